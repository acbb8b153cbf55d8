"""Weight sets: whole tensors that arrive at once, are verified at once, and are loaded in one go where that is possible."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from weightsync.chunk import Piece, WeightChunk, as_bytes
from weightsync.coalescer import Coalescer
from weightsync.digest import ContentDigest, digest_bytes, digest_words
from weightsync.errors import (
    DigestError,
    IncompleteUpdateError,
    ManifestError,
    UpdateTimeoutError,
    WeightSyncError,
)
from weightsync.loadmap import ModuleGroup
from weightsync.manifest import Manifest
from weightsync.weightset import SetDigests, SetLayout, WeightSet, layout_digest

Tensors = dict[str, torch.Tensor]
CPU = torch.device("cpu")

ODD: Tensors = {
    "fp32": torch.randn(3, 5),
    "bf16": torch.randn(7).to(torch.bfloat16),
    "bool": torch.rand(9) > 0.5,
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "int64": torch.tensor([2**62, -1]),
}


def coalescer(
    tensors: Tensors,
    groups: Sequence[Sequence[str]] | None = None,
    *,
    verify: bool = True,
    defer_sets: bool = False,
    producers: int = 1,
    timeout_s: float = 10,
) -> Coalescer:
    manifest = Manifest.from_tensors(tensors)
    names = [[name] for name in manifest.by_name] if groups is None else groups
    return Coalescer(
        manifest,
        [ModuleGroup("+".join(group), tuple(group)) for group in names],
        version=1,
        staging_limit_bytes=1 << 30,
        timeout_s=timeout_s,
        num_producers=producers,
        verify=verify,
        defer_sets=defer_sets,
    )


def weight_set(of: Coalescer, tensors: Tensors, *, sender: int = 0, version: int = 1) -> WeightSet:
    return WeightSet(version, of.manifest.digest, SetLayout(tensors, CPU), sender)


def words(tensors: Tensors) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """What a sender reads: one digest a tensor."""
    return np.array([digest_words(as_bytes(tensor)) for tensor in tensors.values()], dtype=np.uint64)


def sent(chunk: WeightSet, *wrong: str) -> SetDigests:
    """The set's digests, those of some names *wrong*."""
    found = words(dict(chunk.layout.tensors))
    for name in wrong:
        found[chunk.names.index(name)] ^= np.uint64(1)
    return SetDigests(chunk, found)


def stable_chunk(
    of: Coalescer, tensors: Tensors, *, sender: int = 0, release: Callable[[], None] = lambda: None
) -> WeightChunk:
    """As a transport sends what it has copied: in memory that stays."""
    pieces, parts, offset = [], [], 0
    for name, tensor in tensors.items():
        data = as_bytes(tensor)
        pieces.append(Piece(name, 0, data.numel(), offset, digest_bytes(data)))
        parts += [data, torch.zeros(-data.numel() % 64, dtype=torch.uint8)]
        offset += parts[-1].numel() + data.numel()
    payload = torch.cat(parts)
    return WeightChunk(1, of.manifest.digest, tuple(pieces), payload, stable=True, sender=sender, release=release)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(as_bytes(a), as_bytes(b))


def collect(source: Coalescer) -> Tensors:
    return {name: tensor for group in source.groups() for name, tensor in group}


