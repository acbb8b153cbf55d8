"""cuda_ipc between processes and within one, on a real GPU."""

from __future__ import annotations

import gc
import multiprocessing as mp
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

import weightsync as ws
from weightsync.cuda.moves import Moves
from weightsync.errors import DigestError, TransportError
from weightsync.interfaces import LinkContext
from weightsync.testing import LocalSync, TransportSuite, module_engine
from weightsync.testing.link import BUCKET_BYTES, Tensors
from weightsync.testing.transport_bytes import MovesExactBytes

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ON_GPU: dict[str, Any] = {"device": "cuda:0"}
LEAST_S = 3.0
"""The shortest bound: a process that is new to the GPU takes a part of a second for its first transfer."""


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """The kernel: on a machine that has not done so yet, compiling it takes longer than some tests' bounds."""
    source = torch.zeros(64, device="cuda")
    Moves([(source, torch.empty_like(source))], source.device).run(digest=True)


class TestStage(TransportSuite):
    """The tensors come from the CPU, one after the other."""

    transport = "cuda_ipc"
    settings: ClassVar = ON_GPU
    num_tiny_tensors = 2_000

    def context(self, *, timeout_s: float = 20, **others: Any) -> LinkContext:
        return super().context(timeout_s=max(timeout_s, LEAST_S), **others)


class TestStageOfGpuTensors(TestStage):
    def hold(self, tensors: Tensors) -> Callable[[Tensors], Tensors]:
        return lambda values: {name: value.cuda() for name, value in values.items()}


class TestBuckets(TestStageOfGpuTensors):
    settings: ClassVar = ON_GPU | {"staging_limit_bytes": 2 * BUCKET_BYTES, "gpu_bucket_bytes": BUCKET_BYTES}


class TestParameters(MovesExactBytes):
    """The trainer holds its weights on the GPU, and they are read in place."""

    transport = "cuda_ipc"
    settings: ClassVar = ON_GPU
    held = True
    num_tiny_tensors = 2_000

    def hold(self, tensors: Tensors) -> Callable[[Tensors], Tensors]:
        own = {name: tensor.cuda() for name, tensor in tensors.items()}

        def update(values: Tensors) -> Tensors:
            for name, value in values.items():
                own[name].copy_(value)
            return own

        return update


def make(seed: int, device: str = "cuda") -> torch.nn.Module:
    torch.manual_seed(seed)
    model: Any = torch.nn.Sequential(
        torch.nn.Embedding(1000, 256),
        torch.nn.Linear(256, 1024),
        torch.nn.BatchNorm1d(1024),
        torch.nn.Linear(1024, 256),
        torch.nn.Linear(256, 1000, bias=False),
    )
    model[4].weight = model[0].weight
    model[1].weight = torch.nn.Parameter(model[1].weight.detach().t().contiguous().t())  # column-major
    moved: torch.nn.Module = model.to(device)
    return moved


