"""Calls to actors and their answers: over Ray, and, as long as an actor stays for the next one, over a socket of the host.

See `weightsync.ray_actors.staying` for the other end.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from weightsync.errors import WeightSyncError
from weightsync.ray_actors.staying import (
    SMALL_BYTES,
    Answer,
    Here,
    Left,
    Message,
    Request,
    Stayed,
    call_and_stay,
    side_result,
)
from weightsync.transports.channel import Channel, Listener

_RESULT_POLL_S = 0.002
_STAND_BY_S = 0.05
"""How long to wait for a party that was called to stand by, before it is called over Ray."""
_TELL_S = 1.0


@dataclass(slots=True)
class _Open:
    """A call that was not answered yet."""

    number: int
    payload: bytes
    due: float = 0.0
    """When to ask for the result of an answer that was not ready; 0: no need to ask."""


class RayCalls:
    """One coordinator's, one open call a party. Not thread-safe."""

    def __init__(self, actors: Mapping[str, Any]) -> None:
        """*actors*: by party name, "trainer 0"; looked up at each call."""
        self._actors = actors
        self._open: dict[str, _Open] = {}
        self._under_way: dict[str, Future[Stayed]] = {}
        """The call over Ray that was made last, of which the actor may be staying."""
        self._staying: dict[str, Channel[Any]] = {}
        """Parties that have answered a call, or said that they stand by, and were not seen to leave."""
        self._can_stay: set[str] = set()
        self._expected: dict[str, float] = {}
        """Parties that were called to stand by -> until when to wait for them."""
        self._listener = Listener()
        self._closing = threading.Lock()
        self._woken = os.eventfd(0, os.EFD_NONBLOCK)
        self._ready = selectors.DefaultSelector()
        self._ready.register(self._listener, selectors.EVENT_READ)
        self._ready.register(self._woken, selectors.EVENT_READ)

    def expect(self) -> None:
        """The parties are being called to stand by."""
        self._expected = dict.fromkeys(self._can_stay, time.monotonic() + _STAND_BY_S)

    def send(self, party: str, number: int, payload: bytes) -> None:
        """Start a call; the party's open call is given up."""
        self._open[party] = call = _Open(number, payload)
        if party not in self._expected and not self._send_over_line(party, call):
            self._call(party, call)

    def _send_over_line(self, party: str, call: _Open) -> bool:
        line = self._staying.get(party)
        if line is None or len(call.payload) > SMALL_BYTES:
            return False
        try:
            line.send(Request(call.number, call.payload), timeout_s=_TELL_S)
        except WeightSyncError:
            self._drop(line)
            return False
        return True

    def _call(self, party: str, call: _Open) -> None:
        address = self._listener.address
        self._start(party, call_and_stay, party, call.number, call.payload, address)

    def _start(self, party: str, function: Any, *arguments: Any) -> None:
        role = party.partition(" ")[0]
        ref = self._actors[party].__ray_call__.remote(function, role, *arguments)
        self._under_way[party] = future = ref.future()
        future.add_done_callback(self._wake)

    def _wake(self, _: object) -> None:
        with self._closing:
            if self._woken >= 0:
                os.eventfd_write(self._woken, 1)

    def forget(self, party: str) -> None:
        """The party is not called any more."""
        self._open.pop(party, None)
        self._under_way.pop(party, None)
        self._staying.pop(party, None)
        self._expected.pop(party, None)
        self._can_stay.discard(party)

    def answers(self, wait_s: float) -> Iterator[tuple[str, int, Sequence[bytes] | BaseException]]:
        """(party, the call's number, the answer, or what Ray raised) of calls that ended; waits at most *wait_s*."""
        now = time.monotonic()
        for party, call in self._open.items():
            if due := call.due or self._expected.get(party):
                wait_s = min(wait_s, max(due - now, 0))
        events = self._ready.select(wait_s)
        for key, _ in events:
            if key.fileobj is self._listener:
                self._accept()
        for key, _ in events:
            if isinstance(key.fileobj, Channel):
                yield from self._read(key.fileobj)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._woken)
        for party, future in list(self._under_way.items()):
            if future.done() and self._under_way.get(party) is future:
                del self._under_way[party]
                yield from self._ended(party, future)
        now = time.monotonic()
        for party in [party for party, until in self._expected.items() if until <= now]:
            del self._expected[party]
            if party in self._open:
                self._call(party, self._open[party])
        for party, call in list(self._open.items()):
            if call.due and call.due <= now:
                call.due = 0.0
                self._start(party, side_result, call.number)

    def _accept(self) -> None:
        with contextlib.suppress(OSError, WeightSyncError):  # it went away again, or belongs to another user
            channel: Channel[Any] = self._listener.accept(Message, timeout_s=_TELL_S)  # type: ignore[arg-type]
            self._ready.register(channel, selectors.EVENT_READ)

    def _read(self, line: Channel[Any]) -> Iterator[tuple[str, int, Sequence[bytes]]]:
        try:
            message, _ = line.receive(timeout_s=_TELL_S)
        except WeightSyncError:
            self._drop(line)
            return
        match message:
            case Answer(party, number, replies) if party in self._actors:
                self._can_stay.add(party)
                if party in self._under_way:  # else it has left, or stands by, and is known to
                    self._staying[party] = line
                call = self._open.get(party)
                if call is not None and call.number == number:
                    del self._open[party]
                    yield party, number, replies
            case Here(party) if party in self._actors:
                self._here(party, line)
            case Left(party, number) if party in self._actors:
                self._left(party, number)

    def _here(self, party: str, line: Channel[Any]) -> None:
        """A party stands by."""
        expected = self._expected.pop(party, None) is not None
        call = self._open.get(party)
        if not expected and (call is None or party in self._under_way):  # it comes late, and need not wait
            with contextlib.suppress(WeightSyncError):
                line.send(Request(0, b""), timeout_s=_TELL_S)
            return
        self._staying[party] = line
        if call is not None and not self._send_over_line(party, call):
            self._call(party, call)

    def _left(self, party: str, number: int) -> None:
        """A party that stood by has left."""
        self._staying.pop(party, None)
        call = self._open.get(party)
        if call is None or party in self._under_way:
            return
        if number < call.number:
            self._call(party, call)
        else:
            self._start(party, side_result, call.number)

    def _drop(self, line: Channel[Any]) -> None:
        self._ready.unregister(line)
        line.close()
        for party in [party for party, known in self._staying.items() if known is line]:
            del self._staying[party]
            if party in self._open and party not in self._under_way:  # it stood by, and is gone, as Ray will say
                self._call(party, self._open[party])

    def _ended(self, party: str, future: Future[Stayed]) -> Iterator[tuple[str, int, Sequence[bytes] | BaseException]]:
        """A call over Ray returned: the actor does not stay any longer."""
        line = self._staying.pop(party, None)
        call = self._open.get(party)
        if call is None:
            return
        if (error := future.exception()) is not None:
            del self._open[party]
            yield party, call.number, error
            return
        number, answer, told = future.result()
        if number < call.number:  # it had left when the call came
            self._call(party, call)
        elif told:
            if line is not None:
                yield from self._read(line)
        elif answer is None:
            call.due = time.monotonic() + _RESULT_POLL_S
        else:
            del self._open[party]
            yield party, number, answer

    def close(self) -> None:
        """Idempotent."""
        self._open.clear()
        self._under_way.clear()
        for key in list(self._ready.get_map().values()):
            if isinstance(key.fileobj, Channel):
                self._drop(key.fileobj)
        with self._closing:
            if self._woken >= 0:
                self._ready.close()
                self._listener.close()
                os.close(self._woken)
                self._woken = -1
