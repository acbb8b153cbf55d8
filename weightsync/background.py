"""One piece of work at a time on a thread, asked about with a bounded wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Runs *work* on a daemon thread; `result` gives what it returned or raises what it raised."""

    def __init__(self, work: Callable[[], T], *, name: str) -> None:
        self._work = work
        self._done = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"weightsync-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()
            del self  # a failure's traceback would keep it, and with it all that its frames refer to, in a cycle

    def is_done(self, wait_s: float) -> bool:
        return self._done.wait(wait_s)

    def result(self) -> T:
        """What the work returned; call when `is_done`. Raises what it raised."""
        assert self._done.is_set()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def join(self, timeout_s: float) -> bool:
        """Wait for the end, whatever it is; False when it did not come in time."""
        return self._done.wait(timeout_s)

    @property
    def failed(self) -> bool:
        """Whether it ended by raising; False while it runs."""
        return self._error is not None
