"""Calls of one update over sockets: how many are left to Ray, and that nobody is overtaken by them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

import weightsync as ws
from weightsync.ray_actors.fleet import RayFleet
from weightsync.session import Session


class Model:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(8, 8)

    def step(self, seconds: float) -> None:
        time.sleep(seconds)
        with torch.no_grad():
            self.model.weight.add_(1)

    def weight(self) -> torch.Tensor:
        return self.model.weight.detach().clone()


class AsyncModel(Model):
    async def nothing(self) -> None: ...


@pytest.fixture(scope="module")
def trainer(ray_cluster: None) -> Iterator[Any]:
    actor = ray.remote(Model).remote(1)
    ray.get(actor.weight.remote())
    yield actor
    ray.kill(actor)


@pytest.fixture(scope="module", params=[Model, AsyncModel])
def engine(request: pytest.FixtureRequest, ray_cluster: None) -> Iterator[Any]:
    actor = ray.remote(request.param).remote(2)
    ray.get(actor.weight.remote())
    yield actor
    ray.kill(actor)


def assert_equal(trainer: Any, engine: Any) -> None:
    assert torch.equal(ray.get(trainer.weight.remote()), ray.get(engine.weight.remote()))


@pytest.mark.parametrize("apply", ["staged", "streaming"])
def test_one_call_over_ray_an_actor_is_left_unless_it_is_async(
    apply: str, trainer: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = RayFleet("owner", [trainer], [engine], "model", "model", timeout_s=30)
    over_ray: list[str] = []
    start = fleet._calls._start

    def counted(party: str, *rest: Any) -> None:
        over_ray.append(party)
        start(party, *rest)

    monkeypatch.setattr(fleet._calls, "_start", counted)
    fleet.open_sides()
    session = Session(fleet, ws.SyncConfig.load({"apply": apply, "timeout_s": 30}))
    try:
        session.open()
        session.update()
        is_async = ray.get(engine.__ray_call__.remote(lambda actor: isinstance(actor, AsyncModel)))
        wanted = (1, (3 if apply == "streaming" else 4) if is_async else 1)
        counts: set[tuple[int, int]] = set()
        for _ in range(50):  # a moment in which the machine does nothing for 20 ms ends a stay
            if wanted in counts:
                break
            over_ray.clear()
            ray.get(trainer.step.remote(0))
            session.update()
            counts.add((over_ray.count("trainer 0"), over_ray.count("engine 0")))
        assert wanted in counts, counts
        assert_equal(trainer, engine)
    finally:
        session.close()
        fleet.close()


def test_what_was_asked_of_an_actor_before_is_in_the_update(trainer: Any, engine: Any) -> None:
    with ws.connect(trainers=[trainer], engines=[engine], source="model", target="model") as sync:
        for seconds in (0.0, 0.0, 0.3, 0.0):
            trainer.step.remote(seconds)  # nobody waits for it
            sync.update()
            assert_equal(trainer, engine)


def test_threads_that_update_at_once_all_get_their_reports(trainer: Any, engine: Any) -> None:
    versions: list[int] = []
    with ws.connect(trainers=[trainer], engines=[engine], source="model", target="model") as sync:
        before = sync.version
        threads = [threading.Thread(target=lambda: versions.append(sync.update().version)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert sorted(versions) == [before + i for i in (1, 2, 3, 4)]


def test_a_handle_updates_in_another_process(trainer: Any, engine: Any) -> None:
    def update(sync: ws.WeightSync) -> int:
        return sync.update().version

    with ws.connect(trainers=[trainer], engines=[engine], source="model", target="model") as sync:
        first = sync.update().version
        assert ray.get(ray.remote(num_cpus=0)(update).remote(sync), timeout=60) == first + 1
        assert sync.update().version == first + 2
        assert_equal(trainer, engine)
