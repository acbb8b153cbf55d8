"""Slices from end to end: what a plan makes of trainers' shards and engines' needs, without and with real NIXL between."""

from __future__ import annotations

import itertools
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray
import torch

import weightsync as ws
from weightsync import messages as m
from weightsync.boxview import BoxView, adopt
from weightsync.chunk import WeightChunk
from weightsync.coalescer import Coalescer
from weightsync.config import TransportRule
from weightsync.engines.torch_module import TorchModuleAdapter
from weightsync.geometry import Region
from weightsync.holdings import Held, Holdings, Place, Placements, Split, local_shard
from weightsync.identity import identify
from weightsync.loadmap import Copy, LoadMap, Target
from weightsync.manifest import Manifest
from weightsync.needs import Needs
from weightsync.orders import Orders
from weightsync.placement import run_copies
from weightsync.receiver import ReceiverRank
from weightsync.report import LoadSummary
from weightsync.routes import orders_of, plan_routes
from weightsync.sender import SenderRank
from weightsync.session import Session
from weightsync.testing import LocalFleet, LocalSync, in_process_party, module_engine
from weightsync.testing.campaign import odd_weights
from weightsync.testing.modules import nested_module
from weightsync.testing.processes import ProcessParty
from weightsync.transports.sidecar import Sidecars

Weights = dict[str, torch.Tensor]

# ---- plans carried out by hand --------------------------------------------------------------------------------------


def weights() -> Weights:
    g = torch.Generator().manual_seed(0)
    found = {f"layers.{i}.{part}": torch.randn(12, 20, generator=g) for i in range(2) for part in ("up", "down")}
    return {**found, "norm": torch.randn(12, generator=g), "empty": torch.empty(0, 3)}


class Rank(TorchModuleAdapter):
    """An engine rank that takes a slice along one dimension of each tensor, and shows no live tensors: given whole tensors,
    it reads its slices of them."""

    copies_load = False

    def __init__(self, whole: Weights, slices: dict[str, tuple[int, int, int]]) -> None:
        """*slices*: name -> (dimension, start, size)."""
        self.slices = slices
        super().__init__(nested_module({name: whole[name].narrow(*slices[name]) * 0 for name in slices}))

    def load_map(self, manifest: Manifest) -> LoadMap:
        copies, targets = [], []
        for name, cut in self.slices.items():
            meta = manifest.by_name[name]
            view = torch.empty(meta.shape, device="meta").narrow(*cut)
            module, _, leaf = name.rpartition(".")
            targets.append(Target(module, leaf, meta.dtype, tuple(view.shape)))
            whole = Region.of(torch.empty(view.shape, device="meta"))
            copies.append(Copy(name, module, leaf, Region.of(view), whole))
        return LoadMap.from_copies(manifest, copies, targets)

    def apply(self, groups: Any) -> int:
        return super().apply([(n, t.narrow(*self.slices[n])) for n, t in group] for group in groups)

    def check(self, whole: Weights) -> None:
        live = self._tensors()
        for name, cut in self.slices.items():
            assert torch.equal(live[name], whole[name].narrow(*cut)), name


def local_of(tensor: torch.Tensor, mesh: tuple[int, ...], placements: Placements, at: tuple[int, ...]) -> torch.Tensor:
    shard = local_shard(tuple(tensor.shape), mesh, placements, at)
    local = torch.empty(shard.shape, dtype=tensor.dtype)
    for part in shard.parts:
        place = local
        for d, (start, size) in enumerate(zip(part.local_start, part.box.size, strict=True)):
            place = place.narrow(d, start, size)
        place.copy_(part.box.of(tensor))
    return local


def described(holdings: Holdings, manifest: Manifest) -> m.Description:
    return m.Description(identity=identify(), manifest=manifest, version=0, holdings=holdings)


def opened(i: int, needs: Needs) -> m.ReceiverOpened:
    load = LoadSummary(rank=f"engine {i} rank 0", num_groups=0)
    return m.ReceiverOpened(identity=identify(), rank=0, load=load, order=(), version=0, needs=needs)


