"""Reinforcement learning that works because the weights arrive.

A trainer actor improves SmolLM2-135M-Instruct by a small policy-gradient loop on
answers from two rollout engines, and weightsync brings the engines up to date after
every step. Two curves tell the story: the reward, which rises, and the gap between the
trainer's and the engines' log-probabilities, which stays at rounding noise.

    python -m examples.rl_smollm2                                    # two vLLM engines
    python -m examples.rl_smollm2 --engine torch                     # without vLLM
    python -m examples.rl_smollm2 --break one-reload-per-chunk       # the bug this project is about
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ray
from rich.console import Console

from examples.rl.cluster import Actors, private_ray, start_actors
from examples.rl.live import Progress, stage
from examples.rl.reload_per_chunk import NOTE, OneReloadPerChunk
from examples.rl.report import write_plot, write_summary
from examples.rl.task import QUESTIONS, Group, question_numbers, reward
from examples.rl.updates import UpdateFigures, Updater, WeightsyncUpdater
from examples.rl.verdict import Row, Verdict, judge, judge_corruption
from examples.smollm2 import ModelUnavailableError, model_dir

BREAK = "one-reload-per-chunk"
QUESTIONS_PER_STEP = 4
SAMPLES = 8
LEARNING_RATE = 3e-5


class Questions:
    """The questions as tokens, and answers back as text."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self.prompts = tuple(
            tuple(
                self._tokenizer.apply_chat_template(
                    [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
                )
            )
            for question in QUESTIONS
        )

    def text(self, token_ids: Sequence[int]) -> str:
        """An answer as a reader sees it."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True)).strip()


@dataclass(slots=True)
class Recording:
    """What the loop has seen so far; it survives an interruption."""

    rows: list[Row] = field(default_factory=list)
    answers: dict[str, dict[str, str]] = field(default_factory=dict)
    """Question -> the first and the latest answer to it."""


def run_loop(
    actors: Actors,
    updater: Updater,
    questions: Questions,
    *,
    progress: Progress,
    record: Recording,
    steps: int,
    seed: int,
) -> None:
    """Sample, train, update, *steps* times; then sample once more to see what the last update left."""
    version = 0
    for step in range(steps + 1):
        closing = step == steps
        progress.doing(f"step {step}: two engines sample {QUESTIONS_PER_STEP * SAMPLES} answers with version {version}")
        started = time.perf_counter()
        groups = sample(actors, questions, step=step, seed=seed)
        rollout_s = time.perf_counter() - started
        keep_answers(record, questions, groups, step=step)

        progress.doing(f"step {step}: the trainer " + ("scores them" if closing else "learns from them"))
        trained = ray.get(actors.trainer.step.remote(groups, train=not closing))

        update: UpdateFigures | None = None
        if not closing:
            progress.doing(f"step {step}: the engines are updated")
            update = updater.update()
        samples = [answer for group in groups for answer in group.samples]
        row = Row(
            step=step,
            version=version,
            reward=sum(map(reward, samples)) / len(samples),
            gap=trained.gap.mean(),
            gap_by_engine=trained.gap.by_engine(),
            answer_tokens=sum(len(answer.token_ids) for answer in samples) / len(samples),
            rollout_s=rollout_s,
            train_s=trained.seconds,
            grad_norm=trained.grad_norm,
            update=update,
        )
        record.rows.append(row)
        progress.add(row)
        if update:
            version = update.version


def sample(actors: Actors, questions: Questions, *, step: int, seed: int) -> list[Group]:
    """Have every engine answer its part of the step's questions, all at the same time."""
    prompts = [questions.prompts[number] for number in question_numbers(step, per_step=QUESTIONS_PER_STEP)]
    num_engines = len(actors.engines)
    # Far enough apart that no two answers of a run are drawn with one seed.
    step_seed = (seed * 10_000 + step) * 1_000
    pending = [
        engine.sample.remote(prompts[number::num_engines], num_samples=SAMPLES, seed=step_seed + 100 * number)
        for number, engine in enumerate(actors.engines)
    ]
    return [group for groups in ray.get(pending) for group in groups]


