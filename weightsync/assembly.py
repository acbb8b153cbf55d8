"""Module groups in the making: where their tensors lie, within a byte budget, until a consumer has taken them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from weightsync.arrival import Arrival
from weightsync.chunk import Piece, WeightChunk, from_bytes
from weightsync.digest import copy_bytes
from weightsync.errors import StagingLimitError, UpdateTimeoutError
from weightsync.grouptable import GroupTable
from weightsync.hostmemory import host_buffer
from weightsync.loadmap import ModuleGroup
from weightsync.manifest import Manifest, TensorMeta


@dataclass(slots=True)
class OpenGroup:
    spec: ModuleGroup
    pending: int
    """Canonical tensors that are not whole yet."""
    staging_bytes: int = 0
    handed_out: bool = False
    buffer: torch.Tensor | None = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """That are whole, but for those that were written where the engine keeps them."""
    chunks: list[Loan] = field(default_factory=list)


@dataclass(slots=True)
class Lent:
    """A tensor that lies in one run of stable memory: its bytes are `payload[base : base + nbytes]`."""

    payload: torch.Tensor
    base: int
    address: int
    runs: list[tuple[int, int]] = field(default_factory=list)
    """Which of its bytes have come there."""


class Loan:
    """A stable chunk in use by several groups; released with the last."""

    def __init__(self, chunk: WeightChunk) -> None:
        self.chunk, self.users = chunk, 1

    def drop(self) -> None:
        self.users -= 1
        if self.users == 0:
            self.chunk.release()


class GroupAssembly(Arrival):
    """One rank's, of one version."""

    def __init__(
        self,
        manifest: Manifest,
        groups: Sequence[ModuleGroup] | GroupTable,
        *,
        version: int,
        staging_limit_bytes: int,
        timeout_s: float,
        num_producers: int,
    ) -> None:
        super().__init__(manifest, version=version, timeout_s=timeout_s, num_producers=num_producers)
        self.staging_limit_bytes = staging_limit_bytes
        self.peak_staging_bytes = 0
        self._lent: dict[str, Lent] = {}
        self._landing: Mapping[str, torch.Tensor] = {}
        self._landed: dict[str, torch.Tensor] = {}
        """What is whole and was written where the engine keeps it: there."""
        self._is_written = False
        """Something was written where the engine keeps it."""
        self._waiting_producers = 0
        self._used_bytes = 0
        self._freeable_bytes = 0
        self._ready: deque[OpenGroup] = deque()
        self._handed_out = 0
        self._table = groups if isinstance(groups, GroupTable) else GroupTable.of(manifest, groups)
        self._groups = list(map(OpenGroup, self._table.groups, self._table.counts, self._table.staging_bytes))
        self._ready.extend(group for group in self._groups if group.pending == 0)

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    @property
    def keys(self) -> list[str]:
        """Of all groups that come."""
        return [group.key for group in self._table.groups]

    @property
    def num_whole_groups(self) -> int:
        return sum(group.pending == 0 for group in self._groups)

    def _group_of(self, name: str) -> OpenGroup | None:
        """None for a name that feeds nothing here."""
        number = self._table.index.get(name)
        return None if number is None else self._groups[number]

    def _finish(self, meta: TensorMeta, group: OpenGroup | None) -> None:
        """A tensor is whole; and its group, perhaps. With the lock held."""
        self._whole.add(meta.name)
        if self._all_here():
            self._notify()
        if group is None:
            return
        if self.lands(meta.name):
            self._landed[meta.name] = self._landing[meta.name]
        else:
            group.tensors[meta.name] = from_bytes(self._place_of(meta, group), meta.torch_dtype, meta.shape)
        self._finish_one_of(group)

    def _finish_one_of(self, group: OpenGroup) -> None:
        """Another of its tensors is whole: here, or where it was written. With the lock held."""
        group.pending -= 1
        if group.pending > 0:
            return
        self._freeable_bytes += group.staging_bytes if group.buffer is not None else 0
        if not group.tensors:  # all were written where the engine keeps them
            group.handed_out = True
            self._handed_out += 1
            if group.buffer is not None or self._handed_out == len(self._groups):  # else nobody waits for it
                self._give_back(group)
            return
        if self._landed:
            self._add_landed(group)
        self._ready.append(group)
        self._changed.notify_all()

    def _add_landed(self, group: OpenGroup) -> None:
        """The consumer takes all tensors of a group of which one was not written in place."""
        aliases = self.manifest.aliases
        for meta in (self.manifest.by_name[aliases.get(name, name)] for name in group.spec.names):
            if meta.name in self._landed:
                group.tensors[meta.name] = from_bytes(self._landed[meta.name], meta.torch_dtype, meta.shape)

    def _place_of(self, meta: TensorMeta, group: OpenGroup) -> torch.Tensor:
        """Where the bytes of a tensor are that is whole, and was not written in place."""
        lent = self._lent.pop(meta.name, None)
        if lent is not None:
            return lent.payload[lent.base : lent.base + meta.nbytes]
        return self._staging(group, meta.name, torch.device("cpu"))

    def land(self, places: Mapping[str, torch.Tensor]) -> None:
        """The consumer has begun: from now on these tensors are written there (1-D uint8), unverified until the version
        `is_whole`, but for those that come in sets, and of groups of which something has come before. A group of which all
        are is not handed out.
        """
        with self._changed:
            self._raise_if_failed()
            self._landing = places
            if come := {self._table.index.get(name) for name in self._arrived}:
                self._landing = {
                    name: place for name, place in places.items() if self._table.index.get(name) not in come
                }

    def stop_landing(self) -> None:
        """The consumer has failed: what comes from now on is staged. What was written until then, `has_begun` knows."""
        with self._changed:
            self._landing = {}

    def lands(self, name: str) -> bool:
        """Whether pieces of the tensor are to be written where the engine keeps it."""
        return name in self._landing

    def has_landed(self, name: str) -> bool:
        """Whether all of the tensor was."""
        return name in self._landed

    def _lend(self, piece: Piece, meta: TensorMeta, chunk: WeightChunk, group: OpenGroup, loan: Loan) -> bool:
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
            known = self._lent[piece.name] = Lent(chunk.payload, base, address)
        elif known.address != address:
            return False
        known.runs.append((piece.start, piece.start + piece.nbytes))
        group.chunks.append(loan)
        loan.users += 1
        return True

    def _unlend(self, group: OpenGroup, name: str, device: torch.device) -> torch.Tensor:
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

    def _staging(self, group: OpenGroup, name: str, device: torch.device) -> torch.Tensor:
        """The tensor's place in the group's staging buffer, which is made on first use, when there is room."""
        with self._changed:
            if group.buffer is None:
                self._wait_for_room(group)
                self._reserve(group, device)
            assert group.buffer is not None
            start = self._table.offset[name]
            return group.buffer[start : start + self.manifest.by_name[name].nbytes]

    def _reserve(self, group: OpenGroup, device: torch.device) -> bool:
        """Make the group's staging buffer, if there is one already or room for it."""
        with self._changed:
            if group.buffer is None and self._used_bytes + group.staging_bytes <= self.staging_limit_bytes:
                self._used_bytes += group.staging_bytes
                self.peak_staging_bytes = max(self.peak_staging_bytes, self._used_bytes)
                group.buffer = self._new_buffer(group, device)
            return group.buffer is not None

    def _new_buffer(self, group: OpenGroup, device: torch.device) -> torch.Tensor:
        try:
            if device.type == "cpu":
                return host_buffer(group.staging_bytes)
            return torch.empty(group.staging_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise StagingLimitError(
                f"{device} has no memory left to stage module group {group.spec.key} ({group.staging_bytes} bytes, "
                f"{self._used_bytes} are in use): leave the engine less (gpu_memory_utilization), or set apply: streaming",
                group=group.spec.key,
                needed_bytes=group.staging_bytes,
                limit_bytes=self.staging_limit_bytes,
            ) from error

    def _wait_for_room(self, group: OpenGroup) -> None:
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
                        f"{self._used_bytes} of {self.staging_limit_bytes} bytes are in use (staging_limit_bytes)"
                    )
        finally:
            self._waiting_producers -= 1
        self._raise_if_failed()

    def _stuck(self, group: OpenGroup) -> StagingLimitError:
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

    def groups(self, *, private: Iterable[str] = ()) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Each group, once, as it becomes whole: (name, tensor) pairs, ties included.

        *private*: keys of groups of which what lies in a trainer's memory is copied, for a loader that might write into what
        it is given. In CPU memory such a write stays with this process, but hides what comes to the same page later; so there
        it is copied while something is still to come.

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
            if group.buffer is not None and group.buffer.is_cuda:
                # The consumer's stream may still read it; producers allocate on theirs.
                group.buffer.record_stream(torch.cuda.current_stream(group.buffer.device))
            self._give_back(group)

    def _make_private(self, group: OpenGroup) -> None:
        own = group.buffer.untyped_storage().data_ptr() if group.buffer is not None else 0
        with self._changed:
            all_here = self._all_here()
        for name, tensor in group.tensors.items():
            lent = tensor.untyped_storage().data_ptr() != own
            if lent and (tensor.is_cuda or not all_here):
                group.tensors[name] = tensor.clone()

    def _next_group(self) -> OpenGroup | None:
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

    def _give_back(self, group: OpenGroup) -> None:
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

    @property
    def num_handed_out(self) -> int:
        """How many groups the consumer has been given, or need not be, since they were written in place."""
        return self._handed_out

    @property
    def has_begun(self) -> bool:
        """Whether the engine may no longer be what it was."""
        return self._handed_out > 0 or self._is_written

    def unread(self) -> list[str]:
        """Keys of the groups that `groups` has not handed out."""
        with self._changed:
            return [group.spec.key for group in self._groups if not group.handed_out]

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
            self._lent.clear()
            self._landing, self._landed = {}, {}
            self._used_bytes = self._freeable_bytes = 0
            self._notify()
