"""A Qwen3-MoE in a vLLM engine of two tensor-parallel ranks, each on a GPU of its own; the trainer is on the first of them,
or two FSDP2 ranks are, one on each.

Its size is 3.65 GB, or 16.2 GB where WEIGHTSYNC_TEST_LARGE_MOE is set.
"""

from __future__ import annotations

import math
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
from tests.gathers import refuse_gathers
from weightsync.testing.modules import nested_module
from weightsync.testing.random_moe import (
    MOE_3_65_GB,
    MOE_16_2_GB,
    MoeEngine,
    MoeTrainer,
    Outputs,
    moe_shapes,
    moe_weights,
)

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
NUM_SHARDS = 2


class SlowTrainer(MoeTrainer):
    """Makes its tensors one by one, and takes its time where it was told to."""

    pause_s = 0.0

    def slow_down(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def slowly(self) -> Iterator[tuple[str, torch.Tensor]]:
        for item in self.made():
            time.sleep(self.pause_s)
            yield item


class FsdpTrainer:
    """One of two FSDP2 ranks, on a GPU of its own. It holds its shards; tensors are made whole one at a time."""

    def __init__(self, rank: int, store: str) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", init_method=f"file://{store}/ranks", rank=rank, world_size=NUM_SHARDS
        )
        self.model = nested_module(dict(moe_weights(SIZES, OLD, self.device)))
        fully_shard(self.model, mesh=init_device_mesh("cuda", (NUM_SHARDS,)))
        refuse_gathers()

    def set(self, seed: int) -> None:
        from torch.distributed.tensor import distribute_tensor

        parameters: dict[str, Any] = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, whole in moe_weights(SIZES, seed, self.device):
                to = parameters[name]
                # Each rank keeps its part of what it made itself: nothing is sent.
                to.copy_(distribute_tensor(whole, to.device_mesh, to.placements, src_data_rank=None))


@pytest.fixture(scope="module")
def fsdp_trainers(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    store = tmp_path_factory.mktemp("store")
    actors = [ray.remote(FsdpTrainer).remote(rank, str(store)) for rank in range(NUM_SHARDS)]
    yield actors
    for actor in actors:
        ray.kill(actor)


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


@pytest.mark.parametrize("direct_apply", ["auto", "off"])
@pytest.mark.parametrize("transport", ["sharded_cuda_ipc", "sharded_rdt"])
def test_two_ranks_pull_their_own_slices_from_two_fsdp_ranks(
    transport: str, direct_apply: str, fsdp_trainers: list[Any], engines: dict[int, tuple[Any, Outputs]]
) -> None:
    engine, _ = engines[OLD]
    config = {"transport": transport, "direct_apply": direct_apply, "timeout_s": BOUND_S}
    whole = sum(2 * math.prod(shape) for shape in moe_shapes(SIZES).values())
    with ws.connect(trainers=fsdp_trainers, engines=[engine], source="model", target="llm", config=config) as sync:
        for seed in (NEW, OLD, NEW):
            ray.get([trainer.set.remote(seed) for trainer in fsdp_trainers])
            report = sync.update()
            assert ray.get(engine.outputs.remote()) == engines[seed][1]
        assert set(report.transports.values()) == {transport}
        rows = {row.rank: row for row in report.ranks}
        received = [rows[f"engine 0 rank {i}"].nbytes for i in range(2)]
        assert whole < sum(received) < 1.1 * whole  # norms and routers go to both
        assert max(received) < 0.55 * whole
        assert sum(rows[f"trainer {i}"].nbytes for i in range(NUM_SHARDS)) == sum(received)


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
