"""Calls to trainers and engines over Ray, each bounded: one request to a party, one reply from each of its ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from weightsync import messages as m
from weightsync.errors import TransportError, UpdateTimeoutError, WeightSyncError
from weightsync.messages import decode_reply, encode
from weightsync.ray_actors.engine import make_engine_side
from weightsync.ray_actors.side import Locator, call_side, open_side, side_result
from weightsync.ray_actors.trainer import TrainerSide

_RESULT_POLL_S = 0.002


@dataclass(slots=True)
class _Call:
    party: str
    number: int
    due: float = 0.0
    """When to ask for the result of an answer that was not ready; 0 while a Ray call is under way."""


class RayFleet:
    """Actor handles by party name ("trainer 0", "engine 1"). Not thread-safe."""

    def __init__(self, session: str, trainers: list[Any], engines: list[Any]) -> None:
        self.session = session
        self.actors: dict[str, Any] = {
            **{f"trainer {i}": actor for i, actor in enumerate(trainers)},
            **{f"engine {i}": actor for i, actor in enumerate(engines)},
        }
        self.trainers = [f"trainer {i}" for i in range(len(trainers))]
        self.engines = [f"engine {i}" for i in range(len(engines))]
        self._calls: dict[Any, _Call] = {}
        self._number = 0
        self._waiting: list[_Call] = []

    def open_sides(self, source: Locator, target: Locator, *, timeout_s: float) -> None:
        """Put a side into every actor.

        Raises:
            WeightSyncError: as the actors' sides say; UpdateTimeoutError: an actor is busy.
        """
        refs = {}
        for i, party in enumerate(self.trainers):
            refs[party] = self.actors[party].__ray_call__.remote(open_side, self.session, TrainerSide, source, i)
        for i, party in enumerate(self.engines):
            refs[party] = self.actors[party].__ray_call__.remote(open_side, self.session, make_engine_side, target, i)
        deadline = time.monotonic() + timeout_s
        for party, ref in refs.items():
            try:
                ray.get(ref, timeout=max(deadline - time.monotonic(), 0.001))
            except Exception as error:
                raise translate(error, party, timeout_s) from error

    def send(self, party: str, request: m.Request) -> None:
        """Start a call; one still under way to the same party is superseded, and its reply dropped."""
        self._calls = {ref: call for ref, call in self._calls.items() if call.party != party}
        self._waiting = [call for call in self._waiting if call.party != party]
        self._number += 1
        self._start(_Call(party, self._number), call_side, encode(request))

    def _start(self, call: _Call, function: Callable[..., Any], *args: Any) -> None:
        actor = self.actors[call.party]
        self._calls[actor.__ray_call__.remote(function, self.session, call.number, *args)] = call

    def replies(self, wait_s: float) -> Iterator[tuple[str, tuple[m.Reply, ...] | WeightSyncError]]:
        """(party, its ranks' replies, or why there are none) for the calls that ended; waits at most *wait_s*."""
        now = time.monotonic()
        for call in [call for call in self._waiting if call.due <= now]:
            self._waiting.remove(call)
            self._start(call, side_result)
        if self._waiting:
            wait_s = min(wait_s, _RESULT_POLL_S)
        if not self._calls:
            time.sleep(wait_s)
            return
        done, _ = ray.wait(list(self._calls), num_returns=1, timeout=wait_s)
        # Whatever else has ended by now goes along.
        done, _ = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0) if done else (done, [])
        for ref in done:
            call = self._calls.pop(ref)
            try:
                answer = ray.get(ref)
                replies = None if answer is None else tuple(decode_reply(reply) for reply in answer)
            except Exception as error:
                yield call.party, translate(error, call.party, 0)
                continue
            if replies is None:
                call.due = time.monotonic() + _RESULT_POLL_S
                self._waiting.append(call)
            else:
                yield call.party, replies


def translate(error: BaseException, party: str | None, timeout_s: float) -> WeightSyncError:
    """A Ray error as one of ours that names the party; None: the coordinator, which is no rank."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, WeightSyncError):
        error.cause.rank = error.cause.rank or party
        return error.cause
    if isinstance(error, WeightSyncError):
        return error
    who = party or "the coordinator"
    if isinstance(error, TimeoutError):  # Ray's is one, too
        return UpdateTimeoutError(
            f"{who} did not answer for {timeout_s:g} s: it is busy in a long call, still starting (wait for one of its "
            "methods before connect), or stuck. An actor must be free while weightsync talks to it, or be async",
            rank=party,
        )
    if isinstance(error, RayActorError):
        return TransportError(f"the process of {who} is gone: {str(error).splitlines()[0]}", rank=party)
    return TransportError(f"calling {who} failed: {type(error).__name__}: {error}", rank=party)
