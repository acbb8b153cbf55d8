"""weightsync: a transaction for weight updates, from trainers to rollout engines, over any transport.

sync = weightsync.connect(trainers=[...], engines=[...], source="model", target="llm")
report = sync.update()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightsync.chunk import WeightChunk
from weightsync.coalescer import Coalescer
from weightsync.config import SyncConfig
from weightsync.errors import (
    AgreementError,
    ConfigError,
    CoordinatorLostError,
    DigestError,
    EnginePoisonedError,
    EngineStateError,
    IncompleteUpdateError,
    ManifestError,
    RestartedError,
    StagingLimitError,
    TransportError,
    UpdateTimeoutError,
    WeightSyncError,
)
from weightsync.loadmap import LoadMap
from weightsync.manifest import Manifest
from weightsync.report import UpdateReport

if TYPE_CHECKING:
    from weightsync.ray_actors.connect import WeightSync, connect

__version__ = "0.1.0"

__all__ = [
    "AgreementError",
    "Coalescer",
    "ConfigError",
    "CoordinatorLostError",
    "DigestError",
    "EnginePoisonedError",
    "EngineStateError",
    "IncompleteUpdateError",
    "LoadMap",
    "Manifest",
    "ManifestError",
    "RestartedError",
    "StagingLimitError",
    "SyncConfig",
    "TransportError",
    "UpdateReport",
    "UpdateTimeoutError",
    "WeightChunk",
    "WeightSync",
    "WeightSyncError",
    "connect",
]


def __getattr__(name: str) -> Any:
    """The two names that need ray are imported when they are used, so that the core works without it."""
    if name in ("WeightSync", "connect"):
        from weightsync.ray_actors import connect as module

        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
