"""Start a private Ray on this machine and put one trainer and two engines on it."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray
import torch

from examples.rl.engines import TorchEngine, VllmEngine
from examples.rl.trainer import Trainer

NUM_ENGINES = 2
EngineKind = Literal["vllm", "torch"]

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Actors:
    """Handles of the running actors, all with their models loaded."""

    trainer: Any
    engines: tuple[Any, ...]


@contextmanager
def private_ray() -> Iterator[None]:
    """A Ray of our own: never the cluster that ``RAY_ADDRESS`` may name, and gone afterwards."""
    env = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    ray.init(
        address="local",
        num_cpus=NUM_ENGINES + 2,  # slots for actors; the threads are set below
        object_store_memory=500 * 1024**2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": env},
    )
    try:
        yield
    finally:
        ray.shutdown()


def start_actors(
    kind: EngineKind, model_dir: Path, *, learning_rate: float, seed: int, break_mode: bool = False
) -> Actors:
    """Create the actors side by side and return when all have loaded the model.

    On CPU the trainer uses every core and each engine its share: they never work at the same time.
    On a GPU they share it, by Ray's fractions and vLLM's memory limit.
    """
    cuda = torch.cuda.is_available()
    cores = len(os.sched_getaffinity(0))
    device = "cuda" if cuda else "cpu"
    # One actor a GPU where there are enough, else equal shares that fit together on each.
    gpus = 1.0 / math.ceil((NUM_ENGINES + 1) / torch.cuda.device_count()) if cuda else 0.0

    trainer = (
        ray.remote(Trainer)
        .options(num_cpus=1, num_gpus=gpus)
        .remote(model_dir, learning_rate=learning_rate, num_threads=cores, device=device)
    )
    engines = []
    for number in range(NUM_ENGINES):
        threads = max(1, cores // NUM_ENGINES)
        if kind == "vllm":
            options = {"num_cpus": 1, "num_gpus": gpus, "runtime_env": {"env_vars": _vllm_env(threads)}}
            engine = (
                ray.remote(VllmEngine)
                .options(**options)
                .remote(number, model_dir, seed=seed, gpu_memory_utilization=0.8 * (gpus or 1.0))
            )
        else:
            engine = (
                ray.remote(TorchEngine)
                .options(num_cpus=1, num_gpus=gpus)
                .remote(number, model_dir, num_threads=threads, device=device)
            )
        engines.append(engine)
    ray.get([actor.ready.remote() for actor in (trainer, *engines)])
    return Actors(trainer=trainer, engines=tuple(engines))


def _vllm_env(threads: int) -> dict[str, str]:
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Both engines would otherwise be bound to the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        # The engine core in the actor's own process: one process less to start, for each engine.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
