"""Broadcast: each bucket goes from one sender to all its receivers at once, through torch.distributed.

The process group belongs to the link: it is made here, the default group is never touched, and its members are
the sender (rank 0) and the receivers (rank 1 up). Names travel with the bytes: a bucket is announced by two
integers, then sent as header and payload in one tensor, so the ends cannot disagree about what comes.

Collectives run on the thread that calls `connect`, `send` or `receive`, and every wait is bounded.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, ClassVar

import msgspec
import torch
import torch.distributed as dist

from weightsync.background import Background
from weightsync.bucket import Bucket, fill
from weightsync.chunk import Piece, WeightChunk, aligned
from weightsync.digest import ContentDigest
from weightsync.errors import TransportError, UpdateTimeoutError, WeightSyncError
from weightsync.interfaces import LinkContext, ReceiverTransport, SenderTransport, Transfer, TransferStats
from weightsync.manifest import TensorMeta
from weightsync.wire import pack, unpack

_NUM_BUCKETS = 2
_MAX_HEADER_BYTES = 64 << 20
_POLL_S = 0.0002
_GATHER_POLL_S = 0.005
_CLOSE_S = 1.0
_GRACE_S = 0.5


class Address(msgspec.Struct, frozen=True):
    """Where the link's rendezvous store listens."""

    host: str
    port: int


class Header(msgspec.Struct, frozen=True):
    """What a bucket holds."""

    version: int
    manifest_digest: str
    pieces: tuple[Piece, ...]


_headers = msgspec.msgpack.Decoder(Header)


class _Group:
    """One link's process group, with bounded operations that an abort interrupts."""

    def __init__(self, context: LinkContext, address: Address, rank: int) -> None:
        if not dist.is_available():
            raise TransportError("this torch was built without torch.distributed; transport: broadcast needs it")
        self._who = f"broadcast link of sender {context.sender}"
        self._timeout_s = context.timeout_s
        self._aborted = False
        self._rank, self._size, self._token, self._address = rank, context.num_receivers + 1, context.token, address
        self._group: Any = None
        self._store: dist.TCPStore | None = None  # kept until the end: rank 0's serves the others
        if rank == 0:
            self._open_store()
        self.port = self._store.port if self._store is not None else address.port

    def _open_store(self) -> None:
        address = self._address
        try:
            if self._rank != 0:  # the store's own client tries for the whole bound where nobody listens
                socket.create_connection((address.host, address.port), self._timeout_s).close()
            self._store = dist.TCPStore(
                address.host,
                address.port,
                is_master=self._rank == 0,
                timeout=timedelta(seconds=self._timeout_s),
                wait_for_workers=False,
            )
        except Exception as error:
            raise TransportError(f"{self._who}: no rendezvous at {address.host}:{address.port} ({error})") from error

    def connect(self, own_host: str) -> None:
        """Collective: the sender and every receiver call this, or all wait until the bound."""
        # The store's client waits for a server that is stopped without a bound, and no wait of its own can be aborted.
        meeting = Background(self._meet, name="broadcast-meet")
        deadline = time.monotonic() + self._timeout_s + _GRACE_S
        while not meeting.is_done(_GATHER_POLL_S):
            if self._aborted:
                raise TransportError(f"{self._who} was aborted")
            if time.monotonic() > deadline:
                raise TransportError(f"{self._who}: its rendezvous did not answer within {self._timeout_s:g} s")
        meeting.result()
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=self._timeout_s)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_host)]
        try:
            store = dist.PrefixStore(self._token, self._store)  # type: ignore[arg-type]
            self._group = dist.ProcessGroupGloo(store, self._rank, self._size, options)
        except Exception as error:
            raise TransportError(
                f"{self._who}: rank {self._rank} of {self._size} could not join within {self._timeout_s:g} s ({error})"
            ) from error

    def _meet(self) -> None:
        if self._store is None:
            self._open_store()
        self._gather()

    def _gather(self) -> None:
        """Wait for all ends at the store first: that wait can be aborted, and knows who is absent."""
        deadline = time.monotonic() + self._timeout_s
        ends = {
            f"{self._token}/here/{rank}": f"receiver {rank - 1}" if rank else "sender" for rank in range(self._size)
        }
        try:
            assert self._store is not None
            self._store.set(f"{self._token}/here/{self._rank}", "")
            while not self._store.check(list(ends)):
                if self._aborted:
                    raise TransportError(f"{self._who} was aborted")
                if time.monotonic() > deadline:
                    absent = ", ".join(end for key, end in ends.items() if not self._store.check([key]))
                    raise TransportError(f"{self._who}: {absent} did not connect within {self._timeout_s:g} s")
                time.sleep(_GATHER_POLL_S)
        except RuntimeError as error:
            raise TransportError(f"{self._who}: the rendezvous is gone ({error})") from error

    def start(self, tensor: torch.Tensor) -> Any:
        """Collective: begin to broadcast *tensor* from rank 0; returns what `wait` takes."""
        if self._aborted:
            raise TransportError(f"{self._who} was aborted")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        return self._group.broadcast([tensor], options)

    def wait(self, work: Any, what: str) -> None:
        """Wait for what `start` began; *what* it is, for errors."""
        deadline = time.monotonic() + self._timeout_s
        while not work.is_completed():
            if self._aborted:
                raise TransportError(f"{self._who} was aborted")
            if time.monotonic() > deadline:
                raise UpdateTimeoutError(
                    f"{self._who}: {what} was not taken by all {self._size - 1} receivers within {self._timeout_s:g} s"
                )
            time.sleep(_POLL_S)
        try:
            work.wait()
        except Exception as error:
            reason = str(error).partition(" This is typically")[0]
            raise TransportError(f"{self._who} is broken at {what} ({reason}); a peer died or left") from error

    def abort(self) -> None:
        self._aborted = True

    def close(self) -> None:
        self._aborted = True
        # A gloo group ends only when the broadcasts under way have, at their bound; its abort does nothing (torch 2.13).
        last = [self._group]
        self._group = self._store = None
        Background(last.clear, name="broadcast-close").join(_CLOSE_S)


