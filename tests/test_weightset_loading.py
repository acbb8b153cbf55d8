"""Weight sets and chunks into a module's parameters, in place, by moves that are compiled once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
import torch

import weightsync.placement
from tests.test_weightset import CPU, Tensors, sent, stable_chunk
from weightsync.coalescer import Coalescer
from weightsync.cuda.moves import Move, Moves
from weightsync.direct import DirectApply, Way
from weightsync.engines.torch_module import TorchModuleAdapter
from weightsync.errors import DigestError
from weightsync.manifest import Manifest
from weightsync.weightset import SetLayout, WeightSet


class Compiled(Moves):
    """Counts how often moves are compiled, and keeps what was asked for."""

    all: list[Compiled]

    def __init__(self, moves: Sequence[Move], device: torch.device, *, digested: int | None = None) -> None:
        super().__init__(moves, device, digested=digested)
        self.asked = list(moves)
        Compiled.all.append(self)


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Compiled]:
    Compiled.all = []
    monkeypatch.setattr(weightsync.placement, "Moves", Compiled)
    return Compiled.all


class Model(torch.nn.Module):
    def __init__(self, seed: int, *, tied: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(10, 6)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(2))
        self.last = torch.nn.Linear(6, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.head = torch.nn.Linear(6, 10, bias=False)
        self.to(dtype)
        if tied:
            self.head.weight = self.embed.weight

    def held(self) -> Tensors:
        """As a trainer sends it: each tie once."""
        state = self.state_dict()
        return {name: tensor for name, tensor in state.items() if name != "head.weight"}


class Loading:
    """Updates of an engine from a trainer's tensors, of which some come in sets and the rest in chunks."""

    def __init__(
        self, trainer: Model, engine: torch.nn.Module, *, in_sets: Iterable[Iterable[str]] | None = None
    ) -> None:
        self.trainer, self.engine = trainer, engine
        self.adapter = TorchModuleAdapter(engine)
        self.manifest = Manifest.from_module(trainer)
        self.load_map = self.adapter.load_map(self.manifest)
        self.direct = DirectApply(self.adapter, self.load_map, self.manifest, mode="auto", audit_every=10)
        held = trainer.held()
        self.sets = [list(held)] if in_sets is None else [list(names) for names in in_sets]
        self.layouts = [SetLayout({name: held[name] for name in names}, CPU) for names in self.sets]

    def update(self, *, verify: bool = True, defer_sets: bool = True, wrong: Iterable[str] = ()) -> None:
        target = Coalescer(
            self.manifest,
            self.load_map.groups,
            version=1,
            staging_limit_bytes=1 << 20,
            timeout_s=5,
            num_producers=len(self.sets) + 1,
            verify=verify,
            defer_sets=defer_sets,
        )
        way = self.direct.plan(sets=True, staged=False)
        assert way is Way.SETS
        for i, layout in enumerate(self.layouts):
            chunk = WeightSet(1, self.manifest.digest, layout, i)
            target.put(chunk)
            target.put(sent(chunk, *(name for name in wrong if name in layout.tensors)))
            target.producer_done()
        in_sets = {name for names in self.sets for name in names}
        rest = {name: tensor for name, tensor in self.trainer.held().items() if name not in in_sets}
        if rest:
            target.put(stable_chunk(target, rest, sender=99))
        target.producer_done()
        assert self.direct.apply(way, target, verify=verify) == 1
        target.wait_whole()
        assert target.unread() == []

    def exact(self) -> bool:
        theirs, ours = self.trainer.state_dict(), self.engine.state_dict()
        return all(torch.equal(theirs[name].to(tensor.dtype), tensor) for name, tensor in ours.items())

    def disturb(self) -> None:
        with torch.no_grad():
            for tensor in self.trainer.held().values():
                tensor.copy_(torch.randn(tensor.shape) * 10)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("defer_sets", [True, False])
@pytest.mark.parametrize(
    "in_sets",
    [None, [], [["embed.weight", "layers.0.bias"]], [["norm.weight"], ["embed.weight", "layers.1.weight"]]],
    ids=["all in a set", "no set", "one set and chunks", "two sets and chunks"],
)
def test_a_module_holds_exactly_what_came(in_sets: list[list[str]] | None, defer_sets: bool, verify: bool) -> None:
    loading = Loading(Model(1), Model(2), in_sets=in_sets)
    for _ in range(3):
        loading.update(verify=verify, defer_sets=defer_sets)
        assert loading.exact()
        loading.disturb()
        assert not loading.exact()


