"""A plain torch.nn.Module as an engine: names are its state_dict's, and each lands whole where it is called; of a DTensor
the part that lies on this rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import cache

import msgspec
import torch

from weightsync.boxes import Box
from weightsync.errors import EngineStateError, ManifestError
from weightsync.geometry import Region
from weightsync.holdings import Holdings, LocalShard, parts_of
from weightsync.loadmap import Copy, LoadMap, Target
from weightsync.manifest import Manifest
from weightsync.module_tensors import module_tensors, tensor_table
from weightsync.reachable import reachable_tensors
from weightsync.sharded import has_sharded, is_sharded, local_part, own_part


class TorchModuleAdapter:
    """Copies tensors in place: parameters keep their identity, storage, device and dtype (values are cast to it)."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._table = tensor_table(module)

    def load_map(self, manifest: Manifest) -> LoadMap:
        """The identity over `state_dict()`.

        A name that the module lacks feeds nothing; a tied name feeds every module that holds it. A DTensor takes this
        rank's part of the whole tensor; the ranks of its mesh are engines of their own.

        Raises:
            ManifestError: a shape differs.
            EngineStateError: the module's state_dict gives a copy of a tensor.
        """
        targets, copies = [], []
        known = set(manifest.all_names)
        tensors, again = self._tensors(), self._tensors()
        for path, tensor in tensors.items():
            module, parameter = _place(path)
            shard = _shard(path, tensor)
            targets.append(Target(module, parameter, str(tensor.dtype).removeprefix("torch."), shard.shape))
            if path not in known:
                continue
            meta = manifest.meta_of(path)
            if meta.shape != tuple(tensor.shape):
                raise ManifestError(f"{meta} does not fit the engine's {list(tensor.shape)}", name=path)
            if local_part(tensor).data_ptr() != local_part(again[path]).data_ptr():
                raise EngineStateError(
                    f"the engine's state_dict gives a new tensor for {path} each time it is asked: what is loaded into that is "
                    "lost. Leave out the hook or method that copies it, or give another object as target"
                )
            for part in shard.parts:
                source = _region(part.box, meta.shape)
                destination = _region(Box(part.local_start, part.box.size), shard.shape)
                copies.append(Copy(path, module, parameter, source, destination))
        load_map = LoadMap.from_copies(manifest, copies, targets)
        return msgspec.structs.replace(load_map, is_part=has_sharded(tensors.items()))

    @property
    def device(self) -> torch.device:
        """Of the first parameter, or buffer; "cpu" for a module without any."""
        tensors = itertools.chain(self._module.parameters(), self._module.buffers())
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    laid_out_as_loaded = True

    @property
    def copies_load(self) -> bool:
        """Not where a subclass does more than `apply` does here."""
        return type(self).apply is TorchModuleAdapter.apply

    def live(self) -> dict[tuple[str, str], torch.Tensor]:
        """As `check_ready` found the modules; parameters are looked up anew."""
        table = self._table()
        if not has_sharded(table.items()):
            return {_place(path): tensor for path, tensor in table.items()}
        return {_place(path): local_part(tensor) for path, tensor in table.items()}

    def reachable(self) -> dict[str, dict[str, torch.Tensor]]:
        return reachable_tensors(self._module)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def check_ready(self) -> None:
        self._table = tensor_table(self._module)
        for path, tensor in self._table().items():
            if tensor.is_meta:
                raise EngineStateError(f"{path} is on the meta device; give the module memory first (to_empty)")

    def apply(self, groups: Iterable[Iterable[tuple[str, torch.Tensor]]]) -> int:
        tensors = self._tensors()
        with torch.no_grad():
            for group in groups:
                # Tied names are one parameter here; the second copy would write the same bytes again.
                values = {id(tensors[name]): (name, value) for name, value in group if name in tensors}
                for name, value in values.values():
                    tensor = tensors[name]
                    if tensor.shape != value.shape:
                        raise EngineStateError(
                            f"{name} has shape {list(tensor.shape)} now, the trainers send {list(value.shape)}; connect again"
                        )
                    if not is_sharded(tensor):
                        tensor.detach().copy_(value)
                        continue
                    for part in _shard(name, tensor).parts:
                        place = Box(part.local_start, part.box.size).of(local_part(tensor))
                        place.copy_(part.box.of(value))
        return 1

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Those of which this rank holds something."""
        return {path: part for path, t in module_tensors(self._module).items() if (part := own_part(t)) is not None}


def _shard(path: str, tensor: torch.Tensor) -> LocalShard:
    """What lies on this rank."""
    held = Holdings.of([(path, tensor)])
    return parts_of(held.tensors[0], held.meshes)


def _region(box: Box, shape: tuple[int, ...]) -> Region:
    """*box* of a contiguous tensor."""
    return Region.of(box.of(torch.empty(shape, device="meta")))


@cache
def _place(path: str) -> tuple[str, str]:
    """(module path, parameter)."""
    module, _, parameter = path.rpartition(".")
    return module, parameter
