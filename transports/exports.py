"""Which of a trainer's tensors other processes can read where they lie, and where that is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import torch

from weightsync.cuda.memory import Allocation, GpuMemory
from weightsync.cuda.moves import Moves
from weightsync.errors import TransportError
from weightsync.manifest import TensorMeta
from weightsync.transports.handles import Forget
from weightsync.weightset import layout_digest

_SAMPLE_BYTES = 4096

Item = tuple[TensorMeta, torch.Tensor]
Items = Iterable[Item]


class Segment(msgspec.Struct, tag=True, frozen=True):
    """Sender to receiver: map this."""

    id: int
    handle: bytes
    allocation: tuple[int, int, int]
    """Base, bytes and number in the sender's process."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a whole tensor lies."""

    name: str
    segment: int
    offset: int


class Layout(msgspec.Struct, tag=True, frozen=True):
    """Sender to receiver: the set from now on. `samples` are digests of the beginning of each tensor."""

    places: tuple[Place, ...]
    samples: bytes


@dataclass(slots=True)
class Exported:
    """A layout as the sender keeps it: addresses, since references would keep old weights alive."""

    addresses: dict[str, int]
    allocations: dict[int, int]
    """Address -> number of the allocation in which it lies, one for each allocation."""
    nbytes: int
    digest: bytes
    reads: Moves

    def holds(self, items: Items) -> bool:
        """Whether it is the layout of these tensors."""
        return self.addresses == addresses_of(items)


def _lies_as_it_travels(meta: TensorMeta, tensor: torch.Tensor) -> bool:
    plain = not tensor.is_conj() and not tensor.is_neg()
    return plain and tensor.dtype == meta.torch_dtype and tensor.is_contiguous()


class Exports:
    """One sender's. What receivers have to know goes through *tell*, once: an allocation, a layout, the end of one."""

    def __init__(self, memory: GpuMemory, tell: Callable[[msgspec.Struct], None]) -> None:
        self.layout: Exported | None = None
        """What was last told, where it still holds."""
        self._memory, self._device, self._tell = memory, memory.device, tell
        self._next_id = 0
        self._segments: dict[int, int] = {}
        """Allocation number -> segment, of the layout."""
        self._can_export: dict[int, bool] = {}
        """Allocation number -> whether CUDA gives a handle for it."""

    def sort(self, tensors: Items) -> tuple[list[Item], list[Item]]:
        """(what receivers can read where it lies, the rest)."""
        if self.layout is not None and not self._memory.are_unchanged(self.layout.allocations):
            self.layout = None  # receivers have mapped other memory than is there now
        known = self.layout.addresses if self.layout is not None else {}
        found: list[Item] = []
        rest: list[Item] = []
        for item in tensors:
            meta, tensor = item
            same = known.get(meta.name) == tensor.data_ptr() and _lies_as_it_travels(meta, tensor)
            (found if same or self.possible(meta, tensor) else rest).append(item)
        return found, rest

    def possible(self, meta: TensorMeta, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies as it must travel, in memory that can be exported."""
        if tensor.device != self._device or tensor.numel() == 0 or not _lies_as_it_travels(meta, tensor):
            return False
        number = self._memory.number_of(tensor.data_ptr())
        if number and number not in self._can_export:
            allocation = self._memory.allocation_of(tensor.data_ptr())
            self._can_export[number] = allocation is not None and self._memory.export(allocation) is not None
        return self._can_export.get(number, False)

    def layout_of(self, found: Sequence[Item]) -> Exported:
        """The layout of these tensors, all of them `possible`; receivers are told where it is a new one."""
        if self.layout is not None and self.layout.holds(found):
            return self.layout
        addresses = addresses_of(found)
        places, allocations, segments = [], {}, {}
        for name, address in addresses.items():
            allocation = self._memory.allocation_of(address)
            assert allocation is not None, name
            number = allocation.number
            if number not in segments:
                allocations[address] = number
                segments[number] = self._segments[number] if number in self._segments else self.share(allocation)
            places.append(Place(name, segments[number], address - allocation.base))
        for number, segment in self._segments.items():
            if number not in segments:
                self._can_export.pop(number, None)
                self._tell(Forget(segment))
        self._segments = segments
        tensors = [tensor.detach() for _, tensor in found]
        self._tell(Layout(tuple(places), samples(tensors, self._device)))
        self.layout = Exported(
            addresses,
            allocations,
            sum(meta.nbytes for meta, _ in found),
            layout_digest({meta.name: meta.nbytes for meta, _ in found}),
            Moves([(tensor, None) for tensor in tensors], self._device),
        )
        return self.layout

    def forget(self) -> None:
        """Nothing is read in place any more: receivers need not keep it mapped."""
        self.layout = None
        for number, segment in self._segments.items():
            self._can_export.pop(number, None)
            self._tell(Forget(segment))
        self._segments = {}

    def handle_of(self, allocation: Allocation) -> bytes:
        """Raises TransportError where CUDA gives none."""
        handle = self._memory.export(allocation)
        if handle is None:
            raise TransportError(f"CUDA cannot share memory of {self._device} with other processes on this machine")
        return handle

    def share(self, allocation: Allocation) -> int:
        """A new segment for the allocation.

        Raises:
            TransportError: CUDA gives no handle for it.
        """
        handle = self.handle_of(allocation)
        segment = self._next_id
        self._next_id += 1
        self._tell(Segment(segment, handle, allocation.wire))
        return segment


def samples(tensors: Iterable[torch.Tensor], device: torch.device) -> bytes:
    """Digests of the beginning of contiguous tensors: whoever reads the same memory finds the same."""
    parts = [tensor.reshape(-1)[: max(_SAMPLE_BYTES // tensor.element_size(), 1)] for tensor in tensors]
    return Moves([(part, None) for part in parts], device).run(digest=True).astype("<u8").tobytes()


def addresses_of(items: Items) -> dict[str, int]:
    return {meta.name: tensor.data_ptr() for meta, tensor in items}
