"""The bug that weightsync exists for, pinned on vLLM itself: one reload per chunk corrupts, and nothing raises.

A fused module that got part of its shards is rebuilt in uninitialised memory. Which values that memory holds is
chance, so here it is filled with NaN when it is taken: what was never written can then be seen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import weightsync as ws
from weightsync.sender import SenderRank
from weightsync.session import Session
from weightsync.testing import LocalFleet, in_process_party

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture
def unwritten_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.model_loader.reload import meta

    plain = meta.materialize_meta_tensor

    def filled(tensor: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = plain(tensor)
        if made.is_floating_point():
            made.fill_(float("nan"))
        return made

    monkeypatch.setattr(meta, "materialize_meta_tensor", filled)


def live_tensors(llm: Any) -> list[torch.Tensor]:
    """Every floating-point tensor that the model holds."""
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    return [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]


def test_one_reload_per_chunk_corrupts_and_one_reload_per_update_is_exact(
    moe: tuple[Path, Path], load_weights: Any, outputs: Any, reference: Any, vllm_party: Any, unwritten_is_nan: None
) -> None:
    expected = reference(moe[1])
    new = load_weights(moe[1])

    through_us = reference.start(moe[0])
    fleet = LocalFleet([in_process_party([SenderRank(0, lambda: new)])], [vllm_party(through_us)])
    session = Session(fleet, ws.SyncConfig(bucket_bytes=1))
    session.open()
    session.update()
    assert not any(t.isnan().any() for t in live_tensors(through_us))
    assert outputs(through_us) == expected

    # The same engine, the same chunks, the old way.
    runner = through_us.llm_engine.model_executor.driver_worker.worker.model_runner
    for name, tensor in new.items():
        runner.reload_weights(weights_iterator=iter([(name, tensor)]))  # raises nothing
    corrupted = [t for t in live_tensors(through_us) if t.isnan().any()]
    assert corrupted, "no unwritten memory reached the model"
    assert outputs_or_error(outputs, through_us) != expected

    # And a whole update through weightsync repairs it.
    session.update()
    assert not any(t.isnan().any() for t in live_tensors(through_us))
    session.close()


def outputs_or_error(outputs: Any, llm: Any) -> Any:
    """NaN log-probabilities cannot always be returned; that is a wrong output too."""
    try:
        return outputs(llm)
    except Exception as error:
        return repr(error)
