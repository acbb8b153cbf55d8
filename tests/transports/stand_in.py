"""Memory of the CPU that is named, exported and mapped as a GPU's is: everything of cuda_ipc above the handle, without a GPU."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar

import torch

from weightsync.cuda.memory import Allocation, GpuMemory, process_token
from weightsync.errors import TransportError
from weightsync.testing.link import Tensors
from weightsync.transports.cuda_ipc import CudaIpcReceiver, CudaIpcSender

NAME = "cuda_ipc_stand_in"


class StandIn(GpuMemory):
    """Allocations are memory files; a handle is the path under which other processes find one."""

    known: ClassVar[dict[int, tuple[int, int, int]]] = {}
    """Base -> (bytes, number, file descriptor)."""
    numbers = itertools.count(1)
    opened: ClassVar[list[int]] = []
    """Bytes of each mapping of another's allocation."""

    @property
    def uuid(self) -> str:
        return "GPU-stand-in"

    def check(self) -> None: ...

    @contextmanager
    def bound(self) -> Iterator[None]:
        yield

    def synchronize(self) -> None: ...

    def number_of(self, address: int) -> int:
        allocation = self.allocation_of(address)
        return allocation.number if allocation is not None else 0

    def are_unchanged(self, numbers: Mapping[int, int]) -> bool:
        return all(self.number_of(address) == number for address, number in numbers.items())

    def allocation_of(self, address: int) -> Allocation | None:
        for base, (nbytes, number, _) in self.known.items():
            if base <= address < base + nbytes:
                return Allocation(base, nbytes, number)
        return None

    def pool(self, nbytes: int) -> torch.Tensor:
        fd = os.memfd_create("stand-in")
        os.ftruncate(fd, nbytes)
        payload = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
        base = payload.data_ptr()
        self.known[base] = (nbytes, next(self.numbers), fd)
        weakref.finalize(payload.untyped_storage(), self._free, base)
        return payload

    @classmethod
    def _free(cls, base: int) -> None:
        os.close(cls.known.pop(base)[2])

    def export(self, allocation: Allocation) -> bytes | None:
        return f"/proc/{os.getpid()}/fd/{self.known[allocation.base][2]}".encode()

    def open(self, handle: bytes, allocation: Allocation, *, owner: str) -> torch.Tensor:
        if owner == process_token():
            if self.number_of(allocation.base) != allocation.number:
                raise TransportError("the GPU memory that was to be shared is gone: its owner has closed the link")
            array = (ctypes.c_uint8 * allocation.nbytes).from_address(allocation.base)
            return torch.frombuffer(array, dtype=torch.uint8)
        try:
            with open(handle.decode(), "rb") as file:
                mapped = mmap.mmap(file.fileno(), allocation.nbytes, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise TransportError(f"cannot open the trainer's GPU memory ({error})") from error
        self.opened.append(allocation.nbytes)
        return torch.frombuffer(mapped, dtype=torch.uint8)


class StandInSender(CudaIpcSender):
    name = NAME
    memory_kind = StandIn


class StandInReceiver(CudaIpcReceiver):
    name = NAME
    memory_kind = StandIn


def exportable(tensors: Tensors) -> Tensors:
    """The same values in one allocation that others can map; what is strided stays where it was."""
    memory = StandIn(torch.device("cpu")).pool(sum(-(-tensor.nbytes // 64) * 64 for tensor in tensors.values()) + 64)
    found, offset = {}, 0
    for name, tensor in tensors.items():
        if not tensor.is_contiguous() or not tensor.numel():
            found[name] = tensor.clone()
            continue
        place = memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        found[name] = place.copy_(tensor)
        offset += -(-tensor.nbytes // 64) * 64
    return found
