"""The engine's side, inside the engine's actor: which kind stands before what a user's actor holds.

Four kinds of target: an nn.Module in this process, a vllm.LLM, a vllm.AsyncLLM, an adapter of a user's own. Which one it
is, is seen from what it offers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import torch

from weightsync import messages as m
from weightsync.engines.torch_module import TorchModuleAdapter
from weightsync.errors import ConfigError, WeightSyncError
from weightsync.interfaces import EngineAdapter
from weightsync.ray_actors.engine_side import EngineSide
from weightsync.ray_actors.guard import Guard, ModuleGuard, guard_of
from weightsync.ray_actors.side import Locator, Side, has_two_roles, locate
from weightsync.ray_actors.vllm_side import AsyncVllmSide, VllmSide
from weightsync.receiver import ReceiverRank

__all__ = ["AdapterSide", "AsyncVllmSide", "EngineSide", "ModuleSide", "VllmSide", "make_engine_side"]


def make_engine_side(actor: Any, target: Locator, index: int, previous: Side | None) -> Side:
    """The side that fits what *target* names; *previous* where it stands before the same engine.

    Raises:
        ConfigError: it is no engine that weightsync knows.
    """
    try:
        engine = locate(actor, target, key="target")
    except WeightSyncError:
        raise
    except Exception as error:
        raise ConfigError(f"target: looking it up raised {type(error).__name__}: {error}", key="target") from error
    if isinstance(previous, EngineSide) and previous.engine is engine:
        return previous
    if isinstance(previous, EngineSide):
        previous.discard()
    kind: type[ModuleSide | AsyncVllmSide | VllmSide | AdapterSide]
    if isinstance(engine, torch.nn.Module):
        kind = ModuleSide
    elif asyncio.iscoroutinefunction(getattr(engine, "collective_rpc", None)):
        kind = AsyncVllmSide
    elif hasattr(engine, "collective_rpc"):
        kind = VllmSide
    elif isinstance(engine, EngineAdapter):
        kind = AdapterSide
    else:
        lacking = [name for name in ("load_map", "check_ready", "apply") if not hasattr(engine, name)]
        raise ConfigError(
            f"target: a {type(engine).__name__} is no engine; expected a torch.nn.Module, a vllm.LLM, a "
            f"vllm AsyncLLM, or an EngineAdapter (it lacks {', '.join(lacking)})",
            key="target",
        )
    side = kind(engine, lambda: locate(actor, target, key="target"))
    side.is_trainer_too = lambda: has_two_roles(actor)
    return side


class AdapterSide(EngineSide):
    """An adapter in this process: one rank. Its owner asks `check_serving` before each request."""

    def __init__(self, engine: Any, find: Callable[[], Any]) -> None:
        super().__init__(engine, find, self._guard(engine))
        self._rank = ReceiverRank(self._adapter(engine))

    def _guard(self, engine: Any) -> Guard:
        return guard_of(engine, lambda _: Guard())

    def _adapter(self, engine: Any) -> EngineAdapter:
        adapter: EngineAdapter = engine
        return adapter

    def _start(self, call: m.Call) -> list[bytes] | None:
        replies = [self._rank.handle(call)]
        self._note_applied(call.request, replies)
        self._settle(call.request, replies)
        return self._encode(call.request, replies)

    def get_ready(self) -> None:
        self._rank.get_ready()

    def stand_down(self) -> None:
        self._rank.stand_down()

    def discard(self) -> None:
        self._rank.discard()


class ModuleSide(AdapterSide):
    """A module in this process, whose forward is guarded."""

    def _guard(self, engine: torch.nn.Module) -> Guard:
        return guard_of(engine, ModuleGuard)

    def _adapter(self, engine: torch.nn.Module) -> EngineAdapter:
        return TorchModuleAdapter(engine)