def aside(work: Callable[[], object]) -> Callable[[], BaseException | None]:
    """Begin *work* on a thread; returns how to wait for its end, which gives what it raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait() -> BaseException | None:
        thread.join(5)  # less than the bounds of the waits: it must be woken
        assert not thread.is_alive()
        return errors[0] if errors else None

    return wait


# ---- sets into groups -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [None, [list(ODD)], [["fp32", "bool", "empty"], ["int64"]]], ids=str)
def test_all_groups_of_a_set_become_whole_when_its_digests_have_come(groups: list[list[str]] | None) -> None:
    target = coalescer(ODD, groups)
    chunk = weight_set(target, ODD)
    target.put(chunk)
    assert not target.is_whole()
    assert target.missing() == list(ODD)
    assert target.nbytes == 0, "nothing is verified yet"
    target.put(sent(chunk))
    assert target.is_whole()
    assert target.nbytes == sum(tensor.nbytes for tensor in ODD.values())
    found = collect(target)
    assert found.keys() == {name for group in groups or [list(ODD)] for name in group}
    assert all(found[name] is ODD[name] for name in found), "used where they lie"
    assert target.peak_staging_bytes == 0


def test_without_verification_a_set_is_whole_as_it_comes() -> None:
    target = coalescer(ODD, verify=False)
    chunk = weight_set(target, ODD)
    target.put(chunk)
    assert target.is_whole()
    target.put(SetDigests(chunk, np.zeros(len(ODD), dtype=np.uint64)))  # nobody looks at them
    assert collect(target).keys() == ODD.keys()


def test_a_consumer_that_waits_is_woken_by_the_digests() -> None:
    target = coalescer(ODD)
    found: Tensors = {}
    consumer = aside(lambda: found.update(collect(target)))
    chunk = weight_set(target, ODD)
    target.put(chunk)
    time.sleep(0.05)
    assert found == {}
    target.put(sent(chunk))
    assert consumer() is None
    assert found.keys() == ODD.keys()


@pytest.mark.parametrize("name", [name for name in ODD if name != "empty"])
def test_a_tensor_of_which_other_bytes_came_is_named(name: str) -> None:
    target = coalescer(ODD)
    held = {key: tensor.clone() for key, tensor in ODD.items()}
    chunk = weight_set(target, held)
    digests = sent(chunk)
    data = held[name].reshape(-1).view(torch.uint8)
    data[-1] ^= 1
    target.put(chunk)
    with pytest.raises(DigestError, match=f"^{name}: its bytes differ") as caught:
        target.put(digests)
    assert caught.value.name == name
    for later in (target.is_whole, lambda: collect(target), target.take_all, lambda: target.put(digests)):
        with pytest.raises(DigestError, match=name):
            later()


def test_the_first_of_several_wrong_tensors_is_named() -> None:
    target = coalescer(ODD)
    chunk = weight_set(target, ODD)
    target.put(chunk)
    with pytest.raises(DigestError, match=r"^bool"):
        target.put(sent(chunk, "int64", "bool"))


def test_a_layout_serves_many_updates_and_is_read_in_each() -> None:
    held = {name: tensor.clone() for name, tensor in ODD.items()}
    layout = SetLayout(held, CPU)
    for _ in range(3):
        target = coalescer(held)
        chunk = WeightSet(1, target.manifest.digest, layout)
        digests = sent(chunk)
        target.put(chunk)
        target.put(digests)
        assert target.is_whole()
        held["fp32"].add_(1)
        again = coalescer(held)
        chunk = WeightSet(1, again.manifest.digest, layout)
        again.put(chunk)
        with pytest.raises(DigestError, match="fp32"):
            again.put(SetDigests(chunk, digests.digests))


def test_a_layout_is_checked_against_each_manifest() -> None:
    layout = SetLayout({"w": torch.zeros(2, 3)}, CPU)
    good, bad = coalescer({"w": torch.zeros(2, 3)}), coalescer({"w": torch.zeros(3, 2)})
    good.put(WeightSet(1, good.manifest.digest, layout))
    with pytest.raises(ManifestError, match="w "):
        bad.put(WeightSet(1, bad.manifest.digest, layout))


def bad_sets() -> Iterator[tuple[str, type[WeightSyncError], str, Callable[[Coalescer], WeightSet]]]:
    good = {"w": torch.zeros(4), "v": torch.zeros(2, 3)}
    yield (
        "unexpected",
        IncompleteUpdateError,
        "unexpected tensor x",
        lambda of: weight_set(of, good | {"x": torch.zeros(1)}),
    )
    yield "a tie", IncompleteUpdateError, "unexpected tensor tie", lambda of: weight_set(of, {"tie": good["w"]})
    yield (
        "mis-shaped",
        ManifestError,
        r"v \(float32, \[2, 3\]\).*came as .*\[3, 2\]",
        lambda of: weight_set(of, good | {"v": torch.zeros(3, 2)}),
    )
    yield (
        "mis-typed",
        ManifestError,
        r"v .*came as torch.int32 \[2, 3\]",
        lambda of: weight_set(of, good | {"v": torch.zeros(2, 3, dtype=torch.int32)}),
    )
    yield "version", IncompleteUpdateError, "version 2 came", lambda of: weight_set(of, good, version=2)
    yield "manifest", ManifestError, "another manifest", lambda of: WeightSet(1, "0" * 32, SetLayout(good, CPU))


@pytest.mark.parametrize(("kind", "match", "make"), [p[1:] for p in bad_sets()], ids=[p[0] for p in bad_sets()])
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("defer_sets", [True, False])
def test_a_set_that_does_not_fit_fails_the_update_and_names_the_culprit(
    kind: type[WeightSyncError], match: str, make: Callable[[Coalescer], WeightSet], verify: bool, defer_sets: bool
) -> None:
    weight = torch.zeros(4)
    tensors = {"w": weight, "v": torch.zeros(2, 3), "tie": weight}
    target = coalescer(tensors, verify=verify, defer_sets=defer_sets)
    with pytest.raises(kind, match=match):
        target.put(make(target))
    for later in (lambda: target.put(weight_set(target, {"w": weight})), lambda: collect(target), target.take_all):
        with pytest.raises(kind, match=match):
            later()


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("defer_sets", [True, False])
@pytest.mark.parametrize("with_digests", [True, False])
@pytest.mark.parametrize("second", ["set", "chunk"])
def test_a_tensor_that_comes_in_a_set_and_once_more_is_named(
    second: str, with_digests: bool, verify: bool, defer_sets: bool
) -> None:
    tensors = {name: torch.randn(4) for name in "abc"}
    target = coalescer(tensors, verify=verify, defer_sets=defer_sets, producers=2)
    chunk = weight_set(target, {name: tensors[name] for name in "ab"})
    target.put(chunk)
    if with_digests:
        target.put(sent(chunk))
    again: WeightSet | WeightChunk = stable_chunk(target, {"b": tensors["b"]}, sender=1)
    if second == "set":
        again = weight_set(target, {name: tensors[name] for name in "cb"}, sender=1)
    with pytest.raises(IncompleteUpdateError, match="b came twice") as caught:
        target.put(again)
    assert caught.value.duplicated == ["b"]


@pytest.mark.parametrize("verify", [True, False])
def test_a_tensor_that_has_come_in_a_chunk_may_not_come_in_a_set(verify: bool) -> None:
    tensors = {name: torch.randn(4) for name in "abc"}
    target = coalescer(tensors, verify=verify, producers=2)
    target.put(stable_chunk(target, {"b": tensors["b"]}, sender=1))
    with pytest.raises(IncompleteUpdateError, match="b came twice") as caught:
        target.put(weight_set(target, tensors))
    assert caught.value.duplicated == ["b"]


@pytest.mark.parametrize("set_first", [True, False])
@pytest.mark.parametrize("verify", [True, False])
def test_a_group_may_come_half_in_a_set_and_half_in_chunks_of_another_sender(set_first: bool, verify: bool) -> None:
    tensors = {name: torch.randn(5, 3) for name in "abcd"}
    target = coalescer(tensors, [["a", "c"], ["b"], ["d"]], verify=verify, producers=2)
    chunk = weight_set(target, {name: tensors[name] for name in "ab"}, sender=3)
    released: list[int] = []
    other = stable_chunk(target, {name: tensors[name] for name in "cd"}, sender=4, release=lambda: released.append(1))

    def put_set() -> None:
        target.put(chunk)
        target.put(sent(chunk))

    puts: list[Callable[[], None]] = [put_set, lambda: target.put(other)]
    for put in puts if set_first else puts[::-1]:
        assert not target.is_whole()
        assert target.unread() == ["a+c", "b", "d"]
        put()
    assert target.is_whole()
    found = collect(target)
    assert all(same_bytes(found[name], tensors[name]) for name in tensors)
    assert found["a"] is tensors["a"]
    assert released == [1]


def test_ties_stand_beside_their_canonical_name() -> None:
    weight = torch.randn(4)
    tensors = {"embed": weight, "head": weight, "other": torch.randn(2)}
    target = coalescer(tensors, [["embed", "head"], ["other"]])
    chunk = weight_set(target, {"embed": weight, "other": tensors["other"]})
    target.put(chunk)
    target.put(sent(chunk))
    pairs = next(target.groups())
    assert [(name, tensor is weight) for name, tensor in pairs] == [("embed", True), ("head", True)]


def test_a_set_without_digests_is_missing_when_its_sender_is_done() -> None:
    target = coalescer(ODD)
    target.put(weight_set(target, ODD))
    target.producer_done()
    with pytest.raises(IncompleteUpdateError, match="missing: fp32, bf16") as caught:
        target.is_whole()
    assert caught.value.missing == list(ODD)


def test_content_digests_are_what_the_senders_compute() -> None:
    tensors = {name: torch.randn(3, 3) for name in "abcd"}
    parts = [{name: tensors[name] for name in names} for names in ("ab", "c", "d")]
    for verify, defer_sets in ((True, False), (True, True), (False, False), (False, True)):
        target = coalescer(tensors, verify=verify, defer_sets=defer_sets, producers=2)
        of_one, of_two = ContentDigest(), ContentDigest()
        for sender, part, content in ((1, parts[0], of_one), (2, parts[1], of_two)):
            chunk = weight_set(target, part, sender=sender)
            target.put(chunk)
            target.put(sent(chunk))
            digests = words(part) if verify else np.zeros(len(part), dtype=np.uint64)
            sizes = {name: tensor.nbytes for name, tensor in part.items()}
            content.add_table(layout_digest(sizes), sum(sizes.values()), digests)
            if verify and defer_sets:
                assert target.content_digests().get(sender) is None
                target.check_set(chunk, words(part))
        other = stable_chunk(target, parts[2], sender=2)
        target.put(other)
        for piece in other.pieces:
            of_two.add(piece.name, piece.start, piece.nbytes, piece.digest or 0)
        assert target.content_digests() == {1: of_one.value, 2: of_two.value}
        assert target.nbytes == of_one.nbytes + of_two.nbytes == sum(tensor.nbytes for tensor in tensors.values())


def test_a_layouts_digest_tells_names_order_and_sizes() -> None:
    layouts = [{"a": 4, "b": 8}, {"b": 8, "a": 4}, {"a": 8, "b": 4}, {"a": 4, "c": 8}, {"a": 4}, {}]
    assert len({layout_digest(sizes) for sizes in layouts}) == len(layouts)
    tensors = {"a": torch.zeros(1), "b": torch.zeros(2)}
    assert SetLayout(tensors, CPU).digest == layout_digest(layouts[0])


class Elsewhere(torch.Tensor):
    """A tensor that says it lies in GPU memory."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