def packed(orders: Orders, locals_of: Weights) -> dict[int, list[tuple[str, int, torch.Tensor]]]:
    """Per receiver, (name, first byte, bytes) of what a sender sends."""
    found: dict[int, list[tuple[str, int, torch.Tensor]]] = {i: [] for stream in orders.streams for i in stream}
    for order in orders.orders:
        assert order.local is not None
        data = order.local.of(locals_of[order.name]).contiguous().reshape(-1).view(torch.uint8)
        for target in order.targets:
            for i in orders.streams[target.stream]:
                found[i].append((target.name, target.start, data))
    return found


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_a_plan_carried_out_gives_every_rank_its_slices_and_nothing_else(seed: int, apart: bool) -> None:
    rng = random.Random(seed)
    whole = weights()
    manifest = Manifest.from_tensors(whole)
    mesh = rng.choice([(4,), (2, 2), (3,)])
    placements: dict[str, Placements] = {
        name: tuple(rng.choice([None, Split(rng.randrange(tensor.dim()))]) for _ in mesh)
        for name, tensor in whole.items()
    }
    held = tuple(Held(name, "float32", tuple(t.shape), 0, placements[name]) for name, t in whole.items())
    places = list(itertools.product(*map(range, mesh)))
    trainers = [described(Holdings(held, (Place(mesh, at),)), manifest) for at in places]

    def sliced(i: int) -> dict[str, tuple[int, int, int]]:
        found = {}
        for name, tensor in whole.items():
            d = rng.randrange(tensor.dim()) if "layers" in name else 0
            half = tensor.shape[d] // 2
            found[name] = (d, i * half, half) if "layers" in name else (0, 0, tensor.shape[0])
        return found

    engines = [Rank(whole, sliced(i)) for i in range(2)]
    engines.append(Rank(whole, engines[0].slices))  # a replica
    maps = [engine.load_map(manifest) for engine in engines]
    needs = [Needs.of(load_map, manifest) for load_map in maps]
    ranks = {(f"engine {i}", 0): opened(i, of) for i, of in enumerate(needs)}
    first, second = dict(list(ranks.items())[:2]), dict(list(ranks.items())[2:])
    routes = plan_routes(manifest, trainers, first, apart=first if apart else ())
    routes |= plan_routes(manifest, trainers, second, list(routes.values()), second if apart else ())
    assert routes["engine 2", 0] is routes["engine 0", 0], "a twin takes the same"

    views = [BoxView(manifest, maps[i], needs[i], routes[f"engine {i}", 0].parts) for i in range(3)]
    coalescers = [
        Coalescer(view.manifest, view.load_map.groups, version=1, staging_limit_bytes=1 << 20, timeout_s=5)
        for view in views
    ]
    for sender, at in enumerate(places):
        orders = orders_of([route.shares[sender] for route in routes.values()], [*whole])
        assert all(set(stream) & {0, 2} in ({0, 2}, set()) for stream in orders.streams), "replicas share a stream"
        mine = {name: local_of(tensor, mesh, placements[name], at) for name, tensor in whole.items()}
        for i, parts in packed(orders, mine).items():
            assert sum(data.nbytes for _, _, data in parts) == routes[f"engine {i}", 0].shares[sender].nbytes
            for name, start, data in parts:
                assert start == 0 or not apart, "each is a tensor of its own"
                one = chunk(manifest, name, start, data)
                adopt(one, manifest, views[i].manifest)
                coalescers[i].put(one)
    torch.use_deterministic_algorithms(True)  # so that what is not needed of a whole tensor is NaN
    try:
        for engine, view, coalescer, of in zip(engines, views, coalescers, needs, strict=True):
            coalescer.producer_done()
            assert coalescer.is_whole()
            assert coalescer.nbytes == of.nbytes(manifest)
            groups = [dict(group) for group in coalescer.groups()]
            view.adapt(engine).apply(group.items() for group in groups)
            engine.check(whole)
            if apart:
                for target in engine.live().values():
                    target.zero_()
                run_copies(view.load_map.copies, {n: t for group in groups for n, t in group.items()}, engine.live())
                engine.check(whole)
    finally:
        torch.use_deterministic_algorithms(False)


def chunk(manifest: Manifest, name: str, start: int, data: torch.Tensor) -> WeightChunk:
    made = WeightChunk.from_tensors({name: data}, version=1, manifest=manifest)
    made.pieces = tuple(msgspec.structs.replace(piece, start=start) for piece in made.pieces)
    return made


