"""The plan of a sharded transfer, against torch: its placements, its slices, and pulls carried out on real tensors."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from benchmarks.shardplan import CASES, reads, shapes
from weightsync.balance import Lot, fill, share_out, turns
from weightsync.boxes import Box, Read, fused, is_grid, read_of, region_in, regions_in, separated
from weightsync.chunk import ALIGNMENT_BYTES
from weightsync.errors import AgreementError, ManifestError
from weightsync.geometry import Region
from weightsync.holdings import Held, Holdings, Place, Placements, Split, local_box, local_shard, parts_of
from weightsync.loadmap import Copy, LoadMap, ModuleGroup
from weightsync.manifest import Manifest, TensorMeta
from weightsync.needs import Needs, common_groups
from weightsync.pulls import Pull
from weightsync.shardplan import ShardPlan
from weightsync.shardplanner import plan_shards

Shape = tuple[int, ...]


def coordinates(mesh: Shape) -> Iterator[Shape]:
    return itertools.product(*map(range, mesh))


def cut_as_torch(tensor: torch.Tensor, split: Split, num_parts: int) -> list[torch.Tensor]:
    """Parts of *tensor*; with a factor, torch's own code for it."""
    if split.factor > 1:
        parts, _ = _StridedShard(split.dim, split_factor=split.factor)._split_tensor(
            tensor, num_parts, with_padding=False
        )
        return list(parts)
    parts = list(torch.chunk(tensor, num_parts, split.dim))
    return parts + [tensor.narrow(split.dim, 0, 0)] * (num_parts - len(parts))


def local_tensor(tensor: torch.Tensor, mesh: Shape, placements: Placements, coordinate: Shape) -> torch.Tensor:
    for split, num_parts, at in zip(placements, mesh, coordinate, strict=True):
        if split is not None:
            tensor = cut_as_torch(tensor, split, num_parts)[at]
    return tensor.clone(memory_format=torch.contiguous_format)


@st.composite
def placed(draw: st.DrawFn, mesh: Shape, num_dims: int) -> Placements:
    splits = st.builds(Split, st.integers(0, num_dims - 1), st.sampled_from([1, 1, 1, 2, 3])) if num_dims else st.none()
    return tuple(draw(st.one_of(st.none(), splits)) for _ in mesh)


def as_torch(split: Split | None) -> Placement:
    if split is None:
        return Replicate()
    return Shard(split.dim) if split.factor == 1 else _StridedShard(split.dim, split_factor=split.factor)


meshes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@settings(max_examples=150)
@given(data=st.data())
def test_local_shards_are_torch_s(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 13), max_size=3)))
    mesh = data.draw(meshes)
    placements = data.draw(placed(mesh, len(shape)))
    whole = torch.arange(math.prod(shape)).reshape(shape)
    for coordinate in coordinates(mesh):
        shard = local_shard(shape, mesh, placements, coordinate)
        expected = _compute_local_shape_and_global_offset(
            shape, mesh, list(coordinate), [as_torch(split) for split in placements]
        )
        assert (shard.shape, shard.parts[0].box.start) == expected
        local = local_tensor(whole, mesh, placements, coordinate)
        assert sum(part.box.numel for part in shard.parts) == local.numel()
        for part in shard.parts:
            assert torch.equal(Box(part.local_start, part.box.size).of(local), part.box.of(whole))
        if len(shard.parts) == 1:
            assert local_box(shape, mesh, placements, coordinate) == shard.parts[0].box


