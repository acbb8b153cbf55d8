"""A trainer without weights and links without bytes: it answers `messages` as a `SenderRank` does.

In place of weights it has a number, its content; a link is a `Wire`, which both ends look at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from weightsync import messages as m
from weightsync.config import SyncConfig
from weightsync.errors import ErrorInfo, TransportError, WeightSyncError
from weightsync.fence import Fence
from weightsync.identity import Identity
from weightsync.manifest import Manifest, TensorMeta


class Clock:
    """Virtual time; stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 1.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


@dataclass(slots=True)
class Stream:
    """One version on its way."""

    version: int
    content: int
    began: float
    ends: float
    """When the last of it comes; all has come by then if `whole`."""
    whole: bool

    def arrived(self, now: float) -> bool:
        return self.whole and now >= self.ends

    def progress(self, now: float) -> int:
        return int(1e6 * (min(now, self.ends) - self.began))


@dataclass(slots=True)
class Wire:
    """One link, seen from both ends."""

    sender: int
    num_receivers: int
    connected: int = 0
    broken: bool = False
    stream: Stream | None = None


@dataclass(slots=True)
class Wires:
    """All links, by token, and how long a transfer takes."""

    clock: Clock
    transfer_s: float
    lag_s: Callable[[], float]
    """How much later than over its links something comes to a rank: drawn for each transfer."""
    by_token: dict[str, Wire] = field(default_factory=dict)


class SimulatedTrainer:
    """A `SenderRank` that holds one tensor, "w3" for trainer 3."""

    def __init__(self, index: int, pid: int, wires: Wires) -> None:
        self.content = 0
        self.flaw = ""
        """In the next call: "fails", or "stalls" (the transfer stops half way)."""
        self.fence = Fence()
        self.version = 0
        self._name, self._identity, self._wires = f"trainer {index}", simulated_identity(pid), wires
        self._held = Manifest((TensorMeta(f"w{index}", "float32", (1,)),))
        self._config = SyncConfig()
        self._manifest: Manifest | None = None
        self._links: dict[int, tuple[m.LinkPlan, Wire]] = {}
        self._connecting: float | None = None
        self._sending: tuple[tuple[int, ...], Stream] | None = None

    def handle(self, call: m.Call) -> list[m.Reply]:
        try:
            self.fence.admit(call)
            if self.flaw == "fails":
                raise WeightSyncError("its source broke")
            return [self._answer(call.request)]
        except WeightSyncError as error:
            return [m.Failed(error=ErrorInfo.of(error, rank=self._name))]

    def proceed(self) -> list[m.Reply]:
        raise AssertionError("a trainer answers at once")

    def _answer(self, request: m.Request) -> m.Reply:
        match request:
            case m.Describe():
                self._config = request.config
                return m.Description(
                    identity=self._identity, manifest=self._held, version=self.version, epoch=self.fence.epoch
                )
            case m.OpenSender():
                return self._open(request)
            case m.Connect():
                self._connecting = self._wires.clock.now
                return self._poll()
            case m.Prepare():
                if self._manifest is None or self._connecting is not None:
                    raise TransportError("the links are not open")
                return m.Prepared(
                    version=self.version,
                    epoch=self.fence.epoch,
                    manifest_digest=self._manifest.digest,
                    plan_digest=m.plan_digest(plan for plan, _ in self._links.values()),
                )
            case m.Transfer():
                return self._send(request)
            case m.Poll():
                return self._poll()
            case m.Commit():
                self.version = request.version
            case m.Abort():
                self.drop_links(request.links)
            case m.Close():
                self.drop_links()
            case _:
                raise WeightSyncError(f"a trainer cannot handle {type(request).__name__}")
        return m.Ok()

    def _open(self, request: m.OpenSender) -> m.SenderOpened:
        if not request.keep:
            self.drop_links()
        self._manifest = request.manifest
        for plan in request.links:
            wire = self._wires.by_token[plan.token] = Wire(plan.sender, plan.num_receivers)
            self._links[plan.id] = (plan, wire)
        return m.SenderOpened(addresses=(b"",) * len(request.links), stable=(True,) * len(request.links))

    def _send(self, request: m.Transfer) -> m.Reply:
        now, seconds, whole = self._wires.clock.now, self._wires.transfer_s, self.flaw != "stalls"
        stream = Stream(request.version, self.content, now, now + (seconds if whole else seconds / 2), whole)
        self._sending = self._ids(request.links), stream
        for id in self._sending[0]:
            self._links[id][1].stream = stream
        return self._poll()

    def _poll(self) -> m.Reply:
        now = self._wires.clock.now
        if self._connecting is not None:
            return self._wait_connected(now - self._connecting)
        if self._sending is None:
            raise WeightSyncError("nothing is under way")
        ids, stream = self._sending
        if any(self._links[id][1].broken for id in ids):
            raise TransportError("a link broke")
        if not stream.arrived(now):
            return m.Pending(progress=stream.progress(now), doing="sends")
        self._sending = None
        return m.Sent(
            nbytes=4,
            content_digests=dict.fromkeys(ids, stream.content),
            changed_values=None,
            seconds=now - stream.began,
        )

    def _wait_connected(self, waited_s: float) -> m.Reply:
        wires = [wire for _, wire in self._links.values()]
        if all(wire.connected == wire.num_receivers for wire in wires):
            self._connecting = None
            return m.Ok()
        if any(wire.broken for wire in wires) or waited_s > self._config.timeout_s:
            raise TransportError("a receiver did not connect")
        return m.Pending(doing="waits for receivers")

    def drop_links(self, ids: tuple[int, ...] | None = None) -> None:
        for id in self._ids(ids):
            self._links.pop(id)[1].broken = True
        self._sending = self._connecting = None
        if not self._links:
            self._manifest = None

    def _ids(self, ids: tuple[int, ...] | None) -> tuple[int, ...]:
        return tuple(id for id in self._links if ids is None or id in ids)


def simulated_identity(pid: int) -> Identity:
    return Identity(host="simulated", pid=pid, machine="simulated", weightsync="1", torch="2.0", python="3", started=1)
