"""A suite: a contract as test methods, which pytest collects from a subclass and which run without pytest too.

Nothing here imports pytest. `patience_s` bounds what the code under test should have bounded itself, so a hang is a
failure with a reason.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar

from weightsync.background import Background

T = TypeVar("T")


class Suite:
    """Base of the suites. Each test gets an instance of its own."""

    patience_s: ClassVar[float] = 60
    """How long a call may take that has to end soon; longer is called a hang."""

    @classmethod
    def failures(cls, *names: str) -> dict[str, Exception]:
        """Run the tests, or those named; test -> what it raised, for those that failed."""
        failed: dict[str, Exception] = {}
        for name in names or [name for name in dir(cls) if name.startswith("test_")]:
            try:
                getattr(cls(), name)()
            except Exception as error:
                failed[name] = error
        return failed

    def start(self, work: Callable[[], T]) -> Background[T]:
        return Background(work, name="suite")

    def end(self, work: Background[T]) -> T:
        """What the work returned or raised."""
        assert work.join(self.patience_s), f"it hangs: no end within {self.patience_s:g} s"
        return work.result()

    def end_all(self, *works: Background[Any]) -> list[Any]:
        """What each returned; raises what the first to fail raised, since others fail for its sake later."""
        deadline = time.monotonic() + self.patience_s
        pending = list(works)
        while pending:
            assert time.monotonic() < deadline, f"it hangs: no end within {self.patience_s:g} s"
            if pending[0].is_done(0.01) or any(work.failed for work in pending):
                for work in [work for work in pending if work.is_done(0)]:
                    work.result()
                    pending.remove(work)
        return [work.result() for work in works]

    def soon(self, work: Callable[[], T]) -> T:
        """Do the work on another thread, so that a hang is seen."""
        return self.end(self.start(work))


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    assert took < seconds, f"it took {took:.1f} s, allowed are {seconds:g} s"


@contextlib.contextmanager
def raises(*kinds: type[Exception], match: str = "") -> Iterator[None]:
    """Passes where the block raises one of *kinds* with a message in which *match* (a pattern) is found."""
    raised: Exception | None = None
    try:
        yield
    except kinds as error:
        raised = error
    assert raised is not None, f"nothing was raised, expected {' or '.join(kind.__name__ for kind in kinds)}"
    assert re.search(match, str(raised)), f"the message lacks {match!r}: {raised!r}"
