"""A weight set: many whole tensors that lie in stable memory and arrive as one.

A chunk says of each of its pieces what it is, which costs microseconds for each. Where a trainer's parameters are read in
place, nothing but their bytes changes between updates: they are described once, and each update says "the same again".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from weightsync.cuda.moves import Moves
from weightsync.digest import digest_text
from weightsync.errors import DigestError, ManifestError
from weightsync.manifest import TensorMeta

Digests = np.ndarray[Any, np.dtype[np.uint64]]


class SetLayout:
    """Which tensors a set has and where they lie; the same object for as long as that stays."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """*tensors*: canonical name -> the whole tensor, in the order in which digests are listed."""
        self.tensors = tensors
        self.device = device
        self.nbytes = sum(tensor.nbytes for tensor in tensors.values())
        self.digest = layout_digest({name: tensor.nbytes for name, tensor in tensors.items()})
        self.arrived = {name: [(0, tensor.nbytes)] for name, tensor in tensors.items()}
        """By name, the runs of bytes that come with a set."""
        self._reads: Moves | None = None
        self._checked = ""

    def reads(self) -> Moves:
        """Digests of all tensors where they lie."""
        if self._reads is None:
            self._reads = Moves([(tensor, None) for tensor in self.tensors.values()], self.device)
        return self._reads

    def check(self, metas: Mapping[str, TensorMeta], manifest_digest: str) -> None:
        """Raises ManifestError where a tensor is not as announced; looked at once for each manifest."""
        if self._checked == manifest_digest:
            return
        for name, tensor in self.tensors.items():
            meta = metas[name]
            if tensor.dtype != meta.torch_dtype or tensor.shape != meta.shape:
                raise ManifestError(f"{meta} came as {tensor.dtype} {list(tensor.shape)}", name=name)
        self._checked = manifest_digest


def layout_digest(sizes: Mapping[str, int]) -> bytes:
    """Of names and bytes in their order: with the digests of their bytes, the content of a set."""
    return digest_text(["set-1", *sizes.items()]).encode()


class _Lasting:
    """As a chunk in stable memory: there is nothing to give back before the update ends."""

    stable: ClassVar[bool] = True

    def release(self) -> None: ...


@dataclass
class WeightSet(_Lasting):
    """One version of a set. It may be read until the update ends."""

    version: int
    manifest_digest: str
    layout: SetLayout
    sender: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.layout.tensors)


@dataclass
class SetDigests(_Lasting):
    """What the sender of `of` read, one digest a tensor; comes after it where digests are on."""

    of: WeightSet
    digests: Digests

    @property
    def version(self) -> int:
        return self.of.version

    @property
    def manifest_digest(self) -> str:
        return self.of.manifest_digest

    @property
    def sender(self) -> int:
        return self.of.sender

    def compare(self, found: Digests) -> None:
        """Raises DigestError, naming the first tensor of which other bytes were *found*."""
        if np.array_equal(found, self.digests):
            return
        if len(found) != len(self.digests):
            raise DigestError(f"{len(self.digests)} digests came for {len(found)} tensors")
        for name, held, sent in zip(self.of.layout.tensors, found, self.digests, strict=True):
            if held != sent:
                raise DigestError(
                    f"{name}: its bytes differ from what the sender read (words {int(held):016x}, sent {int(sent):016x})",
                    name=name,
                )
