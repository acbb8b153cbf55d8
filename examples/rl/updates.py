"""How the engines get the trainer's new weights after a step: through weightsync.

The loop sees only the ``Updater`` below, so that break mode can put the old
behaviour in the same place (``reload_per_chunk``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import weightsync as ws


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFigures:
    """What one update moved and cost."""

    version: int
    nbytes: int
    seconds: float
    pause_s: float
    """How long the engines could not generate."""
    changed_values: int | None = None
    """Values of the wire that differ from the update before; None where that was not counted."""
    total_values: int | None = None
    phases: dict[str, float] | None = None

    @property
    def gb_per_s(self) -> float:
        """Payload over wall-clock time of the whole update, agreement and apply included."""
        return self.nbytes / self.seconds / 1e9

    @property
    def changed_share(self) -> float | None:
        """Share of the wire's values that this update changed."""
        if self.changed_values is None or not self.total_values:
            return None
        return self.changed_values / self.total_values


class Updater(Protocol):
    """Brings every engine to the trainer's current weights; a context manager."""

    def update(self) -> UpdateFigures:
        """Block until all engines hold the new version."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


class WeightsyncUpdater:
    """The real thing: one ``ws.connect`` for the whole run, one ``update`` a step."""

    def __init__(self, trainer: Any, engines: Sequence[Any], *, target: str) -> None:
        # The trainer's bf16 module is sent as it stands: it is what the trainer computes with, and
        # its tied output head goes along as an alias of the embedding.
        self._sync = ws.connect(
            trainers=[trainer],
            engines=list(engines),
            source="model",
            target=target,
            config=ws.SyncConfig(count_changed_values=True),
        )

    def update(self) -> UpdateFigures:
        """Block until all engines hold the new version."""
        report = self._sync.update()
        return UpdateFigures(
            version=report.version,
            nbytes=report.nbytes,
            seconds=report.seconds,
            pause_s=report.pause_s,
            changed_values=report.changed_values,
            total_values=report.total_values,
            phases=dict(report.phases),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._sync.close()