def announce(rank: int) -> None:
    """One rank's DTensors, in a process that has no other process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=6)
    try:
        mesh: DeviceMesh = init_device_mesh("cpu", (2, 3))
        tensors = {
            f"{i}": distribute_tensor(torch.zeros(7, 5), mesh, placements)
            for i, placements in enumerate(itertools.product([Shard(0), Shard(1), Shard(-1), Replicate()], repeat=2))
        }
        holdings = Holdings.of({**tensors, "plain": torch.zeros(3)})
        assert holdings.meshes == (Place((2, 3), divmod(rank, 3)),)
        for held in holdings.tensors[:-1]:
            local = tensors[held.name].to_local()
            assert parts_of(held, holdings.meshes).shape == tuple(local.shape)
        assert holdings.tensors[-1] == Held("plain", "float32", (3,))
        partial = torch.distributed.tensor.DTensor.from_local(
            torch.zeros(2), mesh, [torch.distributed.tensor.Partial(), Replicate()]
        )
        with pytest.raises(ManifestError, match="p is Partial"):
            Holdings.of({"p": partial})
    finally:
        torch.distributed.destroy_process_group()


def test_dtensors_announce_what_they_hold() -> None:
    program = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("parts", {__file__!r})
parts = sys.modules["parts"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(parts)
for rank in range(6):
    parts.announce(rank)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@st.composite
def views(draw: st.DrawFn, base: torch.Tensor) -> torch.Tensor:
    """A view of *base*, as loaders make them: slices, steps, transposes, flattened and split dimensions."""
    view = base
    for _ in range(draw(st.integers(0, 4))):
        if view.dim() == 0:
            break
        dim = draw(st.integers(0, view.dim() - 1))
        size = view.shape[dim]
        match draw(st.sampled_from(["narrow", "narrow", "chunk", "step", "select", "transpose", "flatten", "split"])):
            case "narrow":
                start = draw(st.integers(0, size))
                view = view.narrow(dim, start, draw(st.integers(0, size - start)))
            case "chunk":
                view = draw(st.sampled_from(view.chunk(2, dim)))
            case "step":
                view = view[(slice(None),) * dim + (slice(None, None, draw(st.integers(1, 3))),)]
            case "select" if size:
                view = view.select(dim, draw(st.integers(0, size - 1)))
            case "transpose":
                view = view.transpose(dim, draw(st.integers(0, view.dim() - 1)))
            case "flatten" if view.is_contiguous():
                view = view.view(-1)
            case "split" if size and size % 2 == 0:
                view = view.unflatten(dim, (2, size // 2))
    return view


@settings(max_examples=200)
@given(data=st.data())
def test_a_read_finds_its_elements_in_the_smallest_box(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=4)))
    base = torch.arange(math.prod(shape)).reshape(shape)
    view = data.draw(views(base))
    region = Region.of(view)
    read = read_of(region, shape)
    if read is None:
        assert view.numel() == 0
        return
    elements = {tuple(torch.nonzero(base == i)[0].tolist()) for i in view.reshape(-1).tolist()}
    inside = set(itertools.product(*(range(a, b) for a, b in zip(read.box.start, read.box.stop, strict=True))))
    assert elements <= inside
    assert read.exact == (elements == inside)
    for d, (a, n) in enumerate(zip(read.box.start, read.box.size, strict=True)):
        used = [element[d] for element in elements]
        assert (min(used), max(used)) == (a, a + n - 1) or n == shape[d]
    assert torch.equal(region_in(region, shape, read.box).view_in(read.box.of(base).contiguous()), view)


@settings(max_examples=200)
@given(data=st.data())
def test_a_copy_of_a_grid_is_the_copies_of_what_of_it_lies_in_each_box(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    base = torch.arange(math.prod(shape)).reshape(shape)
    view = data.draw(views(base))
    source = Region.of(view)
    stretched = torch.full((*view.shape, 2), -1)
    target = stretched[..., 1]  # strided, and not at the beginning
    assume(is_grid(source, shape))
    cut, d = data.draw(st.integers(0, 6)), data.draw(st.integers(0, len(shape) - 1))
    cut = min(cut, shape[d])
    halves = [Box.whole(shape)]
    if 0 < cut < shape[d]:
        low, high = list(shape), list(shape)
        low[d], high[d] = cut, shape[d] - cut
        halves = [
            Box((0,) * len(shape), tuple(low)),
            Box(tuple(cut * (i == d) for i in range(len(shape))), tuple(high)),
        ]
    for box in halves:
        found = regions_in(source, Region.of(target), shape, box)
        if found is not None:
            read, written = found
            assert not (written.view_in(stretched.view(-1)) >= 0).any(), "nothing is written twice"
            written.view_in(stretched.view(-1)).copy_(read.view_in(box.of(base).contiguous()))
    assert torch.equal(target, view)


def test_what_narrows_steps_and_turns_is_a_grid_and_what_runs_over_the_end_of_a_row_is_none() -> None:
    base = torch.empty(6, 4, 2)
    for view in (base, base[1:5, ::2, 1], base.transpose(0, 2)[:, 1:]):
        assert is_grid(Region.of(view), (6, 4, 2))
    for view in (base.view(-1), base.view(-1)[1:3], base.view(3, 2, 8), base.diagonal()):
        assert not is_grid(Region.of(view), (6, 4, 2))


def test_elements_that_are_read_twice_do_not_fill_a_box() -> None:
    assert read_of(Region((2, 2), (1, 1), 0), (2, 2)) == Read(Box((0, 0), (2, 2)), exact=False)


def test_a_read_beyond_the_tensor_is_refused() -> None:
    with pytest.raises(ManifestError, match=r"beyond a tensor of shape \[4, 3\]"):
        read_of(Region((4, 3), (3, 1), 1), (4, 3))


boxes_of_a_tensor = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 4), st.integers(0, 4)).map(
        lambda t: Box((t[0], t[1]), (t[2], t[3]))
    ),
    max_size=7,
)


@settings(max_examples=200)
@given(boxes=boxes_of_a_tensor)
def test_boxes_are_fused_and_separated(boxes: list[Box]) -> None:
    def painted(some: Sequence[Box]) -> torch.Tensor:
        counts = torch.zeros(9, 9)
        for box in some:
            box.of(counts).add_(1)
        return counts

    assert torch.equal(painted(fused(boxes)) > 0, painted(boxes) > 0)
    apart = separated(boxes)
    assert int(painted(apart).max()) <= 1
    assert all(any(box in other for other in apart) for box in boxes if box.numel)
    if boxes:
        rest = [part for part in [Box.whole((9, 9))] for part in part.minus(boxes[0])]
        assert torch.equal(painted([*rest, boxes[0]]), torch.ones(9, 9)) or not boxes[0].numel


DTYPES = {"int16": torch.int16, "int32": torch.int32, "int64": torch.int64}


class World(msgspec.Struct):
    """A model, how trainers hold it (each rank's local tensors) and what engines read of it."""

    manifest: Manifest
    whole: dict[str, torch.Tensor]
    holdings: list[Holdings]
    local: list[dict[str, torch.Tensor]]
    maps: list[LoadMap]
    groups: list[ModuleGroup]

    def plan(self, **options: Sequence[str]) -> ShardPlan:
        return plan_shards(
            self.manifest, self.holdings, [Needs.of(m, self.manifest) for m in self.maps], groups=self.groups, **options
        )


@st.composite
def worlds(draw: st.DrawFn) -> World:
    mesh = draw(meshes.filter(lambda mesh: math.prod(mesh) <= 12))
    ranks = list(coordinates(mesh))
    layout = draw(st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=3))
    # Every layout several times, as layers repeat.
    shapes = {f"layer.{i}.{j}": shape for i in range(draw(st.integers(1, 3))) for j, shape in enumerate(layout)}
    dtypes = [draw(st.sampled_from(sorted(DTYPES))) for _ in layout]
    metas = [TensorMeta(name, dtypes[int(name[-1])], shape) for name, shape in shapes.items()]
    aliases = {"tied": metas[0].name} if draw(st.booleans()) else {}
    manifest = Manifest(tuple(metas), aliases)
    whole = {m.name: torch.arange(m.numel).to(DTYPES[m.dtype]).reshape(m.shape) for m in metas}
    held: list[list[Held]] = [[] for _ in ranks]
    local: list[dict[str, torch.Tensor]] = [{} for _ in ranks]
    styles = [
        (draw(st.sampled_from(["mesh", "mesh", "whole", "stage", "both"])), draw(placed(mesh, len(shape))))
        for shape in layout
    ]
    for meta in metas:
        kind, placements = styles[int(meta.name[-1])]
        only = draw(st.integers(0, len(ranks) - 1))
        for rank, coordinate in enumerate(ranks):
            name = "tied" if aliases and meta.name == aliases["tied"] and rank % 2 else meta.name
            if kind == "mesh" or (kind == "both" and rank != only):
                held[rank].append(Held(name, meta.dtype, meta.shape, 0, placements))
                local[rank][meta.name] = local_tensor(whole[meta.name], mesh, placements, coordinate)
            elif rank == only or (kind == "whole" and rank % 2):
                held[rank].append(Held(name, meta.dtype, meta.shape))
                local[rank][meta.name] = whole[meta.name]
    holdings = [Holdings(tuple(h), (Place(mesh, c),)) for h, c in zip(held, ranks, strict=True)]
    maps = []
    for _ in range(draw(st.integers(1, 3))):
        copies = []
        for meta in metas:
            for k in range(draw(st.integers(0, 2))):
                name = "tied" if aliases and k and meta.name == aliases["tied"] else meta.name
                base = torch.empty(meta.shape, device="meta")
                source = Region.of(draw(views(base))) if draw(st.integers(0, 9)) else None
                copies.append(Copy(name, meta.name.rpartition(".")[0], "weight", source, None))
        maps.append(LoadMap(tuple(copies), (), ()))
    maps += draw(st.lists(st.sampled_from(maps), max_size=4))
    return World(manifest, whole, holdings, local, maps, list(common_groups(manifest, maps)))


