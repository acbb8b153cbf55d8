"""One fault after another against a whole weight sync of real processes, and what became of the engines each time.

A trainer, a bystander (a torch module) and the engine under test each live in a process of their own. For each case the
engines hold weights A, the trainer gets weights B, a fault is armed, and one update is made. Then every engine must hold
A or B exactly, or be known as poisoned; those that are not poisoned must agree; the update must have ended in time; and
the update after it must bring everybody to B.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import msgspec
import torch

from weightsync.chunk import as_bytes
from weightsync.config import SyncConfig
from weightsync.digest import digest_bytes
from weightsync.engines.torch_module import TorchModuleAdapter
from weightsync.errors import UpdateTimeoutError, WeightSyncError
from weightsync.receiver import ReceiverRank
from weightsync.sender import SenderRank
from weightsync.session import Session
from weightsync.testing.faults import (
    ACTIONS,
    CoordinatorKilled,
    Fault,
    Faults,
    FaultyAdapter,
    FaultyFleet,
    faulty_transports,
)
from weightsync.testing.local import Handler, LocalFleet, in_process_party
from weightsync.testing.modules import nested_module
from weightsync.testing.processes import ProcessParty, Serve

if TYPE_CHECKING:
    from weightsync.transports.sidecar import Sidecars

TRANSPORTS = ("shared_memory", "broadcast", "sharded_rdt", "sharded_shared_memory", "sharded_broadcast")
REFUSES = "refuses to serve"
"""What the snapshot of an engine is whose guard refuses requests."""

Weights = Mapping[str, torch.Tensor]
Seeded = Callable[[int], Weights]
"""Weights A (seed 0) and B (seed 1); importable by name."""


class Subject:
    """What a party's process holds, for `ProcessParty.ask`."""

    def __init__(self, weights: Seeded) -> None:
        self.weights = weights
        self.faults = Faults()
        self.held: Weights = weights(0)
        self.snapshot: Callable[[], Any] = lambda: digests(self.held)
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(faulty_transports(self.faults, TRANSPORTS))


def digests(tensors: Weights) -> dict[str, int]:
    return {name: digest_bytes(as_bytes(tensor.detach())) for name, tensor in tensors.items()}


def odd_weights(seed: int) -> Weights:
    """A small model: several layers, several dtypes, tensors larger and smaller than a bucket."""
    torch.manual_seed(seed)
    layers = {f"layers.{i}.{part}": torch.randn(64, 48) for i in range(4) for part in ("up", "down")}
    return {
        **layers,
        "embed": torch.randn(500, 33),
        "norm": torch.randn(48).to(torch.bfloat16),
        "scale": torch.randn(()),
    }


def sparse_weights(seed: int) -> Weights:
    """The same, of which another seed changes some tensors only."""
    return {**odd_weights(0), **{name: odd_weights(seed)[name] for name in ("layers.1.up", "layers.3.down", "norm")}}


def serve_trainer(weights: Seeded) -> tuple[Handler, Subject]:
    subject = Subject(weights)
    return in_process_party([SenderRank(0, lambda: subject.held)]), subject


def serve_module(weights: Seeded) -> tuple[Handler, Subject]:
    subject = Subject(weights)
    module = nested_module({name: tensor.clone() for name, tensor in weights(0).items()})
    subject.snapshot = lambda: digests(module.state_dict())
    return in_process_party([ReceiverRank(FaultyAdapter(TorchModuleAdapter(module), subject.faults))]), subject


# Run in the parties' processes.


def arm(subject: Subject, faults: Sequence[Fault]) -> None:
    subject.faults.arm(*faults)


def hold(subject: Subject, seed: int) -> None:
    subject.held = subject.weights(seed)


def fired(subject: Subject) -> list[Fault]:
    return subject.faults.fired


def look(subject: Subject) -> Any:
    return subject.snapshot()


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A fault, and the party in whose process it happens ("" for control messages)."""

    fault: Fault
    process: str = ""

    @property
    def target(self) -> str:
        return self.process or self.fault.party

    def __str__(self) -> str:
        return f"{self.fault.action} at {self.fault.place} of {self.target}"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one case."""

    case: Case
    transport: str
    apply: str
    engine: str
    """Kind of the engine under test."""
    result: str
    """"committed", "old version", "poisoned" or what went wrong, in capitals."""
    fired: bool
    error: str
    seconds: float
    retry: str
    """"exact", or what went wrong, in capitals."""

    @property
    def sound(self) -> bool:
        return self.result in ("committed", "old version", "poisoned", "in doubt") and self.retry == "exact"


