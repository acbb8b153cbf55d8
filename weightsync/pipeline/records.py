"""What a run leaves in its folder: config.yaml, run.json, metrics.jsonl and updates.jsonl (one JSON object a line), and in the
end what is made of them: report.html and timeline.json."""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from weightsync.flightrecord import FlightRecord, line_of, line_of_failure
from weightsync.identity import package_version
from weightsync.pipeline.config import PipelineConfig
from weightsync.pipeline.document import dump
from weightsync.pipeline.past import RunLine, read_past
from weightsync.pipeline.trainer import Verdict
from weightsync.report import UpdateReport

_PACKAGES = ("weightsync", "torch", "ray")
TIMELINE_UPDATES = 500
"""The newest ones; a viewer takes no pleasure in more."""


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
        versions = {"python": platform.python_version(), **{name: package_version(name) for name in _PACKAGES}}
        self._run = RunLine(started=time.time(), host=socket.gethostname(), job=self.job, versions=versions)
        self._write_run()
        for stale in ("report.html", "timeline.json"):
            (out / stale).unlink(missing_ok=True)

    def step(self, record: Mapping[str, Any]) -> None:
        """A step: its number, the version that its rollouts came from, seconds, and the trainer's metrics."""
        self._metrics.add({**record, "job": self.job})

    def update(self, step: int, report: UpdateReport) -> None:
        """An update that committed."""
        self._updates.add({"step": step, **line_of(report), "job": self.job})

    def failure(self, step: int, error: BaseException, *, seconds: float, why: str) -> None:
        """An update that failed."""
        self._updates.add({"step": step, **line_of_failure(error, seconds=seconds, why=why), "job": self.job})

    def end(self, exit_code: int, last_line: str, verdict: Verdict | None = None) -> None:
        """Note how the run ended, and write its report and timeline.

        Raises:
            OSError, ConfigError: they cannot be written, or what they are made of was changed by somebody else.
        """
        self._run = msgspec.structs.replace(
            self._run,
            ended=time.time(),
            exit_code=exit_code,
            last_line=last_line,
            reasons=() if verdict is None else verdict.reasons,
        )
        self._write_run()
        write_report(self.out, self.out / "report.html")
        write_timeline(self.out, self.out / "timeline.json", last=TIMELINE_UPDATES)

    def _write_run(self) -> None:
        (self.out / "run.json").write_bytes(msgspec.json.format(msgspec.json.encode(self._run), indent=2) + b"\n")


def write_report(past: Path, to: Path) -> None:
    """Raises ConfigError where *past* is no run and no flight record; OSError."""
    from weightsync.pipeline.page import page

    to.write_text(page(read_past(past)), encoding="utf-8")


def write_timeline(past: Path, to: Path, *, last: int = 0) -> None:
    """Of the *last* updates, 0: all. Raises as `write_report`."""
    from weightsync.pipeline.timeline import timeline

    to.write_bytes(msgspec.json.encode(timeline(read_past(past), last=last)))