@settings(max_examples=300)
@given(world=worlds())
def test_pulls_bring_every_needed_element_once_from_a_rank_that_holds_it(world: World) -> None:
    plan = world.plan()
    by_sender: dict[tuple[int, int, int], list[Pull]] = {}
    for sender in range(plan.num_senders):
        for pulls in plan.of_sender(sender):
            for batch in pulls.batches():
                by_sender[batch.group, batch.sender, batch.receiver] = list(batch.pulls)
    sent = [0] * plan.num_senders
    for receiver, load_map in enumerate(world.maps):
        needs, layout = Needs.of(load_map, world.manifest), plan.layout(receiver)
        staging = torch.zeros(layout.nbytes, dtype=torch.uint8)
        taken = torch.zeros(layout.nbytes, dtype=torch.uint8)
        assert layout.boxes == {name: boxes for name, boxes in needs.boxes.items() if boxes}

        def box_in(
            memory: torch.Tensor, name: str, number: int, boxes: dict[str, tuple[Box, ...]] = layout.boxes
        ) -> torch.Tensor:
            dtype, box = DTYPES[world.manifest.by_name[name].dtype], boxes[name][number]
            at = layout.offsets[name][number]  # noqa: B023  # called in this round only
            assert at % ALIGNMENT_BYTES == 0
            return memory[at : at + box.numel * dtype.itemsize].view(dtype).reshape(box.size)

        count = 0
        for pulls in plan.of_receiver(receiver):
            for batch in pulls.batches():
                mine = list(batch.pulls)
                assert mine == by_sender.pop((batch.group, batch.sender, receiver))
                assert batch.packed_bytes >= batch.pulls.nbytes
                assert list(batch.offsets) == sorted(set(batch.offsets))
                count += len(mine)
                for pull in mine:
                    local = world.local[pull.sender][pull.name]
                    source = pull.local.of(local)
                    assert pull.nbytes == source.numel() * source.itemsize > 0
                    assert source.storage_offset() == pull.local_offset
                    assert len(Region.of(source).runs()[0]) == pull.local_runs
                    box = layout.boxes[pull.name][pull.need]
                    target = pull.box.of(box_in(staging, pull.name, pull.need), within=box)
                    assert target.data_ptr() - staging.data_ptr() == pull.staged_offset
                    assert len(Region.of(target).runs()[0]) == pull.staged_runs
                    target.copy_(source)
                    pull.box.of(box_in(taken, pull.name, pull.need), within=box).add_(1)
                    low, high = layout.groups[pull.group]
                    assert low <= pull.staged_offset < high
                    sent[pull.sender] += pull.nbytes
        assert count == plan.num_pulls(receiver)
        assert plan.receiver_bytes[receiver] == needs.nbytes(world.manifest)
        for name, boxes in layout.boxes.items():
            for number, box in enumerate(boxes):
                assert bool((box_in(taken, name, number) == 1).all())
                assert torch.equal(box_in(staging, name, number), box.of(world.whole[name]))
        for copy in load_map.copies:  # and each copy of the loader can be made from the staging
            name = world.manifest.aliases.get(copy.name, copy.name)
            shape = world.whole[name].shape
            read = read_of(copy.source, tuple(shape)) if copy.source is not None else None
            if copy.source is not None and read is not None:
                number, box = next((i, b) for i, b in enumerate(needs.boxes[name]) if read.box in b)
                found = region_in(copy.source, tuple(shape), box).view_in(box_in(staging, name, number))
                assert torch.equal(found, copy.source.view_in(world.whole[name]))
    assert not by_sender
    assert tuple(sent) == plan.sender_bytes
    traffic = sum(plan.traffic(group) for group in range(len(plan.groups)))
    if len(plan.groups):
        assert np.array_equal(np.asarray(traffic).sum(axis=0), sent)


