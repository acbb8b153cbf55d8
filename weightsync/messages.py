"""Control messages between a coordinator and the ranks: small, typed, msgpack; no tensors, no pickle.

A request goes to a party (a trainer rank, or an engine with all its ranks); every rank answers with one reply.
"""

from __future__ import annotations

import msgspec

from weightsync.config import SyncConfig
from weightsync.errors import ErrorInfo
from weightsync.identity import Identity
from weightsync.manifest import Manifest
from weightsync.report import LoadSummary

# ---- opening a weight sync --------------------------------------------------------------------------------------


class Describe(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """To trainers, first: what do you hold?"""

    config: SyncConfig


class Description(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    identity: Identity
    manifest: Manifest
    version: int
    """The last version that this process took part in, 0 if none."""


class OpenReceiver(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """To engines: this is what will come; record where it lands."""

    config: SyncConfig
    manifest: Manifest
    engine: int


class ReceiverOpened(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    identity: Identity
    rank: int
    load: LoadSummary
    order: tuple[str, ...]
    """Canonical names in the order that keeps least staging open."""
    version: int


class LinkPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One link: a sender rank, some receivers, one transport."""

    transport: str
    sender: int
    num_receivers: int
    host: str
    token: str


class OpenSender(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """To trainers: these names are yours to send, over these links."""

    manifest: Manifest
    """Of all trainers together."""
    names: tuple[str, ...]
    links: tuple[LinkPlan, ...]


class SenderOpened(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    addresses: tuple[bytes, ...]
    """One per link."""
    stable: tuple[bool, ...]


class ReceiverLink(msgspec.Struct, frozen=True, kw_only=True):
    """A receiver's end of one link."""

    plan: LinkPlan
    address: bytes
    names: tuple[str, ...]
    stable: bool
    receiver: dict[int, int]
    """Rank in the engine -> index among the link's receivers; ranks that are not in it do not use the link."""


class Connect(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """To all at once: connect your links, in the background. Trainers get no links, they have theirs."""

    links: tuple[ReceiverLink, ...] = ()


# ---- one update -------------------------------------------------------------------------------------------------


class Prepare(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    version: int
    epoch: int
    staged: bool


class Prepared(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """What the rank believes; the coordinator compares."""

    version: int
    """The version it has now."""
    epoch: int
    manifest_digest: str


class Transfer(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Send or receive, in the background; answered as a poll is, within `wait_s`."""

    version: int
    wait_s: float = 0.0


class Poll(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """How far are you? Answered within `wait_s`, earlier when there is something to say."""

    wait_s: float = 0.0


class Pending(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Not done yet; `progress` (bytes, or links) shows that something moves."""

    progress: int = 0


class Sent(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    nbytes: int
    content_digests: tuple[int, ...]
    """One per link: links may cut tensors differently."""
    changed_values: int | None
    seconds: float


class Vote(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Everything is here, whole and verified."""

    nbytes: int
    content_digests: dict[int, int]
    """Per sender index."""
    peak_staging_bytes: int
    seconds: float


class Apply(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Load the version into the model, in one reload. Engines pause before and stay paused."""

    version: int


class Applied(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    vote: Vote
    seconds: float
    reloads: int


class Commit(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """To all: the version is current. Engines resume; trainers may write their memory again."""

    version: int


class Abort(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Give the update up: forget what came, break the links."""

    hold: bool = False
    """Engines that pause stay paused: the others have gone on to the new version."""


class Close(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The weight sync ends."""


class Ok(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    pause_s: float = 0.0
    poisoned: bool = False
    """After an abort: the rank holds mixed weights."""


class Failed(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    error: ErrorInfo
    poisoned: bool = False


Request = (
    Describe | OpenReceiver | OpenSender | Connect | Prepare | Transfer | Poll | Apply | Commit | Abort | Close
)  # fmt: skip
Reply = Description | ReceiverOpened | SenderOpened | Prepared | Pending | Sent | Vote | Applied | Ok | Failed

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
