"""What a trainer rank sends: a module or (name, tensor) pairs, and in which dtypes they travel."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from weightsync.errors import ConfigError, ManifestError
from weightsync.manifest import Manifest, TensorMeta, TieFinder

Pairs = Iterable[tuple[str, torch.Tensor]]


class TrainerSource:
    """One trainer rank's weights. *get* returns, anew for each update, a module, a mapping or an iterable of pairs."""

    def __init__(self, get: Callable[[], Any], *, wire_dtype: Mapping[str, str]) -> None:
        self._get = get
        self._wire_dtype = wire_dtype

    def manifest(self) -> Manifest:
        """Names, wire dtypes, shapes and ties. Where making the pairs is collective, so is this.

        Ties are seen where all tensors exist at once. A source that makes them as it goes may put one after the
        other into the same memory, so there every name is a tensor of its own.
        """
        metas, aliases, ties = [], {}, TieFinder()
        pairs, lazy = self._pairs()
        for name, tensor in pairs:
            meta = self._meta(name, tensor)
            canonical = None if lazy else ties.canonical(name, tensor)
            if canonical is not None:
                aliases[name] = canonical
            else:
                metas.append(meta)
        return Manifest(tuple(metas), aliases)

    def check(self, manifest: Manifest, names: tuple[str, ...]) -> None:
        """Compare what the rank holds with what it announced, where that is known before the tensors are made.

        Raises:
            ManifestError: naming the first tensor that is gone, new or changed.
        """
        pairs, lazy = self._pairs()
        if lazy:
            return
        held = dict(pairs)
        for name, tensor in held.items():
            self._expect(manifest, name, tensor)
        for alias, canonical in manifest.aliases.items():
            if alias in held and canonical in held:
                ties = TieFinder()
                ties.canonical(canonical, held[canonical])
                if ties.canonical(alias, held[alias]) != canonical:
                    raise ManifestError(
                        f"{alias} was announced as a tie of {canonical}, it no longer is; connect again", name=alias
                    )
        for name in names:
            if name not in held:
                raise ManifestError(f"the trainer no longer has {manifest.by_name[name]}; connect again", name=name)

    def tensors(self, manifest: Manifest, names: tuple[str, ...]) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        """The tensors called *names*: in that order where all exist at once, else as the source makes them.

        Ties in *manifest* come once. The source is always iterated to its end.

        Raises:
            ManifestError: the source makes a tensor that was not announced, or announced otherwise.
        """
        pairs, lazy = self._pairs()
        if not lazy:
            held = dict(pairs)
            for name in names:
                if name in held:
                    yield self._expect(manifest, name, held[name]), held[name]
            return
        wanted, made = set(names), 0
        for name, tensor in pairs:
            made += 1
            meta = self._expect(manifest, name, tensor)
            if name in wanted:
                yield meta, tensor
        if names and not made:
            raise ManifestError(
                "the source made no tensors: a generator can be read once only; give a method or a function that makes a "
                "new one for each update",
                name=names[0],
            )

    def _meta(self, name: str, tensor: torch.Tensor) -> TensorMeta:
        if tensor.is_meta:
            raise ManifestError(f"{name} is on the meta device: it has no data to send", name=name)
        if tensor.layout != torch.strided or type(tensor).__name__ == "DTensor":
            raise ManifestError(
                f"{name} is a {type(tensor).__name__} with layout {tensor.layout}: the source must yield whole, dense "
                "tensors (for a DTensor: full_tensor())",
                name=name,
            )
        return TensorMeta.of(name, tensor, dtype=self._dtype(name, tensor.dtype))

    def _expect(self, manifest: Manifest, name: str, tensor: torch.Tensor) -> TensorMeta:
        """The announced meta of *name*, which *tensor* must fit."""
        canonical = manifest.aliases.get(name, name)
        # A tie travels as its canonical name does, whichever wire_dtype pattern its own name would fit.
        found = TensorMeta.of(name, tensor, dtype=self._dtype(canonical, tensor.dtype))
        known = manifest.by_name.get(canonical)
        if known is None:
            raise ManifestError(
                f"the trainer has {found}, which was not announced; connect again to sync it", name=name
            )
        if (known.dtype, known.shape) != (found.dtype, found.shape):
            raise ManifestError(f"{known} was announced, the trainer now has {found}; connect again", name=name)
        return known

    def _pairs(self) -> tuple[Pairs, bool]:
        """(pairs, whether they are made as they are asked for)."""
        source = self._get()
        if isinstance(source, torch.nn.Module):
            source = source.state_dict(keep_vars=True)
        if isinstance(source, Mapping):
            # A state_dict may hold extra state that is no tensor; engines load tensors only.
            return [(name, t) for name, t in source.items() if isinstance(t, torch.Tensor)], False
        if isinstance(source, Iterable):
            return _checked_pairs(source), not isinstance(source, (list, tuple))
        raise ConfigError(
            f"source must yield a torch.nn.Module, a mapping or (name, tensor) pairs; it yields {type(source).__name__}",
            key="source",
        )

    def _dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        if not dtype.is_floating_point:
            return dtype
        for pattern, wire in self._wire_dtype.items():
            if fnmatch.fnmatchcase(name, pattern):
                found = getattr(torch, wire.removeprefix("torch."), None)
                if not isinstance(found, torch.dtype) or not found.is_floating_point:
                    raise ConfigError(
                        f"wire_dtype: {wire!r} is no floating-point dtype of torch", key=f"wire_dtype.{pattern}"
                    )
                return found
        return dtype


def _checked_pairs(source: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for pair in source:
        if not (
            isinstance(pair, tuple)
            and len(pair) == 2
            and isinstance(pair[0], str)
            and isinstance(pair[1], torch.Tensor)
        ):
            raise ConfigError(f"source must yield (name, tensor) pairs, it yields {type(pair).__name__}", key="source")
        yield pair[0], pair[1]
