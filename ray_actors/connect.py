"""`connect` and the handle that it returns: what a training loop uses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray

from weightsync.config import SyncConfig
from weightsync.errors import ConfigError
from weightsync.ray_actors.coordinator import Coordinator
from weightsync.ray_actors.fleet import translate
from weightsync.ray_actors.side import Locator
from weightsync.registry import transport_names
from weightsync.report import UpdateReport

_PHASES = 6  # connect, prepare, transfer, apply, commit, abort: each bounded by timeout_s


def connect(
    *,
    trainers: Sequence[Any],
    engines: Sequence[Any],
    source: Locator,
    target: Locator,
    config: SyncConfig | str | Path | dict[str, Any] | None = None,
) -> WeightSync:
    """Connect trainers and engines that are Ray actors; returns a handle whose `update()` syncs the weights.

    No mixin is asked of the actors' classes. An actor must be free while weightsync talks to it (connect, and during
    an update), or be async, or have a concurrency group.

    Args:
        trainers: actor handles, one per trainer rank.
        engines: actor handles, one per engine replica, with all its ranks inside.
        source: attribute path in the trainer actor ("model"), or a function of the actor; names a module, a mapping
            of tensors, or (name, tensor) pairs, or a method that returns one of these. Asked anew for each update.
        target: attribute path in the engine actor ("llm"), or a function; a vllm.LLM or AsyncLLM created with
            worker_extension_cls="weightsync.ray_actors.vllm_worker.WeightSyncWorkerExtension", or an nn.Module.
        config: a SyncConfig, a dict, the path of a YAML file, or None for the defaults.

    Raises:
        ConfigError: a setting, `source` or `target` is wrong.
        AgreementError: trainer ranks disagree on a tensor.
        ManifestError: an engine's loader refuses a name or a shape.
        UpdateTimeoutError: an actor is busy.
    """
    settings = SyncConfig.load(config)
    for name in [settings.transport] if isinstance(settings.transport, str) else [r.use for r in settings.transport]:
        if name != "auto" and name not in transport_names():
            known = ", ".join(transport_names())
            raise ConfigError(f"transport: unknown transport {name!r}; known: auto, {known}", key="transport")
    for key, actors in (("trainers", trainers), ("engines", engines)):
        if not actors:
            raise ConfigError(f"{key}: at least one actor handle is needed", key=key)
        for actor in actors:
            if not isinstance(actor, ray.actor.ActorHandle):
                raise ConfigError(f"{key}: expected Ray actor handles, got {type(actor).__name__}", key=key)
    coordinator = (
        ray.remote(Coordinator).options(num_cpus=0, max_concurrency=1).remote(list(trainers), list(engines), settings)
    )
    sync = WeightSync(coordinator, settings)
    try:
        sync._get(coordinator.open.remote(source, target))
    except BaseException:
        ray.kill(coordinator)
        raise
    return sync


class WeightSync:
    """A connected weight sync. May be passed to other Ray tasks; close it once."""

    def __init__(self, coordinator: Any, config: SyncConfig) -> None:
        self._coordinator = coordinator
        self.config = config
        self._closed = False

    def update(self) -> UpdateReport:
        """Bring every engine to the trainers' present weights, as the next version.

        Returns when all engines have committed. The trainers' weights must not change meanwhile.

        Raises:
            WeightSyncError: one of its kinds; every engine then serves the version it had, unless the error is
                EnginePoisonedError. A later update starts afresh.
        """
        report: UpdateReport = self._get(self._coordinator.update.remote())
        return report

    async def update_async(self) -> UpdateReport:
        """`update` for async code."""
        try:
            report: UpdateReport = await asyncio.wait_for(
                asyncio.wrap_future(self._coordinator.update.remote().future()), self._bound_s
            )
        except Exception as error:
            raise translate(error, "the coordinator", self._bound_s) from error
        return report

    @property
    def version(self) -> int:
        """The last committed version; 0 before the first update."""
        return int(self.status()["version"])

    def status(self) -> dict[str, Any]:
        """Version, epoch, parties, transports, and what feeds nothing or is fed by nothing. Waits for a running update."""
        status: dict[str, Any] = self._get(self._coordinator.status.remote())
        return status

    def close(self) -> None:
        """End the weight sync; trainers and engines live on, engines with the version they have. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._get(self._coordinator.close.remote())
        finally:
            ray.kill(self._coordinator)

    @property
    def _bound_s(self) -> float:
        return self.config.timeout_s * _PHASES + 30

    def _get(self, ref: Any) -> Any:
        try:
            return ray.get(ref, timeout=self._bound_s)
        except Exception as error:
            raise translate(error, "the coordinator", self._bound_s) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
