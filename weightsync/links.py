"""The links of one epoch: which there are to be (pure functions), and which are open."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weightsync import messages as m
from weightsync.calls import Calls
from weightsync.config import SyncConfig
from weightsync.identity import Identity, check_nccl
from weightsync.manifest import Manifest
from weightsync.plan import choose_transports
from weightsync.ranks import receivers
from weightsync.registry import carrier_of, needs_helpers, takes_boxes, takes_shards
from weightsync.report import LinkRow
from weightsync.routes import Rank, Route, orders_of, plan_routes

_log = logging.getLogger("weightsync")


@dataclass(frozen=True, slots=True)
class Link:
    """One link and its receiving ends, in the order of their indices: (engine, rank in the engine)."""

    plan: m.LinkPlan
    receivers: tuple[tuple[str, int], ...]
    pairs: tuple[str, ...]
    """"trainer 0 -> engine 1 rank 0", for reports."""


def _warn_of_detours(
    trainers: Sequence[m.Description],
    ranks: Mapping[Rank, m.ReceiverOpened],
    transports: Mapping[tuple[int, Rank], str],
) -> None:
    """Say for whom bytes leave the GPU that both ends are on, once for all pairs."""
    pairs = [
        (trainers[i].identity, ranks[place].identity)
        for (i, place), name in transports.items()
        if name == "shared_memory"
    ]
    without = [end for of, to in pairs if of.gpu and of.gpu == to.gpu for end in (of, to) if not end.cupy]
    if without:
        _log.warning(
            "transport auto: bytes between processes on one GPU travel through CPU memory (shared_memory), because %s has no "
            'cupy; pip install "weightsync[cuda13]" (or cuda12) for cuda_ipc',
            " and ".join(dict.fromkeys(f"the process ({end})" for end in without[:2])),
        )


def plan_links(
    trainers: Sequence[m.Description],
    owned: Sequence[tuple[str, ...]],
    engines: Mapping[str, Sequence[m.ReceiverOpened]],
    transports: Mapping[tuple[int, Rank], str],
    first_id: int,
    routes: Mapping[Rank, Route] = {},
    helpers: Mapping[str, str] = {},
) -> list[Link]:
    """One link per trainer that sends something and per transport to its receivers; over one that takes boxes, per set of
    slices.

    Args:
        owned: per trainer the names that it sends.
        transports: of every pair (`weightsync.plan.choose_transports`).
        first_id: numbers from here on are fresh ones for links.
        routes: of the receivers that take shards; a trainer of which one takes nothing has no link to it.
        helpers: address of the helper process of every rank that needs one.

    Raises:
        AgreementError: ranks of a link between GPUs differ in NCCL, or in a variable of its environment; both are named.
    """
    ends: dict[tuple[int, str, str], dict[str, dict[int, m.ReceiverOpened]]] = {}
    for sender in range(len(trainers)):
        for party, ranks in engines.items():
            for rank in ranks:
                route = routes.get((party, rank.rank))
                if route.shares[sender].items if route is not None else owned[sender]:
                    name = transports[sender, (party, rank.rank)]
                    key = route.shares[sender].key if route is not None and takes_boxes(name) else ""
                    ends.setdefault((sender, name, key), {}).setdefault(party, {})[rank.rank] = rank
    links: list[Link] = []
    for (sender, transport, _), of_party in ends.items():
        links.append(_link(sender, trainers[sender].identity, transport, of_party, first_id, routes, helpers))
        first_id += links[-1].plan.num_ids
    return links


def _link(
    sender: int,
    identity: Identity,
    transport: str,
    ends: Mapping[str, Mapping[int, m.ReceiverOpened]],
    id: int,
    routes: Mapping[Rank, Route],
    helpers: Mapping[str, str],
) -> Link:
    order = receivers(ends)
    opened = [ends[party][rank] for party, rank in order]
    gpus = (identity.gpu, *(rank.identity.gpu for rank in opened))
    if carrier_of(transport) == "broadcast" and all(gpus):
        check_nccl({f"trainer {sender}": identity} | {rank.load.rank: rank.identity for rank in opened})
    taken = [routes[rank] for rank in order if rank in routes]
    return Link(
        m.LinkPlan(
            id=id,
            transport=transport,
            sender=sender,
            num_receivers=len(order),
            host=identity.address,
            token=secrets.token_hex(16),
            gpus=gpus,
            helpers=tuple(helpers[r] for r in (f"trainer {sender}", *(o.load.rank for o in opened)))
            if needs_helpers(transport)
            else (),
            contents=tuple(route.shares[sender].key for route in taken),
            shard_plans=tuple(sorted({route.plan_digest for route in taken})),
        ),
        order,
        tuple(f"trainer {sender} -> {rank.load.rank}" for rank in opened),
    )


def receiver_links(
    party: str,
    links: Sequence[Link],
    addresses: Mapping[int, bytes],
    stable: Mapping[int, bool],
    owned: Sequence[tuple[str, ...]],
) -> tuple[m.ReceiverLink, ...]:
    """The ends of *links* that lie in the engine *party*."""
    return tuple(
        m.ReceiverLink(
            plan=link.plan,
            address=addresses[link.plan.id],
            names=owned[link.plan.sender],
            stable=stable[link.plan.id],
            receiver={rank: index for index, (of, rank) in enumerate(link.receivers) if of == party},
        )
        for link in links
        if any(of == party for of, _ in link.receivers)
    )


class Links:
    """The links that are open. Not thread-safe."""

    def __init__(self, calls: Calls, config: SyncConfig, *, first_id: int = 1) -> None:
        self.next_id = first_id
        self._calls, self._config = calls, config
        self._links: dict[int, Link] = {}
        self._addresses: dict[int, bytes] = {}
        self._stable: dict[int, bool] = {}
        self._owned: Sequence[tuple[str, ...]] = ()
        self._routes: dict[Rank, Route] = {}
        self._details: dict[int, str] = {}

    def open(
        self,
        manifest: Manifest,
        trainers: Mapping[str, m.Description],
        owned: Sequence[tuple[str, ...]],
        engines: Mapping[str, Sequence[m.ReceiverOpened]],
    ) -> tuple[int, ...]:
        """Open links to *engines*, beside those that are open: plan (with helper processes for those that take shards), then
        senders, then both ends at once.

        Returns:
            The ids of the new links.

        Raises:
            WeightSyncError: as the ranks say.
        """
        keep = bool(self._links)
        held = list(trainers.values())
        ranks = {(party, rank.rank): rank for party, of_party in engines.items() for rank in of_party}
        transports = choose_transports(
            self._config,
            [trainer.identity for trainer in held],
            {place: rank.identity for place, rank in ranks.items()},
        )
        if self._config.transport == "auto":
            _warn_of_detours(held, ranks, transports)
        takers = {place: rank for place, rank in ranks.items() if takes_shards(transports[0, place])}
        apart = {place for (_, place), name in transports.items() if place in takers and takes_boxes(name)}
        routes = plan_routes(manifest, held, takers, list(self._routes.values()), apart) if takers else {}
        self._routes.update(routes)
        helpers = self._helpers(trainers, takers, routes, transports)
        links = plan_links(held, owned, engines, transports, self.next_id, routes, helpers)
        self.next_id += sum(link.plan.num_ids for link in links)
        orders = {
            link.plan.id: orders_of(
                [routes[rank].shares[link.plan.sender] for rank in link.receivers], ranks[link.receivers[0]].order
            )
            for link in links
            if link.plan.contents
        }
        of_sender = {
            party: tuple(link.plan for link in links if link.plan.sender == i) for i, party in enumerate(trainers)
        }
        senders = [party for party in trainers if of_sender[party] or not keep]
        names = dict(zip(trainers, owned, strict=True))
        opened = self._calls.ask(
            {
                party: m.OpenSender(
                    manifest=manifest,
                    names=names[party],
                    links=of_sender[party],
                    keep=keep,
                    orders={plan.id: orders[plan.id] for plan in of_sender[party] if plan.id in orders},
                    gathers=any(not link.plan.contents for link in (*self._links.values(), *links)),
                )
                for party in senders
            }
        )
        self._owned = owned
        for party in senders:
            (reply,) = opened[party]
            assert isinstance(reply, m.SenderOpened), reply
            for plan, address, stable in zip(of_sender[party], reply.addresses, reply.stable, strict=True):
                self._addresses[plan.id], self._stable[plan.id] = address, stable
            self._details.update(zip((plan.id for plan in of_sender[party]), reply.details, strict=False))
        self._links.update({link.plan.id: link for link in links})
        requests: dict[str, m.Request] = {party: m.Connect() for party in senders}
        for party in engines:
            parts = {rank: dict(route.parts) for (of, rank), route in routes.items() if of == party and route.parts}
            requests[party] = m.Connect(links=self._ends(party), parts=parts)
        self._calls.ask(requests)
        return tuple(link.plan.id for link in links)

    def _helpers(
        self,
        trainers: Mapping[str, m.Description],
        takers: Mapping[Rank, m.ReceiverOpened],
        routes: Mapping[Rank, Route],
        transports: Mapping[tuple[int, Rank], str],
    ) -> Mapping[str, str]:
        """Helper processes of both ends, where shards are taken over a transport that needs such."""
        identities: dict[str, Identity] = {}
        for i, (party, trainer) in enumerate(trainers.items()):
            for place, rank in takers.items():
                if routes[place].shares[i].items and needs_helpers(transports[i, place]):
                    identities.update({party: trainer.identity, rank.load.rank: rank.identity})
        return self._calls.helpers(identities) if identities else {}

    def plan(self, id: int) -> m.LinkPlan:
        return self._links[id].plan

    def contents(self, ids: Iterable[int]) -> dict[int, tuple[int, str]]:
        """Of these links, each id of a content digest -> (trainer, key that is equal for equal content)."""
        found: dict[int, tuple[int, str]] = {}
        for plan in (self._links[id].plan for id in ids):
            if plan.contents:
                keys = [f"{plan.transport} {key}" for key in plan.contents]
                found.update({plan.content_id(i): (plan.sender, key) for i, key in enumerate(keys)})
            else:
                found[plan.id] = plan.sender, plan.transport
        return found

    @property
    def ids(self) -> tuple[int, ...]:
        """Of all links that are open."""
        return tuple(self._links)

    def staging_bytes(self, engines: Mapping[str, Sequence[m.ReceiverOpened]], whole: int) -> int:
        """What the rank needs that has to stage most: its slices, or, where it takes whole tensors, *whole*."""
        routes = [self._routes.get((party, rank.rank)) for party, ranks in engines.items() for rank in ranks]
        return max((whole if route is None else route.nbytes for route in routes), default=0)

    def forget(self, ids: Iterable[int]) -> None:
        """These links were broken."""
        for id in ids:
            del self._links[id], self._addresses[id], self._stable[id]

    def stable(self, engines: Iterable[str]) -> bool:
        """Whether what the links to *engines* carry may be used where it lies."""
        parties = set(engines)
        return all(self._stable[id] for id, link in self._links.items() if any(p in parties for p, _ in link.receivers))

    def digests(self, trainers: Iterable[str], engines: Iterable[str]) -> dict[str, str]:
        """Per party, the digest of the links that it must have open."""
        digests = {
            party: m.plan_digest(link.plan for link in self._links.values() if link.plan.sender == i)
            for i, party in enumerate(trainers)
        }
        return digests | {party: m.plan_digest(self._ends(party)) for party in engines}

    def rows(self, manifest: Manifest, engines: Iterable[str]) -> tuple[LinkRow, ...]:
        """The plan of an update of *engines*, for reports."""
        parties = set(engines)
        return tuple(
            LinkRow(
                transport=link.plan.transport,
                sender=f"trainer {link.plan.sender}",
                receivers=tuple(pair.partition(" -> ")[2] for pair in link.pairs),
                nbytes=self._nbytes(link, manifest),
            )
            for link in self._links.values()
            if any(party in parties for party, _ in link.receivers)
        )

    def _nbytes(self, link: Link, manifest: Manifest) -> int:
        """What goes over the link to a receiver, at most."""
        if link.plan.contents:
            return max(self._routes[rank].shares[link.plan.sender].nbytes for rank in link.receivers)
        return sum(manifest.by_name[name].nbytes for name in self._owned[link.plan.sender])

    def transports(self) -> dict[str, str]:
        """ "trainer 0 -> engine 1 rank 0": name of the transport."""
        return {pair: link.plan.transport for link in self._links.values() for pair in link.pairs}

    def details(self) -> dict[str, str]:
        """ "trainer 0 -> engine 1 rank 0": what its transport has chosen for itself; pairs without a choice are left out."""
        return {
            pair: said for id, link in self._links.items() if (said := self._details.get(id)) for pair in link.pairs
        }

    def _ends(self, party: str) -> tuple[m.ReceiverLink, ...]:
        return receiver_links(party, list(self._links.values()), self._addresses, self._stable, self._owned)
