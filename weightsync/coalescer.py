"""Assemble chunks of any order and size into whole module groups, within a byte budget.

    once per update   Coalescer: what has arrived, what is missing, the first failure
    per group         staging buffer, from its first piece until the consumer is done with it
    per chunk         on loan from a transport, from `put` until released

Bytes of a chunk that is not `stable` are copied into the group's staging buffer inside `put`, and the chunk is
released before `put` returns. A tensor that lies in one run of stable memory is used where it lies and costs no staging;
such a chunk is released when every group that it feeds was consumed, or when the coalescer is closed. What the consumer lets
be written in place (`land`) is copied there, in `put`, and neither staged nor handed out. Staging memory is
of the device on which a group's first bytes came; what came in GPU memory is copied and digested there, chunk by chunk.

Threads: any number of producers call `put`; one consumer iterates `groups` or waits with `wait_whole`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from weightsync.assembly import GroupAssembly, Loan
from weightsync.chunk import Piece, WeightChunk
from weightsync.cuda.moves import Move, note_transfer, run_flat
from weightsync.digest import ContentDigest, copy_and_digest, copy_bytes, digest_view
from weightsync.errors import DigestError, IncompleteUpdateError, ManifestError, WeightSyncError
from weightsync.grouptable import GroupTable
from weightsync.loadmap import ModuleGroup
from weightsync.manifest import Manifest, TensorMeta
from weightsync.weightset import Digests, SetDigests, WeightSet


class Coalescer(GroupAssembly):
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
        super().__init__(
            manifest,
            groups,
            version=version,
            staging_limit_bytes=staging_limit_bytes,
            timeout_s=timeout_s,
            num_producers=num_producers,
        )
        note_transfer()
        self._verify = verify
        self._defer_sets = defer_sets
        self._sets: list[WeightSet] = []
        self._sent: dict[int, SetDigests] = {}
        """By the set's sender: what it read."""

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
        loan = Loan(chunk)
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
            self._arrived.update(layout.arrived)
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
        if self._defer_sets and len(self._whole) == len(self.manifest.tensors) == len(chunk.layout.tensors):
            self._ready = deque(self._groups)  # to be taken all at once, from the set
            self._notify()
            return
        for name, tensor in chunk.layout.tensors.items():
            group = self._group_of(name)
            if group is not None:
                group.tensors[name] = tensor
                self._finish_one_of(group)
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

    def _take(self, piece: Piece, meta: TensorMeta, chunk: WeightChunk, view: memoryview | None, loan: Loan) -> None:
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

    def _take_all(self, chunk: WeightChunk, loan: Loan) -> None:
        """The pieces of a chunk in GPU memory: as many as there is room for are copied and digested in one launch."""
        for pieces in self._batches(chunk):
            device = chunk.payload.device
            moves: list[Move] = []
            staged: list[tuple[torch.Tensor, torch.Tensor]] = []
            for piece, meta in pieces:
                place = self._place(piece, meta, chunk, loan)
                source = chunk.payload[piece.offset : piece.offset + piece.nbytes]
                lands = place is not None and self.lands(piece.name) and place.device == device
                if place is not None and not lands:
                    staged.append((place, source))
                moves.append((source, place if lands else None))
            if staged:
                torch._foreach_copy_([place for place, _ in staged], [source for _, source in staged])
            if not self._verify:
                moves = [move for move in moves if move[1] is not None]
            # Buckets, and what is written in place, stay where they are, so this is compiled once. It comes after the copies.
            digests = run_flat(moves, device, digest=self._verify).tolist() if moves else []
            if staged and not moves:
                torch.cuda.current_stream(device).synchronize()
            for i, (piece, meta) in enumerate(pieces):
                self._verify_piece(piece, digests[i] if self._verify else None)
                self._account(piece, meta, chunk)

    def _batches(self, chunk: WeightChunk) -> Iterator[list[tuple[Piece, TensorMeta]]]:
        """The chunk's pieces: those of groups that have room, or need none, together; each other group alone, so that one
        that becomes whole can make room for the next."""
        metas = [self._check_piece(chunk, piece) for piece in chunk.pieces]
        batch: list[tuple[Piece, TensorMeta]] = []
        runs = itertools.groupby(
            zip(chunk.pieces, metas, strict=True), lambda item: self._table.index.get(item[0].name)
        )
        for number, run in runs:
            pieces = list(run)
            lent = chunk.stable and all(piece.nbytes == meta.nbytes for piece, meta in pieces)
            lent = lent or all(self.lands(piece.name) for piece, _ in pieces)
            if number is None or lent or self._reserve(self._groups[number], chunk.payload.device):
                batch += pieces
                continue
            if batch:
                yield batch
            yield pieces
            batch = []
        if batch:
            yield batch

    def _place(self, piece: Piece, meta: TensorMeta, chunk: WeightChunk, loan: Loan) -> torch.Tensor | None:
        """Where the piece is to be copied; None where it is used as it lies, or dropped."""
        group = self._group_of(piece.name)
        with self._changed:
            self._raise_if_failed()
            self._claim(piece)
            if group is not None and self.lands(piece.name):
                self._is_written = True
                return self._landing[piece.name][piece.start : piece.start + piece.nbytes]
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

    def _verify_piece(self, piece: Piece, digest: int | None) -> None:
        if digest is not None and digest != piece.digest:
            raise DigestError(
                f"{piece.name}: bytes {piece.start} to {piece.start + piece.nbytes} differ from what the sender read "
                f"(digest {digest:016x}, sent {piece.digest:016x})",
                name=piece.name,
            )

    def take_all(self) -> tuple[list[WeightSet], dict[str, torch.Tensor]]:
        """Wait until every tensor has come; the sets, and by canonical name the tensors that came otherwise.

        All groups are handed out at once, so nothing may have to be staged. Where `defer_sets` is on, each set must then
        be passed to `check_set`. Raises as `groups` does.
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
            if len(in_sets) == len(self.manifest.tensors):
                return list(self._sets), {}
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

    def close(self) -> None:
        """Give all memory and chunks back; producers that still come are refused. Idempotent."""
        with self._changed:
            super().close()
            self._sets.clear()
            self._sent.clear()
