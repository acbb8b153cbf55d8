"""What a verified broadcast over NCCL costs beside the broadcast alone: ranks of one communicator on one GPU, or on several.

    NCCL_MULTI_RANK_GPU_ENABLE=1 python -m benchmarks.nccl [--gb 16] [--ranks 2 3 4] [--spread] [--out FILE]

Raw is one ncclBroadcast of the same bytes in place, timed until every rank has them. Ours is one transfer of
a transport: from the trainer's tensors, packed and digested, to memory of the receivers' own, digested again. What a sender does
while an update is prepared (`SenderTransport.begin`: it looks where the tensors lie, and fills the first, small bucket) comes
before. Each rank is a process; the clock is that of the process that asks them, and stops when the last has answered. `--spread`
puts rank i on GPU i.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import write_record
from weightsync.cuda.memory import GpuMemory
from weightsync.cuda.moves import Move, run_flat
from weightsync.identity import nccl_version
from weightsync.interfaces import LinkContext, Transfer
from weightsync.manifest import Manifest, TensorMeta
from weightsync.transports.broadcast import BroadcastReceiver, BroadcastSender
from weightsync.transports.nccl import Communicator, new_unique_id
from weightsync.transports.nccl_group import NcclGroup, warm_up

ROUNDS = 5
TENSOR_BYTES = 45 << 20
"""A large matrix of an 8B model; each with a small one beside it."""
SMALL_BYTES = 8 << 10


class Rank:
    """One rank's process."""

    def __init__(self, rank: int, size: int, device: torch.device, nbytes: int) -> None:
        self.rank, self.size, self.device = rank, size, device
        torch.cuda.set_device(device)
        warm_up(device)
        self.nbytes = nbytes
        self.end: Any = None

    def uuid(self) -> str:
        return GpuMemory(self.device).uuid

    # ---- NCCL alone ------------------------------------------------------------------------------------------------

    def join(self, unique_id: bytes) -> None:
        self.data = torch.ones(self.nbytes, dtype=torch.uint8, device=self.device)
        self.stream = torch.cuda.Stream(self.device, priority=-1)
        self.comm = Communicator(unique_id, rank=self.rank, size=self.size, device=self.device)
        self._settle()

    def raw(self) -> None:
        self.comm.broadcast(self.data.data_ptr(), self.nbytes, root=0, stream=self.stream)
        self._settle()
        self.stream.synchronize()

    def _settle(self) -> None:
        while not self.comm.is_ready():
            time.sleep(0.0001)

    def leave(self) -> None:
        self.comm.abort()
        del self.data
        torch.cuda.empty_cache()

    # ---- the transport ---------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """The trainer's tensors; on a receiver, where they are to land."""
        self.tensors: dict[str, torch.Tensor] = {}
        total = 0
        while total < self.nbytes:
            for kind, size in (("weight", TENSOR_BYTES), ("norm", SMALL_BYTES)):
                count = min(size, max(self.nbytes - total, 0)) // 2
                if count:
                    name = f"layers.{len(self.tensors) // 2}.{kind}"
                    self.tensors[name] = torch.empty(count, dtype=torch.bfloat16, device=self.device)
                    total += 2 * count
            if self.nbytes - total < 2:
                break
        if self.rank == 0:
            for i, tensor in enumerate(self.tensors.values()):
                tensor.fill_(float(i % 251) - 100)
        metas = [TensorMeta.of(name, tensor) for name, tensor in self.tensors.items()]
        self.manifest = Manifest(tuple(metas))

    def open(self, settings: dict[str, Any]) -> bytes:
        context = LinkContext(device=str(self.device), **settings)
        if self.rank == 0:
            self.end = BroadcastSender(context)
            return bytes(self.end.open(self.manifest.tensors))
        self.end = BroadcastReceiver(context, receiver=self.rank - 1)
        return b""

    def connect(self, address: bytes) -> None:
        self.end.connect() if self.rank == 0 else self.end.connect(address)
        assert isinstance(self.end._payloads, NcclGroup), "this is to measure NCCL"

    def prepare(self) -> None:
        self.held = [(self.manifest.by_name[name], tensor) for name, tensor in self.tensors.items()]
        self.transfer = Transfer(version=1, manifest=self.manifest, names=tuple(self.tensors), held=True)
        if self.rank == 0:
            self.end.begin(self.held)

    def move(self, digest: bool) -> None:
        of = self.transfer
        if self.rank == 0:
            self.end.send(of, iter(self.held))
            return
        for chunk in self.end.receive(of):
            moves: list[Move] = []
            for piece in chunk.pieces:
                place = self.tensors[piece.name].view(torch.uint8)[piece.start : piece.start + piece.nbytes]
                moves.append((chunk.payload[piece.offset : piece.offset + piece.nbytes], place))
            found = run_flat(moves, self.device, digest=digest)
            assert not digest or found.tolist() == [piece.digest for piece in chunk.pieces]
            chunk.release()

    def check(self) -> None:
        if self.rank:
            for i, tensor in enumerate(self.tensors.values()):
                assert bool((tensor == float(i % 251) - 100).all()), f"tensor {i} is wrong"
                tensor.zero_()

    def close(self) -> None:
        self.end.close()


