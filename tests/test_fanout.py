"""One pass over an iterator, for several consumers in lock-step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from weightsync.background import Background
from weightsync.errors import TransportError, UpdateTimeoutError
from weightsync.fanout import LockStep


def run(*works: Callable[[], object]) -> list[object]:
    """Results, or what was raised, of works that run side by side."""
    threads = [Background(work, name="test") for work in works]
    found: list[object] = []
    for thread in threads:
        assert thread.join(20), "it hangs"
        try:
            found.append(thread.result())
        except Exception as error:
            found.append(error)
    return found


@pytest.mark.parametrize("consumers", [1, 2, 5])
def test_every_consumer_sees_every_item(consumers: int) -> None:
    step = LockStep(iter(range(100)), consumers, timeout_s=10)
    assert run(*[lambda: list(step)] * consumers) == [list(range(100))] * consumers


def test_an_item_may_be_changed_when_the_next_is_made() -> None:
    def refilled() -> Iterator[torch.Tensor]:
        buffer = torch.empty(100)
        for i in range(50):
            yield buffer.fill_(i)

    def look(pause_s: float) -> list[float]:
        found = []
        for tensor in step:
            time.sleep(pause_s)
            assert bool((tensor == tensor[0]).all())
            found.append(float(tensor[0]))
        return found

    step = LockStep(refilled(), 3, timeout_s=10)
    assert run(*(lambda p=p: look(p) for p in (0, 0.001, 0.002))) == [[float(i) for i in range(50)]] * 3


def test_an_error_while_items_are_made_reaches_every_consumer() -> None:
    def breaks() -> Iterator[int]:
        yield 1
        raise RuntimeError("the gather broke")

    step = LockStep(breaks(), 3, timeout_s=10)
    assert [str(error) for error in run(*[lambda: list(step)] * 3)] == ["the gather broke"] * 3


def test_the_others_go_on_when_one_leaves() -> None:
    step = LockStep(iter(range(20)), 3, timeout_s=10)

    def leaves() -> int:
        items = iter(step)
        found = next(items)
        items.close()  # type: ignore[attr-defined]
        return found

    assert run(lambda: list(step), leaves, lambda: list(step)) == [list(range(20)), 0, list(range(20))]


def test_one_that_never_asks_holds_the_others_for_the_bound_only() -> None:
    step = LockStep(iter(range(20)), 2, timeout_s=0.2)
    (error,) = run(lambda: list(step))
    assert isinstance(error, UpdateTimeoutError)


def test_abort_wakes_those_who_wait_and_refuses_those_who_come() -> None:
    step = LockStep(iter(range(20)), 2, timeout_s=20)
    threading.Timer(0.1, lambda: step.abort(TransportError("another link broke"))).start()
    started = time.monotonic()
    assert [str(error) for error in run(lambda: list(step))] == ["another link broke"]
    assert time.monotonic() - started < 10
    assert [str(error) for error in run(lambda: list(step))] == ["another link broke"]


def test_an_empty_iterator_ends_at_once() -> None:
    step: LockStep[int] = LockStep(iter(()), 2, timeout_s=5)
    assert run(*[lambda: list(step)] * 2) == [[], []]
