"""Tensors that go whole and in order to one run of the engine's memory are written there as they arrive."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch

from tests.test_coalescer import Lent, Tensors, whole
from weightsync import messages as m
from weightsync.chunk import as_bytes
from weightsync.coalescer import Coalescer
from weightsync.config import SyncConfig
from weightsync.digest import copy_and_digest
from weightsync.engines.torch_module import TorchModuleAdapter
from weightsync.errors import DigestError, EnginePoisonedError, EngineStateError, WeightSyncError
from weightsync.geometry import Region
from weightsync.landing import Landing, landings
from weightsync.loadmap import Copy, ModuleGroup
from weightsync.manifest import Manifest, TensorMeta
from weightsync.placement import GroupCopies
from weightsync.receiver import ReceiverRank
from weightsync.testing import LocalSync, module_engine

# ---- which -----------------------------------------------------------------------------------------------------------


def copies(*parts: tuple[str, torch.Tensor, str, torch.Tensor]) -> tuple[Copy, ...]:
    """Of a slice of a tensor, into a region of a parameter of module m."""
    return tuple(Copy(name, "m", at, Region.of(source), Region.of(target)) for name, source, at, target in parts)


def found(
    of: Iterable[Copy], tensors: Tensors, live: Tensors, aliases: Mapping[str, str] | None = None
) -> dict[str, Landing]:
    manifest = Manifest(tuple(TensorMeta.of(name, tensor) for name, tensor in tensors.items()), dict(aliases or {}))
    group = GroupCopies(ModuleGroup("m", tuple(manifest.all_names)), tuple(of), tuple(("m", at) for at in live))
    return landings(group, {("m", at): tensor for at, tensor in live.items()}, manifest)


def test_tensors_that_are_joined_in_one_parameter_land_in_its_runs() -> None:
    tensors = {"q": torch.randn(4, 6), "k": torch.randn(2, 6), "norm": torch.randn(3), "none": torch.empty(0, 6)}
    live = {"qk": torch.zeros(6, 6), "norm": torch.zeros(10)[4:7]}
    of = copies(
        ("q", tensors["q"], "qk", live["qk"][:4]),
        ("k", tensors["k"], "qk", live["qk"][4:]),
        ("none", tensors["none"], "qk", live["qk"][:0]),
        ("norm", tensors["norm"], "norm", torch.zeros(3)),
    )
    places = found(of, tensors, live)
    assert places.keys() == tensors.keys()
    for name, place in places.items():
        as_bytes(live[place.place[1]])[place.start : place.start + place.nbytes].copy_(as_bytes(tensors[name]))
    assert torch.equal(live["qk"], torch.cat([tensors["q"], tensors["k"]]))
    assert torch.equal(live["norm"], tensors["norm"])


def test_a_tie_that_is_one_parameter_lands_once() -> None:
    tensors, live = {"a": torch.randn(4, 2)}, {"a": torch.zeros(4, 2)}
    of = copies(("a", tensors["a"], "a", live["a"]), ("b", tensors["a"], "a", live["a"]))
    assert found(of, tensors, live, {"b": "a"}).keys() == {"a"}


W = torch.randn(4, 6)
LIVE = torch.zeros(4, 6)
NOT_BYTES: dict[str, tuple[Tensors, tuple[Copy, ...]]] = {
    "cut by columns": ({"p": LIVE[:, :3].clone()}, copies(("w", W[:, :3], "p", torch.zeros(4, 3)))),
    "in columns of a wider one": ({"p": torch.zeros(4, 9)}, copies(("w", W, "p", torch.zeros(4, 9)[:, :6]))),
    "transposed": ({"p": torch.zeros(6, 4)}, copies(("w", W.t(), "p", torch.zeros(6, 4)))),
    "kept transposed": ({"p": torch.zeros(6, 4).t()}, copies(("w", W, "p", torch.zeros(6, 4).t()))),
    "cast": ({"p": LIVE.double()}, copies(("w", W, "p", LIVE))),
    "by halves": ({"p": LIVE}, copies(("w", W[:2], "p", LIVE[:2]), ("w", W[2:], "p", LIVE[2:]))),
    "to two places": ({"p": LIVE, "r": LIVE.clone()}, copies(("w", W, "p", LIVE), ("w", W, "r", LIVE))),
    "unknown": ({"p": LIVE}, (Copy("w", "m", "p", None, None),)),
    "no copy": ({"p": LIVE}, ()),
}


@pytest.mark.parametrize("kind", NOT_BYTES)
def test_what_is_no_copy_of_bytes_to_one_place_is_staged(kind: str) -> None:
    live, of = NOT_BYTES[kind]
    assert found(of, {"w": W}, live) == {}


# ---- how -------------------------------------------------------------------------------------------------------------

TENSORS = {"a": torch.randn(5, 3), "b": torch.randn(7).to(torch.bfloat16), "c": torch.randn(40), "none": torch.empty(0)}
GROUPS = [ModuleGroup("ab", ("a", "b")), ModuleGroup("rest", ("c", "none"))]


def in_place(*, verify: bool = True) -> Coalescer:
    manifest = Manifest.from_tensors(TENSORS)
    return Coalescer(manifest, GROUPS, version=1, staging_limit_bytes=1 << 20, timeout_s=10, verify=verify)


def room(*names: str) -> Tensors:
    return {name: torch.zeros_like(as_bytes(TENSORS[name])) for name in names}


@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("verify", [False, True])
def test_pieces_are_written_in_place_and_their_groups_are_not_handed_out(verify: bool, stable: bool) -> None:
    subject, places = in_place(verify=verify), room("a", "b")
    subject.land(places)
    assert not subject.has_begun
    parts = as_bytes(TENSORS["a"])
    lent = [
        Lent(subject, [("a", 16, parts[16:]), ("b", 0, as_bytes(TENSORS["b"]))], stable=stable),
        Lent(subject, [("a", 0, parts[:16])], stable=stable),
    ]
    subject.put(lent[0].chunk)
    assert subject.has_begun
    counts = [subject.num_handed_out]
    subject.put(lent[1].chunk)
    assert [*counts, subject.num_handed_out] == [0, 1]
    assert [chunk.released for chunk in lent] == [1, 1]
    assert subject.peak_staging_bytes == 0
    assert all(torch.equal(places[name], as_bytes(TENSORS[name])) for name in places)
    subject.put(whole(subject, TENSORS, ["c", "none"]).chunk)
    subject.producer_done()
    handed_out = [[name for name, _ in group] for group in subject.groups()]
    assert handed_out == [["c", "none"]]
    assert subject.unread() == []
    assert subject.is_whole()


def test_of_a_group_of_which_one_tensor_has_no_place_all_are_handed_out() -> None:
    subject, places = in_place(), room("a")
    subject.land(places)
    subject.put(whole(subject, TENSORS, ["a", "b"]).chunk)
    (name, tensor), (_, other) = next(subject.groups())
    assert name == "a"
    assert subject.has_landed("a")
    assert tensor.data_ptr() == places["a"].data_ptr()
    assert torch.equal(tensor, TENSORS["a"])
    assert torch.equal(other, TENSORS["b"])


def test_a_group_that_has_begun_to_come_is_staged() -> None:
    subject, places = in_place(), room("a", "b", "c", "none")
    subject.put(whole(subject, TENSORS, ["a", "c"]).chunk)
    subject.land(places)
    assert [subject.has_landed(name) for name in TENSORS] == [False] * 4
    subject.put(whole(subject, TENSORS, ["b", "none"]).chunk)
    assert {name for group in subject.groups() for name, _ in group} == TENSORS.keys()
    assert not any(place.any() for place in places.values())


def test_room_that_was_reserved_in_vain_is_given_back() -> None:
    subject = in_place()
    with subject._changed:
        assert subject._reserve(subject._groups[0], torch.device("cpu"))
    subject.land(room("a", "b"))
    subject.put(whole(subject, TENSORS, ["a", "b"]).chunk)
    assert (subject._used_bytes, subject._freeable_bytes) == (0, 0)


@pytest.mark.parametrize("end", ["closed", "failed"])
def test_nothing_is_written_after_the_end(end: str) -> None:
    subject, places = in_place(), room("a", "b", "c", "none")
    subject.land(places)
    if end == "closed":
        subject.close()
    else:
        subject.fail(WeightSyncError("lost"))
    lent = whole(subject, TENSORS, TENSORS)
    with pytest.raises(WeightSyncError, match="aborted" if end == "closed" else "lost"):
        subject.put(lent.chunk)
    assert lent.released == 1
    assert not subject.has_begun
    assert not any(place.any() for place in places.values())
    with pytest.raises(WeightSyncError):
        subject.land(places)


def test_bytes_that_are_not_those_that_were_read_fail_the_update_which_has_begun() -> None:
    subject = in_place()
    subject.land(room("a", "b"))
    lent = whole(subject, TENSORS, ["a"])
    lent.chunk.payload[3] ^= 1
    with pytest.raises(DigestError, match="a: bytes 0 to 60 differ"):
        subject.put(lent.chunk)
    assert subject.has_begun
    with pytest.raises(DigestError):
        list(subject.groups())


# ---- in an update ----------------------------------------------------------------------------------------------------


class Stack(torch.nn.Module):
    def __init__(self, seed: int, num_layers: int = 6) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(50, 50) for _ in range(num_layers))

    def change(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_()


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items())


BUCKETS = {"apply": "streaming", "bucket_bytes": 4096, "timeout_s": 20, "staging_limit_bytes": 40_000}


@pytest.mark.parametrize("digest", [True, False])
@pytest.mark.parametrize("transport", ["shared_memory", "broadcast"])
def test_an_update_that_streams_into_a_module_stages_nothing(transport: str, digest: bool) -> None:
    trainer, engine = Stack(1), Stack(2)
    addresses = [parameter.data_ptr() for parameter in engine.parameters()]
    config = SyncConfig(transport=transport, digest=digest, **BUCKETS)  # type: ignore[arg-type]
    with LocalSync([lambda: trainer], [module_engine(engine)], config) as session:
        for _ in range(3):
            trainer.change()
            (row,) = [row for row in session.update().ranks if row.rank.startswith("engine")]
            assert same(engine, trainer)
            assert (row.peak_staging_bytes, row.num_direct, row.reloads) == (0, 6, 1)
    assert [parameter.data_ptr() for parameter in engine.parameters()] == addresses


def test_a_wrong_byte_poisons_what_it_was_written_into_and_the_next_update_is_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer, engine = Stack(1), Stack(2)
    config = SyncConfig(transport="broadcast", **BUCKETS)  # type: ignore[arg-type]
    sync = LocalSync([lambda: trainer], [module_engine(engine)], config)
    with sync as session:
        session.update()
        trainer.change()
        with monkeypatch.context() as patch:
            patch.setattr("weightsync.coalescer.copy_and_digest", lambda place, data: copy_and_digest(place, data) ^ 1)
            with pytest.raises(EnginePoisonedError, match="differ from what the sender read"):
                session.update()
        assert sync.receivers[0][0].poisoned
        session.update()
        assert not sync.receivers[0][0].poisoned
    assert same(engine, trainer)


class Waited(TorchModuleAdapter):
    """Notes when its device was waited for."""

    rank: ReceiverRank

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.waits: list[str] = []

    def synchronize(self) -> None:
        self.waits.append("while it comes" if self.rank._receiving else "before")


def test_what_reads_the_old_weights_is_waited_for_once_and_before_new_ones_come() -> None:
    trainer, engine = Stack(1), Stack(2)
    adapter = Waited(engine)
    config = SyncConfig(transport="broadcast", **BUCKETS)  # type: ignore[arg-type]
    sync = LocalSync([lambda: trainer], [[adapter]], config)
    adapter.rank = sync.receivers[0][0]
    with sync as session:
        for _ in range(3):
            trainer.change()
            adapter.waits.clear()
            session.update()
            assert adapter.waits == ["before"]
            assert same(engine, trainer)


def test_the_places_are_kept_no_longer_than_an_update() -> None:
    trainer, engine = Stack(1), Stack(2)
    sync = LocalSync([lambda: trainer], [module_engine(engine)], SyncConfig(transport="broadcast", **BUCKETS))  # type: ignore[arg-type]
    (receiver,) = sync.receivers[0]
    with sync as session:
        session.update()
        direct = receiver._direct
        assert direct is not None
        assert direct._room is None
        receiver.get_ready()
        assert direct._room is not None
        assert direct._room.keys() == engine.state_dict().keys()
        receiver.stand_down()
        assert direct._room is None
        receiver.get_ready()
        session.update()
        assert direct._room is None
        assert same(engine, trainer)


def test_an_engine_whose_parameters_were_moved_since_the_update_was_prepared_is_not_written() -> None:
    trainer, engine = Stack(1), Stack(2)
    sync = LocalSync([lambda: trainer], [module_engine(engine)], SyncConfig(transport="broadcast", **BUCKETS))  # type: ignore[arg-type]
    (receiver,) = sync.receivers[0]
    with sync as session:
        session.update()
        receive = receiver._receive

        def move_first(request: m.Transfer) -> None:
            first = next(engine.parameters())
            first.data = first.data.clone()
            receive(request)

        receiver._receive = move_first  # type: ignore[method-assign]
        before = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
        trainer.change()
        with pytest.raises(EngineStateError, match="moved during the update"):
            session.update()
        assert not receiver.poisoned
        assert all(torch.equal(tensor, before[name]) for name, tensor in engine.state_dict().items())
        del receiver._receive
        session.update()
        assert same(engine, trainer)


class CannotBegin(TorchModuleAdapter):
    """An adapter whose own loader, which some tensor needs, fails as soon as it is asked."""

    armed = False

    copies_load = True

    def apply(self, groups: Iterable[Iterable[tuple[str, torch.Tensor]]]) -> int:
        if self.armed:
            raise RuntimeError("the loader cannot begin")
        return super().apply(groups)


def test_nothing_lands_after_the_apply_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that come between the failure and the abort that it causes."""
    trainer, engine = Stack(1), Stack(2)
    adapter, failed = CannotBegin(engine), threading.Event()
    handle, put = ReceiverRank.handle, Coalescer.put

    def slow(self: ReceiverRank, call: Any) -> Any:
        reply = handle(self, call)
        if isinstance(reply, m.Failed):
            failed.set()
            time.sleep(0.3)  # the answer is on its way
        return reply

    def late_put(self: Coalescer, chunk: Any) -> None:
        if adapter.armed:
            assert failed.wait(10)
        put(self, chunk)

    # A group that is left to the loader, so that it is asked for it at once.
    refused = {"layers.5": "several tensors fill it"}
    monkeypatch.setattr("weightsync.direct.contested", lambda *_: refused)
    monkeypatch.setattr(ReceiverRank, "handle", slow)
    monkeypatch.setattr(Coalescer, "put", late_put)
    config = SyncConfig(transport="broadcast", **BUCKETS)  # type: ignore[arg-type]
    sync = LocalSync([lambda: trainer], [[adapter]], config)
    with sync as session:
        session.update()
        assert same(engine, trainer)
        before = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
        trainer.change()
        adapter.armed = True
        with pytest.raises(WeightSyncError, match="cannot begin"):
            session.update()
        assert all(torch.equal(tensor, before[name]) for name, tensor in engine.state_dict().items())
        assert not sync.receivers[0][0].poisoned
        adapter.armed = False
        session.update()
        assert same(engine, trainer)


