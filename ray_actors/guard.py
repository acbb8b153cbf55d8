"""Whether an engine may serve: requests are refused while it holds weights that were not committed.

A guard stands before an engine from its first weight sync on and outlives them all, so that nobody gets rollouts from
an engine that is in doubt. It knows neither messages nor vLLM; who sends the messages moves it, and how a request
reaches `check` differs from engine to engine.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from weightsync.errors import EnginePoisonedError, EngineStateError, WeightSyncError


class Doubt(IntEnum):
    """Why an engine must not serve; the worse one stands until all are lifted together."""

    NONE = 0
    UNCOMMITTED = 1
    """Holds a whole version that may yet be given up."""
    MISSED = 2
    """Holds a whole version that the other engines have left behind."""
    MIXED = 3
    """Holds parts of two versions, or may."""


class Guard:
    """Of one engine. `check` runs before each request and costs one comparison."""

    def __init__(self) -> None:
        self.doubt = Doubt.NONE
        self._reason = ""

    def refuse(self, doubt: Doubt, reason: str) -> None:
        """From now on `check` raises, with *reason*; a doubt that is no worse than the present one changes nothing."""
        if doubt > self.doubt:
            self.doubt, self._reason = doubt, reason

    def lift(self) -> None:
        """A whole version is committed."""
        self.doubt, self._reason = Doubt.NONE, ""

    def check(self) -> None:
        """Raises EnginePoisonedError, or EngineStateError for a version that is not committed yet."""
        if self.doubt:
            raise self._error()

    def _error(self) -> WeightSyncError:
        kind = EngineStateError if self.doubt == Doubt.UNCOMMITTED else EnginePoisonedError
        return kind(self._reason)


class ModuleGuard(Guard):
    """Before a module's forward, by a hook that is there only while it refuses."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._module = weakref.ref(module)
        self._hook: RemovableHandle | None = None

    def refuse(self, doubt: Doubt, reason: str) -> None:
        super().refuse(doubt, reason)
        module = self._module()
        if self._hook is None and module is not None:
            self._hook = module.register_forward_pre_hook(lambda *_: self.check(), prepend=True)

    def lift(self) -> None:
        super().lift()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


G = TypeVar("G", bound=Guard)

_guards: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def guard_of(engine: Any, make: Callable[[Any], G]) -> G:
    """The guard that stands before *engine*, made where there is none yet. It must not hold the engine alive."""
    if engine not in _guards:
        _guards[engine] = make(engine)
    guard: G = _guards[engine]
    return guard


def check_serving(engine: Any) -> None:
    """For engines that are asked past weightsync, through an adapter of one's own: call it before each request.

    Raises:
        EnginePoisonedError: *engine*, which is the weight sync's target, may hold mixed weights, or has missed a version.
        EngineStateError: it holds a version that is not committed yet.
    """
    if (guard := _guards.get(engine)) is not None:
        guard.check()
