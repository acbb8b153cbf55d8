"""Engines on an NVIDIA GPU, fed by trainers on it or in CPU memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import weightsync as ws
from weightsync.testing import LocalSync, module_engine

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.parametrize("settings", [{}, {"staging_limit_bytes": "8MiB"}, {"transport": "broadcast"}], ids=str)
def test_modules_on_the_gpu_are_exact(settings: dict[str, Any]) -> None:
    def make(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.BatchNorm1d(1024), torch.nn.Linear(1024, 7))
        return model.to("cuda")

    trainer, engine = make(1), make(2)
    with LocalSync([lambda: trainer], [module_engine(engine)], ws.SyncConfig(**settings)) as session:
        for _ in range(3):
            session.update()
            theirs, ours = trainer.state_dict(), engine.state_dict()
            assert all(torch.equal(theirs[name], ours[name]) and ours[name].is_cuda for name in theirs)
            with torch.no_grad():
                for parameter in trainer.parameters():
                    parameter.normal_()


class Trainer:
    def __init__(self, folder: str) -> None:
        self.load(folder)

    def load(self, folder: str) -> None:
        self.weights = torch.load(Path(folder) / "memory.pt")


class Engine:
    def __init__(self, folder: str, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(folder, **arguments)

    def outputs(self, run: Callable[[Any], Any]) -> Any:
        return run(self.llm)


@pytest.mark.vllm
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "CUDA graphs"])
def test_a_vllm_engine_on_the_gpu_equals_a_fresh_one(
    eager: bool, ray_cluster: None, moe: tuple[Path, Path], engine_arguments: dict[str, Any], outputs: Any
) -> None:
    arguments = engine_arguments | {"enforce_eager": eager}
    start = ray.remote(Engine).options(num_gpus=0.4)
    fresh = start.remote(str(moe[1]), arguments)
    expected = ray.get(fresh.outputs.remote(outputs))
    ray.kill(fresh)
    engine = start.remote(str(moe[0]), arguments)
    before = ray.get(engine.outputs.remote(outputs))
    assert before != expected
    trainer = ray.remote(Trainer).options(num_cpus=0.5).remote(str(moe[1]))
    with ws.connect(trainers=[trainer], engines=[engine], source="weights", target="llm") as sync:
        for folder, wanted in ((moe[1], expected), (moe[1], expected), (moe[0], before)):
            ray.get(trainer.load.remote(str(folder)))
            report = sync.update()
            assert ray.get(engine.outputs.remote(outputs)) == wanted
            # One at most; none where every module group was copied instead.
            assert max(row.reloads for row in report.ranks if row.rank.startswith("engine")) <= 1
        assert report.load[0].fallback is None
        assert report.load[0].unmapped == ()
    ray.kill(engine)
