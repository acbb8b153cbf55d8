"""What a run leaves in its folder: config.yaml, metrics.jsonl and updates.jsonl, one JSON object a line."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from weightsync.pipeline.config import PipelineConfig
from weightsync.pipeline.document import dump
from weightsync.report import UpdateReport


def config_text(config: PipelineConfig) -> str:
    """The effective config, defaults and overrides included, as a file that can be run again."""
    return dump(msgspec.to_builtins(config))


def submission_id() -> str | None:
    """Of the Ray job that this process is the entry point of; None outside of one."""
    try:
        config = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
        return config.get("metadata", {}).get("job_submission_id")  # type: ignore[no-any-return]
    except (ValueError, AttributeError):
        return None


class Records:
    """Writes the files; each line is on disk when the call returns."""

    def __init__(self, out: Path, config: PipelineConfig) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.job = out, submission_id()
        (out / "config.yaml").write_text(config_text(config), encoding="utf-8")
        self._metrics, self._updates = out / "metrics.jsonl", out / "updates.jsonl"
        for file in (self._metrics, self._updates):
            file.write_text("")

    def step(self, record: Mapping[str, Any]) -> None:
        """A step: its number, the version that its rollouts came from, seconds, and the trainer's metrics."""
        self._append(self._metrics, record)

    def update(self, step: int, report: UpdateReport) -> None:
        """An update that committed."""
        told = msgspec.to_builtins(report)
        del told["load"]
        self._append(self._updates, {"ok": True, "step": step, "gb_per_s": report.gb_per_s, **told})

    def failure(self, step: int, error: BaseException, *, seconds: float, why: str) -> None:
        """An update that failed; `culprit` is the rank that the error names, where it names one."""
        self._append(
            self._updates,
            {
                "ok": False,
                "step": step,
                "version": None,
                "seconds": seconds,
                "error": type(error).__name__,
                "message": why,
                "culprit": getattr(error, "rank", None),
                "phase": getattr(error, "phase", None),
            },
        )

    def _append(self, file: Path, record: Mapping[str, Any]) -> None:
        line = {**record, "time": time.time(), "job": self.job}
        with file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(finite(line), allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """JSON has no NaN; null says as plainly that there is no number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
