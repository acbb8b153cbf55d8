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

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import torch

from weightsync.bucket import count_changed, cuts, note_piece, write_in_place
from weightsync.chunk import Piece, WeightChunk, aligned, as_bytes
from weightsync.digest import ContentDigest, digest_view
from weightsync.errors import TransportError
from weightsync.interfaces import LinkContext, Transfer, TransferStats
from weightsync.manifest import StorageWatch, TensorMeta
from weightsync.transports.handles import Ack, Chunk, End, Forget, HandleReceiver, HandleSender, Hello
from weightsync.transports.segment import MappedSegment, make_segment

_MIN_DIRECT_BYTES = 1 << 20  # smaller storages are cheaper to copy than to map
_MIN_PIECE_BYTES = 4 << 20
_MAX_DIRECT_SEGMENTS = 256  # each costs both ends a file descriptor; the usual limit is 1024


class Segment(msgspec.Struct, tag=True, frozen=True):
    """Sender to receiver: map this; the descriptor travels along."""

    id: int
    nbytes: int


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


class SharedMemorySender(HandleSender):
    """See the module's docstring. Everything runs on the thread that calls `send`."""

    name: ClassVar[str] = "shared_memory"
    messages: ClassVar[Any] = Message

    def __init__(self, context: LinkContext) -> None:
        super().__init__(context)
        self._next_id = 0
        self._segments: dict[int, _Shared] = {}
        self._direct: dict[int, _Shared] = {}
        self._stage: _Shared | None = None
        self._place: dict[str, int] = {}
        self._written = False
        self._all_copied = True
        # A large tensor goes in pieces, so that receivers verify one while the next is written.
        self._piece_bytes = max(context.bucket_bytes, _MIN_PIECE_BYTES)

    def open(self, metas: tuple[TensorMeta, ...]) -> bytes:
        offset = 0
        for meta in metas:
            self._place[meta.name] = offset
            offset += aligned(meta.nbytes)
        self._stage_bytes = offset
        return self._listen().encode()

    def stable(self) -> bool:
        return self._stage_bytes <= self.context.staging_limit_bytes

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

    def _new_bucket(self) -> tuple[int, torch.Tensor]:
        segment = self._new_segment(self._bucket_size(self.context.bucket_bytes))
        return segment.id, segment.payload

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
        self._tell(Segment(segment.id, nbytes), fd=fd)
        return segment

    def close(self) -> None:
        self.abort()
        for segment in self._segments.values():
            if segment.owned:
                os.close(segment.fd)
        self._segments.clear()
        self._direct.clear()
        self._buckets.clear()
        self._stage = None


class SharedMemoryReceiver(HandleReceiver):
    """See the module's docstring."""

    name: ClassVar[str] = "shared_memory"
    messages: ClassVar[Any] = Message

    def __init__(self, context: LinkContext, *, receiver: int) -> None:
        super().__init__(context, receiver=receiver)
        self._segments: dict[int, MappedSegment] = {}

    def connect(self, address: bytes) -> None:
        self._dial(address.decode())

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
                    segment_of = self._segments.get(message.segment)
                    yield self._chunk(message, segment_of.payload if segment_of is not None else None)
                case End():
                    self._check_end(message, transfer)
                    return
                case _:
                    if fd is not None:
                        os.close(fd)
                    raise TransportError(f"{self._channel.peer} sent {message}, expected a chunk")

    def close(self) -> None:
        self.abort()
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
