"""What a sender says over gloo before each bucket: two integers, sizes of header and payload, then the header.

A size of nought for the header is the end of a transfer. A sender that is aborted says so in place of the next bucket, so that
receivers, which may be waiting within a call that nobody can interrupt, need not wait until their bound. One that has nothing to say
for long, since all goes by a plan, says that, as gloo ends what is waited for in vain.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from weightsync.chunk import Piece
from weightsync.errors import TransportError
from weightsync.transports.bucketplan import BucketPlan
from weightsync.transports.gloo_group import Flight, GlooGroup
from weightsync.wire import pack, unpack

PLAN = -1
"""In place of a payload's size: the header is a plan of many."""
_GAVE_UP, _GOES_ON = -1, -2
"""In place of a header's size: nothing more comes; more does."""
_MAX_HEADER_BYTES = 64 << 20


class Header(msgspec.Struct, tag=True, frozen=True):
    """What a bucket holds."""

    version: int
    manifest_digest: str
    pieces: tuple[Piece, ...]
    more: bool = False
    """Where links take turns: another bucket comes in the same turn."""


_headers: msgspec.msgpack.Decoder[Header | BucketPlan] = msgspec.msgpack.Decoder(Header | BucketPlan)


def announce(group: GlooGroup, header: Header | BucketPlan | None, nbytes: int, what: str) -> Callable[[], None]:
    """Begin to say what comes, or that nothing does; returns how to wait until it was said. *nbytes*: of the payload; `PLAN`
    for a plan."""
    encoded = pack(header) if header is not None else b""
    sizes = torch.tensor([len(encoded), nbytes], dtype=torch.int64)
    parts = [sizes, torch.frombuffer(bytearray(encoded), dtype=torch.uint8)] if encoded else [sizes]
    works = [(group.start(part), part) for part in parts]  # a tensor has to live as long as the work on it

    def wait() -> None:
        for work, _ in works:
            group.wait(work, what)

    return wait


class GoesOn:
    """Says now and then that a transfer does, of which nothing else is said."""

    def __init__(self, group: GlooGroup) -> None:
        self._group = group
        self._said_at = time.monotonic()
        self._said: list[tuple[Any, torch.Tensor]] = []

    def __call__(self) -> None:
        """To be called as often as something has moved."""
        now = time.monotonic()
        if now > self._said_at + self._group.timeout_s / 4:
            self._said_at = now
            sizes = torch.tensor([_GOES_ON, 0], dtype=torch.int64)
            self._said.append((self._group.start(sizes), sizes))

    def wait(self) -> None:
        """Until all of it was said."""
        for work, _ in self._said:
            self._group.wait(work, "what is said of a transfer that goes on")


def give_up(group: GlooGroup) -> None:
    """Say that nothing more comes; waits for nobody, and does nothing where the link is broken."""
    with contextlib.suppress(Exception):
        group.say_last(torch.tensor([_GAVE_UP, 0], dtype=torch.int64))


@dataclass(slots=True)
class Arriving:
    """A bucket that was announced."""

    what: str
    nbytes: int
    text: torch.Tensor
    said: Any
    """Work that ends when *text*, the header, is here."""
    payload: torch.Tensor | None = None
    flight: Flight | None = None


class Incoming:
    """The buckets of one transfer, as the sender announces them."""

    def __init__(self, group: GlooGroup, largest_bytes: int) -> None:
        self._group, self._largest_bytes = group, largest_bytes
        self._number = 0
        self._sizes = torch.zeros(2, dtype=torch.int64)
        self._work: Any = None
        self._ended = False

    @property
    def who(self) -> str:
        return self._group.who

    def next_if_announced(self) -> Arriving | None:
        """The next bucket; None where it was not announced yet, or there is none."""
        if self._ended:
            return None
        return self._accept() if self._is_announced() else None

    def next(self) -> Arriving | None:
        """Wait for the next bucket; None after the last.

        Raises:
            TransportError: the sender is gone, was aborted, or announces what is not possible. UpdateTimeoutError: it says
                nothing.
        """
        if self._ended:
            return None
        while True:
            self.listen()
            self._group.wait(self._work, self._what)
            if not self._goes_on():
                return self._accept()

    def _is_announced(self) -> bool:
        """Whether something was said, other than that it goes on."""
        while True:
            self.listen()
            if not self._group.is_done(self._work, self._what):
                return False
            if not self._goes_on():
                return True

    def _goes_on(self) -> bool:
        """Whether that is all that was said; then what is said next is to be listened for."""
        goes_on = int(self._sizes[0]) == _GOES_ON
        if goes_on:
            self._work = None
        return goes_on

    @property
    def _what(self) -> str:
        return f"bucket {self._number}"

    def listen(self) -> None:
        """Be ready for the next announcement."""
        if self._work is None and not self._ended:
            self._sizes = torch.zeros(2, dtype=torch.int64)
            self._work = self._group.start(self._sizes)

    def _accept(self) -> Arriving | None:
        header_bytes, payload_bytes = map(int, self._sizes)
        self._work, what = None, self._what
        self._number += 1
        self._check_sender()
        if header_bytes == 0:
            self._ended = True
            return None
        if not (0 < header_bytes <= _MAX_HEADER_BYTES and PLAN <= payload_bytes <= self._largest_bytes):
            raise TransportError(
                f"{self._group.who}: it announced a bucket of {payload_bytes} bytes, the largest has {self._largest_bytes}"
            )
        text = torch.empty(header_bytes, dtype=torch.uint8)
        return Arriving(what, payload_bytes, text, self._group.start(text))

    def header(self, arriving: Arriving) -> Header:
        """Wait for the names of what is in it."""
        found = self._read(arriving)
        assert isinstance(found, Header), found
        return found

    def plan(self, arriving: Arriving) -> BucketPlan:
        """Wait for what will come without being announced.

        Raises:
            TransportError: it is not possible.
        """
        found = self._read(arriving)
        if not isinstance(found, BucketPlan) or not found.is_possible(self._largest_bytes):
            raise TransportError(f"{self._group.who}: the plan of its buckets is not possible")
        return found

    def watch(self) -> None:
        """Raises TransportError where the sender is gone, or was aborted."""
        if self._is_announced():
            self._check_sender()

    def _check_sender(self) -> None:
        if int(self._sizes[0]) == _GAVE_UP:
            raise TransportError(f"{self._group.who}: the sender was aborted, and sends no more")

    def _read(self, arriving: Arriving) -> Header | BucketPlan:
        self._group.wait(arriving.said, arriving.what)
        try:
            return unpack(arriving.text.numpy().tobytes(), _headers)
        except TransportError as error:
            raise TransportError(f"{self._group.who}: a header: {error}") from error
