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
    num_skipped: int = 0
    """Module groups that had not changed and stayed as they were (SyncConfig.skip_unchanged)."""


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


class LinkRow(msgspec.Struct, frozen=True, kw_only=True):
    """A link of the plan."""

    transport: str
    sender: str
    receivers: tuple[str, ...]
    nbytes: int
    """What goes over it, to each receiver, where nothing is left out; where they take different slices, to the one that takes
    most."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A phase of one rank, or of the update as a whole (rank "coordinator")."""

    rank: str
    phase: str
    """"connect", "prepare", "transfer", "apply", "commit", "abort"; "pause": the engine did not generate."""
    start_s: float
    """Since the attempt's start, on the coordinator's clock."""
    seconds: float
    ended: bool = True
    """False: it failed, or was given up."""
    nbytes: int = 0


class Clock(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank's clock was brought to the coordinator's: by when its messages left and came."""

    offset_s: float
    """By how much the rank's monotonic clock is ahead; 0 on the coordinator's own machine, where there is one clock."""
    error_s: float
    """By how much that may be wrong."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at an update, as the coordinator saw it; also of a failed one."""

    started: float
    """Unix time, of the coordinator's machine."""
    seconds: float
    version: int | None
    """Where it was to lead; None: it failed before that was settled."""
    epoch: int
    manifest_digest: str
    links: tuple[LinkRow, ...]
    spans: tuple[Span, ...]
    clocks: dict[str, Clock]
    """Of the ranks that said when they did what; the others' spans last from call to answer."""
    error: str | None = None
    """Kind of the error that ended it: "TransportError"."""
    message: str | None = None
    culprit: str | None = None
    """The rank to blame."""
    phase: str | None = None
    """Where it failed."""


class EngineProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far the transfer to an engine is, all its ranks together."""

    nbytes: int
    of_nbytes: int
    """What comes to all its ranks, where each gets all that is sent."""
    groups: int
    """Module groups that are whole on every rank."""
    num_groups: int
    seconds: float
    """Since the transfer to it began; until it was whole."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far the present attempt at an update is, or the last one."""

    phase: str
    seconds: float
    """Since the attempt began."""
    version: int | None = None
    """Where it leads; None: the links are still made."""
    nbytes: int = 0
    """Bytes of the model."""
    engines: dict[str, EngineProgress] = {}
    """Those that something was heard of."""


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
    num_skipped: int = 0
    """Module groups that had not changed and were neither moved nor applied (SyncConfig.skip_unchanged); the most of any
    engine rank."""
    skipped_bytes: int = 0
    """Bytes of the tensors that were not moved, each once."""
    poisoned: dict[str, str] = {}
    """Engines whose apply failed, with the error; they hold mixed weights until a whole update succeeds."""
    failed_attempts: tuple[str, ...] = ()
    """Errors of the attempts before this one (SyncConfig.retries)."""
    lost: tuple[str, ...] = ()
    """Engines that this update went on without, because their process is gone (SyncConfig.on_lost_engine)."""
    joined: tuple[str, ...] = ()
    """Engines that were late, restarted or poisoned, and came in with this update."""
    attempts: tuple[Attempt, ...] = ()
    """What there is for a timeline; the last one succeeded."""

    @property
    def gb_per_s(self) -> float:
        """Model bytes over the whole update's time, 10^9 bytes a second."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0

    def __str__(self) -> str:
        notes = [
            f"{count} {what}"
            for what, count in (
                ("names feed nothing", max((len(load.unmapped) for load in self.load), default=0)),
                ("engine parameters fed by nothing", max((len(load.unfed) for load in self.load), default=0)),
                ("parameters written in part", max((len(load.partial) for load in self.load), default=0)),
                ("module groups unchanged and left out", self.num_skipped),
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