def disturb(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    theirs, ours = one.state_dict(), other.state_dict()
    return all(torch.equal(theirs[name].cpu(), ours[name].cpu()) for name in theirs)


SETTINGS = [
    {"apply": apply, "digest": digest, "staging_limit_bytes": limit, "gpu_bucket_bytes": "1MiB"}
    for apply in ("staged", "streaming")
    for digest in (True, False)
    for limit in ("1GiB", "2MiB")
    if (apply, limit) != ("staged", "2MiB")
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_module_is_exact_after_each_update(settings: dict[str, Any], device: str) -> None:
    trainer, engine = make(1), make(2)
    source: Any = (lambda: trainer) if device == "cuda" else (lambda: iter(trainer.state_dict().items()))
    with LocalSync([source], [module_engine(engine)], ws.SyncConfig(**settings)) as session:
        for _ in range(3):
            report = session.update()
            assert set(report.transports.values()) == {"cuda_ipc"}
            assert same(trainer, engine)
            disturb(trainer)


def test_parameters_that_move_between_updates_are_found_again() -> None:
    trainer, engine = make(1), make(2)
    with LocalSync([lambda: trainer], [module_engine(engine)], ws.SyncConfig()) as session:
        session.update()
        for round in range(4):
            with torch.no_grad():
                for parameter in list(trainer.parameters())[round % 3 :]:
                    parameter.data = torch.randn_like(parameter)
            gc.collect()
            torch.cuda.empty_cache()
            session.update()
            assert same(trainer, engine)


def test_values_are_cast_where_the_engine_has_another_dtype() -> None:
    trainer, engine = make(1), make(2).to(torch.bfloat16)
    with LocalSync([lambda: trainer], [module_engine(engine)], ws.SyncConfig()) as session:
        session.update()
    expected = {name: tensor.to(engine.state_dict()[name].dtype) for name, tensor in trainer.state_dict().items()}
    assert all(torch.equal(expected[name], tensor) for name, tensor in engine.state_dict().items())


def test_a_wire_dtype_is_cast_by_the_trainer() -> None:
    trainer, engine = make(1), make(2).to(torch.bfloat16)
    config = ws.SyncConfig(wire_dtype={"*": "bfloat16"})
    with LocalSync([lambda: trainer], [module_engine(engine)], config) as session:
        for _ in range(2):
            session.update()
            assert all(
                torch.equal(trainer.state_dict()[name].to(tensor.dtype), tensor)
                for name, tensor in engine.state_dict().items()
            )
            disturb(trainer)


@pytest.mark.parametrize("apply", ["staged", "streaming"])
def test_a_weight_that_changes_in_mid_update_is_seen(apply: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from weightsync.transports import cuda_ipc

    trainer, engine = make(1), make(2)
    before = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    with LocalSync([lambda: trainer], [module_engine(engine)], ws.SyncConfig(apply=apply)) as session:
        tell = cuda_ipc.CudaIpcSender._tell

        def late(self: Any, message: Any, **kwargs: Any) -> None:
            if isinstance(message, cuda_ipc.Digests):
                message = cuda_ipc.Digests(bytes([message.digests[0] ^ 1]) + message.digests[1:])
            tell(self, message, **kwargs)

        monkeypatch.setattr(cuda_ipc.CudaIpcSender, "_tell", late)
        error = {"staged": DigestError, "streaming": ws.EnginePoisonedError}[apply]
        with pytest.raises(error, match=r"0\.weight: its bytes differ"):
            session.update()
        monkeypatch.setattr(cuda_ipc.CudaIpcSender, "_tell", tell)
        if apply == "staged":
            assert all(torch.equal(before[name], tensor) for name, tensor in engine.state_dict().items())
        session.update()
        assert same(trainer, engine)


def test_a_gpu_and_a_cpu_engine_take_one_update_over_two_transports() -> None:
    trainer, one, other = make(1), make(2), make(3, "cpu")
    engines = [module_engine(one), module_engine(other)]
    with LocalSync([lambda: trainer], engines, ws.SyncConfig()) as session:
        for _ in range(2):
            report = session.update()
            assert sorted(report.transports.values()) == ["cuda_ipc", "shared_memory"]
            assert same(trainer, one)
            assert same(trainer, other)
            disturb(trainer)


def test_cuda_ipc_refuses_weights_on_the_cpu_before_anything_moves() -> None:
    with pytest.raises(ws.ConfigError, match="not both on a GPU"):  # noqa: SIM117
        with LocalSync([lambda: make(1)], [module_engine(make(2, "cpu"))], ws.SyncConfig(transport="cuda_ipc")):
            pass


def _serve(connection: Any, seed: int) -> None:
    """An engine process: ranks answer encoded calls."""
    from weightsync.receiver import ReceiverRank
    from weightsync.testing.local import in_process_party

    engine = make(seed)
    handle = in_process_party([ReceiverRank(module_engine(engine)[0])])
    while (payload := connection.recv()) is not None:
        if payload == "weights":
            connection.send({name: tensor.cpu() for name, tensor in engine.state_dict().items()})
        elif payload == "memory":
            torch.cuda.synchronize()
            connection.send((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        else:
            connection.send(handle(payload))


class EngineProcess:
    """An engine in a process of its own on the same GPU."""

    def __init__(self, seed: int) -> None:
        context = mp.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, seed), daemon=True)
        self.process.start()

    def ask(self, what: Any) -> Any:
        self.connection.send(what)
        return self.connection.recv()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_engines_in_other_processes_are_exact(settings: dict[str, Any]) -> None:
    trainer = make(1)
    engines = [EngineProcess(seed) for seed in (2, 3)]
    local = LocalSync([lambda: trainer], [], ws.SyncConfig(**settings))
    for engine in engines:
        local.fleet.add(engine.ask)
    with local as session:
        for _ in range(3):
            report = session.update()
            assert set(report.transports.values()) == {"cuda_ipc"}
            for engine in engines:
                held = engine.ask("weights")
                assert all(torch.equal(tensor.cpu(), held[name]) for name, tensor in trainer.state_dict().items())
            disturb(trainer)
    for engine in engines:
        engine.process.kill()


def test_an_engine_that_is_killed_is_a_bounded_error() -> None:
    trainer = make(1)
    engine = EngineProcess(2)
    local = LocalSync([lambda: trainer], [], ws.SyncConfig(timeout_s=5))
    local.fleet.add(engine.ask)
    with local as session:
        session.update()
        engine.process.kill()
        engine.process.join()
        with pytest.raises((TransportError, ws.WeightSyncError)):
            session.update()