@settings(max_examples=20)
@given(world=worlds())
def test_what_ranks_hold_and_need_survives_the_wire(world: World) -> None:
    for holdings in world.holdings:
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(holdings), type=Holdings)
        assert (again, again.table_digest) == (holdings, holdings.table_digest)
    for load_map in world.maps:
        needs = Needs.of(load_map, world.manifest)
        found = msgspec.msgpack.decode(msgspec.msgpack.encode(needs), type=Needs)
        assert (found, found.digest) == (needs, needs.digest)


@settings(max_examples=60)
@given(world=worlds(), seed=st.integers(0, 2**16))
def test_equal_inputs_give_equal_plans_in_whatever_order_they_come(world: World, seed: int) -> None:
    shuffle = random.Random(seed)

    def mixed(needs: Needs) -> Needs:
        items = list(needs.boxes.items())
        shuffle.shuffle(items)
        return Needs(dict(items), needs.inexact)

    def tables(holdings: Holdings) -> Holdings:
        tensors = list(holdings.tensors)
        shuffle.shuffle(tensors)
        return Holdings(tuple(tensors), holdings.meshes)

    again = plan_shards(
        world.manifest,
        [tables(h) for h in world.holdings],
        [mixed(Needs.of(m, world.manifest)) for m in world.maps],
        groups=world.groups,
    )
    plan = world.plan()
    assert plan.digest == again.digest
    for receiver in range(plan.num_receivers):
        assert [p for pulls in plan.of_receiver(receiver) for p in pulls] == [
            p for pulls in again.of_receiver(receiver) for p in pulls
        ]


