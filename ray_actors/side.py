"""Code that runs inside a user's actor, reached with `actor.__ray_call__`: no mixin, no method of the user's class.

Each actor process keeps one side, trainer or engine. A new weight sync takes it over (versions live on); calls of
an older one are refused from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from weightsync.errors import ConfigError, EngineStateError

Locator = str | Callable[[Any], Any]
"""How to find something in an actor: an attribute path ("trainer.model"), or a function of the actor."""


class Side(Protocol):
    """What answers calls in an actor."""

    def call(self, payload: bytes, number: int = 0) -> list[bytes] | None:
        """Answer a request with one reply a rank; None: ask again with `result` and the same *number*."""
        ...

    def result(self, number: int) -> list[bytes] | None: ...


MakeSide = Callable[[Any, Locator, int, Side | None], Side]
"""(actor, locator, index, the side that an earlier weight sync left, if any) -> side."""

_sides: dict[int, tuple[str, Side]] = {}


def open_side(actor: Any, session: str, make: MakeSide, locator: Locator, index: int) -> None:
    """Find what *locator* names in *actor* and put a side before it, which may take over from an earlier one."""
    _, previous = _sides.get(id(actor), ("", None))
    _sides[id(actor)] = (session, make(actor, locator, index, previous))


def call_side(actor: Any, session: str, number: int, payload: bytes) -> list[bytes] | None:
    """Ray may run the calls of an async or threaded actor out of order; *number* tells them apart."""
    return _side(actor, session).call(payload, number)


def side_result(actor: Any, session: str, number: int) -> list[bytes] | None:
    return _side(actor, session).result(number)


def _side(actor: Any, session: str) -> Side:
    known = _sides.get(id(actor))
    if known is None:
        raise EngineStateError("this actor process takes part in no weight sync: it was restarted; connect again")
    if known[0] != session:
        raise EngineStateError("another weight sync has taken this actor over; use that one, or connect again")
    return known[1]


def locate(actor: Any, locator: Locator, *, key: str) -> Any:
    """What *locator* names in *actor*.

    Raises:
        ConfigError: an attribute on the path does not exist; what the actor has is listed.
    """
    if callable(locator):
        return locator(actor)
    found = actor
    for i, part in enumerate(locator.split(".")):
        if not hasattr(found, part):
            seen = ".".join(locator.split(".")[:i]) or type(actor).__name__
            has = sorted(name for name in vars(found) if not name.startswith("_")) if hasattr(found, "__dict__") else []
            raise ConfigError(f"{key}: {seen} has no attribute {part!r}; it has {', '.join(has) or 'none'}", key=key)
        found = getattr(found, part)
    return (
        found()
        if callable(found) and not hasattr(found, "state_dict") and not hasattr(found, "collective_rpc")
        else found
    )
