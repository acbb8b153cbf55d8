"""Chunks of any order and size become whole groups, once each, with exact bytes, within the budget."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.chunk import Piece, WeightChunk, aligned, as_bytes
from weightsync.coalescer import Coalescer
from weightsync.digest import digest_bytes
from weightsync.errors import (
    DigestError,
    IncompleteUpdateError,
    ManifestError,
    StagingLimitError,
    UpdateTimeoutError,
    WeightSyncError,
)
from weightsync.loadmap import ModuleGroup
from weightsync.manifest import Manifest
from weightsync.staging import check_budget, group_bytes, regroup

Tensors = dict[str, torch.Tensor]

ODD: Tensors = {
    "fp32": torch.randn(3, 5),
    "bf16": torch.randn(7).to(torch.bfloat16),
    "bool": torch.rand(9) > 0.5,
    "int8": torch.arange(-8, 8, dtype=torch.int8),
    "float8": torch.randn(6).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "strided": torch.randn(6, 4).t(),
    "int64": torch.tensor([2**62, -1]),
}


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(as_bytes(a), as_bytes(b))


def one_group_each(tensors: Tensors) -> list[ModuleGroup]:
    return [ModuleGroup(name, (name,)) for name in tensors]


def coalescer(
    tensors: Tensors,
    groups: Sequence[ModuleGroup] | None = None,
    *,
    limit: int = 1 << 30,
    timeout_s: float = 10,
    producers: int = 1,
    verify: bool = True,
) -> Coalescer:
    manifest = Manifest.from_tensors(tensors)
    return Coalescer(
        manifest,
        one_group_each(tensors) if groups is None else groups,
        version=1,
        staging_limit_bytes=limit,
        timeout_s=timeout_s,
        num_producers=producers,
        verify=verify,
    )


class Lent:
    """A chunk with a counter of its releases."""

    def __init__(
        self, of: Coalescer, pieces: Iterable[tuple[str, int, torch.Tensor]], *, stable: bool = False, version: int = 1
    ) -> None:
        """*pieces*: name, first byte, bytes."""
        self.released = 0
        parts, placed, offset = [], [], 0
        for name, start, data in pieces:
            placed.append(Piece(name, start, data.numel(), offset, digest_bytes(data.contiguous())))
            parts += [data, torch.zeros(aligned(data.numel()) - data.numel(), dtype=torch.uint8)]
            offset += aligned(data.numel())
        payload = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
        self.chunk = WeightChunk(
            version, of.manifest.digest, tuple(placed), payload, stable=stable, release=self._release
        )

    def _release(self) -> None:
        self.released += 1
        self.chunk.payload.fill_(255)  # whoever reads after the release reads garbage


def whole(of: Coalescer, tensors: Tensors, names: Iterable[str], *, stable: bool = False) -> Lent:
    return Lent(of, [(name, 0, as_bytes(tensors[name])) for name in names], stable=stable)


def collect(source: Coalescer) -> Tensors:
    """Every group's tensors, copied while they are on loan; a name that comes twice fails."""
    found: Tensors = {}
    for group in source.groups():
        for name, tensor in group:
            assert name not in found
            found[name] = tensor.clone()
    return found


def in_threads(*works: Callable[[], object]) -> list[BaseException]:
    """Run side by side to the end; what they raised."""
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return errors


@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("order", [list(ODD), list(reversed(ODD))])
@pytest.mark.parametrize("per_chunk", [1, 4, 100])
def test_tensors_of_every_kind_arrive_exactly(order: list[str], per_chunk: int, stable: bool) -> None:
    target = coalescer(ODD)
    lent = [whole(target, ODD, order[i : i + per_chunk], stable=stable) for i in range(0, len(order), per_chunk)]
    for one in lent:
        target.put(one.chunk)
    target.producer_done()
    found = collect(target)
    assert found.keys() == ODD.keys()
    assert all(same_bytes(found[name], ODD[name]) for name in ODD)
    target.close()
    assert [one.released for one in lent] == [1] * len(lent)