@pytest.mark.parametrize("private", [True, False])
def test_private_groups_are_copies_of_what_lies_in_a_trainers_gpu_memory(private: bool) -> None:
    weight: torch.Tensor = torch.randn(4).as_subclass(Elsewhere)
    here = torch.randn(3)
    tensors: Tensors = {"embed": weight, "head": weight, "here": here}
    target = coalescer(tensors, [["embed", "head"], ["here"]])
    chunk = weight_set(target, {"embed": weight, "here": here})
    target.put(chunk)
    target.put(sent(chunk))
    keys = ["embed+head", "here"] if private else ["here"]
    (embed, head), (own,) = ([tensor for _, tensor in group] for group in target.groups(private=keys))
    assert same_bytes(embed, weight)
    assert (embed.data_ptr() == weight.data_ptr()) is not private
    assert embed.data_ptr() == head.data_ptr(), "a tie is one tensor"
    assert own is here, "in CPU memory a write stays with the process"


# ---- everything at once -----------------------------------------------------------------------------------------


def test_take_all_waits_for_everything_and_gives_sets_and_the_rest() -> None:
    weight = torch.randn(3, 4)
    tensors = {"embed": weight, "a": torch.randn(2), "head": weight, "b": torch.randn(5), "unused": torch.randn(1)}
    target = coalescer(tensors, [["embed", "head"], ["a"], ["b"]], producers=2)
    found: list[Any] = []
    consumer = aside(lambda: found.extend(target.take_all()))
    chunk = weight_set(target, {"a": tensors["a"]}, sender=1)
    for one in (
        chunk,
        sent(chunk),
        stable_chunk(target, {"embed": weight}),
        stable_chunk(target, {"b": tensors["b"]}),
    ):
        time.sleep(0.03)
        assert found == []
        target.put(one)
    assert target.unread() == ["embed+head", "a", "b"], "the name in no group has not come"
    target.put(stable_chunk(target, {"unused": tensors["unused"]}))
    target.producer_done()
    assert consumer() is None
    sets, rest = found
    assert [one is chunk for one in sets] == [True]
    assert list(rest) == ["embed", "b"]
    assert all(same_bytes(tensor, tensors[name]) for name, tensor in rest.items())
    assert target.unread() == []
    assert target.num_handed_out == 3
    target.wait_whole()


