"""Engines in doubt refuse requests: plain modules, and vLLM's interfaces in the part of them that the guard stands on."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.ray_actors.sides import FakeAsyncLlm, X, connect, make_module, party, request_of
from weightsync import messages as m
from weightsync.engines.torch_module import TorchModuleAdapter
from weightsync.errors import EnginePoisonedError, EngineStateError, ErrorInfo, WeightSyncError
from weightsync.ray_actors import vllm_side
from weightsync.ray_actors.engine import AsyncVllmSide, ModuleSide, VllmSide, make_engine_side
from weightsync.ray_actors.guard import Doubt, Guard, check_serving
from weightsync.receiver import ReceiverRank

# ---- the guard, and modules -----------------------------------------------------------------------------------------


def test_the_worst_doubt_stands_until_all_are_lifted() -> None:
    guard = Guard()
    guard.check()
    guard.refuse(Doubt.MISSED, "missed")
    guard.refuse(Doubt.UNCOMMITTED, "uncommitted")
    with pytest.raises(EnginePoisonedError, match="missed"):
        guard.check()
    guard.refuse(Doubt.MIXED, "first")
    guard.refuse(Doubt.MIXED, "second")
    with pytest.raises(EnginePoisonedError, match="first"):
        guard.check()
    guard.lift()
    guard.check()
    guard.refuse(Doubt.UNCOMMITTED, "uncommitted")
    with pytest.raises(EngineStateError, match="uncommitted"):
        guard.check()


@pytest.mark.parametrize("apply", ["staged", "streaming"])
def test_a_poisoned_module_refuses_through_close_and_connect_until_an_update_succeeds(
    apply: str, fails_after: list[int]
) -> None:
    trainer, engine = make_module(1), make_module(2)
    side = ModuleSide(engine, lambda: engine)
    session = connect(trainer, party(side), apply=apply)
    session.update()
    assert torch.equal(engine(X), trainer(X))
    fails_after.append(1)
    with pytest.raises(EnginePoisonedError):
        session.update()
    refusal = r"engine 0 may hold mixed weights: version 2 was not applied as a whole \(.*out of memory.*\)"
    with pytest.raises(EnginePoisonedError, match=refusal):
        engine(X)
    session.close()
    with pytest.raises(EnginePoisonedError, match=refusal):
        engine(X)
    session = connect(trainer, party(side), apply=apply)
    with pytest.raises(EnginePoisonedError, match=refusal):
        engine(X)
    session.update()
    assert torch.equal(engine(X), trainer(X))
    assert not engine._forward_pre_hooks, "nothing of the guard is left where it does not refuse"
    session.close()


@pytest.mark.parametrize("apply", ["staged", "streaming"])
def test_a_version_that_may_be_given_up_is_not_served(apply: str) -> None:
    """Staged, the decision falls before the apply; streaming, after it."""
    trainer, engine = make_module(1), make_module(2)
    seen: list[Any] = []

    def watch(request: m.Request, when: str) -> None:
        if isinstance(request, m.Commit) and when == "before":
            try:
                seen.append(engine(X))
            except WeightSyncError as error:
                seen.append(error)

    session = connect(trainer, party(ModuleSide(engine, lambda: engine), watch), apply=apply)
    session.update()
    (served,) = seen
    if apply == "staged":
        assert torch.equal(served, trainer(X))
    else:
        assert isinstance(served, EngineStateError)
        assert "engine 0: version 1 is applied but not committed yet" in str(served)
    assert torch.equal(engine(X), trainer(X))
    session.close()


def test_an_engine_that_missed_a_version_refuses_though_its_weights_are_whole(fails_after: list[int]) -> None:
    trainer, engines = make_module(1), [make_module(2), make_module(3)]
    parties = [party(ModuleSide(engine, lambda engine=engine: engine)) for engine in engines]  # type: ignore[misc]
    session = connect(trainer, *parties)
    session.update()
    before = [parameter.clone() for parameter in trainer.parameters()]
    torch.nn.init.normal_(trainer[0].weight)  # type: ignore[index]
    fails_after.append(0)
    with pytest.raises(EnginePoisonedError):
        session.update()
    (missed,) = [engine for engine in engines if all(map(torch.equal, engine.parameters(), before))]
    with pytest.raises(
        EnginePoisonedError, match=r"has missed version 2, which others have committed \(.*out of memory"
    ):
        missed(X)
    (current,) = [engine for engine in engines if engine is not missed]
    assert torch.equal(current(X), trainer(X))
    session.update()
    assert all(torch.equal(engine(X), trainer(X)) for engine in engines)
    session.close()


def test_an_engine_behind_the_decided_version_refuses_from_connect_on(tmp_path: Path) -> None:
    trainer, engine, late = make_module(1), make_module(2), make_module(3)
    settings = {"version_log": str(tmp_path / "versions")}
    side = ModuleSide(engine, lambda: engine)
    session = connect(trainer, party(side), **settings)
    session.update()
    session.close()
    session = connect(trainer, party(side), party(ModuleSide(late, lambda: late)), **settings)
    assert torch.equal(engine(X), trainer(X))
    with pytest.raises(EnginePoisonedError, match="engine 1 is at version 0, and version 1 was committed"):
        late(X)
    session.update()
    assert torch.equal(late(X), trainer(X))
    session.close()


def test_a_module_is_guarded_again_by_the_side_of_a_later_weight_sync() -> None:
    actor = SimpleNamespace(model=make_module(1))
    first = make_engine_side(actor, "model", 0, None)
    assert make_engine_side(actor, "model", 0, first) is first
    assert isinstance(first, ModuleSide)
    again = ModuleSide(actor.model, lambda: actor.model)
    first.guard.refuse(Doubt.MIXED, "planted")
    with pytest.raises(EnginePoisonedError, match="planted"):
        actor.model(X)
    again.guard.lift()
    actor.model(X)


def test_an_adapter_of_a_users_own_is_a_target_and_its_owner_is_told_when_not_to_serve(fails_after: list[int]) -> None:
    trainer, module = make_module(1), make_module(2)
    actor = SimpleNamespace(adapter=TorchModuleAdapter(module))
    check_serving(actor.adapter)
    side = make_engine_side(actor, "adapter", 0, None)
    session = connect(trainer, party(side))  # type: ignore[arg-type]
    session.update()
    assert torch.equal(module(X), trainer(X))
    check_serving(actor.adapter)
    fails_after.append(1)
    with pytest.raises(EnginePoisonedError):
        session.update()
    with pytest.raises(EnginePoisonedError, match="may hold mixed weights"):
        check_serving(actor.adapter)
    session.update()
    check_serving(actor.adapter)
    session.close()


# ---- vLLM's add_request ---------------------------------------------------------------------------------------------


class FakeCore:
    def __init__(self) -> None:
        self.queue: list[Any] = []
        self.engine_core = SimpleNamespace()
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=False))

    def add_request(self, request_id: str, prompt: Any, params: Any) -> str:
        self.queue.append(prompt)
        return request_id

    def step(self) -> list[Any]:
        return [self.queue.pop()]


class FakeLlm:
    """The part of vllm.LLM that a side touches; two ranks that hold a module each."""

    def __init__(self) -> None:
        self.llm_engine = FakeCore()
        self.ranks = [ReceiverRank(TorchModuleAdapter(make_module(i)), rank=i) for i in range(2)]

    def collective_rpc(self, method: str, args: tuple[bytes]) -> list[bytes]:
        return [m.answer(rank.handle, args[0]) for rank in self.ranks]


def test_requests_are_refused_before_they_are_queued_and_wrapping_twice_wraps_once() -> None:
    llm = FakeLlm()
    guard = VllmSide(llm, lambda: llm).guard
    wrapped = llm.llm_engine.add_request
    assert VllmSide(llm, lambda: llm).guard is guard
    assert llm.llm_engine.add_request is wrapped
    llm.llm_engine.add_request("0", "hello", None)
    guard.refuse(Doubt.MIXED, "planted")
    with pytest.raises(EnginePoisonedError, match="planted"):
        llm.llm_engine.add_request("1", prompt="hello", params=None)
    with pytest.raises(EnginePoisonedError, match="planted"):
        llm.llm_engine.step()
    assert llm.llm_engine.queue == ["hello"]
    guard.lift()
    assert llm.llm_engine.step() == ["hello"]


def test_a_guarded_engine_is_freed_as_soon_as_nobody_holds_it() -> None:
    llm = FakeLlm()
    VllmSide(llm, lambda: None)
    gone = weakref.ref(llm.llm_engine)
    gc.disable()
    try:
        del llm
        assert gone() is None
    finally:
        gc.enable()


def test_an_engine_whose_ranks_are_at_different_versions_refuses_from_connect_on() -> None:
    llm = FakeLlm()
    side = VllmSide(llm, lambda: llm)
    llm.ranks[1]._version = 4
    session = connect(make_module(0), lambda payload: side.call(payload) or [])
    with pytest.raises(EnginePoisonedError, match="engine 0 holds mixed weights: its ranks are at versions 0, 4"):
        llm.llm_engine.add_request("0", "hello", None)
    assert session.status()["admitted"] == []
    session.close()


def test_a_call_to_a_dead_vllm_ends_though_vllm_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, never = FakeLlm(), threading.Event()
    llm.llm_engine.engine_core.utility_results = {}
    plain = llm.collective_rpc
    side = VllmSide(llm, lambda: llm)

    def dies(method: str, args: tuple[bytes]) -> list[bytes]:
        if isinstance(request_of(args[0]), m.Apply):
            monkeypatch.setattr(vllm_side, "process_state", lambda *_: "gone")
            never.wait(60)
        return plain(method, args)

    monkeypatch.setattr(llm, "collective_rpc", dies)
    session = connect(make_module(0), lambda payload: side.call(payload) or [])
    down = rf"vLLM is down, it has lost engine 0 rank 0 \(pid {os.getpid()}\) and engine 0 rank 1"
    with pytest.raises(EnginePoisonedError, match=down):
        session.update()
    with pytest.raises(EnginePoisonedError, match=down):
        llm.llm_engine.add_request("0", "hello", None)
    session.close()
    never.set()


class Graceful(Exception):
    def __init__(self, message: str, http_status: int) -> None:
        self.http_status = http_status


@pytest.mark.parametrize("let_through", [Graceful, ValueError])
def test_what_an_async_llm_raises_is_of_a_kind_that_it_hands_on_and_travels_as_ours(
    let_through: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(GracefulHTTPError=Graceful) if let_through is Graceful else SimpleNamespace()
    monkeypatch.setitem(sys.modules, "vllm.exceptions", module)
    engine = FakeAsyncLlm(make_module(1))
    guard = AsyncVllmSide(engine, lambda: engine).guard
    guard.refuse(Doubt.MIXED, "planted")
    with pytest.raises(EnginePoisonedError, match="planted") as caught:
        asyncio.run(engine.add_request("0", "hello", None))
    assert isinstance(caught.value, let_through)
    assert getattr(caught.value, "http_status", 503) == 503
    travelled = pickle.loads(pickle.dumps(caught.value))
    assert (type(travelled), str(travelled)) == (EnginePoisonedError, "planted")
    assert type(ErrorInfo.of(caught.value).to_error()) is EnginePoisonedError
    assert engine.queue == []
