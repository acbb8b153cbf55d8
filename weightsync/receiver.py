"""One engine rank's part in a weight sync: receives, coalesces, votes, applies once."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

import torch

from weightsync import messages as m
from weightsync.background import Background
from weightsync.boxview import BoxView, Parts, adopt
from weightsync.coalescer import Coalescer
from weightsync.config import SyncConfig
from weightsync.direct import DirectApply, Way
from weightsync.doctor.look import look
from weightsync.errors import EngineStateError, ErrorInfo, ManifestError, TransportError, WeightSyncError
from weightsync.fence import Fence
from weightsync.grouptable import GroupTable
from weightsync.identity import identify, on_device
from weightsync.interfaces import EngineAdapter, ReceiverTransport, Transfer
from weightsync.loadmap import LoadMap
from weightsync.manifest import Manifest
from weightsync.needs import Needs
from weightsync.plan import may_take_shards
from weightsync.registry import transport_classes
from weightsync.report import LoadSummary
from weightsync.sender import link_context
from weightsync.staging import check_budget, group_bytes, regroup
from weightsync.unchanged import LiveDigests, from_bits, group_numbers, groups_left, without

_Entry = tuple[m.ReceiverLink, ReceiverTransport, tuple[str, ...]]
"""A link, this end of it, and the names that come over it, where it carries whole tensors."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What an update brings that leaves something out."""

    left_out: bytes
    sent: Manifest
    """Of the tensors that come, as the trainers have it."""
    manifest: Manifest
    """The same as it comes here: of their boxes, where this rank takes slices."""
    groups: GroupTable
    links: tuple[_Entry, ...]
    """Over which something comes."""


