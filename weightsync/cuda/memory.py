"""GPU memory that other processes of the host can map: whole allocations, named by CUDA IPC handles.

AllocationId     which allocation an address lies in; a number that is never used again tells it from a later one
Pool memory      allocated past torch's caching allocator, so that it can be exported whatever that is set to
Imported         another process's allocation, opened once and closed once
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from weightsync.cuda.moves import import_cupy
from weightsync.errors import TransportError
from weightsync.process import own_start_ticks

_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID


@dataclass(frozen=True, slots=True)
class Allocation:
    """One allocation of this process."""

    base: int
    nbytes: int
    number: int
    """Unique in this process over its whole life, unlike the address."""

    @property
    def wire(self) -> tuple[int, int, int]:
        return self.base, self.nbytes, self.number


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@contextmanager
def bound_to(device: torch.device) -> Iterator[None]:
    """Make this thread able to ask the driver about memory of *device*, which a thread that has not used it yet is not."""
    with torch.cuda.device(device):
        import_cupy().cuda.runtime.setDevice(device.index or 0)
        yield


def allocation_number(address: int) -> int:
    """The number of the allocation in which *address* lies; 0 where it lies in none."""
    number = ctypes.c_ulonglong()
    failed = _driver().cuPointerGetAttribute(ctypes.byref(number), _BUFFER_ID, ctypes.c_uint64(address))
    return 0 if failed else number.value


def are_unchanged(numbers: Mapping[int, int]) -> bool:
    """Whether each address still lies in the allocation of that number."""
    number, ask = ctypes.c_ulonglong(), _driver().cuPointerGetAttribute
    found, kind = ctypes.byref(number), ctypes.c_int(_BUFFER_ID)
    return all(
        ask(found, kind, ctypes.c_uint64(address)) == 0 and number.value == known for address, known in numbers.items()
    )


def allocation_of(address: int) -> Allocation | None:
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    failed = _driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    number = allocation_number(address)
    return None if failed or not number else Allocation(base.value, size.value, number)


def export(allocation: Allocation) -> bytes | None:
    """A handle by which other processes open the allocation; None where CUDA gives none (virtual memory: torch's
    expandable segments, vLLM's sleep mode)."""
    runtime = import_cupy().cuda.runtime
    try:
        return bytes(runtime.ipcGetMemHandle(allocation.base))
    except runtime.CUDARuntimeError:
        return None


def process_token() -> str:
    """Names this process; equal for two ends of a link exactly when they share their addresses."""
    return f"{os.getpid()}/{own_start_ticks()}"


def pool_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory past torch's allocator, 1-D uint8; given back with the last view of it.

    Raises:
        TransportError: the GPU has too little memory left.
    """
    runtime = import_cupy().cuda.runtime
    with torch.cuda.device(device):
        try:
            address = runtime.malloc(nbytes)
        except runtime.CUDARuntimeError as error:
            free, total = torch.cuda.mem_get_info(device)
            raise TransportError(
                f"{device} has no {nbytes} bytes left for a transfer buffer ({free} of {total} bytes are free, torch may hold "
                "more in its cache): lower staging_limit_bytes or gpu_bucket_bytes"
            ) from error
    return _tensor_at(address, nbytes, device, runtime.free)


def import_memory(handle: bytes, allocation: Allocation, device: torch.device, *, owner: str) -> torch.Tensor:
    """An allocation of the process *owner*, mapped here, 1-D uint8; unmapped with the last view of it.

    In *owner* itself it is used as it is: a process cannot open its own handle.

    Raises:
        TransportError: the memory cannot be reached from *device*, or is gone.
    """
    if owner == process_token():
        if allocation_number(allocation.base) != allocation.number:
            raise TransportError("the GPU memory that was to be shared is gone: its owner has closed the link")
        return _tensor_at(allocation.base, allocation.nbytes, device, None)
    runtime = import_cupy().cuda.runtime
    with torch.cuda.device(device):
        try:
            address = runtime.ipcOpenMemHandle(handle)
        except runtime.CUDARuntimeError as error:
            raise TransportError(
                f"{device} cannot open the trainer's GPU memory ({error}): both processes must use one GPU, or two that reach "
                "each other and are both in CUDA_VISIBLE_DEVICES, under one user, in one container"
            ) from error
    return _tensor_at(address, allocation.nbytes, device, runtime.ipcCloseMemHandle)


class _Array:
    """Memory as `torch.as_tensor` takes it, which keeps this object as long as any view."""

    def __init__(self, address: int, nbytes: int, give_back: Callable[[int], None] | None) -> None:
        self._address, self._give_back = address, give_back
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }

    def __del__(self) -> None:
        if self._give_back is not None and not sys.is_finalizing():
            self._give_back(self._address)


def _tensor_at(
    address: int, nbytes: int, device: torch.device, give_back: Callable[[int], None] | None
) -> torch.Tensor:
    with torch.cuda.device(device):
        return torch.as_tensor(_Array(address, nbytes, give_back))


def gpu_uuid(device: torch.device) -> str:
    """Of the GPU that *device* is in this process; the same in every process, whatever CUDA_VISIBLE_DEVICES says."""
    return str(torch.cuda.get_device_properties(device).uuid)
