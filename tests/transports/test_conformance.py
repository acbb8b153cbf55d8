"""One contract, held by every transport: exact bytes, bounded waits, named culprits, nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, Self, TypeVar

import pytest
import torch

from weightsync.background import Background
from weightsync.chunk import as_bytes
from weightsync.errors import TransportError, UpdateTimeoutError
from weightsync.interfaces import LinkContext, ReceiverTransport, SenderTransport, Transfer, TransferStats
from weightsync.manifest import Manifest, TensorMeta
from weightsync.registry import transport_classes, transport_names
from weightsync.transports.shared_memory import share_parameters

_path = Path(__file__).parent / "receiver_process.py"
_spec = importlib.util.spec_from_file_location("receiver_process", _path)
assert _spec is not None and _spec.loader is not None
receiver_process = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(receiver_process)

T = TypeVar("T")
Tensors = dict[str, torch.Tensor]
Received = dict[str, tuple[str, tuple[int, ...], bytes]]

BUCKET_BYTES = 64 << 10
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "shared_memory-stage": ("shared_memory", {}),
    "shared_memory-parameters": ("shared_memory", {}),
    "shared_memory-buckets": ("shared_memory", {"staging_limit_bytes": 2 * BUCKET_BYTES}),
    "broadcast": ("broadcast", {}),
}
TESTED_ELSEWHERE: frozenset[str] = frozenset()

every_transport = pytest.mark.parametrize("variant", VARIANTS)


@cache
def model(version: int) -> Tensors:
    """Tensors of all odd kinds, to be left as they are; every value changes with the version."""
    torch.manual_seed(version)
    return {
        "fp32": torch.randn(3, 5),
        "larger_than_a_bucket": torch.randn(300, 1000),
        "bf16": torch.randn(7, 3).to(torch.bfloat16),
        "bool": torch.rand(9) > 0.5,
        "int8": torch.randint(-128, 128, (1001,), dtype=torch.int8),
        "float8": torch.randn(6, 2).to(torch.float8_e4m3fn),
        "scalar": torch.randn(()),
        "empty": torch.empty(0, 4),
        "strided": torch.randn(60, 40).t(),
        "every_second": torch.randn(100)[::2],
        "int64": torch.randint(-(2**62), 2**62, (11,)),
        "nan": torch.full((3,), float("nan")),
    }


def expected(tensors: Tensors) -> Received:
    return {name: (str(t.dtype), tuple(t.shape), as_bytes(t.detach()).numpy().tobytes()) for name, t in tensors.items()}


class Shared(torch.nn.Module):
    """The model in shared memory, as a trainer that called `share_parameters` holds it."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.clone())
        share_parameters(self)

    def update(self, tensors: Tensors) -> Tensors:
        own = dict(self.named_buffers())
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
        return own


def context(variant: str, *, num_receivers: int = 2, timeout_s: float = 20, digest: bool = True) -> LinkContext:
    settings: dict[str, Any] = {"staging_limit_bytes": 1 << 30, **VARIANTS[variant][1]}
    return LinkContext(
        sender=0,
        num_receivers=num_receivers,
        host="127.0.0.1",
        token=f"token of {variant}",
        timeout_s=timeout_s,
        bucket_bytes=BUCKET_BYTES,
        digest=digest,
        **settings,
    )


def transfer(version: int, tensors: Tensors) -> Transfer:
    return Transfer(version=version, manifest=Manifest.from_tensors(tensors), names=tuple(tensors))


def items(tensors: Tensors, manifest: Manifest | None = None) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
    manifest = manifest or Manifest.from_tensors(tensors)
    return ((manifest.by_name[name], tensor) for name, tensor in tensors.items())


def start(work: Callable[[], T]) -> Background[T]:
    return Background(work, name="test")


def end(work: Background[T]) -> T:
    assert work.join(30), "it hangs"
    return work.result()


