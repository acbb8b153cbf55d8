"""Buckets that go by a plan which both ends know, over NCCL: nothing is said between them, and all rooms are in use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import torch

from weightsync.digest import ContentDigest
from weightsync.transports.announcements import Header, Incoming
from weightsync.transports.bucketplan import BucketPlan, PlannedBuckets
from weightsync.transports.gloo_group import Flight
from weightsync.transports.nccl_group import NcclGroup


def send_planned(planned: PlannedBuckets, payloads: NcclGroup, landed: Callable[[], None]) -> ContentDigest:
    """Send all buckets, of which the first is filled, and wait until they have arrived; returns what was in them.

    *landed* is called after each.
    """
    content = ContentDigest()
    in_flight = deque[tuple[int, Flight]]()

    def land(leave: int) -> None:
        while len(in_flight) > leave:
            number, flight = in_flight.popleft()
            payloads.wait(flight)
            planned.note(number, content)
            landed()

    for number, payload in enumerate(planned.payloads):
        land(payloads.num_buckets - 1)
        if number:
            planned.fill(number)
        in_flight.append((number, payloads.start(payload, f"bucket {number}")))
    land(0)
    return content


def receive_planned(
    plan: BucketPlan, version: int, incoming: Incoming, payloads: NcclGroup
) -> Iterator[tuple[Header, torch.Tensor]]:
    """What arrives. A payload is the reader's until it asks for the next; *incoming* is watched for a sender that gives up."""
    in_flight = deque[tuple[Flight, torch.Tensor]]()
    numbers = iter(range(len(plan.buckets)))

    def look_ahead() -> None:
        while len(in_flight) < payloads.num_buckets and (number := next(numbers, None)) is not None:
            payload = payloads.room(number % payloads.num_buckets, plan.nbytes[number])
            in_flight.append((payloads.start(payload, f"bucket {number}"), payload))

    incoming.listen()  # what the sender says next lasts until it is heard
    for number in range(len(plan.buckets)):
        incoming.watch()  # a reader that is slow never waits below
        look_ahead()
        flight, payload = in_flight.popleft()
        payloads.wait(flight, incoming.watch)
        yield Header(version, plan.manifest_digest, plan.landed(number, payload)), payload
