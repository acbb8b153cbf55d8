"""Parameters of which an engine keeps the rows in another order than they are loaded in: the order, learned from a watched reload.

Some kernels want the halves of a fused weight the other way round, or two weights interleaved. Rows are told apart by hashes of
their values, so the order is seen only where no two rows are alike; and it is taken only where it is regular, so that it can
come from the layout and not from the values. What is learned is a guess: copies that a further reload has to prove, as all others
(`weightsync.qualify`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from weightsync.geometry import Region
from weightsync.loadmap import Copy
from weightsync.placement import GroupCopies, Live, Place

_MAX_RUNS = 4
"""Per copy; what falls into more is no regular order."""
_MAX_COPIES = 4096
"""Per group."""
_CHUNK = 1 << 24
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class LoadedRows:
    """The rows of some parameters of one group, as the loader was given them."""

    def __init__(self, group: GroupCopies, parts: Sequence[torch.Tensor], live: Live, places: frozenset[Place]) -> None:
        """*parts*: what each of the group's copies takes, in the parameter's dtype. *places*: the parameters in question."""
        self._group, self._places = group, places
        self._hashes: dict[Place, torch.Tensor] = {}
        self._rows: dict[int, torch.Tensor] = {}
        """Per copy of these places: the parameter's rows that it fills, in the shape of the copy's region."""
        by_place: dict[Place, list[int]] = {place: [] for place in places}
        for i, copy in enumerate(group.copies):
            if (copy.module, copy.parameter) in places:
                by_place[copy.module, copy.parameter].append(i)
        for place, indices in by_place.items():
            rows = {i: _rows_of(group.copies[i], live[place]) for i in indices}
            known = {i: found for i, found in rows.items() if found is not None}
            count = _num_rows(live[place])
            if len(known) < len(rows) or sum(found.numel() for found in known.values()) != count:
                continue  # not by whole rows, or with padding
            hashes = torch.zeros(count, dtype=torch.int64, device=live[place].device)
            for i, found in known.items():
                hashes[found.reshape(-1).to(hashes.device)] = _hash(parts[i], _width(live[place])).to(hashes.device)
            self._hashes[place] = hashes
            self._rows |= known

    def learn(self, live: Live) -> GroupCopies | None:
        """After the reload: the group with copies that do what it did; None where no regular order of rows explains it."""
        if self._hashes.keys() != self._places:
            return None
        order: dict[Place, npt.NDArray[np.int64]] = {}
        for place, loaded in self._hashes.items():
            found = _order(loaded, _hash(live[place], _width(live[place])))
            if found is None:
                return None
            order[place] = found
        copies: list[Copy] = []
        for i, copy in enumerate(self._group.copies):
            place = (copy.module, copy.parameter)
            if place not in order:
                copies.append(copy)
                continue
            runs = list(_runs(order[place][self._rows[i].numpy()]))
            if not runs:
                return None
            copies += [_part(copy, run, _width(live[place])) for run in runs]
        return GroupCopies(self._group.group, tuple(copies), self._group.places) if len(copies) <= _MAX_COPIES else None


def _width(parameter: torch.Tensor) -> int:
    """Elements of a row; those of a vector are rows of one."""
    return parameter.shape[-1] if parameter.dim() > 1 else 1


def _num_rows(parameter: torch.Tensor) -> int:
    return parameter.numel() // max(_width(parameter), 1)


def _rows_of(copy: Copy, parameter: torch.Tensor) -> torch.Tensor | None:
    """The numbers of the parameter's rows that the copy fills, in its shape; None where it fills no whole rows."""
    source, region, width = copy.source, copy.destination, _width(parameter)
    if source is None or region is None or source.shape != region.shape or not region.numel:
        return None
    shape, stride = region.shape, region.stride
    if parameter.dim() > 1:
        if not shape or shape[-1] != width or stride[-1] != 1:
            return None
        shape, stride = shape[:-1], stride[:-1]
    if not shape or region.offset % width or any(step % width for step in stride):
        return None
    rows = Region(shape, tuple(step // width for step in stride), region.offset // width)
    return rows.view_in(torch.arange(_num_rows(parameter)))


def _hash(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """int64 of each row's bits."""
    rows = tensor.detach().reshape(-1, width).contiguous()
    bits = rows.view(_BITS[rows.element_size()])
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (width,), generator=generator).mul_(2).add_(1).to(tensor.device)
    step = max(_CHUNK // width, 1)
    return torch.cat([(part.to(torch.int64) * factors).sum(1) for part in bits.split(step)])


def _order(loaded: torch.Tensor, kept: torch.Tensor) -> npt.NDArray[np.int64] | None:
    """Per row as loaded, where it is kept; None where the rows do not tell."""
    if loaded.shape != kept.shape:
        return None
    ordered, by_hash = torch.sort(loaded)
    found, by_kept = torch.sort(kept)
    if bool((ordered[1:] == ordered[:-1]).any()) or not torch.equal(ordered, found):
        return None
    order = torch.empty_like(by_hash)
    order[by_hash] = by_kept
    return order.cpu().numpy()


_Run = tuple[tuple[int, ...], int, int, tuple[int, ...], int]
"""(which of the leading dimensions or () for all, first row of the last dimension, their number, steps between kept rows, first
kept row)."""


def _runs(kept: npt.NDArray[np.int64]) -> Iterator[_Run]:
    """Cut a copy's rows into runs that are kept at equal distances; nothing where they are too many."""
    lines = kept.reshape(-1, kept.shape[-1])
    cuts = _cuts(lines[0])
    if len(cuts) > _MAX_RUNS:
        return
    shifts = lines - lines[:, :1]
    leads = [np.diff(np.moveaxis(kept[..., 0], axis, 0), axis=0) for axis in range(kept.ndim - 1)]
    if bool((shifts == shifts[0]).all()) and all(
        lead.size == 0 or bool((lead == max(lead.flat[0], 1)).all()) for lead in leads
    ):
        outer = tuple(int(lead.flat[0]) if lead.size else 0 for lead in leads)
        for start, count, step in cuts:
            yield (), start, count, (*outer, step), int(lines[0, start])
        return
    per_line = [_cuts(line) for line in lines]
    if max(map(len, per_line)) > _MAX_RUNS:
        return
    for number, of_line in enumerate(per_line):
        at = tuple(int(i) for i in np.unravel_index(number, kept.shape[:-1]))
        for start, count, step in of_line:
            yield at, start, count, (step,), int(lines[number, start])


def _cuts(line: npt.NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """(first, number, step) of the longest runs of equal steps, from the left; more than `_MAX_RUNS` are not counted."""
    found: list[tuple[int, int, int]] = []
    start = 0
    while start < len(line) and len(found) <= _MAX_RUNS:
        if start + 1 == len(line):
            found.append((start, 1, 1))
            break
        step = int(line[start + 1] - line[start])
        more = np.flatnonzero(np.diff(line[start:]) != step)
        count = int(more[0]) + 1 if len(more) else len(line) - start
        if step < 0:  # no view goes backwards
            count, step = 1, 1
        found.append((start, count, step))
        start += count
    return found


def _part(copy: Copy, run: _Run, width: int) -> Copy:
    """The part of a copy that is one run."""
    at, start, count, steps, first = run
    source = copy.source
    assert source is not None
    is_vector = len(source.shape) == len(steps) + len(at)
    shape, stride = (source.shape, source.stride) if not is_vector else ((*source.shape, 1), (*source.stride, 1))
    offset = source.offset + start * stride[-2] + sum(i * s for i, s in zip(at, stride, strict=False))
    lead = len(at)
    of_run = (*shape[lead:-2], count, shape[-1])
    return Copy(
        copy.name,
        copy.module,
        copy.parameter,
        Region(of_run, stride[lead:], offset),
        Region(of_run, (*(step * width for step in steps), 1), first * width),
    )
