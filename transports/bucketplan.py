"""Buckets that are known before the first byte moves: where all tensors exist at once, on the GPU and as they travel.

Told to the receivers in one message, so that a bucket need not be announced before it is sent; filled by launches that were
compiled once, as long as the tensors lie where they do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import torch

from weightsync.chunk import Piece, aligned, as_bytes
from weightsync.cuda.moves import Moves
from weightsync.digest import ContentDigest
from weightsync.manifest import TensorMeta

Item = tuple[TensorMeta, torch.Tensor]


class BucketPlan(msgspec.Struct, tag=True, frozen=True):
    """To receivers: what comes, bucket by bucket."""

    version: int
    manifest_digest: str
    buckets: tuple[tuple[Piece, ...], ...]
    nbytes: tuple[int, ...]
    """Of each bucket."""


@dataclass(frozen=True, slots=True)
class _Slice:
    """A run of a tensor's bytes, and where in its bucket it goes."""

    name: str
    data: torch.Tensor
    start: int
    offset: int


class PlannedBuckets:
    """A sender's, for tensors that lie where they did when it was made. Keeps no reference to them."""

    def __init__(self, tensors: Sequence[Item], buckets: Sequence[torch.Tensor], device: torch.device) -> None:
        """*buckets* are used in turn."""
        self._addresses = _addresses(tensors)
        self._pieces: list[list[Piece]] = []
        self._fills: list[Moves] = []
        self.payloads: list[torch.Tensor] = []
        """What is to be sent, in order."""
        slices = _cut(tensors, buckets[0].numel())
        for i, parts in enumerate(slices):
            bucket = buckets[i % len(buckets)]
            last = parts[-1]
            self.payloads.append(bucket[: max(min(aligned(last.offset + last.data.numel()), bucket.numel()), 1)])
            self._pieces.append([Piece(part.name, part.start, part.data.numel(), part.offset) for part in parts])
            moves = [(part.data, bucket[part.offset : part.offset + part.data.numel()]) for part in parts]
            self._fills.append(Moves(moves, device))
        self._reads = Moves([(part.data, None) for parts in slices for part in parts], device)

    def is_of(self, tensors: Sequence[Item]) -> bool:
        """Whether these tensors lie where it was made for."""
        return self._addresses == _addresses(tensors)

    def start(self) -> None:
        """Begin to digest all of it."""
        self._reads.start(digest=True)

    def fill(self, number: int) -> torch.Tensor:
        """Put the bytes into a bucket that is free; returns what is to be sent."""
        self._fills[number].run(digest=False)
        return self.payloads[number]

    def tell(self, version: int, manifest_digest: str, *, digest: bool) -> BucketPlan:
        """With the digests, where `start` was called for this version."""
        buckets = tuple(map(tuple, self._pieces))
        if digest:
            values = iter(self._reads.result().tolist())
            buckets = tuple(
                tuple(
                    Piece(p.name, p.start, p.nbytes, p.offset, value) for p, value in zip(pieces, values, strict=False)
                )
                for pieces in self._pieces
            )
        return BucketPlan(version, manifest_digest, buckets, tuple(payload.numel() for payload in self.payloads))


def can_plan(tensors: Iterable[Item], device: torch.device) -> bool:
    """Whether the tensors can be read as they lie, on *device*."""
    return all(
        tensor.dtype == meta.torch_dtype and tensor.device == device and tensor.is_contiguous()
        for meta, tensor in tensors
    )


def note(plan: BucketPlan, content: ContentDigest) -> None:
    """Count what was planned as sent."""
    for pieces in plan.buckets:
        for piece in pieces:
            content.add(piece.name, piece.start, piece.nbytes, piece.digest or 0)


def _cut(tensors: Iterable[Item], bucket_bytes: int) -> list[list[_Slice]]:
    """Each tensor whole where it fits into a bucket, else in runs, each of which fills one."""
    buckets: list[list[_Slice]] = [[]]
    end = 0
    for meta, tensor in tensors:
        data = as_bytes(tensor.detach())
        if buckets[-1] and end + data.numel() > bucket_bytes and data.numel() <= bucket_bytes:
            buckets.append([])
            end = 0
        start = 0
        while True:
            if end >= bucket_bytes:
                buckets.append([])
                end = 0
            stop = min(start + bucket_bytes - end, data.numel())
            buckets[-1].append(_Slice(meta.name, data[start:stop], start, end))
            end = aligned(end + stop - start)
            start = stop
            if start == data.numel():
                break
    return [parts for parts in buckets if parts]


def _addresses(tensors: Iterable[Item]) -> list[tuple[str, int, int]]:
    return [(meta.name, tensor.data_ptr(), tensor.numel()) for meta, tensor in tensors]
