"""A doctor among real actors: each fault is planted for real, named with its cure, and nothing is changed by looking."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import ray
import torch

import weightsync as ws
from weightsync.doctor.finding import Finding
from weightsync.ray_actors.doctor import examine

pytestmark = pytest.mark.usefixtures("ray_cluster")


def make_model(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))


class Party:
    """A trainer or an engine that can be made ill."""

    def __init__(self, seed: int) -> None:
        self.model, self.ill = make_model(seed), ""

    def set(self, ill: str = "") -> None:
        """Well again, but for *ill*."""
        self.ill = ill
        match ill:
            case "meta":
                self.target: Any = make_model(1).to("meta")
            case "no engine":
                self.target = "a text"
            case "bfloat16":
                self.target = make_model(1).bfloat16()
            case "wider":
                self.target = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
            case "deeper":
                self.target = make_model(1).append(torch.nn.Linear(4, 4))
            case _:
                self.target = self.model

    def weights(self) -> Any:
        state = dict(self.model.state_dict())
        match self.ill:
            case "raises":
                raise ValueError("the mesh is not there")
            case "number":
                return 3
            case "extra":
                state["value_head.weight"] = torch.zeros(3)
            case "prefix":
                state = {f"module.{name}": tensor for name, tensor in state.items()}
            case "cut":
                state["0.weight"] = state["0.weight"][:5]
            case "tied":
                state["3.weight"] = state["2.weight"]
        return state

    def held(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@dataclass
class Parties:
    trainers: list[Any]
    engines: list[Any]
    threaded: Any
    gone: Any

    def examine(self, **config: Any) -> list[Finding]:
        return examine(
            trainers=self.trainers,
            engines=self.engines,
            source="weights",
            target="target",
            config={"timeout_s": 20, **config},
        )

    def held(self) -> list[dict[str, torch.Tensor]]:
        held: list[dict[str, torch.Tensor]] = ray.get([a.held.remote() for a in (*self.trainers, *self.engines)])
        return held


@pytest.fixture(scope="module")
def started(ray_cluster: None) -> Iterator[Parties]:
    actor = ray.remote(num_cpus=0.1)(Party)
    trainers, engines = [actor.remote(1), actor.remote(1)], [actor.remote(2), actor.remote(3)]
    threaded, gone = actor.options(max_concurrency=4).remote(4), actor.remote(5)
    ray.get([threaded.set.remote(), gone.set.remote()])
    ray.kill(gone)
    yield Parties(trainers, engines, threaded, gone)
    for one in (*trainers, *engines, threaded):
        ray.kill(one)


@pytest.fixture
def parties(started: Parties) -> Parties:
    ray.get([actor.set.remote() for actor in (*started.trainers, *started.engines)])
    return started


def faults(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level != "green"]


def test_looking_finds_nothing_wrong_and_changes_nothing(parties: Parties) -> None:
    before = parties.held()
    with ws.connect(trainers=parties.trainers, engines=parties.engines, source="weights", target="target") as sync:
        sync.update()
        version, after = sync.version, parties.held()
    assert faults(parties.examine()) == []
    assert faults(parties.examine()) == []
    now = parties.held()
    for was, is_ in zip(after, now, strict=True):
        assert all(torch.equal(was[name], is_[name]) for name in was)
    assert not torch.equal(before[2]["0.weight"], now[2]["0.weight"])
    with ws.connect(trainers=parties.trainers, engines=parties.engines, source="weights", target="target") as again:
        assert again.version == version
        assert again.update().version == version + 1


CASES: list[tuple[str, str, dict[str, Any], str, str, str, str]] = [
    # who is ill, with what, config, level, check, what is found, what the cure says
    ("trainer", "raises", {}, "red", "source", "ValueError: the mesh is not there", "mend weights()"),
    ("trainer", "number", {}, "red", "source", "source must yield a torch.nn.Module", "it yields int"),
    ("trainer", "extra", {}, "yellow", "names that feed nothing", "feed nothing in engine 0, engine 1: value_head.weight", "leave them out"),
    ("trainers", "prefix", {}, "red", "load map", "no trainer tensor feeds this engine", "does a wrapper add a prefix"),
    ("trainer", "cut", {}, "red", "trainer ranks", "trainer 0 has 0.weight (float32, [5, 16])", "make the ranks alike"),
    ("engine", "meta", {}, "red", "state", "is on the meta device", "give the module memory first"),
    ("engine", "no engine", {}, "red", "actors", "a str is no engine", "expected a torch.nn.Module"),
    ("engine", "wider", {}, "red", "load map", "0.weight (float32, [32, 16]) does not fit the engine's [64, 16]", "names and shapes"),
    ("engine", "bfloat16", {}, "yellow", "dtype casts", "float32 -> bfloat16", 'sync.wire_dtype: {"*": bfloat16}'),
    ("engine", "deeper", {}, "yellow", "parameters that nothing feeds", "keep the values that they were made with: 3.weight, 3.bias", "have weights() return them"),
    ("engine", "deeper", {"unfed": "error"}, "red", "parameters that nothing feeds", "3.weight, 3.bias", "sync.unfed: report"),
    ("", "", {"transport": "broadcast", "staging_limit_bytes": 1024}, "red", "staging", "module group 0 needs", "sync.staging_limit_bytes"),
    ("", "", {"transport": "cuda_ipc"}, "red", "chosen", "cuda_ipc cannot serve", "sync.transport: auto"),
    ("", "", {"transport": [{"use": "broadcast", "same_host": False}]}, "red", "chosen", "no rule fits", "add a rule"),
    ("", "", {"apply": "streaming"}, "yellow", "staging", "engines are paused for the whole transfer", "sync.apply: auto"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("who", "ill", "config", "level", "check", "says", "cure"),
    [pytest.param(*case, id=" ".join((case[0], case[1], *map(str, case[2].values())))) for case in CASES],
)
def test_a_fault_is_found_and_its_cure_named(
    parties: Parties, who: str, ill: str, config: dict[str, Any], level: str, check: str, says: str, cure: str
) -> None:
    """Of the first trainer, or the last engine; one engine's fault does not hide what can be known of the others."""
    patients = {"trainer": parties.trainers[:1], "trainers": parties.trainers, "engine": parties.engines[-1:], "": []}
    ray.get([actor.set.remote(ill) for actor in patients[who]])
    findings = parties.examine(**config)
    hits = [finding for finding in faults(findings) if finding.check == check]
    assert hits, faults(findings)
    assert all(hit.level == level for hit in hits)
    assert says in " ".join(hit.found for hit in hits)
    assert cure in " ".join(f"{hit.cure} {hit.found}" for hit in hits)
    if who == "engine":
        assert all("engine 1" in hit.party for hit in hits)
        assert {f.check for f in findings if f.level == "green"} >= {"libraries", "formats", "chosen"}


