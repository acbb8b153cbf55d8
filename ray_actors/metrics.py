"""Ray's metrics of weight syncs: exported where Ray exports its own, by the process that calls `update()`.

Tags have few values: engines, phases, transports, outcomes; never a step, a version or a name of a tensor. Ray puts `ray_`
before each name, and Prometheus' `_total` after those of counters. `docs/grafana.json` is a dashboard of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from ray.util import metrics

from weightsync.report import Attempt, UpdateReport

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclass(frozen=True, slots=True)
class Metric:
    kind: Literal["counter", "gauge", "histogram"]
    name: str
    tags: tuple[str, ...]
    description: str

    @property
    def exported(self) -> tuple[str, ...]:
        """Names under which Prometheus has it."""
        match self.kind:
            case "counter":
                return (f"ray_{self.name}_total",)
            case "gauge":
                return (f"ray_{self.name}",)
            case "histogram":
                return tuple(f"ray_{self.name}_{part}" for part in ("bucket", "count", "sum"))


METRICS = (
    Metric("counter", "weightsync_updates", ("outcome",), "Updates: committed, poisoned (some engines), failed"),
    Metric("counter", "weightsync_failed_attempts", ("phase",), "Attempts that failed, by phase, also those that were tried again"),
    Metric("counter", "weightsync_bytes", ("transport",), "Bytes that engine ranks received"),
    Metric("counter", "weightsync_engine_events", ("engine", "outcome"), "Engines that were poisoned, lost, or joined"),
    Metric("gauge", "weightsync_version", ("engine",), "The version that the engine has committed"),
    Metric("gauge", "weightsync_gb_per_s", (), "Model bytes over the last update's time, 10^9 bytes a second"),
    Metric("histogram", "weightsync_update_seconds", ("outcome",), "Time of an update, retries included"),
    Metric("histogram", "weightsync_phase_seconds", ("phase",), "Time of each phase of the attempts that succeeded"),
    Metric("histogram", "weightsync_pause_seconds", ("engine",), "How long the engine did not generate in an update"),
)  # fmt: skip


def note_commit(report: UpdateReport) -> None:
    """Tell of an update that committed."""
    outcome = "poisoned" if report.poisoned else "committed"
    _made("weightsync_updates").inc(1, {"outcome": outcome})
    _made("weightsync_update_seconds").observe(report.seconds, {"outcome": outcome})
    _made("weightsync_gb_per_s").set(report.gb_per_s)
    for phase, seconds in report.phases.items():
        _made("weightsync_phase_seconds").observe(seconds, {"phase": phase})
    _note_attempts(report.attempts)
    for outcome, engines in (("poisoned", report.poisoned), ("lost", report.lost), ("joined", report.joined)):
        for engine in engines:
            _made("weightsync_engine_events").inc(1, {"engine": engine, "outcome": outcome})
    updated = {row.rank.partition(" rank ")[0] for row in report.ranks if row.rank.startswith("engine")}
    for engine in updated - report.poisoned.keys():
        _made("weightsync_version").set(report.version, {"engine": engine})
    for attempt in report.attempts[-1:]:
        for link in (link for link in attempt.links if link.nbytes):
            _made("weightsync_bytes").inc(link.nbytes * len(link.receivers), {"transport": link.transport})
        for span in attempt.spans:
            if span.phase == "pause":
                _made("weightsync_pause_seconds").observe(span.seconds, {"engine": span.rank})


def note_failure(attempts: tuple[Attempt, ...], seconds: float) -> None:
    """Tell of an update that failed."""
    _made("weightsync_updates").inc(1, {"outcome": "failed"})
    _made("weightsync_update_seconds").observe(seconds, {"outcome": "failed"})
    _note_attempts(attempts)


def _note_attempts(attempts: tuple[Attempt, ...]) -> None:
    for attempt in attempts:
        if attempt.error is not None:
            _made("weightsync_failed_attempts").inc(1, {"phase": attempt.phase or "connect"})


@cache
def _made(name: str) -> Any:
    """Ray's object for it, one a process: the first use registers it."""
    (metric,) = [metric for metric in METRICS if metric.name == name]
    match metric.kind:
        case "counter":
            return metrics.Counter(name, metric.description, metric.tags)
        case "gauge":
            return metrics.Gauge(name, metric.description, metric.tags)
        case "histogram":
            return metrics.Histogram(name, metric.description, boundaries=list(_SECONDS), tag_keys=metric.tags)
