"""Which shards a trainer rank's links take, and this rank's own parts of them."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator

import torch

from weightsync.manifest import Manifest, TensorMeta
from weightsync.orders import Orders, Slicer
from weightsync.source import TrainerSource

Items = Iterator[tuple[TensorMeta, torch.Tensor]]


class ShardLinks:
    """Of one rank, by the links' ids. Parts are kept from `take` to `release` only."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[str, ...]] = {}
        """The tensors of which a link takes some, in the order in which they are best sent."""
        self._slicers: dict[int, Slicer] = {}
        """Of the links that take boxes."""
        self._parts: dict[str, tuple[TensorMeta, torch.Tensor]] | None = None

    def __contains__(self, id: int) -> bool:
        return id in self._names

    def __len__(self) -> int:
        return len(self._names)

    @property
    def boxed(self) -> Collection[int]:
        """The links that take boxes."""
        return self._slicers.keys()

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors of which any link takes some."""
        return tuple(dict.fromkeys(name for names in self._names.values() for name in names))

    @property
    def taken(self) -> bool:
        """Whether the parts are there, all at once."""
        return self._parts is not None

    def add(self, id: int, orders: Orders, manifest: Manifest, *, boxes: bool) -> None:
        self._names[id] = orders.names
        if boxes:
            self._slicers[id] = Slicer(orders, manifest)

    def drop(self, id: int) -> None:
        self._names.pop(id, None)
        self._slicers.pop(id, None)

    def metas(self, id: int, manifest: Manifest) -> tuple[TensorMeta, ...]:
        """What the link's transport is given."""
        if id in self._slicers:
            return self._slicers[id].metas
        return tuple(manifest.by_name[name] for name in self._names[id])

    def take(self, source: TrainerSource, manifest: Manifest) -> None:
        """Keep this rank's parts, where they exist all at once."""
        self._parts = None
        if self._names and not source.makes:
            self._parts = {meta.name: (meta, part) for meta, part in source.shards(manifest, self.names)}

    def release(self) -> None:
        """What was taken may change."""
        self._parts = None

    def of_link(self, id: int, left_out: Container[str] = frozenset()) -> Items:
        """What the link takes, of the parts that were taken; each link goes at its own pace."""
        assert self._parts is not None
        parts = self._parts
        return self.cut(id, (parts[name] for name in self._names[id] if name not in left_out))

    def made(self, source: TrainerSource, manifest: Manifest) -> Items:
        """This rank's parts, where they are made one after the other: once, for all links. To be iterated to the end, also
        where no link takes anything: making them may be collective."""
        return source.shards(manifest, self.names)

    def cut(self, id: int, parts: Iterable[tuple[TensorMeta, torch.Tensor]]) -> Items:
        """*parts* as the link takes them."""
        return self._slicers[id].cut(parts) if id in self._slicers else iter(parts)
