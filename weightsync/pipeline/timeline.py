"""A run as a timeline in Chrome's trace event format, which ui.perfetto.dev and chrome://tracing open.

One track a rank, one for the loop, one for the coordinator, one for the pauses of each engine; phases are slices. The
format: "Trace Event Format", catapult-project; times in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from weightsync.pipeline.past import Past, StepLine, UpdateLine
from weightsync.report import Attempt, Span

Event = dict[str, Any]
_PID = 1
_COORDINATOR, _LOOP = "coordinator", "loop"


def timeline(past: Past, *, last: int = 0) -> dict[str, Any]:
    """The trace, as JSON has it; *last* keeps so many updates, 0 all."""
    updates = past.updates[-last:]
    zero = _start(updates, past.steps)
    steps = past.steps
    if last and len(updates) < len(past.updates):  # what was before them is left out, too
        zero = _start(updates, ())
        steps = tuple(step for step in steps if step.time - step.train_s - step.rollout_s >= zero)
        zero = _start(updates, steps)
    tids = {track: i for i, track in enumerate(_tracks(updates, steps))}
    events = list(_named(past.name, tids))
    for step in steps:
        events += _step_events(step, zero, tids[_LOOP])
    for update in updates:
        for i, attempt in enumerate(update.attempts):
            events += _attempt_events(update, i, attempt, zero, tids)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"run": past.name, "unix_time_at_zero": zero}}


def _start(updates: Iterable[UpdateLine], steps: Iterable[StepLine]) -> float:
    starts = [attempt.started for update in updates for attempt in update.attempts]
    starts += [step.time - step.train_s - step.rollout_s for step in steps]
    return min(starts, default=0.0)


def _tracks(updates: Iterable[UpdateLine], steps: Iterable[StepLine]) -> list[str]:
    """In the order in which they are shown."""
    seen = dict.fromkeys(_track(span) for update in updates for a in update.attempts for span in a.spans)
    seen.pop(_COORDINATOR, None)
    ranks = sorted(seen, key=lambda track: (track.startswith("engine"), [int(w) for w in track.split() if w.isdigit()]))
    return [*([_LOOP] if steps else []), _COORDINATOR, *ranks]


def _track(span: Span) -> str:
    return f"{span.rank} paused" if span.phase == "pause" else span.rank


def _named(name: str, tids: dict[str, int]) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": _PID, "tid": 0, "args": {"name": f"weightsync {name}"}}
    for track, tid in tids.items():
        yield {"ph": "M", "name": "thread_name", "pid": _PID, "tid": tid, "args": {"name": track}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": _PID, "tid": tid, "args": {"sort_index": tid}}


def _step_events(step: StepLine, zero: float, tid: int) -> Iterator[Event]:
    trained = step.time - step.train_s - zero
    args = {"step": step.step, "version": step.version, "rollouts": step.num_rollouts}
    yield _slice("rollouts", "loop", trained - step.rollout_s, step.rollout_s, tid, args)
    name = "train" if step.trained else "evaluate"
    yield _slice(name, "loop", trained, step.train_s, tid, {"step": step.step, **step.metrics})


def _attempt_events(
    update: UpdateLine, number: int, attempt: Attempt, zero: float, tids: dict[str, int]
) -> Iterator[Event]:
    start = attempt.started - zero
    args: dict[str, Any] = {"version": attempt.version, "step": update.step, "attempt": number + 1}
    yield _slice(
        f"update to {attempt.version}" if attempt.version is not None else "update",
        "update",
        start,
        attempt.seconds,
        tids[_COORDINATOR],
        {**args, "epoch": attempt.epoch, "manifest": attempt.manifest_digest, "error": attempt.message},
    )
    for span in attempt.spans:
        told = {**args, **_moved(attempt, span)}
        if clock := attempt.clocks.get(span.rank):
            told |= {"clock_offset_s": clock.offset_s, "clock_error_s": clock.error_s}
        name = span.phase if span.ended else f"{span.phase} (failed)"
        yield _slice(name, span.phase, start + span.start_s, span.seconds, tids[_track(span)], told)
    if attempt.error is not None:
        yield {
            "ph": "i",
            "s": "g",
            "name": f"{attempt.error}: {attempt.culprit or 'unknown culprit'}",
            "cat": "failure",
            "ts": _us(start + attempt.seconds),
            "pid": _PID,
            "tid": tids[_COORDINATOR],
            "args": {**args, "phase": attempt.phase, "message": attempt.message},
        }


def _moved(attempt: Attempt, span: Span) -> dict[str, Any]:
    """Bytes, speed and transports of a rank's transfer."""
    if span.phase != "transfer":
        return {}
    links = [link for link in attempt.links if span.rank == link.sender or span.rank in link.receivers]
    told: dict[str, Any] = {"transports": sorted({link.transport for link in links or attempt.links})}
    told["links"] = [f"{link.sender} -> {len(link.receivers)} ranks: {link.nbytes} bytes" for link in links]
    if span.nbytes:
        told |= {"nbytes": span.nbytes, "gb_per_s": span.nbytes / span.seconds / 1e9 if span.seconds else 0.0}
    return told


def _slice(name: str, kind: str, start_s: float, seconds: float, tid: int, args: dict[str, Any]) -> Event:
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "ts": _us(start_s),
        "dur": _us(max(seconds, 0.0)),
        "pid": _PID,
        "tid": tid,
        "args": args,
    }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
