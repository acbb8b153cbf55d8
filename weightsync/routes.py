"""The routes of sharded links: what a plan (`weightsync.shardplan`) asks of every sender, and how it comes to every receiver.

Made by whoever opens links, once an epoch, for the engine ranks that take slices. Twins, ranks of equal needs, take the same
from the same senders, so that it is packed once for all replicas, and one that comes late joins them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from weightsync import messages as m
from weightsync.boxes import Box
from weightsync.chunk import aligned
from weightsync.digest import digest_text
from weightsync.errors import ConfigError
from weightsync.manifest import Manifest
from weightsync.needs import Needs
from weightsync.orders import Order, Orders, Piecewise, box_name
from weightsync.shardplan import ShardPlan
from weightsync.shardplanner import plan_shards

T = TypeVar("T")

Rank = tuple[str, int]
"""(engine, rank in the engine)."""
Items = tuple[tuple[str, Box, str, int], ...]
"""What one receiver takes from one sender, in order: (tensor, box of the local tensor, the receiver's name of the box that
it is part of, first byte in that)."""


@dataclass(frozen=True, slots=True)
class Route:
    """How one engine rank gets its slices."""

    needs: Needs
    items: tuple[Items, ...]
    """Per sender."""
    parts: Mapping[str, tuple[Box, ...]]
    """Names of which a needed box comes in parts -> those."""
    nbytes: int
    """What it needs, as it is staged."""
    plan_digest: str


def plan_routes(
    manifest: Manifest,
    trainers: Sequence[m.Description],
    ranks: Mapping[Rank, m.ReceiverOpened],
    known: Sequence[Route] = (),
) -> dict[Rank, Route]:
    """A route for each of *ranks*; those whose needs are equal have one, a *known* one where there is such.

    Raises:
        ManifestError: a rank needs what no trainer holds. AgreementError: trainers describe a tensor differently.
        ConfigError: a party did not say what it holds or needs.
    """
    needs = {rank: _said(opened.needs, opened.load.rank) for rank, opened in ranks.items()}
    routes = {route.needs.digest: route for route in known}
    fresh = list({of.digest: rank for rank, of in reversed(needs.items()) if of.digest not in routes}.values())
    if not fresh:
        return {rank: routes[of.digest] for rank, of in needs.items()}
    plan = plan_shards(
        manifest,
        [_said(trainer.holdings, f"trainer {i}") for i, trainer in enumerate(trainers)],
        [needs[rank] for rank in fresh],
        trainer_nodes=[trainer.identity.node for trainer in trainers],
        engine_nodes=[ranks[rank].identity.node for rank in fresh],
        engine_names=[ranks[rank].load.rank for rank in fresh],
    )
    for j, rank in enumerate(fresh):
        split = _split(plan, j)
        routes[needs[rank].digest] = Route(
            needs=needs[rank],
            items=_items(plan, j, split),
            parts=_parts(plan, j, split),
            nbytes=_staged_bytes(manifest, needs[rank]),
            plan_digest=plan.digest,
        )
    return {rank: routes[of.digest] for rank, of in needs.items()}


def _said(said: T | None, who: str) -> T:
    if said is None:
        raise ConfigError(
            f"{who} was not asked for its shards: no rule of the config names sharded_rdt", key="transport"
        )
    return said


def _staged_bytes(manifest: Manifest, needs: Needs) -> int:
    return sum(
        aligned(box.numel * manifest.by_name[name].torch_dtype.itemsize)
        for name, boxes in needs.boxes.items()
        for box in boxes
    )


def _split(plan: ShardPlan, receiver: int) -> set[tuple[int, int]]:
    """(number of the tensor, needed box) of what a pull would fill in several runs: each pull is a tensor of its own there."""
    found: set[tuple[int, int]] = set()
    for pulls in plan.of_receiver(receiver):
        rows = pulls.rows[pulls.rows["staged_runs"] > 1]
        found.update(zip(rows["name"].tolist(), rows["need"].tolist(), strict=True))
    return found


def _parts(plan: ShardPlan, receiver: int, split: set[tuple[int, int]]) -> dict[str, tuple[Box, ...]]:
    found: dict[str, list[Box]] = {}
    if split:
        for pulls in plan.of_receiver(receiver):
            for pull, number in zip(pulls, pulls.rows["name"].tolist(), strict=True):
                if (number, pull.need) in split:
                    found.setdefault(pull.name, []).append(pull.box)
    return {name: tuple(sorted(boxes)) for name, boxes in found.items()}


def _items(plan: ShardPlan, receiver: int, split: set[tuple[int, int]]) -> tuple[Items, ...]:
    """Per sender, what the receiver takes from it, group by group."""
    found: list[list[tuple[str, Box, str, int]]] = [[] for _ in range(plan.num_senders)]
    layout = plan.layout(receiver)
    fields = ("sender", "name", "need", "start", "size", "local_start", "staged_offset")
    for pulls in plan.of_receiver(receiver):
        for row in zip(*(pulls.rows[field].tolist() for field in fields), strict=True):
            sender, number, need, start, size, local_start, staged = row
            meta = plan.metas[number]
            skip = len(size) - len(meta.shape)
            size = tuple(size[skip:])
            if (number, need) in split:
                label, at = box_name(meta, Box(tuple(start[skip:]), size)), 0
            else:
                label = box_name(meta, layout.boxes[meta.name][need])
                at = staged - layout.offsets[meta.name][need]
            found[sender].append((meta.name, Box(tuple(local_start[skip:]), size), label, at))
    return tuple(map(tuple, found))


def orders_of(items: Sequence[Items], order: Sequence[str]) -> Orders:
    """What a sender is told about a link: *items* of each of the link's receivers; tensors are sent in *order*."""
    streams: dict[Items, list[int]] = {}
    for i, of_receiver in enumerate(items):
        streams.setdefault(of_receiver, []).append(i)
    targets: dict[str, dict[Box, list[Piecewise]]] = {}
    for number, of_stream in enumerate(streams):
        for name, local, label, start in of_stream:
            targets.setdefault(name, {}).setdefault(local, []).append(Piecewise(number, label, start))
    return Orders(
        tuple(map(tuple, streams.values())),
        tuple(
            Order(name, local, tuple(of_box))
            for name in order
            if name in targets
            for local, of_box in targets[name].items()
        ),
    )


def content_key(items: Items) -> str:
    """Equal for receivers that get the same bytes of a version from a sender."""
    return digest_text(["items-1", [(name, box.start, box.size, label, start) for name, box, label, start in items]])
