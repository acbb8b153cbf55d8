"""About how long an update will take, from copies that a probe has timed. An estimate, and said to be one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from weightsync.doctor.evidence import Evidence, Process
from weightsync.doctor.facts import Rates
from weightsync.doctor.finding import Check, Finding, size

_CALLS = 8
"""Prepare, transfer, polls, apply, commit: answers that are waited for, one after another."""
_GLOO_COPIES = 20.0
"""A gloo broadcast on one host against a copy of the same bytes: 463 against 22 ms for 269 MB (benchmarks/results/cpu.json)."""


def seconds_of(e: Evidence) -> float | None:
    """Seconds of one update without an engine's own reload; None where nothing was measured."""
    sender, receiver = _rates(e.trainers), _rates(e.engines)
    if e.manifest is None or sender is None or receiver is None or not e.owned:
        return None
    senders: dict[str, float] = defaultdict(float)
    receivers: dict[str, float] = defaultdict(float)
    for (trainer, engine), transport in e.carriers.items():
        nbytes = e.owned.get(trainer, 0)
        if transport == "broadcast":
            senders[trainer] = (
                nbytes * _GLOO_COPIES / sender.copy if not e.processes[trainer].identity.gpu else nbytes / sender.copy
            )
            receivers[engine] += nbytes / receiver.copy
        else:
            in_place = transport == "cuda_ipc" or e.processes[trainer].facts.shares_memory
            senders[trainer] = nbytes / (sender.digest if in_place else sender.copy_and_digest)
            receivers[engine] += nbytes / receiver.copy_and_digest
    answers = _CALLS * max((actor.answered_s for actor in e.actors.values()), default=0.0)
    return _side_by_side(e, senders) + _side_by_side(e, receivers) + answers


def update(e: Evidence) -> Iterator[Finding]:
    check, seconds = Check("estimate", "seconds an update"), seconds_of(e)
    if seconds is None or e.manifest is None:
        return
    copied = _rates(e.engines)
    assert copied is not None
    notes = [f"copies at {copied.copy / 1e9:.1f} GB/s, measured here"]
    if any(process.facts.libraries.get("vllm") and process.facts.engine for process in e.engines.values()):
        notes.append("vLLM's own reload, in the first update at least, comes on top")
    if len({process.identity.machine for process in e.processes.values()}) > 1 or "broadcast" in e.carriers.values():
        notes.append("the network is not measured")
    found = f"about {seconds:.2g} s for {size(e.manifest.nbytes)}; an estimate ({'; '.join(notes)})"
    if seconds > e.config.timeout_s / 2:
        yield check.yellow(
            found,
            expected=f"much less than sync.timeout_s, {e.config.timeout_s:g} s",
            cure=f"set sync.timeout_s: {4 * seconds:.0f} or more",
        )
    else:
        yield check.green(found)


def _rates(ranks: Mapping[str, Process]) -> Rates | None:
    return next((process.facts.rates for process in ranks.values() if process.facts.rates is not None), None)


def _side_by_side(e: Evidence, seconds: dict[str, float]) -> float:
    """Ranks work at the same time, as far as a machine has CPUs for them; a GPU's are its own."""
    by_machine: dict[str, list[str]] = defaultdict(list)
    for rank in seconds:
        identity = e.processes[rank].identity
        by_machine[identity.gpu or identity.machine].append(rank)
    totals = []
    for ranks in by_machine.values():
        at_once = 1 if e.processes[ranks[0]].identity.gpu else e.processes[ranks[0]].facts.cpus
        totals.append(max(max(seconds[r] for r in ranks), sum(seconds[r] for r in ranks) / max(at_once, 1)))
    return max(totals, default=0.0)
