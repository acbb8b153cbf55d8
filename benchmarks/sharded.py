"""Slices pulled against whole tensors sent: FSDP2 trainer ranks, engine replicas of two ranks each, one machine.

    python -m benchmarks.sharded [--mb 270 1000] [--rounds 5] [--out benchmarks/results/sharded.json]

Engine ranks are torch modules whose layers are cut by columns and rows in turn (DTensor). Over sharded_... each gets its
half; over the others every trainer rank gathers each tensor, one of them sends it whole, and every engine rank copies its
half out of it. All ranks are Ray actors; from the call in the driver until all engines have committed. After the last round
the parts of every engine rank are compared with the trainers', bit by bit. On the CPU: four trainer ranks, two replicas;
`benchmarks.multigpu` has them on GPUs.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from rich.console import Console
from rich.table import Table

import weightsync as ws
from benchmarks.common import start_ray, write_record
from weightsync.chunk import as_bytes
from weightsync.digest import digest_bytes

WIDTH = 2048
RANKS = 2
"""Of an engine replica."""
WARM_UP = 2
TRANSPORTS = ("sharded_shared_memory", "sharded_rdt", "sharded_broadcast", "shared_memory", "broadcast")


@dataclass(frozen=True, slots=True)
class Layout:
    trainers: int = 4
    replicas: int = 2
    gpus: int = 0
    """Over which the ranks are spread, trainers first; 0: they are on the CPU."""

    def device(self, number: int) -> str:
        return f"cuda:{number % self.gpus}" if self.gpus else "cpu"


def layers(count: int) -> torch.nn.Sequential:
    """Layers of 8 MiB of bf16."""
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(count)))


def join(store: str, rank: int, size: int, device: torch.device) -> Any:
    """The mesh of all ranks that share *store*."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    return init_device_mesh(device.type, (size,))


class Measured:
    """By how much its memory grows: the GPU's, or the process's."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.before = 0

    def note_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.before = self._peak()

    def grown(self) -> int:
        return self._peak() - self.before

    def _peak(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Trainer(Measured):
    def __init__(self, count: int, store: str, rank: int, size: int, device: str) -> None:
        from torch.distributed.fsdp import fully_shard

        super().__init__(device)
        mesh = join(store, rank, size, self.device)
        torch.manual_seed(0)
        self.model = layers(count).to(self.device)
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def change(self, step: int) -> None:
        for parameter in self.model.parameters():
            part: Any = parameter.data
            part.to_local().view(torch.int16).add_(step)

    def digests(self) -> list[list[int]]:
        """Per tensor, of each engine rank's half."""
        found = []
        for i, parameter in enumerate(self.model.parameters()):
            of: Any = parameter.data
            found.append([digest_bytes(as_bytes(half.cpu())) for half in of.full_tensor().chunk(RANKS, i % 2)])
        return found


class Engine(Measured):
    def __init__(self, count: int, store: str, rank: int, device: str) -> None:
        from torch.distributed.tensor import DTensor, Shard

        super().__init__(device)
        mesh = join(store, rank, RANKS, self.device)
        with torch.device("meta"):
            self.model = layers(count)
        for i, layer in enumerate(self.model):
            shape = [WIDTH, WIDTH]
            shape[i % 2] //= RANKS
            part = torch.zeros(shape, dtype=torch.bfloat16, device=self.device)
            cut = DTensor.from_local(part, mesh, [Shard(i % 2)], run_check=False)
            layer.register_parameter("weight", torch.nn.Parameter(cut, requires_grad=False))

    def digests(self) -> list[int]:
        parts: list[Any] = [parameter.data for parameter in self.model.parameters()]
        return [digest_bytes(as_bytes(part.to_local().cpu())) for part in parts]


def measure(layout: Layout, megabytes: int, transport: str, rounds: int, bucket: str) -> dict[str, Any]:
    """One transport, in actors of its own, so that peaks of memory are its own."""
    count = max(round(megabytes * 1e6 / (2 * WIDTH * WIDTH)), 1)
    with tempfile.TemporaryDirectory() as folder:
        start = {kind: ray.remote(num_cpus=0)(kind) for kind in (Trainer, Engine)}
        trainers = [
            start[Trainer].remote(count, f"{folder}/trainers", rank, layout.trainers, layout.device(rank))
            for rank in range(layout.trainers)
        ]
        engines = [
            start[Engine].remote(
                count,
                f"{folder}/engine {replica}",
                rank,
                layout.device(layout.trainers + replica * RANKS + rank),
            )
            for replica in range(layout.replicas)
            for rank in range(RANKS)
        ]
        everybody = [*trainers, *engines]
        config = {"transport": transport, "bucket_bytes": bucket, "timeout_s": 120}
        reports = []
        ray.get([trainer.digests.remote() for trainer in trainers])
        with ws.connect(trainers=trainers, engines=engines, source="model", target="model", config=config) as sync:
            ray.get([actor.note_peak.remote() for actor in everybody])
            for step in range(WARM_UP + rounds):
                ray.get([trainer.change.remote(step + 1) for trainer in trainers])
                reports.append(sync.update())
            grown = ray.get([actor.grown.remote() for actor in everybody])
        (wanted, *_) = ray.get([trainer.digests.remote() for trainer in trainers])
        for i, found in enumerate(ray.get([engine.digests.remote() for engine in engines])):
            assert found == [halves[i % RANKS] for halves in wanted], f"engine {i} holds other bytes over {transport}"
        for actor in everybody:
            ray.kill(actor)
    counted = reports[WARM_UP:]
    rows = [row for row in counted[-1].ranks if row.rank.startswith("engine")]
    return {
        "transport": transport,
        "model_bytes": counted[-1].nbytes,
        "seconds": [report.seconds for report in counted],
        "median_s": statistics.median(report.seconds for report in counted),
        "median_transfer_s": statistics.median(report.phases["transfer"] for report in counted),
        "median_pause_s": statistics.median(report.pause_s for report in counted),
        "bytes_per_engine_rank": rows[0].nbytes,
        "bytes_to_engines": sum(row.nbytes for row in rows),
        "peak_growth_trainer_bytes": max(grown[: layout.trainers]),
        "peak_growth_engine_bytes": max(grown[layout.trainers :]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, nargs="+", default=[270, 1000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket", default="8MiB")
    parser.add_argument("--transports", nargs="+", default=TRANSPORTS)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    start_ray()
    layout = Layout()
    found = [
        measure(layout, megabytes, transport, asked.rounds, asked.bucket)
        for megabytes in asked.mb
        for transport in asked.transports
    ]
    table = Table("transport", "model MB", "median ms", "transfer", "MB a rank", "MB grown: trainer", "engine")
    for row in found:
        table.add_row(
            row["transport"],
            f"{row['model_bytes'] / 1e6:.0f}",
            f"{1e3 * row['median_s']:.0f}",
            f"{1e3 * row['median_transfer_s']:.0f}",
            f"{row['bytes_per_engine_rank'] / 1e6:.0f}",
            f"{row['peak_growth_trainer_bytes'] / 1e6:.0f}",
            f"{row['peak_growth_engine_bytes'] / 1e6:.0f}",
        )
    Console(width=120).print(table)
    if asked.out:
        settings = {**asdict(layout), "ranks": RANKS, "bucket": asked.bucket, "rounds": asked.rounds}
        write_record(asked.out, ["weightsync", "torch", "ray", "nixl"], {**settings, "runs": found})


if __name__ == "__main__":
    main()
