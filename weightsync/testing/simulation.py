"""Simulated trainers and engines in virtual time: thousands of ranks, and any loss, delay, repetition or death.

Parties answer `messages` as `SenderRank`, `ReceiverRank` and the side of an engine that generates during updates do, with
the real `Fence`. In place of weights an engine's rank holds one number for each trainer, in place of a link there is an
object that both ends look at. What becomes of a call is up to the caller: see `Fate` and `Simulation.fate`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

from weightsync import calls, drive, fence, session
from weightsync import messages as m
from weightsync.errors import ErrorInfo, RestartedError, TransportError, WeightSyncError
from weightsync.identity import Identity
from weightsync.testing.simulated_engine import SimulatedEngine
from weightsync.testing.simulated_trainer import Clock, SimulatedTrainer, Wires

LATENCY_S = 0.001
_LOOK_S = 0.05  # how often a party that works is looked at
_NOTICE_S = 0.01  # until the death of a process is noticed


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What becomes of one call. The default: it arrives at once, is carried out, and its answer comes back."""

    delays_s: tuple[float, ...] = (LATENCY_S,)
    """One per copy that arrives; () where it is lost."""
    answer_s: float | None = LATENCY_S
    """None: the answer is lost."""
    flaw: str = ""
    """What the party does wrong: see `SimulatedEngine.flaw` and `SimulatedTrainer.flaw`."""
    damaged: str = ""
    """ "call" or "answer": a byte of it is flipped."""
    dies: str = ""
    """The process dies "before" or "after" it has carried the call out."""
    restarts: bool = False
    """A process that died comes back, with the weights that it first had."""
    stops_s: float = 0.0
    """The process stands still before it reads the call; what is sent meanwhile waits for it."""


@dataclass(slots=True)
class _Process:
    make: Callable[[int], SimulatedTrainer | SimulatedEngine]
    party: SimulatedTrainer | SimulatedEngine
    pid: int
    alive: bool = True
    opened: bool = True
    stopped_until: float = 0.0
    busy: _Message | None = None
    inbox: deque[_Message] = field(default_factory=deque)


@dataclass(frozen=True, slots=True, eq=False)
class _Message:
    fleet: SimulatedFleet
    number: int
    payload: bytes
    fate: Fate


