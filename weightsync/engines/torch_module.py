"""A plain torch.nn.Module as an engine: names are its state_dict's, and each lands whole where it is called."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from weightsync.errors import EngineStateError, ManifestError
from weightsync.geometry import Region
from weightsync.loadmap import Copy, LoadMap, Target
from weightsync.manifest import Manifest


class TorchModuleAdapter:
    """Copies tensors in place: parameters keep their identity, storage, device and dtype (values are cast to it)."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def load_map(self, manifest: Manifest) -> LoadMap:
        """The identity over `state_dict()`.

        A name that the module lacks feeds nothing; a tied name feeds every module that holds it.

        Raises:
            ManifestError: a shape differs.
        """
        targets, copies = [], []
        known = set(manifest.all_names)
        for path, tensor in self._tensors().items():
            module, _, parameter = path.rpartition(".")
            targets.append(Target(module, parameter, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
            if path not in known:
                continue
            meta = manifest.meta_of(path)
            if meta.shape != tuple(tensor.shape):
                raise ManifestError(f"{meta} does not fit the engine's {list(tensor.shape)}", name=path)
            region = Region.of(torch.empty(meta.shape, device="meta"))
            copies.append(Copy(path, module, parameter, region, region))
        return LoadMap.from_copies(manifest, copies, targets)

    def check_ready(self) -> None:
        for path, tensor in self._tensors().items():
            if tensor.is_meta:
                raise EngineStateError(f"{path} is on the meta device; give the module memory first (to_empty)")

    def apply(self, groups: Iterable[Iterable[tuple[str, torch.Tensor]]]) -> int:
        tensors = self._tensors()
        with torch.no_grad():
            for group in groups:
                # Tied names are one parameter here; the second copy would write the same bytes again.
                values = {id(tensors[name]): (tensors[name], value) for name, value in group if name in tensors}
                for tensor, value in values.values():
                    tensor.detach().copy_(value)
        return 1

    def _tensors(self) -> dict[str, torch.Tensor]:
        # A state_dict may hold extra state that is no tensor.
        state = self._module.state_dict(keep_vars=True)
        return {path: tensor for path, tensor in state.items() if isinstance(tensor, torch.Tensor)}
