"""What a run leaves in its folder: config.yaml, metrics.jsonl and updates.jsonl, one JSON object a line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from weightsync.flightrecord import FlightRecord, line_of, line_of_failure
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
        self._metrics, self._updates = FlightRecord(out / "metrics.jsonl"), FlightRecord(out / "updates.jsonl")
        for record in (self._metrics, self._updates):
            record.path.write_text("")

    def step(self, record: Mapping[str, Any]) -> None:
        """A step: its number, the version that its rollouts came from, seconds, and the trainer's metrics."""
        self._metrics.add({**record, "job": self.job})

    def update(self, step: int, report: UpdateReport) -> None:
        """An update that committed."""
        self._updates.add({"step": step, **line_of(report), "job": self.job})

    def failure(self, step: int, error: BaseException, *, seconds: float, why: str) -> None:
        """An update that failed."""
        self._updates.add({"step": step, **line_of_failure(error, seconds=seconds, why=why), "job": self.job})
