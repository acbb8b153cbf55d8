"""Every error that weightsync raises, named by situation.

    WeightSyncError
    ├── ConfigError             a setting is wrong; names key, file and line
    ├── ManifestError           a tensor differs from what was announced; names it
    ├── AgreementError          ranks answered differently; names rank and field
    ├── IncompleteUpdateError   tensors are missing, came twice or were not asked for
    ├── DigestError             bytes differ from what the sender read
    ├── StagingLimitError       a module group does not fit the staging budget
    ├── TransportError          a peer is gone or a link broke
    │   └── CoordinatorLostError  the coordinator's process is gone; the next call starts another
    ├── UpdateTimeoutError      a bounded wait ran out; names who was silent
    ├── EngineStateError        the engine cannot take an update, or a request, in its present state
    │   └── RestartedError      the actor's process was restarted and takes part in no weight sync
    └── EnginePoisonedError     an apply failed half way; only a whole update clears it

All arguments but the message are optional, so that each error survives pickling
(Ray) and the wire (`ErrorInfo`) with its attributes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

if TYPE_CHECKING:
    from weightsync.report import Attempt


class WeightSyncError(Exception):
    """Base of all weightsync errors. `rank` says on which rank it was seen, where that is known."""

    fields: ClassVar[tuple[str, ...]] = ("rank", "phase")

    def __init__(self, message: str = "", **attributes: Any) -> None:
        super().__init__(message)
        unknown = attributes.keys() - set(self.fields)
        assert not unknown, f"{type(self).__name__} has no attribute {sorted(unknown)}"
        for field in self.fields:
            setattr(self, field, attributes.get(field))

    rank: str | None
    phase: str | None
    attempts: tuple[Attempt, ...] = ()
    """Of the update that failed with this; the last one ended it."""


class ConfigError(WeightSyncError):
    """A setting is wrong. Nothing was started."""

    fields = (*WeightSyncError.fields, "key", "file", "line")
    key: str | None
    file: str | None
    line: int | None


class ManifestError(WeightSyncError):
    """A tensor's name, dtype or shape differs from what was announced; retrying cannot help."""

    fields = (*WeightSyncError.fields, "name")
    name: str | None


class AgreementError(WeightSyncError):
    """Two ranks disagree on `field`. Nothing was moved."""

    fields = (*WeightSyncError.fields, "field")
    field: str | None


class IncompleteUpdateError(WeightSyncError):
    """The tensors that came are not exactly the manifest's. No engine was changed."""

    fields = (*WeightSyncError.fields, "missing", "duplicated", "unexpected")
    missing: list[str] | None
    duplicated: list[str] | None
    unexpected: list[str] | None


class DigestError(WeightSyncError):
    """Received bytes differ from the bytes that the sender read. No engine was changed."""

    fields = (*WeightSyncError.fields, "name")
    name: str | None


class StagingLimitError(WeightSyncError):
    """`group` needs `needed_bytes` of staging memory, `limit_bytes` are allowed."""

    fields = (*WeightSyncError.fields, "group", "needed_bytes", "limit_bytes")
    group: str | None
    needed_bytes: int | None
    limit_bytes: int | None


class TransportError(WeightSyncError):
    """A link to a peer broke or could not be made."""


class CoordinatorLostError(TransportError):
    """The coordinator died; how far the update had come shows in the next one, which makes it whole."""


class UpdateTimeoutError(WeightSyncError):
    """A bounded wait ran out; the message says who was silent, in which phase and for how long."""


class EngineStateError(WeightSyncError):
    """The engine cannot take an update as it is; the message says what to change."""


class RestartedError(EngineStateError):
    """The process was restarted since it was connected: it holds the weights that it started with."""


class EnginePoisonedError(WeightSyncError):
    """An apply failed half way: the engine holds mixed weights until a whole update succeeds."""


_KINDS: dict[str, type[WeightSyncError]] = {
    kind.__name__: kind
    for kind in (
        WeightSyncError,
        ConfigError,
        ManifestError,
        AgreementError,
        IncompleteUpdateError,
        DigestError,
        StagingLimitError,
        TransportError,
        CoordinatorLostError,
        UpdateTimeoutError,
        EngineStateError,
        RestartedError,
        EnginePoisonedError,
    )
}


class ErrorInfo(msgspec.Struct, frozen=True):
    """An error as it travels: plain data, no pickled exception."""

    kind: str
    message: str
    attributes: dict[str, Any] = {}

    @classmethod
    def of(cls, error: BaseException, *, rank: str | None = None) -> ErrorInfo:
        """Describe *error*; one that is not ours becomes a WeightSyncError that keeps type and text."""
        if isinstance(error, WeightSyncError):
            attributes = {field: getattr(error, field) for field in error.fields}
            if attributes.get("rank") is None:
                attributes["rank"] = rank
            return cls(type(error).__name__, str(error), {k: v for k, v in attributes.items() if v is not None})
        return cls("WeightSyncError", f"{type(error).__name__}: {error}", {"rank": rank} if rank else {})

    def to_error(self) -> WeightSyncError:
        kind = _KINDS.get(self.kind, WeightSyncError)
        attributes = {k: v for k, v in self.attributes.items() if k in kind.fields}
        rank = attributes.get("rank")
        message = f"{rank}: {self.message}" if rank and not self.message.startswith(rank) else self.message
        return kind(message, **attributes)
