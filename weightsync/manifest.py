"""The manifest: what one version of a model consists of, without its data.

Names, dtypes and shapes in the trainer's order, and which names are ties of others.
Both ends derive everything else from it, so its digest is the first thing that all
ranks must agree on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cached_property

import msgspec
import torch

from weightsync.digest import digest_text
from weightsync.errors import ManifestError

MAX_NAME_CHARS = 1024


class TensorMeta(msgspec.Struct, frozen=True, dict=True):
    """One tensor as it crosses the wire: checkpoint name, wire dtype (without "torch."), shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def torch_dtype(self) -> torch.dtype:
        """Raises ManifestError where this torch has no such dtype."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ManifestError(f"{self.name}: unknown dtype {self.dtype!r}", name=self.name)
        return dtype

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        return self.numel * self.torch_dtype.itemsize

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, *, dtype: torch.dtype | None = None) -> TensorMeta:
        return cls(name, str(dtype or tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype}, {list(self.shape)})"


class Manifest(msgspec.Struct, frozen=True, dict=True):
    """The tensors of one model, in order, and `aliases`: tied name -> the name whose bytes it shares.

    An aliased name is not in `tensors`: its bytes travel once, under the canonical name.
    """

    tensors: tuple[TensorMeta, ...]
    aliases: dict[str, str] = {}

    def __post_init__(self) -> None:
        names = {meta.name for meta in self.tensors}
        if len(names) != len(self.tensors):
            seen: set[str] = set()
            twice = next(m.name for m in self.tensors if m.name in seen or seen.add(m.name))  # type: ignore[func-returns-value]
            raise ManifestError(f"{twice} stands in the manifest twice; each name may come once", name=twice)
        for meta in self.tensors:
            if not meta.name or len(meta.name) > MAX_NAME_CHARS:
                raise ManifestError(f"a tensor name must have 1 to {MAX_NAME_CHARS} characters: {meta.name[:80]!r}")
            if any(size < 0 for size in meta.shape):
                raise ManifestError(f"{meta}: negative size", name=meta.name)
            _ = meta.torch_dtype
        for alias, canonical in self.aliases.items():
            if canonical not in names:
                raise ManifestError(f"{alias} is tied to {canonical}, which is not in the manifest", name=alias)
            if alias in names:
                raise ManifestError(f"{alias} is both a tensor and a tie of {canonical}", name=alias)

    @cached_property
    def by_name(self) -> dict[str, TensorMeta]:
        """Canonical names only."""
        return {meta.name: meta for meta in self.tensors}

    @cached_property
    def nbytes(self) -> int:
        return sum(meta.nbytes for meta in self.tensors)

    @cached_property
    def digest(self) -> str:
        """128-bit hex; equal in every process for equal content, order included."""
        rows = [(m.name, m.dtype, m.shape) for m in self.tensors]
        return digest_text(["manifest-1", rows, sorted(self.aliases.items())])

    def meta_of(self, name: str) -> TensorMeta:
        """The meta of a canonical name or of a tie, under that name."""
        meta = self.by_name[self.aliases.get(name, name)]
        return meta if meta.name == name else msgspec.structs.replace(meta, name=name)

    @cached_property
    def ties(self) -> dict[str, list[str]]:
        """Canonical name -> the names tied to it."""
        ties: dict[str, list[str]] = {}
        for alias, canonical in self.aliases.items():
            ties.setdefault(canonical, []).append(alias)
        return ties

    def with_ties(self, names: Iterable[str]) -> tuple[str, ...]:
        """Canonical *names*, each followed by the names tied to it."""
        return tuple(n for name in names for n in (name, *self.ties.get(name, ())))

    @cached_property
    def all_names(self) -> tuple[str, ...]:
        """Canonical names in order, each followed by its ties."""
        return self.with_ties(meta.name for meta in self.tensors)

    def difference(self, other: Manifest) -> str:
        """The first way in which *other* differs, in words; empty when equal."""
        for name, meta in self.by_name.items():
            theirs = other.by_name.get(name)
            if theirs is None:
                return f"{name} is missing"
            if theirs != meta:
                return f"{name} was {meta.dtype} {list(meta.shape)}, is {theirs.dtype} {list(theirs.shape)}"
        for name in other.by_name:
            if name not in self.by_name:
                return f"{name} is new"
        if self.aliases != other.aliases:
            return f"ties changed from {self.aliases} to {other.aliases}"
        return "" if self.digest == other.digest else "the order of the tensors changed"

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        *,
        wire_dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> Manifest:
        """The manifest of (name, tensor) pairs; pairs over the very same memory and geometry become ties.

        An iterable that makes its tensors as it goes is consumed once and nothing is kept alive
        but what it keeps itself, so ties are seen only among tensors that live at the same time.
        """
        items = tensors.items() if isinstance(tensors, Mapping) else tensors
        metas: list[TensorMeta] = []
        aliases: dict[str, str] = {}
        ties = TieFinder()
        for name, tensor in items:
            canonical = ties.canonical(name, tensor)
            if canonical is not None:
                aliases[name] = canonical
            else:
                metas.append(TensorMeta.of(name, tensor, dtype=(wire_dtypes or {}).get(name)))
        return cls(tuple(metas), aliases)

    @classmethod
    def from_module(cls, module: torch.nn.Module) -> Manifest:
        """Parameters and persistent buffers of *module*; tied parameters become aliases."""
        # A state_dict may hold extra state that is no tensor.
        state = module.state_dict(keep_vars=True).items()
        return cls.from_tensors((name, tensor) for name, tensor in state if isinstance(tensor, torch.Tensor))


class TieFinder:
    """Recognises a tensor that was seen before under another name, by memory and geometry.

    It holds a weak reference to each storage's tensor, so an address that the allocator
    hands out again does not pass for a tie.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[object, ...], tuple[str, object]] = {}

    def canonical(self, name: str, tensor: torch.Tensor) -> str | None:
        """The earlier name of the same memory, else None (and *name* is remembered)."""
        if tensor.numel() == 0 or tensor.device.type == "meta":
            return None
        storage = tensor.untyped_storage()
        key = (
            storage.data_ptr(), tensor.device, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(),
            tensor.dtype, tensor.is_conj(), tensor.is_neg(),
        )  # fmt: skip
        found = self._seen.get(key)
        if found is not None and found[1].alive():  # type: ignore[attr-defined]
            return found[0]
        self._seen[key] = (name, StorageWatch(storage))
        return None


class StorageWatch:
    """Knows whether a storage is still alive without keeping it alive."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._weak = storage._weak_ref()

    def alive(self) -> bool:
        return not torch.UntypedStorage._expired(self._weak)

    def __del__(self) -> None:
        torch.UntypedStorage._free_weak_ref(self._weak)
