"""Which module groups may be loaded by the load map's own copies: those of which a reload has been seen to do just that.

    statically     every copy is a copy of bytes (or a cast), copies and constant padding cover each parameter, and the live
                   parameters have the layout that the loader saw
    by behaviour   after a reload with other values than before, every region holds its source bit for bit, and no other
                   tensor that the group's modules reach has changed

A group of which nothing tells one layout from another (a constant), or of which nothing changed, stays with the reload.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from weightsync.geometry import Region, coverage
from weightsync.loadmap import LoadMap
from weightsync.placement import GroupCopies, Live, copies_of_groups, digests_of, live_view, source_view

Reachable = Mapping[str, Mapping[str, torch.Tensor]]
"""Module path -> the tensors that the module reaches, by a name for people; parameters among them."""

_TELLING = 0.25
"""Share of a region's values that must differ from their neighbours, and from those half the region away."""

NOT_SEEN = "no reload has shown yet how it is laid out: its values did not change, or are all alike"


class Observation:
    """One reload, watched. Make it before, feed it the groups that the loader takes, ask afterwards."""

    def __init__(
        self,
        groups: Mapping[str, GroupCopies],
        reasons: Mapping[str, str],
        live: Live,
        reachable: Callable[[], Reachable],
    ) -> None:
        """*reasons* name the groups that cannot qualify; they are not looked at."""
        self._groups = {key: group for key, group in groups.items() if key not in reasons}
        self._owner_of = {module: key for key, group in groups.items() for module in _modules(group)}
        self._live, self._reachable = live, reachable
        self._of_name = {name: group for group in self._groups.values() for name in group.group.names}
        self._before = self._digest_regions()
        self._tensors_before = _digest_reachable(reachable())
        self._sources: dict[str, list[int]] = {}
        self._telling: dict[str, bool] = {}

    def watch(self, groups: Iterable[Iterable[tuple[str, torch.Tensor]]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Hand the groups on, having digested what the copies would take of them."""
        for pairs in groups:
            tensors = dict(pairs)
            group = self._of_name.get(next(iter(tensors), ""))
            if group is not None:
                parts = [
                    source_view(copy, tensors[copy.name]).to(self._live[copy.module, copy.parameter])
                    for copy in group.copies
                ]
                self._sources[group.group.key] = digests_of(parts)
                self._telling[group.group.key] = all(map(_tells, parts))
            yield list(tensors.items())

    def reasons(self) -> dict[str, str]:
        """After the reload: the groups that did not qualify, and why."""
        after = self._digest_regions()
        covered = {tensor.untyped_storage().data_ptr() for tensor in self._live.values()}
        found: dict[str, str] = {}
        for key, group in self._groups.items():
            if key not in self._sources:
                found[key] = NOT_SEEN
            elif after[key] != self._sources[key]:
                wrong = next(c for c, a, b in zip(group.copies, after[key], self._sources[key], strict=True) if a != b)
                found[key] = f"after a reload {wrong.module}.{wrong.parameter} is not laid out as loaded"
            elif not self._telling[key] or after[key] == self._before[key]:
                found[key] = NOT_SEEN
        for owner, name, tensor in self._changed():
            if tensor is not None and tensor.untyped_storage().data_ptr() in covered:
                continue
            reason = f"the reload also changed {owner or 'the model'}'s {name}, which no tensor feeds"
            # Where nobody knows whose it is, it may be anybody's.
            keys = [self._owner_of[owner]] if owner in self._owner_of else list(self._groups)
            found.update({key: reason for key in keys if key in self._groups})
        return found

    def _changed(self) -> Iterator[tuple[str, str, torch.Tensor | None]]:
        """(module, name, tensor) of what is not as it was before: other values, come or gone."""
        tensors = self._reachable()
        now = _digest_reachable(tensors)
        for owner in {**self._tensors_before, **now}:
            before, after = self._tensors_before.get(owner, {}), now.get(owner, {})
            for name in {**before, **after}:
                if before.get(name) != after.get(name):
                    yield owner, name, tensors.get(owner, {}).get(name)

    def _digest_regions(self) -> dict[str, list[int]]:
        keys = list(self._groups)
        views = [[live_view(copy, self._live) for copy in self._groups[key].copies] for key in keys]
        digests = iter(digests_of([view for part in views for view in part]))
        return {key: [next(digests) for _ in part] for key, part in zip(keys, views, strict=True)}


def unfit(load_map: LoadMap, live: Live) -> tuple[dict[str, GroupCopies], dict[str, str]]:
    """(all groups, why some of them can never be loaded by copies)."""
    groups, targets = copies_of_groups(load_map), {(t.module, t.parameter): t for t in load_map.targets}
    # Padding was filled by the reload that qualified its group, and stays as it is.
    filled: dict[tuple[str, str], list[Region]] = {}
    for fill in load_map.fills:
        filled.setdefault((fill.module, fill.parameter), []).append(fill.region)
    reasons: dict[str, str] = {}
    for key, group in groups.items():
        reason = load_map.fallback or ("" if group.copies else "nothing is known of how it is loaded")
        for place in group.places:
            target, tensor = targets[place], live.get(place)
            regions = [c.destination for c in group.copies if (c.module, c.parameter) == place and c.destination]
            if any(
                (c.source is None or c.destination is None) and (c.module, c.parameter) == place for c in group.copies
            ):
                reason = reason or f"the loader computes {target.path}"
            elif coverage(math.prod(target.shape), [*regions, *filled.get(place, [])]).never:
                reason = reason or f"its tensors cover {target.path} in part"
            elif tensor is None or not _laid_out(tensor, target.dtype, target.shape):
                reason = reason or f"{target.path} is not kept as it is loaded"
        if reason:
            reasons[key] = reason
    return groups, reasons


def layout_of(live: Live) -> list[object]:
    """Where and how live tensors lie; equal as long as copies that were proven stay right."""
    tensors = live.values()
    parts: tuple[list[Any], ...] = (
        [tensor.data_ptr() for tensor in tensors],
        [tensor.dtype for tensor in tensors],
        [tensor.shape for tensor in tensors],
        [tensor.stride() for tensor in tensors],
    )
    return [*live, *itertools.chain(*parts)]


def _laid_out(tensor: torch.Tensor, dtype: str, shape: Sequence[int]) -> bool:
    return (
        str(tensor.dtype).removeprefix("torch.") == dtype
        and tuple(tensor.shape) == tuple(shape)
        and tensor.is_contiguous()
        and not tensor.is_meta
    )


def _modules(group: GroupCopies) -> set[str]:
    return {module for module, _ in group.places}


def _digest_reachable(reachable: Reachable) -> dict[str, dict[str, int]]:
    """A tensor that several modules reach is digested once."""
    unique: dict[tuple[object, ...], torch.Tensor] = {}
    for tensors in reachable.values():
        for tensor in tensors.values():
            unique.setdefault(_identity(tensor), tensor)
    digests = dict(zip(unique, digests_of(list(unique.values())), strict=True))
    return {
        owner: {name: digests[_identity(tensor)] for name, tensor in tensors.items()}
        for owner, tensors in reachable.items()
    }


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _tells(region: torch.Tensor) -> bool:
    """Whether the values tell a layout from a permutation of it: they are not all alike, nor the same half by half."""
    flat = region.reshape(-1)
    if flat.numel() < 2:
        return True
    half = flat.numel() // 2
    pairs = ((flat[1:], flat[:-1]), (flat[half:], flat[: flat.numel() - half]))
    return all(bool((a != b).float().mean() >= _TELLING) for a, b in pairs)
