"""An engine without a model: its ranks answer `messages` as `ReceiverRank` does, and what stands before them as the side
of an engine that generates during updates.

In place of weights a rank holds one number for each trainer. Nothing blocks: a call that would wait is answered None, and is
asked about again with `proceed`.
"""

from __future__ import annotations

import math

import msgspec

from weightsync import messages as m
from weightsync.config import SyncConfig
from weightsync.errors import ErrorInfo, TransportError, UpdateTimeoutError, WeightSyncError
from weightsync.fence import Fence
from weightsync.manifest import Manifest
from weightsync.report import LoadSummary
from weightsync.testing.simulated_trainer import Wire, Wires, simulated_identity

MIXED = -1
"""Content of what was loaded in part."""


class SimulatedRank:
    """A `ReceiverRank`."""

    def __init__(self, rank: int, pid: int, wires: Wires) -> None:
        self.weights: dict[int, int] = {}
        """Trainer -> content."""
        self.version = 0
        self.poisoned = False
        self.applied = False
        """Holds new weights that were not committed yet."""
        self.flaw = ""
        self.fence = Fence()
        self._name, self._rank = f"engine rank {rank}", rank
        self._identity, self._wires = simulated_identity(pid), wires
        self._config = SyncConfig()
        self._manifest: Manifest | None = None
        self._plan_digest = ""
        self._links: list[tuple[m.LinkPlan, Wire]] = []
        self._connecting = False
        self._receiving: int | None = None
        """The version."""
        self._began = 0.0
        self._garbled = False
        self._lag_s = 0.0

    def handle(self, call: m.Call) -> m.Reply | None:
        try:
            self.fence.admit(call)
            if isinstance(call.request, m.OpenReceiver):
                self._name = f"engine {call.request.engine} rank {self._rank}"
            if self.flaw == "fails" and not isinstance(call.request, m.Apply):
                raise WeightSyncError("it broke")
            return self._answer(call.request)
        except WeightSyncError as error:
            return self._failed(error)

    def proceed(self, request: m.Request) -> m.Reply | None:
        version = m.applied_by(request)  # what comes is being received already
        try:
            return self._apply(version) if version else self._answer(request)
        except WeightSyncError as error:
            return self._failed(error)

    def _failed(self, error: WeightSyncError) -> m.Failed:
        return m.Failed(error=ErrorInfo.of(error, rank=self._name), poisoned=self.poisoned)

    def _answer(self, request: m.Request) -> m.Reply | None:
        match request:
            case m.OpenReceiver():
                return self._open(request)
            case m.Connect():
                return self._connect(request)
            case m.Prepare():
                if self._manifest is None or not self._links:
                    raise TransportError("the links are not open")
                return m.Prepared(
                    version=self.version,
                    epoch=self.fence.epoch,
                    manifest_digest=self._manifest.digest,
                    plan_digest=self._plan_digest,
                    poisoned=self.poisoned,
                )
            case m.Transfer():
                self._receiving, self._began = request.version, self._wires.clock.now
                self._connecting = self.applied = False
                self._garbled = self.flaw == "garbles"
                self._lag_s = math.inf if self.flaw == "stalls" else self._wires.lag_s()
                return self._apply(request.version) if request.apply else self._poll()
            case m.Poll():
                return self._poll()
            case m.Apply():
                return self._apply(request.version)
            case m.Commit():
                self._commit(request.version)
                return m.Ok()
            case m.Abort() | m.Close():
                self.drop_links()
                return m.Ok(poisoned=self.poisoned)
            case _:
                raise WeightSyncError(f"an engine cannot handle {type(request).__name__}")

    def _open(self, request: m.OpenReceiver) -> m.ReceiverOpened:
        if self.applied and self._receiving == request.decided:
            self._commit(request.decided)
        self.drop_links()
        self._config, self._manifest = request.config, request.manifest
        return m.ReceiverOpened(
            identity=self._identity,
            rank=self._rank,
            load=LoadSummary(rank=self._name, num_groups=1),
            order=tuple(meta.name for meta in request.manifest.tensors),
            version=self.version,
            epoch=self.fence.epoch,
            poisoned=self.poisoned,
        )

    def _connect(self, request: m.Connect) -> m.Reply:
        self.drop_links()
        self._plan_digest = m.plan_digest(request.links)
        self._connecting = True
        for link in request.links:
            if self._rank in link.receiver:
                wire = self._wires.by_token[link.plan.token]
                wire.connected += 1
                self._links.append((link.plan, wire))
        return self._poll()

    def _poll(self) -> m.Reply:
        if self._connecting:
            if any(wire.broken for _, wire in self._links):
                raise TransportError("the sender is gone")
            return m.Ok()
        if self._receiving is None:
            raise WeightSyncError("nothing is under way")
        return self._vote() if self._whole(self._began) else m.Pending(progress=self._progress(), doing="receives")

    def _whole(self, since: float) -> bool:
        """Whether all has come; raises when nothing more will, or nothing came for too long."""
        now = self._wires.clock.now
        streams = [wire.stream for _, wire in self._links if wire.stream and wire.stream.version == self._receiving]
        if len(streams) == len(self._links) and all(stream.arrived(now - self._lag_s) for stream in streams):
            return True
        if any(wire.broken for _, wire in self._links):
            raise TransportError("a link broke")
        if now - max([since, *(min(now, stream.ends) for stream in streams)]) > self._config.timeout_s:
            raise UpdateTimeoutError("nothing comes any more")
        return False

    def _progress(self) -> int:
        now = self._wires.clock.now
        return sum(
            wire.stream.progress(now)
            for _, wire in self._links
            if wire.stream and wire.stream.version == self._receiving
        )

    def _vote(self) -> m.Vote:
        held = {plan.id: wire.stream.content + self._garbled for plan, wire in self._links if wire.stream}
        return m.Vote(nbytes=4 * len(held), content_digests=held, peak_staging_bytes=0, seconds=0.0)

    def _apply(self, version: int) -> m.Applied | None:
        """None: the rest has yet to come."""
        if self._receiving != version:
            raise WeightSyncError(f"version {version} was not received, it cannot be applied")
        try:
            if not self._whole(self._began):
                return None
            if self.flaw == "fails":
                raise WeightSyncError("out of memory")
        except WeightSyncError:
            if self._progress():
                self.poisoned, self.weights = True, {wire.sender: MIXED for _, wire in self._links}
            raise
        vote = self._vote()
        self.weights = {plan.sender: vote.content_digests[plan.id] for plan, _ in self._links}
        self.applied = True
        return m.Applied(vote=vote, seconds=0.0, reloads=1)

    def _commit(self, version: int) -> None:
        if self._receiving != version or not self.applied:
            raise WeightSyncError(f"version {version} was not applied, it cannot be committed")
        self._receiving, self.applied, self.poisoned, self.version = None, False, False, version

    def drop_links(self) -> None:
        self.poisoned = self.poisoned or self.applied
        for _, wire in self._links:
            wire.broken = True
        self._links = []
        self._receiving, self.applied, self._connecting = None, False, False


