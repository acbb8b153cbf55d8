"""The load map: where every tensor of a manifest lands in one rank's model.

Recorded once by running the model's own loader over meta tensors (`weightsync.recorder`). From it follow
the module groups (what must arrive together), completeness, the slices that this rank needs, and the list
of what feeds nothing or is fed by nothing. It knows nothing of any engine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import cached_property

import msgspec

from weightsync.digest import digest_text
from weightsync.geometry import Coverage, Region, coverage
from weightsync.manifest import Manifest


class Copy(msgspec.Struct, frozen=True, array_like=True):
    """One copy of the loader: a region of checkpoint tensor `name` into a region of a parameter.

    `source` or `destination` is None where the loader computed instead of viewing: the name feeds the
    parameter, but which elements go where is not known.
    """

    name: str
    module: str
    parameter: str
    source: Region | None
    destination: Region | None


class Fill(msgspec.Struct, frozen=True, array_like=True):
    """A region that the loader fills with a constant: padding."""

    module: str
    parameter: str
    region: Region


class ModuleGroup(msgspec.Struct, frozen=True):
    """Names that must arrive together before `modules` may be loaded. Ties stand beside their canonical name."""

    key: str
    names: tuple[str, ...]
    modules: tuple[str, ...] = ()


class Target(msgspec.Struct, frozen=True, array_like=True):
    """A parameter or buffer that a loader could fill, in the layout the loader sees."""

    module: str
    parameter: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def path(self) -> str:
        return f"{self.module}.{self.parameter}" if self.module else self.parameter


class LoadMap(msgspec.Struct, frozen=True, dict=True):
    """Copies of one rank, and the module groups they imply.

    `fallback` says, in words, why the groups are coarser than modules; None when the recording succeeded.
    """

    copies: tuple[Copy, ...]
    targets: tuple[Target, ...]
    groups: tuple[ModuleGroup, ...]
    unmapped: tuple[str, ...] = ()
    """Canonical names that feed nothing on this rank. They must still arrive, and are dropped."""
    fallback: str | None = None
    fills: tuple[Fill, ...] = ()
    whole_modules: bool = False
    """The engine rebuilds a module as a whole: what is not fed of a fed module is lost, not kept."""
    is_part: bool = False
    """The rank holds a part of its model by itself; the other parts are other engines'."""

    @cached_property
    def digest(self) -> str:
        return digest_text(["loadmap-1", msgspec.to_builtins(self)])

    @cached_property
    def unfed(self) -> tuple[str, ...]:
        """Targets that no name feeds; they keep their value over an update, unless they are in `partial`."""
        if self.fallback is not None:
            return ()
        fed = {(copy.module, copy.parameter) for copy in self.copies}
        return tuple(t.path for t in self.targets if (t.module, t.parameter) not in fed)

    def coverage(self) -> dict[str, Coverage]:
        """Per fed target, how often its elements are written. Exact everywhere for a sound loader.

        A target that several names write as a whole (ties) is covered repeatedly by intent of the model.
        """
        regions: dict[tuple[str, str], list[Region]] = {}
        for copy in self.copies:
            if copy.destination is not None:
                regions.setdefault((copy.module, copy.parameter), []).append(copy.destination)
        return {
            t.path: coverage(math.prod(t.shape), regions[t.module, t.parameter])
            for t in self.targets
            if (t.module, t.parameter) in regions
        }

    @cached_property
    def partial(self) -> tuple[str, ...]:
        """Targets of which an update would write a part and leave the rest undefined: some of their names are missing."""
        written: dict[tuple[str, str], list[Region]] = {}
        for copy in self.copies:
            if copy.destination is not None:
                written.setdefault((copy.module, copy.parameter), []).append(copy.destination)
        for fill in self.fills:
            if (fill.module, fill.parameter) in written:
                written[fill.module, fill.parameter].append(fill.region)
        fed_modules = {copy.module for copy in self.copies}
        unfed = set(self.unfed)
        return tuple(
            t.path
            for t in self.targets
            if (
                (t.module, t.parameter) in written
                and coverage(math.prod(t.shape), written[t.module, t.parameter]).never
            )
            or (self.whole_modules and t.path in unfed and t.module in fed_modules)
        )

    def read_in_part(self, manifest: Manifest) -> dict[str, int]:
        """Name -> how many of its elements this rank reads, for names of which it reads some; ranks share tensors. Of a rank
        that `is_part`, nothing: its engine's ranks do not add up to the whole."""
        if self.is_part:
            return {}
        read: dict[str, list[Region] | None] = {}
        for copy in self.copies:
            regions = read.setdefault(copy.name, [])
            if copy.source is None:  # made from the tensor in a way that views do not show
                read[copy.name] = None
            elif regions is not None:
                regions.append(copy.source)
        counted = {
            name: manifest.meta_of(name).numel - coverage(manifest.meta_of(name).numel, regions).never
            for name, regions in read.items()
            if regions is not None
        }
        return {name: count for name, count in counted.items() if count < manifest.meta_of(name).numel}

    def casts(self, manifest: Manifest) -> tuple[str, ...]:
        """Which tensors change dtype when they land: "name: float32 -> bfloat16"."""
        dtypes = {(t.module, t.parameter): t.dtype for t in self.targets}
        found = {
            f"{copy.name}: {meta.dtype} -> {target}"
            for copy in self.copies
            if (meta := manifest.meta_of(copy.name)).dtype != (target := dtypes[copy.module, copy.parameter])
        }
        return tuple(sorted(found))

    @classmethod
    def from_copies(
        cls, manifest: Manifest, copies: Iterable[Copy], targets: Iterable[Target], fills: Iterable[Fill] = ()
    ) -> LoadMap:
        copies = tuple(copies)
        groups, unmapped = module_groups(manifest, {(copy.name, copy.module) for copy in copies})
        return cls(copies, tuple(targets), groups, unmapped, fills=tuple(fills))

    @classmethod
    def from_fallback(cls, manifest: Manifest, targets: Iterable[Target], reason: str) -> LoadMap:
        """One group per decoder layer, or one for the whole model where names carry no index."""
        groups = layer_groups(manifest)
        unit = "decoder layer" if len(groups) > 1 else "whole model"
        return cls((), tuple(targets), groups, (), f"one group per {unit}: {reason}")


