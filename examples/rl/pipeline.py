"""The demo's trainer as `weightsync run` wants one, and its engine without vLLM."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from examples.rl.task import QUESTIONS, Group, Sample, question_numbers, reward
from examples.rl.trainer import Trainer, TrainingStep
from weightsync.pipeline import Completion, Rollout


def make_model() -> str:
    """Folder of SmolLM2-135M-Instruct, made on the first call."""
    from examples.smollm2 import model_dir

    return str(model_dir())


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


class PipelineTrainer:
    """Asks four questions a step, pays for short answers, and measures the gap on all of them."""

    def __init__(self, model: str, learning_rate: float = 3e-5, questions_per_step: int = 4) -> None:
        from transformers import AutoTokenizer

        self._trainer = Trainer(
            Path(model), learning_rate=learning_rate, num_threads=len(os.sched_getaffinity(0)), device=_device()
        )
        tokenizer = AutoTokenizer.from_pretrained(model)
        self._per_step = questions_per_step
        self._prompts: list[list[int]] = [
            list(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
                )
            )
            for question in QUESTIONS
        ]

    def prompts(self, step: int) -> list[list[int]]:
        return [self._prompts[number] for number in question_numbers(step, per_step=self._per_step)]

    def reward(self, prompt: list[int], completion: Completion) -> float:
        return reward(_sample(completion, engine=0))

    def step(self, step: int, rollouts: Sequence[Rollout]) -> dict[str, float]:
        return _metrics(self._trainer.step(_groups(rollouts)), rollouts)

    def evaluate(self, step: int, rollouts: Sequence[Rollout]) -> dict[str, float]:
        return _metrics(self._trainer.step(_groups(rollouts), train=False), rollouts)

    def weights(self) -> torch.nn.Module:
        """The bf16 module: it is what the trainer computes with."""
        module: torch.nn.Module = self._trainer.model
        return module


class PipelineTorchEngine:
    """A transformers model and a sampling loop."""

    def __init__(self, model: str) -> None:
        from examples.rl.engines import TorchEngine

        self._engine = TorchEngine(0, Path(model), num_threads=1, device=_device())
        self.model = self._engine.model

    def rollout(self, prompts: Sequence[list[int]], *, seed: int, n: int = 8) -> list[list[Completion]]:
        groups = self._engine.sample([tuple(prompt) for prompt in prompts], num_samples=n, seed=seed)
        return [[_completion(sample) for sample in group.samples] for group in groups]


def _completion(sample: Sample) -> Completion:
    return Completion(
        text="",
        token_ids=sample.token_ids,
        logprobs=sample.logprobs,
        finish_reason="stop" if sample.ended else "length",
    )


def _sample(completion: Completion, *, engine: int) -> Sample:
    return Sample(
        engine=engine,
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        ended=completion.finish_reason == "stop",
    )


def _groups(rollouts: Sequence[Rollout]) -> list[Group]:
    return [
        Group(prompt_ids=tuple(r.prompt), samples=tuple(_sample(c, engine=r.engine) for c in r.completions))
        for r in rollouts
    ]


def _metrics(trained: TrainingStep, rollouts: Sequence[Rollout]) -> dict[str, float]:
    lengths = [len(c.token_ids) for r in rollouts for c in r.completions]
    gaps = {f"gap {engine}": gap for engine, gap in trained.gap.by_engine().items()}
    return {"gap": trained.gap.mean(), **gaps, "tokens": sum(lengths) / len(lengths), "grad_norm": trained.grad_norm}
