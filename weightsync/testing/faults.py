"""Faults at any message of any party: control messages, tensors, chunks, and the engine's loader.

A `Fault` names a place and what happens there. `FaultyFleet` carries out those of control messages; `faulty_transports`
and `FaultyAdapter` those of the data, in the process where they happen.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
import torch

from weightsync import messages as m
from weightsync.chunk import WeightChunk
from weightsync.errors import TransportError, WeightSyncError
from weightsync.identity import Identity
from weightsync.interfaces import (
    EngineAdapter,
    Fleet,
    LinkContext,
    ReceiverTransport,
    SenderTransport,
    Transfer,
    TransferStats,
)
from weightsync.loadmap import LoadMap
from weightsync.manifest import Manifest, TensorMeta
from weightsync.registry import register_transport, transport_classes, unregister_transport

Action = Literal["drop", "delay", "duplicate", "reorder", "truncate", "flip", "raise", "kill", "stop"]
ACTIONS: tuple[Action, ...] = ("drop", "delay", "duplicate", "reorder", "truncate", "flip", "raise", "kill", "stop")
CALLS = ("OpenSender", "OpenReceiver", "Connect", "Prepare", "Transfer", "Poll", "Apply", "Commit", "Abort")


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What happens, once, at the *nth* time that *place* is passed."""

    action: Action
    place: str
    """A call ("Apply") or its answer ("Apply answer"); or "tensor", "chunk", "group" in the transfer and the loader."""
    party: str = ""
    """Whose call; empty for the places in a process, of which each has its own faults."""
    nth: int = 0
    seconds: float = 0.0
    """How long a delay lasts, or a process is stopped; 0: for good."""


class InjectedError(Exception):
    """What "raise" raises."""