def whole_everywhere(manifest: Manifest, num_ranks: int) -> list[Holdings]:
    held = Holdings(tuple(Held(m.name, m.dtype, m.shape) for m in manifest.tensors))
    return [held] * num_ranks


def everything(manifest: Manifest) -> Needs:
    return Needs({m.name: (Box.whole(m.shape),) for m in manifest.tensors})


def layers(num: int, shape: Shape = (64, 64)) -> Manifest:
    return Manifest(tuple(TensorMeta(f"layer.{i}.weight", "float32", shape) for i in range(num)))


@settings(max_examples=100)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=20),
    num_trainers=st.integers(1, 9),
    num_engines=st.integers(1, 5),
)
def test_replicas_share_the_work_to_within_one_tensor(sizes: list[int], num_trainers: int, num_engines: int) -> None:
    manifest = Manifest(tuple(TensorMeta(f"t{i}", "uint8", (n,)) for i, n in enumerate(sizes)))
    plan = plan_shards(manifest, whole_everywhere(manifest, num_trainers), [everything(manifest)] * num_engines)
    assert max(plan.sender_bytes) - min(plan.sender_bytes) <= max(sizes)
    assert sum(plan.sender_bytes) == sum(sizes) * num_engines


def test_large_tensors_are_given_out_first() -> None:
    manifest = Manifest(tuple(TensorMeta(f"t{i}", "uint8", (n,)) for i, n in enumerate([1] * 10 + [10])))
    assert plan_shards(manifest, whole_everywhere(manifest, 2), [everything(manifest)]).sender_bytes == (10, 10)


