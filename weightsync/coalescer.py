"""Assemble chunks of any order and size into whole module groups, within a byte budget.

    once per update   Coalescer: what has arrived, what is missing, the first failure
    per group         staging buffer, from its first piece until the consumer is done with it
    per chunk         on loan from a transport, from `put` until released

Bytes of a chunk that is not `stable` are copied into the group's staging buffer inside `put`, and the chunk is
released before `put` returns. A tensor that lies in one run of stable memory is used where it lies and costs no staging;
such a chunk is released when every group that it feeds was consumed, or when the coalescer is closed. Staging memory is
of the device on which a group's first bytes came; what came in GPU memory is copied and digested there, chunk by chunk.

Threads: any number of producers call `put`; one consumer iterates `groups` or waits with `wait_whole`.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from weightsync.chunk import Piece, WeightChunk, from_bytes
from weightsync.cuda.moves import Move, Moves
from weightsync.digest import ContentDigest, copy_and_digest, copy_bytes, digest_view
from weightsync.errors import (
    DigestError,
    IncompleteUpdateError,
    ManifestError,
    StagingLimitError,
    UpdateTimeoutError,
    WeightSyncError,
)
from weightsync.grouptable import GroupTable
from weightsync.loadmap import ModuleGroup
from weightsync.manifest import Manifest, TensorMeta
from weightsync.weightset import Digests, SetDigests, WeightSet


@dataclass(slots=True)
class _Group:
    spec: ModuleGroup
    pending: int
    """Canonical tensors that are not whole yet."""
    staging_bytes: int = 0
    handed_out: bool = False
    buffer: torch.Tensor | None = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    chunks: list[_Loan] = field(default_factory=list)


@dataclass(slots=True)
class _Lent:
    """A tensor that lies in one run of stable memory: its bytes are `payload[base : base + nbytes]`."""

    payload: torch.Tensor
    base: int
    address: int
    runs: list[tuple[int, int]] = field(default_factory=list)
    """Which of its bytes have come there."""


class _Loan:
    """A stable chunk in use by several groups; released with the last."""

    def __init__(self, chunk: WeightChunk) -> None:
        self.chunk, self.users = chunk, 1

    def drop(self) -> None:
        self.users -= 1
        if self.users == 0:
            self.chunk.release()


class Coalescer:
    """One rank's assembly of one version. See the module's docstring for who owns which bytes when."""

    def __init__(
        self,
        manifest: Manifest,
        groups: Sequence[ModuleGroup] | GroupTable,
        *,
        version: int,
        staging_limit_bytes: int,
        timeout_s: float,
        num_producers: int = 1,
        verify: bool = True,
        defer_sets: bool = False,
    ) -> None:
        """Assemble *groups*; canonical names in none of them must arrive too, are verified and dropped.

        Args:
            timeout_s: bound of each wait, for room as for the next whole group.
            num_producers: how many threads will call `put` and then `producer_done`.
            verify: check digests. A piece without one then fails.
            defer_sets: the consumer digests the tensors of sets as it copies them, and reports to `check_set`; their
                groups are handed out before.
        """
        self.manifest = manifest
        self.version = version
        self.staging_limit_bytes = staging_limit_bytes
        self.peak_staging_bytes = 0
        self.nbytes = 0
        """Bytes that have arrived and were verified."""
        self._content: dict[int, ContentDigest] = {}
        self._lent: dict[str, _Lent] = {}
        self._timeout_s = timeout_s
        self._verify = verify
        self._defer_sets = defer_sets
        self._sets: list[WeightSet] = []
        self._sent: dict[int, SetDigests] = {}
        """By the set's sender: what it read."""
        self._unverified = 0
        """Sets of which the digests were not compared yet."""
        # One lock, two audiences: woken at each group or room to stage, and only when the outcome is known. A waiter
        # that is woken for each of 272 tensors costs the producer 14 ms (2-core AMD EPYC, 2026-11).
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._decided = threading.Condition(lock)
        self._error: WeightSyncError | None = None
        self._closed = False
        self._producers = num_producers
        self._deadline = 0.0
        self._waiting_producers = 0
        self._used_bytes = 0
        self._freeable_bytes = 0
        self._ready: deque[_Group] = deque()
        self._handed_out = 0
        self._arrived: dict[str, list[tuple[int, int]]] = {}
        self._done: dict[str, int] = {}
        self._whole: set[str] = set()
        self._seen_whole = 0
        self._table = groups if isinstance(groups, GroupTable) else GroupTable.of(manifest, groups)
        self._groups = list(map(_Group, self._table.groups, self._table.counts, self._table.staging_bytes))
        self._ready.extend(group for group in self._groups if group.pending == 0)

    # ---- producers ------------------------------------------------------------------------------------------

    def put(self, chunk: WeightChunk | WeightSet | SetDigests) -> None:
        """Take a chunk; blocks while the staging budget is full. Always leaves the chunk released or on loan.

        Raises:
            IncompleteUpdateError, ManifestError, DigestError: the chunk does not fit the update; the culprit is
                named. The update has failed, and every later call raises the same.
            StagingLimitError: the budget is full of groups that are not whole, and nobody can complete one.
            UpdateTimeoutError: the consumer made no room for `timeout_s`.
        """
        try:
            match chunk:
                case WeightSet():
                    self._put_set(chunk)
                case SetDigests():
                    self._put_digests(chunk)
                case _:
                    self._put_chunk(chunk)
        except WeightSyncError as error:
            raise self.fail(error) from None

    def _put_chunk(self, chunk: WeightChunk) -> None:
        loan = _Loan(chunk)
        try:
            self._check_chunk(chunk)
            if chunk.payload.is_cuda:
                self._take_all(chunk, loan)
                return
            view = chunk.payload.numpy().data if self._verify else None
            for piece in chunk.pieces:
                self._take(piece, self._check_piece(chunk, piece), chunk, view, loan)
        finally:
            with self._changed:
                loan.drop()

    def producer_done(self) -> None:
        """A producer will put nothing more; once all are done, what is missing is missing for good."""
        with self._changed:
            self._producers -= 1
            self._notify()

    def fail(self, error: WeightSyncError) -> WeightSyncError:
        """End the update with *error*, unless it has failed already; returns the first error."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._notify()
            return self._error

    def _notify(self) -> None:
        """Wake everybody: what they wait for is there, or will never be."""
        self._changed.notify_all()
        self._decided.notify_all()

    def _check_chunk(self, chunk: WeightChunk | WeightSet) -> None:
        names = list(chunk.names)
        if chunk.version != self.version:
            raise IncompleteUpdateError(
                f"a chunk of version {chunk.version} came into the update to version {self.version}: {', '.join(names[:3])}",
                unexpected=names,
            )
        if chunk.manifest_digest != self.manifest.digest:
            raise ManifestError(
                f"a chunk of another manifest ({chunk.manifest_digest}) came, this update's is "
                f"{self.manifest.digest}: {', '.join(names[:3])}",
                name=next(iter(names), None),
            )

    def _put_set(self, chunk: WeightSet) -> None:
        """All tensors of a set become whole at once; verified when their digests have come."""
        self._check_chunk(chunk)
        layout = chunk.layout
        if unknown := layout.tensors.keys() - self.manifest.by_name.keys():
            raise IncompleteUpdateError(f"unexpected tensor {min(unknown)}", unexpected=sorted(unknown))
        layout.check(self.manifest.by_name, self.manifest.digest)
        if self._verify and not self._defer_sets:
            layout.reads().start(digest=True)
        with self._changed:
            self._raise_if_failed()
            if twice := layout.tensors.keys() & self._arrived.keys():
                raise IncompleteUpdateError(f"{min(twice)} came twice", duplicated=sorted(twice))
            metas = self.manifest.by_name
            self._arrived.update((name, [(0, metas[name].nbytes)]) for name in layout.tensors)
            self._sets.append(chunk)
            if self._verify:
                self._unverified += 1
                if not self._defer_sets:
                    return
            else:
                self._note_set(chunk, np.zeros(len(layout.tensors), dtype=np.uint64))
            self._finish_set(chunk)

    def _put_digests(self, sent: SetDigests) -> None:
        if not self._verify:
            return
        with self._changed:
            self._raise_if_failed()
            if sent.sender in self._sent or not any(chunk is sent.of for chunk in self._sets):
                raise IncompleteUpdateError(f"digests of sender {sent.sender} came twice, or without their tensors")
            self._sent[sent.of.sender] = sent
            self._notify()
        if self._defer_sets:
            return
        found = sent.of.layout.reads().result()
        sent.compare(found)
        with self._changed:
            self._raise_if_failed()
            self._unverified -= 1
            self._note_set(sent.of, found)
            self._finish_set(sent.of)

    def _note_set(self, chunk: WeightSet, digests: Digests) -> None:
        layout = chunk.layout
        self.nbytes += layout.nbytes
        self._content.setdefault(chunk.sender, ContentDigest()).add_table(layout.digest, layout.nbytes, digests)

    def _finish_set(self, chunk: WeightSet) -> None:
        """With the lock held."""
        self._whole.update(chunk.layout.tensors)
        for name, tensor in chunk.layout.tensors.items():
            group = self._group_of(name)
            if group is not None:
                group.tensors[name] = tensor
                group.pending -= 1
                if group.pending == 0:
                    self._ready.append(group)
                    self._freeable_bytes += group.staging_bytes if group.buffer is not None else 0
        self._notify()

    def _check_piece(self, chunk: WeightChunk, piece: Piece) -> TensorMeta:
        meta = self.manifest.by_name.get(piece.name)
        if meta is None:
            canonical = self.manifest.aliases.get(piece.name)
            hint = f"; it is a tie of {canonical}, whose bytes travel once" if canonical else ""
            raise IncompleteUpdateError(f"unexpected tensor {piece.name}{hint}", unexpected=[piece.name])
        if piece.start < 0 or piece.nbytes < 0 or piece.start + piece.nbytes > meta.nbytes:
            raise ManifestError(
                f"{meta} has {meta.nbytes} bytes, a chunk carries its bytes {piece.start} to "
                f"{piece.start + piece.nbytes}: dtype or shape differ from the manifest",
                name=piece.name,
            )
        if piece.offset < 0 or piece.offset + piece.nbytes > chunk.payload.numel():
            raise ManifestError(f"{piece.name} reaches past the end of its chunk", name=piece.name)
        if self._verify and piece.digest is None:
            raise DigestError(f"{piece.name} came without a digest", name=piece.name)
        return meta

    def _take(self, piece: Piece, meta: TensorMeta, chunk: WeightChunk, view: memoryview | None, loan: _Loan) -> None:
        start, end = piece.offset, piece.offset + piece.nbytes
        place = self._place(piece, meta, chunk, loan)
        if place is None:
            self._verify_piece(piece, digest_view(view[start:end]) if view is not None else None)
        elif place.is_cuda:
            self._verify_piece(piece, digest_view(view[start:end]) if view is not None else None)
            place.copy_(chunk.payload[start:end])
        elif view is not None:
            self._verify_piece(piece, copy_and_digest(place, chunk.payload[start:end]))
        else:
            copy_bytes(place, chunk.payload[start:end])
        self._account(piece, meta, chunk)

    def _take_all(self, chunk: WeightChunk, loan: _Loan) -> None:
        """The pieces of a chunk in GPU memory: those of one group are copied and digested in one launch."""
        metas = [self._check_piece(chunk, piece) for piece in chunk.pieces]
        # Group by group, so that one that becomes whole can make room for the next.
        runs = itertools.groupby(zip(chunk.pieces, metas, strict=True), lambda item: id(self._group_of(item[0].name)))
        for _, run in runs:
            pieces = list(run)
            places = [self._place(piece, meta, chunk, loan) for piece, meta in pieces]
            sources = [chunk.payload[piece.offset : piece.offset + piece.nbytes] for piece, _ in pieces]
            moves: list[Move] = [
                (source, place if place is not None and place.device == source.device else None)
                for source, place in zip(sources, places, strict=True)
            ]
            digests: list[int] = []
            if self._verify or any(place is not None for _, place in moves):
                digests = Moves(moves, chunk.payload.device).run(digest=self._verify).tolist()
            for i, ((piece, meta), place) in enumerate(zip(pieces, places, strict=True)):
                if place is not None and moves[i][1] is None:
                    place.copy_(sources[i])
                self._verify_piece(piece, digests[i] if self._verify else None)
                self._account(piece, meta, chunk)

    def _place(self, piece: Piece, meta: TensorMeta, chunk: WeightChunk, loan: _Loan) -> torch.Tensor | None:
        """Where the piece is to be copied; None where it is used as it lies, or dropped."""
        group = self._group_of(piece.name)
        with self._changed:
            self._raise_if_failed()
            self._claim(piece)
            if group is None or self._lend(piece, meta, chunk, group, loan):
                return None
        return self._unlend(group, piece.name, chunk.payload.device)[piece.start : piece.start + piece.nbytes]

    def _account(self, piece: Piece, meta: TensorMeta, chunk: WeightChunk) -> None:
        """The piece is where it belongs, and verified."""
        with self._changed:
            self._raise_if_failed()  # `close` has given everything back
            self.nbytes += piece.nbytes
            content = self._content.get(chunk.sender)
            if content is None:
                content = self._content[chunk.sender] = ContentDigest()
            content.add(piece.name, piece.start, piece.nbytes, piece.digest or 0)
            # Not what was claimed: another producer may still be copying its piece.
            done = self._done[piece.name] = self._done.get(piece.name, 0) + piece.nbytes
            if done >= meta.nbytes and piece.name not in self._whole:
                self._finish(meta, self._group_of(piece.name))

    def _group_of(self, name: str) -> _Group | None:
        """None for a name that feeds nothing here."""
        number = self._table.index.get(name)
        return None if number is None else self._groups[number]

    def _finish(self, meta: TensorMeta, group: _Group | None) -> None:
        """A tensor is whole; and its group, perhaps. With the lock held."""
        self._whole.add(meta.name)
        if self._all_here():
            self._notify()
        if group is None:
            return
        lent = self._lent.pop(meta.name, None)
        place = (
            lent.payload[lent.base : lent.base + meta.nbytes]
            if lent is not None
            else self._staging(group, meta.name, torch.device("cpu"))
        )
        group.tensors[meta.name] = from_bytes(place, meta.torch_dtype, meta.shape)
        group.pending -= 1
        if group.pending == 0:
            self._ready.append(group)
            self._freeable_bytes += group.staging_bytes if group.buffer is not None else 0
            self._changed.notify_all()

    def _lend(self, piece: Piece, meta: TensorMeta, chunk: WeightChunk, group: _Group, loan: _Loan) -> bool:
        """Use the tensor where it lies, if that is in stable memory and in one run; else False: it is to be staged.
        With the lock held."""
        base = piece.offset - piece.start
        if not chunk.stable or base < 0 or base + meta.nbytes > chunk.payload.numel():
            return False
        address = chunk.payload.data_ptr() + base
        known = self._lent.get(piece.name)
        if known is None:
            if len(self._arrived[piece.name]) > 1 or address % meta.torch_dtype.itemsize:
                return False
            known = self._lent[piece.name] = _Lent(chunk.payload, base, address)
        elif known.address != address:
            return False
        known.runs.append((piece.start, piece.start + piece.nbytes))
        group.chunks.append(loan)
        loan.users += 1
        return True

    def _unlend(self, group: _Group, name: str, device: torch.device) -> torch.Tensor:
        """The tensor's place in staging memory, with what was lent of it copied there: a part lies elsewhere."""
        staged = self._staging(group, name, device)
        with self._changed:
            # Once: another producer may have done it meanwhile, and written its own pieces there since.
            lent = self._lent.pop(name, None)
            if lent is not None:
                for start, end in lent.runs:
                    part = lent.payload[lent.base + start : lent.base + end]
                    if staged.is_cuda or part.is_cuda:
                        staged[start:end].copy_(part)
                    else:
                        copy_bytes(staged[start:end], part)
        return staged

    def _claim(self, piece: Piece) -> None:
        """Note that the piece has come; refuse bytes that have come before. With the lock held."""
        runs = self._arrived.setdefault(piece.name, [])
        start, end = piece.start, piece.start + piece.nbytes
        if piece.name in self._whole or any(start < e and s < end for s, e in runs) or (start, end) in runs:
            raise IncompleteUpdateError(f"{piece.name} came twice", duplicated=[piece.name])
        runs.append((start, end))

    def _verify_piece(self, piece: Piece, digest: int | None) -> None:
        if digest is not None and digest != piece.digest:
            raise DigestError(
                f"{piece.name}: bytes {piece.start} to {piece.start + piece.nbytes} differ from what the sender read "
                f"(digest {digest:016x}, sent {piece.digest:016x})",
                name=piece.name,
            )

    def _staging(self, group: _Group, name: str, device: torch.device) -> torch.Tensor:
        """The tensor's place in the group's staging buffer, which is made on first use, when there is room."""
        with self._changed:
            if group.buffer is None:
                self._wait_for_room(group)
            if group.buffer is None:
                self._used_bytes += group.staging_bytes
                self.peak_staging_bytes = max(self.peak_staging_bytes, self._used_bytes)
                group.buffer = self._new_buffer(group, device)
            start = self._table.offset[name]
            return group.buffer[start : start + self.manifest.by_name[name].nbytes]

    def _new_buffer(self, group: _Group, device: torch.device) -> torch.Tensor:
        try:
            return torch.empty(group.staging_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise StagingLimitError(
                f"{device} has no memory left to stage module group {group.spec.key} ({group.staging_bytes} bytes, "
                f"{self._used_bytes} are in use): leave the engine less (gpu_memory_utilization), or set apply: streaming",
                group=group.spec.key,
                needed_bytes=group.staging_bytes,
                limit_bytes=self.staging_limit_bytes,
            ) from error

    def _wait_for_room(self, group: _Group) -> None:
        deadline = time.monotonic() + self._timeout_s
        self._waiting_producers += 1
        try:
            while group.buffer is None and self._used_bytes + group.staging_bytes > self.staging_limit_bytes:
                self._raise_if_failed()
                if self._freeable_bytes == 0 and self._waiting_producers >= self._producers:
                    raise self._stuck(group)
                if not self._changed.wait(deadline - time.monotonic()):
                    raise UpdateTimeoutError(
                        f"no room to stage module group {group.spec.key} for {self._timeout_s:g} s: "
                        f"{self._used_bytes} of {self.staging_limit_bytes} bytes are in use"
                    )
        finally:
            self._waiting_producers -= 1
        self._raise_if_failed()

    def _stuck(self, group: _Group) -> StagingLimitError:
        partial = [g for g in self._groups if g.buffer is not None and g.pending]
        needed = sum(g.staging_bytes for g in [*partial, group])
        names = ", ".join(g.spec.key for g in partial[:3])
        return StagingLimitError(
            f"module group {group.spec.key} needs {group.staging_bytes} bytes of staging, but "
            f"{len(partial)} groups that are not whole ({names}) fill staging_limit_bytes ({self.staging_limit_bytes}): "
            f"send each group's tensors together, or raise the limit to {needed} or more",
            group=group.spec.key,
            needed_bytes=needed,
            limit_bytes=self.staging_limit_bytes,
        )

    # ---- consumer -------------------------------------------------------------------------------------------

    def groups(self, *, private: Iterable[str] = ()) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Each group, once, as it becomes whole: (name, tensor) pairs, ties included.

        *private*: keys of groups of which what lies in a trainer's GPU memory is copied, for a loader that might write into
        what it is given. (In CPU memory such a write stays with this process.)

        A group's memory is given back when the next one is asked for. Ends after the last group and the last
        dropped tensor.

        Raises:
            IncompleteUpdateError: the producers are done and something is missing. And whatever failed the update.
        """
        private = set(private)
        while True:
            group = self._next_group()
            if group is None:
                self.wait_whole()
                return
            aliases = self.manifest.aliases
            if group.spec.key in private:
                self._make_private(group)
            yield [(name, group.tensors[aliases.get(name, name)]) for name in group.spec.names]
            self._give_back(group)

    def _make_private(self, group: _Group) -> None:
        own = group.buffer.untyped_storage().data_ptr() if group.buffer is not None else 0
        for name, tensor in group.tensors.items():
            if tensor.is_cuda and tensor.untyped_storage().data_ptr() != own:
                group.tensors[name] = tensor.clone()

    def _next_group(self) -> _Group | None:
        with self._changed:
            nbytes = -1
            while not self._ready:
                self._raise_if_failed()
                if self._handed_out == len(self._groups):
                    return None
                self._raise_if_missing()
                nbytes = self._wait_for_bytes(self._changed, nbytes)
            self._raise_if_failed()
            self._handed_out += 1
            group = self._ready.popleft()
            group.handed_out = True
            return group

    def _give_back(self, group: _Group) -> None:
        with self._changed:
            if group.buffer is not None:
                self._used_bytes -= group.staging_bytes
                self._freeable_bytes -= group.staging_bytes
            group.buffer = None
            group.tensors = {}
            loans, group.chunks = group.chunks, []
            for loan in loans:
                loan.drop()
            self._changed.notify_all()

    def take_all(self) -> tuple[list[WeightSet], dict[str, torch.Tensor]]:
        """Wait until every tensor has come; the sets, and by canonical name the tensors that came otherwise.

        All groups are handed out at once, so nothing may have to be staged. Where `defer_sets` is on, each set must then
        be passed to `check_set`.

        Raises:
            As `groups`.
        """
        with self._changed:
            nbytes = -1
            while len(self._ready) < len(self._groups) or len(self._arrived) < len(self.manifest.tensors):
                self._raise_if_failed()
                self._raise_if_missing()
                nbytes = self._wait_for_bytes(self._changed, nbytes)
            self._raise_if_failed()
            for group in self._ready:
                group.handed_out = True
            self._handed_out = len(self._groups)
            self._ready.clear()
            in_sets = {name for chunk in self._sets for name in chunk.layout.tensors}
            return list(self._sets), {
                name: tensor for group in self._groups for name, tensor in group.tensors.items() if name not in in_sets
            }

    def check_set(self, chunk: WeightSet, found: Digests) -> None:
        """The consumer has copied the set's tensors, and *found* these digests; waits for the sender's.

        Raises:
            DigestError: they differ; the tensor is named.
        """
        with self._changed:
            nbytes = -1
            while chunk.sender not in self._sent:
                self._raise_if_failed()
                if self._producers <= 0:
                    raise self.fail(DigestError(f"the tensors of sender {chunk.sender} came without digests"))
                nbytes = self._wait_for_bytes(self._changed, nbytes)
            try:
                self._sent[chunk.sender].compare(found)
            except DigestError as error:
                raise self.fail(error) from None
            if self._defer_sets:
                self._unverified -= 1
                self._note_set(chunk, found)
                self._notify()

    def content_digests(self) -> dict[int, int]:
        """Per sender, the digest of all that came from it; see `ContentDigest`."""
        with self._changed:
            return {sender: content.value for sender, content in self._content.items()}

    def is_whole(self, wait_s: float = 0.0) -> bool:
        """Whether everything arrived and was verified; waits at most *wait_s* for it.

        Raises:
            IncompleteUpdateError: the producers are done and something is missing. And whatever failed the update.
        """
        with self._changed:
            self._decided.wait_for(self._is_decided, wait_s)
            self._raise_if_failed()
            if self._all_here():
                return True
            self._raise_if_missing()
            return False

    def _all_here(self) -> bool:
        return len(self._whole) == len(self.manifest.tensors) and not self._unverified

    def _is_decided(self) -> bool:
        return self._error is not None or self._closed or self._producers <= 0 or self._all_here()

    def wait_whole(self) -> None:
        """Wait until everything arrived; raises as `is_whole`, and UpdateTimeoutError when nothing came for
        `timeout_s`."""
        with self._changed:
            nbytes = -1
            while not self.is_whole():
                nbytes = self._wait_for_bytes(self._decided, nbytes)

    def _wait_for_bytes(self, event: threading.Condition, before: int) -> int:
        """Wait for *event*; the bound starts anew whenever more has arrived than the *before* of the last call."""
        if self.nbytes != before:
            self._deadline = time.monotonic() + self._timeout_s
        now = self.nbytes
        if not event.wait(self._deadline - time.monotonic()) and self.nbytes == now:
            raise self._late()
        return now

    @property
    def num_handed_out(self) -> int:
        """How many groups the consumer has been given."""
        return self._handed_out

    def unread(self) -> list[str]:
        """Keys of the groups that `groups` has not handed out."""
        with self._changed:
            return [group.spec.key for group in self._groups if not group.handed_out]

    def missing(self) -> list[str]:
        """Canonical names that are not whole yet, in the manifest's order."""
        with self._changed:
            return [meta.name for meta in self.manifest.tensors if meta.name not in self._whole]

    def describe_wait(self) -> str:
        """For errors: what this rank waits for."""
        with self._changed:
            metas = self.manifest.tensors
            while self._seen_whole < len(metas) and metas[self._seen_whole].name in self._whole:
                self._seen_whole += 1
            if self._seen_whole == len(metas):
                return "waits for its links to end"
            name = metas[self._seen_whole].name
            group = self._group_of(name)
            where = f" of module group {group.spec.key}" if group is not None else ""
            return f"waits for {name}{where}, has {self.nbytes} of {self.manifest.nbytes} bytes"

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise WeightSyncError("the update was aborted")

    def _raise_if_missing(self) -> None:
        if self._producers <= 0 and (missing := self.missing()):
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            self._error = IncompleteUpdateError(f"missing: {shown}", missing=missing)
            raise self._error

    def _late(self) -> UpdateTimeoutError:
        missing = self.missing()
        return UpdateTimeoutError(
            f"nothing arrived for {self._timeout_s:g} s; {len(missing)} tensors are missing, the first is {missing[0]}"
            if missing
            else f"no module group became whole for {self._timeout_s:g} s"
        )

    def close(self) -> None:
        """Give all memory and chunks back; producers that still come are refused. Idempotent."""
        with self._changed:
            self._closed = True
            for group in self._groups:
                group.buffer, group.tensors = None, {}
                loans, group.chunks = group.chunks, []
                for loan in loans:
                    loan.drop()
            self._ready.clear()
            self._sets.clear()
            self._sent.clear()
            self._lent.clear()
            self._used_bytes = self._freeable_bytes = 0
            self._notify()