def control_cases(*, delay_s: float) -> Iterator[Case]:
    """Every action at every call of an update and its answer, to a trainer and to an engine; and the coordinator's end."""
    places = ("Connect", "Prepare", "Transfer", "Poll", "Apply", "Commit", "Abort")
    for place, party in itertools.product(places, ("trainer 0", "engine 1")):
        if party == "trainer 0" and place == "Apply":
            continue
        for action, end in itertools.product(ACTIONS, ("", " answer")):
            yield Case(
                fault=Fault(action=action, place=place + end, party=party, seconds=delay_s if action == "delay" else 0)
            )
    for place in places:
        yield Case(fault=Fault(action="kill", place=place, party="coordinator"))


def data_cases(*, delay_s: float) -> Iterator[Case]:
    """Every action at a tensor that is sent, a chunk that is received, and a group that is loaded."""
    for place, process in (("tensor", "trainer 0"), ("chunk", "engine 1"), ("group", "engine 1")):
        for action in ACTIONS:
            if place == "group" and action not in ("delay", "raise", "kill", "stop"):
                continue  # the engine's own loader is no message
            for nth in (0, 2):
                fault = Fault(action=action, place=place, nth=nth, seconds=delay_s if action == "delay" else 0)
                yield Case(fault=fault, process=process)


