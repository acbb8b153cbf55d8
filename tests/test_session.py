"""Whole weight syncs in one process, over real transports: exact bytes after success, old bytes after failure."""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from weightsync.chunk import aligned, as_bytes
from weightsync.config import SyncConfig, TransportRule
from weightsync.engines.torch_module import TorchModuleAdapter
from weightsync.errors import (
    AgreementError,
    ConfigError,
    EnginePoisonedError,
    EngineStateError,
    IncompleteUpdateError,
    ManifestError,
    StagingLimitError,
    WeightSyncError,
)
from weightsync.messages import (
    Call,
    Close,
    Connect,
    Describe,
    Description,
    LinkPlan,
    Ok,
    OpenReceiver,
    OpenSender,
    Poll,
    ReceiverLink,
    ReceiverOpened,
    Reply,
    Request,
    SenderOpened,
    answer,
    decode_call,
    encode,
)
from weightsync.receiver import ReceiverRank
from weightsync.sender import SenderRank
from weightsync.session import Session
from weightsync.testing import LocalFleet, LocalSync, module_engine
from weightsync.transports.shared_memory import share_parameters

TRANSPORTS = ["shared_memory", "broadcast"]


class Model(torch.nn.Module):
    """Odd on purpose: ties, a frozen buffer, several dtypes, a scalar, an empty tensor, a parameter of its own."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(50, 16)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))
        self.norm = torch.nn.BatchNorm1d(16)
        self.bf16 = torch.nn.Linear(16, 4, dtype=torch.bfloat16)
        self.head = torch.nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.randn(()))
        self.register_buffer("mask", torch.rand(7) > 0.5)
        self.register_buffer("nothing", torch.empty(0, 3))

    def step(self) -> None:
        """Change every value."""
        with torch.no_grad():
            for tensor in [*self.parameters(), *self.buffers()]:
                if tensor.is_floating_point():
                    tensor.add_(torch.randn_like(tensor))
                else:
                    tensor.copy_(tensor.logical_not())


def weights(module: torch.nn.Module) -> dict[str, bytes]:
    return {name: as_bytes(t.detach()).numpy().tobytes() for name, t in module.state_dict().items()}


def config(**settings: Any) -> SyncConfig:
    return SyncConfig(**{"timeout_s": 20, **settings})


def half_of(module: Model, which: int) -> dict[str, torch.Tensor]:
    """Every second name; ties stay with their canonical name."""
    names = [name for name in module.state_dict() if name != "head.weight"]
    return {name: module.state_dict()[name] for name in names[which::2]}


class FailsOnce(TorchModuleAdapter):
    """Its first apply fails after one group, as a loader that runs out of memory does."""

    failed = False

    def apply(self, groups: Iterable[Iterable[tuple[str, torch.Tensor]]]) -> int:
        if not self.failed:
            self.failed = True
            super().apply([next(iter(groups))])
            raise RuntimeError("out of memory")
        return super().apply(groups)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("apply", ["staged", "streaming"])
def test_engines_hold_the_trainers_bytes_after_each_update(transport: str, apply: str) -> None:
    trainer, engines = Model(1), [Model(2), Model(3)]
    with LocalSync(
        [lambda: trainer], [module_engine(e) for e in engines], config(transport=transport, apply=apply)
    ) as session:
        for version in range(1, 4):
            report = session.update()
            assert [weights(engine) for engine in engines] == [weights(trainer)] * 2
            assert (report.version, session.version, report.apply) == (version, version, apply)
            trainer.step()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_trainers_that_each_hold_a_part_and_engines_of_several_ranks(transport: str) -> None:
    trainer = Model(1)
    engines = [[Model(2), Model(3)], [Model(4)]]
    with LocalSync(
        [lambda: half_of(trainer, 0), lambda: half_of(trainer, 1)],
        [[TorchModuleAdapter(rank) for rank in engine] for engine in engines],
        config(transport=transport),
    ) as session:
        for _ in range(2):
            report = session.update()
            assert all(weights(rank) == weights(trainer) for engine in engines for rank in engine)
            trainer.step()
        assert sum(row.nbytes for row in report.ranks if row.rank.startswith("trainer")) == report.nbytes
        assert {row.rank: row.reloads for row in report.ranks if row.rank.startswith("engine")} == {
            "engine 0 rank 0": 1,
            "engine 0 rank 1": 1,
            "engine 1 rank 0": 1,
        }
        assert len(report.transports) == 6


def test_ranks_of_an_engine_may_connect_at_different_times() -> None:
    """A rank that is asked again because another is not ready answers again."""
    rank = ReceiverRank(TorchModuleAdapter(Model(1)))
    sender = SenderRank(0, lambda: Model(1))
    settings = config()
    numbers = itertools.count(1)

    def ask(rank: SenderRank | ReceiverRank, request: Request) -> Reply:
        return rank.handle(Call(session="s", epoch=1, number=next(numbers), request=request))

    description = ask(sender, Describe(config=settings))
    assert isinstance(description, Description)
    ask(rank, OpenReceiver(config=settings, manifest=description.manifest, engine=0))
    plan = LinkPlan(id=1, transport="shared_memory", sender=0, num_receivers=1, host="127.0.0.1", token="t")
    names = tuple(meta.name for meta in description.manifest.tensors)
    opened = ask(sender, OpenSender(manifest=description.manifest, names=names, links=(plan,)))
    assert isinstance(opened, SenderOpened)
    ask(sender, Connect())
    link = ReceiverLink(plan=plan, address=opened.addresses[0], names=names, stable=True, receiver={0: 0})
    ask(rank, Connect(links=(link,)))
    assert [ask(rank, Poll(wait_s=5)) for _ in range(3)] == [Ok()] * 3
    ask(rank, Close())
    ask(sender, Close())


def test_trainers_that_all_hold_everything_share_the_sending() -> None:
    trainers = [Model(1), Model(1)]
    engine = Model(2)
    with LocalSync([lambda: trainers[0], lambda: trainers[1]], [module_engine(engine)], config()) as session:
        report = session.update()
    assert weights(engine) == weights(trainers[0])
    sent = [row.nbytes for row in report.ranks if row.rank.startswith("trainer")]
    assert sum(sent) == report.nbytes
    assert min(sent) > report.nbytes // 4


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_trainer_without_names_of_its_own_still_iterates_its_source(transport: str) -> None:
    values, seen = torch.randn(1000), []

    def collective(rank: int) -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("weight",):
            seen.append(rank)
            yield name, values.view(10, 100)

    engine = torch.nn.Linear(100, 10, bias=False)
    with LocalSync(
        [lambda: collective(0), lambda: collective(1)], [module_engine(engine)], config(transport=transport)
    ) as session:
        seen.clear()
        session.update()
    assert sorted(seen) == [0, 1]
    assert torch.equal(engine.weight, values.view(10, 100))


def test_trainers_that_disagree_are_named() -> None:
    other = {**dict(Model(1).state_dict()), "scale": torch.zeros(2)}
    sync = LocalSync([lambda: Model(1), lambda: other], [module_engine(Model(2))], config())
    with pytest.raises(AgreementError, match="trainer 1 has scale") as caught, sync:
        pass
    assert (caught.value.rank, caught.value.field) == ("trainer 1", "scale")


def test_values_are_cast_to_the_engines_dtype_and_the_report_says_so() -> None:
    trainer, engine = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, dtype=torch.bfloat16)
    with LocalSync([lambda: trainer], [module_engine(engine)], config()) as session:
        report = session.update()
    assert torch.equal(engine.weight, trainer.weight.to(torch.bfloat16))
    assert report.load[0].casts == ("bias: float32 -> bfloat16", "weight: float32 -> bfloat16")


def test_wire_dtypes_halve_the_bytes_and_spare_what_no_pattern_names() -> None:
    trainer, engine = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    with LocalSync([lambda: trainer], [module_engine(engine)], config(wire_dtype={"weight": "bfloat16"})) as session:
        report = session.update()
    assert report.nbytes == 64 * 2 + 8 * 4
    assert torch.equal(engine.weight, trainer.weight.to(torch.bfloat16).float())
    assert torch.equal(engine.bias, trainer.bias)


def test_wire_dtypes_that_treat_the_names_of_a_tie_differently_are_no_obstacle() -> None:
    trainer, engine = Model(1), Model(2)
    patterns = {"head.*": "float32", "*": "bfloat16"}
    with LocalSync([lambda: trainer], [module_engine(engine)], config(wire_dtype=patterns)) as session:
        session.update()
    assert torch.equal(engine.head.weight, trainer.embed.weight.to(torch.bfloat16).float())


def test_names_that_feed_nothing_and_parameters_that_nothing_feeds_are_reported() -> None:
    trainer = {"weight": torch.randn(4, 4), "extra": torch.randn(3)}
    engine = torch.nn.Linear(4, 4)
    bias = engine.bias.detach().clone()
    with LocalSync([lambda: trainer], [module_engine(engine)], config()) as session:
        report = session.update()
        assert session.status()["unmapped"] == {"engine 0 rank 0": ("extra",)}
    assert (report.load[0].unmapped, report.load[0].unfed) == (("extra",), ("bias",))
    assert torch.equal(engine.weight, trainer["weight"])
    assert torch.equal(engine.bias, bias)


def test_unfed_parameters_can_be_refused() -> None:
    sync = LocalSync(
        [lambda: {"weight": torch.ones(4, 4)}], [module_engine(torch.nn.Linear(4, 4))], config(unfed="error")
    )
    with pytest.raises(EngineStateError, match=r"engine 0 rank 0: no trainer tensor feeds bias"), sync:
        pass


def test_a_shape_that_does_not_fit_the_engine_is_refused_when_connecting() -> None:
    sync = LocalSync([lambda: torch.nn.Linear(4, 5)], [module_engine(torch.nn.Linear(4, 4))], config())
    with pytest.raises(ManifestError, match=r"weight \(float32, \[5, 4\]\) does not fit") as caught, sync:
        pass
    assert caught.value.rank == "engine 0 rank 0"


Change = Callable[[dict[str, torch.Tensor]], object]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(
    ("change", "kind", "match"),
    [
        (lambda held: held.pop("b"), (ManifestError, IncompleteUpdateError), "no longer has b|missing: b"),
        (lambda held: held.update(new=torch.ones(1)), ManifestError, "new .*not announced"),
        (lambda held: held.update(b=torch.ones(5)), ManifestError, r"b \(float32, \[3\]\) was announced"),
        (lambda held: held.update(b=torch.ones(3).half()), ManifestError, "float16"),
    ],
)
def test_what_changed_between_updates_is_named_and_the_engine_keeps_its_version(
    change: Change, kind: Any, match: str, lazy: bool
) -> None:
    held = {"a": torch.randn(4), "b": torch.randn(3)}
    good = dict(held)
    engine = torch.nn.ParameterDict({name: torch.zeros_like(t) for name, t in held.items()})
    source = (lambda: iter(list(held.items()))) if lazy else (lambda: held)
    with LocalSync([source], [module_engine(engine)], config()) as session:
        session.update()
        before = weights(engine)
        held["a"] = good["a"] = torch.randn(4)
        change(held)
        with pytest.raises(kind, match=match):
            session.update()
        assert weights(engine) == before
        assert session.version == 1
        held.clear()
        held.update(good)
        assert session.update().version == 2
        assert torch.equal(engine["a"], good["a"])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_name_that_the_source_yields_twice_is_named_and_nothing_changes(transport: str) -> None:
    twice = False

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", torch.ones(2, 2)
        yield "bias", torch.ones(2)
        if twice:
            yield "bias", torch.ones(2)

    engine = torch.nn.Linear(2, 2)
    with LocalSync([source], [module_engine(engine)], config(transport=transport)) as session:
        session.update()
        before, twice = weights(engine), True
        with pytest.raises(IncompleteUpdateError, match="engine 0 rank 0: bias came twice"):
            session.update()
        assert weights(engine) == before
        twice = False
        session.update()


def test_a_source_may_refill_one_buffer_for_every_tensor() -> None:
    values = {"0.weight": torch.randn(3, 3), "1.weight": torch.randn(3, 3)}

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(3, 3)
        for name, value in values.items():
            yield name, buffer.copy_(value)

    engine = torch.nn.Sequential(*(torch.nn.Linear(3, 3, bias=False) for _ in values))
    with LocalSync([source], [module_engine(engine)], config()) as session:
        session.update()
    assert weights(engine) == {name: as_bytes(value).numpy().tobytes() for name, value in values.items()}


def test_a_tie_that_was_cut_is_an_error_and_not_the_wrong_bytes() -> None:
    trainer, engine = Model(1), Model(2)
    with LocalSync([lambda: trainer], [module_engine(engine)], config()) as session:
        session.update()
        trainer.head.weight = torch.nn.Parameter(torch.randn(50, 16))
        with pytest.raises(ManifestError, match=r"head\.weight was announced as a tie of embed\.weight"):
            session.update()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_source_that_fails_half_way_changes_no_engine_and_the_next_update_is_exact(transport: str) -> None:
    trainer, engines, fail = Model(1), [Model(2), Model(3)], False

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for i, pair in enumerate(trainer.state_dict().items()):
            if fail and i == 5:
                raise RuntimeError("the gather broke")
            yield pair

    with LocalSync(
        [source], [module_engine(e) for e in engines], config(transport=transport, apply="staged")
    ) as session:
        session.update()
        before = weights(engines[0])
        trainer.step()
        fail = True
        with pytest.raises(WeightSyncError, match="trainer 0: RuntimeError: the gather broke"):
            session.update()
        assert [weights(e) for e in engines] == [before] * 2
        fail = False
        assert session.update().version == 2
        assert [weights(e) for e in engines] == [weights(trainer)] * 2


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("on_failure", ["raise", "poison"])
def test_an_engine_that_fails_to_apply_is_poisoned_the_other_commits_and_the_next_update_heals(
    transport: str, on_failure: str
) -> None:
    trainer, healthy, broken = Model(1), Model(2), Model(3)
    sync = LocalSync(
        [lambda: trainer],
        [module_engine(healthy), [FailsOnce(broken)]],
        config(transport=transport, on_failure=on_failure, apply="staged"),
    )
    with sync as session:
        if on_failure == "raise":
            with pytest.raises(EnginePoisonedError, match=r"engine 1 .*out of memory"):
                session.update()
        else:
            assert "out of memory" in session.update().poisoned["engine 1"]
        assert weights(healthy) == weights(trainer)
        assert [rank.poisoned for engine in sync.receivers for rank in engine] == [False, True]
        for _ in range(2):
            trainer.step()
            report = session.update()
            assert weights(healthy) == weights(broken) == weights(trainer)
            assert not report.poisoned
        assert session.version == 3
        assert not any(rank.poisoned for engine in sync.receivers for rank in engine)


def test_a_streaming_update_that_fails_poisons_and_the_next_heals() -> None:
    trainer, engine, fail = Model(1), Model(2), False

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for i, pair in enumerate(trainer.state_dict().items()):
            if fail and i == 8:
                deadline = time.monotonic() + 10
                while not sync.receivers[0][0]._coalescer.num_handed_out:  # type: ignore[union-attr]
                    assert time.monotonic() < deadline, "the engine has not begun to apply"
                    time.sleep(0.01)
                raise RuntimeError("the gather broke")
            yield pair

    sync = LocalSync(
        [source],
        [module_engine(engine)],
        config(transport="broadcast", apply="streaming", bucket_bytes=64, timeout_s=30),
    )
    with sync as session:
        session.update()
        fail, started = True, time.monotonic()
        with pytest.raises(EnginePoisonedError, match="gather broke"):
            session.update()
        assert time.monotonic() - started < 10, "the engine, which is loading, hears of it at once"
        assert sync.receivers[0][0].poisoned
        fail = False
        trainer.step()
        session.update()
        assert weights(engine) == weights(trainer)
        assert not sync.receivers[0][0].poisoned


class Lazy(TorchModuleAdapter):
    """A loader that stops before the end, as one that waits for a certain name does."""

    def apply(self, groups: Iterable[Iterable[tuple[str, torch.Tensor]]]) -> int:
        return super().apply([next(iter(groups))])


def test_a_loader_that_leaves_groups_unread_poisons_and_does_not_commit() -> None:
    sync = LocalSync([lambda: Model(1)], [[Lazy(Model(2))]], config())
    with sync as session:
        with pytest.raises(WeightSyncError, match="engine 0 rank 0: the engine's loader ended before it read"):
            session.update()
        assert session.version == 0
        assert sync.receivers[0][0].poisoned


class Stack(torch.nn.Module):
    """20 layers of 40 kB."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(100, 100) for _ in range(20))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_budget_smaller_than_the_model_streams_within_it(transport: str) -> None:
    trainer, engine, casting = Stack(1), Stack(2), Stack(3).double()
    limit = 100_000
    settings = config(transport=transport, staging_limit_bytes=limit, bucket_bytes=16_384)
    with LocalSync([lambda: trainer], [module_engine(engine), module_engine(casting)], settings) as session:
        report = session.update()
    assert weights(engine) == weights(casting.float()) == weights(trainer)
    assert report.apply == "streaming"
    peaks = [row.peak_staging_bytes for row in report.ranks if row.rank.startswith("engine")]
    assert max(peaks) <= limit
    assert peaks[1] > 0, "what is cast has to be whole first"


