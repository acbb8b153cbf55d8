"""The engine's side, inside the engine's actor: hands requests to every rank, pauses around apply.

Three kinds of target: an nn.Module in this process, a vllm.LLM, a vllm.AsyncLLM. Which one it is, is seen from what
it offers; vllm is not imported.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import ray
import torch

from weightsync import messages as m
from weightsync.config import SyncConfig
from weightsync.engines.torch_module import TorchModuleAdapter
from weightsync.errors import ConfigError, EngineStateError, ErrorInfo, WeightSyncError
from weightsync.fence import Fence
from weightsync.identity import identify
from weightsync.messages import decode_call, decode_reply, encode
from weightsync.ray_actors.side import Locator, Side, locate
from weightsync.receiver import ReceiverRank

EXTENSION = "weightsync.ray_actors.vllm_worker.WeightSyncWorkerExtension"


def make_engine_side(actor: Any, target: Locator, index: int, previous: Side | None) -> Side:
    """The side that fits what *target* names; *previous* where it stands before the same engine.

    Raises:
        ConfigError: it is no engine that weightsync knows.
    """
    engine = locate(actor, target, key="target")
    if isinstance(previous, EngineSide) and previous.engine is engine:
        return previous
    if isinstance(previous, EngineSide):
        previous.discard()
    kind: type[EngineSide]
    if isinstance(engine, torch.nn.Module):
        kind = ModuleSide
    elif asyncio.iscoroutinefunction(getattr(engine, "collective_rpc", None)):
        kind = AsyncVllmSide
    elif hasattr(engine, "collective_rpc"):
        kind = VllmSide
    else:
        raise ConfigError(
            f"target: a {type(engine).__name__} is no engine; expected a torch.nn.Module, a vllm.LLM or a vllm AsyncLLM",
            key="target",
        )
    return kind(engine, lambda: locate(actor, target, key="target"))


class EngineSide(ABC):
    """One engine with all its ranks."""

    def __init__(self, engine: Any, find: Callable[[], Any]) -> None:
        """*find* looks the engine up again, so that a replaced one is noticed."""
        self.engine = engine
        self._find = find
        self._config = SyncConfig()
        self._pause = _Pause()
        self.fence = Fence()
        self._own = identify(node=ray.get_runtime_context().get_node_id() if ray.is_initialized() else "")

    def call(self, payload: bytes) -> list[bytes] | None:
        """Answer a call with one reply a rank; None: not ready, ask `result`."""
        try:
            call = decode_call(payload)
            self.fence.admit(call)
            request = call.request
            if isinstance(request, m.OpenReceiver):
                self._config = request.config
            if isinstance(request, m.Prepare) and self._find() is not self.engine:
                raise EngineStateError("the actor's engine was replaced by another since connect; connect again")
        except WeightSyncError as error:
            return [encode(m.Failed(error=ErrorInfo.of(error)))]
        self._pause.before(request)
        return self._start(call)

    @abstractmethod
    def _start(self, call: m.Call) -> list[bytes] | None: ...

    def result(self, number: int) -> list[bytes] | None:
        raise AssertionError("this engine answers at once")

    def discard(self) -> None:  # noqa: B027 - vLLM's workers end with their engine
        """Another engine has taken this one's place."""

    def _encode(self, request: m.Request, replies: list[m.Reply]) -> list[bytes]:
        return [encode(self._located(self._pause.after(request, reply))) for reply in replies]

    def _located(self, reply: m.Reply) -> m.Reply:
        """With the Ray node, which an engine's worker processes do not know."""
        if isinstance(reply, m.ReceiverOpened) and reply.identity.machine == self._own.machine:
            identity = msgspec.structs.replace(reply.identity, node=self._own.node, address=self._own.address)
            return msgspec.structs.replace(reply, identity=identity)
        return reply

    @property
    def _flushes(self) -> bool:
        return "flush_prefix_cache" in self._config.on_commit


class ModuleSide(EngineSide):
    """A module in this process: one rank."""

    def __init__(self, engine: torch.nn.Module, find: Callable[[], Any]) -> None:
        super().__init__(engine, find)
        self._rank = ReceiverRank(TorchModuleAdapter(engine))

    def _start(self, call: m.Call) -> list[bytes] | None:
        return self._encode(call.request, [self._rank.handle(call)])

    def discard(self) -> None:
        self._rank.discard()


class VllmSide(EngineSide):
    """A vllm.LLM: nothing generates while a call runs, so that is the pause."""

    def _start(self, call: m.Call) -> list[bytes] | None:
        request = call.request
        try:
            if isinstance(request, m.Prepare):
                _refuse_asleep(self.engine.llm_engine.is_sleeping())
            answers = self.engine.collective_rpc("weightsync_handle", args=(encode(call),))
            replies = [decode_reply(answer) for answer in answers]
        except Exception as error:
            replies = [_failed_rpc(error)]
        # In the call that applied: no request can come between new weights and old cache.
        if self._flushes and _has_applied(request, replies) and not self.engine.reset_prefix_cache():
            replies = [_refused_flush()]
        return self._encode(request, replies)


