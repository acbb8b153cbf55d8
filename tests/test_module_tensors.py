"""What is sent of a module is its state_dict, however it is looked up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weightsync.module_tensors import module_tensors


def plain() -> torch.nn.Module:
    model: Any = torch.nn.Sequential(
        torch.nn.Embedding(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 5, bias=False), torch.nn.ReLU()
    )
    model[2].weight = model[0].weight
    model[1].register_buffer("passing", torch.ones(2), persistent=False)
    model[1].register_buffer("empty", None)
    model[2].register_module("nothing", None)
    model.scale = torch.nn.Parameter(torch.ones(()))
    made: torch.nn.Module = model
    return made


def with_hook(model: torch.nn.Module) -> None:
    def rename(_: Any, state: dict[str, Any], prefix: str, __: Any) -> None:
        state["renamed"] = state.pop("scale")

    model.register_state_dict_post_hook(rename)


def with_a_hook_below(model: torch.nn.Module) -> None:
    part = next(iter(model.children()))

    def drop(_: Any, state: dict[str, Any], prefix: str, __: Any) -> None:
        del state[prefix + "weight"]

    part._register_state_dict_hook(drop)


def with_extra_state(model: torch.nn.Module) -> None:
    class Extra(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return {"step": 1}

    model.add_module("extra", Extra(2, 2))


def with_its_own_state_dict(model: torch.nn.Module) -> None:
    class Own(torch.nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return super().state_dict(*args, **kwargs) | {"more": torch.ones(1)}

    model.add_module("own", Own(2, 2))


@pytest.mark.parametrize(
    "change",
    [None, with_hook, with_a_hook_below, with_extra_state, with_its_own_state_dict],
    ids=lambda f: f and f.__name__,
)
def test_it_is_what_state_dict_says(change: Any) -> None:
    model = plain()
    if change is not None:
        change(model)
    expected = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    found = module_tensors(model)
    assert list(found) == list(expected)
    assert all(found[name] is expected[name] for name in expected)
