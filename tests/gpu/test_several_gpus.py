"""A Qwen3-MoE in a vLLM engine of two tensor-parallel ranks, each on a GPU of its own; the trainer is on the first of them.

Its size is 3.65 GB, or 16.2 GB where WEIGHTSYNC_TEST_LARGE_MOE is set.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import weightsync as ws
from weightsync.testing.random_moe import MOE_3_65_GB, MOE_16_2_GB, MoeEngine, MoeTrainer, Outputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SIZES: dict[str, int] = MOE_16_2_GB if os.environ.get("WEIGHTSYNC_TEST_LARGE_MOE") else MOE_3_65_GB
OLD, NEW = 1, 2
SEEDS = [NEW, OLD, *range(3, 10), NEW]
BOUND_S = 60


class SlowTrainer(MoeTrainer):
    """Makes its tensors one by one, and takes its time where it was told to."""

    pause_s = 0.0

    def slow_down(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def slowly(self) -> Iterator[tuple[str, torch.Tensor]]:
        for item in self.made():
            time.sleep(self.pause_s)
            yield item


@pytest.fixture(scope="module")
def trainer(ray_cluster: None) -> Iterator[Any]:
    # Without a GPU of its own an actor sees all of them.
    actor = ray.remote(SlowTrainer).remote(SIZES, "cuda:0")
    yield actor
    ray.kill(actor)


@pytest.fixture(scope="module")
def engines(
    trainer: Any, tmp_path_factory: pytest.TempPathFactory, engine_arguments: dict[str, Any]
) -> Iterator[dict[int, tuple[Any, Outputs]]]:
    """Seed -> an engine that was started on that version, and what it put out then."""
    arguments = engine_arguments | {
        "tensor_parallel_size": 2,
        "kv_cache_memory_bytes": 1 << 30,
        "gpu_memory_utilization": 0.25,
    }
    start = ray.remote(MoeEngine).options(num_cpus=1)
    folders: list[Path] = []
    started = {}
    for seed in (OLD, NEW):
        folders.append(tmp_path_factory.mktemp(f"moe-{seed}"))
        ray.get(trainer.set.remote(seed))
        ray.get(trainer.write.remote(str(folders[-1])))
        started[seed] = start.remote(str(folders[-1]), arguments, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    found = {seed: (engine, ray.get(engine.outputs.remote())) for seed, engine in started.items()}
    assert found[OLD][1] != found[NEW][1]
    for folder in folders:
        shutil.rmtree(folder)
    yield found
    for engine in started.values():
        ray.kill(engine)


@pytest.mark.parametrize("direct_apply", ["auto", "off"])
def test_two_ranks_equal_a_fresh_engine_after_one_two_and_ten_updates(
    direct_apply: str, trainer: Any, engines: dict[int, tuple[Any, Outputs]]
) -> None:
    engine, _ = engines[OLD]
    config = {"direct_apply": direct_apply}
    with ws.connect(trainers=[trainer], engines=[engine], source="weights", target="llm", config=config) as sync:
        for number, seed in enumerate(SEEDS, 1):
            ray.get(trainer.set.remote(seed))
            report = sync.update()
            rows = [row for row in report.ranks if row.rank.startswith("engine")]
            assert len({row.pid for row in rows}) == 2
            assert [row.reloads for row in rows] == [1, 1] or (direct_apply == "auto" and number > 1)
            if number in (1, 2, 10):
                assert ray.get(engine.outputs.remote()) == engines[seed][1]
        assert direct_apply == "off" or [row.reloads for row in rows] == [0, 0]


def test_a_worker_that_is_killed_in_mid_update_is_named_and_the_retry_is_exact_in_another_engine(
    trainer: Any, engines: dict[int, tuple[Any, Outputs]]
) -> None:
    """Last in this file: it ends the first engine."""
    (engine, _), (other, _) = engines[OLD], engines[NEW]
    config = {"timeout_s": BOUND_S}
    with ws.connect(trainers=[trainer], engines=[engine], source="slowly", target="llm", config=config) as sync:
        ray.get(trainer.set.remote(NEW))
        pid = {row.rank: row.pid for row in sync.update().ranks}["engine 0 rank 1"]
        assert ray.get(engine.outputs.remote()) == engines[NEW][1]
        ray.get([trainer.set.remote(OLD), trainer.slow_down.remote(0.02)])
        threading.Timer(3.0, os.kill, (pid, signal.SIGKILL)).start()
        started = time.monotonic()
        with pytest.raises(ws.WeightSyncError, match=rf"engine 0 rank 1 \(.*pid {pid}\) is gone"):
            sync.update()
        assert time.monotonic() - started < BOUND_S
    ray.get(trainer.slow_down.remote(0.0))
    with ws.connect(trainers=[trainer], engines=[other], source="slowly", target="llm", config=config) as sync:
        sync.update()
        assert ray.get(other.outputs.remote()) == engines[OLD][1]
