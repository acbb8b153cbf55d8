"""The routes of sharded links: what a plan (`weightsync.shardplan`) asks of every sender, and how it comes to every receiver.

Made by whoever opens links, once an epoch, for the engine ranks that take slices. Twins, ranks of equal needs, take the same
from the same senders, so that it is packed once for all replicas, and one that comes late joins them.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from weightsync import messages as m
from weightsync.boxes import Box
from weightsync.chunk import aligned
from weightsync.cuts import Ints
from weightsync.digest import digest_text
from weightsync.errors import ConfigError
from weightsync.manifest import Manifest, TensorMeta
from weightsync.needs import Needs
from weightsync.orders import Order, Orders, Piecewise, box_name
from weightsync.pulls import Pulls
from weightsync.shardplan import StagingLayout
from weightsync.shardplanner import plan_shards

T = TypeVar("T")

Rank = tuple[str, int]
"""(engine, rank in the engine)."""
Item = tuple[str, Box, str, int]
"""(tensor, box of the local tensor, the receiver's name of the box that it is part of, first byte in that)."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one receiver takes from one sender."""

    items: tuple[Item, ...]
    """In order."""
    nbytes: int
    key: str
    """Equal for receivers that get the same bytes of a version from a sender."""

    @classmethod
    def of(cls, items: Sequence[Item], nbytes: int) -> Share:
        return cls(tuple(items), nbytes, digest_text(["share-1", *items]))


@dataclass(frozen=True, slots=True)
class Route:
    """How one engine rank gets its slices."""

    needs: Needs
    shares: tuple[Share, ...]
    """Per sender."""
    parts: Mapping[str, tuple[Box, ...]]
    """Names of which a needed box comes in parts -> those."""
    nbytes: int
    """What it needs, as it is staged."""
    plan_digest: str
    apart: bool = False
    """Whatever comes from several senders, or in several pieces, is cut so that each is a tensor of its own."""


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """For what makes millions of objects without cycles, through which Python's collector would look again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@uncollected()
def plan_routes(
    manifest: Manifest,
    trainers: Sequence[m.Description],
    ranks: Mapping[Rank, m.ReceiverOpened],
    known: Sequence[Route] = (),
    apart: Collection[Rank] = (),
) -> dict[Rank, Route]:
    """A route for each of *ranks*; those whose needs are equal have one, a *known* one where there is such.

    Args:
        apart: ranks of which a transport takes boxes (`weightsync.interfaces.SenderTransport.takes_boxes`).

    Raises:
        ManifestError: a rank needs what no trainer holds. AgreementError: trainers describe a tensor differently.
        ConfigError: a party did not say what it holds or needs.
    """
    needs = {rank: _said(opened.needs, opened.load.rank) for rank, opened in ranks.items()}
    keys = {rank: (of.digest, rank in apart) for rank, of in needs.items()}
    routes = {(route.needs.digest, route.apart): route for route in known}
    fresh = list({key: rank for rank, key in reversed(keys.items()) if key not in routes}.values())
    if not fresh:
        return {rank: routes[key] for rank, key in keys.items()}
    plan = plan_shards(
        manifest,
        [_said(trainer.holdings, f"trainer {i}") for i, trainer in enumerate(trainers)],
        [needs[rank] for rank in fresh],
        trainer_nodes=[trainer.identity.node for trainer in trainers],
        engine_nodes=[ranks[rank].identity.node for rank in fresh],
        engine_names=[ranks[rank].load.rank for rank in fresh],
    )
    for j, rank in enumerate(fresh):
        pulls = list(plan.of_receiver(j))
        split = _split(pulls, apart=rank in apart)
        routes[keys[rank]] = Route(
            needs=needs[rank],
            shares=tuple(
                itertools.starmap(Share.of, _items(pulls, plan.layout(j), split, plan.metas, plan.num_senders))
            ),
            parts=_parts(pulls, split),
            nbytes=_staged_bytes(manifest, needs[rank]),
            plan_digest=plan.digest,
            apart=rank in apart,
        )
    return {rank: routes[key] for rank, key in keys.items()}


def _said(said: T | None, who: str) -> T:
    if said is None:
        raise ConfigError(
            f"{who} was not asked for its shards: no rule of the config names a transport that takes them",
            key="transport",
        )
    return said


def _staged_bytes(manifest: Manifest, needs: Needs) -> int:
    return sum(
        aligned(box.numel * manifest.by_name[name].torch_dtype.itemsize)
        for name, boxes in needs.boxes.items()
        for box in boxes
    )


def _split(found: Sequence[Pulls], *, apart: bool) -> set[tuple[int, int]]:
    """(number of the tensor, needed box) of what a pull would fill in several runs, or, *apart*, several pulls would: each
    pull is a tensor of its own there."""
    split: set[tuple[int, int]] = set()
    for pulls in found:
        rows = pulls.rows
        if apart:
            _, which, times = np.unique(rows[["name", "need"]], return_inverse=True, return_counts=True)
            rows = rows[times[which.reshape(-1)] > 1]
        else:
            rows = rows[rows["staged_runs"] > 1]
        split.update(zip(rows["name"].tolist(), rows["need"].tolist(), strict=True))
    return split


def _parts(found: Sequence[Pulls], split: set[tuple[int, int]]) -> dict[str, tuple[Box, ...]]:
    parts: dict[str, list[Box]] = {}
    if split:
        for pulls in found:
            for pull, number in zip(pulls, pulls.rows["name"].tolist(), strict=True):
                if (number, pull.need) in split:
                    parts.setdefault(pull.name, []).append(pull.box)
    return {name: tuple(sorted(boxes)) for name, boxes in parts.items()}


def _items(
    found: Sequence[Pulls],
    layout: StagingLayout,
    split: set[tuple[int, int]],
    metas: Sequence[TensorMeta],
    num_senders: int,
) -> Iterable[tuple[list[Item], int]]:
    """Per sender, what the receiver takes from it, group by group, and its bytes.

    A plan has millions of pulls: what is alike in many module groups, the boxes of local tensors, is made once.
    """
    items: list[list[Item]] = [[] for _ in range(num_senders)]
    nbytes = np.zeros(num_senders, dtype=np.int64)
    known: dict[bytes, list[Box]] = {}
    num_dims = np.array([len(meta.shape) for meta in metas], dtype=np.int64)
    for pulls in found:
        names, labels, at = _labels(pulls, layout, split)
        boxes = _local_boxes(pulls, num_dims, known)
        taken = list(zip(names, boxes, labels, at, strict=True))
        senders = pulls.rows["sender"]
        np.add.at(nbytes, senders, pulls.rows["nbytes"])
        edges = [0, *(np.flatnonzero(senders[1:] != senders[:-1]) + 1).tolist(), len(senders)]
        for start, end in itertools.pairwise(edges):
            if end > start:
                items[int(senders[start])] += taken[start:end]
    return zip(items, nbytes.tolist(), strict=True)


def _local_boxes(pulls: Pulls, num_dims: Ints, known: dict[bytes, list[Box]]) -> list[Box]:
    """Of each pull, the box of its sender's local tensor; *known* are those of other module groups."""
    columns = np.column_stack([num_dims[pulls.rows["name"]], pulls.rows["local_start"], pulls.rows["size"]])
    key = columns.tobytes()
    if key not in known:
        unique, at = np.unique(columns, axis=0, return_inverse=True)
        width = pulls.rows["size"].shape[1]
        boxes = [
            Box(tuple(row[1 + width - row[0] : 1 + width]), tuple(row[1 + 2 * width - row[0] :]))
            for row in unique.tolist()
        ]
        known[key] = [boxes[i] for i in at.reshape(-1).tolist()]
    return known[key]


def _labels(pulls: Pulls, layout: StagingLayout, split: set[tuple[int, int]]) -> tuple[list[str], list[str], list[int]]:
    """Of each pull, its tensor, the receiver's name of the box that it is part of, and the first byte in that."""
    rows, metas = pulls.rows, pulls.metas
    pairs, which = np.unique(np.stack([rows["name"], rows["need"]]), axis=1, return_inverse=True)
    of_pair = [(metas[number], number, need) for number, need in pairs.T.tolist()]
    names = [meta.name for meta, _, _ in of_pair]
    labels = [box_name(meta, layout.boxes[meta.name][need]) for meta, _, need in of_pair]
    starts = np.array([layout.offsets[meta.name][need] for meta, _, need in of_pair], dtype=np.int64)
    which = which.reshape(-1)
    each = which.tolist()
    found = [labels[i] for i in each]
    at = (rows["staged_offset"] - starts[which]).tolist()
    if split:
        parted = {i for i, (_, number, need) in enumerate(of_pair) if (number, need) in split}
        for row in (row for row, i in enumerate(each) if i in parted):
            meta = metas[rows["name"][row]]
            skip = rows["size"].shape[1] - len(meta.shape)
            start, size = (tuple(rows[field][row].tolist()[skip:]) for field in ("start", "size"))
            found[row], at[row] = box_name(meta, Box(start, size)), 0
    return [names[i] for i in each], found, at


@uncollected()
def orders_of(shares: Sequence[Share], order: Sequence[str]) -> Orders:
    """What a sender is told about a link: *shares* of each of the link's receivers; tensors are sent in *order*."""
    streams: dict[str, list[int]] = {}
    for i, share in enumerate(shares):
        streams.setdefault(share.key, []).append(i)
    targets: dict[str, dict[Box, list[Piecewise]]] = {}
    for number, receivers in enumerate(streams.values()):
        for name, local, label, start in shares[receivers[0]].items:
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
