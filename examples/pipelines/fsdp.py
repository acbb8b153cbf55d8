"""An FSDP2 trainer for `fsdp.yaml`; ranks find each other by the environment, as under torchrun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 255), torch.nn.ReLU(), torch.nn.Linear(255, 7))


class Trainer:
    def __init__(self, lr: float = 0.1) -> None:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = make_model()
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)

    def step(self, step: int, rollouts: Sequence[Any]) -> dict[str, float]:
        loss = self.model(torch.randn(32, 64)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": loss.item()}

    def weights(self) -> torch.nn.Module:
        return self.model
