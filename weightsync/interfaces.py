"""What a transport must be (ABCs, we own them) and what a model must offer (Protocols, we are given them).

A transport opens, moves, closes. It does not convert, apply, retry or choose. One sender object serves
all receivers that use it; control messages do not pass through it but through whoever drives the update.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch

from weightsync.chunk import WeightChunk
from weightsync.errors import WeightSyncError
from weightsync.identity import Identity
from weightsync.loadmap import LoadMap
from weightsync.manifest import Manifest, TensorMeta
from weightsync.orders import Orders
from weightsync.weightset import SetDigests, WeightSet


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkContext:
    """What both ends of a link are told when it opens."""

    sender: int
    """Index of the sender rank."""
    num_receivers: int
    host: str
    """Address of the sender's node, as other nodes reach it."""
    token: str
    """Unguessable, new for each link."""
    timeout_s: float
    bucket_bytes: int
    staging_limit_bytes: int
    digest: bool
    count_changed_values: bool = False
    gpu_bucket_bytes: int = 512 << 20
    device: str = "cpu"
    """Where this end's weights lie: "cpu", "cuda:0"."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs of the sender and of each receiver, in the order of their indices; "" for one on the CPU."""
    helpers: tuple[str, ...] = ()
    """Addresses of the helper processes beside the sender and each receiver, where the transport needs such."""
    orders: Orders | None = None
    """To a sender that takes shards: what of them goes to whom."""
    min_bytes_per_s: float = 0.0
    """A link that is slower, as far as the transport measures it when it opens, is refused."""

    def helper(self, receiver: int | None) -> str:
        """The address of a receiver's helper, or of the sender's (None); "" where there is none."""
        index = 0 if receiver is None else receiver + 1
        return self.helpers[index] if index < len(self.helpers) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One version on its way over one link."""

    version: int
    manifest: Manifest
    names: tuple[str, ...]
    """Canonical names that this sender sends, in the order that it sends them where it can choose."""
    held: bool = False
    """To senders: all tensors exist at once and stay as they are until `finish`, so they may be read where they lie."""


@dataclass(slots=True)
class TransferStats:
    """What a sender did for one version."""

    nbytes: int = 0
    content_digest: int = 0
    content_digests: tuple[int, ...] = ()
    """Per receiver, where they do not all get the same."""
    changed_values: int | None = None
    """Values that differ from the version before; None where the sender keeps no copy to compare with."""


class SenderTransport(ABC):
    """The trainer's end of the links from one sender rank to all its receivers.

    Calls come in the order look, open, connect, (head_start, begin, send, finish)*, close; all but `abort` from one thread
    at a time. `look`, `head_start` and `begin` are left out where the tensors are not held.
    """

    name: ClassVar[str]
    takes_shards: ClassVar[bool] = False
    """Engine ranks get the slices that they need, from whichever ranks hold them. The sender is given this rank's own parts of
    sharded tensors, as they lie, and orders that say which receiver gets what of them."""
    takes_boxes: ClassVar[bool] = False
    """With `takes_shards`: the sender needs no orders. It is given, as tensors of their own, the slices that go to its
    receivers, which all get the same; others have links of their own."""
    needs_helpers: ClassVar[bool] = False
    """Its links need helper processes (`Fleet.helpers`)."""

    def __init__(self, context: LinkContext) -> None:
        self.context = context

    def look(self, tensors: Iterable[tuple[TensorMeta, torch.Tensor]]) -> None:  # noqa: B027 - most need not know
        """Before `open`, where they are held: the tensors to be sent; how they lie may decide what `stable` says."""

    @abstractmethod
    def open(self, metas: tuple[TensorMeta, ...]) -> bytes:
        """Get ready for the tensors to be sent; returns what receivers need in order to find this end.

        Does not wait for anybody.
        """

    @abstractmethod
    def connect(self) -> None:
        """Wait, at most `timeout_s`, until every receiver has connected.

        Raises:
            TransportError: a receiver did not come; the message says which.
        """

    def head_start(self, held: Mapping[str, torch.Tensor]) -> None:  # noqa: B027 - most have nothing to do
        """Before `begin`: these are there, by name, and have not been looked at yet. Start what can be thrown away."""

    def begin(self, tensors: Sequence[tuple[TensorMeta, torch.Tensor]]) -> None:  # noqa: B027 - most have nothing to do
        """Before `send`, where they are held: the tensors that it will be given. Start what takes time and waits for nobody."""

    @abstractmethod
    def send(self, transfer: Transfer, tensors: Iterable[tuple[TensorMeta, torch.Tensor]]) -> TransferStats:
        """Move the tensors to every receiver. Returns when this end need do no more.

        The tensors may be on any device, strided in any way, and of another dtype than their meta's, which
        is the wire's; each may be changed by its owner as soon as the iterator is asked for the next one,
        unless the transfer is `held` or it lies in shared memory, where it must stay as it is until `finish`.

        Raises:
            TransportError: a link broke. UpdateTimeoutError: a receiver did not answer in time.
        """

    @property
    def progress(self) -> int:
        """From any thread: what moves as `send` gets on although it asks for no more tensors."""
        return 0

    def describe(self) -> str:
        """For people: what the transport has chosen for itself, once open; "" where there was no choice."""
        return ""

    @abstractmethod
    def stable(self) -> bool:
        """Whether chunks stay readable where they lie until `finish`, so that receivers need no copy of them."""

    def finish(self) -> None:  # noqa: B027 - a transport without a fence has nothing to do
        """Every receiver is done with the version; its memory may be written again."""

    @abstractmethod
    def abort(self) -> None:
        """From any thread: make `connect` and `send` raise soon. Only `close` may follow."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Idempotent; releases even when the goodbye fails."""


