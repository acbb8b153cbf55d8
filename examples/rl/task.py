"""What the policy is asked and what it is paid for: short answers that end by themselves.

Pure: no model, no Ray. A reward that a few lines of arithmetic can check leaves
no room for a demo that only looks as if it learned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Half of these get a short answer now and then from the untrained model, half
# never do: the first half gives the loop something to learn from at once.
QUESTIONS: tuple[str, ...] = (
    "What is the capital of France?",
    "What is the ocean?",
    "How many legs does a spider have?",
    "Why is the sky blue?",
    "Name a planet.",
    "What is the sun?",
    "What is 2 plus 2?",
    "What is bread made of?",
)
MAX_NEW_TOKENS = 32
FULL_REWARD_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer, as the engine produced it."""

    engine: int
    """Which engine sampled it; a gap on one engine alone must not hide in a mean."""
    token_ids: tuple[int, ...]
    """The answer's tokens, the end-of-answer token included."""
    logprobs: tuple[float, ...]
    """The engine's own log-probability of each token, at temperature 1."""
    ended: bool
    """The policy ended the answer itself; False when it was cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All answers to one question; GRPO compares an answer with the others of its group."""

    prompt_ids: tuple[int, ...]
    samples: tuple[Sample, ...]


def reward(sample: Sample) -> float:
    """1 for an answer that ends by itself within 16 tokens, falling to 0 at 32; 0 when cut off.

    The end-of-answer token counts. It alone is no answer and earns nothing.
    """
    num_tokens = len(sample.token_ids)
    if not sample.ended or num_tokens < 2:
        return 0.0
    fall = (MAX_NEW_TOKENS - num_tokens) / (MAX_NEW_TOKENS - FULL_REWARD_TOKENS)
    return min(1.0, max(0.0, fall))


def advantages(rewards: Sequence[float]) -> list[float]:
    """Reward minus group mean, over the group's standard deviation.

    A group whose rewards are all equal says nothing about which answer was
    better: all its advantages are exactly 0, so that its backward pass can be left out.
    """
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    if deviation < 1e-6:
        return [0.0] * len(rewards)
    return [(r - mean) / deviation for r in rewards]


def question_numbers(step: int, *, per_step: int) -> list[int]:
    """The questions of *step*: the list is taken in turn, *per_step* at a time."""
    first = step * per_step
    return [(first + i) % len(QUESTIONS) for i in range(per_step)]
