"""Buckets that are announced one by one: the sender learns what is in them as it packs them.

One is packed, and one read, while others are on their way; where the link has to wait for its turn on a GPU
(`weightsync.transports.turns`), one is sent at a time.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch

from weightsync.background import Background
from weightsync.bucket import Bucket, fill
from weightsync.digest import ContentDigest
from weightsync.interfaces import Transfer
from weightsync.manifest import TensorMeta
from weightsync.transports.announcements import Arriving, Header, Incoming, announce
from weightsync.transports.gloo_group import GlooGroup, GlooPayload
from weightsync.transports.nccl_group import NcclGroup

_JOIN_S = 0.0005


def send_announced(
    transfer: Transfer,
    tensors: Iterable[tuple[TensorMeta, torch.Tensor]],
    group: GlooGroup,
    payloads: GlooPayload | NcclGroup,
    *,
    digest: bool,
) -> ContentDigest:
    """Send all buckets, say that they were all, and wait until they have arrived; returns what was in them."""
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
    return content


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


def receive_in_turns(incoming: Incoming, payloads: NcclGroup) -> Iterator[tuple[Header, torch.Tensor]]:
    """No turn is held, and nothing received, while a payload is read: its reader may wait for another link's."""
    while (current := incoming.next()) is not None:
        header = incoming.header(current)
        payload = payloads.room(0, current.nbytes)
        if current.nbytes:
            with payloads.turn(current.what):
                payloads.wait(payloads.start(payload, current.what))
        yield header, payload
