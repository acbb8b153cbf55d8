"""Make a `ShardPlan` from what trainer ranks hold (`weightsync.holdings`) and engine ranks need (`weightsync.needs`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from weightsync.balance import Lot, share_out
from weightsync.boxes import Box
from weightsync.chunk import aligned
from weightsync.cuts import Cut, Hole, Ints, Owned, cut
from weightsync.errors import AgreementError, ManifestError
from weightsync.holdings import Held, Holdings, Place, parts_of
from weightsync.loadmap import ModuleGroup, layer_groups
from weightsync.manifest import Manifest, TensorMeta
from weightsync.needs import Needs
from weightsync.pulls import Entry
from weightsync.shardplan import Alike, ShardPlan, StagingLayout
from weightsync.staging import regroup


def plan_shards(
    manifest: Manifest,
    holdings: Sequence[Holdings],
    needs: Sequence[Needs],
    *,
    groups: Sequence[ModuleGroup] | None = None,
    trainer_nodes: Sequence[str] | None = None,
    engine_nodes: Sequence[str] | None = None,
    engine_names: Sequence[str] | None = None,
) -> ShardPlan:
    """The plan for trainer ranks with these holdings and engine ranks with these needs. The same everywhere.

    Args:
        groups: of all engine ranks together (`weightsync.needs.common_groups`); default one a decoder layer.
        trainer_nodes, engine_nodes: where the ranks are; pairs on one node are preferred, within 5 % of balance.
        engine_names: what errors call the engine ranks.

    Raises:
        ManifestError: an engine rank needs a slice that nobody holds; or what is held or needed is not in the manifest.
        AgreementError: two trainer ranks announce a tensor differently.
    """
    if groups is None:
        groups = layer_groups(manifest)
    names = engine_names or [f"engine rank {j}" for j in range(len(needs))]
    metas, keys, group_of = _ordered(manifest, groups)
    members = _classes(needs)
    classes = [needs[js[0]] for js in members]
    for alike, js in zip(classes, members, strict=True):
        _check_needs(manifest, alike, names[js[0]])
    patterns = _patterns(manifest, metas, _Owners(manifest, holdings), classes)
    num_dims = max((len(meta.shape) for meta in metas), default=0) or 1
    for pattern in patterns:
        _cut(pattern, metas, num_dims, {c: names[members[c][0]] for c in pattern.boxes})
    sender_bytes = _choose(patterns, members, len(holdings), trainer_nodes, engine_nodes)
    layouts = [_layout(metas, group_of, len(keys), alike) for alike in classes]
    entries = _entries(patterns, classes, layouts, metas, group_of, len(keys))
    content = [
        manifest.digest, keys, [(m.name, int(g)) for m, g in zip(metas, group_of, strict=True)], members,
        [(p.names, sorted((c, x.content()) for c, x in p.cuts.items())) for p in patterns],
    ]  # fmt: skip
    return ShardPlan(
        metas,
        keys,
        [
            Alike(alike, tuple(js), layout, of_groups)
            for alike, js, layout, of_groups in zip(classes, members, layouts, entries, strict=True)
        ],
        sender_bytes,
        content,
    )


@dataclass(eq=False, slots=True)
class _Pattern:
    """Tensors that are alike, and their cut for each class that needs them."""

    itemsize: int
    owned: list[Owned]
    boxes: dict[int, tuple[Box, ...]]
    names: list[int] = field(default_factory=list)
    cuts: dict[int, Cut] = field(default_factory=dict)


class _Owners:
    """Per tensor, who holds which part. Parts that are alike are numbered, so that tensors can be compared."""

    def __init__(self, manifest: Manifest, holdings: Sequence[Holdings]) -> None:
        self._manifest = manifest
        self._numbers: dict[object, int] = {}
        self._parts: list[list[Owned]] = []
        self.of: dict[str, list[int]] = {}
        """Canonical name -> numbers, in the order of ranks."""
        first: dict[str, tuple[Held, int]] = {}
        for number, (tensors, ranks) in enumerate(_tables(holdings)):
            for name, held in self._canonical(tensors).items():
                known, rank = first.setdefault(name, (held, ranks[0]))
                if (known.shape, known.dtype) != (held.shape, held.dtype):
                    raise AgreementError(
                        f"trainer {rank} holds {name} as {known.dtype} {list(known.shape)}, trainer {ranks[0]} as "
                        f"{held.dtype} {list(held.shape)}",
                        rank=f"trainer {ranks[0]}",
                        field=name,
                    )
                key = (number, held.mesh, held.placements, held.shape)
                found = self._numbers.get(key)
                if found is None:
                    found = self._numbers[key] = len(self._parts)
                    self._parts.append(_owned(held, {rank: holdings[rank].meshes for rank in ranks}))
                self.of.setdefault(name, []).append(found)
        for name, (held, rank) in first.items():
            meta = manifest.by_name.get(name)
            if meta is None or meta.shape != held.shape:
                announced = "it is not there" if meta is None else list(meta.shape)
                raise ManifestError(
                    f"trainer {rank} holds {name} as {list(held.shape)}; in the manifest {announced}",
                    name=name,
                    rank=f"trainer {rank}",
                )

    def parts(self, numbers: Sequence[int]) -> list[Owned]:
        return [owned for number in numbers for owned in self._parts[number]]

    def _canonical(self, tensors: tuple[Held, ...]) -> dict[str, Held]:
        """By canonical name; a tie counts where its canonical tensor is not held."""
        aliases = self._manifest.aliases
        found = {held.name: held for held in tensors if held.name not in aliases}
        for held in tensors:
            if held.name in aliases:
                found.setdefault(aliases[held.name], held)
        return found


def _tables(holdings: Sequence[Holdings]) -> list[tuple[tuple[Held, ...], list[int]]]:
    """The distinct tables of tensors, each with its ranks."""
    number_of: dict[int, int] = {}
    numbers: dict[tuple[Held, ...], int] = {}
    tables: list[tuple[tuple[Held, ...], list[int]]] = []
    for rank, held in enumerate(holdings):
        number = number_of.get(id(held.tensors))
        if number is None:
            number = number_of[id(held.tensors)] = numbers.setdefault(held.tensors, len(tables))
            if number == len(tables):
                tables.append((held.tensors, []))
        tables[number][1].append(rank)
    return tables


def _owned(held: Held, meshes: Mapping[int, tuple[Place, ...]]) -> list[Owned]:
    found = []
    for rank, of_rank in meshes.items():
        shard = parts_of(held, of_rank)
        found += [Owned(rank, part, shard.shape) for part in shard.parts]
    return found


def _ordered(manifest: Manifest, groups: Sequence[ModuleGroup]) -> tuple[tuple[TensorMeta, ...], tuple[str, ...], Ints]:
    """(all tensors group by group, the groups' keys, the group of each); what is in no group comes last."""
    number = {name: g for g, group in reversed(list(enumerate(groups))) for name in group.names}
    metas = tuple(manifest.by_name[name] for name in dict.fromkeys(regroup(manifest, groups)))
    group_of = np.array([number.get(meta.name, len(groups)) for meta in metas], dtype=np.int64)
    rest = ("(rest)",) if len(groups) in group_of else ()
    return metas, (*(group.key for group in groups), *rest), group_of


def _classes(needs: Sequence[Needs]) -> list[list[int]]:
    digests: dict[int, str] = {}
    found: dict[str, list[int]] = {}
    for j, of_rank in enumerate(needs):
        if id(of_rank) not in digests:
            digests[id(of_rank)] = of_rank.digest
        found.setdefault(digests[id(of_rank)], []).append(j)
    return list(found.values())


def _check_needs(manifest: Manifest, needs: Needs, who: str) -> None:
    for name, boxes in needs.boxes.items():
        meta = manifest.by_name.get(name)
        if meta is None:
            raise ManifestError(f"{who} needs {name}, which is not in the manifest", name=name, rank=who)
        for box in boxes:
            if len(box.start) != len(meta.shape) or box not in Box.whole(meta.shape):
                raise ManifestError(
                    f"{who} needs {name}[{box}], which is not in {list(meta.shape)}", name=name, rank=who
                )


def _patterns(
    manifest: Manifest, metas: Sequence[TensorMeta], owners: _Owners, classes: Sequence[Needs]
) -> list[_Pattern]:
    found: dict[object, _Pattern] = {}
    for i, meta in enumerate(metas):
        boxes = {c: boxes for c, needs in enumerate(classes) if (boxes := needs.boxes.get(meta.name))}
        if not boxes or not meta.numel:
            continue
        numbers = tuple(owners.of.get(meta.name, ()))
        itemsize = meta.torch_dtype.itemsize
        key = (itemsize, numbers, tuple(boxes.items()))
        pattern = found.get(key)
        if pattern is None:
            pattern = found[key] = _Pattern(itemsize, owners.parts(numbers), boxes)
        pattern.names.append(i)
    return list(found.values())


def _cut(pattern: _Pattern, metas: Sequence[TensorMeta], num_dims: int, who: Mapping[int, str]) -> None:
    for c, boxes in pattern.boxes.items():
        try:
            pattern.cuts[c] = cut(boxes, pattern.owned, num_dims)
        except Hole as hole:
            name = metas[pattern.names[0]].name
            raise ManifestError(
                f"{who[c]} needs {name}[{hole.box}], which no trainer holds", name=name, rank=who[c]
            ) from None


def _choose(
    patterns: Sequence[_Pattern],
    members: Sequence[Sequence[int]],
    num_senders: int,
    trainer_nodes: Sequence[str] | None,
    engine_nodes: Sequence[str] | None,
) -> list[int]:
    """Settle which owner serves whom in every cut. Returns bytes per sender."""
    lots: list[Lot] = []
    cuts: list[Cut] = []
    for pattern in patterns:
        for c, of_class in pattern.cuts.items():
            for owners, numel in zip(of_class.owners, of_class.strand_numel(), strict=True):
                near = None
                if trainer_nodes and engine_nodes and len(owners) > 1:
                    near = tuple(tuple(trainer_nodes[i] == engine_nodes[j] for i in owners) for j in members[c])
                lots.append(Lot(owners, numel * pattern.itemsize, len(pattern.names), len(members[c]), near))
                cuts.append(of_class)
    counts, loads = share_out(lots, num_senders)
    for of_class, chosen in zip(cuts, counts, strict=True):
        of_class.counts.append(chosen)
    return loads


def _layout(metas: Sequence[TensorMeta], group_of: Ints, num_groups: int, needs: Needs) -> StagingLayout:
    boxes: dict[str, tuple[Box, ...]] = {}
    offsets: dict[str, tuple[int, ...]] = {}
    ends = [0] * num_groups
    at = 0
    for meta, group in zip(metas, group_of.tolist(), strict=True):
        needed = needs.boxes.get(meta.name)
        if needed:
            itemsize, found = meta.torch_dtype.itemsize, []
            for box in needed:
                found.append(at)
                at += aligned(box.numel * itemsize)
            boxes[meta.name], offsets[meta.name] = needed, tuple(found)
        ends[group] = at
    ends = np.maximum.accumulate(np.array(ends, dtype=np.int64)).tolist() if ends else []
    return StagingLayout(boxes, offsets, tuple(zip([0, *ends[:-1]], ends, strict=True)) if ends else (), at)


def _entries(
    patterns: Sequence[_Pattern],
    classes: Sequence[Needs],
    layouts: Sequence[StagingLayout],
    metas: Sequence[TensorMeta],
    group_of: Ints,
    num_groups: int,
) -> list[tuple[tuple[Entry, ...], ...]]:
    found: list[list[list[Entry]]] = [[[] for _ in range(num_groups)] for _ in classes]
    for pattern in patterns:
        names = np.array(pattern.names, dtype=np.int64)
        groups = group_of[names]
        ordinals = np.arange(len(names))
        edges = np.flatnonzero(np.diff(groups)) + 1
        for c, of_class in pattern.cuts.items():
            offsets = layouts[c].offsets
            staged = np.array([offsets[metas[i].name] for i in pattern.names], dtype=np.int64)
            for at in np.split(ordinals, edges):
                entry = Entry(of_class, pattern.itemsize, names[at], at, staged[at])
                found[c][int(groups[at[0]])].append(entry)
    return [tuple(map(tuple, of_class)) for of_class in found]
