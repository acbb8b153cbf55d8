"""The coordinator: a Ray actor that drives updates and moves no tensor."""

from __future__ import annotations

import secrets
from typing import Any

import ray

from weightsync.config import SyncConfig
from weightsync.ray_actors.fleet import RayFleet
from weightsync.ray_actors.side import Locator
from weightsync.report import UpdateReport
from weightsync.session import Session


class Coordinator:
    """A `Session` over Ray actor handles."""

    def __init__(self, trainers: list[Any], engines: list[Any], config: SyncConfig) -> None:
        self._config = config
        self._fleet = RayFleet(secrets.token_hex(8), trainers, engines)
        self._session = Session(self._fleet, config)

    def open(self, source: Locator, target: Locator) -> None:
        self._fleet.open_sides(source, target, timeout_s=self._config.timeout_s)
        try:
            self._session.open()
        except BaseException:
            self._session.close()
            raise

    @ray.method(concurrency_group="watch")  # type: ignore[untyped-decorator]
    def ping(self) -> None:
        """Answers while an update runs."""

    def update(self) -> UpdateReport:
        return self._session.update()

    def status(self) -> dict[str, Any]:
        return self._session.status()

    def close(self) -> None:
        self._session.close()
