"""An update's report on its way back: over a socket of the host, if it is one, before Ray says that the call has ended.

The call itself goes over Ray, behind what its caller asked of the actors before.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from multiprocessing.connection import wait
from typing import Any

import msgspec

from weightsync.errors import WeightSyncError
from weightsync.report import UpdateReport
from weightsync.transports.channel import Channel, Listener, dial

_TELL_S = 1.0


class Reply(msgspec.Struct, frozen=True):
    """Coordinator to caller."""

    token: str
    """Of the call."""
    report: UpdateReport


class Replies:
    """Where one process hears of its calls, one call at a time."""

    def __init__(self) -> None:
        self._listener = Listener()
        self._channel: Channel[Reply] | None = None
        self._ended, self._end = socket.socketpair()  # a byte for each call that has
        self._end.setblocking(False)
        self._lock = threading.Lock()
        self.address = self._listener.address

    def take(self) -> str:
        """A token for a call; "" while another thread's is under way. Else to be followed by `give_back`."""
        return secrets.token_hex(8) if self._lock.acquire(blocking=False) else ""

    def wait(self, ref: Any, token: str, timeout_s: float) -> UpdateReport | None:
        """The report of the call *ref*; None where it has ended without one here, or neither came in time."""
        future = ref.future()
        future.add_done_callback(self._wake)
        while ready := wait(self._sources(), timeout_s):
            if self._listener.fileno() in ready:
                with contextlib.suppress(OSError, WeightSyncError):
                    self._channel = self._listener.accept(Reply, timeout_s=_TELL_S)
            elif self._ended.fileno() not in ready:
                report = self._read(token)
                if report is not None:
                    return report
            else:
                self._ended.recv(64)
                if future.done():  # else it was an earlier one
                    return None
        return None

    def give_back(self) -> None:
        self._lock.release()

    def close(self) -> None:
        """While no call is under way."""
        for closed in (self._listener, self._channel, self._ended, self._end):
            if closed is not None:
                closed.close()

    def _sources(self) -> list[int]:
        sources = [self._ended.fileno(), self._listener.fileno()]
        return sources if self._channel is None else [*sources, self._channel.fileno()]

    def _read(self, token: str) -> UpdateReport | None:
        assert self._channel is not None
        try:
            reply, _ = self._channel.receive(timeout_s=_TELL_S)
        except WeightSyncError:  # the coordinator is gone, as Ray will say
            self._channel.close()
            self._channel = None
            return None
        return reply.report if reply.token == token else None

    def _wake(self, _: object) -> None:
        with contextlib.suppress(OSError):  # full, or closed
            self._end.send(b"\0")


class Callers:
    """The coordinator's channels to those who call it."""

    def __init__(self) -> None:
        self._channels: dict[str, Channel[Reply] | None] = {}

    def tell(self, address: str, token: str, report: UpdateReport) -> None:
        """The report, if there is a way; it goes over Ray, too."""
        if address not in self._channels:
            self._channels[address] = None
            with contextlib.suppress(WeightSyncError):  # on another host
                self._channels[address] = dial(address, Reply, peer="whoever called", timeout_s=_TELL_S)
        channel = self._channels[address]
        if channel is not None:
            try:
                channel.send(Reply(token, report), timeout_s=_TELL_S)
            except WeightSyncError:
                self._channels[address] = None

    def close(self) -> None:
        for channel in self._channels.values():
            if channel is not None:
                channel.close()
        self._channels.clear()
