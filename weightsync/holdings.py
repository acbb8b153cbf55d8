"""Who holds what: the part of every tensor that lies on each trainer rank, from meshes and placements.

Pure geometry: it imports no torch.distributed and talks to nobody. Ranks that hold experts or pipeline stages of their own
simply hold other names.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from weightsync.boxes import Box
from weightsync.digest import digest_text
from weightsync.errors import ManifestError
from weightsync.sharded import is_sharded

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Shape = tuple[int, ...]


class Split(msgspec.Struct, frozen=True, array_like=True):
    """A dimension cut along a mesh axis as torch.chunk cuts it; with *factor* > 1 as torch's _StridedShard does."""

    dim: int
    factor: int = 1


Placements = tuple[Split | None, ...]
"""Per mesh axis: how the tensor is cut along it; None where it is replicated."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A mesh and where in it a rank stands."""

    shape: Shape
    coordinate: Shape


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of which a rank holds a part, or all where `placements` is empty. `shape` is the whole tensor's."""

    name: str
    dtype: str
    shape: Shape
    mesh: int = 0
    """Which of `Holdings.meshes`."""
    placements: Placements = ()


class Holdings(msgspec.Struct, frozen=True, dict=True):
    """What one trainer rank holds. `tensors` are equal on ranks of one mesh, so they need to travel and be kept once."""

    tensors: tuple[Held, ...]
    meshes: tuple[Place, ...] = ()

    @cached_property
    def table_digest(self) -> str:
        """Equal for equal `tensors`, wherever the rank stands in its meshes."""
        return digest_text(["holdings-1", msgspec.to_builtins(self.tensors)])

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> Holdings:
        """From a rank's DTensors and whole tensors; a DTensor whose mesh leaves the rank out is left out.

        Raises:
            ManifestError: a DTensor is Partial, so that no rank has its values.
        """
        held: list[Held] = []
        meshes: dict[Place, int] = {}
        for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
            dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
            if not is_sharded(tensor):
                held.append(Held(name, dtype, shape))
                continue
            coordinate = tensor.device_mesh.get_coordinate()
            if coordinate is None:
                continue
            place = Place(tuple(tensor.device_mesh.shape), tuple(coordinate))
            held.append(Held(name, dtype, shape, meshes.setdefault(place, len(meshes)), _placements(name, tensor)))
        return cls(tuple(held), tuple(meshes))


def _placements(name: str, tensor: DTensor) -> Placements:
    found: list[Split | None] = []
    for placement in tensor.placements:
        if placement.is_partial():
            raise ManifestError(f"{name} is Partial on its mesh: no rank has its values; reduce it first", name=name)
        split: Any = placement
        found.append(
            None
            if placement.is_replicate()
            else Split(split.dim % max(len(tensor.shape), 1), int(getattr(split, "split_factor", 1)))
        )
    return tuple(found)


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A box of the whole tensor, and where in the rank's local tensor it starts."""

    box: Box
    local_start: Shape


class LocalShard(msgspec.Struct, frozen=True, array_like=True):
    """A rank's local tensor: its shape, and the boxes of the whole tensor that it consists of.

    One box, unless a strided split came out uneven. An empty shard is one empty box.
    """

    shape: Shape
    parts: tuple[Part, ...]


@lru_cache(maxsize=1 << 16)
def local_shard(shape: Shape, mesh_shape: Shape, placements: Placements, coordinate: Shape) -> LocalShard:
    """What the rank at *coordinate* holds of a tensor of *shape*; as torch.distributed.tensor places it.

    Raises:
        ManifestError: placements, mesh and coordinate do not fit each other, or the tensor.
    """
    if not len(placements) == len(mesh_shape) == len(coordinate) or any(
        not 0 <= at < size for at, size in zip(coordinate, mesh_shape, strict=True)
    ):
        raise ManifestError(f"{placements} at {coordinate} do not fit a mesh of {mesh_shape}")
    intervals: list[list[tuple[int, int]]] = [[(0, n)] for n in shape]
    for split, num_parts, at in zip(placements, mesh_shape, coordinate, strict=True):
        if split is None:
            continue
        if not 0 <= split.dim < len(shape):
            raise ManifestError(f"a tensor of shape {list(shape)} has no dimension {split.dim} to cut")
        pieces = intervals[split.dim]
        cut = [_chunk(group, num_parts, at) for group in (_chunk(pieces, split.factor, i) for i in range(split.factor))]
        intervals[split.dim] = _joined(itertools.chain(*cut))
    rows = [_rows(pieces) or [(shape[d], 0, 0)] for d, pieces in enumerate(intervals)]  # as torch starts empty shards
    parts = tuple(
        Part(Box(tuple(a for a, _, _ in row), tuple(n for _, n, _ in row)), tuple(at for _, _, at in row))
        for row in itertools.product(*rows)
    )
    local = tuple(sum(b - a for a, b in pieces) for pieces in intervals)
    return LocalShard(local, parts)


def local_box(shape: Shape, mesh_shape: Shape, placements: Placements, coordinate: Shape) -> Box:
    """The box that `local_shard` is.

    Raises:
        ManifestError: it is several boxes, or as `local_shard` does.
    """
    parts = local_shard(shape, mesh_shape, placements, coordinate).parts
    if len(parts) > 1:
        raise ManifestError(
            f"{placements} on a mesh of {mesh_shape} give {coordinate} {len(parts)} boxes of {list(shape)}"
        )
    return parts[0].box


def parts_of(held: Held, meshes: tuple[Place, ...]) -> LocalShard:
    """What a rank with these meshes holds of a tensor.

    Raises:
        ManifestError: as `local_shard`, naming the tensor.
    """
    if not held.placements:
        return local_shard(held.shape, (), (), ())
    try:
        place = meshes[held.mesh]
        return local_shard(held.shape, place.shape, held.placements, place.coordinate)
    except IndexError:
        raise ManifestError(f"{held.name}: there is no mesh number {held.mesh}", name=held.name) from None
    except ManifestError as error:
        raise ManifestError(f"{held.name}: {error}", name=held.name) from error


def _chunk(pieces: list[tuple[int, int]], num_parts: int, index: int) -> list[tuple[int, int]]:
    """Part *index* of *pieces*, end to end, as torch.chunk cuts them; nothing where it makes fewer parts."""
    total = sum(b - a for a, b in pieces)
    length = -(-total // num_parts)
    low, high = length * index, min(length * (index + 1), total)
    found, at = [], 0
    for a, b in pieces:
        first, last = max(low - at, 0), min(high - at, b - a)
        if last > first:
            found.append((a + first, a + last))
        at += b - a
    return found


def _rows(pieces: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(start, size, where it starts in the local tensor) of each."""
    found, at = [], 0
    for a, b in pieces:
        found.append((a, b - a, at))
        at += b - a
    return found


def _joined(pieces: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for a, b in pieces:
        if found and found[-1][1] == a:
            found[-1] = (found[-1][0], b)
        else:
            found.append((a, b))
    return found
