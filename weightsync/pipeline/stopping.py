"""SIGINT and SIGTERM as a KeyboardInterrupt that remembers which of them it was."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

_STOPPING = (signal.SIGINT, signal.SIGTERM)


class Stopping:
    """Catches the two signals while it is open. Ray's waits let no other exception than KeyboardInterrupt through."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def catch(self) -> None:
        """Once more after ray.init, which sets a handler of its own."""
        for number in _STOPPING:
            before = signal.signal(number, self._handle)
            self._before.setdefault(number, before)

    def over(self, connect: Callable[[], None]) -> None:
        """Do what calls ray.init, whose handler of SIGTERM ends the process with the signal's number."""
        try:
            connect()
        except SystemExit as ended:
            if ended.code != signal.SIGTERM:
                raise
            self.signal = signal.SIGTERM
            raise KeyboardInterrupt from None

    def ignore(self) -> None:
        """For the end, which is bounded, and must not be cut short."""
        for number in _STOPPING:
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        raise KeyboardInterrupt

    @property
    def exit_code(self) -> int:
        """As a shell has it: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + (self.signal or signal.SIGINT)

    def __enter__(self) -> Self:
        self.catch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
