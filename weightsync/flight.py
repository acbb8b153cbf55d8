"""What one attempt at an update does and when, noted while it is driven: for its record, and for who looks on.

Ranks say on their own monotonic clocks when they worked. Such a clock is ahead of the coordinator's by an offset that each
message bounds, since nothing began before it was asked for or ended after it was answered:

    coordinator   asked ─────────────────────────▶ answered
    rank                  began ═══════ ended                    ended - answered  <=  offset  <=  began - asked
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from weightsync import messages as m
from weightsync.errors import WeightSyncError
from weightsync.identity import Identity, identify
from weightsync.report import Attempt, Clock, EngineProgress, LinkRow, Progress, Span
from weightsync.update import UpdateMachine

_PHASES: dict[type, str] = {
    m.Prepare: "prepare",
    m.Transfer: "transfer",
    m.Apply: "apply",
    m.Commit: "commit",
    m.Abort: "abort",
}
Replies = Sequence[m.Reply] | WeightSyncError


@dataclass(slots=True)
class _Part:
    """What a party was asked to do in a phase."""

    asked: float
    answered: float = 0.0
    """0: not yet."""
    ended: bool = False
    """Well."""
    timed: tuple[m.Timed, ...] = ()
    """One a rank."""


class Flight:
    """One attempt. `progress` may be called from any thread, all else is the driver's."""

    def __init__(self) -> None:
        self._started, self._zero = time.time(), time.monotonic()
        self._began = self._zero
        self._machine: UpdateMachine | None = None
        self._epoch, self._manifest_digest, self._nbytes = 0, "", 0
        self._links: tuple[LinkRow, ...] = ()
        self._ranks: dict[str, list[str]] = {}
        self._identities: Mapping[str, Identity] = {}
        self._num_groups: dict[str, int] = {}
        self._connect_s = self._ended = 0.0
        self._parts: dict[str, dict[str, _Part]] = {}
        """Party -> phase -> its part in it."""
        self._live: dict[str, tuple[int, int]] = {}
        """Engine -> bytes that have come, and module groups that are whole."""

    def begin(
        self,
        machine: UpdateMachine,
        *,
        epoch: int,
        manifest_digest: str,
        nbytes: int,
        links: tuple[LinkRow, ...],
        trainers: Iterable[str],
        engines: Mapping[str, Sequence[m.ReceiverOpened]],
        identities: Mapping[str, Identity],
        connect_s: float = 0.0,
    ) -> None:
        """*machine* is about to be driven; making links for it took *connect_s*."""
        self._epoch, self._manifest_digest, self._nbytes, self._links = epoch, manifest_digest, nbytes, links
        self._ranks = {trainer: [trainer] for trainer in trainers}
        self._ranks |= {party: [rank.load.rank for rank in ranks] for party, ranks in engines.items()}
        self._num_groups = {
            party: min((rank.load.num_groups for rank in ranks), default=0) for party, ranks in engines.items()
        }
        self._identities, self._connect_s, self._began = identities, connect_s, time.monotonic()
        self._machine = machine

    def sent(self, party: str, request: m.Request) -> None:
        """*request* is about to be sent."""
        phase = _PHASES.get(type(request))
        parts = self._parts.setdefault(party, {})
        if phase is None or phase in parts:
            return
        now = time.monotonic()
        if phase == "abort":
            self._give_up(party, now)
        parts[phase] = _Part(asked=now)
        if m.applied_by(request):
            parts.setdefault("apply", _Part(asked=now))

    def answered(self, party: str, replies: Replies) -> None:
        if isinstance(replies, WeightSyncError) or any(isinstance(reply, m.Failed) for reply in replies):
            self._give_up(party, time.monotonic())
            return
        arrived = [
            (r.progress, r.groups)
            if isinstance(r, m.Pending)
            else ((r.vote if isinstance(r, m.Applied) else r).nbytes, self._num_groups.get(party, 0))
            for r in replies
            if isinstance(r, m.Pending | m.Vote | m.Applied)
        ]
        if arrived and party in self._num_groups:
            self._live[party] = (sum(nbytes for nbytes, _ in arrived), min(groups for _, groups in arrived))
        timed = tuple(reply for reply in replies if isinstance(reply, m.Timed))
        if len(timed) == len(replies) > 0:
            self._end(party, timed)

    def _end(self, party: str, timed: tuple[m.Timed, ...]) -> None:
        match timed[0]:
            case m.Prepared():
                phases = {"prepare": timed}
            case m.Applied():
                votes = tuple(reply.vote for reply in timed if isinstance(reply, m.Applied))
                phases = {"transfer": votes, "apply": timed}
            case m.Ok():
                phases = {"commit": timed, "abort": timed}
            case _:
                phases = {"transfer": timed}
        for phase, replies in phases.items():
            part = self._parts.get(party, {}).get(phase)
            if part is not None and not part.answered:
                part.answered, part.ended, part.timed = time.monotonic(), True, replies

    def _give_up(self, party: str, now: float) -> None:
        for part in self._parts.get(party, {}).values():
            if not part.answered:
                part.answered = now

    def end(self) -> None:
        """The attempt is over; what is looked into afterwards is no part of it."""
        self._ended = time.monotonic()

    # ---- telling ------------------------------------------------------------------------------------------------

    def progress(self) -> Progress:
        """How far it is."""
        machine, now = self._machine, time.monotonic()
        if machine is None:
            return Progress(phase="connect", seconds=now - self._zero)
        engines = {}
        for party in self._num_groups:
            if party not in self._live:
                continue
            nbytes, groups = self._live[party]
            part = self._parts[party].get("transfer")
            seconds = (part.answered or now) - part.asked if part is not None else 0.0
            engines[party] = EngineProgress(
                nbytes=nbytes,
                of_nbytes=(self._nbytes - machine.left_out_bytes) * len(self._ranks[party]),
                groups=groups,
                num_groups=self._num_groups[party],
                seconds=seconds,
            )
        return Progress(
            version=machine.version,
            phase=machine.phase.value,
            seconds=now - self._zero,
            nbytes=self._nbytes,
            engines=engines,
        )

    def record(self, error: WeightSyncError | None = None) -> Attempt:
        """What there is to say in the end; *error* ended it."""
        now = self._ended or time.monotonic()
        for party in self._parts:
            self._give_up(party, now)
        machine = self._machine
        clocks = self._clocks()
        return Attempt(
            started=self._started,
            seconds=now - self._zero,
            version=machine.version if machine else None,
            epoch=self._epoch,
            manifest_digest=self._manifest_digest,
            links=self._links,
            spans=(*self._own_spans(error), *self._rank_spans(clocks)),
            clocks=clocks,
            error=type(error).__name__ if error else None,
            message=str(error) if error else None,
            culprit=error.rank if error else None,
            phase=error.phase if error else None,
        )

    def _clocks(self) -> dict[str, Clock]:
        bounds: dict[str, list[tuple[float, float]]] = {}
        for party, parts in self._parts.items():
            for part in parts.values():
                for rank, timed in zip(self._ranks.get(party, ()), part.timed, strict=False):
                    if timed.began:
                        ended = timed.began + timed.seconds
                        bounds.setdefault(rank, []).append((ended - part.answered, timed.began - part.asked))
        clocks = {}
        for rank, found in bounds.items():
            low, high = max(low for low, _ in found), min(high for _, high in found)
            if low <= 0 <= high and rank in self._identities and self._identities[rank].machine == _own_machine():
                clocks[rank] = Clock(offset_s=0.0, error_s=0.0)
            else:
                clocks[rank] = Clock(offset_s=(low + high) / 2, error_s=abs(high - low) / 2)
        return clocks

    def _own_spans(self, error: WeightSyncError | None) -> list[Span]:
        spans, start = [], self._began - self._zero
        if self._connect_s > 0.001:
            spans.append(Span(rank="coordinator", phase="connect", start_s=0.0, seconds=self._connect_s))
        for phase, seconds in (self._machine.phases if self._machine else {}).items():
            ended = error is None or phase != error.phase
            spans.append(Span(rank="coordinator", phase=phase, start_s=start, seconds=seconds, ended=ended))
            start += seconds
        return spans

    def _rank_spans(self, clocks: Mapping[str, Clock]) -> list[Span]:
        spans = []
        for party, ranks in self._ranks.items():
            committed = 0.0
            for phase, part in self._parts.get(party, {}).items():
                for i, rank in enumerate(ranks):
                    timed = part.timed[i] if i < len(part.timed) and part.timed[i].began else None
                    if timed is not None:
                        start, seconds = timed.began - clocks[rank].offset_s, timed.seconds
                    else:
                        start, seconds = part.asked, part.answered - part.asked
                    spans.append(
                        Span(
                            rank=rank,
                            phase=phase,
                            start_s=start - self._zero,
                            seconds=seconds,
                            ended=part.ended,
                            nbytes=timed.nbytes if isinstance(timed, m.Sent | m.Vote) else 0,
                        )
                    )
                    if phase == "commit":
                        committed = max(committed, start + seconds - self._zero)
            if pause_s := self._machine.pause_s.get(party, 0.0) if self._machine else 0.0:
                spans.append(Span(rank=party, phase="pause", start_s=committed - pause_s, seconds=pause_s))
        return spans


@cache
def _own_machine() -> str:
    return identify().machine
