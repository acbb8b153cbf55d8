"""One run of a pipeline, from a checked config to an exit code."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from rich.console import Console

from weightsync.errors import WeightSyncError
from weightsync.pipeline.config import PipelineConfig
from weightsync.pipeline.display import Display
from weightsync.pipeline.loop import Loop
from weightsync.pipeline.records import Records, config_text
from weightsync.pipeline.starting import connected, started
from weightsync.pipeline.stopping import Stopping
from weightsync.pipeline.trainer import Verdict
from weightsync.ray_actors.pipeline_fleet import RunError, explain


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
    with started(config, display, stopping) as fleet, connected(config, fleet, display, stopping) as sync:
        return Loop(config, fleet, sync, records, display).run()
