"""Collect the evidence from trainers and engines: everything that a weight sync does up to its first byte, and no further.

What one party refuses does not keep the others from being looked at. Parties that take part in a weight sync are taken
over, as `connect` does; no weight and no version changes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from weightsync import messages as m
from weightsync.calls import Calls
from weightsync.config import SyncConfig
from weightsync.doctor.evidence import Evidence, Process, Trouble, party_of
from weightsync.errors import WeightSyncError
from weightsync.interfaces import Fleet
from weightsync.links import Links
from weightsync.manifest import Manifest
from weightsync.plan import assign_owners, merge_manifests

_PROBE_BYTES = 32 << 20
R = TypeVar("R")


class Examination:
    """One look at the parties of a fleet. Not thread-safe."""

    def __init__(self, fleet: Fleet, config: SyncConfig) -> None:
        self._fleet, self._config = fleet, config
        self._calls = Calls(fleet, timeout_s=config.timeout_s)
        self._troubles: list[Trouble] = []

    def run(self, *, skip: Iterable[str] = ()) -> Evidence:
        """Everything that can be found out; *skip*: parties that cannot be asked."""
        trainers = [party for party in self._fleet.trainers if party not in skip]
        engines = [party for party in self._fleet.engines if party not in skip]
        parties = [*trainers, *engines]
        try:
            described = self._describe(trainers)
            processes = self._look(parties)
            ready = [party for party in engines if _is_ready(party, processes)]
            complete = len(described) == len(self._fleet.trainers)
            manifest = self._merge(described) if complete else None
            opened = self._open(ready, manifest) if manifest is not None else {}
            owned: list[tuple[str, ...]] = []
            links_s, stable = None, None
            if manifest is not None and opened:
                order = next(iter(opened.values()))[0].order
                owned = assign_owners(manifest, [d.manifest for d in described.values()], order)
                if len(opened) == len(self._fleet.engines):
                    links_s, stable = self._link(manifest, described, owned, opened)
            processes |= self._probe(processes)
        finally:
            self._calls.goodbye(parties, within_s=min(5.0, self._config.timeout_s))
        return Evidence(
            config=self._config,
            processes=processes,
            manifest=manifest,
            loads={rank.load.rank: rank.load for ranks in opened.values() for rank in ranks},
            owned={
                party: sum(manifest.by_name[name].nbytes for name in names) if manifest else 0
                for party, names in zip(described, owned, strict=False)
            },
            links_s=links_s,
            stable=stable,
            troubles=tuple(self._troubles),
        )

    # ---- steps --------------------------------------------------------------------------------------------------

    def _describe(self, trainers: list[str]) -> dict[str, m.Description]:
        """All at once: making what they hold may be collective."""
        answers = self._ask("describe", {party: m.Describe(config=self._config) for party in trainers}, m.Description)
        return {party: answers[party][0] for party in trainers if party in answers}

    def _look(self, parties: list[str]) -> dict[str, Process]:
        answers = self._ask("look", {party: m.Examine() for party in parties}, m.Examined)
        return {
            party if party in self._fleet.trainers else f"{party} rank {reply.rank}": Process(
                identity=reply.identity, facts=reply.facts
            )
            for party in parties
            for reply in answers.get(party, ())
        }

    def _probe(self, processes: Mapping[str, Process]) -> dict[str, Process]:
        """Measure in one trainer and one engine, one after the other: side by side each would look slower than it is."""
        found = {}
        for parties in (self._fleet.trainers, self._fleet.engines):
            party = next((p for p in parties if any(party_of(rank) == p for rank in processes)), None)
            if party is None:
                continue
            answers = self._ask("look", {party: m.Examine(probe_bytes=_PROBE_BYTES)}, m.Examined)
            for reply in answers.get(party, ())[:1]:
                rank = party if party in self._fleet.trainers else f"{party} rank {reply.rank}"
                facts = msgspec.structs.replace(processes[rank].facts, rates=reply.facts.rates)
                found[rank] = Process(identity=processes[rank].identity, facts=facts)
        return found

    def _merge(self, described: Mapping[str, m.Description]) -> Manifest | None:
        try:
            return merge_manifests([description.manifest for description in described.values()])
        except WeightSyncError as error:
            self._note("agree", error.rank or "trainers", error)
            return None

    def _open(self, engines: list[str], manifest: Manifest) -> dict[str, tuple[m.ReceiverOpened, ...]]:
        """With what would be an error later reported only, so that all of it is seen."""
        config = msgspec.structs.replace(self._config, partial="report", unfed="report")
        requests = {
            party: m.OpenReceiver(config=config, manifest=manifest, engine=int(party.rpartition(" ")[2]))
            for party in engines
        }
        return self._ask("open", requests, m.ReceiverOpened)

    def _link(
        self,
        manifest: Manifest,
        described: Mapping[str, m.Description],
        owned: list[tuple[str, ...]],
        opened: Mapping[str, tuple[m.ReceiverOpened, ...]],
    ) -> tuple[float | None, bool | None]:
        """Open every link, for real: (seconds, whether what they carry is stable)."""
        links = Links(self._calls, self._config)
        started = time.perf_counter()
        try:
            links.open(manifest, described, owned, opened)
        except WeightSyncError as error:
            self._note("link", error.rank or "", error)
            return None, None
        return time.perf_counter() - started, links.stable(opened)

    # ---- asking -------------------------------------------------------------------------------------------------

    def _ask(self, step: str, requests: Mapping[str, m.Request], kind: type[R]) -> dict[str, tuple[R, ...]]:
        """The answers of those that gave one; the others' errors are noted."""
        answers: dict[str, tuple[R, ...]] = {}
        outcomes = dict(self._calls.outcomes(requests)) if requests else {}
        for party in requests:  # in the same order each time, whoever answers first
            outcome = outcomes[party]
            if isinstance(outcome, WeightSyncError):
                self._note(step, party, outcome)
                continue
            answers[party] = tuple(reply for reply in outcome if isinstance(reply, kind))
            # Ranks refuse what is older than the last weight sync that they took part in.
            self._calls.epoch = max(self._calls.epoch, *(getattr(reply, "epoch", 0) for reply in outcome))
        return answers

    def _note(self, step: str, party: str, error: WeightSyncError) -> None:
        self._troubles.append(Trouble.of(step, party, error))


def _is_ready(engine: str, processes: Mapping[str, Process]) -> bool:
    """Whether the engine's ranks answered, and none refuses an update."""
    ranks = [process for rank, process in processes.items() if party_of(rank) == engine]
    return bool(ranks) and not any(process.facts.refusal for process in ranks)
