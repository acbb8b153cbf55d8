"""The recorder watches toy loaders; the load map says what lands where, and which names belong together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import pytest
import torch

from weightsync.errors import ManifestError
from weightsync.geometry import Coverage, Region
from weightsync.loadmap import LoadMap, ModuleGroup, layer_groups
from weightsync.manifest import Manifest, TensorMeta
from weightsync.recorder import record_load_map

Items = Iterable[tuple[str, torch.Tensor]]
Place = tuple[str, str]


def manifest(
    shapes: Mapping[str, tuple[int, ...]], aliases: dict[str, str] | None = None, dtype: str = "float32"
) -> Manifest:
    return Manifest(tuple(TensorMeta(name, dtype, shape) for name, shape in shapes.items()), aliases or {})


def places(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> dict[Place, torch.Tensor]:
    """Meta parameters by "module.parameter"."""
    found = {}
    for path, shape in shapes.items():
        module, _, parameter = path.rpartition(".")
        found[module, parameter] = torch.empty(shape, dtype=dtype, device="meta")
    return found


def replay(
    found: LoadMap, values: dict[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, torch.Tensor]:
    """The parameters that the map's copies make of *values*; NaN where nothing was written."""
    made = {path: torch.full(shape, float("nan")) for path, shape in shapes.items()}
    for copy in found.copies:
        assert copy.source is not None
        assert copy.destination is not None
        path = f"{copy.module}.{copy.parameter}" if copy.module else copy.parameter
        copy.destination.view_in(made[path]).copy_(copy.source.view_in(values[copy.name]))
    return made


def random_values(of: Manifest) -> dict[str, torch.Tensor]:
    return {name: torch.randn(of.meta_of(name).shape) for name in of.all_names}


def groups(found: LoadMap) -> list[tuple[str, ...]]:
    return [group.names for group in found.groups]


QKV = {"q": (4, 6), "k": (2, 6), "v": (2, 6)}


def load_qkv(parameter: torch.Tensor, items: Items) -> None:
    """A fused projection, as engines load it."""
    starts = {"q": 0, "k": 4, "v": 6}
    for name, tensor in items:
        parameter.narrow(0, starts[name], tensor.shape[0]).copy_(tensor)


def test_a_fused_projection_is_one_group_with_each_shard_in_its_place() -> None:
    of, into = manifest(QKV), places({"attn.qkv": (8, 6)})
    found = record_load_map(of, into, lambda items: load_qkv(into["attn", "qkv"], items))
    assert groups(found) == [("q", "k", "v")]
    assert (found.groups[0].key, found.groups[0].modules) == ("attn", ("attn",))
    assert found.copies[1].destination == Region((2, 6), (6, 1), 24)
    assert found.coverage() == {"attn.qkv": Coverage(once=48, never=0, repeated=0)}
    values = random_values(of)
    made = replay(found, values, {"attn.qkv": (8, 6)})
    assert torch.equal(made["attn.qkv"], torch.cat([values["q"], values["k"], values["v"]]))


def test_a_rank_of_a_sharded_engine_gets_its_slices_of_the_source() -> None:
    of = manifest({"column": (8, 6), "row": (6, 8)})
    shapes = {"a.w": (4, 6), "b.w": (6, 4)}
    into = places(shapes)

    def load(items: Items) -> None:
        for name, tensor in items:
            if name == "column":
                into["a", "w"].copy_(tensor[4:])
            else:
                into["b", "w"].copy_(tensor.narrow(1, 4, 4))

    found = record_load_map(of, into, load)
    values = random_values(of)
    made = replay(found, values, shapes)
    assert torch.equal(made["a.w"], values["column"][4:])
    assert torch.equal(made["b.w"], values["row"][:, 4:])
    assert all(cover.exact for cover in found.coverage().values())
    assert groups(found) == [("column",), ("row",)]


