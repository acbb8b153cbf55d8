"""Links for the transport suite: tensors of all odd kinds, both ends of a link in this process, what it leaves behind."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch

from weightsync.background import Background
from weightsync.chunk import as_bytes
from weightsync.coalescer import Coalescer
from weightsync.interfaces import LinkContext, ReceiverTransport, SenderTransport, Transfer, TransferStats
from weightsync.loadmap import ModuleGroup
from weightsync.manifest import Manifest, TensorMeta
from weightsync.registry import transport_classes
from weightsync.testing.suite import Suite

Tensors = dict[str, torch.Tensor]
Pairs = Iterator[tuple[TensorMeta, torch.Tensor]]

BUCKET_BYTES = 64 << 10
SENDER = 3
"""Index of the sender rank, which messages and chunks have to say."""


@cache
def model(version: int) -> Tensors:
    """Tensors of all odd kinds, to be left as they are; every value changes with the version."""
    g = torch.Generator().manual_seed(version)
    return {
        "fp32": torch.randn(3, 5, generator=g),
        "larger_than_a_bucket": torch.randn(300, 1000, generator=g),
        "bf16": torch.randn(7, 3, generator=g).to(torch.bfloat16),
        "bool": torch.rand(9, generator=g) > 0.5,
        "int8": torch.randint(-128, 128, (1001,), dtype=torch.int8, generator=g),
        "float8": torch.randn(6, 2, generator=g).to(torch.float8_e4m3fn),
        "scalar": torch.randn((), generator=g),
        "empty": torch.empty(0, 4),
        "strided": torch.randn(60, 40, generator=g).t(),
        "every_second": torch.randn(100, generator=g)[::2],
        "int64": torch.randint(-(2**62), 2**62, (11,), generator=g),
        "nan": torch.full((3,), float("nan")),
    }


def rows() -> Tensors:
    """Sixty tensors, each of one value."""
    return {f"t{i}": torch.full((5000,), float(i)) for i in range(60)}


def transfer(version: int, tensors: Tensors, names: Iterable[str] | None = None) -> Transfer:
    return Transfer(
        version=version, manifest=Manifest.from_tensors(tensors), names=tuple(tensors if names is None else names)
    )


def items(tensors: Tensors, manifest: Manifest | None = None) -> Pairs:
    manifest = manifest or Manifest.from_tensors(tensors)
    return ((manifest.by_name[name], tensor) for name, tensor in tensors.items())


def endless(tensors: Tensors) -> Pairs:
    """A transfer that does not end by itself."""
    while True:
        yield from items(tensors)


@dataclass(frozen=True)
class Received:
    """One version as a receiver holds it."""

    tensors: dict[str, tuple[str, tuple[int, ...], bytes]]
    """name -> (dtype, shape, row-major bytes)."""
    content_digest: int

    def check(self, tensors: Tensors) -> None:
        """Exactly *tensors* came."""
        assert self.tensors.keys() == tensors.keys(), (
            f"tensors came that were not sent, or not all: {self.tensors.keys() ^ tensors.keys()}"
        )
        for name, tensor in tensors.items():
            dtype, shape, data = self.tensors[name]
            assert (dtype, shape) == (str(tensor.dtype), tuple(tensor.shape)), f"{name} came as {dtype} {shape}"
            assert data == as_bytes(tensor.detach().cpu()).numpy().tobytes(), f"{name} came with other bytes"


def receive_all(receiver: ReceiverTransport, of: Transfer) -> Received:
    """One version, whole and verified as the context says, assembled as an engine does."""
    target = Coalescer(
        of.manifest,
        (ModuleGroup("(sent)", of.names),),
        version=of.version,
        staging_limit_bytes=1 << 30,
        timeout_s=receiver.context.timeout_s,
        verify=receiver.context.digest,
    )
    for chunk in receiver.receive(of):
        assert chunk.sender == receiver.context.sender, f"a chunk says it came from sender {chunk.sender}"
        target.put(chunk)
    target.producer_done()
    found = {}
    for group in islice(target.groups(), 1):  # what this sender does not send is missing, and may be
        for name, tensor in group:
            found[name] = (str(tensor.dtype), tuple(tensor.shape), as_bytes(tensor.cpu()).numpy().tobytes())
    target.close()
    return Received(found, target.content_digests().get(receiver.context.sender, 0))


class Link:
    """A sender that is open and its receivers, in this process, each end used from a thread of its own."""

    def __init__(self, case: TransportCase, tensors: Tensors, context: LinkContext) -> None:
        self._case, self.context = case, context
        sender, receiver = transport_classes(case.transport)
        self.sender: SenderTransport = sender(context)
        self.receivers: list[ReceiverTransport] = [receiver(context, receiver=i) for i in range(context.num_receivers)]
        self._hold = case.hold(tensors)
        self._sending: list[Background[TransferStats]] = []
        self.address = self.sender.open(Manifest.from_tensors(tensors).tensors)

    def connect(self) -> None:
        works = [self._case.start(partial(receiver.connect, self.address)) for receiver in self.receivers]
        self._case.end_all(self._case.start(self.sender.connect), *works)

    def abort(self) -> None:
        """So that no end is in use when it is closed."""
        for abort in (self.sender.abort, *(receiver.abort for receiver in self.receivers)):
            abort()
        for work in self._sending:
            work.join(self._case.patience_s)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # every end, whatever one of them does; the sender first
            for receiver in self.receivers:
                stack.callback(self._case.soon, receiver.close)
            stack.callback(self._case.soon, self.sender.close)

    def send(self, of: Transfer, tensors: Tensors) -> Background[TransferStats]:
        return self.send_pairs(replace(of, held=self._case.held), items(self._hold(tensors), of.manifest))

    def send_pairs(self, of: Transfer, pairs: Pairs) -> Background[TransferStats]:
        def work() -> TransferStats:
            if not of.held:
                return self.sender.send(of, pairs)
            known = list(pairs)
            self.sender.begin(known)
            return self.sender.send(of, iter(known))

        self._sending.append(self._case.start(work))
        return self._sending[-1]

    def send_without_end(self, tensors: Tensors) -> Background[TransferStats]:
        return self.send_pairs(transfer(1, tensors), endless(self._hold(tensors)))

    def move(self, version: int, tensors: Tensors) -> TransferStats:
        """Every receiver gets one version, exactly."""
        of = transfer(version, tensors)
        works = [self._case.start(partial(receive_all, receiver, of)) for receiver in self.receivers]
        return self.settle(self.send(of, tensors), works, tensors)

    def settle(
        self, sending: Background[TransferStats], works: list[Background[Received]], tensors: Tensors
    ) -> TransferStats:
        """The end of a transfer that was exact, at every receiver."""
        self._case.end_all(sending, *works)
        stats = sending.result()
        for received in (work.result() for work in works):
            received.check(tensors)
            assert received.content_digest == stats.content_digest, (
                "the sender digested other pieces than were received"
            )
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        assert stats.nbytes == nbytes, f"the sender counts {stats.nbytes} bytes, {nbytes} were sent"
        self.sender.finish()
        return stats


class TransportCase(Suite):
    """What a transport's tests start from."""

    transport: ClassVar[str]
    """The name by which the registry knows it."""
    settings: ClassVar[Mapping[str, Any]] = {}
    """Fields of `LinkContext` that are to be other than the suite's."""
    held: ClassVar[bool] = False
    """Whether `hold` returns tensors that stay as they are until the version is finished, so that they may be read in place."""
    settle_s: ClassVar[float] = 10
    """How long after its close a link may take to give everything back."""

    def hold(self, tensors: Tensors) -> Callable[[Tensors], Tensors]:
        """How a trainer holds weights like *tensors*: a function from new values to the tensors that are sent.

        To be overridden where the transport treats memory of some kind in a way of its own.
        """
        return lambda values: values

    def context(self, *, num_receivers: int = 2, timeout_s: float = 20, **others: Any) -> LinkContext:
        settings: dict[str, Any] = {
            "sender": SENDER,
            "num_receivers": num_receivers,
            "host": "127.0.0.1",
            "token": secrets.token_hex(16),
            "timeout_s": timeout_s,
            "bucket_bytes": BUCKET_BYTES,
            "staging_limit_bytes": 1 << 30,
            "digest": True,
        }
        return LinkContext(**(settings | dict(self.settings) | others))

    @contextlib.contextmanager
    def open(self, tensors: Tensors, **settings: Any) -> Iterator[Link]:
        """A link whose sender is open for *tensors*; it is closed whatever happens."""
        link = Link(self, tensors, self.context(**settings))
        try:
            yield link
        except BaseException:
            self.soon(link.abort)
            raise
        finally:
            link.close()

    @contextlib.contextmanager
    def link(self, tensors: Tensors, **settings: Any) -> Iterator[Link]:
        """The same, connected."""
        with self.open(tensors, **settings) as link:
            link.connect()
            yield link