def test_what_feeds_nothing_here_arrives_where_nothing_else_has_changed() -> None:
    trainer, engine = Stack(1, 7), Stack(2)
    config = SyncConfig(transport="broadcast", skip_unchanged=True, **BUCKETS)  # type: ignore[arg-type]
    with LocalSync([lambda: trainer], [module_engine(engine)], config) as session:
        session.update()
        changed = trainer.layers[6].get_parameter("weight")
        with torch.no_grad():
            changed.add_(1)
        (row,) = [row for row in session.update().ranks if row.rank.startswith("engine")]
    assert changed.nbytes <= row.nbytes < 2 * changed.nbytes
    assert same(engine, trainer)


class Wrapper(torch.Tensor):
    """A parameter whose bytes are those of another tensor."""

    of: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.of = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if op is torch.ops.aten.detach.default:
            return cls(args[0].of)
        assert op is torch.ops.aten.copy_.default, op
        args[0].of.copy_(args[1])
        return args[0]


@pytest.mark.parametrize("apply", ["streaming", "staged"])
def test_a_parameter_that_wraps_another_tensor_is_left_to_the_loader(apply: Any) -> None:
    trainer, engine = Stack(1), Stack(2)
    inner = torch.zeros(50, 50)
    engine.layers[2].register_parameter("weight", torch.nn.Parameter(Wrapper(inner), requires_grad=False))
    config = SyncConfig(transport="broadcast", **(BUCKETS | {"apply": apply, "staging_limit_bytes": 1 << 20}))  # type: ignore[arg-type]
    with LocalSync([lambda: trainer], [module_engine(engine)], config) as session:
        session.update()
    assert torch.equal(inner, trainer.layers[2].get_parameter("weight"))
    assert torch.equal(engine.layers[3].get_parameter("weight"), trainer.layers[3].get_parameter("weight"))
