"""Control messages between a coordinator and the ranks: small, typed, msgpack; no tensors, no pickle.

A request goes to a party (a trainer rank, or an engine with all its ranks) in a `Call`; every rank answers with one
reply.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec

from weightsync.boxes import Box
from weightsync.config import SyncConfig
from weightsync.digest import digest_text
from weightsync.doctor.facts import ProcessFacts
from weightsync.errors import ErrorInfo, TransportError
from weightsync.holdings import Holdings
from weightsync.identity import Identity
from weightsync.manifest import Manifest
from weightsync.needs import Needs
from weightsync.orders import Orders
from weightsync.report import LoadSummary
from weightsync.wire import pack, unpack

# ---- looking at a process, at any time ------------------------------------------------------------------------------


class Examine(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """To anybody, also without having opened it: what is your process like? Changes nothing."""

    probe_bytes: int = 0
    """Measure copies of so many bytes; 0: do not."""


class Examined(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    identity: Identity
    rank: int
    facts: ProcessFacts


# ---- opening a weight sync --------------------------------------------------------------------------------------


class Describe(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """To trainers, first: what do you hold?"""

    config: SyncConfig


class Description(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    identity: Identity
    manifest: Manifest
    version: int
    """The last version that this process took part in, 0 if none."""
    epoch: int = 0
    """The highest that this process has heard of."""
    holdings: Holdings | None = None
    """Which parts of which tensors, where the config may use a transport that takes shards."""


class OpenReceiver(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """To engines: this is what will come; record where it lands."""

    config: SyncConfig
    manifest: Manifest
    engine: int
    decided: int = 0
    """The last version on whose commit a coordinator had decided: a rank that applied it commits it now."""


class ReceiverOpened(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    identity: Identity
    rank: int
    load: LoadSummary
    order: tuple[str, ...]
    """Canonical names in the order that keeps least staging open."""
    version: int
    epoch: int = 0
    poisoned: bool = False
    groups: tuple[int, ...] = ()
    """With `skip_unchanged`: `weightsync.unchanged.group_numbers`."""
    needs: Needs | None = None
    """Which slices of which tensors, where the config may use a transport that takes shards."""


class LinkPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One link: a sender rank, some receivers, one transport."""

    id: int
    """Unique within the weight sync."""
    transport: str
    sender: int
    num_receivers: int
    host: str
    token: str
    gpus: tuple[str, ...] = ()
    """UUIDs of the sender's and of each receiver's GPU; "" for one whose weights lie in CPU memory."""
    helpers: tuple[str, ...] = ()
    """Addresses of the helper processes beside the sender and each receiver, where the transport needs such."""
    contents: tuple[str, ...] = ()
    """Where receivers take shards: for each, a key that is equal for equal content. Its digests then go by ids of their own,
    those that follow the link's."""
    shard_plans: tuple[str, ...] = ()
    """Digests of the plans that the shards come from."""

    def content_id(self, receiver: int) -> int:
        """Under which id the digests of what this receiver gets are compared."""
        return self.id + 1 + receiver if self.contents else self.id

    @property
    def num_ids(self) -> int:
        """How many ids the link takes up, its own included."""
        return 1 + len(self.contents)


