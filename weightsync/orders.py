"""What a plan asks of one sender: which boxes of its local tensors go into which stream, and what they are there.

A receiver takes boxes of tensors, each of which is a tensor of its own to it (`weightsync.boxview`), called by the tensor's
name and the box. Receivers that take the same from a sender share a stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import torch

from weightsync.boxes import Box
from weightsync.manifest import Manifest, TensorMeta


def box_name(meta: TensorMeta, box: Box) -> str:
    """ "model.norm.weight" for the whole tensor, "lm_head.weight[0:64, 0:8]" for a part of it."""
    return meta.name if box == Box.whole(meta.shape) else f"{meta.name}[{box}]"


class Piecewise(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a box goes in one stream."""

    stream: int
    name: str
    """As the receivers call the box that it is a part of."""
    start: int = 0
    """First byte in that."""


class Order(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One box of one local tensor."""

    name: str
    local: Box | None
    """None: all of it."""
    targets: tuple[Piecewise, ...]

    @classmethod
    def whole(cls, name: str) -> Order:
        """The tensor as it is, in the only stream."""
        return cls(name, None, (Piecewise(0, name),))


class Orders(msgspec.Struct, frozen=True):
    """All that one link carries."""

    streams: tuple[tuple[int, ...], ...]
    """Per stream, which of the link's receivers take it."""
    orders: tuple[Order, ...]
    """Tensor by tensor, in the order in which they are best sent."""

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors, each once, in order."""
        return tuple(dict.fromkeys(order.name for order in self.orders))


class Slicer:
    """Cuts one rank's own parts into what a link takes: boxes, each a tensor of its own. There is one stream."""

    def __init__(self, orders: Orders, manifest: Manifest) -> None:
        self._boxes: dict[str, list[tuple[TensorMeta, Box | None]]] = {}
        for order in orders.orders:
            meta = manifest.by_name[order.name]
            shape = meta.shape if order.local is None else order.local.size
            for target in order.targets:
                box = TensorMeta(target.name, meta.dtype, shape)
                self._boxes.setdefault(order.name, []).append((box, order.local))

    @property
    def metas(self) -> tuple[TensorMeta, ...]:
        """All that the link takes."""
        return tuple(meta for boxes in self._boxes.values() for meta, _ in boxes)

    def cut(self, shards: Iterable[tuple[TensorMeta, torch.Tensor]]) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        """The boxes, as views. Shards of which none is taken are passed over."""
        for meta, shard in shards:
            for box, local in self._boxes.get(meta.name, ()):
                yield box, shard if local is None else local.of(shard)
