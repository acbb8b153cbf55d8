"""GPU memory that other processes of the host can map: whole allocations, named by CUDA IPC handles.

Memory goes when the last tensor that views it goes: a thread that comes back late finds it still there.
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


def process_token() -> str:
    """Names this process; equal for two ends of a link exactly when they share their addresses."""
    return f"{os.getpid()}/{own_start_ticks()}"


class GpuMemory:
    """What a transport does with the memory of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def uuid(self) -> str:
        """Of the GPU; the same in every process, whatever CUDA_VISIBLE_DEVICES says."""
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def check(self) -> None:
        """Raises TransportError where the weights lie in CPU memory."""
        if self.device.type != "cuda":
            raise TransportError(
                "cuda_ipc is for weights that lie on a GPU; these lie in CPU memory: use shared_memory"
            )

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Make this thread able to ask the driver about the memory, which a thread that has not used it yet is not."""
        with torch.cuda.device(self.device):
            import_cupy().cuda.runtime.setDevice(self.device.index or 0)
            yield

    def synchronize(self) -> None:
        """Wait for all that this process has given the GPU to do, on whichever stream."""
        torch.cuda.synchronize(self.device)

    # ---- allocations ------------------------------------------------------------------------------------------

    def number_of(self, address: int) -> int:
        """The number of the allocation in which *address* lies; 0 where it lies in none."""
        number = ctypes.c_ulonglong()
        failed = _driver().cuPointerGetAttribute(ctypes.byref(number), _BUFFER_ID, ctypes.c_uint64(address))
        return 0 if failed else number.value

    def are_unchanged(self, numbers: Mapping[int, int]) -> bool:
        """Whether each address still lies in the allocation of that number."""
        number, ask = ctypes.c_ulonglong(), _driver().cuPointerGetAttribute
        found, kind = ctypes.byref(number), ctypes.c_int(_BUFFER_ID)
        return all(
            ask(found, kind, ctypes.c_uint64(address)) == 0 and number.value == known
            for address, known in numbers.items()
        )

    def allocation_of(self, address: int) -> Allocation | None:
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        failed = _driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        number = self.number_of(address)
        return None if failed or not number else Allocation(base.value, size.value, number)

    def pool(self, nbytes: int) -> torch.Tensor:
        """Memory past torch's caching allocator, so that it can be exported whatever that is set to; 1-D uint8.

        Raises:
            TransportError: the GPU has too little memory left.
        """
        runtime = import_cupy().cuda.runtime
        with torch.cuda.device(self.device):
            try:
                address = runtime.malloc(nbytes)
            except runtime.CUDARuntimeError as error:
                free, total = torch.cuda.mem_get_info(self.device)
                raise TransportError(
                    f"{self.device} has no {nbytes} bytes left for a transfer buffer ({free} of {total} bytes are free, torch "
                    "may hold more in its cache): lower staging_limit_bytes or gpu_bucket_bytes"
                ) from error
        return self._tensor_at(address, nbytes, runtime.free)

    # ---- across processes -------------------------------------------------------------------------------------

    def export(self, allocation: Allocation) -> bytes | None:
        """A handle by which other processes open the allocation; None where CUDA gives none (virtual memory: torch's
        expandable segments, vLLM's sleep mode)."""
        runtime = import_cupy().cuda.runtime
        try:
            return bytes(runtime.ipcGetMemHandle(allocation.base))
        except runtime.CUDARuntimeError:
            return None

    def open(self, handle: bytes, allocation: Allocation, *, owner: str) -> torch.Tensor:
        """An allocation of the process *owner*, mapped here, 1-D uint8; opened once, and closed with the last view of it.

        In *owner* itself it is used as it is: a process cannot open its own handle.

        Raises:
            TransportError: the memory cannot be reached from this GPU, or is gone.
        """
        if owner == process_token():
            if self.number_of(allocation.base) != allocation.number:
                raise TransportError("the GPU memory that was to be shared is gone: its owner has closed the link")
            found = self._tensor_at(allocation.base, allocation.nbytes, None)
            if found.device.index != (self.device.index or 0):
                raise TransportError(
                    f"within one process cuda_ipc needs one GPU; these are {found.device} and {self.device}"
                )
            return found
        runtime = import_cupy().cuda.runtime
        with torch.cuda.device(self.device):
            try:
                address = runtime.ipcOpenMemHandle(handle)
            except runtime.CUDARuntimeError as error:
                raise TransportError(
                    f"{self.device} cannot open the trainer's GPU memory ({error}): both processes must use one GPU, or two "
                    "that reach each other and are both in CUDA_VISIBLE_DEVICES, under one user, in one container"
                ) from error

        def unmap(address: int) -> None:
            with self.bound():
                runtime.ipcCloseMemHandle(address)

        return self._tensor_at(address, allocation.nbytes, unmap)

    def _tensor_at(self, address: int, nbytes: int, give_back: Callable[[int], None] | None) -> torch.Tensor:
        with torch.cuda.device(self.device):
            return torch.as_tensor(_Array(address, nbytes, give_back))


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
