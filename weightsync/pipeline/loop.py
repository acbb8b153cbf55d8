"""The loop: rollouts, step, update."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from weightsync.errors import WeightSyncError
from weightsync.pipeline.config import PipelineConfig
from weightsync.pipeline.display import Display
from weightsync.pipeline.records import Records
from weightsync.pipeline.trainer import Rollout, Verdict
from weightsync.ray_actors.pipeline_fleet import Fleet, RunError, ask, explain
from weightsync.report import UpdateReport

if TYPE_CHECKING:
    from weightsync.ray_actors.connect import WeightSync


class Loop:
    """One run's loop, over actors that have loaded and a weight sync that is connected."""

    def __init__(
        self, config: PipelineConfig, fleet: Fleet, sync: WeightSync, records: Records, display: Display
    ) -> None:
        self._config, self._fleet, self._sync = config, fleet, sync
        self._records, self._display = records, display
        self._versions = dict.fromkeys(range(config.engines.replicas), 0)
        """Engine -> version that it serves. Lost engines are not in it."""
        self._poisoned: set[int] = set()
        self._num_updates = 0

    def run(self) -> Verdict | None:
        """All steps; then, where the trainer has `evaluate`, rollouts of what the last update left.

        Returns:
            What `evaluate` came to, where it says.

        Raises:
            RunError: who failed, and why.
        """
        run = self._config.run
        for step in range(run.steps):
            due = (step + 1) % run.sync_every == 0 or step + 1 == run.steps
            self._step(step, train=True, update=due)
        if ask({"trainer 0": self._fleet.trainers[0].evaluates.remote()})[0]:
            return self._step(run.steps, train=False, update=False)
        return None

    def _step(self, step: int, *, train: bool, update: bool) -> Verdict | None:
        started = time.perf_counter()
        version = max(self._versions.values(), default=0)
        rollouts = self._rollouts(step)
        rollout_s = time.perf_counter() - started
        self._display.doing(f"step {step}: the trainer " + ("learns" if train else "evaluates"))
        calls = {}
        for rank, actor in enumerate(self._fleet.trainers):
            method = actor.step if train else actor.evaluate
            calls[f"trainer {rank}"] = method.remote(step, rollouts)
        answer = ask(calls)[0]
        metrics, verdict = (answer, None) if train else answer
        rewards = [reward for rollout in rollouts for reward in rollout.rewards]
        if rewards:
            metrics = {"reward": sum(rewards) / len(rewards), **metrics}
        seconds = time.perf_counter() - started
        self._records.step(
            {
                "step": step,
                "version": version,
                "trained": train,
                "rollout_s": rollout_s,
                "train_s": seconds - rollout_s,
                "num_rollouts": len(rollouts),
                "metrics": metrics,
            }
        )
        report = self._update(step) if update else None
        self._display.row(step, version, metrics, seconds, report)
        return verdict

    def _rollouts(self, step: int) -> list[Rollout]:
        """The answers to the step's prompts, in their order; each engine answers every n-th."""
        trainer = self._fleet.trainers[0]
        prompts: list[Any] = ask({"trainer 0": trainer.prompts.remote(step)})[0]
        if not prompts:
            return []
        serving = [i for i in self._versions if i not in self._poisoned]
        if not serving:
            raise RunError("engines", "none is left that serves whole weights")
        self._display.doing(f"step {step}: {len(serving)} engines answer {len(prompts)} prompts")
        # Far enough apart that no two answers of a run are drawn with one seed.
        step_seed = (self._config.run.seed * 10_000 + step) * 10**9 % 2**62
        shares = {i: prompts[n :: len(serving)] for n, i in enumerate(serving)}
        calls = {
            f"engine {i}": self._fleet.engines[i].rollout.remote(share, step_seed + 10**6 * i)
            for i, share in shares.items()
            if share
        }
        answered = dict(zip((i for i, share in shares.items() if share), ask(calls), strict=True))
        rollouts: list[Any] = [None] * len(prompts)
        for n, i in enumerate(serving):
            for position, completions in zip(range(n, len(prompts), len(serving)), answered.get(i, ()), strict=True):
                rollouts[position] = Rollout(
                    prompt=prompts[position],
                    completions=completions,
                    rewards=(),
                    engine=i,
                    version=self._versions[i],
                )
        rewarded: list[Rollout] = ask({"trainer 0": trainer.rewarded.remote(rollouts)})[0]
        return rewarded

    def _update(self, step: int) -> UpdateReport:
        self._display.doing(f"step {step}: the engines are updated")
        started = time.perf_counter()
        try:
            with self._display.following(lambda: self._sync.progress()):
                report = self._sync.update()
        except WeightSyncError as error:
            self._records.failure(step, error, seconds=time.perf_counter() - started, why=explain(error))
            raise RunError(f"update after step {step}", error) from error
        self._records.update(step, report)
        self._poisoned = {_number(engine) for engine in report.poisoned}
        for engine in report.lost:
            self._versions.pop(_number(engine), None)
            self._display.say(f"{engine} is lost; the run goes on without it")
        for i in self._versions:
            if i not in self._poisoned:
                self._versions[i] = report.version
        self._num_updates += 1
        every = self._config.run.verify_every
        if every and self._num_updates % every == 0 and not self._poisoned:
            self._verify(step)
        return report

    def _verify(self, step: int) -> None:
        self._display.doing(f"step {step}: the engines are verified")
        started = time.perf_counter()
        try:
            report = self._sync.verify()
        except WeightSyncError as error:
            self._records.failure(step, error, seconds=time.perf_counter() - started, why=explain(error))
            raise RunError(f"verification after step {step}", error) from error
        self._display.say(f"verified: every engine holds version {report.version} ({report.seconds:.2f} s)")


def _number(engine: str) -> int:
    """3 of "engine 3"."""
    return int(engine.split()[1])
