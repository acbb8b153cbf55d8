"""Broadcast: each bucket goes from one sender to all its receivers at once, through CPU memory (gloo) or over NCCL.

The groups belong to the link: they are made here, torch.distributed's default group is never touched, and their members are
the sender (rank 0) and the receivers (rank 1 up). Names travel with the bytes: a bucket is announced over gloo by two
integers, then sent as header and payload, so the ends cannot disagree about what comes.

Payloads travel over NCCL where both ends of a link find that they can (`backend.backend_of`), from GPU memory to GPU
memory; over gloo otherwise. Every wait is bounded.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar

import msgspec
import torch

from weightsync.background import Background
from weightsync.bucket import Bucket, fill
from weightsync.chunk import WeightChunk, aligned
from weightsync.cuda.moves import note_transfer
from weightsync.digest import ContentDigest
from weightsync.errors import TransportError, WeightSyncError
from weightsync.interfaces import LinkContext, ReceiverTransport, SenderTransport, Transfer, TransferStats
from weightsync.manifest import TensorMeta
from weightsync.ranks import SENDER, group_rank
from weightsync.transports.announcements import PLAN, Arriving, Header, Incoming, announce, give_up
from weightsync.transports.backend import backend_of
from weightsync.transports.bucketplan import BucketPlan, PlannedBuckets, can_plan, planned_bytes
from weightsync.transports.gloo_group import Address, Flight, GlooGroup, GlooPayload, node_host
from weightsync.transports.nccl_group import NcclGroup

_JOIN_S = 0.0005


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
        """Over NCCL: plan the buckets."""
        payloads, planned = self._payloads, self._planned
        self._is_begun = False
        if not isinstance(payloads, NcclGroup) or not tensors:
            return
        if planned is None or not planned.is_of(tensors):
            if not can_plan(tensors, payloads.bucket(0)):
                return
            buckets = [payloads.bucket(i) for i in range(payloads.num_buckets)]
            self._planned = PlannedBuckets(next(self._plans), tensors, buckets, digest=self.context.digest)
        self._is_begun = True

    def send(self, transfer: Transfer, tensors: Iterable[tuple[TensorMeta, torch.Tensor]]) -> TransferStats:
        assert self._group is not None and self._payloads is not None, "send before open"
        group, payloads = self._group, self._payloads
        planned, self._is_begun = self._planned if self._is_begun and transfer.held else None, False
        self._is_sent = False
        try:
            note_transfer()
            payloads.synchronize()  # what the trainer computed
            if planned is not None and isinstance(payloads, NcclGroup):
                stats = self._send_planned(transfer, planned, tensors, group, payloads)
            else:
                payloads.begin(transfer.version)
                stats = self._send(transfer, tensors, group, payloads)
        except Exception:
            payloads.stop()
            raise
        self._is_sent = True
        return stats

    def _send_planned(
        self,
        transfer: Transfer,
        planned: PlannedBuckets,
        tensors: Iterable[tuple[TensorMeta, torch.Tensor]],
        group: GlooGroup,
        payloads: NcclGroup,
    ) -> TransferStats:
        """Buckets that need not be announced: that takes as long as 200 MB between two GPUs."""
        # Other links may go in step, and receivers that have met launch kernels which wait for this rank's.
        known = list(tensors)
        plan = planned.number, transfer.manifest.digest
        payloads.begin(transfer.version, planned.number if plan == self._told else 0, lambda: planned.fill(0))
        if payloads.in_turns:
            return self._send(transfer, known, group, payloads)
        if plan != self._told:
            announce(group, planned.tell(transfer.manifest.digest), PLAN, "the plan of its buckets")()
            self._told = plan
        content = ContentDigest()
        in_flight = deque[tuple[int, Flight]]()

        def land(leave: int) -> None:
            while len(in_flight) > leave:
                number, flight = in_flight.popleft()
                payloads.wait(flight)
                planned.note(number, content)

        for number in range(len(planned.payloads)):
            land(payloads.num_buckets - 1)
            if number:
                planned.fill(number)
            in_flight.append((number, payloads.start(planned.payloads[number], f"bucket {number}")))
        land(0)
        announce(group, None, 0, "the end")()
        return TransferStats(content.nbytes, content.value)

    def _send(
        self,
        transfer: Transfer,
        tensors: Iterable[tuple[TensorMeta, torch.Tensor]],
        group: GlooGroup,
        payloads: GlooPayload | NcclGroup,
    ) -> TransferStats:
        content, number = ContentDigest(), itertools.count()
        in_flight = deque[Callable[[], None]]()  # each waits for one bucket

        def free_buckets() -> Iterator[Bucket]:
            while True:
                for i in range(payloads.num_buckets):
                    land(payloads.num_buckets - 1)
                    yield Bucket(payloads.bucket(i), [])

        def land(leave: int) -> None:
            while len(in_flight) > leave:
                in_flight.popleft()()

        in_turns = isinstance(payloads, NcclGroup) and payloads.in_turns
        digest = self.context.digest
        for bucket in fill(tensors, free_buckets(), content=content, digest=digest, held=transfer.held):
            if not bucket.pieces:
                continue
            header = Header(transfer.version, transfer.manifest.digest, tuple(bucket.pieces))
            what = f"bucket {next(number)} ({bucket.pieces[0].name}, ...)"
            payload = bucket.payload[: bucket.used_bytes]
            if in_turns:
                land(0)  # it goes on saying things to the others
            start = _in_turn if in_turns else _at_once
            in_flight.append(start(group, payloads, header, payload, what))
        if in_turns:
            land(0)
        in_flight.append(announce(group, None, 0, "the end"))
        land(0)
        return TransferStats(content.nbytes, content.value)

    def abort(self) -> None:
        """Receivers hear of it only now, when whoever aborts knows why: what they say comes after the cause."""
        if self._group is not None:
            if not self._is_sent:
                give_up(self._group)
            self._group.abort()

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self._planned = None
        if self._payloads is not None:
            self._payloads.close()


def _at_once(
    group: GlooGroup, payloads: GlooPayload | NcclGroup, header: Header, payload: torch.Tensor, what: str
) -> Callable[[], None]:
    """Begin to send a bucket; returns how to wait for its end."""
    said = announce(group, header, payload.numel(), what)
    flight = payloads.start(payload, what) if payload.numel() else None

    def wait() -> None:
        said()
        if flight is not None:
            payloads.wait(flight)

    return wait


def _in_turn(
    group: GlooGroup, payloads: GlooPayload | NcclGroup, header: Header, payload: torch.Tensor, what: str
) -> Callable[[], None]:
    """The same where the link has to wait for its turn, on a thread, so that the next bucket can be packed meanwhile."""

    def send() -> None:
        announce(group, header, payload.numel(), what)()
        if payload.numel() and isinstance(payloads, NcclGroup):
            with payloads.turn(what):
                payloads.wait(payloads.start(payload, what))

    sending = Background(send, name="broadcast-turn")

    def wait() -> None:
        while not sending.is_done(_JOIN_S):  # all its waits are bounded
            pass
        sending.result()

    return wait


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
            version, plan = payloads.begin()
            if isinstance(payloads, NcclGroup) and payloads.in_turns:
                yield from self._receive_in_turns(group, payloads)
            else:
                yield from self._receive(group, payloads, version, plan)
        except BaseException:  # GeneratorExit too: whoever read has failed, and the next bucket may be under way
            payloads.stop()
            raise

    def _receive(
        self, group: GlooGroup, payloads: GlooPayload | NcclGroup, version: int, known: int
    ) -> Iterator[WeightChunk]:
        """*known*: the number of the plan by which all comes; 0: it is announced."""
        places = itertools.cycle(range(payloads.num_buckets if payloads.ahead else 1))
        incoming = Incoming(group, payloads.largest_bytes)
        following = deque[Arriving]()

        def start(arriving: Arriving) -> Arriving:
            arriving.payload = payloads.room(next(places), arriving.nbytes)
            if arriving.nbytes:
                arriving.flight = payloads.start(arriving.payload, arriving.what)
            return arriving

        def look_ahead() -> None:
            """One room is the reader's."""
            if payloads.ahead:
                while len(following) < payloads.num_buckets - 1 and (arriving := incoming.next_if_announced()):
                    following.append(start(arriving))
                incoming.listen()

        if known and isinstance(payloads, NcclGroup):
            yield from self._receive_planned(incoming, self._known_plan(known), payloads, version)
        while True:
            if not following:
                arriving = incoming.next()
                if arriving is None:
                    return
                if arriving.nbytes == PLAN and isinstance(payloads, NcclGroup):
                    self._plan = incoming.plan(arriving)
                    yield from self._receive_planned(incoming, self._plan, payloads, version)
                    continue
                following.append(start(arriving))
            current = following.popleft()
            if current.flight is not None:
                payloads.wait(current.flight, look_ahead)
            assert current.payload is not None
            chunk = self._chunk(incoming.header(current), current.payload)
            look_ahead()
            yield chunk
            self._expect_released()

    def _known_plan(self, number: int) -> BucketPlan:
        if self._plan is None or self._plan.number != number:
            raise TransportError(f"sender {self.context.sender} sends by a plan ({number}) that it has not told")
        return self._plan

    def _receive_planned(
        self, incoming: Incoming, plan: BucketPlan, payloads: NcclGroup, version: int
    ) -> Iterator[WeightChunk]:
        """Buckets that nobody announces: all but the reader's are under way."""
        in_flight = deque[tuple[Flight, torch.Tensor]]()
        numbers = iter(range(len(plan.buckets)))

        def look_ahead() -> None:
            while len(in_flight) < payloads.num_buckets and (number := next(numbers, None)) is not None:
                payload = payloads.room(number % payloads.num_buckets, plan.nbytes[number])
                in_flight.append((payloads.start(payload, f"bucket {number}"), payload))

        look_ahead()
        for number in range(len(plan.buckets)):
            flight, payload = in_flight.popleft()
            payloads.wait(flight, incoming.watch)
            yield self._chunk(Header(version, plan.manifest_digest, plan.landed(number, payload)), payload)
            self._expect_released()
            look_ahead()

    def _receive_in_turns(self, group: GlooGroup, payloads: NcclGroup) -> Iterator[WeightChunk]:
        """No turn is held, and nothing received, while a chunk is read: its reader may wait for another link's."""
        incoming = Incoming(group, payloads.largest_bytes)
        while (current := incoming.next()) is not None:
            header = incoming.header(current)
            payload = payloads.room(0, current.nbytes)
            if current.nbytes:
                with payloads.turn(current.what):
                    payloads.wait(payloads.start(payload, current.what))
            yield self._chunk(header, payload)
            self._expect_released()

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

    def _expect_released(self) -> None:
        if self._lent:
            raise WeightSyncError("a broadcast chunk was not released before the next was asked for")

    def abort(self) -> None:
        self._aborted = True
        if self._group is not None:
            self._group.abort()

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        if self._payloads is not None:
            self._payloads.close()