class Link:
    """A sender and its receivers, each end used from a thread of its own."""

    def __init__(self, variant: str, tensors: Tensors, **settings: Any) -> None:
        self.context = context(variant, **settings)
        sender, receiver = transport_classes(VARIANTS[variant][0])
        self.sender: SenderTransport = sender(self.context)
        self.receivers: list[ReceiverTransport] = [
            receiver(self.context, receiver=i) for i in range(self.context.num_receivers)
        ]
        self.shared = Shared(tensors) if variant == "shared_memory-parameters" else None
        self.address = self.sender.open(tuple(meta for meta, _ in items(tensors)))

    def __enter__(self) -> Self:
        works = [start(lambda r=r: r.connect(self.address)) for r in self.receivers]  # type: ignore[misc]
        for work in [*works, start(self.sender.connect)]:
            end(work)
        return self

    def __exit__(self, *_: object) -> None:
        self.sender.close()
        for receiver in self.receivers:
            receiver.close()

    def send(self, of: Transfer, tensors: Tensors) -> Background[TransferStats]:
        if self.shared is not None:
            tensors = self.shared.update(tensors)
        return start(lambda: self.sender.send(of, items(tensors, of.manifest)))

    def move(self, version: int, tensors: Tensors) -> tuple[TransferStats, list[Received]]:
        of = transfer(version, tensors)
        works = [start(partial(receiver_process.receive_all, receiver, of)) for receiver in self.receivers]
        stats = end(self.send(of, tensors))
        found = [end(work) for work in works]
        self.sender.finish()
        return stats, found


class Process:
    """A receiver in a process of its own."""

    def __init__(self, path: str) -> None:
        self._connection: Connection[Any, Any] = Client(path, "AF_UNIX")

    def call(self, command: str, *arguments: Any) -> Any:
        self._connection.send((command, arguments))
        kind, *answer = self._connection.recv()
        if kind == "error":
            raise AssertionError(f"{answer[0]}: {answer[1]}")
        return answer[0]

    def close(self) -> None:
        self._connection.close()