def test_a_tensor_cut_anywhere_in_any_order_is_put_together() -> None:
    tensors = {"w": torch.randn(100), "v": torch.randn(3)}
    target = coalescer(tensors)
    data = as_bytes(tensors["w"])
    for start, end in [(250, 400), (0, 3), (3, 250)]:
        target.put(Lent(target, [("w", start, data[start:end])]).chunk)
    target.put(whole(target, tensors, ["v"]).chunk)
    assert same_bytes(collect(target)["w"], tensors["w"])


def test_a_copied_chunk_is_released_before_put_returns() -> None:
    target = coalescer(ODD)
    lent = whole(target, ODD, ODD)
    target.put(lent.chunk)
    assert lent.released == 1
    assert all(same_bytes(value, ODD[name]) for name, value in collect(target).items())


def test_a_stable_chunk_costs_no_staging_and_is_released_with_the_last_group_it_feeds() -> None:
    tensors = {"a": torch.randn(4), "b": torch.randn(4)}
    target = coalescer(tensors)
    lent = whole(target, tensors, tensors, stable=True)
    target.put(lent.chunk)
    groups = target.groups()
    ((_, first),) = next(groups)
    assert first.untyped_storage().data_ptr() == lent.chunk.payload.untyped_storage().data_ptr()
    next(groups)
    assert lent.released == 0
    assert next(groups, None) is None
    assert lent.released == 1
    target.close()
    assert lent.released == 1
    assert target.peak_staging_bytes == 0


def test_a_stable_chunk_that_is_misaligned_for_its_dtype_is_copied() -> None:
    tensors = {"w": torch.randn(4)}
    target = coalescer(tensors)
    data = as_bytes(tensors["w"])
    payload = torch.empty(64 + 16, dtype=torch.uint8)
    offset = 1 - payload.data_ptr() % 4 + 4
    payload[offset : offset + 16] = data
    piece = Piece("w", 0, 16, offset, digest_bytes(data))
    target.put(WeightChunk(1, target.manifest.digest, (piece,), payload, stable=True))
    assert same_bytes(collect(target)["w"], tensors["w"])


class OneRun:
    """Stable chunks over one payload, in which *tensor* lies whole."""

    def __init__(self, of: Coalescer, tensor: torch.Tensor) -> None:
        self.of, self.data, self.released = of, as_bytes(tensor), 0
        self.payload = torch.cat([torch.zeros(64, dtype=torch.uint8), self.data])

    def _release(self) -> None:
        self.released += 1

    def chunk(self, start: int, end: int) -> WeightChunk:
        piece = Piece("w", start, end - start, 64 + start, digest_bytes(self.data[start:end]))
        return WeightChunk(1, self.of.manifest.digest, (piece,), self.payload, stable=True, release=self._release)


def test_pieces_that_lie_in_one_run_of_stable_memory_are_used_where_they_lie() -> None:
    tensors = {"w": torch.randn(100)}
    target = coalescer(tensors)
    lent = OneRun(target, tensors["w"])
    for start, end in [(200, 400), (0, 40), (40, 200)]:
        target.put(lent.chunk(start, end))
    ((_, found),) = next(target.groups())
    assert found.data_ptr() == lent.payload[64:].data_ptr()
    assert same_bytes(found, tensors["w"])
    assert (target.peak_staging_bytes, lent.released) == (0, 0)
    target.close()
    assert lent.released == 3


@pytest.mark.parametrize("elsewhere", [(0, 40), (40, 200), (200, 400)])
@pytest.mark.parametrize("stable", [True, False])
def test_a_tensor_of_which_a_part_lies_elsewhere_is_staged(elsewhere: tuple[int, int], stable: bool) -> None:
    tensors = {"w": torch.randn(100)}
    target = coalescer(tensors)
    lent = OneRun(target, tensors["w"])
    for start, end in [(40, 200), (0, 40), (200, 400)]:
        if (start, end) == elsewhere:
            other = Lent(target, [("w", start, lent.data[start:end])], stable=stable)
            target.put(other.chunk)
        else:
            target.put(lent.chunk(start, end))
    assert same_bytes(collect(target)["w"], tensors["w"])
    target.close()
    assert (lent.released, other.released) == (2, 1)


