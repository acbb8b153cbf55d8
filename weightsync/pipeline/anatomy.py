"""When each rank did what in one update: lanes of bars, for the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weightsync.pipeline.numbers import size, took, when
from weightsync.pipeline.past import UpdateLine
from weightsync.report import Attempt, Span

PHASES = ("connect", "prepare", "transfer", "apply", "commit", "abort")
_MAX_LANES = 16


def named(update: UpdateLine) -> str:
    """What the report calls it."""
    if update.step is not None:
        return f"Update after step {update.step}"
    return f"Update to version {update.version}" if update.version is not None else f"Update at {when(update.time)}"


def anatomy(updates: Sequence[UpdateLine]) -> dict[str, Any] | None:
    """When each rank did what: of the failed update that came last, else of the last."""
    told = [update for update in updates if update.attempts]
    if not told:
        return None
    update = next((update for update in reversed(told) if not update.ok), told[-1])
    attempt = update.attempts[-1]
    whole = max([attempt.seconds, *(span.start_s + span.seconds for span in attempt.spans)])
    ranks = list(dict.fromkeys(span.rank for span in attempt.spans if span.phase != "pause"))
    rows = [
        {"rank": rank, "bars": [_bar(attempt, span, whole) for span in attempt.spans if _on_lane(span, rank)]}
        for rank in ranks[:_MAX_LANES]
    ]
    more = f"; {len(ranks) - _MAX_LANES} more ranks are in the timeline" if len(ranks) > _MAX_LANES else ""
    pairs = ", ".join(sorted({link.transport for link in attempt.links}))
    kinds = {span.phase for span in attempt.spans}
    return {
        "title": f"{named(update)}, rank by rank",
        "caption": f"{'the last one' if update.ok else 'the last that failed'}; {took(attempt.seconds)}"
        + (f" over {pairs}" if pairs else "")
        + f"; the thin line: the engine did not generate; hatched: did not end well{more}",
        "legend": [phase for phase in PHASES if phase in kinds],
        "rows": rows,
        "half": took(whole / 2),
        "whole": took(whole),
    }


def _on_lane(span: Span, rank: str) -> bool:
    """A pause is drawn with each rank of its engine."""
    return span.rank == rank or (span.phase == "pause" and rank.startswith(f"{span.rank} rank "))


def _bar(attempt: Attempt, span: Span, whole: float) -> dict[str, Any]:
    clock = attempt.clocks.get(span.rank)
    title = f"{span.rank}: {span.phase}, {took(span.seconds)}, from {took(max(span.start_s, 0.0))}"
    if span.nbytes:
        title += f", {size(span.nbytes)}"
    if not span.ended:
        title += ", did not end well"
    if clock is not None and clock.error_s:
        title += f" (its clock is known to {took(clock.error_s)})"
    left = min(max(span.start_s / whole, 0.0), 1.0) if whole else 0.0
    width = min(span.seconds / whole, 1 - left) if whole else 0.0
    kind = span.phase if span.phase in (*PHASES, "pause") else "connect"
    return {
        "kind": kind,
        "ended": span.ended,
        "left": f"{100 * left:.3f}",
        "width": f"{100 * width:.3f}",
        "title": title,
    }
