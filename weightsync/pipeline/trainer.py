"""What a pipeline asks of a trainer class, and the rollouts that it gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer of a vLLM engine. (Engines of kind torch answer with whatever their `rollout` returns.)"""

    text: str
    """Empty where the engine has no tokenizer."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The engine's own, one a token; empty unless `engines.sampling` asks for `logprobs`."""
    finish_reason: str | None
    """"stop": it ended by itself. "length": it was cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """All answers to one prompt."""

    prompt: Any
    """As `prompts` returned it."""
    completions: tuple[Any, ...]
    rewards: tuple[float, ...]
    """One a completion; empty where the trainer has no `reward`."""
    engine: int
    version: int
    """Of the weights that answered; 0 is what the engine was loaded with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a run showed what it set out to show; `evaluate` may return one."""

    ok: bool
    """False: the run ends with exit code 1."""
    reasons: tuple[str, ...]
    """Why, in sentences."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """By name, as `step` returns them."""


class Trainer(Protocol):
    """A trainer class: two methods. There is no base class, and nothing to import.

    The class is made once a rank, in a Ray actor, with `trainer.arguments` as keywords, and with `model` where the file
    has one. RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set as under torchrun, so that
    `torch.distributed.init_process_group()` needs no arguments.

    Three more methods are called where they exist; all but `evaluate` on rank 0 alone:

        prompts(step) -> list           what the engines are asked before a step: texts, lists of token ids or of chat
                                        messages for vLLM. Without it there are no rollouts, and `step` gets [].
        reward(prompt, completion) -> float
                                        fills `Rollout.rewards`; the mean is among the metrics.
        evaluate(step, rollouts) -> metrics, or a Verdict
                                        called once, on every rank, with rollouts of the weights of the last update.
                                        Rank 0's verdict is the run's: one that is not ok makes it fail.
    """

    def step(self, step: int, rollouts: Sequence[Rollout]) -> Mapping[str, float] | None:
        """Take training step number *step*, from 0; every rank gets all rollouts, in the order of the prompts.

        Returns:
            Metrics by name; those of rank 0 are shown and recorded.
        """
        ...

    def weights(self) -> Any:
        """What the engines shall have: a module, a mapping of tensors, or (name, tensor) pairs.

        Asked for on every rank at each update. They must not change until the next call of `step`. A rank returns what
        it holds; DTensors are gathered.
        """
        ...
