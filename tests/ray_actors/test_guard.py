"""Engines in doubt refuse requests: plain modules, and vLLM's interfaces in the part of them that the guard stands on."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import sys
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightsync import messages as m
from weightsync.coalescer import Coalescer
from weightsync.config import SyncConfig
from weightsync.engines.torch_module import TorchModuleAdapter
from weightsync.errors import EnginePoisonedError, EngineStateError, ErrorInfo, WeightSyncError
from weightsync.ray_actors import vllm_side
from weightsync.ray_actors.cache_salt import salted
from weightsync.ray_actors.commit_steps import commit_steps
from weightsync.ray_actors.engine import AsyncVllmSide, ModuleSide, VllmSide, make_engine_side
from weightsync.ray_actors.guard import Doubt, Guard, check_serving
from weightsync.receiver import ReceiverRank
from weightsync.sender import SenderRank
from weightsync.session import Session
from weightsync.testing import LocalFleet, in_process_party

Handler = Callable[[bytes], list[bytes]]
X = torch.ones(2, 4)


def make_module(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def request_of(payload: bytes) -> m.Request:
    return m.decode_call(payload).request


def connect(trainer: torch.nn.Module, *engines: Handler, **settings: Any) -> Session:
    fleet = LocalFleet([in_process_party([SenderRank(0, lambda: trainer)])], engines)
    session = Session(fleet, SyncConfig(**({"timeout_s": 20} | settings)))
    session.open()
    return session


def party(side: ModuleSide, watch: Callable[[m.Request, str], None] = lambda request, when: None) -> Handler:
    """The side as a party; *watch* is called "before" and "after" each request."""

    def handle(payload: bytes) -> list[bytes]:
        request = request_of(payload)
        watch(request, "before")
        replies = side.call(payload)
        watch(request, "after")
        return replies or []

    return handle


@pytest.fixture
def fails_after(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each number that a test appends makes one apply fail after so many module groups."""
    plain, planted = Coalescer.groups, list[int]()

    def groups(self: Coalescer, **options: Any) -> Iterator[Any]:
        return broken(self, plain(self, **options), planted.pop()) if planted else plain(self, **options)

    def broken(of: Coalescer, groups: Iterator[Any], count: int) -> Iterator[Any]:
        while of.num_handed_out < count:  # those that are written in place are not given out
            of._raise_if_failed()
            if of._ready:
                yield next(groups)
            time.sleep(0.001)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Coalescer, "groups", groups)
    return planted


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


EMBEDS = torch.ones(2, 4)
PROMPTS: dict[str, tuple[Any, Any]] = {
    "text": ("hi", {"prompt": "hi", "cache_salt": "s"}),
    "token ids": ([1, 2], {"prompt_token_ids": [1, 2], "cache_salt": "s"}),
    "text dict": ({"prompt": "hi"}, {"prompt": "hi", "cache_salt": "s"}),
    "token dict": ({"prompt_token_ids": [1]}, {"prompt_token_ids": [1], "cache_salt": "s"}),
    "embeds": ({"prompt_embeds": EMBEDS}, {"prompt_embeds": EMBEDS, "cache_salt": "s"}),
    "rendered": (
        {"type": "token", "prompt_token_ids": [1], "cache_salt": "mine"},
        {"type": "token", "prompt_token_ids": [1], "cache_salt": "mine|s"},
    ),
    "rendered encoder-decoder": (
        {"type": "enc_dec", "encoder_prompt": {"prompt_token_ids": []}, "decoder_prompt": {"prompt_token_ids": [1]}},
        {
            "type": "enc_dec",
            "encoder_prompt": {"prompt_token_ids": []},
            "decoder_prompt": {"prompt_token_ids": [1], "cache_salt": "s"},
        },
    ),
    "encoder-decoder": (
        {"encoder_prompt": "hi", "decoder_prompt": None},
        {"encoder_prompt": {"prompt": "hi", "cache_salt": "s"}, "decoder_prompt": None},
    ),
    "encoder-decoder, salted": (
        {"encoder_prompt": "hi", "decoder_prompt": {"prompt": "ho", "cache_salt": "mine"}},
        {"encoder_prompt": "hi", "decoder_prompt": {"prompt": "ho", "cache_salt": "mine|s"}},
    ),
    "engine core request": (SimpleNamespace(cache_salt="mine"), SimpleNamespace(cache_salt="mine|s")),
}


@pytest.mark.parametrize("form", PROMPTS)
def test_every_form_of_prompt_is_salted_and_the_callers_is_left_alone(form: str) -> None:
    prompt, expected = PROMPTS[form]
    before = repr(prompt)
    assert salted(prompt, "s") == expected
    assert repr(prompt) == before


def test_a_stream_of_prompts_is_salted_chunk_by_chunk() -> None:
    async def chunks() -> AsyncGenerator[Any, None]:
        yield SimpleNamespace(prompt=[1])
        yield SimpleNamespace(prompt=[2])

    async def collect() -> list[Any]:
        stream = salted(chunks(), "s")
        assert isinstance(stream, AsyncGenerator)
        return [chunk.prompt["cache_salt"] async for chunk in stream]

    assert asyncio.run(collect()) == ["s", "s"]


