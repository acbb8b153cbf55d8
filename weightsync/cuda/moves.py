"""Copies and digests of tensors, compiled once into a table and run in one launch (`moves.cu`).

On a CPU device the same class does the same with torch and numpy: what is built on it can be tested there.
"""

from __future__ import annotations

import atexit
import math
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weightsync.digest import digest_words
from weightsync.errors import TransportError

Move = tuple[torch.Tensor, torch.Tensor | None]
"""(source, destination of the same shape and dtype, or None to digest only). The digest is of the source's row-major bytes."""

TILE_BYTES = 4096 * 8
_THREADS = 256
_MAX_DIMS = 4
_ROW_FIELDS = 6 + 3 * _MAX_DIMS


class Moves:
    """Moves between tensors that stay where they are. Not thread-safe; one run at a time.

    The tensors' memory must stay valid as long as the object is used; it keeps no reference to them on a GPU, so that it
    does not keep a trainer's weights alive.
    """

    def __init__(
        self,
        moves: Sequence[Move],
        device: torch.device,
        *,
        digested: int | None = None,
        digests: torch.Tensor | None = None,
        beside: bool = False,
    ) -> None:
        """Args:
        device: on which the kernel runs. It must reach all the memory.
        digested: only the first so many moves are digested; None: all.
        digests: int64 on the device, one a digested move: left there, too, for others to read.
        beside: leave half of the GPU to what runs beside it.
        """
        self.count = len(moves) if digested is None else digested
        self.nbytes = sum(source.nbytes for source, _ in moves)
        self._device, self._beside = device, beside
        self._moves: Sequence[Move] = ()
        self._done: Any = None
        self._found_on_cpu: np.ndarray[Any, np.dtype[np.uint64]] = np.zeros(0, dtype=np.uint64)
        self._out = digests
        if device.type == "cpu":
            self._moves = moves
            return
        rows, self._late = _rows(moves, self.count)
        tiles = -(-rows[:, 2] // TILE_BYTES)
        rows[:, 4] = np.cumsum(tiles) - tiles
        self._num_tiles = self._num_blocks = int(tiles.sum())
        if beside:
            # Blocks on every multiprocessor slow the kernels that they share it with, for as long as they run.
            half = torch.cuda.get_device_properties(device).multi_processor_count // 2
            self._num_blocks = min(self._num_tiles, max(half, 1))
        with torch.cuda.device(device):
            self._rows = torch.from_numpy(rows).to(device)
            self._tile_rows = torch.from_numpy(np.repeat(np.arange(len(rows), dtype=np.int32), tiles)).to(device)
            if digests is None:
                self._out = torch.zeros(max(self.count, 1), dtype=torch.int64, device=device)
                self._out.record_stream(stream_of(device))
            assert self._out is not None
            self._found = torch.zeros(max(self.count, 1), dtype=torch.int64, pin_memory=True)
            self._done = torch.cuda.Event()
            for table in (self._rows, self._tile_rows):
                # Dropped while the kernel runs, they are not handed out before it ends.
                table.record_stream(stream_of(device))
            rows_at, tiles_at, out_at = (np.uint64(t.data_ptr()) for t in (self._rows, self._tile_rows, self._out))
            self._arguments = (rows_at, tiles_at, np.int64(self._num_tiles), out_at)

    def start(self, *, digest: bool) -> None:
        """Launch on this package's stream of the device and return; what the current stream was given before comes first."""
        self._digest = digest
        if self._device.type == "cpu":
            self._found_on_cpu = self._run_on_cpu()
            return
        stream = stream_of(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(stream), torch.no_grad():
            for source, destination in self._late:  # too many strides for a row; copied by torch, digested from there
                destination.copy_(source)
            assert self._out is not None
            if digest:
                self._out.zero_()
            if self._num_tiles:
                name = "move_and_digest" if digest else "move_only"
                kernel = _kernels(self._device.index or 0)[name + ("_beside" if self._beside else "")]
                kernel((self._num_blocks,), (_THREADS,), self._arguments, stream=_cupy_stream(stream))
            if digest:
                self._found[: self._out.numel()].copy_(self._out, non_blocking=True)
            self._done.record(stream)

    def result(self) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Wait for the last `start`; one digest a move, zeros where it was not to digest."""
        if self._device.type == "cpu":
            return self._found_on_cpu
        self._done.synchronize()
        if not self._digest:
            return np.zeros(self.count, dtype=np.uint64)
        return self._found.numpy()[: self.count].view(np.uint64).copy()

    def run(self, *, digest: bool) -> np.ndarray[Any, np.dtype[np.uint64]]:
        self.start(digest=digest)
        return self.result()

    def _run_on_cpu(self) -> np.ndarray[Any, np.dtype[np.uint64]]:
        found = np.zeros(self.count, dtype=np.uint64)
        with torch.no_grad():
            for i, (source, destination) in enumerate(self._moves):
                if destination is not None:
                    destination.copy_(source)
                if self._digest and i < self.count:
                    found[i] = digest_words(_flat_bytes(source))
        if self._digest and self._out is not None:
            self._out.copy_(torch.from_numpy(found.view(np.int64)))
        return found


def run_flat(moves: Sequence[Move], device: torch.device, *, digest: bool) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """`Moves.run` of moves between contiguous bytes.

    What was compiled for them is kept for some transfers: buckets and stages are filled alike at every update, and compiling
    takes longer than copying half a gigabyte.
    """
    if device.type == "cpu":
        return Moves(moves, device).run(digest=digest)
    key = (device, *((s.data_ptr(), d.data_ptr() if d is not None else 0, s.numel()) for s, d in moves))
    with _kept_lock:
        known = _kept.pop(key, None)  # so that nobody else runs it meanwhile
    compiled = known[0] if known is not None else Moves(moves, device)
    found = compiled.run(digest=digest)
    with _kept_lock:
        _kept[key] = (compiled, _transfers)
    return found


def note_transfer() -> None:
    """A transfer begins in this process: what the last ones did not run is not kept any longer."""
    global _transfers
    with _kept_lock:
        _transfers += 1
        for key in [key for key, (_, used) in _kept.items() if used < _transfers - _KEPT_FOR]:
            del _kept[key]


_KEPT_FOR = 8
_transfers = 0
_kept: dict[tuple[object, ...], tuple[Moves, int]] = {}
"""By device and places; with the transfer in which it was run last."""
_kept_lock = threading.Lock()


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def _rows(
    moves: Sequence[Move], digested: int
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], list[tuple[torch.Tensor, torch.Tensor]]]:
    """(the kernel's table, copies that torch has to do before). First tiles are left to be filled in."""
    rows, late = [], []
    for slot, (source, destination) in enumerate(moves):
        if source.numel() == 0:
            continue
        row = _row(source, destination, slot if slot < digested else -1)
        if row is None:
            whole = torch.empty(source.shape, dtype=source.dtype, device=source.device)
            late += [(source, whole)] if destination is None else [(source, whole), (whole, destination)]
            row = _row(whole, None, slot if slot < digested else -1)
            assert row is not None
        rows.append(row)
    return np.array(rows, dtype=np.int64).reshape(-1, _ROW_FIELDS), late


def _row(source: torch.Tensor, destination: torch.Tensor | None, slot: int) -> list[int] | None:
    """One row of the table; None where the strides are too many."""
    size = source.element_size()
    to = source if destination is None else destination
    dims = collapse(
        tuple(source.shape), tuple(s * size for s in source.stride()), tuple(s * size for s in to.stride()), size
    )
    start, end = source.data_ptr(), 0 if destination is None else destination.data_ptr()
    *outer, (run, _, _) = dims
    if len(dims) > _MAX_DIMS:
        return None
    nbytes = source.numel() * size
    if not outer and start % 16 == 0 and end % 16 == 0:
        unit = 16
    else:
        unit = math.gcd(8, run, start, end, *(s for _, s, _ in outer), *(d for _, _, d in outer))
    dims = [*outer, (run // unit, unit, unit)]
    dims = [(1, 0, 0)] * (_MAX_DIMS - len(dims)) + dims
    sizes, strides, to_strides = zip(*dims, strict=True)
    row = [start, end, nbytes, slot, 0, unit, *sizes, *strides, *to_strides]
    return [value - (1 << 64) if value >= 1 << 63 else value for value in row]


def collapse(
    shape: Sequence[int], source: Sequence[int], destination: Sequence[int], item: int
) -> list[tuple[int, int, int]]:
    """(size, source stride, destination stride) of as few dimensions as describe both; strides in bytes.

    The last is the run of bytes that lie together on both sides, with strides of 1.
    """
    dims = [dim for dim in zip(shape, source, destination, strict=True) if dim[0] != 1]
    merged: list[tuple[int, int, int]] = [(item, 1, 1)]
    for size, from_stride, to_stride in reversed(dims):
        inner, inner_from, inner_to = merged[-1]
        if from_stride == inner * inner_from and to_stride == inner * inner_to:
            merged[-1] = (size * inner, inner_from, inner_to)
        else:
            merged.append((size, from_stride, to_stride))
    return merged[::-1]


@cache
def stream_of(device: torch.device) -> torch.cuda.Stream:
    """The one stream on which this package works on a device; a new one each time would strand cached memory."""
    return torch.cuda.Stream(device)


@cache
def _cupy_stream(stream: torch.cuda.Stream) -> Any:
    cuda = import_cupy().cuda
    if hasattr(cuda.Stream, "from_external"):  # cupy 14
        return cuda.Stream.from_external(_External(stream.cuda_stream))
    return cuda.ExternalStream(stream.cuda_stream, stream.device_index)


class _External:
    """A stream as cupy takes it from others."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


@cache
def _kernels(index: int) -> dict[str, Any]:
    """The compiled kernels. Compiling takes a second, once per machine: cupy keeps the result on disk."""
    cupy = import_cupy()
    with cupy.cuda.Device(index):
        module = cupy.RawModule(code=Path(__file__).with_name("moves.cu").read_text(), options=("-std=c++17",))
        atexit.register(_kernels.cache_clear)  # before cupy's own modules are gone
        names = ("move_and_digest", "move_only", "move_and_digest_beside", "move_only_beside")
        return {name: module.get_function(name) for name in names}


def import_cupy() -> Any:
    """Raises TransportError, with the cure, where cupy is not installed."""
    try:
        import cupy
    except ImportError as error:
        cuda = (torch.version.cuda or "12").partition(".")[0]
        raise TransportError(
            f'copies between GPU processes need cupy ({error}): pip install "weightsync[cuda{cuda}]", or choose '
            "transport: shared_memory"
        ) from error
    return cupy
