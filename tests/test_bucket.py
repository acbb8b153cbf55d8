"""Tensors are packed into buckets of bounded size, cut where they must be, cast and digested on the way."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.bucket import Bucket, count_changed, fill, write_in_place
from weightsync.chunk import ALIGNMENT_BYTES, Piece, aligned, as_bytes, from_bytes
from weightsync.digest import ContentDigest, digest_bytes
from weightsync.manifest import Manifest, TensorMeta

Tensors = dict[str, torch.Tensor]


def buckets(size: int) -> Iterator[Bucket]:
    while True:
        yield Bucket(torch.full((size,), 255, dtype=torch.uint8), [])


def pack(
    tensors: Tensors, size: int, *, wire: Tensors | None = None, digest: bool = True
) -> tuple[list[Bucket], ContentDigest]:
    content = ContentDigest()
    manifest = Manifest.from_tensors(wire or tensors)
    items = ((manifest.by_name[name], tensor) for name, tensor in tensors.items())
    return list(fill(items, buckets(size), content=content, digest=digest)), content


def unpack(filled: list[Bucket], tensors: Tensors) -> Tensors:
    """Put the pieces together again; each byte must have come once."""
    found = {name: torch.zeros(tensor.nbytes, dtype=torch.uint8) for name, tensor in tensors.items()}
    count = {name: torch.zeros(tensor.nbytes, dtype=torch.uint8) for name, tensor in tensors.items()}
    for bucket in filled:
        for piece in bucket.pieces:
            span = slice(piece.start, piece.start + piece.nbytes)
            found[piece.name][span] = bucket.payload[piece.offset : piece.offset + piece.nbytes]
            count[piece.name][span] += 1
    assert all(bool((times == 1).all()) for times in count.values())
    return {name: from_bytes(found[name], t.dtype, tuple(t.shape)) for name, t in tensors.items()}


@settings(max_examples=150)
@given(sizes=st.lists(st.integers(0, 300), max_size=12), bucket_bytes=st.integers(1, 500))
def test_whatever_the_sizes_every_byte_arrives_once_in_buckets_of_bounded_size(
    sizes: list[int], bucket_bytes: int
) -> None:
    tensors = {f"t{i}": torch.randint(0, 256, (size,), dtype=torch.uint8) for i, size in enumerate(sizes)}
    filled, content = pack(tensors, bucket_bytes)
    found = unpack(filled, tensors)
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert content.nbytes == sum(sizes)
    seen = [piece.name for bucket in filled for piece in bucket.pieces]
    assert sorted(set(seen)) == sorted(tensors)
    for bucket in filled:
        ends = [(piece.offset, piece.offset + piece.nbytes) for piece in bucket.pieces]
        assert all(end <= start for (_, end), (start, _) in pairwise(ends))
        assert all(offset % ALIGNMENT_BYTES == 0 for offset, end in ends if end > offset)
        assert all(end <= bucket.used_bytes <= bucket_bytes for _, end in ends)
        assert all(p.digest == digest_bytes(bucket.payload[p.offset : p.offset + p.nbytes]) for p in bucket.pieces)


def test_a_tensor_that_fits_a_bucket_is_never_cut() -> None:
    tensors = {f"t{i}": torch.zeros(40, dtype=torch.uint8) for i in range(5)}
    filled, _ = pack(tensors, 100)
    assert [[piece.name for piece in bucket.pieces] for bucket in filled] == [["t0"], ["t1"], ["t2"], ["t3"], ["t4"]]
    filled, _ = pack(tensors, 128)
    assert [len(bucket.pieces) for bucket in filled] == [2, 2, 1]


def test_a_tensor_larger_than_a_bucket_is_cut_and_starts_in_the_room_that_is_left() -> None:
    tensors = {"small": torch.zeros(64, dtype=torch.uint8), "large": torch.zeros(300, dtype=torch.uint8)}
    filled, _ = pack(tensors, 128)
    assert [(p.name, p.start, p.nbytes) for bucket in filled for p in bucket.pieces] == [
        ("small", 0, 64),
        ("large", 0, 64),
        ("large", 64, 128),
        ("large", 192, 108),
    ]


def test_tensors_are_cast_to_their_wire_dtype_whatever_their_strides() -> None:
    held = {
        "w": torch.randn(6, 4).t(),
        "s": torch.tensor(1.5),
        "b": torch.tensor([True, False]),
        "f": torch.randn(5)[::2],
    }
    wire = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in held.items()}
    filled, _ = pack(held, 32, wire=wire)
    found = unpack(filled, wire)
    assert all(found[name].dtype == t.dtype and torch.equal(found[name], t) for name, t in wire.items())


def test_without_digests_pieces_carry_none_and_the_bytes_are_the_same() -> None:
    tensors = {"w": torch.randn(100)}
    filled, _ = pack(tensors, 64, digest=False)
    assert {piece.digest for bucket in filled for piece in bucket.pieces} == {None}
    assert torch.equal(unpack(filled, tensors)["w"], tensors["w"])


def test_nothing_to_send_is_one_bucket_of_nothing() -> None:
    filled, content = pack({}, 64)
    assert [bucket.pieces for bucket in filled] == [[]]
    assert (content.nbytes, content.value) == (0, 0)


KINDS: Tensors = {
    "fp32": torch.randn(3, 5),
    "bf16": torch.randn(7).to(torch.bfloat16),
    "bool": torch.rand(9) > 0.5,
    "int8": torch.arange(-8, 8, dtype=torch.int8),
    "float8": torch.randn(6).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "strided": torch.randn(6, 4).t(),
    "complex": torch.randn(4, dtype=torch.complex64),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("digest", [True, False])
def test_a_tensor_written_in_place_is_there_with_its_digest(name: str, digest: bool) -> None:
    tensor = KINDS[name]
    meta = TensorMeta.of(name, tensor)
    payload = torch.full((512,), 255, dtype=torch.uint8)
    pieces = list(write_in_place(payload, 64, meta, tensor, digest=digest, piece_bytes=40))
    place = payload[64 : 64 + meta.nbytes]
    assert torch.equal(place, as_bytes(tensor))
    expected = [(start, min(start + 40, meta.nbytes)) for start in range(0, max(meta.nbytes, 1), 40)]
    assert pieces == [
        Piece(name, start, end - start, 64 + start, digest_bytes(place[start:end]) if digest else None)
        for start, end in expected
    ]
    assert bool((payload[:64] == 255).all())
    assert bool((payload[64 + meta.nbytes :] == 255).all())


@pytest.mark.parametrize("name", KINDS)
def test_changed_values_are_counted_by_their_bits(name: str) -> None:
    tensor = KINDS[name].clone()
    meta = TensorMeta.of(name, tensor)
    payload = torch.empty(aligned(max(meta.nbytes, 1)), dtype=torch.uint8)

    def write() -> int:
        changed = count_changed(payload, 0, meta, tensor)
        list(write_in_place(payload, 0, meta, tensor, digest=True, piece_bytes=64))
        return changed

    write()
    assert write() == 0
    if tensor.numel():
        index = (0,) * tensor.dim()
        tensor[index] = (
            tensor[index].logical_not()
            if tensor.dtype == torch.bool
            else (tensor[index] if tensor.is_complex() else tensor[index].float()) + 2
        )
        assert write() == 1
    assert write() == 0


def test_a_value_that_stays_nan_has_not_changed_and_a_sign_of_zero_has() -> None:
    tensor = torch.tensor([float("nan"), 0.0])
    meta = TensorMeta.of("w", tensor)
    payload = torch.empty(64, dtype=torch.uint8)
    list(write_in_place(payload, 0, meta, tensor, digest=True, piece_bytes=64))
    tensor[1] = -0.0
    assert count_changed(payload, 0, meta, tensor) == 1


def test_changed_values_are_counted_after_the_cast() -> None:
    tensor = torch.tensor([1.0, 2.0])
    meta = TensorMeta.of("w", tensor, dtype=torch.bfloat16)
    payload = torch.empty(64, dtype=torch.uint8)
    list(write_in_place(payload, 0, meta, tensor, digest=True, piece_bytes=64))
    tensor += 1e-6
    assert count_changed(payload, 0, meta, tensor) == 0
