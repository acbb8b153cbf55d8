"""What a verified update of a vLLM engine costs on one GPU, beside a bare `reload_weights` of the same tensors.

    python -m benchmarks.vllm_gpu [--model 3.65GB|16.2GB] [--out benchmarks/results/vllm_gpu.json]

A Qwen3-MoE of 3.65 GB (843 tensors, bf16) or 16.2 GB (4,719). Trainer and engines are processes of their own on the same GPU.

    copy    one `Tensor.copy_` of a tensor of as many bytes, in the engine's process
    bare    the engine reloads tensors that lie in its own process on the GPU already: no transfer, no proof
    update  `sync.update()` as the caller sees it, over cuda_ipc: from the trainer's parameters to the committed version, with
            digests (verified) and without (raw), staged and streaming; by copies where these were seen to equal a reload, and
            always by a reload
    ipc     vLLM's own transfer over CUDA IPC, packed and not (`benchmarks.vllm_ipc`)

Times are medians. Each update brings another version; after each variant's last one the engine's outputs must be those that it
had fresh from the checkpoint.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from rich.console import Console
from rich.table import Table

import weightsync as ws
from benchmarks import vllm_ipc
from benchmarks.common import EXTENSION, start_ray, write_record
from weightsync.report import RankRow
from weightsync.testing.random_moe import CUDA_GRAPHS, MOE_3_65_GB, MOE_16_2_GB, Outputs

MODELS: dict[str, dict[str, int]] = {"3.65GB": MOE_3_65_GB, "16.2GB": MOE_16_2_GB}
DEVICE = "cuda"
AUTO = "cuda_ipc"
GPU_SHARE = {"trainer": 0.1, "engine": 0.4}
FRESH_SEED = 1
"""Of the version in the checkpoint."""
WARM_UP = 2
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # for `bare_reloads`, which runs in the worker
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
}
ARGUMENTS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 128,
    "max_num_seqs": 8,
    "skip_tokenizer_init": True,
    "gpu_memory_utilization": 0.25,
    "kv_cache_memory_bytes": 1 << 30,  # vLLM would measure what is free, which the other engine's start disturbs
    "worker_extension_cls": EXTENSION,
}
ENGINES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "CUDA graphs": {"enforce_eager": False, "compilation_config": CUDA_GRAPHS},
}
VARIANTS: dict[str, dict[str, Any]] = {
    f"{'verified' if digest else 'raw'}, {apply}": {"digest": digest, "apply": apply}
    for digest in (True, False)
    for apply in ("staged", "streaming")
} | {
    f"verified, {apply}, reloaded": {"digest": True, "apply": apply, "direct_apply": "off"}
    for apply in ("staged", "streaming")
}


@dataclass
class Row:
    """One variant's updates on one engine."""

    update_s: list[float] = field(default_factory=list)
    """As the caller waits for `update()`."""
    report_s: list[float] = field(default_factory=list)
    """Within the coordinator."""
    pause_s: list[float] = field(default_factory=list)
    apply_s: list[float] = field(default_factory=list)
    """The slowest engine rank's own: from the first copy, or the loader's start, until the GPU has done it all."""
    phases: list[dict[str, float]] = field(default_factory=list)
    reloads: list[int] = field(default_factory=list)
    """How often the engine's loader ran; 0: everything was copied."""
    connect_s: float = 0.0
    ratio_to_bare: float = 0.0
    apply_to_copy: float = 0.0
    exact: bool = False
    """After the last update the engine put out what it did when it was fresh."""


@dataclass
class Ipc:
    """Of vLLM's own transfer: updates as their caller waits for them, in which the engine cannot generate."""

    update_s: list[float]
    exact: bool


@dataclass
class Measured:
    """Of one engine."""

    copy_s: list[float]
    bare_reload_s: list[float]
    updates: dict[str, Row] = field(default_factory=dict)
    ipc: dict[str, Ipc] = field(default_factory=dict)


def timed(work: Callable[[], object], warm_up: int, rounds: int) -> list[float]:
    """Seconds of each round, until the device has done it; in the worker."""

    def synchronize() -> None:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    seconds = []
    for _ in range(warm_up + rounds):
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds[warm_up:]


