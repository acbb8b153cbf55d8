"""Direct apply: which modules are copied, and which are reloaded because they are no mere copies or show nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import weightsync.direct
import weightsync.placement
from tests.direct.made_up import (
    FEW_WAYS,
    PLAIN,
    WAYS,
    Part,
    Plan,
    Tensors,
    keep,
    plan,
    qkv,
    run,
    scaled,
    swap_halves,
    swap_some,
    whole,
)
from tests.direct.test_derived import in_place, with_cache
from weightsync.qualify import NOT_SEEN


@pytest.mark.parametrize("config", WAYS, ids=str)
def test_plain_fused_cast_and_padded_modules_are_copied_after_one_watched_reload(config: dict[str, Any]) -> None:
    with run(lambda: plan(qkv()), **config) as made:
        first, *later = made.updates(5)
        assert (first.num_direct, first.reloads, set(first.reloaded)) == (0, 1, PLAIN | {"odd"})
        assert set(first.reloaded.values()) == {NOT_SEEN}
        for row in later:
            assert (row.num_direct, row.reloads, row.reloaded) == (4, 0, {})
        assert made.engine.reloads == 1


def transposed(module: Any, loaded: Tensors) -> None:
    keep(module, loaded | {"weight": loaded["weight"].t()})


def by_columns(module: Any) -> None:
    module.weight.data = module.weight.data.t().contiguous().t()


def as_rows(module: Any) -> None:
    module.weight.data = module.weight.data.t().contiguous()


def as_doubles(module: Any) -> None:
    module.weight.data = module.weight.data.double()


def nothing(module: Any) -> None: ...


def sort_rows(module: Any, loaded: Tensors) -> None:
    """An order that the values decide."""
    loaded["weight"] = loaded["weight"][loaded["weight"][:, 0].argsort()]
    keep(module, loaded)


def turn_columns(module: Any, loaded: Tensors) -> None:
    keep(module, loaded | {"weight": loaded["weight"].roll(1, 1)})


LAYOUTS = {
    "two rows swapped": (nothing, swap_some, "odd.weight is not laid out as loaded"),
    "rows sorted by their values": (nothing, sort_rows, "odd.weight is not laid out as loaded"),
    "columns turned": (nothing, turn_columns, "odd.weight is not laid out as loaded"),
    "scaled": (nothing, scaled, "odd.weight is not laid out as loaded"),
    "by columns": (by_columns, keep, "odd.weight is not kept as it is loaded"),
    "transposed": (as_rows, transposed, "odd.weight is not kept as it is loaded"),
    "in another dtype": (as_doubles, keep, "odd.weight is not kept as it is loaded"),
}


@pytest.mark.parametrize("config", FEW_WAYS, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_module_that_is_laid_out_otherwise_is_reloaded_and_the_others_copied(
    name: str, config: dict[str, Any]
) -> None:
    setup, finish, reason = LAYOUTS[name]
    with run(lambda: plan(qkv(setup=setup, finish=finish)), **config) as made:
        *_, last = made.updates(5)
        assert last.num_direct == 3
        assert last.reloads == 1
        assert last.reloaded.keys() == {"odd"}
        assert reason in last.reloaded["odd"]


def test_frozen_weights_qualify_when_they_have_changed() -> None:
    with run(lambda: plan(qkv())) as made:
        for _ in range(4):
            row = made.update()
            made.step(*(name for name in made.weights if name not in ("q", "embed")))
        assert row.num_direct == 4, "the first update changed everything"
    with run(lambda: plan(qkv())) as made:
        made.engine.apply([[(name, made.weights[name]) for name in group.names] for group in made.groups])
        moving = [name for name in made.weights if name not in ("q", "embed")]
        for _ in range(4):
            row = made.update()
            made.step(*moving)
        assert row.reloaded == {"odd": NOT_SEEN, "embed": NOT_SEEN}
        assert row.num_direct == 2
        *_, last = made.updates(10)
        assert last.num_direct == 4


def test_what_one_reload_shows_of_a_group_adds_up_with_what_another_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weightsync.direct, "_MAX_PATIENCE", 0)
    with run(lambda: plan(qkv())) as made:
        made.engine.apply([[(name, made.weights[name]) for name in group.names] for group in made.groups])
        names = ["q", "k", "v", "b"]
        for i in range(5):
            made.step(names[i % 4], "norm", "attn.q", "attn.k", "attn.v", "embed")
            row = made.update()
            assert ("odd" in row.reloaded) is (i < 4)
        assert row.num_direct == 4


def test_a_group_of_which_one_tensor_changed_is_not_proven_for_the_others() -> None:
    """The tensor made from the frozen weight did not change either."""
    odd = qkv(finish=in_place, setup=with_cache)
    with run(lambda: plan(odd, held=lambda model: model.odd.cache)) as made:
        made.engine.apply([[(name, made.weights[name]) for name in group.names] for group in made.groups])
        for _ in range(3):
            made.step("b", "norm")
            assert "odd" in made.update().reloaded
        for _ in range(8):
            made.step()
            row = made.update()
        assert "also changed odd's cache" in row.reloaded["odd"]


def test_what_was_seen_once_to_be_no_copy_is_not_forgotten_when_another_reload_does_not_show_it() -> None:
    def finish(module: Any, loaded: Tensors) -> None:
        keep(module, loaded)
        module.cache.fill_((loaded["weight"] > 100).float().sum())

    odd = qkv(finish=finish, setup=with_cache)
    with run(lambda: plan(odd, held=lambda model: model.odd.cache)) as made:
        made.weights["norm"].fill_(1)  # is watched again and again
        made.weights["k"][0, 0] = 1000
        made.update()
        for _ in range(8):
            made.step(*(name for name in made.weights if name != "norm"))
            row = made.update()
            assert "also changed odd's cache" in row.reloaded["odd"]
        assert row.num_direct == 2


@pytest.mark.parametrize("make_values", [torch.zeros_like, torch.ones_like], ids=["zeros", "ones"])
def test_constant_weights_show_nothing(make_values: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with run(lambda: plan(qkv(finish=swap_some))) as made:
        for name in "qkv":
            made.weights[name].copy_(make_values(made.weights[name]))
        assert made.update().num_direct == 0
        for _ in range(3):
            made.step("norm", "attn.q", "attn.k", "attn.v", "embed")
            assert made.update().reloaded["odd"] == NOT_SEEN
        *_, last = made.updates(6)
        assert "not laid out as loaded" in last.reloaded["odd"]


def swap_q_and_k(module: Any, loaded: Tensors) -> None:
    loaded["weight"] = torch.cat([loaded["weight"][8:16], loaded["weight"][:8], loaded["weight"][16:]])
    keep(module, loaded)


def test_twins_may_have_changed_places() -> None:
    with run(lambda: plan(qkv(finish=swap_q_and_k))) as made:
        made.weights["k"].copy_(made.weights["q"])
        made.update()
        made.step("norm")
        assert made.update().reloaded == {"odd": NOT_SEEN}
        *_, last = made.updates(12)
        assert last.reloaded == {}, "the order is regular, and was learned"


def permute_experts(module: Any, loaded: Tensors) -> None:
    loaded["weight"] = loaded["weight"][[1, 2, 0]]
    keep(module, loaded)


@pytest.mark.parametrize("values", ["alike in all experts", "alike in both halves", "alike in all rows"])
def test_values_that_repeat_show_nothing(values: str) -> None:
    """As of experts that all begin as one."""

    def make() -> Plan:
        finish = {"alike in all experts": permute_experts, "alike in both halves": swap_halves}.get(values, swap_rows)
        shape = (4, 5, 6) if values == "alike in both halves" else (3, 5, 7)
        return plan(Part({"weight": shape}, {"experts": ("weight", whole)}, finish=finish))

    def swap_rows(module: Any, loaded: Tensors) -> None:
        loaded["weight"] = loaded["weight"][:, [1, 0, 2, 3, 4]]
        keep(module, loaded)

    with run(make) as made:
        weight = made.weights["experts"]
        if values == "alike in all experts":
            weight.copy_(weight[:1].clone().expand_as(weight))
        elif values == "alike in both halves":
            weight[2:] = weight[:2]
        else:
            weight.copy_(weight[:, :1].clone().expand_as(weight))
        made.update()
        made.step("norm", "embed")
        assert made.update().reloaded == {"odd": NOT_SEEN}
        *_, last = made.updates(12)
        assert last.reloaded == {}, "the order is regular, and was learned"