def test_a_staged_update_that_does_not_fit_is_refused_before_anything_moves() -> None:
    engine = Stack(2)
    before = weights(engine)
    settings = config(transport="broadcast", staging_limit_bytes=100_000, apply="staged")
    needed = sum(aligned(t.nbytes) for t in engine.state_dict().values())
    with LocalSync([lambda: Stack(1)], [module_engine(engine)], settings) as session:
        with pytest.raises(StagingLimitError, match="raise it") as caught:
            session.update()
        assert (caught.value.group, caught.value.needed_bytes, caught.value.limit_bytes) == (
            "(the whole model)",
            needed,
            100_000,
        )
    assert weights(engine) == before


def test_a_module_that_does_not_fit_the_budget_is_refused_with_its_name() -> None:
    settings = config(transport="broadcast", staging_limit_bytes=30_000)
    with (
        LocalSync([lambda: Stack(1)], [module_engine(Stack(2))], settings) as session,
        pytest.raises(StagingLimitError, match=r"module group layers\.0 needs 40448") as caught,
    ):
        session.update()
    assert (caught.value.group, caught.value.phase) == ("layers.0", "prepare")


def test_auto_counts_the_alignment_of_tiny_tensors_against_the_budget() -> None:
    trainer = {f"{i}.t": torch.randn(1) for i in range(100)}
    engine = torch.nn.Sequential(*(torch.nn.ParameterDict({"t": torch.zeros(1)}) for _ in range(100)))
    with LocalSync([lambda: trainer], [module_engine(engine)], config(staging_limit_bytes=2_000)) as session:
        assert session.update().apply == "streaming"
    assert all(torch.equal(engine.state_dict()[name], value) for name, value in trainer.items())