class OpenSender(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """To trainers: these names are yours to send, over these links."""

    manifest: Manifest
    """Of all trainers together."""
    names: tuple[str, ...]
    links: tuple[LinkPlan, ...]
    keep: bool = False
    """These links come beside those that are open, for engines that came late."""
    orders: dict[int, Orders] = {}
    """Of the links that take shards."""
    gathers: bool = True
    """Whether any link of any trainer takes whole tensors, so that sharded ones must be gathered in each update over all
    links."""


class SenderOpened(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    addresses: tuple[bytes, ...]
    """One per link."""
    stable: tuple[bool, ...]
    details: tuple[str, ...] = ()
    """What each link's transport says of itself."""


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
    parts: dict[int, dict[str, tuple[Box, ...]]] = {}
    """Rank in the engine -> names of which the slices come in parts -> those."""


# ---- one update -------------------------------------------------------------------------------------------------


class Prepare(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    version: int
    staged: bool
    since: int = 0
    """What has not changed since this version may be left out; 0: everything will be sent."""
    verify: bool = False
    """It is the version that everybody has: to engines, say whether you held it."""


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """When a rank did its part of a phase, on its own `time.monotonic()`."""

    began: float = 0.0
    """0: it does not say."""
    seconds: float = 0.0


class Prepared(Timed, tag=True, frozen=True, kw_only=True):
    """What the rank believes; the coordinator compares. `plan_digest` is of the links that it has open."""

    version: int
    """The version it has now."""
    epoch: int
    manifest_digest: str
    plan_digest: str
    poisoned: bool = False
    """Holds mixed weights; a whole update repairs that."""
    changed: bytes | None = None
    """Of a trainer rank: the names that differ from version `since` in what it holds (`weightsync.unchanged`); None: it cannot
    tell."""
    holds: bool = False
    """Of an engine rank: its weights are those of version `since`, and it can do without what has not changed."""


class Transfer(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Send or receive, in the background; answered as a poll is, within `wait_s`."""

    version: int
    wait_s: float = 0.0
    links: tuple[int, ...] | None = None
    """Trainers send over these only; None: over all."""
    apply: bool = False
    """To engines: load it as it comes; answered as `Apply` is, or, where an engine is to be told so apart, Pending."""
    left_out: bytes = b""
    """Names that have not changed and are not sent (`weightsync.unchanged`)."""


class Poll(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """How far are you? Answered within `wait_s`, earlier when there is something to say."""

    wait_s: float = 0.0


class Pending(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Not done yet; `progress` (bytes, or links) shows that something moves."""

    progress: int = 0
    groups: int = 0
    """Of an engine rank: module groups that are whole."""
    doing: str = ""
    """For errors: "sends model.norm.weight", "waits for model.norm.weight of module group model.norm"."""


class Sent(Timed, tag=True, frozen=True, kw_only=True):
    nbytes: int
    content_digests: dict[int, int]
    """Per link, since links may cut tensors differently; by `LinkPlan.content_id`."""
    changed_values: int | None


class Vote(Timed, tag=True, frozen=True, kw_only=True):
    """Everything is here, whole and verified."""

    nbytes: int
    content_digests: dict[int, int]
    """Per link, by `LinkPlan.content_id`."""
    peak_staging_bytes: int


class Apply(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Load the version into the model, in one reload. Engines pause before and stay paused."""

    version: int


class Applied(Timed, tag=True, frozen=True, kw_only=True):
    vote: Vote
    reloads: int
    num_direct: int = 0
    """Module groups that were loaded by copies."""
    reloaded: dict[str, str] = {}
    """The groups that were not: key -> why."""
    num_skipped: int = 0
    """The groups that had not changed and stayed as they were."""


class Commit(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """To all: the version is current. Engines resume; trainers may write their memory again."""

    version: int


class Abort(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Give the update up: forget what came, break the links."""

    hold: bool = False
    """Engines stay paused and must not serve: the others have gone on to the new version."""
    links: tuple[int, ...] | None = None
    """Trainers break these links only; None: all."""


class Close(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The weight sync ends."""


class Ok(Timed, tag=True, frozen=True, kw_only=True):
    pause_s: float = 0.0
    poisoned: bool = False
    """After an abort: the rank holds mixed weights."""


class Failed(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    error: ErrorInfo
    poisoned: bool = False


Request = (
    Examine | Describe | OpenReceiver | OpenSender | Connect | Prepare | Transfer | Poll | Apply | Commit | Abort | Close
)  # fmt: skip
Reply = (
    Examined | Description | ReceiverOpened | SenderOpened | Prepared | Pending | Sent | Vote | Applied | Ok | Failed
)


def applied_by(request: Request) -> int:
    """The version that *request* has an engine load; 0: it has not."""
    match request:
        case Apply(version=version) | Transfer(version=version, apply=True):
            return version
        case _:
            return 0


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it travels. Ranks refuse what is not newer than the last they heard; see `weightsync.fence`."""

    session: str
    """Of the coordinator that sends it; new for each."""
    epoch: int
    number: int
    """Grows with each call."""
    request: Request


_calls = msgspec.msgpack.Decoder(Call)
_replies = msgspec.msgpack.Decoder(Reply)

encode = pack


def plan_digest(links: Iterable[LinkPlan | ReceiverLink]) -> str:
    """Equal for equal links, in this order: those that a trainer has open, or those that an engine was told of."""
    return digest_text(["links-1", list(links)])


def timed(handle: Callable[[Request], Reply], request: Request) -> Reply:
    """A rank's reply; a phase that is done within the call says how long that took."""
    began = time.monotonic()
    reply = handle(request)
    if isinstance(request, Prepare | Commit | Abort) and isinstance(reply, Prepared | Ok):
        return msgspec.structs.replace(reply, began=began, seconds=time.monotonic() - began)
    return reply


def answer(handle: Callable[[Call], Reply], payload: bytes) -> bytes:
    """One rank's encoded reply to an encoded call; a damaged call is answered, too."""
    try:
        call = decode_call(payload)
    except TransportError as error:
        return encode(Failed(error=ErrorInfo.of(error)))
    return encode(handle(call))


def decode_call(payload: bytes) -> Call:
    """Raises TransportError where *payload* is no call, or damaged."""
    return unpack(payload, _calls)


def decode_reply(payload: bytes) -> Reply:
    """Raises TransportError where *payload* is no reply, or damaged."""
    reply: Reply = unpack(payload, _replies)
    return reply
