"""Pulls: who takes which box of which tensor from whom, where it lies there, and where it goes.

A table of numpy rows, as a plan has millions; one row, as an object, is a `Pull`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from weightsync.boxes import Box
from weightsync.chunk import ALIGNMENT_BYTES
from weightsync.cuts import Cut, Ints
from weightsync.manifest import TensorMeta

Rows = np.ndarray[Any, np.dtype[np.void]]


class Pull(msgspec.Struct, frozen=True, array_like=True):
    """One box of one tensor, from one sender to one receiver."""

    name: str
    """Canonical; a sender that holds a tie of it only, sends that."""
    box: Box
    group: int
    sender: int
    receiver: int
    nbytes: int
    """In the wire dtype."""
    local: Box
    """The box within the sender's local tensor."""
    local_offset: int
    """First element within the sender's local tensor, were it contiguous."""
    local_runs: int
    """In how many contiguous runs it lies there: pack where there are several."""
    need: int
    """Which of the receiver's needed boxes of this tensor."""
    staged_offset: int
    """First byte within the receiver's staging."""
    staged_runs: int


def row_type(num_dims: int) -> np.dtype[np.void]:
    """Boxes are padded in front to *num_dims* dimensions."""
    boxes = [(field, np.int64, (num_dims,)) for field in ("start", "size", "local_start")]
    whole = ("nbytes", "local_offset", "local_runs", "staged_offset", "staged_runs")
    return np.dtype(
        [
            *((field, np.int32) for field in ("name", "group", "sender", "receiver", "need")),
            *((field, np.int64) for field in whole),
            *boxes,
        ]
    )


@dataclass(eq=False, slots=True)
class Entry:
    """Tensors of one group that are alike, and how what a class of receivers needs of each is cut."""

    cut: Cut
    itemsize: int
    names: Ints
    """Numbers of the tensors, ascending."""
    ordinals: Ints
    """Their numbers among all tensors of the plan that are alike."""
    staged: Ints
    """[tensor, needed box]: first byte in the receiver's staging."""

    @property
    def num_pulls(self) -> int:
        """Per receiver."""
        return len(self.names) * len(self.cut.start)

    @property
    def nbytes(self) -> int:
        """Per receiver."""
        return len(self.names) * int(self.cut.numel.sum()) * self.itemsize

    def rows(self, group: int, tensor: Ints, candidate: Ints, receiver: Ints | int, num_dims: int) -> Rows:
        """A row for each pair of a tensor (number within the entry) and a candidate of the cut."""
        cut, piece = self.cut, self.cut.piece_of[candidate]
        rows = np.empty(len(candidate), dtype=row_type(num_dims))
        rows["name"], rows["group"], rows["receiver"] = self.names[tensor], group, receiver
        rows["sender"], rows["need"] = cut.rank[candidate], cut.box[piece]
        rows["start"], rows["size"], rows["local_start"] = cut.start[piece], cut.size[piece], cut.local_start[candidate]
        rows["nbytes"] = cut.numel[piece] * self.itemsize
        rows["local_offset"], rows["local_runs"] = cut.local_offset[candidate], cut.local_runs[candidate]
        rows["staged_offset"] = self.staged[tensor, cut.box[piece]] + cut.box_offset[piece] * self.itemsize
        rows["staged_runs"] = cut.box_runs[piece]
        return rows


@dataclass(eq=False, slots=True)
class Pulls:
    """Pulls of one module group, those between the same two ranks together."""

    rows: Rows
    """Columns as in `row_type`; `name` counts in `metas`."""
    metas: Sequence[TensorMeta]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        return int(self.rows["nbytes"].sum())

    def __iter__(self) -> Iterator[Pull]:
        for row in self.rows:
            meta = self.metas[row["name"]]
            skip = len(row["start"]) - len(meta.shape)
            start, size, local = (tuple(row[field].tolist()[skip:]) for field in ("start", "size", "local_start"))
            numbers = {
                field: int(row[field]) for field in Pull.__struct_fields__ if field not in ("name", "box", "local")
            }
            yield Pull(name=meta.name, box=Box(start, size), local=Box(local, size), **numbers)

    def batches(self) -> Iterator[Batch]:
        """The pulls between each two ranks. Both find the same batch, in the same order."""
        pairs = self.rows[["sender", "receiver"]]
        edges = np.flatnonzero(pairs[1:] != pairs[:-1]) + 1
        for rows in np.split(self.rows, edges):
            if len(rows):
                yield Batch(
                    int(rows["group"][0]), int(rows["sender"][0]), int(rows["receiver"][0]), Pulls(rows, self.metas)
                )


@dataclass(eq=False, slots=True)
class Batch:
    """What one message carries: all that a receiver takes of a group from one sender."""

    group: int
    sender: int
    receiver: int
    pulls: Pulls

    @property
    def offsets(self) -> Ints:
        """Where each pull starts in a packed message; the same on both sides."""
        return np.concatenate([[0], np.cumsum(self._padded)])[:-1].astype(np.int64)

    @property
    def packed_bytes(self) -> int:
        """The message's length."""
        return int(self._padded.sum())

    @property
    def _padded(self) -> Ints:
        nbytes: Ints = self.pulls.rows["nbytes"]
        return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
