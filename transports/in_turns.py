"""Buckets of a link of which a GPU takes part in others, too: some at a time, when it is their turn (`turns`).

Those of one turn are announced before it, started in it, and read after it. Meanwhile the other links have theirs, and the sender
packs the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from weightsync.background import Background
from weightsync.bucket import Bucket
from weightsync.digest import ContentDigest
from weightsync.errors import TransportError
from weightsync.interfaces import Transfer
from weightsync.manifest import TensorMeta
from weightsync.transports.announced import pack
from weightsync.transports.announcements import Arriving, Header, Incoming, announce
from weightsync.transports.gloo_group import Flight, GlooGroup
from weightsync.transports.nccl_group import NcclGroup

_PER_TURN = NcclGroup.num_buckets // 2
_JOIN_S = 0.0005


@dataclass(frozen=True, slots=True)
class _Packed:
    header: Header
    bucket: torch.Tensor
    used_bytes: int
    what: str


def send_in_turns(
    transfer: Transfer,
    tensors: Iterable[tuple[TensorMeta, torch.Tensor]],
    group: GlooGroup,
    payloads: NcclGroup,
    *,
    digest: bool,
) -> ContentDigest:
    """Send all buckets, say that they were all, and wait until they have arrived; returns what was in them."""
    content = ContentDigest()
    free = deque(payloads.bucket(i) for i in range(payloads.num_buckets))
    packed: list[_Packed] = []
    sending: Background[None] | None = None
    in_flight: list[torch.Tensor] = []

    def free_buckets() -> Iterator[Bucket]:
        while True:
            if not free:
                land()
            yield Bucket(free.popleft(), [])

    def land() -> None:
        nonlocal sending
        if sending is not None:
            while not sending.is_done(_JOIN_S):  # all its waits are bounded
                pass
            ended, sending = sending, None
            ended.result()
            free.extend(in_flight)

    def send() -> None:
        nonlocal packed, sending, in_flight
        land()
        in_flight = [one.bucket for one in packed]
        sending, packed = Background(partial(_send, group, payloads, packed), name="broadcast-turn"), []

    for bucket, header, what in pack(transfer, tensors, free_buckets(), content=content, digest=digest):
        packed.append(_Packed(header, bucket.payload, bucket.used_bytes, what))
        if len(packed) == _PER_TURN:
            send()
    if packed:
        send()
    land()
    announce(group, None, 0, "the end")()
    return content


def _send(group: GlooGroup, payloads: NcclGroup, packed: Sequence[_Packed]) -> None:
    """What is sent in one turn: on a thread, so that the next can be packed meanwhile."""
    for one in packed:
        header = one.header if one is packed[-1] else msgspec.structs.replace(one.header, more=True)
        announce(group, header, one.used_bytes, one.what)()
    for flight in _start(payloads, [(one.bucket[: one.used_bytes], one.what) for one in packed]):
        payloads.wait(flight)


def receive_in_turns(incoming: Incoming, payloads: NcclGroup) -> Iterator[tuple[Header, torch.Tensor]]:
    """What arrives. A payload is the reader's until it asks for the next.

    No turn is waited for, and nobody held up in one, while something is to be read: its reader may wait for another link's.
    """
    while announced := next_turn(incoming, payloads.num_buckets):
        rooms = [payloads.room(i, arriving.nbytes) for i, (_, arriving) in enumerate(announced)]
        whats = [arriving.what for _, arriving in announced]
        flights = _start(payloads, list(zip(rooms, whats, strict=True)))
        for (header, _), room in zip(announced, rooms, strict=True):
            if room.numel():
                payloads.wait(flights.popleft())
            yield header, room


def next_turn(incoming: Incoming, at_most: int) -> list[tuple[Header, Arriving]]:
    """What comes in it, as announced; nothing at the end of the transfer.

    Raises:
        TransportError: it is not possible.
    """
    found: list[tuple[Header, Arriving]] = []
    while (arriving := incoming.next()) is not None:
        header = incoming.header(arriving)
        found.append((header, arriving))
        if not header.more:
            return found
        if len(found) == at_most:
            raise TransportError(
                f"{incoming.who}: it announced more than {at_most} buckets at once, for which there is no room"
            )
    if found:
        raise TransportError(f"{incoming.who}: it announced a bucket that did not come")
    return []


def _start(payloads: NcclGroup, buckets: Sequence[tuple[torch.Tensor, str]]) -> deque[Flight]:
    """Collective: begin to send or receive those that have bytes, in a turn."""
    filled = [(payload, what) for payload, what in buckets if payload.numel()]
    if not filled:
        return deque()
    with payloads.turn(filled[0][1]):
        return deque(payloads.start(payload, what) for payload, what in filled)
