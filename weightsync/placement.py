"""The load map's copies between live tensors and arrived ones: compiled, run, compared.

A copy is a slice of a checkpoint tensor and a region of a parameter. Where the live parameter is laid out as the loader
saw it, running the copies is a load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from weightsync.chunk import as_bytes
from weightsync.cuda.moves import Move, Moves
from weightsync.digest import digest_bytes
from weightsync.loadmap import Copy, LoadMap, ModuleGroup
from weightsync.weightset import SetLayout

Place = tuple[str, str]
"""(module, parameter)."""
Live = Mapping[Place, torch.Tensor]
"""The tensors that the engine computes with."""


@dataclass(frozen=True, slots=True)
class GroupCopies:
    """One module group, and the copies that load it."""

    group: ModuleGroup
    copies: tuple[Copy, ...]
    places: tuple[Place, ...]
    """The parameters that they fill."""


def copies_of_groups(load_map: LoadMap) -> dict[str, GroupCopies]:
    """By the group's key. A load map without copies (a fallback) gives groups without copies."""
    group_of = {name: group.key for group in load_map.groups for name in group.names}
    found: dict[str, list[Copy]] = {group.key: [] for group in load_map.groups}
    for copy in load_map.copies:
        found[group_of[copy.name]].append(copy)
    return {
        group.key: GroupCopies(
            group, tuple(found[group.key]), tuple(dict.fromkeys((c.module, c.parameter) for c in found[group.key]))
        )
        for group in load_map.groups
    }


def source_view(copy: Copy, tensor: torch.Tensor) -> torch.Tensor:
    """The slice of a whole, contiguous checkpoint tensor."""
    assert copy.source is not None
    return copy.source.view_in(tensor)


def live_view(copy: Copy, live: Live) -> torch.Tensor:
    """The region of the live parameter."""
    assert copy.destination is not None
    return copy.destination.view_in(live[copy.module, copy.parameter])


def run_copies(
    copies: Iterable[Copy],
    sources: Mapping[str, torch.Tensor],
    live: Live,
    aliases: Mapping[str, str] = {},
) -> None:
    """Copy from whole tensors into live ones, casting where dtypes differ. *aliases*: names whose tensor has another."""
    with torch.no_grad():
        for copy in copies:
            live_view(copy, live).copy_(source_view(copy, sources[aliases.get(copy.name, copy.name)]))


Compiled = dict[torch.device, tuple[list[object], Moves]]
"""By device: how some tensors lie, and the launch that digests them."""


def digests_of(tensors: Sequence[torch.Tensor], compiled: Compiled | None = None) -> list[int]:
    """One of each, of its row-major bytes; on a GPU all in one launch. Comparable on one device only.

    *compiled* keeps that launch for the next call, where the same tensors are digested again and again.
    """
    compiled = {} if compiled is None else compiled
    found = [0] * len(tensors)
    by_device: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if tensor.is_cuda:
            by_device.setdefault(tensor.device, []).append(i)
        else:
            found[i] = digest_bytes(as_bytes(tensor.detach()))
    for device, indices in by_device.items():
        there = [tensors[i].detach() for i in indices]
        layout: list[object] = [(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in there]
        if device not in compiled or compiled[device][0] != layout:
            compiled[device] = layout, Moves([(tensor, None) for tensor in there], device)
        for i, value in zip(indices, compiled[device][1].run(digest=True).tolist(), strict=True):
            found[i] = value
    return found


def marks_of(live: Live, compiled: Compiled | None = None) -> dict[Place, tuple[object, ...]]:
    """Of each: a digest, its dtype and its shape, which are equal where it holds the same. *compiled* as for `digests_of`."""
    digests = digests_of(list(live.values()), compiled)
    return {
        place: (digest, tensor.dtype, tensor.shape)
        for (place, tensor), digest in zip(live.items(), digests, strict=True)
    }


@dataclass(frozen=True, slots=True)
class SetCopies:
    """What a set's tensors need in one launch, and what torch has to cast afterwards."""

    moves: Moves
    """The set's tensors first, in order, each digested whole."""
    casts: tuple[tuple[torch.Tensor, torch.Tensor], ...]


def compile_set(layout: SetLayout, copies: Iterable[Copy], live: Live, aliases: Mapping[str, str]) -> SetCopies:
    """One launch that digests every tensor of the set and runs those *copies* that are copies of bytes on its device.

    A tensor that one copy takes whole is read once. Parameters that are one and the same in the engine are written once.
    """
    written: set[tuple[object, ...]] = set()
    fused: dict[str, Move] = {}
    more: list[Move] = []
    casts: list[tuple[torch.Tensor, torch.Tensor]] = []
    for copy in copies:
        name = aliases.get(copy.name, copy.name)
        source = layout.tensors.get(name)
        if source is None:
            continue
        part, target = source_view(copy, source), live_view(copy, live)
        place = (target.device, target.data_ptr(), target.shape, target.stride())
        if place in written:
            continue
        written.add(place)
        if target.dtype != source.dtype or target.device != layout.device:
            casts.append((part, target))
        elif name not in fused and part.is_contiguous() and part.numel() == source.numel():
            fused[name] = (part, target)  # the same bytes in the same order, in the shape of the region
        else:
            more.append((part, target))
    first: list[Move] = [fused.get(name, (tensor, None)) for name, tensor in layout.tensors.items()]
    return SetCopies(Moves([*first, *more], layout.device, digested=len(first)), tuple(casts))
