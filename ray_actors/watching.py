"""What is told of each update: the flight record and Ray's metrics, where the config asks for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weightsync.config import SyncConfig
from weightsync.errors import WeightSyncError
from weightsync.flightrecord import FlightRecord, line_of, line_of_failure
from weightsync.report import UpdateReport

_log = logging.getLogger(__name__)


class Watching:
    """Costs nothing where the config asks for nothing. Never makes an update fail."""

    def __init__(self, config: SyncConfig) -> None:
        self._record = FlightRecord(Path(config.flight_record)) if config.flight_record else None
        self._metrics = config.metrics

    def committed(self, report: UpdateReport) -> None:
        if self._record is not None:
            self._add(self._record, line_of(report))
        if self._metrics:
            from weightsync.ray_actors.metrics import note_commit

            self._note(lambda: note_commit(report))

    def failed(self, error: WeightSyncError, seconds: float) -> None:
        if self._record is not None:
            self._add(self._record, line_of_failure(error, seconds=seconds))
        if self._metrics:
            from weightsync.ray_actors.metrics import note_failure

            self._note(lambda: note_failure(error.attempts, seconds))

    def _note(self, note: Callable[[], None]) -> None:
        try:
            note()
        except Exception:
            _log.warning("metrics: an update could not be counted", exc_info=True)

    def _add(self, record: FlightRecord, line: Mapping[str, Any]) -> None:
        try:
            record.add(line)
        except OSError as error:
            _log.warning("flight_record: %s cannot be written (%s)", record.path, error)