def test_replicas_of_shards_are_balanced() -> None:
    manifest = layers(10, (96, 8))
    held = tuple(Held(m.name, m.dtype, m.shape, 0, (None, Split(0))) for m in manifest.tensors)
    holdings = [Holdings(held, (Place((4, 8), divmod(rank, 8)),)) for rank in range(32)]
    plan = plan_shards(manifest, holdings, [everything(manifest)] * 6)
    assert max(plan.sender_bytes) <= 1.1 * sum(plan.sender_bytes) / 32


def test_a_sender_on_the_same_node_serves() -> None:
    manifest = layers(5)
    nodes = ["a", "b", "c", "d"]
    plan = plan_shards(
        manifest,
        whole_everywhere(manifest, 4),
        [everything(manifest)] * 4,
        trainer_nodes=nodes,
        engine_nodes=nodes[::-1],
    )
    for receiver in range(4):
        assert {pull.sender for pulls in plan.of_receiver(receiver) for pull in pulls} == {3 - receiver}


def test_nearness_does_not_unbalance() -> None:
    manifest = layers(200)
    plan = plan_shards(
        manifest, whole_everywhere(manifest, 4), [everything(manifest)] * 2, trainer_nodes="abcd", engine_nodes="aa"
    )
    mean = sum(plan.sender_bytes) / 4
    assert mean < plan.sender_bytes[0] <= 1.1 * mean
    assert max(plan.sender_bytes) <= 1.1 * mean


def test_receivers_begin_with_different_groups_and_senders() -> None:
    manifest = layers(8)
    held = tuple(Held(m.name, m.dtype, m.shape, 0, (Split(0),)) for m in manifest.tensors)
    holdings = [Holdings(held, (Place((4,), (rank,)),)) for rank in range(4)]
    plan = plan_shards(manifest, holdings, [everything(manifest)] * 4)
    assert [plan.order(j)[0] for j in range(4)] == [0, 2, 4, 6]
    assert [next(iter(next(plan.of_receiver(j)))).sender for j in range(4)] == [0, 1, 2, 3]
    assert all(sorted(plan.order(j)) == list(range(8)) for j in range(4))


def test_a_slice_that_nobody_holds_is_named() -> None:
    manifest = layers(2, (8, 4))
    held = tuple(Held(m.name, m.dtype, m.shape, 0, (Split(0),)) for m in manifest.tensors)
    holdings = [Holdings(held, (Place((4,), (rank,)),)) for rank in (0, 1, 3)]
    needs = Needs({"layer.1.weight": (Box((0, 1), (8, 2)),)})
    with pytest.raises(ManifestError, match=r"engine 1 rank 0 needs layer.1.weight\[4:6, 1:3\], which no trainer") as e:
        plan_shards(manifest, holdings, [Needs({}), needs], engine_names=["engine 0 rank 0", "engine 1 rank 0"])
    assert (e.value.name, e.value.rank) == ("layer.1.weight", "engine 1 rank 0")
    with pytest.raises(ManifestError, match=r"engine rank 0 needs layer.0.weight\[0:8, 0:4\], which no trainer holds"):
        plan_shards(manifest, [Holdings(())], [everything(manifest)])


