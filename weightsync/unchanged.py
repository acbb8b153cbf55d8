"""What has not changed since the version that everybody holds, and is neither moved nor applied (`skip_unchanged`).

    opening     each engine rank says which tensors it loads together
    prepare     each trainer rank compares digests of what it holds with those of the version that was committed last, each engine
                rank those of its live tensors with what it had then
    transfer    module groups of which nothing changed, on any trainer and for any engine, are left out for all

A set of names travels as bits, one for each of the manifest's tensors, in its order.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from weightsync.errors import WeightSyncError
from weightsync.interfaces import DirectAdapter, EngineAdapter
from weightsync.loadmap import LoadMap, ModuleGroup
from weightsync.manifest import Manifest
from weightsync.placement import Compiled, Live, digests_of, marks_of
from weightsync.sharded import local_part, shard_layout

_Flags = np.ndarray[Any, np.dtype[np.bool_]]
_Seen = tuple[object, ...]
"""A digest of what a rank has of a tensor, and of which dtype and part it is."""


def to_bits(manifest: Manifest, names: Container[str]) -> bytes:
    """Canonical *names* as bits."""
    return np.packbits([meta.name in names for meta in manifest.tensors]).tobytes()


def from_bits(manifest: Manifest, bits: bytes) -> frozenset[str]:
    """The canonical names that *bits* stand for; none for no bits."""
    if not bits:
        return frozenset()
    return frozenset(
        meta.name for meta, flag in zip(manifest.tensors, _flags(bits, len(manifest.tensors)), strict=True) if flag
    )


def without(manifest: Manifest, names: Container[str]) -> Manifest:
    """What is left of *manifest* where canonical *names* and their ties are left out."""
    return Manifest(
        tuple(meta for meta in manifest.tensors if meta.name not in names),
        {alias: canonical for alias, canonical in manifest.aliases.items() if canonical not in names},
    )


def _flags(bits: bytes, count: int) -> _Flags:
    return np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=count).astype(bool)


# ---- the coordinator's part -----------------------------------------------------------------------------------------


class LeavingOut:
    """What an update may leave out, for the engines that take part."""

    def __init__(self, manifest: Manifest, groups: Iterable[tuple[int, ...]]) -> None:
        """*groups*: of each engine rank, see `group_numbers`."""
        self._sizes = np.array([meta.nbytes for meta in manifest.tensors], dtype=np.int64)
        self._groups = [np.array(numbers, dtype=np.int64) for numbers in dict.fromkeys(groups)]

    def choose(self, changed: Iterable[bytes]) -> tuple[bytes, int]:
        """(the names to leave out, their bytes), where *changed* is what each trainer rank says. No names: b""."""
        moved = np.zeros(len(self._sizes), dtype=bool)
        for bits in changed:
            moved |= _flags(bits, len(moved))
        while True:  # engines that cut groups differently widen them in turn
            before = moved.sum()
            for numbers in self._groups:
                touched = np.zeros(len(moved) + 1, dtype=bool)  # the last is for -1, which is no group
                touched[numbers[moved]] = True
                touched[-1] = False
                moved |= touched[numbers]
            if moved.sum() == before:
                break
        return (b"", 0) if moved.all() else (np.packbits(~moved).tobytes(), int(self._sizes[~moved].sum()))


def group_numbers(manifest: Manifest, load_map: LoadMap) -> tuple[int, ...]:
    """For each of the manifest's tensors the number of its module group; -1: it feeds nothing on this rank.

    Where the load map is a fallback it is not known what is made from what, so all tensors are one group.
    """
    if load_map.fallback is not None:
        return (0,) * len(manifest.tensors)
    number_of = {name: number for number, group in enumerate(load_map.groups) for name in group.names}
    return tuple(number_of.get(meta.name, -1) for meta in manifest.tensors)


# ---- a trainer rank's part ------------------------------------------------------------------------------------------


class SourceDigests:
    """What a trainer rank's tensors were like in the version that was committed last, and are like now."""

    def __init__(self) -> None:
        self._compiled: Compiled = {}
        self._version = 0
        self._committed: dict[str, list[_Seen]] = {}
        self._now: dict[str, list[_Seen]] | None = None

    def read(self, manifest: Manifest, names: Container[str], parts: Mapping[str, torch.Tensor] | None) -> None:
        """Digest what the next update sends.

        Args:
            names: those that this rank sends. Of the others it tells about what it has a share of.
            parts: by name, ties too, what the rank holds; None: that is not known before it is sent.
        """
        self._now = None
        if parts is None:
            return
        shares = {name: local_part(tensor) for name, tensor in parts.items()}
        own = [name for name in shares if manifest.aliases.get(name, name) in names or shares[name] is not parts[name]]
        self._now = {}
        for name, digest in zip(own, digests_of([shares[name] for name in own], self._compiled), strict=True):
            self._now.setdefault(manifest.aliases.get(name, name), []).append(
                (digest, parts[name].dtype, shard_layout(parts[name]))
            )

    def changed(self, manifest: Manifest, since: int) -> bytes | None:
        """The names that differ from version *since*, as bits; None where that cannot be told."""
        if self._now is None or not since or since != self._version:
            return None
        return to_bits(manifest, {name for name, found in self._now.items() if self._committed.get(name) != found})

    def commit(self, version: int) -> None:
        """What was read last is *version*."""
        self._version = version if self._now is not None else 0
        self._committed, self._now = self._now or {}, None

    def forget(self) -> None:
        """Nothing is known of what engines hold."""
        self._version, self._committed, self._now = 0, {}, None


# ---- an engine rank's part ------------------------------------------------------------------------------------------


class LiveDigests:
    """What an engine rank's live tensors were like when it had loaded a version: whether they still are.

    Weights that were lost in a deep sleep, or that somebody else has loaded, must come again as a whole. An adapter that does not
    show its live tensors is taken at its word.
    """

    def __init__(self, adapter: EngineAdapter, load_map: LoadMap) -> None:
        self._adapter = adapter if isinstance(adapter, DirectAdapter) else None
        self._fed_by: dict[tuple[str, str], set[str]] = {}
        for copy in load_map.copies:
            self._fed_by.setdefault((copy.module, copy.parameter), set()).add(copy.name)
        self._compiled: Compiled = {}
        self._known: dict[tuple[str, str], _Seen] = {}

    def note(self, loaded: Container[str]) -> None:
        """All *loaded* names, ties too, have just been loaded; the others were seen to be as they were."""
        live = self._live()
        new = [place for place in live if any(name in loaded for name in self._fed_by.get(place, ()))]
        self._known |= marks_of({place: live[place] for place in new})

    def hold(self) -> bool:
        """Whether every live tensor is as it was."""
        live = self._live()
        if self._adapter is not None and not live:  # nothing of what it loads can be seen
            return False
        return marks_of(live, self._compiled) == self._known

    def _live(self) -> Live:
        return self._adapter.live() if self._adapter is not None else {}


def groups_left(manifest: Manifest, groups: Sequence[ModuleGroup], left_out: Container[str]) -> list[ModuleGroup]:
    """The groups that still come.

    Raises:
        WeightSyncError: of one, only a part would come.
    """
    left = []
    for group in groups:
        missing = [manifest.aliases.get(name, name) in left_out for name in group.names]
        if not any(missing):
            left.append(group)
        elif not all(missing):
            raise WeightSyncError(f"module group {group.key} would come in part: its tensors must be left out together")
    return left
