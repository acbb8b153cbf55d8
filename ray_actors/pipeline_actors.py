"""The actors of a pipeline: a user's trainer, a vLLM engine, a torch engine. Made first, loaded by `build`.

So an error of a constructor comes back as itself, and all ranks load at the same time.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Sequence
from typing import Any

from weightsync.pipeline.check import EXTENSION, resolve
from weightsync.pipeline.trainer import Completion, Rollout, Verdict

Answers = list[tuple[Any, ...]]
"""One tuple of completions a prompt."""


class TrainerActor:
    """One rank of the user's trainer class. weightsync is pointed at `user.weights`."""

    user: Any

    def address(self) -> tuple[str, int]:
        """Where ranks may meet: this node's address, and a port that is free now."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def build(self, path: str, arguments: dict[str, Any], env: dict[str, str]) -> None:
        os.environ.update(env)
        self.user = resolve(path)(**arguments)

    def asks(self) -> bool:
        return hasattr(self.user, "prompts")

    def prompts(self, step: int) -> list[Any]:
        return list(self.user.prompts(step)) if self.asks() else []

    def rewarded(self, rollouts: list[Rollout]) -> list[Rollout]:
        """With `rewards`, where the trainer has `reward`."""
        if not hasattr(self.user, "reward"):
            return rollouts
        return [
            dataclasses.replace(r, rewards=tuple(float(self.user.reward(r.prompt, c)) for c in r.completions))
            for r in rollouts
        ]

    def step(self, step: int, rollouts: list[Rollout]) -> dict[str, float]:
        return _numbers(self.user.step(step, rollouts))

    def evaluates(self) -> bool:
        return hasattr(self.user, "evaluate")

    def evaluate(self, step: int, rollouts: list[Rollout]) -> tuple[dict[str, float], Verdict | None]:
        found = self.user.evaluate(step, rollouts)
        if not isinstance(found, Verdict):
            return _numbers(found), None
        # Plain values: what holds a user's own types may not be readable elsewhere.
        return _numbers(found.metrics), Verdict(ok=bool(found.ok), reasons=tuple(map(str, found.reasons)))


class VllmEngineActor:
    """One vllm.LLM with weightsync's worker extension. weightsync is pointed at `target`."""

    target: Any
    sampling: dict[str, Any]

    def build(self, model: str, arguments: dict[str, Any], sampling: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        SamplingParams(**sampling)  # a wrong one shows now, not after minutes
        self.sampling = sampling
        # In a placement group vLLM would take Ray for its ranks, which allows one GPU a bundle; all of this actor's are in one.
        ranks = {"distributed_executor_backend": "mp"} if arguments.get("tensor_parallel_size", 1) != 1 else {}
        self.target = LLM(**{"model": model, **ranks, **arguments, "worker_extension_cls": EXTENSION})

    def answers(self) -> bool:
        return True

    def rollout(self, prompts: Sequence[Any], seed: int) -> Answers:
        """Answer every prompt; the answers to one are drawn with seed, seed + 1 and so on, and no two share one."""
        from vllm import SamplingParams

        num_samples = self.sampling.get("n", 1)
        params = [SamplingParams(**{"seed": seed + i * num_samples, **self.sampling}) for i in range(len(prompts))]
        if isinstance(prompts[0], list | tuple) and isinstance(prompts[0][0], dict):
            outputs = self.target.chat(list(prompts), params, use_tqdm=False)
        else:
            outputs = self.target.generate([_vllm_prompt(p) for p in prompts], params, use_tqdm=False)
        return [tuple(_completion(completion) for completion in output.outputs) for output in outputs]


class TorchEngineActor:
    """A user's module. weightsync is pointed at `target`."""

    engine: Any
    target: Any
    sampling: dict[str, Any]

    def build(self, path: str, arguments: dict[str, Any], sampling: dict[str, Any]) -> None:
        import torch

        self.sampling = sampling
        self.engine = resolve(path)(**arguments)
        self.target = self.engine if isinstance(self.engine, torch.nn.Module) else getattr(self.engine, "model", None)
        if not isinstance(self.target, torch.nn.Module):
            raise TypeError(
                f"engines.class {path} made {type(self.engine).__name__}; expected an nn.Module, or an object that has "
                "one as its attribute model"
            )

    def answers(self) -> bool:
        return hasattr(self.engine, "rollout")

    def rollout(self, prompts: Sequence[Any], seed: int) -> Answers:
        if not self.answers():
            raise TypeError(
                f"the trainer has prompts, but {type(self.engine).__name__} has no method rollout(prompts, *, seed); "
                "add it to engines.class, or remove prompts from the trainer"
            )
        answers = [tuple(completions) for completions in self.engine.rollout(prompts, seed=seed, **self.sampling)]
        if len(answers) != len(prompts):
            raise ValueError(f"rollout returned {len(answers)} lists of completions for {len(prompts)} prompts")
        return answers


def _vllm_prompt(prompt: Any) -> Any:
    return {"prompt_token_ids": list(prompt)} if isinstance(prompt, list | tuple) else prompt


def _completion(output: Any) -> Completion:
    token_ids = tuple(output.token_ids)
    logprobs = output.logprobs or ()
    return Completion(
        text=output.text,
        token_ids=token_ids,
        logprobs=tuple(at[token].logprob for token, at in zip(token_ids, logprobs, strict=False)),
        finish_reason=output.finish_reason,
    )


def _numbers(metrics: Any) -> dict[str, float]:
    return {str(name): float(value) for name, value in (metrics or {}).items()}
