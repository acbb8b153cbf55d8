"""Calls to trainers and engines over Ray, each bounded: one call to a party, one reply from each of its ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from weightsync.errors import TransportError, UpdateTimeoutError, WeightSyncError
from weightsync.identity import Identity, identify
from weightsync.process import process_state
from weightsync.ray_actors.engine import make_engine_side
from weightsync.ray_actors.side import Locator, MakeSide, call_side, open_side, side_result
from weightsync.ray_actors.trainer import TrainerSide
from weightsync.transports.sidecar import Sidecars

_RESULT_POLL_S = 0.002
_PROBE_S = 2.5


@dataclass(slots=True)
class _Call:
    party: str
    number: int
    due: float = 0.0
    """When to ask for the result of an answer that was not ready; 0 while a Ray call is under way."""


class RayFleet:
    """Actor handles by party name ("trainer 0", "engine 1"); a name is given once. Not thread-safe."""

    def __init__(
        self, owner: str, trainers: list[Any], engines: list[Any], source: Locator, target: Locator, *, timeout_s: float
    ) -> None:
        """*owner* is the weight sync's id, the same after the coordinator was restarted."""
        self._owner = owner
        self._source, self._target, self._timeout_s = source, target, timeout_s
        self.actors: dict[str, Any] = {f"trainer {i}": actor for i, actor in enumerate(trainers)}
        self.trainers = list(self.actors)
        self.engines: list[str] = []
        self._num_engines = 0
        self._calls: dict[Any, _Call] = {}
        self._waiting: list[_Call] = []
        self._machine = identify().machine
        self._sidecars: Sidecars | None = None
        for actor in engines:
            self._name_engine(actor)

    def _name_engine(self, actor: Any) -> str:
        party = f"engine {self._num_engines}"
        self._num_engines += 1
        self.actors[party] = actor
        self.engines.append(party)
        return party

    def open_sides(self, *parties: str) -> None:
        """Put a side into each actor; into all without *parties*.

        Raises:
            WeightSyncError: as the actors' sides say; UpdateTimeoutError: an actor is busy.
        """
        refs = {}
        for party in parties or self.actors:
            role, _, index = party.partition(" ")
            make: MakeSide = TrainerSide if role == "trainer" else make_engine_side
            locator = self._source if role == "trainer" else self._target
            refs[party] = self.actors[party].__ray_call__.remote(
                open_side, self._owner, role, make, locator, int(index), self._timeout_s
            )
        deadline = time.monotonic() + self._timeout_s
        for party, ref in refs.items():
            try:
                ray.get(ref, timeout=max(deadline - time.monotonic(), 0.001))
            except Exception as error:
                raise translate(error, party, self._timeout_s) from error

    def add(self, actor: Any) -> str:
        """Another engine; returns its name. Raises as `open_sides`, and then has not taken it in."""
        party = self._name_engine(actor)
        try:
            self.open_sides(party)
        except WeightSyncError:
            self.remove(party)
            raise
        return party

    def party_of(self, actor_id: str) -> str:
        """The engine's name; "actor ..." where it is none."""
        return next((p for p in self.engines if self.actors[p]._actor_id.hex() == actor_id), f"actor {actor_id[:8]}")

    def reopen(self, party: str) -> None:
        self.open_sides(party)

    def remove(self, party: str) -> None:
        self.engines.remove(party)
        del self.actors[party]
        if self._sidecars is not None:
            self._sidecars.forget(party)
        self._calls = {ref: call for ref, call in self._calls.items() if call.party != party}
        self._waiting = [call for call in self._waiting if call.party != party]

    def send(self, party: str, number: int, payload: bytes) -> None:
        self._calls = {ref: call for ref, call in self._calls.items() if call.party != party}
        self._waiting = [call for call in self._waiting if call.party != party]
        self._start(_Call(party, number), call_side, payload)

    def _start(self, call: _Call, function: Callable[..., Any], argument: Any) -> None:
        role = call.party.partition(" ")[0]
        self._calls[self.actors[call.party].__ray_call__.remote(function, role, argument)] = call

    def replies(self, wait_s: float) -> Iterator[tuple[str, int, Sequence[bytes] | WeightSyncError]]:
        now = time.monotonic()
        for call in [call for call in self._waiting if call.due <= now]:
            self._waiting.remove(call)
            self._start(call, side_result, call.number)
        if self._waiting:
            wait_s = min(wait_s, _RESULT_POLL_S)
        if not self._calls:
            time.sleep(wait_s)
            return
        done, _ = ray.wait(list(self._calls), num_returns=1, timeout=wait_s)
        # Whatever else has ended by now goes along.
        done, _ = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0) if done else (done, [])
        for ref in done:
            if ref not in self._calls:  # superseded while the caller took the answers before
                continue
            call = self._calls.pop(ref)
            try:
                answer = ray.get(ref, timeout=self._timeout_s)
            except Exception as error:
                yield call.party, call.number, translate(error, call.party, 0)
                continue
            if answer is None:
                call.due = time.monotonic() + _RESULT_POLL_S
                self._waiting.append(call)
            else:
                yield call.party, call.number, answer

    def helpers(self, ranks: Mapping[str, Identity]) -> Mapping[str, str]:
        if self._sidecars is None:
            self._sidecars = Sidecars(timeout_s=self._timeout_s)
        return self._sidecars.addresses(ranks)

    def process_state(self, identity: Identity) -> str:
        if identity.machine == self._machine or not identity.node:
            return process_state(identity.pid, identity.started) if identity.machine == self._machine else "unknown"
        if any(node["NodeID"] == identity.node and not node["Alive"] for node in ray.nodes()):
            return "gone"
        place = NodeAffinitySchedulingStrategy(identity.node, soft=False)
        probe = ray.remote(num_cpus=0, max_retries=0)(process_state).options(scheduling_strategy=place)
        try:
            return str(ray.get(probe.remote(identity.pid, identity.started), timeout=_PROBE_S))
        except Exception:
            return "unknown"


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
