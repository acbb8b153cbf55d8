"""Code that runs inside a user's actor, reached with `actor.__ray_call__`: no mixin, no method of the user's class.

Each actor process keeps a side as trainer, as engine, or as both. A new weight sync takes it over (versions live on);
calls of an older one are refused from then on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from weightsync.errors import ConfigError, EngineStateError, RestartedError
from weightsync.fence import Fence

Locator = str | Callable[[Any], Any]
"""How to find something in an actor: an attribute path ("trainer.model"), or a function of the actor."""


class Side(Protocol):
    """What answers calls in an actor."""

    @property
    def fence(self) -> Fence: ...

    def call(self, payload: bytes) -> list[bytes] | None:
        """Answer a call with one reply a rank; None: ask again with `result` and the call's number."""
        ...

    def result(self, number: int) -> list[bytes] | None: ...

    def get_ready(self) -> None:
        """An update is about to begin: do ahead what needs no word of it. Never raises."""
        ...

    def stand_down(self) -> None:
        """Forget what was done ahead and not used: others may use the actor now."""
        ...


MakeSide = Callable[[Any, Locator, int, Side | None], Side]
"""(actor, locator, index, the side that an earlier weight sync left, if any) -> side."""

_sides: dict[tuple[int, str], tuple[str, Side]] = {}
"""(actor, "trainer" or "engine") -> the weight sync that has it, and its side; an actor may be both."""


def open_side(actor: Any, owner: str, role: str, make: MakeSide, locator: Locator, index: int, lease_s: float) -> None:
    """Find what *locator* names in *actor* and put a side before it, which may take over from an earlier one.

    Args:
        owner: the weight sync; a coordinator that was restarted comes with the same.
        lease_s: for how long another weight sync that is in mid update is believed to be alive.

    Raises:
        EngineStateError: another weight sync is in mid update here. ConfigError: *locator* names nothing of use.
    """
    before, previous = _sides.get((id(actor), role), ("", None))
    if previous is not None and before != owner and previous.fence.updating:
        silent_s = time.monotonic() - previous.fence.heard
        if silent_s < lease_s:
            raise EngineStateError(
                f"another weight sync is in the middle of an update of this {role} (heard {silent_s:.1f} s ago); wait for "
                "its end, or close it"
            )
    _sides[id(actor), role] = (owner, make(actor, locator, index, previous))


def find_side(actor: Any, role: str) -> Side:
    """Raises RestartedError where *actor* has none."""
    known = _sides.get((id(actor), role))
    if known is None:
        raise RestartedError("this actor process takes part in no weight sync: it was restarted")
    return known[1]


def has_two_roles(actor: Any) -> bool:
    """Whether *actor* is trainer and engine."""
    return all((id(actor), role) in _sides for role in ("trainer", "engine"))


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
