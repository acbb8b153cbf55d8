"""Segments: anonymous shared memory (memfd) that one process makes and others map by its file descriptor."""

from __future__ import annotations

import fcntl
import mmap
import os
import warnings

import numpy as np
import torch

from weightsync.errors import TransportError
from weightsync.hostmemory import with_huge_pages


def make_segment(nbytes: int) -> tuple[int, torch.Tensor]:
    """(file descriptor, its bytes as 1-D uint8). The memory lives as long as anybody has it open or mapped."""
    fd = os.memfd_create("weightsync", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    # A segment that shrank would kill whoever reads it (SIGBUS).
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd, torch.frombuffer(with_huge_pages(mmap.mmap(fd, nbytes)), dtype=torch.uint8)


def open_segment(fd: int, nbytes: int) -> torch.Tensor:
    """The bytes of another process's segment, as 1-D uint8, to be read and written by both."""
    return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)


class MappedSegment:
    """A segment on the receiver's side: a private mapping, so that nothing here can change the trainer's weights."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self._fd = fd
        size = os.fstat(fd).st_size
        if not 0 < nbytes <= size:
            os.close(fd)
            raise TransportError(f"a segment of {nbytes} bytes was announced, the descriptor has {size}")
        self._nbytes = nbytes
        self._map()

    def _map(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.payload = torch.frombuffer(
                with_huge_pages(mmap.mmap(self._fd, self._nbytes, access=mmap.ACCESS_COPY)), dtype=torch.uint8
            )

    def refresh(self) -> None:
        """Map anew where a loader has written into the bytes: such pages are private by now, and stale."""
        if self._has_private_pages():
            self._map()

    def _has_private_pages(self) -> bool:
        """Whether the kernel has given this process pages of its own here (Documentation/admin-guide/mm/pagemap.rst)."""
        count = -(-self._nbytes // mmap.PAGESIZE)
        try:
            with open("/proc/self/pagemap", "rb", buffering=0) as file:
                file.seek(self.payload.data_ptr() // mmap.PAGESIZE * 8)
                entries = np.frombuffer(file.read(count * 8), dtype=np.uint64)
        except OSError:  # some sandboxes hide it
            return True
        in_memory, of_a_file = entries >> np.uint64(62) != 0, (entries >> np.uint64(61)) & np.uint64(1) != 0
        return bool((in_memory & ~of_a_file).any())

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
