"""The rows of a run, and what they prove or fail to prove. Pure arithmetic on recorded figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weightsync.pipeline import Verdict

# bf16 noise is not one number: it depends on the model and shifts a little as the policy does.
# So the limit is a multiple of what this very model shows before any update, where both sides
# have just read the same file. For scale, limit 0.132: a healthy run stayed below 0.067; an engine that
# missed every update had gaps of 0.039, 0.043, 0.067, 0.087, 0.141, 0.194 (SmolLM2-135M, vLLM 0.32 CPU).
GAP_FACTOR = 3.0
# One broken update exceeds this by far (a healthy gap is some hundredths).
CORRUPTION_FACTOR = 10.0
# Shorter runs are for trying things out: they are judged by the gap alone.
MIN_STEPS_FOR_REWARD = 10
REWARD_END = 0.5
REWARD_RISE = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What the rollouts of one step showed."""

    step: int
    version: int
    """Version of the weights that sampled the answers; 0 is the checkpoint as loaded."""
    reward: float
    gap_by_engine: dict[int, float]
    """Mean |trainer - engine| log-probability over the engine's sampled tokens, both with this version."""

    @property
    def worst_gap(self) -> float:
        """The gap of the worse engine; NaN if any is NaN."""
        gaps = list(self.gap_by_engine.values())
        return math.nan if any(math.isnan(gap) for gap in gaps) else max(gaps)


def judge(rows: Sequence[Row]) -> Verdict:
    """Ask of a healthy run that the gap stayed at noise in every step and that the reward rose."""
    limit = GAP_FACTOR * rows[0].worst_gap
    over = [row for row in rows if not row.worst_gap < limit]
    if over:
        text = f"gap: above {limit:.3f} in step(s) {_steps(over)}, at worst {_worst(over):.3f}: NOT noise"
    else:
        text = f"gap: at most {_worst(rows):.3f} in all {len(rows)} rows, limit {limit:.3f}: bf16 noise"
    reasons = [text]

    rose = True
    if len(rows) < MIN_STEPS_FOR_REWARD:
        reasons.append(f"reward: not judged, {len(rows)} rows are fewer than {MIN_STEPS_FOR_REWARD}")
    else:
        first, last = _mean_reward(rows[:3]), _mean_reward(rows[-3:])
        rose = last >= REWARD_END and last >= first + REWARD_RISE
        reasons.append(
            f"reward: {first:.2f} in the first three rows, {last:.2f} in the last three: "
            + ("rose clearly" if rose else f"did NOT reach {REWARD_END} and rise by {REWARD_RISE}")
        )
    return Verdict(ok=not over and rose, reasons=tuple(reasons))


def judge_corruption(rows: Sequence[Row]) -> Verdict:
    """Ask of one reload per chunk that the gap explodes in every row after the first update."""
    limit = CORRUPTION_FACTOR * rows[0].worst_gap
    hidden = [row for row in rows if row.version > 0 and row.worst_gap < limit]
    updated = [row for row in rows if row.version > 0]
    if hidden or not updated:
        text = f"the corruption did NOT show in step(s) {_steps(hidden)}" if hidden else "no update was made"
    else:
        text = (
            f"one reload per chunk corrupted the engines: the gap went from {rows[0].worst_gap:.3f} "
            f"to {_worst(updated):.3f}, and no call raised"
        )
    return Verdict(ok=bool(updated) and not hidden, reasons=(text,))


def _mean_reward(rows: Sequence[Row]) -> float:
    return sum(row.reward for row in rows) / len(rows)


def _worst(rows: Sequence[Row]) -> float:
    gaps = [row.worst_gap for row in rows]
    return math.nan if any(math.isnan(gap) for gap in gaps) else max(gaps)


def _steps(rows: Sequence[Row]) -> str:
    return ", ".join(str(row.step) for row in rows)
