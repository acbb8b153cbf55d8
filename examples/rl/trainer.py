"""The trainer: a small, honest GRPO-style policy gradient in plain PyTorch.

Once:      fp32 master weights, AdamW's state, and the bf16 module
Per step:  forward and backward on the sampled answers -> fp32 gradients
           -> AdamW moves the masters -> masters rounded into the bf16 module

The bf16 module is what is sent to the engines, and its values are what the trainer
computes with. That matters: at this learning rate many optimiser steps are smaller
than a bf16 step, so a trainer that computed with the unrounded masters would drift
away from engines that hold the rounded weights, although every update was exact.
Where the processor multiplies bf16 slowly, the same rounded values are computed with
in fp32, in a module of their own.

Knows nothing about weightsync: ``model`` is an ordinary attribute.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.backends.cpu import get_cpu_capability

from examples.rl.gap import GapSum
from examples.rl.task import Group, advantages, reward


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """What one step saw and did."""

    gap: GapSum
    """Trainer against engine log-probabilities, before the optimiser moved anything."""
    grad_norm: float
    """Before clipping; 0 when no group told good answers from bad."""
    num_trained_groups: int


class Trainer:
    """Holds the policy and improves it."""

    def __init__(self, model_dir: Path, *, learning_rate: float, num_threads: int, device: str) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(num_threads)
        self.device = torch.device(device)
        self.model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).to(self.device)
        # AVX2 has no product of bf16: torch's is then several times slower than that of fp32.
        is_slow = self.device.type == "cpu" and get_cpu_capability() in ("DEFAULT", "AVX2")
        self._policy: Any = copy.deepcopy(self.model).float() if is_slow else self.model
        # parameters() yields a tied tensor once, so embedding and output head share one master too.
        self.weights: list[torch.nn.Parameter] = list(self._policy.parameters())
        self.masters = [torch.nn.Parameter(w.detach().to(torch.float32, copy=True)) for w in self.weights]
        self.optimizer = torch.optim.AdamW(self.masters, lr=learning_rate, weight_decay=0.0)

    def step(self, groups: Sequence[Group], *, train: bool = True) -> TrainingStep:
        """Measure the gap on all answers and take one policy-gradient step on them.

        The answers are on-policy, so the ratio of GRPO's objective is 1 and what
        remains is ``-advantage * log-prob``, here as the mean over all tokens.

        Args:
            groups: Sampled with the weights that ``model`` holds now; with others the gap means nothing.
            train: False measures only.
        """
        num_tokens = sum(len(s.token_ids) for g in groups for s in g.samples)
        gap, num_trained = GapSum(), 0
        for group in groups:
            weight = advantages([reward(s) for s in group.samples])
            learns = train and any(weight)
            with torch.set_grad_enabled(learns):
                logprobs, mask = self._logprobs(group)
            for row, sample in zip(logprobs.detach().tolist(), group.samples, strict=True):
                gap.add(sample.engine, row[: len(sample.token_ids)], sample.logprobs)
            if learns:
                signal = torch.tensor(weight, device=self.device)[:, None] * mask
                (-(signal * logprobs).sum() / num_tokens).backward()
                self._collect_gradients()
                num_trained += 1
        grad_norm = self._optimizer_step() if num_trained else 0.0
        return TrainingStep(gap=gap, grad_norm=grad_norm, num_trained_groups=num_trained)

    def _logprobs(self, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of each answer token, and the mask of tokens that exist; both [answer, token].

        All rows share one prompt, so padding is needed on the right only.
        """
        num_prompt = len(group.prompt_ids)
        lengths = torch.tensor([len(s.token_ids) for s in group.samples])
        num_answer = int(lengths.max())
        ids = torch.zeros(len(group.samples), num_prompt + num_answer, dtype=torch.long)
        ids[:, :num_prompt] = torch.tensor(group.prompt_ids)
        for row, sample in enumerate(group.samples):
            ids[row, num_prompt : num_prompt + len(sample.token_ids)] = torch.tensor(sample.token_ids)
        mask = torch.arange(num_answer)[None, :] < lengths[:, None]
        ids, mask = ids.to(self.device), mask.to(self.device)

        attention = torch.cat([torch.ones_like(ids[:, :num_prompt]), mask.long()], dim=1)
        # The logits at one position score the token at the next.
        logits = self._policy(input_ids=ids, attention_mask=attention, logits_to_keep=num_answer + 1).logits[:, :-1]
        scores = torch.log_softmax(logits.float(), dim=-1)
        return scores.gather(-1, ids[:, num_prompt:, None]).squeeze(-1), mask

    def _collect_gradients(self) -> None:
        """Add the group's gradients to the masters' fp32 ones: bf16 ones, summed in bf16, would lose bits."""
        for master, weight in zip(self.masters, self.weights, strict=True):
            if weight.grad is None:
                continue
            if master.grad is None:
                master.grad = weight.grad.float()
            else:
                master.grad += weight.grad
            weight.grad = None

    def _optimizer_step(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for master, sent, weight in zip(self.masters, self.model.parameters(), self.weights, strict=True):
                sent.copy_(master)
                if weight is not sent:
                    weight.copy_(sent)
        return float(norm)
