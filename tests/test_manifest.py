"""A manifest knows names, dtypes, shapes and ties, in order, and has one digest in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
import torch

from weightsync.errors import ManifestError
from weightsync.manifest import MAX_NAME_CHARS, Manifest, TensorMeta, TieFinder


def metas(*names: str) -> tuple[TensorMeta, ...]:
    return tuple(TensorMeta(name, "float32", (2,)) for name in names)


def tied_model() -> torch.nn.Module:
    module = torch.nn.Module()
    module.embed = torch.nn.Embedding(7, 4)
    module.body = torch.nn.Linear(4, 4)
    module.head = torch.nn.Linear(4, 7, bias=False)
    module.head.weight = module.embed.weight
    return module


def test_tensors_keep_the_order_in_which_they_came() -> None:
    names = ["z", "a", "m.10", "m.9"]
    manifest = Manifest.from_tensors({name: torch.ones(1) for name in names})
    assert [meta.name for meta in manifest.tensors] == names


def test_tied_parameters_are_one_tensor_and_an_alias() -> None:
    manifest = Manifest.from_module(tied_model())
    assert [meta.name for meta in manifest.tensors] == ["embed.weight", "body.weight", "body.bias"]
    assert manifest.aliases == {"head.weight": "embed.weight"}
    assert manifest.all_names == ("embed.weight", "head.weight", "body.weight", "body.bias")
    assert manifest.nbytes == 4 * (28 + 16 + 4)
    assert manifest.meta_of("head.weight") == TensorMeta("head.weight", "float32", (7, 4))


def test_a_detached_state_dict_shows_the_same_ties() -> None:
    module = tied_model()
    assert Manifest.from_tensors(module.state_dict()) == Manifest.from_module(module)


def test_only_the_very_same_memory_and_geometry_is_a_tie() -> None:
    base = torch.randn(4, 4)
    same = {"base": base, "again": base.view(4, 4)}
    other = {
        "rows": base[:2],
        "transposed": base.t(),
        "other shape": base.view(16),
        "other bits": base.view(torch.int32),
        "equal values": base.clone(),
        "shifted": base[1:3],
    }
    assert Manifest.from_tensors({**same, **other}).aliases == {"again": "base"}


def test_empty_and_meta_tensors_are_never_ties() -> None:
    empty, meta = torch.empty(0), torch.empty(3, device="meta")
    assert Manifest.from_tensors({"a": empty, "b": empty, "c": meta, "d": meta}).aliases == {}


def test_a_recycled_address_is_no_tie() -> None:
    addresses: list[int] = []

    def temporaries() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(50):
            tensor = torch.full((1000,), float(i))
            addresses.append(tensor.data_ptr())
            yield f"t{i}", tensor
            del tensor

    manifest = Manifest.from_tensors(temporaries())
    assert manifest.aliases == {}
    assert len(manifest.tensors) == 50
    assert len(set(addresses)) < 50, "this test needs an address that is used again"


def test_a_tie_finder_keeps_no_tensor_alive() -> None:
    finder, tensor = TieFinder(), torch.ones(3)
    weak = tensor.untyped_storage()._weak_ref()
    assert finder.canonical("a", tensor) is None
    assert finder.canonical("b", tensor) == "a"
    del tensor
    assert torch.UntypedStorage._expired(weak)
    torch.UntypedStorage._free_weak_ref(weak)


def test_extra_state_that_is_no_tensor_is_left_out() -> None:
    class WithExtra(torch.nn.Linear):
        def get_extra_state(self) -> object:
            return {"scale": 1}

    assert Manifest.from_module(WithExtra(2, 2)).all_names == ("weight", "bias")


def test_the_digest_is_the_same_in_every_process_whatever_its_hash_seed() -> None:
    script = (
        "from weightsync.manifest import Manifest, TensorMeta\n"
        "names = ['b', 'a', 'ü.0']\n"
        "print(Manifest(tuple(TensorMeta(n, 'float32', (2, 3)) for n in names), {'y': 'a', 'x': 'a'}).digest)"
    )
    seed = "0" if os.environ.get("PYTHONHASHSEED") != "0" else "1"  # another than this process's
    there = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    here = Manifest(tuple(TensorMeta(n, "float32", (2, 3)) for n in ["b", "a", "ü.0"]), {"x": "a", "y": "a"})
    assert there.stdout.strip() == here.digest
    assert len(here.digest) == 32


@pytest.mark.parametrize(
    "other",
    [
        Manifest(metas("b", "a")),
        Manifest(metas("a")),
        Manifest(metas("a", "b", "c")),
        Manifest(metas("a", "b"), {"c": "a"}),
        Manifest((TensorMeta("a", "float16", (2,)), *metas("b"))),
        Manifest((TensorMeta("a", "float32", (1, 2)), *metas("b"))),
    ],
)
def test_any_difference_changes_the_digest_and_has_words(other: Manifest) -> None:
    manifest = Manifest(metas("a", "b"))
    assert manifest.digest != other.digest
    assert manifest.difference(other)
    assert other.difference(manifest)
    assert manifest.difference(Manifest(metas("a", "b"))) == ""


def test_the_words_of_a_difference_name_the_tensor_and_both_descriptions() -> None:
    manifest = Manifest(metas("a", "b"))
    assert manifest.difference(Manifest(metas("a"))) == "b is missing"
    assert manifest.difference(Manifest(metas("a", "b", "c"))) == "c is new"
    changed = Manifest((TensorMeta("a", "int8", (3,)), *metas("b")))
    assert manifest.difference(changed) == "a was float32 [2], is int8 [3]"
    assert manifest.difference(Manifest(metas("b", "a"))) == "the order of the tensors changed"
    assert "ties changed" in manifest.difference(Manifest(metas("a", "b"), {"t": "a"}))


@pytest.mark.parametrize(
    ("tensors", "aliases", "match"),
    [
        (metas("a", "b", "a"), {}, "a stands in the manifest twice"),
        (metas(""), {}, "1 to 1024 characters"),
        (metas("x" * (MAX_NAME_CHARS + 1)), {}, "1 to 1024 characters"),
        ((TensorMeta("a", "float32", (2, -1)),), {}, r"a \(float32, \[2, -1\]\): negative size"),
        ((TensorMeta("a", "float33", (2,)),), {}, "a: unknown dtype 'float33'"),
        ((TensorMeta("a", "nn", (2,)),), {}, "a: unknown dtype 'nn'"),
        (metas("a"), {"b": "c"}, "b is tied to c, which is not in the manifest"),
        (metas("a", "b"), {"b": "a"}, "b is both a tensor and a tie of a"),
        (metas("a"), {"b": "a", "c": "b"}, "c is tied to b"),
    ],
)
def test_a_bad_manifest_is_refused_with_the_name(
    tensors: tuple[TensorMeta, ...], aliases: dict[str, str], match: str
) -> None:
    with pytest.raises(ManifestError, match=match):
        Manifest(tensors, aliases)


def test_a_bad_manifest_is_refused_on_the_wire_too() -> None:
    good = Manifest(metas("a", "b"), {"c": "a"})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(good), type=Manifest) == good
    data = {"tensors": [{"name": "a", "dtype": "float33", "shape": [1]}], "aliases": {}}
    with pytest.raises((ManifestError, msgspec.ValidationError), match="float33"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(data), type=Manifest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_sizes_are_those_of_torch(dtype: torch.dtype) -> None:
    for shape in [(), (0,), (3,), (2, 0, 5), (2, 3)]:
        tensor = torch.empty(shape, dtype=dtype)
        meta = TensorMeta.of("w", tensor)
        assert (meta.torch_dtype, meta.shape, meta.numel, meta.nbytes) == (dtype, shape, tensor.numel(), tensor.nbytes)
