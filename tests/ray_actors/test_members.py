"""Engines that come and go, actors and coordinators that are restarted, over a real local Ray."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import weightsync as ws

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Model:
    """A trainer as well as an engine; a restart begins with the seed that it was made with."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(1)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: t.clone() for name, t in self.model.state_dict().items()}

    def pid(self) -> int:
        return os.getpid()

    def slowly(self, seconds: float, begun: Path | None = None, until: Path | None = None) -> None:
        """From now on wait before each tensor, and tell by a file when the first is asked for; it waits until another is there."""
        self.seconds, self.begun, self.until = seconds, begun, until

    def source(self) -> Any:
        if (begun := getattr(self, "begun", None)) is not None:
            begun.touch()
        if (until := getattr(self, "until", None)) is not None:
            wait_for(until, 15)
        for name, tensor in self.model.state_dict().items():
            time.sleep(getattr(self, "seconds", 0))
            yield name, tensor


def start(seed: int, **options: Any) -> Any:
    return ray.remote(Model).options(num_cpus=0.1, **options).remote(seed)


@pytest.fixture(scope="module")
def actors(ray_cluster: None) -> list[Any]:
    return [start(1, max_restarts=-1), start(2, max_restarts=-1), start(3, max_restarts=-1)]


def same(*actors: Any) -> bool:
    first, *others = ray.get([actor.weights.remote() for actor in actors])
    return all(torch.equal(first[name], other[name]) for other in others for name in first)


def kill(actor: Any) -> None:
    """SIGKILL, and wait until Ray has started it again."""
    pid = ray.get(actor.pid.remote())
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if ray.get(actor.pid.remote()) != pid:
                return
        except ray.exceptions.RayActorError:
            time.sleep(0.1)
    raise AssertionError("Ray did not restart the actor")


def wait_for(file: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not file.exists():
        assert time.monotonic() < deadline, f"no {file.name} in {seconds} s"
        time.sleep(0.01)


def connect(trainer: Any, engines: list[Any], **config: Any) -> ws.WeightSync:
    return ws.connect(
        trainers=[trainer], engines=engines, source="source", target="model", config={"timeout_s": 20, **config}
    )


def test_an_engine_joins_and_leaves_while_the_others_stay(actors: list[Any]) -> None:
    trainer, engine, late = actors
    with connect(trainer, [engine]) as sync:
        version = sync.update().version
        report = sync.add_engine(late)
        assert report is not None
        assert (report.version, report.joined) == (version, ("engine 1",))
        assert same(*actors)
        ray.get(trainer.step.remote())
        sync.update()
        assert same(*actors)
        with pytest.raises(ws.ConfigError, match=r"engines\[2\] is the same actor as engines\[1\]"):
            sync.add_engine(late)
        sync.remove_engine(late)
        ray.get(trainer.step.remote())
        sync.update()
        assert same(trainer, engine)
        assert not same(trainer, late)
        with pytest.raises(ws.ConfigError, match="takes no part"):
            sync.remove_engine(late)
        with pytest.raises(ws.ConfigError, match="expected a Ray actor handle"):
            sync.remove_engine("engine 0")


def test_actors_that_ray_restarted_come_in_with_the_next_update(actors: list[Any]) -> None:
    trainer, engine, other = actors
    with connect(trainer, [engine, other]) as sync:
        version = sync.update().version
        kill(engine)
        ray.get(trainer.step.remote())
        report = sync.update()
        assert same(*actors)
        assert (report.version, report.joined) == (version + 1, ("engine 0",))
        kill(trainer)
        ray.get(trainer.step.remote())
        assert sync.update().version == version + 2
        assert same(*actors)


@pytest.mark.parametrize("retries", [0, 1])
def test_a_coordinator_that_dies_in_mid_update_is_replaced_and_versions_go_on(
    retries: int, actors: list[Any], tmp_path: Path
) -> None:
    trainer, engine, other = actors
    with connect(trainer, [engine, other], retries=retries, version_log=str(tmp_path / "log")) as sync:
        version = sync.update().version
        begun = tmp_path / "begun"
        ray.get([trainer.step.remote(), trainer.slowly.remote(1, begun)])

        def kill_in_mid_update() -> None:
            wait_for(begun)
            ray.kill(sync._coordinator)

        threading.Thread(target=kill_in_mid_update).start()
        if retries:
            assert sync.update().version == version + 1
        else:
            with pytest.raises(ws.CoordinatorLostError, match="coordinator died in update"):
                sync.update()
            assert same(engine, other)
            assert not same(trainer, engine)
            assert sync.version == version
        ray.get(trainer.slowly.remote(0))
        ray.get(trainer.step.remote())
        assert sync.update().version == version + 1 + retries
        assert same(*actors)


def test_a_weight_sync_that_is_in_mid_update_cannot_be_taken_over(actors: list[Any], tmp_path: Path) -> None:
    trainer, engine, other = actors
    with connect(trainer, [engine]) as sync:
        ray.get(trainer.slowly.remote(0, tmp_path / "begun", tmp_path / "refused"))
        updating = threading.Thread(target=sync.update)
        updating.start()
        try:
            wait_for(tmp_path / "begun")
            with pytest.raises(ws.EngineStateError, match="another weight sync is in the middle of an update"):
                connect(trainer, [other])
        finally:
            (tmp_path / "refused").touch()
            updating.join()
        ray.get(trainer.slowly.remote(0))
        assert same(trainer, engine)
    with connect(trainer, [other]) as sync:
        sync.update()
        assert same(trainer, other)


def test_versions_go_on_from_the_log_when_all_actors_are_new(
    tmp_path: Path, actors: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, engine, _ = actors
    log = tmp_path / "versions.jsonl"
    monkeypatch.chdir(tmp_path)  # a folder that the coordinator does not work in
    with connect(trainer, [engine], version_log=log.name) as sync:
        version = sync.update().version
        with pytest.raises(ws.EngineStateError, match="uses this version log"):
            connect(trainer, [engine], version_log=str(log))
        assert sync.update().version == version + 1, "who was refused has disturbed nothing"
    with connect(start(5), [start(6)], version_log=str(log)) as sync:
        assert sync.version == version + 1
        assert sync.update().version == version + 2


def test_a_lost_engine_is_left_out_where_the_config_says_so(actors: list[Any]) -> None:
    trainer, engine, _ = actors
    mortal = start(9)
    with connect(trainer, [engine, mortal], on_lost_engine="remove") as sync:
        sync.update()
        os.kill(ray.get(mortal.pid.remote()), signal.SIGKILL)
        ray.get(trainer.step.remote())
        report = sync.update()
        assert report.lost == ("engine 1",)
        assert same(trainer, engine)
        assert list(sync.status()["engines"]) == ["engine 0"]
        ray.kill(sync._coordinator)
        with pytest.raises(ws.CoordinatorLostError):
            sync.update()
        ray.get(trainer.step.remote())
        assert sync.update().version == report.version + 1, "the next coordinator does not ask for the lost one"
        assert same(trainer, engine)