def test_producers_that_stage_parts_of_a_lent_tensor_do_not_undo_one_another() -> None:
    tensors = {"w": torch.randn(100)}
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(150):
            target = coalescer(tensors, producers=3)
            lent = OneRun(target, tensors["w"])
            target.put(lent.chunk(0, 40))
            others = [Lent(target, [("w", a, lent.data[a:b])]).chunk for a, b in ((40, 200), (200, 400))]
            lent.payload[64 + 40 :] = 255  # what has not come may hold anything
            assert in_threads(*(partial(target.put, chunk) for chunk in others)) == []
            assert same_bytes(collect(target)["w"], tensors["w"])
    finally:
        sys.setswitchinterval(interval)


def keep_groups(source: Coalescer, into: list[torch.Tensor]) -> None:
    into += collect(source).values()


def test_a_tensor_is_whole_when_every_producer_has_copied_its_part_and_not_before() -> None:
    tensors = {"w": torch.randint(0, 256, (1 << 16,), dtype=torch.uint8)}
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(150):
            target = coalescer(tensors, producers=4)
            step = (1 << 16) // 4
            chunks = [Lent(target, [("w", a, tensors["w"][a : a + step])]).chunk for a in range(0, 1 << 16, step)]
            found: list[torch.Tensor] = []
            works = [partial(target.put, chunk) for chunk in chunks]
            assert in_threads(*works, partial(keep_groups, target, found)) == []
            assert torch.equal(found[0], tensors["w"])
    finally:
        sys.setswitchinterval(interval)


def test_ties_stand_beside_their_canonical_name_and_share_its_bytes() -> None:
    weight = torch.randn(4)
    target = coalescer({"embed": weight, "head": weight}, [ModuleGroup("m", ("embed", "head"))])
    target.put(whole(target, {"embed": weight}, ["embed"]).chunk)
    (pairs,) = target.groups()
    assert [name for name, _ in pairs] == ["embed", "head"]
    assert pairs[0][1].data_ptr() == pairs[1][1].data_ptr()


def test_a_tie_that_is_sent_is_unexpected_and_the_message_says_why() -> None:
    weight = torch.randn(4)
    target = coalescer({"embed": weight, "head": weight}, [ModuleGroup("m", ("embed", "head"))])
    with pytest.raises(IncompleteUpdateError, match="tie of embed") as caught:
        target.put(whole(target, {"head": weight}, ["head"]).chunk)
    assert caught.value.unexpected == ["head"]


def test_names_in_no_group_must_arrive_and_are_dropped() -> None:
    tensors = {"a": torch.randn(4), "extra": torch.randn(4)}
    target = coalescer(tensors, [ModuleGroup("a", ("a",))])
    target.put(whole(target, tensors, ["a"]).chunk)
    assert not target.is_whole()
    target.put(whole(target, tensors, ["extra"], stable=True).chunk)
    assert list(collect(target)) == ["a"]
    assert target.peak_staging_bytes == aligned(16)


def test_groups_that_were_not_handed_out_are_named() -> None:
    tensors = {name: torch.randn(2) for name in "abc"}
    target = coalescer(tensors)
    target.put(whole(target, tensors, tensors).chunk)
    groups = target.groups()
    next(groups)
    assert target.unread() == ["b", "c"]
    list(groups)
    assert target.unread() == []


def test_a_slow_consumer_holds_producers_back_within_the_budget() -> None:
    tensors = {f"t{i}": torch.randn(100) for i in range(20)}
    limit = 3 * aligned(400)
    target = coalescer(tensors, limit=limit)
    found: Tensors = {}

    def consume() -> None:
        for pairs in target.groups():
            time.sleep(0.005)
            found.update({name: value.clone() for name, value in pairs})

    def produce() -> None:
        for name in tensors:
            target.put(whole(target, tensors, [name]).chunk)
        target.producer_done()

    assert in_threads(consume, produce) == []
    assert all(same_bytes(found[name], tensors[name]) for name in tensors)
    assert 0 < target.peak_staging_bytes <= limit


