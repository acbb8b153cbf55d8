"""The gap: how far the trainer's log-probabilities lie from the engine's, on the tokens that were sampled.

Both sides score the same tokens with what should be the same weights. Only
rounding may differ, so the mean absolute difference stays at the noise of bf16
for as long as the engines really hold the trainer's weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class GapSum:
    """Running sums of |trainer - engine|, kept apart by engine."""

    totals: dict[int, float] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)

    def add(self, engine: int, trainer_logprobs: Sequence[float], engine_logprobs: Sequence[float]) -> None:
        """Take in one answer, token by token."""
        difference = sum(abs(t - e) for t, e in zip(trainer_logprobs, engine_logprobs, strict=True))
        self.totals[engine] = self.totals.get(engine, 0.0) + difference
        self.counts[engine] = self.counts.get(engine, 0) + len(engine_logprobs)

    def mean(self) -> float:
        """Over all tokens; NaN when a log-probability was NaN or there was none."""
        count = sum(self.counts.values())
        return sum(self.totals.values()) / count if count else math.nan

    def by_engine(self) -> dict[int, float]:
        """The mean of each engine alone."""
        return {engine: self.totals[engine] / self.counts[engine] for engine in sorted(self.totals)}
