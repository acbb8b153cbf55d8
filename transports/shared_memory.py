"""Shared memory of one host: handles cross, payloads stay.

    once                the listener, one channel a receiver
    per storage         a segment: memory that both ends have mapped, sent as a file descriptor
    per version         pieces that say where in which segment a tensor lies

Three places from which receivers read, in this order of preference: the trainer's own parameters, where they
live in shared memory (`share_parameters`, `Module.share_memory`); a stage as large as the model, where
`staging_limit_bytes` allows it; two buckets used in turn, where it does not. The first two are stable until the
update ends, so receivers copy nothing; a bucket is filled again only after every receiver has released it.

Segments are anonymous (memfd): no name to guess, nothing left behind when a process is killed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import torch

from weightsync.bucket import Bucket, count_changed, cuts, fill, note_piece, write_in_place
from weightsync.chunk import Piece, WeightChunk, aligned, as_bytes
from weightsync.digest import ContentDigest, digest_view
from weightsync.errors import TransportError, UpdateTimeoutError
from weightsync.interfaces import LinkContext, ReceiverTransport, SenderTransport, Transfer, TransferStats
from weightsync.manifest import StorageWatch, TensorMeta
from weightsync.transports.channel import Channel, Listener, dial
from weightsync.transports.segment import MappedSegment, make_segment

_NUM_BUCKETS = 2
_MIN_DIRECT_BYTES = 1 << 20  # smaller storages are cheaper to copy than to map
_MIN_PIECE_BYTES = 4 << 20
_MAX_DIRECT_SEGMENTS = 256  # each costs both ends a file descriptor; the usual limit is 1024


class Hello(msgspec.Struct, tag=True, frozen=True):
    """Receiver to sender, first on a channel."""

    token: str
    receiver: int


class Segment(msgspec.Struct, tag=True, frozen=True):
    """Sender to receiver: map this; the descriptor travels along."""

    id: int
    nbytes: int


class Forget(msgspec.Struct, tag=True, frozen=True):
    """Sender to receiver: the segment is gone."""

    id: int


class Chunk(msgspec.Struct, tag=True, frozen=True):
    version: int
    manifest_digest: str
    segment: int
    stable: bool
    pieces: tuple[Piece, ...]


class End(msgspec.Struct, tag=True, frozen=True):
    version: int


class Ack(msgspec.Struct, tag=True, frozen=True):
    """Receiver to sender: done with one chunk in this segment."""

    segment: int


Message = Hello | Segment | Forget | Chunk | End | Ack


def share_parameters(module: torch.nn.Module) -> None:
    """Move all parameters and buffers of *module* into one block of shared memory, in place.

    Receivers then map the trainer's weights once and read them where they lie. Ties stay ties, dtypes and values
    stay. Call it before an optimizer takes references to `parameter.data`; the parameters themselves stay the same objects.

    Raises:
        ValueError: a tensor is not on the CPU.
    """
    tensors: dict[tuple[int, int, torch.Size, tuple[int, ...]], list[torch.Tensor]] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.device.type != "cpu":
            raise ValueError(f"share_parameters moves CPU tensors only, found one on {tensor.device}")
        key = (tensor.data_ptr(), int(tensor.storage_offset()), tensor.shape, tensor.stride())
        tensors.setdefault(key, []).append(tensor)
    total = sum(aligned(same[0].nbytes) for same in tensors.values())
    block = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(max(total, 1)))
    offset = 0
    for same in tensors.values():
        place = block[offset : offset + same[0].nbytes]
        if same[0].numel():
            typed = place.view(same[0].dtype).view(same[0].shape)
            typed.copy_(same[0].detach())
            for tensor in same:
                tensor.data = typed
        offset += aligned(same[0].nbytes)


@dataclass(slots=True)
class _Shared:
    """A segment on the sender's side."""

    id: int
    fd: int
    payload: torch.Tensor
    owned: bool
    """Made here (memfd), so ours to close; else the trainer's."""
    watch: StorageWatch | None = None


