"""Two trainer ranks that share a model with FSDP2, and an engine that gets it whole. Runs on a laptop in seconds."""

import tempfile

import ray
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import weightsync as ws

WORLD = 2


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 255), torch.nn.ReLU(), torch.nn.Linear(255, 7))


class Trainer:
    def __init__(self, rank: int, folder: str) -> None:
        dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=WORLD)
        mesh = init_device_mesh("cpu", (WORLD,))
        self.model = make_model()
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)  # the parameters are DTensors now: each rank has a part of each
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        self.model(torch.randn(32, 64)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.model(x)  # type: ignore[no-any-return]


class Engine:
    def __init__(self) -> None:
        self.model = make_model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.model(x)  # type: ignore[no-any-return]


if __name__ == "__main__":
    ray.init(address="local", num_cpus=3, object_store_memory=10**8, include_dashboard=False, logging_level="warning")
    with tempfile.TemporaryDirectory() as folder:
        trainers = [ray.remote(Trainer).remote(rank, folder) for rank in range(WORLD)]
        engine = ray.remote(Engine).remote()
        x = torch.randn(4, 64)
        with ws.connect(trainers=trainers, engines=[engine], source="model", target="model") as sync:
            for _ in range(3):
                ray.get([trainer.step.remote() for trainer in trainers])
                report = sync.update()  # every rank gathers each tensor, and one of them sends it
                *of_trainers, of_engine = ray.get([actor.forward.remote(x) for actor in (*trainers, engine)])
                same = all(torch.equal(of_trainer, of_engine) for of_trainer in of_trainers)
                print(f"{report}   the engine equals the trainers: {same}")
                assert same
