"""`connect` and `update` over a real local Ray, with plain torch modules as engines."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

import weightsync as ws
from weightsync.testing.link import Footprint

pytestmark = pytest.mark.usefixtures("ray_cluster")


def make_model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))


class Model:
    """A trainer as well as an engine; nothing in it knows of weightsync."""

    def __init__(self, seed: int = 0) -> None:
        self.reset(seed)

    def reset(self, seed: int, names: list[str] | None = None) -> None:
        self.model = make_model(seed)
        self.names = names

    def part(self) -> dict[str, torch.Tensor]:
        return {name: t for name, t in self.model.state_dict().items() if self.names is None or name in self.names}

    def slowly(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.model.state_dict().items():
            time.sleep(0.4)
            yield name, tensor

    def change(self, seed: int) -> None:
        self.model.load_state_dict(make_model(seed).state_dict())

    def change_last(self) -> None:
        with torch.no_grad():
            self.model[2].bias.add_(1)  # type: ignore[index]

    def drop_last_layer(self) -> None:
        del self.model[2]  # type: ignore[operator]

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: t.clone() for name, t in self.model.state_dict().items()}

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def pid(self) -> int:
        return os.getpid()

    def die(self) -> None:
        os._exit(1)


class AsyncModel(Model):
    async def tick(self) -> int:
        await asyncio.sleep(0)
        return 1


def start(cls: type = Model) -> Any:
    return ray.remote(cls).options(num_cpus=0.1).remote()


@pytest.fixture(scope="module")
def started(ray_cluster: None) -> list[Any]:
    return [start(), start(), start(), start(), start(AsyncModel)]


@pytest.fixture
def trainer(started: list[Any]) -> Any:
    ray.get(started[0].reset.remote(1))
    return started[0]


@pytest.fixture
def engines(started: list[Any]) -> list[Any]:
    """One with plain methods, one with async ones; started once, since each start costs seconds."""
    ray.get([started[3].reset.remote(2), started[4].reset.remote(3)])
    return [started[3], started[4]]


@pytest.fixture
def engine(engines: list[Any]) -> Any:
    return engines[0]


def weights_of(*actors: Any) -> list[dict[str, torch.Tensor]]:
    found: list[dict[str, torch.Tensor]] = ray.get([a.weights.remote() for a in actors])
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("apply", ["staged", "streaming"])
def test_only_what_changed_is_moved(apply: str, trainer: Any, engines: list[Any]) -> None:
    with ws.connect(
        trainers=[trainer],
        engines=engines,
        source="model",
        target="model",
        config={"skip_unchanged": True, "apply": apply, "timeout_s": 30},
    ) as sync:
        assert sync.update().num_skipped == 0
        ray.get(trainer.change_last.remote())
        report = sync.update()
        assert (report.num_skipped, report.skipped_bytes) == (1, 4 * (16 * 32 + 32))
        assert all(same(found, weights_of(trainer)[0]) for found in weights_of(*engines))
        assert (sync.update().skipped_bytes, sync.version) == (report.nbytes, report.version + 1)
        ray.get(engines[1].change.remote(5))
        assert sync.update().num_skipped == 0, "an engine has lost the version"
        assert all(same(found, weights_of(trainer)[0]) for found in weights_of(*engines))


def test_a_weight_sync_goes_on_after_another_could_not_connect(trainer: Any, engines: list[Any]) -> None:
    config = {"transport": "shared_memory"}
    with ws.connect(trainers=[trainer], engines=engines, source="model", target="model", config=config) as sync:
        version = sync.update().version
        for _ in range(2):
            with pytest.raises(ws.ConfigError, match="mdoel"):
                ws.connect(trainers=[trainer], engines=engines, source="model", target="mdoel", config=config)
            ray.get(trainer.change_last.remote())
            version += 1
            assert sync.update().version == version
            assert all(same(found, weights_of(trainer)[0]) for found in weights_of(*engines))


def test_an_engine_that_holds_other_weights_is_found_and_repaired(trainer: Any, engines: list[Any]) -> None:
    with ws.connect(trainers=[trainer], engines=engines, source="model", target="model") as sync:
        version = sync.update().version
        report = sync.verify()
        assert (report.version, sync.version) == (version, version)
        ray.get(engines[1].change.remote(5))
        with pytest.raises(ws.EnginePoisonedError, match=r"held other values in 0\.weight, .* \(4 of its") as caught:
            sync.verify()
        assert caught.value.rank == "engine 1 rank 0"
        assert all(same(found, weights_of(trainer)[0]) for found in weights_of(engines[0]))
        assert sync.update().version == version + 1
        ray.get(trainer.change_last.remote())
        with pytest.raises(ws.AgreementError, match="trainer 0 does not hold version"):
            sync.verify()
        sync.update()
        sync.verify()
        assert all(same(found, weights_of(trainer)[0]) for found in weights_of(*engines))
    with pytest.raises(ws.EngineStateError, match="closed"):
        sync.verify()


@pytest.mark.parametrize("transport", ["auto", "shared_memory", "broadcast"])
def test_all_engines_equal_the_trainer_after_each_update(transport: str, trainer: Any, engines: list[Any]) -> None:
    with ws.connect(
        trainers=[trainer], engines=engines, source="model", target="model", config={"transport": transport}
    ) as sync:
        first = sync.version + 1
        for version, seed in enumerate((1, 4, 4, 5), start=first):
            ray.get(trainer.change.remote(seed))
            report = sync.update()
            assert report.version == sync.version == version
            expected, *held = weights_of(trainer, *engines)
            assert all(same(expected, weights) for weights in held)
            assert set(report.transports.values()) == {"shared_memory" if transport == "auto" else transport}
            assert report.nbytes == sum(t.nbytes for t in expected.values())


def test_trainer_ranks_that_each_hold_a_part_feed_every_engine(started: list[Any], engines: list[Any]) -> None:
    names = list(make_model(0).state_dict())
    trainers = started[:3]
    for rank, part in zip(trainers, (names[:1], names[1:3], names[3:]), strict=True):
        ray.get(rank.reset.remote(7, part))
    with ws.connect(trainers=trainers, engines=engines, source="part", target="model") as sync:
        report = sync.update()
    expected, *held = weights_of(trainers[0], *engines)
    assert all(same(expected, weights) for weights in held)
    sent = [row.nbytes for row in report.ranks if row.rank.startswith("trainer")]
    assert sent == [sum(expected[n].nbytes for n in part) for part in (names[:1], names[1:3], names[3:])]


def test_source_and_target_may_be_functions_of_the_actor(trainer: Any, engine: Any) -> None:
    with ws.connect(
        trainers=[trainer], engines=[engine], source=lambda a: a.model.state_dict().items(), target=lambda a: a.model
    ) as sync:
        sync.update()
    assert same(*weights_of(trainer, engine))


def test_an_update_can_be_awaited(trainer: Any, engine: Any) -> None:
    with ws.connect(trainers=[trainer], engines=[engine], source="model", target="model") as sync:
        before = sync.version
        report = asyncio.run(sync.update_async())
        assert report.version == before + 1
    assert same(*weights_of(trainer, engine))


def test_how_far_an_update_is_can_be_asked_meanwhile(trainer: Any, engine: Any) -> None:
    with ws.connect(trainers=[trainer], engines=[engine], source="slowly", target="model") as sync:
        updating = threading.Thread(target=sync.update)
        updating.start()
        phases = set()
        while updating.is_alive():
            if (progress := sync.progress()) is not None:
                phases.add(progress.phase)
                if progress.phase == "transfer" and progress.engines:
                    assert 0 <= progress.engines["engine 0"].groups <= progress.engines["engine 0"].num_groups == 2
        updating.join()
        assert "transfer" in phases
        last = sync.progress()
        assert last is not None
        assert (last.phase, last.version) == ("done", sync.version)
        assert last.engines["engine 0"].nbytes == last.nbytes == sync.status()["nbytes"]


def test_a_new_weight_sync_continues_at_the_version_that_the_actors_have(trainer: Any, engine: Any) -> None:
    with ws.connect(trainers=[trainer], engines=[engine], source="model", target="model") as first:
        version = first.update().version
    with ws.connect(trainers=[trainer], engines=[engine], source="model", target="model") as second:
        assert second.version == version
        assert second.update().version == version + 1


def test_an_engine_that_was_replaced_since_connect_is_noticed(trainer: Any, engine: Any) -> None:
    with ws.connect(trainers=[trainer], engines=[engine], source="model", target="model") as sync:
        sync.update()
        ray.get(engine.reset.remote(9))
        with pytest.raises(ws.EngineStateError, match=r"engine 0.*was replaced"):
            sync.update()
    with ws.connect(trainers=[trainer], engines=[engine], source="model", target="model") as sync:
        sync.update()
    assert same(*weights_of(trainer, engine))


def test_a_failed_update_names_the_culprit_and_leaves_the_engines_as_they_were(
    trainer: Any, engines: list[Any]
) -> None:
    with ws.connect(trainers=[trainer], engines=engines, source="model", target="model") as sync:
        version = sync.update().version
        before = weights_of(*engines)
        ray.get(trainer.drop_last_layer.remote())
        with pytest.raises(ws.ManifestError, match=r"2\.weight") as caught:
            sync.update()
        assert caught.value.name == "2.weight"
        assert caught.value.rank == "trainer 0"
        assert caught.value.phase == "prepare"
        assert sync.version == version
        assert all(same(a, b) for a, b in zip(before, weights_of(*engines), strict=True))


def test_trainers_that_disagree_on_a_tensor_are_refused(trainer: Any, engine: Any) -> None:
    class Wide(Model):
        def part(self) -> dict[str, torch.Tensor]:
            return {"0.weight": torch.ones(5, 16)}

    with pytest.raises(ws.AgreementError, match=r"trainer 0 has 0\.weight.*trainer 1 has 0\.weight") as caught:
        ws.connect(trainers=[trainer, start(Wide)], engines=[engine], source="part", target="model")
    assert caught.value.rank == "trainer 1"


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"source": "modle"}, ws.ConfigError, "Model has no attribute 'modle'; it has model, names"),
        ({"target": "names"}, ws.ConfigError, r"NoneType is no engine.*it lacks load_map, check_ready, apply"),
        (
            {"target": lambda actor: actor.engines[3]},
            ws.ConfigError,
            "target: looking it up raised AttributeError: .*'engines'",
        ),
        ({"source": "pid"}, ws.ConfigError, "yields int"),
        ({"trainers": []}, ws.ConfigError, "at least one"),
        ({"engines": [3]}, ws.ConfigError, "expected a Ray actor handle, got int"),
        ({"engines": 3}, ws.ConfigError, "expected a list of at least one actor handle"),
        (
            {"config": {"transport": "carrier_pigeon"}},
            ws.ConfigError,
            "known: auto, broadcast, cuda_ipc, sharded_broadcast, ",
        ),
        ({"config": {"bucket_byte": 3}}, ws.ConfigError, "did you mean 'bucket_bytes'"),
        ({"config": {"wire_dtype": {"*": "bflot16"}}}, ws.ConfigError, "bflot16"),
    ],
)
def test_bad_arguments_are_refused_with_the_reason(
    change: dict[str, Any], error: type[Exception], text: str, trainer: Any, engine: Any
) -> None:
    arguments: dict[str, Any] = {"trainers": [trainer], "engines": [engine], "source": "model", "target": "model"}
    with pytest.raises(error, match=text):
        ws.connect(**(arguments | change))


def test_the_same_actor_twice_is_refused(trainer: Any, engine: Any) -> None:
    with pytest.raises(ws.ConfigError, match=r"engines\[1\] is the same actor as engines\[0\]"):
        ws.connect(trainers=[trainer], engines=[engine, engine], source="model", target="model")


@pytest.mark.parametrize("apply", ["staged", "streaming"])
def test_one_actor_may_be_trainer_and_engine(apply: str, trainer: Any, engine: Any) -> None:
    def policy(a: Any) -> torch.nn.Module:
        a.policy = getattr(a, "policy", None) or make_model(11)
        return a.policy  # type: ignore[no-any-return]

    with ws.connect(
        trainers=[trainer], engines=[trainer, engine], source=policy, target="model", config={"apply": apply}
    ) as sync:
        sync.update()
        sync.update()
    assert same(*weights_of(trainer, engine))
    assert same(weights_of(engine)[0], dict(make_model(11).state_dict()))


def test_a_trainer_whose_names_fit_nothing_is_refused(trainer: Any, engine: Any) -> None:
    def wrapped(a: Any) -> dict[str, torch.Tensor]:
        return {f"module.{name}": tensor for name, tensor in a.model.state_dict().items()}

    with pytest.raises(ws.ManifestError, match=r"no trainer tensor feeds this engine.*module\.0\.weight"):
        ws.connect(trainers=[trainer], engines=[engine], source=wrapped, target="model")


def test_a_closed_weight_sync_says_so(trainer: Any, engine: Any) -> None:
    sync = ws.connect(trainers=[trainer], engines=[engine], source="model", target="model")
    sync.close()
    sync.close()
    with pytest.raises(ws.EngineStateError, match="was closed"):
        sync.update()


def test_a_busy_actor_ends_in_a_bounded_error_that_says_so(trainer: Any, engine: Any) -> None:
    with ws.connect(
        trainers=[trainer], engines=[engine], source="model", target="model", config={"timeout_s": 2}
    ) as sync:
        busy = engine.sleep.remote(5)
        start = time.monotonic()
        with pytest.raises(
            ws.UpdateTimeoutError, match=r"engine 0 did not answer for 2 s in phase prepare.*must be free"
        ):
            sync.update()
        assert time.monotonic() - start < 6
        ray.get(busy)
        sync.update()
    assert same(*weights_of(trainer, engine))


def test_a_dead_engine_is_named_and_the_others_keep_their_weights(trainer: Any, engine: Any) -> None:
    engines = [engine, start()]
    sync = ws.connect(trainers=[trainer], engines=engines, source="model", target="model", config={"timeout_s": 10})
    before = weights_of(engines[0])
    engines[1].die.remote()
    with pytest.raises(ws.TransportError, match="engine 1"):
        sync.update()
    assert same(*before, *weights_of(engines[0]))
    sync.close()


def test_the_handle_may_be_used_from_another_task(trainer: Any, engine: Any) -> None:
    with ws.connect(trainers=[trainer], engines=[engine], source="model", target="model") as sync:

        def update(handle: ws.WeightSync) -> int:
            return handle.update().version

        elsewhere = ray.remote(num_cpus=0.1)(update)

        before = sync.version
        assert ray.get(elsewhere.remote(sync)) == before + 1
    assert same(*weights_of(trainer, engine))


@pytest.mark.parametrize(
    ("transport", "source", "limit_mib"),
    [("auto", "model", 8), ("broadcast", "model", 8), ("broadcast", "copies", 96)],
)
def test_fifty_updates_leave_open_files_and_memory_flat(transport: str, source: str, limit_mib: int) -> None:
    """A model of 32 MiB, of tensors of 4 MiB, which malloc would take from a thread's arena, and keep there: up to 300 MiB
    after as many updates. Of tensors that the trainer makes some stay at the top of each arena."""

    class Measured(Model):
        def measure(self) -> tuple[int, int, int]:
            counts = Footprint.now().counts
            with open("/proc/self/statm") as file:
                nbytes = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            return counts["open files"], counts["shared mappings"], nbytes

        def blow_up(self) -> None:
            self.model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))

        def copies(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self.model.state_dict().items():
                yield name, tensor.clone()

    trainer, engine = start(Measured), start(Measured)
    ray.get([trainer.blow_up.remote(), engine.blow_up.remote()])
    config = {"transport": transport}
    with ws.connect(trainers=[trainer], engines=[engine], source=source, target="model", config=config) as sync:

        def least() -> list[list[int]]:
            """Of both, over ten updates: what one of them has not yet given back the next one may have."""
            found = []
            for _ in range(10):
                sync.update()
                found.append(ray.get([trainer.measure.remote(), engine.measure.remote()]))
            return [[min(counts) for counts in zip(*of_one, strict=True)] for of_one in zip(*found, strict=True)]

        before = least()
        for _ in range(40):
            sync.update()
        after = least()
    for was, now in zip(before, after, strict=True):
        (files_before, mappings_before, bytes_before), (files_after, mappings_after, bytes_after) = was, now
        assert files_after <= files_before + 2
        assert mappings_after <= mappings_before + 1
        assert bytes_after - bytes_before < limit_mib * 2**20
