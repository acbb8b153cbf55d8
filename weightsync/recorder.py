"""Record a loader at work on meta tensors: which slice of which checkpoint tensor goes where.

A meta tensor has no data, but a view of it keeps its base's storage, shape, strides and offset. So when
the model's own loader runs over meta tensors of the manifest's shapes, each `aten.copy_` it makes names
a source region and a destination region. No table of architectures and no list of allowed operations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from weightsync.errors import ManifestError
from weightsync.geometry import Region
from weightsync.loadmap import Copy, Fill, LoadMap, Target
from weightsync.manifest import Manifest

Items = Iterator[tuple[str, torch.Tensor]]


def record_load_map(
    manifest: Manifest,
    destinations: Mapping[tuple[str, str], torch.Tensor],
    load: Callable[[Items], object],
) -> LoadMap:
    """Run *load* over meta tensors of all names, ties included, and read off its copies.

    *destinations* are the meta tensors, by (module path, parameter name), that *load* fills; the caller puts
    them into the model before and takes them out afterwards, whatever happens here. Where *load* fails for
    want of real data the map falls back to one group per decoder layer and says so.
    """
    targets = [Target(m, p, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for (m, p), t in destinations.items()]
    recorder = _CopyRecorder(destinations)
    items = []
    for name in manifest.all_names:
        meta = manifest.meta_of(name)
        tensor = torch.empty(meta.shape, dtype=meta.torch_dtype, device="meta")
        recorder.add_source(name, tensor)
        items.append((name, tensor))
    try:
        with torch.no_grad(), recorder:
            load(iter(items))
            recorder.note_replaced()
    except Exception as error:
        if not _wants_data(error):
            raise ManifestError(
                f"the engine's loader refuses the trainers' names or shapes: {type(error).__name__}: {error}. They send "
                f"{manifest.tensors[0].name}, ...: names must be those of a checkpoint that the engine loads, without a wrapper's "
                "prefix (module., _orig_mod.)"
            ) from error
        reason = f"the loader cannot run without data ({type(error).__name__}: {error})"
        return LoadMap.from_fallback(manifest, targets, reason)
    if recorder.strays:
        return LoadMap.from_fallback(manifest, targets, f"the loader writes from an unknown source ({recorder.strays})")
    return LoadMap.from_copies(manifest, recorder.sound_copies(), targets, recorder.fills)


def _wants_data(error: BaseException) -> bool:
    """Whether *error* says that a meta tensor was asked for its values."""
    text = str(error).lower()
    return (
        re.search(r"meta tensor|meta device|on meta|device.{0,3}meta|to meta|from meta|data-dependent|faketensor", text)
        is not None
    )


class _CopyRecorder(TorchDispatchMode):
    """Watches writes into the destinations. Results computed from sources keep their names, not their geometry."""

    def __init__(self, destinations: Mapping[tuple[str, str], torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[Copy] = []
        self.fills: list[Fill] = []
        self.strays: str = ""
        # Storages are identified by address, so every tensor that is looked up is kept alive.
        self._keep: list[torch.Tensor] = []
        self._destinations: dict[int, tuple[str, str]] = {}
        self._names: dict[int, frozenset[str]] = {}
        self._sources: dict[int, tuple[str, torch.dtype]] = {}
        self._dtypes = {place: tensor.dtype for place, tensor in destinations.items()}
        self._computed: set[tuple[str, str]] = set()
        self._held = dict(destinations)
        for place, tensor in destinations.items():
            self._destinations.setdefault(self._key(tensor), place)

    def add_source(self, name: str, tensor: torch.Tensor) -> None:
        key = self._key(tensor)
        self._sources[key] = (name, tensor.dtype)
        self._names[key] = frozenset({name})

    def _key(self, tensor: torch.Tensor) -> int:
        self._keep.append(tensor)
        return int(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        written = [t for t in _written(func, args, kwargs) if self._key(t) in self._destinations]
        inputs = [
            t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor) and all(t is not w for w in written)
        ]
        names: frozenset[str] = frozenset().union(*(self._names.get(self._key(t), frozenset()) for t in inputs))
        for tensor in written:
            self._record(func, tensor, args, names)
        if names:
            for tensor in written or tree_iter(result):
                if isinstance(tensor, torch.Tensor):
                    key = self._key(tensor)
                    self._names[key] = self._names.get(key, frozenset()) | names
        return result

    def _record(self, func: Any, destination: torch.Tensor, args: Any, names: frozenset[str]) -> None:
        place = self._destinations[self._key(destination)]
        is_copy = func is torch.ops.aten.copy_.default
        source_name, source_dtype = self._sources.get(self._key(args[1]), (None, None)) if is_copy else (None, None)
        # Through a view of another dtype the bits are copied, at offsets that count other elements.
        as_stored = destination.dtype == self._dtypes[place] and is_copy and args[1].dtype == source_dtype
        if source_name is not None and as_stored:
            region = Region.of(args[1].expand(destination.shape))
            self.copies.append(Copy(source_name, *place, region, Region.of(destination)))
        elif is_copy and not names:
            self.strays = self.strays or f"{'.'.join(place)}"
        elif func in _CONSTANT_WRITES:
            self.fills.append(Fill(*place, Region.of(destination)))
        else:
            self._computed.add(place)
            self.copies += [Copy(name, *place, None, None) for name in sorted(names)]

    def note_replaced(self) -> None:
        """Parameters that were given another tensor (`parameter.data = tensor`) instead of being written into."""
        for key, place in list(self._destinations.items()):
            now = self._key(self._held[place])
            if now != key:
                names = self._names.get(now)
                if names:
                    self.copies += [Copy(name, *place, None, None) for name in sorted(names)]
                else:
                    self.strays = self.strays or ".".join(place)

    def sound_copies(self) -> list[Copy]:
        """The copies; those into a parameter that the loader also computed on lose their geometry."""
        return [
            Copy(c.name, c.module, c.parameter, None, None) if (c.module, c.parameter) in self._computed else c
            for c in self.copies
        ]


# Padding is filled with constants at load and keeps them; replaying the copies need not fill it again.
_CONSTANT_WRITES = frozenset({torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default})


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that *func* writes in place, by its schema."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            if isinstance(value, torch.Tensor):
                yield value
