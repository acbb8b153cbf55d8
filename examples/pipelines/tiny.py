"""A trainer and an engine of a few thousand weights: the smallest pair that learns from its rollouts.

The policy chooses one of eight actions for an observation; action `observation % 8` is paid. Nothing of weightsync is
needed in the classes: the methods are all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

ACTIONS = 8
OBSERVATIONS = 32


class Policy(torch.nn.Module):
    """Observation number -> logits; as an engine it answers with sampled actions."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.Sequential(
            torch.nn.Embedding(OBSERVATIONS, 64), torch.nn.Tanh(), torch.nn.Linear(64, ACTIONS)
        )

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(observations)
        return logits

    @torch.no_grad()
    def rollout(self, prompts: Sequence[int], *, seed: int, num_samples: int = 1) -> list[list[int]]:
        """For each prompt, its completions: here an observation, and actions."""
        generator = torch.Generator().manual_seed(seed)
        probabilities = torch.softmax(self(torch.tensor(prompts)), dim=-1)
        actions = torch.multinomial(probabilities, num_samples, replacement=True, generator=generator)
        answers: list[list[int]] = actions.tolist()
        return answers


class Trainer:
    """REINFORCE with a baseline."""

    def __init__(self, lr: float = 0.05, seed: int = 1) -> None:
        self.policy = Policy(seed)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=lr)

    def prompts(self, step: int) -> list[int]:
        return list(range(OBSERVATIONS))

    def reward(self, prompt: int, completion: int) -> float:
        return float(completion == prompt % ACTIONS)

    def step(self, step: int, rollouts: Sequence[Any]) -> dict[str, float]:
        observations = torch.tensor([r.prompt for r in rollouts for _ in r.completions])
        actions = torch.tensor([action for r in rollouts for action in r.completions])
        rewards = torch.tensor([reward for r in rollouts for reward in r.rewards])
        logprobs = torch.log_softmax(self.policy(observations), dim=-1)
        chosen = logprobs.gather(-1, actions[:, None])[:, 0]
        loss = -((rewards - rewards.mean()) * chosen).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item()}

    def weights(self) -> torch.nn.Module:
        return self.policy
