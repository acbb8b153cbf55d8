"""cuda_ipc over memory of the CPU that is named, exported and mapped as a GPU's is: everything above the handle, without a GPU.

On a GPU the same suites run in tests/gpu/test_cuda_ipc.py.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch

import weightsync as ws
from tests.transports.stand_in import NAME, StandIn, StandInReceiver, StandInSender, exportable
from weightsync.errors import DigestError, TransportError
from weightsync.manifest import Manifest
from weightsync.receiver import ReceiverRank
from weightsync.registry import register_transport, unregister_transport
from weightsync.testing import LocalSync, TransportSuite, module_engine
from weightsync.testing.link import BUCKET_BYTES, Tensors
from weightsync.testing.local import in_process_party
from weightsync.testing.transport_bytes import MovesExactBytes
from weightsync.transports.cuda_ipc import CudaIpcSender, Digests, Set
from weightsync.transports.exports import Layout, Segment
from weightsync.transports.handles import Chunk


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register_transport(NAME, StandInSender, StandInReceiver)
    yield
    unregister_transport(NAME)


class TestStage(TransportSuite):
    transport = NAME
    num_tiny_tensors = 2_000


class TestBuckets(MovesExactBytes):
    transport = NAME
    num_tiny_tensors = 2_000
    settings: ClassVar = {"staging_limit_bytes": 2 * BUCKET_BYTES, "gpu_bucket_bytes": BUCKET_BYTES}


class TestParameters(MovesExactBytes):
    """The trainer holds its weights in memory that others can map, and they are read in place."""

    transport = NAME
    held = True
    num_tiny_tensors = 2_000

    def hold(self, tensors: Tensors) -> Callable[[Tensors], Tensors]:
        own = exportable(tensors)

        def update(values: Tensors) -> Tensors:
            for name, value in values.items():
                own[name].copy_(value)
            return own

        return update


def make(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model: Any = torch.nn.Sequential(
        torch.nn.Embedding(100, 32),
        torch.nn.Linear(32, 64),
        torch.nn.BatchNorm1d(64),
        torch.nn.Linear(32, 100, bias=False),
    )
    model[3].weight = model[0].weight
    made: torch.nn.Module = model
    return made


def shared(seed: int) -> torch.nn.Module:
    """A trainer's model, whose parameters lie in memory that others can map."""
    model = make(seed)
    own = exportable({name: parameter.detach() for name, parameter in model.named_parameters()})
    for name, parameter in model.named_parameters():
        parameter.data = own[name]
    return model


