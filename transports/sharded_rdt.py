"""Sharded Ray Direct Transport: every receiver pulls its own slices, from the senders that hold them.

    per link     one arena at each end: two slots for each stream that is sent, two slots for what is pulled
    per version  rounds: a slot is packed, announced, pulled, acknowledged, and packed again

Receivers that take the same from a sender share a stream, so replicas cost it nothing more. What a stream consists of is
the plan's (`weightsync.orders`); without a plan it is every tensor, whole.

Bytes move between the ranks' sidecars, one-sided, by NIXL. Control messages go from rank to rank over TCP: names, digests,
and the fence that RDT lacks: a slot is written again only after every receiver of it has said that it has what lay there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
import torch

from weightsync.bucket import Bucket, wire_tensor, write_piece
from weightsync.chunk import Piece, WeightChunk, aligned, as_bytes
from weightsync.digest import ContentDigest
from weightsync.errors import TransportError, UpdateTimeoutError
from weightsync.interfaces import LinkContext, Transfer, TransferStats
from weightsync.manifest import TensorMeta
from weightsync.orders import Order, Piecewise
from weightsync.transports.arenas import ArenaClient, Source
from weightsync.transports.channel import dial_host
from weightsync.transports.handles import Ack, ChannelReceiver, ChannelSender, End, Hello

NUM_SLOTS = 2
_PROBE_BYTES = 4 << 20

logger = logging.getLogger(__name__)


class Address(msgspec.Struct, frozen=True):
    """Of a sender, for its receivers."""

    place: str
    source: Source
    slot_bytes: int
    nbytes: int
    """Of the arena."""


class Round(msgspec.Struct, tag=True, frozen=True):
    """Sender to receiver: this run of the arena is ready to be pulled."""

    version: int
    manifest_digest: str
    slot: int
    offset: int
    nbytes: int
    pieces: tuple[Piece, ...]


Message = Hello | Round | End | Ack


@dataclass(eq=False, slots=True)
class _Stream:
    """What some receivers take alike."""

    receivers: tuple[int, ...]
    first_slot: int
    content: ContentDigest = field(default_factory=ContentDigest)
    turn: int = 0
    bucket: Bucket | None = None
    """The slot that is being packed."""
    unanswered: deque[int] = field(default_factory=deque)
    """Slots that not every receiver has pulled, oldest first."""

    @property
    def slot(self) -> int:
        return self.first_slot + self.turn % NUM_SLOTS


class ShardedRdtSender(ChannelSender):
    """See the module's docstring. Everything but `abort` runs on the thread that calls `send`."""

    name: ClassVar[str] = "sharded_rdt"
    messages: ClassVar[Any] = Message
    takes_shards: ClassVar[bool] = True
    needs_helpers: ClassVar[bool] = True

    def __init__(self, context: LinkContext) -> None:
        super().__init__(context)
        self._memory: ArenaClient | None = None
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._orders: dict[str, list[Order]] = {}
        orders = context.orders
        streams = orders.streams if orders is not None else (tuple(range(context.num_receivers)),)
        self._streams = [_Stream(receivers, i * NUM_SLOTS) for i, receivers in enumerate(streams)]
        for order in orders.orders if orders is not None else ():
            self._orders.setdefault(order.name, []).append(order)

    def open(self, metas: tuple[TensorMeta, ...]) -> bytes:
        """Raises TransportError where this rank's sidecar is gone."""
        num_slots = NUM_SLOTS * len(self._streams)
        wanted = min(self.context.bucket_bytes, sum(aligned(meta.nbytes) for meta in metas))
        self._slot_bytes = max(aligned(min(wanted, self.context.staging_limit_bytes // max(num_slots, 1))), aligned(1))
        who = f"sender {self.context.sender}"
        self._memory = ArenaClient(self.context.helper(None), who=who, timeout_s=self.context.timeout_s)
        self._arena = self._memory.take(max(num_slots, 1) * self._slot_bytes)
        place = self._listen(self.context.host)
        return msgspec.msgpack.encode(Address(place, self._memory.source, self._slot_bytes, self._arena.numel()))

    def describe(self) -> str:
        return f"NIXL over {self._memory.backend}" if self._memory is not None else ""

    def stable(self) -> bool:
        return False

    def send(self, transfer: Transfer, tensors: Iterable[tuple[TensorMeta, torch.Tensor]]) -> TransferStats:
        """*tensors* are this rank's own parts, as they lie, where the context has orders."""
        for stream in self._streams:
            stream.content, stream.bucket = ContentDigest(), None
        for meta, tensor in tensors:
            for order in self._orders_of(meta):
                part = order.local.of(tensor) if order.local is not None else tensor
                of = TensorMeta(meta.name, meta.dtype, tuple(part.shape))
                data = as_bytes(wire_tensor(of, part))
                for target in order.targets:
                    self._pack(transfer, self._streams[target.stream], target, data)
                del data, part  # else they live while the next tensor is made
        for stream in self._streams:
            self._flush(transfer, stream)
        self._tell(End(transfer.version))
        for stream in self._streams:
            while stream.unanswered:
                self._await_pulls(stream)
        of_receiver = {i: stream.content.value for stream in self._streams for i in stream.receivers}
        return TransferStats(
            nbytes=sum(stream.content.nbytes for stream in self._streams),
            content_digest=self._streams[0].content.value if self._streams else 0,
            content_digests=tuple(of_receiver[i] for i in range(self.context.num_receivers)),
        )

    def _orders_of(self, meta: TensorMeta) -> Iterable[Order]:
        return self._orders.get(meta.name, ()) if self.context.orders is not None else (Order.whole(meta.name),)

    def _pack(self, transfer: Transfer, stream: _Stream, target: Piecewise, data: torch.Tensor) -> None:
        """Append *data* to the stream, in as many rounds as it takes."""
        meta = TensorMeta(target.name, "uint8", (data.numel(),))
        at = 0
        while True:
            if stream.bucket is None:
                stream.bucket = self._free_slot(stream)
            bucket = stream.bucket
            room = bucket.payload.numel() - bucket.used_bytes
            left = data.numel() - at
            if (room < left and bucket.pieces and left <= self._slot_bytes) or (room == 0 and bucket.pieces):
                self._flush(transfer, stream)
                continue
            end = at + min(room, left)
            write_piece(
                bucket,
                meta,
                data[at:end],
                start=target.start + at,
                content=stream.content,
                digest=self.context.digest,
            )
            at = end
            if at == data.numel():
                return

    def _free_slot(self, stream: _Stream) -> Bucket:
        """The stream's next slot, once nobody reads it any more."""
        while stream.slot in stream.unanswered:
            self._await_pulls(stream)
        if self._aborted:
            raise TransportError("the update was aborted")
        start = stream.slot * self._slot_bytes
        return Bucket(self._arena[start : start + self._slot_bytes], [])

    def _flush(self, transfer: Transfer, stream: _Stream) -> None:
        bucket, stream.bucket = stream.bucket, None
        if bucket is None or not bucket.pieces:
            return
        slot = stream.slot
        offset = slot * self._slot_bytes
        message = Round(
            transfer.version, transfer.manifest.digest, slot, offset, bucket.used_bytes, tuple(bucket.pieces)
        )
        if self._aborted:
            raise TransportError("the update was aborted")
        assert self._memory is not None
        self._memory.stir()
        for i in stream.receivers:
            self._channels[i].send(message, timeout_s=self.context.timeout_s)
        stream.unanswered.append(slot)
        stream.turn += 1

    def _await_pulls(self, stream: _Stream) -> None:
        """Wait until every receiver of the stream's oldest slot has what lay there: the fence."""
        slot = stream.unanswered.popleft()
        for i in stream.receivers:
            message, _ = self._channels[i].receive(timeout_s=self.context.timeout_s)
            if not isinstance(message, Ack) or message.segment != slot:
                raise TransportError(f"{self._channels[i]} answered {message}, expected that it has slot {slot}")

    def abort(self) -> None:
        super().abort()
        if self._memory is not None:
            self._memory.abort()

    def close(self) -> None:
        self.abort()
        self._arena = torch.empty(0, dtype=torch.uint8)
        for stream in self._streams:
            stream.bucket = None


class ShardedRdtReceiver(ChannelReceiver):
    """See the module's docstring. Chunks are copied out of two slots, of which one is filled while the other is read."""

    name: ClassVar[str] = "sharded_rdt"
    messages: ClassVar[Any] = Message

    def __init__(self, context: LinkContext, *, receiver: int) -> None:
        super().__init__(context, receiver=receiver)
        self._memory: ArenaClient | None = None
        self._address: Address | None = None
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._released = threading.Condition()
        self._free: deque[int] = deque(range(NUM_SLOTS))
        self.bytes_per_s = 0.0
        """As the probe at `connect` found it."""

    @property
    def nbytes_pulled(self) -> int:
        """Over this link, as the sidecar confirmed them, the probe's among them."""
        return self._memory.nbytes_pulled if self._memory is not None else 0

    def connect(self, address: bytes) -> None:
        """Raises TransportError, too, where a first pull is slower than the context allows."""
        self._address = found = msgspec.msgpack.decode(address, type=Address)
        self._dial(found.place, dial_host)
        who = f"receiver {self.receiver} of sender {self.context.sender}"
        self._memory = ArenaClient(self.context.helper(self.receiver), who=who, timeout_s=self.context.timeout_s)
        if self._aborted:
            self._memory.abort()
        self._arena = self._memory.take(max(NUM_SLOTS * found.slot_bytes, min(found.nbytes, _PROBE_BYTES)))
        self._probe(self._memory, found)

    def _probe(self, memory: ArenaClient, address: Address) -> None:
        """Pull from the sender's arena twice: NIXL falls to slow paths without a word."""
        nbytes = min(address.nbytes, _PROBE_BYTES, self._arena.numel())
        for _ in range(2):
            memory.start_pull(address.source, offset=0, nbytes=nbytes, into=0, set_up=True)
            seconds = memory.finish_pull()
        self.bytes_per_s = nbytes / max(seconds, 1e-9)
        logger.info("%s pulls %.2f GB/s over NIXL, %s", memory.who, self.bytes_per_s / 1e9, memory.backend)
        if self.bytes_per_s < self.context.min_bytes_per_s:
            raise TransportError(
                f"receiver {self.receiver} pulls {self.bytes_per_s / 1e9:.3f} GB/s from sender {self.context.sender} over "
                f"NIXL, {memory.backend}; min_bandwidth_bytes asks for {self.context.min_bytes_per_s / 1e9:.3f}. Set UCX_TLS "
                "in the environment of Ray's workers (sm for one host, rc for RDMA), or lower the bound"
            )

    def receive(self, transfer: Transfer) -> Iterator[WeightChunk]:
        assert self._channel is not None, "receive before connect"
        pulling: tuple[Round, int] | None = None
        ended = False
        while not ended:
            if pulling is None:
                message, _ = self._channel.receive(timeout_s=self.context.timeout_s)
                if isinstance(message, End):
                    self._check_end(message, transfer)
                    return
                pulling = self._start(message)
            (round, slot), pulling = pulling, None
            self._finish(round)
            # The next is pulled while this one is read.
            if self._free and self._channel.is_waiting():
                message, _ = self._channel.receive(timeout_s=self.context.timeout_s)
                if isinstance(message, End):
                    self._check_end(message, transfer)
                    ended = True
                else:
                    pulling = self._start(message)
            yield self._chunk(round, slot)

    def _start(self, message: object) -> tuple[Round, int]:
        assert self._channel is not None and self._memory is not None and self._address is not None
        if not isinstance(message, Round) or message.nbytes > self._address.slot_bytes:
            raise TransportError(f"{self._channel} sent {message}, expected a round of at most a slot")
        slot = self._await_slot()
        if message.nbytes:
            into = slot * self._address.slot_bytes
            self._memory.start_pull(self._address.source, offset=message.offset, nbytes=message.nbytes, into=into)
        return message, slot

    def _finish(self, round: Round) -> None:
        assert self._channel is not None and self._memory is not None
        if round.nbytes:
            try:
                self._memory.finish_pull()
            except (TransportError, UpdateTimeoutError) as error:
                raise type(error)(f"the link to {self._channel.peer} is broken: {error}") from error
        self._channel.send(Ack(round.slot), timeout_s=self.context.timeout_s)

    def _await_slot(self) -> int:
        deadline = time.monotonic() + self.context.timeout_s
        with self._released:
            while not self._free:
                if self._aborted:
                    raise TransportError("the update was aborted")
                if not self._released.wait(deadline - time.monotonic()):
                    raise UpdateTimeoutError(
                        f"no chunk of sender {self.context.sender} was released for {self.context.timeout_s:g} s"
                    )
            return self._free.popleft()

    def _chunk(self, round: Round, slot: int) -> WeightChunk:
        assert self._address is not None
        start = slot * self._address.slot_bytes

        def release() -> None:
            with self._released:
                self._free.append(slot)
                self._released.notify()

        return WeightChunk(
            round.version,
            round.manifest_digest,
            round.pieces,
            self._arena[start : start + round.nbytes],
            sender=self.context.sender,
            release=release,
        )

    def abort(self) -> None:
        super().abort()
        if self._memory is not None:
            self._memory.abort()
        with self._released:
            self._released.notify_all()

    def close(self) -> None:
        self.abort()
        self._arena = torch.empty(0, dtype=torch.uint8)
