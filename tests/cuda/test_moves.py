"""The kernel that copies and digests: its table and its arithmetic on any machine, compiled for a CPU; itself on a GPU."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import weightsync.cuda
from weightsync.cuda.moves import TILE_BYTES, Move, Moves, _rows, collapse
from weightsync.digest import digest_bytes, digest_words

Run = Callable[..., "np.ndarray[Any, Any]"]


def run_on_gpu(moves: list[Move], digest: bool, *, beside: bool) -> np.ndarray[Any, Any]:
    return Moves(moves, torch.device("cuda", torch.cuda.current_device()), beside=beside).run(digest=digest)


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Run:
    if shutil.which("g++") is None:
        pytest.skip("needs g++ to compile the kernel for the CPU")
    library = tmp_path_factory.mktemp("moves") / "moves.so"
    include = f"-I{Path(weightsync.cuda.__file__).parent}"
    source = Path(__file__).with_name("emulate.cpp")
    subprocess.run(
        ["g++", "-O2", "-std=c++17", "-shared", "-fPIC", "-w", include, "-o", str(library), str(source)], check=True
    )
    kernel = ctypes.CDLL(str(library)).run

    def run(moves: list[Move], digest: bool, *, beside: bool) -> np.ndarray[Any, Any]:
        rows, late = _rows(moves, len(moves))
        for source, destination in late:
            destination.copy_(source)
        tiles = -(-rows[:, 2] // TILE_BYTES)
        rows[:, 4] = np.cumsum(tiles) - tiles
        tile_rows = np.repeat(np.arange(len(rows), dtype=np.int32), tiles)
        out = np.zeros(len(moves), dtype=np.uint64)
        pointers = (ctypes.c_void_p(array.ctypes.data) for array in (rows, tile_rows))
        flags = int(digest), int(beside)
        kernel(*pointers, ctypes.c_longlong(int(tiles.sum())), ctypes.c_void_p(out.ctypes.data), *flags)
        return out

    return run


@pytest.fixture(params=[False, True], ids=["alone", "beside"])
def beside(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest, beside: bool) -> tuple[Run, str]:
    if request.param == "gpu":
        return partial(run_on_gpu, beside=beside), "cuda"
    return partial(request.getfixturevalue("emulated"), beside=beside), "cpu"


def bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bytes of any dtype, NaNs and all."""
    generator = torch.Generator().manual_seed(seed)
    count = int(np.prod(shape)) * dtype.itemsize
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    if dtype == torch.bool:
        data = data % 2
    return data.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def row_major(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def check(run: tuple[Run, str], moves: list[Move]) -> None:
    found = run[0](moves, True)
    for value, (source, destination) in zip(found, moves, strict=True):
        assert int(value) == digest_words(row_major(source)), (source.shape, source.stride())
        if destination is not None:
            assert torch.equal(row_major(destination), row_major(source))
    for _, destination in moves:
        if destination is not None:
            destination.zero_()
    run[0](moves, False)
    for source, destination in moves:
        assert destination is None or torch.equal(row_major(destination), row_major(source))


DTYPES = [torch.bfloat16, torch.float32, torch.int8, torch.bool, torch.float64, torch.complex128, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_length_is_copied_and_digested(run: tuple[Run, str], dtype: torch.dtype) -> None:
    lengths = [0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 1000, 32768 // dtype.itemsize * 4 + 1, TILE_BYTES]
    sources = [bits((n,), dtype, n).to(run[1]) for n in lengths]
    check(run, [(source, torch.empty_like(source)) for source in sources] + [(source, None) for source in sources])


@pytest.mark.parametrize("source_shift", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("destination_shift", [0, 1, 3, 8])
def test_any_alignment_is_exact(run: tuple[Run, str], source_shift: int, destination_shift: int) -> None:
    data = bits((3 * TILE_BYTES + 64,), torch.uint8).to(run[1])
    room = torch.zeros_like(data)
    moves: list[Move] = [
        (data[source_shift : source_shift + n], room[destination_shift : destination_shift + n])
        for n in (TILE_BYTES * 2 + 13,)
    ]
    check(run, moves)


def test_what_lies_beside_a_destination_is_left_alone(run: tuple[Run, str]) -> None:
    data = bits((1000,), torch.uint8).to(run[1])
    room = torch.full_like(data, 77)
    run[0]([(data[:333], room[100:433])], True)
    assert (room[:100] == 77).all()
    assert (room[433:] == 77).all()


def test_strided_tensors_are_read_and_written_in_row_major_order(run: tuple[Run, str]) -> None:
    base = bits((60, 40, 6), torch.bfloat16).to(run[1])
    room = torch.zeros(80, 80, 12, dtype=torch.bfloat16, device=run[1])
    check(
        run,
        [
            (base.transpose(0, 1), room[:40, :60, :6]),
            (base[::2, 3:17], room[40:70, :14, 6:]),
            (base.permute(2, 0, 1)[1:4], torch.zeros(3, 60, 40, dtype=torch.bfloat16, device=run[1])),
            (base[5].expand(3, 40, 6), None),
        ],
    )


def test_random_geometry_is_exact(run: tuple[Run, str]) -> None:
    rng = random.Random(7)
    moves: list[Move] = []
    for seed in range(60):
        shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 6)))
        dtype = rng.choice(DTYPES)
        source = scattered(shape, dtype, seed, rng, run[1])
        destination = scattered(shape, dtype, seed + 100, rng, run[1])
        moves.append((source, rng.choice([destination, torch.empty_like(source)])))
    check(run, moves)


def scattered(shape: tuple[int, ...], dtype: torch.dtype, seed: int, rng: random.Random, device: str) -> torch.Tensor:
    """A tensor of that shape whose elements lie in any order of dimensions and any steps."""
    order = rng.sample(range(len(shape)), len(shape))
    steps = [rng.choice([1, 1, 2]) for _ in shape]
    large = bits(tuple(shape[i] * step for i, step in zip(order, steps, strict=True)), dtype, seed).to(device)
    return large[tuple(slice(None, None, step) for step in steps)].permute([order.index(i) for i in range(len(shape))])


def test_a_digest_depends_on_place_and_value() -> None:
    data = bits((4096,), torch.uint8)
    seen = {digest_words(data)}
    for at in range(0, 4096, 37):
        changed = data.clone()
        changed[at] ^= 128
        seen.add(digest_words(changed))
    swapped = data.clone()
    swapped[:8], swapped[8:16] = data[8:16].clone(), data[:8].clone()
    seen.add(digest_words(swapped))
    negated = data.clone()
    negated[7::8] ^= 128  # the top bit of every word
    seen.add(digest_words(negated))
    assert len(seen) == 1 + len(range(0, 4096, 37)) + 2
    assert digest_words(data) != digest_bytes(data)


def test_blocks_of_the_cpu_digest_add_up() -> None:
    data = bits(((1 << 20) * 2 + 24,), torch.uint8)
    words = data.numpy().view("<u8").astype(object)
    mask, total = (1 << 64) - 1, 0
    for i, word in enumerate(words[:2000]):
        x = (word + (i + 1) * 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 32)) * 0xD6E8FEB86659FD93) & mask
        total += x ^ (x >> 29)
    assert digest_words(data[:16000]) == total & mask
    assert digest_words(data) != digest_words(data[: 1 << 20])


def test_dimensions_that_lie_together_are_merged() -> None:
    assert collapse((4, 6, 8), (96, 16, 2), (96, 16, 2), 2) == [(384, 1, 1)]
    assert collapse((4, 6, 8), (96, 16, 2), (192, 16, 2), 2) == [(4, 96, 192), (96, 1, 1)]
    assert collapse((1, 1), (5, 7), (9, 11), 4) == [(4, 1, 1)]
    assert collapse((3, 5), (2, 6), (10, 2), 2) == [(3, 2, 10), (5, 6, 2), (2, 1, 1)]


def test_on_a_cpu_the_same_is_done_without_the_kernel() -> None:
    source, destination = bits((33, 7), torch.bfloat16), torch.zeros(33, 7, dtype=torch.bfloat16)
    moves = Moves([(source, destination), (source, None)], torch.device("cpu"), digested=1)
    assert moves.run(digest=True).tolist() == [digest_words(row_major(source))]
    assert torch.equal(row_major(destination), row_major(source))
    assert moves.run(digest=False).tolist() == [0]
