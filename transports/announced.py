"""Buckets that are announced one by one: the sender learns what is in them as it packs them.

One is packed, and one read, while others are on their way.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch

from weightsync.bucket import Bucket, fill
from weightsync.digest import ContentDigest
from weightsync.interfaces import Transfer
from weightsync.manifest import TensorMeta
from weightsync.transports.announcements import Arriving, Header, Incoming, announce
from weightsync.transports.gloo_group import GlooGroup, GlooPayload
from weightsync.transports.nccl_group import NcclGroup


def send_announced(
    transfer: Transfer,
    tensors: Iterable[tuple[TensorMeta, torch.Tensor]],
    group: GlooGroup,
    payloads: GlooPayload | NcclGroup,
    *,
    digest: bool,
) -> ContentDigest:
    """Send all buckets, say that they were all, and wait until they have arrived; returns what was in them."""
    content = ContentDigest()
    in_flight = deque[Callable[[], None]]()  # each waits for one bucket

    def free_buckets() -> Iterator[Bucket]:
        while True:
            for i in range(payloads.num_buckets):
                land(payloads.num_buckets - 1)
                yield Bucket(payloads.bucket(i), [])

    def land(leave: int) -> None:
        while len(in_flight) > leave:
            in_flight.popleft()()

    for bucket, header, what in pack(transfer, tensors, free_buckets(), content=content, digest=digest):
        in_flight.append(_send(group, payloads, header, bucket.payload[: bucket.used_bytes], what))
    in_flight.append(announce(group, None, 0, "the end"))
    land(0)
    return content


def pack(
    transfer: Transfer,
    tensors: Iterable[tuple[TensorMeta, torch.Tensor]],
    free_buckets: Iterator[Bucket],
    *,
    content: ContentDigest,
    digest: bool,
) -> Iterator[tuple[Bucket, Header, str]]:
    """Each bucket that has something, with what is to be said of it, and its name for errors; as `fill`."""
    number = itertools.count()
    for bucket in fill(tensors, free_buckets, content=content, digest=digest, held=transfer.held):
        if bucket.pieces:
            header = Header(transfer.version, transfer.manifest.digest, tuple(bucket.pieces))
            yield bucket, header, f"bucket {next(number)} ({bucket.pieces[0].name}, ...)"


def _send(
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


def receive_announced(
    incoming: Incoming, first: Arriving | None, payloads: GlooPayload | NcclGroup
) -> Iterator[tuple[Header, torch.Tensor]]:
    """What arrives, until the end. *first* was announced already; None: the end was.

    A payload is the reader's until it asks for the next.
    """
    places = itertools.cycle(range(payloads.num_buckets if payloads.ahead else 1))
    following = deque[Arriving]()

    def start(arriving: Arriving) -> None:
        arriving.payload = payloads.room(next(places), arriving.nbytes)
        if arriving.nbytes:
            arriving.flight = payloads.start(arriving.payload, arriving.what)
        following.append(arriving)

    def look_ahead() -> None:
        """One room is the reader's."""
        if payloads.ahead:
            while len(following) < payloads.num_buckets - 1 and (arriving := incoming.next_if_announced()):
                start(arriving)
            incoming.listen()

    arriving = first
    while arriving is not None:
        start(arriving)
        while following:
            current = following.popleft()
            if current.flight is not None:
                payloads.wait(current.flight, look_ahead)
            assert current.payload is not None
            header = incoming.header(current)
            look_ahead()
            yield header, current.payload
        arriving = incoming.next()