def test_experts_stacked_by_index_and_transposed_ones_land_where_the_loader_puts_them() -> None:
    of = manifest({**{f"experts.{i}.w": (3, 5) for i in range(4)}, "stacked": (4, 5, 3)})
    shapes = {"moe.w": (4, 3, 5), "moe2.w": (4, 3, 5)}
    into = places(shapes)

    def load(items: Items) -> None:
        for name, tensor in items:
            if name == "stacked":
                into["moe2", "w"].copy_(tensor.transpose(1, 2))
            else:
                into["moe", "w"][int(name.split(".")[1])].copy_(tensor)

    found = record_load_map(of, into, load)
    values = random_values(of)
    made = replay(found, values, shapes)
    assert torch.equal(made["moe.w"], torch.stack([values[f"experts.{i}.w"] for i in range(4)]))
    assert torch.equal(made["moe2.w"], values["stacked"].transpose(1, 2))
    assert groups(found) == [tuple(f"experts.{i}.w" for i in range(4)), ("stacked",)]


def test_a_scalar_that_is_broadcast_is_recorded_as_such() -> None:
    of, into = manifest({"scale": ()}), places({"m.scales": (3,)})
    found = record_load_map(of, into, lambda items: [into["m", "scales"].copy_(t) for _, t in items])
    values = random_values(of)
    assert torch.equal(replay(found, values, {"m.scales": (3,)})["m.scales"], values["scale"].expand(3))


def test_names_join_a_group_through_any_chain_of_modules() -> None:
    of = manifest(dict.fromkeys("abcd", (2,)))
    into = places({"m1.x": (4,), "m2.x": (4,), "m3.x": (2,)})
    feeds = {"a": [("m1", 0)], "b": [("m1", 2), ("m2", 0)], "c": [("m2", 2)], "d": [("m3", 0)]}

    def load(items: Items) -> None:
        for name, tensor in items:
            for module, start in feeds[name]:
                into[module, "x"][start : start + 2].copy_(tensor)

    found = record_load_map(of, into, load)
    assert groups(found) == [("a", "b", "c"), ("d",)]
    assert found.groups[0].modules == ("m1", "m2")


def test_two_parameters_of_one_module_belong_together() -> None:
    of, into = manifest({"w": (2,), "b": (2,)}), places({"m.weight": (2,), "m.bias": (2,)})
    where = {"w": ("m", "weight"), "b": ("m", "bias")}
    found = record_load_map(of, into, lambda items: [into[where[name]].copy_(t) for name, t in items])
    assert groups(found) == [("w", "b")]


def load_some(into: dict[Place, torch.Tensor], taken: tuple[str, ...], items: Items) -> None:
    for name, tensor in items:
        if name in taken:
            into[name[0], "w"].copy_(tensor)


def test_a_tie_stands_beside_its_canonical_name_whichever_the_loader_takes() -> None:
    of = manifest({"embed": (3,), "other": (3,)}, {"head": "embed"})
    for taken in [("embed", "other"), ("head", "other"), ("embed", "head", "other")]:
        into = places({"e.w": (3,), "o.w": (3,), "h.w": (3,)})
        found = record_load_map(of, into, partial(load_some, into, taken))
        assert groups(found) == [("embed", "head"), ("other",)]
        assert found.unmapped == ()


def test_what_feeds_nothing_and_what_nothing_feeds_are_listed() -> None:
    of, into = manifest({"w": (2,), "rope": (2,)}), places({"m.w": (2,), "m.cache": (9,), "top": (1,)})
    found = record_load_map(of, into, lambda items: [into["m", "w"].copy_(t) for name, t in items if name == "w"])
    assert found.unmapped == ("rope",)
    assert found.unfed == ("m.cache", "top")
    assert found.fallback is None


def test_gaps_and_overlaps_show_in_the_coverage() -> None:
    of, into = manifest({"a": (4,), "b": (4,)}), places({"m.w": (10,)})

    def load(items: Items) -> None:
        for (_, tensor), start in zip(items, (0, 3), strict=True):
            into["m", "w"][start : start + 4].copy_(tensor)

    cover = record_load_map(of, into, load).coverage()["m.w"]
    assert (cover, cover.exact) == (Coverage(once=6, never=3, repeated=1), False)


