"""CUDA tensors over Ray Direct Transport between two actors of one GPU: by cuda_ipc handle, and pulled by NIXL over UCX.

    python -m benchmarks.rdt_cuda [--gb 1] [--device cuda] [--out benchmarks/results/rdt_cuda.json]

The reader ends with the bytes in memory of its own, GPU to GPU: for cuda_ipc it copies from what it was lent, for NIXL it gives
the target. Seconds are the reader's for NIXL, whose refs it keeps, and the driver's for cuda_ipc, which needs a call of the
holder for each transfer. "through host memory" is what `sharded_rdt` does: a copy to shared memory, a pull between two registered
arenas in it, a copy to the GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import ray
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import start_ray, write_record

ROUNDS = 5
CASES: dict[str, dict[str, str]] = {
    "nixl, UCX's own choice": {},
    "nixl, cuda_ipc and cuda_copy named": {"UCX_TLS": "cuda_ipc,cuda_copy,sm,self,tcp"},
    "nixl, reads over cuda_ipc asked for": {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"},
    "nixl, without tcp": {"UCX_TLS": "cuda_ipc,cuda_copy,sm,self"},
}
"""Case -> environment of UCX."""
LIMIT_S = 60.0


class Holder:
    def __init__(self, nbytes: int, device: str) -> None:
        self._data = (torch.arange(nbytes // 4, dtype=torch.int32, device=device)).view(torch.uint8)

    @ray.method(tensor_transport="cuda_ipc")  # type: ignore[untyped-decorator]
    def lend(self) -> torch.Tensor:
        return self._data

    def publish(self, host: bool) -> list[Any]:
        self._published = self._data.cpu() if host else self._data
        return [ray.put([self._published], _tensor_transport="nixl")]

    def to_host(self) -> float:
        start = time.perf_counter()
        self._published.copy_(self._data)
        return time.perf_counter() - start


class Reader:
    def __init__(self, nbytes: int, device: str) -> None:
        self._target = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def copy(self, lent: torch.Tensor) -> None:
        self._target.copy_(lent)
        torch.cuda.synchronize()

    def pull(self, refs: list[Any], host: bool) -> list[float]:
        from ray.experimental import register_nixl_memory, set_target_for_ref

        into = torch.zeros_like(self._target, device="cpu") if host else self._target
        register_nixl_memory(into)
        seconds = []
        for _ in range(ROUNDS + 1):
            start = time.perf_counter()
            set_target_for_ref(refs[0], [into])
            (found,) = ray.get(refs[0], timeout=LIMIT_S)
            assert found.data_ptr() == into.data_ptr()
            if host:
                self._target.copy_(into)
            if self._target.is_cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return seconds[1:]

    def is_right(self) -> bool:
        wanted = torch.arange(self._target.numel() // 4, dtype=torch.int32, device=self._target.device)
        right = torch.equal(self._target.view(torch.int32), wanted)
        self._target.zero_()
        return right


def actors(nbytes: int, device: str, environment: dict[str, str]) -> tuple[Any, Any]:
    options: dict[str, Any] = {"enable_tensor_transport": True, "runtime_env": {"env_vars": environment}}
    if device == "cuda":
        options["num_gpus"] = 0.4
    return tuple(ray.remote(**options)(kind).remote(nbytes, device) for kind in (Holder, Reader))


def by_handle(holder: Any, reader: Any) -> list[float]:
    seconds = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        ray.get(reader.copy.remote(holder.lend.remote()), timeout=LIMIT_S)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def by_nixl(holder: Any, reader: Any, *, host: bool) -> list[float]:
    refs = ray.get(holder.publish.remote(host), timeout=LIMIT_S)
    found: list[float] = ray.get(reader.pull.remote(refs, host), timeout=LIMIT_S)
    if host:
        copies = [ray.get(holder.to_host.remote()) for _ in range(ROUNDS)]
        found = [pulled + copied for pulled, copied in zip(found, copies, strict=True)]
    return found


def measure(case: str, nbytes: int, device: str) -> dict[str, Any]:
    environment = CASES.get(case, {})
    holder, reader = actors(nbytes, device, environment)
    try:
        if case == "cuda_ipc":
            seconds = by_handle(holder, reader)
        else:
            seconds = by_nixl(holder, reader, host=case == "nixl, through host memory")
        right = ray.get(reader.is_right.remote())
    except Exception as error:
        return {"case": case, "error": str(error).strip().splitlines()[-1][:300]}
    finally:
        for actor in (holder, reader):
            ray.kill(actor)
    median = statistics.median(seconds)
    return {
        "case": case,
        "seconds": seconds,
        "gb_per_s": nbytes / median / 1e9,
        "exact": right,
        "environment": environment,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/rdt_cuda.json"))
    asked = parser.parse_args()
    nbytes = int(asked.gb * 1e9) // 4096 * 4096
    start_ray()
    cases = ["cuda_ipc"] if asked.device == "cuda" else []
    table = Table("", "GB/s", "median ms", "exact")
    rows = []
    for case in [*cases, *CASES, "nixl, through host memory"]:
        row = measure(case, nbytes, asked.device)
        rows.append(row)
        if "error" in row:
            table.add_row(case, "failed", row["error"])
        else:
            table.add_row(
                case, f"{row['gb_per_s']:.2f}", f"{1e3 * statistics.median(row['seconds']):.1f}", str(row["exact"])
            )
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    write_record(asked.out, ("torch", "ray", "nixl"), {"gpu": gpu, "nbytes": nbytes, "cases": rows})
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
