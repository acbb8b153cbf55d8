"""Which module groups may be loaded by the load map's own copies: those of which a reload has been seen to do just that.

    statically     every copy is a copy of bytes (or a cast), copies and constant padding cover each parameter, the live
                   parameters have the layout that the loader saw, and no two tensors fill the same memory
    by behaviour   in reloads with other values than before, every region came to hold its source bit for bit, and no other
                   tensor that the group's modules reach has changed

A region of which nothing tells one layout from another (a constant, a twin of another region), or which did not change, has
shown nothing; its group stays with the reload until each of its regions has. Where regions came to hold other than their
sources, a further reload is watched for a regular order of rows (`weightsync.permuted`), and one more for its proof.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from weightsync.geometry import Region, coverage
from weightsync.loadmap import Copy, LoadMap
from weightsync.permuted import LoadedRows
from weightsync.placement import GroupCopies, Live, Place, copies_of_groups, digests_of, live_view, source_view
from weightsync.reachable import Reached

Reachable = Mapping[str, Mapping[str, torch.Tensor]]
"""Module path -> the tensors that the module reaches, by a name for people; parameters among them."""

Marks = dict[str, dict[str, tuple[object, ...]]]
"""Module path -> name -> what tells a tensor's content from another."""

_TELLING = 0.25
"""Share of a region's values that must differ from their neighbours, and from those half the region away."""

NOT_SEEN = "no reload has shown yet how it is laid out: its values did not change, or are all alike"
LEARNING = "it is kept otherwise than it is loaded; a further reload may show in which order"
OPEN = frozenset((NOT_SEEN, LEARNING))
"""Reasons that a further watched reload may do away with."""


