"""A real vLLM engine is put to the shipped suite: after each update it puts out what a fresh engine does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from weightsync.interfaces import EngineAdapter
from weightsync.testing import EngineSuite

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def moe_llm(moe: tuple[Path, Path], reference: Any) -> Any:
    return reference.start(moe[0])


class TestVllm(EngineSuite):
    may_stay_unfed = r"\.attn\._\w+_scale$"
    num_probed_names = 4

    @pytest.fixture(autouse=True)
    def reached(self, moe_llm: Any, moe: tuple[Path, Path], reference: Any, outputs: Any, load_weights: Any) -> None:
        self.llm, self.folders = moe_llm, moe
        self.reference, self.outputs, self.load_weights = reference, outputs, load_weights

    def make_adapter(self) -> EngineAdapter:
        from weightsync.engines.vllm import VllmAdapter

        return VllmAdapter(self.llm.llm_engine.model_executor.driver_worker.worker)

    def weights(self, seed: int) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = self.load_weights(self.folders[seed])
        return weights

    def snapshot(self, adapter: EngineAdapter) -> Any:
        return self.outputs(self.llm)

    def expected(self, seed: int) -> Any:
        return self.reference(self.folders[seed])
