"""The contract of `EngineAdapter` as tests that any adapter can be put to.

    class TestMine(EngineSuite):
        def make_adapter(self): ...         # a fresh adapter
        def weights(self, seed): ...        # checkpoint name -> tensor, all values other for another seed
        def snapshot(self, adapter): ...    # what tells one set of live weights from another

pytest collects the class from the test file in which it stands; `TestMine.failures()` runs it without pytest.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import msgspec
import torch

from weightsync.chunk import as_bytes
from weightsync.errors import ManifestError
from weightsync.geometry import coverage
from weightsync.interfaces import EngineAdapter
from weightsync.loadmap import LoadMap, ModuleGroup
from weightsync.manifest import Manifest, TensorMeta
from weightsync.testing.lending import Lender, PlantedError
from weightsync.testing.suite import Suite, raises

Tensors = dict[str, torch.Tensor]


class EngineSuite(Suite):
    """`make_adapter`, `weights` and `snapshot` are to be given; the rest may be."""

    may_stay_unfed: ClassVar[str] = r"(?!)"
    """Pattern of the parameters that no checkpoint tensor feeds, by intent of the model."""
    keeps_tensors: ClassVar[bool] = False
    """The loader refers to a group's tensors after it asked for the next, as the interface allows."""
    num_probed_names: ClassVar[int] = 50
    """Of how many names it is tried whether they reach the model, one by one."""

    def make_adapter(self) -> EngineAdapter:
        """An adapter of an engine that is whole. Its weights may be any: tests start by loading some."""
        raise NotImplementedError

    def weights(self, seed: int) -> Tensors:
        """What a trainer sends: checkpoint name -> tensor. Two seeds give the same names, dtypes and shapes, and other
        values everywhere; one seed gives the same every time."""
        raise NotImplementedError

    def snapshot(self, adapter: EngineAdapter) -> Any:
        """What the live weights are, or what they put out: plain values and tensors, in lists and dicts."""
        raise NotImplementedError

    def expected(self, seed: int) -> Any:
        """The snapshot of an engine that holds these weights.

        By default a fresh adapter's that was given them. An engine that got them on another way than the adapter is a
        stronger proof.
        """
        engine = _Engine(self, expects=False)
        engine.load(seed)
        return self.snapshot(engine.adapter)

    # ---- the load map -----------------------------------------------------------------------------------------

    def test_it_is_an_adapter_and_ready(self) -> None:
        adapter = self.make_adapter()
        assert isinstance(adapter, EngineAdapter), f"{type(adapter).__name__} lacks a method of EngineAdapter"
        adapter.check_ready()

    def test_load_map_leaves_the_model_as_it_was(self) -> None:
        engine = _Engine(self)
        before = engine.seen()
        again = engine.adapter.load_map(engine.manifest)
        assert again.digest == engine.load_map.digest, "the same manifest gave another load map"
        assert engine.seen() == before, "load_map changed the model"
        engine.load(1)
        engine.adapter.load_map(engine.manifest)
        engine.check(1)

    def test_every_parameter_is_fed_whole_or_listed_as_unfed(self) -> None:
        found = _Engine(self).load_map
        assert not found.partial, f"fed in part: {found.partial}"
        surprising = [path for path in found.unfed if not re.search(self.may_stay_unfed, path)]
        assert not surprising, f"nothing feeds {surprising}; may_stay_unfed is for what is meant so"

    def test_groups_partition_the_names(self) -> None:
        engine = _Engine(self)
        names = [name for group in engine.load_map.groups for name in group.names]
        unmapped = engine.manifest.with_ties(engine.load_map.unmapped)
        assert sorted([*names, *unmapped]) == sorted(engine.manifest.all_names), "not every name, each in one group"

    def test_names_that_feed_one_module_stand_in_one_group(self) -> None:
        found = _Engine(self).load_map
        group_of = {name: group.key for group in found.groups for name in group.names}
        groups: dict[str, set[str]] = {}
        for copy in found.copies:
            groups.setdefault(copy.module, set()).add(group_of[copy.name])
        torn = {module: keys for module, keys in groups.items() if len(keys) > 1}
        assert not torn, f"modules whose names stand in several groups: {torn}"

    def test_a_name_that_the_model_lacks_is_refused_or_unmapped(self) -> None:
        engine = _Engine(self)
        engine.load(0)
        stray = TensorMeta("weightsync.no.such.module.weight", "float32", (3,))
        try:
            found = engine.adapter.load_map(Manifest((*engine.manifest.tensors, stray), engine.manifest.aliases))
        except ManifestError:
            pass
        else:
            assert stray.name in found.unmapped or found.fallback is not None, f"{stray.name} is said to feed a module"
        engine.check(0)

    def test_a_tensor_of_another_shape_is_refused_or_the_load_map_shows_it(self) -> None:
        """A loader may read a part of what it is given, as a rank of several does; the map then says which."""
        engine = _Engine(self)
        engine.load(0)
        for meta in engine.manifest.tensors:
            if meta.name not in engine.load_map.unmapped and meta.numel and meta.shape:
                for size in (meta.shape[-1] + 1, meta.shape[-1] - 1):
                    self._try_shape(engine, msgspec.structs.replace(meta, shape=(*meta.shape[:-1], size)))
        engine.check(0)

    def _try_shape(self, engine: _Engine, other: TensorMeta) -> None:
        metas = tuple(other if meta.name == other.name else meta for meta in engine.manifest.tensors)
        try:
            found = engine.adapter.load_map(Manifest(metas, engine.manifest.aliases))
        except ManifestError:
            return
        if found.fallback is not None or found.partial:
            return
        read = [copy.source for copy in found.copies if copy.name == other.name and copy.source is not None]
        assert coverage(other.numel, read).never > 0, f"{other} was taken for what the model has"

    # ---- updates ----------------------------------------------------------------------------------------------

    def test_whole_groups_in_any_order_are_exact_in_one_reload(self) -> None:
        engine = _Engine(self)
        for seed, order in enumerate(engine.orders()):
            engine.load(seed % 2, order)
            engine.check(seed % 2)

    def test_an_update_may_be_repeated_and_undone(self) -> None:
        engine = _Engine(self)
        for seed in (0, 1, 1, 0):
            engine.load(seed)
            engine.check(seed)

    def test_every_name_reaches_the_model(self) -> None:
        engine = _Engine(self)
        names = [
            meta.name for meta in engine.manifest.tensors if meta.name not in engine.load_map.unmapped and meta.numel
        ]
        old, new = self.weights(0), self.weights(1)
        engine.load(0)
        before = engine.seen()
        for name in names[:: -(-len(names) // self.num_probed_names)]:
            engine.load_tensors({**old, name: new[name]})
            assert engine.seen() != before, f"another {name} changed nothing"

    def test_what_the_groups_raise_comes_out_and_the_next_update_is_exact(self) -> None:
        engine = _Engine(self)
        engine.load(0)
        num_groups = len(engine.load_map.groups)
        for count in sorted({0, 1, num_groups // 2, num_groups}):
            with raises(PlantedError, match="planted"):
                engine.load(1, fail_after=count)
            if count == 0:
                engine.check(0)
            engine.adapter.check_ready()
            engine.load(1, engine.load_map.groups[::-1])
            engine.check(1)
            engine.load(0)
            engine.check(0)

    def test_lent_memory_is_not_used_after_its_loan(self) -> None:
        engine = _Engine(self)
        for seed in (0, 1):
            lender = Lender(engine.manifest, self.weights(seed), may_keep=self.keeps_tensors)
            engine.apply(lender)
            lender.take_back()
            engine.check(seed)

    def test_lent_memory_is_not_used_after_a_failure(self) -> None:
        engine = _Engine(self)
        engine.load(0)
        lender = Lender(engine.manifest, self.weights(1), may_keep=self.keeps_tensors)
        with raises(PlantedError):
            engine.apply(lender, fail_after=max(len(engine.load_map.groups) // 2, 1))
        lender.take_back()
        engine.load(1)
        engine.check(1)


class _Engine:
    """A fresh adapter with its load map."""

    _expected: ClassVar[dict[type[EngineSuite], list[Any]]] = {}
    """By suite, what either seed is to look like."""

    def __init__(self, suite: EngineSuite, *, expects: bool = True) -> None:
        self._suite = suite
        if expects and type(suite) not in self._expected:  # before the adapter, of which a suite may keep the last
            self._expected[type(suite)] = [_plain(suite.expected(seed)) for seed in (0, 1)]
        self.manifest = Manifest.from_tensors(suite.weights(0))
        difference = self.manifest.difference(Manifest.from_tensors(suite.weights(1)))
        assert not difference, f"weights(0) and weights(1) are not of one model: {difference}"
        self.adapter = suite.make_adapter()
        self.load_map: LoadMap = self.adapter.load_map(self.manifest)

    def orders(self) -> Iterator[Sequence[ModuleGroup]]:
        yield self.load_map.groups
        yield self.load_map.groups[::-1]
        for seed in (0, 1):
            yield random.Random(seed).sample(self.load_map.groups, len(self.load_map.groups))

    def load(self, seed: int, groups: Sequence[ModuleGroup] | None = None, *, fail_after: int | None = None) -> None:
        self.load_tensors(self._suite.weights(seed), groups, fail_after=fail_after)

    def load_tensors(
        self, tensors: Tensors, groups: Sequence[ModuleGroup] | None = None, *, fail_after: int | None = None
    ) -> None:
        self.apply(Lender(self.manifest, tensors, may_keep=True), groups, fail_after=fail_after)

    def apply(
        self, lender: Lender, groups: Sequence[ModuleGroup] | None = None, *, fail_after: int | None = None
    ) -> None:
        groups = self.load_map.groups if groups is None else groups
        reloads = self.adapter.apply(lender.groups(groups, fail_after=fail_after))
        assert lender.num_lent == len(groups), f"apply asked for {lender.num_lent} of {len(groups)} groups"
        assert reloads == 1, f"apply says that the loader ran {reloads} times"

    def seen(self) -> Any:
        return _plain(self._suite.snapshot(self.adapter))

    def check(self, seed: int) -> None:
        """The live weights are these."""
        expected = self._expected[type(self._suite)]
        assert expected[0] != expected[1], "snapshot() cannot tell weights(0) from weights(1), or they are not loaded"
        seen = self.seen()
        was = "the other weights are" if seen == expected[1 - seed] else "other weights are"
        assert seen == expected[seed], f"{was} live than were given: {_difference(expected[seed], seen)}"


def _plain(value: Any) -> Any:
    """*value* without references to live memory, to be compared bit by bit."""
    match value:
        case torch.Tensor():
            data = as_bytes(value.detach().cpu()).numpy().tobytes()
            return (str(value.dtype), tuple(value.shape), data)
        case dict():
            return {key: _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            return value


def _difference(expected: Any, seen: Any) -> str:
    if isinstance(expected, dict) and isinstance(seen, dict):
        keys = [str(key) for key in expected.keys() | seen.keys() if expected.get(key) != seen.get(key)]
        return f"{', '.join(sorted(keys)[:5])} of {len(expected)} differ"
    return "the snapshots differ"
