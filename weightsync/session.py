"""One weight sync from opening to closing: who takes part, over which links, at which version and epoch.

Talks to the parties through a `Fleet`; knows neither Ray nor any engine or transport. One update's steps are
`UpdateMachine`'s; this carries them out, and decides what follows a failure.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from weightsync.blame import explain
from weightsync.calls import Calls
from weightsync.chunk import aligned
from weightsync.config import SyncConfig
from weightsync.drive import drive
from weightsync.errors import (
    AgreementError,
    ConfigError,
    DigestError,
    EnginePoisonedError,
    EngineStateError,
    RestartedError,
    StagingLimitError,
    TransportError,
    UpdateTimeoutError,
    WeightSyncError,
)
from weightsync.flight import Flight
from weightsync.interfaces import Fleet
from weightsync.links import Links
from weightsync.members import Engine, Members
from weightsync.report import Attempt, Progress, UpdateReport
from weightsync.summary import summarize
from weightsync.unchanged import LeavingOut
from weightsync.update import UpdateMachine
from weightsync.versions import VersionLog

_RETRIABLE = (TransportError, UpdateTimeoutError, DigestError, EnginePoisonedError)


class Session:
    """Owns one weight sync: the parties, their links, the version and the epoch. Not thread-safe."""

    def __init__(self, fleet: Fleet, config: SyncConfig) -> None:
        """Raises ConfigError or EngineStateError where the version log cannot be used."""
        self._config = config
        self._fleet = fleet
        self._calls = Calls(fleet, timeout_s=config.timeout_s)
        self._log = VersionLog(Path(config.version_log) if config.version_log else None)
        self._members = Members(self._calls, fleet, config)
        self._links = Links(self._calls, config)
        self._content: dict[tuple[int, str], int] = {}
        """(trainer, transport or what was taken of its shards) -> content digest of the committed version."""
        self._leaving_out: LeavingOut | None = None
        self._uniform: tuple[int, int] | None = None
        """The (version, epoch) that an update has brought to everybody, without a failure."""
        self._linked = False
        self._flight = Flight()
        self.version = 0

    @property
    def engines(self) -> dict[str, Engine]:
        """By name; those that take part."""
        return self._members.engines

    @property
    def epoch(self) -> int:
        """Counts how often the links were made anew; messages of an earlier epoch are refused."""
        return self._calls.epoch

    # ---- opening ------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Agree on the manifest, record every load map, connect all links."""
        self._members.open(decided=self._log.decided)
        self.version = max(self._log.committed, *self._members.versions)
        self._members.admit(self.version)
        self._calls.epoch = max(self._log.epoch, *self._members.epochs)
        self._relink()

    def _relink(self) -> None:
        """Open every link, afresh, in a new epoch."""
        self._calls.epoch += 1
        self._write("epoch", self._log.decided)
        self._links = Links(self._calls, self._config, first_id=self._links.next_id)
        self._link(list(self.engines))
        self._linked = True

    def relink_next(self) -> None:
        """Make the links anew at the next update, in a new epoch."""
        self._linked = False

    def _link(self, parties: list[str]) -> tuple[int, ...]:
        """Open links to some engines beside those that are open; returns their ids."""
        ids = self._links.open(
            self._members.manifest,
            self._members.trainers,
            self._members.owned,
            {party: self.engines[party].ranks for party in parties},
        )
        for party in parties:
            self.engines[party].linked = True
        if self._config.skip_unchanged:
            groups = (rank.groups for engine in self.engines.values() for rank in engine.ranks)
            self._leaving_out = LeavingOut(self._members.manifest, groups)
        return ids

    # ---- updating -----------------------------------------------------------------------------------------------

    def update(self) -> UpdateReport:
        """Bring every engine to the next version; see `weightsync.update` for what can happen.

        After a failure: a party that was restarted is opened again (where that fails, by the next update), an engine
        that is gone is left out where the config says so, and what a retry can cure is tried again, `retries` times; each
        time from the start. Where some trainers were restarted and others were not, that is an AgreementError, once.
        """
        failures: list[str] = []
        lost: list[str] = []
        attempts: list[Attempt] = []
        restarted: set[str] = set()
        retries = self._config.retries
        while True:
            self._flight = Flight()
            try:
                self._members.reopen(decided=self._log.decided)
                report = self._attempt(last=retries == 0, restarted=restarted)
            except WeightSyncError as error:
                attempts.append(self._look_into(error))
                error.attempts = tuple(attempts)
                if isinstance(error, RestartedError) and error.rank and error.rank not in restarted:
                    restarted.add(error.rank)
                    self._linked = False
                    self._members.note_restarted(error.rank)
                elif dropped := self._drop_lost():
                    lost += dropped
                elif retries and isinstance(error, _RETRIABLE):
                    retries -= 1
                else:
                    raise
                failures.append(str(error))
                continue
            if report.poisoned:
                lost += self._drop_lost()
            attempts.append(self._flight.record())
            return msgspec.structs.replace(
                report, failed_attempts=tuple(failures), lost=tuple(lost), attempts=tuple(attempts)
            )

    def verify(self) -> UpdateReport:
        """Send the committed version once more, and have every engine rank compare what a reload of it makes with what it held.

        Costs an update by a reload. The version stays.

        Raises:
            EngineStateError: there is no version, an engine does not hold it, or one cannot show what it holds.
            AgreementError: the trainers do not hold that version any more; nothing has changed.
            EnginePoisonedError: an engine held something else; a later update repairs that.
            WeightSyncError: as `update`; it is not tried again.
        """
        self._flight = Flight()
        try:
            self._members.reopen(decided=self._log.decided)
            late = [party for party, engine in self.engines.items() if not engine.admitted or engine.poisoned]
            if late or not self.version:
                what = (
                    f"{', '.join(late)} does not hold version {self.version}"
                    if self.version
                    else "there is no version yet"
                )
                raise EngineStateError(f"nothing can be verified: {what}; update first")
            report = self._attempt(last=False, verify=True)
        except WeightSyncError as error:
            error.attempts = (self._look_into(error),)
            raise
        return msgspec.structs.replace(report, attempts=(self._flight.record(),))

    def _look_into(self, error: WeightSyncError) -> Attempt:
        """What has failed, with whose process is to blame."""
        self._flight.end()
        unwell = self._members.unwell()
        explain(error, unwell, self._members.identities())
        self._members.note_gone(unwell)
        return self._flight.record(error)

    def _drop_lost(self) -> list[str]:
        """Leave engines out whose process is gone, where the config says so; not the last one."""
        gone = self._members.gone() if self._config.on_lost_engine == "remove" else []
        if len(gone) == len(self.engines):
            return []
        for party in gone:
            self.remove_engine(party)
        return gone

    def _attempt(self, *, last: bool, verify: bool = False, restarted: Collection[str] = ()) -> UpdateReport:
        started = time.perf_counter()
        phases: dict[str, float] = {}
        if not self._linked:
            self._relink()
        elif late := [party for party, engine in self.engines.items() if not engine.linked]:
            self._linked = False  # unless all goes well
            self._link(late)
            self._linked = True
        connected = time.perf_counter() - started
        if connected > 0.001:
            phases["connect"] = connected
        joining = tuple(party for party, engine in self.engines.items() if not engine.admitted and self.version)
        if verify:
            contents = self._links.contents(self._links.ids)
            expected = {id: self._content[content] for id, content in contents.items() if content in self._content}
            machine = self._machine(
                self.version, list(self.engines), expected=expected, since=self._since(), verify=True
            )
        else:
            version = max(self.version, self._log.decided) + 1
            machine = self._machine(version, list(self.engines), since=self._since(), restarted=restarted)
        self._linked = False  # unless all goes well
        self._drive(machine, connect_s=connected)
        self._linked = machine.error is None and not machine.poisoned
        self._note_outcome(machine)
        if machine.error is not None:
            self._raise(machine, machine.error, last=last)
        return self._report(machine, time.perf_counter() - started, joining, phases)

    def _raise(self, machine: UpdateMachine, error: WeightSyncError, *, last: bool) -> None:
        """What the config makes of an update that failed, for all or for some; returns where a report will do."""
        if not machine.poisoned:
            raise error
        if machine.phase != "failed":
            if self._config.on_lost_engine == "remove" and set(machine.poisoned) <= set(self._members.gone()):
                return
            if self._config.on_failure == "poison" and last:
                return
        raise _poisoned_error(machine)

    def _machine(
        self,
        version: int,
        engines: list[str],
        *,
        links: tuple[int, ...] | None = None,
        expected: Mapping[int, int] | None = None,
        since: int = 0,
        verify: bool = False,
        restarted: Collection[str] = (),
    ) -> UpdateMachine:
        members = self._members
        senders = {self._links.plan(id).sender for id in links} if links is not None else range(len(members.trainers))
        return UpdateMachine(
            version=version,
            epoch=self.epoch,
            manifest_digest=members.manifest.digest,
            trainers=[party for i, party in enumerate(members.trainers) if i in senders],
            engines=engines,
            staged=self._staged(engines, careful=verify or expected is not None),
            timeout_s=self._config.timeout_s,
            plan_digests=self._links.digests(members.trainers, engines),
            links=links,
            expected=expected,
            since=since,
            leaving_out=None if verify else self._leaving_out,
            verify=verify,
            restarted=restarted,
        )

    def _since(self) -> int:
        """The version since which only what has changed must be sent; 0 where a party may not hold it: it is late, was
        poisoned, or an update failed."""
        if not self._config.skip_unchanged:
            return 0
        all_admitted = all(engine.admitted and not engine.poisoned for engine in self.engines.values())
        return self.version if all_admitted and self._uniform == (self.version, self.epoch) else 0

    def _note_outcome(self, machine: UpdateMachine) -> None:
        self._members.note(machine, is_new=machine.version > self.version)
        if machine.error is not None or machine.poisoned:
            self._uniform = None
        elif machine.version > self.version:
            self._uniform = (machine.version, self.epoch)
        if machine.phase == "failed":
            return
        if machine.version > self.version:
            self._content.clear()
        self.version = machine.version
        with contextlib.suppress(WeightSyncError):  # the decision is on disk, which is all that matters after a crash
            self._write("commit", self.version)
        if machine.left_out:  # there is none of the whole
            return
        contents = self._links.contents(self._links.ids)
        for sent in machine.sent.values():
            self._content.update({contents[id]: digest for id, digest in sent.content_digests.items()})

    def _staged(self, engines: list[str], *, careful: bool) -> bool:
        """*careful*: where it can be, so that what the trainers turn out to hold, or one engine to have held, harms no engine."""
        needed = self._links.staging_bytes(
            {party: self.engines[party].ranks for party in engines},
            sum(aligned(meta.nbytes) for meta in self._members.manifest.tensors),
        )
        fits = self._links.stable(engines) or needed <= self._config.staging_limit
        if self._config.apply == "staged" and not fits:
            raise StagingLimitError(
                f"apply: staged needs {needed} bytes of staging on every engine rank, staging_limit_bytes allows "
                f"{self._config.staging_limit}; raise it, or use apply: auto",
                group="(the whole model)",
                needed_bytes=needed,
                limit_bytes=self._config.staging_limit,
            )
        return fits if careful or self._config.apply == "auto" else self._config.apply == "staged"

    def _drive(self, machine: UpdateMachine, *, connect_s: float = 0.0) -> None:
        def note_decision() -> None:
            if self._log.decided < machine.version:  # not where a late engine is brought to what is committed
                self._write("decide", machine.version)

        members = self._members
        self._flight.begin(
            machine,
            epoch=self.epoch,
            manifest_digest=members.manifest.digest,
            nbytes=members.manifest.nbytes,
            links=self._links.rows(members.manifest, machine.engines),
            trainers=machine.trainers,
            engines={party: self.engines[party].ranks for party in machine.engines},
            identities=members.identities(),
            connect_s=connect_s,
        )
        drive(machine, self._calls, note_decision, self._flight)

    def _write(self, event: str, version: int) -> None:
        """Raises WeightSyncError where the log cannot be written."""
        try:
            self._log.write(event, version=version, epoch=self.epoch, manifest_digest=self._members.manifest.digest)
        except OSError as error:
            raise WeightSyncError(f"version_log: {self._config.version_log} cannot be written ({error})") from error

    # ---- membership ---------------------------------------------------------------------------------------------

    def add_engine(self, party: str) -> UpdateReport | None:
        """Take in an engine that the fleet knows already; the others' links stay as they are.

        Where the trainers still hold the committed version, proven by its digest, the engine is brought to it now and
        admitted with its own commit; returns the report of that. Otherwise it comes in with the next update: None.

        Raises:
            WeightSyncError: it cannot take part; nothing has changed.
        """
        try:
            self._members.open_engines(party, decided=self._log.decided)
            self._calls.epoch = max(self.epoch, *(rank.epoch for rank in self.engines[party].ranks))
            return self._catch_up(party) if self._linked and self.version else None
        except WeightSyncError:
            self._members.remove(party)
            raise

    def _catch_up(self, party: str) -> UpdateReport | None:
        started = time.perf_counter()
        self._flight = Flight()
        engine = self.engines[party]
        if any(rank.version >= self.version for rank in engine.ranks) or not self._config.digest:
            return None
        try:
            links = self._link([party])
        except WeightSyncError:
            self._linked = False  # the trainers may hold links that lead nowhere
            raise
        contents = self._links.contents(links)
        expected = {id: self._content[content] for id, content in contents.items() if content in self._content}
        if len(expected) < len(contents):  # nothing was ever sent that way, so there is nothing to compare with
            return None
        machine = self._machine(self.version, [party], links=links, expected=expected)
        self._drive(machine)
        if machine.phase == "failed":
            assert machine.error is not None
            self._links.forget(links)
            engine.linked = False
            if isinstance(machine.error, AgreementError) and machine.error.field == "content" and not machine.poisoned:
                return None
            machine.error.attempts = (self._flight.record(machine.error),)
            raise machine.error
        self._note_outcome(machine)
        report = self._report(machine, time.perf_counter() - started, (party,))
        return msgspec.structs.replace(report, attempts=(self._flight.record(),))

    def remove_engine(self, party: str) -> None:
        """Go on without an engine; the others' links are made anew at the next update.

        Raises:
            ConfigError: it does not take part, or is the only one.
        """
        if party not in self.engines:
            raise ConfigError(f"{party} takes no part; there are {', '.join(self.engines)}", key="engine")
        if len(self.engines) == 1:
            raise ConfigError(f"{party} is the only engine; close the weight sync instead", key="engine")
        self._members.remove(party)
        self._linked = False

    def _report(
        self, machine: UpdateMachine, seconds: float, joined: tuple[str, ...], phases: Mapping[str, float] | None = None
    ) -> UpdateReport:
        return summarize(
            machine,
            manifest=self._members.manifest,
            trainers={party: described.identity for party, described in self._members.trainers.items()},
            engines={party: engine.ranks for party, engine in self.engines.items()},
            seconds=seconds,
            phases={**(phases or {}), **machine.phases},
            transports=self._links.transports(),
            joined=joined,
        )

    # ---- telling ------------------------------------------------------------------------------------------------

    def progress(self) -> Progress:
        """How far the present attempt at an update is; may be called from any thread."""
        return self._flight.progress()

    def status(self) -> dict[str, Any]:
        """Plain facts for people: version, epoch, parties, transports, what feeds nothing."""
        loads = [rank.load for engine in self.engines.values() for rank in engine.ranks]
        return {
            "version": self.version,
            "epoch": self.epoch,
            "trainers": len(self._members.trainers),
            "engines": {party: len(engine.ranks) for party, engine in self.engines.items()},
            "admitted": [party for party, engine in self.engines.items() if engine.admitted],
            "poisoned": {party: engine.poisoned for party, engine in self.engines.items() if engine.poisoned},
            "transports": self._links.transports(),
            "transport_details": self._links.details(),
            "tensors": len(self._members.manifest.tensors),
            "nbytes": self._members.manifest.nbytes,
            "unmapped": {load.rank: load.unmapped for load in loads},
            "unfed": {load.rank: load.unfed for load in loads},
            "fallback": {load.rank: load.fallback for load in loads},
        }

    def close(self) -> None:
        """Break all links; engines keep serving the version they have."""
        self._linked = False
        parties = {*self._fleet.trainers, *self._fleet.engines}
        self._calls.goodbye(parties, within_s=min(5.0, self._config.timeout_s))
        self._log.close()


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
