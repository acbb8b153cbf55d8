"""DTensors: what a rank has of one, when two are one, and how one is made whole.

A DTensor is gathered by all ranks of its mesh together. So these ranks must gather the same tensors in the same order,
whatever each of them sends; `TrainerSource` sees to it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeGuard, cast

import torch
import torch.distributed as dist

from weightsync.errors import ManifestError, WeightSyncError
from weightsync.manifest import TensorMeta

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Gloo moves no others; their bytes are gathered instead.
_MOVED_AS_THEY_ARE = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip


def dtensor_type() -> type[DTensor] | None:
    """None where nothing has imported it, so that there can be none: the import takes half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)


def is_sharded(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether *tensor*, as `own_part` gave it, must be gathered."""
    kind = dtensor_type()
    return kind is not None and isinstance(tensor, kind)


def has_sharded(pairs: Iterable[tuple[str, torch.Tensor]]) -> bool:
    """Whether any of them `is_sharded`."""
    kind = dtensor_type()
    return kind is not None and any(isinstance(tensor, kind) for _, tensor in pairs)


def own_part(tensor: torch.Tensor) -> torch.Tensor | None:
    """*tensor* itself; for a DTensor that is whole on this rank, the plain tensor; None outside its mesh."""
    if not is_sharded(tensor):
        return tensor
    mesh = tensor.device_mesh
    if mesh.get_coordinate() is None:
        return None
    whole = all(
        place.is_replicate() or (mesh.size(axis) == 1 and not place.is_partial())
        for axis, place in enumerate(tensor.placements)
    )
    return _local(tensor) if whole else tensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What of *tensor*, as `own_part` gave it, lies on this rank: the tensor itself where it is not sharded."""
    return _local(tensor) if is_sharded(tensor) else tensor


def shard_layout(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """How *tensor*, as `own_part` gave it, is cut, and which part lies here; None where it is not sharded."""
    if not is_sharded(tensor):
        return None
    mesh = tensor.device_mesh
    return tuple(tensor.placements), tuple(mesh.shape), tuple(mesh.get_coordinate() or ())


def tie_key(tensor: DTensor) -> tuple[object, ...]:
    """Equal for two DTensors over the same memory, while both live; also where this rank's part is empty."""
    local = _local(tensor)
    return (
        local.untyped_storage()._cdata, local.storage_offset(), local.stride(), local.dtype, tuple(tensor.shape),
        tensor.placements, local.is_conj(), local.is_neg(),
    )  # fmt: skip


def check_gatherable(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Find what would stop a gather, without one.

    Raises:
        ManifestError: a tensor has no data. WeightSyncError: a process group is gone, or does not reach the shards.
    """
    seen = set()
    for name, tensor in tensors:
        if not is_sharded(tensor):
            continue
        if tensor.is_meta:
            raise no_data(name)
        mesh, device = tensor.device_mesh, tensor.device.type
        if (id(mesh), device) in seen:
            continue
        seen.add((id(mesh), device))
        try:
            backends = [str(dist.get_backend_config(group)) for group in mesh.get_all_groups()]
        except Exception as error:
            raise WeightSyncError(
                f"{name} cannot be gathered: the process group of its {_describe(tensor)} is gone ({error}); keep it "
                "until the last update"
            ) from error
        if not all(f"{device}:" in backend for backend in backends):
            raise WeightSyncError(
                f"{name} cannot be gathered: its shards are in {device} memory and its process group knows "
                f"{backends[0]} only; start with init_process_group('cpu:gloo,cuda:nccl')"
            )


def gather(meta: TensorMeta, tensor: DTensor) -> torch.Tensor:
    """The whole tensor, in memory of its own. Collective over the tensor's mesh; placements that are Partial are reduced.

    It comes in the wire dtype where that is the smaller one, so that fewer bytes are gathered. Give it back with
    `release`.

    Raises:
        WeightSyncError: the gather failed, which leaves the mesh's ranks out of step.
    """
    described = _describe(tensor)
    try:
        with torch.no_grad():
            partial = any(place.is_partial() for place in tensor.placements)
            dtype = meta.torch_dtype
            if tensor.dtype.is_floating_point and dtype.itemsize < tensor.dtype.itemsize and not partial:
                tensor = cast("DTensor", tensor.to(dtype))
            whole = tensor.full_tensor() if partial or tensor.dtype in _MOVED_AS_THEY_ARE else _gather_bytes(tensor)
            # An object of its own, for `release` to empty: torch may have returned the trainer's.
            return whole.new_empty(0).set_(whole.untyped_storage(), whole.storage_offset(), whole.shape, whole.stride())
    except Exception as error:
        raise WeightSyncError(
            f"{meta.name} could not be gathered over its {described} ({error}); all of its ranks must be trainers of "
            "this weight sync, alive, and not in another collective"
        ) from error


def release(whole: torch.Tensor) -> None:
    """Free what `gather` returned, even while a caller's variable still refers to it."""
    with torch.no_grad():
        whole.set_()  # type: ignore[call-overload]


def no_data(name: str) -> ManifestError:
    return ManifestError(
        f"{name} is on the meta device: it has no data to send; initialise or load it first", name=name
    )


def _gather_bytes(tensor: DTensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    shape = torch.Size((*tensor.shape, tensor.dtype.itemsize))
    whole = DTensor.from_local(
        _local(tensor).contiguous().unsqueeze(-1).view(torch.uint8),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    ).full_tensor()
    return whole.view(tensor.dtype).squeeze(-1)


def _local(tensor: DTensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.to_local()


def _describe(tensor: DTensor) -> str:
    mesh = tensor.device_mesh
    names = ", ".join(mesh.mesh_dim_names or ())
    return f"mesh of {' x '.join(map(str, mesh.shape))} ranks" + (f" ({names})" if names else "")
