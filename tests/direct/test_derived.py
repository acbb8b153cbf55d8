"""Direct apply: tensors that are made from weights are found wherever they are kept."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.direct.made_up import FEW_WAYS, Block, MadeUp, Plan, Tensors, derive, keep, plan, qkv, run, whole
from weightsync.reachable import reachable_tensors


class Kernel:
    """An object with slots."""

    __slots__ = ("__hidden", "cached")

    def __init__(self, cached: Any) -> None:
        self.cached = 0
        self.__hidden = cached

    def get(self) -> Any:
        return self.__hidden


class Table(dict[str, Any]):
    """A container with attributes."""

    cached: torch.Tensor


def closure_over(value: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: value


def function_with(value: torch.Tensor) -> Callable[[], None]:
    def forward(*, weight: torch.Tensor = value) -> None: ...

    return forward


def function_that_carries(value: torch.Tensor) -> Callable[[], None]:
    def forward() -> None: ...

    forward.cached = value  # type: ignore[attr-defined]
    return forward


def hidden_module(value: torch.Tensor) -> Any:
    inner = torch.nn.Linear(1, 1)
    inner.register_buffer("cached", value)
    return [types.SimpleNamespace(inner=torch.nn.Sequential(inner))]


def on_table(value: torch.Tensor) -> Table:
    table = Table()
    table.cached = value
    return table


# How a module may hold a tensor: (how it is put there, how it is read).
HOLDERS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], Any]]] = {
    "attribute": (whole, whole),
    "dict": (lambda t: {"a": [1, (t,)]}, lambda held: held["a"][1][0]),
    "set": (lambda t: {t}, lambda held: next(iter(held))),
    "deque": (lambda t: deque([t]), lambda held: held[0]),
    "closure": (closure_over, lambda held: held()),
    "keyword default": (function_with, lambda held: held.__kwdefaults__["weight"]),
    "function's attribute": (function_that_carries, lambda held: held.cached),
    "wrapped function": (
        lambda t: functools.lru_cache(closure_over(t)),
        lambda held: held.__wrapped__(),
    ),
    "partial": (lambda t: functools.partial(torch.add, t), lambda held: held.args[0]),
    "bound method": (lambda t: Kernel(t).get, lambda held: held()),
    "bound builtin": (lambda t: t.detach().clone, lambda held: held()),
    "kernel object": (Kernel, lambda held: held.get()),
    "container with attributes": (on_table, lambda held: held.cached),
    "hidden module": (hidden_module, lambda held: held[0].inner[0].cached),
    "numpy array": (lambda t: t.numpy().copy(), whole),
    "read-only array": (lambda t: np.frombuffer(t.numpy().tobytes()), whole),
    "float": (lambda t: float(t.sum()), whole),
    "NumPy scalar": (lambda t: np.float32(t.sum().item()), whole),
    "complex": (lambda t: complex(0.0, float(t.sum())), whole),
    "floats in a list": (lambda t: t.tolist(), whole),
    "attribute of a tensor": (
        lambda t: carried(t),
        lambda held: held.cached,
    ),
    "sparse tensor": (lambda t: t.reshape(1, -1).to_sparse(), lambda held: held.to_dense()),
}


def carried(value: torch.Tensor) -> torch.Tensor:
    tensor = torch.zeros(1)
    tensor.cached = value  # type: ignore[attr-defined]
    return tensor


@pytest.mark.parametrize("config", FEW_WAYS, ids=str)
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_tensor_made_from_a_weight_is_found_wherever_its_module_keeps_it(holder: str, config: dict[str, Any]) -> None:
    put, read = HOLDERS[holder]

    def make() -> Plan:
        def setup(module: Any) -> None:
            module.cache = put(torch.zeros(4))

        odd = qkv(finish=derive(put), setup=setup)
        return plan(odd, held=lambda model: read(model.odd.cache))

    with run(make, **config) as made:
        *_, last = made.updates(4)
        assert last.num_direct == 3
        assert last.reloaded.keys() == {"odd"}
        assert "odd" in last.reloaded["odd"]
        assert "which no tensor feeds" in last.reloaded["odd"] or "cannot be looked at" in last.reloaded["odd"]


def test_a_tensor_that_the_modules_class_keeps_is_found() -> None:
    def make() -> Plan:
        class Own(Block):
            pass

        def setup(module: Any) -> None:
            module.__class__ = Own

        def finish(module: Any, loaded: Tensors) -> None:
            keep(module, loaded)
            Own.shared = {"a": loaded["weight"].sum(0)}

        return plan(qkv(finish=finish, setup=setup), held=lambda model: model.odd.shared["a"])

    with run(make) as made:
        *_, last = made.updates(4)
        assert last.reloaded.keys() == {"odd"}


def in_place(module: Any, loaded: Tensors) -> None:
    keep(module, loaded)
    module.cache.copy_(loaded["weight"].sum(0))


def shares_storage(module: Any) -> None:
    """The parameter and a tensor made from it lie side by side in one storage."""
    storage = torch.zeros(24 * 4 + 4)
    module.weight.data = storage[:96].view(24, 4)
    module.cache = storage[96:]


def with_cache(module: Any) -> None:
    module.cache = torch.zeros(4)


@pytest.mark.parametrize("setup", [with_cache, shares_storage])
@pytest.mark.parametrize("config", FEW_WAYS, ids=str)
def test_a_tensor_that_is_written_in_place_is_found(setup: Callable[[Any], None], config: dict[str, Any]) -> None:
    with run(lambda: plan(qkv(finish=in_place, setup=setup), held=lambda m: m.odd.cache), **config) as made:
        *_, last = made.updates(4)
        assert last.num_direct == 3
        assert "also changed odd's cache" in last.reloaded["odd"]


def test_a_view_of_a_parameter_is_no_tensor_of_its_own() -> None:
    def setup(module: Any) -> None:
        module.cache = {"view": module.weight.data[3:5], "bits": module.weight.data.view(torch.int32)}

    with run(lambda: plan(qkv(setup=setup), held=lambda m: m.odd.cache)) as made:
        *_, last = made.updates(4)
        assert last.num_direct == 4


def scale_of(module: Any, loaded: Tensors) -> None:
    """Made anew in each reload, and mostly the same."""
    keep(module, loaded)
    module.scale = (loaded["weight"].abs().max() > 100).float() + 1


def test_a_scalar_that_is_made_anew_counts_as_changed_though_it_came_out_the_same() -> None:
    def setup(module: Any) -> None:
        module.scale = torch.ones(())

    with run(lambda: plan(qkv(finish=scale_of, setup=setup), held=lambda m: m.odd.scale)) as made:
        made.updates(3)
        made.weights["k"][0, 0] = 1000
        last = made.update()
        assert last.reloaded.keys() == {"odd"}
        assert "odd's scale" in last.reloaded["odd"]


class Elsewhere(MadeUp):
    """The odd module's weight decides what is kept in another module."""

    maker, keeper = "odd", "norm"

    def __init__(self, plan: Plan) -> None:
        odd = plan.parts[self.maker]

        def finish(module: Any, loaded: Tensors) -> None:
            keep(module, loaded)
            self.model.get_submodule(self.keeper).cache = loaded["weight"].sum(0).clone()

        odd.finish = finish
        plan.held = lambda model: getattr(model.get_submodule(self.keeper), "cache", None)
        super().__init__(plan)
        if self.keeper == "other":
            self.model.other = Block()


