"""What no loss, delay, repetition, death or order of messages may break, over simulated ranks in virtual time.

`World` draws what becomes of each call and looks after each whether something has happened that never may; `Story` is a
training loop that updates through it, and then once more while nothing happens.
"""

from __future__ import annotations

import errno
import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from weightsync import messages as m
from weightsync.config import SyncConfig
from weightsync.errors import AgreementError, ErrorInfo, TransportError, UpdateTimeoutError, WeightSyncError
from weightsync.session import Session
from weightsync.testing.simulated_engine import SimulatedEngine
from weightsync.testing.simulation import Fate, SimulatedFleet, Simulation, virtual_time
from weightsync.update import Command, Phase, UpdateMachine

TIMEOUT_S = 1.0
ROUNDS = 2
UPDATING: list[type] = [m.Prepare, m.Transfer, m.Poll, m.Apply, m.Commit, m.Abort]
KINDS: list[type] = [*UPDATING, *UPDATING, m.OpenSender, m.OpenReceiver, m.Connect, m.Describe]
OPENING = m.Describe | m.OpenReceiver
SECONDS = (0.02, 0.3, 0.95, 1.5, 3.0)
FATES = [
    Fate(delays_s=()),
    Fate(answer_s=None),
    *(Fate(delays_s=(s,)) for s in SECONDS),
    *(Fate(answer_s=s) for s in SECONDS),
    *(Fate(delays_s=(0.001, s)) for s in SECONDS),
    *(Fate(stops_s=s) for s in SECONDS),
    *(Fate(flaw=flaw) for flaw in ("fails", "fails", "stalls", "garbles", "unsure")),
    *(Fate(damaged=what) for what in ("call", "answer")),
    *(Fate(dies=when, restarts=restarts) for when in ("before", "after") for restarts in (True, False)),
]

Fault = tuple[int, int, type, Fate]
"""(round, whose, which call, what becomes of the first such)"""
Faults = st.lists(
    st.tuples(st.integers(0, ROUNDS - 1), st.integers(0, 15), st.sampled_from(KINDS), st.sampled_from(FATES)),
    min_size=2,
    max_size=8,
)
Configs = st.fixed_dictionaries(
    {
        "apply": st.sampled_from(["staged", "streaming"]),
        "retries": st.integers(0, 1),
        "on_failure": st.sampled_from(["raise", "poison"]),
        "on_lost_engine": st.sampled_from(["raise", "remove"]),
    }
)


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, Any]:
    """Up to 16 ranks."""
    trainers = draw(st.integers(1, 8))
    engines = draw(st.lists(st.integers(1, 4), min_size=1, max_size=8).filter(lambda w: sum(w) + trainers <= 16))
    return {"trainers": trainers, "engines": engines}


examples = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


class CoordinatorDied(BaseException):
    """In the middle of an update."""


@dataclass(slots=True)
class Heard:
    """What a party was told last, by this test's own reckoning."""

    session: str = ""
    number: int = 0
    epoch: int = 0
    retired: set[str] = field(default_factory=set)

    def is_stale(self, call: m.Call) -> bool:
        opening = isinstance(call.request, OPENING)
        if call.session in self.retired or (call.session != self.session and not opening):
            return True
        return call.session == self.session and (
            call.number <= self.number or (call.epoch < self.epoch and not opening)
        )

    def note(self, call: m.Call) -> None:
        if call.session != self.session:
            self.retired.add(self.session)
            self.session = call.session
        self.number, self.epoch = call.number, max(self.epoch, call.epoch)


