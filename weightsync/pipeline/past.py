"""A run read back from its folder, or updates from a flight record: for the report and the timeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from weightsync.errors import ConfigError
from weightsync.report import Attempt, RankRow

T = TypeVar("T")


class StepLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of metrics.jsonl."""

    step: int
    version: int
    time: float
    """Unix time of its end."""
    trained: bool = True
    rollout_s: float = 0.0
    train_s: float = 0.0
    num_rollouts: int = 0
    metrics: dict[str, float | None] = {}


class UpdateLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of updates.jsonl, or of a flight record; see `UpdateReport`."""

    ok: bool
    time: float
    seconds: float
    step: int | None = None
    version: int | None = None
    nbytes: int = 0
    gb_per_s: float = 0.0
    pause_s: float = 0.0
    phases: dict[str, float] = {}
    apply: str = ""
    transports: dict[str, str] = {}
    ranks: tuple[RankRow, ...] = ()
    total_values: int = 0
    changed_values: int | None = None
    poisoned: dict[str, str] = {}
    failed_attempts: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    error: str | None = None
    message: str | None = None
    culprit: str | None = None
    phase: str | None = None


class RunLine(msgspec.Struct, frozen=True, kw_only=True):
    """run.json."""

    started: float
    host: str = ""
    job: str | None = None
    versions: dict[str, str] = {}
    ended: float | None = None
    """None: it goes on, or was killed."""
    exit_code: int | None = None
    last_line: str = ""
    """What it said last on stderr."""
    reasons: tuple[str, ...] = ()
    """Of the trainer's verdict."""


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run; of a flight record alone, its updates."""

    name: str
    updates: tuple[UpdateLine, ...]
    steps: tuple[StepLine, ...] = ()
    config: str = ""
    run: RunLine | None = None


def read_past(path: Path) -> Past:
    """What lies at *path*: the folder of a run, or a flight record.

    Raises:
        ConfigError: there is no such thing, or a line of it is damaged (but the last, which may be half written).
    """
    if path.is_file():
        return Past(name=path.name, updates=tuple(_lines(path, UpdateLine)))
    updates = path / "updates.jsonl"
    if not updates.is_file():
        what = "has no updates.jsonl" if path.is_dir() else "does not exist"
        raise ConfigError(
            f"{path} {what}; expected the folder that a run wrote (run.out), or a flight record (sync.flight_record)",
            file=str(path),
        )
    run, config = path / "run.json", path / "config.yaml"
    return Past(
        name=path.resolve().name,
        updates=tuple(_lines(updates, UpdateLine)),
        steps=tuple(_lines(path / "metrics.jsonl", StepLine)),
        config=config.read_text(encoding="utf-8") if config.is_file() else "",
        run=_decoded(run.read_bytes(), RunLine, str(run)) if run.is_file() else None,
    )


def _lines(path: Path, kind: type[T]) -> Sequence[T]:
    if not path.is_file():
        return []
    whole = path.read_bytes().split(b"\n")[:-1]  # a run that was killed, or goes on, may have half a line after these
    return [_decoded(line, kind, f"{path}:{i}") for i, line in enumerate(whole, start=1) if line.strip()]


def _decoded(data: bytes, kind: type[T], place: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{place}: no {kind.__name__} of weightsync: {error}", file=place) from error