@pytest.mark.parametrize("in_sets", [None, [["norm.weight"], ["embed.weight", "layers.1.weight"]]], ids=str)
def test_what_was_compiled_is_used_again_while_nothing_moves(
    in_sets: list[list[str]] | None, compiled: list[Compiled]
) -> None:
    loading = Loading(Model(1), Model(2), in_sets=in_sets)
    for _ in range(4):
        loading.update()
        assert loading.exact()
        loading.disturb()
    assert len(compiled) == len(loading.sets)


def test_a_parameter_that_moved_is_found_again(compiled: list[Compiled]) -> None:
    engine = Model(2)
    loading = Loading(Model(1), engine)
    loading.update()
    loading.disturb()
    old = engine.last.weight.data
    kept = old.clone()
    engine.last.weight.data = torch.zeros_like(old)
    loading.update()
    assert loading.exact()
    assert torch.equal(old, kept), "nothing is written where it lay before"
    assert len(compiled) == 2
    loading.update()
    assert len(compiled) == 2


def test_another_layout_is_compiled_anew(compiled: list[Compiled]) -> None:
    trainer = Model(1)
    loading = Loading(trainer, Model(2))
    loading.update()
    moved = {name: tensor.clone() for name, tensor in trainer.held().items()}
    moved["layers.0.bias"].fill_(7)
    loading.layouts = [SetLayout(moved, CPU)]
    loading.update()
    assert torch.equal(loading.engine.state_dict()["layers.0.bias"], torch.full((6,), 7.0))
    assert len(compiled) == 2


def test_nothing_compiled_is_left_when_the_links_are_gone(compiled: list[Compiled]) -> None:
    loading = Loading(Model(1), Model(2))
    loading.update()
    loading.direct.forget_links()
    loading.disturb()
    loading.update()
    assert loading.exact()
    assert len(compiled) == 2


@pytest.mark.parametrize("tied", [True, False])
def test_ties_are_written_once_or_to_each_destination_of_their_own(tied: bool, compiled: list[Compiled]) -> None:
    loading = Loading(Model(1, tied=True), Model(2, tied=tied))
    loading.update()
    assert loading.exact()
    (moves,) = compiled
    source = loading.trainer.embed.weight.data_ptr()
    written = [to.data_ptr() for of, to in moves.asked if of.data_ptr() == source and to is not None]
    assert len(written) == len(set(written)) == (1 if tied else 2)
    assert moves.count == len(loading.trainer.held()), "and its bytes are digested once"


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_values_are_cast_where_the_engine_has_another_dtype(tied: bool, verify: bool, compiled: list[Compiled]) -> None:
    loading = Loading(Model(1), Model(2, tied=tied, dtype=torch.bfloat16))
    for _ in range(2):
        loading.update(verify=verify)
        assert loading.engine.state_dict()["embed.weight"].dtype == torch.bfloat16
        assert loading.exact()
        loading.disturb()
    assert all(to is None or to.dtype == of.dtype for of, to in compiled[0].asked), "the kernel moves bytes"


def test_a_tie_of_which_one_destination_has_another_dtype_is_written_to_both() -> None:
    engine = Model(2, tied=False)
    engine.head.to(torch.float64)
    loading = Loading(Model(1), engine)
    loading.update()
    assert loading.exact()


def test_strided_destinations_are_written_where_they_lie() -> None:
    engine = Model(2)
    weight = engine.last.weight
    weight.data = torch.empty(12, 12)[::2, 1::2].t()
    loading = Loading(Model(1), engine)
    for _ in range(2):
        loading.update()
        assert loading.exact()
        assert weight.stride() == (2, 24)
        loading.disturb()


def test_a_parameter_that_is_strided_otherwise_at_the_same_address_is_written_right() -> None:
    engine = Model(2)
    loading = Loading(Model(1), engine)
    loading.update()
    loading.disturb()
    engine.last.weight.data = engine.last.weight.data.t()
    loading.update()
    assert loading.exact()


def test_names_that_the_engine_lacks_are_digested_and_dropped(compiled: list[Compiled]) -> None:
    trainer, engine = Model(1), Model(2)
    del engine.layers[1], engine.last
    loading = Loading(trainer, engine)
    loading.update()
    assert loading.exact()
    assert compiled[0].count == len(trainer.held())
    with pytest.raises(DigestError, match=r"^layers\.1\.bias"):
        loading.update(wrong=["layers.1.bias"])


@pytest.mark.parametrize("name", ["embed.weight", "norm.num_batches_tracked"])
def test_a_wrong_digest_is_named(name: str) -> None:
    loading = Loading(Model(1), Model(2))
    with pytest.raises(DigestError, match=f"^{name}: its bytes differ"):
        loading.update(wrong=[name])
    loading.update()
    assert loading.exact()


def test_without_verification_digests_are_not_looked_at() -> None:
    loading = Loading(Model(1), Model(2))
    loading.update(verify=False, wrong=["embed.weight"])
    assert loading.exact()
