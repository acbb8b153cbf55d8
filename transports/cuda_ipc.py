"""CUDA IPC: engines read a trainer's weights where they lie in GPU memory.

    once                the listener, one channel a receiver, a probe that both ends reach one GPU memory
    per allocation      a segment: memory that both ends have mapped, opened once by its IPC handle
    while it stays so   a layout: which tensor lies where in which segment
    per version         "the layout again", and what the sender read: one digest a tensor

Three places from which receivers read, in this order of preference: the trainer's own parameters, where they are held
during the update and CUDA can export their memory; a stage outside torch's allocator for the rest, where
`staging_limit_bytes` allows it; two buckets used in turn, where it does not. The first two are stable until the update
ends, so receivers copy nothing before they load; a bucket is filled again only after every receiver has released it.

Ordered by the host: the sender waits for all work of its process on the GPU before it announces anything, and each end
for its own kernels before it sends the message that the other waits for.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch

from weightsync.bucket import Bucket, seal, wire_tensor, write_piece
from weightsync.chunk import WeightChunk, aligned, as_bytes, from_bytes
from weightsync.cuda.memory import Allocation, GpuMemory, process_token
from weightsync.cuda.moves import note_transfer, stream_of
from weightsync.digest import ContentDigest
from weightsync.errors import TransportError
from weightsync.interfaces import LinkContext, Transfer, TransferStats
from weightsync.manifest import TensorMeta
from weightsync.transports.exports import Exported, Exports, Item, Items, Layout, Segment, samples
from weightsync.transports.handles import Ack, Chunk, End, Forget, HandleReceiver, HandleSender, Hello
from weightsync.weightset import SetDigests, SetLayout, WeightSet

_POOL_BYTES = 2 << 20  # smaller allocations share a block with others, which an IPC handle would export as a whole
_NONCE_BYTES = 16


class Address(msgspec.Struct, frozen=True):
    """Where the sender listens, and a piece of its GPU memory with a nonce in it."""

    listener: str
    gpu: str
    process: str
    handle: bytes
    probe: tuple[int, int, int]
    """Base, bytes and number of its allocation."""
    nonce: bytes


class Set(msgspec.Struct, tag=True, frozen=True):
    """Sender to receiver: every tensor of the layout holds the version."""

    version: int
    manifest_digest: str


class Digests(msgspec.Struct, tag=True, frozen=True):
    """Sender to receiver: of the set's tensors, 64-bit little-endian."""

    digests: bytes


Message = Hello | Segment | Forget | Layout | Set | Digests | Chunk | End | Ack