@pytest.mark.parametrize("prompt", [b"hi", {"data": 1}, None, 7])
def test_a_prompt_of_unknown_form_is_refused_rather_than_left_unsalted(prompt: Any) -> None:
    with pytest.raises(EngineStateError, match="version_salt"):
        salted(prompt, "s")


# ---- an AsyncLLM's pause --------------------------------------------------------------------------------------------


class FakeAsyncLlm:
    """The part of vLLM's AsyncLLM that a side touches; the model is a plain module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.queue: list[Any] = []
        self.paused = False
        self.log: list[str] = []
        self.rank = ReceiverRank(TorchModuleAdapter(module))
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_size=1),
            model_config=SimpleNamespace(is_multimodal_model=False, enable_sleep_mode=False),
            kv_transfer_config=None,
        )
        self.busy_s = 0.0

    async def add_request(self, request_id: str, prompt: Any, params: Any) -> str:
        self.queue.append(prompt)
        return request_id

    async def collective_rpc(self, method: str, args: tuple[bytes]) -> list[bytes]:
        self.log.append(type(request_of(args[0])).__name__)
        return [await asyncio.to_thread(m.answer, self.rank.handle, args[0])]

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.paused = True
        await asyncio.sleep(self.busy_s)  # until requests in flight have ended

    async def resume_generation(self) -> None:
        self.log.append("resume")
        self.paused = False

    async def is_paused(self) -> bool:
        return self.paused

    async def is_sleeping(self) -> bool:
        return self.paused  # as vLLM's, which does not tell one from the other

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        self.log.append("flush")
        return True

    async def update_weight_version(self, version: str) -> None:
        self.log.append(f"version {version}")


class AsyncActor:
    """An event loop with a side on it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.engine = FakeAsyncLlm(module)
        self.side = AsyncVllmSide(self.engine, lambda: self.engine)
        self.lost: type[m.Request] | None = None
        """Requests of this kind do not arrive."""

    def __call__(self, payload: bytes) -> list[bytes]:
        if self.lost is not None and isinstance(request_of(payload), self.lost):
            raise WeightSyncError("the coordinator died")

        async def answer() -> list[bytes]:
            replies = self.side.call(payload)
            while replies is None:
                await asyncio.sleep(0.001)
                replies = self.side.result(m.decode_call(payload).number)
            return replies

        return asyncio.run_coroutine_threadsafe(answer(), self.loop).result()

    def ask(self, prompt: Any = "hello") -> Any:
        asyncio.run_coroutine_threadsafe(self.engine.add_request("0", prompt, None), self.loop).result()
        return self.engine.queue[-1]


@pytest.fixture
def actor() -> AsyncActor:
    return AsyncActor(make_module(2))


@pytest.mark.parametrize(
    ("apply", "order"),
    [
        ("staged", ["Apply", "flush", "version 1", "Commit", "resume"]),
        ("streaming", ["Apply", "Commit", "flush", "version 1", "resume"]),
    ],
)
def test_caches_are_dropped_when_all_have_voted_and_before_anything_is_served(
    apply: str, order: list[str], actor: AsyncActor
) -> None:
    session = connect(make_module(1), actor, apply=apply)
    session.update()
    assert actor.engine.log[actor.engine.log.index("Apply") :] == order
    session.close()


def test_a_poisoned_async_engine_refuses_at_once_stays_paused_and_can_be_updated(
    actor: AsyncActor, fails_after: list[int]
) -> None:
    trainer = make_module(1)
    session = connect(trainer, actor)
    session.update()
    fails_after.append(1)
    with pytest.raises(EnginePoisonedError):
        session.update()
    assert actor.engine.paused
    with pytest.raises(EnginePoisonedError, match="engine 0 may hold mixed weights: version 2"):
        actor.ask()
    session.close()
    assert actor.engine.paused
    session = connect(trainer, actor)
    assert actor.engine.paused
    session.update()
    assert not actor.engine.paused
    assert actor.ask() == "hello"
    session.close()


def test_an_engine_that_its_user_has_paused_stays_so(actor: AsyncActor) -> None:
    actor.engine.paused = True
    session = connect(make_module(1), actor)
    session.update()
    assert actor.engine.paused
    session.close()


def test_an_engine_that_may_be_asleep_is_refused(actor: AsyncActor) -> None:
    actor.engine.paused = actor.engine.vllm_config.model_config.enable_sleep_mode = True
    with pytest.raises(EngineStateError, match="asleep"):
        connect(make_module(1), actor)


