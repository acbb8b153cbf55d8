"""An actor that was called stays a moment for the next call, which then comes over a socket: of one host only.

A call over Ray takes a millisecond or two, and an update makes four in a row; over a socket the next ones take a tenth of
that. The Ray call is still what holds the actor's thread and what tells of its death. Whoever is called stays only while
an update goes on and its calls are short and follow each other: what others asked of the actor before an update is done
before it, and what they ask meanwhile waits little longer than for one of its calls.

Whoever asks for an update may call the actors to stand by, so that they are there when the coordinator is.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from functools import cache
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import msgspec

from weightsync.errors import WeightSyncError
from weightsync.ray_actors.side import Side, find_side, has_two_roles
from weightsync.transports.channel import Channel, dial

STAY_S = 0.02
"""How long to wait for the next call, and how long one may take after which there is still a wait."""
SMALL_BYTES = 64 << 10
"""What a socket takes in any case, read or not; what is larger goes over Ray."""
_TELL_S = 1.0


class Request(msgspec.Struct, tag=True, frozen=True):
    """To a party: a call."""

    number: int
    payload: bytes


class Answer(msgspec.Struct, tag=True, frozen=True):
    """From a party: its ranks' replies to the call of that number."""

    party: str
    number: int
    replies: list[bytes]


class Here(msgspec.Struct, tag=True, frozen=True):
    """From a party that was called to stand by: its thread waits."""

    party: str


class Left(msgspec.Struct, tag=True, frozen=True):
    """From a party that stood by: calls after that number were not read."""

    party: str
    number: int


Message = Request | Answer | Here | Left


class Stayed(NamedTuple):
    """What a call over Ray returns."""

    number: int
    """Of the call that was answered last."""
    answer: list[bytes] | None
    """None: not ready, ask for the result."""
    told: bool
    """The answer went over the socket."""


class _Line(NamedTuple):
    """What is known of the way to a coordinator."""

    address: str
    party: str
    channel: Channel[Any] | None
    """None: it runs on another host."""


_lines: dict[tuple[int, str], _Line] = {}
"""(actor, role) -> the line to the coordinator that called last."""


def call_and_stay(actor: Any, role: str, party: str, number: int, payload: bytes, address: str) -> Stayed:
    """Answer a call, and those that follow at once over the channel to *address*.

    Raises:
        RestartedError: the actor takes part in no weight sync.
    """
    side = find_side(actor, role)
    started = time.perf_counter()
    answer = side.call(payload)
    channel = None if answer is None or _others_wait(actor) else _line(actor, role, party, address).channel
    if channel is None:
        return Stayed(number, answer, told=False)
    return _stay(actor, role, side, channel, started, Stayed(number, answer, told=False))


def stand_by(actor: Any, role: str) -> None:
    """Wait for the first call of an update, doing ahead what needs no word of the coordinator; never raises."""
    line = _lines.get((id(actor), role))
    if line is None or line.channel is None or _others_wait(actor):
        return
    channel = line.channel
    with contextlib.suppress(WeightSyncError):
        side = find_side(actor, role)
        last = Stayed(side.fence.number, None, told=True)
        channel.send(Here(line.party), timeout_s=_TELL_S)
        side.get_ready()
        request = _next(channel, after=last.number)
        if request is not None:
            started = time.perf_counter()
            last = Stayed(request.number, side.call(request.payload), told=False)
            last = _stay(actor, role, side, channel, started, last)
        side.stand_down()
        if not last.told and last.answer is not None:
            channel.send(Answer(line.party, last.number, last.answer), timeout_s=_TELL_S)
        channel.send(Left(line.party, last.number), timeout_s=_TELL_S)


def side_result(actor: Any, role: str, number: int) -> Stayed:
    """Of a call that was not ready."""
    return Stayed(number, find_side(actor, role).result(number), told=False)


def _stay(actor: Any, role: str, side: Side, channel: Channel[Any], started: float, last: Stayed) -> Stayed:
    """Tell the answer to the *last* call, which *started* then, and answer the next ones; returns the one after which
    there came none."""
    party = _lines[id(actor), role].party
    number, answer, told = last
    try:
        while answer is not None and sum(map(len, answer)) <= SMALL_BYTES:
            channel.send(Answer(party, number, answer), timeout_s=_TELL_S)
            told = True
            brief = time.perf_counter() - started < STAY_S
            if not (brief and side.fence.updating) or (request := _next(channel, after=number)) is None:
                break
            started = time.perf_counter()
            told, number, answer = False, request.number, side.call(request.payload)
    except WeightSyncError:  # the coordinator is gone, or has closed its end
        channel.close()
        _lines.pop((id(actor), role), None)
    return Stayed(number, answer, told)


def _next(channel: Channel[Any], *, after: int) -> Request | None:
    """The next call, if it comes soon; one that came over Ray, too, is passed over."""
    while wait([channel.fileno()], STAY_S):
        request, _ = channel.receive(timeout_s=_TELL_S)
        if request.number > after:
            return request  # type: ignore[no-any-return]
        if not request.payload:  # nobody will come
            return None
    return None


def _line(actor: Any, role: str, party: str, address: str) -> _Line:
    line = _lines.get((id(actor), role))
    if line is None or line.address != address:
        if line is not None and line.channel is not None:
            line.channel.close()
        channel: Channel[Any] | None = None
        with contextlib.suppress(WeightSyncError):
            channel = dial(address, Message, peer="the coordinator", timeout_s=_TELL_S)  # type: ignore[arg-type]
        line = _lines[id(actor), role] = _Line(address, party, channel)
    return line


def _others_wait(actor: Any) -> bool:
    """Whether staying would keep from running what the update itself may need: the actor is trainer and engine at once,
    or async, where even a call that is not holds the loop."""
    return has_two_roles(actor) or _is_async(type(actor))  # type: ignore[arg-type]


@cache
def _is_async(kind: type) -> bool:
    """Whether Ray makes an async actor of the class."""
    functions = (function for _, function in inspect.getmembers(kind, inspect.isfunction))
    return any(inspect.iscoroutinefunction(f) or inspect.isasyncgenfunction(f) for f in functions)