def serve(connection: Connection, rank: int, size: int, index: int, nbytes: int) -> None:
    subject = Rank(rank, size, torch.device("cuda", index), nbytes)
    connection.send(None)
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send(getattr(subject, method)(*arguments))
        except Exception as error:
            connection.send(error)


class Ranks:
    """All ranks; `ask` has all do something at once and returns the seconds until the last has, with what they returned."""

    def __init__(self, gpus: Sequence[int], nbytes: int) -> None:
        """*gpus*: of each rank."""
        context = multiprocessing.get_context("spawn")
        self._ends, self._processes = [], []
        for rank, gpu in enumerate(gpus):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, rank, len(gpus), gpu, nbytes), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)
        self._answers()

    def ask(self, method: str, *arguments: Any) -> tuple[float, list[Any]]:
        started = time.perf_counter()
        for end in self._ends:
            end.send((method, arguments))
        answers = self._answers()
        return time.perf_counter() - started, answers

    def _answers(self) -> list[Any]:
        answers = [end.recv() for end in self._ends]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def close(self) -> None:
        for end, process in zip(self._ends, self._processes, strict=True):
            end.close()
            process.join(10)
            process.kill()


def seconds(of: Callable[[], float]) -> list[float]:
    """Of some rounds, after one that does not count."""
    of()
    return [of() for _ in range(ROUNDS)]


def transfer_of(ranks: Ranks, digest: bool) -> float:
    """Seconds."""
    ranks.ask("prepare")
    return ranks.ask("move", digest)[0]


def raw(gpus: Sequence[int], nbytes: int) -> float:
    """Median seconds of NCCL alone, from a rank on the first GPU to one on each of the others."""
    ranks = Ranks(gpus, nbytes)
    try:
        ranks.ask("join", new_unique_id())
        return statistics.median(seconds(lambda: ranks.ask("raw")[0]))
    finally:
        ranks.close()


def measure(gpus: Sequence[int], nbytes: int, bucket_bytes: Sequence[int]) -> list[dict[str, Any]]:
    """Every case of ranks on these GPUs, the trainer's first."""
    found: list[dict[str, Any]] = []

    def note(case: str, times: list[float], **more: Any) -> None:
        median = statistics.median(times)
        row = {
            "case": case,
            "ranks": len(gpus),
            "gpus": len(set(gpus)),
            "nbytes": nbytes,
            "seconds": median,
            "min": min(times),
            "max": max(times),
            "gb_per_s": nbytes / median / 1e9,
            **more,
        }
        found.append(row)
        print(json.dumps(row), flush=True)

    ranks = Ranks(gpus, nbytes)
    try:
        ranks.ask("join", new_unique_id())
        alone = seconds(lambda: ranks.ask("raw")[0])
        note("raw", alone)
        ranks.ask("leave")
        ranks.ask("hold")
        uuids = tuple(ranks.ask("uuid")[1])
        for bucket in bucket_bytes:
            for digest in (True, False):
                context = {
                    "sender": 0,
                    "num_receivers": len(gpus) - 1,
                    "host": "127.0.0.1",
                    "token": secrets.token_hex(16),
                    "timeout_s": 60.0,
                    "bucket_bytes": 8 << 20,
                    "gpu_bucket_bytes": bucket,
                    "staging_limit_bytes": 4 << 30,
                    "digest": digest,
                    "gpus": uuids,
                }
                address = ranks.ask("open", context)[1][0]
                ranks.ask("connect", address)
                ours = seconds(partial(transfer_of, ranks, digest))
                share = statistics.median(alone) / statistics.median(ours)
                note("ours", ours, digest=digest, bucket_bytes=bucket, of_raw=share)
                ranks.ask("check")
                ranks.ask("close")
    finally:
        ranks.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gb", type=float, default=16.0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--bucket-mib", type=int, nargs="+", default=[512])
    parser.add_argument("--spread", action="store_true", help="rank i on GPU i, not all on the first")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/nccl.json"))
    arguments = parser.parse_args()
    nbytes = int(arguments.gb * 1e9) // 64 * 64
    buckets = [mib << 20 for mib in arguments.bucket_mib]
    places = [range(size) if arguments.spread else [0] * size for size in arguments.ranks]
    cases = [row for gpus in places for row in measure(gpus, nbytes, buckets)]
    environment = {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")}
    facts = {"gpu": torch.cuda.get_device_name(0), "nccl": nccl_version(), "environment": environment}
    write_record(arguments.out, ("weightsync", "torch"), {"rounds": ROUNDS, **facts, "cases": cases})
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
