"""Two plain Ray actors, a trainer and an engine, and one weight sync between them. Runs on a laptop in seconds."""

import ray
import torch

import weightsync as ws


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))


@ray.remote
class Trainer:
    def __init__(self) -> None:
        self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self) -> float:
        x = torch.randn(32, 64)
        loss = self.model(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.model(x)


@ray.remote
class Engine:
    def __init__(self) -> None:
        self.model = make_model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.model(x)


if __name__ == "__main__":
    ray.init(num_cpus=2, object_store_memory=10**8, include_dashboard=False, logging_level="warning")
    trainer, engines = Trainer.remote(), [Engine.remote(), Engine.remote()]
    x = torch.randn(4, 64)
    with ws.connect(trainers=[trainer], engines=engines, source="model", target="model") as sync:
        for _ in range(3):
            loss = ray.get(trainer.step.remote())
            report = sync.update()
            outputs = ray.get([actor.forward.remote(x) for actor in (trainer, *engines)])
            same = all(torch.equal(outputs[0], output) for output in outputs[1:])
            print(f"loss {loss:.4f}   {report}   engines equal the trainer: {same}")
            assert same