class SimulatedEngine:
    """All ranks of an engine that generates during updates, with the side that stands before it: pauses it from apply to
    commit, and lets it serve nobody while its weights are in doubt."""

    def __init__(self, num_ranks: int, pid: int, wires: Wires) -> None:
        self.ranks = [SimulatedRank(rank, pid, wires) for rank in range(num_ranks)]
        self.fence = Fence()
        self.flaw = ""
        """In the next call, of its last rank: "fails" (in apply half way), "garbles" (a wrong byte comes), or "stalls"
        (the rest never comes); of all its ranks: "unsure" (they do what they are asked, and the answer is that it failed)."""
        self.held = False
        """Paused."""
        self.doubt = ""
        """"mixed" or "missed"."""
        self._applied = 0
        """The version that every rank holds and none has committed; 0: none."""
        self._call: m.Call | None = None
        self._replies: list[m.Reply | None] = []

    @property
    def serves(self) -> bool:
        return not self.held and not self.doubt

    def handle(self, call: m.Call) -> list[m.Reply] | None:
        """None: some rank is still at it; then ask `proceed`, and nothing else."""
        try:
            self.fence.admit(call)
        except WeightSyncError as error:
            return [m.Failed(error=ErrorInfo.of(error))]
        if m.applied_by(call.request):
            self.held = True
        self.ranks[-1].flaw = self.flaw
        self._call, self._replies = call, [rank.handle(call) for rank in self.ranks]
        return self._collected(call.request)

    def proceed(self) -> list[m.Reply] | None:
        assert self._call is not None
        request = self._call.request
        self._replies = [reply or rank.proceed(request) for rank, reply in zip(self.ranks, self._replies, strict=True)]
        return self._collected(request)

    def _collected(self, request: m.Request) -> list[m.Reply] | None:
        replies = [reply for reply in self._replies if reply is not None]
        if len(replies) < len(self.ranks):
            return None
        if self.flaw == "unsure":
            error = ErrorInfo.of(WeightSyncError("its workers did not answer"))
            replies = [m.Failed(error=error, poisoned=isinstance(request, m.Commit) or bool(m.applied_by(request)))]
        failed = any(isinstance(reply, m.Failed) for reply in replies)
        self._settle(request, replies, failed)
        ends = isinstance(request, m.OpenReceiver | m.Commit | m.Abort | m.Close)
        self.held = self.held and not (ends and not self.doubt and not failed)
        return [self._marked(reply) for reply in replies]

    def _settle(self, request: m.Request, replies: list[m.Reply], failed: bool) -> None:
        """What the ranks' answers mean for the engine."""
        mixed = any(getattr(reply, "poisoned", False) for reply in replies)
        match request:
            case m.OpenReceiver() if not failed:
                version = min(rank.version for rank in self.ranks)
                if self._applied and version == self._applied:
                    self._applied, self.doubt = 0, ""
                elif version < request.decided:
                    self.doubt = self.doubt or "missed"
            case m.Apply() | m.Transfer(apply=True):
                mixed = mixed or (failed and any(isinstance(reply, m.Applied) for reply in replies))
                self._applied = 0 if failed else request.version
            case m.Commit() if not failed:
                self._applied, self.doubt = 0, ""
            case m.Commit():
                mixed = mixed or any(isinstance(reply, m.Ok) for reply in replies)
                self.doubt = self.doubt or "missed"
            case m.Abort(hold=True):
                self.doubt = self.doubt or "missed"
        if isinstance(request, m.Abort | m.Close) and self._applied:
            mixed = True
        if mixed:
            self._applied, self.doubt = 0, "mixed"

    def _marked(self, reply: m.Reply) -> m.Reply:
        """With what a rank cannot know."""
        if self.doubt == "mixed" and isinstance(reply, m.ReceiverOpened | m.Prepared | m.Ok):
            return msgspec.structs.replace(reply, poisoned=True)
        return reply

    def drop_links(self) -> None:
        """Its process is gone."""
        for rank in self.ranks:
            rank.drop_links()
