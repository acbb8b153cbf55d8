"""`weightsync doctor FILE.yaml`: start a pipeline as `run` does, look at it, end it; no update is made."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import msgspec
from rich.console import Console

from weightsync.doctor.diagnosis import diagnose
from weightsync.doctor.evidence import Evidence
from weightsync.doctor.finding import Check, Finding, exit_code
from weightsync.doctor.rendering import as_json, show
from weightsync.pipeline.config import PipelineConfig
from weightsync.pipeline.display import Display
from weightsync.pipeline.starting import processes, started
from weightsync.pipeline.stopping import Stopping
from weightsync.ray_actors.pipeline_fleet import Fleet, RunError, ask


def doctor(config: PipelineConfig, *, json: bool) -> int:
    """0 where nothing is red, else 1; 130 and 143 when stopped. What it is at goes to stderr, findings to stdout.

    However it ends, the actors are gone when it returns, with Ray if it was ours.
    """
    display = Display(Console(stderr=True))
    with Stopping() as stopping:
        try:
            findings = look_at(config, display, stopping)
        except KeyboardInterrupt:
            name = stopping.signal.name if stopping.signal else "SIGINT"
            print(f"stopped by {name} at {display.at}; the actors are gone", file=sys.stderr, flush=True)
            return stopping.exit_code
    if json:
        print(as_json(findings))
    else:
        show(findings, Console())
    return exit_code(findings)


def look_at(config: PipelineConfig, display: Display, stopping: Stopping) -> list[Finding]:
    """Start it, look, end it. A start that fails is a finding."""
    findings: list[Finding] = []
    begun = time.perf_counter()
    try:
        with started(config, display, stopping) as fleet:
            lasted = time.perf_counter() - begun
            findings.append(Check("start", "processes").green(f"{processes(config)}, in {lasted:.1f} s"))
            with display.stage("looking at them"):
                findings += _examine(config, fleet)
    except RunError as error:
        findings.append(failed_start(error))
    return findings


def _examine(config: PipelineConfig, fleet: Fleet) -> list[Finding]:
    from weightsync.ray_actors.doctor import evidence_of

    evidence = evidence_of(fleet.trainers, fleet.engines, "user.weights", "target", config.sync)
    pairs = tuple((f"trainer {i}", f"engine {i}") for i in range(config.engines.replicas))
    if config.engines.placement == "colocated":
        evidence = msgspec.structs.replace(evidence, colocated=pairs)
    return [*_rollouts(config, fleet, evidence), *diagnose(evidence)]


def _rollouts(config: PipelineConfig, fleet: Fleet, evidence: Evidence) -> list[Finding]:
    """Whether the first step will get the answers that its trainer asks for."""
    check = Check("start", "rollouts")
    if any(trouble.step == "reach" for trouble in evidence.troubles):
        return []
    asks = ask({"trainer 0": fleet.trainers[0].asks.remote()})[0]
    answers = ask({f"engine {i}": engine.answers.remote() for i, engine in enumerate(fleet.engines)})
    if asks and not all(answers):
        return [
            check.red(
                "the trainer has prompts, and the engines have no method rollout(prompts, *, seed)",
                party="engines",
                expected="engines that answer",
                cure="add rollout to engines.class, or remove prompts from the trainer",
            )
        ]
    return [check.green("the trainer asks, the engines can answer" if asks else "none: the trainer has no prompts")]


def failed_start(error: RunError) -> Finding:
    """A start that failed, and what to do about it."""
    cure = next(cure for fits, cure in _CURES if fits(error))
    party = "" if error.who in ("Ray", "model.make") else error.who
    return Check("start", error.who).red(error.why, party=party, expected="all processes up", cure=cure)


def _says(*texts: str) -> Callable[[RunError], bool]:
    return lambda error: any(text in error.why for text in texts)


_CURES: tuple[tuple[Callable[[RunError], bool], str], ...] = (
    (
        _says("no room for", "this machine has"),
        "lower trainer.ranks, engines.replicas, or resources.num_cpus and num_gpus; or add nodes to the cluster",
    ),
    (_says("cannot connect"), "start the cluster, or unset RAY_ADDRESS so that a local Ray is started"),
    (
        _says("out of memory", "OutOfMemory", "Free memory on device"),
        "free GPU memory, or lower engines.arguments.gpu_memory_utilization or max_model_len; on the CPU, take a smaller model",
    ),
    (
        _says("ModuleNotFoundError", "ImportError"),
        "install it in the environment of trainers and engines, or ship it with Ray's working_dir",
    ),
    (
        _says("its process is gone"),
        "look into Ray's logs (run.log_actors=true shows what it printed); often it ran out of memory",
    ),
    (
        lambda error: error.who == "Ray",
        "look into Ray's logs, in /tmp/ray/session_latest/logs",
    ),
    (
        lambda error: error.who == "model.make",
        "mend the function that model.make names, or model.arguments",
    ),
    (
        lambda error: error.who.startswith("trainer"),
        "mend what trainer.class does when it is made, or trainer.arguments; run.log_actors=true shows what it prints",
    ),
    (
        lambda error: True,
        "mend what the engine does when it is made, or engines.arguments; run.log_actors=true shows what it prints",
    ),
)
"""Whether it fits -> the cure; the first that fits."""