def test_a_budget_full_of_partial_groups_is_a_named_error_and_not_a_hang() -> None:
    tensors = {f"{g}.{i}": torch.randn(100) for g in "ab" for i in range(2)}
    groups = [ModuleGroup(g, (f"{g}.0", f"{g}.1")) for g in "ab"]
    target = coalescer(tensors, groups, limit=3 * aligned(400))
    target.put(whole(target, tensors, ["a.0"]).chunk)
    with pytest.raises(StagingLimitError, match="module group b") as caught:
        target.put(whole(target, tensors, ["b.0"]).chunk)
    assert (caught.value.group, caught.value.needed_bytes) == ("b", 4 * aligned(400))


def test_two_producers_that_block_one_another_are_told_both() -> None:
    tensors = {f"{g}.{i}": torch.randn(100) for g in "abc" for i in range(2)}
    groups = [ModuleGroup(g, (f"{g}.0", f"{g}.1")) for g in "abc"]
    target = coalescer(tensors, groups, limit=2 * aligned(400), producers=2)
    target.put(whole(target, tensors, ["a.0"]).chunk)
    errors = in_threads(*(lambda n=n: target.put(whole(target, tensors, [n]).chunk) for n in ("b.0", "c.0")))
    assert [type(error) for error in errors] == [StagingLimitError, StagingLimitError]


def test_a_producer_waits_at_most_its_bound_for_room() -> None:
    tensors = {"a": torch.randn(100), "b": torch.randn(100)}
    target = coalescer(tensors, limit=aligned(400), timeout_s=0.2)
    target.put(whole(target, tensors, ["a"]).chunk)  # whole, and nobody consumes it
    lent = whole(target, tensors, ["b"])
    with pytest.raises(UpdateTimeoutError, match="no room to stage module group b"):
        target.put(lent.chunk)
    assert lent.released == 1


def test_a_group_larger_than_the_budget_is_refused_beforehand_with_its_name_and_need() -> None:
    tensors = {"a": torch.randn(100), "b": torch.randn(1000)}
    manifest, groups = Manifest.from_tensors(tensors), one_group_each(tensors)
    check_budget(manifest, groups, copied={"a"}, limit_bytes=500, whole_model=False)
    with pytest.raises(StagingLimitError, match="module group b needs 4032") as caught:
        check_budget(manifest, groups, copied={"a", "b"}, limit_bytes=500, whole_model=False)
    assert (caught.value.group, caught.value.needed_bytes, caught.value.limit_bytes) == ("b", 4032, 500)
    check_budget(manifest, groups, copied={"a", "b"}, limit_bytes=4032, whole_model=False)
    with pytest.raises(StagingLimitError, match="whole model") as caught:
        check_budget(manifest, groups, copied={"a", "b"}, limit_bytes=4032, whole_model=True)
    assert caught.value.needed_bytes == sum(group_bytes(manifest, group) for group in groups)


def test_what_is_missing_is_named_once_all_producers_are_done() -> None:
    target = coalescer(ODD, producers=2)
    target.put(whole(target, ODD, [name for name in ODD if name not in ("bool", "empty")]).chunk)
    target.producer_done()
    assert not target.is_whole()
    target.producer_done()
    with pytest.raises(IncompleteUpdateError, match="missing: bool, empty") as caught:
        target.is_whole()
    assert caught.value.missing == ["bool", "empty"]
    with pytest.raises(IncompleteUpdateError):
        collect(target)


