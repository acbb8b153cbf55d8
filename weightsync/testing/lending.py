"""Lend tensors to an engine's loader as a coalescer does, and take the memory back as hard as the contract allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from weightsync.chunk import as_bytes, from_bytes
from weightsync.loadmap import ModuleGroup
from weightsync.manifest import Manifest, StorageWatch

GARBAGE = 0xFF
"""Every byte of memory that was taken back: NaN as a floating-point number, in bool neither."""


class PlantedError(Exception):
    """What `Lender.groups` raises when told to."""


class Lender:
    """Whole groups of one version, each handed out once.

    Memory is taken back, which is to say filled with garbage, when the next group is asked for: all of it, or, where
    *may_keep*, what the loader does not refer to any more. `take_back` fills all, whoever refers to it.
    """

    def __init__(self, manifest: Manifest, tensors: dict[str, torch.Tensor], *, may_keep: bool) -> None:
        self._manifest, self._tensors, self._may_keep = manifest, tensors, may_keep
        self._kept: list[tuple[np.ndarray[Any, Any], StorageWatch]] = []
        self._memory: list[np.ndarray[Any, Any]] = []
        self.num_lent = 0

    def groups(
        self, groups: Sequence[ModuleGroup], *, fail_after: int | None = None
    ) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """*groups* in this order; raises after *fail_after* of them."""
        for i, group in enumerate(groups):
            if i == fail_after:
                raise PlantedError(f"planted after {i} groups")
            self.num_lent += 1
            yield iter(self._lend(group))
            self._take_back_what_may_be()
        if fail_after == len(groups):
            raise PlantedError("planted after all groups")

    def take_back(self) -> None:
        for memory in self._memory:
            memory.fill(GARBAGE)

    def _lend(self, group: ModuleGroup) -> list[tuple[str, torch.Tensor]]:
        lent: dict[str, torch.Tensor] = {}
        for name in group.names:
            canonical = self._manifest.aliases.get(name, name)
            if canonical not in lent:
                # numpy owns the memory, so it stays ours to look at and to fill when torch has let go of it.
                memory = as_bytes(self._tensors[canonical].detach().cpu()).numpy().copy()
                meta = self._manifest.by_name[canonical]
                whole = torch.from_numpy(memory)
                self._memory.append(memory)
                self._kept.append((memory, StorageWatch(whole.untyped_storage())))
                lent[canonical] = from_bytes(whole, meta.torch_dtype, meta.shape)
        return [(name, lent[self._manifest.aliases.get(name, name)]) for name in group.names]

    def _take_back_what_may_be(self) -> None:
        kept, self._kept = self._kept, []
        for memory, watch in kept:
            if self._may_keep and watch.alive():
                self._kept.append((memory, watch))
            else:
                memory.fill(GARBAGE)
