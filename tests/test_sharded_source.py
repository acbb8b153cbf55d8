"""Sharded trainers: four gloo processes whose DTensors become whole, in one order, without one waiting for ever."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from weightsync import messages as m
from weightsync.chunk import as_bytes
from weightsync.config import SyncConfig
from weightsync.engines.torch_module import TorchModuleAdapter
from weightsync.errors import ManifestError, WeightSyncError
from weightsync.manifest import Manifest, StorageWatch, TensorMeta
from weightsync.plan import assign_owners, merge_manifests
from weightsync.receiver import ReceiverRank
from weightsync.sender import SenderRank
from weightsync.session import Session
from weightsync.sharded import gather
from weightsync.source import TrainerSource
from weightsync.testing import LocalFleet, in_process_party
from weightsync.testing.processes import ProcessParty

WORLD = 4
Tensors = dict[str, torch.Tensor]
Bytes = dict[str, bytes]

# ---- what the ranks hold -------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """Sizes that four ranks cannot share evenly, so that some parts are empty, also of the tie; and a plain buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(3, 6)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(3))
        self.narrow = torch.nn.Linear(6, 1)
        self.head = torch.nn.Linear(6, 3, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor([seed]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden).relu()
        logits: torch.Tensor = self.head(hidden) + self.narrow(hidden)
        return logits


def column_and_row(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(OrderedDict(up=torch.nn.Linear(6, 10), down=torch.nn.Linear(10, 6)))


def typed(seed: int) -> Tensors:
    torch.manual_seed(seed)
    return {
        "fp8": torch.randn(5, 3).to(torch.float8_e4m3fn),
        "int16": torch.randint(-9, 9, (5, 3), dtype=torch.int16),
        "bool": torch.rand(5) > 0.5,
        "complex": torch.randn(5, 2, dtype=torch.complex64),
        "empty": torch.empty(0, 3),
        "replicated": torch.randn(()),
        "strided": torch.randn(4, 6).t(),
    }


def mesh(*shape: int, names: Sequence[str] | None = None) -> Any:
    """All ranks, without a *shape* in a row."""
    from torch.distributed.device_mesh import init_device_mesh

    device = "cuda" if "nccl" in str(dist.get_backend_config()) else "cpu"
    return init_device_mesh(device, shape or (dist.get_world_size(),), mesh_dim_names=tuple(names) if names else None)


def tensor_parallel(module: torch.nn.Module, tp: Any) -> torch.nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(module, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def fsdp(seed: int, *shape: int, **options: Any) -> torch.nn.Module:
    from torch.distributed.fsdp import fully_shard

    model, of = Model(seed), mesh(*shape, names=("copies", "shards") if shape else None)
    for layer in model.layers:
        fully_shard(layer, mesh=of, **options)
    fully_shard(model, mesh=of, **options)
    return model


def offloaded(seed: int) -> torch.nn.Module:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return fsdp(seed, offload_policy=CPUOffloadPolicy(pin_memory=False))


def trained(seed: int) -> torch.nn.Module:
    """After a forward FSDP2 leaves the root's parameters unsharded, until its state_dict is taken."""
    model = fsdp(seed)
    with torch.no_grad():
        model(torch.tensor([1, 2]))
    return model


def fsdp_and_tp(seed: int) -> torch.nn.Module:
    from torch.distributed.fsdp import fully_shard

    both = mesh(2, 2, names=("dp", "tp"))
    model = tensor_parallel(column_and_row(seed), both["tp"])
    for layer in model.children():
        fully_shard(layer, mesh=both["dp"])
    fully_shard(model, mesh=both["dp"])
    return model


def pipeline(seed: int) -> Tensors:
    """Ranks 0 and 1 hold the first layers, ranks 2 and 3 the others."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    stages = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    stage = dist.get_rank() // 2
    whole = Model(seed).state_dict()
    names = [
        name for name in whole if (name.startswith(("embed", "layers.0"))) == (stage == 0) and name != "head.weight"
    ]
    return {n: distribute_tensor(whole[n], stages[stage], [Shard(0)]) if whole[n].dim() else whole[n] for n in names}


def experts(seed: int) -> Tensors:
    """Every rank knows the DTensors of both stages, as code does that builds the model everywhere; and has an expert."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    stages = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3]), mesh()]
    whole, rank = Model(seed).state_dict(), dist.get_rank()
    expert = {f"experts.{rank}": torch.full((3,), float(seed + rank))}
    layers = {
        f"layers.{i}.weight": distribute_tensor(whole[f"layers.{i}.weight"], of, [Shard(1)], src_data_rank=None)
        for i, of in enumerate(stages)
    }
    # The order differs between ranks; that of the merged manifest counts.
    pairs = list((layers | expert if rank % 2 else expert | layers).items())
    return dict(pairs)


def odd(seed: int) -> Tensors:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    of, whole = mesh(), typed(seed)
    held: Tensors = {
        name: distribute_tensor(t, of, [Replicate() if name == "replicated" else Shard(0)], src_data_rank=None)
        for name, t in whole.items()
    }
    return held | {"partial": DTensor.from_local(torch.full((3,), float(seed)), of, [Partial()])}


def whole(seed: int) -> Tensors:
    """Nothing to gather: copies on all ranks, and shards of one."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    one = mesh(WORLD, 1, names=("copies", "shards"))
    state = Model(seed).state_dict()
    return {
        name: DTensor.from_local(t, one, [Replicate(), Shard(0) if t.dim() else Replicate()], run_check=False)
        for name, t in state.items()
    }


def all_of(seed: int) -> Tensors:
    return Model(seed).state_dict()


def parameters_of(seed: int) -> Tensors:
    return dict(Model(seed).named_parameters())


# Kind -> (what a rank holds, collective; the same whole).
KINDS: dict[str, tuple[Callable[[int], Any], Callable[[int], Tensors]]] = {
    "fsdp": (lambda seed: fsdp(seed), all_of),
    "fsdp after a forward": (trained, all_of),
    "fsdp, offloaded": (offloaded, all_of),
    "fsdp, state dict": (lambda seed: fsdp(seed).state_dict(), all_of),
    "fsdp, list": (lambda seed: list(fsdp(seed).named_parameters()), parameters_of),
    "fsdp, generator": (lambda seed: fsdp(seed).named_parameters, parameters_of),
    "hsdp": (lambda seed: fsdp(seed, 2, 2), all_of),
    "tensor-parallel": (
        lambda seed: tensor_parallel(column_and_row(seed), mesh()),
        lambda seed: column_and_row(seed).state_dict(),
    ),
    "fsdp x tensor-parallel": (fsdp_and_tp, lambda seed: column_and_row(seed).state_dict()),
    "pipeline": (pipeline, lambda seed: {n: t for n, t in all_of(seed).items() if n != "head.weight"}),
    "experts": (
        experts,
        lambda seed: (
            {f"layers.{i}.weight": all_of(seed)[f"layers.{i}.weight"] for i in range(3)}
            | {f"experts.{rank}": torch.full((3,), float(seed + rank)) for rank in range(WORLD)}
        ),
    ),
    "odd": (odd, lambda seed: typed(seed) | {"partial": torch.full((3,), float(seed * WORLD))}),
    "whole": (whole, all_of),
}

# ---- what happens in a rank's process; each is a function for `Ranks.ask` -------------------------------------------


class Rank:
    """A trainer rank of one gloo group."""

    def __init__(self, rank: int, store: str, world: int, backend: str) -> None:
        torch.set_num_threads(1)
        if "nccl" in backend:
            torch.cuda.set_device(rank)
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=30),  # so that what would hang fails
        )
        self.rank = rank
        self.held: Any = None
        self.source = TrainerSource(lambda: self.held, wire_dtype={})
        self.sender = SenderRank(rank, lambda: self.held)
        self.stack = ExitStack()
        self.gathers = Gathers()


def serve(rank: int, store: str, world: int, backend: str) -> tuple[Callable[[bytes], list[bytes]], Rank]:
    subject = Rank(rank, store, world, backend)
    return lambda payload: [m.answer(lambda call: subject.sender.handle(call), payload)], subject


def hold(subject: Rank, kind: str, seed: int, wire_dtype: dict[str, str]) -> Manifest:
    """What the rank announces."""
    subject.held = KINDS[kind][0](seed)
    get = subject.held if isinstance(subject.held, MethodType) else lambda: subject.held
    subject.source = TrainerSource(get, wire_dtype=wire_dtype)
    return subject.source.manifest()


@dataclass
class Gathers:
    """Which tensors were gathered, and how many others were alive at each gather."""

    names: list[str] = field(default_factory=list)
    others_alive: list[int] = field(default_factory=list)


@contextmanager
def watched() -> Iterator[Gathers]:
    gathers, watches = Gathers(), list[StorageWatch]()

    def watching(meta: TensorMeta, tensor: Any) -> torch.Tensor:
        deadline = time.monotonic() + 2  # a thread of gloo's lets go of a tensor a moment after it is whole
        while any(watch.alive() for watch in watches) and time.monotonic() < deadline:
            time.sleep(0)
        gathers.others_alive.append(sum(watch.alive() for watch in watches))
        whole = gather(meta, tensor)
        gathers.names.append(meta.name)
        watches.append(StorageWatch(whole.untyped_storage()))
        return whole

    with patch("weightsync.source.gather", watching):
        yield gathers


def send(
    subject: Rank, manifest: Manifest, names: Sequence[tuple[str, ...]], check: bool, fails: Sequence[int]
) -> tuple[Bytes, Gathers, bool]:
    """What was sent, the gathers, whether the tensors are held. Iterates as a sender does. The ranks in *fails* break down at their second tensor, and go on without sending."""
    own, sent = names[subject.rank], dict[str, bytes]()
    with watched() as gathers:
        if check:
            subject.source.check(manifest, own)
            assert not gathers.names, "check must not gather"
        tensors = subject.source.tensors(manifest, own)
        for meta, tensor in tensors:
            assert tuple(tensor.shape) == meta.shape
            sent[meta.name] = as_bytes(tensor.detach().to(meta.torch_dtype).cpu()).numpy().tobytes()
            if subject.rank in fails and len(sent) == 2:
                break
        for _ in tensors:
            pass
    return sent, gathers, subject.source.held


def change(subject: Rank, name: str, in_rank: int) -> None:
    """Another tensor takes the place of *name* in one rank."""
    if subject.rank == in_rank:
        subject.held = dict(subject.held) | {name: torch.ones(1, 2, 3)}
        subject.source = TrainerSource(lambda: subject.held, wire_dtype={})


def errors(subject: Rank) -> dict[str, tuple[str, str]]:
    """(type, text) of what a rank says of DTensors that cannot be sent."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    group = dist.new_group(list(range(WORLD)))
    shard = DTensor.from_local(torch.ones(2), DeviceMesh.from_group(group, "cpu"), [Shard(0)], run_check=False)
    no_data = DTensor.from_local(torch.empty(2, device="meta"), mesh(), [Shard(0)], run_check=False)
    source = TrainerSource(lambda: {"w": shard}, wire_dtype={})
    lazy = TrainerSource(lambda: iter([("w", shard)]), wire_dtype={})
    manifest = source.manifest()
    found = {}

    def attempt(name: str, do: Callable[[], object]) -> None:
        with pytest.raises(WeightSyncError) as caught:
            do()
        found[name] = (caught.typename, str(caught.value))

    attempt("meta", TrainerSource(lambda: {"w": no_data}, wire_dtype={}).manifest)
    with patch("torch.distributed.get_backend_config", return_value="cuda:nccl"):
        attempt("backend", lambda: source.check(manifest, ("w",)))
    dist.destroy_process_group(group)
    attempt("check", lambda: source.check(manifest, ("w",)))
    attempt("unchecked", lambda: list(source.tensors(manifest, ("w",))))
    attempt("lazy", lambda: list(lazy.tensors(manifest, ("w",))))
    return found


def start_sync(subject: Rank, kind: str, seed: int) -> None:
    subject.held = KINDS[kind][0](seed)
    subject.sender = SenderRank(subject.rank, lambda: subject.held)


def step(subject: Rank) -> Bytes:
    """Change every parameter, as an optimizer does; returns the whole weights. Collective."""
    with torch.no_grad():
        for parameter in subject.held.parameters():
            parameter.mul_(-1.5)
        state = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in subject.held.state_dict().items()}
    return to_bytes(state)


def break_link(subject: Rank, rank: int) -> None:
    """The next send of that rank fails after one tensor."""
    from weightsync.transports.shared_memory import SharedMemorySender

    if subject.rank != rank:
        return
    whole = SharedMemorySender.send

    def broken(self: Any, transfer: Any, tensors: Iterator[Any]) -> Any:
        SharedMemorySender.send = whole  # type: ignore[method-assign]
        next(tensors)
        raise ConnectionError("the cable was cut")

    SharedMemorySender.send = broken  # type: ignore[method-assign,assignment]


# ---- the tests -----------------------------------------------------------------------------------------------------


def to_bytes(tensors: Tensors) -> Bytes:
    return {name: as_bytes(t.detach()).numpy().tobytes() for name, t in tensors.items()}


class Ranks:
    """The processes of one group, seen from the test."""

    def __init__(self, store: Path, world: int = WORLD, backend: str = "gloo") -> None:
        self.parties = [
            ProcessParty(f"trainer {rank}", partial(serve, rank, str(store), world, backend)) for rank in range(world)
        ]
        self._threads = ThreadPoolExecutor(world)

    def ask(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What *function* returns on every rank; the ranks run it at the same time."""
        return list(self._threads.map(lambda party: party.ask(function, *arguments), self.parties))

    def close(self) -> None:
        for party in self.parties:
            party.close()
        self._threads.shutdown()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("sharded") / "store")
    yield ranks
    ranks.close()


def plan(ranks: Ranks, kind: str, wire_dtype: dict[str, str] | None = None) -> tuple[Manifest, list[tuple[str, ...]]]:
    """The merged manifest and who sends what: in another order than the manifest's."""
    manifests = ranks.ask(hold, kind, 3, wire_dtype or {})
    merged = merge_manifests(manifests)
    return merged, assign_owners(merged, manifests, [meta.name for meta in reversed(merged.tensors)])


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_sends_whole_tensors_and_gathers_in_the_manifests_order(kind: str, ranks: Ranks) -> None:
    expected = KINDS[kind][1](3)
    manifest, names = plan(ranks, kind)
    assert set(manifest.all_names) == expected.keys()
    assert all(manifest.meta_of(n) == TensorMeta.of(n, t) for n, t in expected.items())
    assert manifest.aliases == ({"head.weight": "embed.weight"} if "head.weight" in expected else {})
    assert sum(bool(part) for part in names) > 1, "more than one rank sends"
    sent: Bytes = {}
    for part, (found, gathers, held) in zip(names, ranks.ask(send, manifest, names, True, ()), strict=True):
        assert set(found) == set(part)
        sent |= found
        assert gathers.names == [meta.name for meta in manifest.tensors if meta.name in gathers.names]
        assert not any(gathers.others_alive), "one whole tensor at a time"
        assert held == (kind == "whole") == (not gathers.names)
        assert tuple(found) == part or not held, "in the order asked for where nothing is gathered"
    assert sent == {name: data for name, data in to_bytes(expected).items() if name in manifest.by_name}


def test_every_rank_gathers_what_others_send_and_only_within_its_mesh(ranks: Ranks) -> None:
    manifest, names = plan(ranks, "experts")
    gathered = [gathers.names for _, gathers, _ in ranks.ask(send, manifest, names, True, ())]
    first, second, common = (f"layers.{i}.weight" for i in range(3))
    assert [sorted(names) for names in gathered] == [[first, common]] * 2 + [[second, common]] * 2


def test_a_tensor_is_cast_before_it_is_gathered(ranks: Ranks) -> None:
    """So that half the bytes are gathered; the values are those of a cast of the whole."""
    manifest, names = plan(ranks, "fsdp", {"*bias": "float32", "*": "bfloat16"})
    sent: Bytes = {}
    for found, _, _ in ranks.ask(send, manifest, names, True, ()):
        sent |= found
    for name, tensor in Model(3).state_dict().items():
        if name in manifest.by_name:
            wire = manifest.by_name[name].torch_dtype
            assert wire is (torch.int64 if name == "count" else torch.float32 if "bias" in name else torch.bfloat16)
            assert sent[name] == to_bytes({name: tensor.to(wire)})[name]


@pytest.mark.parametrize("kind", ["fsdp", "fsdp, generator"])
def test_ranks_that_stop_sending_do_not_stop_the_others(kind: str, ranks: Ranks) -> None:
    manifest, _ = plan(ranks, kind)
    everything = tuple(meta.name for meta in manifest.tensors)
    answers = ranks.ask(send, manifest, [everything, (), everything, everything], True, (0, 2))
    assert [len(sent) for sent, _, _ in answers] == [2, 0, 2, len(everything)]
    gathered = [name for name in everything if name != "count"]
    assert all(gathers.names == gathered for _, gathers, _ in answers)


def test_a_rank_whose_tensor_changed_unnoticed_gathers_on_and_says_so_at_the_end(ranks: Ranks) -> None:
    manifest, _ = plan(ranks, "fsdp, state dict")
    everything = tuple(meta.name for meta in manifest.tensors)
    ranks.ask(change, "count", 1)
    with ThreadPoolExecutor(WORLD) as threads:
        works = [threads.submit(p.ask, send, manifest, [everything] * WORLD, False, ()) for p in ranks.parties]
    with pytest.raises(ManifestError, match=r"count \(int64, \[1\]\) was announced, .*\[1, 2, 3\]"):
        works[1].result()
    assert all(set(works[rank].result()[0]) == set(everything) for rank in (0, 2, 3))


@pytest.mark.gpu
def test_nccl_gathers_between_gpus_and_gloo_what_is_offloaded(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    ranks = Ranks(tmp_path / "store", 2, "cpu:gloo,cuda:nccl")
    try:
        for kind in ("fsdp", "fsdp, offloaded", "tensor-parallel"):
            manifest, names = plan(ranks, kind, {"*": "bfloat16"})
            expected = {n: t.to(manifest.meta_of(n).torch_dtype) for n, t in KINDS[kind][1](3).items()}
            sent: Bytes = {}
            for found, gathers, held in ranks.ask(send, manifest, names, True, ()):
                sent |= found
                assert gathers.names
                assert not held
            assert sent == {n: data for n, data in to_bytes(expected).items() if n in manifest.by_name}
    finally:
        ranks.close()


def test_what_cannot_be_gathered_is_named(ranks: Ranks) -> None:
    for found in ranks.ask(errors):
        kind, text = found.pop("meta")
        assert kind == "ManifestError"
        assert text.startswith("w is on the meta device")
        assert {kind for kind, _ in found.values()} == {"WeightSyncError"}
        assert "shards are in cpu memory" in found["backend"][1]
        gone = "w cannot be gathered: the process group of its mesh of 4 ranks is gone"
        assert found["check"][1].startswith(gone)
        assert found["unchecked"][1].startswith(gone)
        assert found["lazy"][1].startswith("w could not be gathered over its mesh of 4 ranks")


@pytest.fixture
def engine() -> Model:
    return Model(9)


@pytest.fixture
def fleet(ranks: Ranks, engine: Model) -> Iterator[LocalFleet]:
    adapter = TorchModuleAdapter(engine)
    fleet = LocalFleet(ranks.parties, [in_process_party([ReceiverRank(adapter, rank=0)])])
    yield fleet
    fleet.close()


@pytest.mark.parametrize(
    ("transport", "apply"),
    [
        ("shared_memory", "staged"),
        ("broadcast", "staged"),
        ("shared_memory", "streaming"),
        ("sharded_rdt", "staged"),
        ("sharded_rdt", "streaming"),
        ("sharded_shared_memory", "staged"),
        ("sharded_broadcast", "streaming"),
    ],
)
def test_an_engine_equals_four_fsdp_ranks_bit_for_bit(
    transport: str, apply: str, ranks: Ranks, engine: Model, fleet: LocalFleet, request: pytest.FixtureRequest
) -> None:
    if transport == "sharded_rdt":
        fleet.use_sidecars(request.getfixturevalue("sidecars"))
    ranks.ask(start_sync, "fsdp after a forward", 5)
    session = Session(fleet, SyncConfig(transport=transport, apply=apply, timeout_s=20, bucket_bytes=256))  # type: ignore[arg-type]
    session.open()
    for _ in range(2):
        expected, *others = ranks.ask(step)
        assert all(other == expected for other in others)
        report = session.update()
        assert to_bytes(engine.state_dict()) == expected
        assert sum(bool(row.nbytes) for row in report.ranks if row.rank.startswith("trainer")) > 1
    session.close()


def start_sync_of_parameters(subject: Rank, seed: int) -> None:
    subject.held = fsdp(seed)
    subject.sender = SenderRank(subject.rank, lambda: dict(subject.held.named_parameters(remove_duplicate=False)))


def forward(subject: Rank) -> None:
    with torch.no_grad():
        subject.held(torch.tensor([1, 2]))


def reshard(subject: Rank) -> None:
    subject.held.reshard()


@pytest.mark.parametrize("transport", ["sharded_shared_memory", "sharded_broadcast"])
def test_parameters_that_a_forward_left_whole_are_not_cut_as_if_they_were_shards(
    transport: str, ranks: Ranks, engine: Model, fleet: LocalFleet
) -> None:
    def parameters(of: Any) -> Bytes:
        found = of if isinstance(of, dict) else to_bytes(of.state_dict())
        return {name: value for name, value in found.items() if name != "count"}

    ranks.ask(start_sync_of_parameters, 5)
    session = Session(fleet, SyncConfig(transport=transport, timeout_s=20))
    session.open()
    before = parameters(ranks.ask(step)[0])
    session.update()
    assert parameters(engine) == before
    expected = parameters(ranks.ask(step)[0])
    ranks.ask(forward)
    with pytest.raises(ManifestError, match=r"weight was sharded on this rank.*is whole now.*Call reshard\(\)"):
        session.update()
    assert parameters(engine) == before
    ranks.ask(reshard)
    session.update()
    assert parameters(engine) == expected
    session.close()


def count_gathers(subject: Rank) -> None:
    subject.stack = ExitStack()
    subject.gathers = subject.stack.enter_context(watched())


def step_one(subject: Rank, name: str) -> Bytes:
    """Train a single parameter; what the whole model then is."""
    subject.gathers.names.clear()
    with torch.no_grad():
        subject.held.get_parameter(name).to_local().add_(1)
    return to_bytes(
        {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in subject.held.state_dict().items()}
    )


def gathered(subject: Rank) -> list[str]:
    return subject.gathers.names


@pytest.mark.parametrize("transport", ["shared_memory", "sharded_shared_memory"])
def test_shards_that_have_not_changed_are_not_gathered(
    transport: str, ranks: Ranks, engine: Model, fleet: LocalFleet
) -> None:
    ranks.ask(start_sync, "fsdp", 7)
    session = Session(fleet, SyncConfig(transport=transport, timeout_s=20, skip_unchanged=True))
    session.open()
    session.update()
    ranks.ask(count_gathers)
    for name in ("layers.1.weight", "narrow.weight", "embed.weight"):
        expected, *_ = ranks.ask(step_one, name)
        report = session.update()
        assert to_bytes(engine.state_dict()) == expected
        module = name.rpartition(".")[0]
        needed = {n for n in expected if n.startswith(module)} if transport == "shared_memory" else set()
        assert [set(names) for names in ranks.ask(gathered)] == [needed] * WORLD
        assert report.num_skipped == 5, "all modules but one, of which the root holds a buffer"
    session.close()


def test_after_an_owner_failed_midway_the_next_update_is_exact(ranks: Ranks, engine: Model, fleet: LocalFleet) -> None:
    ranks.ask(start_sync, "fsdp", 6)
    session = Session(fleet, SyncConfig(transport="shared_memory", apply="staged", timeout_s=20, retries=0))
    session.open()
    before = to_bytes(engine.state_dict())
    ranks.ask(break_link, 1)
    with pytest.raises(WeightSyncError, match="the cable was cut") as caught:
        session.update()
    assert caught.value.rank == "trainer 1"
    assert to_bytes(engine.state_dict()) == before
    (expected, *_) = ranks.ask(step)
    session.update()
    assert to_bytes(engine.state_dict()) == expected
    session.close()