def module_groups(
    manifest: Manifest, feeds: Iterable[tuple[str, str]]
) -> tuple[tuple[ModuleGroup, ...], tuple[str, ...]]:
    """(groups, unmapped names) from (name, module) pairs: names that share a module, directly or through others.

    Groups come in the manifest's order of their first name, so a sender that follows the manifest
    leaves few of them open at a time.
    """
    modules_of: dict[str, set[str]] = {}
    for name, module in feeds:
        modules_of.setdefault(manifest.aliases.get(name, name), set()).add(module)
    sets = _DisjointSets()
    for name, modules in modules_of.items():
        for module in modules:
            sets.join(("name", name), ("module", module))
    members: dict[object, list[str]] = {}
    for meta in manifest.tensors:
        if meta.name in modules_of:
            members.setdefault(sets.root(("name", meta.name)), []).append(meta.name)
    groups = []
    for names in members.values():
        paths = tuple(sorted({module for name in names for module in modules_of[name]}))
        groups.append(ModuleGroup(paths[0] or "(root)", manifest.with_ties(names), paths))
    unmapped = tuple(meta.name for meta in manifest.tensors if meta.name not in modules_of)
    return tuple(groups), unmapped


def layer_groups(manifest: Manifest) -> tuple[ModuleGroup, ...]:
    """Groups by the outermost index in the name (decoder layers); names without one go together.

    Coarser than any engine's fusion unit, so always correct where modules do not span layers.
    """
    members: dict[str, list[str]] = {}
    for meta in manifest.tensors:
        match = re.match(r"(.*?\.\d+)(?:\.|$)", meta.name)
        members.setdefault(match[1] if match else "(rest)", []).append(meta.name)
    if members.keys() <= {"(rest)"}:
        members = {"(model)": members.get("(rest)", [])}
    return tuple(ModuleGroup(key, manifest.with_ties(names)) for key, names in members.items() if names)


class _DisjointSets:
    """Union-find over hashable keys."""

    def __init__(self) -> None:
        self._parent: dict[object, object] = {}

    def root(self, key: object) -> object:
        self._parent.setdefault(key, key)
        while self._parent[key] != key:
            self._parent[key] = self._parent[self._parent[key]]
            key = self._parent[key]
        return key

    def join(self, a: object, b: object) -> None:
        self._parent[self.root(a)] = self.root(b)