def test_take_all_waits_until_sets_that_are_not_deferred_are_verified() -> None:
    target = coalescer(ODD)
    found: list[Any] = []
    chunk = weight_set(target, ODD)
    target.put(chunk)
    consumer = aside(lambda: found.extend(target.take_all()))
    time.sleep(0.05)
    assert found == []
    target.put(sent(chunk))
    assert consumer() is None
    assert found == [[chunk], {}]


def test_take_all_names_what_is_missing() -> None:
    tensors = {name: torch.randn(2) for name in "abc"}
    target = coalescer(tensors, producers=2)
    consumer = aside(target.take_all)
    chunk = weight_set(target, {"a": tensors["a"], "c": tensors["c"]})
    target.put(chunk)
    target.put(sent(chunk))
    target.producer_done()
    target.producer_done()
    error = consumer()
    assert isinstance(error, IncompleteUpdateError)
    assert error.missing == ["b"]
    assert target.num_handed_out == 0, "nothing can have changed"


@pytest.mark.parametrize("defer_sets", [True, False])
def test_take_all_waits_at_most_its_bound(defer_sets: bool) -> None:
    tensors = {name: torch.randn(2) for name in "abc"}
    target = coalescer(tensors, defer_sets=defer_sets, timeout_s=0.2)
    target.put(weight_set(target, {"a": tensors["a"]}))
    with pytest.raises(UpdateTimeoutError, match=r"nothing arrived for 0\.2 s"):
        target.take_all()


