"""Faults at messages of whole weight syncs between real processes; the full set is `benchmarks.faults`."""

from __future__ import annotations

import pytest

from weightsync.testing.campaign import Campaign, control_cases, data_cases
from weightsync.testing.faults import ACTIONS

EVERY = 22


@pytest.mark.parametrize(
    ("first", "transport", "apply"),
    [
        (0, "shared_memory", "staged"),
        (2, "broadcast", "staged"),
        (4, "shared_memory", "streaming"),
        (9, "broadcast", "streaming"),
        (6, "sharded_rdt", "staged"),
        (11, "sharded_shared_memory", "streaming"),
        (13, "sharded_broadcast", "staged"),
    ],
)
def test_no_fault_corrupts_hangs_or_outlives_the_next_update(
    first: int, transport: str, apply: str, request: pytest.FixtureRequest
) -> None:
    sidecars = request.getfixturevalue("sidecars") if transport == "sharded_rdt" else None
    cases = [*control_cases(delay_s=0.2), *data_cases(delay_s=0.2)][first::EVERY]
    assert {case.fault.action for case in cases} == set(ACTIONS)
    with Campaign(transport=transport, apply=apply, sidecars=sidecars) as campaign:
        outcomes = [campaign.run(case) for case in cases]
    assert [f"{o.case}: {o.result}, retry {o.retry} ({o.error})" for o in outcomes if not o.sound] == []
    assert {"committed", "old version", "poisoned"} <= {outcome.result for outcome in outcomes}
    assert sum(outcome.fired for outcome in outcomes) > 0.8 * len(outcomes)
