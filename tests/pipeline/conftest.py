"""A run's folder, made of real updates within this process."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weightsync.config import SyncConfig
from weightsync.errors import TransportError, WeightSyncError
from weightsync.pipeline.config import EnginesConfig, PipelineConfig, RunConfig, TrainerConfig
from weightsync.pipeline.records import Records
from weightsync.testing.local import LocalSync, module_engine

HOSTILE = "</title><script>console.error('x')</script> & \"it's\""


class Source:
    """A trainer's weights, which break when told so."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = torch.nn.Sequential(torch.nn.Linear(256, 300), torch.nn.Linear(300, 7))
        self.breaks = 0

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.module.state_dict().items():
            if self.breaks and name == "1.weight":
                self.breaks -= 1
                raise TransportError(f"the source broke: {HOSTILE}")
            yield name, tensor


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve steps with an update every second one: the third was retried, the sixth failed, and its error ended the run."""
    out = tmp_path_factory.mktemp("past") / "run & 1"
    trainer = TrainerConfig(class_="mine:Trainer", arguments={"prompt": HOSTILE})
    config = PipelineConfig(
        trainer=trainer, engines=EnginesConfig(kind="torch", class_="mine:Engine", replicas=2), run=RunConfig(steps=12)
    )
    records, source, version = Records(out, config), Source(), 0
    engines: list[Any] = [module_engine(Source().module) for _ in range(2)]
    with LocalSync([source], engines, SyncConfig(retries=1)) as session:
        for step in range(12):
            time.sleep(0.0035)  # the rollouts and the training, of which the step tells
            metrics = {"reward": step / 12, "loss": math.nan if step == 4 else 1 / (step + 1), HOSTILE: -float(step)}
            records.step(
                {"step": step, "version": version, "trained": True, "rollout_s": 0.002, "train_s": 0.001, "num_rollouts": 4, "metrics": metrics}
            )  # fmt: skip
            if step % 2 == 0:
                continue
            source.breaks = {5: 1, 11: 2}.get(step, 0)
            try:
                report = session.update()
            except WeightSyncError as error:
                records.failure(step, error, seconds=0.01, why=str(error))
                records.end(1, f"error: update after step {step}: {error}")
            else:
                records.update(step, report)
                version = report.version
    return out
