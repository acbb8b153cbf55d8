"""`verify`: whether every engine holds the trainers' weights, as its own loader makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import pytest
import torch

from tests.direct.made_up import WAYS, Part, derive, plan, qkv, run, swap_some, whole
from weightsync.config import SyncConfig
from weightsync.engines.torch_module import TorchModuleAdapter
from weightsync.errors import AgreementError, EnginePoisonedError, EngineStateError
from weightsync.interfaces import EngineAdapter
from weightsync.loadmap import LoadMap
from weightsync.manifest import Manifest
from weightsync.testing import LocalSync, module_engine
from weightsync.testing.modules import nested_module

Tensors = dict[str, torch.Tensor]


def values(seed: int) -> Tensors:
    torch.manual_seed(seed)
    return {f"layers.{i}.{part}": torch.randn(16, 3 + i) for i in range(4) for part in ("up", "down")}


class Synced:
    """A trainer of tensors and engines that are torch modules."""

    def __init__(self, *, num_engines: int = 1, **config: Any) -> None:
        self.trainer = values(0)
        self.engines = [nested_module(values(10 + i)) for i in range(num_engines)]
        self.sync = LocalSync([lambda: self.trainer], [module_engine(e) for e in self.engines], SyncConfig(**config))
        self.session = self.sync.session

    def __enter__(self) -> Self:
        self.sync.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.sync.__exit__(*error)

    def step(self, seed: int) -> None:
        for name, value in values(seed).items():
            self.trainer[name].copy_(value)

    def spoil(self, name: str, engine: int = -1) -> None:
        self.engines[engine].state_dict()[name].view(-1)[3] += 1

    def are_equal(self) -> bool:
        return all(torch.equal(t, self.trainer[n]) for e in self.engines for n, t in e.state_dict().items())


@pytest.mark.parametrize("skip_unchanged", [False, True])
@pytest.mark.parametrize("apply", ["staged", "streaming"])
@pytest.mark.parametrize("transport", ["shared_memory", "broadcast", "sharded_shared_memory", "sharded_broadcast"])
def test_every_engine_that_held_other_weights_is_named_and_repaired(
    transport: str, apply: str, skip_unchanged: bool
) -> None:
    with Synced(num_engines=2, transport=transport, apply=apply, skip_unchanged=skip_unchanged) as made:
        for seed in (1, 2):
            made.step(seed)
            assert made.session.update().version == seed
        report = made.session.verify()
        assert (report.version, made.session.version) == (2, 2)
        assert [row.reloads for row in report.ranks if row.rank.startswith("engine")] == [1, 1]
        assert made.are_equal()

        made.spoil("layers.2.up")
        with pytest.raises(EnginePoisonedError, match=r"it held other values in layers\.2\.up \(1 of its") as caught:
            made.session.verify()
        assert caught.value.rank == "engine 1 rank 0"
        assert made.session.status()["poisoned"].keys() == {"engine 1"}
        with pytest.raises(EngineStateError, match="engine 1 does not hold version 2; update first"):
            made.session.verify()

        made.step(3)
        assert made.session.update().version == 3
        assert made.session.verify().version == 3
        assert made.are_equal()


def test_a_model_that_cannot_be_staged_is_verified_as_it_comes() -> None:
    with Synced(num_engines=2, transport="broadcast", bucket_bytes="1KiB", staging_limit_bytes="2KiB") as made:
        for seed in (1, 2):
            made.step(seed)
            assert made.session.update().apply == "streaming"
        assert made.session.verify().apply == "streaming"
        made.spoil("layers.0.down")
        with pytest.raises(EnginePoisonedError, match=r"layers\.0\.down \(1 of its"):
            made.session.verify()
        made.session.update()
        made.session.verify()
        assert made.are_equal()


@pytest.mark.parametrize("skip_unchanged", [False, True])
@pytest.mark.parametrize("transport", ["shared_memory", "broadcast"])
def test_trainers_that_have_gone_on_are_told_and_nothing_changes(transport: str, skip_unchanged: bool) -> None:
    with Synced(transport=transport, skip_unchanged=skip_unchanged) as made:
        made.step(0)
        made.session.update()
        for name in ("layers.0.up", "layers.0.down"):
            made.trainer[name].copy_(values(1)[name])
        assert made.session.update().num_skipped == (3 if skip_unchanged else 0)
        assert made.session.verify().num_skipped == 0
        made.step(1)
        made.session.update()
        made.trainer["layers.3.up"].copy_(values(2)["layers.3.up"])
        with pytest.raises(AgreementError, match="trainer 0 does not hold version 3 any more") as caught:
            made.session.verify()
        assert caught.value.field == "content"
        assert made.session.status()["poisoned"] == {}
        assert all(torch.equal(t, values(1)[name]) for name, t in made.engines[0].state_dict().items())
        assert made.session.update().version == 4
        assert made.session.verify().version == 4


def test_there_is_nothing_to_verify_before_the_first_update() -> None:
    with Synced(transport="shared_memory") as made:
        with pytest.raises(EngineStateError, match="there is no version yet; update first"):
            made.session.verify()
        assert made.session.update().version == 1


class Hidden(EngineAdapter):
    """Shows nothing."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._inner = TorchModuleAdapter(module)

    def load_map(self, manifest: Manifest) -> LoadMap:
        return self._inner.load_map(manifest)

    def check_ready(self) -> None:
        self._inner.check_ready()

    def apply(self, groups: Any) -> int:
        return self._inner.apply(groups)


def test_an_engine_that_shows_nothing_is_refused_and_goes_on() -> None:
    trainer, engine = values(0), nested_module(values(1))
    sync = LocalSync([lambda: trainer], [[Hidden(engine)]], SyncConfig(transport="shared_memory"))
    with sync as session:
        session.update()
        with pytest.raises(EngineStateError, match=r"does not show its live tensors.*cannot be verified"):
            session.verify()
        assert session.update().version == 2
        assert all(torch.equal(t, trainer[name]) for name, t in engine.state_dict().items())


# ---- engines that load as vLLM does ---------------------------------------------------------------------------------

ODD: dict[str, Callable[[], Part]] = {
    "plain": qkv,
    "kept in another order": lambda: qkv(finish=swap_some),
    "with a tensor made from the weight": lambda: qkv(finish=derive(whole)),
}


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("odd", ODD)
def test_what_was_copied_or_reloaded_is_as_after_a_reload(odd: str, way: dict[str, Any]) -> None:
    with run(lambda: plan(ODD[odd]()), **way) as made:
        for version in range(1, 6):
            made.step()
            made.update()
            assert made.session.verify().version == version
            made.check()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_value_that_is_wrong_is_found(way: dict[str, Any]) -> None:
    with run(lambda: plan(qkv()), **way) as made:
        made.updates(2)
        made.update()
        with torch.no_grad():
            made.engine.model.odd.weight[9] += 1
        with pytest.raises(EnginePoisonedError, match=r"odd\.weight \(1 of its .*direct apply is off") as caught:
            made.session.verify()
        assert caught.value.rank == "engine 0 rank 0"
        made.step()
        row = made.update()
        assert (row.num_direct, row.reloads) == (0, 1)
        assert {"did not hold the weights it should" in reason for reason in row.reloaded.values()} == {True}
        made.session.verify()


def test_a_loader_that_fails_while_it_verifies_poisons_and_the_next_update_repairs() -> None:
    with run(plan, transport="shared_memory") as made:
        made.update()
        made.engine.fail_after = 1
        with pytest.raises(EnginePoisonedError, match="planted"):
            made.session.verify()
        made.engine.fail_after = None
        made.step()
        made.update()
        made.session.verify()