def test_the_report_counts_values_that_changed() -> None:
    trainer, engine = Model(1), Model(2)
    with LocalSync([lambda: trainer], [module_engine(engine)], config(count_changed_values=True)) as session:
        assert session.update().changed_values is None
        assert session.update().changed_values == 0
        with torch.no_grad():
            trainer.embed.weight[0, :5] += 1
        report = session.update()
    assert report.changed_values == 5
    assert report.total_values == sum(t.numel() for n, t in trainer.state_dict().items() if n != "head.weight")


def test_shared_parameters_are_updated_in_place_without_staging() -> None:
    trainer, engine = Stack(1), Stack(2)
    trainer.big = torch.nn.Linear(600, 600)
    engine.big = torch.nn.Linear(600, 600)
    share_parameters(trainer)
    with LocalSync([lambda: trainer], [module_engine(engine)], config()) as session:
        for _ in range(3):
            report = session.update()
            assert weights(engine) == weights(trainer)
            with torch.no_grad():
                for parameter in trainer.parameters():
                    parameter.add_(1)
    assert max(row.peak_staging_bytes for row in report.ranks) == 0


def test_rules_choose_the_transport_and_an_unknown_one_is_refused() -> None:
    rules = (TransportRule(use="broadcast", same_host=True), TransportRule(use="shared_memory"))
    engine = Model(2)
    with LocalSync([lambda: Model(1)], [module_engine(engine)], config(transport=rules)) as session:
        report = session.update()
    assert report.transports == {"trainer 0 -> engine 0 rank 0": "broadcast"}
    sync = LocalSync([lambda: Model(1)], [module_engine(engine)], config(transport="carrier_pigeon"))
    with pytest.raises(ConfigError, match="unknown transport 'carrier_pigeon'; known: auto, broadcast"), sync:
        pass


