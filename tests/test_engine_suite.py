"""Plain torch modules as engines are put to the shipped suite."""

from __future__ import annotations

from typing import Any

import torch

from weightsync.engines.torch_module import TorchModuleAdapter
from weightsync.interfaces import EngineAdapter
from weightsync.testing import EngineSuite

Tensors = dict[str, torch.Tensor]


class Model(torch.nn.Module):
    """Nested, tied, with parameters of several dtypes and buffers, one of which no trainer sends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 4)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)) for _ in range(3)
        )
        self.router = torch.nn.Linear(4, 2, dtype=torch.bfloat16)
        self.head = torch.nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(1.0))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("cache", torch.zeros(5), persistent=False)
        self.register_buffer("engine_only", torch.zeros(2))


class TestTorchModule(EngineSuite):
    may_stay_unfed = r"^engine_only$"

    def make_adapter(self) -> EngineAdapter:
        self.module = Model()
        return TorchModuleAdapter(self.module)

    def weights(self, seed: int) -> Tensors:
        torch.manual_seed(seed)
        trainer = Model()
        with torch.no_grad():
            for tensor in trainer.state_dict().values():
                tensor.normal_()
        return {name: tensor for name, tensor in trainer.state_dict().items() if name != "engine_only"}

    def snapshot(self, adapter: EngineAdapter) -> Any:
        return {name: tensor for name, tensor in self.module.state_dict().items() if name != "engine_only"}

    def expected(self, seed: int) -> Any:
        return self.weights(seed)


class TestTorchModuleOfAnotherDtype(TestTorchModule):
    """The values are cast: there is no other way to know what comes out than to give them to a fresh module."""

    def make_adapter(self) -> EngineAdapter:
        self.module = Model().double()
        return TorchModuleAdapter(self.module)

    def expected(self, seed: int) -> Any:
        return {name: tensor.double() for name, tensor in self.weights(seed).items()}


def test_the_default_for_what_is_expected_is_a_fresh_adapter() -> None:
    class Default(TestTorchModule):
        expected = EngineSuite.expected

    assert Default.failures() == {}
