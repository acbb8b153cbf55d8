"""One trainer rank's part in a weight sync: answers the coordinator, sends through its transports."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from weightsync import messages as m
from weightsync.background import Background
from weightsync.config import SyncConfig
from weightsync.doctor.look import look
from weightsync.errors import (
    ConfigError,
    ErrorInfo,
    RestartedError,
    TransportError,
    UpdateTimeoutError,
    WeightSyncError,
)
from weightsync.fanout import LockStep
from weightsync.fence import Fence
from weightsync.hostmemory import trim_heap
from weightsync.identity import identify, on_device
from weightsync.interfaces import LinkContext, SenderTransport, Transfer, TransferStats
from weightsync.manifest import Manifest, TensorMeta
from weightsync.orders import Orders
from weightsync.plan import may_take_shards
from weightsync.registry import takes_boxes, transport_classes
from weightsync.shardlinks import ShardLinks
from weightsync.source import TrainerSource
from weightsync.unchanged import SourceDigests, from_bits, without


def link_context(
    plan: m.LinkPlan, config: SyncConfig, *, device: str, orders: Orders | None = None, among: int = 1
) -> LinkContext:
    """*among*: between how many links the rank's staging memory is shared out."""
    return LinkContext(
        sender=plan.sender,
        num_receivers=plan.num_receivers,
        host=plan.host,
        token=plan.token,
        timeout_s=config.timeout_s,
        bucket_bytes=config.bucket,
        staging_limit_bytes=config.staging_limit // among,
        digest=config.digest,
        count_changed_values=config.count_changed_values,
        gpu_bucket_bytes=config.gpu_bucket,
        device=device,
        gpus=plan.gpus,
        helpers=plan.helpers,
        orders=orders,
        min_bytes_per_s=config.min_bandwidth,
    )


