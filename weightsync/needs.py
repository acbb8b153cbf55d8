"""What one engine rank needs of every tensor: the boxes around all that its load map reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import msgspec

from weightsync.boxes import Box, Read, read_of, separated
from weightsync.digest import digest_text
from weightsync.errors import ManifestError
from weightsync.loadmap import LoadMap, ModuleGroup, layer_groups, module_groups
from weightsync.manifest import Manifest


class Needs(msgspec.Struct, frozen=True, dict=True):
    """Canonical name -> boxes that do not overlap. What is read by a tie, or several times, is needed once.

    Every `Copy.source` of the load map lies in one of its name's boxes, so it can be replayed from there
    (`weightsync.boxes.region_in`).
    """

    boxes: dict[str, tuple[Box, ...]]
    inexact: tuple[str, ...] = ()
    """Names of which a box holds more than is read: the reads are no boxes, or it is not known what is read."""

    def __post_init__(self) -> None:
        for name, boxes in self.boxes.items():
            if len(boxes) > 1 and _overlap(boxes):
                raise ManifestError(f"{name}: the needed boxes {'; '.join(map(str, boxes))} overlap", name=name)

    @cached_property
    def digest(self) -> str:
        rows = sorted((name, [(box.start, box.size) for box in boxes]) for name, boxes in self.boxes.items())
        return digest_text(["needs-1", rows])

    def nbytes(self, manifest: Manifest) -> int:
        """Bytes to pull."""
        return sum(
            box.numel * manifest.by_name[name].torch_dtype.itemsize
            for name, boxes in self.boxes.items()
            for box in boxes
        )

    @classmethod
    def of(cls, load_map: LoadMap, manifest: Manifest) -> Needs:
        """The needs of the rank that *load_map* was recorded on; after a fallback, everything.

        Raises:
            ManifestError: the map names a tensor that is not in the manifest, or reads beyond it.
        """
        if load_map.fallback is not None:
            names = [name for group in load_map.groups for name in group.names if name in manifest.by_name]
            return cls({name: _whole(manifest, name) for name in names}, tuple(names))
        reads: dict[str, list[Read | None]] = {}
        for copy in load_map.copies:
            name = manifest.aliases.get(copy.name, copy.name)
            meta = manifest.by_name.get(name)
            if meta is None:
                raise ManifestError(f"{copy.name} is read by {copy.module} and not in the manifest", name=copy.name)
            try:
                read = read_of(copy.source, meta.shape) if copy.source is not None else _UNKNOWN
            except ManifestError as error:
                raise ManifestError(f"{copy.name}: {error}", name=copy.name) from error
            reads.setdefault(name, []).append(read)
        boxes: dict[str, tuple[Box, ...]] = {}
        inexact = []
        for name, found in reads.items():
            if any(read is _UNKNOWN for read in found):
                boxes[name] = _whole(manifest, name)
                inexact.append(name)
                continue
            some = [read for read in found if read is not None]
            boxes[name] = tuple(separated(read.box for read in some)) if len(some) > 1 else tuple(r.box for r in some)
            if _holds_more(boxes[name], some):
                inexact.append(name)
        return cls(boxes, tuple(inexact))


_UNKNOWN = Read(Box((), ()), False)


def _whole(manifest: Manifest, name: str) -> tuple[Box, ...]:
    meta = manifest.by_name[name]
    return (Box.whole(meta.shape),) if meta.numel else ()


def _overlap(boxes: Sequence[Box]) -> bool:
    return any(a.intersection(b) is not None for i, a in enumerate(boxes) for b in boxes[i + 1 :])


def _holds_more(boxes: Sequence[Box], reads: Sequence[Read]) -> bool:
    """Whether *boxes* hold elements that no exact read covers."""
    left = list(boxes)
    exact = {read.box for read in reads if read.exact}
    for box in exact:
        if not left:
            break
        left = [rest for part in left for rest in part.minus(box)]
    return bool(left)


def common_groups(manifest: Manifest, load_maps: Iterable[LoadMap]) -> tuple[ModuleGroup, ...]:
    """The module groups of all ranks together: names that meet in a module on any rank are in one group."""
    feeds: set[tuple[str, str]] = set()
    maps: Mapping[int, LoadMap] = {id(load_map): load_map for load_map in load_maps}
    for load_map in maps.values():
        if load_map.fallback is not None:
            return layer_groups(manifest)
        feeds.update((copy.name, copy.module) for copy in load_map.copies)
    return module_groups(manifest, feeds)[0]
