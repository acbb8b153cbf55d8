"""Weight updates between GPUs of one host, trainer ranks and engine ranks on different ones: links, sessions, slices.

    python -m benchmarks.multigpu [--gpus N] [--engines M] [--size 8b] [--rounds 5] [--only link nccl ...] [--out FILE]
    python -m benchmarks.multigpu --cpu --gpus 3 --size tiny      # the script itself, without a GPU

    link        one `copy_` of one tensor, from each GPU to each other
    nccl        one raw broadcast, and the transport alone beside it, from GPU 0 to 1, 2, ... others (`benchmarks.nccl`)
    sessions    `sync.update()` through Ray of a torch module on GPU 0 into engines on GPUs 1, ..., for each number of them: what
                `auto` takes, broadcast and cuda_ipc, verified and not; beside them one raw broadcast between the same GPUs
    roots       the same from two trainers that hold the model each, on GPUs 0 and 1, and send half each, to the others; raw: one
                after the other
    slices      FSDP2 over two GPUs into tensor-parallel engines on two others, or the same two (`benchmarks.sharded`)

Where there are more engines than GPUs without a trainer they share them, which NCCL takes from 2.30 on, with
NCCL_MULTI_RANK_GPU_ENABLE=1. Real vLLM engines over several GPUs: `python -m benchmarks.vllm_gpu --tensor-parallel-size 2`.
Every value changes before each update, and after it digests of all tensors are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from rich.console import Console
from rich.table import Table

import weightsync as ws
from benchmarks import nccl, sharded
from benchmarks.common import start_ray, write_record
from benchmarks.gpu_party import SIZES, Party, layout

SECTIONS = ("link", "nccl", "sessions", "roots", "slices")
LINK_BYTES = (64 << 20, 1 << 30, 4 << 30)
BUCKET_BYTES = (512 << 20, 1 << 30)
TIMEOUT_S = 120.0
WARM_UP = 1

Row = dict[str, Any]


# ---- links ----------------------------------------------------------------------------------------------------------


def copies(gpus: int, rounds: int) -> list[Row]:
    """From each GPU to each other; in one process, which sees them all."""
    found = []
    for source, target in ((a, b) for a in range(gpus) for b in range(gpus) if a != b):
        for nbytes in LINK_BYTES:
            here = torch.ones(nbytes, dtype=torch.uint8, device=f"cuda:{source}")
            there = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{target}")
            seconds = []
            for _ in range(WARM_UP + rounds):
                for gpu in (source, target):
                    torch.cuda.synchronize(gpu)
                start = time.perf_counter()
                there.copy_(here)
                for gpu in (source, target):
                    torch.cuda.synchronize(gpu)
                seconds.append(time.perf_counter() - start)
            at = statistics.median(seconds[WARM_UP:])
            found.append({"from": source, "to": target, "nbytes": nbytes, "seconds": at, "gb_per_s": nbytes / at / 1e9})
    return found


# ---- sessions -------------------------------------------------------------------------------------------------------


def session(size: str, trainers: Sequence[str], engines: Sequence[str], rounds: int, config: dict[str, Any]) -> Row:
    """Updates of one weight sync, in actors of its own, which see all GPUs."""
    start = ray.remote(num_cpus=0.1)(Party)
    senders = [start.remote(size, of, 1) for of in trainers]
    receivers = [start.remote(size, of, 2 + i) for i, of in enumerate(engines)]
    seconds: list[float] = []
    data_path: list[float] = []
    try:
        with ws.connect(
            trainers=senders,
            engines=receivers,
            source="model",
            target="model",
            config=config | {"timeout_s": TIMEOUT_S},
        ) as sync:
            for _ in range(WARM_UP + rounds):
                ray.get([sender.before.remote(True, False) for sender in senders])
                ray.get([receiver.before.remote(False, False) for receiver in receivers])
                began = time.perf_counter()
                report = sync.update()
                seconds.append(time.perf_counter() - began)
                data_path.append(report.phases["transfer"] + report.phases.get("apply", 0.0))
                sent, *held = ray.get([party.after.remote() for party in (senders[0], *receivers)])
                assert all(of == sent for of in held), f"engines do not hold what was sent: {config}"
    finally:
        for party in (*senders, *receivers):
            ray.kill(party)
    update_s = statistics.median(seconds[WARM_UP:])
    return {
        "roots": len(trainers),
        "engines": len(engines),
        "config": config,
        "transports": sorted(set(report.transports.values())),
        "update_s": update_s,
        "data_path_s": statistics.median(data_path[WARM_UP:]),
        "gb_per_s": report.nbytes / update_s / 1e9,
    }


def sessions(size: str, gpus: int, rounds: int, roots: int, most: int, *, cpu: bool) -> Iterator[Row]:
    place = sharded.Layout(gpus=0 if cpu else gpus)
    trainers = range(roots)
    free = range(roots, gpus) or [gpus - 1]
    direct = "shared_memory" if cpu else "cuda_ipc"
    for count in range(1, most + 1):
        engines = [free[i % len(free)] for i in range(count)]
        if not cpu:
            yield attempt(partial(raw_broadcast, size, trainers, engines), {"transport": "raw"})
        for transport in ("auto", "broadcast", direct):
            for digest in (True, False):
                config = {"transport": transport, "digest": digest, "apply": "streaming"}
                ends = [place.device(i) for i in trainers], [place.device(i) for i in engines]
                yield attempt(partial(session, size, *ends, rounds, config), config)


def raw_broadcast(size: str, roots: Sequence[int], engines: Sequence[int]) -> Row:
    """NCCL alone: each root sends its share to all engines, one root after the other."""
    nbytes = layout(size)[1]
    seconds = sum(nccl.raw([root, *engines], nbytes // len(roots) // 64 * 64) for root in roots)
    found = {"update_s": seconds, "data_path_s": seconds, "gb_per_s": nbytes / seconds / 1e9}
    return {"roots": len(roots), "engines": len(engines), "config": {"transport": "raw", "digest": False}} | found


def attempt(run: Callable[[], Row], asked: dict[str, Any]) -> Row:
    """One case that fails must not cost the others."""
    try:
        found = run()
    except Exception as error:
        found = {"config": asked, "error": f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:300]}"}
    print(json.dumps(found), flush=True)
    return found


# ---- slices ---------------------------------------------------------------------------------------------------------


def slices(gpus: int, megabytes: int, rounds: int, *, cpu: bool) -> Iterator[Row]:
    place = sharded.Layout(trainers=2, replicas=1, gpus=0 if cpu else gpus)
    here = "shared_memory" if cpu else "cuda_ipc"
    for transport in (f"sharded_{here}", "sharded_broadcast", "sharded_rdt", here, "broadcast"):
        run = partial(sharded.measure, place, megabytes, transport, rounds, "32MiB")
        yield attempt(run, {"transport": transport})


# ---- all of it ------------------------------------------------------------------------------------------------------


def table(found: dict[str, list[Row]]) -> Table:
    shown = Table("", "case", "ms", "GB/s", "beside it")
    for row in found.get("link", []):
        case = f"{row['from']} to {row['to']}, {row['nbytes'] >> 20} MiB"
        shown.add_row("link", case, f"{1e3 * row['seconds']:.2f}", f"{row['gb_per_s']:.0f}", "")
    for row in found.get("nccl", []):
        case = f"{row['ranks']} ranks, {row['case']}"
        beside = f"{row['of_raw']:.2f} of raw, {'verified' if row['digest'] else 'not'}" if "of_raw" in row else ""
        shown.add_row("nccl", case, f"{1e3 * row['seconds']:.1f}", f"{row['gb_per_s']:.0f}", beside)
    for section in ("sessions", "roots"):
        for row in found.get(section, []):
            config = row["config"]
            if "error" in row:
                shown.add_row(section, str(config), "-", "-", row["error"])
                continue
            taken = "" if config["transport"] != "auto" else f" ({', '.join(row['transports'])})"
            case = f"{row['roots']} to {row['engines']}, {config['transport']}{taken}"
            beside = f"data path {1e3 * row['data_path_s']:.1f} ms, {'verified' if config['digest'] else 'not'}"
            shown.add_row(section, case, f"{1e3 * row['update_s']:.1f}", f"{row['gb_per_s']:.1f}", beside)
    for row in found.get("slices", []):
        if "error" in row:
            shown.add_row("slices", str(row["config"]), "-", "-", row["error"])
            continue
        rate = row["model_bytes"] / row["median_s"] / 1e9
        beside = f"{row['bytes_per_engine_rank'] / row['model_bytes']:.2f} of the model to each rank"
        shown.add_row("slices", row["transport"], f"{1e3 * row['median_s']:.1f}", f"{rate:.1f}", beside)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--engines", type=int, default=0, help="up to so many; 0: one on each GPU without a trainer")
    parser.add_argument("--cpu", action="store_true", help="all ranks on the CPU")
    parser.add_argument("--size", choices=SIZES, default="8b")
    parser.add_argument("--slices-mb", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/multigpu.json"))
    asked = parser.parse_args()
    if asked.gpus < 2:
        parser.error("two GPUs at least; --gpus says how many to use")
    start_ray()
    nbytes = layout(asked.size)[1]
    most = {"sessions": asked.engines or asked.gpus - 1, "roots": max(asked.gpus - 2, 1)}
    arguments = asked.size, asked.gpus, asked.rounds
    sections: dict[str, Callable[[], Iterable[Row]]] = {
        "link": lambda: copies(asked.gpus, asked.rounds),
        "nccl": lambda: (
            row for ranks in range(2, asked.gpus + 1) for row in nccl.measure(range(ranks), nbytes, BUCKET_BYTES)
        ),
        "sessions": lambda: sessions(*arguments, 1, most["sessions"], cpu=asked.cpu),
        "roots": lambda: sessions(*arguments, 2, most["roots"], cpu=asked.cpu),
        "slices": lambda: slices(asked.gpus, asked.slices_mb, asked.rounds, cpu=asked.cpu),
    }
    gpu = None if asked.cpu else torch.cuda.get_device_name(0)
    settings = {"gpu": gpu, "gpus": asked.gpus, "size": asked.size, "nbytes": nbytes, "rounds": asked.rounds}
    found: dict[str, list[Row]] = {}
    for section in SECTIONS:
        if section not in asked.only or (asked.cpu and section in ("link", "nccl")):
            continue
        found[section] = []
        for row in sections[section]():
            found[section].append(row)
            # In case the next never ends.
            write_record(asked.out, ("weightsync", "torch", "ray", "nixl"), settings | found)
    Console(width=140).print(table(found))


if __name__ == "__main__":
    main()
