"""NCCL links without a GPU: the choice of a backend, NCCL's structs, turns; and the whole protocol over a stand-in for NCCL."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from weightsync.background import Background
from weightsync.cuda import moves
from weightsync.digest import digest_bytes
from weightsync.errors import TransportError, UpdateTimeoutError
from weightsync.fanout import LockStep
from weightsync.identity import nccl_version
from weightsync.interfaces import LinkContext, ReceiverTransport, Transfer
from weightsync.manifest import Manifest
from weightsync.plan import why_not_nccl
from weightsync.testing import TransportSuite
from weightsync.testing.link import Pairs, Tensors, TransportCase, items, model, receive_all, transfer
from weightsync.testing.suite import at_most, raises
from weightsync.transports import announcements, backend, broadcast, nccl, nccl_group
from weightsync.transports.announcements import Arriving, Header
from weightsync.transports.backend import backend_of
from weightsync.transports.broadcast import BroadcastReceiver, BroadcastSender
from weightsync.transports.bucketplan import BucketPlan
from weightsync.transports.in_turns import next_turn
from weightsync.transports.turns import Turns

# ---- what is the same on any machine ----------------------------------------------------------------------------


def test_the_structs_have_the_layout_of_nccl() -> None:
    assert ctypes.sizeof(nccl.UniqueId) == 128
    assert ctypes.sizeof(nccl.Config) == 48
    offsets = {name: getattr(nccl.Config, name).offset for name, *_ in nccl.Config._fields_}
    assert offsets == {
        "size": 0,
        "magic": 8,
        "version": 12,
        "blocking": 16,
        "cga_cluster_size": 20,
        "min_ctas": 24,
        "max_ctas": 28,
        "net_name": 32,
        "split_share": 40,
        "padding": 44,
    }
    config = nccl.Config.non_blocking()
    assert (config.size, config.magic, config.version, config.blocking) == (48, 0xCAFEBEEF, 21800, 0)
    undefined = ("cga_cluster_size", "min_ctas", "max_ctas", "split_share", "padding")
    assert {getattr(config, name) for name in undefined} == {-(2**31)}
    assert config.net_name is None


@pytest.mark.parametrize(
    ("gpus", "version", "cupy", "environment", "why"),
    [
        (("a", "b"), "2.28.9", True, {}, ""),
        (("a", "b", "c"), "2.18.1", True, {}, ""),
        (("a", "b"), "2.17.1", True, {}, "2.18 is needed"),
        (("a", "b"), "", True, {}, "no NCCL"),
        (("a", "b"), "2.28.9", False, {}, "no cupy"),
        (("a", ""), "2.28.9", True, {}, "not all"),
        ((), "2.28.9", True, {}, "not all"),
        (("a", "b"), "2.28.9", True, {"NCCL_COMM_BLOCKING": "1"}, "NCCL_COMM_BLOCKING"),
        (("a", "b"), "2.28.9", True, {"NCCL_COMM_BLOCKING": "0"}, ""),
        (("a", "a"), "2.28.9", True, {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, "before 2.30"),
        (("a", "b", "a"), "2.30.7", True, {}, "NCCL_MULTI_RANK_GPU_ENABLE is not 1"),
        (("a", "a"), "2.30.7", True, {"NCCL_MULTI_RANK_GPU_ENABLE": "0"}, "NCCL_MULTI_RANK_GPU_ENABLE is not 1"),
        (("a", "a"), "2.30.7", True, {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, ""),
    ],
)
def test_nccl_is_used_where_it_can_be(
    gpus: tuple[str, ...], version: str, cupy: bool, environment: dict[str, str], why: str
) -> None:
    found = why_not_nccl(gpus, nccl=version, cupy=cupy, environment=environment)
    assert why in found
    assert bool(why) == bool(found)


def test_links_with_an_end_on_the_cpu_do_not_look_for_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise AssertionError("NCCL was looked for")

    monkeypatch.setattr(backend, "nccl_version", fail)
    case = TransportCase()
    for settings in ({}, {"gpus": ("a", "", "b"), "device": "cuda:0"}, {"gpus": ("a", "b", "c")}):
        assert backend_of(case.context(**settings)) == "gloo"


def test_why_a_link_between_gpus_goes_over_gloo_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend, "nccl_version", lambda: "2.28.9")
    monkeypatch.setattr(backend, "cupy_version", lambda: "14.0.0")
    backend._say_once.cache_clear()
    context = TransportCase().context(gpus=("one", "one", "two"), device="cuda:0")
    assert [backend_of(context) for _ in range(3)] == ["gloo"] * 3
    (record,) = caplog.records
    assert "several of its ranks are on GPU one" in record.getMessage()


def test_the_library_is_spoken_to_where_there_is_one() -> None:
    if not nccl_version():
        pytest.skip("no NCCL on this machine")
    ids = {nccl.new_unique_id() for _ in range(2)}
    assert [len(id) for id in ids] == [128, 128]
    with pytest.raises(TransportError, match="NCCL: it failed: invalid argument"):
        nccl._check("it", 4)
    nccl._check("it", 0)
    nccl._check("it", 7)


def test_a_turn_is_one_links_until_all_its_ends_gave_it_back() -> None:
    turns = Turns()
    for token in ("a", "b", "a"):
        turns.join("gpu", token)
    assert turns.num_links("gpu") == 2
    assert turns.num_links("another gpu") == 0
    turns.take("gpu", "a", lambda: None)
    turns.take("gpu", "a", lambda: None)
    turns.take("another gpu", "b", lambda: None)

    def impatient() -> None:
        raise UpdateTimeoutError("too long")

    with pytest.raises(UpdateTimeoutError):
        turns.take("gpu", "b", impatient)
    turns.give("gpu", "a")
    taken = threading.Event()

    def wait() -> None:
        turns.take("gpu", "b", lambda: None)
        taken.set()

    threading.Thread(target=wait, daemon=True).start()
    assert not taken.wait(0.05)
    turns.give("gpu", "a", "after a")
    assert taken.wait(5)
    turns.give("gpu", "b")
    assert turns.take("gpu", "b", lambda: None) == "after a"
    turns.give("gpu", "b", "after b")
    assert turns.take("gpu", "a", lambda: None) == "after b"
    turns.give("gpu", "a")
    for token in ("a", "b", "a", "a"):
        turns.leave("gpu", token)
    assert turns.num_links("gpu") == 0
    turns.join("gpu", "c")
    assert turns.take("gpu", "c", lambda: None) is None, "what waits for the kernels of links that are closed"


# ---- the protocol over a stand-in -----------------------------------------------------------------------------------


class Operation:
    """One broadcast of one communicator: it is done when it has come to its turn on every member's GPU."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.running: dict[int, tuple[int, int]] = {}
        self.started = 0.0
        self.done = False