class CudaIpcSender(HandleSender):
    """See the module's docstring. Everything runs on the thread that calls `send`."""

    name: ClassVar[str] = "cuda_ipc"
    messages: ClassVar[Any] = Message
    memory_kind: ClassVar[type[GpuMemory]] = GpuMemory

    def __init__(self, context: LinkContext) -> None:
        super().__init__(context)
        self._memory = self.memory_kind(torch.device(context.device))
        self._probe: torch.Tensor | None = None
        self._exports = Exports(self._memory, self._tell)
        self._head_start: Exported | None = None
        """The layout that is being digested, before it was seen to hold."""
        self._begun: tuple[list[Item], list[Item]] | None = None
        """The version that comes, sorted, where the digests of the layout's tensors have been started."""
        self._stage: tuple[int, torch.Tensor] | None = None
        self._place: dict[str, int] = {}
        self._place_end = 0
        self._copied_bytes: int | None = None
        """Of the tensors that have to be copied, as far as is known before they come."""

    def look(self, tensors: Items) -> None:
        with self._memory.bound():
            _, rest = self._exports.sort(tensors)
        self._copied_bytes = sum(aligned(meta.nbytes) for meta, _ in rest)

    def open(self, metas: tuple[TensorMeta, ...]) -> bytes:
        self._memory.check()
        if self._copied_bytes is None:
            self._copied_bytes = sum(aligned(meta.nbytes) for meta in metas)
        with self._memory.bound():
            self._probe = self._memory.pool(_POOL_BYTES)
            probe = self._memory.allocation_of(self._probe.data_ptr())
        assert probe is not None
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._probe[:_NONCE_BYTES].copy_(torch.frombuffer(bytearray(nonce), dtype=torch.uint8))
        self._memory.synchronize()
        handle = self._exports.handle_of(probe)
        address = Address(self._listen(), self._memory.uuid, process_token(), handle, probe.wire, nonce)
        return msgspec.msgpack.encode(address)

    def stable(self) -> bool:
        assert self._copied_bytes is not None, "stable before open"
        return self._copied_bytes <= self.context.staging_limit_bytes

    def send(self, transfer: Transfer, tensors: Items) -> TransferStats:
        with self._memory.bound():
            return self._send(transfer, tensors)

    def _send(self, transfer: Transfer, tensors: Items) -> TransferStats:
        content = ContentDigest()
        note_transfer()
        if not transfer.held:
            self._begun = None
        if self._begun is None:
            self._memory.synchronize()  # whoever made the weights, on whichever stream, is done
        if transfer.held:
            tensors = self._send_set(transfer, tensors, content)
        if self.stable():
            self._send_stage(transfer, tensors, content)
        else:
            self._send_buckets(transfer, tensors, content)
        self._tell(End(transfer.version))
        return TransferStats(content.nbytes, content.value)

    # ---- the trainer's own memory -----------------------------------------------------------------------------

    def head_start(self, held: Mapping[str, torch.Tensor]) -> None:
        """Start to digest the weights that lie where they did, while nobody waits for it yet."""
        layout = self._exports.layout
        self._head_start = (
            layout
            if self.context.digest
            and layout is not None
            and all(name in held and held[name].data_ptr() == address for name, address in layout.addresses.items())
            else None
        )
        if self._head_start is not None:
            with self._memory.bound():
                self._memory.synchronize()  # whoever made the weights, on whichever stream, is done
                self._head_start.reads.start(digest=True)

    def begin(self, tensors: Sequence[Item]) -> None:
        """Look through the weights, for `send`."""
        self._begun = None  # of a transfer that went over other links only
        started, self._head_start = self._head_start, None
        if self._exports.layout is None:
            return
        with self._memory.bound():
            found, rest = self._exports.sort(tensors)
            layout = self._exports.layout
            if layout is not None and layout.holds(found):
                self._begun = found, rest
                if self.context.digest and layout is not started:
                    self._memory.synchronize()
                    layout.reads.start(digest=True)

    def _send_set(self, transfer: Transfer, tensors: Items, content: ContentDigest) -> list[Item]:
        """Announce what can be read where it lies; returns the rest."""
        begun, self._begun = self._begun, None
        found, rest = begun or self._exports.sort(tensors)
        if found:
            self._announce_set(transfer, found, content, started=begun is not None)
        else:
            self._exports.forget()
        if begun is not None:  # the iterator is still to be asked for all; other links may take long over it
            for _ in tensors:
                pass
        return rest

    def _announce_set(self, transfer: Transfer, found: list[Item], content: ContentDigest, *, started: bool) -> None:
        layout = self._exports.layout_of(found)
        if self.context.digest and not started:
            layout.reads.start(digest=True)
        self._tell(Set(transfer.version, transfer.manifest.digest))
        digests = np.zeros(len(found), dtype=np.uint64)
        if self.context.digest:
            digests = layout.reads.result()
            self._tell(Digests(digests.astype("<u8").tobytes()))
        content.add_table(layout.digest, layout.nbytes, digests)

    # ---- the rest ---------------------------------------------------------------------------------------------

    def _send_stage(self, transfer: Transfer, tensors: Items, content: ContentDigest) -> None:
        """Copy into memory that receivers have mapped; announced when a bucket's worth has come together."""
        bucket: Bucket | None = None
        nbytes = 0
        for meta, tensor in tensors:
            segment, stage = self._stage_for(meta)
            bucket = bucket or Bucket(stage, [])
            bucket.used_bytes = self._place[meta.name]
            write_piece(
                bucket,
                meta,
                as_bytes(wire_tensor(meta, tensor)),
                start=0,
                content=content,
                digest=self.context.digest,
                held=transfer.held,
            )
            nbytes += meta.nbytes
            if nbytes >= self.context.gpu_bucket_bytes:
                self._announce_stage(transfer, segment, bucket, content)
                nbytes = 0
        if bucket is not None and bucket.pieces:
            self._announce_stage(transfer, segment, bucket, content)

    def _announce_stage(self, transfer: Transfer, segment: int, bucket: Bucket, content: ContentDigest) -> None:
        seal(bucket, content=content, digest=self.context.digest)
        self._announce(transfer, segment, bucket.pieces, stable=True)
        bucket.pieces = []

    def _stage_for(self, meta: TensorMeta) -> tuple[int, torch.Tensor]:
        """The stage, with a place for the tensor."""
        if meta.name not in self._place:
            self._place[meta.name] = self._place_end
            self._place_end += aligned(meta.nbytes)
        if self._stage is None:
            assert self._copied_bytes is not None
            self._stage = self._new_pool(self._copied_bytes)
        if self._place_end > self._stage[1].numel():
            raise TransportError(
                f"{meta.name} could be read in place when the link was opened and has to be copied now; the next update "
                "opens it anew"
            )
        return self._stage

    def _new_bucket(self) -> tuple[int, torch.Tensor]:
        return self._new_pool(self._bucket_size(self.context.gpu_bucket_bytes))

    def _new_pool(self, nbytes: int) -> tuple[int, torch.Tensor]:
        if self._aborted:  # and perhaps closed, so nobody would give the memory back
            raise TransportError("the update was aborted")
        memory = self._memory.pool(-(-max(nbytes, 1) // _POOL_BYTES) * _POOL_BYTES)
        allocation = self._memory.allocation_of(memory.data_ptr())
        assert allocation is not None
        return self._exports.share(allocation), memory[: max(nbytes, 1)]

    def finish(self) -> None:
        self._begun = None

    def close(self) -> None:
        self.abort()
        self._buckets.clear()
        self._begun = self._head_start = self._exports.layout = None
        self._stage = self._probe = None


class CudaIpcReceiver(HandleReceiver):
    """See the module's docstring."""

    name: ClassVar[str] = "cuda_ipc"
    messages: ClassVar[Any] = Message
    sends_sets: ClassVar[bool] = True
    memory_kind: ClassVar[type[GpuMemory]] = GpuMemory

    def __init__(self, context: LinkContext, *, receiver: int) -> None:
        super().__init__(context, receiver=receiver)
        self._memory = self.memory_kind(torch.device(context.device))
        self._owner = ""
        self._segments: dict[int, torch.Tensor] = {}
        self._layout: SetLayout | None = None

    def connect(self, address: bytes) -> None:
        self._memory.check()
        found = msgspec.msgpack.decode(address, type=Address)
        self._owner = found.process
        probe = self._memory.open(found.handle, Allocation(*found.probe), owner=found.process)
        nonce = probe[:_NONCE_BYTES].cpu().numpy().tobytes()
        del probe
        if nonce != found.nonce:
            raise TransportError(
                f"the memory that {self._memory.device} (GPU {self._memory.uuid}) reaches is not that of sender "
                f"{self.context.sender} (GPU {found.gpu}); check CUDA_VISIBLE_DEVICES of both"
            )
        self._dial(found.listener)

    def receive(self, transfer: Transfer) -> Iterator[WeightChunk | WeightSet | SetDigests]:
        assert self._channel is not None, "receive before connect"
        current: WeightSet | None = None
        while True:
            message, _ = self._channel.receive(timeout_s=self.context.timeout_s)
            match message:
                case Segment(id=id, handle=handle, allocation=allocation):
                    self._segments[id] = self._memory.open(handle, Allocation(*allocation), owner=self._owner)
                case Forget(id=id) if id in self._segments:
                    self._layout = current = None
                    del self._segments[id]
                case Layout():
                    self._layout = self._read_layout(message, transfer)
                case Set(version=version, manifest_digest=manifest_digest) if self._layout is not None:
                    current = WeightSet(version, manifest_digest, self._layout, self.context.sender)
                    yield current
                case Digests(digests=digests) if current is not None:
                    values = np.frombuffer(digests, dtype="<u8").astype(np.uint64)
                    yield SetDigests(current, values)
                case Chunk():
                    yield self._chunk(message, self._segments.get(message.segment))
                case End():
                    self._check_end(message, transfer)
                    return
                case _:
                    raise TransportError(f"{self._channel.peer} sent {message}, expected a chunk")

    def _read_layout(self, layout: Layout, transfer: Transfer) -> SetLayout:
        tensors: dict[str, torch.Tensor] = {}
        for place in layout.places:
            meta, segment = transfer.manifest.by_name.get(place.name), self._segments.get(place.segment)
            if (
                meta is None
                or segment is None
                or place.name in tensors
                or not 0 <= place.offset <= segment.numel() - meta.nbytes
            ):
                raise TransportError(
                    f"sender {self.context.sender} says that {place.name} lies where nothing was shared"
                )
            data = segment[place.offset : place.offset + meta.nbytes]
            tensors[place.name] = from_bytes(data, meta.torch_dtype, meta.shape)
        if samples(tensors.values(), self._memory.device) != layout.samples:
            raise TransportError(
                f"the memory that was mapped is not where the weights of sender {self.context.sender} lie"
            )
        return SetLayout(tensors, self._memory.device)

    def close(self) -> None:
        self.abort()
        if self._memory.device.type == "cuda":
            stream_of(self._memory.device).synchronize()  # a digest that nobody waited for still reads the mappings
        self._segments.clear()
        self._layout = None
