"""An actor that was called stays a moment for the next call, which then comes over a socket: of one host only.

A call over Ray takes a millisecond or two, and an update makes four in a row; over a socket the next ones take a tenth of
that. The Ray call is still what holds the actor's thread and what tells of its death. Whoever is called stays only while
an update goes on and its calls are short and follow each other: what others asked of the actor before an update is done
before it, and what they ask meanwhile waits little longer than for one of its calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import msgspec

from weightsync.errors import WeightSyncError
from weightsync.ray_actors.side import find_side, has_two_roles
from weightsync.transports.channel import Channel, dial

STAY_S = 0.02
"""How long to wait for the next call, and how long one may take after which there is still a wait."""
SMALL_BYTES = 64 << 10
"""What a socket takes in any case, read or not; what is larger goes over Ray."""
_TELL_S = 1.0


class Message(msgspec.Struct, frozen=True):
    """A call to *party*, and back, the answer to it."""

    party: str
    number: int
    payloads: list[bytes]


class Stayed(NamedTuple):
    """What a call over Ray returns."""

    number: int
    """Of the call that was answered last."""
    answer: list[bytes] | None
    """None: not ready, ask for the result."""
    told: bool
    """The answer went over the socket."""


_lines: dict[tuple[int, str], tuple[str, Channel[Message] | None]] = {}
"""(actor, role) -> the coordinator's address, and the channel to it; None where it cannot be reached."""


def call_and_stay(actor: Any, role: str, party: str, number: int, payload: bytes, address: str) -> Stayed:
    """Answer a call, and those that follow at once over the channel to *address*.

    Raises:
        RestartedError: the actor takes part in no weight sync.
    """
    side = find_side(actor, role)
    started = time.perf_counter()
    answer = side.call(payload)
    line = None if answer is None or _others_wait(actor) else _line(actor, role, address)
    told = False
    try:
        while line is not None and answer is not None and sum(map(len, answer)) <= SMALL_BYTES:
            line.send(Message(party, number, answer), timeout_s=_TELL_S)
            told = True
            brief = time.perf_counter() - started < STAY_S
            if not (brief and side.fence.updating) or (message := _next(line, after=number)) is None:
                break
            started = time.perf_counter()
            told, number, answer = False, message.number, side.call(message.payloads[0])
    except WeightSyncError:  # the coordinator is gone, or has closed its end
        assert line is not None
        line.close()
        del _lines[id(actor), role]
    return Stayed(number, answer, told)


def side_result(actor: Any, role: str, number: int) -> Stayed:
    """Of a call that was not ready."""
    return Stayed(number, find_side(actor, role).result(number), told=False)


def _next(line: Channel[Message], *, after: int) -> Message | None:
    """The next call, if it comes soon; one that came over Ray, too, is passed over."""
    while wait([line.fileno()], STAY_S):
        message, _ = line.receive(timeout_s=_TELL_S)
        if message.number > after:
            return message
    return None


def _line(actor: Any, role: str, address: str) -> Channel[Message] | None:
    known, line = _lines.get((id(actor), role), ("", None))
    if known != address:
        if line is not None:
            line.close()
        try:
            line = dial(address, Message, peer="the coordinator", timeout_s=_TELL_S)
        except WeightSyncError:  # it runs on another host
            line = None
        _lines[id(actor), role] = (address, line)
    return line


def _others_wait(actor: Any) -> bool:
    """Whether staying would keep from running what the update itself may need: the actor is trainer and engine at once,
    or async, where this holds the loop."""
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        return True
    return has_two_roles(actor)