def test_dtypes_that_change_when_they_land_are_listed() -> None:
    of, into = manifest({"w": (2,)}), places({"m.w": (2,)}, torch.bfloat16)
    found = record_load_map(of, into, lambda items: [into["m", "w"].copy_(t) for _, t in items])
    assert found.casts(of) == ("w: float32 -> bfloat16",)


def test_padding_filled_with_a_constant_is_no_obstacle() -> None:
    of, into = manifest({"vocab": (5, 2)}), places({"e.w": (8, 2)})

    def load(items: Items) -> None:
        for _, tensor in items:
            into["e", "w"][:5].copy_(tensor)
            into["e", "w"][5:].fill_(0)
            into["e", "w"][5:].zero_()

    found = record_load_map(of, into, load)
    assert found.fallback is None
    assert found.coverage() == {"e.w": Coverage(once=10, never=6, repeated=0)}


def transform_after(into: dict[Place, torch.Tensor], items: Items) -> None:
    for _, tensor in items:
        into["m", "w"].copy_(tensor)
    into["m", "w"].mul_(2)


def compute_before(into: dict[Place, torch.Tensor], items: Items) -> None:
    into["m", "w"].copy_(sum((tensor for _, tensor in items), torch.zeros(2, device="meta")))


def through_a_buffer(into: dict[Place, torch.Tensor], items: Items) -> None:
    buffer = torch.empty(2, device="meta")
    for _, tensor in items:
        buffer.add_(tensor)
    into["m", "w"].copy_(buffer)


def through_other_bits(into: dict[Place, torch.Tensor], items: Items) -> None:
    for _, tensor in items:
        into["m", "w"].view(torch.uint8)[:8].copy_(tensor.view(torch.uint8))


def in_place(into: dict[Place, torch.Tensor], items: Items) -> None:
    for _, tensor in items:
        into["m", "w"].add_(tensor)


def rebound(into: dict[Place, torch.Tensor], items: Items) -> None:
    into["m", "w"].data = torch.stack([tensor for _, tensor in items]).sum(0)


@pytest.mark.parametrize(
    "load", [transform_after, compute_before, through_a_buffer, through_other_bits, in_place, rebound]
)
def test_where_a_loader_computes_names_are_known_and_regions_are_not(
    load: Callable[[dict[Place, torch.Tensor], Items], None],
) -> None:
    of, into = manifest({"a": (2,), "b": (2,)}), places({"m.w": (2,)})
    found = record_load_map(of, into, lambda items: load(into, items))
    assert groups(found) == [("a", "b")]
    assert {(copy.source, copy.destination) for copy in found.copies} == {(None, None)}
    assert found.coverage() == {}
    assert found.fallback is None


def wants_item(items: Items) -> None:
    for _, tensor in items:
        if tensor[0].item() > 0:
            raise AssertionError("never reached")


def wants_numpy(items: Items) -> None:
    for _, tensor in items:
        tensor.numpy()


def wants_cpu(items: Items) -> None:
    for _, tensor in items:
        torch.empty(tensor.shape).copy_(tensor)


def wants_truth(items: Items) -> None:
    for _, tensor in items:
        if (tensor == 0).all():
            raise AssertionError("never reached")


@pytest.mark.parametrize("load", [wants_item, wants_numpy, wants_cpu, wants_truth])
def test_a_loader_that_wants_data_falls_back_to_layers_and_says_why(load: Callable[[Items], None]) -> None:
    of = manifest({"embed": (2,), "layers.0.a": (2,), "layers.0.b": (2,), "layers.1.a": (2,)})
    found = record_load_map(of, places({"m.w": (2,)}), load)
    assert groups(found) == [("embed",), ("layers.0.a", "layers.0.b"), ("layers.1.a",)]
    assert found.fallback is not None
    assert found.fallback.startswith("one group per decoder layer: the loader cannot run without data")
    assert (found.copies, found.unfed, found.unmapped) == ((), (), ())


