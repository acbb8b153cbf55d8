"""What a trainer rank sends: a module or (name, tensor) pairs, and in which dtypes they travel."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from weightsync.config import floating_dtype
from weightsync.errors import ConfigError, ManifestError, WeightSyncError
from weightsync.holdings import Holdings
from weightsync.manifest import Manifest, TensorMeta, TieFinder
from weightsync.module_tensors import module_tensors, plain_table
from weightsync.sharded import (
    check_gatherable,
    gather,
    has_sharded,
    is_sharded,
    local_part,
    no_data,
    own_part,
    release,
    shard_layout,
    tie_key,
)

Pairs = Iterable[tuple[str, torch.Tensor]]


class _Known(NamedTuple):
    """What a tensor must be like: looked up for every tensor of every update, so worked out once a manifest."""

    meta: TensorMeta
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_cast: bool
    """Any floating-point dtype will do; it travels in this one."""


class _Checked(NamedTuple):
    """What `check` saw, for `tensors` to send."""

    manifest: Manifest
    names: tuple[str, ...]
    tensors: dict[str, torch.Tensor]


class TrainerSource:
    """One trainer rank's weights. *get* returns, anew for each update, a module, a mapping or an iterable of pairs.

    Tensors may be DTensors, of any mesh and placements. In the manifest they stand with their whole shape; `tensors`
    gathers them one at a time, in an order in which no two ranks wait for each other: all that a module, a mapping or a
    list holds, in the manifest's order, which is the same on every rank; or, of an iterable that makes its tensors
    as it goes, all in the order in which it makes them, which must be the same on every rank of a mesh. A rank outside
    a DTensor's mesh holds nothing of it.
    """

    def __init__(self, get: Callable[[], Any], *, wire_dtype: Mapping[str, str]) -> None:
        self._get = get
        self._wire_dtype = wire_dtype
        self._held = False
        self._device = torch.device("cpu")
        self._in_shared_memory = False
        self._sharded = False
        self._known: tuple[Manifest, dict[str, _Known]] | None = None
        self._layouts: dict[str, tuple[object, ...] | None] = {}
        """How each tensor was cut when `holdings` told."""
        self._checked: _Checked | None = None
        self._tables = WeakKeyDictionary[torch.nn.Module, Callable[[], dict[str, torch.Tensor]]]()

    @property
    def held(self) -> bool:
        """Whether, when last looked at, all tensors existed at once and as they are sent: none is made or gathered.

        They then stay as they are until the trainer changes them; else each is gone when the next is asked for.
        """
        return self._held

    @property
    def makes(self) -> bool:
        """Whether, when last looked at, it made its tensors as they were asked for."""
        return not (self._held or self._sharded)

    @property
    def is_sharded(self) -> bool:
        """Whether, when last looked at, some tensors were DTensors that must be gathered to be whole."""
        return self._sharded

    @property
    def device(self) -> torch.device:
        """Where the weights lay when `manifest` looked: the device of the first tensor that is not on the CPU."""
        return self._device

    @property
    def in_shared_memory(self) -> bool:
        """Whether, when `manifest` looked, every tensor lay in CPU memory that other processes can map."""
        return self._in_shared_memory

    def manifest(self) -> Manifest:
        """Names, wire dtypes, shapes and ties. Where making the pairs is collective, so is this.

        Ties are seen where all tensors exist at once. A source that makes them as it goes may put one after the
        other into the same memory, so there every name is a tensor of its own.

        Raises:
            ManifestError: naming a tensor that cannot be sent. ConfigError: the source yields something else.
        """
        metas, aliases, ties = [], {}, TieFinder()
        shards: dict[tuple[object, ...], str] = {}
        pairs, lazy = self._look()
        self._device = torch.device("cpu")
        self._in_shared_memory = self._held
        for name, tensor in pairs:
            meta = self._meta(name, tensor)
            self._in_shared_memory = self._in_shared_memory and tensor.device.type == "cpu" and tensor.is_shared()
            if self._device.type == "cpu":
                self._device = tensor.device
            canonical: str | None = None
            if not lazy and is_sharded(tensor):
                canonical = shards.setdefault(tie_key(tensor), name)
            elif not lazy:
                canonical = ties.canonical(name, tensor)
            if canonical is not None and canonical != name:
                aliases[name] = canonical
            else:
                metas.append(meta)
        return Manifest(tuple(metas), aliases)

    def check(
        self,
        manifest: Manifest,
        names: tuple[str, ...],
        seen: Callable[[Mapping[str, torch.Tensor]], None] | None = None,
    ) -> None:
        """Compare what the rank holds with what it announced, where that is known before the tensors are made.

        Never collective. What was checked is what the next `tensors` sends. Where that is a module that was looked at before,
        *seen* is called first with what its modules of then hold now, by name.

        Raises:
            ManifestError: naming the first tensor that is gone, new or changed.
            WeightSyncError: naming one that cannot be gathered.
        """
        self._checked = None
        pairs, lazy = self._look(seen)
        if not lazy:
            held = dict(pairs)
            self._compare(manifest, names, held)
            self._checked = _Checked(manifest, names, held)

    def forget_checked(self) -> None:
        """What `check` saw may change, and is looked at anew."""
        self._checked = None

    def parts(self) -> Mapping[str, torch.Tensor] | None:
        """What the last `check` saw, by name, until `tensors` is asked for it; None where tensors are made as they go."""
        return self._checked.tensors if self._checked is not None else None

    def tensors(
        self, manifest: Manifest, names: tuple[str, ...], *, left_out: Container[str] = frozenset()
    ) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        """The tensors called *names*: in that order where they are `held`, else as they are made or gathered.

        Those *left_out*, the same on every rank, are not gathered. Ties in *manifest* come once. To be iterated to its end
        on every rank, whatever happens: other ranks may wait for this one's part in what is made or gathered. A tensor
        that was gathered is emptied when the next one is asked for.

        Raises:
            ManifestError: a tensor was not announced, or announced otherwise; after the last one, where tensors are made
                or gathered. WeightSyncError: naming a tensor that could not be gathered.
        """
        checked, self._checked = self._checked, None
        failure: WeightSyncError | None = None
        if checked is not None and checked.manifest is manifest and checked.names == names:
            held = checked.tensors
        else:
            pairs, lazy = self._look()
            if lazy:
                yield from self._made(manifest, names, pairs)
                return
            held = dict(pairs)
            try:
                self._compare(manifest, names, held)
            except ManifestError as error:
                if not self._sharded:
                    raise
                names, failure = (), error
        if self._sharded:
            yield from self._gathered(manifest, names, held, left_out)
        else:
            for name in names:
                if name not in left_out:
                    yield manifest.by_name[name], held[name]
        if failure is not None:
            raise failure

    def holdings(self) -> Holdings:
        """What this rank holds of every tensor, as it lies. Where making the pairs is collective, so is this.

        Raises:
            ManifestError: naming a tensor whose values no rank has.
        """
        self._layouts = {}
        return Holdings.of(self._noted(self._look()[0]))

    def _noted(self, pairs: Pairs) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in pairs:
            self._layouts[name] = shard_layout(tensor)
            yield name, tensor

    def shards(self, manifest: Manifest, names: Sequence[str]) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        """This rank's own parts of the tensors called *names*, as they lie: in that order, or as they are made. Of what the
        last `check` saw, until that is forgotten. Gathers nothing; where making the pairs is collective, it is to be
        iterated to its end on every rank.

        Raises:
            ManifestError: a tensor is gone, or is not as it was announced, or not cut as `holdings` told.
        """
        known, wanted = self._know(manifest), set(names)
        pairs: Pairs
        if self._checked is not None and self._checked.manifest is manifest:
            pairs, lazy = self._checked.tensors.items(), False
        else:
            pairs, lazy = self._look()
        if not lazy:
            held = {manifest.aliases.get(name, name): (name, tensor) for name, tensor in reversed(list(pairs))}
            if gone := next((name for name in names if name not in held), None):
                raise ManifestError(f"the trainer no longer has {manifest.by_name[gone]}; connect again", name=gone)
            pairs = (held[name] for name in names)
        for name, tensor in pairs:
            if not _fits(known.get(name), tensor):
                raise self._misfit(known.get(name), name, tensor)
            meta = known[name].meta
            if meta.name in wanted:
                self._check_layout(name, tensor)
                yield meta, local_part(tensor)

    def _check_layout(self, name: str, tensor: torch.Tensor) -> None:
        if shard_layout(tensor) != self._layouts.get(name):
            was, now = ("sharded" if layout else "whole" for layout in (self._layouts.get(name), shard_layout(tensor)))
            raise ManifestError(
                f"{name} was {was} on this rank when the weight sync opened, and is {now if now != was else 'sharded otherwise'} "
                "now: FSDP leaves its root's parameters whole after a forward. Call reshard() on the module before an update, or "
                "give the module or its state_dict() as source",
                name=name,
            )

    def _gathered(
        self, manifest: Manifest, names: tuple[str, ...], held: Mapping[str, torch.Tensor], left_out: Container[str]
    ) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        """Gather all that is held and not *left_out*, in the manifest's order; yields *names* of it."""
        wanted = set(names)
        for meta in manifest.tensors:
            tensor = held.get(meta.name)
            if tensor is not None and meta.name not in left_out:
                yield from _whole(meta, tensor, is_wanted=meta.name in wanted)

    def _made(
        self, manifest: Manifest, names: tuple[str, ...], pairs: Pairs
    ) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        """Make all that the source makes; yields *names* of it."""
        wanted, made = set(names), 0
        known, failure = self._know(manifest), None
        for name, tensor in pairs:
            made += 1
            if failure is None and not _fits(known.get(name), tensor):
                failure = self._misfit(known.get(name), name, tensor)
            meta = known[name].meta if name in known else TensorMeta.of(name, tensor)
            yield from _whole(meta, tensor, is_wanted=failure is None and name in wanted)
        if failure is not None:
            raise failure
        if names and not made:
            raise ManifestError(
                "the source made no tensors: a generator can be read once only; give a method or a function that makes a "
                "new one for each update",
                name=names[0],
            )

    def _meta(self, name: str, tensor: torch.Tensor) -> TensorMeta:
        if tensor.is_meta:
            raise no_data(name)
        if tensor.is_quantized:
            raise ManifestError(
                f"{name} is quantized by torch ({tensor.dtype}); let the source yield what the engine loads: dequantize(), or "
                "int_repr() and its scales",
                name=name,
            )
        if tensor.layout != torch.strided or type(tensor).__name__ == "ShardedTensor":
            raise ManifestError(
                f"{name} is a {type(tensor).__name__} with layout {tensor.layout}: the source must yield dense tensors, "
                "whole ones or DTensors",
                name=name,
            )
        return TensorMeta.of(name, tensor, dtype=self._dtype(name, tensor.dtype))

    def _compare(self, manifest: Manifest, names: tuple[str, ...], held: Mapping[str, torch.Tensor]) -> None:
        """Raises ManifestError, or WeightSyncError where *held* cannot be gathered."""
        known = self._know(manifest)
        for name, tensor in held.items():
            if not _fits(known.get(name), tensor):
                raise self._misfit(known.get(name), name, tensor)
        for alias, canonical in manifest.aliases.items():
            if alias in held and canonical in held and not _is_tied(held[canonical], held[alias]):
                raise ManifestError(
                    f"{alias} was announced as a tie of {canonical}, it no longer is; connect again", name=alias
                )
        for name in names:
            if name not in held:
                raise ManifestError(f"the trainer no longer has {manifest.by_name[name]}; connect again", name=name)
        if self._sharded:
            check_gatherable(held.items())

    def _misfit(self, known: _Known | None, name: str, tensor: torch.Tensor) -> ManifestError:
        found = TensorMeta.of(name, tensor, dtype=self._dtype(known.meta.name if known else name, tensor.dtype))
        if known is None:
            return ManifestError(
                f"the trainer has {found}, which was not announced; connect again to sync it", name=name
            )
        return ManifestError(f"{known.meta} was announced, the trainer now has {found}; connect again", name=name)

    def _know(self, manifest: Manifest) -> dict[str, _Known]:
        """Every name of *manifest*, ties too."""
        if self._known is None or self._known[0] is not manifest:
            known = {}
            for meta in manifest.tensors:
                dtype = meta.torch_dtype
                is_cast = dtype.is_floating_point and self._cast(meta.name) is not None
                # A tie travels as its canonical name does, whichever wire_dtype pattern its own name would fit.
                for name in manifest.with_ties((meta.name,)):
                    known[name] = _Known(meta, dtype, meta.shape, is_cast)
            self._known = (manifest, known)
        return self._known[1]

    def _look(self, seen: Callable[[Mapping[str, torch.Tensor]], None] | None = None) -> tuple[Pairs, bool]:
        """(pairs, whether they are made as they are asked for), of what this rank has a part in."""
        source = self._get()
        if isinstance(source, torch.nn.Module):
            module, known = source, self._tables.pop(source, None)
            if known is not None and seen is not None:
                with contextlib.suppress(KeyError):
                    seen(known())
            table = plain_table(module)
            if table is not None:
                self._tables[module] = table
            source = table() if table is not None else module_tensors(module)
        if isinstance(source, Mapping):
            # A state_dict may hold extra state that is no tensor; engines load tensors only.
            pairs = [(name, t) for name, t in source.items() if isinstance(t, torch.Tensor)]
            if source and not pairs:
                raise ConfigError(
                    f"source is a mapping without a tensor: {next(iter(source))!r} is a {type(next(iter(source.values()))).__name__}; "
                    "expected name -> torch.Tensor, as state_dict() gives",
                    key="source",
                )
        elif isinstance(source, (list, tuple)):
            pairs = list(_checked_pairs(source))
        elif isinstance(source, Iterable):
            self._held = self._sharded = False
            return _own_parts(_checked_pairs(source)), True
        else:
            raise ConfigError(
                "source must yield a torch.nn.Module, a mapping or (name, tensor) pairs; it yields "
                f"{type(source).__name__}",
                key="source",
            )
        if has_sharded(pairs):
            pairs = list(_own_parts(pairs))
        self._sharded = has_sharded(pairs)
        self._held = not self._sharded
        return pairs, False

    def _dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which *name* travels."""
        return (self._cast(name) or dtype) if dtype.is_floating_point else dtype

    def _cast(self, name: str) -> torch.dtype | None:
        """What the first pattern of `wire_dtype` that fits makes of a floating-point tensor."""
        for pattern, wire in self._wire_dtype.items():
            if fnmatch.fnmatchcase(name, pattern):
                return floating_dtype(wire, key=f"wire_dtype.{pattern}")
        return None


def _fits(known: _Known | None, tensor: torch.Tensor) -> bool:
    if known is None:
        return False
    _, dtype, shape, is_cast = known
    found = tensor.dtype
    return (found is dtype or (is_cast and found.is_floating_point)) and tensor.shape == shape


def _whole(meta: TensorMeta, tensor: torch.Tensor, *, is_wanted: bool) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
    """The tensor, gathered where it must be, wanted or not."""
    if is_sharded(tensor):
        whole = gather(meta, tensor)
        if is_wanted:
            yield meta, whole
        release(whole)
    elif is_wanted:
        yield meta, tensor


def _is_tied(canonical: torch.Tensor, alias: torch.Tensor) -> bool:
    if alias is canonical:
        return True
    if is_sharded(canonical) or is_sharded(alias):
        return is_sharded(canonical) and is_sharded(alias) and tie_key(canonical) == tie_key(alias)
    ties = TieFinder()
    ties.canonical("canonical", canonical)
    return ties.canonical("alias", alias) is not None


def _own_parts(pairs: Pairs) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in pairs:
        part = own_part(tensor)
        if part is not None:
            yield name, part


def _checked_pairs(source: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for pair in source:
        if not (
            isinstance(pair, tuple)
            and len(pair) == 2
            and isinstance(pair[0], str)
            and isinstance(pair[1], torch.Tensor)
        ):
            raise ConfigError(
                f"source must yield (name, tensor) pairs, it yields {type(pair).__name__}; name the module itself, or yield "
                "named_parameters()",
                key="source",
            )
        yield pair[0], pair[1]
