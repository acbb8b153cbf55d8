"""Trainers and engines for the pipelines of these tests, good and bad."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from weightsync.pipeline import Verdict


def make_module(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.Linear(33, 7))


def hang(folder: Path) -> None:
    """For good, in this process; says that it has come to that, in a file that is whole once it is there."""
    partial = folder / "hangs.partial"
    partial.write_text(str(os.getpid()))
    partial.rename(folder / "hangs")
    time.sleep(600)


class HangingEngine(torch.nn.Module):
    """Hangs where it is told to: in its start, or as its rank applies or commits the second update."""

    def __init__(self, folder: str, where: str, model: str = "") -> None:
        super().__init__()
        if where == "start":
            hang(Path(folder))
        for name, child in make_module(1).named_children():
            self.add_module(name, child)
        if where in ("apply", "commit"):
            from weightsync.receiver import ReceiverRank

            ours = getattr(ReceiverRank, f"_{where}")

            def step(rank: ReceiverRank, version: int) -> Any:
                if version == 2:
                    hang(Path(folder))
                return ours(rank, version)

            setattr(ReceiverRank, f"_{where}", step)


class HangingTrainer:
    """Hangs where it is told to: as the second update gets its weights, half way."""

    def __init__(self, folder: str, where: str, model: str = "") -> None:
        self.folder, self.where, self.steps = Path(folder), where, 0

    def step(self, step: int, rollouts: list[Any]) -> None:
        self.steps = step + 1

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in make_module(self.steps).state_dict().items():
            if self.where == "transfer" and self.steps == 2 and name == "1.weight":
                hang(self.folder)
            yield name, tensor


class Engine(torch.nn.Module):
    """Notes its weights at each rollout, so that a test can compare them with the trainer's."""

    def __init__(self, folder: str, model: str = "") -> None:
        super().__init__()
        for name, child in make_module(1).named_children():
            self.add_module(name, child)
        self.folder = Path(folder)

    def rollout(self, prompts: list[int], *, seed: int, scale: float = 1.0) -> list[list[float]]:
        torch.save({k: v.clone() for k, v in self.state_dict().items()}, self.folder / f"engine-{prompts[0]}.pt")
        return [[prompt * scale] for prompt in prompts]


class Trainer:
    """Moves its weights at random, and notes what it had after each step."""

    def __init__(
        self, folder: str, fail_at: int = -1, hang_at: int = -1, ok: bool | None = None, model: str = ""
    ) -> None:
        self.module = make_module(2)
        self.folder, self.fail_at, self.hang_at, self.ok = Path(folder), fail_at, hang_at, ok

    def prompts(self, step: int) -> list[int]:
        return [2 * step, 2 * step + 1]

    def reward(self, prompt: int, completion: float) -> float:
        return completion

    def step(self, step: int, rollouts: list[Any]) -> dict[str, float]:
        assert [r.prompt for r in rollouts] == self.prompts(step)
        if step == self.fail_at:
            raise ValueError("the loss\nis not finite")
        if step == self.hang_at:
            hang(self.folder)
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.add_(torch.randn_like(parameter))
        torch.save(self.module.state_dict(), self.folder / f"trainer-{step}.pt")
        return {"loss": 1.0 / (step + 1)}

    def evaluate(self, step: int, rollouts: list[Any]) -> Mapping[str, float] | Verdict:
        if self.ok is None:
            return {"loss": 0.0}
        return Verdict(ok=self.ok, reasons=("the loss", f"is <{rollouts[0].version}>"), metrics={"loss": 0.0})

    def weights(self) -> torch.nn.Module:
        return self.module


class Minimal:
    """The two methods, and no more."""

    def step(self, step: int, rollouts: list[Any]) -> None:
        assert rollouts == []

    def weights(self) -> torch.nn.Module:
        return make_module(3)


class NoWeights:
    def step(self, step: int, rollouts: list[Any]) -> None: ...


class NearMiss(Minimal):
    step = None  # type: ignore[assignment]

    def steps(self, step: int, rollouts: list[Any]) -> None: ...


class WrongStep(Minimal):
    def step(self) -> None: ...  # type: ignore[override]


class AsyncStep(Minimal):
    async def step(self, step: int, rollouts: list[Any]) -> None: ...  # type: ignore[override]


def make_path(name: str) -> str:
    return name


a_number = 3
