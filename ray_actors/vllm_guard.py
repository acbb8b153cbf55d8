"""The guard before a vLLM engine: in `add_request`, through which generate, chat, encode, score and the servers go.

Refused before anything is queued. The same place adds the version to the request's cache salt.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from weightsync.errors import WeightSyncError
from weightsync.ray_actors.cache_salt import salted
from weightsync.ray_actors.guard import Guard


class VllmGuard(Guard):
    """Also salts requests with the version that will serve them."""

    def __init__(self) -> None:
        super().__init__()
        self.salt = ""
        """Added to each request's; "": none."""
        self.given_up = 0
        """How many versions requests may have been salted with that were then given up: their numbers come again."""

    def salt_with(self, version: int | None) -> None:
        """From now on requests are for *version*; None: unsalted."""
        again = f".{self.given_up}" if self.given_up else ""
        self.salt = "" if version is None else f"weightsync-{version}{again}"

    def admit(self, prompt: Any) -> Any:
        """The prompt to go on with. Raises as `check`; EngineStateError where the prompt cannot be salted."""
        self.check()
        return salted(prompt, self.salt) if self.salt else prompt


class AsyncVllmGuard(VllmGuard):
    """Raises what AsyncLLM hands on as it is; any other error it hides behind an EngineGenerateError without a text."""

    def _error(self) -> WeightSyncError:
        return _handed_on(super()._error())


def guard_llm(llm: Any) -> VllmGuard:
    """Stand before a vllm.LLM's requests, and before the steps for those that were queued earlier."""
    guard, engine = VllmGuard(), llm.llm_engine
    plain_add, plain_step = _weakly(engine, "add_request"), _weakly(engine, "step")

    def add_request(request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        return plain_add()(request_id, guard.admit(prompt), *args, **kwargs)

    def step(*args: Any, **kwargs: Any) -> Any:
        guard.check()
        return plain_step()(*args, **kwargs)

    engine.add_request, engine.step = add_request, step
    return guard


def guard_async_llm(engine: Any) -> AsyncVllmGuard:
    """Stand before an AsyncLLM's requests. Those in flight are held by the pause."""
    guard = AsyncVllmGuard()
    plain_add = _weakly(engine, "add_request")

    async def add_request(request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        return await plain_add()(request_id, guard.admit(prompt), *args, **kwargs)

    engine.add_request = add_request
    return guard


def _weakly(owner: Any, name: str) -> Callable[[], Any]:
    """Gives the method; a reference from the engine to itself would keep a deleted engine's memory until a collection."""
    found = getattr(owner, name)
    return (lambda: found) if name in vars(owner) else weakref.WeakMethod(found)


def _handed_on(error: WeightSyncError) -> WeightSyncError:
    """*error* as one of those that AsyncLLM.generate and encode let through: vLLM's servers answer 503 to it. Before
    vLLM had these, ValueErrors were let through."""
    graceful = getattr(sys.modules.get("vllm.exceptions"), "GracefulHTTPError", None)
    kind = type(error)

    class HandedOn(kind, graceful or ValueError):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            Exception.__init__(self, *error.args)
            self.__dict__.update(error.__dict__, message=str(error), http_status=HTTPStatus.SERVICE_UNAVAILABLE)

        def __reduce__(self) -> Any:  # travels, to Ray's caller for instance, as what it is
            return kind, self.args, error.__dict__

    HandedOn.__name__ = HandedOn.__qualname__ = kind.__name__
    return HandedOn()
