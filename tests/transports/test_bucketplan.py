"""Buckets that are planned ahead: every byte of every tensor is in one of them, once, with its digest at the bucket's end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.chunk import ALIGNMENT_BYTES, as_bytes
from weightsync.digest import ContentDigest, digest_words
from weightsync.manifest import TensorMeta
from weightsync.transports import bucketplan
from weightsync.transports.bucketplan import (
    _SMALL_BYTES,
    BucketPlan,
    Item,
    PlannedBuckets,
    _sizes,
    can_plan,
    planned_bytes,
)


def tensors_of(sizes: Sequence[int]) -> list[Item]:
    torch.manual_seed(len(sizes))
    made = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    return [(TensorMeta.of(f"t{i}", tensor), tensor) for i, tensor in enumerate(made)]


def planned(items: Sequence[Item], bucket_bytes: int, num_buckets: int = 3, *, digest: bool = True) -> PlannedBuckets:
    buckets = [torch.zeros(bucket_bytes, dtype=torch.uint8) for _ in range(num_buckets)]
    return PlannedBuckets(1, items, buckets, digest=digest)


@settings(max_examples=200)
@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=30),
    bucket_bytes=st.integers(256, 4096),
    digest=st.booleans(),
    small=st.sampled_from([256, 1024, _SMALL_BYTES]),
)
def test_every_byte_is_in_one_bucket_with_its_digest(
    sizes: list[int], bucket_bytes: int, digest: bool, small: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucketplan, "_SMALL_BYTES", small)
        check(tensors_of(sizes), bucket_bytes, digest)


def check(items: Sequence[Item], bucket_bytes: int, digest: bool) -> None:
    assert can_plan(items, torch.empty(bucket_bytes, dtype=torch.uint8))
    subject = planned(items, bucket_bytes, digest=digest)
    plan = subject.tell("a manifest")
    assert plan.is_possible(bucket_bytes)
    found = {meta.name: bytearray(meta.nbytes) for meta, _ in items}
    seen = dict.fromkeys(found, 0)
    sent, content = ContentDigest(), ContentDigest()
    for number, payload in enumerate(subject.payloads):
        subject.fill(number)
        assert payload.numel() == plan.nbytes[number] <= bucket_bytes
        subject.note(number, sent)
        end = 0
        for piece in plan.landed(number, payload):
            assert piece.offset >= end, "pieces overlap"
            assert piece.offset % ALIGNMENT_BYTES == 0
            end = piece.offset + piece.nbytes
            data = payload[piece.offset : end]
            assert piece.digest == (digest_words(data) if digest else None)
            assert piece.start == seen[piece.name]
            found[piece.name][piece.start : piece.start + piece.nbytes] = data.numpy().tobytes()
            seen[piece.name] += piece.nbytes
            content.add(piece.name, piece.start, piece.nbytes, piece.digest or 0)
        assert end <= payload.numel()
    assert seen == {meta.name: meta.nbytes for meta, _ in items}
    assert all(found[meta.name] == as_bytes(tensor).numpy().tobytes() for meta, tensor in items)
    assert (sent.nbytes, sent.value) == (content.nbytes, content.value)


@pytest.mark.parametrize("sizes", [[0], [1], [64, 0, 64], [5, 1000, 17] * 20])
def test_one_bucket_of_planned_bytes_has_room_for_all(sizes: list[int]) -> None:
    items = tensors_of(sizes)
    assert len(planned(items, planned_bytes(meta for meta, _ in items)).payloads) == 1


@settings(max_examples=100)
@given(many=st.floats(0, 500), largest=st.integers(256, 1 << 31))
def test_the_first_and_the_last_of_many_buckets_are_small(many: float, largest: int) -> None:
    used = []
    left = total = int(many * largest)
    for size in _sizes(total, largest):
        assert min(_SMALL_BYTES, largest) <= size <= largest
        used.append(min(size, left))
        left -= used[-1]
        if left <= 0:
            break
    assert len(used) <= total // largest + 10
    if total > 4 * largest and largest > 16 * _SMALL_BYTES:
        assert used[0] <= largest // 8
        assert used[-1] <= largest // 3
        assert all(size <= 3 * before for before, size in pairwise(used))


def test_a_plan_is_of_the_places_that_it_was_made_for() -> None:
    items = tensors_of([100, 200])
    subject = planned(items, 1024)
    assert subject.is_of(items)
    assert not subject.is_of(items[:1])
    assert not subject.is_of([items[0], (items[1][0], items[1][1].clone())])


def test_tensors_that_cannot_be_read_as_they_lie_are_not_planned() -> None:
    bucket = torch.empty(1024, dtype=torch.uint8)
    tensor = torch.zeros(4, 6)
    meta = TensorMeta.of("t", tensor)
    assert can_plan([(meta, tensor)], bucket)
    assert not can_plan([(meta, torch.zeros(6, 4).t())], bucket)
    assert not can_plan([(meta, tensor.double())], bucket)
    assert not can_plan([(meta, tensor)], bucket[:128])


def test_a_plan_that_is_not_possible_is_known() -> None:
    plan = planned(tensors_of([100, 200]), 1024).tell("")
    assert plan.is_possible(1024)
    for wrong in (
        {"nbytes": ()},
        {"nbytes": (0,)},
        {"nbytes": (8,)},
        {"nbytes": (1025,)},
    ):
        given = {"number": 1, "manifest_digest": "", "buckets": plan.buckets, "nbytes": plan.nbytes, "digested": True}
        assert not BucketPlan(**(given | wrong)).is_possible(1024), wrong  # type: ignore[arg-type]
