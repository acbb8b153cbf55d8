"""A Qwen3-MoE, trainer and vLLM engine on one GPU: after each update the engine cannot be told from a fresh one.

Its size is 3.65 GB, or 16.2 GB where WEIGHTSYNC_TEST_LARGE_MOE is set.

Each engine is an actor of its own. The eager one's core is a process of its own besides, as is vLLM's default; the one with
CUDA graphs runs in its actor.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import weightsync as ws
from weightsync.testing.random_moe import CUDA_GRAPHS, MOE_3_65_GB, MOE_16_2_GB, MoeEngine, MoeTrainer, Outputs

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.timeout(600)]

SIZES: dict[str, int] = MOE_16_2_GB if os.environ.get("WEIGHTSYNC_TEST_LARGE_MOE") else MOE_3_65_GB
DEVICE = "cuda"
AUTO = "cuda_ipc"
"""What transport "auto" chooses here."""
GPU_SHARE = {"trainer": 0.1, "engine": 0.3}
OLD, NEW = 1, 2
"""Seeds of the two versions that fresh engines are started on."""
SEEDS = [NEW, OLD, *range(3, 10), NEW]
CHUNK_BYTES = 64 << 20
FILL = 0.015625


@dataclass
class Parties:
    trainer: Any
    engine: Any
    expected: dict[int, Outputs]
    """Seed -> what a fresh engine puts out."""
    folders: dict[int, Path]

    def connect(self, source: str = "weights", **config: Any) -> ws.WeightSync:
        return ws.connect(trainers=[self.trainer], engines=[self.engine], source=source, target="llm", config=config)

    def update(self, sync: ws.WeightSync, seed: int) -> ws.UpdateReport:
        ray.get(self.trainer.set.remote(seed))
        return sync.update()

    def outputs(self) -> Outputs:
        found: Outputs = ray.get(self.engine.outputs.remote())
        return found

    def on_engine(self, function: Callable[[Any], Any]) -> Any:
        return ray.get(self.engine.__ray_call__.remote(function))

    def on_worker(self, *function: Any) -> Any:
        return ray.get(self.engine.on_worker.remote(*function))


@pytest.fixture(scope="module")
def trainer(ray_cluster: None) -> Iterator[Any]:
    actor = ray.remote(MoeTrainer).options(num_gpus=GPU_SHARE["trainer"]).remote(SIZES, DEVICE)
    yield actor
    ray.kill(actor)


@pytest.fixture(scope="module")
def folders(trainer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Path]]:
    """Both versions as checkpoints; removed at the end, since they are large."""
    found = {seed: tmp_path_factory.mktemp(f"moe-{seed}") for seed in (OLD, NEW)}
    for seed, folder in found.items():
        ray.get(trainer.set.remote(seed))
        ray.get(trainer.write.remote(str(folder)))
    yield found
    for folder in found.values():
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module", params=[True, False], ids=["eager", "CUDA graphs"])
def parties(
    request: pytest.FixtureRequest, trainer: Any, folders: dict[int, Path], engine_arguments: dict[str, Any]
) -> Iterator[Parties]:
    """The engine begins with the old version, and notes what it puts out while it is fresh."""
    eager = request.param
    # A set size of the KV cache: vLLM would measure what is free, which engines that start or end beside it disturb.
    arguments = engine_arguments | {
        "enforce_eager": eager,
        "enable_sleep_mode": eager,
        "kv_cache_memory_bytes": 1 << 30,
        "gpu_memory_utilization": 0.25,
    }
    arguments |= {} if eager else {"compilation_config": CUDA_GRAPHS}
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if eager else "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # for the functions that these tests run in the worker
    }
    start = ray.remote(MoeEngine).options(num_gpus=GPU_SHARE["engine"])
    engine = start.remote(str(folders[OLD]), arguments, environment)
    expected = {}
    if not eager:  # what it compiles is found by the next one
        expected[OLD] = ray.get(engine.outputs.remote())
    fresh = start.remote(str(folders[NEW]), arguments, environment)
    expected |= {OLD: ray.get(engine.outputs.remote()), NEW: ray.get(fresh.outputs.remote())}
    assert expected[OLD] != expected[NEW]
    end(fresh)
    yield Parties(trainer, engine, expected, folders)
    end(engine)


def end(engine: Any) -> None:
    ray.get(engine.stop.remote())
    ray.kill(engine)


def reloads(report: ws.UpdateReport) -> list[int]:
    return [row.reloads for row in report.ranks if row.rank.startswith("engine")]


@pytest.mark.parametrize("direct_apply", ["auto", "off", "audit"])
def test_an_engine_equals_a_fresh_one_after_one_two_and_ten_updates(direct_apply: str, parties: Parties) -> None:
    with parties.connect(direct_apply=direct_apply, audit_every=4) as sync:
        for number, seed in enumerate(SEEDS, 1):
            report = parties.update(sync, seed)
            assert set(report.transports.values()) == {AUTO}
            # One reload at most, whatever the chunking; none where every module group is copied instead.
            assert reloads(report) in ([[1]] if direct_apply == "off" or number == 1 else [[0], [1]])
            if number in (1, 2, 10):
                assert parties.outputs() == parties.expected[seed]
        assert report.load[0].fallback is None
        assert report.load[0].unmapped == ()


CHUNKINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "read in place, streaming": ("weights", {"apply": "streaming"}),
    "read in place, streaming, reloaded": ("weights", {"apply": "streaming", "direct_apply": "off"}),
    "read in place, without digests": ("weights", {"digest": False}),
    "made one by one, staged": ("made", {"gpu_bucket_bytes": "1MiB"}),
    "made one by one, in buckets": (
        "made",
        {"apply": "streaming", "staging_limit_bytes": "512MiB", "gpu_bucket_bytes": "16MiB"},
    ),
    "shared_memory": ("weights", {"transport": "shared_memory", "bucket_bytes": "1MiB"}),
    "broadcast": ("weights", {"transport": "broadcast", "bucket_bytes": "1MiB", "gpu_bucket_bytes": "1MiB"}),
}


@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_an_engine_equals_a_fresh_one_after_every_chunking(chunking: str, parties: Parties) -> None:
    source, settings = CHUNKINGS[chunking]
    with parties.connect(source, **settings) as sync:
        for seed in (OLD, NEW):
            report = parties.update(sync, seed)
            assert set(report.transports.values()) == {settings.get("transport", AUTO)}
            assert report.apply == settings.get("apply", "staged")
            assert max(reloads(report)) <= 1
            assert parties.outputs() == parties.expected[seed]
        assert sync.verify().version == report.version
        assert parties.outputs() == parties.expected[NEW]


@pytest.mark.parametrize("parties", [True], indirect=True, ids=["eager"])
def test_weights_that_sleep_threw_away_come_back_before_the_cache_wakes(parties: Parties) -> None:
    with parties.connect(apply="streaming") as sync:
        for seed in (OLD, NEW):
            parties.update(sync, seed)
        parties.on_engine(lambda engine: engine.llm.sleep(level=2))
        with pytest.raises(ws.EngineStateError, match=r"weights are not in memory; call wake_up"):
            parties.update(sync, OLD)
        parties.on_engine(lambda engine: engine.llm.wake_up(tags=["weights"]))
        parties.update(sync, OLD)
        parties.on_engine(lambda engine: engine.llm.wake_up(tags=["kv_cache"]))
        assert parties.outputs() == parties.expected[OLD]


def test_one_reload_per_chunk_corrupts_and_the_next_update_repairs(parties: Parties) -> None:
    with parties.connect() as sync:
        parties.update(sync, NEW)
        assert parties.outputs() == parties.expected[NEW]
        parties.on_worker(remember)
        assert parties.on_worker(differing) == []

        # The very same weights once more, the old way. It raises nothing.
        count = parties.on_worker(reload_per_chunk, str(parties.folders[NEW] / "model.safetensors"), CHUNK_BYTES)
        assert count > 10
        assert any("experts" in name for name in parties.on_worker(differing))
        ray.get(parties.engine.forget_prompts.remote())  # vLLM leaves that to its caller
        assert parties.outputs() != parties.expected[NEW]
        with pytest.raises(ws.EnginePoisonedError, match=r"engine 0 rank 0: it held other values in .*experts"):
            sync.verify()

        parties.update(sync, NEW)
        assert parties.on_worker(differing) == []
        assert parties.outputs() == parties.expected[NEW]


def live_tensors(worker: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in worker.model_runner.get_model().named_parameters()}


def remember(worker: Any) -> None:
    """Keep a copy of the weights as they are now."""
    worker.remembered = {name: tensor.clone() for name, tensor in live_tensors(worker).items()}


def differing(worker: Any) -> list[str]:
    """Which weights are not as remembered, bit for bit."""
    return [name for name, tensor in live_tensors(worker).items() if not torch.equal(tensor, worker.remembered[name])]


def reload_per_chunk(worker: Any, file: str, chunk_bytes: int) -> int:
    """vLLM's own reload, once for each chunk; returns how often.

    What a rebuilt module holds where nothing was written is chance; here a number is written there first, so that it shows
    each time. Not NaN, which experts' routing may not survive.
    """
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import meta

    plain = meta.materialize_meta_tensor

    def filled(tensor: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = plain(tensor)
        return made.fill_(FILL) if made.is_floating_point() else made

    chunks: list[list[tuple[str, torch.Tensor]]] = [[]]
    nbytes = 0
    for name, tensor in load_file(file, device=str(worker.device)).items():
        if nbytes + tensor.nbytes > chunk_bytes and chunks[-1]:
            chunks.append([])
            nbytes = 0
        chunks[-1].append((name, tensor))
        nbytes += tensor.nbytes
    meta.materialize_meta_tensor = filled
    try:
        with set_current_vllm_config(worker.vllm_config):
            for chunk in chunks:
                worker.model_runner.reload_weights(weights_iterator=iter(chunk))
    finally:
        meta.materialize_meta_tensor = plain
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return len(chunks)
