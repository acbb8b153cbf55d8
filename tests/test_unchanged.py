"""skip_unchanged: only what has changed is moved and applied, and nobody can tell it from a full update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync import messages as m
from weightsync.config import SyncConfig
from weightsync.engines.torch_module import TorchModuleAdapter
from weightsync.errors import EnginePoisonedError, WeightSyncError
from weightsync.loadmap import LoadMap, ModuleGroup
from weightsync.manifest import Manifest, TensorMeta
from weightsync.receiver import ReceiverRank
from weightsync.report import UpdateReport
from weightsync.session import Session
from weightsync.testing import LocalSync, in_process_party, module_engine
from weightsync.testing.campaign import Campaign, control_cases, data_cases, digests, sparse_weights
from weightsync.testing.modules import nested_module
from weightsync.unchanged import LeavingOut, from_bits, groups_left, to_bits, without

Tensors = dict[str, torch.Tensor]
NUM_LAYERS = 8
WAYS = [(transport, apply) for transport in ("shared_memory", "broadcast") for apply in ("staged", "streaming")]


def layers(seed: int) -> Tensors:
    torch.manual_seed(seed)
    return {f"layers.{i}.{part}": torch.randn(16, 3 + i) for i in range(NUM_LAYERS) for part in ("up", "down")}


class Coarse(TorchModuleAdapter):
    """Loads two layers at a time, and fails when it is told to."""

    fails = False
    taken: list[str] | None = None

    def load_map(self, manifest: Manifest) -> LoadMap:
        found = super().load_map(manifest)
        names: dict[int, list[str]] = {}
        for name in manifest.all_names:
            names.setdefault(int(name.split(".")[1]) // 2, []).append(name)
        joined = [ModuleGroup(f"layers {2 * pair} and {2 * pair + 1}", tuple(of)) for pair, of in names.items()]
        return msgspec.structs.replace(found, groups=tuple(joined))

    def apply(self, groups: Iterable[Iterable[tuple[str, torch.Tensor]]]) -> int:
        self.taken = []
        return super().apply(self._watched(groups))

    def _watched(self, groups: Iterable[Iterable[tuple[str, torch.Tensor]]]) -> Iterator[Any]:
        for group in groups:
            if self.fails:
                self.fails = False
                raise RuntimeError("planted")
            pairs = list(group)
            assert self.taken is not None
            self.taken += [name for name, _ in pairs]
            yield pairs


class Synced:
    """Trainers with a share of the layers each, an engine that loads layer by layer and one that loads two at a time."""

    def __init__(self, *, num_trainers: int = 1, source: Callable[[Tensors], Any] = dict, **options: Any) -> None:
        self.weights = layers(0)
        self.fine, self.coarse = (nested_module(layers(seed)) for seed in (1, 2))
        self.adapter = Coarse(self.coarse)
        names = list(self.weights)
        shares = [names[i::num_trainers] for i in range(num_trainers)]
        self.sync = LocalSync(
            [lambda share=share: source({name: self.weights[name] for name in share}) for share in shares],  # type: ignore[misc]
            [[TorchModuleAdapter(self.fine)], [self.adapter]],
            SyncConfig(skip_unchanged=True, timeout_s=10, bucket_bytes=1024, **options),
        )
        self.session: Session = self.sync.session

    def step(self, *names: str) -> None:
        """Other values for some tensors, in place or as new tensors."""
        for i, name in enumerate(names):
            if i % 2:
                self.weights[name] = self.weights[name] + 1
            else:
                self.weights[name].add_(1)

    def update(self) -> UpdateReport:
        report = self.session.update()
        for module in (self.fine, self.coarse):
            assert digests(module.state_dict()) == digests(self.weights)
        return report


@contextmanager
def synced(**options: Any) -> Iterator[Synced]:
    made = Synced(**options)
    with made.sync:
        yield made


def moved(report: UpdateReport) -> list[int]:
    return [row.nbytes for row in report.ranks if row.rank.startswith("engine")]


def together(names: Iterable[str]) -> list[str]:
    """With what the coarse engine loads together with them."""
    pairs = {int(name.split(".")[1]) // 2 for name in names}
    return [f"layers.{i}.{part}" for i in range(NUM_LAYERS) if i // 2 in pairs for part in ("up", "down")]


# ---- what is left out ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("transport", "apply"), WAYS)
def test_two_of_eight_layers_that_changed_are_all_that_is_moved_and_applied(transport: str, apply: str) -> None:
    with synced(transport=transport, apply=apply) as made:
        first = made.update()
        assert (first.num_skipped, first.skipped_bytes, moved(first)) == (0, 0, [first.nbytes] * 2)
        made.step("layers.2.up", "layers.3.down")
        second = made.update()
        expected = together(["layers.2.up"])
        nbytes = sum(made.weights[name].nbytes for name in expected)
        assert made.adapter.taken == expected
        assert (second.num_skipped, second.skipped_bytes) == (NUM_LAYERS - 2, first.nbytes - nbytes)
        assert moved(second) == [nbytes] * 2
        assert "6 module groups unchanged and left out" in str(second)


@pytest.mark.parametrize(("transport", "apply"), WAYS)
def test_an_update_without_a_change_moves_nothing_and_commits_a_new_version(transport: str, apply: str) -> None:
    with synced(transport=transport, apply=apply, num_trainers=2) as made:
        made.update()
        made.adapter.taken = None
        report = made.update()
        assert (report.version, made.session.version) == (2, 2)
        assert report.skipped_bytes == report.nbytes
        assert [row.nbytes for row in report.ranks] == [0] * 4
        assert [row.reloads for row in report.ranks] == [0] * 4
        assert made.adapter.taken is None, "the loader was not called"
        made.step("layers.7.up")
        assert moved(made.update())[0] > 0


@settings(max_examples=12)
@given(
    way=st.sampled_from(WAYS),
    num_trainers=st.integers(1, 3),
    changes=st.lists(st.sets(st.sampled_from(sorted(layers(0)))), min_size=2, max_size=4),
    digest=st.booleans(),
)
def test_random_changes_arrive_exactly_and_bring_their_groups_alone(
    way: tuple[str, str], num_trainers: int, changes: list[set[str]], digest: bool
) -> None:
    with synced(transport=way[0], apply=way[1], num_trainers=num_trainers, digest=digest) as made:
        made.update()
        for names in changes:
            made.step(*sorted(names))
            report = made.update()
            assert moved(report) == [sum(made.weights[name].nbytes for name in together(names))] * 2


def test_a_source_that_makes_its_tensors_as_they_are_sent_sends_all() -> None:
    with synced(source=lambda held: iter(held.items())) as made:
        for version in (1, 2):
            report = made.update()
            assert (report.version, report.num_skipped) == (version, 0)


def test_an_audit_is_of_everything() -> None:
    made = Synced(direct_apply="audit", audit_every=3, transport="shared_memory")
    for receivers in made.sync.receivers:
        receivers[0]._adapter.laid_out_as_loaded = False  # type: ignore[attr-defined]  # so that there is something to prove
    with made.sync:
        assert [made.update().num_skipped for _ in range(7)] == [0, 8, 0, 8, 8, 0, 8]


# ---- when everything is sent again ----------------------------------------------------------------------------------


def is_full(made: Synced) -> bool:
    """Whether the next update sends everything; after it, nothing has to be."""
    full = made.update().num_skipped == 0
    assert made.update().num_skipped == NUM_LAYERS
    return full


@pytest.mark.parametrize(("transport", "apply"), WAYS)
def test_after_a_poisoned_engine_everything_is_sent(transport: str, apply: str) -> None:
    with synced(transport=transport, apply=apply) as made:
        made.update()
        made.step("layers.0.up")
        made.adapter.fails = True
        with pytest.raises(EnginePoisonedError, match="planted"):
            made.session.update()
        assert is_full(made)


def test_after_a_failure_before_anything_was_applied_everything_is_sent() -> None:
    with synced() as made:
        made.update()
        kept = made.weights["layers.5.up"]
        made.weights["layers.5.up"] = torch.zeros(1)
        with pytest.raises(WeightSyncError):
            made.session.update()
        made.weights["layers.5.up"] = kept
        assert is_full(made)


def test_with_new_links_everything_is_sent() -> None:
    with synced() as made:
        made.update()
        made.session.relink_next()
        assert is_full(made)


def test_another_weight_sync_sends_everything() -> None:
    with synced() as made:
        made.update()
        made.session = Session(made.sync.fleet, made.session._config)
        made.session.open()
        assert is_full(made)
        made.session.close()


def test_a_late_engine_gets_everything_and_then_as_little_as_the_others() -> None:
    with synced() as made:
        made.update()
        made.step("layers.4.up")
        made.update()
        late = nested_module(layers(9))
        party = made.sync.fleet.add(_party(late))
        assert made.session.add_engine(party) is None, "of what was left out nothing is known that could be compared"
        assert is_full(made)
        assert digests(late.state_dict()) == digests(made.weights)
        later = nested_module(layers(10))
        made.session.add_engine(made.sync.fleet.add(_party(later)))
        made.update()
        assert digests(later.state_dict()) == digests(made.weights)


def test_a_late_engine_is_not_brought_to_what_the_trainer_held_before() -> None:
    with synced() as made:
        made.update()
        before = {name: tensor.clone() for name, tensor in made.weights.items()}
        made.step("layers.4.up")
        made.update()
        made.weights |= before
        assert made.session.add_engine(made.sync.fleet.add(_party(nested_module(layers(9))))) is None
        assert made.session.version == 2


def _party(module: torch.nn.Module) -> Any:
    from weightsync.receiver import ReceiverRank
    from weightsync.testing import in_process_party

    return in_process_party([ReceiverRank(TorchModuleAdapter(module))])


def test_an_engine_whose_weights_were_lost_or_loaded_by_somebody_else_gets_everything() -> None:
    with synced() as made:
        made.update()
        with torch.no_grad():
            made.fine.get_parameter("layers.6.down")[3, 4] += 1
        assert is_full(made)


# ---- the parts ------------------------------------------------------------------------------------------------------


def manifest_of(count: int) -> Manifest:
    return Manifest(tuple(TensorMeta(f"t{i}", "float32", (i + 1,)) for i in range(count)))


@given(st.data())
def test_what_is_left_out_is_what_no_group_joins_with_a_change(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    manifest = manifest_of(count)
    tables = data.draw(st.lists(st.lists(st.integers(-1, count - 1), min_size=count, max_size=count), max_size=3))
    changes = data.draw(st.lists(st.sets(st.integers(0, count - 1)), max_size=3))
    bits, nbytes = LeavingOut(manifest, [tuple(table) for table in tables]).choose(
        to_bits(manifest, {f"t{i}" for i in change}) for change in changes
    )
    reached = set().union(*changes)
    for _ in range(count):
        for table in tables:
            groups = {table[i] for i in reached if table[i] >= 0}
            reached |= {i for i in range(count) if table[i] in groups}
    left_out = from_bits(manifest, bits)
    assert left_out == {f"t{i}" for i in range(count) if i not in reached}
    assert nbytes == sum(manifest.by_name[name].nbytes for name in left_out)


@given(count=st.integers(1, 20), data=st.data())
def test_names_survive_as_bits(count: int, data: st.DataObject) -> None:
    manifest = manifest_of(count)
    names = data.draw(st.sets(st.sampled_from([meta.name for meta in manifest.tensors])))
    assert from_bits(manifest, to_bits(manifest, names)) == names
    assert [meta.name for meta in without(manifest, names).tensors] == [n for n in manifest.by_name if n not in names]


def test_a_group_that_would_come_in_part_is_refused() -> None:
    manifest = Manifest(manifest_of(3).tensors, {"tie": "t1"})
    groups = [ModuleGroup("a", ("t0", "t1", "tie")), ModuleGroup("b", ("t2",))]
    assert groups_left(manifest, groups, {"t0", "t1"}) == groups[1:]
    with pytest.raises(WeightSyncError, match="module group a would come in part"):
        groups_left(manifest, groups, {"t1"})


def test_a_rank_that_does_not_hold_the_version_refuses_an_update_that_leaves_something_out() -> None:
    with synced() as made:
        made.update()
        (receiver,) = made.sync.receivers[0]
        receiver._holds = False
        with pytest.raises(WeightSyncError, match="does not hold it"):
            receiver._receive(m.Transfer(version=2, left_out=np.packbits([True] * 16).tobytes()))


# ---- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "transport", "apply"), [(1, "shared_memory", "staged"), (30, "broadcast", "streaming")]
)
def test_no_fault_corrupts_hangs_or_outlives_the_next_update(first: int, transport: str, apply: str) -> None:
    cases = [*control_cases(delay_s=0.2), *data_cases(delay_s=0.2)][first::61]
    with Campaign(weights=sparse_weights, transport=transport, apply=apply, skip_unchanged=True) as campaign:
        outcomes = [campaign.run(case) for case in cases]
    assert [f"{o.case}: {o.result}, retry {o.retry} ({o.error})" for o in outcomes if not o.sound] == []


@pytest.mark.parametrize("transport", ["shared_memory", "sharded_shared_memory"])
def test_an_engine_that_is_brought_up_does_not_hide_what_has_changed_for_the_others(transport: str) -> None:
    """It needs but a part of the weights, which the trainer still holds as they were committed."""
    trainer = {"a.w": torch.randn(8), "b.w": torch.randn(8)}
    full, part, late = (
        nested_module({n: torch.zeros(8) for n in names}) for names in (["a.w", "b.w"], ["a.w"], ["a.w"])
    )
    config = SyncConfig(transport=transport, timeout_s=10, skip_unchanged=True)
    sync = LocalSync([lambda: trainer], [module_engine(full), module_engine(part)], config)
    with sync as session:
        session.update()
        trainer["b.w"].normal_()
        report = session.add_engine(sync.fleet.add(in_process_party([ReceiverRank(TorchModuleAdapter(late))])))
        assert (report is not None) == (transport != "shared_memory")
        session.update()
        for engine in (full, part, late):
            assert all(torch.equal(tensor, trainer[name]) for name, tensor in engine.state_dict().items())