# ---- digests that the consumer finds ------------------------------------------------------------------------------


def test_deferred_sets_are_handed_out_before_their_digests_and_count_when_these_are_compared() -> None:
    target = coalescer(ODD, defer_sets=True)
    chunk = weight_set(target, ODD)
    target.put(chunk)
    assert target.take_all()[0] == [chunk]
    assert not target.is_whole()
    assert target.nbytes == 0
    target.put(sent(chunk))
    target.producer_done()
    assert not target.is_whole(), "the consumer has not said what it found"
    target.check_set(chunk, words(ODD))
    assert target.is_whole()
    target.wait_whole()
    assert target.nbytes == chunk.layout.nbytes


def test_check_set_waits_for_the_digests() -> None:
    target = coalescer(ODD, defer_sets=True)
    chunk = weight_set(target, ODD)
    target.put(chunk)
    target.take_all()
    consumer = aside(lambda: target.check_set(chunk, words(ODD)))
    time.sleep(0.05)
    target.put(sent(chunk))
    assert consumer() is None
    assert target.is_whole()


@pytest.mark.parametrize("defer_sets", [True, False])
def test_check_set_names_the_tensor_that_was_read_otherwise(defer_sets: bool) -> None:
    """Where it was verified before the vote, too: it may have changed since."""
    target = coalescer(ODD, defer_sets=defer_sets)
    chunk = weight_set(target, ODD)
    target.put(chunk)
    target.put(sent(chunk))
    target.take_all()
    found = words(ODD)
    found[chunk.names.index("int64")] ^= np.uint64(1)
    with pytest.raises(DigestError, match=r"^int64: its bytes differ") as caught:
        target.check_set(chunk, found)
    assert caught.value.name == "int64"
    with pytest.raises(DigestError, match="int64"):
        target.wait_whole()


