"""One trainer rank's part in a weight sync: answers the coordinator, sends through its transports."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from weightsync import messages as m
from weightsync.background import Background
from weightsync.config import SyncConfig
from weightsync.errors import ErrorInfo, TransportError, UpdateTimeoutError, WeightSyncError
from weightsync.fanout import LockStep
from weightsync.identity import identify
from weightsync.interfaces import LinkContext, SenderTransport, Transfer, TransferStats
from weightsync.manifest import Manifest, TensorMeta
from weightsync.registry import transport_classes
from weightsync.source import TrainerSource


def link_context(plan: m.LinkPlan, config: SyncConfig) -> LinkContext:
    return LinkContext(
        sender=plan.sender,
        num_receivers=plan.num_receivers,
        host=plan.host,
        token=plan.token,
        timeout_s=config.timeout_s,
        bucket_bytes=config.bucket,
        staging_limit_bytes=config.staging_limit,
        digest=config.digest,
        count_changed_values=config.count_changed_values,
    )


class SenderRank:
    """Driven by `handle`, one request at a time; nothing in it blocks longer than it takes to look at the weights."""

    def __init__(self, index: int, get_source: Callable[[], Any], *, address: str = "127.0.0.1") -> None:
        """*get_source* gives the weights anew for each update; *address* is how other nodes reach this one."""
        self.name = f"trainer {index}"
        self._address = address
        self._get_source = get_source
        self._source: TrainerSource | None = None
        self._config = SyncConfig()
        self._manifest: Manifest | None = None
        self._names: tuple[str, ...] = ()
        self._transports: list[SenderTransport] = []
        self._work: Background[m.Ok | m.Sent] | None = None
        self._progress = 0
        self._version = 0
        self._epoch = 0

    def take_over(self, other: SenderRank) -> None:
        """Continue at the version of *other*, an earlier weight sync's rank on the same weights, and end that one."""
        other.handle(m.Close())
        self._version = other._version

    def handle(self, request: m.Request) -> m.Reply:
        """Answer; an error becomes a `Failed` reply that names this rank."""
        try:
            return self._handle(request)
        except Exception as error:
            return m.Failed(error=ErrorInfo.of(error, rank=self.name))

    def _handle(self, request: m.Request) -> m.Reply:
        match request:
            case m.Describe():
                self._config = request.config
                self._source = TrainerSource(self._get_source, wire_dtype=self._config.wire_dtype)
                return m.Description(
                    identity=identify(self._address), manifest=self._source.manifest(), version=self._version
                )
            case m.OpenSender():
                return self._open(request)
            case m.Connect():
                return self._start(self._connect, "connect", 0.0)
            case m.Prepare():
                return self._prepare(request)
            case m.Transfer():
                return self._start(lambda: self._send(request.version), "send", request.wait_s)
            case m.Poll():
                return self._poll(request.wait_s)
            case m.Commit():
                for transport in self._transports:
                    transport.finish()
                self._version = request.version
                return m.Ok()
            case m.Abort() | m.Close():
                self._drop_links()
                return m.Ok()
            case _:
                raise WeightSyncError(f"a trainer cannot handle {type(request).__name__}")

    def _open(self, request: m.OpenSender) -> m.SenderOpened:
        self._drop_links()
        self._manifest, self._names = request.manifest, request.names
        metas = tuple(self._manifest.by_name[name] for name in self._names)
        addresses = []
        for plan in request.links:
            transport = transport_classes(plan.transport)[0](link_context(plan, self._config))
            self._transports.append(transport)
            addresses.append(transport.open(metas))
        return m.SenderOpened(addresses=tuple(addresses), stable=tuple(t.stable() for t in self._transports))

    def _connect(self) -> m.Ok:
        for transport in self._transports:
            transport.connect()
        return m.Ok()

    def _prepare(self, request: m.Prepare) -> m.Prepared:
        assert self._source is not None
        if self._manifest is None:
            raise TransportError("the links are not open")
        if self._work is not None:
            raise UpdateTimeoutError("the source still makes tensors for an earlier update that was given up")
        self._source.check(self._manifest, self._names)
        self._epoch = request.epoch
        return m.Prepared(version=self._version, epoch=self._epoch, manifest_digest=self._manifest.digest)

    def _send(self, version: int) -> m.Sent:
        assert self._source is not None and self._manifest is not None
        start = time.perf_counter()
        transfer = Transfer(version=version, manifest=self._manifest, names=self._names)
        tensors = self._counted(self._source.tensors(self._manifest, self._names))
        try:
            if len(self._transports) == 1:
                stats = [self._transports[0].send(transfer, tensors)]
            else:
                items = LockStep(tensors, len(self._transports), timeout_s=self._config.timeout_s)
                stats = self._send_over_all(transfer, items)
        finally:
            # Making the tensors may be collective: whatever happened here, other ranks wait for this one's part.
            for _ in tensors:
                pass
        first = stats[0] if stats else TransferStats()
        return m.Sent(
            nbytes=first.nbytes,
            content_digests=tuple(part.content_digest for part in stats),
            changed_values=first.changed_values,
            seconds=time.perf_counter() - start,
        )

    def _counted(self, tensors: Iterator[tuple[TensorMeta, torch.Tensor]]) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        for meta, tensor in tensors:
            yield meta, tensor
            self._progress += 1

    def _send_over_all(self, transfer: Transfer, items: LockStep[Any]) -> list[TransferStats]:
        works = [
            Background(lambda t=transport: t.send(transfer, iter(items)), name=f"send-{transport.name}")  # type: ignore[misc]
            for transport in self._transports
        ]
        culprit = None
        while not all(work.is_done(0.05) for work in works):
            if culprit is None and (failed := [work for work in works if work.is_done(0) and work.failed]):
                culprit = failed[0]
                for transport in self._transports:
                    transport.abort()
                items.abort(TransportError("another link of this trainer broke"))
        if culprit is not None:
            culprit.result()
        return [work.result() for work in works]

    def _start(self, work: Callable[[], m.Ok | m.Sent], name: str, wait_s: float) -> m.Reply:
        self._work = Background(work, name=name)
        return self._poll(wait_s)

    def _poll(self, wait_s: float) -> m.Reply:
        if self._work is None:
            raise WeightSyncError("nothing is under way")
        if not self._work.is_done(wait_s):
            return m.Pending(progress=self._progress)
        work, self._work = self._work, None
        return work.result()

    def _drop_links(self) -> None:
        for transport in self._transports:
            transport.abort()
        if self._work is not None and self._work.join(self._config.timeout_s):
            self._work = None
        for transport in self._transports:
            transport.close()
        self._transports = []
        self._manifest = None