def plain_copies(worker: Any, nbytes: int, warm_up: int, rounds: int) -> list[float]:
    """Seconds of each copy of *nbytes* on the worker's device."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=worker.device)
    target = torch.empty_like(source)
    seconds = timed(partial(target.copy_, source), warm_up, rounds)
    del source, target
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    return seconds


def bare_reloads(worker: Any, file: str, warm_up: int, rounds: int) -> list[float]:
    """Seconds of each `reload_weights` of all tensors in *file*, which are read to the device before."""
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config

    tensors = list(load_file(file, device=str(worker.device)).items())
    with set_current_vllm_config(worker.vllm_config):
        return timed(lambda: worker.model_runner.reload_weights(weights_iterator=iter(tensors)), warm_up, rounds)


class Clock:
    """Time since the start of the run, and whether there is enough left to begin another variant."""

    def __init__(self, limit_s: float) -> None:
        self._start, self._limit_s = time.monotonic(), limit_s

    def __call__(self) -> float:
        return time.monotonic() - self._start

    def is_over(self) -> bool:
        return self() > self._limit_s


def measure(
    engine: Any,
    trainer: Any,
    file: Path,
    fresh: Outputs,
    rounds: int,
    variants: Mapping[str, dict[str, Any]],
    clock: Clock,
) -> Measured:
    """All that is measured of one engine; variants for which no time is left are left out."""
    nbytes = ray.get(trainer.nbytes.remote())
    found = Measured(
        ray.get(engine.on_worker.remote(plain_copies, nbytes, WARM_UP, rounds)),
        ray.get(engine.on_worker.remote(bare_reloads, str(file), WARM_UP, rounds)),
    )
    copy_s, bare_s = statistics.median(found.copy_s), statistics.median(found.bare_reload_s)
    seed = FRESH_SEED

    def is_fresh() -> bool:
        ray.get(engine.forget_prompts.remote())
        return bool(ray.get(engine.outputs.remote()) == fresh)

    print(f"{clock():.0f} s: copy {1e3 * copy_s:.2f} ms, bare reload {1e3 * bare_s:.0f} ms", flush=True)
    ranks: list[RankRow] = []
    for name, config in variants.items():
        if clock.is_over():
            continue
        row = found.updates[name] = Row()
        start = time.perf_counter()
        with ws.connect(trainers=[trainer], engines=[engine], source="weights", target="llm", config=config) as sync:
            row.connect_s = time.perf_counter() - start
            for i in range(-WARM_UP, rounds):
                seed += 1
                ray.get(trainer.set.remote(FRESH_SEED if i == rounds - 1 else seed))
                start = time.perf_counter()
                report = sync.update()
                seconds = time.perf_counter() - start
                ranks = [of for of in report.ranks if of.rank.startswith("engine")]
                taken = AUTO if config["transport"] == "auto" else config["transport"]
                assert len(ranks) > 1 or set(report.transports.values()) == {taken}, report.transports
                assert report.apply == config["apply"], report.apply
                if i >= 0:
                    row.update_s.append(seconds)
                    row.report_s.append(report.seconds)
                    row.pause_s.append(report.pause_s)
                    row.phases.append(report.phases)
                    row.apply_s.append(max(of.apply_s for of in ranks))
                    row.reloads.append(max(of.reloads for of in ranks))
        row.ratio_to_bare = statistics.median(row.update_s) / bare_s
        row.apply_to_copy = statistics.median(row.apply_s) / copy_s
        row.exact = is_fresh()
        print(
            f"{clock():.0f} s: {name}: {1e3 * statistics.median(row.update_s):.1f} ms, apply "
            f"{1e3 * statistics.median(row.apply_s):.1f} ms, {row.reloads}, exact {row.exact}",
            flush=True,
        )
    if len(ranks) > 1:  # vLLM's own needs a trainer rank on each of their GPUs
        return found
    ray.get(engine.init_weight_transfer_engine.remote())
    for name, packed in vllm_ipc.WAYS.items():
        if clock.is_over():
            continue
        times = []
        for i in range(-WARM_UP, rounds):
            seed += 1
            ray.get(trainer.set.remote(FRESH_SEED if i == rounds - 1 else seed))
            times.append(vllm_ipc.timed_update(trainer, engine, packed))
        found.ipc[name] = Ipc(times[WARM_UP:], is_fresh())
        print(f"{clock():.0f} s: {name}: {1e3 * statistics.median(times[WARM_UP:]):.1f} ms", flush=True)
    return found


def run(
    folder: Path,
    sizes: dict[str, int],
    rounds: int,
    arguments: dict[str, Any],
    wanted: list[str],
    variants: Mapping[str, dict[str, Any]],
    clock: Clock,
) -> dict[str, Measured]:
    # An actor without a GPU of its own sees all of them.
    share = GPU_SHARE if arguments.get("tensor_parallel_size", 1) == 1 else dict.fromkeys(GPU_SHARE, 0.0)
    trainer = ray.remote(vllm_ipc.IpcTrainer).options(num_gpus=share["trainer"]).remote(sizes, DEVICE)
    ray.get(trainer.set.remote(FRESH_SEED))
    ray.get(trainer.write.remote(str(folder)))
    start = ray.remote(vllm_ipc.IpcEngine).options(num_gpus=share["engine"])
    # Both start at once, and neither is measured before both stand.
    engines = {
        name: start.remote(str(folder), ARGUMENTS | vllm_ipc.ENGINE_ARGUMENTS | arguments | own, ENVIRONMENT)
        for name, own in ENGINES.items()
        if name in wanted
    }
    print(f"{clock():.0f} s: the checkpoint is written", flush=True)
    fresh = dict(zip(engines, ray.get([engine.outputs.remote() for engine in engines.values()]), strict=True))
    file = folder / "model.safetensors"
    print(f"{clock():.0f} s: the engines stand", flush=True)
    found = {}
    for name, engine in engines.items():
        found[name] = measure(engine, trainer, file, fresh[name], rounds, variants, clock)
        print(f"{clock():.0f} s: {name} is measured", flush=True)
    ray.get([engine.stop.remote() for engine in engines.values()])
    return found


def table(model: str, measured: dict[str, Measured]) -> Table:
    columns = ("", "ms", "min to max", "x bare", "apply", "x copy", "pause", "reloads", "phases, ms", "exact")
    found = Table(*columns, title=f"{model} Qwen3-MoE, vLLM, one GPU (medians)")
    for engine, of in measured.items():
        found.add_row(f"{engine}: plain copy", *_spread(of.copy_s), "", "", "1")
        found.add_row(f"{engine}: bare reload", *_spread(of.bare_reload_s), "1", "", "", "", "1")
        for name, row in of.updates.items():
            medians = {phase: statistics.median(p.get(phase, 0.0) for p in row.phases) for phase in row.phases[-1]}
            phases = ", ".join(f"{phase} {1e3 * s:.0f}" for phase, s in medians.items())
            pause = f"{1e3 * statistics.median(row.pause_s):.0f}"
            apply = f"{1e3 * statistics.median(row.apply_s):.1f}"
            ratios = f"{row.ratio_to_bare:.2f}", apply, f"{row.apply_to_copy:.2f}"
            exact = "yes" if row.exact else "NO"
            found.add_row(
                f"{engine}: {name}", *_spread(row.update_s), *ratios, pause, f"{max(row.reloads)}", phases, exact
            )
        for name, ipc in of.ipc.items():
            bare = f"{statistics.median(ipc.update_s) / statistics.median(of.bare_reload_s):.2f}"
            exact = "yes" if ipc.exact else "NO"
            found.add_row(f"{engine}: {name}", *_spread(ipc.update_s), bare, "", "", "", "1", "", exact)
    return found


def _spread(seconds: list[float]) -> tuple[str, str]:
    return f"{1e3 * statistics.median(seconds):.1f}", f"{1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="3.65GB")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument(
        "--updates", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="which kinds, in this order"
    )
    parser.add_argument("--transports", nargs="+", default=["auto"], help="each kind over each of them")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--limit-s", type=float, default=125, help="begin no more variants after so many seconds")
    parser.add_argument(
        "--tensor-parallel-size", type=int, default=1, help="GPUs of an engine; the trainer is on the first"
    )
    parser.add_argument("--attention-backend", help="vLLM's attention_backend, where its own choice does not run")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/vllm_gpu.json"))
    asked = parser.parse_args()
    clock = Clock(asked.limit_s)
    arguments: dict[str, Any] = {"attention_backend": asked.attention_backend} if asked.attention_backend else {}
    variants = {
        name if transport == "auto" else f"{name}, {transport}": VARIANTS[name] | {"transport": transport}
        for transport in asked.transports
        for name in asked.updates
    }
    start_ray()
    if asked.tensor_parallel_size > 1:
        arguments["tensor_parallel_size"] = asked.tensor_parallel_size
    with tempfile.TemporaryDirectory() as folder:
        measured = run(Path(folder), MODELS[asked.model], asked.rounds, arguments, asked.engines, variants, clock)
    packages = ("torch", "ray", "vllm", "cupy-cuda13x", "cupy-cuda12x", "weightsync")
    settings = {
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "rounds": asked.rounds,
        "model": MODELS[asked.model],
        "attention_backend": asked.attention_backend,
        "tensor_parallel_size": asked.tensor_parallel_size,
    }
    write_record(asked.out, packages, settings | {"measured": {name: asdict(of) for name, of in measured.items()}})
    Console(width=160).print(table(asked.model, measured))


if __name__ == "__main__":
    main()
