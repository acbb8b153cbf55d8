"""Direct apply: failures in the middle of it, its settings, and audits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import weightsync.coalescer
import weightsync.direct
import weightsync.placement
from tests.direct.made_up import (
    FEW_WAYS,
    WAYS,
    MadeUp,
    Plan,
    Run,
    Tensors,
    derive,
    keep,
    plan,
    qkv,
    run,
    scaled,
    shapes_of,
    swap_halves,
    swap_some,
    whole,
)
from tests.direct.sets import SetSender
from weightsync.config import SyncConfig
from weightsync.digest import copy_and_digest
from weightsync.direct import DirectApply, Way
from weightsync.errors import DigestError, EnginePoisonedError, WeightSyncError
from weightsync.interfaces import DirectAdapter
from weightsync.manifest import Manifest
from weightsync.testing import LocalSync


@pytest.mark.parametrize("config", WAYS, ids=str)
@pytest.mark.parametrize("odd", [keep, swap_some], ids=["all copied", "one reloaded"])
def test_a_failure_in_the_middle_of_the_copies_poisons_and_the_next_update_is_exact(
    config: dict[str, Any], odd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run(lambda: plan(qkv(finish=odd)), **config) as made:
        made.updates(3)
        plain_copy = torch.Tensor.copy_
        for count in (1, 2):
            before, calls = made.engine.snapshot(), 0
            ours = {tensor.data_ptr() for tensor in made.engine.live().values()}

            def broken(plain: Any, place: torch.Tensor, *args: Any, count: int = count, ours: set[int] = ours) -> Any:
                nonlocal calls
                calls += place.data_ptr() in ours
                if calls > count:
                    raise RuntimeError("planted")
                return plain(place, *args)

            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "copy_", lambda *args: broken(plain_copy, *args))
                patch.setattr(weightsync.coalescer, "copy_and_digest", lambda *args: broken(copy_and_digest, *args))
                with pytest.raises(EnginePoisonedError, match="planted"):
                    made.session.update()
            assert made.sync.receivers[0][0].poisoned
            assert made.engine.snapshot() != before
            made.updates(2)
            assert not made.sync.receivers[0][0].poisoned


@pytest.mark.parametrize("config", FEW_WAYS, ids=str)
@pytest.mark.parametrize("after", [0, 1])
def test_a_reload_of_the_rest_that_fails_poisons_and_the_next_update_is_exact(
    config: dict[str, Any], after: int
) -> None:
    def make() -> Plan:
        made = plan(qkv(finish=swap_some))
        made.parts["norm"].finish = scaled
        return made

    with run(make, **config) as made:
        made.updates(3)
        made.engine.fail_after = after
        with pytest.raises(EnginePoisonedError, match="planted"):
            made.session.update()
        made.engine.fail_after = None
        assert made.updates(2)[-1].num_direct == 2


def test_a_watched_reload_that_fails_is_watched_again() -> None:
    with run(lambda: plan(qkv())) as made:
        made.engine.fail_after = 2
        with pytest.raises(EnginePoisonedError, match="planted"):
            made.session.update()
        made.engine.fail_after = None
        made.step()
        assert made.update().num_direct == 0
        made.step()
        assert made.update().num_direct == 4


@pytest.mark.parametrize("name", ["norm", "k"])
@pytest.mark.parametrize("apply", ["staged", "streaming"])
def test_a_wrong_digest_is_named_and_the_next_update_is_exact(
    apply: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run(lambda: plan(qkv(finish=swap_some)), transport="sets", apply=apply) as made:
        made.updates(3)
        before = made.engine.snapshot()
        with monkeypatch.context() as patch:
            patch.setattr(SetSender, "wrong", name)
            with pytest.raises((DigestError, EnginePoisonedError), match=f"{name}: its bytes differ"):
                made.session.update()
        assert made.sync.receivers[0][0].poisoned is (apply == "streaming")
        assert (made.engine.snapshot() == before) is (apply == "staged")
        made.updates(2)


@pytest.mark.parametrize("apply", ["staged", "streaming"])
def test_a_link_that_breaks_between_tensors_and_digests(apply: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with run(lambda: plan(qkv()), transport="sets", apply=apply) as made:
        made.updates(3)
        with monkeypatch.context() as patch:
            patch.setattr(SetSender, "late_break", True)
            with pytest.raises(WeightSyncError):
                made.session.update()
        assert apply == "streaming" or not made.sync.receivers[0][0].poisoned
        made.updates(2)


@pytest.mark.parametrize("digest", [True, False])
@pytest.mark.parametrize("apply", ["staged", "streaming"])
@pytest.mark.parametrize(
    "chunked",
    [set(), {"norm"}, {"q", "embed"}, {"norm", "embed", "q", "k", "v", "b"}],
    ids=lambda names: " ".join(sorted(names)) or "none",
)
@pytest.mark.parametrize("odd", [keep, swap_some], ids=["all copied", "one reloaded"])
def test_sets_and_chunks_may_be_mixed_with_groups_that_are_reloaded(
    odd: Any, chunked: set[str], apply: str, digest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SetSender, "chunked", frozenset(chunked))
    with run(lambda: plan(qkv(finish=odd)), transport="sets", apply=apply, digest=digest) as made:
        *_, last = made.updates(4)
        assert last.num_direct == (4 if odd is keep else 3)
        assert last.reloads == int(odd is not keep)


def test_two_trainers_send_a_set_each() -> None:
    made = Run(lambda: plan(qkv(finish=swap_some)))
    made.close()
    names = list(made.weights)
    parts = [{name: made.weights[name] for name in names[i::2]} for i in range(2)]
    made.sync = LocalSync(
        [lambda: parts[0], lambda: parts[1]], [[made.engine]], SyncConfig(timeout_s=20, transport="sets")
    )
    made.session = made.sync.__enter__()
    try:
        *_, last = made.updates(4)
        assert last.num_direct == 3
    finally:
        made.close()


def test_names_that_feed_nothing_come_and_are_dropped() -> None:
    for transport in ("sets", "shared_memory"):
        shapes = shapes_of(plan(qkv())) | {"nothing": (5,)}
        made = Run(lambda: plan(qkv()), shapes, transport=transport)
        try:
            *_, last = made.updates(3)
            assert last.num_direct == 4
        finally:
            made.close()


@pytest.mark.parametrize("transport", ["shared_memory", "sets"])
def test_off_reloads_everything_and_says_so(transport: str) -> None:
    with run(lambda: plan(qkv()), direct_apply="off", transport=transport) as made:
        for row in made.updates(3):
            assert (row.num_direct, row.reloads) == (0, 1)
            assert set(row.reloaded.values()) == {"direct_apply is off"}


def test_an_adapter_that_does_not_show_its_tensors_is_reloaded() -> None:
    class Closed(MadeUp):
        copies_load = False

    with run(lambda: plan(qkv()), kind=Closed) as made:
        for row in made.updates(2):
            assert row.num_direct == 0
            assert set(row.reloaded.values()) == {"the engine's adapter does not show its live tensors"}


@pytest.mark.parametrize("transport", ["shared_memory", "sets"])
def test_an_audit_does_both_every_so_many_updates(transport: str) -> None:
    with run(lambda: plan(qkv(finish=swap_some)), direct_apply="audit", audit_every=3, transport=transport) as made:
        before = made.engine.reloads
        rows = made.updates(9)
        assert [row.num_direct for row in rows] == [0, 0] + [3] * 7
        assert made.engine.reloads - before == 9
    with run(lambda: plan(qkv()), direct_apply="audit", audit_every=3, transport=transport) as made:
        reloads = [row.reloads for row in made.updates(9)]
        assert reloads == [1, 0, 1, 0, 0, 1, 0, 0, 1]


def test_an_audit_whose_update_failed_is_made_up_for() -> None:
    with run(lambda: plan(qkv()), direct_apply="audit", audit_every=3) as made:
        assert [row.reloads for row in made.updates(2)] == [1, 0]
        made.engine.fail_after = 1
        with pytest.raises(EnginePoisonedError, match="planted"):
            made.session.update()
        made.engine.fail_after = None
        assert [row.reloads for row in made.updates(4)] == [1, 0, 0, 1]


CHANGES: dict[str, tuple[Callable[[Any, Tensors], None], str]] = {
    "another layout": (swap_halves, ""),
    "other values": (scaled, ""),
    "a tensor made from the weight": (derive(whole), "also changed odd's cache"),
}


@pytest.mark.parametrize("transport", ["shared_memory", "sets"])
@pytest.mark.parametrize("change", CHANGES)
def test_an_audit_finds_an_engine_that_changed_its_ways(change: str, transport: str) -> None:
    finish, why = CHANGES[change]
    with run(lambda: plan(qkv()), direct_apply="audit", audit_every=4, transport=transport) as made:
        assert made.updates(3)[-1].num_direct == 4
        for adapter in (made.engine, made.reference):
            adapter.plan.parts["odd"].finish = finish
            adapter.plan.held = lambda model: getattr(model.odd, "cache", None)
        message = f"direct apply differs from a reload in module group odd.*{why}.*Update again"
        with pytest.raises(EnginePoisonedError, match=message):
            made.session.update()
        assert made.sync.receivers[0][0].poisoned
        for row in made.updates(3):
            assert (row.num_direct, row.reloads) == (0, 1)
            assert set(row.reloaded.values()) == {"an audit found that copies and a reload differ"}
        assert not made.sync.receivers[0][0].poisoned


def test_an_audit_finds_a_copy_that_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_copies = weightsync.placement.run_copies

    def wrong(copies: Any, sources: Any, live: Any, *aliases: Any) -> None:
        plain_copies([copy for copy in copies if copy.name != "k"], sources, live, *aliases)

    with run(lambda: plan(qkv()), direct_apply="audit", audit_every=2) as made:
        made.updates(1)
        monkeypatch.setattr(weightsync.direct, "run_copies", wrong)
        with pytest.raises(EnginePoisonedError, match="module group odd"):
            made.session.update()
        made.updates(2)


def test_made_up_engines_are_what_direct_apply_asks_for() -> None:
    assert isinstance(MadeUp(plan()), DirectAdapter)


def test_without_cupy_an_engine_on_a_gpu_is_reloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = MadeUp(plan())
    manifest = Manifest.from_tensors({name: torch.randn(shape) for name, shape in shapes_of(plan()).items()})
    load_map = adapter.load_map(manifest)
    adapter.device = torch.device("cuda")
    monkeypatch.setattr("weightsync.direct.cupy_version", lambda: "")
    direct = DirectApply(adapter, load_map, manifest, mode="auto", audit_every=10)
    assert set(direct.reasons.values()) == {"a reload cannot be watched: cupy is not installed"}
    assert direct.plan(sets=False, staged=True) is Way.RELOAD
    monkeypatch.setattr("weightsync.direct.cupy_version", lambda: "14.2")
    assert (
        DirectApply(adapter, load_map, manifest, mode="auto", audit_every=10).plan(sets=False, staged=True)
        is Way.OBSERVE
    )
