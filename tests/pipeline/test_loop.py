"""The loop over actors that answer at once: who gets which prompts, and what a report changes about that."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from weightsync.errors import EnginePoisonedError, TransportError
from weightsync.pipeline import loop
from weightsync.pipeline.config import EnginesConfig, PipelineConfig, RunConfig, TrainerConfig
from weightsync.pipeline.display import Display
from weightsync.pipeline.records import Records
from weightsync.pipeline.trainer import Rollout
from weightsync.ray_actors.pipeline_fleet import RunError
from weightsync.report import UpdateReport

REPORT = UpdateReport(
    version=1,
    nbytes=8,
    seconds=1.0,
    pause_s=0.0,
    phases={},
    apply="staged",
    transports={},
    ranks=(),
    load=(),
    total_values=4,
)


def method(answer: Callable[..., Any]) -> Any:
    return SimpleNamespace(remote=answer)


class Fake:
    """A pipeline of one trainer and three engines, with no process but this one."""

    def __init__(
        self, out: Path, monkeypatch: pytest.MonkeyPatch, *, steps: int, reports: list[Any], **run: Any
    ) -> None:
        monkeypatch.setattr(loop, "ask", lambda calls: list(calls.values()))
        self.seen: list[list[tuple[Any, int, int]]] = []
        """For each step (prompt, engine, version) of its rollouts."""
        self.seeds: list[int] = []
        self._reports = reports
        self.verified: list[int] = []
        """After how many updates."""
        self.verify_error: Exception | None = None
        trainer = SimpleNamespace(
            prompts=method(lambda step: [10 * step + i for i in range(5)]),
            rewarded=method(lambda rollouts: rollouts),
            step=method(self._step),
            evaluates=method(lambda: False),
        )
        engine = SimpleNamespace(rollout=method(self._rollout))
        fleet: Any = SimpleNamespace(trainers=[trainer], engines=[engine] * 3)
        config = PipelineConfig(
            trainer=TrainerConfig(class_="a:B"),
            engines=EnginesConfig(kind="torch", class_="a:C", replicas=3),
            run=RunConfig(steps=steps, **run),
        )
        sync: Any = SimpleNamespace(update=self._update, verify=self._verify)
        display = Display(Console(quiet=True))
        self.loop = loop.Loop(config, fleet, sync, Records(out, config), display)

    def _step(self, step: int, rollouts: list[Rollout]) -> dict[str, float]:
        self.seen.append([(r.prompt, r.engine, r.version) for r in rollouts])
        assert all(r.completions == (-r.prompt,) for r in rollouts)
        return {}

    def _rollout(self, prompts: list[int], seed: int) -> list[tuple[int, ...]]:
        self.seeds.append(seed)
        return [(-prompt,) for prompt in prompts]

    def _verify(self) -> UpdateReport:
        self.verified.append(self.loop._num_updates)
        if self.verify_error is not None:
            raise self.verify_error
        return REPORT

    def _update(self) -> UpdateReport:
        report = self._reports.pop(0)
        if isinstance(report, Exception):
            raise report
        assert isinstance(report, UpdateReport)
        return report


def test_prompts_keep_their_order_and_seeds_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(tmp_path, monkeypatch, steps=2, reports=[REPORT, REPORT])
    fake.loop.run()
    assert fake.seen[0] == [(0, 0, 0), (1, 1, 0), (2, 2, 0), (3, 0, 0), (4, 1, 0)]
    assert [(prompt, version) for prompt, _, version in fake.seen[1]] == [(10 + i, 1) for i in range(5)]
    assert len(set(fake.seeds)) == len(fake.seeds) == 6


def test_poisoned_engines_rest_until_a_whole_update_and_lost_ones_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned = msgspec.structs.replace(REPORT, poisoned={"engine 0": "broke"})
    lost = msgspec.structs.replace(REPORT, version=2, lost=("engine 2",))
    fake = Fake(tmp_path, monkeypatch, steps=3, reports=[poisoned, lost, REPORT])
    fake.loop.run()
    assert [{engine for _, engine, _ in step} for step in fake.seen] == [{0, 1, 2}, {1, 2}, {0, 1}]
    assert {version for _, _, version in fake.seen[2]} == {2}


def test_without_an_engine_of_whole_weights_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned = msgspec.structs.replace(REPORT, poisoned={f"engine {i}": "broke" for i in range(3)})
    fake = Fake(tmp_path, monkeypatch, steps=2, reports=[poisoned])
    with pytest.raises(RunError, match="engines: none is left that serves whole weights"):
        fake.loop.run()


def test_an_update_that_fails_is_recorded_and_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = TransportError("engine 1 rank 0: its link broke", rank="engine 1 rank 0", phase="transfer")
    fake = Fake(tmp_path, monkeypatch, steps=2, reports=[error])
    with pytest.raises(RunError, match="update after step 0: engine 1 rank 0: its link broke"):
        fake.loop.run()
    (line,) = (tmp_path / "updates.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert (record["ok"], record["step"], record["culprit"]) == (False, 0, "engine 1 rank 0")


def test_engines_are_verified_every_so_many_updates_and_where_one_fails_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake(tmp_path, monkeypatch, steps=5, reports=[REPORT] * 5, verify_every=2)
    fake.loop.run()
    assert fake.verified == [2, 4]

    fake = Fake(tmp_path, monkeypatch, steps=5, reports=[REPORT] * 5, verify_every=3)
    fake.verify_error = EnginePoisonedError("engine 2 rank 0: it held other values", rank="engine 2 rank 0")
    with pytest.raises(RunError, match="verification after step 2: engine 2 rank 0: it held other values"):
        fake.loop.run()
    record = json.loads((tmp_path / "updates.jsonl").read_text().splitlines()[-1])
    assert (record["ok"], record["step"], record["culprit"]) == (False, 2, "engine 2 rank 0")


def test_engines_are_updated_after_the_last_step_where_steps_are_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake(tmp_path, monkeypatch, steps=3, reports=[REPORT], sync_every=5)
    fake.loop.run()
    assert fake.loop._num_updates == 1
