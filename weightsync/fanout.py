"""Give one pass over an iterator to several consumers in lock-step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

from weightsync.errors import UpdateTimeoutError

T = TypeVar("T")


class LockStep(Generic[T]):
    """Each consumer sees every item; the next is made when all have asked for it or left.

    So an item may be changed by its owner as soon as the iterator is advanced, and making items may be collective.
    """

    def __init__(self, items: Iterator[T], consumers: int, *, timeout_s: float) -> None:
        self._items = items
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._consumers = consumers
        self._waiting = 0
        self._round = 0
        self._item: T | None = None
        self._ended = False
        self._error: BaseException | None = None

    def __iter__(self) -> Iterator[T]:
        """For one consumer, on its own thread. Raises what making the items raised."""
        try:
            while self._next():
                yield self._item  # type: ignore[misc]
        finally:
            with self._changed:
                self._consumers -= 1
                if self._waiting and self._waiting >= self._consumers:
                    self._advance()

    def abort(self, error: BaseException) -> None:
        """Every consumer that waits, or asks later, gets *error*."""
        with self._changed:
            self._error = self._error or error
            self._round += 1
            self._waiting = 0
            self._changed.notify_all()

    def _next(self) -> bool:
        with self._changed:
            seen = self._round
            self._waiting += 1
            if self._waiting >= self._consumers:
                self._advance()
            elif not self._changed.wait_for(lambda: self._round != seen, self._timeout_s):
                self._waiting -= 1
                raise UpdateTimeoutError(f"another link did not take its tensor for {self._timeout_s:g} s")
            if self._error is not None:
                raise self._error
            return not self._ended

    def _advance(self) -> None:
        self._waiting = 0
        self._round += 1
        try:
            self._item = next(self._items)
        except StopIteration:
            self._ended = True
        except BaseException as error:
            self._error = error
        self._changed.notify_all()