def disturb(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    theirs, ours = one.state_dict(), other.state_dict()
    return all(torch.equal(theirs[name], ours[name]) for name in theirs)


def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What senders tell from now on."""
    found: list[Any] = []
    tell = CudaIpcSender._tell

    def noted(self: CudaIpcSender, message: Any, **more: Any) -> None:
        found.append(message)
        tell(self, message, **more)

    monkeypatch.setattr(CudaIpcSender, "_tell", noted)
    return found


@pytest.mark.parametrize("apply", ["staged", "streaming"])
@pytest.mark.parametrize("digest", [True, False])
def test_parameters_are_described_once_and_read_in_place(
    apply: Any, digest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, engine = shared(1), make(2)
    messages = told(monkeypatch)
    config = ws.SyncConfig(transport=NAME, apply=apply, digest=digest)
    with LocalSync([lambda: trainer], [module_engine(engine)], config) as session:
        for _ in range(4):
            session.update()
            assert same(trainer, engine)
            disturb(trainer)
    kinds = [type(message) for message in messages]
    assert kinds.count(Layout) == 1
    assert kinds.count(Set) == 4
    assert kinds.count(Digests) == (4 if digest else 0)
    assert kinds.count(Segment) == 2  # the parameters, and a stage for the buffers


@pytest.mark.parametrize("apply", ["streaming", "auto"])
@pytest.mark.parametrize("digest", [True, False])
def test_what_is_read_in_place_is_loaded_beside_what_has_no_room_in_a_stage(
    apply: Any, digest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, engine = shared(1), make(2)
    for model in (trainer, engine):
        for module in model.children():
            module.register_buffer("table", torch.zeros(4096))  # which cannot be mapped
    messages = told(monkeypatch)
    config = ws.SyncConfig(transport=NAME, apply=apply, digest=digest, staging_limit_bytes=50_000)
    with LocalSync([lambda: trainer], [module_engine(engine)], config) as session:
        for number in range(1, 4):
            disturb(trainer)
            for _, buffer in trainer.named_buffers():
                buffer.fill_(number)
            report = session.update()
            assert same(trainer, engine)
        assert report.apply == "streaming"
    assert not any(message.stable for message in messages if isinstance(message, Chunk))
    assert sum(isinstance(message, Set) for message in messages) == 3


@pytest.mark.parametrize("apply", ["staged", "streaming"])
@pytest.mark.parametrize("digest", [True, False])
def test_what_has_not_changed_is_left_out_of_sets_and_stages(
    apply: Any, digest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, engine = shared(1), make(2)
    messages = told(monkeypatch)
    config = ws.SyncConfig(transport=NAME, apply=apply, digest=digest, skip_unchanged=True)
    tensors = {name: t for name, t in trainer.state_dict(keep_vars=True).items() if name != "3.weight"}
    groups = [[name for name in tensors if name.startswith(key)] for key in "012"]  # "3" is tied to "0"
    with LocalSync([lambda: trainer], [module_engine(engine)], config) as session:
        session.update()
        for step in ((0,), (), (0,), (1, 2), (2,), (0, 1), (0, 1)):
            for group in step:
                with torch.no_grad():
                    tensors[groups[group][0]].add_(1)
            messages.clear()
            report = session.update()
            assert same(trainer, engine)
            expected = sum(tensors[name].nbytes for group in step for name in groups[group])
            assert [row.nbytes for row in report.ranks] == [expected] * 2
            assert report.num_skipped == 3 - len(step)
            assert bool(messages) == bool(step), "nothing is even said where nothing has changed"
    assert [type(message) for message in messages].count(Layout) == 0, "the same tensors as before: described once"


def test_parameters_that_move_are_described_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, engine = shared(1), make(2)
    messages = told(monkeypatch)
    with LocalSync([lambda: trainer], [module_engine(engine)], ws.SyncConfig(transport=NAME)) as session:
        session.update()
        for round_ in range(4):
            some = list(trainer.named_parameters())[round_ % 3 :]
            moved = exportable({name: torch.randn_like(parameter) for name, parameter in some})
            for name, tensor in moved.items():
                trainer.get_parameter(name).data = tensor
            del moved, tensor
            gc.collect()
            messages.clear()
            session.update()
            assert same(trainer, engine)
            assert [isinstance(message, Layout) for message in messages].count(True) == 1


@pytest.mark.parametrize("apply", ["staged", "streaming"])
def test_a_weight_that_is_read_otherwise_than_sent_is_seen(apply: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, engine = shared(1), make(2)
    before = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    with LocalSync([lambda: trainer], [module_engine(engine)], ws.SyncConfig(transport=NAME, apply=apply)) as session:
        tell = CudaIpcSender._tell

        def other(self: CudaIpcSender, message: Any, **more: Any) -> None:
            if isinstance(message, Digests):
                message = Digests(bytes([message.digests[0] ^ 1]) + message.digests[1:])
            tell(self, message, **more)

        with monkeypatch.context() as patch:
            patch.setattr(CudaIpcSender, "_tell", other)
            error = {"staged": DigestError, "streaming": ws.EnginePoisonedError}[apply]
            with pytest.raises(error, match=r"0\.weight: its bytes differ"):
                session.update()
        if apply == "staged":
            assert all(torch.equal(before[name], tensor) for name, tensor in engine.state_dict().items())
        session.update()
        assert same(trainer, engine)


def test_memory_that_is_not_where_the_sender_says_is_refused_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer, engine, lies = shared(1), make(2), True
    tell = CudaIpcSender._tell

    def elsewhere(self: CudaIpcSender, message: Any, **more: Any) -> None:
        if isinstance(message, Layout) and lies:
            first, second, *rest = message.places
            places = (type(first)(first.name, first.segment, first.offset + 256), second, *rest)
            message = Layout(places, message.samples)
        tell(self, message, **more)

    monkeypatch.setattr(CudaIpcSender, "_tell", elsewhere)
    with LocalSync([lambda: trainer], [module_engine(engine)], ws.SyncConfig(transport=NAME, digest=False)) as session:
        with pytest.raises(TransportError, match="is not where the weights of sender 0 lie"):
            session.update()
        lies = False
        session.update()
        assert same(trainer, engine)


def test_a_receiver_that_reaches_other_memory_is_refused_when_it_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = StandIn(torch.device("cpu"))
    opened = StandIn.open
    monkeypatch.setattr(StandIn, "open", lambda self, *_, **__: wrong.pool(4096))
    with pytest.raises(TransportError, match="is not that of sender 0"):  # noqa: SIM117
        with LocalSync([lambda: shared(1)], [module_engine(make(2))], ws.SyncConfig(transport=NAME, timeout_s=2)):
            pass
    monkeypatch.setattr(StandIn, "open", opened)


def test_what_cannot_be_exported_goes_over_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, engine = shared(1), make(2)
    export = StandIn.export
    pools = {StandIn(torch.device("cpu")).number_of(p.data_ptr()) for p in trainer.parameters()}
    monkeypatch.setattr(StandIn, "export", lambda self, a: None if a.number in pools else export(self, a))
    messages = told(monkeypatch)
    with LocalSync([lambda: trainer], [module_engine(engine)], ws.SyncConfig(transport=NAME)) as session:
        for _ in range(2):
            session.update()
            assert same(trainer, engine)
            disturb(trainer)
    assert not any(isinstance(message, Set) for message in messages)


def test_a_tensor_that_stops_being_readable_in_place_opens_the_link_anew() -> None:
    trainer, engine = shared(1), make(2)
    with LocalSync([lambda: trainer], [module_engine(engine)], ws.SyncConfig(transport=NAME, retries=1)) as session:
        session.update()
        for parameter in trainer.parameters():
            parameter.data = parameter.data.clone()  # to memory that nobody can map
        report = session.update()
        assert same(trainer, engine)
        assert report.failed_attempts


def test_everything_is_given_back() -> None:
    trainer = shared(1)
    gc.collect()
    before = set(StandIn.known)
    with LocalSync([lambda: trainer], [module_engine(make(2))], ws.SyncConfig(transport=NAME)) as session:
        session.update()
        assert len(StandIn.known) > len(before)
    gc.collect()
    assert set(StandIn.known) == before
    assert Manifest.from_tensors(trainer.state_dict())


def test_a_late_engine_leaves_nothing_behind_for_the_next_update() -> None:
    weights = exportable(dict(make(1).state_dict()))
    one, late = make(2), make(3)
    local = LocalSync([lambda: weights], [module_engine(one)], ws.SyncConfig(transport=NAME))
    with local as session:
        session.update()
        party = local.fleet.add(in_process_party([ReceiverRank(module_engine(late)[0])]))
        session.add_engine(party)
        for seed in (4, 5):
            weights = exportable(dict(make(seed).state_dict()))
            session.update()
            for engine in (one, late):
                assert all(torch.equal(weights[name], tensor) for name, tensor in engine.state_dict().items())


def test_other_bits_at_the_same_address_are_not_read_as_they_lie() -> None:
    held = {"w": exportable({"w": torch.randn(100, 100).to(torch.bfloat16)})["w"]}
    engine = torch.nn.Module()
    engine.register_buffer("w", torch.zeros(100, 100, dtype=torch.bfloat16))
    config = ws.SyncConfig(transport=NAME, wire_dtype={"*": "bfloat16"}, retries=1)
    with LocalSync([lambda: held], [module_engine(engine)], config) as session:
        session.update()
        held["w"] = held["w"].view(torch.float16)
        session.update()
        assert torch.equal(engine.state_dict()["w"], held["w"].to(torch.bfloat16))


def test_the_source_is_asked_once_an_update_and_what_it_gave_is_let_go() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def source() -> dict[str, torch.Tensor]:
        tensor = torch.randn(10, 10)
        made.append(weakref.ref(tensor))
        return {"w": tensor}

    engine = torch.nn.Module()
    engine.register_buffer("w", torch.zeros(10, 10))
    with LocalSync([source], [module_engine(engine)], ws.SyncConfig(transport=NAME)) as session:
        session.update()
        before = len(made)
        session.update()
        assert len(made) == before + 1
        gc.collect()
        assert all(of() is None for of in made)
