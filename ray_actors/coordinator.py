"""The coordinator: a Ray actor that drives updates and moves no tensor."""

from __future__ import annotations

from typing import Any

import ray

from weightsync.config import SyncConfig
from weightsync.ray_actors.fleet import RayFleet
from weightsync.ray_actors.reply import Callers
from weightsync.ray_actors.side import Locator
from weightsync.report import Progress, UpdateReport
from weightsync.session import Session


class Coordinator:
    """A `Session` over Ray actor handles."""

    def __init__(
        self, owner: str, trainers: list[Any], engines: list[Any], source: Locator, target: Locator, config: SyncConfig
    ) -> None:
        self._fleet = RayFleet(owner, trainers, engines, source, target, timeout_s=config.timeout_s)
        self._callers = Callers()
        self._session: Session | None = None
        self._config = config

    def open(self) -> None:
        """Idempotent."""
        if self._session is not None:
            return
        session = Session(self._fleet, self._config)
        try:
            self._fleet.open_sides()
            session.open()
        except BaseException:
            session.close()
            raise
        self._session = session

    @ray.method(concurrency_group="watch")  # type: ignore[untyped-decorator]
    def ping(self) -> None:
        """Answers while an update runs."""

    @ray.method(concurrency_group="watch")  # type: ignore[untyped-decorator]
    def progress(self) -> Progress | None:
        """Answers while an update runs."""
        return None if self._session is None else self._session.progress()

    def update(self, *, standing_by: bool = False, reply_to: tuple[str, str] | None = None) -> UpdateReport:
        """*standing_by*: the actors are being called to; *reply_to*: where the report is to go first, and the call's token."""
        if standing_by:
            self._fleet.expect()
        report = self._open_session.update()
        if reply_to is not None:
            self._callers.tell(*reply_to, report)
        return report

    def verify(self) -> UpdateReport:
        return self._open_session.verify()

    def add_engine(self, actor: Any) -> UpdateReport | None:
        return self._open_session.add_engine(self._fleet.add(actor))

    def remove_engine(self, actor_id: str) -> None:
        """Raises ConfigError where the actor takes no part, or is the only engine."""
        self._open_session.remove_engine(self._fleet.party_of(actor_id))

    def engine_ids(self) -> list[str]:
        return self._fleet.engine_ids()

    def status(self) -> dict[str, Any]:
        return self._open_session.status()

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._fleet.close()
        self._callers.close()

    @property
    def _open_session(self) -> Session:
        assert self._session is not None, "not opened"
        return self._session
