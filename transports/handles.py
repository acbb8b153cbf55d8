"""What transports share that talk to their receivers over channels: who may connect, messages to all receivers, the end;
and, where handles move over a Unix socket of one host while payloads stay, buckets that are used in turn.
"""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import msgspec
import torch

from weightsync.bucket import Bucket, fill
from weightsync.chunk import Piece, WeightChunk
from weightsync.digest import ContentDigest
from weightsync.errors import TransportError, UpdateTimeoutError
from weightsync.interfaces import LinkContext, ReceiverTransport, SenderTransport, Transfer
from weightsync.manifest import TensorMeta
from weightsync.transports.channel import Channel, Listener, dial

NUM_BUCKETS = 2


class Hello(msgspec.Struct, tag=True, frozen=True):
    """Receiver to sender, first on a channel."""

    token: str
    receiver: int


class Ack(msgspec.Struct, tag=True, frozen=True):
    """Receiver to sender: done with one chunk in this segment."""

    segment: int


class Forget(msgspec.Struct, tag=True, frozen=True):
    """Sender to receiver: the segment is gone."""

    id: int


class Chunk(msgspec.Struct, tag=True, frozen=True):
    """Sender to receiver: these pieces lie in that segment."""

    version: int
    manifest_digest: str
    segment: int
    stable: bool
    pieces: tuple[Piece, ...]


class End(msgspec.Struct, tag=True, frozen=True):
    """Sender to receiver: the version has been sent."""

    version: int


class ChannelSender(SenderTransport):
    """A sender with a channel to each receiver. Everything but `abort` runs on the thread that calls `send`."""

    messages: ClassVar[Any]
    """The union of all messages on a channel, `Hello` and `Ack` among them."""

    def __init__(self, context: LinkContext) -> None:
        super().__init__(context)
        self._listener: Listener | None = None
        self._channels: dict[int, Channel[Any]] = {}
        self._aborted = False

    def _listen(self, host: str | None = None) -> str:
        """Begin to listen, on this host or, as *host*, for others; returns the address."""
        self._listener = Listener(host)
        return self._listener.address

    def connect(self) -> None:
        assert self._listener is not None, "connect before open"
        deadline = time.monotonic() + self.context.timeout_s
        while len(self._channels) < self.context.num_receivers:
            try:
                channel: Channel[Any] = self._listener.accept(
                    self.messages, timeout_s=max(deadline - time.monotonic(), 0.001)
                )
            except TransportError:  # another user's process; refused
                continue
            except OSError as error:
                absent = sorted(set(range(self.context.num_receivers)) - self._channels.keys())
                raise TransportError(
                    f"receivers {absent} did not connect to sender {self.context.sender} over {self.name} within "
                    f"{self.context.timeout_s:g} s ({error})"
                ) from error
            with contextlib.suppress(TransportError, UpdateTimeoutError):  # a stranger does not stop the others
                hello, _ = channel.receive(timeout_s=max(deadline - time.monotonic(), 0.001))
                known = self._channels.keys()
                if (
                    isinstance(hello, Hello)
                    and hello.token == self.context.token
                    and hello.receiver in set(range(self.context.num_receivers)) - known
                ):
                    channel.peer = f"receiver {hello.receiver}"
                    self._channels[hello.receiver] = channel
                    continue
            channel.close()
        self._listener.close()

    def _tell(self, message: msgspec.Struct, *, fd: int | None = None) -> None:
        """To all receivers."""
        if self._aborted:
            raise TransportError("the update was aborted")
        for channel in self._channels.values():
            channel.send(message, fd=fd, timeout_s=self.context.timeout_s)

    def abort(self) -> None:
        self._aborted = True
        if self._listener is not None:
            self._listener.close()
        for channel in self._channels.values():
            channel.close()