class ReceiverTransport(ABC):
    """The engine's end of the link from one sender rank. Calls come in the order connect, receive*, close."""

    name: ClassVar[str]
    sends_sets: ClassVar[bool] = False
    """Whether tensors that are held come as weight sets."""

    def __init__(self, context: LinkContext, *, receiver: int) -> None:
        self.context = context
        self.receiver = receiver

    @abstractmethod
    def connect(self, address: bytes) -> None:
        """Connect to the sender that returned *address*, within `timeout_s`.

        Raises:
            TransportError: the sender cannot be reached, or is not the one that was meant.
        """

    @abstractmethod
    def receive(self, transfer: Transfer) -> Iterator[WeightChunk | WeightSet | SetDigests]:
        """The chunks of one version, each on loan until released, and sets; ends after the last.

        Raises:
            TransportError: the link broke. UpdateTimeoutError: nothing came for `timeout_s`.
        """

    @abstractmethod
    def abort(self) -> None:
        """From any thread: make `connect` and `receive` raise soon. Only `close` may follow."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Idempotent; releases even when the goodbye fails."""


@runtime_checkable
class EngineAdapter(Protocol):
    """One rank of an engine, in the process where its model lives. `runtime_checkable` checks names only.

    An attribute `device` (torch.device) says where its weights lie; without one they are taken to be in CPU memory, and
    bytes reach it there. A method `settings()`, where there is one, gives the engine's settings that matter for an update,
    by name (`weightsync.doctor.facts.ProcessFacts.engine`).
    """

    def load_map(self, manifest: Manifest) -> LoadMap:
        """Where the manifest's tensors land on this rank. The model is left as it was, whatever happens.

        Raises:
            ManifestError: the model's loader refuses a name or a shape.
        """
        ...

    def check_ready(self) -> None:
        """Raises EngineStateError, with the cure, where the engine cannot take an update as it is."""
        ...

    def apply(self, groups: Iterable[Iterable[tuple[str, torch.Tensor]]]) -> int:
        """Load whole module groups, in one reload; returns how often the loader ran, which is once.

        A group's tensors are on loan until the next is asked for, or, where the loader keeps them longer, as long
        as it refers to them.

        On error the loader is left ready for a new reload, the weights are mixed, and the error is raised.
        """
        ...


@runtime_checkable
class DirectAdapter(EngineAdapter, Protocol):
    """An engine that shows its live tensors, so that the load map's copies may be run on them instead of its loader."""

    @property
    def device(self) -> torch.device: ...

    @property
    def copies_load(self) -> bool:
        """Whether copies may take the place of `apply`, which does no more than load."""
        ...

    @property
    def laid_out_as_loaded(self) -> bool:
        """True: live tensors are what the loader fills, always. Else that has to be seen."""
        ...

    def live(self) -> Mapping[tuple[str, str], torch.Tensor]:
        """(module path, parameter) of the load map's fed targets -> the tensor that the engine computes with now; what is
        gone is left out."""
        ...

    def reachable(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Module path -> every tensor that the module reaches and a reload may change, parameters and caches of kernels alike."""
        ...

    def synchronize(self) -> None:
        """Wait for all that the engine's device was given to do."""
        ...


@runtime_checkable
class Fleet(Protocol):
    """How a session reaches its parties: trainer ranks, and engines with all their ranks."""

    @property
    def trainers(self) -> Sequence[str]: ...

    @property
    def engines(self) -> Sequence[str]: ...

    def send(self, party: str, number: int, payload: bytes) -> None:
        """Start a call and return. One still under way to the same party is superseded: its answer may be dropped."""
        ...

    def replies(self, wait_s: float) -> Iterable[tuple[str, int, Sequence[bytes] | WeightSyncError]]:
        """(party, the call's number, one reply a rank, or why there are none) for the calls that ended; waits at most
        *wait_s*."""
        ...

    def reopen(self, party: str) -> None:
        """Make a party whose process was restarted answer again.

        Raises:
            WeightSyncError: it is gone for good, or busy.
        """
        ...

    def remove(self, party: str) -> None:
        """Forget an engine; nothing is sent to it any more."""
        ...

    def helpers(self, ranks: Mapping[str, Identity]) -> Mapping[str, str]:
        """Rank -> address of a helper process beside it (`weightsync.transports.sidecar`), started where there is none or it
        is gone.

        Raises:
            WeightSyncError: none can be started.
        """
        ...

    def process_state(self, identity: Identity) -> str:
        """ "running", "stopped", "gone" or "unknown"; within a few seconds. May be called from several threads."""
        ...