def keep_answers(record: Recording, questions: Questions, groups: Sequence[Group], *, step: int) -> None:
    """Note one answer to each question, so that a reader can see what the policy learned."""
    for group in groups:
        question = QUESTIONS[questions.prompts.index(group.prompt_ids)]
        text = questions.text(group.samples[0].token_ids)
        record.answers.setdefault(question, {"first": text})["last"] = text


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; break mode needs vLLM and, by default, few steps."""
    parser = argparse.ArgumentParser(prog="python -m examples.rl_smollm2", description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, help="training steps (default: 14; 3 with --break)")
    parser.add_argument("--engine", choices=["vllm", "torch"], default="vllm", help="what generates (default: vllm)")
    parser.add_argument("--break", dest="broken", choices=[BREAK], help="update the engines as it was done before")
    parser.add_argument("--out", type=Path, default=Path("runs/rl_smollm2"), help="folder for plot and summary")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="a checkpoint folder of your own instead of SmolLM2")
    options = parser.parse_args(arguments)
    if options.broken and options.engine != "vllm":
        parser.error("--break shows a bug in reloading vLLM: it needs --engine vllm")
    if options.steps is None:
        options.steps = 3 if options.broken else 14
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    return options


def run(options: argparse.Namespace, console: Console, record: Recording) -> None:
    """Start everything, run the loop into *record*, and take everything down."""
    with stage(console, "model folder"):
        folder = options.model or model_dir()
    with private_ray():
        with stage(console, f"Ray, a trainer and two {options.engine} engines"):
            actors = start_actors(options.engine, folder, learning_rate=LEARNING_RATE, seed=options.seed)
            questions = Questions(folder)
        updater: Updater
        if options.broken:
            console.print(NOTE, highlight=False, soft_wrap=True)
            updater = OneReloadPerChunk(actors.trainer, actors.engines)
        else:
            with stage(console, "weightsync session"):
                target = "llm" if options.engine == "vllm" else "model"
                updater = WeightsyncUpdater(actors.trainer, actors.engines, target=target)
        with Progress(console) as progress, updater:
            try:
                run_loop(
                    actors,
                    updater,
                    questions,
                    progress=progress,
                    record=record,
                    steps=options.steps,
                    seed=options.seed,
                )
            except KeyboardInterrupt:
                progress.doing("interrupted: the actors finish what they are at; once more ends them at once")
                raise


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; 0 when it showed what it set out to show, 1 when not, 130 when interrupted."""
    options = parse_args(arguments)
    console = Console()
    options.out.mkdir(parents=True, exist_ok=True)
    record = Recording()
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    settings |= {"learning_rate": LEARNING_RATE, "questions_per_step": QUESTIONS_PER_STEP, "samples": SAMPLES}
    started = time.perf_counter()

    def summary(verdict: Verdict | None) -> Path:
        seconds = time.perf_counter() - started
        return write_summary(
            options.out, rows=record.rows, verdict=verdict, settings=settings, answers=record.answers, seconds=seconds
        )

    try:
        run(options, console, record)
    except ModelUnavailableError as error:
        console.print(f"error: {error}", style="red", highlight=False, markup=False)
        return 1
    except (KeyboardInterrupt, Exception) as error:
        path = summary(None)
        console.print(f"stopped after {len(record.rows)} rows, kept in {path}", highlight=False, soft_wrap=True)
        if not isinstance(error, KeyboardInterrupt):
            raise
        return 130

    verdict = judge_corruption(record.rows) if options.broken else judge(record.rows)
    title = f"{options.steps} updates, " + ("one reload per chunk" if options.broken else "through weightsync")
    plot = write_plot(options.out, rows=record.rows, verdict=verdict, title=title)
    print_end(console, record, verdict, [summary(verdict), plot], seconds=time.perf_counter() - started)
    return 0 if verdict.ok else 1


def print_end(console: Console, record: Recording, verdict: Verdict, files: Sequence[Path], *, seconds: float) -> None:
    """What changed in the answers, what the run shows, and where the files are."""

    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    say("")
    for question, answers in list(record.answers.items())[:2]:
        say(f"{question} first: {answers['first']!r}, last: {answers['last']!r}", "dim")
    for reason in verdict.reasons:
        say(reason)
    say("files: " + ", ".join(map(str, files)))
    say(f"verdict: {'PASS' if verdict.ok else 'FAIL'} ({seconds:.0f} s)", "bold green" if verdict.ok else "bold red")


if __name__ == "__main__":
    sys.exit(main())
