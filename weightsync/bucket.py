"""Fill buckets with tensors: the senders' side of packing, the same for every transport that copies.

A tensor larger than a bucket is cut; each cut is a piece. Casting to the wire dtype, reading strided or
device memory and digesting happen in the same pass that copies. A bucket in GPU memory is digested as a whole when it is
full, and copied then too, in one launch, where its tensors stay as they are until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec
import torch

from weightsync.chunk import Piece, aligned, as_bytes, from_bytes
from weightsync.cuda.moves import Move, run_flat
from weightsync.digest import ContentDigest, copy_and_digest, copy_bytes, digest_bytes
from weightsync.manifest import TensorMeta

_SERIAL_ELEMENTS = 32_768  # torch's grain: it splits work over threads only above this


@dataclass(slots=True)
class Bucket:
    """A reusable buffer: `payload` (1-D uint8) and what was packed into it."""

    payload: torch.Tensor
    pieces: list[Piece]
    used_bytes: int = 0
    moves: list[Move] = field(default_factory=list)
    """In GPU memory: what is still to be copied and digested, one for each piece."""


def write_piece(
    bucket: Bucket,
    meta: TensorMeta,
    data: torch.Tensor,
    *,
    start: int,
    content: ContentDigest,
    digest: bool,
    held: bool = False,
) -> None:
    """Copy *data* (bytes of *meta*'s tensor from byte *start*) to the bucket's end.

    In GPU memory it is whole after `seal`; *held* says that *data* stays as it is until then.
    """
    offset = bucket.used_bytes
    place = bucket.payload[offset : offset + data.numel()]
    bucket.used_bytes = min(aligned(offset + data.numel()), bucket.payload.numel())
    if place.is_cuda:
        if held and data.device == place.device:
            bucket.moves.append((data, place))
        else:
            place.copy_(data)
            bucket.moves.append((place, None))
        bucket.pieces.append(Piece(meta.name, start, data.numel(), offset))
        return
    value = None
    if data.device.type != "cpu":
        place.copy_(data)
        value = digest_bytes(place) if digest else None
    elif digest:
        value = copy_and_digest(place, data)
    else:
        copy_bytes(place, data)
    note_piece(bucket.pieces, Piece(meta.name, start, data.numel(), offset, value), content)


def seal(bucket: Bucket, *, content: ContentDigest, digest: bool) -> None:
    """In GPU memory: copy and digest what is left to be, and wait until it is done. Elsewhere it is done already."""
    if not bucket.payload.is_cuda or not bucket.pieces:
        return
    digests = run_flat(bucket.moves, bucket.payload.device, digest=digest).tolist()
    pieces, bucket.pieces, bucket.moves = bucket.pieces, [], []
    for piece, value in zip(pieces, digests, strict=True):
        note_piece(bucket.pieces, msgspec.structs.replace(piece, digest=value if digest else None), content)


def note_piece(pieces: list[Piece], piece: Piece, content: ContentDigest) -> None:
    pieces.append(piece)
    content.add(piece.name, piece.start, piece.nbytes, piece.digest or 0)


def wire_tensor(meta: TensorMeta, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in its wire dtype, contiguous; the tensor itself where it is both already."""
    tensor = tensor.detach()
    if tensor.dtype == meta.torch_dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
        return tensor.to(dtype=meta.torch_dtype).contiguous()
    cast = torch.empty(meta.shape, dtype=meta.torch_dtype)
    _cast(cast.reshape(-1), tensor.reshape(-1))
    return cast


def fill(
    tensors: Iterable[tuple[TensorMeta, torch.Tensor]],
    next_bucket: Iterator[Bucket],
    *,
    content: ContentDigest,
    digest: bool,
    held: bool = False,
) -> Iterator[Bucket]:
    """Pack *tensors* into buckets; yields each when it is full, and the last.

    *next_bucket* hands out cleared buckets and may block until one is free. *held*: the tensors stay as they are.
    """
    bucket = next(next_bucket)
    for meta, tensor in tensors:
        data = as_bytes(wire_tensor(meta, tensor))
        start = 0
        while True:
            room = bucket.payload.numel() - bucket.used_bytes
            if (room < data.numel() - start and bucket.pieces and data.numel() <= bucket.payload.numel()) or room == 0:
                seal(bucket, content=content, digest=digest)
                yield bucket
                bucket = next(next_bucket)
                room = bucket.payload.numel()
            end = min(start + room, data.numel())
            write_piece(bucket, meta, data[start:end], start=start, content=content, digest=digest, held=held)
            start = end
            if start == data.numel():
                break
        del data  # else it lives while the next is made
    seal(bucket, content=content, digest=digest)
    yield bucket


def write_in_place(
    payload: torch.Tensor, offset: int, meta: TensorMeta, tensor: torch.Tensor, *, digest: bool, piece_bytes: int
) -> Iterator[Piece]:
    """Write a tensor to a fixed place, in pieces; each is yielded when its bytes are there.

    The cast to the wire dtype is part of the copy.
    """
    place = payload[offset : offset + meta.nbytes]
    tensor = tensor.detach()
    on_cpu = tensor.is_contiguous() and tensor.device.type == "cpu"
    plain = on_cpu and tensor.dtype == meta.torch_dtype
    if not plain and meta.numel:
        typed = from_bytes(place, meta.torch_dtype, meta.shape)
        if on_cpu:
            _cast(typed.reshape(-1), tensor.reshape(-1))
        else:
            typed.copy_(tensor)
    data = as_bytes(tensor) if plain else None
    for start, end in cuts(meta.nbytes, piece_bytes):
        value = None
        if data is not None and digest:
            value = copy_and_digest(place[start:end], data[start:end])
        elif data is not None:
            copy_bytes(place[start:end], data[start:end])
        elif digest:
            value = digest_bytes(place[start:end])
        yield Piece(meta.name, start, end - start, offset + start, value)


def _cast(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy 1-D *source* over *destination*, casting, in runs so short that torch keeps to this thread (`copy_bytes`)."""
    for start in range(0, source.numel(), _SERIAL_ELEMENTS):
        end = start + _SERIAL_ELEMENTS
        destination[start:end].copy_(source[start:end])


def cuts(nbytes: int, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, end) of runs of at most *piece_bytes*; one empty run for no bytes."""
    for start in range(0, max(nbytes, 1), piece_bytes):
        yield start, min(start + piece_bytes, nbytes)


def count_changed(payload: torch.Tensor, offset: int, meta: TensorMeta, tensor: torch.Tensor) -> int:
    """How many values of *tensor*, in its wire dtype, differ from what lies at its place."""
    known = from_bytes(payload[offset : offset + meta.nbytes], meta.torch_dtype, meta.shape)
    return int((_bits(tensor.detach().to(dtype=meta.torch_dtype)) != _bits(known)).sum())


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The values as integers, so that NaN equals itself; complex128 is compared as it is."""
    bits = _BITS.get(tensor.dtype.itemsize)
    return tensor.contiguous().view(bits).cpu() if bits is not None and tensor.dim() else tensor.cpu()
