"""One bench, from a checked config to an exit code."""

from __future__ import annotations

import sys

import msgspec
from rich.console import Console

from weightsync.bench.figures import Figures, figures_of, show
from weightsync.bench.weights import Floor, alternating, flip, floor
from weightsync.errors import WeightSyncError
from weightsync.pipeline.config import PipelineConfig
from weightsync.pipeline.display import Display
from weightsync.pipeline.starting import connected, started
from weightsync.pipeline.stopping import Stopping
from weightsync.ray_actors.pipeline_fleet import Fleet, RunError, ask
from weightsync.report import UpdateReport

_WARM_UP = 3
"""Updates that are not counted: links are opened, and vLLM's reloads watched, in the first ones."""


def bench(config: PipelineConfig, *, rounds: int, json: bool) -> int:
    """0, or 1 with the culprit as the last line on stderr; 130 and 143 when stopped. Figures go to stdout.

    No training step is made. However it ends, the actors are gone when it returns, with Ray if it was ours.
    """
    display = Display(Console(stderr=True))
    with Stopping() as stopping:
        try:
            figures = _measure(config, rounds, display, stopping)
        except KeyboardInterrupt:
            name = stopping.signal.name if stopping.signal else "SIGINT"
            print(f"stopped by {name} at {display.at}; the actors are gone", file=sys.stderr, flush=True)
            return stopping.exit_code
        except RunError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return 1
    if json:
        print(msgspec.json.format(msgspec.json.encode(figures), indent=2).decode())
    else:
        show(figures, Console())
    return 0


def _measure(config: PipelineConfig, rounds: int, display: Display, stopping: Stopping) -> Figures:
    with (
        started(config, display, stopping) as fleet,
        connected(config, fleet, display, stopping, source=alternating) as sync,
    ):
        reports: list[UpdateReport] = []
        floors: list[Floor] = []
        with display.stage(f"{_WARM_UP} updates to warm up, {rounds} that count"):
            for number in range(_WARM_UP + rounds):
                _in_trainers(fleet, flip)
                floors.append(_in_trainers(fleet, floor))
                try:
                    reports.append(sync.update())
                except WeightSyncError as error:
                    raise RunError(f"update {number + 1}", error) from error
                if reports[-1].poisoned:
                    raise RunError(f"update {number + 1}", f"poisoned: {reports[-1].poisoned}")
    return figures_of(reports[0], reports[_WARM_UP:], floors[_WARM_UP:])


def _in_trainers(fleet: Fleet, function: object) -> Floor:
    """On every rank, since making sharded weights may need all; the first rank's answer."""
    calls = {f"trainer {rank}": actor.__ray_call__.remote(function) for rank, actor in enumerate(fleet.trainers)}
    first: Floor = ask(calls)[0]
    return first
