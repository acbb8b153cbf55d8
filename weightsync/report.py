"""What an update did, for people and for records."""

from __future__ import annotations

import msgspec


class RankRow(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part in an update."""

    rank: str
    """"trainer 0", "engine 1 rank 3"."""
    host: str
    pid: int
    node: str = ""
    nbytes: int = 0
    """Payload bytes sent or received."""
    transfer_s: float = 0.0
    apply_s: float = 0.0
    peak_staging_bytes: int = 0
    reloads: int = 0
    """How often the engine's loader ran for this update: once, or not at all where every module group was copied."""
    num_direct: int = 0
    """Module groups that were loaded by copies (SyncConfig.direct_apply)."""
    reloaded: dict[str, str] = {}
    """The groups that were loaded by the engine's loader: key -> why."""


class LoadSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine rank's load map says about the manifest."""

    rank: str
    num_groups: int
    largest_group: str = ""
    largest_group_bytes: int = 0
    """Staging that the largest module group needs where its bytes are copied."""
    unmapped: tuple[str, ...] = ()
    """Names that feed nothing on this rank."""
    unfed: tuple[str, ...] = ()
    """Parameters and buffers of the engine that no name feeds."""
    partial: tuple[str, ...] = ()
    """Those that the names feed only in part (SyncConfig.partial)."""
    read_in_part: dict[str, int] = {}
    """Name -> elements that this rank reads, for names of which it reads some; an engine's ranks together read all."""
    casts: tuple[str, ...] = ()
    fallback: str | None = None
    """Why groups are coarser than modules; None when they are exact."""


class UpdateReport(msgspec.Struct, frozen=True, kw_only=True):
    """One update, from prepare to commit."""

    version: int
    nbytes: int
    """Bytes of the model in wire dtypes, each tensor once."""
    seconds: float
    pause_s: float
    """Longest time that an engine could not generate."""
    phases: dict[str, float]
    apply: str
    """"staged" or "streaming"."""
    transports: dict[str, str]
    """"trainer 0 -> engine 1 rank 0": name of the transport."""
    ranks: tuple[RankRow, ...]
    load: tuple[LoadSummary, ...]
    total_values: int
    changed_values: int | None = None
    """Values that differ from the update before; None unless counted (SyncConfig.count_changed_values)."""
    poisoned: dict[str, str] = {}
    """Engines whose apply failed, with the error; they hold mixed weights until a whole update succeeds."""
    failed_attempts: tuple[str, ...] = ()
    """Errors of the attempts before this one (SyncConfig.retries)."""
    lost: tuple[str, ...] = ()
    """Engines that this update went on without, because their process is gone (SyncConfig.on_lost_engine)."""
    joined: tuple[str, ...] = ()
    """Engines that were late, restarted or poisoned, and came in with this update."""

    @property
    def gb_per_s(self) -> float:
        """Model bytes over the whole update's time, 10^9 bytes a second."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0

    def __str__(self) -> str:
        notes = [
            f"{count} {what}"
            for what, count in (
                ("names feed nothing", max((len(load.unmapped) for load in self.load), default=0)),
                ("parameters written in part", max((len(load.partial) for load in self.load), default=0)),
                ("engines poisoned", len(self.poisoned)),
                ("engines lost", len(self.lost)),
                ("engines joined", len(self.joined)),
                ("attempts failed before", len(self.failed_attempts)),
            )
            if count
        ]
        phases = ", ".join(f"{name} {1e3 * s:.0f}" for name, s in self.phases.items())
        return (
            f"version {self.version}: {self.nbytes / 1e6:.1f} MB in {self.seconds:.3f} s ({self.gb_per_s:.2f} GB/s), "
            f"pause {1e3 * self.pause_s:.0f} ms, {self.apply}; ms: {phases}" + "".join(f"; {note}" for note in notes)
        )
