"""Where a module group's tensors may be written as they arrive: without staging, and with nothing left to apply.

That is where every one of them goes whole, in its own order and dtype, to one run of the engine's memory. What is cut, cast
or strided on its way is staged, and copied when its group is whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from weightsync.chunk import as_bytes
from weightsync.loadmap import Copy
from weightsync.manifest import Manifest, TensorMeta
from weightsync.placement import GroupCopies, Live, Place, live_view, source_view


@dataclass(frozen=True, slots=True)
class Landing:
    """A run of the bytes of a live tensor. Says where, and keeps nothing alive."""

    place: Place
    start: int
    nbytes: int


def landings(group: GroupCopies, live: Live, manifest: Manifest) -> dict[str, Landing]:
    """By canonical name, for all tensors of the group; empty where one has to be staged.

    Nothing else may fill that memory (`qualify.contested`); parameters that are one in the engine are written once.
    """
    found: dict[str, Landing] = {}
    addresses: dict[str, int] = {}
    for copy in group.copies:
        name = manifest.aliases.get(copy.name, copy.name)
        if copy.source is None or copy.destination is None:
            return {}
        place = copy.module, copy.parameter
        target, whole = live_view(copy, live), live[place]
        if not _is_of_bytes(copy, manifest.by_name[name], whole, target):
            return {}
        if addresses.setdefault(name, target.data_ptr()) != target.data_ptr():
            return {}
        start = target.data_ptr() - whole.data_ptr() if target.numel() else 0
        found.setdefault(name, Landing(place, start, target.nbytes))
    wanted = {manifest.aliases.get(name, name) for name in group.group.names}
    return found if found.keys() == wanted else {}


def views(groups: Iterable[Mapping[str, Landing]], live: Live) -> dict[str, torch.Tensor]:
    """By canonical name: the bytes where it lands, 1-D uint8."""
    found: dict[str, torch.Tensor] = {}
    wholes: dict[Place, torch.Tensor] = {}  # many tensors land in one: of experts, thousands
    for group in groups:
        for name, landing in group.items():
            if landing.place not in wholes:
                wholes[landing.place] = as_bytes(live[landing.place].detach())
            found[name] = wholes[landing.place][landing.start : landing.start + landing.nbytes]
    return found


def _is_of_bytes(copy: Copy, meta: TensorMeta, live: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether the copy takes the whole tensor, and its row-major bytes are those of *target*, within the *live* tensor."""
    part = source_view(copy, torch.empty(meta.shape, dtype=meta.torch_dtype, device="meta"))
    whole = part.is_contiguous() and part.numel() == meta.numel
    return whole and live.is_contiguous() and target.is_contiguous() and target.dtype == meta.torch_dtype
