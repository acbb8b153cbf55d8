"""What the benchmarks share: a Ray, and how a record of a run says where, when and with what it was made."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

EXTENSION = "weightsync.ray_actors.vllm_worker.WeightSyncWorkerExtension"
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
"""Under which vLLM runs on a small CPU machine; to be set before it is imported."""


def write_record(path: Path, versions_of: Iterable[str], found: Mapping[str, Any]) -> None:
    """Write *found* as JSON, with date, machine and the versions of some packages."""
    record = {
        "date": date.today().isoformat(),
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "kernel": platform.release()},
        "versions": {name: version(name) for name in versions_of},
        "python": platform.python_version(),
        **found,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def version(name: str) -> str | None:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def start_ray() -> None:
    """A local Ray that says little; actors without a GPU of their own see all of them."""
    import ray

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(
        address="local",
        num_cpus=8,
        object_store_memory=10**9,
        include_dashboard=False,
        logging_level="error",
        log_to_driver=False,
    )
