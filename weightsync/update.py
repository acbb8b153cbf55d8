"""One update's state machine, without I/O.

Fed with replies, errors and the time; answers with commands to send. It can be driven by Ray, by a test, or for
thousands of simulated ranks. A party is a trainer rank, or an engine with all its ranks.

    prepare ──▶ transfer ──▶ apply ──▶ commit ──▶ done
       │            │          └─ engines that fail are poisoned; the others commit
       └────────────┴─▶ abort ──▶ failed            (no engine has changed)

With apply "streaming" an engine applies while it receives, so there a failed transfer poisons.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from weightsync import messages as m
from weightsync.errors import (
    AgreementError,
    DigestError,
    EnginePoisonedError,
    UpdateTimeoutError,
    WeightSyncError,
)
from weightsync.unchanged import LeavingOut

POLL_S = 0.02  # how long a party may hold an answer back while nothing happens


class Phase(StrEnum):
    PREPARE = "prepare"
    TRANSFER = "transfer"
    APPLY = "apply"
    COMMIT = "commit"
    ABORT = "abort"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Command:
    """Send *request* to *party*, and give its reply to `on_reply`."""

    party: str
    request: m.Request


class UpdateMachine:
    """Call `start`, then `on_reply`, `on_error` or `on_tick` until `finished`; carry out what each returns.

    A new command to a party supersedes the one before; a reply that still comes to that one must not be fed in.
    """

    def __init__(
        self,
        *,
        version: int,
        epoch: int,
        manifest_digest: str,
        trainers: Sequence[str],
        engines: Sequence[str],
        staged: bool,
        timeout_s: float,
        plan_digests: Mapping[str, str],
        links: tuple[int, ...] | None = None,
        expected: Mapping[int, int] | None = None,
        since: int = 0,
        leaving_out: LeavingOut | None = None,
        verify: bool = False,
        restarted: Collection[str] = (),
    ) -> None:
        """An update of all *engines* to *version*.

        Args:
            plan_digests: of the links that each party must have open.
            links: the trainers send over these only; None: over all.
            expected: link -> content digest. The update then brings late engines to a version that the trainers have
                already: what they send must be that version's content.
            since, leaving_out: what has not changed since this version, which everybody should hold, is not sent; 0, None:
                all is.
            verify: everybody has the version already; the engines are to compare it with what they hold.
            restarted: trainers of which nobody knows yet that they were, among these parties.
        """
        self.version = version
        self.phase = Phase.PREPARE
        self.error: WeightSyncError | None = None
        """Why the update failed; after `commit`, why some engines are poisoned."""
        self.poisoned: dict[str, WeightSyncError] = {}
        self.sent: dict[str, m.Sent] = {}
        self.applied: dict[str, tuple[m.Applied, ...]] = {}
        self.votes: dict[str, tuple[m.Vote, ...]] = {}
        self.pause_s: dict[str, float] = {}
        self.phases: dict[str, float] = {}
        self._epoch = epoch
        self._manifest_digest = manifest_digest
        # Ordered, and quick to look into for thousands.
        self._trainers, self._engines = dict.fromkeys(trainers), dict.fromkeys(engines)
        self.staged = staged
        self._timeout_s = timeout_s
        self._plan_digests, self._links, self._expected = plan_digests, links, expected
        self._since_version, self._leaving_out = since, leaving_out
        self._verify = verify
        self._restarted = [party for party in trainers if party in restarted]
        self._changed: dict[str, bytes] = {}
        """Per trainer, what differs from that version."""
        self._holders: set[str] = set()
        """Engines that hold it."""
        self.left_out, self.left_out_bytes = b"", 0
        """What is not sent; known from the transfer on."""
        self._lost: set[str] = set()
        """Parties that cannot be reached; the silent among them are still told to abort."""
        self._silent: set[str] = set()
        self._applying: set[str] = set()
        """Engines that were told to apply. What came of it, if not all of it, they say in their answer to the abort."""
        self._mixed: set[str] = set()
        """Engines of which some rank holds a part of the new weights, or may."""
        self._waiting: dict[str, float] = {}
        """Party -> when its wait began."""
        self._moved = 0.0
        """When anything was last seen to move in the transfer."""
        self._progress: dict[str, int] = {}
        self._doing: dict[str, str] = {}
        """Party -> what it said that it waits for."""
        self.was_poisoned: set[str] = set()
        """Engines that held mixed weights when the update began."""
        self._answered: dict[str, float] = {}
        self._entered = 0.0

    @property
    def trainers(self) -> list[str]:
        """Those that take part."""
        return list(self._trainers)

    @property
    def engines(self) -> list[str]:
        """Those that are to be brought to the version."""
        return list(self._engines)

    @property
    def finished(self) -> bool:
        return self.phase in (Phase.DONE, Phase.FAILED)

    @property
    def decided(self) -> bool:
        """Every engine that takes part is whole and has voted (staged), or has applied (streaming): from here on the
        version is rolled forward. To be on disk before the commands that come with it are sent."""
        return self.phase in (Phase.APPLY, Phase.COMMIT, Phase.DONE)

    def start(self, now: float) -> list[Command]:
        self._entered = now
        prepare = m.Prepare(version=self.version, staged=self.staged, since=self._since_version, verify=self._verify)
        return self._ask_all((*self._trainers, *self._engines), prepare, now)

    def on_reply(self, party: str, replies: Sequence[m.Reply], now: float) -> list[Command]:
        """*party* answered, one reply a rank."""
        self._answered[party] = now
        if party not in self._waiting or self.finished:
            return []
        if failed := [reply for reply in replies if isinstance(reply, m.Failed)]:
            if any(reply.poisoned for reply in failed):
                self._mixed.add(party)
            return self._on_failure(party, failed[0].error.to_error(), now)
        match self.phase:
            case Phase.PREPARE:
                return self._on_prepared(party, replies, now)
            case Phase.TRANSFER:
                return self._on_transfer(party, replies, now)
            case Phase.APPLY:
                return self._note_applied(party, replies, now)
            case Phase.COMMIT:
                self.pause_s[party] = max((r.pause_s for r in replies if isinstance(r, m.Ok)), default=0.0)
            case Phase.ABORT:
                if party in self._engines and any(isinstance(r, m.Ok) and r.poisoned for r in replies):
                    assert self.error is not None
                    self.poisoned.setdefault(party, self.error)
        return self._done(party, now)

    def on_error(self, party: str, error: WeightSyncError, now: float) -> list[Command]:
        """*party* cannot be reached any more: its process died, or the call itself failed."""
        if party not in self._waiting or self.finished:
            return []
        self._lost.add(party)
        if party in self._applying:
            self._mixed.add(party)
        return self._on_failure(party, error, now)

    def on_tick(self, now: float) -> list[Command]:
        """Call now and then; a party that was silent for `timeout_s` has failed."""
        late = [
            party for party, since in self._waiting.items() if now - self._since(party, since, now) > self._timeout_s
        ]
        # Who does not answer at all is to blame before who answers that nothing moves, and a sender before a receiver.
        late.sort(key=lambda party: (self._answers(party, now), party in self._engines))
        commands: list[Command] = []
        phase = self.phase
        for party in late:
            answers = self._answers(party, now)
            # What answers will do so to the abort that an earlier one of these has brought about; what is silent will not.
            if party in self._waiting and not self.finished and (self.phase is phase or not answers):
                if answers:
                    reason = f"{party} made no progress for {self._timeout_s:g} s in phase {phase}"
                    if party in self._trainers:
                        reason += ": its source or a receiver is stuck"
                    elif sending := [trainer for trainer in self._trainers if trainer in self._waiting]:
                        reason += f": {', '.join(sending)} did not go on sending"
                else:
                    self._silent.add(party)
                    reason = (
                        f"{party} did not answer for {self._timeout_s:g} s in phase {phase}: it is busy in a long "
                        "call, or stuck. An actor must be free while an update runs, or be async"
                    )
                if doing := self._doing.get(party):
                    reason += f"; when last heard, {doing}"
                error = UpdateTimeoutError(reason, rank=party, phase=phase.value)
                commands += self._on_failure(party, error, now) if answers else self.on_error(party, error, now)
        return commands

    def _since(self, party: str, since: float, now: float) -> float:
        """When *party*'s bound began: with its wait, or, for one that answers or cannot while it applies what streams
        in, when anything last moved: bytes over one link keep the other end waiting."""
        applying = party in self._engines and not self.staged and self.phase is Phase.TRANSFER
        return max(since, self._moved) if applying or self._answers(party, now) else since

    def _answers(self, party: str, now: float) -> bool:
        """Whether *party* has answered within the bound."""
        return now - self._answered.get(party, self._entered) < self._timeout_s and party in self._answered

    # ---- phases ---------------------------------------------------------------------------------------------

    def _on_prepared(self, party: str, replies: Sequence[m.Reply], now: float) -> list[Command]:
        for i, reply in enumerate(replies):
            rank = party if party in self._trainers else f"{party} rank {i}"
            assert isinstance(reply, m.Prepared), reply
            for field, theirs, ours in (
                ("epoch", reply.epoch, self._epoch),
                ("manifest_digest", reply.manifest_digest, self._manifest_digest),
                ("plan_digest", reply.plan_digest, self._plan_digests[party]),
            ):
                if theirs != ours:
                    return self._on_failure(
                        party,
                        AgreementError(f"{rank} has {field} {theirs}, the others have {ours}", rank=rank, field=field),
                        now,
                    )
            if reply.poisoned:
                self.was_poisoned.add(party)
            if text := self._misfit(party, rank, reply.version):
                return self._on_failure(party, AgreementError(text, rank=rank, field="version"), now)
            if reply.changed is not None:
                self._changed[party] = reply.changed
        if all(isinstance(reply, m.Prepared) and reply.holds and not reply.poisoned for reply in replies):
            self._holders.add(party)
        return self._done(party, now)

    def _misfit(self, party: str, rank: str, version: int) -> str:
        """Why *rank* of *party* cannot take part at the *version* that it has; "" where it can."""
        if self._verify:
            return (
                "" if version == self.version else f"{rank} is at version {version}, {self.version} is to be verified"
            )
        if version >= self.version and (party in self._engines or self._expected is None):
            return f"{rank} is at version {version} already, the update is to {self.version}"
        return ""

    def _on_transfer(self, party: str, replies: Sequence[m.Reply], now: float) -> list[Command]:
        if party in self._trainers:
            if isinstance(replies[0], m.Sent):
                self.sent[party] = replies[0]
                return self._done(party, now)
            return self._ask(party, m.Poll(wait_s=POLL_S), now, replies)
        if not self.staged:
            if all(isinstance(reply, m.Applied) for reply in replies):
                return self._note_applied(party, replies, now)
            return self._ask(party, m.Apply(version=self.version), now)
        if all(isinstance(reply, m.Vote) for reply in replies):
            self.votes[party] = tuple(r for r in replies if isinstance(r, m.Vote))
            return self._done(party, now)
        return self._ask(party, m.Poll(wait_s=POLL_S), now, replies)

    def _note_applied(self, party: str, replies: Sequence[m.Reply], now: float) -> list[Command]:
        applied = tuple(reply for reply in replies if isinstance(reply, m.Applied))
        assert len(applied) == len(replies), replies
        self.applied[party] = applied
        self.votes[party] = tuple(reply.vote for reply in applied)
        return self._done(party, now)

    def _done(self, party: str, now: float) -> list[Command]:
        """*party* has done its part of the phase; go on with the next when all have."""
        del self._waiting[party]
        return [] if self._waiting else self._advance(now)

    def _advance(self, now: float) -> list[Command]:
        match self.phase:
            case Phase.PREPARE:
                if (error := self._differing_trainers()) is not None:
                    return self._abort(error, now)
                self._enter(Phase.TRANSFER, now)
                self._leave_out()
                # Engines first: a receiver that listens never keeps a sender waiting.
                engines = m.Transfer(version=self.version, wait_s=POLL_S, apply=not self.staged, left_out=self.left_out)
                if not self.staged:
                    self._applying.update(self._engines)
                trainers = m.Transfer(version=self.version, wait_s=POLL_S, links=self._links, left_out=self.left_out)
                return self._ask_all(self._engines, engines, now) + self._ask_all(self._trainers, trainers, now)
            case Phase.TRANSFER:
                error = self._compare_digests()
                if error is not None:
                    return self._abort(error, now)
                if self.staged:
                    self._enter(Phase.APPLY, now)
                    self._applying.update(self._engines)
                    return self._ask_all(self._engines, m.Apply(version=self.version), now)
                return self._commit(now)
            case Phase.APPLY:
                return self._commit(now)
            case Phase.COMMIT:
                self._enter(Phase.DONE, now)
            case Phase.ABORT:
                self._enter(Phase.FAILED, now)
        return []

    def _differing_trainers(self) -> WeightSyncError | None:
        """Trainers that may not hold what the others do, or what is to be verified."""
        if self._restarted and len(self._restarted) < len(self._trainers):
            others = [trainer for trainer in self._trainers if trainer not in self._restarted]
            return AgreementError(
                f"{', '.join(self._restarted)} was restarted and may hold other weights than {', '.join(others)}; see that all "
                "hold those of one step (load its checkpoint), and update again",
                rank=self._restarted[0],
                field="restarted",
            )
        gone_on = [trainer for trainer, changed in self._changed.items() if any(changed)] if self._verify else []
        if gone_on:
            return AgreementError(
                f"{', '.join(gone_on)} does not hold version {self.version} any more", rank=gone_on[0], field="content"
            )
        return None

    def _leave_out(self) -> None:
        """Where everybody is known to hold the version before: what has not changed since."""
        known = self._changed.keys() == self._trainers.keys() and self._holders >= self._engines.keys()
        if known and self._leaving_out is not None:
            self.left_out, self.left_out_bytes = self._leaving_out.choose(self._changed.values())

    def _compare_digests(self) -> WeightSyncError | None:
        """Whether every rank holds what was sent over its links, and, for a late engine, what was meant to be."""
        sent = {
            link: (trainer, digest)
            for trainer, reply in self.sent.items()
            for link, digest in reply.content_digests.items()
        }
        for link, digest in (self._expected or {}).items():
            trainer, found = sent.get(link, ("nobody", 0))
            if found != digest:
                return AgreementError(
                    f"{trainer} does not hold version {self.version} any more (content {found:016x}, committed "
                    f"{digest:016x})",
                    rank=trainer,
                    field="content",
                )
        for party, votes in self.votes.items():
            for i, vote in enumerate(votes):
                for link, held in vote.content_digests.items():
                    trainer, digest = sent.get(link, ("nobody", 0))
                    if held != digest:
                        rank = f"{party} rank {i}"
                        return DigestError(
                            f"{rank} holds {held:016x} of {trainer}, which sent {digest:016x}", rank=rank
                        )
        return None

    def _commit(self, now: float) -> list[Command]:
        healthy = [engine for engine in self._engines if engine in self.applied and engine not in self.poisoned]
        if not healthy:
            return self._abort(self.error or EnginePoisonedError("no engine applied the update"), now)
        self._enter(Phase.COMMIT, now)
        # An engine that did not apply must not go on with the old version beside the others.
        abort = m.Abort(hold=True)
        told = [Command(engine, abort) for engine in self._engines if engine in self._silent]
        broken = [engine for engine in self.poisoned if engine not in self._lost]
        committing = (*healthy, *(t for t in self._trainers if t not in self._lost))
        commit = m.Commit(version=self.version)
        return told + self._ask_all(committing, commit, now) + self._ask_all(broken, abort, now)

    def give_up(self, error: WeightSyncError, now: float) -> list[Command]:
        """End the update with *error*, which happened on the coordinator's side, before anybody heard of a decision."""
        if self.staged:
            self._applying.clear()  # the commands to apply were not sent
        return self._abort(error, now)

    # ---- failure --------------------------------------------------------------------------------------------

    def _on_failure(self, party: str, error: WeightSyncError, now: float) -> list[Command]:
        error.phase = error.phase or self.phase.value
        if error.rank is None:
            error.rank = party
            error.args = (f"{party}: {error}",)
        if self.phase is Phase.ABORT:
            if party in self._applying or party in self._mixed:  # it does not say that nothing came of it
                self.poisoned.setdefault(party, self.error or error)  # the first failure is the cause
            return self._done(party, now)
        applying = self.phase is Phase.APPLY or (self.phase is Phase.COMMIT and party in self._engines)
        if applying:
            self.error = self.error or error
            self.poisoned.setdefault(party, error)  # the first failure is the cause
            return self._done(party, now)
        if self.phase is Phase.COMMIT:  # every engine has the version; a trainer that is gone cannot take it back
            return self._done(party, now)
        return self._abort(error, now)

    def _abort(self, error: WeightSyncError, now: float) -> list[Command]:
        self.error = error
        error.phase = error.phase or self.phase.value
        # Whoever else has applied a part says so in its answer to the abort.
        self._mixed.update(self.applied)
        self.poisoned = {engine: self.poisoned.get(engine, error) for engine in self._engines if engine in self._mixed}
        self._enter(Phase.ABORT, now)
        abort = m.Abort(links=self._links)
        self._waiting.clear()
        told = [Command(party, abort) for party in self._silent]
        parties = [p for p in (*self._trainers, *self._engines) if p not in self._lost]
        if not parties:
            self._enter(Phase.FAILED, now)
        return told + self._ask_all(parties, abort, now)

    # ---- helpers --------------------------------------------------------------------------------------------

    def _enter(self, phase: Phase, now: float) -> None:
        self.phases[self.phase.value] = now - self._entered
        self.phase, self._entered = phase, now

    def _ask_all(self, parties: Iterable[str], request: m.Request, now: float) -> list[Command]:
        parties = list(parties)
        self._waiting.update(dict.fromkeys(parties, now))
        return [Command(party, request) for party in parties]

    def _ask(self, party: str, request: m.Request, now: float, replies: Sequence[m.Reply] = ()) -> list[Command]:
        """Ask again; notes when the party's progress moved."""
        self._doing[party] = "; ".join(
            (f"rank {i} " if len(replies) > 1 else "it ") + reply.doing
            for i, reply in enumerate(replies)
            if isinstance(reply, m.Pending) and reply.doing
        )
        progress = sum(reply.progress for reply in replies if isinstance(reply, m.Pending))
        if progress != self._progress.get(party, 0):
            self._progress[party], self._moved = progress, now
        if not replies:
            self._waiting[party] = now
        return [Command(party, request)]
