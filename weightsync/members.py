"""Who takes part in a weight sync: trainer ranks with what they hold, engines with where it lands, and how they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weightsync import messages as m
from weightsync.blame import find_unwell
from weightsync.calls import Calls
from weightsync.config import SyncConfig
from weightsync.errors import AgreementError, ManifestError, TransportError
from weightsync.identity import Identity, check_versions
from weightsync.interfaces import Fleet
from weightsync.manifest import Manifest
from weightsync.plan import assign_owners, merge_manifests
from weightsync.report import LoadSummary
from weightsync.update import UpdateMachine


@dataclass(slots=True)
class Engine:
    """An engine that takes part."""

    ranks: tuple[m.ReceiverOpened, ...]
    linked: bool = False
    admitted: bool = False
    """Has committed the last version."""
    poisoned: str = ""
    """Why it holds mixed weights."""


class Members:
    """The parties as they described themselves. Not thread-safe."""

    def __init__(self, calls: Calls, fleet: Fleet, config: SyncConfig) -> None:
        self._calls, self._fleet, self._config = calls, fleet, config
        self.manifest = Manifest(())
        """Of all trainers together."""
        self.trainers: dict[str, m.Description] = {}
        self.owned: list[tuple[str, ...]] = []
        """Per trainer the names that it sends."""
        self.engines: dict[str, Engine] = {}
        self._restarted: dict[str, bool] = {}
        """Parties to be opened again -> whether there is a new process: False where that one is gone, too."""

    def open(self, *, decided: int) -> None:
        """Ask everybody, and agree on manifest, owners and library versions; *decided*: see `OpenReceiver`."""
        described = self._calls.ask({party: m.Describe(config=self._config) for party in self._fleet.trainers})
        self.trainers = {party: _description(described[party]) for party in self._fleet.trainers}
        manifests = [description.manifest for description in self.trainers.values()]
        self.manifest = merge_manifests(manifests)
        self.open_engines(*self._fleet.engines, decided=decided)
        order = next(iter(self.engines.values())).ranks[0].order
        self.owned = assign_owners(self.manifest, manifests, order)

    def open_engines(self, *parties: str, decided: int) -> None:
        """Have engines record where the manifest lands.

        Raises:
            WeightSyncError: as the ranks say. AgreementError: their libraries differ from the others'.
        """
        requests = {
            party: m.OpenReceiver(
                config=self._config,
                manifest=self.manifest,
                engine=int(party.rpartition(" ")[2]),
                decided=decided,
            )
            for party in parties
        }
        answers = self._calls.ask(requests)
        for party in parties:
            ranks = tuple(reply for reply in answers[party] if isinstance(reply, m.ReceiverOpened))
            poisoned = ", ".join(rank.load.rank for rank in ranks if rank.poisoned)
            if self._config.partial == "error":
                self._check_read(party, ranks)
            self.engines[party] = Engine(ranks, poisoned=f"{poisoned} held mixed weights" if poisoned else "")
        check_versions(self.identities())

    def _check_read(self, party: str, ranks: Sequence[m.ReceiverOpened]) -> None:
        """Raises ManifestError for a tensor of which the engine's ranks together read a part: its shape is another."""
        for name, count in read_too_little(self.manifest, [rank.load for rank in ranks]).items():
            meta = self.manifest.meta_of(name)
            raise ManifestError(
                f"{party} reads {count} of the {meta.numel} elements of {meta}: its loader expects another shape (set "
                "partial: report, if it cuts the tensor on purpose)",
                rank=party,
                name=name,
            )

    def note_restarted(self, party: str) -> None:
        """A party answers that its process was restarted; `reopen` takes it in again."""
        self._restarted[party] = True
        if party in self.engines:
            self.engines[party].admitted = False

    def reopen(self, *, decided: int) -> None:
        """Take parties in again whose processes were restarted.

        Raises:
            WeightSyncError: one cannot be opened; it and those after it are tried again by the next call.
            AgreementError: a trainer holds other tensors than before.
        """
        for party in list(self._restarted):
            self._restarted[party] = True
            try:
                self._fleet.reopen(party)
            except TransportError:
                self._restarted[party] = False
                raise
            if party in self.engines:
                self.open_engines(party, decided=decided)
            else:
                self._describe_again(party)
            del self._restarted[party]

    def _describe_again(self, party: str) -> None:
        described = _description(self._calls.ask({party: m.Describe(config=self._config)})[party])
        if described.manifest.digest != self.trainers[party].manifest.digest:
            raise AgreementError(
                f"{party} was restarted and holds other tensors than before; connect again",
                rank=party,
                field="manifest",
            )
        self.trainers[party] = described

    def remove(self, party: str) -> None:
        """Say goodbye to an engine, which may not hear it."""
        self._calls.send(party, m.Close())
        self.engines.pop(party, None)
        self._restarted.pop(party, None)
        self._fleet.remove(party)

    @property
    def versions(self) -> list[int]:
        """Every rank's."""
        return [described.version for described in self.trainers.values()] + [rank.version for rank in self._ranks()]

    @property
    def epochs(self) -> list[int]:
        """The highest that each rank has heard of."""
        return [described.epoch for described in self.trainers.values()] + [rank.epoch for rank in self._ranks()]

    def admit(self, version: int) -> None:
        """Engines that say that they have *version*, whole, count as admitted."""
        for engine in self.engines.values():
            engine.admitted = all(rank.version == version and not rank.poisoned for rank in engine.ranks)

    def note(self, machine: UpdateMachine, *, is_new: bool) -> None:
        """What an update has made of the engines; *is_new*: to a version that nobody had before."""
        for party, why in machine.poisoned.items():
            self.engines[party].poisoned, self.engines[party].admitted = str(why), False
        if machine.phase == "failed":
            return
        if is_new:
            for engine in self.engines.values():
                engine.admitted = False
        for party in machine.applied.keys() - machine.poisoned.keys():
            self.engines[party].admitted, self.engines[party].poisoned = True, ""

    def identities(self) -> dict[str, Identity]:
        """By rank: "trainer 0", "engine 1 rank 3"."""
        trainers = {party: described.identity for party, described in self.trainers.items()}
        return trainers | {rank.load.rank: rank.identity for rank in self._ranks()}

    def unwell(self) -> dict[str, str]:
        """Ranks whose processes are "gone" or "stopped"; takes a few seconds at most.

        Not those of a party that answers from a new process: which one that is, is known when it has been opened.
        """
        known = {rank: who for rank, who in self.identities().items() if not self._restarted.get(_party(rank))}
        return find_unwell(known, self._fleet.process_state)

    def gone(self, unwell: Mapping[str, str] | None = None) -> list[str]:
        """Engines of which some rank's process is gone."""
        unwell = self.unwell() if unwell is None else unwell
        return [
            party
            for party, engine in self.engines.items()
            if any(unwell.get(rank.load.rank) == "gone" for rank in engine.ranks)
        ]

    def note_gone(self, unwell: Mapping[str, str]) -> None:
        """Nobody that is gone has the last version."""
        for party in self.gone(unwell):
            self.engines[party].admitted = False

    def _ranks(self) -> list[m.ReceiverOpened]:
        return [rank for engine in self.engines.values() for rank in engine.ranks]


def read_too_little(manifest: Manifest, loads: Sequence[LoadSummary]) -> dict[str, int]:
    """Name -> elements that the ranks of one engine read together, for tensors of which they leave some unread."""
    found = {}
    for name in dict.fromkeys(name for load in loads for name in load.read_in_part):
        if any(name not in load.read_in_part and name not in load.unmapped for load in loads):
            continue  # one of them reads it as a whole
        count = sum(load.read_in_part.get(name, 0) for load in loads)
        if count < manifest.meta_of(name).numel:
            found[name] = count
    return found


def _party(rank: str) -> str:
    """ "engine 1 rank 3" is of "engine 1", a trainer is one rank."""
    return rank.partition(" rank ")[0]


def _description(replies: tuple[m.Reply, ...]) -> m.Description:
    """A trainer is one rank."""
    (reply,) = replies
    assert isinstance(reply, m.Description), reply
    return reply
