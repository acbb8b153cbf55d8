"""All that is known about a weight sync before its first byte. Checks are functions of this, and of nothing else."""

from __future__ import annotations

import contextlib
from functools import cached_property

import msgspec

from weightsync.config import SyncConfig
from weightsync.doctor.facts import ProcessFacts
from weightsync.errors import ConfigError, WeightSyncError
from weightsync.identity import Identity
from weightsync.manifest import Manifest
from weightsync.plan import choose_transport, choose_transports, count_readers, may_take_shards
from weightsync.registry import carrier_of
from weightsync.report import LoadSummary


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """A step that a party refused, or could not do. What follows from it is not known."""

    step: str
    """ "reach", "look", "describe", "agree", "open", "link"."""
    party: str
    kind: str
    """Name of the error's class."""
    message: str

    @classmethod
    def of(cls, step: str, party: str, error: WeightSyncError) -> Trouble:
        return cls(step=step, party=party, kind=type(error).__name__, message=str(error))


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's process."""

    identity: Identity
    facts: ProcessFacts


class ActorFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A party as the actor that it is."""

    answered_s: float = 0.0
    """How long a call that does nothing took."""
    threaded: bool = False
    """Runs several calls at once, in threads."""
    is_async: bool = False
    blocks: bool = True
    """Generates within a call: a module or a vllm.LLM. An AsyncLLM goes on meanwhile."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    config: SyncConfig = SyncConfig()
    processes: dict[str, Process] = {}
    """By rank: "trainer 0", "engine 1 rank 3"."""
    manifest: Manifest | None = None
    """Of all trainers together; None where they disagree, or one has none."""
    loads: dict[str, LoadSummary] = {}
    """Engine rank -> where the manifest lands."""
    owned: dict[str, int] = {}
    """Trainer -> bytes that it sends."""
    links_s: float | None = None
    """How long it took to open all links; None where that was not tried, or went wrong."""
    stable: bool | None = None
    """Engines may read what comes where it lies, so that they copy nothing before the vote."""
    actors: dict[str, ActorFacts] = {}
    """By party: "trainer 0", "engine 1"."""
    colocated: tuple[tuple[str, str], ...] = ()
    """(trainer, engine): who was meant to share a GPU."""
    troubles: tuple[Trouble, ...] = ()

    @property
    def trainers(self) -> dict[str, Process]:
        return {rank: process for rank, process in self.processes.items() if rank.startswith("trainer ")}

    @property
    def engines(self) -> dict[str, Process]:
        return {rank: process for rank, process in self.processes.items() if rank.startswith("engine ")}

    @property
    def senders(self) -> dict[str, Process]:
        """Trainers that send something; all, as long as that is not known, and where slices are sent."""
        slices = False
        with contextlib.suppress(ConfigError):  # of an unknown transport, which is said elsewhere
            slices = may_take_shards(self.config)
        return {rank: process for rank, process in self.trainers.items() if slices or self.owned.get(rank, 1)}

    @cached_property
    def transports(self) -> dict[tuple[str, str], str]:
        """(trainer, engine rank) -> the transport that the config and the places lead to; "" where none fits."""
        receivers = {rank: process.identity for rank, process in self.engines.items()}
        try:
            found = choose_transports(self.config, [of.identity for of in self.senders.values()], receivers)
        except ConfigError:
            return {
                (sender, receiver): self._transport(of.identity, to)
                for sender, of in self.senders.items()
                for receiver, to in receivers.items()
            }
        return {
            (sender, receiver): found[i, receiver] for i, sender in enumerate(self.senders) for receiver in receivers
        }

    @cached_property
    def carriers(self) -> dict[tuple[str, str], str]:
        """The same pairs -> by which transport bytes move there: sharded_cuda_ipc moves them as cuda_ipc does."""
        return {pair: name and carrier_of(name) for pair, name in self.transports.items()}

    def readers(self, sender: Identity) -> int:
        """How many other GPUs of its host the sender's weights are for."""
        return count_readers(sender, (process.identity for process in self.engines.values()))

    def _transport(self, sender: Identity, receiver: Identity) -> str:
        try:
            return choose_transport(self.config, sender, receiver, readers=self.readers(sender))
        except ConfigError:
            return ""


def party_of(rank: str) -> str:
    """ "engine 1 rank 3" is of "engine 1"; a trainer is one rank."""
    return rank.partition(" rank ")[0]
