"""Direct apply: whatever an engine does with its weights, an update leaves exactly what a reload of everything leaves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.direct.made_up import WAYS, MadeUp, Part, Plan, Tensors, keep, norm, rows, run
from weightsync.errors import EnginePoisonedError


@dataclass
class Drawn:
    """A module of a random engine."""

    cuts: list[int]
    order: list[int]
    """Where each shard's rows stand in the live parameter."""
    derived: str
    dtype: torch.dtype
    padded: int
    steps: list[list[bool]] = field(default_factory=list)


DERIVED = ["none", "none", "none", "attribute", "in place", "scalar", "norm's", "model's", "at the end", "float"]


@st.composite
def drawn_modules(draw: st.DrawFn) -> list[Drawn]:
    found = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
        straight = draw(st.booleans())
        order = list(range(sum(cuts))) if straight else draw(st.permutations(range(sum(cuts))))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
        found.append(Drawn(cuts, list(order), draw(st.sampled_from(DERIVED)), dtype, draw(st.integers(0, 2))))
    return found


def random_plan(modules: list[Drawn]) -> Plan:
    box: list[Any] = []

    def model() -> Any:
        return box[0]

    parts: dict[str, Part] = {"norm": norm()}
    for i, drawn in enumerate(modules):
        feeds, start = {}, 0
        for j, size in enumerate(drawn.cuts):
            feeds[f"m{i}.{j}"] = ("weight", rows(start, start + size))
            start += size

        def finish(module: Any, loaded: Tensors, drawn: Drawn = drawn, i: int = i) -> None:
            weight = loaded["weight"]
            order = [*drawn.order, *range(len(drawn.order), len(weight))]
            keep(module, {"weight": weight[order]})
            value = weight.float().sum(0)
            match drawn.derived:
                case "attribute":
                    module.cache = value
                case "in place":
                    module.buffer_of.copy_(value)
                case "scalar":
                    module.cache = value.abs().max()
                case "float":
                    module.cache = float(value.abs().max())
                case "norm's":
                    setattr(module.norm_of(), f"cache{i}", value)
                case "model's":
                    setattr(model(), f"cache{i}", value)

        def setup(module: Any, i: int = i) -> None:
            module.buffer_of = torch.zeros(5)
            module.norm_of = lambda: model().norm

        parts[f"m{i}"] = Part(
            {"weight": (start + drawn.padded, 5)}, feeds, finish, setup, bool(drawn.padded), dtype=drawn.dtype
        )

    def end(found: Any) -> None:
        for i, drawn in enumerate(modules):
            if drawn.derived == "at the end":
                found.norm.late = {**getattr(found.norm, "late", {}), i: getattr(found, f"m{i}").weight.float().sum(0)}

    def held(found: Any) -> Any:
        of_modules = [[getattr(m, "cache", None), getattr(m, "buffer_of", None)] for m in found.children()]
        numbered = [getattr(at, f"cache{i}", None) for at in (found, found.norm) for i in range(len(modules))]
        return [of_modules, numbered, getattr(found.norm, "late", None)]

    made = Plan(parts, end, held)
    made.box = box  # type: ignore[attr-defined]
    return made


class Boxed(MadeUp):
    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        getattr(plan, "box", []).append(self.model)


@settings(max_examples=25)
@given(
    modules=drawn_modules(),
    config=st.sampled_from(WAYS[:2] + WAYS[3:]),
    mode=st.sampled_from(["auto", "auto", "audit"]),
    data=st.data(),
)
def test_random_engines_are_as_after_a_reload(
    modules: list[Drawn], config: dict[str, Any], mode: str, data: st.DataObject
) -> None:
    with run(lambda: random_plan(modules), kind=Boxed, direct_apply=mode, audit_every=3, **config) as made:
        if data.draw(st.booleans()):  # the engine begins on the trainer's weights
            made.engine.apply([[(name, made.weights[name]) for name in group.names] for group in made.groups])
        for _ in range(6):
            changes = data.draw(st.lists(st.sampled_from(sorted(made.weights)), unique=True))
            if changes:
                made.step(*changes)
            if data.draw(st.integers(0, 5)) == 0:
                first = made.engine.model.m0.weight
                first.data = first.data.clone()
            try:
                made.update()
            except (
                EnginePoisonedError
            ):  # it does not know from which weight a tensor was made that had not changed before
                assert mode == "audit"


@settings(max_examples=10)
@given(modules=drawn_modules(), config=st.sampled_from(WAYS[:2] + WAYS[3:]))
def test_random_engines_that_only_copy_are_copied(modules: list[Drawn], config: dict[str, Any]) -> None:
    for drawn in modules:
        drawn.order, drawn.derived = list(range(sum(drawn.cuts))), "none"
    with run(lambda: random_plan(modules), **config) as made:
        assert made.updates(2)[-1].num_direct == len(modules) + 1
