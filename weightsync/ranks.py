"""Who has which number: ranks of an engine's workers, receivers of a link, members of its process group. Pure functions.

engine     data-parallel replicas, each of pipeline x tensor workers: rank = (data * pipelines + pipeline) * tensors + tensor
link       receivers 0, 1, ...: engine by engine in the order in which they take part, in each by rank
group      the sender is 0, receiver i is i + 1
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SENDER = 0
"""The sender's rank in a link's group."""


def rank_in_engine(replica: int, worker: int, world_size: int) -> int:
    """Of the worker number *worker* among the *world_size* of a data-parallel replica, as vLLM counts them."""
    return replica * world_size + worker


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """How an engine's workers are laid out; data-parallel outermost, tensor-parallel innermost, as in vLLM."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1

    @property
    def world_size(self) -> int:
        """Workers of one replica."""
        return self.pipeline * self.tensor

    @property
    def size(self) -> int:
        return self.data * self.world_size

    def rank(self, data: int, pipeline: int, tensor: int) -> int:
        return rank_in_engine(data, pipeline * self.tensor + tensor, self.world_size)

    def place(self, rank: int) -> tuple[int, int, int]:
        """(data, pipeline, tensor) of a rank."""
        replica, worker = divmod(rank, self.world_size)
        return (replica, *divmod(worker, self.tensor))


def receivers(engines: Mapping[str, Iterable[int]]) -> tuple[tuple[str, int], ...]:
    """(engine, rank in it) of receiver 0, 1, ... of a link to these ranks of these engines."""
    return tuple((engine, rank) for engine, ranks in engines.items() for rank in sorted(ranks))


def group_rank(receiver: int) -> int:
    """In the link's group, of which the sender is the first."""
    return receiver + 1


def receiver_of(rank: int) -> int | None:
    """Which receiver has *rank* in the link's group; None: it is the sender's."""
    return None if rank == SENDER else rank - 1
