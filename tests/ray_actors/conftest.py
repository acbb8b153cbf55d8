"""What tests of engine sides share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from weightsync.coalescer import Coalescer


@pytest.fixture
def fails_after(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each number that a test appends makes one apply fail after so many module groups."""
    plain, planted = Coalescer.groups, list[int]()

    def groups(self: Coalescer, **options: Any) -> Iterator[Any]:
        return broken(self, plain(self, **options), planted.pop()) if planted else plain(self, **options)

    def broken(of: Coalescer, groups: Iterator[Any], count: int) -> Iterator[Any]:
        while of.num_handed_out < count:  # those that are written in place are not given out
            of._raise_if_failed()
            if of._ready:
                yield next(groups)
            time.sleep(0.001)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Coalescer, "groups", groups)
    return planted
