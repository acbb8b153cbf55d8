"""Calls to trainers and engines over Ray, each bounded: one call to a party, one reply from each of its ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from weightsync.errors import TransportError, UpdateTimeoutError, WeightSyncError
from weightsync.identity import Identity, identify
from weightsync.process import process_state
from weightsync.ray_actors.calling import RayCalls
from weightsync.ray_actors.engine import make_engine_side
from weightsync.ray_actors.side import Locator, MakeSide, open_side
from weightsync.ray_actors.trainer import TrainerSide
from weightsync.transports.sidecar import Sidecars

_PROBE_S = 2.5


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
        self._calls = RayCalls(self.actors)
        self._pid_space = identify().pid_space
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

    def engine_ids(self) -> list[str]:
        """Ray's ids of the actors that take part as engines."""
        return [self.actors[party]._actor_id.hex() for party in self.engines]

    def reopen(self, party: str) -> None:
        self.open_sides(party)

    def remove(self, party: str) -> None:
        self.engines.remove(party)
        del self.actors[party]
        if self._sidecars is not None:
            self._sidecars.forget(party)
        self._calls.forget(party)

    def expect(self) -> None:
        """The actors are being called to stand by for an update."""
        self._calls.expect()

    def send(self, party: str, number: int, payload: bytes) -> None:
        self._calls.send(party, number, payload)

    def replies(self, wait_s: float) -> Iterator[tuple[str, int, Sequence[bytes] | WeightSyncError]]:
        for party, number, answer in self._calls.answers(wait_s):
            yield party, number, translate(answer, party, 0) if isinstance(answer, BaseException) else answer

    def close(self) -> None:
        """No call can be made any more."""
        self._calls.close()
        if self._sidecars is not None:
            self._sidecars.close()

    def helpers(self, ranks: Mapping[str, Identity]) -> Mapping[str, str]:
        if self._sidecars is None:
            self._sidecars = Sidecars(timeout_s=self._timeout_s)
        return self._sidecars.addresses(ranks)

    def process_state(self, identity: Identity) -> str:
        if identity.pid_space == self._pid_space:
            return process_state(identity.pid, identity.started)
        if not identity.node:
            return "unknown"
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