def node_host(peer_host: str) -> str:
    """The address of this node from which *peer_host* is reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer_host, 9))  # a datagram socket: sends nothing, only chooses the interface
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


class BroadcastSender(SenderTransport):
    """Packs one bucket while the other is on its way."""

    name: ClassVar[str] = "broadcast"

    def __init__(self, context: LinkContext) -> None:
        super().__init__(context)
        self._group: _Group | None = None
        self._buckets: list[torch.Tensor] = []

    def open(self, metas: tuple[TensorMeta, ...]) -> bytes:
        self._group = _Group(self.context, Address(self.context.host, 0), 0)
        return msgspec.msgpack.encode(Address(self.context.host, self._group.port))

    def stable(self) -> bool:
        return False

    def connect(self) -> None:
        assert self._group is not None, "connect before open"
        self._group.connect(self.context.host)

    def send(self, transfer: Transfer, tensors: Iterable[tuple[TensorMeta, torch.Tensor]]) -> TransferStats:
        content = ContentDigest()
        assert self._group is not None, "send before open"
        group, in_flight = self._group, deque[tuple[str, list[Any]]]()
        number = itertools.count()

        def wait_for_oldest() -> None:
            what, works = in_flight.popleft()
            for work, _ in works:
                group.wait(work, what)

        def free_buckets() -> Iterator[Bucket]:
            size = max(min(self.context.bucket_bytes, self.context.staging_limit_bytes // _NUM_BUCKETS), 1)
            while len(self._buckets) < _NUM_BUCKETS:
                self._buckets.append(torch.empty(size, dtype=torch.uint8))
            while True:
                for payload in self._buckets:
                    while len(in_flight) >= _NUM_BUCKETS:
                        wait_for_oldest()
                    yield Bucket(payload, [])

        for bucket in fill(tensors, free_buckets(), content=content, digest=self.context.digest):
            if bucket.pieces:
                header = Header(transfer.version, transfer.manifest.digest, tuple(bucket.pieces))
                what = f"bucket {next(number)} ({bucket.pieces[0].name}, ...)"
                in_flight.append((what, self._start(header, bucket.payload[: bucket.used_bytes])))
        in_flight.append(("the end", self._start(None, torch.empty(0, dtype=torch.uint8))))
        while in_flight:
            wait_for_oldest()
        return TransferStats(content.nbytes, content.value)

    def _start(self, header: Header | None, payload: torch.Tensor) -> list[tuple[Any, torch.Tensor]]:
        """Begin one bucket; (work, tensor) pairs, the tensors kept alive until the work is done."""
        assert self._group is not None
        encoded = pack(header) if header is not None else b""
        sizes = torch.tensor([len(encoded), payload.numel()], dtype=torch.int64)
        works = [(self._group.start(sizes), sizes)]
        if encoded:
            text = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
            works.append((self._group.start(text), text))
        if payload.numel():
            works.append((self._group.start(payload), payload))
        return works

    def abort(self) -> None:
        if self._group is not None:
            self._group.abort()

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self._buckets.clear()


class BroadcastReceiver(ReceiverTransport):
    """Takes one bucket at a time; the next is received when the chunk of the last was released."""

    name: ClassVar[str] = "broadcast"

    def __init__(self, context: LinkContext, *, receiver: int) -> None:
        super().__init__(context, receiver=receiver)
        self._group: _Group | None = None
        self._bucket = torch.empty(0, dtype=torch.uint8)
        self._lent = False
        self._aborted = False

    def connect(self, address: bytes) -> None:
        found = msgspec.msgpack.decode(address, type=Address)
        self._group = _Group(self.context, found, self.receiver + 1)
        if self._aborted:  # perhaps before there was a group to tell
            self._group.abort()
        self._group.connect(node_host(found.host))

    def receive(self, transfer: Transfer) -> Iterator[WeightChunk]:
        assert self._group is not None, "receive before connect"
        group = self._group
        for number in itertools.count():
            what = f"bucket {number}"
            sizes = torch.zeros(2, dtype=torch.int64)
            group.wait(group.start(sizes), what)
            header_bytes, payload_bytes = map(int, sizes)
            if header_bytes == 0:
                return
            if not (0 < header_bytes <= _MAX_HEADER_BYTES and 0 <= payload_bytes <= self._largest_bucket()):
                raise TransportError(
                    f"sender {self.context.sender} announced a bucket of {payload_bytes} bytes, "
                    f"bucket_bytes is {self.context.bucket_bytes}"
                )
            text = torch.empty(header_bytes, dtype=torch.uint8)
            header_work = group.start(text)
            payload = self._room(payload_bytes)
            payload_work = group.start(payload) if payload_bytes else None
            group.wait(header_work, what)
            header = self._decode(text)
            if payload_work is not None:
                group.wait(payload_work, what)
            yield self._chunk(header, payload)

    def _largest_bucket(self) -> int:
        return aligned(self.context.bucket_bytes)

    def _room(self, nbytes: int) -> torch.Tensor:
        if self._lent:
            raise WeightSyncError("a broadcast chunk was not released before the next was asked for")
        if self._bucket.numel() < nbytes:
            self._bucket = torch.empty(nbytes, dtype=torch.uint8)
        return self._bucket[:nbytes]

    def _decode(self, text: torch.Tensor) -> Header:
        try:
            return unpack(text.numpy().tobytes(), _headers)
        except TransportError as error:
            raise TransportError(f"header of sender {self.context.sender}: {error}") from error

    def _chunk(self, header: Header, payload: torch.Tensor) -> WeightChunk:
        self._lent = True

        def release() -> None:
            self._lent = False

        return WeightChunk(
            header.version,
            header.manifest_digest,
            header.pieces,
            payload,
            sender=self.context.sender,
            release=release,
        )

    def abort(self) -> None:
        self._aborted = True
        if self._group is not None:
            self._group.abort()

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self._bucket = torch.empty(0, dtype=torch.uint8)