class SenderRank:
    """Driven by `handle`, one request at a time; nothing in it blocks longer than it takes to look at the weights."""

    def __init__(
        self, index: int, get_source: Callable[[], Any], *, address: str = "127.0.0.1", node: str = ""
    ) -> None:
        """*get_source* gives the weights anew for each update; *address* is how other nodes reach this one, *node* its
        id."""
        self.name = f"trainer {index}"
        self.fence = Fence()
        self._identity = identify(address, node)
        self._get_source = get_source
        self._source: TrainerSource | None = None
        self._config = SyncConfig()
        self._manifest: Manifest | None = None
        self._names: tuple[str, ...] = ()
        self._held: list[tuple[TensorMeta, torch.Tensor]] | None = None
        """What the update under way sends, where it all exists."""
        self._digests = SourceDigests()
        self._ready = False
        """The weights were looked through, and nobody can have changed them since."""
        self._links: dict[int, SenderTransport] = {}
        self._unconnected: list[SenderTransport] = []
        self._plans: dict[int, m.LinkPlan] = {}
        self._shards = ShardLinks()
        self._gathers = True
        self._work: Background[m.Ok | m.Sent] | None = None
        self._progress = 0
        self._doing = ""
        self._version = 0
        self._is_new = True
        """The update under way goes to all engines, and to a version that none has. Else what they hold is what it was."""

    def take_over(self, other: SenderRank) -> None:
        """Continue at the version of *other*, an earlier weight sync's rank on the same weights, and end that one."""
        other._drop_links(None)
        self.fence, self._version = other.fence, other._version
        self._work = other._work  # a gather that was given up goes on, and no other may run beside it

    def handle(self, call: m.Call) -> m.Reply:
        """Answer; an error becomes a `Failed` reply that names this rank."""
        try:
            self.fence.admit(call)
            return m.timed(self._handle, call.request)
        except Exception as error:
            return m.Failed(error=ErrorInfo.of(error, rank=self.name))

    def _handle(self, request: m.Request) -> m.Reply:
        if self._source is None and isinstance(request, m.OpenSender | m.Connect | m.Prepare | m.Transfer):
            raise RestartedError("another weight sync has looked at this trainer, and did not come to open it")
        match request:
            case m.Examine():
                return self._examine(request)
            case m.Describe():
                self._config = request.config
                self._source = TrainerSource(self._get_source, wire_dtype=self._config.wire_dtype)
                manifest = self._source.manifest()
                self._identity = on_device(self._identity, self._source.device)
                return m.Description(
                    identity=self._identity,
                    manifest=manifest,
                    version=self._version,
                    epoch=self.fence.epoch,
                    holdings=self._source.holdings() if may_take_shards(self._config) else None,
                )
            case m.OpenSender():
                return self._open(request)
            case m.Connect():
                return self._start(self._connect, "connect", 0.0)
            case m.Prepare():
                return self._prepare(request)
            case m.Transfer():
                return self._start(lambda: self._send(request), "send", request.wait_s)
            case m.Poll():
                return self._poll(request.wait_s)
            case m.Commit():
                for transport in self._links.values():
                    transport.finish()
                self._version = request.version
                if self._is_new:
                    self._digests.commit(request.version)
                return m.Ok()
            case m.Abort():
                self._drop_links(request.links)
                return m.Ok()
            case m.Close():
                self._drop_links(None)
                return m.Ok()
            case _:
                raise WeightSyncError(f"a trainer cannot handle {type(request).__name__}")

    def _examine(self, request: m.Examine) -> m.Examined:
        """Where the weights lie is known once they were described."""
        device, shared, sharded = torch.device("cpu"), False, False
        if self._source is not None:
            device, shared, sharded = self._source.device, self._source.in_shared_memory, self._source.is_sharded
        facts = look(device, shares_memory=shared, is_sharded=sharded, probe_bytes=request.probe_bytes)
        return m.Examined(identity=self._identity, rank=0, facts=facts)

    def _open(self, request: m.OpenSender) -> m.SenderOpened:
        if not request.keep:
            self._drop_links(None)
        self._manifest, self._names, self._gathers = request.manifest, request.names, request.gathers
        assert self._source is not None
        self._let_go()
        held = list(self._source.tensors(self._manifest, self._names)) if self._source.held else []
        opened = []
        if request.orders and request.gathers and self._source.makes:
            raise ConfigError(
                "the source makes its tensors as it goes and is read once an update, for whole tensors or for shards: let it "
                "yield a module, a mapping or a list, or use one transport for all pairs",
                key="source",
            )
        for plan in request.links:
            if orders := request.orders.get(plan.id):
                self._shards.add(plan.id, orders, self._manifest, boxes=takes_boxes(plan.transport))
        self._shards.take(self._source, self._manifest)
        for plan in request.links:
            metas = tuple(self._manifest.by_name[name] for name in self._names)
            orders = request.orders.get(plan.id)
            among = len(self._shards.boxed) if plan.id in self._shards.boxed else 1
            context = link_context(plan, self._config, device=str(self._source.device), orders=orders, among=among)
            transport = transport_classes(plan.transport)[0](context)
            self._links[plan.id], self._plans[plan.id] = transport, plan
            if orders is not None:
                metas = self._shards.metas(plan.id, self._manifest)
                if self._shards.taken and plan.id in self._shards.boxed:
                    transport.look(list(self._shards.of_link(plan.id)))
            elif self._source.held:
                transport.look(held)
            opened.append((transport.open(metas), transport.stable(), transport.describe()))
            self._unconnected.append(transport)
        self._let_go()
        return m.SenderOpened(
            addresses=tuple(address for address, _, _ in opened),
            stable=tuple(stable for _, stable, _ in opened),
            details=tuple(details for _, _, details in opened),
        )

    def _connect(self) -> m.Ok:
        while self._unconnected:
            self._doing = f"waits for receivers over {self._unconnected[0].name}"
            self._unconnected[0].connect()
            del self._unconnected[0]
        return m.Ok()

    def _prepare(self, request: m.Prepare) -> m.Prepared:
        assert self._source is not None
        if self._manifest is None or self._unconnected:
            raise TransportError("the links are not open")
        self._refuse_while_busy()
        if not self._ready:
            self._look_through(self._source, self._manifest)
        self._ready, self._is_new = False, not request.verify
        return m.Prepared(
            version=self._version,
            epoch=self.fence.epoch,
            manifest_digest=self._manifest.digest,
            plan_digest=m.plan_digest(self._plans.values()),
            changed=self._digests.changed(self._manifest, request.since),
        )

    def _look_through(self, source: TrainerSource, manifest: Manifest) -> None:
        """Check the weights; where they exist all at once, let the transports begin."""
        if source.device.type == "cuda":
            torch.cuda.synchronize(source.device)  # what the trainer computed, on whichever stream
        source.check(manifest, self._names, self._give_head_start)
        if self._config.skip_unchanged:
            self._digests.read(manifest, frozenset((*self._names, *self._shards.names)), source.parts())
        self._shards.take(source, manifest)
        self._held = list(source.tensors(manifest, self._names)) if source.held else None
        if not self._config.skip_unchanged:
            self._begin(self._held, self._links)

    def _give_head_start(self, held: Mapping[str, torch.Tensor]) -> None:
        for id, transport in self._links.items():
            if id not in self._shards and not self._config.skip_unchanged:  # what will be sent is known later
                transport.head_start(held)

    def _begin(
        self,
        held: list[tuple[TensorMeta, torch.Tensor]] | None,
        ids: Iterable[int],
        left_out: frozenset[str] = frozenset(),
    ) -> None:
        for id in ids:
            if id in self._shards.boxed and self._shards.taken:
                self._links[id].begin(list(self._shards.of_link(id, left_out)))
            elif id not in self._shards and held is not None:
                self._links[id].begin(held)

    def get_ready(self) -> None:
        """Look through the weights ahead of `Prepare`; until that comes, or `stand_down`, they must stay as they are.

        Does nothing where links are not open; what is wrong with the weights is left for `Prepare` to say.
        """
        if self._source is not None and self._manifest is not None and not self._unconnected and self._work is None:
            with contextlib.suppress(Exception):
                self._look_through(self._source, self._manifest)
                self._ready = True

    def stand_down(self) -> None:
        """The weights may change again."""
        if self._ready:
            self._let_go()

    def _let_go(self) -> None:
        """Forget what was looked through."""
        self._ready, self._held = False, None
        self._shards.release()
        if self._source is not None:
            self._source.forget_checked()

    def _send(self, request: m.Transfer) -> m.Sent:
        assert self._source is not None and self._manifest is not None
        began = time.monotonic()
        held, self._held = self._held, None
        self._is_new = self._is_new and request.links is None
        left_out = from_bits(self._manifest, request.left_out)
        names = tuple(name for name in self._names if name not in left_out)
        ids = self._links.keys() if request.links is None else request.links
        moves_shards, moves_whole = len(left_out) < len(self._manifest.tensors), bool(names) or not left_out
        links = {
            id: self._links[id]
            for id in ids
            if id in self._links and (moves_shards if id in self._shards else moves_whole)
        }
        transfer = Transfer(
            version=request.version,
            manifest=without(self._manifest, left_out) if left_out else self._manifest,
            names=names,
            held=held is not None,
        )
        if held is not None and left_out:
            held = [(meta, tensor) for meta, tensor in held if meta.name not in left_out]
        if self._config.skip_unchanged:
            self._begin(held, links, left_out)
        source = self._source.tensors(self._manifest, self._names, left_out=left_out) if held is None else iter(held)
        tensors = self._counted(source)
        sharded = [id for id in links if id in self._shards]
        gathers = len(sharded) < len(links) or (request.links is None and self._gathers)
        makes_shards = not gathers and (self._source.makes or (bool(sharded) and not self._shards.taken))
        shards = self._counted(self._shards.made(self._source, self._manifest)) if makes_shards else iter(())
        transfers = dict.fromkeys(links, transfer) | dict.fromkeys(sharded, replace(transfer, held=self._shards.taken))
        try:
            whole = LockStep(tensors, len(links) - len(sharded), timeout_s=self._config.timeout_s)
            made = LockStep(shards, len(sharded), timeout_s=self._config.timeout_s)
            if self._shards.taken:
                items = {id: self._counted(self._shards.of_link(id, left_out)) for id in sharded}
            else:
                items = {id: self._shards.cut(id, iter(made)) for id in sharded}
            if len(links) == 1:
                stats = {id: link.send(transfers[id], items.get(id, tensors)) for id, link in links.items()}
            else:
                # What is there at once each link takes at its own pace.
                items |= {
                    id: self._counted(iter(held)) if held is not None else iter(whole)
                    for id in links
                    if id not in sharded
                }
                stats = self._send_over_all(links, transfers, items, (whole, made))
        finally:
            # Making the tensors may be collective: whatever happened here, other ranks wait for this one's part.
            for _ in tensors if gathers else shards:
                pass
            self._shards.release()
            self._source.forget_checked()
            if gathers and not transfer.held and self._source.device.type == "cpu":
                trim_heap()
        nothing = TransferStats(changed_values=0 if self._config.count_changed_values and left_out else None)
        first = next(iter(stats.values()), nothing)
        return m.Sent(
            nbytes=max(
                sum(part.nbytes for id, part in stats.items() if id in self._shards),
                *(part.nbytes for id, part in stats.items() if id not in self._shards),
                0,
            ),
            content_digests={key: digest for id, part in stats.items() for key, digest in self._contents(id, part)},
            changed_values=first.changed_values if not self._shards.boxed else None,
            began=began,
            seconds=time.monotonic() - began,
        )

    def _contents(self, id: int, stats: TransferStats) -> Iterator[tuple[int, int]]:
        """(id, digest) of what receivers of a link have to hold."""
        plan = self._plans[id]
        alike = (stats.content_digest,) * max(len(plan.contents), 1)
        for i, digest in enumerate(stats.content_digests or alike):
            yield plan.content_id(i), digest

    def _counted(self, tensors: Iterator[tuple[TensorMeta, torch.Tensor]]) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        self._doing = "waits for its source"
        for meta, tensor in tensors:
            self._doing = f"sends {meta.name}"
            yield meta, tensor
            self._progress += 1
            self._doing = f"waits for its source, after {meta.name}"
        self._doing = "waits for receivers to take the last bytes"

    def _send_over_all(
        self,
        links: dict[int, SenderTransport],
        transfers: Mapping[int, Transfer],
        items: Mapping[int, Iterator[tuple[TensorMeta, torch.Tensor]]],
        steps: Iterable[LockStep[Any]],
    ) -> dict[int, TransferStats]:
        def send(id: int) -> TransferStats:
            return links[id].send(transfers[id], items[id])

        works = {id: Background(partial(send, id), name=f"send-{transport.name}") for id, transport in links.items()}
        culprit = None
        while not all(work.is_done(0.05) for work in works.values()):
            if culprit is None and (failed := [work for work in works.values() if work.is_done(0) and work.failed]):
                culprit = failed[0]
                for transport in links.values():
                    transport.abort()
                for step in steps:
                    step.abort(TransportError("another link of this trainer broke"))
        if culprit is not None:
            culprit.result()
        return {id: work.result() for id, work in works.items()}

    def _start(self, work: Callable[[], m.Ok | m.Sent], name: str, wait_s: float) -> m.Reply:
        self._refuse_while_busy()
        self._work = Background(work, name=name)
        return self._poll(wait_s)

    def _refuse_while_busy(self) -> None:
        """A gather cannot be given up, and a second one beside it could meet the first one's parts on other ranks."""
        if self._work is not None and not self._work.is_done(0):
            raise UpdateTimeoutError("the source still makes tensors for an earlier update that was given up")
        self._work = None

    def _poll(self, wait_s: float) -> m.Reply:
        if self._work is None:
            raise WeightSyncError("nothing is under way")
        if not self._work.is_done(wait_s):
            moved = sum(transport.progress for transport in self._links.values())
            return m.Pending(progress=self._progress + moved, doing=self._doing)
        work, self._work = self._work, None
        return work.result()

    def _drop_links(self, ids: tuple[int, ...] | None) -> None:
        """Break some links, or all (None); nothing is sent while they break."""
        links = {id: link for id, link in self._links.items() if ids is None or id in ids}
        self._let_go()
        self._digests.forget()
        for transport in links.values():
            transport.abort()
        if self._work is not None and self._work.join(self._config.timeout_s):
            self._work = None
        for id, transport in links.items():
            transport.close()
            del self._links[id], self._plans[id]
            self._shards.drop(id)
        self._unconnected = [link for link in self._unconnected if link in self._links.values()]
        if not self._links:
            self._manifest = None