class Observation:
    """One reload, watched. Make it before, feed it the groups that the loader takes, ask afterwards."""

    def __init__(
        self,
        groups: Mapping[str, GroupCopies],
        never: Mapping[str, str],
        live: Live,
        reachable: Callable[[], Reachable],
        shown: set[Copy],
        learn: Mapping[str, frozenset[Place]] = {},
    ) -> None:
        """Groups in *never* cannot qualify. *shown*: the copies that earlier observations have proven; added to. *learn*: groups
        of which an earlier one has seen parameters `displaced`, and those."""
        self._groups = {key: group for key, group in groups.items() if key not in never}
        self._live, self._shown, self._learn = live, shown, learn
        self._of_name = {name: group for group in groups.values() for name in group.group.names}
        self._before = self._digest_regions()
        self._bystanders = Bystanders(groups, live, reachable)
        self._sources: dict[str, list[int]] = {}
        self._telling: dict[str, list[bool]] = {}
        self._rows: dict[str, LoadedRows] = {}
        self.displaced: dict[str, frozenset[Place]] = {}
        """After `reasons`: groups of which parameters came to hold other than their sources, and no more is known against them."""
        self.learned: dict[str, GroupCopies] = {}
        """After `reasons`: groups in *learn* with the copies that they were seen to be, still to be proven."""

    def watch(self, groups: Iterable[Iterable[tuple[str, torch.Tensor]]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Hand the groups on, having digested what the copies would take of them."""
        for pairs in groups:
            tensors = dict(pairs)
            key = self._of_name[next(iter(tensors))].group.key
            if key in self._groups:
                self._read(self._groups[key], tensors)
            self._bystanders.enter(key)
            yield list(tensors.items())
            self._bystanders.leave(key)

    def _read(self, group: GroupCopies, tensors: Mapping[str, torch.Tensor]) -> None:
        parts = [source_view(copy, tensors[copy.name]) for copy in group.copies]
        cast = [
            part.to(self._live[copy.module, copy.parameter]) for copy, part in zip(group.copies, parts, strict=True)
        ]
        if (places := self._learn.get(group.group.key)) is not None:
            self._rows[group.group.key] = LoadedRows(group, cast, self._live, places)
        digests = self._sources[group.group.key] = digests_of(cast)
        # Twins could have changed places. A tie is one tensor under two names.
        twins = Counter(digest for digest, _ in {(d, _identity(p)) for d, p in zip(digests, parts, strict=True)})
        self._telling[group.group.key] = [
            twins[digest] == 1 and _tells(part) for digest, part in zip(digests, cast, strict=True)
        ]

    def reasons(self) -> dict[str, str]:
        """After the reload: the groups that did not qualify, and why."""
        after = self._digest_regions()
        found: dict[str, str] = {}
        for key, group in self._groups.items():
            sources = self._sources.get(key)
            if sources is None:  # it was left out, for nothing in it has changed
                if not self._shown.issuperset(group.copies):
                    found[key] = NOT_SEEN
                continue
            for copy, old, new, source, telling in zip(
                group.copies, self._before[key], after[key], sources, self._telling[key], strict=True
            ):
                if new != source:
                    found.setdefault(key, f"after a reload {copy.module}.{copy.parameter} is not laid out as loaded")
                    self.displaced[key] = self.displaced.get(key, frozenset()) | {(copy.module, copy.parameter)}
                elif telling and new != old:
                    self._shown.add(copy)
            if not self._shown.issuperset(group.copies):
                found.setdefault(key, NOT_SEEN)
        blamed = self._bystanders.blamed()
        self.displaced = {key: places for key, places in self.displaced.items() if key not in blamed}
        for key, rows in self._rows.items():
            places = self.displaced.get(key)
            if places and places <= self._learn[key] and (learned := rows.learn(self._live)) is not None:
                self.learned[key] = learned
        return found | {key: reason for key, reason in blamed.items() if key in self._groups}

    def _digest_regions(self) -> dict[str, list[int]]:
        keys = list(self._groups)
        views = [[live_view(copy, self._live) for copy in self._groups[key].copies] for key in keys]
        digests = iter(digests_of([view for part in views for view in part]))
        return {key: [next(digests) for _ in part] for key, part in zip(keys, views, strict=True)}


class Bystanders:
    """What a reload changes besides the parameters that the load map feeds, and which groups that may come from.

    What a group's module holds, and what changed while that group was loaded, is the group's own. Anything else may be
    made from any weight of the model.
    """

    def __init__(self, groups: Mapping[str, GroupCopies], live: Live, reachable: Callable[[], Reachable]) -> None:
        self._groups, self._reachable = groups, reachable
        self._modules = {key: {module for module, _ in group.places} for key, group in groups.items()}
        self._owner_of = {module: key for key, modules in self._modules.items() for module in modules}
        self._fed = {_identity(tensor) for tensor in live.values()}
        self._spans = sorted(_span(tensor) for tensor in live.values() if tensor.numel() and tensor.is_contiguous())
        self._kept: list[torch.Tensor] = []
        found = reachable()
        self._again = found.walk if isinstance(found, Reached) else None
        self._unseen = found.unseen if isinstance(found, Reached) else {}
        self._before = self._expected = self._mark(found)
        self._foreign: list[tuple[str, str]] = []
        """(module, name) of what changed while another group was loaded, or none."""

    def enter(self, key: str) -> None:
        """The loader is about to be given this group."""
        self._compare(self._now(self._modules[key]), self._modules[key])

    def leave(self, key: str) -> None:
        """The loader asks for the next group."""
        now = self._now(self._modules[key])
        self._expected = {**self._expected, **{module: now.get(module, {}) for module in self._modules[key]}}

    def blamed(self) -> dict[str, str]:
        """After the reload: the groups that copies alone would not load, and why."""
        now = self._mark(self._reachable())
        self._compare(now, {*self._expected, *now})
        own = [(m, name) for m in {**self._before, **now} for name in _changed(self._before.get(m, {}), now.get(m, {}))]
        found: dict[str, str] = {}
        for module, name in own:
            reason = f"the reload also changed {module or 'the model'}'s {name}, which no tensor feeds"
            key = self._owner_of.get(module)
            found.update(
                {key: reason} if key and (module, name) not in self._foreign else dict.fromkeys(self._groups, reason)
            )
        for module, what in self._unseen.items():
            reason = f"what {module or 'the model'} holds cannot be looked at: {what}"
            found.update(dict.fromkeys([self._owner_of[module]] if module in self._owner_of else self._groups, reason))
        return found

    def _compare(self, now: Marks, modules: Iterable[str]) -> None:
        for module in modules:
            changed = _changed(self._expected.get(module, {}), now.get(module, {}))
            self._foreign += [(module, name) for name in changed]

    def _now(self, modules: Iterable[str]) -> Marks:
        if self._again is not None:
            return self._mark(self._again(list(modules)))
        found = self._reachable()
        return self._mark({module: found[module] for module in modules if module in found})

    def _mark(self, found: Reachable) -> Marks:
        """A tensor that several modules reach is digested once."""
        others = {
            module: {name: tensor for name, tensor in tensors.items() if not self._is_fed(tensor)}
            for module, tensors in found.items()
        }
        unique = {_identity(tensor): tensor for tensors in others.values() for tensor in tensors.values()}
        digests = dict(zip(unique, digests_of(list(unique.values())), strict=True))
        return {
            module: {name: self._mark_of(module, tensor, digests) for name, tensor in tensors.items()}
            for module, tensors in others.items()
        }

    def _mark_of(
        self, module: str, tensor: torch.Tensor, digests: Mapping[tuple[object, ...], int]
    ) -> tuple[object, ...]:
        mark = (digests[_identity(tensor)], tensor.dtype, tensor.shape)
        if tensor.numel() != 1 or module not in self._owner_of:
            return mark
        # One made anew: a handle of what only native code sees, or a scale that came out the same this time.
        self._kept.append(tensor)  # so that its address is not used again
        return *mark, tensor.data_ptr()

    def _is_fed(self, tensor: torch.Tensor) -> bool:
        """Whether it is, or lies in, a parameter that the load map feeds."""
        if not tensor.numel() or _identity(tensor) in self._fed:
            return True
        device, start, end = _span(tensor)
        # Parameters do not overlap, so the last that begins no later is the one.
        i = bisect.bisect_right(self._spans, (device, start, math.inf)) - 1
        return i >= 0 and self._spans[i][0] == device and end <= self._spans[i][2]


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
            elif tensor is None or not is_laid_out(tensor, target.dtype, target.shape):
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


def addresses_of(live: Live) -> list[int]:
    """Where live tensors lie: what of `layout_of` changes when something moves them during an update."""
    return [tensor.data_ptr() for tensor in live.values()]


def is_laid_out(tensor: torch.Tensor, dtype: str, shape: Sequence[int]) -> bool:
    """Whether a live tensor is as the loader saw it, so that regions of it are where the load map says."""
    return (
        str(tensor.dtype).removeprefix("torch.") == dtype
        and tuple(tensor.shape) == tuple(shape)
        and tensor.is_contiguous()
        and not tensor.is_meta
        and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__  # a wrapper's bytes are those of others
    )


def contested(groups: Mapping[str, GroupCopies], live: Live, aliases: Mapping[str, str]) -> dict[str, str]:
    """Groups of which a parameter's memory is filled by several tensors, so that the order decides; with the reason.

    *aliases*: names that are one tensor. Parameters that are one in the engine are filled by it once.
    """
    writers: dict[tuple[object, ...], dict[Region, set[object]]] = {}
    keys: dict[tuple[object, ...], dict[str, str]] = {}
    tensors: dict[tuple[object, ...], torch.Tensor] = {}
    for key, group in groups.items():
        for copy in group.copies:
            tensor = live.get((copy.module, copy.parameter))
            if tensor is None or copy.destination is None or not tensor.numel():
                continue
            place = _identity(tensor)
            tensors[place] = tensor
            keys.setdefault(place, {})[key] = f"{copy.module}.{copy.parameter}"
            regions = writers.setdefault(place, {})
            regions.setdefault(copy.destination, set()).add((aliases.get(copy.name, copy.name), copy.source))
    found: dict[str, str] = {}
    for place, regions in writers.items():
        if (
            any(len(names) > 1 for names in regions.values())
            or coverage(tensors[place].numel(), list(regions)).repeated
        ):
            found |= {key: f"several tensors fill {path}" for key, path in keys[place].items()}
    spans = sorted(((*_span(tensor), place) for place, tensor in tensors.items()), key=lambda span: span[:3])
    reach = None
    for span in spans:
        if reach is not None and span[0] == reach[0] and span[1] < reach[2]:
            found |= {
                key: f"{path} shares memory with another"
                for at in (reach[3], span[3])
                for key, path in keys[at].items()
            }
        if reach is None or span[0] != reach[0] or span[2] > reach[2]:
            reach = span
    return found


def _changed(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Names of other content, come or gone."""
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


def _span(tensor: torch.Tensor) -> tuple[str, int, float]:
    """(device, first byte, end) of the memory that it reaches over."""
    last = sum((n - 1) * abs(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _tells(region: torch.Tensor) -> bool:
    """Whether the values tell a layout from a permutation of it: along no dimension are they all alike, nor the same half
    by half."""
    if region.numel() < 2:
        return True
    bits = region.view(_BITS[region.element_size()]) if region.element_size() in _BITS else region
    flat = bits.reshape(-1)
    half = flat.numel() // 2
    pairs = [(flat[1:], flat[:-1]), (flat[half:], flat[: flat.numel() - half])]
    for dim, size in enumerate(bits.shape):
        if size > 1:
            pairs.append((bits.narrow(dim, 1, size - 1), bits.narrow(dim, 0, size - 1)))
    return all(bool((a != b).float().mean() >= _TELLING) for a, b in pairs)