class Machine:
    """GPUs that run one kernel at a time, in the order in which they were given: the worst that NCCL has to live with."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.worlds: dict[bytes, list[FakeCommunicator]] = {}
        self.queues: dict[Any, deque[tuple[FakeCommunicator, Operation, int, int]]] = {}
        """By device, and by rank, so that ends of one link which name one device have a GPU each."""
        self.operations: dict[tuple[bytes, int], Operation] = {}
        self.ids = itertools.count()
        self.silent = False
        """Kernels do not run."""
        self.wire_s = 0.0
        """How long a broadcast takes."""
        self.num_behind_another = 0
        """Kernels that were given to a GPU behind one of another link."""

    def new_unique_id(self) -> bytes:
        return next(self.ids).to_bytes(128, "little")

    def advance(self) -> None:
        """Start what is first on a GPU; end what runs on all GPUs of its communicator."""
        moved = not self.silent
        while moved:
            moved = False
            for queue in self.queues.values():
                if queue and queue[0][0].rank not in queue[0][1].running:
                    comm, operation, address, nbytes = queue[0]
                    operation.running[comm.rank] = (address, nbytes)
                    operation.started = time.monotonic()
                    moved = True
            for queue in self.queues.values():
                if queue and self._is_done(queue[0][1]):
                    queue.popleft()
                    moved = True

    def _is_done(self, operation: Operation) -> bool:
        if operation.done or len(operation.running) < operation.size:
            return operation.done
        if time.monotonic() < operation.started + self.wire_s:
            return False
        source, nbytes = operation.running[0]
        for rank, (address, length) in operation.running.items():
            assert length == nbytes, "the members broadcast different numbers of bytes"
            if rank:
                ctypes.memmove(address, source, nbytes)
        operation.done = True
        return True


class FakeStream:
    def __init__(self) -> None:
        self.last: Operation | None = None

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...


class FakeEvent:
    def record(self, stream: FakeStream) -> None:
        self.operation = stream.last

    def query(self) -> bool:
        with machine.lock:
            machine.advance()
            return self.operation is None or self.operation.done


class FakeCommunicator:
    def __init__(self, unique_id: bytes, *, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device, self._id = rank, size, device, unique_id
        self._calls = itertools.count()
        self._called: Callable[[], None] | None = None
        """Gives the stream what was called last; as NCCL does, some time after the call."""
        self.ended = ""
        with machine.lock:
            machine.worlds.setdefault(unique_id, []).append(self)

    def is_ready(self) -> bool:
        if self.ended:
            raise TransportError("the NCCL communicator has ended")
        if len(machine.worlds[self._id]) < self.size:
            return False
        called, self._called = self._called, None
        if called is not None:
            called()
            return False
        return True

    def broadcast(self, address: int, nbytes: int, *, root: int, stream: FakeStream) -> None:
        assert root == 0
        assert self._called is None, "NCCL was called before it had done what was called last"

        def give() -> None:
            with machine.lock:
                stream.last = machine.operations.setdefault((self._id, next(self._calls)), Operation(self.size))
                queue = machine.queues.setdefault((self.device, self.rank), deque())
                machine.num_behind_another += any(comm is not self for comm, *_ in queue)
                queue.append((self, stream.last, address, nbytes))

        self._called = give

    def finalize(self) -> None: ...

    def destroy(self) -> None:
        self.ended = "gently"

    def abort(self) -> None:
        with machine.lock:
            self.ended = "by force"
            for queue in machine.queues.values():
                mine = [entry for entry in queue if entry[0] is self]
                for entry in mine:
                    queue.remove(entry)
                    entry[1].running.pop(self.rank, None)  # an aborted kernel touches no memory any more


class FakeMoves:
    def __init__(self, *_: object) -> None: ...

    def run(self, *, digest: bool) -> None: ...


class FakeStreams:
    def take(self, device: torch.device) -> FakeStream:
        return FakeStream()

    def give(self, stream: FakeStream) -> None: ...


machine = Machine()


class FakeMemory:
    def __init__(self, device: torch.device) -> None: ...

    def pool(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Machine:
    global machine
    machine = Machine()
    for name, fake in {
        "Communicator": FakeCommunicator,
        "new_unique_id": machine.new_unique_id,
        "Moves": FakeMoves,
        "GpuMemory": FakeMemory,
        "_streams": FakeStreams(),
        "stream_of": lambda device: None,
    }.items():
        monkeypatch.setattr(nccl_group, name, fake)
    monkeypatch.setattr(backend, "nccl_version", lambda: "2.30.7")
    monkeypatch.setattr(backend, "cupy_version", lambda: "14.0.0")
    monkeypatch.setattr(moves, "digest_words", digest_bytes)  # that of CPU memory, where receivers find the bytes
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return machine


NEEDS_PROCESSES = (
    "test_bytes_are_exact_in_other_processes",
    "test_a_receiver_process_that_is_killed_ends_the_transfer_with_an_error",
    "test_a_sender_process_that_is_killed_ends_receive_with_an_error",
    "test_a_sender_process_that_is_stopped_before_it_connects_is_an_error_for_its_receiver",
    "test_a_process_that_is_stopped_is_an_error_for_whoever_waits_for_it",
)


class OnStandIns(TransportCase):
    transport = "broadcast"

    def context(self, *, num_receivers: int = 2, **others: Any) -> LinkContext:
        gpus = tuple(f"gpu {i}" for i in range(num_receivers + 1))
        settings: dict[str, Any] = {"gpus": gpus, "gpu_bucket_bytes": 64 << 10, "device": "cuda:0"}
        return super().context(num_receivers=num_receivers, **(settings | others))


@pytest.mark.usefixtures("stand_in")
class TestSuiteOnStandIns(OnStandIns, TransportSuite):
    num_tiny_tensors = 2_000


@pytest.mark.usefixtures("stand_in")
class TestSuiteOfHeldTensors(OnStandIns, TransportSuite):
    """They lie where they did: what comes is told once, and buckets are not announced."""

    held = True
    num_tiny_tensors = 2_000

    def hold(self, tensors: Tensors) -> Callable[[Tensors], Tensors]:
        kept = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}

        def change(values: Tensors) -> Tensors:
            assert values.keys() <= kept.keys()
            return {name: kept[name].copy_(value) for name, value in values.items()}

        return change

    def test_progress_is_told_while_all_tensors_were_asked_for(self) -> None:
        with self.link(model(0)) as link:
            link.move(1, model(1))
            before, seen = link.sender.progress, set[int]()
            machine.wire_s = 0.02
            of = transfer(2, model(2))
            works = [self.start(partial(receive_all, receiver, of)) for receiver in link.receivers]
            sending = link.send(of, model(2))
            while not sending.is_done(0.002):
                seen.add(link.sender.progress - before)
            unfinished: list[Background[Any]] = [sending, *works]
            for work in unfinished:
                self.end(work)
            assert len(seen) > 2, seen
            assert link.sender.progress - before == len(link.sender._planned.payloads) > 2  # type: ignore[attr-defined]

    @pytest.mark.parametrize("slow", ["wire", "reader"])
    def test_what_goes_by_plan_may_last_longer_than_the_bound(self, slow: str) -> None:
        with self.link(model(0), timeout_s=1.0) as link:
            link.move(1, model(1))
            pause_s = 2.0 / len(link.sender._planned.payloads)  # type: ignore[attr-defined]
            machine.wire_s = pause_s if slow == "wire" else 0.0

            def receive(receiver: ReceiverTransport, of: Transfer) -> None:
                for chunk in receiver.receive(of):
                    time.sleep(pause_s if slow == "reader" else 0.0)
                    chunk.release()

            for version in (2, 3):
                of, began = transfer(version, model(version)), time.monotonic()
                works = [self.start(partial(receive, receiver, of)) for receiver in link.receivers]
                sending = link.send(of, model(version))
                unfinished: list[Background[Any]] = [sending, *works]
                for work in unfinished:
                    self.end(work)
                assert time.monotonic() - began > 1.5

    def test_what_comes_is_told_once_while_the_tensors_lie_where_they_did(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told = []

        def announce(group: Any, header: Any, nbytes: int, what: str) -> Any:
            told.append(header)
            return announcements.announce(group, header, nbytes, what)

        monkeypatch.setattr(broadcast, "announce", announce)
        with self.link(model(0)) as link:
            for version in (1, 2, 3):
                link.move(version, model(version))
            first, end, *later = told
            assert isinstance(first, BucketPlan)
            assert first.number == 1
            assert len(first.buckets) > 1
            assert [end, *later] == [None, None, None]
            link._hold = self.hold(model(0))
            link.move(4, model(4))
            assert isinstance(told[4], BucketPlan)
            assert told[4].number == 2
        with self.link(model(0)) as link:
            link.move(1, model(1))
            link.receivers[0]._plan = None  # type: ignore[attr-defined]
            works = [self.start(partial(receive_all, receiver, transfer(2, model(2)))) for receiver in link.receivers]
            link.send(transfer(2, model(2)), model(2))
            with raises(TransportError, match="a plan .1. that it has not told"):
                self.end(works[0])


for _name in NEEDS_PROCESSES:
    setattr(TestSuiteOnStandIns, _name, None)
    setattr(TestSuiteOfHeldTensors, _name, None)


@pytest.mark.usefixtures("stand_in")
class TestOnStandIns(OnStandIns):
    def test_a_bucket_that_is_not_taken_ends_at_the_bound_and_the_communicator_is_aborted(self) -> None:
        with self.link(model(0), timeout_s=1) as link:
            machine.silent = True
            of = transfer(1, model(1))
            works = [self.start(partial(receive_all, receiver, of)) for receiver in link.receivers]
            sending = link.send(of, model(1))
            with at_most(5):
                unfinished: list[Background[Any]] = [sending, *works]
                for work in unfinished:
                    with raises(UpdateTimeoutError, TransportError, match="link of sender 3"):
                        self.end(work)
            self._expect_ended("by force")

    def test_a_link_that_is_closed_in_peace_is_finalized(self) -> None:
        with self.link(model(0)) as link:
            link.move(1, model(1))
            link.abort()  # as a weight sync does before it closes its links
        self._expect_ended("gently")

    def _expect_ended(self, how: str) -> None:
        deadline = time.monotonic() + 5
        while {comm.ended for world in machine.worlds.values() for comm in world} != {how}:
            assert time.monotonic() < deadline, [comm.ended for world in machine.worlds.values() for comm in world]
            time.sleep(0.01)

    def test_the_next_bucket_is_received_while_the_last_is_read(self) -> None:
        tensors = {f"t{i}": torch.full((16 << 10,), float(i)) for i in range(8)}
        of = transfer(1, tensors)
        with self.link(tensors, num_receivers=1, gpu_bucket_bytes=64 << 10) as link:
            machine.wire_s = 0.05
            sending = link.send(of, tensors)
            done = 0
            for chunk in link.receivers[0].receive(of):
                deadline = time.monotonic() + 5
                wanted = min(done + 2, 8) + 1  # and the one with which the link was opened
                while sum(op.done for op in machine.operations.values()) < wanted:
                    assert time.monotonic() < deadline, f"the bucket after {done} is not on its way"
                    time.sleep(0.001)
                    with machine.lock:
                        machine.advance()
                done += 1
                chunk.release()
            self.end(sending)
            assert done == 8

    @pytest.mark.parametrize("num_senders", [2, 3])
    @pytest.mark.parametrize("collective", [False, True], ids=["held", "made together"])
    def test_several_senders_take_turns(self, num_senders: int, collective: bool) -> None:
        links = [self._open(sender) for sender in range(num_senders)]
        for version in range(1, 5):
            self._move(version, links, collective=collective)
        for sender, receivers in links:
            for close in (sender.close, *(receiver.close for receiver in receivers)):
                self.soon(close)

    def test_a_links_next_buckets_wait_on_the_gpu_while_anothers_are_on_their_way(self) -> None:
        links = [self._open(sender) for sender in range(2)]
        machine.wire_s = 0.05
        shares = {f"t{i}": torch.full((16 << 10,), float(i)) for i in range(16)}  # a bucket each, two in a turn
        self._move(1, links, collective=False, tensors=shares)
        assert machine.num_behind_another >= 8  # two turns' kernels, on both receivers' GPUs
        for sender, receivers in links:
            for close in (sender.close, *(receiver.close for receiver in receivers)):
                self.soon(close)

    def test_a_sender_that_announces_more_for_a_turn_than_there_is_room_for_is_refused(self) -> None:
        said: list[tuple[Header, Arriving]] = [
            (Header(1, "", (), more=True), Arriving(f"bucket {i}", 1, torch.empty(0), None)) for i in range(6)
        ]

        class Said:
            who = "broadcast link of sender 3"

            def next(self) -> Arriving | None:
                return said[0][1] if said else None

            def header(self, arriving: Arriving) -> Header:
                return said.pop(0)[0]

        with pytest.raises(TransportError, match="sender 3: it announced more than 4 buckets at once"):
            next_turn(Said(), 4)  # type: ignore[arg-type]
        assert len(said) == 2
        with pytest.raises(TransportError, match="sender 3: it announced a bucket that did not come"):
            next_turn(Said(), 4)  # type: ignore[arg-type]

    def _open(self, index: int) -> tuple[BroadcastSender, list[BroadcastReceiver]]:
        """A link of which the ends are on GPUs of their own, the receivers on the same as those of the other links."""
        settings: dict[str, Any] = {"sender": index, "token": f"link {index}", "timeout_s": 10}
        sender = BroadcastSender(self.context(device=f"cuda:{10 + index}", **settings))
        receivers = [BroadcastReceiver(self.context(device=f"cuda:{i}", **settings), receiver=i) for i in range(2)]
        address = sender.open(Manifest.from_tensors(model(0)).tensors)
        works = [self.start(partial(receiver.connect, address)) for receiver in receivers]
        self.end_all(self.start(sender.connect), *works)
        return sender, receivers

    def _move(
        self,
        version: int,
        links: list[tuple[BroadcastSender, list[BroadcastReceiver]]],
        *,
        collective: bool,
        tensors: Tensors | None = None,
    ) -> None:
        tensors = model(version) if tensors is None else tensors
        shares = [dict(list(tensors.items())[index :: len(links)]) for index in range(len(links))]
        of = [transfer(version, tensors, share) for share in shares]
        together = threading.Barrier(len(links), timeout=10)

        def source(share: Tensors) -> Pairs:
            for meta, tensor in items(tensors):
                if collective:
                    together.wait()
                if meta.name in share:
                    yield meta, tensor

        receiving = [
            (share, self.start(partial(receive_all, receiver, wanted)))
            for (_, receivers), share, wanted in zip(links, shares, of, strict=True)
            for receiver in receivers
        ]
        sending = [
            self.start(partial(sender.send, wanted, source(share)))
            for (sender, _), share, wanted in zip(links, shares, of, strict=True)
        ]
        self.end_all(*sending, *(work for _, work in receiving))
        for share, work in receiving:
            work.result().check(share)

    def test_a_sender_with_two_links_sends_over_both_in_step(self) -> None:
        """As where an engine came late, and has links beside those of the others."""
        links = [self._open_alone(i) for i in range(2)]
        for version in range(1, 4):
            tensors = model(version)
            of = transfer(version, tensors)
            steps = LockStep(items(tensors), 2, timeout_s=10)
            receiving = [self.start(partial(receive_all, receiver, of)) for _, receiver in links]
            sending = [self.start(partial(sender.send, of, iter(steps))) for sender, _ in links]
            self.end_all(*sending, *receiving)
            for work in receiving:
                work.result().check(tensors)
        for sender, receiver in links:
            for close in (sender.close, receiver.close):
                self.soon(close)

    def _open_alone(self, index: int) -> tuple[BroadcastSender, BroadcastReceiver]:
        settings: dict[str, Any] = {"num_receivers": 1, "token": f"link {index}", "timeout_s": 10}
        sender = BroadcastSender(self.context(device="cuda:9", **settings))
        receiver = BroadcastReceiver(self.context(device=f"cuda:{index}", **settings), receiver=0)
        address = sender.open(Manifest.from_tensors(model(0)).tensors)
        self.end_all(self.start(sender.connect), self.start(partial(receiver.connect, address)))
        return sender, receiver
