"""Which of the ranks that hold the same data serves whom, so that all send about as many bytes. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

Counts = np.ndarray[Any, np.dtype[np.int64]]
NODE_SLACK = 0.05
"""By how much of the mean load a sender may be above its fair share to serve ranks on its own node."""


@dataclass(frozen=True, slots=True)
class Lot:
    """Equal pieces of work: each of `num_receivers` receivers takes `num_units` units, each from any of `owners`."""

    owners: tuple[int, ...]
    unit_bytes: int
    num_units: int
    num_receivers: int
    near: tuple[tuple[bool, ...], ...] | None = None
    """[receiver][owner]: on the same node. None where that is not known."""

    @property
    def nbytes(self) -> int:
        return self.unit_bytes * self.num_units * self.num_receivers


def share_out(lots: Sequence[Lot], num_senders: int) -> tuple[list[Counts | None], list[int]]:
    """(per lot, how many units each receiver takes from each owner; None where there is one owner; bytes per sender).

    The large units are placed first. Deterministic.
    """
    loads = [0] * num_senders
    counts: list[Counts | None] = [None] * len(lots)
    for lot in lots:
        if len(lot.owners) == 1:
            loads[lot.owners[0]] += lot.nbytes
    slack = int(NODE_SLACK * sum(lot.nbytes for lot in lots) / max(num_senders, 1))
    free = [i for i, lot in enumerate(lots) if len(lot.owners) > 1]
    for i in sorted(free, key=lambda i: (-lots[i].unit_bytes, i)):
        lot = lots[i]
        held = [loads[owner] for owner in lot.owners]
        least = min(held)
        found = _counts(
            tuple(load - least for load in held), lot.unit_bytes, lot.num_units, lot.num_receivers, lot.near, slack
        )
        counts[i] = found
        for owner, units in zip(lot.owners, found.sum(axis=0).tolist(), strict=True):
            loads[owner] += units * lot.unit_bytes
    return counts, loads


@lru_cache(maxsize=1 << 12)
def _counts(
    loads: tuple[int, ...],
    unit: int,
    num_units: int,
    num_receivers: int,
    near: tuple[tuple[bool, ...], ...] | None,
    slack: int,
) -> Counts:
    """[receiver, owner]: units taken; each row sums to *num_units*."""
    total = num_units * num_receivers
    found = np.zeros((num_receivers, len(loads)), dtype=np.int64)
    wanted = np.full(num_receivers, num_units, dtype=np.int64)
    if near is not None and any(map(any, near)):
        fair = fill(loads, unit, total)
        room = [n + slack // max(unit, 1) for n in fair]
        for r, row in enumerate(near):
            here = [i for i, is_near in enumerate(row) if is_near]
            taken = fill([loads[i] + int(found[:, i].sum()) * unit for i in here], unit, num_units) if here else []
            for i, n in zip(here, taken, strict=True):
                n = min(n, room[i])
                room[i] -= n
                found[r, i] += n
                wanted[r] -= n
    rest = fill(
        [load + int(n) * unit for load, n in zip(loads, found.sum(axis=0), strict=True)], unit, int(wanted.sum())
    )
    owner = 0
    for r in range(num_receivers):  # in turn, so that a receiver has few owners to ask
        while wanted[r]:
            n = min(int(wanted[r]), rest[owner])
            found[r, owner] += n
            wanted[r] -= n
            rest[owner] -= n
            if not rest[owner] and wanted[r]:
                owner += 1
    found.setflags(write=False)
    return found


def fill(loads: Sequence[int], unit: int, count: int) -> list[int]:
    """How many of *count* equal units go onto each load, so that the largest is as small as it can be."""
    if unit == 0:
        return [count // len(loads) + (i < count % len(loads)) for i in range(len(loads))]
    order = sorted(range(len(loads)), key=lambda i: (loads[i], i))
    below, num = 0, 0
    level = 0
    for k, i in enumerate(order):
        if k and loads[i] * k - below >= count * unit:
            break
        below, num = below + loads[i], k + 1
        level = (below + count * unit) // num
    given = [0] * len(loads)
    for i in order[:num]:
        given[i] = max(level - loads[i], 0) // unit
    left = count - sum(given)
    for i in sorted(order, key=lambda i: (loads[i] + given[i] * unit, i))[:left]:
        given[i] += 1
    return given


@lru_cache(maxsize=1 << 12)
def turns(counts: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The owner of each unit in turn: as many as *counts* says, each spread evenly over the whole."""
    owner = np.repeat(np.arange(len(counts)), counts)
    place = np.concatenate([(np.arange(n) + 0.5) / n for n in counts if n] or [np.zeros(0)])
    return owner[np.argsort(place, kind="stable")]