@dataclass(frozen=True)
class Footprint:
    """What this process holds: a link that was closed leaves none of it behind."""

    counts: dict[str, int]
    dev_shm: frozenset[str]
    """Names in /dev/shm that this process uses. Others there may be another process's."""

    @classmethod
    def now(cls) -> Footprint:
        maps = Path("/proc/self/maps").read_text()
        counts = {
            "open files": len(os.listdir("/proc/self/fd")),
            "shared mappings": len(re.findall(r"memfd:|/dev/shm/", maps)),
            "threads": len(os.listdir("/proc/self/task")),
        }
        return cls(counts, frozenset(re.findall(r"/dev/shm/(\S+)$", maps, re.MULTILINE)))

    @classmethod
    def at_rest(cls) -> Footprint:
        """What it is when it no longer changes: threads need a moment to end."""
        gc.collect()
        last = cls.now()
        for _ in range(50):
            time.sleep(0.01)
            now = cls.now()
            if now == last:
                break
            last = now
        return last

    def check_returns(self, within_s: float, *, since: Sequence[Footprint] = ()) -> None:
        """This process comes to hold no more than this again, and has removed what it used *since*."""
        deadline = time.monotonic() + within_s
        while more := self._more(since):
            assert time.monotonic() < deadline, f"left behind: {', '.join(more)}"
            time.sleep(0.02)
            gc.collect()

    def _more(self, since: Sequence[Footprint]) -> list[str]:
        now = Footprint.now()
        more = [f"{kind} {self.counts[kind]} -> {n}" for kind, n in now.counts.items() if n > self.counts[kind]]
        used = frozenset[str]().union(*(footprint.dev_shm for footprint in since)) - self.dev_shm
        return more + [f"/dev/shm/{name}" for name in sorted(used) if os.path.exists(f"/dev/shm/{name}")]
