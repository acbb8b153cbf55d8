"""The links of one epoch: which there are to be (pure functions), and which are open."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weightsync import messages as m
from weightsync.calls import Calls
from weightsync.config import SyncConfig
from weightsync.identity import Identity, check_nccl
from weightsync.manifest import Manifest
from weightsync.plan import choose_transport
from weightsync.ranks import receivers
from weightsync.report import LinkRow


@dataclass(frozen=True, slots=True)
class Link:
    """One link and its receiving ends, in the order of their indices: (engine, rank in the engine)."""

    plan: m.LinkPlan
    receivers: tuple[tuple[str, int], ...]
    pairs: tuple[str, ...]
    """"trainer 0 -> engine 1 rank 0", for reports."""


def plan_links(
    config: SyncConfig,
    trainers: Sequence[m.Description],
    owned: Sequence[tuple[str, ...]],
    engines: Mapping[str, Sequence[m.ReceiverOpened]],
    ids: Iterable[int],
) -> list[Link]:
    """One link per trainer that sends something and per transport to its receivers.

    Args:
        owned: per trainer the names that it sends.
        ids: numbers for the links, fresh ones.

    Raises:
        ConfigError: no rule of the config fits a pair. AgreementError: ranks of a link between GPUs differ in NCCL, or in
            a variable of its environment; both are named.
    """
    ends: dict[tuple[int, str], dict[str, dict[int, m.ReceiverOpened]]] = {}
    for sender, description in enumerate(trainers):
        if not owned[sender]:
            continue
        for party, ranks in engines.items():
            for rank in ranks:
                name = choose_transport(config, description.identity, rank.identity)
                ends.setdefault((sender, name), {}).setdefault(party, {})[rank.rank] = rank
    return [
        _link(sender, trainers[sender].identity, transport, of_party, id)
        for ((sender, transport), of_party), id in zip(ends.items(), ids, strict=False)
    ]


def _link(
    sender: int, identity: Identity, transport: str, ends: Mapping[str, Mapping[int, m.ReceiverOpened]], id: int
) -> Link:
    order = receivers(ends)
    opened = [ends[party][rank] for party, rank in order]
    gpus = (identity.gpu, *(rank.identity.gpu for rank in opened))
    if transport == "broadcast" and all(gpus):
        check_nccl({f"trainer {sender}": identity} | {rank.load.rank: rank.identity for rank in opened})
    return Link(
        m.LinkPlan(
            id=id,
            transport=transport,
            sender=sender,
            num_receivers=len(order),
            host=identity.address,
            token=secrets.token_hex(16),
            gpus=gpus,
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

    def open(
        self,
        manifest: Manifest,
        trainers: Mapping[str, m.Description],
        owned: Sequence[tuple[str, ...]],
        engines: Mapping[str, Sequence[m.ReceiverOpened]],
    ) -> tuple[int, ...]:
        """Open links to *engines*, beside those that are open: plan, then senders, then both ends at once.

        Returns:
            The ids of the new links.

        Raises:
            WeightSyncError: as the ranks say.
        """
        keep = bool(self._links)
        held = list(trainers.values())
        links = plan_links(self._config, held, owned, engines, itertools.count(self.next_id))
        self.next_id += len(links)
        of_sender = {
            party: tuple(link.plan for link in links if link.plan.sender == i) for i, party in enumerate(trainers)
        }
        senders = [party for party in trainers if of_sender[party] or not keep]
        names = dict(zip(trainers, owned, strict=True))
        opened = self._calls.ask(
            {
                party: m.OpenSender(manifest=manifest, names=names[party], links=of_sender[party], keep=keep)
                for party in senders
            }
        )
        self._owned = owned
        for party in senders:
            (reply,) = opened[party]
            assert isinstance(reply, m.SenderOpened), reply
            for plan, address, stable in zip(of_sender[party], reply.addresses, reply.stable, strict=True):
                self._addresses[plan.id], self._stable[plan.id] = address, stable
        self._links.update({link.plan.id: link for link in links})
        requests: dict[str, m.Request] = {party: m.Connect() for party in senders}
        for party in engines:
            requests[party] = m.Connect(links=self._ends(party))
        self._calls.ask(requests)
        return tuple(link.plan.id for link in links)

    def plan(self, id: int) -> m.LinkPlan:
        return self._links[id].plan

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
                nbytes=sum(manifest.by_name[name].nbytes for name in self._owned[link.plan.sender]),
            )
            for link in self._links.values()
            if any(party in parties for party, _ in link.receivers)
        )

    def transports(self) -> dict[str, str]:
        """ "trainer 0 -> engine 1 rank 0": name of the transport."""
        return {pair: link.plan.transport for link in self._links.values() for pair in link.pairs}

    def _ends(self, party: str) -> tuple[m.ReceiverLink, ...]:
        return receiver_links(party, list(self._links.values()), self._addresses, self._stable, self._owned)
