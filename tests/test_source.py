"""What a trainer hands out: modules, mappings, lists and generators, checked against what it announced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from weightsync.errors import ConfigError, ManifestError
from weightsync.manifest import Manifest, TensorMeta
from weightsync.source import TrainerSource

HELD = {"b": torch.randn(3), "a": torch.randn(2, 2), "n": torch.tensor([1, 2])}


def source(get: Callable[[], Any], wire_dtype: Mapping[str, str] | None = None) -> TrainerSource:
    return TrainerSource(get, wire_dtype=wire_dtype or {})


def tied() -> torch.nn.Module:
    module = torch.nn.Module()
    module.embed = torch.nn.Linear(3, 3, bias=False)
    module.head = torch.nn.Linear(3, 3, bias=False)
    module.head.weight = module.embed.weight
    return module


class Weights:
    """Third parties' way: an object that can be iterated."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(HELD.items())


@pytest.mark.parametrize(
    "get",
    [
        lambda: HELD,
        lambda: list(HELD.items()),
        lambda: tuple(HELD.items()),
        lambda: iter(HELD.items()),
        lambda: ((name, tensor) for name, tensor in HELD.items()),
        Weights,
    ],
    ids=["mapping", "list", "tuple", "iterator", "generator", "object"],
)
def test_every_kind_of_source_gives_the_same_manifest_and_tensors(get: Callable[[], Any]) -> None:
    of = source(get)
    manifest = of.manifest()
    assert manifest == Manifest.from_tensors(HELD)
    of.check(manifest, tuple(HELD))
    found = dict(of.tensors(manifest, tuple(HELD)))
    assert {meta.name: tensor for meta, tensor in found.items()}.keys() == HELD.keys()
    assert all(tensor is HELD[meta.name] for meta, tensor in found.items())


def test_a_module_gives_parameters_persistent_buffers_and_ties() -> None:
    module = tied()
    module.register_buffer("kept", torch.ones(2))
    module.register_buffer("dropped", torch.ones(2), persistent=False)
    of = source(lambda: module)
    manifest = of.manifest()
    assert manifest == Manifest.from_module(module)
    assert manifest.all_names == ("kept", "embed.weight", "head.weight")
    assert [meta.name for meta, _ in of.tensors(manifest, ("embed.weight", "kept"))] == ["embed.weight", "kept"]


def test_what_exists_at_once_comes_in_the_order_that_is_asked_for() -> None:
    of = source(lambda: HELD)
    assert [meta.name for meta, _ in of.tensors(of.manifest(), ("n", "b"))] == ["n", "b"]


def test_a_collective_source_is_iterated_to_its_end_whatever_this_rank_sends() -> None:
    made: list[str] = []

    def collective() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in HELD.items():
            made.append(name)
            yield name, tensor.clone()

    of = source(collective)
    manifest = of.manifest()
    assert made == list(HELD)
    made.clear()
    of.check(manifest, ("a",))
    assert made == [], "check must not gather"
    assert [meta.name for meta, _ in of.tensors(manifest, ("a",))] == ["a"]
    assert made == list(HELD)


def test_what_was_checked_is_sent_without_looking_again() -> None:
    """Once: a second transfer looks anew."""
    looks: list[dict[str, torch.Tensor]] = []

    def look() -> dict[str, torch.Tensor]:
        looks.append({name: tensor.clone() for name, tensor in HELD.items()})
        return looks[-1]

    of = source(look)
    manifest = of.manifest()
    of.check(manifest, ("a",))
    for i in (1, 2):
        ((_, tensor),) = of.tensors(manifest, ("a",))
        assert tensor is looks[i]["a"]
    of.check(manifest, ("a",))
    ((_, tensor),) = of.tensors(manifest, ("b",))
    assert tensor is looks[4]["b"], "other names than were checked"
    assert len(looks) == 5


@pytest.mark.parametrize(
    ("get", "held"),
    [
        (tied, True),
        (lambda: HELD, True),
        (lambda: list(HELD.items()), True),
        (lambda: HELD.items(), False),
        (lambda: iter(HELD.items()), False),
    ],
    ids=["module", "mapping", "list", "view", "iterator"],
)
def test_a_source_says_whether_its_tensors_exist_at_once(get: Callable[[], Any], held: bool) -> None:
    of = source(get)
    manifest = of.manifest()
    assert of.held is held
    of.check(manifest, ())
    assert of.held is held


def test_a_collective_source_is_iterated_to_its_end_though_a_tensor_changed() -> None:
    made: list[str] = []

    def collective() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in HELD.items():
            made.append(name)
            yield name, tensor

    of = source(collective)
    manifest = Manifest.from_tensors(HELD | {"a": torch.ones(3, 3)})
    sent = of.tensors(manifest, tuple(HELD))
    made.clear()
    assert next(sent)[0].name == "b"
    with pytest.raises(ManifestError, match=r"a \(float32, \[3, 3\]\) was announced"):
        next(sent)
    assert made == list(HELD)


def test_a_lazy_source_makes_one_tensor_at_a_time() -> None:
    made: list[str] = []

    def collective() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in HELD.items():
            made.append(name)
            yield name, tensor

    of = source(collective)
    tensors = of.tensors(of.manifest(), tuple(HELD))
    made.clear()
    next(tensors)
    assert made == ["b"]


