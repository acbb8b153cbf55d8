"""One weight sync from opening to closing: who takes part, over which links, at which version and epoch.

Talks to the parties through a `Fleet`; knows neither Ray nor any engine or transport. One update's steps are
`UpdateMachine`'s; this carries them out, and decides what follows a failure.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from weightsync import messages as m
from weightsync.blame import explain, find_unwell
from weightsync.calls import Calls
from weightsync.chunk import aligned
from weightsync.config import SyncConfig
from weightsync.errors import (
    AgreementError,
    ConfigError,
    DigestError,
    EnginePoisonedError,
    RestartedError,
    StagingLimitError,
    TransportError,
    UpdateTimeoutError,
    WeightSyncError,
)
from weightsync.identity import Identity, check_versions
from weightsync.interfaces import Fleet
from weightsync.links import Links
from weightsync.manifest import Manifest
from weightsync.plan import assign_owners, merge_manifests
from weightsync.report import UpdateReport
from weightsync.summary import summarize
from weightsync.update import Command, UpdateMachine
from weightsync.versions import VersionLog

T = TypeVar("T")

_TICK_S = 0.05
_RETRIABLE = (TransportError, UpdateTimeoutError, DigestError, EnginePoisonedError)


@dataclass(slots=True)
class Engine:
    """An engine that takes part."""

    ranks: tuple[m.ReceiverOpened, ...]
    linked: bool = False
    admitted: bool = False
    """Has committed the last version."""
    poisoned: str = ""
    """Why it holds mixed weights."""


class Session:
    """Owns one weight sync: the parties, their links, the version and the epoch. Not thread-safe."""

    def __init__(self, fleet: Fleet, config: SyncConfig) -> None:
        """Raises ConfigError or EngineStateError where the version log cannot be used."""
        self._config = config
        self._fleet = fleet
        self._calls = Calls(fleet, timeout_s=config.timeout_s)
        self._log = VersionLog(Path(config.version_log) if config.version_log else None)
        self._manifest: Manifest | None = None
        self._trainers: list[m.Description] = []
        self._owned: list[tuple[str, ...]] = []
        self.engines: dict[str, Engine] = {}
        self._links = Links(self._calls, config)
        self._content: dict[tuple[int, str], int] = {}
        """(trainer, transport) -> content digest of the committed version."""
        self._linked = False
        self.version = 0

    @property
    def epoch(self) -> int:
        """Counts how often the links were made anew; messages of an earlier epoch are refused."""
        return self._calls.epoch

    # ---- opening ------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Agree on the manifest, record every load map, connect all links."""
        described = self._calls.ask({party: m.Describe(config=self._config) for party in self._fleet.trainers})
        self._trainers = [_only(described[party], m.Description) for party in self._fleet.trainers]
        self._manifest = merge_manifests([description.manifest for description in self._trainers])
        self._open_engines(*self._fleet.engines)
        check_versions(self._identities())
        ranks = [rank for engine in self.engines.values() for rank in engine.ranks]
        self.version = max(self._log.committed, *(d.version for d in self._trainers), *(r.version for r in ranks))
        for engine in self.engines.values():
            engine.admitted = all(rank.version == self.version and not rank.poisoned for rank in engine.ranks)
        self._calls.epoch = max(self._log.epoch, *(d.epoch for d in self._trainers), *(r.epoch for r in ranks))
        self._owned = assign_owners(self._manifest, [d.manifest for d in self._trainers], ranks[0].order)
        self._relink()

    def _open_engines(self, *parties: str) -> None:
        assert self._manifest is not None
        requests = {
            party: m.OpenReceiver(
                config=self._config,
                manifest=self._manifest,
                engine=int(party.rpartition(" ")[2]),
                decided=self._log.decided,
            )
            for party in parties
        }
        answers = self._calls.ask(requests)
        for party in parties:
            ranks = tuple(reply for reply in answers[party] if isinstance(reply, m.ReceiverOpened))
            poisoned = ", ".join(rank.load.rank for rank in ranks if rank.poisoned)
            self.engines[party] = Engine(ranks, poisoned=f"{poisoned} held mixed weights" if poisoned else "")

    def _relink(self) -> None:
        """Open every link, afresh, in a new epoch."""
        self._calls.epoch += 1
        self._log.write("epoch", version=self._log.decided, epoch=self.epoch)
        self._links = Links(self._calls, self._config, first_id=self._links.next_id)
        self._link(list(self.engines))
        self._linked = True

    def relink_next(self) -> None:
        """Make the links anew at the next update, in a new epoch."""
        self._linked = False

    def _link(self, parties: list[str]) -> tuple[int, ...]:
        """Open links to some engines beside those that are open; returns their ids."""
        assert self._manifest is not None
        ids = self._links.open(
            self._manifest,
            dict(zip(self._fleet.trainers, self._trainers, strict=True)),
            self._owned,
            {party: self.engines[party].ranks for party in parties},
        )
        for party in parties:
            self.engines[party].linked = True
        return ids

    # ---- updating -----------------------------------------------------------------------------------------------

    def update(self) -> UpdateReport:
        """Bring every engine to the next version; see `weightsync.update` for what can happen.

        After a failure: a party that was restarted is opened again, an engine that is gone is left out where the config
        says so, and what a retry can cure is tried again, `retries` times; each time from the start.
        """
        assert self._manifest is not None, "update before open"
        failures: list[str] = []
        lost: list[str] = []
        reopened: set[str] = set()
        retries = self._config.retries
        while True:
            try:
                report = self._attempt(last=retries == 0)
            except WeightSyncError as error:
                unwell = find_unwell(self._identities(), self._fleet.process_state)
                explain(error, unwell, self._identities())
                gone = self._gone(unwell)
                if isinstance(error, RestartedError) and error.rank and error.rank not in reopened:
                    reopened.add(error.rank)
                    self._reopen(error.rank)
                elif gone and self._config.on_lost_engine == "remove" and len(gone) < len(self.engines):
                    for party in gone:
                        self.remove_engine(party)
                    lost += gone
                elif retries and isinstance(error, _RETRIABLE):
                    retries -= 1
                else:
                    raise
                failures.append(str(error))
                continue
            lost += self._drop_dead(report)
            return msgspec.structs.replace(report, failed_attempts=tuple(failures), lost=tuple(lost))

    def _drop_dead(self, report: UpdateReport) -> list[str]:
        """Engines that died while the others took the version, where the config says to go on without them."""
        if not report.poisoned or self._config.on_lost_engine != "remove":
            return []
        gone = [
            party
            for party in self._gone(find_unwell(self._identities(), self._fleet.process_state))
            if party in report.poisoned
        ]
        for party in gone:
            self.remove_engine(party)
        return gone

    def _gone(self, unwell: Mapping[str, str]) -> list[str]:
        """Engines of which some rank's process is gone."""
        return [
            party
            for party, engine in self.engines.items()
            if any(unwell.get(rank.load.rank) == "gone" for rank in engine.ranks)
        ]

    def _reopen(self, party: str) -> None:
        """Take a party in again whose process was restarted.

        Raises:
            AgreementError: a trainer holds other tensors than before.
        """
        self._linked = False
        self._fleet.reopen(party)
        if party in self.engines:
            self._open_engines(party)
            return
        i = list(self._fleet.trainers).index(party)
        described = _only(self._calls.ask({party: m.Describe(config=self._config)})[party], m.Description)
        if described.manifest.digest != self._trainers[i].manifest.digest:
            raise AgreementError(
                f"{party} was restarted and holds other tensors than before; connect again",
                rank=party,
                field="manifest",
            )
        self._trainers[i] = described

    def _attempt(self, *, last: bool) -> UpdateReport:
        started = time.perf_counter()
        phases: dict[str, float] = {}
        if not self._linked:
            self._relink()
        elif late := [party for party, engine in self.engines.items() if not engine.linked]:
            self._link(late)
        connected = time.perf_counter() - started
        if connected > 0.001:
            phases["connect"] = connected
        joining = tuple(party for party, engine in self.engines.items() if not engine.admitted and self.version)
        machine = self._machine(max(self.version, self._log.decided) + 1, list(self.engines))
        self._linked = False  # unless all goes well
        self._drive(machine)
        self._linked = machine.error is None and not machine.poisoned
        self._note_outcome(machine)
        if machine.phase == "failed" and not machine.poisoned:
            assert machine.error is not None
            raise machine.error
        if machine.poisoned and (machine.phase == "failed" or self._config.on_failure == "raise" or not last):
            gone_only = (
                machine.phase != "failed" and self._config.on_lost_engine == "remove" and self._all_gone(machine)
            )
            if not gone_only:
                raise _poisoned_error(machine)
        return self._report(machine, time.perf_counter() - started, joining, phases)

    def _all_gone(self, machine: UpdateMachine) -> bool:
        gone = self._gone(find_unwell(self._identities(), self._fleet.process_state))
        return all(party in gone for party in machine.poisoned)

    def _machine(
        self,
        version: int,
        engines: list[str],
        *,
        links: tuple[int, ...] | None = None,
        expected: Mapping[int, int] | None = None,
    ) -> UpdateMachine:
        assert self._manifest is not None
        senders = {self._links.plan(id).sender for id in links} if links is not None else range(len(self._trainers))
        return UpdateMachine(
            version=version,
            epoch=self.epoch,
            manifest_digest=self._manifest.digest,
            trainers=[party for i, party in enumerate(self._fleet.trainers) if i in senders],
            engines=engines,
            staged=self._staged(engines),
            timeout_s=self._config.timeout_s,
            plan_digests=self._links.digests(self._fleet.trainers, engines),
            links=links,
            expected=expected,
        )

    def _note_outcome(self, machine: UpdateMachine) -> None:
        """What the update has made of the engines."""
        for party, why in machine.poisoned.items():
            self.engines[party].poisoned, self.engines[party].admitted = str(why), False
        if machine.phase == "failed":
            return
        if machine.version > self.version:
            for engine in self.engines.values():
                engine.admitted = False
        self.version = machine.version
        for party in machine.applied.keys() - machine.poisoned.keys():
            self.engines[party].admitted, self.engines[party].poisoned = True, ""
        self._log.write("commit", version=self.version, epoch=self.epoch)
        for sent in machine.sent.values():
            for id, digest in sent.content_digests.items():
                plan = self._links.plan(id)
                self._content[plan.sender, plan.transport] = digest

    def _staged(self, engines: list[str]) -> bool:
        assert self._manifest is not None
        needed = sum(aligned(meta.nbytes) for meta in self._manifest.tensors)
        fits = self._links.stable(engines) or needed <= self._config.staging_limit
        if self._config.apply == "staged" and not fits:
            raise StagingLimitError(
                f"apply: staged needs {needed} bytes of staging on every engine rank, staging_limit_bytes allows "
                f"{self._config.staging_limit}; raise it, or use apply: auto",
                group="(the whole model)",
                needed_bytes=needed,
                limit_bytes=self._config.staging_limit,
            )
        return fits if self._config.apply == "auto" else self._config.apply == "staged"

    def _drive(self, machine: UpdateMachine) -> None:
        """Carry out what the machine asks for until it has finished."""
        commands = machine.start(time.monotonic())
        ticked = 0.0
        while True:
            if machine.decided and self._log.decided < machine.version:
                commands = self._decide(machine, commands)
            for command in commands:
                self._calls.send(command.party, command.request)
            if machine.finished:
                return
            commands = []
            now = time.monotonic()
            if now - ticked > _TICK_S:
                ticked = now
                commands += machine.on_tick(now)
            if commands:
                continue
            for party, replies in self._calls.replies(_TICK_S):
                if any(command.party == party for command in commands):  # superseded, though not sent yet
                    continue
                now = time.monotonic()
                if isinstance(replies, WeightSyncError):
                    commands += machine.on_error(party, replies, now)
                else:
                    commands += machine.on_reply(party, replies, now)

    def _decide(self, machine: UpdateMachine, commands: list[Command]) -> list[Command]:
        """Put the decision on disk before anybody hears of it; where the disk refuses, nothing was decided."""
        try:
            self._log.write(
                "decide",
                version=machine.version,
                epoch=self.epoch,
                manifest_digest=self._manifest.digest,  # type: ignore[union-attr]
            )
        except OSError as error:
            text = f"the version log cannot be written ({error}); version {machine.version} was given up"
            return machine.give_up(WeightSyncError(text), time.monotonic())
        return commands

    # ---- membership ---------------------------------------------------------------------------------------------

    def add_engine(self, party: str) -> UpdateReport | None:
        """Take in an engine that the fleet knows already; the others' links stay as they are.

        Where the trainers still hold the committed version, proven by its digest, the engine is brought to it now and
        admitted with its own commit; returns the report of that. Otherwise it comes in with the next update: None.

        Raises:
            WeightSyncError: it cannot take part; nothing has changed.
        """
        assert self._manifest is not None, "add_engine before open"
        try:
            self._open_engines(party)
            check_versions(self._identities())
            self._calls.epoch = max(self.epoch, *(rank.epoch for rank in self.engines[party].ranks))
            return self._catch_up(party) if self._linked and self.version else None
        except WeightSyncError:
            self._calls.send(party, m.Close())
            self.engines.pop(party, None)
            self._fleet.remove(party)
            raise

    def _catch_up(self, party: str) -> UpdateReport | None:
        started = time.perf_counter()
        engine = self.engines[party]
        if any(rank.version >= self.version for rank in engine.ranks) or not self._config.digest:
            return None
        links = self._link([party])
        plans = [self._links.plan(id) for id in links]
        expected = {
            p.id: self._content[p.sender, p.transport] for p in plans if (p.sender, p.transport) in self._content
        }
        if len(expected) < len(links):  # nothing was ever sent that way, so there is nothing to compare with
            return None
        machine = self._machine(self.version, [party], links=links, expected=expected)
        self._drive(machine)
        if machine.phase == "failed":
            assert machine.error is not None
            self._links.forget(links)
            engine.linked = False
            if isinstance(machine.error, AgreementError) and machine.error.field == "content" and not machine.poisoned:
                return None
            raise machine.error
        self._note_outcome(machine)
        return self._report(machine, time.perf_counter() - started, (party,))

    def remove_engine(self, party: str) -> None:
        """Go on without an engine; the others' links are made anew at the next update.

        Raises:
            ConfigError: it does not take part, or is the only one.
        """
        if party not in self.engines:
            raise ConfigError(f"{party} takes no part; there are {', '.join(self.engines)}", key="engine")
        if len(self.engines) == 1:
            raise ConfigError(f"{party} is the only engine; close the weight sync instead", key="engine")
        self._calls.send(party, m.Close())
        del self.engines[party]
        self._fleet.remove(party)
        self._linked = False

    def _report(
        self, machine: UpdateMachine, seconds: float, joined: tuple[str, ...], phases: Mapping[str, float] | None = None
    ) -> UpdateReport:
        assert self._manifest is not None
        return summarize(
            machine,
            manifest=self._manifest,
            trainers=dict(zip(self._fleet.trainers, (d.identity for d in self._trainers), strict=True)),
            engines={party: engine.ranks for party, engine in self.engines.items()},
            seconds=seconds,
            phases={**(phases or {}), **machine.phases},
            transports=self._links.transports(),
            joined=joined,
        )

    # ---- telling ------------------------------------------------------------------------------------------------

    def _identities(self) -> dict[str, Identity]:
        ranks = {f"trainer {i}": description.identity for i, description in enumerate(self._trainers)}
        return ranks | {rank.load.rank: rank.identity for engine in self.engines.values() for rank in engine.ranks}

    def status(self) -> dict[str, Any]:
        """Plain facts for people: version, epoch, parties, transports, what feeds nothing."""
        loads = [rank.load for engine in self.engines.values() for rank in engine.ranks]
        return {
            "version": self.version,
            "epoch": self.epoch,
            "trainers": len(self._fleet.trainers),
            "engines": {party: len(engine.ranks) for party, engine in self.engines.items()},
            "admitted": [party for party, engine in self.engines.items() if engine.admitted],
            "poisoned": {party: engine.poisoned for party, engine in self.engines.items() if engine.poisoned},
            "transports": self._links.transports(),
            "tensors": len(self._manifest.tensors) if self._manifest else 0,
            "nbytes": self._manifest.nbytes if self._manifest else 0,
            "unmapped": {load.rank: load.unmapped for load in loads},
            "unfed": {load.rank: load.unfed for load in loads},
            "fallback": {load.rank: load.fallback for load in loads},
        }

    def close(self) -> None:
        """Break all links; engines keep serving the version they have."""
        self._linked = False
        parties = {*self._fleet.trainers, *self._fleet.engines}
        for party in parties:
            self._calls.send(party, m.Close())
        deadline = time.monotonic() + min(5.0, self._config.timeout_s)
        while parties and time.monotonic() < deadline:
            parties -= {party for party, _ in self._calls.replies(0.1)}
        self._log.close()


def _only(replies: tuple[m.Reply, ...], kind: type[T]) -> T:
    """The one reply of a party of one rank."""
    (reply,) = replies
    assert isinstance(reply, kind), reply
    return reply


def _poisoned_error(machine: UpdateMachine) -> EnginePoisonedError:
    engine, error = next(iter(machine.poisoned.items()))
    healthy = len(machine.applied.keys() - machine.poisoned.keys()) if machine.phase != "failed" else 0
    poisoned = EnginePoisonedError(
        f"{', '.join(machine.poisoned)} failed while applying version {machine.version} and may hold mixed weights; no "
        f"rollouts from there until a whole update succeeds ({healthy} engines have committed). First failure: {error}",
        rank=error.rank or engine,
        phase=error.phase,
    )
    poisoned.__cause__ = error
    return poisoned