def two_hosts(
    source: Callable[[], Any], near: torch.nn.Module, far: torch.nn.Module, settings: SyncConfig
) -> tuple[Session, LocalFleet]:
    """A session in which the second engine says that it runs on another host; both are here."""
    sender, ranks = SenderRank(0, source), [ReceiverRank(TorchModuleAdapter(module)) for module in (near, far)]

    def receive(i: int, payload: bytes) -> list[bytes]:
        reply = ranks[i].handle(decode_call(payload))
        if i == 1 and isinstance(reply, ReceiverOpened):
            reply = replace(reply, identity=replace(reply.identity, machine="another"))
        return [encode(reply)]

    fleet = LocalFleet(
        [lambda payload: [answer(sender.handle, payload)]],
        [lambda payload: receive(0, payload), lambda payload: receive(1, payload)],
    )
    return Session(fleet, settings), fleet


@pytest.mark.parametrize("gpu", ["GPU-1", ""])
def test_whose_bytes_leave_the_gpu_that_both_ends_are_on_for_want_of_cupy_is_logged(
    gpu: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, engine = Model(1), Model(2)
    sender, receiver = SenderRank(0, lambda: trainer), ReceiverRank(TorchModuleAdapter(engine))

    def on_gpu(reply: Any) -> list[bytes]:
        if isinstance(reply, Description | ReceiverOpened):
            reply = replace(reply, identity=replace(reply.identity, gpu=gpu, cupy=""))
        return [encode(reply)]

    fleet = LocalFleet(
        [lambda payload: on_gpu(sender.handle(decode_call(payload)))],
        [lambda payload: on_gpu(receiver.handle(decode_call(payload)))],
    )
    session = Session(fleet, config())
    try:
        session.open()
        assert set(session.update().transports.values()) == {"shared_memory"}
        assert weights(engine) == weights(trainer)
    finally:
        session.close()
        fleet.close()
    warned = [record.getMessage() for record in caplog.records if "cupy" in record.getMessage()]
    assert len(warned) == bool(gpu)
    for text in warned:
        assert f"pid {os.getpid()}) has no cupy; pip install" in text
        assert "travel through CPU memory" in text


@pytest.mark.parametrize("bucket_bytes", ["16MiB", 16_384])
def test_one_trainer_serves_two_hosts_over_two_transports(bucket_bytes: str | int) -> None:
    trainer, near, far = Stack(1), Stack(2), Stack(3)
    session, fleet = two_hosts(lambda: trainer, near, far, config(bucket_bytes=bucket_bytes))
    try:
        session.open()
        report = session.update()
        assert sorted(report.transports.values()) == ["broadcast", "shared_memory"]
        assert weights(near) == weights(far) == weights(trainer)
    finally:
        session.close()
        fleet.close()


def test_a_source_that_fails_ends_both_links_at_once() -> None:
    fail, engines = False, (Stack(2), Stack(3))

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for i, pair in enumerate(Stack(1).state_dict().items()):
            if fail and i == 5:
                raise RuntimeError("the gather broke")
            yield pair

    session, fleet = two_hosts(source, *engines, config(timeout_s=20))
    try:
        session.open()
        fail, started = True, time.monotonic()
        with pytest.raises(WeightSyncError, match=r"gather broke|another link"):
            session.update()
        assert time.monotonic() - started < 10
    finally:
        session.close()
        fleet.close()


def resources() -> tuple[int, int]:
    """(open files, resident bytes)."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("settings", [{}, {"transport": "broadcast"}, {"staging_limit_bytes": 200_000}], ids=str)
def test_fifty_updates_leave_files_and_memory_flat(settings: dict[str, Any]) -> None:
    trainer, engine = Stack(1), Stack(2)
    with LocalSync([lambda: trainer], [module_engine(engine)], config(bucket_bytes=65_536, **settings)) as session:
        for i in range(50):
            session.update()
            if i == 9:
                files, resident = resources()
        assert weights(engine) == weights(trainer)
        now = resources()
    assert now[0] <= files
    assert now[1] - resident < 16 << 20, "half of what a model kept by each update would be"