@pytest.mark.parametrize("decided", [True, False])
@pytest.mark.parametrize("apply", ["staged", "streaming"])
def test_the_next_coordinator_lets_an_engine_go_on_or_keeps_it_back(
    apply: str, decided: bool, actor: AsyncActor, tmp_path: Path
) -> None:
    """The one before died between apply and commit; what it had decided is in its log, or lost with it."""
    trainer = make_module(1)
    settings = {"apply": apply} | ({"version_log": str(tmp_path / "versions")} if decided else {})
    session = connect(trainer, actor, **settings)
    session.update()
    torch.nn.init.normal_(trainer[0].weight)  # type: ignore[index]
    actor.lost = m.Commit
    with pytest.raises(EnginePoisonedError):
        session.update()
    session._log.close()  # as the end of its process does
    assert actor.engine.paused
    actor.lost = None
    session = connect(trainer, actor, **settings)
    if decided:
        assert (session.version, actor.engine.paused, actor.ask()) == (2, False, "hello")
        assert torch.equal(actor.engine.module(X), trainer(X))
        log = actor.engine.log
        assert log.index("version 2") < len(log) - 1 - log[::-1].index("resume")
    else:
        assert (session.version, actor.engine.paused) == (1, True)
        with pytest.raises(EnginePoisonedError, match="mixed weights"):
            actor.ask()
    session.update()
    assert (actor.engine.paused, actor.ask()) == (False, "hello")
    session.close()


def test_an_engine_whose_requests_do_not_end_in_time_goes_on_with_them(actor: AsyncActor) -> None:
    actor.engine.busy_s = 30
    session = connect(make_module(1), actor, timeout_s=1, pause="wait")
    with pytest.raises(WeightSyncError, match="engine 0"):
        session.update()
    session.close()
    assert ("Apply" in actor.engine.log, actor.engine.paused, actor.ask()) == (False, False, "hello")


def test_an_update_given_up_while_an_engine_pauses_never_reaches_its_workers(
    actor: AsyncActor, fails_after: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(self: LocalFleet, party: str, handler: Handler, inbox: Any) -> None:
        """As calls reach an async actor: while others are open."""
        while (item := inbox.get()) is not None:
            threading.Thread(target=answer, args=(self, party, handler, *item), daemon=True).start()

    def answer(self: LocalFleet, party: str, handler: Handler, number: int, payload: bytes) -> None:
        with contextlib.suppress(KeyError):  # of a call that another took the place of
            self._answers.put((party, number, handler(payload)))

    monkeypatch.setattr(LocalFleet, "_serve", serve)
    actor.engine.busy_s = 0.5
    other = make_module(3)
    session = connect(make_module(1), actor, party(ModuleSide(other, lambda: other)), apply="streaming")
    fails_after.append(0)
    with pytest.raises(WeightSyncError, match="out of memory"):
        session.update()
    assert ("Apply" in actor.engine.log, actor.engine.paused, actor.ask()) == (False, False, "hello")
    session.update()
    assert actor.engine.log[-1] == "resume"
    session.close()


def test_requests_are_salted_with_the_version_that_serves_them(actor: AsyncActor, fails_after: list[int]) -> None:
    trainer = make_module(1)
    settings = {"version_salt": True, "on_commit": (), "apply": "streaming"}
    session = connect(trainer, actor, **settings)

    def salt() -> str:
        return str(actor.ask([1])["cache_salt"])

    assert salt() == "weightsync-0"
    session.update()
    assert (salt(), "flush" in actor.engine.log) == ("weightsync-1", False)
    fails_after.append(1)
    with pytest.raises(EnginePoisonedError):
        session.update()
    session.update()
    assert (session.version, salt()) == (2, "weightsync-2.1"), "what was asked for in the failed attempt does not match"
    session.close()
    connect(trainer, actor).close()
    assert actor.ask([1]) == [1]


# ---- steps of a commit ----------------------------------------------------------------------------------------------


class Owner:
    def __init__(self, *, multimodal: bool, connector: object = None) -> None:
        model_config = SimpleNamespace(is_multimodal_model=multimodal)
        self.vllm_config = SimpleNamespace(model_config=model_config, kv_transfer_config=connector)
        self.calls: list[Any] = []

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        self.calls.append(("prefix", reset_running_requests, reset_connector))
        return True

    def reset_mm_cache(self) -> None:
        self.calls.append("mm")

    def set_weight_version(self, weight_version: str) -> None:
        self.calls.append(weight_version)


class OwnerWithEncoder(Owner):
    def reset_encoder_cache(self) -> None:
        self.calls.append("encoder")


PREFIX = ("prefix", True, False)


@pytest.mark.parametrize(
    ("owner", "steps", "calls"),
    [
        (OwnerWithEncoder(multimodal=True), None, [PREFIX, "mm", "encoder", "7"]),
        (OwnerWithEncoder(multimodal=True), ("reset_encoder_cache",), [PREFIX, "encoder"]),
        (OwnerWithEncoder(multimodal=False), None, [PREFIX, "7"]),
        (Owner(multimodal=True), None, [PREFIX, "mm", "7"]),
        (Owner(multimodal=False, connector=object()), None, [("prefix", True, True), "7"]),
        (Owner(multimodal=True), (), []),
    ],
    ids=["all", "encoder alone", "text only", "no encoder", "connector", "none"],
)
def test_steps_are_taken_where_asked_for_and_offered(owner: Owner, steps: Any, calls: list[Any]) -> None:
    config = SyncConfig() if steps is None else SyncConfig(on_commit=steps)
    for _, step in commit_steps([owner], config, 7):
        step()
    assert owner.calls == calls