class World(Simulation):
    """Draws fates, and looks after each call whether something has happened that never may."""

    def __init__(self, faults: list[Fault], seed: int, *, staged: bool, log: Path | None = None, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.round = self.calls = 0
        self.ends_by = 1e9
        """What is under way must have ended by then."""
        self.decided: dict[int, list[dict[int, int]]] = {}
        """Version -> contents for which it was decided; several only where a coordinator forgot that it had."""
        self.interrupt: tuple[int, int, Callable[[], None]] | None = None
        """(round, how many calls before, what then)."""
        self.stopped = False
        """Some process, for a while."""
        self.late_opening = False
        """A first call came late, perhaps after that of the next weight sync, which it then ends."""
        self._faults, self._random, self._staged, self._log = list(faults), random.Random(seed), staged, log
        self._calls_in_round = 0
        self._zombies: set[str] = set()
        self._seen: dict[SimulatedEngine, tuple[Any, ...]] = {}
        self._heard: dict[object, Heard] = {}
        self._prepared: dict[str, m.Call] = {}
        self._voted: set[str] = set()
        self._sent: dict[int, int] = {}

    def begin(self, round: int) -> None:
        self.round, self._calls_in_round = round, 0

    def names(self, kind: str) -> list[str]:
        return [name for name in self._processes if name.startswith(kind)]

    def is_fresh(self, party: str) -> bool:
        """Its process was restarted, and nobody has spoken to it since."""
        return not self._processes[party].opened

    def run(self, until: float) -> bool:
        assert until < self.ends_by, "it takes too long"
        return super().run(until)

    # ---- on the way there -------------------------------------------------------------------------------------

    def fate(self, party: str, call: m.Call) -> Fate:
        self.calls += 1
        if call.session not in self._zombies:
            self._check_rules(party, call)
        if self.interrupt and self.interrupt[:2] == (self.round, self._calls_in_round):
            (*_, act), self.interrupt = self.interrupt, None
            self._zombies.add(call.session)
            act()
        self._calls_in_round += 1
        self.late_opening |= call.session in self._zombies and isinstance(call.request, OPENING)
        parties = sorted(self._processes)
        for fault in self._faults:
            round, index, kind, fate = fault
            if round == self.round and parties[index % len(parties)] == party and isinstance(call.request, kind):
                self._faults.remove(fault)
                self.stopped |= fate.stops_s > 0
                self.late_opening |= max(fate.delays_s, default=0) > 0.1 and isinstance(call.request, OPENING)
                return fate
        return Fate(delays_s=(self._random.uniform(0, 0.02),), answer_s=self._random.uniform(0, 0.02))

    def lag_s(self) -> float:
        return self._random.uniform(0, 0.05)

    def _check_rules(self, party: str, call: m.Call) -> None:
        """The coordinator does nothing before its time."""
        request = call.request
        if isinstance(request, m.Prepare):
            if party in self._prepared or any(
                other.request != request or other.session != call.session for other in self._prepared.values()
            ):
                self._prepared.clear()
                self._voted.clear()
            self._prepared[party] = call
        if isinstance(request, m.Commit) or (isinstance(request, m.Apply) and self._staged):
            if isinstance(request, m.Apply):
                engines = {name for name in self._prepared if name.startswith("engine")}
                assert engines <= self._voted, "told to apply before every engine had voted"
            if self._sent not in self.decided.setdefault(request.version, []):
                self.decided[request.version].append(dict(self._sent))
            if self._log is not None:
                assert f'"decide","version":{request.version},' in self._log.read_text(), "not on disk yet"

    # ---- there ------------------------------------------------------------------------------------------------

    def handled(self, party: str, call: m.Call, replies: list[m.Reply] | None) -> None:
        target, busy = self._processes[party].party, self._processes[party].busy
        for reply in replies or ():
            if isinstance(reply, m.Sent):
                self._sent[int(party.split()[1])] = next(iter(reply.content_digests.values()))
        if replies is not None and all(isinstance(reply, m.Vote) for reply in replies):
            self._voted.add(party)
        heard = self._heard.setdefault(target, Heard())
        stale = busy is None and heard.is_stale(call)
        if not stale:
            heard.note(call)
        if isinstance(target, SimulatedEngine):
            before, after = self._seen.get(target), state(target)
            assert not stale or before in (None, after), f"{party} was changed by a call that is late, or a zombie's"
            if before is not None:
                assert all(new[0] >= old[0] for new, old in zip(after[1:], before[1:], strict=True)), "versions grow"
            self._seen[target] = after
        self.check_engines()

    def check_engines(self) -> None:
        for name, engine in self.engines.items():
            for rank in engine.ranks if engine.serves else ():
                assert not rank.applied, f"{name} serves what was not committed"
                assert not rank.poisoned, f"{name} serves mixed weights"
                good = self.decided.get(rank.version, []) if rank.version else [{}]
                assert rank.weights in good, f"{name} serves {rank.weights} as version {rank.version}, decided: {good}"


def state(engine: SimulatedEngine) -> tuple[Any, ...]:
    ranks = [(rank.version, dict(rank.weights), rank.poisoned, rank.applied) for rank in engine.ranks]
    return (engine.serves, *ranks)


def disagreement(error: WeightSyncError | None) -> str:
    """On what parties did not agree, where that is the error, or what poisoned engines; else ""."""
    first = error if isinstance(error, AgreementError) else getattr(error, "__cause__", None)
    return (first.field or "") if isinstance(first, AgreementError) else ""


class Story:
    """A training loop: connect, update, update; with what is expected after each."""

    def __init__(self, world: World, config: SyncConfig, faults: list[Fault]) -> None:
        self.world, self.config = world, config
        self._bound_s = 15.0 * (2 + config.retries + len(faults))
        self.connect()

    def connect(self) -> None:
        """As a training loop does: until it works."""
        for _ in range(20):
            self.revive(*self.world.names("trainer"))
            if not self.world.engines:
                self.revive("engine 0")
            self.fleet = SimulatedFleet(self.world)
            self.session = Session(self.fleet, self.config)
            try:
                self.session.open()
            except WeightSyncError as error:
                self.check_named(error)
                self.session.close()
            else:
                self.check_view()
                return
        raise AssertionError("cannot be opened")

    def revive(self, *parties: str) -> None:
        for party in parties:
            self.world.restart(party)

    def update(self, step: int) -> WeightSyncError | None:
        """One update, in which anything may happen."""
        world, session = self.world, self.session
        for i, trainer in enumerate(world.trainers.values()):
            trainer.content = 100 * step + i
        names = [name for name in session.status()["admitted"] if name in world.engines and not world.is_fresh(name)]
        admitted = {name: world.engines[name] for name in names}
        before = {name: state(engine) for name, engine in admitted.items()}
        decided = {number: len(contents) for number, contents in world.decided.items()}
        version, calls = session.version, world.calls
        world.ends_by = world.clock.now + self._bound_s
        error = None
        try:
            report = session.update()
            assert report.version == session.version > version
        except WeightSyncError as caught:
            error = caught
            self.check_named(error)
        assert session.version >= version
        world.ends_by = 1e9
        assert world.calls - calls < 1000 * self._bound_s, "it asks too often"
        world.check_engines()
        if session is not self.session:  # another coordinator has taken over
            return error
        self.check_view()
        nothing_decided = decided == {number: len(contents) for number, contents in world.decided.items()}
        if error and self.config.apply == "staged" and nothing_decided:
            for name, engine in admitted.items():
                if world.engines.get(name) is engine and name in session.engines:
                    assert state(engine) == before[name], f"{name} was changed, though nothing was decided"
                    assert name in session.status()["admitted"]
        return error

    def check_named(self, error: WeightSyncError) -> None:
        if "version_log" in str(error):  # the coordinator's own disk
            return
        assert error.rank, f"names nobody: {error!r}"
        party = " ".join(error.rank.split()[:2])
        assert party in (*self.world.names("trainer"), *self.world.names("engine")), error.rank

    def check_view(self) -> None:
        """Engines that are admitted, as the coordinator has it, serve its version; all the same content."""
        status = self.session.status()
        held = []
        for name in status["admitted"]:
            engine = self.world.engines.get(name)
            if engine is None or self.world.is_fresh(name):  # its process ended, later
                continue
            assert name not in status["poisoned"]
            # A decision that no engine lived to carry out keeps all from serving until the next update.
            missed = engine.doubt == "missed" and max(self.world.decided) > status["version"]
            assert engine.serves or missed, f"{name} was admitted, and does not serve"
            assert {rank.version for rank in engine.ranks} == {status["version"]}
            held += [rank.weights for rank in engine.ranks]
        assert all(weights == held[0] for weights in held), "engines serve different contents"

    def change_members(self, change: str) -> None:
        if change == "add":
            party = self.fleet.add(self.world.add_engine(1))
            try:
                self.session.add_engine(party)
            except WeightSyncError as error:
                self.check_named(error)
            self.check_view()
        elif change == "remove" and len(self.session.engines) > 1:
            self.session.remove_engine(next(iter(self.session.engines)))

    def heal(self) -> None:
        """Whatever happened before, an update in which nothing does brings every engine that lives to its version."""
        world, step = self.world, ROUNDS + 1
        world.begin(ROUNDS)
        settled = world.clock.now + (5.0 if world.stopped or world.late_opening else 0.1)
        while world.run(settled):
            pass
        self.revive(*world.names("trainer"))
        dead = [party for party in self.session.engines if party not in world.engines]
        if dead and len(dead) == len(self.session.engines):
            self.revive(dead.pop())
        for party in dead if self.config.on_lost_engine == "raise" else ():
            self.session.remove_engine(party)
        error = self.update(step)
        told = {"restarted"} | ({"session"} if world.late_opening else set())
        while (field := disagreement(error)) in told:  # do as the error says, once for each
            told.discard(field)
            if field == "session":
                self.session.close()
                self.connect()
            error = self.update(step)
        assert error is None, repr(error)
        status = self.session.status()
        assert not status["poisoned"]
        assert status["admitted"] == list(self.session.engines)
        content = {i: 100 * step + i for i in range(len(world.trainers))}
        for party in self.session.engines:
            assert world.engines[party].serves
            for rank in world.engines[party].ranks:
                assert (rank.version, rank.weights) == (self.session.version, content)


@settings(examples, max_examples=500)
@given(
    sizes=sizes(),
    config=Configs,
    faults=Faults,
    changes=st.tuples(*[st.sampled_from(["", "", "add", "remove"])] * ROUNDS),
    seed=st.integers(0, 99),
)
@example(
    sizes={"trainers": 1, "engines": [1]},
    config={"apply": "staged", "retries": 0, "on_failure": "raise", "on_lost_engine": "raise"},
    faults=[
        (0, 0, m.Prepare, Fate(dies="before", restarts=True)),
        (1, 0, m.OpenReceiver, Fate(flaw="fails")),
    ],
    changes=("", ""),
    seed=0,
)
def test_no_engine_serves_what_was_not_decided_every_update_ends_and_the_next_one_heals(
    sizes: dict[str, Any], config: dict[str, Any], faults: list[Fault], changes: tuple[str, ...], seed: int
) -> None:
    world = World(faults, seed, staged=config["apply"] == "staged", **sizes)
    with virtual_time(world.clock):
        story = Story(world, SyncConfig(timeout_s=TIMEOUT_S, **config), faults)
        for round, change in enumerate(changes):
            world.begin(round)
            story.change_members(change)
            story.update(round + 1)
        story.heal()
        story.session.close()


@pytest.mark.parametrize("durable", [True, False])
@settings(examples, max_examples=200)
@given(
    sizes=sizes(),
    config=Configs,
    faults=Faults,
    after=st.integers(0, 150),
    acts=st.booleans(),
    full=st.none() | st.integers(0, 8),
    seed=st.integers(0, 99),
)
def test_a_coordinator_that_dies_or_falls_asleep_at_any_message_is_replaced_and_never_changes_an_engine_again(
    durable: bool,
    sizes: dict[str, Any],
    config: dict[str, Any],
    faults: list[Fault],
    after: int,
    acts: bool,
    full: int | None,
    seed: int,
) -> None:
    """Asleep: another takes over in the middle of its update, and then it *acts* again. *full*: how many lines the disk
    takes before one that it refuses."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "versions") if durable else None
        world = World(faults, seed, staged=config["apply"] == "staged", log=log, **sizes)
        settings = SyncConfig(timeout_s=TIMEOUT_S, version_log=str(log) if log else None, **config)
        with virtual_time(world.clock), refusing_disk(full):
            story = Story(world, settings, faults)
            first = story.session

            def die() -> None:
                first._log.close()  # as the kernel does
                raise CoordinatorDied

            def sleep() -> None:
                first._log.close()
                story.connect()
                story.update(ROUNDS)

            world.interrupt = (1, after, sleep if acts else die)
            for round in range(ROUNDS):
                world.begin(round)
                try:
                    story.update(round + 1)
                except CoordinatorDied:
                    story.connect()
            if story.session is not first:
                with pytest.raises(WeightSyncError):
                    first.update()
        with virtual_time(world.clock):
            story.heal()
            story.session.close()


def refusing_disk(after: int | None) -> Any:
    """One `fdatasync` fails, after so many that did not."""
    synced = 0

    def fdatasync(fd: int) -> None:
        nonlocal synced
        synced += 1
        if synced - 1 == after:
            raise OSError(errno.ENOSPC, "No space left on device")

    return patch.object(os, "fdatasync", fdatasync)


# ---- the machine alone: every answer to every command --------------------------------------------------------------

PREPARED = m.Prepared(version=4, epoch=3, manifest_digest="m", plan_digest="p")


def new_machine(trainers: int, engines: int, *, staged: bool = True) -> tuple[UpdateMachine, list[str]]:
    """With all its parties."""
    names = [f"trainer {i}" for i in range(trainers)], [f"engine {i}" for i in range(engines)]
    machine = UpdateMachine(
        version=5,
        epoch=3,
        manifest_digest="m",
        trainers=names[0],
        engines=names[1],
        staged=staged,
        timeout_s=TIMEOUT_S,
        plan_digests=dict.fromkeys([*names[0], *names[1]], "p"),
    )
    return machine, [*names[0], *names[1]]


Mishap = st.sampled_from(["pending", "failed", "in part", "poisoned", "dead", "silent", "silent", "wrong digest"])


@settings(examples, max_examples=1500)
@given(
    trainers=st.integers(1, 4),
    engines=st.integers(1, 6),
    staged=st.booleans(),
    mishaps=st.dictionaries(st.integers(0, 40), Mishap, min_size=1, max_size=8),
    seed=st.integers(0, 99),
)
def test_whatever_the_parties_answer_the_machine_ends_and_knows_which_engines_are_mixed(
    trainers: int, engines: int, staged: bool, mishaps: dict[int, str], seed: int
) -> None:
    """Without a fence, and with answers that no real rank would give. *mishaps*: number of the answer -> what it is."""
    machine, parties = new_machine(trainers, engines, staged=staged)
    order = random.Random(seed)
    now, asked = 0.0, dict[str, Command]()
    voted, holds = set[str](), dict[str, str]()
    dead, aborted, held_back, garbled = set[str](), set[str](), set[str](), set[str]()
    applied, committed = set[str](), set[str]()
    """By their own answers."""

    def take(commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command.request, m.Commit) or (isinstance(command.request, m.Apply) and staged):
                assert len(voted) == engines, "decided before every engine had voted"
                assert not garbled, "decided on what nobody sent"
            if isinstance(command.request, m.Commit) and command.party.startswith("engine"):
                assert holds.get(command.party) == "new", "committed an engine that did not apply"
                assert command.party not in machine.poisoned
            if isinstance(command.request, m.Abort):
                aborted.add(command.party)
                held_back.update({command.party} if command.request.hold else ())
            asked[command.party] = command

    def answer(command: Command, how: str) -> m.Reply:
        """Of the party's first rank."""
        trainer = command.party.startswith("trainer")
        digests = dict.fromkeys(range(trainers), 8 if how == "wrong digest" else 7)
        vote = m.Vote(nbytes=1, content_digests=digests, peak_staging_bytes=0, seconds=0.0)
        if how in ("failed", "poisoned"):
            return m.Failed(error=ErrorInfo.of(WeightSyncError("broke")), poisoned=how == "poisoned")
        match command.request:
            case m.Prepare():
                return PREPARED
            case m.Transfer() | m.Poll() if how == "pending":
                return m.Pending(progress=steps)
            case m.Transfer() | m.Poll() if trainer:
                index = int(command.party.split()[1])
                return m.Sent(nbytes=1, content_digests={index: 7}, changed_values=None, seconds=0.0)
            case m.Transfer() | m.Poll():
                return vote
            case m.Apply():
                return m.Applied(vote=vote, seconds=0.0, reloads=1)
        return m.Ok(poisoned=isinstance(command.request, m.Abort) and holds.get(command.party) in ("new", "mixed"))

    steps = 0
    take(machine.start(now))
    while not machine.finished:
        steps += 1
        assert steps < 1000, "it does not end"
        how = mishaps.get(steps, "well")
        party = order.choice(sorted(asked)) if asked else ""
        if not asked or how == "silent":
            asked.pop(party, None)  # never to be answered
            now += TIMEOUT_S * 0.6
            take(machine.on_tick(now))
            continue
        command = asked.pop(party)
        if how == "dead":
            dead.add(party)
            holds[party] = "mixed" if isinstance(command.request, m.Apply) else holds.get(party, "old")
            take(machine.on_error(party, TransportError("gone"), now))
            continue
        reply = answer(command, how)
        if isinstance(reply, m.Vote if staged else m.Applied):
            voted.add(party)
            garbled.update({party} if how == "wrong digest" else ())
        if isinstance(command.request, m.Apply):
            failed = {"failed": holds.get(party, "old"), "poisoned": "mixed", "in part": "mixed"}
            holds[party] = failed.get(how, "new")
        for kind, done in ((m.Apply, applied), (m.Commit, committed)):
            if isinstance(command.request, kind) and how not in ("failed", "poisoned", "in part"):
                done.add(party)
        others = [m.Failed(error=ErrorInfo.of(WeightSyncError("it did not begin")))] if how == "in part" else []
        take(machine.on_reply(party, [reply, *others], now))

    engines_left = {f"engine {i}" for i in range(engines)} - machine.poisoned.keys()
    if machine.phase is Phase.DONE:
        assert all(holds.get(engine) == "new" for engine in engines_left)
        assert engines_left <= committed
        assert (machine.error is None) == (not machine.poisoned)
        missed = {engine for engine, error in machine.poisoned.items() if error.phase == "apply"}
        assert missed - dead <= held_back, "the others have gone on"
    else:
        assert machine.error is not None
        assert machine.error.rank
        assert machine.error.phase
        assert set(parties) - dead <= aborted
        assert not (staged and applied), "a decision is rolled forward"
        assert all(holds.get(engine, "old") == "old" for engine in engines_left)
    assert all(error.rank and error.phase for error in machine.poisoned.values())


def test_a_party_that_still_answers_is_waited_for_when_another_has_timed_out() -> None:
    """What an engine says to the abort is needed: it may have begun to apply."""
    machine, parties = new_machine(2, 1)
    machine.start(0.0)
    for reply, now in ((PREPARED, 0.0), (m.Pending(), 0.5), (m.Pending(), 1.0)):
        for party in parties:
            machine.on_reply(party, [reply], now)
    commands = machine.on_tick(TIMEOUT_S + 0.1)
    assert isinstance(machine.error, UpdateTimeoutError)
    assert machine.error.rank == "trainer 0"
    assert [command.party for command in commands] == parties
    for party in parties:
        assert not machine.finished
        machine.on_reply(party, [m.Ok()], TIMEOUT_S + 0.2)
    assert machine.phase is Phase.FAILED


def test_a_decision_that_could_not_be_noted_leaves_no_engine_in_doubt_even_one_that_does_not_answer() -> None:
    machine, parties = new_machine(1, 1)
    machine.start(0.0)
    for party in parties:
        machine.on_reply(party, [PREPARED], 0.0)
    machine.on_reply("trainer 0", [m.Sent(nbytes=1, content_digests={1: 7}, changed_values=None, seconds=0.0)], 0.0)
    machine.on_reply("engine 0", [m.Vote(nbytes=1, content_digests={1: 7}, peak_staging_bytes=0, seconds=0.0)], 0.0)
    assert machine.decided
    machine.give_up(WeightSyncError("the disk is full"), 0.0)
    assert not machine.decided
    machine.on_reply("trainer 0", [m.Ok()], 0.0)
    machine.on_tick(TIMEOUT_S + 0.1)
    assert machine.phase is Phase.FAILED
    assert not machine.poisoned
