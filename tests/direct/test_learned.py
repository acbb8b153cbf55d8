"""Direct apply: a regular order of rows is learned, proven, and then copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.direct.made_up import WAYS, Part, Tensors, keep, plan, qkv, rows, run, swap_halves, whole
from weightsync.qualify import LEARNING, NOT_SEEN


def rows_of_expert(expert: int, start: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor[expert, start : start + 4]


def experts(order: Callable[[torch.Tensor], torch.Tensor], *, fused: bool) -> Part:
    """Two weights of each of three experts in one, 8 rows of 4; sent one by one, or all in one."""
    feeds = {
        f"{expert}.{name}": ("weight", rows_of_expert(expert, start))
        for expert in range(3)
        for name, start in (("gate", 0), ("up", 4))
    }

    def finish(module: Any, loaded: Tensors) -> None:
        keep(module, {"weight": order(loaded["weight"])})

    return Part({"weight": (3, 8, 4)}, {"experts": ("weight", whole)} if fused else feeds, finish=finish)


def swapped(weight: torch.Tensor) -> torch.Tensor:
    return weight.roll(4, 1)


def interleaved(weight: torch.Tensor) -> torch.Tensor:
    return weight.reshape(3, 2, 4, 4).transpose(1, 2).reshape(3, 8, 4)


def experts_first_to_last(weight: torch.Tensor) -> torch.Tensor:
    return weight.roll(-1, 0)


REGULAR: dict[str, Callable[[], Part]] = {
    "halves swapped": lambda: qkv(finish=swap_halves),
    "halves of each expert swapped": lambda: experts(swapped, fused=False),
    "halves of each expert swapped, of one tensor": lambda: experts(swapped, fused=True),
    "halves of each expert interleaved": lambda: experts(interleaved, fused=False),
    "halves of each expert interleaved, of one tensor": lambda: experts(interleaved, fused=True),
    "experts moved up, of one tensor": lambda: experts(experts_first_to_last, fused=True),
    "halves of a vector swapped": lambda: Part(
        {"weight": (8,)},
        {"v": ("weight", whole)},
        lambda module, loaded: keep(module, {"weight": loaded["weight"].roll(4)}),
    ),
}


@pytest.mark.parametrize("config", WAYS, ids=str)
@pytest.mark.parametrize("name", REGULAR)
def test_a_regular_order_of_rows_is_learned_proven_and_then_copied(name: str, config: dict[str, Any]) -> None:
    with run(lambda: plan(REGULAR[name]()), **config) as made:
        first, second, third, *later = made.updates(6)
        assert (first.reloaded["odd"], second.reloaded["odd"], third.reloaded["odd"]) == (NOT_SEEN, LEARNING, NOT_SEEN)
        assert (second.reloads, third.reloads) == (1, 1)
        for row in later:
            assert (row.num_direct, row.reloads, row.reloaded) == (4, 0, {})


def test_what_was_learned_and_then_does_not_hold_is_reloaded() -> None:
    """It is a guess until a further reload proves it."""
    orders = [swapped, swapped, interleaved]

    with run(lambda: plan(experts(lambda weight: orders[0](weight), fused=False))) as made:
        for _ in range(12):
            row = made.update()
            made.step()
            if len(orders) > 1:
                del orders[0]
        assert "odd.weight is not laid out as loaded" in row.reloaded["odd"]
        assert row.num_direct == 3


def test_an_order_that_one_reload_does_not_show_is_waited_for() -> None:
    """Equal rows stand for each other; nothing of it may be taken for a copy in the order of loading."""
    with run(lambda: plan(experts(swapped, fused=True))) as made:
        for step in range(12):
            if step in (1, 2):
                made.weights["experts"].fill_(step)
            row = made.update()
            assert ("odd" in row.reloaded) or step > 3
            made.step()
        assert row.num_direct == 4


def test_an_order_among_padding_is_not_learned() -> None:
    def turned(module: Any, loaded: Tensors) -> None:
        keep(module, {"weight": loaded["weight"].roll(2, 0)})

    odd = Part({"weight": (10, 4)}, {"odd": ("weight", rows(0, 7))}, finish=turned, padded=True)
    with run(lambda: plan(odd)) as made:
        *_, last = made.updates(8)
        assert "odd.weight is not laid out as loaded" in last.reloaded["odd"]
