"""vLLM engines in Ray actors: tensor-parallel, multiprocess and asynchronous ones, and what happens when they fail."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray
import torch

import weightsync as ws
from examples.vllm_actors import AsyncRollouts, Rollouts
from tests.gathers import refuse_gathers
from weightsync.chunk import ALIGNMENT_BYTES
from weightsync.geometry import coverage
from weightsync.loadmap import LoadMap
from weightsync.needs import Needs
from weightsync.testing.modules import nest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROMPTS = [[5, 9, 200, 17, 33, 2], [1, 2, 3, 4], [77] * 20]
NUM_SHARDS = 4
PATIENCE_S = 180
LONG_ANSWER = 240
"""Tokens: an update begins before so many are there."""
LONG_PROMPT = [1 + i % 200 for i in range(70)]
"""Longer than two blocks of the cache."""
EXTENSION = {
    "PYTHONPATH": str(Path(__file__).parent / "extension"),
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
}


class Trainer:
    """Any user's class: weightsync asks nothing of it."""

    def __init__(self, folder: str) -> None:
        self.load(folder)
        self.delay_s = 0.0

    def load(self, folder: str) -> None:
        self.weights = torch.load(Path(folder) / "memory.pt")

    def slow_down(self, delay_s: float) -> None:
        self.delay_s = delay_s

    def slowly(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.weights.items():
            time.sleep(self.delay_s)
            yield name, tensor


class ShardedTrainer:
    """One of four FSDP2 ranks."""

    def __init__(self, rank: int, folder: str, store: str) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo", init_method=f"file://{store}/ranks", rank=rank, world_size=NUM_SHARDS)
        self.model = Tensors(torch.load(Path(folder) / "memory.pt"))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (NUM_SHARDS,)))

    def load(self, folder: str) -> None:
        """Every rank its own part."""
        from torch.distributed.tensor import distribute_tensor

        weights = torch.load(Path(folder) / "memory.pt")
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                of: Any = parameter
                of.copy_(distribute_tensor(weights[name], of.device_mesh, of.placements))

    def never_gather(self) -> None:
        refuse_gathers()


class Engine(Rollouts):
    def __init__(self, folder: str, arguments: dict[str, Any], run: Callable[[Any], Any]) -> None:
        super().__init__(folder, **arguments)
        self.run = run

    def outputs(self) -> Any:
        return self.run(self.llm)

    def load_maps(self, manifest: bytes) -> Any:
        return self.llm.collective_rpc("weightsync_load_map", args=(manifest,))

    def plant(self, *fault: Any) -> None:
        self.llm.collective_rpc("weightsync_plant", args=fault)


class AsyncEngine(AsyncRollouts):
    def __init__(self, folder: str, arguments: dict[str, Any]) -> None:
        super().__init__(folder, **arguments)
        self.num_outputs = 0

    async def ask(self, prompt: list[int], count: int) -> tuple[list[int], list[str], int]:
        """(tokens, the versions that made them, how many tokens of the prompt were found in the cache)"""
        from vllm import SamplingParams

        asked = SamplingParams(temperature=0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False)
        async for output in self.llm.generate({"prompt_token_ids": prompt}, asked, request_id=os.urandom(8).hex()):
            last = output
            self.num_outputs += 1
        said = last.outputs[0]
        return list(said.token_ids), [span.version for span in said.weight_versions or ()], last.num_cached_tokens

    async def tokens(self, prompt: list[int], count: int) -> list[int]:
        return (await self.ask(prompt, count))[0]

    async def next_output(self) -> None:
        """Wait until a request has got further."""
        before = self.num_outputs
        while self.num_outputs == before:
            await asyncio.sleep(0.002)

    async def plant(self, *fault: Any) -> None:
        await self.llm.collective_rpc("weightsync_plant", args=fault)


