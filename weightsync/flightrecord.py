"""The flight record: a JSON line for each update, whether it committed or failed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from weightsync.errors import WeightSyncError
from weightsync.report import UpdateReport


def line_of(report: UpdateReport) -> dict[str, Any]:
    """Of an update that committed: the report, without what each says again about the load."""
    told: dict[str, Any] = msgspec.to_builtins(report)
    del told["load"]
    return {"ok": True, "gb_per_s": report.gb_per_s, **told}


def line_of_failure(error: BaseException, *, seconds: float, why: str | None = None) -> dict[str, Any]:
    """Of an update that failed; `culprit` is the rank that the error names, where it names one.

    Args:
        why: the explanation, where the caller has a better one than the error's text.
    """
    attempts = error.attempts if isinstance(error, WeightSyncError) else ()
    return {
        "ok": False,
        "version": None,
        "seconds": seconds,
        "error": type(error).__name__,
        "message": str(error) if why is None else why,
        "culprit": getattr(error, "rank", None),
        "phase": getattr(error, "phase", None),
        "attempts": msgspec.to_builtins(attempts),
    }


class FlightRecord:
    """A file that lines are added to, at once each. JSON has no NaN: null stands for it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, line: Mapping[str, Any]) -> None:
        """Raises OSError where the file cannot be written."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as stream:
            stream.write(msgspec.json.encode({**line, "time": time.time()}) + b"\n")