def test_check_set_of_one_sender_does_not_take_another_senders_digests() -> None:
    tensors = {"a": torch.randn(3), "b": torch.randn(3)}
    target = coalescer(tensors, defer_sets=True, producers=2)
    one, two = (weight_set(target, {name: tensors[name]}, sender=i) for i, name in enumerate("ab"))
    target.put(one)
    target.put(two)
    assert target.take_all()[0] == [one, two]
    target.put(sent(two))
    target.check_set(two, words({"b": tensors["b"]}))
    assert not target.is_whole()
    target.put(sent(one))
    target.check_set(one, words({"a": tensors["a"]}))
    assert target.is_whole()


def test_digests_that_never_come_are_an_error_when_the_sender_is_done() -> None:
    target = coalescer(ODD, defer_sets=True)
    chunk = weight_set(target, ODD, sender=7)
    target.put(chunk)
    target.take_all()
    target.producer_done()
    with pytest.raises(DigestError, match="sender 7 came without digests"):
        target.check_set(chunk, words(ODD))
    with pytest.raises(DigestError):
        target.is_whole()


def test_digests_that_never_come_are_waited_for_at_most_the_bound() -> None:
    target = coalescer(ODD, defer_sets=True, timeout_s=0.2)
    chunk = weight_set(target, ODD)
    target.put(chunk)
    target.take_all()
    start = time.monotonic()
    with pytest.raises(UpdateTimeoutError):
        target.check_set(chunk, words(ODD))
    assert 0.1 < time.monotonic() - start < 5


@pytest.mark.parametrize("defer_sets", [True, False])
def test_digests_that_come_twice_or_without_their_set_are_refused(defer_sets: bool) -> None:
    target = coalescer(ODD, defer_sets=defer_sets)
    chunk = weight_set(target, ODD)
    target.put(chunk)
    target.put(sent(chunk))
    with pytest.raises(IncompleteUpdateError, match="digests of sender 0 came twice"):
        target.put(sent(chunk))
    other = coalescer(ODD, defer_sets=defer_sets)
    with pytest.raises(IncompleteUpdateError, match="without their tensors"):
        other.put(sent(weight_set(other, ODD)))


@pytest.mark.parametrize("defer_sets", [True, False])
def test_too_few_digests_are_an_error(defer_sets: bool) -> None:
    target = coalescer(ODD, defer_sets=defer_sets)
    chunk = weight_set(target, ODD)
    target.put(chunk)

    def verify() -> None:
        target.put(SetDigests(chunk, words(ODD)[:-1]))
        target.check_set(chunk, words(ODD))

    with pytest.raises(DigestError, match="5 digests came for 6 tensors"):
        verify()


# ---- closing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", [Coalescer.take_all, collect, Coalescer.wait_whole])
def test_close_wakes_who_waits_and_refuses_what_comes(wait: Callable[[Coalescer], object]) -> None:
    tensors = {name: torch.randn(2) for name in "abc"}
    target = coalescer(tensors, producers=2)
    released: list[int] = []
    target.put(stable_chunk(target, {"c": tensors["c"]}, release=lambda: released.append(1)))
    chunk = weight_set(target, {"a": tensors["a"]})
    target.put(chunk)
    consumer = aside(lambda: wait(target))
    time.sleep(0.05)
    target.close()
    error = consumer()
    assert type(error) is WeightSyncError
    assert "aborted" in str(error)
    for late in (sent(chunk), weight_set(target, {"b": tensors["b"]}, sender=1)):
        with pytest.raises(WeightSyncError, match="aborted"):
            target.put(late)
    target.close()
    assert released == [1]


def test_close_wakes_who_waits_for_digests() -> None:
    target = coalescer(ODD, defer_sets=True)
    chunk = weight_set(target, ODD)
    target.put(chunk)
    target.take_all()
    consumer = aside(lambda: target.check_set(chunk, words(ODD)))
    time.sleep(0.05)
    target.close()
    assert "aborted" in str(consumer())


def test_a_failure_elsewhere_wakes_who_waits_for_digests() -> None:
    target = coalescer(ODD, defer_sets=True, producers=2)
    chunk = weight_set(target, ODD)
    target.put(chunk)
    target.take_all()
    consumer = aside(lambda: target.check_set(chunk, words(ODD)))
    time.sleep(0.05)
    target.fail(DigestError("planted"))
    assert "planted" in str(consumer())