class Tensors(torch.nn.Module):
    """A module of any names; its output is the sum of all it holds."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        nest(self, {name: tensor.clone() for name, tensor in tensors.items()})

    def forward(self) -> torch.Tensor:
        return torch.stack([tensor.double().sum() for tensor in self.parameters()]).sum()


class ModuleEngine:
    """An engine of another kind in the same weight sync."""

    def __init__(self, folder: str) -> None:
        self.llm = Tensors(torch.load(Path(folder) / "memory.pt"))

    def total(self) -> float:
        return float(self.llm())


def total(folder: Path) -> float:
    return float(Tensors(torch.load(folder / "memory.pt"))())


@pytest.fixture(scope="module")
def trainer(ray_cluster: None, moe: tuple[Path, Path]) -> Any:
    return ray.remote(Trainer).options(num_cpus=0.5).remote(str(moe[1]))


@pytest.fixture(scope="module")
def tp_engines(
    ray_cluster: None, moe: tuple[Path, Path], engine_arguments: dict[str, Any], outputs: Any
) -> Iterator[list[Any]]:
    """On the old weights and on the new ones, with two ranks each."""
    arguments = engine_arguments | {
        "tensor_parallel_size": 2,
        "worker_extension_cls": "recording_extension.RecordingExtension",
    }
    start = ray.remote(Engine).options(num_cpus=1, runtime_env={"env_vars": EXTENSION})
    engines = [start.remote(str(folder), arguments, outputs) for folder in moe]
    yield engines
    for engine in engines:
        ray.kill(engine)


@pytest.fixture(scope="module")
def async_engine(ray_cluster: None, moe: tuple[Path, Path], engine_arguments: dict[str, Any]) -> Iterator[Any]:
    arguments = engine_arguments | {
        "block_size": 32,
        "max_model_len": 256,
        "worker_extension_cls": "recording_extension.RecordingExtension",
    }
    start = ray.remote(AsyncEngine).options(num_cpus=1, runtime_env={"env_vars": EXTENSION})
    engine = start.remote(str(moe[0]), arguments)
    yield engine
    ray.kill(engine)


# ---- tensor parallel ------------------------------------------------------------------------------------------------


def test_two_tensor_parallel_ranks_equal_a_fresh_engine_and_get_their_own_slices(
    trainer: Any, moe: tuple[Path, Path], tp_engines: list[Any]
) -> None:
    engine, fresh = tp_engines
    before, expected = ray.get([engine.outputs.remote(), fresh.outputs.remote()])
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


def pulled() -> dict[str, int]:
    """Rank -> bytes that its sidecar has read over NIXL."""
    names = [row["name"] for row in ray.util.list_named_actors(all_namespaces=True) if "sidecar of" in row["name"]]
    asked = {
        name.split(" of ")[1].rpartition(" ")[0]: ray.get_actor(name, namespace="weightsync").nbytes_pulled.remote()
        for name in names
    }
    return {rank: ray.get(ref) for rank, ref in asked.items()}


def test_two_replicas_of_two_ranks_pull_their_own_slices_from_four_fsdp_ranks(
    moe: tuple[Path, Path], tp_engines: list[Any], tmp_path: Path
) -> None:
    # Each engine is a fresh one of its folder's weights until it gets others.
    wanted = dict(zip(moe, ray.get([engine.outputs.remote() for engine in tp_engines]), strict=True))
    trainers = [
        ray.remote(ShardedTrainer).options(num_cpus=0.1).remote(rank, str(moe[0]), str(tmp_path))
        for rank in range(NUM_SHARDS)
    ]
    ray.get([trainer.never_gather.remote() for trainer in trainers])
    config = {"transport": "sharded_rdt", "bucket_bytes": "64KiB", "timeout_s": 60}
    with ws.connect(trainers=trainers, engines=tp_engines, source="model", target="llm", config=config) as sync:
        for folder in (moe[1], moe[0]):
            ray.get([trainer.load.remote(str(folder)) for trainer in trainers])
            before = pulled()
            report = sync.update()
            moved = {rank: nbytes - before[rank] for rank, nbytes in pulled().items()}
            assert [ray.get(engine.outputs.remote()) for engine in tp_engines] == [wanted[folder]] * 2
        assert set(report.transports.values()) == {"sharded_rdt"}
    over_memory = config | {"transport": "sharded_shared_memory"}
    with ws.connect(trainers=trainers, engines=tp_engines, source="model", target="llm", config=over_memory) as sync:
        for folder in (moe[1], moe[0]):
            ray.get([trainer.load.remote(str(folder)) for trainer in trainers])
            other = {row.rank: row.nbytes for row in sync.update().ranks}
            assert [ray.get(engine.outputs.remote()) for engine in tp_engines] == [wanted[folder]] * 2
    manifest = ws.Manifest.from_tensors(torch.load(moe[0] / "memory.pt"))
    maps = ray.get(tp_engines[0].load_maps.remote(msgspec.msgpack.encode(manifest)))
    rows = {row.rank: row for row in report.ranks}
    for i, encoded in enumerate(maps):
        needs = Needs.of(msgspec.msgpack.decode(encoded, type=LoadMap), manifest)
        slices = needs.nbytes(manifest)
        num_pulls = NUM_SHARDS * sum(map(len, needs.boxes.values()))
        for rank in (f"engine {replica} rank {i}" for replica in range(2)):
            assert rows[rank].nbytes == other[rank] == slices
            assert slices <= moved[rank] <= slices + num_pulls * ALIGNMENT_BYTES
            assert rows[rank].peak_staging_bytes < 0.7 * manifest.nbytes
    for trainer in trainers:
        ray.kill(trainer)


def test_a_rank_that_fails_alone_poisons_its_engine_and_the_retry_is_exact(
    trainer: Any, moe: tuple[Path, Path], tp_engines: list[Any]
) -> None:
    engine = tp_engines[0]
    before = ray.get(engine.outputs.remote())
    ray.get(trainer.load.remote(str(moe[1])))
    with ws.connect(trainers=[trainer], engines=[engine], source="weights", target="llm") as sync:
        sync.update()
        expected = ray.get(engine.outputs.remote())
        ray.get(trainer.load.remote(str(moe[0])))
        ray.get(engine.plant.remote(1, "raise", 0))
        with pytest.raises(ws.EnginePoisonedError, match=r"engine 0 rank 1: RuntimeError: planted"):
            sync.update()
        with pytest.raises(
            ws.EnginePoisonedError, match=r"engine 0 may hold mixed weights: version \d+ .*rank 1.*planted"
        ):
            ray.get(engine.outputs.remote())
        sync.update()
        assert ray.get(engine.outputs.remote()) == before != expected


@pytest.mark.parametrize("moment", ["transfer", "apply"])
def test_a_worker_that_is_killed_is_named_and_the_others_go_on_without_its_engine(
    moment: str, trainer: Any, moe: tuple[Path, Path], tp_engines: list[Any]
) -> None:
    """Last in this file for these engines: each loses one."""
    engine = tp_engines[0 if moment == "transfer" else 1]
    beside = ray.remote(ModuleEngine).options(num_cpus=0.1).remote(str(moe[0]))
    ray.get(trainer.load.remote(str(moe[0])))
    with ws.connect(
        trainers=[trainer],
        engines=[engine, beside],
        source="slowly",
        target="llm",
        config={"timeout_s": 60, "bucket_bytes": 1},
    ) as sync:
        pid = {row.rank: row.pid for row in sync.update().ranks}["engine 0 rank 1"]
        ray.get(trainer.load.remote(str(moe[1])))
        if moment == "transfer":
            ray.get(trainer.slow_down.remote(0.3))
            threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()
            error: type[ws.WeightSyncError] = ws.TransportError
        else:
            ray.get(engine.plant.remote(1, "die", 5))
            error = ws.EnginePoisonedError
        started = time.monotonic()
        with pytest.raises(error, match=rf"engine 0 rank 1 \(.*pid {pid}\) is gone") as caught:
            sync.update()
        assert time.monotonic() - started < 60
        assert str(caught.value.rank).startswith("engine 0")
        # The vote had not fallen: nobody takes the version. It had: everybody else does.
        assert ray.get(beside.total.remote()) == total(moe[0 if moment == "transfer" else 1])
        refusal = r"vLLM is down|EngineDead" if moment == "apply" else "EngineDead"
        with pytest.raises(Exception, match=refusal):
            ray.get(engine.outputs.remote(), timeout=PATIENCE_S)
        ray.get(trainer.slow_down.remote(0.0))
        sync.remove_engine(engine)
        sync.update()
        assert ray.get(beside.total.remote()) == total(moe[1])
    with pytest.raises(ws.TransportError, match=rf"vLLM is down.*pid {pid}"):
        ws.connect(trainers=[trainer], engines=[engine], source="weights", target="llm")
    ray.kill(beside)


# ---- asynchronous ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wanted(moe: tuple[Path, Path], reference: Any) -> dict[Path, list[list[int]]]:
    """What fresh engines say to PROMPTS."""
    return {folder: [tokens for tokens, _, _ in reference(folder)] for folder in moe}


def served(engine: Any) -> list[list[int]]:
    return [ray.get(engine.tokens.remote(prompt, 8), timeout=PATIENCE_S) for prompt in PROMPTS]


def test_an_async_engine_generates_during_updates_and_is_exact_after_them(
    trainer: Any, moe: tuple[Path, Path], async_engine: Any, wanted: dict[Path, list[list[int]]]
) -> None:
    engine = async_engine
    assert served(engine) == wanted[moe[0]]
    with ws.connect(trainers=[trainer], engines=[engine], source="weights", target="llm") as sync:
        spanned = 0
        for i in range(9):
            if spanned >= 2 and i % 2:  # it ends with the new weights
                break
            folder = moe[(i + 1) % 2]
            ray.get(trainer.load.remote(str(folder)))
            long_request = engine.ask.remote(PROMPTS[0], LONG_ANSWER)
            report = sync.update()
            tokens, versions, _ = ray.get(long_request, timeout=PATIENCE_S)
            assert len(tokens) == LONG_ANSWER, "a request in flight goes on after the pause"
            assert versions[-1] in (str(report.version), str(report.version - 1))
            spanned += versions[-1] == str(report.version)  # else it was done before the pause
            assert served(engine) == wanted[folder]
            assert 0 < report.pause_s < report.seconds
            spans = {(span.rank, span.phase): span for span in report.attempts[-1].spans}
            paused, applied = spans["engine 0", "pause"], spans["engine 0 rank 0", "apply"]
            assert paused.seconds == report.pause_s
            assert paused.start_s <= applied.start_s + 0.01
            assert applied.seconds < report.phases["apply"]
            # The second time its blocks are there, and after the update they are not.
            found = [ray.get(engine.ask.remote(LONG_PROMPT, 1), timeout=PATIENCE_S) for _ in range(2)]
            assert [(versions, cached) for _, versions, cached in found] == [
                ([str(report.version)], 0),
                ([str(report.version)], 64),
            ]
    assert spanned >= 2
    for pause, served_tokens in (("wait", LONG_ANSWER), ("abort", None)):
        with ws.connect(
            trainers=[trainer], engines=[engine], source="weights", target="llm", config={"pause": pause}
        ) as sync:
            long_request = engine.tokens.remote(PROMPTS[0], LONG_ANSWER)
            ray.get(engine.next_output.remote(), timeout=PATIENCE_S)
            sync.update()
            count = len(ray.get(long_request, timeout=PATIENCE_S))
            assert count == served_tokens if served_tokens is not None else count < LONG_ANSWER
            assert served(engine) == wanted[moe[1]]


def test_an_async_engine_that_salts_its_cache_is_exact_without_a_flush(
    trainer: Any, moe: tuple[Path, Path], async_engine: Any, wanted: dict[Path, list[list[int]]]
) -> None:
    settings = {"version_salt": True, "on_commit": ["set_weight_version"]}
    with ws.connect(
        trainers=[trainer], engines=[async_engine], source="weights", target="llm", config=settings
    ) as sync:
        for folder in (moe[0], moe[1]):
            ray.get(trainer.load.remote(str(folder)))
            sync.update()
            assert served(async_engine) == wanted[folder]
            cached = [ray.get(async_engine.ask.remote(LONG_PROMPT, 1), timeout=PATIENCE_S)[2] for _ in range(2)]
            assert cached == [0, 64]


def test_a_poisoned_async_engine_refuses_new_requests_at_once_and_holds_those_in_flight(
    trainer: Any, moe: tuple[Path, Path], async_engine: Any, wanted: dict[Path, list[list[int]]]
) -> None:
    with ws.connect(trainers=[trainer], engines=[async_engine], source="weights", target="llm") as sync:
        sync.update()
        ray.get(trainer.load.remote(str(moe[0])))
        ray.get(async_engine.plant.remote(0, "raise", 5))
        long_request = async_engine.ask.remote(PROMPTS[0], LONG_ANSWER)
        with pytest.raises(ws.EnginePoisonedError, match="planted"):
            sync.update()
        for _ in range(2):
            with pytest.raises(
                ws.EnginePoisonedError, match=r"engine 0 may hold mixed weights: version \d+ was not .*planted"
            ):
                ray.get(async_engine.tokens.remote(PROMPTS[0], 8), timeout=10)
        assert not ray.wait([long_request], timeout=0.5)[0]
    with ws.connect(trainers=[trainer], engines=[async_engine], source="weights", target="llm") as sync:
        assert not ray.wait([long_request], timeout=0.5)[0], "connecting again lifts nothing"
        report = sync.update()
        tokens, versions, _ = ray.get(long_request, timeout=PATIENCE_S)
        assert (len(tokens), versions[-1]) == (LONG_ANSWER, str(report.version))
        assert served(async_engine) == wanted[moe[0]]


def test_an_async_engine_goes_on_when_the_coordinator_died_while_it_was_paused(
    trainer: Any, moe: tuple[Path, Path], async_engine: Any, wanted: dict[Path, list[list[int]]], tmp_path: Path
) -> None:
    ray.get(trainer.load.remote(str(moe[1])))
    log = tmp_path / "versions"
    settings = {"version_log": str(log)}
    with ws.connect(
        trainers=[trainer], engines=[async_engine], source="weights", target="llm", config=settings
    ) as sync:
        ray.get(async_engine.plant.remote(0, "5", 5))
        before = log.read_text().count("decide")

        def kill_once_decided() -> None:
            deadline = time.monotonic() + 60
            while log.read_text().count("decide") == before and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(1)  # until the engine applies, which takes 5 s
            ray.kill(sync._coordinator)

        killing = threading.Thread(target=kill_once_decided)
        killing.start()
        long_request = async_engine.ask.remote(PROMPTS[0], LONG_ANSWER)
        with pytest.raises(ws.CoordinatorLostError):
            sync.update()
        killing.join()
        assert not ray.wait([long_request], timeout=0.5)[0]
        version = sync.version  # another coordinator; the log says that this version was decided on
        tokens, versions, _ = ray.get(long_request, timeout=PATIENCE_S)
        assert (len(tokens), versions[-1]) == (LONG_ANSWER, str(version))
        assert served(async_engine) == wanted[moe[1]]
