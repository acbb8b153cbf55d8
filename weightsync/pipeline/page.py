"""The report of a run: one HTML page that needs no network, no script, and nothing beside it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Literal

import jinja2
from markupsafe import Markup

from weightsync.pipeline.anatomy import PHASES, anatomy, named
from weightsync.pipeline.charts import Bar, bar_chart, line_chart
from weightsync.pipeline.numbers import percent, short, size, speed, took, when, whole
from weightsync.pipeline.past import Past, StepLine, UpdateLine

_MAX_ROWS, _MAX_FAILURES = 200, 50
_COLUMNS = ("step", "version", "time", "pause", "GB/s", *PHASES[:5], "changed", "transport", "notes")


@dataclass(frozen=True, slots=True)
class _Figure:
    title: str
    caption: str
    svg: Markup
    legend: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Section:
    title: str
    figures: list[_Figure]


@dataclass(frozen=True, slots=True)
class _Outcome:
    kind: Literal["good", "bad", "open"]
    text: str


@dataclass(frozen=True, slots=True)
class _Tile:
    name: str
    value: str


@dataclass(frozen=True, slots=True)
class _Failure:
    title: str
    text: str
    culprit: str | None = None
    phase: str | None = None
    mild: bool = False
    """The run went on."""


def page(past: Past) -> str:
    """The page's text. Whatever comes from the records is escaped."""
    updates = past.updates
    return _template().render(
        past=past,
        phases=PHASES,
        outcome=_outcome(past),
        reasons=past.run.reasons if past.run else (),
        facts=_facts(past),
        tiles=_tiles(past),
        failures=list(_failures(past)),
        sections=[_Section("Updates over time", _update_figures(updates)), _Section("Training", _step_figures(past))],
        anatomy=anatomy(updates),
        columns=_COLUMNS,
        rows=[_row(update) for update in updates[-_MAX_ROWS:]],
        left_out=max(len(updates) - _MAX_ROWS, 0),
        footer=f"weightsync report, written {when(time.time())}",
    )