def test_ties_are_told(parties: Parties) -> None:
    ray.get([trainer.set.remote("tied") for trainer in parties.trainers])
    (told,) = (finding for finding in parties.examine() if finding.check == "ties")
    assert told.found == "3.weight is 2.weight; sent once"


def test_an_actor_that_is_busy_or_gone_or_of_many_threads_is_named(parties: Parties) -> None:
    busy = parties.trainers[1].sleep.remote(9)
    findings = faults(
        examine(
            trainers=parties.trainers,
            engines=[parties.threaded, parties.gone],
            source="weights",
            target="target",
            config={"timeout_s": 2},
        )
    )
    ray.get(busy)
    told = {finding.party: finding for finding in findings if finding.check == "actors"}
    assert {party: finding.level for party, finding in told.items()} == {
        "engine 0": "yellow",
        "engine 1": "red",
        "trainer 1": "red",
    }
    assert "runs several calls at once" in told["engine 0"].found
    assert "the process of engine 1 is gone" in told["engine 1"].found
    assert "trainer 1 did not answer for 2 s" in told["trainer 1"].found
    assert "An actor must be free" in told["trainer 1"].cure


def test_what_connect_refuses_is_refused(parties: Parties) -> None:
    with pytest.raises(ws.ConfigError, match="engines: expected a list of at least one actor handle"):
        examine(trainers=parties.trainers, engines=[], source="weights", target="target")
