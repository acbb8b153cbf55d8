"""`examine`: a look at trainers and engines that are Ray actors, before they are connected."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import ray

from weightsync.config import SyncConfig
from weightsync.doctor.diagnosis import diagnose
from weightsync.doctor.evidence import ActorFacts, Evidence, Trouble
from weightsync.doctor.examination import Examination
from weightsync.doctor.finding import Finding
from weightsync.errors import WeightSyncError
from weightsync.ray_actors.connect import check_arguments
from weightsync.ray_actors.engine import AsyncVllmSide
from weightsync.ray_actors.fleet import RayFleet, translate
from weightsync.ray_actors.side import Locator, find_side


def examine(
    *,
    trainers: Sequence[Any],
    engines: Sequence[Any],
    source: Locator,
    target: Locator,
    config: SyncConfig | str | Path | dict[str, Any] | None = None,
) -> list[Finding]:
    """What would go wrong, and what is well, if these were connected; arguments as of `weightsync.connect`.

    Nothing is transferred: no weight and no version changes. A weight sync that the actors take part in is ended. What is
    wrong with an actor is a finding, not an error.

    Raises:
        ConfigError: a setting is wrong, or the lists are not of actor handles.
    """
    return diagnose(evidence_of(trainers, engines, source, target, check_arguments(trainers, engines, config)))


def evidence_of(
    trainers: Sequence[Any], engines: Sequence[Any], source: Locator, target: Locator, config: SyncConfig
) -> Evidence:
    """What `examine` judges."""
    fleet = RayFleet("doctor", list(trainers), list(engines), source, target, timeout_s=config.timeout_s)
    troubles: dict[str, Trouble] = {}
    actors: dict[str, ActorFacts] = {}
    try:
        for party, actor in fleet.actors.items():
            try:
                actors[party] = _look_at(party, actor, fleet, config.timeout_s)
            except WeightSyncError as error:
                troubles[party] = Trouble.of("reach", party, error)
        found = Examination(fleet, config).run(skip=troubles)
    finally:
        fleet.close()
    return msgspec.structs.replace(found, actors=actors, troubles=(*troubles.values(), *found.troubles))


def _look_at(party: str, actor: Any, fleet: RayFleet, timeout_s: float) -> ActorFacts:
    """Put a side into the actor, and see what kind of actor it is. Raises WeightSyncError where that cannot be done."""
    fleet.open_sides(party)
    try:
        for _ in range(2):  # the first call brings the function there
            started = time.perf_counter()
            is_async, blocks = ray.get(actor.__ray_call__.remote(_kind, party.partition(" ")[0]), timeout=timeout_s)
            seconds = time.perf_counter() - started
    except Exception as error:
        raise translate(error, party, timeout_s) from error
    return ActorFacts(
        answered_s=seconds,
        is_async=is_async,
        threaded=bool(getattr(actor, "_ray_allow_out_of_order_execution", False)) and not is_async,
        blocks=blocks,
    )


def _kind(actor: Any, role: str) -> tuple[bool, bool]:
    """Inside the actor: (whether it is an async one, whether it generates within a call)."""
    core = ray._private.worker.global_worker.core_worker
    return core.current_actor_is_asyncio(), not isinstance(find_side(actor, role), AsyncVllmSide)