@cache
def _template() -> jinja2.Template:
    source = Path(__file__).with_name("page.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(source)


# ---- in words -------------------------------------------------------------------------------------------------------


def _outcome(past: Past) -> _Outcome:
    run = past.run
    if run is None:
        failed = sum(not update.ok for update in past.updates)
        return _Outcome("bad" if failed else "good", f"{failed} of {len(past.updates)} updates failed")
    if run.ended is None:
        return _Outcome("open", "no end is recorded: the run goes on, or was killed")
    lasted = took(run.ended - run.started)
    match run.exit_code:
        case 0:
            return _Outcome("good", f"finished in {lasted}")
        case 130 | 143:
            return _Outcome("open", f"after {lasted}: {run.last_line}")
        case code:
            return _Outcome("bad", f"failed after {lasted}, exit code {code}: {run.last_line.removeprefix('error: ')}")


def _facts(past: Past) -> list[str]:
    run = past.run
    if run is None:
        return []
    facts = [f"began {when(run.started)}", *([run.host] if run.host else []), *([f"job {run.job}"] if run.job else [])]
    return facts + [f"{name} {version}" for name, version in run.versions.items()]


def _tiles(past: Past) -> list[_Tile]:
    done = [update for update in past.updates if update.ok]
    tiles = []
    if past.steps:
        tiles.append(_Tile("steps trained", str(sum(step.trained for step in past.steps))))
    tiles.append(_Tile("last version", str(done[-1].version) if done else "none"))
    tiles.append(_Tile("updates failed", str(len(past.updates) - len(done))))
    if done:
        tiles += [
            _Tile("time of an update, median", took(median(update.seconds for update in done))),
            _Tile("engines paused in it, median", took(median(update.pause_s for update in done))),
            _Tile("throughput, median", speed(median(update.gb_per_s for update in done))),
            _Tile("model", size(done[-1].nbytes)),
        ]
        if (wall := _wall(past)) > 0:
            tiles.append(_Tile("of all time paused", percent(sum(update.pause_s for update in done) / wall)))
    rewards = [value for step in past.steps if (value := step.metrics.get("reward")) is not None]
    if rewards:
        tiles.append(_Tile("reward, first and last", f"{short(rewards[0])} → {short(rewards[-1])}"))
    return tiles


def _wall(past: Past) -> float:
    """How long the loop has lasted."""
    starts = [step.time - step.train_s - step.rollout_s for step in past.steps]
    starts += [attempt.started for update in past.updates for attempt in update.attempts]
    ends = [step.time for step in past.steps] + [update.time for update in past.updates]
    return max(ends) - min(starts) if starts and ends else 0.0


def _failures(past: Past) -> Iterable[_Failure]:
    """The newest first."""
    run = past.run
    told = 0
    if run is not None and run.exit_code == 1 and all(update.ok for update in past.updates):
        yield _Failure("The run failed", run.last_line.removeprefix("error: "))
    for update in reversed(past.updates):
        if told >= _MAX_FAILURES:
            yield _Failure("More", "earlier failures are in the records", mild=True)
            return
        if not update.ok:
            told += 1
            yield _Failure(
                f"{named(update)} failed: {update.error}", update.message or "", update.culprit, update.phase
            )
        retried = [attempt for attempt in update.attempts if attempt.error is not None]
        for attempt in retried if update.ok else retried[:-1]:
            told += 1
            title = f"{named(update)}: an attempt failed and was made again: {attempt.error}"
            yield _Failure(title, attempt.message or "", attempt.culprit, attempt.phase, mild=True)
        for engine, why in update.poisoned.items():
            told += 1
            yield _Failure(f"{named(update)}: {engine} was poisoned", why, engine)
        for engine in update.lost:
            told += 1
            yield _Failure(f"{named(update)}: {engine} was lost; the others went on", "", engine, mild=True)


# ---- in charts ------------------------------------------------------------------------------------------------------


def _update_figures(updates: Sequence[UpdateLine]) -> list[_Figure]:
    bars: list[Bar] = []
    kinds: dict[str, None] = {}
    for i, update in enumerate(updates):
        parts = _phases(update)
        kinds |= dict.fromkeys(parts)
        told = ", ".join(f"{phase} {took(seconds)}" for phase, seconds in parts.items())
        outcome = f"version {update.version}" if update.ok else f"failed ({update.error})"
        title = f"{named(update)}: {outcome}, {took(update.seconds)}: {told}"
        label = f"step {update.step}" if update.step is not None else f"update {i + 1}"
        bars.append(Bar(label, parts, not update.ok, title))
    done = [(update.step if update.step is not None else i, update) for i, update in enumerate(updates) if update.ok]
    phases = bar_chart(bars, name="time by phase", tell=took)
    legend = tuple(phase for phase in PHASES if phase in kinds)
    shares = [(step, update.pause_s / update.seconds if update.seconds else None) for step, update in done]
    speeds = [(step, update.gb_per_s) for step, update in done]
    figures = [
        _Figure("Update time by phase", "each bar an update; ✕ failed", phases, legend),
        _line("Pause share", "of an update's time in which engines did not generate", shares, percent),
        _line("Throughput", "model bytes over the whole update's time", speeds, speed),
    ]
    changed = [
        (step, update.changed_values / update.total_values)
        for step, update in done
        if update.changed_values is not None and update.total_values
    ]
    figures.append(_line("Values changed", "by the training between two updates", changed, percent))
    return [figure for figure in figures if figure.svg]


def _phases(update: UpdateLine) -> dict[str, float]:
    """Seconds by phase, of all attempts together."""
    seconds: dict[str, float] = {}
    for attempt in update.attempts:
        for span in attempt.spans:
            if span.rank == "coordinator" and span.phase in PHASES:
                seconds[span.phase] = seconds.get(span.phase, 0.0) + span.seconds
    found = seconds or update.phases
    return {phase: found[phase] for phase in PHASES if phase in found}


def _step_figures(past: Past) -> list[_Figure]:
    names = dict.fromkeys(name for step in past.steps for name in step.metrics)
    ordered = sorted(names, key=lambda name: name != "reward")  # the reward first, the others as they are
    figures = [
        _line(name, "by step", [(step.step, step.metrics.get(name)) for step in past.steps], short) for name in ordered
    ]
    figures.insert(
        1 if "reward" in names else 0,
        _line("Staleness", "training steps by which the sampled weights lay behind", _staleness(past), whole),
    )
    for title, seconds in (
        ("Rollouts", [(step.step, step.rollout_s) for step in past.steps if step.num_rollouts]),
        ("Training", [(step.step, step.train_s) for step in past.steps]),
    ):
        figures.append(_line(f"{title}, time", "of a step", seconds, took))
    return [figure for figure in figures if figure.svg]


def _staleness(past: Past) -> list[tuple[int, float | None]]:
    """Steps trained before the step, less those that the weights had that answered."""
    trained = {0: 0} | {
        update.version: update.step + 1
        for update in past.updates
        if update.version is not None and update.step is not None
    }
    return [(step.step, _behind(step, trained)) for step in past.steps if step.num_rollouts]


def _behind(step: StepLine, trained: dict[int, int]) -> float | None:
    return float(step.step - trained[step.version]) if step.version in trained else None


def _line(title: str, caption: str, values: Sequence[tuple[int, float | None]], tell: Any) -> _Figure:
    return _Figure(title, caption, line_chart(values, name=title, tell=tell) if values else Markup(""))


# ---- the table ------------------------------------------------------------------------------------------------------


def _row(update: UpdateLine) -> list[str]:
    notes = [f"failed: {update.error} ({update.culprit or 'no culprit known'})"] if not update.ok else []
    notes += [f"{len(update.failed_attempts)} attempts failed before"] if update.failed_attempts else []
    for what, engines in (("poisoned", update.poisoned), ("lost", update.lost), ("joined", update.joined)):
        notes += [f"{what}: {', '.join(engines)}"] if engines else []
    phases = _phases(update)
    changed = update.changed_values
    return [
        "-" if update.step is None else str(update.step),
        "-" if update.version is None else str(update.version),
        took(update.seconds),
        took(update.pause_s) if update.ok else "-",
        short(update.gb_per_s) if update.ok else "-",
        *(took(phases[phase]) if phase in phases else "-" for phase in PHASES[:5]),
        "-" if changed is None or not update.total_values else percent(changed / update.total_values),
        ", ".join(sorted({*update.transports.values()})) or "-",
        "; ".join(notes),
    ]
