"""The shipped suites can fail: each of these transports and adapters breaks one promise, and is caught at it."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory
from typing import Any, ClassVar

import msgspec
import pytest
import torch

from weightsync.chunk import WeightChunk
from weightsync.engines.torch_module import TorchModuleAdapter
from weightsync.errors import TransportError, UpdateTimeoutError
from weightsync.geometry import Region
from weightsync.interfaces import (
    EngineAdapter,
    LinkContext,
    ReceiverTransport,
    SenderTransport,
    Transfer,
    TransferStats,
)
from weightsync.loadmap import LoadMap, ModuleGroup
from weightsync.manifest import Manifest, TensorMeta
from weightsync.registry import register_transport, unregister_transport
from weightsync.testing import EngineSuite, TransportSuite
from weightsync.transports.shared_memory import SharedMemoryReceiver, SharedMemorySender

Pairs = Iterable[tuple[TensorMeta, torch.Tensor]]


# ---- transports ---------------------------------------------------------------------------------------------------


class Sender(SenderTransport):
    """Sound: has another transport do everything."""

    name = "third party"

    def __init__(self, context: LinkContext) -> None:
        super().__init__(context)
        self.inner = SharedMemorySender(context)

    def open(self, metas: tuple[TensorMeta, ...]) -> bytes:
        return self.inner.open(metas)

    def connect(self) -> None:
        self.inner.connect()

    def send(self, transfer: Transfer, tensors: Pairs) -> TransferStats:
        return self.inner.send(transfer, tensors)

    def stable(self) -> bool:
        return self.inner.stable()

    def abort(self) -> None:
        self.inner.abort()

    def close(self) -> None:
        self.inner.close()


class Receiver(ReceiverTransport):
    name = "third party"

    def __init__(self, context: LinkContext, *, receiver: int) -> None:
        super().__init__(context, receiver=receiver)
        self.inner = SharedMemoryReceiver(context, receiver=receiver)

    def connect(self, address: bytes) -> None:
        self.inner.connect(address)

    def receive(self, transfer: Transfer) -> Iterator[WeightChunk]:
        return self.inner.receive(transfer)

    def abort(self) -> None:
        self.inner.abort()

    def close(self) -> None:
        self.inner.close()


class DropsATensor(Sender):
    def send(self, transfer: Transfer, tensors: Pairs) -> TransferStats:
        return self.inner.send(transfer, (pair for pair in tensors if pair[0].name != "int8"))


class ReadsTensorsLate(Sender):
    def send(self, transfer: Transfer, tensors: Pairs) -> TransferStats:
        return self.inner.send(transfer, list(tensors))


class SwallowsWhatTheSourceRaises(Sender):
    def send(self, transfer: Transfer, tensors: Pairs) -> TransferStats:
        def until_it_raises() -> Iterator[tuple[TensorMeta, torch.Tensor]]:
            with contextlib.suppress(LookupError):
                yield from tensors

        return self.inner.send(transfer, until_it_raises())


class CountsWrongly(Sender):
    def send(self, transfer: Transfer, tensors: Pairs) -> TransferStats:
        stats = self.inner.send(transfer, tensors)
        return replace(stats, changed_values=(stats.changed_values or 0) + 1)


class SaysThatBucketsAreStable(Sender):
    def stable(self) -> bool:
        return True


class IgnoresAbort(Sender):
    def abort(self) -> None: ...

    def close(self) -> None:
        self.inner.abort()
        time.sleep(0.2)
        self.inner.close()


class HangsOnAbort(Sender):
    for_ever = threading.Event()

    def abort(self) -> None:
        self.for_ever.wait(20)


class ClosesOnce(Sender):
    closed = False

    def close(self) -> None:
        if self.closed:
            raise RuntimeError("closed already")
        self.closed = True
        self.inner.close()


class LeaksAFile(Sender):
    leaked: ClassVar[list[int]] = []

    def send(self, transfer: Transfer, tensors: Pairs) -> TransferStats:
        self.leaked.append(os.dup(0))
        return self.inner.send(transfer, tensors)


class LeaksAThread(Sender):
    for_ever = threading.Event()

    def connect(self) -> None:
        threading.Thread(target=self.for_ever.wait, args=(60,), daemon=True).start()
        self.inner.connect()


class LeavesAFileInMemory(Sender):
    left: ClassVar[list[SharedMemory]] = []

    def open(self, metas: tuple[TensorMeta, ...]) -> bytes:
        self.memory = SharedMemory(create=True, size=1)
        self.left.append(SharedMemory(self.memory.name))
        return self.inner.open(metas)

    def close(self) -> None:
        self.memory.close()  # and no unlink
        self.inner.close()


class SendsToAnyCaller(Sender):
    def __init__(self, context: LinkContext) -> None:
        super().__init__(replace(context, token=""))


class AnyCaller(Receiver):
    def __init__(self, context: LinkContext, *, receiver: int) -> None:
        super().__init__(replace(context, token=""), receiver=receiver)


class FlipsAByteThatHasNoDigest(Receiver):
    def receive(self, transfer: Transfer) -> Iterator[WeightChunk]:
        for chunk in self.inner.receive(transfer):
            if not self.context.digest:
                chunk.payload = chunk.payload.clone()
                chunk.payload[max(chunk.pieces, key=lambda piece: piece.nbytes).offset] ^= 1
            yield chunk


class ReusesABufferBeforeItsRelease(Receiver):
    def receive(self, transfer: Transfer) -> Iterator[WeightChunk]:
        buffer, ahead = torch.empty(2 << 20, dtype=torch.uint8), queue.Queue[WeightChunk | None]()

        def read() -> None:
            with contextlib.suppress(TransportError):
                for chunk in self.inner.receive(transfer):
                    pieces, offset = [], 0
                    for piece in chunk.pieces:
                        data = chunk.payload[piece.offset : piece.offset + piece.nbytes]
                        buffer[offset : offset + piece.nbytes] = data
                        pieces.append(msgspec.structs.replace(piece, offset=offset))
                        offset += piece.nbytes
                    ahead.put(replace(chunk, pieces=tuple(pieces), payload=buffer, stable=False))
            ahead.put(None)

        threading.Thread(target=read, daemon=True).start()
        while (chunk := ahead.get()) is not None:
            yield chunk


class SaysStableOfABucket(Receiver):
    def receive(self, transfer: Transfer) -> Iterator[WeightChunk]:
        for chunk in self.inner.receive(transfer):
            chunk.stable = True
            chunk.release()
            chunk.release = lambda: None
            yield chunk


class StampsChunksWithWhatWasAskedFor(Receiver):
    def receive(self, transfer: Transfer) -> Iterator[WeightChunk]:
        for chunk in self.inner.receive(transfer):
            chunk.version = transfer.version
            yield chunk


class WaitsForEver(Receiver):
    def __init__(self, context: LinkContext, *, receiver: int) -> None:
        super().__init__(replace(context, timeout_s=10_000), receiver=receiver)


class NamesNobody(Receiver):
    def receive(self, transfer: Transfer) -> Iterator[WeightChunk]:
        try:
            yield from self.inner.receive(transfer)
        except UpdateTimeoutError:
            raise UpdateTimeoutError("it took too long") from None


class TakesADeadSenderForASlowOne(Receiver):
    for_ever = threading.Event()

    def receive(self, transfer: Transfer) -> Iterator[WeightChunk]:
        try:
            yield from self.inner.receive(transfer)
        except TransportError:
            self.for_ever.wait(20)


HANGS = "it hangs"
FAULTS: list[tuple[type[SenderTransport], type[ReceiverTransport], str, str]] = [
    (DropsATensor, Receiver, "test_bytes_are_exact_over_versions", "int8"),
    (ReadsTensorsLate, Receiver, "test_a_tensor_may_be_overwritten_when_the_next_is_asked_for", "other bytes"),
    (SwallowsWhatTheSourceRaises, Receiver, "test_what_the_source_raises_comes_out_of_send", "nothing was raised"),
    (CountsWrongly, Receiver, "test_changed_values_are_counted_exactly_or_not_at_all", "counted as changed"),
    (
        SaysThatBucketsAreStable,
        Receiver,
        "test_a_stable_chunk_stays_as_it_is_until_the_version_is_finished",
        "not every",
    ),
    (IgnoresAbort, Receiver, "test_abort_wakes_a_sender_that_sends", HANGS),
    (HangsOnAbort, Receiver, "test_abort_wakes_a_sender_that_connects", HANGS),
    (ClosesOnce, Receiver, "test_close_may_come_at_any_time_and_again", "closed already"),
    (LeaksAFile, Receiver, "test_thirty_versions_and_a_close_leave_nothing_behind", "open files"),
    (LeaksAThread, Receiver, "test_aborted_transfers_leave_nothing_behind", "threads"),
    (LeavesAFileInMemory, Receiver, "test_thirty_versions_and_a_close_leave_nothing_behind", "/dev/shm/"),
    (SendsToAnyCaller, AnyCaller, "test_a_sender_whose_only_caller_is_a_stranger_ends_within_its_bound", "nothing was"),
    (Sender, FlipsAByteThatHasNoDigest, "test_bytes_are_exact_without_digests", "other bytes"),
    (Sender, ReusesABufferBeforeItsRelease, "test_a_lent_chunk_stays_as_it_is_until_it_is_released", "a chunk changed"),
    (Sender, SaysStableOfABucket, "test_a_stable_chunk_stays_as_it_is_until_the_version_is_finished", "chunk changed"),
    (Sender, StampsChunksWithWhatWasAskedFor, "test_a_chunk_says_of_which_version_and_manifest_it_is", "came as"),
    (Sender, WaitsForEver, "test_a_receiver_waits_at_most_its_bound", HANGS),
    (Sender, NamesNobody, "test_a_receiver_waits_at_most_its_bound", "lacks 'sender 3'"),
    (Sender, TakesADeadSenderForASlowOne, "test_a_sender_process_that_is_killed_ends_receive_with_an_error", HANGS),
]


class Buckets(TransportSuite):
    transport = "third party"
    settings: ClassVar = {"staging_limit_bytes": 128 << 10}
    settle_s = 1.5


class Impatient(Buckets):
    patience_s = 3


@pytest.fixture(autouse=True)
def for_ever_ends() -> Iterator[None]:
    """What the faults keep for ever is given back after the test."""
    yield
    for fault in (HangsOnAbort, LeaksAThread, TakesADeadSenderForASlowOne):
        fault.for_ever.set()
        fault.for_ever = threading.Event()
    while LeaksAFile.leaked:
        os.close(LeaksAFile.leaked.pop())
    while LeavesAFileInMemory.left:
        memory = LeavesAFileInMemory.left.pop()
        memory.close()
        memory.unlink()


@pytest.mark.parametrize(("sender", "receiver", "test", "reason"), FAULTS)
def test_a_transport_that_breaks_a_promise_is_caught(
    sender: type[SenderTransport], receiver: type[ReceiverTransport], test: str, reason: str
) -> None:
    register_transport("third party", sender, receiver)
    try:
        failures = (Impatient if reason == HANGS else Buckets).failures(test)
    finally:
        unregister_transport("third party")
    assert reason in str(failures[test])


def test_a_sound_transport_of_a_third_party_passes_in_other_processes_too() -> None:
    register_transport("third party", Sender, Receiver)
    try:
        tests = {test for _, _, test, _ in FAULTS} | {"test_bytes_are_exact_in_other_processes"}
        assert Buckets.failures(*sorted(tests)) == {}
    finally:
        unregister_transport("third party")


# ---- adapters -----------------------------------------------------------------------------------------------------

Groups = Iterable[Iterable[tuple[str, torch.Tensor]]]


class DropsAName(TorchModuleAdapter):
    def apply(self, groups: Groups) -> int:
        return super().apply([(n, t) for n, t in group if n != "1.bias"] for group in groups)


class AppliesHalfAGroup(TorchModuleAdapter):
    def apply(self, groups: Groups) -> int:
        return super().apply(list(group)[::2] for group in groups)


class StopsBeforeTheLastGroup(TorchModuleAdapter):
    def apply(self, groups: Groups) -> int:
        reader = iter(groups)
        return super().apply(next(reader) for _ in range(2))


class NeedsTwoReloads(TorchModuleAdapter):
    pending: ClassVar[list[tuple[str, torch.Tensor]]] = []

    def apply(self, groups: Groups) -> int:
        last, self.pending = self.pending, [(name, tensor.clone()) for group in groups for name, tensor in group]  # type: ignore[misc]
        return super().apply([last])


class ReloadsForEachGroup(TorchModuleAdapter):
    def apply(self, groups: Groups) -> int:
        return sum(super(ReloadsForEachGroup, self).apply([group]) for group in groups)


class KeepsViews(TorchModuleAdapter):
    def apply(self, groups: Groups) -> int:
        for group in groups:
            for name, tensor in group:
                self._tensors()[name].data = tensor
        return 1


class ReadsAGroupLate(TorchModuleAdapter):
    def apply(self, groups: Groups) -> int:
        return super().apply([list(group) for group in groups])


class StaysInItsReload(TorchModuleAdapter):
    loading = False

    def apply(self, groups: Groups) -> int:
        assert not self.loading, "a reload is under way"
        self.loading = True
        count = super().apply(groups)
        self.loading = False
        return count


class SwallowsErrors(TorchModuleAdapter):
    def apply(self, groups: Groups) -> int:
        with contextlib.suppress(Exception):
            super().apply(groups)
        return 1


class ClearsTheModelFirst(TorchModuleAdapter):
    def apply(self, groups: Groups) -> int:
        for tensor in self._tensors().values():
            tensor.data.zero_()
        return super().apply(groups)


class ChangesTheModelInLoadMap(TorchModuleAdapter):
    def load_map(self, manifest: Manifest) -> LoadMap:
        self._tensors()["0.bias"].data.add_(1)
        return super().load_map(manifest)


class TakesAnyShape(TorchModuleAdapter):
    def load_map(self, manifest: Manifest) -> LoadMap:
        return super().load_map(Manifest.from_module(self._module))


class TearsAModule(TorchModuleAdapter):
    def load_map(self, manifest: Manifest) -> LoadMap:
        found = super().load_map(manifest)
        groups = tuple(ModuleGroup(name, (name,)) for group in found.groups for name in group.names)
        return msgspec.structs.replace(found, groups=groups)


class LosesAGroup(TorchModuleAdapter):
    def load_map(self, manifest: Manifest) -> LoadMap:
        found = super().load_map(manifest)
        return msgspec.structs.replace(found, groups=found.groups[1:])


class LosesATarget(TorchModuleAdapter):
    def load_map(self, manifest: Manifest) -> LoadMap:
        found = super().load_map(manifest)
        return msgspec.structs.replace(found, copies=found.copies[1:])


class FeedsAPart(TorchModuleAdapter):
    def load_map(self, manifest: Manifest) -> LoadMap:
        found = super().load_map(manifest)
        first = found.copies[0]
        half = Region.of(torch.empty(3, 3, device="meta")[:2])
        return msgspec.structs.replace(
            found, copies=(msgspec.structs.replace(first, source=half, destination=half), *found.copies[1:])
        )


IN_ANY_ORDER = "test_whole_groups_in_any_order_are_exact_in_one_reload"
AFTER_A_FAILURE = "test_what_the_groups_raise_comes_out_and_the_next_update_is_exact"
ON_LOAN = "test_lent_memory_is_not_used_after_its_loan"
ADAPTERS: list[tuple[type[TorchModuleAdapter], str, str]] = [
    (DropsAName, "test_every_name_reaches_the_model", "another 1.bias changed nothing"),
    (AppliesHalfAGroup, "test_every_name_reaches_the_model", "changed nothing"),
    (StopsBeforeTheLastGroup, IN_ANY_ORDER, "asked for 2 of 3 groups"),
    (NeedsTwoReloads, IN_ANY_ORDER, "they are not loaded"),
    (ReloadsForEachGroup, IN_ANY_ORDER, "the loader ran 3 times"),
    (KeepsViews, ON_LOAN, "other weights are live"),
    (ReadsAGroupLate, ON_LOAN, "other weights are live"),
    (StaysInItsReload, AFTER_A_FAILURE, "a reload is under way"),
    (SwallowsErrors, AFTER_A_FAILURE, "asked for 0 of 3"),
    (ClearsTheModelFirst, AFTER_A_FAILURE, "other weights are live"),
    (ChangesTheModelInLoadMap, "test_load_map_leaves_the_model_as_it_was", "changed the model"),
    (TakesAnyShape, "test_a_tensor_of_another_shape_is_refused_or_the_load_map_shows_it", "was taken for"),
    (TearsAModule, "test_names_that_feed_one_module_stand_in_one_group", "several groups"),
    (LosesAGroup, "test_groups_partition_the_names", "each in one group"),
    (LosesATarget, "test_every_parameter_is_fed_whole_or_listed_as_unfed", "nothing feeds ['0.weight']"),
    (FeedsAPart, "test_every_parameter_is_fed_whole_or_listed_as_unfed", "fed in part: ('0.weight',)"),
]


class Faulty(EngineSuite):
    """What is expected is what the same faulty adapter makes of a fresh module: the weakest oracle."""

    kind: ClassVar[type[TorchModuleAdapter]]

    def make_adapter(self) -> EngineAdapter:
        self.module = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)))
        return self.kind(self.module)

    def weights(self, seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        state: dict[str, torch.Tensor] = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3))).state_dict()
        return state

    def snapshot(self, adapter: EngineAdapter) -> Any:
        return self.module.state_dict()


def suite_of(kind: type[TorchModuleAdapter], **settings: Any) -> type[Faulty]:
    suite: Any = type(kind.__name__, (Faulty,), {"kind": kind, **settings})
    return suite  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "test", "reason"), ADAPTERS)
def test_an_adapter_that_breaks_a_promise_is_caught(kind: type[TorchModuleAdapter], test: str, reason: str) -> None:
    assert reason in str(suite_of(kind).failures(test)[test])


def test_an_adapter_that_keeps_its_promises_passes() -> None:
    assert suite_of(TorchModuleAdapter).failures() == {}


def test_a_loader_that_may_keep_tensors_is_not_robbed_of_them_while_it_refers_to_them() -> None:
    assert suite_of(ReadsAGroupLate, keeps_tensors=True).failures() == {}
