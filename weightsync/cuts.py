"""Cut what a rank needs of a tensor along what others hold of it, once for all tensors and ranks that are alike.

Arrays have one row a piece, and boxes in them are padded in front to one number of dimensions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from weightsync.balance import Counts, turns
from weightsync.boxes import Box, fused
from weightsync.holdings import Part

Ints = np.ndarray[Any, np.dtype[np.int64]]


class Hole(Exception):
    """Nobody holds this box."""

    def __init__(self, box: Box) -> None:
        super().__init__(str(box))
        self.box = box


class Owned(NamedTuple):
    """A part of a tensor on one rank."""

    rank: int
    part: Part
    local_shape: tuple[int, ...]


@dataclass(eq=False, slots=True)
class Cut:
    """The pieces of one need, and for each the ranks that hold it: its candidates, one of which is chosen per tensor.

    Piece arrays have P rows; candidate arrays have the candidates of piece 0, then those of piece 1, and so on.
    """

    start: Ints
    size: Ints
    box: Ints
    """Which of the needed boxes."""
    box_offset: Ints
    """First element within that box, and in how many runs the piece lies there."""
    box_runs: Ints
    first: Ints
    """P + 1 rows: where the candidates of a piece start."""
    rank: Ints
    local_start: Ints
    local_offset: Ints
    local_runs: Ints
    strand: Ints
    """Per piece: which of `owners`, the sets of candidate ranks."""
    owners: tuple[tuple[int, ...], ...]
    counts: list[Counts | None] = field(default_factory=list)
    """Per strand, how many tensors each receiver takes from each owner; None where there is one."""
    numel: Ints = field(init=False)
    piece_of: Ints = field(init=False)
    by_rank: Ints = field(init=False)

    def __post_init__(self) -> None:
        self.numel = self.size.prod(axis=1)
        self.piece_of = np.repeat(np.arange(len(self.start)), np.diff(self.first))
        self.by_rank = np.argsort(self.rank, kind="stable")

    @property
    def is_forced(self) -> bool:
        """Every piece has one owner."""
        return len(self.rank) == len(self.start)

    def strand_numel(self) -> list[int]:
        """Per strand, how many elements of one tensor it has."""
        found = np.zeros(len(self.owners), dtype=np.int64)
        np.add.at(found, self.strand, self.numel)
        return [int(n) for n in found]

    def candidates_of(self, rank: int) -> Ints:
        """The candidates on one rank, in the order of their pieces."""
        low, high = np.searchsorted(self.rank, [rank, rank + 1], sorter=self.by_rank)
        return self.by_rank[low:high]

    def choices(self, receiver: int, ordinals: Ints, strands: Ints) -> Ints:
        """[strand, tensor]: which owner serves a receiver (its number among the like) for some of the like tensors."""
        found = np.zeros((len(strands), len(ordinals)), dtype=np.int64)
        rows: dict[int, Ints] = {}
        for i, strand in enumerate(strands.tolist()):
            counts = self.counts[strand]
            if counts is None:
                continue
            row = rows.get(id(counts))
            if row is None:
                owners = turns(tuple(counts[receiver].tolist()))
                row = rows[id(counts)] = owners[ordinals]
            found[i] = row
        return found

    def chosen(self, receiver: int, ordinals: Ints) -> Ints:
        """[tensor, piece]: the candidate that serves it."""
        if self.is_forced:
            return np.broadcast_to(np.arange(len(self.rank)), (len(ordinals), len(self.rank)))
        choices = self.choices(receiver, ordinals, np.arange(len(self.owners)))
        return (self.first[:-1, None] + choices[self.strand]).T

    def content(self) -> list[bytes]:
        """All that decides who sends what, for a digest."""
        arrays = [self.start, self.size, self.box, self.first, self.rank, self.local_start, self.strand]
        return [array.tobytes() for array in arrays] + [b"" if c is None else c.tobytes() for c in self.counts]


def cut(boxes: Sequence[Box], owned: Sequence[Owned], num_dims: int) -> Cut:
    """Cut needed *boxes* (not overlapping) of one tensor along what is *owned* of it.

    Pieces are as large as what is held allows.

    Raises:
        Hole: nobody holds a part of a box.
    """
    owned = sorted((o for o in owned if o.part.box.numel), key=lambda o: (o.part.box, o.rank))
    held = [(box, [i for i, _ in group]) for box, group in itertools.groupby(enumerate(owned), lambda e: e[1].part.box)]
    pieces: list[tuple[int, Box, list[int]]] = []
    for number, need in enumerate(boxes):
        if need.numel:
            pieces += [(number, piece, holders) for piece, holders in _pieces(need, held)]
    start = _padded([piece.start for _, piece, _ in pieces], num_dims, 0)
    size = _padded([piece.size for _, piece, _ in pieces], num_dims, 1)
    box = np.array([number for number, _, _ in pieces], dtype=np.int64)
    need_start = _padded([need.start for need in boxes], num_dims, 0)[box]
    need_size = _padded([need.size for need in boxes], num_dims, 1)[box]
    box_offset, box_runs = _lie(start - need_start, size, need_size)

    lengths = [len(holders) for _, _, holders in pieces]
    first = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
    rows = np.array([i for _, _, holders in pieces for i in holders], dtype=np.int64)
    at = np.repeat(np.arange(len(pieces)), lengths)
    owned_start = _padded([o.part.box.start for o in owned], num_dims, 0)[rows]
    local_start = _padded([o.part.local_start for o in owned], num_dims, 0)[rows] + start[at] - owned_start
    local_size = _padded([o.local_shape for o in owned], num_dims, 1)[rows]
    local_offset, local_runs = _lie(local_start, size[at], local_size)
    strands: dict[tuple[int, ...], int] = {}
    strand = [strands.setdefault(tuple(owned[i].rank for i in holders), len(strands)) for _, _, holders in pieces]
    return Cut(
        start, size, box, box_offset, box_runs, first, np.array([o.rank for o in owned], dtype=np.int64)[rows],
        local_start, local_offset, local_runs, np.array(strand, dtype=np.int64), tuple(strands),
    )  # fmt: skip


def _pieces(need: Box, held: Sequence[tuple[Box, list[int]]]) -> list[tuple[Box, list[int]]]:
    found = [(common, holders) for box, holders in held if (common := need.intersection(box)) is not None]
    if sum(piece.numel for piece, _ in found) != need.numel or _overlap([piece for piece, _ in found]):
        left = [need]
        for piece, _ in found:
            left = [rest for part in left for rest in part.minus(piece)]
        if left:
            raise Hole(fused(left)[0])
        return _cells(need, found)
    return found


def _cells(need: Box, found: Sequence[tuple[Box, list[int]]]) -> list[tuple[Box, list[int]]]:
    """Where held boxes overlap: boxes all of whose elements are held by the same ranks."""
    cuts = [
        sorted({n for box, _ in found for n in (box.start[d], box.start[d] + box.size[d])})
        for d in range(len(need.start))
    ]
    cells: dict[tuple[int, ...], list[Box]] = {}
    for sides in itertools.product(*(itertools.pairwise(cut) for cut in cuts)):
        cell = Box(tuple(a for a, _ in sides), tuple(b - a for a, b in sides))
        holders = tuple(sorted(i for box, indices in found if cell in box for i in indices))
        cells.setdefault(holders, []).append(cell)
    return sorted((box, list(holders)) for holders, boxes in cells.items() for box in fused(boxes))


def _overlap(boxes: Sequence[Box]) -> bool:
    """Whether any two do; in blocks, as there are as many as ranks."""
    if len(boxes) < 2 or not boxes[0].start:
        return len(boxes) > 1
    low, high = np.array([box.start for box in boxes]), np.array([box.stop for box in boxes])
    for at in range(0, len(boxes), 256):
        block = slice(at, at + 256)
        meet = ((low[block, None] < high[None]) & (low[None] < high[block, None])).all(axis=2)
        if int(meet.sum()) > len(low[block]):  # each meets itself
            return True
    return False


def _padded(rows: Iterable[tuple[int, ...]], num_dims: int, value: int) -> Ints:
    padded = [(value,) * (num_dims - len(row)) + row for row in rows]
    return np.array(padded, dtype=np.int64).reshape(len(padded), num_dims)


def _lie(start: Ints, size: Ints, outer: Ints) -> tuple[Ints, Ints]:
    """(offset, number of runs) of boxes in contiguous tensors of shapes *outer*."""
    num_dims = start.shape[1]
    offset, runs = np.zeros(len(start), dtype=np.int64), size.prod(axis=1)
    stride, whole = np.ones(len(start), dtype=np.int64), np.ones(len(start), dtype=bool)
    for d in reversed(range(num_dims)):
        offset += start[:, d] * stride
        runs = np.where(whole, runs // size[:, d], runs)
        whole &= size[:, d] == outer[:, d]
        stride = stride * outer[:, d]
    return offset, runs
