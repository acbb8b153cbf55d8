"""Digests are those of xxhash, whether made in one pass with a copy or not, and add up in any order."""

from __future__ import annotations

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.digest import ContentDigest, copy_and_digest, digest_bytes, digest_text


@pytest.mark.parametrize("size", [0, 1, 63, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_a_copy_that_digests_copies_and_digests(size: int) -> None:
    source = torch.randint(0, 256, (size,), dtype=torch.uint8)
    destination = torch.zeros_like(source)
    assert (
        copy_and_digest(destination, source)
        == digest_bytes(source)
        == xxhash.xxh3_64_intdigest(source.numpy().tobytes())
    )
    assert torch.equal(destination, source)


def test_any_flipped_bit_changes_the_digest() -> None:
    data = torch.randint(0, 256, (1000,), dtype=torch.uint8)
    before = digest_bytes(data)
    for bit in (0, 1, 500 * 8 + 3, 7999):
        data[bit // 8] ^= 1 << bit % 8
        assert digest_bytes(data) != before
        data[bit // 8] ^= 1 << bit % 8
    assert digest_bytes(data) == before


def test_text_digests_tell_parts_and_types_apart() -> None:
    assert len(digest_text(["a", 1])) == 32
    assert digest_text(["ab", "c"]) != digest_text(["a", "bc"])
    assert digest_text([1]) != digest_text(["1"])


pieces = st.tuples(st.sampled_from("abc"), st.integers(0, 99), st.integers(0, 99), st.integers(0, 2**64 - 1))


@settings(max_examples=50)
@given(data=st.data(), found=st.lists(pieces, max_size=8), senders=st.integers(1, 3))
def test_neither_order_nor_the_number_of_senders_matters(
    data: st.DataObject, found: list[tuple[str, int, int, int]], senders: int
) -> None:
    whole = ContentDigest()
    for piece in found:
        whole.add(*piece)
    parts = [ContentDigest() for _ in range(senders)]
    for piece in data.draw(st.permutations(found)):
        parts[data.draw(st.integers(0, senders - 1))].add(*piece)
    assert sum(part.value for part in parts) % 2**64 == whole.value
    assert sum(part.nbytes for part in parts) == whole.nbytes


def test_a_piece_that_is_missing_or_comes_twice_shows() -> None:
    one, two = ContentDigest(), ContentDigest()
    one.add("a", 0, 4, 7)
    two.add("a", 0, 4, 7)
    two.add("a", 0, 4, 7)
    assert len({one.value, two.value, 0}) == 3
