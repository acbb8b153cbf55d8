"""What the groups of a manifest need, worked out once: which names, how many bytes, where in a staging buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weightsync.chunk import aligned
from weightsync.loadmap import ModuleGroup
from weightsync.manifest import Manifest


@dataclass(frozen=True, slots=True)
class GroupTable:
    """Of one manifest and one load map; the same for every update of an epoch."""

    groups: tuple[ModuleGroup, ...]
    counts: tuple[int, ...]
    """Canonical tensors of each group."""
    staging_bytes: tuple[int, ...]
    index: dict[str, int]
    """Canonical name -> its group's number."""
    offset: dict[str, int]
    """Canonical name -> its first byte in the group's staging buffer."""

    @classmethod
    def of(cls, manifest: Manifest, groups: Sequence[ModuleGroup]) -> GroupTable:
        index: dict[str, int] = {}
        offset: dict[str, int] = {}
        counts, staging = [], []
        for number, group in enumerate(groups):
            count = end = 0
            for name in group.names:
                meta = manifest.by_name.get(name)
                if meta is not None:
                    assert name not in index, f"{name} stands in two groups"
                    index[name], offset[name] = number, end
                    end += aligned(meta.nbytes)
                    count += 1
            counts.append(count)
            staging.append(end)
        return cls(tuple(groups), tuple(counts), tuple(staging), index, offset)