class _Batches:
    """Pieces by segment, announced when a bucket's worth of bytes has come together."""

    def __init__(self, announce: Callable[[int, list[Piece]], None], context: LinkContext) -> None:
        self._announce, self._bucket_bytes = announce, context.bucket_bytes
        self._pieces: dict[int, list[Piece]] = {}
        self._nbytes: dict[int, int] = {}

    def add(self, segment_id: int, piece: Piece, content: ContentDigest) -> None:
        note_piece(self._pieces.setdefault(segment_id, []), piece, content)
        self._nbytes[segment_id] = self._nbytes.get(segment_id, 0) + piece.nbytes
        if self._nbytes[segment_id] >= self._bucket_bytes:
            del self._nbytes[segment_id]
            self._announce(segment_id, self._pieces.pop(segment_id))

    def flush(self) -> None:
        for segment_id, pieces in self._pieces.items():
            self._announce(segment_id, pieces)


class SharedMemorySender(SenderTransport):
    """See the module's docstring. Everything runs on the thread that calls `send`."""

    name: ClassVar[str] = "shared_memory"

    def __init__(self, context: LinkContext) -> None:
        super().__init__(context)
        self._listener: Listener | None = None
        self._channels: dict[int, Channel[Message]] = {}
        self._next_id = 0
        self._segments: dict[int, _Shared] = {}
        self._direct: dict[int, _Shared] = {}
        self._stage: _Shared | None = None
        self._buckets: list[_Shared] = []
        self._lent: deque[int] = deque()
        self._place: dict[str, int] = {}
        self._written = False
        self._all_copied = True
        self._aborted = False
        # A large tensor goes in pieces, so that receivers verify one while the next is written.
        self._piece_bytes = max(context.bucket_bytes, _MIN_PIECE_BYTES)

    def open(self, metas: tuple[TensorMeta, ...]) -> bytes:
        offset = 0
        for meta in metas:
            self._place[meta.name] = offset
            offset += aligned(meta.nbytes)
        self._stage_bytes = offset
        self._listener = Listener()
        return self._listener.address.encode()

    def stable(self) -> bool:
        return self._stage_bytes <= self.context.staging_limit_bytes

    def connect(self) -> None:
        assert self._listener is not None, "connect before open"
        deadline = time.monotonic() + self.context.timeout_s
        while len(self._channels) < self.context.num_receivers:
            try:
                channel: Channel[Message] = self._listener.accept(
                    Message,  # type: ignore[arg-type]
                    timeout_s=max(deadline - time.monotonic(), 0.001),
                )
            except TransportError:  # another user's process; refused
                continue
            except OSError as error:
                absent = sorted(set(range(self.context.num_receivers)) - self._channels.keys())
                raise TransportError(
                    f"receivers {absent} did not connect to sender {self.context.sender} over shared memory within "
                    f"{self.context.timeout_s:g} s ({error})"
                ) from error
            with contextlib.suppress(TransportError, UpdateTimeoutError):  # a stranger does not stop the others
                hello, _ = channel.receive(timeout_s=max(deadline - time.monotonic(), 0.001))
                known = self._channels.keys()
                if (
                    isinstance(hello, Hello)
                    and hello.token == self.context.token
                    and hello.receiver in set(range(self.context.num_receivers)) - known
                ):
                    channel.peer = f"receiver {hello.receiver}"
                    self._channels[hello.receiver] = channel
                    continue
            channel.close()
        self._listener.close()

    def send(self, transfer: Transfer, tensors: Iterable[tuple[TensorMeta, torch.Tensor]]) -> TransferStats:
        content, stats = ContentDigest(), TransferStats()
        self._forget_dead()
        copied = self._send_direct(transfer, tensors, content)
        if self.stable():
            stats.changed_values = self._send_stage(transfer, copied, content)
        else:
            self._send_buckets(transfer, copied, content)
        self._tell(End(transfer.version))
        stats.nbytes, stats.content_digest = content.nbytes, content.value
        return stats

    def _send_direct(
        self, transfer: Transfer, tensors: Iterable[tuple[TensorMeta, torch.Tensor]], content: ContentDigest
    ) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        """Announce the tensors that lie in shared memory; yields the others."""
        batches = _Batches(lambda segment, pieces: self._announce(transfer, segment, pieces, stable=True), self.context)
        self._all_copied = True
        for meta, tensor in tensors:
            segment = self._export(meta, tensor)
            if segment is None:
                yield meta, tensor
                continue
            self._all_copied = False
            data = as_bytes(tensor.detach()).numpy().data
            offset = int(tensor.storage_offset()) * tensor.element_size()
            for start, end in cuts(meta.nbytes, self._piece_bytes):
                value = digest_view(data[start:end]) if self.context.digest else None
                batches.add(segment.id, Piece(meta.name, start, end - start, offset + start, value), content)
        batches.flush()

    def _send_stage(
        self, transfer: Transfer, tensors: Iterable[tuple[TensorMeta, torch.Tensor]], content: ContentDigest
    ) -> int | None:
        batches = _Batches(lambda segment, pieces: self._announce(transfer, segment, pieces, stable=True), self.context)
        changed = 0
        count = self.context.count_changed_values and self._written
        for meta, tensor in tensors:
            if self._stage is None:
                self._stage = self._new_segment(self._stage_bytes)
            payload, place = self._stage.payload, self._place[meta.name]
            if count:
                changed += count_changed(payload, place, meta, tensor)
            for piece in write_in_place(
                payload, place, meta, tensor, digest=self.context.digest, piece_bytes=self._piece_bytes
            ):
                batches.add(self._stage.id, piece, content)
        batches.flush()
        self._written = True
        return changed if count and self._all_copied else None

    def _send_buckets(
        self, transfer: Transfer, tensors: Iterable[tuple[TensorMeta, torch.Tensor]], content: ContentDigest
    ) -> None:
        for bucket in fill(tensors, self._free_buckets(), content=content, digest=self.context.digest):
            if bucket.pieces:
                segment = next((s for s in self._buckets if s.payload is bucket.payload), None)
                if segment is None:  # closed meanwhile, while the source was stuck
                    raise TransportError("the update was aborted")
                self._announce(transfer, segment.id, bucket.pieces, stable=False)
                self._lent.append(segment.id)
        while self._lent:
            self._await_release(self._lent.popleft())

    def _free_buckets(self) -> Iterator[Bucket]:
        size = max(min(self.context.bucket_bytes, self.context.staging_limit_bytes // _NUM_BUCKETS), 1)
        while len(self._buckets) < _NUM_BUCKETS:
            self._buckets.append(self._new_segment(size))
        while True:
            for segment in self._buckets:
                while segment.id in self._lent:
                    self._await_release(self._lent.popleft())
                yield Bucket(segment.payload, [])
            if self._aborted:  # and perhaps closed, so there are no buckets to hand out
                raise TransportError("the update was aborted")

    def _await_release(self, segment_id: int) -> None:
        """Wait until every receiver has released the bucket. Receivers release in the order they were sent."""
        for channel in self._channels.values():
            message, _ = channel.receive(timeout_s=self.context.timeout_s)
            if not isinstance(message, Ack) or message.segment != segment_id:
                raise TransportError(f"{channel.peer} answered {message}, expected the release of bucket {segment_id}")

    def _export(self, meta: TensorMeta, tensor: torch.Tensor) -> _Shared | None:
        """The segment in which *tensor* lies as it must travel; None where it has to be copied."""
        storage = tensor.untyped_storage()
        if (
            tensor.device.type != "cpu"
            or storage.nbytes() < _MIN_DIRECT_BYTES
            or tensor.dtype != meta.torch_dtype
            or not tensor.is_contiguous()
            or not storage.is_shared()
            or torch.multiprocessing.get_sharing_strategy() != "file_descriptor"
        ):
            return None
        found = self._direct.get(storage.data_ptr())
        if found is not None and found.watch is not None and found.watch.alive():
            return found
        if len(self._direct) >= _MAX_DIRECT_SEGMENTS:
            return None
        fd, nbytes = storage._share_fd_cpu_()
        if fd < 0:  # a mapped file (torch.from_file): shared, but without a descriptor to pass on
            return None
        payload = torch.empty(0, dtype=torch.uint8).set_(storage)
        segment = self._add_segment(fd, nbytes, payload, owned=False, watch=StorageWatch(storage))
        # The payload would keep the trainer's storage alive; the watch must see it go.
        segment.payload = payload[:0].clone()
        self._direct[storage.data_ptr()] = segment
        return segment

    def _forget_dead(self) -> None:
        self._direct = {a: s for a, s in self._direct.items() if s.watch is not None and s.watch.alive()}
        for segment in list(self._segments.values()):
            if segment.watch is not None and not segment.watch.alive():
                del self._segments[segment.id]
                self._tell(Forget(segment.id))

    def _new_segment(self, nbytes: int) -> _Shared:
        if self._aborted:  # and perhaps closed, so nobody would give the memory back
            raise TransportError("the update was aborted")
        fd, payload = make_segment(max(nbytes, 1))
        return self._add_segment(fd, payload.numel(), payload, owned=True)

    def _add_segment(
        self, fd: int, nbytes: int, payload: torch.Tensor, *, owned: bool, watch: StorageWatch | None = None
    ) -> _Shared:
        segment = _Shared(self._next_id, fd, payload, owned, watch)
        self._next_id += 1
        self._segments[segment.id] = segment
        for channel in self._channels.values():
            channel.send(Segment(segment.id, nbytes), fd=fd, timeout_s=self.context.timeout_s)
        return segment

    def _announce(self, transfer: Transfer, segment_id: int, pieces: list[Piece], *, stable: bool) -> None:
        self._tell(Chunk(transfer.version, transfer.manifest.digest, segment_id, stable, tuple(pieces)))

    def _tell(self, message: Message) -> None:
        if self._aborted:
            raise TransportError("the update was aborted")
        for channel in self._channels.values():
            channel.send(message, timeout_s=self.context.timeout_s)

    def abort(self) -> None:
        self._aborted = True
        if self._listener is not None:
            self._listener.close()
        for channel in self._channels.values():
            channel.close()

    def close(self) -> None:
        self.abort()
        for segment in self._segments.values():
            if segment.owned:
                os.close(segment.fd)
        self._segments.clear()
        self._direct.clear()
        self._buckets.clear()
        self._stage = None


class SharedMemoryReceiver(ReceiverTransport):
    """See the module's docstring."""

    name: ClassVar[str] = "shared_memory"

    def __init__(self, context: LinkContext, *, receiver: int) -> None:
        super().__init__(context, receiver=receiver)
        self._channel: Channel[Message] | None = None
        self._segments: dict[int, MappedSegment] = {}
        self._aborted = False

    def connect(self, address: bytes) -> None:
        self._channel = dial(
            address.decode(),
            Message,  # type: ignore[arg-type]
            peer=f"sender {self.context.sender}",
            timeout_s=self.context.timeout_s,
        )
        if self._aborted:  # perhaps before there was a channel to close
            self._channel.close()
        self._channel.send(Hello(self.context.token, self.receiver), timeout_s=self.context.timeout_s)

    def receive(self, transfer: Transfer) -> Iterator[WeightChunk]:
        assert self._channel is not None, "receive before connect"
        for segment in self._segments.values():
            segment.refresh()
        while True:
            message, fd = self._channel.receive(timeout_s=self.context.timeout_s)
            match message:
                case Segment(id=segment_id, nbytes=nbytes) if fd is not None:
                    self._segments[segment_id] = MappedSegment(fd, nbytes)
                case Forget(id=segment_id) if segment_id in self._segments:
                    self._segments.pop(segment_id).close()
                case Chunk():
                    yield self._chunk(message)
                case End(version=version):
                    if version != transfer.version:
                        raise TransportError(
                            f"{self._channel.peer} ended version {version}, expected {transfer.version}"
                        )
                    return
                case _:
                    if fd is not None:
                        os.close(fd)
                    raise TransportError(f"{self._channel.peer} sent {message}, expected a chunk")

    def _chunk(self, message: Chunk) -> WeightChunk:
        assert self._channel is not None
        channel, timeout_s, segment = self._channel, self.context.timeout_s, message.segment
        if segment not in self._segments:
            raise TransportError(f"{channel.peer} sent a chunk in segment {segment}, which it never shared")

        def release() -> None:
            if not message.stable:
                try:
                    channel.send(Ack(segment), timeout_s=timeout_s)
                except (TransportError, UpdateTimeoutError):
                    channel.close()  # the sender is gone or stuck; `receive` says so to whoever waits

        return WeightChunk(
            message.version,
            message.manifest_digest,
            message.pieces,
            self._segments[segment].payload,
            stable=message.stable,
            sender=self.context.sender,
            release=release,
        )

    def abort(self) -> None:
        self._aborted = True
        if self._channel is not None:
            self._channel.close()

    def close(self) -> None:
        self.abort()
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