# ---- whole weight syncs ------------------------------------------------------------------------------------------


def refresh(modules: Sequence[torch.nn.Module], seed: int) -> None:
    for module in modules:
        torch.manual_seed(seed)
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape))


def equal(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.fixture
def trainers() -> list[torch.nn.Module]:
    """Two that hold the whole model each."""
    return [nested_module(odd_weights(0)) for _ in range(2)]


CONFIG = ws.SyncConfig(transport="sharded_rdt", timeout_s=20, bucket_bytes="64KiB")
over_each_transport = pytest.mark.parametrize(
    "config",
    [
        pytest.param(msgspec.structs.replace(CONFIG, transport=name), id=name)
        for name in ("sharded_rdt", "sharded_shared_memory", "sharded_broadcast")
    ],
)


@over_each_transport
def test_whole_models_are_pulled_from_all_that_hold_them_and_a_late_engine_disturbs_nobody(
    config: ws.SyncConfig, trainers: list[torch.nn.Module], sidecars: Sidecars
) -> None:
    engines = [nested_module(odd_weights(i)) for i in (1, 2)]
    local = LocalSync([lambda t=t: t for t in trainers], [module_engine(engines[0])], config, sidecars=sidecars)  # type: ignore[misc]
    with local as session:
        refresh(trainers, 3)
        report = session.update()
        assert equal(engines[0], trainers[0])
        rows = {row.rank: row.nbytes for row in report.ranks}
        assert rows["trainer 0"] + rows["trainer 1"] == rows["engine 0 rank 0"] == report.nbytes
        assert max(rows["trainer 0"], rows["trainer 1"]) < 0.8 * report.nbytes, "both serve"

        late = ReceiverRank(TorchModuleAdapter(engines[1]))
        joined = session.add_engine(local.fleet.add(in_process_party([late])))
        assert joined is not None
        assert joined.joined == ("engine 1",)
        assert {pair.split(" -> ")[1] for pair in joined.transports} >= {"engine 1 rank 0"}
        assert equal(engines[1], trainers[0])
        assert session.epoch == 1, "the other's links stayed"

        refresh(trainers, 4)
        session.update()
        assert all(equal(engine, trainers[0]) for engine in engines)


@over_each_transport
def test_a_late_engine_waits_for_the_next_update_where_the_trainers_have_gone_on(
    config: ws.SyncConfig, trainers: list[torch.nn.Module], sidecars: Sidecars
) -> None:
    engines = [nested_module(odd_weights(i)) for i in (1, 2)]
    local = LocalSync([lambda t=t: t for t in trainers], [module_engine(engines[0])], config, sidecars=sidecars)  # type: ignore[misc]
    with local as session:
        session.update()
        refresh(trainers, 5)
        late = ReceiverRank(TorchModuleAdapter(engines[1]))
        assert session.add_engine(local.fleet.add(in_process_party([late]))) is None
        assert not equal(engines[1], trainers[0])
        session.update()
        assert all(equal(engine, trainers[0]) for engine in engines)


@over_each_transport
@pytest.mark.parametrize("apply", ["staged", "streaming"])
def test_slices_of_module_groups_that_have_not_changed_are_not_sent(
    apply: Any, config: ws.SyncConfig, trainers: list[torch.nn.Module], sidecars: Sidecars
) -> None:
    engines = [nested_module(odd_weights(i)) for i in (1, 2)]
    config = msgspec.structs.replace(config, skip_unchanged=True, apply=apply)
    local = LocalSync([lambda t=t: t for t in trainers], list(map(module_engine, engines)), config, sidecars=sidecars)  # type: ignore[misc]
    sizes = {name: parameter.nbytes for name, parameter in trainers[0].named_parameters()}
    by_module = {name: [n for n in sizes if n.rpartition(".")[0] == name.rpartition(".")[0]] for name in sizes}
    steps = [
        [*sizes],
        [],
        ["norm"],
        ["layers.1.up"],
        ["layers.1.up", "layers.3.down"],
        [],
        ["embed", "layers.0.up"],
        [*sizes],
    ]
    with local as session:
        session.update()
        for step in steps:
            for trainer in trainers:
                for name in step:
                    trainer.get_parameter(name).add_(1)
            report = session.update()
            moved = sum(sizes[name] for name in {n for name in step for n in by_module[name]})
            rows = {row.rank: row.nbytes for row in report.ranks}
            assert [rows[f"engine {i} rank 0"] for i in range(2)] == [moved] * 2
            assert rows["trainer 0"] + rows["trainer 1"] == moved
            assert report.skipped_bytes == sum(sizes.values()) - moved
            assert all(equal(engine, trainers[0]) for engine in engines)
        engines[1].get_parameter("norm").add_(1)  # somebody else's doing: all comes again
        assert session.update().skipped_bytes == 0
        assert equal(engines[1], trainers[0])


@over_each_transport
def test_a_source_is_asked_once_an_update_for_its_shards(
    config: ws.SyncConfig, trainers: list[torch.nn.Module], sidecars: Sidecars
) -> None:
    engine, asked = nested_module(odd_weights(1)), 0

    def source() -> torch.nn.Module:
        nonlocal asked
        asked += 1
        return trainers[0]

    with LocalSync([source], [module_engine(engine)], config, sidecars=sidecars) as session:
        for seed in (3, 4):
            refresh(trainers, seed)
            asked = 0
            session.update()
            assert equal(engine, trainers[0])
            assert asked == 1


@over_each_transport
@pytest.mark.parametrize("lazy", [False, True])
def test_slices_travel_in_their_wire_dtype_also_where_the_source_makes_its_tensors(
    lazy: bool, config: ws.SyncConfig, trainers: list[torch.nn.Module], sidecars: Sidecars
) -> None:
    engine = nested_module(odd_weights(1))
    config = msgspec.structs.replace(config, wire_dtype={"*": "bfloat16"}, apply="streaming")
    sources = [lambda t=t: iter(t.state_dict().items()) if lazy else t for t in trainers]
    with LocalSync(sources, [module_engine(engine)], config, sidecars=sidecars) as session:
        report = session.update()
        said = session.status()["transport_details"]
    assert all(details.startswith("NIXL over UCX (") for details in said.values())
    assert bool(said) == (config.transport == "sharded_rdt")
    assert report.nbytes == sum(2 * parameter.numel() for parameter in engine.parameters())
    state = trainers[0].state_dict()
    assert all(torch.equal(b, state[n].to(torch.bfloat16).to(b.dtype)) for n, b in engine.named_parameters())


@pytest.mark.parametrize("lost", ["trainer 1", "engine 0 rank 0"])
def test_after_a_sidecar_was_killed_the_update_fails_in_time_and_the_next_is_exact(
    lost: str, trainers: list[torch.nn.Module], sidecars: Sidecars
) -> None:
    engine = nested_module(odd_weights(1))
    local = LocalSync([lambda t=t: t for t in trainers], [module_engine(engine)], CONFIG, sidecars=sidecars)  # type: ignore[misc]
    with local as session:
        session.update()
        before = {name: parameter.clone() for name, parameter in engine.named_parameters()}
        refresh(trainers, 6)
        pid = ray.get(sidecars.actor(lost).__ray_call__.remote(lambda _: os.getpid()))
        os.kill(pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(ws.TransportError, match="sidecar of"):
            session.update()
        assert time.monotonic() - started < CONFIG.timeout_s
        assert all(torch.equal(before[name], parameter) for name, parameter in engine.named_parameters())
        session.update()
        assert equal(engine, trainers[0])


def at_node(rank: ReceiverRank, node: str) -> Callable[[bytes], list[bytes]]:
    """A party whose rank says that it is on that Ray node."""
    handle = in_process_party([rank])

    def moved(payload: bytes) -> list[bytes]:
        (reply,) = map(m.decode_reply, handle(payload))
        if isinstance(reply, m.ReceiverOpened):
            reply = msgspec.structs.replace(reply, identity=msgspec.structs.replace(reply.identity, node=node))
        return [m.encode(reply)]

    return moved


@pytest.mark.parametrize("other", ["shared_memory", "broadcast", "sharded_shared_memory", "sharded_broadcast"])
def test_one_update_carries_slices_to_some_and_to_others_slices_or_whole_tensors_over_another_transport(
    other: str, trainers: list[torch.nn.Module], sidecars: Sidecars
) -> None:
    engines = [nested_module(odd_weights(i)) for i in (1, 2)]
    here, there = (ReceiverRank(TorchModuleAdapter(engine)) for engine in engines)
    senders = [SenderRank(i, lambda t=t: t) for i, t in enumerate(trainers)]  # type: ignore[misc]
    fleet = LocalFleet(
        [in_process_party([sender]) for sender in senders],
        [in_process_party([here]), at_node(there, ray.get_runtime_context().get_node_id())],
        sidecars=sidecars,
    )
    rules = (TransportRule(use=other, same_node=True), TransportRule(use="sharded_rdt"))
    session = Session(fleet, msgspec.structs.replace(CONFIG, transport=rules))
    session.open()
    for seed in (7, 8):
        refresh(trainers, seed)
        report = session.update()
        assert all(equal(engine, trainers[0]) for engine in engines)
    of_engine: dict[str, set[str]] = {}
    for pair, name in report.transports.items():
        of_engine.setdefault(pair.split(" -> ")[1], set()).add(name)
    assert of_engine == {"engine 0 rank 0": {other}, "engine 1 rank 0": {"sharded_rdt"}}
    session.close()
    fleet.close()


# ---- torch modules that are sharded over engine ranks ---------------------------------------------------------------

LARGE = 3000
"""Rows and columns: tensors of 36 MB."""


def large(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(LARGE, LARGE, bias=i == 1) for i in range(4)))


def serve_part(rank: int, store: str) -> tuple[Callable[[bytes], Sequence[bytes]], torch.nn.Module]:
    """One of two ranks: columns and rows of the layers in turn."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    with torch.device("meta"):
        module = large(0)
    for i, layer in enumerate(module.children()):
        for name, parameter in list(layer.named_parameters()):
            place = Shard(i % 2) if name == "weight" else Replicate()
            shape = list(parameter.shape)
            if name == "weight":
                shape[i % 2] //= 2
            part = DTensor.from_local(torch.zeros(shape), mesh, [place], run_check=False)
            layer.register_parameter(name, torch.nn.Parameter(part, requires_grad=False))
    return in_process_party([ReceiverRank(TorchModuleAdapter(module))]), module


def parts(module: torch.nn.Module) -> Weights:
    return {name: tensor.to_local().clone() for name, tensor in module.state_dict().items()}


def peak_bytes(_: torch.nn.Module) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.fixture
def part_engines(tmp_path: Path) -> Iterator[list[ProcessParty]]:
    started = [ProcessParty(f"engine {i}", partial(serve_part, i, str(tmp_path / "store"))) for i in range(2)]
    yield started
    for party in started:
        party.close()


@over_each_transport
def test_ranks_of_a_sharded_torch_module_take_their_parts_and_never_hold_the_whole(
    config: ws.SyncConfig, part_engines: list[ProcessParty], sidecars: Sidecars
) -> None:
    trainer = large(1)
    fleet = LocalFleet([in_process_party([SenderRank(0, lambda: trainer)])], part_engines, sidecars=sidecars)
    session = Session(fleet, msgspec.structs.replace(config, bucket_bytes=4 << 20, timeout_s=60))
    session.open()
    before = [party.ask(peak_bytes) for party in part_engines]
    report = session.update()
    grown = [party.ask(peak_bytes) - was for party, was in zip(part_engines, before, strict=True)]
    state = trainer.state_dict()
    for i, party in enumerate(part_engines):
        for name, part in party.ask(parts).items():
            whole = state[name]
            d = int(name.split(".")[0]) % 2
            assert torch.equal(part, whole if name.endswith("bias") else whole.chunk(2, d)[i]), name
    rows = {row.rank: row for row in report.ranks}
    assert rows["engine 0 rank 0"].nbytes == rows["engine 1 rank 0"].nbytes < 0.51 * report.nbytes
    # The slices, staged for the vote, and the slots; not the model.
    assert max(grown) < 0.75 * report.nbytes, [f"{n / 1e6:.0f} MB of {report.nbytes / 1e6:.0f}" for n in grown]
    session.close()
    fleet.close()
