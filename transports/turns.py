"""Whose turn it is to run NCCL kernels on a GPU.

Kernels of two communicators wait for their peers on other GPUs while they hold their place on this one. Where GPU A begins
with one and GPU B with the other, and neither has room for both, all wait forever. So where a GPU takes part in several
links, a link starts its kernels in turns: when all its members are there, each in one order, the same for all links, makes
its GPU that link's alone; then all give their kernels to the GPU, behind those of the turn before, and the turn is over. So
the kernels of any two links come in the same order on every GPU, one link's wait there for the other's to end, and nobody
waits within a turn for what is sent in it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_POLL_S = 0.001


class Turns:
    """The GPUs of one process, by name; a link is known by its token. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ends: dict[str, list[str]] = {}
        """Tokens of the ends that are open on a GPU."""
        self._taken: dict[str, list[str]] = {}
        """Tokens of the ends whose turn it is: all of one link."""
        self._last: dict[str, Any] = {}
        """By GPU: the event after the last kernel that was given to it in a turn."""

    def join(self, gpu: str, token: str) -> None:
        """A link has an end on *gpu*."""
        with self._changed:
            self._ends.setdefault(gpu, []).append(token)

    def leave(self, gpu: str, token: str) -> None:
        """It has closed. Idempotent for an end that has joined once."""
        with self._changed:
            if token in self._ends.get(gpu, ()):
                self._ends[gpu].remove(token)
            if not self._ends.get(gpu):
                self._last.pop(gpu, None)

    def num_links(self, gpu: str) -> int:
        with self._changed:
            return len(set(self._ends.get(gpu, ())))

    def take(self, gpu: str, token: str, check: Callable[[], None]) -> Any:
        """Wait until no other link has its turn on *gpu*; *check* is called now and then, and raises to give up.

        Returns:
            The event that the kernels of this turn have to wait for; None: nothing.
        """
        while True:
            check()
            with self._changed:
                taken = self._taken.setdefault(gpu, [])
                if all(other == token for other in taken):
                    taken.append(token)
                    return self._last.get(gpu)
                self._changed.wait(_POLL_S)

    def give(self, gpu: str, token: str, event: Any = None) -> None:
        """The turn that was taken is over; *event*: after the last kernel that was given to the GPU in it."""
        with self._changed:
            self._taken[gpu].remove(token)
            if event is not None and self._ends.get(gpu):
                self._last[gpu] = event
            self._changed.notify_all()


TURNS = Turns()
