"""vLLM engines: an LLM, which blocks while it generates, and an AsyncLLM, which generates during transfers.

What their workers' answers mean is `EngineSide`'s; here is how vLLM is called, paused, flushed and resumed. vllm is not
imported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from weightsync import messages as m
from weightsync.background import Background
from weightsync.config import CommitStep
from weightsync.errors import EngineStateError, ErrorInfo, TransportError, UpdateTimeoutError, WeightSyncError
from weightsync.messages import decode_reply, encode
from weightsync.process import process_state
from weightsync.ray_actors.commit_steps import commit_steps
from weightsync.ray_actors.engine_side import EngineSide
from weightsync.ray_actors.guard import guard_of
from weightsync.ray_actors.vllm_guard import VllmGuard, guard_async_llm, guard_llm

EXTENSION = "weightsync.ray_actors.vllm_worker.WeightSyncWorkerExtension"
_WATCH_S = 1.0


class BaseVllmSide(EngineSide):
    """What an LLM and an AsyncLLM have in common."""

    guard: VllmGuard

    def __init__(self, engine: Any, find: Callable[[], Any], guard: VllmGuard) -> None:
        super().__init__(engine, find, guard)
        self._served = 0
        """The version that the engine serves."""
        self._begun = 0
        """The version that was to be applied last, until it is known what came of it; 0: none."""

    def _settle(self, request: m.Request, replies: Sequence[m.Reply]) -> None:
        super()._settle(request, replies)
        if version := m.applied_by(request):
            self._begun = version
        elif isinstance(request, m.OpenReceiver | m.Commit | m.Abort | m.Close):
            if isinstance(request, m.Commit) and all(isinstance(reply, m.Ok) for reply in replies):
                self._served = request.version
            elif opened := [reply.version for reply in replies if isinstance(reply, m.ReceiverOpened)]:
                self._served = min(opened)
            if self._begun not in (0, self._served):
                self.guard.given_up += 1
            self._begun = 0
            self._salt(self._served)

    def _salt(self, version: int) -> None:
        """From now on requests are for *version*."""
        self.guard.salt_with(version if self._config.version_salt else None)

    @property
    def _core(self) -> Any:
        """The LLMEngine of an LLM; an AsyncLLM is its own."""
        return getattr(self.engine, "llm_engine", self.engine)

    def _can_sleep(self) -> bool:
        """Where it cannot, vLLM's `is_sleeping` says that it is paused, and no more."""
        return bool(self._core.vllm_config.model_config.enable_sleep_mode)

    def _failed(self, request: m.Request, error: Exception) -> m.Failed:
        """vLLM could not run the call on all its workers. While weights change, nobody knows how far they came."""
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, WeightSyncError):
            translated = error
        elif self._gone() or type(error).__name__ == "EngineDeadError":
            translated = self._down(text)
        elif "weightsync_handle" in text and ("attribute" in text or "not implemented" in text.lower()):
            translated = EngineStateError(
                f'the engine runs without weightsync\'s worker extension; create it with worker_extension_cls="{EXTENSION}"'
            )
        else:
            translated = EngineStateError(f"vLLM could not run {type(request).__name__} on its workers: {text}")
        info = ErrorInfo.of(translated, rank=self._name)
        return m.Failed(error=info, poisoned=isinstance(request, m.Commit) or bool(m.applied_by(request)))

    def _check_alive(self) -> None:
        """Raises TransportError where a worker is gone: vLLM may leave a call without an answer."""
        if self._gone():
            raise self._down()

    def _down(self, text: str = "") -> WeightSyncError:
        lost = " and ".join(self._gone()) or "a process of it"
        why = f" ({text})" if text else ""
        return TransportError(f"vLLM is down, it has lost {lost}{why}; only a new engine can take its place")

    def _gone(self) -> list[str]:
        return [
            f"{rank.load.rank} (pid {rank.identity.pid})"
            for rank in self._ranks
            if rank.identity.pid_space == self._own.pid_space
            and process_state(rank.identity.pid, rank.identity.started) == "gone"
        ]


class VllmSide(BaseVllmSide):
    """A vllm.LLM: nothing generates while a call runs, so that is the pause."""

    def __init__(self, engine: Any, find: Callable[[], Any]) -> None:
        super().__init__(engine, find, guard_of(engine, guard_llm))

    def _start(self, call: m.Call) -> list[bytes] | None:
        request = call.request
        try:
            replies = self._ask(call)
            self._note_applied(request, replies)
            if version := self._takes_effect(request, replies):
                self._take_effect(version)
        except Exception as error:
            replies = [self._failed(request, error)]
        self._settle(request, replies)
        return self._encode(request, replies)

    def _ask(self, call: m.Call) -> list[m.Reply]:
        self._check_alive()
        if isinstance(call.request, m.OpenReceiver | m.Prepare) and self._can_sleep() and self._core.is_sleeping():
            _refuse_asleep(self.engine.collective_rpc("weightsync_asleep"))

        def ask() -> list[bytes]:
            answers: list[bytes] = self.engine.collective_rpc("weightsync_handle", args=(encode(call),))
            return answers

        if hasattr(self._core.engine_core, "utility_results"):  # another process; if it dies, the call waits for ever
            work = Background(ask, name="vllm")
            while not work.is_done(_WATCH_S):
                self._check_alive()
            return [decode_reply(answer) for answer in work.result()]
        return [decode_reply(answer) for answer in ask()]

    def _take_effect(self, version: int) -> None:
        # In the call that brings the version: no request can come between new weights and old cache.
        for name, step in commit_steps([self.engine, self._core], self._config, version):
            _check_step(name, step())
        self._unflushed = 0
        self._salt(version)


