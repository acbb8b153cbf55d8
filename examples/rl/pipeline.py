"""The demo's trainer and its engine without vLLM, as `weightsync run` wants them.

A trainer improves SmolLM2-135M-Instruct by a small policy-gradient loop on answers from two rollout engines, and
weightsync brings the engines up to date after every step. Two figures tell the story: the reward, which rises, and the
gap between the trainer's and the engines' log-probabilities, which stays at rounding noise.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from examples.rl.engines import TorchEngine
from examples.rl.task import QUESTIONS, Group, Sample, question_numbers, reward
from examples.rl.trainer import Trainer, TrainingStep
from examples.rl.verdict import Row, judge, judge_corruption
from weightsync.pipeline import Completion, Rollout, Verdict

SHOWN_QUESTIONS = 2


def make_model() -> str:
    """Folder of SmolLM2-135M-Instruct, made on the first call."""
    from examples.smollm2 import model_dir

    return str(model_dir())


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


class PipelineTrainer:
    """Asks four questions a step, pays for short answers, measures the gap on all of them, and judges the run by both."""

    def __init__(
        self,
        model: str,
        learning_rate: float = 3e-5,
        questions_per_step: int = 4,
        expect: Literal["learning", "corruption"] = "learning",
    ) -> None:
        from transformers import AutoTokenizer

        if expect not in ("learning", "corruption"):
            raise ValueError(f"expect is {expect!r}; expected learning or corruption")
        self._judge = judge if expect == "learning" else judge_corruption
        self._rows: list[Row] = []
        self._answers: dict[str, list[str]] = {}
        """Question -> an answer to it from each step that asked it."""
        self._trainer = Trainer(
            Path(model), learning_rate=learning_rate, num_threads=len(os.sched_getaffinity(0)), device=_device()
        )
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._per_step = questions_per_step
        self._prompts: list[list[int]] = [
            list(
                self._tokenizer.apply_chat_template(
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
        return self._seen(step, rollouts, self._trainer.step(_groups(rollouts)))

    def evaluate(self, step: int, rollouts: Sequence[Rollout]) -> Verdict:
        metrics = self._seen(step, rollouts, self._trainer.step(_groups(rollouts), train=False))
        verdict = self._judge(self._rows)
        changed = [
            f"{question} first: {answers[0]!r}, last: {answers[-1]!r}"
            for question, answers in list(self._answers.items())[:SHOWN_QUESTIONS]
        ]
        return Verdict(ok=verdict.ok, reasons=(*changed, *verdict.reasons), metrics=metrics)

    def weights(self) -> torch.nn.Module:
        """The bf16 module: it is what the trainer computes with."""
        module: torch.nn.Module = self._trainer.model
        return module

    def _seen(self, step: int, rollouts: Sequence[Rollout], trained: TrainingStep) -> dict[str, float]:
        """Keep what the verdict is made of; returns the step's metrics."""
        rewards = [value for rollout in rollouts for value in rollout.rewards]
        gaps = trained.gap.by_engine()
        self._rows.append(
            Row(step=step, version=rollouts[0].version, reward=sum(rewards) / len(rewards), gap_by_engine=gaps)
        )
        for rollout in rollouts:
            text = self._tokenizer.decode(rollout.completions[0].token_ids, skip_special_tokens=True).strip()
            self._answers.setdefault(QUESTIONS[self._prompts.index(rollout.prompt)], []).append(text)
        lengths = [len(completion.token_ids) for rollout in rollouts for completion in rollout.completions]
        return {
            "gap": trained.gap.mean(),
            **{f"gap {engine}": gap for engine, gap in gaps.items()},
            "tokens": sum(lengths) / len(lengths),
            "grad_norm": trained.grad_norm,
        }


class PipelineTorchEngine:
    """A transformers model and a sampling loop."""

    def __init__(self, model: str) -> None:
        self._engine = TorchEngine(Path(model), device=_device())
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
