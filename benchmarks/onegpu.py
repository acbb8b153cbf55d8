"""Weight syncs from a trainer's process to an engine's on one GPU, side by side: the floor, ours, and how others do it.

    python -m benchmarks.onegpu [--size 8b] [--rounds 10] [--only floor ours ...] [--out benchmarks/results/onegpu.json]
    python -m benchmarks.onegpu --engine-device cuda:1        # two GPUs of one host
    python -m benchmarks.onegpu --device cpu --size tiny      # the script itself, without a GPU

Each mode has two fresh processes, or Ray actors, with the same plain torch module; every value changes before each
round, and after each round the digests of all tensors are compared, after the first and the last also all bits. None of
this is timed. `seconds` of a mode:

    floor, packed, per-tensor    from the call in the trainer's process until the engine holds the new values
    memcpy                       one copy of everything, within the engine's process
    checkpoint-engine            register, gather_metas and update; 3 rounds
    path-...                     our transport and load without a coordinator, as the peers have none; the time after what an
                                 update does while it is prepared stands beside it
    ours-...                     phases transfer and apply of the report; the whole `update()` stands beside it
    nccl-...                     ours-..., over NCCL; not on one GPU
    ray-...                      `sync.update()` as the driver sees it, end to end, in twice the rounds; phases beside it

Memory is sampled in the first round, which is reported apart, and in one more that does not count, so that sampling
slows no round that does (checkpoint-engine's are long: in all of them). `first_s` of ours includes what it loads and opens.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import weightsync as ws
from benchmarks.common import write_record
from benchmarks.gpu_modes import EXIT_S, NAMES, Asked, Result, label, run_local, run_ray
from benchmarks.gpu_party import SIZES, shapes
from benchmarks.gpu_peers import PEERS, serve

LIMIT_S = 120.0
"""Bound of one mode."""


def run_modes(names: Sequence[str], asked: Asked) -> Iterator[tuple[str, Result]]:
    """Each mode's result as it comes; those through Ray share a driver."""
    for name in names:
        if name in PEERS and PEERS[name].gpu_only and asked.device == "cpu":
            yield name, {"skipped": "it moves weights between GPUs only"}
        elif not name.startswith("ray-"):
            yield from run_group([name], asked)
    if through_ray := [name for name in names if name.startswith("ray-")]:
        yield from run_group(through_ray, asked)


def run_group(names: Sequence[str], asked: Asked) -> Iterator[tuple[str, Result]]:
    """Modes of one pair of processes, which are gone afterwards, whatever happens."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.gpu_peers"])
    results, results_end = context.Pipe(duplex=False)
    trainer_end, engine_end = context.Pipe()
    if names[0].startswith("ray-"):
        processes = [context.Process(target=run_ray, args=(names, asked, results_end), daemon=True)]
    else:
        block = names[0] in PEERS and PEERS[names[0]].blocks[1]
        processes = [
            context.Process(target=run_local, args=(names[0], asked, results_end, trainer_end), daemon=True),
            context.Process(target=serve, args=(engine_end, asked.size, asked.engine_device, block), daemon=True),
        ]
    patience = EXIT_S
    ended = False
    try:
        for process in processes:
            process.start()
        for end in (results_end, trainer_end, engine_end):
            end.close()
        for name in names:
            result: Result = {"error": "its processes had ended"}
            try:
                if not ended and results.poll(LIMIT_S):
                    result = results.recv()
                elif not ended:
                    result, ended = {"error": f"no result within {LIMIT_S:g} s"}, True
            except EOFError:
                ended = True
            patience = 1.0 if ended or "error" in result else EXIT_S
            yield name, result
    finally:
        for process in processes:
            if process.pid is not None:
                process.join(patience)
                process.kill()
                process.join(EXIT_S)
        results.close()


def table(title: str, nbytes: int, found: Mapping[str, Result]) -> Table:
    timed = ("median ms", "min", "max", "x floor", "GB/s", "setup ms", "first ms")
    columns = (*timed, "extra GB", "torch: trainer", "engine")
    shown = Table("", *columns, "beside it, median ms", title=title)
    floor = found.get("floor", {}).get("median", {}).get("seconds")
    for name, result in found.items():
        if "median" not in result:
            shown.add_row(name, *("-" for _ in columns), result.get("error") or f"skipped: {result['skipped']}")
            continue
        seconds, median = result["seconds"], result["median"]["seconds"]
        times = [f"{1e3 * s:.2f}" for s in (median, min(seconds), max(seconds))]
        rates = [f"{median / floor:.2f}" if floor else "-", f"{nbytes / median / 1e9:,.1f}"]
        starts = [f"{1e3 * result[key]:.1f}" for key in ("setup_s", "first_s")]
        torch_bytes = result["extra_torch_bytes"]
        memory = [result["extra_device_bytes"], torch_bytes["trainer"], torch_bytes["engine"]]
        beside = ", ".join(f"{key} {1e3 * s:.2f}" for key, s in result["median"].items() if key != "seconds")
        shown.add_row(name, *times, *rates, *starts, *(f"{b / 1e9:.3f}" for b in memory), beside)
    return shown


def driver_version() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="8b")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"names, or beginnings, of {', '.join(NAMES)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--engine-device", metavar="DEVICE", help="another GPU for the engine: cuda:1")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/onegpu.json"))
    given = parser.parse_args()
    names = [name for name in NAMES if given.engine_device or not name.startswith("nccl-")]
    if given.only:
        names = [name for name in NAMES if name.startswith(tuple(given.only))]
    if not names or given.rounds < 1:
        parser.error(f"--only takes names, or beginnings, of {', '.join(NAMES)}; --rounds at least 1")
    device = "cuda:0" if given.device == "cuda" else "cpu"
    asked = Asked(given.size, device, given.engine_device or device, given.rounds)
    console = Console(width=None if sys.stdout.isatty() else 200)
    all_shapes = [shape for _, shape in shapes(asked.size)]
    nbytes = 2 * sum(map(math.prod, all_shapes))
    found: dict[str, Result] = {}
    record: dict[str, Any] = {
        "weightsync": ws.__version__,
        "size": asked.size,
        "tensors": len(all_shapes),
        "nbytes": nbytes,
        "device": asked.device,
        "engine_device": asked.engine_device,
        "driver": driver_version() if given.device == "cuda" else None,
    }
    packages = ("torch", "cupy-cuda13x", "cupy-cuda12x", "ray", "checkpoint-engine")
    started = time.perf_counter()
    for name, result in run_modes(names, asked):
        record.update(result.pop("about", {}))
        found[name] = {"label": label(name), **result}
        median = result.get("median", {}).get("seconds")
        outcome = f"{1e3 * median:.2f} ms" if median else result.get("error") or f"skipped: {result['skipped']}"
        seconds = time.perf_counter() - started
        console.print(f"{seconds:5.0f} s  {name}: {outcome}", markup=False, highlight=False)
        write_record(given.out, packages, {**record, "seconds_in_all": seconds, "modes": found})
    title = (
        f"{asked.size}: {nbytes / 1e9:.2f} GB of bf16 in {len(all_shapes)} tensors, {record.get('gpu') or asked.device}"
    )
    console.print(table(title, nbytes, found))
    console.print(f"written to {given.out}")


if __name__ == "__main__":
    main()
