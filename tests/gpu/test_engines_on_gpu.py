"""Engines and trainers on an NVIDIA GPU; the bytes travel through CPU memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import weightsync as ws
from weightsync.sender import SenderRank
from weightsync.session import Session
from weightsync.testing import LocalFleet, LocalSync, in_process_party, module_engine

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


@pytest.mark.vllm
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "CUDA graphs"])
def test_a_vllm_engine_on_the_gpu_equals_a_fresh_one(
    eager: bool, moe: tuple[Path, Path], start_llm: Any, load_weights: Any, outputs: Any, vllm_party: Any
) -> None:
    engine, fresh = (start_llm(folder, enforce_eager=eager) for folder in moe)
    before, expected = outputs(engine), outputs(fresh)
    assert before != expected
    old, new = (load_weights(folder) for folder in moe)
    trainer = {"weights": new}
    fleet = LocalFleet([in_process_party([SenderRank(0, lambda: trainer["weights"])])], [vllm_party(engine)])
    session = Session(fleet, ws.SyncConfig(bucket_bytes=1))
    session.open()
    for trainer["weights"], wanted in ((new, expected), (new, expected), (old, before)):
        report = session.update()
        assert outputs(engine) == wanted
        assert [row.reloads for row in report.ranks if row.rank.startswith("engine")] == [1]
    assert report.load[0].fallback is None
    assert report.load[0].unmapped == ()
    session.close()