def test_a_source_that_refills_one_buffer_declares_no_ties() -> None:
    def refills() -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(3)
        for i in range(3):
            yield f"t{i}", buffer.fill_(i)

    of = source(refills)
    assert of.manifest().aliases == {}
    assert [float(tensor[0]) for _, tensor in of.tensors(of.manifest(), ("t0", "t1", "t2"))] == [0, 1, 2]


Change = Callable[[dict[str, torch.Tensor]], object]


@pytest.mark.parametrize(
    ("change", "name", "match"),
    [
        (lambda held: held.update(a=torch.ones(2, 3)), "a", r"a \(float32, \[2, 2\]\) was announced, .*\[2, 3\]"),
        (lambda held: held.update(a=torch.ones(2, 2).double()), "a", "now has a .float64"),
        (lambda held: held.update(new=torch.ones(1)), "new", r"has new \(float32, \[1\]\), which was not announced"),
    ],
)
@pytest.mark.parametrize("lazy", [True, False])
def test_a_changed_or_new_tensor_is_named(change: Change, name: str, match: str, lazy: bool) -> None:
    held = dict(HELD)
    of = source((lambda: iter(held.items())) if lazy else (lambda: held))
    manifest = of.manifest()
    change(held)
    with pytest.raises(ManifestError, match=match) as caught:
        list(of.tensors(manifest, tuple(HELD))) if lazy else of.check(manifest, tuple(HELD))
    assert caught.value.name == name


def test_a_tensor_that_is_gone_is_named_beforehand_where_all_exist_at_once() -> None:
    held = dict(HELD)
    of = source(lambda: held)
    manifest = of.manifest()
    del held["a"]
    of.check(manifest, ("b", "n"))
    with pytest.raises(ManifestError, match="no longer has a") as caught:
        of.check(manifest, ("b", "a"))
    assert caught.value.name == "a"


def test_a_tie_that_was_cut_is_named_and_one_that_stands_is_not_whatever_the_order() -> None:
    module = tied()
    of = source(lambda: module)
    manifest = of.manifest()
    of.check(manifest, ("embed.weight",))
    backwards = source(lambda: dict(reversed(module.state_dict().items())))
    backwards.check(manifest, ("embed.weight",))
    module.get_submodule("head").weight = torch.nn.Parameter(torch.ones(3, 3))
    with pytest.raises(ManifestError, match=r"head\.weight was announced as a tie of embed\.weight"):
        of.check(manifest, ("embed.weight",))


def test_the_first_wire_dtype_pattern_that_fits_decides_and_only_floats_are_cast() -> None:
    held = {"l.weight": torch.ones(2), "l.bias": torch.ones(2), "router.bias": torch.ones(2), "n": torch.tensor([1])}
    of = source(lambda: held, {"router.*": "float32", "*.bias": "float16", "*": "bfloat16"})
    manifest = of.manifest()
    assert {meta.name: meta.dtype for meta in manifest.tensors} == {
        "l.weight": "bfloat16",
        "l.bias": "float16",
        "router.bias": "float32",
        "n": "int64",
    }
    of.check(manifest, tuple(held))
    found = {meta.name: (meta, tensor) for meta, tensor in of.tensors(manifest, tuple(held))}
    assert found["l.weight"][0] == TensorMeta("l.weight", "bfloat16", (2,))
    assert found["l.weight"][1] is held["l.weight"], "the cast is the transport's"


def test_a_tie_travels_in_the_dtype_of_its_canonical_name() -> None:
    module = tied()
    of = source(lambda: module, {"head.*": "float32", "*": "bfloat16"})
    manifest = of.manifest()
    assert manifest.meta_of("head.weight").dtype == "bfloat16"
    of.check(manifest, ("embed.weight",))
    assert [meta.name for meta, _ in of.tensors(manifest, ("embed.weight",))] == ["embed.weight"]


def test_an_unknown_wire_dtype_is_a_config_error_with_its_key() -> None:
    with pytest.raises(ConfigError, match="'bf16' is no floating-point dtype") as caught:
        source(lambda: HELD, {"*": "bf16"}).manifest()
    assert caught.value.key == "wire_dtype.*"


@pytest.mark.parametrize(
    ("get", "match"),
    [
        (lambda: 3, "it yields int"),
        (lambda: None, "it yields NoneType"),
        (lambda: "model", "pairs, it yields str"),
        (lambda: [("a", 3)], "pairs"),
        (lambda: [torch.ones(2)], "pairs, it yields Tensor"),
    ],
)
def test_what_is_no_source_is_a_config_error(get: Callable[[], Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        source(get).manifest()
    assert caught.value.key == "source"


def test_extra_state_that_is_no_tensor_is_left_out() -> None:
    assert source(lambda: {"a": torch.ones(1), "extra": {"scale": 1}}).manifest().all_names == ("a",)


def test_a_name_that_comes_twice_is_refused_when_it_is_announced() -> None:
    with pytest.raises(ManifestError, match="a stands in the manifest twice"):
        source(lambda: iter([("a", torch.ones(1)), ("a", torch.ones(1))])).manifest()


@pytest.mark.parametrize(
    ("get", "match"),
    [
        (lambda: {"model": HELD}, "a mapping without a tensor: 'model' is a dict; expected name -> torch.Tensor"),
        (lambda: HELD.values(), r"must yield \(name, tensor\) pairs, it yields Tensor; name the module itself"),
        (lambda: 3, "it yields int"),
    ],
    ids=["nested", "no names", "a number"],
)
def test_what_is_no_source_is_told_with_what_it_is(get: Callable[[], Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        source(get).manifest()
    assert caught.value.key == "source"