class OnAModuleThatIsLoadedLater(Elsewhere):
    maker, keeper = "norm", "odd"


class OnAnUnfedModule(Elsewhere):
    keeper = "other"


class OnTheModel(Elsewhere):
    keeper = ""


@pytest.mark.parametrize("kind", [Elsewhere, OnAModuleThatIsLoadedLater, OnAnUnfedModule, OnTheModel])
@pytest.mark.parametrize("config", FEW_WAYS, ids=str)
def test_a_tensor_that_another_module_keeps_may_be_made_from_any_weight(
    kind: type[Elsewhere], config: dict[str, Any]
) -> None:
    with run(lambda: plan(qkv()), kind=kind, **config) as made:
        rows = made.updates(4)
        assert [row.num_direct for row in rows] == [0] * 4
        assert all("cache, which no tensor feeds" in reason for reason in rows[-1].reloaded.values())
        for name in ("q", "norm", "k"):
            made.step(name)
            made.update()


def test_what_is_made_at_the_end_of_a_reload_may_be_made_from_any_weight() -> None:
    def end(model: Any) -> None:
        model.norm.cache = model.attn.weight.float().sum(0)

    with run(lambda: plan(end=end, held=lambda model: getattr(model.norm, "cache", None))) as made:
        rows = made.updates(4)
        assert [row.num_direct for row in rows] == [0] * 4


def test_an_object_that_two_modules_share_belongs_to_both() -> None:
    def make() -> Plan:
        kernel = types.SimpleNamespace(cached=torch.zeros(4))

        def setup(module: Any) -> None:
            module.kernel = kernel

        def finish(module: Any, loaded: Tensors) -> None:
            keep(module, loaded)
            kernel.cached = loaded["weight"].sum(0).clone()

        made = plan(qkv(finish=finish, setup=setup), held=lambda model: model.odd.kernel.cached)
        made.parts["norm"].setup = setup
        return made

    with run(make) as made:
        *_, last = made.updates(4)
        assert {"odd", "norm"} <= last.reloaded.keys()


def test_a_module_with_too_many_objects_to_look_through_is_reloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.reachable._MAX_OBJECTS", 100)

    def setup(module: Any) -> None:
        module.things = [[i] for i in range(200)]

    def finish(module: Any, loaded: Tensors) -> None:
        keep(module, loaded)
        module.things[-1] = loaded["weight"].sum(0)

    with run(lambda: plan(qkv(finish=finish, setup=setup), held=lambda model: model.odd.things[-1])) as made:
        *_, last = made.updates(4)
        assert last.reloaded == {"odd": "what odd holds cannot be looked at: more than 100 objects"}


def test_compiled_code_and_tensors_without_data_are_not_looked_through() -> None:
    module: Any = Block()
    module.code = [torch.fx.symbolic_trace(torch.nn.Linear(2, 2))]
    module.shape_only = torch.empty(3, device="meta")
    found = reachable_tensors(module)
    assert (dict(found), found.unseen) == ({}, {})
