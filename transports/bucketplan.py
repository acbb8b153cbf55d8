"""Buckets that are known before the first byte moves: where all tensors exist at once, on the GPU and as they travel.

Told to the receivers once, as long as the tensors lie where they do: then a bucket need not be announced before it is sent,
and is filled by a launch that was compiled once. Its digests travel at its end, where the launch that fills it leaves them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch

from weightsync.chunk import ALIGNMENT_BYTES, Piece, aligned, as_bytes
from weightsync.cuda.moves import Moves
from weightsync.digest import ContentDigest
from weightsync.manifest import TensorMeta

Item = tuple[TensorMeta, torch.Tensor]

DIGEST_BYTES = 8
_LEAST_BYTES = 4 * ALIGNMENT_BYTES
_SMALL_BYTES = 16 << 20
"""Cutting a bucket of less gains nothing."""


class BucketPlan(msgspec.Struct, tag=True, frozen=True):
    """To receivers: what comes, bucket by bucket."""

    number: int
    """By which the sender names it from then on."""
    manifest_digest: str
    buckets: tuple[tuple[Piece, ...], ...]
    nbytes: tuple[int, ...]
    """Of each bucket."""
    digested: bool
    """Each bucket ends with the digests of its pieces, `DIGEST_BYTES` each."""

    def is_possible(self, largest_bytes: int) -> bool:
        """Whether its buckets have room for what is said to be in them, and the receiver for each bucket."""
        return len(self.nbytes) == len(self.buckets) and all(
            0 < nbytes <= largest_bytes and DIGEST_BYTES * len(pieces) * self.digested <= nbytes
            for pieces, nbytes in zip(self.buckets, self.nbytes, strict=True)
        )

    def landed(self, number: int, payload: torch.Tensor) -> tuple[Piece, ...]:
        """The pieces of a bucket that is here, with the digests that came with it."""
        pieces = self.buckets[number]
        if not self.digested:
            return pieces
        end = payload[self.nbytes[number] - DIGEST_BYTES * len(pieces) : self.nbytes[number]]
        digests = end.cpu().numpy().view("<u8").tolist()
        return tuple(Piece(p.name, p.start, p.nbytes, p.offset, d) for p, d in zip(pieces, digests, strict=True))


@dataclass(frozen=True, slots=True)
class _Slice:
    """A run of a tensor's bytes, and where in its bucket it goes."""

    name: str
    data: torch.Tensor
    start: int
    offset: int


class PlannedBuckets:
    """A sender's, for tensors that lie where they did when it was made. Keeps no reference to them."""

    def __init__(self, number: int, tensors: Sequence[Item], buckets: Sequence[torch.Tensor], *, digest: bool) -> None:
        """*buckets* are used in turn."""
        self.number, self._digest = number, digest
        self._places = _places(tensors)
        self._pieces: list[tuple[Piece, ...]] = []
        self._fills: list[Moves] = []
        self.payloads: list[torch.Tensor] = []
        """What is to be sent, in order."""
        for i, parts in enumerate(_cut(tensors, buckets[0].numel())):
            bucket = buckets[i % len(buckets)]
            end = aligned(parts[-1].offset + parts[-1].data.numel())
            digests = bucket[end : end + DIGEST_BYTES * len(parts)]
            self.payloads.append(bucket[: end + digests.numel() if digest else max(end, 1)])
            self._pieces.append(tuple(Piece(part.name, part.start, part.data.numel(), part.offset) for part in parts))
            moves = [(part.data, bucket[part.offset : part.offset + part.data.numel()]) for part in parts]
            # Beside the broadcast of the bucket before.
            self._fills.append(Moves(moves, bucket.device, digests=digests.view(torch.int64), beside=True))

    def is_of(self, tensors: Sequence[Item]) -> bool:
        """Whether these tensors lie where it was made for."""
        return self._places == _places(tensors)

    def fill(self, number: int) -> None:
        """Begin to put the bytes, and their digests, into a bucket that is free, on this package's stream."""
        self._fills[number].start(digest=self._digest)

    def tell(self, manifest_digest: str) -> BucketPlan:
        nbytes = tuple(payload.numel() for payload in self.payloads)
        return BucketPlan(self.number, manifest_digest, tuple(self._pieces), nbytes, self._digest)

    def note(self, number: int, content: ContentDigest) -> None:
        """Count what is in a filled bucket as sent."""
        digests = self._fills[number].result().tolist()
        for piece, digest in zip(self._pieces[number], digests, strict=True):
            content.add(piece.name, piece.start, piece.nbytes, digest)


def can_plan(tensors: Iterable[Item], bucket: torch.Tensor) -> bool:
    """Whether the tensors can be read as they lie, on the device of the buckets, and these have room for any."""
    return bucket.numel() >= _LEAST_BYTES and all(
        tensor.dtype == meta.torch_dtype and tensor.device == bucket.device and tensor.is_contiguous()
        for meta, tensor in tensors
    )


def planned_bytes(metas: Iterable[TensorMeta]) -> int:
    """What one bucket with all of them takes."""
    return max(sum(aligned(meta.nbytes) + DIGEST_BYTES for meta in metas), _LEAST_BYTES)


def _cut(tensors: Iterable[Item], bucket_bytes: int) -> list[list[_Slice]]:
    """Each tensor in as many runs as there are buckets that it reaches into; every bucket has room for its digests."""
    items = [(meta, as_bytes(tensor.detach())) for meta, tensor in tensors]
    sizes = _sizes(sum(aligned(data.numel()) + DIGEST_BYTES for _, data in items), bucket_bytes)
    buckets: list[list[_Slice]] = [[]]
    size, end = next(sizes), 0
    for meta, data in items:
        start = 0
        while True:
            room = _room(size, len(buckets[-1]) + 1) - end
            if buckets[-1] and room <= 0:
                buckets.append([])
                size, end = next(sizes), 0
                continue
            stop = start + min(data.numel() - start, room)
            buckets[-1].append(_Slice(meta.name, data[start:stop], start, end))
            end = aligned(end + stop - start)
            start = stop
            if start == data.numel():
                break
    return buckets


def _sizes(total: int, largest: int) -> Iterator[int]:
    """Of buckets for *total* bytes. The first are smaller, so that there soon is something to send; the last are again, since
    the last one is only read, and each takes a while to read however small it is."""
    part = largest // 8
    while True:
        size = min(part, 2 * total // 3) if total > largest // 3 else largest
        size = min(max(size, _SMALL_BYTES), largest)
        yield size
        total -= size
        part = min(3 * part, largest)


def _room(bucket_bytes: int, num_pieces: int) -> int:
    """For the bytes of so many pieces."""
    return (bucket_bytes - DIGEST_BYTES * num_pieces) // ALIGNMENT_BYTES * ALIGNMENT_BYTES


def _places(tensors: Iterable[Item]) -> list[tuple[str, int, torch.dtype, int, bool]]:
    return [(meta.name, t.data_ptr(), t.dtype, t.numel(), t.is_contiguous()) for meta, t in tensors]