def bad_chunks() -> Iterator[tuple[str, type[WeightSyncError], str, Callable[[Coalescer], WeightChunk]]]:
    w = torch.arange(4, dtype=torch.float32)

    def flipped(of: Coalescer) -> WeightChunk:
        chunk = whole(of, {"w": w}, ["w"]).chunk
        chunk.payload[5] ^= 1
        return chunk

    def without_digest(of: Coalescer) -> WeightChunk:
        return WeightChunk.from_tensors({"w": w}, version=1, manifest=of.manifest, digest=False)

    def other_manifest(of: Coalescer) -> WeightChunk:
        return WeightChunk.from_tensors({"w": w}, version=1, manifest=Manifest.from_tensors({"v": w}))

    def past_its_end(of: Coalescer) -> WeightChunk:
        return WeightChunk(1, of.manifest.digest, (Piece("w", 0, 16, 8, 0),), as_bytes(w))

    def negative(of: Coalescer) -> WeightChunk:
        return WeightChunk(1, of.manifest.digest, (Piece("w", -4, 4, 0, 0),), as_bytes(w))

    def overlapping(of: Coalescer) -> WeightChunk:
        return Lent(of, [("w", 0, as_bytes(w)[:9]), ("w", 8, as_bytes(w)[8:])]).chunk

    yield "unexpected", IncompleteUpdateError, "unexpected tensor x", lambda of: whole(of, {"x": w}, ["x"]).chunk
    yield "larger", ManifestError, r"w \(float32, \[4\]\)", lambda of: whole(of, {"w": torch.zeros(5)}, ["w"]).chunk
    yield "wider", ManifestError, "dtype or shape differ", lambda of: whole(of, {"w": w.double()}, ["w"]).chunk
    yield "flipped", DigestError, "w: bytes 0 to 16 differ", flipped
    yield "no digest", DigestError, "w came without a digest", without_digest
    yield "version", IncompleteUpdateError, "version 2", lambda of: Lent(of, [("w", 0, as_bytes(w))], version=2).chunk
    yield "manifest", ManifestError, "another manifest", other_manifest
    yield "past", ManifestError, "w reaches past the end", past_its_end
    yield "negative", ManifestError, "bytes -4 to 0", negative
    yield "overlap", IncompleteUpdateError, "w came twice", overlapping


@pytest.mark.parametrize(("kind", "match", "make"), [p[1:] for p in bad_chunks()], ids=[p[0] for p in bad_chunks()])
@pytest.mark.parametrize("stable", [False, True])
def test_a_wrong_chunk_fails_the_update_for_all_and_names_the_culprit(
    kind: type[WeightSyncError], match: str, make: Callable[[Coalescer], WeightChunk], stable: bool
) -> None:
    target = coalescer({"w": torch.arange(4, dtype=torch.float32), "v": torch.zeros(1)})
    released: list[int] = []
    chunk = make(target)
    chunk.stable, chunk.release = stable, lambda: released.append(1)
    with pytest.raises(kind, match=match):
        target.put(chunk)
    with pytest.raises(kind, match=match):
        target.put(whole(target, {"v": torch.zeros(1)}, ["v"]).chunk)
    with pytest.raises(kind, match=match):
        collect(target)
    target.close()
    assert released == [1]


@pytest.mark.parametrize("name", ["w", "empty"])
@pytest.mark.parametrize("stable", [False, True])
def test_a_tensor_that_comes_twice_is_named(name: str, stable: bool) -> None:
    tensors = {"w": torch.randn(4), "empty": torch.empty(0), "v": torch.zeros(1)}
    target = coalescer(tensors)
    target.put(whole(target, tensors, [name], stable=stable).chunk)
    with pytest.raises(IncompleteUpdateError, match=f"{name} came twice") as caught:
        target.put(whole(target, tensors, [name], stable=stable).chunk)
    assert caught.value.duplicated == [name]


def test_with_digests_off_pieces_need_none() -> None:
    tensors = {"w": torch.randn(4)}
    target = coalescer(tensors, verify=False)
    target.put(WeightChunk.from_tensors(tensors, version=1, manifest=target.manifest, digest=False))
    assert same_bytes(collect(target)["w"], tensors["w"])


def test_a_consumer_waits_at_most_its_bound_when_nothing_comes() -> None:
    target = coalescer({"w": torch.randn(4)}, timeout_s=0.2)
    with pytest.raises(UpdateTimeoutError, match="the first is w"):
        collect(target)
    with pytest.raises(UpdateTimeoutError, match="the first is w"):
        target.wait_whole()


@pytest.mark.parametrize("wait", [collect, Coalescer.wait_whole])
def test_the_bound_starts_anew_with_every_byte_that_comes(wait: Callable[[Coalescer], object]) -> None:
    tensors = {"w": torch.randn(8)}
    target = coalescer(tensors, timeout_s=1.5)
    data = as_bytes(tensors["w"])

    def produce() -> None:
        for start in range(0, 32, 4):
            time.sleep(0.25)
            target.put(Lent(target, [("w", start, data[start : start + 4])]).chunk)
        target.producer_done()

    assert in_threads(produce, lambda: wait(target)) == []