class Campaign:
    """Runs cases one after another over the same processes. Use with `with`."""

    def __init__(
        self,
        *,
        weights: Seeded = odd_weights,
        serve_engine: Serve | None = None,
        engine: str = "torch",
        timeout_s: float = 1.0,
        apply: str = "staged",
        sidecars: Sidecars | None = None,
        **settings: Any,
    ) -> None:
        """*serve_engine* makes the engine under test; a torch module without. *sidecars*: as for `LocalFleet`."""
        self._sidecars = sidecars
        self._kind, self._weights = engine, weights
        self.config = SyncConfig(timeout_s=timeout_s, apply=apply, bucket_bytes=4096, **settings)  # type: ignore[arg-type]
        self._parties = {
            "trainer 0": ProcessParty("trainer 0", partial(serve_trainer, weights)),
            "engine 0": ProcessParty("engine 0", partial(serve_module, weights)),
            "engine 1": ProcessParty("engine 1", serve_engine or partial(serve_module, weights)),
        }
        self._known: dict[str, list[Any]] = {}
        self._session: Session | None = None
        self._seed = 0

    def __enter__(self) -> Self:
        try:
            for party in self._parties.values():
                party.ask(look)  # an engine may take long to start
            self._connect()
            for seed in (0, 1, 0):
                self._parties["trainer 0"].ask(hold, seed)
                self._update_unless_late()
                for name in ("engine 0", "engine 1"):
                    self._known.setdefault(name, []).append(self._parties[name].ask(look))
            exact = [digests(self._weights(seed)) for seed in (0, 1)]
            assert self._known["engine 0"][:2] == exact
            assert all(known[0] == known[2] != known[1] for known in self._known.values())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._session is not None:
            self._session.close()
        for party in self._parties.values():
            party.close()

    def _connect(self) -> None:
        """A coordinator, new or in place of one that was killed."""
        fleet = LocalFleet([self._parties["trainer 0"]], [], sidecars=self._sidecars)
        for name in ("engine 0", "engine 1"):
            fleet.add(self._parties[name], restart=self._parties[name].reopen)
        fleet.add_restart("trainer 0", self._parties["trainer 0"].reopen)
        self._faulty = FaultyFleet(fleet, lambda party, number: self._parties[party].signal(number))
        self._session = Session(self._faulty, self.config)
        self._session.open()

    def _update(self) -> Any:
        assert self._session is not None
        return self._session.update()

    def _update_unless_late(self) -> None:
        """Where nothing is wrong: only the machine can stall for as long as a bound, and is given another chance."""
        try:
            self._update()
        except UpdateTimeoutError:
            self._update()

    def run(self, case: Case) -> Outcome:
        """Make one update under a fault, judge it, and make everybody whole again."""
        new = 1 - self._seed
        self._parties["trainer 0"].ask(hold, new)
        self._arm(case)
        error: BaseException | None = None
        poisoned: set[str] = set()
        started = time.monotonic()
        try:
            poisoned = set(self._update().poisoned)
        except (WeightSyncError, CoordinatorKilled) as caught:
            error = caught
        seconds = time.monotonic() - started
        result = self._judge(error, poisoned, new)
        fired = self._fired(case)
        if seconds > self.bound_s:
            result = f"TOO LATE: {seconds:.1f} s"
        return Outcome(
            case=case,
            transport=str(self.config.transport),
            apply=self.config.apply,
            engine=self._kind,
            result=result,
            fired=fired,
            error="the coordinator was killed" if isinstance(error, CoordinatorKilled) else str(error or ""),
            seconds=seconds,
            retry=self._recover(isinstance(error, CoordinatorKilled), new),
        )

    def _arm(self, case: Case) -> None:
        assert self._session is not None
        place = case.fault.place.split()[0]
        if case.process:
            self._parties[case.process].ask(arm, [case.fault])
            return
        faults = [case.fault]
        if place == "Connect":
            self._session.relink_next()
        if place == "Poll":  # sent only while something lasts
            self._parties["trainer 0"].ask(arm, [Fault(action="delay", place="tensor", seconds=0.2)])
        if place == "Abort":  # sent only when something failed
            faults.append(Fault(action="raise", place="Transfer answer", party="engine 0"))
        self._faulty.faults.arm(*faults)

    def _fired(self, case: Case) -> bool:
        if not case.process:
            return case.fault in self._faulty.faults.fired
        party = self._parties[case.process]
        return not party.is_alive() or case.fault in party.ask(fired)

    @property
    def bound_s(self) -> float:
        """Within which every update must end: connecting, preparing, moving, applying and giving up take a bound each,
        finding the culprit a few seconds."""
        return 5 * self.config.timeout_s + 4

    def _judge(self, error: BaseException | None, poisoned: set[str], new: int) -> str:
        assert self._session is not None
        poisoned |= {party for party, engine in self._session.engines.items() if engine.poisoned}
        for party in self._parties.values():
            party.signal(signal.SIGCONT)
        held: dict[str, int | None] = {}
        for name in ("engine 0", "engine 1"):
            if not self._parties[name].is_alive():
                continue
            found = self._parties[name].ask(look)
            if found == REFUSES and (error is not None or poisoned):
                continue  # so nobody gets anything from it
            held[name] = self._known[name].index(found) if found in self._known[name] else None
        serving = {name: seed for name, seed in held.items() if name not in poisoned}
        if None in serving.values():
            return f"SILENT CORRUPTION of {[name for name, seed in serving.items() if seed is None]}"
        if isinstance(error, CoordinatorKilled):
            return "in doubt"
        if len(set(serving.values())) > 1:
            return f"DISAGREEMENT: {serving}"
        if error is None and not poisoned:
            return "committed" if set(serving.values()) == {new} else f"NOT UPDATED: {serving}"
        if poisoned:
            return "poisoned"
        return "old version" if set(serving.values()) <= {1 - new} else f"CHANGED THOUGH IT FAILED: {serving}"

    def _recover(self, coordinator_killed: bool, new: int) -> str:
        """The next whole update, with the processes that died started again."""
        self._faulty.faults.arm()
        for party in self._parties.values():
            if not party.is_alive():
                party.restart()
                party.ask(hold, new)
            party.ask(arm, [])
        try:
            if coordinator_killed:
                self._connect()
            with contextlib.suppress(WeightSyncError):  # a late message of the case may still meet it
                self._update()
            self._update_unless_late()
        except WeightSyncError as error:
            return f"FAILED: {error}"
        self._seed = new
        wrong = [name for name in ("engine 0", "engine 1") if self._parties[name].ask(look) != self._known[name][new]]
        return f"WRONG in {wrong}" if wrong else "exact"