class Faults:
    """Counts how often each place was passed, and gives the fault that is due. Thread-safe."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._lock = threading.Lock()
        self.arm(*faults)

    def arm(self, *faults: Fault) -> None:
        """Replace what was armed; counts begin anew."""
        with self._lock:
            self._armed = list(faults)
            self._seen: dict[Fault, int] = {}
            self.fired: list[Fault] = []

    def due(self, place: str, party: str = "") -> Fault | None:
        """The fault for this passing of *place*."""
        with self._lock:
            for fault in self._armed:
                if (fault.place, fault.party) != (place, party):
                    continue
                count = self._seen[fault] = self._seen.get(fault, 0) + 1
                if count == fault.nth + 1:
                    self.fired.append(fault)
                    return fault
            return None


def strike(fault: Fault) -> None:
    """Do to this process, or thread, what needs no message: delay, raise, kill, stop."""
    match fault.action:
        case "delay":
            time.sleep(fault.seconds)
        case "raise":
            raise InjectedError(f"injected at {fault.place}")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)


class CoordinatorKilled(BaseException):
    """Stands for the death of the coordinator, which may be in this process: whoever drives the update drops all."""


class FaultyFleet:
    """A `Fleet` between a session and its real fleet, which loses, damages and repeats messages as armed.

    Faults of the party "coordinator" kill it: `CoordinatorKilled` is raised before the call (or after its answer).
    """

    def __init__(self, fleet: Fleet, signal_party: Callable[[str, int], None]) -> None:
        """*signal_party* sends a signal to the process of a party."""
        self.faults = Faults()
        self._fleet, self._signal = fleet, signal_party
        self._places: dict[int, str] = {}
        self._held_calls: dict[str, tuple[int, bytes]] = {}
        self._held_answers: list[tuple[str, int, Sequence[bytes] | WeightSyncError]] = []
        self._made_up: list[tuple[str, int, WeightSyncError]] = []

    @property
    def trainers(self) -> Sequence[str]:
        return self._fleet.trainers

    @property
    def engines(self) -> Sequence[str]:
        return self._fleet.engines

    def send(self, party: str, number: int, payload: bytes) -> None:
        place = type(m.decode_call(payload).request).__name__
        self._places[number] = place
        if self.faults.due(place, "coordinator"):
            raise CoordinatorKilled
        fault = self.faults.due(place, party)
        held = self._held_calls.pop(party, None)
        match fault.action if fault else None:
            case "drop":
                pass
            case "delay":
                assert fault is not None
                threading.Timer(fault.seconds, self._fleet.send, (party, number, payload)).start()
            case "reorder":
                self._held_calls[party] = (number, payload)
            case "raise":
                self._made_up.append((party, number, TransportError(f"{party}: injected at {place}", rank=party)))
            case "kill" | "stop":
                self._strike(party, fault)
                self._fleet.send(party, number, payload)
            case action:
                for sent in _damaged(payload, action):
                    self._fleet.send(party, number, sent)
        if held is not None:
            self._fleet.send(party, *held)

    def replies(self, wait_s: float) -> Iterator[tuple[str, int, Sequence[bytes] | WeightSyncError]]:
        made_up, self._made_up = self._made_up, []
        yield from made_up
        for party, number, answer in self._fleet.replies(wait_s):
            place = f"{self._places.get(number)} answer"
            if self.faults.due(place, "coordinator"):
                raise CoordinatorKilled
            fault = self.faults.due(place, party)
            held, self._held_answers = self._held_answers, []
            match fault.action if fault else None:
                case "drop":
                    pass
                case "delay":
                    assert fault is not None
                    time.sleep(fault.seconds)
                    yield party, number, answer
                case "reorder":
                    self._held_answers.append((party, number, answer))
                case "raise":
                    yield party, number, TransportError(f"{party}: injected at {place}", rank=party)
                case "kill" | "stop":
                    self._strike(party, fault)  # after it did what it was asked, before anybody knew
                    yield party, number, TransportError(f"{party}: its answer was lost", rank=party)
                case action if not isinstance(answer, WeightSyncError):
                    for damaged in zip(*(_damaged(part, action) for part in answer), strict=True):
                        yield party, number, damaged
                case _:
                    yield party, number, answer
            yield from held

    def _strike(self, party: str, fault: Fault | None) -> None:
        assert fault is not None
        self._signal(party, signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)
        if fault.action == "stop" and fault.seconds:
            threading.Timer(fault.seconds, self._signal, (party, signal.SIGCONT)).start()

    def reopen(self, party: str) -> None:
        self._fleet.reopen(party)

    def remove(self, party: str) -> None:
        self._fleet.remove(party)

    def helpers(self, ranks: Mapping[str, Identity]) -> Mapping[str, str]:
        return self._fleet.helpers(ranks)

    def process_state(self, identity: Identity) -> str:
        return self._fleet.process_state(identity)


def _damaged(payload: bytes, action: str | None) -> list[bytes]:
    """What arrives in place of *payload*."""
    match action:
        case "duplicate":
            return [payload, payload]
        case "truncate":
            return [payload[: len(payload) // 2]]
        case "flip":
            at = len(payload) // 2
            return [payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :]]
        case _:
            return [payload]


@contextlib.contextmanager
def faulty_transports(faults: Faults, names: Iterable[str]) -> Iterator[None]:
    """Within, the transports *names* pass the places "tensor" (a sender is about to send one) and "chunk" (a receiver
    has got one) of *faults*, in this process."""
    names = tuple(names)
    for name in names:
        register_transport(name, *_faulty(faults, *transport_classes(name)))
    try:
        yield
    finally:
        for name in names:
            unregister_transport(name)


def _faulty(
    faults: Faults, sender: type[SenderTransport], receiver: type[ReceiverTransport]
) -> tuple[type[SenderTransport], type[ReceiverTransport]]:
    class FaultySender(sender):  # type: ignore[misc, valid-type]
        def send(self, transfer: Transfer, tensors: Iterable[tuple[TensorMeta, torch.Tensor]]) -> TransferStats:
            stats: TransferStats = super().send(transfer, _altered(faults, "tensor", tensors, _altered_tensor))
            return stats

    class FaultyReceiver(receiver):  # type: ignore[misc, valid-type]
        def __init__(self, context: LinkContext, *, receiver: int) -> None:
            super().__init__(context, receiver=receiver)

        def receive(self, transfer: Transfer) -> Iterator[WeightChunk]:
            return _altered(faults, "chunk", super().receive(transfer), _altered_chunk)

    return FaultySender, FaultyReceiver


def _altered(faults: Faults, place: str, items: Iterable[Any], alter: Callable[[Any, str], list[Any]]) -> Iterator[Any]:
    """*items* with the faults of *place* done to them."""
    late: list[Any] = []
    for item in items:
        fault = faults.due(place)
        if fault is None:
            yield item
        elif fault.action == "reorder":
            late.append(item)
            continue
        else:
            strike(fault)
            yield from alter(item, fault.action)
        yield from late
        late.clear()
    yield from late


def _altered_tensor(item: tuple[TensorMeta, torch.Tensor], action: str) -> list[tuple[TensorMeta, torch.Tensor]]:
    meta, tensor = item
    match action:
        case "drop":
            return []
        case "duplicate":
            return [item, item]
        case "truncate":
            shape = (max(meta.shape[0] - 1, 0), *meta.shape[1:]) if meta.shape else (0,)
            return [(TensorMeta(meta.name, meta.dtype, shape), tensor.reshape(meta.shape or (1,))[: shape[0]])]
        case "flip":  # under another name: the wrong tensor
            return [(TensorMeta(meta.name + "?", meta.dtype, meta.shape), tensor)]
        case _:
            return [item]


def _altered_chunk(chunk: WeightChunk, action: str) -> list[WeightChunk]:
    match action:
        case "drop":
            chunk.release()
            return []
        case "duplicate":
            again = WeightChunk(chunk.version, chunk.manifest_digest, chunk.pieces, chunk.payload.clone())
            return [chunk, again]
        case "truncate":
            chunk.payload = chunk.payload[: max(piece.offset + piece.nbytes for piece in chunk.pieces) - 1]
        case "flip":
            chunk.payload = chunk.payload.clone()
            piece = max(chunk.pieces, key=lambda piece: piece.nbytes)
            chunk.payload[piece.offset + piece.nbytes // 2] ^= 1
    return [chunk]


class FaultyAdapter:
    """An `EngineAdapter` that passes the place "group" before each group that the engine's loader is given."""

    def __init__(self, adapter: EngineAdapter, faults: Faults) -> None:
        self.adapter, self._faults = adapter, faults

    def load_map(self, manifest: Manifest) -> LoadMap:
        return self.adapter.load_map(manifest)

    def check_ready(self) -> None:
        self.adapter.check_ready()

    def apply(self, groups: Iterable[Iterable[tuple[str, torch.Tensor]]]) -> int:
        def struck() -> Iterator[Iterable[tuple[str, torch.Tensor]]]:
            for group in groups:
                if fault := self._faults.due("group"):
                    strike(fault)
                yield group

        return self.adapter.apply(struck())
