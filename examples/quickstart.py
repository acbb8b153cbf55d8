"""Two plain Ray actors, a trainer and an engine, and one weight sync between them. Runs on a laptop in seconds."""

import ray
import torch

import weightsync as ws


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))


class Trainer:
    def __init__(self) -> None:
        self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        x = torch.randn(32, 64)
        loss = self.model(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def forward(self, x: torch.Tensor) -> list[list[float]]:
        with torch.no_grad():
            outputs: list[list[float]] = self.model(x).tolist()
            return outputs


class Engine:
    def __init__(self) -> None:
        self.model = make_model()

    def forward(self, x: torch.Tensor) -> list[list[float]]:
        with torch.no_grad():
            outputs: list[list[float]] = self.model(x).tolist()
            return outputs


if __name__ == "__main__":
    ray.init(address="local", num_cpus=2, object_store_memory=10**8, include_dashboard=False, logging_level="warning")
    trainer, engines = ray.remote(Trainer).remote(), [ray.remote(Engine).remote() for _ in range(2)]
    x = torch.randn(4, 64)
    with ws.connect(trainers=[trainer], engines=engines, source="model", target="model") as sync:
        for _ in range(3):
            ray.get(trainer.step.remote())
            report = sync.update()
            outputs = ray.get([actor.forward.remote(x) for actor in (trainer, *engines)])
            same = all(output == outputs[0] for output in outputs[1:])
            print(f"{report}   engines equal the trainer: {same}")
            assert same