def test_close_gives_everything_back_wakes_everybody_and_may_be_repeated() -> None:
    tensors = {name: torch.randn(100) for name in "abc"}
    target = coalescer(tensors, [ModuleGroup("ab", ("a", "b")), ModuleGroup("c", ("c",))], limit=2 * aligned(400))
    lent = [whole(target, tensors, ["a"], stable=True), whole(target, tensors, ["b"])]
    target.put(lent[0].chunk)
    target.put(lent[1].chunk)
    late = whole(target, tensors, ["c"])
    closing = threading.Timer(0.2, target.close)
    closing.start()
    errors = in_threads(lambda: target.put(late.chunk), target.wait_whole)
    assert [type(error) for error in errors] == [WeightSyncError, WeightSyncError]
    target.close()
    assert [one.released for one in [*lent, late]] == [1, 1, 1]


def test_a_chunk_put_after_close_is_refused_and_released() -> None:
    tensors = {"w": torch.randn(4)}
    target = coalescer(tensors)
    target.close()
    lent = whole(target, tensors, ["w"], stable=True)
    with pytest.raises(WeightSyncError, match="aborted"):
        target.put(lent.chunk)
    assert lent.released == 1


def test_regroup_orders_names_by_group_and_leaves_none_out() -> None:
    weight = torch.randn(2)
    manifest = Manifest.from_tensors({"a": weight, "x": torch.randn(2), "b": torch.randn(2), "tie": weight})
    groups = [ModuleGroup("1", ("b",)), ModuleGroup("2", ("a", "tie"))]
    assert regroup(manifest, groups) == ("b", "a", "x")


@st.composite
def updates(draw: st.DrawFn) -> tuple[list[int], list[list[int]], int, bool]:
    """Sizes of tensors, their groups (some in none), number of producers, whether all chunks are stable."""
    sizes = draw(st.lists(st.integers(0, 300), min_size=1, max_size=12))
    labels = [draw(st.integers(-1, 3)) for _ in sizes]
    groups = [[i for i, label in enumerate(labels) if label == g] for g in sorted(set(labels) - {-1})]
    return sizes, groups, draw(st.integers(1, 4)), draw(st.booleans())


@settings(max_examples=60)
@given(update=updates(), data=st.data())
def test_every_group_comes_out_once_with_exact_bytes(
    update: tuple[list[int], list[list[int]], int, bool], data: st.DataObject
) -> None:
    sizes, members, producers, one_kind = update
    tensors = {f"t{i}": torch.randint(0, 256, (size,), dtype=torch.uint8) for i, size in enumerate(sizes)}
    groups = [ModuleGroup(f"g{g}", tuple(f"t{i}" for i in names)) for g, names in enumerate(members)]
    target = coalescer(tensors, groups, producers=producers)
    pieces: list[tuple[str, int, torch.Tensor]] = []
    for name, tensor in tensors.items():
        cuts = sorted({0, tensor.numel(), *data.draw(st.lists(st.integers(0, tensor.numel()), max_size=3))})
        spans = list(pairwise(cuts)) or [(0, 0)]
        pieces += [(name, start, tensor[start:end]) for start, end in spans]
    pieces = data.draw(st.permutations(pieces))
    lent: list[Lent] = []
    while pieces:
        size = data.draw(st.integers(1, len(pieces)))
        lent.append(Lent(target, pieces[:size], stable=one_kind or data.draw(st.booleans())))
        pieces = pieces[size:]

    def produce(mine: list[Lent]) -> None:
        for one in mine:
            target.put(one.chunk)
        target.producer_done()

    found: Tensors = {}
    works = [lambda mine=lent[i::producers]: produce(mine) for i in range(producers)]
    assert in_threads(*works, lambda: found.update(collect(target))) == []
    assert sorted(found) == sorted(name for group in groups for name in group.names)
    assert all(torch.equal(found[name], tensors[name]) for name in found)
    target.close()
    assert [one.released for one in lent] == [1] * len(lent)