class AsyncVllmSide(BaseVllmSide):
    """A vllm AsyncLLM: it generates during transfers and is paused from apply to commit.

    An async actor runs these calls on its event loop, which must not wait; each starts a task and the answer is
    fetched with `result`. From a thread the engine's own loop is used. Calls are answered one after another.
    """

    pauses = True

    def __init__(self, engine: Any, find: Callable[[], Any]) -> None:
        super().__init__(engine, find, guard_of(engine, guard_async_llm))
        self._pending: dict[int, asyncio.Task[list[bytes]] | Future[list[bytes]]] = {}
        self._turn = asyncio.Lock()
        self._newest: m.Call | None = None
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
        self._newest = call
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
        async with self._turn:
            request = call.request
            try:
                replies = await self._ask(call)
                self._note_applied(request, replies)
                if version := self._takes_effect(request, replies):
                    await self._take_effect(version)
            except Exception as error:
                replies = [self._failed(request, error)]
            self._settle(request, replies)
            if self._held and self._may_resume(request, replies):
                try:
                    await self.engine.resume_generation()
                    self._held = False
                except Exception as error:
                    replies = [self._failed(request, error)]
            return self._encode(request, replies)

    async def _ask(self, call: m.Call) -> list[m.Reply]:
        request = call.request
        self._check_alive()
        opens = isinstance(request, m.OpenReceiver | m.Prepare) and self._can_sleep() and not self._held
        if opens and await self.engine.is_sleeping():
            _refuse_asleep(await self.engine.collective_rpc("weightsync_asleep"))
        if isinstance(request, m.Apply):
            try:
                await self._hold(call, request.version)
            except WeightSyncError as error:  # no worker has heard of it
                return [m.Failed(error=ErrorInfo.of(error, rank=self._name))]
        asked = asyncio.ensure_future(self.engine.collective_rpc("weightsync_handle", args=(encode(call),)))
        while not (await asyncio.wait({asked}, timeout=_WATCH_S))[0]:
            self._check_alive()  # if the process dies that would answer, nobody does
        return [decode_reply(answer) for answer in asked.result()]

    async def _hold(self, call: m.Call, version: int) -> None:
        """Pause. An engine that its user has paused already stays so after the update."""
        paused = await self.engine.is_paused()
        if not (paused and self._held):  # a pause of another mode would let go what this one holds
            self._held = not paused
            pause = self.engine.pause_generation(mode=self._config.pause, clear_cache=False)
            try:
                await asyncio.wait_for(pause, self._config.timeout_s)
            except TimeoutError as error:
                text = (
                    f"requests in flight did not end within {self._config.timeout_s:g} s (pause: {self._config.pause})"
                )
                raise UpdateTimeoutError(text) from error
        if self._newest is not call:
            raise EngineStateError(f"version {version} was given up before it was applied")
        self._begun = version
        self._salt(version)  # who asks from here on gets it

    async def _take_effect(self, version: int) -> None:
        for name, step in commit_steps([self.engine], self._config, version):
            _check_step(name, await step())
        self._unflushed = 0

    def _may_resume(self, request: m.Request, replies: Sequence[m.Reply]) -> bool:
        """When the update has ended, for this engine in a whole version that the others have, too."""
        ends = isinstance(request, m.OpenReceiver | m.Commit | m.Abort | m.Close)
        return ends and not self.guard.doubt and not any(isinstance(reply, m.Failed) for reply in replies)


def _refuse_asleep(ranks: Sequence[bool | None]) -> None:
    """*ranks*: whether the weights of each sleep. An engine of which only the KV cache does is one that sleeps, to vLLM."""
    if any(ranks):
        raise EngineStateError(
            'the engine is asleep, its weights are not in memory; call wake_up(), or wake_up(tags=["weights"]), before the update'
        )
    if None in ranks:
        raise EngineStateError(
            "the engine is asleep or paused, which this vLLM does not tell apart; call wake_up(), or resume_generation(), "
            "before the update"
        )


def _check_step(name: CommitStep, done: Any) -> None:
    """Raises EngineStateError where the engine refused: what it holds belongs to the old weights."""
    if done is False:
        raise EngineStateError(f"vLLM refused to {name.replace('_', ' ')}; what it holds belongs to the old weights")