class HandleSender(ChannelSender):
    """The sender's half where payloads stay."""

    def __init__(self, context: LinkContext) -> None:
        super().__init__(context)
        self._buckets: list[tuple[int, torch.Tensor]] = []
        """(segment, its bytes)."""
        self._lent: deque[int] = deque()
        """Segments of buckets that receivers have not released, oldest first."""

    @abstractmethod
    def _new_bucket(self) -> tuple[int, torch.Tensor]:
        """A segment that receivers know, and its bytes."""

    def _announce(self, transfer: Transfer, segment_id: int, pieces: Sequence[Piece], *, stable: bool) -> None:
        self._tell(Chunk(transfer.version, transfer.manifest.digest, segment_id, stable, tuple(pieces)))

    def _send_buckets(
        self, transfer: Transfer, tensors: Iterable[tuple[TensorMeta, torch.Tensor]], content: ContentDigest
    ) -> None:
        buckets = fill(tensors, self._free_buckets(), content=content, digest=self.context.digest, held=transfer.held)
        for bucket in buckets:
            if bucket.pieces:
                segment_id = next((id for id, payload in self._buckets if payload is bucket.payload), None)
                if segment_id is None:  # closed meanwhile, while the source was stuck
                    raise TransportError("the update was aborted")
                self._announce(transfer, segment_id, bucket.pieces, stable=False)
                self._lent.append(segment_id)
        while self._lent:
            self._await_release(self._lent.popleft())

    def _free_buckets(self) -> Iterator[Bucket]:
        while len(self._buckets) < NUM_BUCKETS:
            self._buckets.append(self._new_bucket())
        while True:
            for segment_id, payload in self._buckets:
                while segment_id in self._lent:
                    self._await_release(self._lent.popleft())
                yield Bucket(payload, [])
            if self._aborted:  # and perhaps closed, so there are no buckets to hand out
                raise TransportError("the update was aborted")

    def _bucket_size(self, wanted: int) -> int:
        return max(min(wanted, self.context.staging_limit_bytes // NUM_BUCKETS), 1)

    def _await_release(self, segment_id: int) -> None:
        """Wait until every receiver has released the bucket. Receivers release in the order they were sent."""
        for channel in self._channels.values():
            message, _ = channel.receive(timeout_s=self.context.timeout_s)
            if not isinstance(message, Ack) or message.segment != segment_id:
                raise TransportError(f"{channel.peer} answered {message}, expected the release of bucket {segment_id}")


class ChannelReceiver(ReceiverTransport):
    """A receiver with a channel to its sender."""

    messages: ClassVar[Any]

    def __init__(self, context: LinkContext, *, receiver: int) -> None:
        super().__init__(context, receiver=receiver)
        self._channel: Channel[Any] | None = None
        self._aborted = False

    def _dial(self, address: str, connect: Callable[..., Channel[Any]] = dial) -> None:
        self._channel = connect(
            address,
            self.messages,
            peer=f"sender {self.context.sender}",
            timeout_s=self.context.timeout_s,
        )
        if self._aborted:  # perhaps before there was a channel to close
            self._channel.close()
        self._channel.send(Hello(self.context.token, self.receiver), timeout_s=self.context.timeout_s)

    def _check_end(self, end: End, transfer: Transfer) -> None:
        assert self._channel is not None
        if end.version != transfer.version:
            raise TransportError(f"{self._channel.peer} ended version {end.version}, expected {transfer.version}")

    def abort(self) -> None:
        self._aborted = True
        if self._channel is not None:
            self._channel.close()


class HandleReceiver(ChannelReceiver):
    """The receiver's half where payloads stay."""

    def _chunk(self, message: Chunk, payload: torch.Tensor | None) -> WeightChunk:
        assert self._channel is not None
        if payload is None:
            raise TransportError(
                f"{self._channel.peer} sent a chunk in segment {message.segment}, which it never shared"
            )
        channel, timeout_s = self._channel, self.context.timeout_s

        def release() -> None:
            if not message.stable:
                try:
                    channel.send(Ack(message.segment), timeout_s=timeout_s)
                except (TransportError, UpdateTimeoutError):
                    channel.close()  # the sender is gone or stuck; `receive` says so to whoever waits

        return WeightChunk(
            message.version,
            message.manifest_digest,
            message.pieces,
            payload,
            stable=message.stable,
            sender=self.context.sender,
            release=release,
        )