class AsyncVllmSide(EngineSide):
    """A vllm AsyncLLM: it generates during transfers and is paused from apply to commit.

    An async actor runs these calls on its event loop, which must not wait; each starts a task and the answer is
    fetched with `result`. From a thread the engine's own loop is used.
    """

    def __init__(self, engine: Any, find: Callable[[], Any]) -> None:
        super().__init__(engine, find)
        self._pending: dict[int, asyncio.Task[list[bytes]] | Future[list[bytes]]] = {}
        self._held = False
        """Paused by us: to be resumed by us."""

    def _start(self, call: m.Call) -> list[bytes] | None:
        request, number = call.request, call.number
        if isinstance(request, m.OpenReceiver):
            parallel = self.engine.vllm_config.parallel_config
            if parallel.data_parallel_size > 1 and not getattr(parallel, "data_parallel_external_lb", False):
                error = EngineStateError(
                    f"an AsyncLLM with data_parallel_size={parallel.data_parallel_size} hands back the answers of its first "
                    "replica only, so the others cannot be checked; use one AsyncLLM per replica"
                )
                return [encode(m.Failed(error=ErrorInfo.of(error)))]
        if isinstance(request, m.Poll | m.Transfer):  # a worker that waits keeps the engine from generating
            request = msgspec.structs.replace(request, wait_s=0.0)
            call = msgspec.structs.replace(call, request=request)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # called from a thread
            loop = self._engine_loop()
            self._pending[number] = asyncio.run_coroutine_threadsafe(self._answer(call), loop)
        else:
            self._pending[number] = loop.create_task(self._answer(call))
        return None

    def result(self, number: int) -> list[bytes] | None:
        pending = self._pending[number]
        if not pending.done():
            return None
        # Calls that were superseded end on their own; nobody asks for them any more.
        self._pending = {n: task for n, task in self._pending.items() if n > number or not task.done()}
        return pending.result()

    def _engine_loop(self) -> asyncio.AbstractEventLoop:
        handler = getattr(self.engine, "output_handler", None)
        if handler is None:
            raise EngineStateError(
                "an AsyncLLM in an actor without async methods has no event loop yet; make the actor async, or let it "
                "serve one request first"
            )
        loop: asyncio.AbstractEventLoop = handler.get_loop()
        return loop

    async def _answer(self, call: m.Call) -> list[bytes]:
        request = call.request
        try:
            if isinstance(request, m.Prepare):
                _refuse_asleep(await self.engine.is_sleeping())
            if isinstance(request, m.Apply):
                await self._hold()
            answers = await self.engine.collective_rpc("weightsync_handle", args=(encode(call),))
            replies = [decode_reply(answer) for answer in answers]
        except Exception as error:
            replies = [_failed_rpc(error)]
        if (
            self._flushes
            and _has_applied(request, replies)
            and not await self.engine.reset_prefix_cache(reset_running_requests=True)
        ):
            replies = [_refused_flush()]
        if self._held and _may_resume(request, replies):
            await self.engine.resume_generation()
            self._held = False
        return self._encode(request, replies)

    async def _hold(self) -> None:
        """Pause. An engine that its user has paused already stays so after the update."""
        if not await self.engine.is_paused():
            self._held = True
        pause = self.engine.pause_generation(mode=self._config.pause, clear_cache=False)
        await asyncio.wait_for(pause, self._config.timeout_s)


def _may_resume(request: m.Request, replies: list[m.Reply]) -> bool:
    """After a commit on every rank, or an abort that left none with mixed weights."""
    if isinstance(request, m.Abort) and request.hold:
        return False
    ends = isinstance(request, m.Commit | m.Abort | m.Close)
    return ends and all(isinstance(reply, m.Ok) and not reply.poisoned for reply in replies)


def _refuse_asleep(asleep: bool) -> None:
    if asleep:
        raise EngineStateError("the engine is asleep: its weights are not in memory; call wake_up() before the update")


class _Pause:
    """How long an engine did not generate: from the start of apply to the end of commit."""

    def __init__(self) -> None:
        self._since: float | None = None

    def before(self, request: m.Request) -> None:
        if isinstance(request, m.Apply) and self._since is None:
            self._since = time.perf_counter()

    def after(self, request: m.Request, reply: m.Reply) -> m.Reply:
        if isinstance(request, m.Commit) and isinstance(reply, m.Ok) and self._since is not None:
            return m.Ok(pause_s=time.perf_counter() - self._since)
        if isinstance(request, m.Transfer):
            self._since = None
        return reply


def _has_applied(request: m.Request, replies: list[m.Reply]) -> bool:
    return isinstance(request, m.Apply) and all(isinstance(reply, m.Applied) for reply in replies)


def _refused_flush() -> m.Failed:
    error = EngineStateError("vLLM refused to reset its prefix cache; its blocks belong to the old weights")
    return m.Failed(error=ErrorInfo.of(error), poisoned=True)


def _failed_rpc(error: Exception) -> m.Failed:
    """vLLM could not run the call on its workers. The missing extension is by far the commonest reason."""
    if isinstance(error, EngineStateError):
        return m.Failed(error=ErrorInfo.of(error))
    text = f"{type(error).__name__}: {error}"
    if "weightsync_handle" in text and ("attribute" in text or "not implemented" in text.lower()):
        text = (
            f'the engine runs without weightsync\'s worker extension; create it with worker_extension_cls="{EXTENSION}"'
        )
    return m.Failed(error=ErrorInfo.of(EngineStateError(text)))
