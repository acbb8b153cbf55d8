"""What stands before an engine inside its actor: admits calls, follows what becomes of the weights, moves the guard.

An engine's ranks each answer for themselves; here their answers become one fact about the engine:

    Apply ──▶ every rank applied: a whole version, to be committed    ──▶ Commit: it is this engine's, the guard lifts
      └─▶ some did not: mixed weights, no requests until a whole update has succeeded
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import ray

from weightsync import messages as m
from weightsync.config import SyncConfig
from weightsync.errors import EngineStateError, ErrorInfo, WeightSyncError
from weightsync.fence import Fence
from weightsync.identity import identify
from weightsync.messages import decode_call, encode
from weightsync.ray_actors.guard import Doubt, Guard

_CURE = "no requests until a whole update has succeeded"


class EngineSide(ABC):
    """One engine with all its ranks."""

    pauses = False
    """Serves nothing from Apply to Commit, so that a version which may be given up cannot be seen."""

    def __init__(self, engine: Any, find: Callable[[], Any], guard: Guard) -> None:
        """*find* looks the engine up again, so that a replaced one is noticed."""
        self.engine = engine
        self.is_trainer_too: Callable[[], bool] = lambda: False
        """Whether what is sent to it comes from the same actor, which must be free to send it."""
        self.guard = guard
        self.fence = Fence()
        self._find = find
        self._config = SyncConfig()
        self._name = "this engine"
        self._pause = _Pause()
        self._own = identify(node=ray.get_runtime_context().get_node_id() if ray.is_initialized() else "")
        self._staged = False
        self._target = 0
        """The version of the update that was prepared last."""
        self._applied = 0
        """The version that every rank holds and none has committed; 0: none."""
        self._unflushed = 0
        """The same, until what was computed with the weights before is dropped."""
        self._cause = "the update was given up"
        """Why the update failed, as far as this engine knows."""
        self._ranks: tuple[m.ReceiverOpened, ...] = ()

    def call(self, payload: bytes) -> list[bytes] | None:
        """Answer a call with one reply a rank; None: not ready, ask `result`."""
        try:
            call = decode_call(payload)
            self.fence.admit(call)
            request = call.request
            if isinstance(request, m.OpenReceiver):
                self._config, self._name = request.config, f"engine {request.engine}"
            if isinstance(request, m.Transfer) and (self.pauses or self.is_trainer_too()):
                request = msgspec.structs.replace(request, apply=False)  # it is told to apply apart
                call = msgspec.structs.replace(call, request=request)
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

    def get_ready(self) -> None:  # noqa: B027 - vLLM's workers are told by messages alone
        pass

    def stand_down(self) -> None:  # noqa: B027
        pass

    def discard(self) -> None:  # noqa: B027 - vLLM's workers end with their engine
        """Another engine has taken this one's place."""

    # ---- what the ranks' answers mean for the engine ------------------------------------------------------------

    def _note_applied(self, request: m.Request, replies: Sequence[m.Reply]) -> None:
        version = m.applied_by(request)
        if version and all(isinstance(reply, m.Applied) for reply in replies):
            self._applied = self._unflushed = version

    def _takes_effect(self, request: m.Request, replies: Sequence[m.Reply]) -> int:
        """The version that becomes the engine's with *replies*, and with it what was computed before is stale; 0: none.

        All have voted by then: staged, before the apply; streaming, before the commit.
        """
        version = self._unflushed
        match request:
            case m.Apply():
                effective = self._staged and version == request.version
            case m.Commit():
                effective = version == request.version and all(isinstance(reply, m.Ok) for reply in replies)
            case m.OpenReceiver():  # it was decided on, but the coordinator died before it said so
                effective = all(isinstance(r, m.ReceiverOpened) and r.version == version for r in replies)
            case _:
                effective = False
        return version if effective else 0

    def _settle(self, request: m.Request, replies: Sequence[m.Reply]) -> None:
        """Move the guard: from here on requests are served, or refused, by what the engine now holds."""
        failed = next((reply for reply in replies if isinstance(reply, m.Failed)), None)
        mixed = any(getattr(reply, "poisoned", False) for reply in replies)
        if failed is not None:
            self._cause = str(failed.error.to_error())
        match request:
            case m.OpenReceiver():
                self._settle_opened(request, replies)
            case m.Prepare() if failed is None:
                self._staged, self._target, self._cause = request.staged, request.version, "the update was given up"
            case m.Apply() | m.Transfer(apply=True):
                mixed = mixed or (failed is not None and any(isinstance(reply, m.Applied) for reply in replies))
                if failed is None and not self._staged and not self.pauses:
                    reason = f"version {request.version} is applied but not committed yet; ask again after the update"
                    self.guard.refuse(Doubt.UNCOMMITTED, f"{self._name}: {reason}")
            case m.Commit():
                if failed is None:
                    self._applied = self._unflushed = 0
                    self.guard.lift()
                elif not mixed:
                    mixed = any(isinstance(reply, m.Ok) for reply in replies)
                    self._refuse_missed()
            case m.Abort(hold=True):
                self._refuse_missed()
        if isinstance(request, m.Abort | m.Close) and self._applied:
            mixed = True
        if mixed:
            self._applied = self._unflushed = 0
            what = f"version {self._target}" if self._target else "an earlier version"
            reason = f"may hold mixed weights: {what} was not applied as a whole ({self._cause})"
            self.guard.refuse(Doubt.MIXED, f"{self._name} {reason}; {_CURE}")

    def _settle_opened(self, request: m.OpenReceiver, replies: Sequence[m.Reply]) -> None:
        opened = tuple(reply for reply in replies if isinstance(reply, m.ReceiverOpened))
        if len(opened) < len(replies):
            return
        self._ranks = opened
        versions = {reply.version for reply in opened}
        version = min(versions)
        if len(versions) > 1:
            reason = f"holds mixed weights: its ranks are at versions {', '.join(map(str, sorted(versions)))}"
            self.guard.refuse(Doubt.MIXED, f"{self._name} {reason}; {_CURE}")
        elif self._applied and version == self._applied:
            self._applied = self._unflushed = 0
            self.guard.lift()
        elif version < request.decided:
            self.guard.refuse(
                Doubt.MISSED,
                f"{self._name} is at version {version}, and version {request.decided} was committed; {_CURE}",
            )

    def _refuse_missed(self) -> None:
        reason = f"has missed version {self._target}, which others have committed ({self._cause})"
        self.guard.refuse(Doubt.MISSED, f"{self._name} {reason}; {_CURE}")

    # ---- answering ----------------------------------------------------------------------------------------------

    def _encode(self, request: m.Request, replies: list[m.Reply]) -> list[bytes]:
        return [encode(self._located(self._marked(self._pause.after(request, reply)))) for reply in replies]

    def _marked(self, reply: m.Reply) -> m.Reply:
        """With what the ranks cannot know: that the engine as a whole holds mixed weights."""
        if self.guard.doubt == Doubt.MIXED and isinstance(reply, m.ReceiverOpened | m.Prepared | m.Ok):
            return msgspec.structs.replace(reply, poisoned=True)
        return reply

    def _located(self, reply: m.Reply) -> m.Reply:
        """With the Ray node, which an engine's worker processes do not know."""
        if isinstance(reply, m.ReceiverOpened | m.Examined) and reply.identity.machine == self._own.machine:
            identity = msgspec.structs.replace(reply.identity, node=self._own.node, address=self._own.address)
            return msgspec.structs.replace(reply, identity=identity)
        return reply


class _Pause:
    """How long an engine did not generate: from the start of apply to the end of commit."""

    def __init__(self) -> None:
        self._since: float | None = None

    def before(self, request: m.Request) -> None:
        if m.applied_by(request) and self._since is None:
            self._since = time.perf_counter()

    def after(self, request: m.Request, reply: m.Reply) -> m.Reply:
        if isinstance(request, m.Commit) and isinstance(reply, m.Ok) and self._since is not None:
            return msgspec.structs.replace(reply, pause_s=time.perf_counter() - self._since)
        if isinstance(request, m.Prepare):
            self._since = None
        return reply
