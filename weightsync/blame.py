"""Who is to blame: what has become of each rank's process, added to an error of a wait or a link."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from weightsync.background import Background
from weightsync.errors import EnginePoisonedError, EngineStateError, TransportError, UpdateTimeoutError, WeightSyncError
from weightsync.identity import Identity

_PROBE_S = 3.0
_PROBES = 16
_NAMED = 3


def find_unwell(ranks: Mapping[str, Identity], state_of: Callable[[Identity], str]) -> dict[str, str]:
    """Rank -> "stopped" or "gone", for those that are; asks all at once and takes a few seconds at most."""
    states: dict[str, str] = {}

    def probe(some: list[tuple[str, Identity]]) -> None:
        for rank, identity in some:
            states[rank] = state_of(identity)

    todo = list(ranks.items())
    probes = [Background(lambda i=i: probe(todo[i::_PROBES]), name="probe") for i in range(min(_PROBES, len(todo)))]  # type: ignore[misc]
    deadline = time.monotonic() + _PROBE_S
    for work in probes:
        work.join(max(deadline - time.monotonic(), 0))
    return {rank: state for rank, state in sorted(states.copy().items()) if state in ("stopped", "gone")}


def explain(error: WeightSyncError, unwell: Mapping[str, str], ranks: Mapping[str, Identity]) -> None:
    """Add to *error* which processes are gone or stopped; the first of them becomes the culprit of a link or a wait."""
    if not unwell or not isinstance(
        error, TransportError | UpdateTimeoutError | EnginePoisonedError | EngineStateError
    ):
        return
    named = [f"{rank} ({ranks[rank]}) is {state}" for rank, state in unwell.items()][:_NAMED]
    more = f" and {len(unwell) - _NAMED} more" if len(unwell) > _NAMED else ""
    error.args = (f"{error}. Found: {', '.join(named)}{more}",)
    if isinstance(error, TransportError | UpdateTimeoutError) and not any(
        rank.startswith(error.rank or "-") for rank in unwell
    ):
        error.rank = next(iter(unwell))
