"""A pipeline's processes, started and ended: for `run`, and for whatever else needs them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsync.errors import WeightSyncError
from weightsync.pipeline.check import resolve
from weightsync.pipeline.config import ModelMaker, PipelineConfig
from weightsync.pipeline.display import Display
from weightsync.pipeline.stopping import Stopping
from weightsync.ray_actors.pipeline_fleet import Fleet, RunError

if TYPE_CHECKING:
    from weightsync.ray_actors.connect import WeightSync

_CLOSE_TIMEOUT_S = 2.0


def processes(config: PipelineConfig) -> str:
    """ "1 trainer ranks, 2 vllm engines"."""
    return f"{config.trainer.ranks} trainer ranks, {config.engines.replicas} {config.engines.kind} engines"


@contextmanager
def started(config: PipelineConfig, display: Display, stopping: Stopping) -> Iterator[Fleet]:
    """Model, Ray, and all actors, loaded; afterwards the actors are gone, with Ray if it was ours.

    Raises:
        RunError: who could not start, and why.
    """
    with display.stage("model"):
        model = model_path(config)
    fleet = Fleet(config)
    try:
        with display.stage(f"Ray at {fleet.address}" if fleet.address else "a local Ray"):
            stopping.over(fleet.connect)
        stopping.catch()
        with display.stage(processes(config)):
            fleet.start(model)
        yield fleet
    finally:
        stopping.ignore()
        display.end()
        fleet.stop()
        stopping.catch()


@contextmanager
def connected(
    config: PipelineConfig,
    fleet: Fleet,
    display: Display,
    stopping: Stopping,
    source: str | Callable[[Any], Any] = "user.weights",
) -> Iterator[WeightSync]:
    """The weight sync of a pipeline's actors, closed afterwards.

    Raises:
        RunError: it cannot be made.
    """
    from weightsync.ray_actors.connect import connect

    with display.stage("weight sync"):
        try:
            sync = connect(
                trainers=fleet.trainers, engines=fleet.engines, source=source, target="target", config=config.sync
            )
        except WeightSyncError as error:
            raise RunError("connect", error) from error
    try:
        yield sync
    finally:
        stopping.ignore()
        display.end()
        _close(sync)


def model_path(config: PipelineConfig) -> str | None:
    """The model's path or name; made first, where the file says how."""
    model = config.model
    if isinstance(model, ModelMaker):
        try:
            return str(resolve(model.make)(**model.arguments))
        except Exception as error:
            raise RunError("model.make", error) from error
    if model is None:
        return None
    path = Path(model).expanduser()
    return os.path.abspath(path) if path.is_dir() else model


def _close(sync: WeightSync) -> None:
    """Close, but wait no longer than so for an actor that is busy, or an update that hangs: all actors end anyway."""
    import ray

    def close() -> None:
        with contextlib.suppress(Exception):
            sync.close()

    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(_CLOSE_TIMEOUT_S)
    coordinator = sync._coordinator
    if closing.is_alive() and coordinator is not None:
        # Its end ends the wait. A thread that outlived Ray would start another by its next call.
        ray.kill(coordinator)
        closing.join(_CLOSE_TIMEOUT_S)
