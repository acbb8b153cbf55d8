"""An engine rank that takes slices: what it needs as tensors of their own, and back to whole ones where a loader wants them.

Each needed box is a tensor of a manifest of boxes, and the load map is written anew over them (`weightsync.boxes.region_in`).
So assembling, budget, digests, votes and copies work as they do with whole tensors. Only a loader gets whole tensors, a
module group at a time, of which nothing but the needed boxes is filled. The rest stays undefined, and is not read: the load
map was recorded by the same loader over the same shapes, and where it could not tell what is read (a fallback, a computed
source), the needed box is the whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import torch

from weightsync.boxes import Box, is_grid, read_of, region_in, regions_in
from weightsync.chunk import WeightChunk
from weightsync.digest import digest_text
from weightsync.interfaces import DirectAdapter, EngineAdapter
from weightsync.loadmap import Copy, LoadMap, ModuleGroup
from weightsync.manifest import Manifest, TensorMeta
from weightsync.needs import Needs
from weightsync.orders import box_name
from weightsync.placement import copies_of_groups, run_copies
from weightsync.qualify import is_laid_out
from weightsync.weightset import SetDigests, WeightSet

Pairs = list[tuple[str, torch.Tensor]]
Parts = Mapping[str, tuple[Box, ...]]


def adopt(chunk: WeightChunk | WeightSet | SetDigests, sent: Manifest, boxes: Manifest) -> None:
    """Let what speaks of *sent*, a manifest of whole tensors, speak of that of their *boxes*; what speaks of any other stays."""
    if not isinstance(chunk, SetDigests) and chunk.manifest_digest == sent.digest:
        chunk.manifest_digest = boxes.digest


def parted(boxes: Sequence[Box], parts: Sequence[Box]) -> list[tuple[Box, tuple[Box, ...]]]:
    """Each needed box, with the boxes in which it comes: itself, or those of *parts* that lie in it."""
    return [(box, tuple(part for part in parts if part in box) or (box,)) for box in boxes]


class BoxView:
    """One rank's boxes, for one manifest, load map and plan."""

    def __init__(self, manifest: Manifest, load_map: LoadMap, needs: Needs, parts: Parts) -> None:
        """*parts*: names of which needed boxes come in parts, because they lie in several places in the staging."""
        self.whole = manifest
        self._boxes: dict[str, list[tuple[Box, tuple[Box, ...]]]] = {
            name: parted(needs.boxes.get(name, ()), parts.get(name, ())) for name in manifest.by_name
        }
        self.manifest = Manifest(
            tuple(
                TensorMeta(box_name(meta, part), meta.dtype, part.size)
                for meta in manifest.tensors
                for _, in_parts in self._boxes[meta.name]
                for part in in_parts
            )
        )
        self._names = {group.key: group.names for group in load_map.groups}
        self._key_of: dict[str, str] = {}
        groups = tuple(self._group(group) for group in load_map.groups)
        self.load_map = msgspec.structs.replace(
            load_map,
            copies=tuple(moved for copy in load_map.copies for moved in self._moved(copy)),
            groups=tuple(group for group in groups if group.names),
            unmapped=(),
        )
        self.digest = digest_text(["boxview-1", self.manifest.digest, self.load_map.digest])

    def _labels(self, name: str) -> list[str]:
        meta = self.whole.by_name[name]
        return [box_name(meta, part) for _, in_parts in self._boxes[name] for part in in_parts]

    def _group(self, group: ModuleGroup) -> ModuleGroup:
        canonical = [name for name in group.names if name in self.whole.by_name]
        labels = tuple(label for name in canonical for label in self._labels(name))
        self._key_of.update(dict.fromkeys(labels, group.key))
        return ModuleGroup(group.key, labels, group.modules)

    def _moved(self, copy: Copy) -> Iterator[Copy]:
        """The copy, from the box that it reads; without geometry where that is not one tensor here."""
        name = self.whole.aliases.get(copy.name, copy.name)
        meta = self.whole.by_name[name]
        if copy.source is not None:
            read = read_of(copy.source, meta.shape)
            if read is None:
                return
            box, in_parts = next((b, parts) for b, parts in self._boxes[name] if read.box in b)
            if len(in_parts) == 1:
                source = region_in(copy.source, meta.shape, box)
                yield Copy(box_name(meta, box), copy.module, copy.parameter, source, copy.destination)
                return
            if copy.destination is not None and is_grid(copy.source, meta.shape):
                for part in in_parts:
                    regions = regions_in(copy.source, copy.destination, meta.shape, part)
                    if regions is not None:
                        yield Copy(box_name(meta, part), copy.module, copy.parameter, *regions)
                return
        for label in self._labels(name):
            yield Copy(label, copy.module, copy.parameter, None, None)

    def labels(self, names: Iterable[str]) -> frozenset[str]:
        """The boxes of these canonical tensors."""
        return frozenset(label for name in names for label in self._labels(name))

    def key_of(self, group: Mapping[str, torch.Tensor]) -> str:
        """The key of the module group that these boxes are."""
        return self._key_of[next(iter(group))]

    def whole_tensors(self, group: Iterable[tuple[str, torch.Tensor]]) -> Pairs:
        """A group of boxes as (name, whole tensor) pairs, ties included. Undefined outside the needed boxes."""
        tensors = dict(group)
        key = self.key_of(tensors)
        device = next(iter(tensors.values())).device
        found: dict[str, torch.Tensor] = {}
        for name in self._names[key]:
            if name in self.whole.by_name:
                found[name] = self._whole(self.whole.by_name[name], tensors, device)
        return [(name, found[self.whole.aliases.get(name, name)]) for name in self._names[key]]

    def _whole(self, meta: TensorMeta, tensors: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
        if meta.name in tensors:
            return tensors[meta.name]
        whole = torch.empty(meta.shape, dtype=meta.torch_dtype, device=device)
        for _, in_parts in self._boxes[meta.name]:
            for part in in_parts:
                part.of(whole).copy_(tensors[box_name(meta, part)])
        return whole

    def adapt(self, adapter: EngineAdapter) -> EngineAdapter:
        """*adapter*, whose `apply` takes groups of boxes."""
        return _DirectBoxes(adapter, self) if isinstance(adapter, DirectAdapter) else _Boxes(adapter, self)


class _Boxes(EngineAdapter):
    """An engine's adapter, given boxes."""

    def __init__(self, adapter: EngineAdapter, view: BoxView) -> None:
        self._adapter, self._view = adapter, view

    def load_map(self, manifest: Manifest) -> LoadMap:
        return self._adapter.load_map(manifest)

    def check_ready(self) -> None:
        self._adapter.check_ready()

    def apply(self, groups: Iterable[Iterable[tuple[str, torch.Tensor]]]) -> int:
        return self._adapter.apply(self._view.whole_tensors(group) for group in groups)


class _DirectBoxes(_Boxes, DirectAdapter):
    """The same for one that shows its live tensors."""

    _adapter: DirectAdapter

    @property
    def device(self) -> torch.device:
        return self._adapter.device

    @property
    def copies_load(self) -> bool:
        return self._adapter.copies_load

    @property
    def laid_out_as_loaded(self) -> bool:
        return self._adapter.laid_out_as_loaded

    def live(self) -> Mapping[tuple[str, str], torch.Tensor]:
        return self._adapter.live()

    def reachable(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        return self._adapter.reachable()

    def synchronize(self) -> None:
        self._adapter.synchronize()

    def apply(self, groups: Iterable[Iterable[tuple[str, torch.Tensor]]]) -> int:
        """Where copying is all that loading does, without whole tensors."""
        if not (self.laid_out_as_loaded and self.copies_load):
            return super().apply(groups)
        live, of_groups = self.live(), copies_of_groups(self._view.load_map)
        targets = {(t.module, t.parameter): t for t in self._view.load_map.targets}
        for group in groups:
            tensors = dict(group)
            found = of_groups[self._view.key_of(tensors)]
            copies = found.copies
            plain = all(is_laid_out(live[p], targets[p].dtype, targets[p].shape) for p in found.places)
            if copies and plain and all(c.source is not None and c.destination is not None for c in copies):
                # Parameters that are tied in the engine are written once.
                places = {(live[c.module, c.parameter].data_ptr(), c.destination): c for c in copies}
                run_copies(places.values(), tensors, live)
            else:
                self._adapter.apply([self._view.whole_tensors(tensors.items())])
        return 1
