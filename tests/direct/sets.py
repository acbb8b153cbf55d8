"""A transport of sets in CPU memory: what direct apply is given on a GPU."""

from __future__ import annotations

import queue
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import numpy as np
import torch

from tests.direct.made_up import CPU
from weightsync.chunk import WeightChunk
from weightsync.cuda.moves import Moves
from weightsync.digest import ContentDigest
from weightsync.interfaces import (
    LinkContext,
    ReceiverTransport,
    SenderTransport,
    Transfer,
    TransferStats,
)
from weightsync.manifest import TensorMeta
from weightsync.weightset import SetDigests, SetLayout, WeightSet


class SetSender(SenderTransport):
    """Tells of the tensors where they lie; those called one of `chunked` come in a chunk."""

    name = "sets"
    is_stable: ClassVar[bool] = True
    chunked: ClassVar[frozenset[str]] = frozenset()
    wrong: ClassVar[str | None] = None
    """Of this tensor another digest is told."""
    late_break: ClassVar[bool] = False
    """The link breaks after the tensors, before their digests."""
    inboxes: ClassVar[dict[bytes, list[queue.Queue[Any]]]] = {}

    def open(self, metas: tuple[TensorMeta, ...]) -> bytes:
        self._token = self.context.token.encode()
        self._boxes: list[queue.Queue[Any]] = [queue.Queue() for _ in range(self.context.num_receivers)]
        self.inboxes[self._token] = self._boxes
        self._layout: SetLayout | None = None
        return self._token

    def connect(self) -> None: ...

    def stable(self) -> bool:
        return self.is_stable

    def is_chunked(self, name: str) -> bool:
        return name in self.chunked

    def send(self, transfer: Transfer, tensors: Iterable[tuple[TensorMeta, torch.Tensor]]) -> TransferStats:
        found = {meta.name: tensor.detach() for meta, tensor in tensors}
        in_set = {name: tensor for name, tensor in found.items() if not self.is_chunked(name)}
        rest = {name: tensor for name, tensor in found.items() if self.is_chunked(name)}
        held = {name: tensor.data_ptr() for name, tensor in in_set.items()}
        if self._layout is None or {n: t.data_ptr() for n, t in self._layout.tensors.items()} != held:
            self._layout = SetLayout(in_set, CPU)
        layout, content = self._layout, ContentDigest()
        digest = self.context.digest
        digests = Moves([(tensor, None) for tensor in in_set.values()], CPU).run(digest=digest)
        content.add_table(layout.digest, layout.nbytes, digests)
        if self.wrong in in_set:
            digests = digests.copy()
            digests[list(in_set).index(self.wrong)] ^= np.uint64(1)
        weight_set = WeightSet(transfer.version, transfer.manifest.digest, layout, self.context.sender)
        messages: list[Any] = [weight_set, TransferError() if self.late_break else SetDigests(weight_set, digests)]
        if rest:
            chunk = WeightChunk.from_tensors(rest, version=transfer.version, manifest=transfer.manifest, digest=digest)
            chunk.stable, chunk.sender = self.is_stable, self.context.sender
            for piece in chunk.pieces:
                content.add(piece.name, piece.start, piece.nbytes, piece.digest or 0)
            messages.append(chunk)
        for box in self._boxes:
            for message in [*messages, None]:
                box.put(message)
        return TransferStats(sum(tensor.nbytes for tensor in found.values()), content.value)

    def abort(self) -> None:
        for box in getattr(self, "_boxes", []):
            box.put(TransferError())

    def close(self) -> None:
        self.inboxes.pop(getattr(self, "_token", b""), None)


class BucketsBesideSender(SetSender):
    """As where what cannot be read in place has no room in a stage: about half of the tensors come in a chunk that is lent."""

    name = "sets_and_buckets"
    is_stable = False

    def is_chunked(self, name: str) -> bool:
        return zlib.crc32(name.encode()) % 2 == 0


class TransferError(RuntimeError):
    """What the other end of a broken link finds."""


class SetReceiver(ReceiverTransport):
    name = "sets"
    sends_sets = True

    def __init__(self, context: LinkContext, *, receiver: int) -> None:
        super().__init__(context, receiver=receiver)
        self._box: queue.Queue[Any] = queue.Queue()

    def connect(self, address: bytes) -> None:
        self._box = SetSender.inboxes[address][self.receiver]

    def receive(self, transfer: Transfer) -> Iterator[Any]:
        while (message := self._box.get(timeout=self.context.timeout_s)) is not None:
            if isinstance(message, Exception):
                raise message
            yield message

    def abort(self) -> None:
        self._box.put(TransferError())

    def close(self) -> None: ...


class BucketsBesideReceiver(SetReceiver):
    name = "sets_and_buckets"