@pytest.fixture(scope="module", autouse=True)
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where receiver processes can be had; it imports torch while other tests run."""
    path = str(tmp_path_factory.mktemp("receivers") / "socket")
    with subprocess.Popen([sys.executable, str(_path), path]) as server:
        yield path
        server.terminate()


def processes(path: str, count: int) -> list[Process]:
    deadline = time.monotonic() + 60
    while not os.path.exists(path):
        assert time.monotonic() < deadline, "the receiver server did not start"
        time.sleep(0.05)
    time.sleep(0.05)
    return [Process(path) for _ in range(count)]


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


def endless(tensors: Tensors) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
    while True:
        yield from items(tensors)


def release_all(receiver: ReceiverTransport) -> None:
    for chunk in receiver.receive(transfer(1, model(1))):
        chunk.release()


def test_every_transport_is_held_to_the_contract() -> None:
    assert set(transport_names()) == {name for name, _ in VARIANTS.values()} | TESTED_ELSEWHERE


@every_transport
@pytest.mark.parametrize("digest", [True, False])
def test_bytes_are_exact_over_versions(variant: str, digest: bool) -> None:
    with Link(variant, model(0), digest=digest) as link:
        for version in range(1, 4):
            stats, found = link.move(version, model(version))
            assert found == [expected(model(version))] * 2
            assert stats.nbytes == sum(t.nbytes for t in model(version).values())


@every_transport
def test_bytes_are_exact_across_processes(variant: str, server: str) -> None:
    link = Link(variant, model(0))
    ends = processes(server, 2)
    works = [
        start(lambda i=i, p=p: p.call("connect", VARIANTS[variant][0], link.context, i, link.address))  # type: ignore[misc]
        for i, p in enumerate(ends)
    ]
    link.sender.connect()
    for work in works:
        end(work)
    for version in range(1, 4):
        tensors = model(version)
        receiving = [start(partial(process.call, "receive", transfer(version, tensors))) for process in ends]
        end(link.send(transfer(version, tensors), tensors))
        for received in receiving:
            assert end(received) == expected(tensors)
        link.sender.finish()
    link.sender.close()
    for process in ends:
        process.close()


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "shared_memory-parameters"])
def test_twenty_thousand_tiny_tensors_arrive(variant: str) -> None:
    values = torch.randn(20_000)
    tensors = {f"t{i}": values[i : i + 1].clone() for i in range(20_000)}
    with Link(variant, tensors, num_receivers=1) as link:
        _, found = link.move(1, tensors)
    assert found == [expected(tensors)]


@every_transport
def test_a_tensor_may_be_overwritten_when_the_next_is_asked_for(variant: str) -> None:
    tensors = {f"t{i}": torch.full((5000,), float(i)) for i in range(30)}
    manifest, reused = Manifest.from_tensors(tensors), torch.empty(5000)

    def one_after_the_other() -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        for name, tensor in tensors.items():
            yield manifest.by_name[name], reused.copy_(tensor)

    with Link(variant, tensors) as link:
        works = [
            start(lambda r=r: receiver_process.receive_all(r, transfer(1, tensors)))  # type: ignore[misc]
            for r in link.receivers
        ]
        link.sender.send(transfer(1, tensors), one_after_the_other())
        for work in works:
            assert end(work) == expected(tensors)


@every_transport
def test_tensors_travel_in_their_wire_dtype(variant: str) -> None:
    held = {"w": torch.randn(500, 1000), "v": torch.randn(3).t(), "s": torch.randn(())}
    wire = {name: tensor.to(torch.bfloat16) for name, tensor in held.items()}
    with Link(variant, wire) as link:
        works = [
            start(lambda r=r: receiver_process.receive_all(r, transfer(1, wire)))  # type: ignore[misc]
            for r in link.receivers
        ]
        manifest = Manifest.from_tensors(wire)
        stats = link.sender.send(transfer(1, wire), [(manifest.by_name[name], t) for name, t in held.items()])
        for work in works:
            assert end(work) == expected(wire)
        assert stats.nbytes == manifest.nbytes


@every_transport
def test_a_lent_chunk_stays_as_it_is_until_it_is_released(variant: str) -> None:
    tensors = {f"t{i}": torch.full((5000,), float(i)) for i in range(30)}

    def slowly(receiver: ReceiverTransport, pause_s: float) -> int:
        seen = 0
        for chunk in receiver.receive(transfer(1, tensors)):
            parts = [chunk.payload[piece.offset : piece.offset + piece.nbytes] for piece in chunk.pieces]
            before = [part.clone() for part in parts]
            time.sleep(pause_s)
            assert all(torch.equal(part, then) for part, then in zip(parts, before, strict=True))
            seen += sum(piece.nbytes for piece in chunk.pieces)
            chunk.release()
        return seen

    with Link(variant, tensors) as link:
        works = [start(lambda r=r, p=p: slowly(r, p)) for r, p in zip(link.receivers, (0.0, 0.02), strict=True)]  # type: ignore[misc]
        end(link.send(transfer(1, tensors), tensors))
        assert [end(work) for work in works] == [30 * 20_000] * 2


@every_transport
def test_a_receiver_that_never_connects_is_named_within_the_bound(variant: str) -> None:
    link = Link(variant, model(0), timeout_s=0.5)
    work = start(lambda: link.receivers[0].connect(link.address))
    with at_most(5), pytest.raises(TransportError, match=r"receivers? \[?1"):
        link.sender.connect()
    with contextlib.suppress(TransportError):
        end(work)
    link.__exit__()


@every_transport
def test_a_sender_that_is_gone_cannot_be_connected_to(variant: str) -> None:
    link = Link(variant, model(0), timeout_s=1)
    link.sender.close()
    with at_most(10), pytest.raises(TransportError):
        link.receivers[0].connect(link.address)
    link.__exit__()


@every_transport
def test_a_receiver_that_closes_half_way_ends_the_transfer_with_an_error(variant: str) -> None:
    with Link(variant, model(1), timeout_s=2) as link:
        work = start(lambda: link.sender.send(transfer(1, model(1)), endless(model(1))))
        start(lambda: release_all(link.receivers[1]))
        next(iter(link.receivers[0].receive(transfer(1, model(1)))))
        link.receivers[0].close()
        with at_most(15), pytest.raises((TransportError, UpdateTimeoutError), match=r"receiver|sender 0"):
            end(work)


@every_transport
def test_a_receiver_process_that_dies_half_way_ends_the_transfer_with_an_error(variant: str, server: str) -> None:
    link = Link(variant, model(1), timeout_s=5, num_receivers=1)
    (process,) = processes(server, 1)
    connected = start(lambda: process.call("connect", VARIANTS[variant][0], link.context, 0, link.address))
    link.sender.connect()
    end(connected)
    sending = start(lambda: link.sender.send(transfer(1, model(1)), endless(model(1))))
    with pytest.raises(EOFError):
        process.call("die_after_one_chunk", transfer(1, model(1)))
    with at_most(15), pytest.raises((TransportError, UpdateTimeoutError), match=r"receiver 0|sender 0"):
        end(sending)
    link.__exit__()


@every_transport
def test_a_sender_that_closes_half_way_ends_receive_with_an_error(variant: str) -> None:
    with Link(variant, model(1), timeout_s=2) as link:
        half = threading.Event()

        def first_half() -> Iterator[tuple[TensorMeta, torch.Tensor]]:
            yield from items(model(1))
            half.set()
            time.sleep(0.2)
            link.sender.abort()
            yield from items(model(1))

        works = [
            start(lambda r=r: release_all(r))  # type: ignore[misc]
            for r in link.receivers
        ]
        with pytest.raises(TransportError):
            link.sender.send(transfer(1, model(1)), first_half())
        link.sender.close()
        for work in works:
            with at_most(15), pytest.raises((TransportError, UpdateTimeoutError), match="sender 0"):
                end(work)
        assert half.is_set()


@every_transport
def test_a_receiver_waits_at_most_its_bound(variant: str) -> None:
    with (
        Link(variant, model(1), timeout_s=0.5) as link,
        at_most(5),
        pytest.raises(UpdateTimeoutError, match="sender 0"),
    ):
        next(iter(link.receivers[0].receive(transfer(1, model(1)))))


@every_transport
def test_abort_wakes_a_sender_that_connects(variant: str) -> None:
    link = Link(variant, model(0))
    work = start(link.sender.connect)
    time.sleep(0.1)
    link.sender.abort()
    with at_most(5), pytest.raises(TransportError):
        end(work)
    link.__exit__()


@every_transport
def test_abort_wakes_a_sender_that_sends(variant: str) -> None:
    with Link(variant, model(1)) as link:
        work = start(lambda: link.sender.send(transfer(1, model(1)), endless(model(1))))
        time.sleep(0.3)
        link.sender.abort()
        with at_most(5), pytest.raises(TransportError):
            end(work)


@every_transport
def test_abort_wakes_a_receiver(variant: str) -> None:
    with Link(variant, model(1)) as link:
        work = start(lambda: list(link.receivers[0].receive(transfer(1, model(1)))))
        time.sleep(0.2)
        link.receivers[0].abort()
        with at_most(5), pytest.raises(TransportError):
            end(work)


@every_transport
def test_close_may_come_at_any_time_and_again(variant: str) -> None:
    sender, receiver = transport_classes(VARIANTS[variant][0])
    unopened = sender(context(variant))
    unconnected = receiver(context(variant), receiver=0)
    opened = sender(context(variant))
    opened.open(())
    with Link(variant, model(1)) as link:
        link.move(1, model(1))
    ends: list[SenderTransport | ReceiverTransport] = [unopened, unconnected, opened, link.sender, *link.receivers]
    for one in ends:
        one.abort()
        one.close()
        one.close()


def footprint() -> tuple[int, int, int]:
    """(open files, mappings of memory that can be shared, entries of /dev/shm) of this process."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return (
        len(os.listdir("/proc/self/fd")),
        sum("memfd:" in m or "/dev/shm" in m for m in maps),
        len(os.listdir("/dev/shm")),
    )


@every_transport
def test_thirty_versions_and_a_close_leave_nothing_behind(variant: str) -> None:
    torch.ones(1).share_memory_()  # what torch itself opens once
    before = footprint()
    with Link(variant, model(0)) as link:
        for version in range(1, 31):
            link.move(version, model(version % 3))
            if version == 3:
                early = footprint()
        assert footprint() == early
    link.shared = None
    del link
    deadline = time.monotonic() + 5
    while footprint() > before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert footprint() <= before


def test_open_files_return_after_aborted_transfers() -> None:
    torch.ones(1).share_memory_()
    before = footprint()
    for variant in ("shared_memory-stage", "shared_memory-buckets", "shared_memory-parameters"):
        for _ in range(3):
            with Link(variant, model(1)) as link:
                work = start(lambda link=link: link.sender.send(transfer(1, model(1)), endless(model(1))))  # type: ignore[misc]
                time.sleep(0.05)
                link.sender.abort()
                with pytest.raises(TransportError):
                    end(work)
            del link, work
    assert footprint() <= before