class ReceiverRank:
    """Driven by `handle`, one request at a time. The model's weights are touched by `Apply` alone."""

    def __init__(self, adapter: EngineAdapter, *, rank: int = 0) -> None:
        self._adapter = adapter
        self._rank = rank
        self.name = f"engine rank {rank}"
        self._device = getattr(adapter, "device", torch.device("cpu"))
        self._group_table = GroupTable((), (), (), {}, {})
        self._live_digests: LiveDigests | None = None
        """With `skip_unchanged`."""
        self._holds = False
        """What has not changed may be left out of the update that is prepared."""
        self._part: _Part | None = None
        """What came of the last update that left something out."""
        self._came = Manifest(())
        """Of the tensors that the update under way brings, whole."""
        self._direct: DirectApply | None = None
        self._way = Way.RELOAD
        self._staged = True
        self._defer_sets = False
        """Digests of sets are compared while they are applied, so there is no vote before."""
        self._config = SyncConfig()
        self._manifest: Manifest | None = None
        self._load_map: LoadMap | None = None
        self._needs: Needs | None = None
        self._boxes: BoxView | None = None
        """Where this rank takes slices: the boxes that they are."""
        self._links: list[tuple[m.ReceiverLink, ReceiverTransport]] = []
        self._connecting: Background[m.Ok] | None = None
        self._receiving: list[Background[None]] = []
        self._coalescer: Coalescer | None = None
        self._ready = False
        """The engine was looked at, and nothing can have changed it since."""
        self._next: Coalescer | None = None
        """Of the update that is prepared, until it begins."""
        self._began = self._arrived = 0.0
        """When the transfer began, and when the last link's end was reached."""
        self._applied = False
        """Some of the version is in the model."""
        self._whole = False
        """All of it is."""
        self.poisoned = False
        self.fence = Fence()
        self._plan_digest = ""
        self._version = 0

    def handle(self, call: m.Call) -> m.Reply:
        """Answer; an error becomes a `Failed` reply that names this rank."""
        try:
            self.fence.admit(call)
            return m.timed(self._handle, call.request)
        except Exception as error:
            return m.Failed(error=ErrorInfo.of(error, rank=self.name), poisoned=self.poisoned)

    def _handle(self, request: m.Request) -> m.Reply:
        match request:
            case m.Examine():
                facts = look(self._device, adapter=self._adapter, probe_bytes=request.probe_bytes)
                return m.Examined(identity=on_device(identify(), self._device), rank=self._rank, facts=facts)
            case m.OpenReceiver():
                return self._open(request)
            case m.Connect():
                return self._connect(request)
            case m.Prepare():
                return self._prepare(request)
            case m.Transfer():
                self._receive(request)
                return self._apply(request.version) if request.apply else self._poll(request.wait_s)
            case m.Poll():
                return self._poll(request.wait_s)
            case m.Apply():
                return self._apply(request.version)
            case m.Commit():
                return self._commit(request.version)
            case m.Abort() | m.Close():
                self._drop_links()
                return m.Ok(poisoned=self.poisoned)
            case _:
                raise WeightSyncError(f"an engine cannot handle {type(request).__name__}")

    def _open(self, request: m.OpenReceiver) -> m.ReceiverOpened:
        if self._whole and self._coalescer is not None and self._coalescer.version == request.decided:
            self._commit(request.decided)  # the coordinator that decided so is gone
        self._drop_links()
        self.name = f"engine {request.engine} rank {self._rank}"
        self._config, self._manifest = request.config, request.manifest
        self._load_map = load_map = self._adapter.load_map(request.manifest)
        self._check_load_map(load_map, request.manifest)
        self._needs = Needs.of(load_map, request.manifest) if may_take_shards(self._config) else None
        self._boxes = None
        self._load_by(self._adapter, load_map, request.manifest)
        self._live_digests = LiveDigests(self._adapter, load_map) if self._config.skip_unchanged else None
        sizes = {group.key: group_bytes(request.manifest, group) for group in load_map.groups}
        largest = max(sizes, key=lambda key: sizes[key], default="")
        summary = LoadSummary(
            rank=self.name,
            num_groups=len(load_map.groups),
            largest_group=largest,
            largest_group_bytes=sizes.get(largest, 0),
            unmapped=load_map.unmapped,
            unfed=load_map.unfed,
            partial=load_map.partial,
            read_in_part=load_map.read_in_part(request.manifest),
            casts=load_map.casts(request.manifest),
            fallback=load_map.fallback,
        )
        return m.ReceiverOpened(
            identity=on_device(identify(), self._device),
            rank=self._rank,
            load=summary,
            order=regroup(request.manifest, load_map.groups),
            version=self._version,
            epoch=self.fence.epoch,
            poisoned=self.poisoned,
            groups=group_numbers(request.manifest, load_map) if self._config.skip_unchanged else (),
            needs=self._needs,
        )

    def _load_by(self, adapter: EngineAdapter, load_map: LoadMap, manifest: Manifest) -> None:
        """Make ready for groups of *load_map*, which take tensors of *manifest*."""
        self._group_table = GroupTable.of(manifest, load_map.groups)
        self._direct = DirectApply(
            adapter,
            load_map,
            manifest,
            mode=self._config.direct_apply,
            audit_every=self._config.audit_every,
        )

    def _look_at_boxes(self, parts: Parts | None) -> None:
        """From the next update on take slices, some of them in *parts*; None: whole tensors."""
        assert self._manifest is not None and self._load_map is not None
        if parts is not None:
            assert self._needs is not None
            view = BoxView(self._manifest, self._load_map, self._needs, parts)
            if self._boxes is None or self._boxes.digest != view.digest:  # else what was proven stays so
                self._boxes = view
                self._load_by(view.adapt(self._adapter), view.load_map, view.manifest)
        elif self._boxes is not None:
            self._boxes = None
            self._load_by(self._adapter, self._load_map, self._manifest)

    def _check_load_map(self, load_map: LoadMap, manifest: Manifest) -> None:
        """Refuse a manifest that this engine cannot be updated from."""
        if load_map.targets and not load_map.copies and load_map.fallback is None:
            raise ManifestError(
                f"no trainer tensor feeds this engine: the trainers have {manifest.tensors[0].name}, ..., the engine has "
                f"{load_map.targets[0].path}, ...; does a wrapper add a prefix (module., _orig_mod.)?"
            )
        if load_map.partial and self._config.partial == "error":
            raise ManifestError(
                f"the trainers' tensors feed only a part of {', '.join(load_map.partial[:5])}; a reload would leave the rest "
                "undefined. Send the missing names (or set partial: report, if it is padding)",
                name=load_map.partial[0],
            )
        if load_map.unfed and self._config.unfed == "error":
            raise EngineStateError(
                f"no trainer tensor feeds {', '.join(load_map.unfed[:5])}: they would keep their old values; send them, "
                "or set unfed: report"
            )

    def _connect(self, request: m.Connect) -> m.Reply:
        self._drop_links()  # an engine that committed while another failed still has its old ones
        self._plan_digest = m.plan_digest(request.links)
        sharded = any(link.plan.contents and self._rank in link.receiver for link in request.links)
        self._look_at_boxes(request.parts.get(self._rank, {}) if sharded else None)
        for link in request.links:
            index = link.receiver.get(self._rank)
            if index is not None:
                receiver = transport_classes(link.plan.transport)[1]
                context = link_context(link.plan, self._config, device=str(self._device))
                self._links.append((link, receiver(context, receiver=index)))

        def connect() -> m.Ok:
            # In the order of the senders, which is the same on every receiver: links that are collective to open
            # cannot wait for one another in a circle.
            for link, transport in self._links:
                transport.connect(link.address)
            return m.Ok()

        self._connecting = Background(connect, name="connect")
        return self._poll(0)

    def _prepare(self, request: m.Prepare) -> m.Prepared:
        if self._manifest is None or self._load_map is None or not self._links:
            raise TransportError("the links are not open")
        if not self._ready:
            self._adapter.check_ready()
        self._ready = False
        self._staged = request.staged
        copied = {name for link, _ in self._links if not link.stable for name in link.names}
        if self._boxes is not None:
            stays = all(link.stable for link, _ in self._links)
            copied = set() if stays else set(self._boxes.manifest.by_name)
        if copied:
            check_budget(
                self._manifest if self._boxes is None else self._boxes.manifest,
                self._group_table.groups,
                copied=copied,
                limit_bytes=self._config.staging_limit,
                whole_model=request.staged,
            )
        assert self._direct is not None
        if request.verify:
            self._way = self._direct.plan_to_verify()
        else:
            self._way = self._direct.plan(sets=self._takes_sets(), staged=request.staged)
        self._defer_sets = not self._staged and self._way is Way.SETS
        self._next = self._new_coalescer(request.version)
        self._holds = (
            self._live_digests is not None
            and 0 < request.since == self._version
            and not self.poisoned
            and self._way is not Way.AUDIT  # which is of everything
            and self._live_digests.hold()
        )
        return m.Prepared(
            version=self._version,
            epoch=self.fence.epoch,
            manifest_digest=self._manifest.digest,
            plan_digest=self._plan_digest,
            poisoned=self.poisoned,
            holds=self._holds,
        )

    def _takes_sets(self) -> bool:
        """All that comes stays where it lies, in weight sets as far as may be."""
        return all(link.stable and transport.sends_sets for link, transport in self._links)

    def get_ready(self) -> None:
        """Look at the engine ahead of `Prepare`; until that comes, or `stand_down`, nothing may change its modules.

        What is wrong with the engine is left for `Prepare` to say.
        """
        if self._direct is not None and self._links:
            with contextlib.suppress(Exception):
                self._adapter.check_ready()
                self._direct.look(in_place=not self._staged and not self._takes_sets())
                self._ready = True

    def stand_down(self) -> None:
        """Its modules may change again."""
        self._ready = False
        if self._direct is not None:
            self._direct.look_again()

    def _receive(self, request: m.Transfer) -> None:
        assert self._manifest is not None and self._load_map is not None
        self._connecting = None
        self._began = self._arrived = time.monotonic()
        self._applied = self._whole = False
        coalescer, self._next = self._next or self._new_coalescer(request.version), None
        sent = self._manifest
        links = tuple((link, transport, link.names) for link, transport in self._links)
        if request.left_out:
            part = self._part_without(request.left_out)
            coalescer, sent, links = self._new_coalescer(request.version, part), part.sent, part.links
        self._coalescer, self._came = coalescer, sent
        if request.apply and self._direct is not None and self._way is not Way.RELOAD:
            self._direct.begin(coalescer)
        self._receiving = [
            Background(lambda entry=entry: self._drain(coalescer, sent, *entry), name="receive")  # type: ignore[misc]
            for entry in links
        ]

    def _part_without(self, left_out: bytes) -> _Part:
        """What comes where *left_out* does not; most updates leave out what the one before did."""
        assert self._manifest is not None and self._load_map is not None
        if not self._holds:
            raise WeightSyncError("something is left out of the update, and this rank does not hold it")
        if self._part is None or self._part.left_out != left_out:
            names = from_bits(self._manifest, left_out)
            sent = manifest = without(self._manifest, names)
            if self._boxes is None:
                left = groups_left(self._manifest, self._load_map.groups, names)
                rest = ((link, end, tuple(n for n in link.names if n in sent.by_name)) for link, end in self._links)
                links = tuple(entry for entry in rest if entry[2])
            else:
                labels = self._boxes.labels(names)
                manifest = without(self._boxes.manifest, labels)
                left = groups_left(self._boxes.manifest, self._boxes.load_map.groups, labels)
                links = tuple((link, end, link.names) for link, end in self._links) if sent.tensors else ()
            self._part = _Part(left_out, sent, manifest, GroupTable.of(manifest, left), links)
        return self._part

    def _new_coalescer(self, version: int, part: _Part | None = None) -> Coalescer:
        assert self._manifest is not None
        manifest = self._manifest if self._boxes is None else self._boxes.manifest
        if part is not None:
            manifest = part.manifest
        return Coalescer(
            manifest,
            part.groups if part is not None else self._group_table,
            version=version,
            staging_limit_bytes=self._config.staging_limit,
            timeout_s=self._config.timeout_s,
            num_producers=len(self._links if part is None else part.links),
            verify=self._config.digest,
            defer_sets=self._defer_sets,
        )

    def _drain(
        self,
        coalescer: Coalescer,
        sent: Manifest,
        link: m.ReceiverLink,
        transport: ReceiverTransport,
        names: tuple[str, ...],
    ) -> None:
        """Move one link's chunks into the coalescer."""
        try:
            transfer = Transfer(version=coalescer.version, manifest=coalescer.manifest, names=names)
            for chunk in transport.receive(transfer):
                adopt(chunk, sent, coalescer.manifest)
                coalescer.put(chunk)
            self._arrived = time.monotonic()
            coalescer.producer_done()
        except WeightSyncError as error:
            coalescer.fail(error)
        except Exception as error:
            coalescer.fail(TransportError(f"{transport.name} link to trainer {link.plan.sender}: {error!r}"))

    def _poll(self, wait_s: float) -> m.Reply:
        if self._connecting is not None:
            # Kept until the next step: other ranks of this engine may take longer, and then all are asked again.
            return (
                self._connecting.result() if self._connecting.is_done(wait_s) else m.Pending(doing="connects its links")
            )
        if self._coalescer is None:
            raise WeightSyncError("nothing is under way")
        if self._defer_sets and not self._whole:
            return self._pending(self._coalescer)
        # A tensor may come twice after everything came once, so the vote waits for the ends of all streams.
        if not self._coalescer.is_whole(wait_s) or not all(work.is_done(wait_s) for work in self._receiving):
            return self._pending(self._coalescer)
        self._coalescer.is_whole()
        return self._vote()

    @staticmethod
    def _pending(coalescer: Coalescer) -> m.Pending:
        return m.Pending(progress=coalescer.nbytes, groups=coalescer.num_whole_groups, doing=coalescer.describe_wait())

    def _vote(self) -> m.Vote:
        assert self._coalescer is not None
        found = self._coalescer.content_digests()
        # What streams in may have been applied before the threads that received it have ended.
        arrived = self._arrived if all(work.is_done(0) for work in self._receiving) else time.monotonic()
        return m.Vote(
            nbytes=self._coalescer.nbytes,
            content_digests={
                link.plan.content_id(link.receiver[self._rank]): found.get(link.plan.sender, 0)
                for link, _ in self._links
            },
            peak_staging_bytes=self._coalescer.peak_staging_bytes,
            began=self._began,
            seconds=arrived - self._began,
        )

    def _apply(self, version: int) -> m.Reply:
        if self._coalescer is None or self._coalescer.version != version:
            raise WeightSyncError(f"version {version} was not received, it cannot be applied")
        began = time.monotonic()
        try:
            assert self._direct is not None
            reloads = self._direct.apply(self._way, self._coalescer, verify=self._config.digest)
            self._coalescer.wait_whole()
            if unread := self._coalescer.unread():
                raise WeightSyncError(f"the engine's loader ended before it read {len(unread)} groups: {unread[:3]}")
        except BaseException:
            self._coalescer.stop_landing()
            self.poisoned = self.poisoned or self._coalescer.has_begun
            raise
        finally:
            self._applied = self._coalescer.has_begun
            if self._device.type == "cuda":
                # A loader need not wait; the trainer may write, or what it lent be unmapped, as soon as this is answered.
                torch.cuda.current_stream(self._device).synchronize()
        self._whole = True
        if self._live_digests is not None:
            self._live_digests.note(frozenset(self._came.all_names))
        return m.Applied(
            vote=self._vote(),
            began=began,
            seconds=time.monotonic() - began,
            reloads=reloads,
            num_direct=self._coalescer.num_groups - len(self._direct.reloaded),
            reloaded=self._direct.reloaded,
            num_skipped=len(self._group_table.groups) - self._coalescer.num_groups,
        )

    def _commit(self, version: int) -> m.Ok:
        if self._coalescer is None or self._coalescer.version != version or not self._whole:
            raise WeightSyncError(f"version {version} was not applied, it cannot be committed")
        self._forget_update()
        self.poisoned = False
        self._version = version
        return m.Ok()

    def discard(self) -> None:
        """Another engine has taken this one's place."""
        self._drop_links()

    def _forget_update(self) -> None:
        if self._coalescer is not None:
            self._coalescer.close()
        for work in self._receiving:
            work.join(self._config.timeout_s)
        self._coalescer = self._next = None
        self._receiving = []
        self.stand_down()
        self._applied = self._whole = self._holds = False

    def _drop_links(self) -> None:
        coalescer, begun = self._coalescer, self._applied
        for _, transport in self._links:
            transport.abort()
        self._forget_update()
        # Applied, or written, but never committed.
        self.poisoned = self.poisoned or begun or (coalescer is not None and coalescer.has_begun)
        if self._connecting is not None:
            self._connecting.join(self._config.timeout_s)
            self._connecting = None
        for _, transport in self._links:
            transport.close()
        self._links, self._part = [], None
        if self._direct is not None:
            self._direct.forget_links()