def test_a_write_from_nowhere_falls_back() -> None:
    of, into = manifest({"a": (2,)}), places({"m.w": (2,)})
    found = record_load_map(
        of, into, lambda items: [into["m", "w"].copy_(torch.empty(2, device="meta")) for _ in items]
    )
    assert found.fallback is not None
    assert "unknown source (m.w)" in found.fallback


@pytest.mark.parametrize("name", ["w", "metaformer.w", "metadata"])
def test_a_loader_that_refuses_a_name_refuses_the_manifest(name: str) -> None:
    def load(items: Items) -> None:
        known: dict[str, torch.Tensor] = {}
        for key, tensor in items:
            known[key].copy_(tensor)

    with pytest.raises(
        ManifestError, match=f"refuses the trainers' names or shapes: KeyError: '{name}'.*a wrapper's prefix"
    ):
        record_load_map(manifest({name: (2,)}), places({"m.w": (2,)}), load)


def test_a_shape_that_does_not_fit_refuses_the_manifest() -> None:
    into = places({"m.w": (3,)})
    with pytest.raises(ManifestError, match="refuses the trainers' names or shapes"):
        record_load_map(manifest({"w": (2,)}), into, lambda items: [into["m", "w"].copy_(t) for _, t in items])


def test_a_loader_whose_intermediates_come_and_go_is_recorded_right() -> None:
    """Storages are told apart by address; temporaries must not pass for one another."""
    count = 200
    of, into = manifest({f"w{i}": (2,) for i in range(count)}), places({f"m{i}.w": (2,) for i in range(count)})

    def load(items: Items) -> None:
        for i, (_, tensor) in enumerate(items):
            temporary = tensor * 2
            into[f"m{i}", "w"].copy_(temporary)
            del temporary, tensor

    assert groups(record_load_map(of, into, load)) == [(f"w{i}",) for i in range(count)]


def test_the_map_is_the_same_each_time_and_its_digest_too() -> None:
    def once() -> LoadMap:
        into = places({"attn.qkv": (8, 6)})
        return record_load_map(manifest(QKV), into, lambda items: load_qkv(into["attn", "qkv"], items))

    assert once() == once()
    assert once().digest == once().digest
    into = places({"attn.qkv": (8, 6)})
    other = record_load_map(
        manifest(QKV), into, lambda items: load_qkv(into["attn", "qkv"], [i for i in items if i[0] != "v"])
    )
    assert other.digest != once().digest


def test_layers_are_told_by_the_outermost_index() -> None:
    of = manifest(
        {
            "model.embed.weight": (1,),
            "model.layers.0.experts.3.w": (1,),
            "model.layers.0.attn.w": (1,),
            "model.layers.10.w": (1,),
            "model.layers.1": (1,),
            "head2.weight": (1,),
        },
        {"tie": "model.embed.weight"},
    )
    assert {group.key: group.names for group in layer_groups(of)} == {
        "(rest)": ("model.embed.weight", "tie", "head2.weight"),
        "model.layers.0": ("model.layers.0.experts.3.w", "model.layers.0.attn.w"),
        "model.layers.10": ("model.layers.10.w",),
        "model.layers.1": ("model.layers.1",),
    }


def test_without_an_index_in_any_name_the_model_is_one_group() -> None:
    of = manifest({"a": (1,), "b": (1,)}, {"c": "a"})
    assert [(group.key, group.names) for group in layer_groups(of)] == [("(model)", ("a", "c", "b"))]
    assert (ModuleGroup("(model)", of.all_names),)[0].names == ("a", "c", "b")
    found = LoadMap.from_fallback(of, (), "because")
    assert found.fallback == "one group per whole model: because"
