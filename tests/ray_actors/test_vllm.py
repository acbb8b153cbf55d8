"""vLLM engines in Ray actors: tensor-parallel, multiprocess and asynchronous ones."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray
import torch

import weightsync as ws
from weightsync.geometry import coverage
from weightsync.loadmap import LoadMap

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROMPTS = [[5, 9, 200, 17, 33, 2], [1, 2, 3, 4], [77] * 20]


class Trainer:
    """Any user's class: weightsync asks nothing of it."""

    def __init__(self, folder: str) -> None:
        self.load(folder)

    def load(self, folder: str) -> None:
        self.weights = torch.load(Path(folder) / "memory.pt")

    def alive(self) -> bool:
        return True


class Engine:
    def __init__(self, folder: str, arguments: dict[str, Any], run: Callable[[Any], Any]) -> None:
        from vllm import LLM

        self.llm = LLM(folder, **arguments)
        self.run = run

    def outputs(self) -> Any:
        return self.run(self.llm)

    def load_maps(self, manifest: bytes) -> Any:
        return self.llm.collective_rpc("weightsync_load_map", args=(manifest,))


class AsyncEngine:
    def __init__(self, folder: str, arguments: dict[str, Any]) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=folder, **arguments))

    async def tokens(self, prompt: list[int], count: int) -> list[int]:
        from vllm import SamplingParams

        asked = SamplingParams(temperature=0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False)
        async for output in self.llm.generate({"prompt_token_ids": prompt}, asked, request_id=os.urandom(8).hex()):
            last = output
        return list(last.outputs[0].token_ids)


@pytest.fixture(scope="module")
def trainer(ray_cluster: None, moe: tuple[Path, Path]) -> Any:
    return ray.remote(Trainer).options(num_cpus=0.5).remote(str(moe[1]))


def test_two_tensor_parallel_ranks_equal_a_fresh_engine_and_get_their_own_slices(
    trainer: Any, moe: tuple[Path, Path], engine_arguments: dict[str, Any], outputs: Any
) -> None:
    environment = {"PYTHONPATH": str(Path(__file__).parent / "extension"), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    arguments = engine_arguments | {
        "tensor_parallel_size": 2,
        "worker_extension_cls": "recording_extension.RecordingExtension",
    }
    start = ray.remote(Engine).options(num_cpus=1, runtime_env={"env_vars": environment})
    engine, fresh = (start.remote(str(folder), arguments, outputs) for folder in moe)
    before, expected = ray.get([engine.outputs.remote(), fresh.outputs.remote()])
    ray.kill(fresh)
    assert before != expected

    with ws.connect(trainers=[trainer], engines=[engine], source="weights", target="llm") as sync:
        for folder, wanted in ((moe[1], expected), (moe[1], expected), (moe[0], before)):
            ray.get(trainer.load.remote(str(folder)))
            report = sync.update()
            assert ray.get(engine.outputs.remote()) == wanted
            rows = [row for row in report.ranks if row.rank.startswith("engine")]
            assert [(row.rank, row.reloads) for row in rows] == [("engine 0 rank 0", 1), ("engine 0 rank 1", 1)]
            assert len({row.pid for row in rows}) == 2

    manifest = ws.Manifest.from_tensors(torch.load(moe[0] / "memory.pt"))
    encoded = ray.get(engine.load_maps.remote(msgspec.msgpack.encode(manifest)))
    ranks = [msgspec.msgpack.decode(map_, type=LoadMap) for map_ in encoded]
    assert len(ranks) == 2
    for meta in manifest.tensors:
        parts = [[c.source for c in rank.copies if c.name == meta.name and c.source] for rank in ranks]
        read = [coverage(math.prod(meta.shape), part) for part in parts]
        if "norm" in meta.name or meta.name.endswith("mlp.gate.weight"):
            assert all(part.exact for part in read), f"{meta.name} is whole on each rank"
        else:
            assert [part.once for part in read] == [meta.numel // 2] * 2, f"{meta.name} is halved"
            assert coverage(meta.numel, [*parts[0], *parts[1]]).exact, f"the halves of {meta.name} are different ones"
    for rank in ranks:
        assert all(found.exact for found in rank.coverage().values())
    ray.kill(engine)


def test_an_async_engine_generates_during_updates_and_is_exact_after_them(
    trainer: Any, moe: tuple[Path, Path], engine_arguments: dict[str, Any], outputs: Any, reference: Any
) -> None:
    engine = ray.remote(AsyncEngine).options(num_cpus=1).remote(str(moe[0]), engine_arguments)
    wanted = {folder: [tokens for tokens, _, _ in reference(folder)] for folder in moe}

    def served() -> list[list[int]]:
        return [ray.get(engine.tokens.remote(prompt, 8)) for prompt in PROMPTS]

    assert served() == wanted[moe[0]]
    with ws.connect(trainers=[trainer], engines=[engine], source="weights", target="llm") as sync:
        for folder in (moe[1], moe[0], moe[1]):
            ray.get(trainer.load.remote(str(folder)))
            long_request = engine.tokens.remote(PROMPTS[0], 100)
            report = sync.update()
            assert len(ray.get(long_request, timeout=60)) == 100, "a request in flight goes on after the pause"
            assert served() == wanted[folder]
            assert 0 < report.pause_s < report.seconds
    for pause, served_tokens in (("wait", 100), ("abort", None)):
        with ws.connect(
            trainers=[trainer], engines=[engine], source="weights", target="llm", config={"pause": pause}
        ) as sync:
            long_request = engine.tokens.remote(PROMPTS[0], 100)
            time.sleep(0.2)
            sync.update()
            count = len(ray.get(long_request, timeout=60))
            assert count == served_tokens if served_tokens is not None else count < 100
            assert served() == wanted[moe[1]]
    ray.kill(engine)