class Simulation:
    """The processes, the calls on their way to them, and the time. Subclasses decide fates and watch what happens."""

    def __init__(self, *, trainers: int, engines: Sequence[int], transfer_s: float = 0.03) -> None:
        """*engines* are numbers of ranks."""
        self.clock = Clock()
        self._wires = Wires(self.clock, transfer_s, self.lag_s)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ties, self._pids = itertools.count(), itertools.count(1000)
        self._processes: dict[str, _Process] = {}
        for i in range(trainers):
            self._start(f"trainer {i}", lambda pid, i=i: SimulatedTrainer(i, pid, self._wires))  # type: ignore[misc]
        for ranks in engines:
            self.add_engine(ranks)

    def fate(self, party: str, call: m.Call) -> Fate:
        """What becomes of a call that is sent now."""
        return Fate()

    def lag_s(self) -> float:
        """How much later than on other ranks a transfer ends on the next one that begins it."""
        return 0.0

    def handled(self, party: str, call: m.Call, replies: list[m.Reply] | None) -> None:
        """*party* has just done what it was asked; None: it is still at it."""

    def add_engine(self, ranks: int) -> str:
        name = f"engine {sum(name.startswith('engine') for name in self._processes)}"
        self._start(name, lambda pid: SimulatedEngine(ranks, pid, self._wires))
        return name

    @property
    def engines(self) -> dict[str, SimulatedEngine]:
        """Those whose process lives."""
        found = {name: process.party for name, process in self._processes.items() if process.alive}
        return {name: party for name, party in found.items() if isinstance(party, SimulatedEngine)}

    @property
    def trainers(self) -> dict[str, SimulatedTrainer]:
        """Those whose process lives."""
        found = {name: process.party for name, process in self._processes.items() if process.alive}
        return {name: party for name, party in found.items() if isinstance(party, SimulatedTrainer)}

    def restart(self, party: str) -> None:
        """Start the process of *party* anew, where it is dead."""
        if self._processes[party].alive:
            return
        self._start(party, self._processes[party].make)
        self._processes[party].opened = False

    def process_state(self, pid: int) -> str:
        process = next((p for p in self._processes.values() if p.pid == pid), None)
        if process is None or not process.alive:
            return "gone"
        return "stopped" if self.clock.now < process.stopped_until else "running"

    def open_side(self, party: str) -> None:
        """Raises TransportError where the process is gone."""
        if not self._processes[party].alive:
            raise TransportError(f"the process of {party} is gone", rank=party)
        self._processes[party].opened = True

    def run(self, until: float) -> bool:
        """Let the next thing happen that is due by then; False: nothing was, and the time has come."""
        if not self._events or self._events[0][0] > until:
            self.clock.now = max(self.clock.now, until)
            return False
        when, _, happen = heapq.heappop(self._events)
        self.clock.now = max(self.clock.now, when)
        happen()
        return True

    # ---- one call ---------------------------------------------------------------------------------------------

    def call(self, fleet: SimulatedFleet, party: str, number: int, payload: bytes) -> None:
        fate = self.fate(party, m.decode_call(payload))
        message = _Message(fleet, number, _flip(payload) if fate.damaged == "call" else payload, fate)
        for delay in fate.delays_s:
            self._after(delay, lambda: self._arrive(party, message))

    def _arrive(self, party: str, message: _Message) -> None:
        process = self._processes[party]
        if not process.alive:
            self._after(_NOTICE_S, lambda: message.fleet.take(party, message.number, _gone(party)))
            return
        if message.fate.stops_s:
            process.stopped_until = self.clock.now + message.fate.stops_s
            self._after(message.fate.stops_s, lambda: self._work(party, process))
        process.inbox.append(message)
        self._work(party, process)

    def _work(self, party: str, process: _Process) -> None:
        """One call after the other; a call that must wait for others keeps the party, as it keeps an actor."""
        while process.alive and self.clock.now >= process.stopped_until:
            message = process.busy or (process.inbox.popleft() if process.inbox else None)
            if message is None:
                return
            answer = self._handle(party, process, message)
            if not process.alive:
                return
            if answer is None:
                process.busy = message
                self._after(_LOOK_S, lambda: self._work(party, process))
                return
            process.busy = None
            if message.fate.answer_s is not None:
                self._after(message.fate.answer_s, lambda a=answer, g=message: g.fleet.take(party, g.number, a))  # type: ignore[misc]

    def _handle(self, party: str, process: _Process, message: _Message) -> Sequence[bytes] | WeightSyncError | None:
        fate, again = message.fate, process.busy is message
        if not process.opened:
            return RestartedError("this actor process takes part in no weight sync: it was restarted", rank=party)
        try:
            call = m.decode_call(message.payload)
        except TransportError as error:
            return [m.encode(m.Failed(error=ErrorInfo.of(error)))]
        if fate.dies == "before":
            self._die(party, message)
            return None
        process.party.flaw = fate.flaw
        replies = process.party.proceed() if again else process.party.handle(call)
        self.handled(party, call, replies)
        if replies is None:
            return None
        if fate.dies:
            self._die(party, message)
            return None
        encoded = [m.encode(reply) for reply in replies]
        return [_flip(part) for part in encoded] if fate.damaged == "answer" else encoded

    def _die(self, party: str, message: _Message) -> None:
        process = self._processes[party]
        process.alive = False
        process.party.drop_links()
        for lost in (message, *process.inbox):
            self._after(_NOTICE_S, lambda g=lost: g.fleet.take(party, g.number, _gone(party)))  # type: ignore[misc]
        if message.fate.restarts:
            self._after(2 * _NOTICE_S, lambda: self.restart(party))

    def _start(self, party: str, make: Callable[[int], SimulatedTrainer | SimulatedEngine]) -> None:
        pid = next(self._pids)
        self._processes[party] = _Process(make, make(pid), pid)

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.clock.now + seconds, next(self._ties), happen))


class SimulatedFleet:
    """One coordinator's way to the parties: a `Fleet`. Another coordinator has its own over the same simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.trainers, self.engines = list(simulation.trainers), list(simulation.engines)
        self._answers: list[tuple[str, int, Sequence[bytes] | WeightSyncError]] = []
        for party in (*self.trainers, *self.engines):
            simulation.open_side(party)

    def send(self, party: str, number: int, payload: bytes) -> None:
        self._simulation.call(self, party, number, payload)

    def take(self, party: str, number: int, answer: Sequence[bytes] | WeightSyncError) -> None:
        """An answer has come."""
        self._answers.append((party, number, answer))

    def replies(self, wait_s: float) -> list[tuple[str, int, Sequence[bytes] | WeightSyncError]]:
        until = self._simulation.clock.now + wait_s
        while not self._answers and self._simulation.run(until):
            pass
        answers, self._answers = self._answers, []
        return answers

    def reopen(self, party: str) -> None:
        self._simulation.open_side(party)

    def add(self, party: str) -> str:
        """Another engine of the simulation; returns its name."""
        self._simulation.open_side(party)
        self.engines.append(party)
        return party

    def remove(self, party: str) -> None:
        self.engines.remove(party)

    def helpers(self, ranks: Mapping[str, Identity]) -> Mapping[str, str]:
        return dict.fromkeys(ranks, "")

    def process_state(self, identity: Identity) -> str:
        return self._simulation.process_state(identity.pid)


@contextmanager
def virtual_time(clock: Clock) -> Iterator[None]:
    """Sessions, their calls and all fences read *clock*."""
    with ExitStack() as stack:
        for module in (calls, drive, fence, session):
            stack.enter_context(patch.object(module, "time", clock))
        yield


def _gone(party: str) -> TransportError:
    return TransportError(f"the process of {party} is gone", rank=party)


def _flip(payload: bytes) -> bytes:
    return payload[:-1] + bytes([payload[-1] ^ 1])
