"""Broadcast: each bucket goes from one sender to all its receivers at once, through CPU memory (gloo) or over NCCL.

The groups belong to the link: they are made here, torch.distributed's default group is never touched, and their members are
the sender (rank 0) and the receivers (rank 1 up). Names travel with the bytes, so the ends cannot disagree about what comes:
a bucket is announced over gloo by two integers, then sent as header and payload (`announced`), or its names were told ahead,
with those of all others (`planned`).

Payloads travel over NCCL where both ends of a link find that they can (`backend.backend_of`), from GPU memory to GPU
memory; over gloo otherwise. Every wait is bounded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar

import msgspec
import torch

from weightsync.chunk import WeightChunk, aligned
from weightsync.cuda.moves import note_transfer
from weightsync.digest import ContentDigest
from weightsync.errors import TransportError, WeightSyncError
from weightsync.interfaces import LinkContext, ReceiverTransport, SenderTransport, Transfer, TransferStats
from weightsync.manifest import TensorMeta
from weightsync.ranks import SENDER, group_rank
from weightsync.transports.announced import receive_announced, send_announced
from weightsync.transports.announcements import PLAN, GoesOn, Header, Incoming, announce, give_up
from weightsync.transports.backend import backend_of
from weightsync.transports.bucketplan import BucketPlan, PlannedBuckets, can_plan, planned_bytes
from weightsync.transports.gloo_group import Address, GlooGroup, GlooPayload, node_host
from weightsync.transports.in_turns import receive_in_turns, send_in_turns
from weightsync.transports.nccl_group import NcclGroup
from weightsync.transports.planned import receive_planned, send_planned


class BroadcastSender(SenderTransport):
    """Packs one bucket while others are on their way."""

    name: ClassVar[str] = "broadcast"

    def __init__(self, context: LinkContext) -> None:
        super().__init__(context)
        self._group: GlooGroup | None = None
        self._payloads: GlooPayload | NcclGroup | None = None
        self._total_bytes = 0
        self._planned: PlannedBuckets | None = None
        self._plans = itertools.count(1)
        self._told = (0, "")
        """The plan that the receivers know: its number, and of which manifest."""
        self._is_begun = False
        """The plan is of the version that comes."""
        self._is_sent = True
        """No version is on its way."""
        self._end_said: Callable[[], None] | None = None
        """Waits until the receivers were told of the end of what went by plan: they know it, and nobody waits then."""

    def open(self, metas: tuple[TensorMeta, ...]) -> bytes:
        context, backend = self.context, backend_of(self.context)
        self._total_bytes = planned_bytes(metas)
        self._group = GlooGroup(context, Address(context.host, 0, backend), SENDER)
        if backend == "nccl":
            self._payloads = NcclGroup(context, self._group)
        else:
            size = self._bucket_bytes(context.bucket_bytes, GlooPayload.num_buckets)
            self._payloads = GlooPayload(self._group, bucket_bytes=size, largest_bytes=size)
        return msgspec.msgpack.encode(Address(context.host, self._group.port, backend))

    def _bucket_bytes(self, limit: int, num_buckets: int) -> int:
        return max(min(limit, self.context.staging_limit_bytes // num_buckets), 1)

    def stable(self) -> bool:
        return False

    def connect(self) -> None:
        assert self._group is not None, "connect before open"
        self._group.connect(self.context.host)
        if isinstance(self._payloads, NcclGroup):
            size = self._bucket_bytes(self.context.gpu_bucket_bytes, NcclGroup.num_buckets)
            self._payloads.connect(min(size, self._total_bytes))

    def begin(self, tensors: Sequence[tuple[TensorMeta, torch.Tensor]]) -> None:
        """Over NCCL: plan the buckets, and begin to fill the first."""
        payloads, planned = self._payloads, self._planned
        self._is_begun = False
        if not isinstance(payloads, NcclGroup) or not tensors:
            return
        if planned is None or not planned.is_of(tensors):
            if not can_plan(tensors, payloads.bucket(0)):
                return
            buckets = [payloads.bucket(i) for i in range(payloads.num_buckets)]
            planned = self._planned = PlannedBuckets(next(self._plans), tensors, buckets, digest=self.context.digest)
        planned.fill(0)
        self._is_begun = True

    def send(self, transfer: Transfer, tensors: Iterable[tuple[TensorMeta, torch.Tensor]]) -> TransferStats:
        assert self._group is not None and self._payloads is not None, "send before open"
        group, payloads = self._group, self._payloads
        planned, self._is_begun = self._planned if self._is_begun and transfer.held else None, False
        self._is_sent = False
        try:
            self._wait_for_end()
            note_transfer()
            payloads.synchronize()  # what the trainer computed
            if planned is not None and isinstance(payloads, NcclGroup):
                content = self._send_by_plan(transfer, planned, tensors, group, payloads)
            else:
                payloads.begin(transfer.version)
                content = self._send_as_packed(transfer, tensors, group, payloads)
        except Exception:
            payloads.stop()
            raise
        self._is_sent = True
        return TransferStats(content.nbytes, content.value)

    def _send_as_packed(
        self,
        transfer: Transfer,
        tensors: Iterable[tuple[TensorMeta, torch.Tensor]],
        group: GlooGroup,
        payloads: GlooPayload | NcclGroup,
    ) -> ContentDigest:
        if isinstance(payloads, NcclGroup) and payloads.in_turns:
            return send_in_turns(transfer, tensors, group, payloads, digest=self.context.digest)
        return send_announced(transfer, tensors, group, payloads, digest=self.context.digest)

    def _send_by_plan(
        self,
        transfer: Transfer,
        planned: PlannedBuckets,
        tensors: Iterable[tuple[TensorMeta, torch.Tensor]],
        group: GlooGroup,
        payloads: NcclGroup,
    ) -> ContentDigest:
        """Tell the receivers of the plan, if they do not know it; where links have to take turns, nothing goes by plan."""
        # Other links may go in step, and receivers that have met launch kernels which wait for this rank's.
        known = list(tensors)
        plan = planned.number, transfer.manifest.digest
        payloads.begin(transfer.version, planned.number if plan == self._told else 0)
        if payloads.in_turns:
            return self._send_as_packed(transfer, known, group, payloads)
        if plan != self._told:
            announce(group, planned.tell(transfer.manifest.digest), PLAN, "the plan of its buckets")()
            self._told = plan
        goes_on = GoesOn(group)
        content = send_planned(planned, payloads, goes_on)
        goes_on.wait()
        self._end_said = announce(group, None, 0, "the end")
        return content

    def _wait_for_end(self) -> None:
        """Of the transfer before."""
        if self._end_said is not None:
            self._end_said()
            self._end_said = None

    @property
    def progress(self) -> int:
        """Buckets that have landed over NCCL: what goes by plan is asked for at once."""
        return self._payloads.num_landed if isinstance(self._payloads, NcclGroup) else 0

    def abort(self) -> None:
        """Receivers hear of it only now, when whoever aborts knows why: what they say comes after the cause."""
        if self._group is not None:
            if not self._is_sent:
                give_up(self._group)
            self._group.abort()

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        if self._payloads is not None:
            self._payloads.close()
        self._planned = None  # with it the last views of the buckets: freeing these waits for kernels


class BroadcastReceiver(ReceiverTransport):
    """Takes one bucket at a time, over NCCL the next ones while it is read; a chunk must be released before the next is
    asked for."""

    name: ClassVar[str] = "broadcast"

    def __init__(self, context: LinkContext, *, receiver: int) -> None:
        super().__init__(context, receiver=receiver)
        self._group: GlooGroup | None = None
        self._payloads: GlooPayload | NcclGroup | None = None
        self._plan: BucketPlan | None = None
        """That the sender told last."""
        self._unheard: Incoming | None = None
        """Of a transfer that went by plan: its end, of which the sender has yet to be heard, was known."""
        self._lent = False
        self._aborted = False

    def connect(self, address: bytes) -> None:
        found = msgspec.msgpack.decode(address, type=Address)
        backend = backend_of(self.context)
        if backend != found.backend:
            raise TransportError(
                f"sender {self.context.sender} sends over {found.backend}, receiver {self.receiver} would receive over "
                f"{backend}: NCCL, its environment, cupy or the device of the weights differ"
            )
        self._group = group = GlooGroup(self.context, found, group_rank(self.receiver))
        if self._aborted:  # perhaps before there was a group to tell
            group.abort()
        group.connect(node_host(found.host))
        if backend == "nccl":
            self._payloads = payloads = NcclGroup(self.context, group)
            payloads.connect(0)
        else:
            self._payloads = GlooPayload(group, bucket_bytes=0, largest_bytes=aligned(self.context.bucket_bytes))

    def receive(self, transfer: Transfer) -> Iterator[WeightChunk]:
        assert self._group is not None and self._payloads is not None, "receive before connect"
        group, payloads = self._group, self._payloads
        try:
            self._hear_end()
            version, plan = payloads.begin()
            for header, payload in self._arrivals(group, payloads, version, plan):
                yield self._chunk(header, payload)
                if self._lent:
                    raise WeightSyncError("a broadcast chunk was not released before the next was asked for")
        except BaseException:  # GeneratorExit too: whoever read has failed, and the next bucket may be under way
            payloads.stop()
            raise

    def _arrivals(
        self, group: GlooGroup, payloads: GlooPayload | NcclGroup, version: int, known: int
    ) -> Iterator[tuple[Header, torch.Tensor]]:
        """*known*: the number of the plan by which all comes; 0: the sender tells it, or has none."""
        incoming = Incoming(group, payloads.largest_bytes)
        if not isinstance(payloads, NcclGroup):
            yield from receive_announced(incoming, incoming.next(), payloads)
            return
        if payloads.in_turns:
            yield from receive_in_turns(incoming, payloads)
            return
        first = None if known else incoming.next()
        if first is not None and first.nbytes == PLAN:
            self._plan = incoming.plan(first)
            known = self._plan.number
        if known:
            yield from receive_planned(self._known_plan(known), version, incoming, payloads)
            self._unheard = incoming
        else:
            yield from receive_announced(incoming, first, payloads)

    def _hear_end(self) -> None:
        """Of the transfer before."""
        if self._unheard is not None:
            unheard, self._unheard = self._unheard, None
            if unheard.next() is not None:
                raise TransportError(f"sender {self.context.sender} announced more than was in its plan")

    def _known_plan(self, number: int) -> BucketPlan:
        if self._plan is None or self._plan.number != number:
            raise TransportError(f"sender {self.context.sender} sends by a plan ({number}) that it has not told")
        return self._plan

    def _chunk(self, header: Header, payload: torch.Tensor) -> WeightChunk:
        self._lent = True

        def release() -> None:
            self._lent = False

        return WeightChunk(
            header.version,
            header.manifest_digest,
            header.pieces,
            payload,
            sender=self.context.sender,
            release=release,
        )

    def abort(self) -> None:
        self._aborted = True
        if self._group is not None:
            self._group.abort()

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        if self._payloads is not None:
            self._payloads.close()
