"""An AsyncLLM pauses for an update, drops its caches, and goes on, whatever becomes of the update or of who leads it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ray_actors.sides import FakeAsyncLlm, Handler, X, connect, make_module, party, request_of
from weightsync import messages as m
from weightsync.errors import EnginePoisonedError, EngineStateError, WeightSyncError
from weightsync.ray_actors.engine import AsyncVllmSide, ModuleSide
from weightsync.testing import LocalFleet


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


@pytest.mark.parametrize("asleep", [None, True])
def test_an_engine_that_may_be_asleep_is_refused(asleep: bool | None, actor: AsyncActor) -> None:
    actor.engine.paused = actor.engine.vllm_config.model_config.enable_sleep_mode = True
    actor.engine.asleep = asleep
    with pytest.raises(EngineStateError, match=r"asleep.*wake_up"):
        connect(make_module(1), actor)


def test_an_engine_of_which_only_the_cache_sleeps_is_updated_and_sleeps_on(actor: AsyncActor) -> None:
    actor.engine.paused = actor.engine.vllm_config.model_config.enable_sleep_mode = True
    actor.engine.asleep = False
    session = connect(make_module(1), actor)
    assert session.update().version == 1
    assert actor.engine.paused
    session.close()


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
    actor.engine.busy_s = 3
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