def test_trainers_that_announce_a_tensor_differently_are_named() -> None:
    manifest = layers(1, (8, 4))
    holdings = [Holdings((Held("layer.0.weight", "float32", shape),)) for shape in [(8, 4), (8, 4), (8, 5)]]
    with pytest.raises(AgreementError, match=r"trainer 0 holds layer.0.weight as .*\[8, 4\], trainer 2 .*\[8, 5\]"):
        plan_shards(manifest, holdings, [])
    with pytest.raises(ManifestError, match=r"trainer 0 holds layer.0.weight as \[8, 5\]; in the manifest \[8, 4\]"):
        plan_shards(manifest, holdings[2:], [])
    with pytest.raises(ManifestError, match=r"trainer 0 holds other as \[1\]; in the manifest it is not there"):
        plan_shards(manifest, [Holdings((Held("other", "float32", (1,)),))], [])


def test_holdings_that_fit_no_mesh_are_named() -> None:
    manifest = layers(1, (8, 4))
    for held, meshes in [
        (Held("layer.0.weight", "float32", (8, 4), 1, (Split(0),)), (Place((2,), (0,)),)),
        (Held("layer.0.weight", "float32", (8, 4), 0, (Split(0),)), (Place((2,), (2,)),)),
        (Held("layer.0.weight", "float32", (8, 4), 0, (Split(2),)), (Place((2,), (1,)),)),
    ]:
        with pytest.raises(ManifestError, match=r"layer.0.weight: "):
            plan_shards(manifest, [Holdings((held,), meshes)], [everything(manifest)])


def test_needs_outside_the_manifest_are_named() -> None:
    manifest = layers(1, (8, 4))
    for needs, text in [
        (Needs({"layer.0.weight": (Box((0, 0), (8, 5)),)}), r"layer.0.weight\[0:8, 0:5\], which is not in \[8, 4\]"),
        (Needs({"other": (Box((0,), (1,)),)}), "other, which is not in the manifest"),
    ]:
        with pytest.raises(ManifestError, match=f"engine rank 0 needs {text}"):
            plan_shards(manifest, whole_everywhere(manifest, 1), [needs])
    with pytest.raises(ManifestError, match=r"x: the needed boxes 0:2; 1:3 overlap"):
        Needs({"x": (Box((0,), (2,)), Box((1,), (2,)))})


def needs_of(shape: Shape, *views: torch.Tensor | None, aliases: dict[str, str] | None = None) -> Needs:
    """The needs of a loader that makes these views of tensor "w"; the second one of its tie, where there is one."""
    manifest = Manifest((TensorMeta("w", "float32", shape),), aliases or {})
    names = ["w", *(aliases or {}), *["w"] * len(views)]
    copies = [
        Copy(name, "m", "w", None if view is None else Region.of(view), None)
        for name, view in zip(names, views, strict=False)
    ]
    return Needs.of(LoadMap(tuple(copies), (), ()), manifest)


