"""Direct apply: loaders and layouts that only reloads can follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch

from tests.direct.made_up import FEW_WAYS, MadeUp, Part, Plan, Run, Tensors, keep, plan, qkv, rows, run, whole
from weightsync.config import SyncConfig
from weightsync.direct import DirectApply, Way
from weightsync.errors import WeightSyncError
from weightsync.manifest import Manifest
from weightsync.testing import LocalSync


def test_a_parameter_that_the_names_cover_in_part_is_reloaded() -> None:
    def finish(module: Any, loaded: Tensors) -> None:
        keep(module, {name: tensor.nan_to_num(7) for name, tensor in loaded.items()})

    part = Part({"weight": (10, 4)}, {"odd": ("weight", rows(0, 7))}, finish=finish)
    with run(lambda: plan(part)) as made:
        *_, last = made.updates(3)
        assert last.reloaded == {"odd": "its tensors cover odd.weight in part"}


def test_a_parameter_that_the_loader_computes_is_reloaded() -> None:
    part = Part({"weight": (5, 4)}, {"odd": ("weight", whole)}, load=lambda to, of: to.copy_(of * 2))
    with run(lambda: plan(part)) as made:
        *_, last = made.updates(3)
        assert last.reloaded == {"odd": "the loader computes odd.weight"}


def test_without_a_load_map_everything_is_reloaded() -> None:
    def load(to: torch.Tensor, of: torch.Tensor) -> None:
        if float(of.sum()) < float("inf"):
            to.copy_(of)

    part = Part({"weight": (5, 4)}, {"odd": ("weight", whole)}, load=load)
    with run(lambda: plan(part)) as made:
        for row in made.updates(3):
            assert row.num_direct == 0
            assert set(row.reloaded) == {group.key for group in made.groups}
            assert all("the loader cannot run without data" in reason for reason in row.reloaded.values())


@pytest.mark.parametrize("config", FEW_WAYS, ids=str)
def test_memory_that_two_tensors_fill_is_reloaded(config: dict[str, Any]) -> None:
    """The last wins. At first both are the same, so that no reload tells."""

    def make() -> Plan:
        weight = torch.zeros(6, 3)

        def setup(module: Any) -> None:
            module.weight.data = weight

        parts = {
            name: Part({"weight": (6, 3)}, {name: ("weight", whole)}, setup=setup, finish=keep)
            for name in ("one", "two")
        }
        return Plan(plan().parts | parts)

    with run(make, **config) as made:
        made.weights["two"].copy_(made.weights["one"])
        made.update()
        *_, last = made.updates(4)
        assert last.reloaded.keys() == {"one", "two"}
        assert last.reloaded["one"] == "several tensors fill one.weight"


@pytest.mark.parametrize("config", FEW_WAYS, ids=str)
def test_parameters_that_share_a_part_of_their_memory_are_reloaded(config: dict[str, Any]) -> None:
    def make() -> Plan:
        storage = torch.zeros(30)

        def at(start: int) -> Callable[[Any], None]:
            return lambda module: setattr(module.weight, "data", storage[start : start + 18].view(6, 3))

        parts = {
            name: Part({"weight": (6, 3)}, {name: ("weight", whole)}, setup=at(12 * i))
            for i, name in enumerate(("one", "two"))
        }
        return Plan(plan().parts | parts)

    with run(make, **config) as made:
        for _ in range(3):
            made.weights["two"].view(-1)[:6] = made.weights["one"].view(-1)[12:]
            made.update()
            made.step()
        *_, last = made.updates(2)
        assert last.reloaded == {
            "one": "one.weight shares memory with another",
            "two": "two.weight shares memory with another",
        }


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("config", FEW_WAYS, ids=str)
def test_a_tie_of_the_trainer_fills_both_ends(config: dict[str, Any], tied: bool) -> None:
    def make() -> Plan:
        weight = torch.zeros(6, 3)

        def setup(module: Any) -> None:
            if tied:
                module.weight.data = weight

        ends = {name: Part({"weight": (6, 3)}, {name: ("weight", whole)}, setup=setup) for name in ("in", "out")}
        return Plan(plan().parts | ends)

    made = Run(make, **config)
    made.close()
    made.weights["out"] = made.weights["in"]
    made.manifest = Manifest.from_tensors(made.weights)
    assert made.manifest.aliases
    made.groups = made.reference.load_map(made.manifest).groups
    made.sync = LocalSync([lambda: made.weights], [[made.engine]], SyncConfig(timeout_s=20, **config))
    made.session = made.sync.__enter__()
    try:
        *_, last = made.updates(4)
        assert last.num_direct == len(made.groups)
        assert last.reloaded == {}
    finally:
        made.close()


def test_a_name_that_feeds_two_parameters_is_copied_to_both() -> None:
    class Twice(MadeUp):
        def _load(self, items: Iterable[tuple[str, torch.Tensor]], into: Mapping[str, Tensors]) -> None:
            for name, tensor in items:
                super()._load([(name, tensor)], into)
                if name == "b" and "odd" in into:
                    into["odd"]["again"].copy_(tensor)

    def make() -> Plan:
        return plan(Part({"bias": (6,), "again": (6,)}, {"b": ("bias", whole)}))

    with run(make, kind=Twice) as made:
        made.engine.plan.parts["embed"].padded = made.reference.plan.parts["embed"].padded = True
        *_, last = made.updates(3)
        assert "odd" not in last.reloaded


@pytest.mark.parametrize("config", FEW_WAYS, ids=str)
def test_a_parameter_that_moved_between_updates_is_watched_anew(config: dict[str, Any]) -> None:
    with run(lambda: plan(qkv()), **config) as made:
        made.updates(3)
        old = made.engine.model.odd.weight.data
        kept = old.clone()
        made.engine.model.odd.weight.data = torch.zeros_like(old)
        row = made.update()
        assert (row.num_direct, row.reloads) == (0, 1)
        assert torch.equal(old, kept), "nothing is written where it lay before"
        made.step()
        assert made.update().num_direct == 4


def test_a_reload_that_moves_a_parameter_each_time_is_never_copied() -> None:
    keeps: list[torch.Tensor] = []

    def finish(module: Any, loaded: Tensors) -> None:
        keeps.append(loaded["weight"])
        module.weight.data = loaded.pop("weight")
        keep(module, loaded)

    with run(lambda: plan(qkv(finish=finish))) as made:
        for row in made.updates(5):
            assert row.num_direct == 0


@pytest.mark.parametrize("config", FEW_WAYS, ids=str)
@pytest.mark.parametrize("way", [Way.OBSERVE, "later"])
def test_a_parameter_that_moves_after_the_plan_ends_the_update_before_anything_changed(
    config: dict[str, Any], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run(lambda: plan(qkv()), **config) as made:
        if way == "later":
            made.updates(3)
        before = made.engine.snapshot()
        plain_plan = DirectApply.plan

        def move(self: DirectApply, *, sets: bool, staged: bool) -> Way:
            found = plain_plan(self, sets=sets, staged=staged)
            made.engine.model.odd.weight.data = made.engine.model.odd.weight.data.clone()
            return found

        with monkeypatch.context() as patch:
            patch.setattr(DirectApply, "plan", move)
            with pytest.raises(WeightSyncError, match="moved during the update"):
                made.session.update()
        assert made.engine.snapshot() == before
        assert not made.sync.receivers[0][0].poisoned
        made.updates(3)
