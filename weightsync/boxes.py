"""Boxes: hyper-rectangles of tensors, and the smallest one from which a strided read can still be made.

Pure geometry, in elements: no data, no device, no network.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import msgspec
import torch

from weightsync.errors import ManifestError
from weightsync.geometry import Region


class Box(msgspec.Struct, frozen=True, array_like=True, order=True, gc=False):
    """A hyper-rectangle of a tensor: where it starts and how large it is, per dimension."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(a + n for a, n in zip(self.start, self.size, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def __contains__(self, other: Box) -> bool:
        return all(a <= b for a, b in zip(self.start, other.start, strict=True)) and all(
            a >= b for a, b in zip(self.stop, other.stop, strict=True)
        )

    def intersection(self, other: Box) -> Box | None:
        """The elements in both; None where there are none."""
        start = tuple(map(max, zip(self.start, other.start, strict=True)))
        size = tuple(min(pair) - a for pair, a in zip(zip(self.stop, other.stop, strict=True), start, strict=True))
        return Box(start, size) if all(n > 0 for n in size) else None

    def around(self, other: Box) -> Box:
        """The smallest box around both."""
        start = tuple(map(min, zip(self.start, other.start, strict=True)))
        return Box(
            start, tuple(max(p) - a for p, a in zip(zip(self.stop, other.stop, strict=True), start, strict=True))
        )

    def minus(self, other: Box) -> list[Box]:
        """What is left of this box without *other*, as boxes that do not overlap."""
        common = self.intersection(other)
        if common is None:
            return [self]
        left, start, size = [], list(self.start), list(self.size)
        for d, (a, n) in enumerate(zip(common.start, common.size, strict=True)):
            for low, high in ((start[d], a), (a + n, start[d] + size[d])):
                if high > low:
                    left.append(Box((*start[:d], low, *start[d + 1 :]), (*size[:d], high - low, *size[d + 1 :])))
            start[d], size[d] = a, n
        return left

    def offset_in(self, outer: Box) -> int:
        """Where its first element lies in a contiguous tensor that holds *outer* and nothing else."""
        strides = strides_of(outer.size)
        return sum((a - b) * s for a, b, s in zip(self.start, outer.start, strides, strict=True))

    def runs_in(self, outer: Box) -> int:
        """As how many contiguous runs it lies in a contiguous tensor that holds *outer* and nothing else."""
        length = 1
        for n, full in zip(reversed(self.size), reversed(outer.size), strict=True):
            length *= n
            if n != full:
                break
        return self.numel // length if length else 0

    def of(self, tensor: torch.Tensor, *, within: Box | None = None) -> torch.Tensor:
        """A view of its elements in *tensor*, which holds the box *within* (default: starts at 0)."""
        origin = within.start if within is not None else (0,) * len(self.start)
        for d, (a, n, zero) in enumerate(zip(self.start, self.size, origin, strict=True)):
            tensor = tensor.narrow(d, a - zero, n)
        return tensor

    def __str__(self) -> str:
        """As in Python: "0:16, 8:24"."""
        return ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True))


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor."""
    strides = [1] * len(shape)
    for d in reversed(range(len(shape) - 1)):
        strides[d] = strides[d + 1] * shape[d + 1]
    return tuple(strides)


def fused(boxes: Iterable[Box]) -> list[Box]:
    """The same elements in fewer boxes: two whose union is a box become that box. Sorted; the empty ones are gone."""
    found = sorted({box for box in boxes if box.numel})
    while found:
        before = len(found)
        for d in reversed(range(len(found[0].start))):
            found = _fused_along(found, d)
        if len(found) == before:
            break
    return sorted(found)


def separated(boxes: Iterable[Box]) -> list[Box]:
    """Boxes that do not overlap and in one of which each of *boxes* lies, with as few elements as that allows.

    Boxes that overlap, and whose union is no box, become the smallest box around both.
    """
    found = fused(boxes)
    while True:
        pair = next(
            ((a, b) for i, a in enumerate(found) for b in found[i + 1 :] if a.intersection(b) is not None), None
        )
        if pair is None:
            return found
        found = fused([*(box for box in found if box not in pair), pair[0].around(pair[1])])


def _fused_along(boxes: list[Box], d: int) -> list[Box]:
    rows: dict[tuple[tuple[int, ...], ...], list[Box]] = {}
    for box in boxes:
        key = (box.start[:d], box.start[d + 1 :], box.size[:d], box.size[d + 1 :])
        rows.setdefault(key, []).append(box)
    found = []
    for row in rows.values():
        row.sort()
        last = row[0]
        for box in row[1:]:
            if box.start[d] <= last.start[d] + last.size[d]:
                last = last.around(box)
            else:
                found.append(last)
                last = box
        found.append(last)
    return found


class Read(msgspec.Struct, frozen=True):
    """The box that a region needs; `exact` where it needs every element of the box."""

    box: Box
    exact: bool


@lru_cache(maxsize=1 << 16)
def read_of(region: Region, shape: tuple[int, ...]) -> Read | None:
    """The smallest box that *region* of a contiguous tensor of *shape* can be read from as a view; None for no elements.

    A region that wraps over the end of a dimension (a read of the flattened tensor) needs that dimension whole.

    Raises:
        ManifestError: the region reaches beyond the tensor.
    """
    if region.numel == 0:
        return None
    strides = strides_of(shape)
    low, high = _digits(region.offset, strides), _digits(region.offset, strides)
    dims = sorted((s, n) for n, s in zip(region.shape, region.stride, strict=True) if n > 1 and s)
    reach, distinct, plain = 1, 1, True
    for s, n in dims:
        plain = plain and s >= reach  # then no element is read twice
        reach += s * (n - 1)
        distinct *= n
        for d, digit in enumerate(_digits(s, strides)):
            high[d] += digit * (n - 1)
    for d in reversed(range(len(shape))):
        over, last = divmod(high[d], shape[d])
        if over and d == 0:
            break
        if over:
            low[d], high[d] = 0, shape[d] - 1
            high[d - 1] += over
        else:
            high[d] = last
    if region.offset + reach > math.prod(shape):
        raise ManifestError(f"{region} reaches beyond a tensor of shape {list(shape)}")
    box = Box(tuple(low), tuple(b - a + 1 for a, b in zip(low, high, strict=True)))
    return Read(box, plain and distinct == box.numel)


def region_in(region: Region, shape: tuple[int, ...], box: Box) -> Region:
    """*region* of a contiguous tensor of *shape*, as a region of a contiguous tensor that holds *box* of it.

    *box* must hold the region's `read_of`; then the same elements come in the same order.
    """
    if region.numel == 0:
        return Region(region.shape, strides_of(region.shape), 0)
    strides, inner = strides_of(shape), strides_of(box.size)
    digits = _digits(region.offset, strides)
    offset = sum((a - b) * s for a, b, s in zip(digits, box.start, inner, strict=True))
    moved = tuple(
        sum(digit * step for digit, step in zip(_digits(s, strides), inner, strict=True)) if n > 1 else 1
        for n, s in zip(region.shape, region.stride, strict=True)
    )
    return Region(region.shape, moved, offset)


def is_grid(region: Region, shape: tuple[int, ...]) -> bool:
    """Whether each dimension of *region* goes along one dimension of a contiguous tensor of *shape*, each along another, and
    stays within it: then what of it lies in a box is such a region again."""
    strides = strides_of(shape)
    along = [_digits(s, strides) for n, s in zip(region.shape, region.stride, strict=True) if n > 1]
    taken = [[d for d, digit in enumerate(digits) if digit] for digits in along]
    if any(len(dims) != 1 for dims in taken) or len({dims[0] for dims in taken}) < len(taken):
        return False
    low = _digits(region.offset, strides)
    sizes = [n for n in region.shape if n > 1]
    return all(
        low[dims[0]] + digits[dims[0]] * (n - 1) < shape[dims[0]]
        for dims, digits, n in zip(taken, along, sizes, strict=True)
    )


def regions_in(source: Region, destination: Region, shape: tuple[int, ...], box: Box) -> tuple[Region, Region] | None:
    """What of *source*, a grid (`is_grid`) in a contiguous tensor of *shape*, lies in *box*: as a region of a contiguous tensor
    that holds the box, and where the copy to *destination* puts it. None where nothing does."""
    strides = strides_of(shape)
    low = _digits(source.offset, strides)
    fixed = set(range(len(shape)))
    sizes, offset, moved = list(source.shape), source.offset, destination.offset
    for i, (n, s) in enumerate(zip(source.shape, source.stride, strict=True)):
        if n > 1:
            d, step = next((d, digit) for d, digit in enumerate(_digits(s, strides)) if digit)
            fixed.remove(d)
            first = max(-(-(box.start[d] - low[d]) // step), 0)
            last = min((box.start[d] + box.size[d] - 1 - low[d]) // step, n - 1)
            if last < first:
                return None
            sizes[i] = last - first + 1
            offset += first * s
            moved += first * destination.stride[i]
    if source.numel == 0 or any(not 0 <= low[d] - box.start[d] < box.size[d] for d in fixed):
        return None
    part = Region(tuple(sizes), source.stride, offset)
    return region_in(part, shape, box), Region(tuple(sizes), destination.stride, moved)


def _digits(elements: int, strides: Sequence[int]) -> list[int]:
    """*elements* as steps along each dimension of a tensor with these strides."""
    steps = []
    for stride in strides:
        steps.append(elements // stride)
        elements %= stride
    return steps