def test_needs_are_boxes_and_say_where_they_hold_more_than_is_read() -> None:
    w = torch.empty(8, 6, device="meta")
    whole = (Box((0, 0), (8, 6)),)
    assert needs_of((8, 6), w[:4], w[4:]) == Needs({"w": whole})
    assert needs_of((8, 6), w.t()) == Needs({"w": whole})
    assert needs_of((8, 6), w.view(-1)) == Needs({"w": whole})
    assert needs_of((8, 6), w[2:6, 3:]) == Needs({"w": (Box((2, 3), (4, 3)),)})
    assert needs_of((8, 6), w[:2], w[6:]) == Needs({"w": (Box((0, 0), (2, 6)), Box((6, 0), (2, 6)))})
    assert needs_of((8, 6), w[:5], w[3:], aliases={"tied": "w"}) == Needs({"w": whole})
    assert needs_of((8, 6), w[::2], w[1::2]) == Needs({"w": whole}, ("w",))
    assert needs_of((8, 6), w[::2]) == Needs({"w": (Box((0, 0), (7, 6)),)}, ("w",))
    assert needs_of((8, 6), w[:2], None) == Needs({"w": whole}, ("w",))
    assert needs_of((8, 6), w[:4, :4], w[2:, 2:]) == Needs({"w": whole}, ("w",))
    assert needs_of((8, 6), w[:0]) == Needs({"w": ()})


def test_after_a_fallback_everything_is_needed() -> None:
    manifest = layers(3)
    needs = Needs.of(LoadMap.from_fallback(manifest, (), "no reason"), manifest)
    assert needs == Needs(everything(manifest).boxes, tuple(m.name for m in manifest.tensors))


def test_a_load_map_of_another_manifest_is_refused() -> None:
    copy = Copy("other", "m", "w", Region((1,), (1,), 0), None)
    with pytest.raises(ManifestError, match="other is read by m and not in the manifest"):
        Needs.of(LoadMap((copy,), (), ()), layers(1))
    beyond = Copy("layer.0.weight", "m", "w", Region((65, 64), (64, 1), 0), None)
    with pytest.raises(ManifestError, match=r"layer.0.weight: .* beyond"):
        Needs.of(LoadMap((beyond,), (), ()), layers(1))


@settings(max_examples=200)
@given(loads=st.lists(st.integers(0, 50), min_size=1, max_size=6), unit=st.integers(0, 9), count=st.integers(0, 60))
def test_filling_makes_the_largest_load_as_small_as_it_can_be(loads: list[int], unit: int, count: int) -> None:
    greedy = list(loads)
    for _ in range(count):
        i = min(range(len(greedy)), key=lambda i: greedy[i])
        greedy[i] += unit
    given_units = fill(loads, unit, count)
    filled = [load + n * unit for load, n in zip(loads, given_units, strict=True)]
    assert sum(given_units) == count
    assert min(given_units) >= 0
    assert max(filled) == max(greedy)


def test_turns_are_spread_evenly() -> None:
    assert turns((2, 4)).tolist() == [1, 0, 1, 1, 0, 1]
    assert turns((0, 3)).tolist() == [1, 1, 1]


def test_lots_are_shared_out_with_those_that_have_one_owner_counted_first() -> None:
    counts, loads = share_out([Lot((0, 1), 1, 10, 1), Lot((0,), 10, 1, 1)], 2)
    assert loads == [10, 10]
    assert counts[1] is None
    assert counts[0] is not None
    assert counts[0].tolist() == [[0, 10]]


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_large_model_is_planned_in_balance(case: str) -> None:
    of = shapes()
    manifest = Manifest(tuple(TensorMeta(name, "bfloat16", shape) for name, shape in of.items()))
    needs = [Needs.of(LoadMap(tuple(reads(of, rank)), (), ()), manifest) for rank in range(8)]
    plan = plan_shards(manifest, CASES[case](of), [needs[j % 8] for j in range(128)])
    for nbytes in (plan.sender_bytes, plan.receiver_bytes):
        assert max(nbytes) <= 1.1 * sum(nbytes) / len(nbytes)
    # An expert of each layer, at a rank of each kind.
    mine = plan.receiver_group(127, plan.groups.index("model.layers.93"))
    assert mine.nbytes == plan.traffic(plan.groups.index("model.layers.93"))[127].sum()
    assert plan.layout(127).nbytes < 1.01 * plan.receiver_bytes[127]
