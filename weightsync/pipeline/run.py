"""One run of a pipeline, from a checked config to an exit code."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from weightsync.errors import WeightSyncError
from weightsync.pipeline.check import resolve
from weightsync.pipeline.config import ModelMaker, PipelineConfig
from weightsync.pipeline.display import Display
from weightsync.pipeline.fleet import Fleet, RunError, explain
from weightsync.pipeline.loop import Loop
from weightsync.pipeline.records import Records, config_text
from weightsync.pipeline.stopping import Stopping
from weightsync.pipeline.trainer import Verdict

if TYPE_CHECKING:
    from weightsync.ray_actors.connect import WeightSync

_CLOSE_TIMEOUT_S = 2.0


def run(config: PipelineConfig, console: Console) -> int:
    """Run it to its end; 0, or 1 with the culprit as the last line on stderr, or 130 and 143 when stopped.

    However it ends, the weight sync is closed and the actors are gone when it returns, with Ray if it was ours.
    """
    display = Display(console)
    records: Records | None = None
    verdict: Verdict | None = None
    last_line = ""
    with Stopping() as stopping:
        code = 0
        try:
            records = Records(Path(config.run.out).expanduser(), config)
            verdict = _run(config, records, display, stopping)
            if verdict is not None and not verdict.ok:
                code, last_line = 1, f"error: verdict: FAIL: {'; '.join(verdict.reasons)}"
        except KeyboardInterrupt:
            code, name = stopping.exit_code, stopping.signal.name if stopping.signal else "SIGINT"
            last_line = (
                f"stopped by {name} at {display.at}; the actors are gone, the records are kept in {config.run.out}"
            )
        except RunError as error:
            code, last_line = 1, f"error: {error}"
            if isinstance(error.error, BaseException) and not isinstance(error.error, WeightSyncError):
                print(error.error, file=sys.stderr)
        except Exception as error:
            code, last_line = 1, f"error: {display.at}: {explain(error)}"
            traceback.print_exc()
        stopping.ignore()
        if records is not None:
            _end(records, code, last_line, verdict, display)
    sys.stdout.flush()
    if last_line:
        print(last_line, file=sys.stderr, flush=True)
    return code


def _end(records: Records, code: int, last_line: str, verdict: Verdict | None, display: Display) -> None:
    for reason in verdict.reasons if verdict else ():
        display.say(reason)
    try:
        records.end(code, last_line, verdict)
        display.say(f"records: {records.out}, report: {records.out / 'report.html'}")
    except Exception as error:
        display.say(f"records: {records.out}; no report could be written: {explain(error)}")
    if verdict is not None and verdict.ok:
        display.say("verdict: PASS", style="bold green")


def _run(config: PipelineConfig, records: Records, display: Display, stopping: Stopping) -> Verdict | None:
    display.say(config_text(config).rstrip())
    with display.stage("model"):
        model = model_path(config)
    fleet = Fleet(config)
    sync: WeightSync | None = None
    try:
        with display.stage(f"Ray at {fleet.address}" if fleet.address else "a local Ray"):
            fleet.connect()
        stopping.catch()
        what = f"{config.trainer.ranks} trainer ranks, {config.engines.replicas} {config.engines.kind} engines"
        with display.stage(what):
            fleet.start(model)
        with display.stage("weight sync"):
            sync = _connect(config, fleet)
        return Loop(config, fleet, sync, records, display).run()
    finally:
        stopping.ignore()
        display.end()
        if sync is not None:
            _close(sync)
        fleet.stop()
        stopping.catch()


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


def _connect(config: PipelineConfig, fleet: Fleet) -> WeightSync:
    from weightsync.ray_actors.connect import connect

    try:
        return connect(
            trainers=fleet.trainers, engines=fleet.engines, source="user.weights", target="target", config=config.sync
        )
    except WeightSyncError as error:
        raise RunError("connect", error) from error


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
