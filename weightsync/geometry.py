"""Strided regions of tensors: where a slice lies, in how many runs, and whether regions cover a tensor.

Pure geometry, in elements: no data, no device, no network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch


class Region(msgspec.Struct, frozen=True, array_like=True):
    """A strided view of a storage: shape, strides and offset in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, view: torch.Tensor) -> Region:
        return cls(tuple(view.shape), tuple(view.stride()), int(view.storage_offset()))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def view_in(self, storage_of: torch.Tensor) -> torch.Tensor:
        """This region of *storage_of*, a tensor that starts its storage's numbering where the record did."""
        return torch.as_strided(storage_of, self.shape, self.stride, self.offset + storage_of.storage_offset())

    def runs(self) -> tuple[torch.Tensor, int]:
        """(start offsets as int64, run length): the region as contiguous runs of one length, in order."""
        length, dims = 1, [(n, s) for n, s in zip(self.shape, self.stride, strict=True) if n != 1]
        while dims and dims[-1][1] == length:
            length *= dims.pop()[0]
        starts = torch.tensor([self.offset])
        for size, stride in dims:
            starts = (starts[:, None] + torch.arange(size) * stride).reshape(-1)
        return (starts, length) if self.numel else (starts[:0], 0)


class Coverage(msgspec.Struct, frozen=True):
    """How often regions touch the elements of a tensor; all zero but `once` when it is covered exactly."""

    once: int
    never: int
    repeated: int

    @property
    def exact(self) -> bool:
        return self.never == 0 and self.repeated == 0


def coverage(numel: int, regions: Sequence[Region]) -> Coverage:
    """Count the elements of a contiguous tensor of *numel* elements that *regions* touch never, once, more often.

    `repeated` counts elements touched at least twice. Works on runs, so its cost follows the number of
    runs and not the number of elements.
    """
    starts, ends = [], []
    for region in regions:
        run_starts, length = region.runs()
        if length:
            starts.append(run_starts)
            ends.append(run_starts + length)
    if not starts:
        return Coverage(0, numel, 0)
    positions = torch.cat(starts + ends)
    steps = torch.cat([torch.ones(sum(map(len, starts))), -torch.ones(sum(map(len, ends)))]).to(torch.int64)
    order = torch.argsort(positions, stable=True)
    positions, depth = positions[order], torch.cumsum(steps[order], 0)
    widths = positions[1:] - positions[:-1]
    once = int(widths[depth[:-1] == 1].sum())
    repeated = int(widths[depth[:-1] > 1].sum())
    return Coverage(once, numel - once - repeated, repeated)
