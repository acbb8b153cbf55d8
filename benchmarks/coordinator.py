"""What the coordinator costs: its state machine for up to 10,000 simulated ranks, and the real one for real actors.

    python -m benchmarks.coordinator [--rounds 15] [--out benchmarks/results/coordinator.json]

Simulated parties answer at once with messages encoded beforehand, each after one poll, so what is timed is the
coordinator: encoding calls, decoding answers, deciding. Real actors hold a model of a few bytes, so that nearly all of an
update is agreement.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from rich.console import Console
from rich.table import Table

import weightsync as ws
from benchmarks.common import start_ray, write_record
from weightsync import messages as m
from weightsync.calls import Calls
from weightsync.drive import drive
from weightsync.flight import Flight
from weightsync.identity import Identity
from weightsync.update import UpdateMachine

TRAINERS = 4
SIZES = (10, 100, 1_000, 10_000)
WIDTHS = (1, 8)
ACTORS = (2, 8, 32)
WARM_UP = 3


class InstantFleet:
    """Parties that answer every call at once, and well."""

    def __init__(self, engines: int, width: int) -> None:
        self.trainers = [f"trainer {i}" for i in range(TRAINERS)]
        self.engines = [f"engine {i}" for i in range(engines)]
        self.seconds = 0.0
        """Spent in here, which is not the coordinator's."""
        self._answers: list[tuple[str, int, Sequence[bytes]]] = []
        prepared = m.encode(m.Prepared(version=0, epoch=1, manifest_digest="m", plan_digest="p"))
        vote = m.Vote(nbytes=1, content_digests=dict.fromkeys(range(TRAINERS), 7), peak_staging_bytes=0, seconds=0.0)
        applied = m.Applied(vote=vote, seconds=0.0, reloads=1)
        ok = m.encode(m.Ok())
        pending = m.encode(m.Pending(progress=1, doing="waits for model.norm.weight"))
        of_rank = {m.Prepare: prepared, m.Transfer: pending, m.Poll: m.encode(vote), m.Apply: m.encode(applied)}
        self._of_engine: dict[type, list[bytes]] = {kind: [answer] * width for kind, answer in of_rank.items()}
        self._of_engine[m.Commit] = [ok] * width
        self._of_trainer: list[dict[type, list[bytes]]] = []
        for i in range(TRAINERS):
            sent = m.Sent(nbytes=1, content_digests={i: 7}, changed_values=None, seconds=0.0)
            self._of_trainer.append(
                {m.Prepare: [prepared], m.Transfer: [pending], m.Poll: [m.encode(sent)], m.Commit: [ok]}
            )

    def send(self, party: str, number: int, payload: bytes) -> None:
        started = time.perf_counter()
        kind = type(m.decode_call(payload).request)
        role, _, index = party.partition(" ")
        answers = self._of_trainer[int(index)] if role == "trainer" else self._of_engine
        self._answers.append((party, number, answers[kind]))
        self.seconds += time.perf_counter() - started

    def replies(self, wait_s: float) -> Iterator[tuple[str, int, Sequence[bytes]]]:
        answers, self._answers = self._answers, []
        yield from answers

    def reopen(self, party: str) -> None: ...

    def remove(self, party: str) -> None: ...

    def helpers(self, ranks: Mapping[str, Identity]) -> Mapping[str, str]:
        return dict.fromkeys(ranks, "")

    def process_state(self, identity: Identity) -> str:
        return "running"


def simulated(ranks: int, width: int, rounds: int) -> float:
    """Median seconds that the coordinator spends in one update."""
    found = []
    for _ in range(rounds):
        fleet = InstantFleet(max((ranks - TRAINERS) // width, 1), width)
        calls = Calls(fleet, timeout_s=60)
        machine = UpdateMachine(
            version=1,
            epoch=1,
            manifest_digest="m",
            trainers=fleet.trainers,
            engines=fleet.engines,
            staged=True,
            timeout_s=60,
            plan_digests=dict.fromkeys([*fleet.trainers, *fleet.engines], "p"),
        )
        started = time.perf_counter()
        drive(machine, calls, lambda: None, Flight())
        found.append(time.perf_counter() - started - fleet.seconds)
        assert machine.error is None
        assert len(machine.applied) == len(fleet.engines)
    return statistics.median(found)


class Party:
    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 2)

    def ready(self) -> bool:
        return True


def real(actors: Sequence[Any], rounds: int) -> dict[str, float]:
    """Milliseconds of whole updates of a model of 24 bytes: one trainer, the others engines."""
    with ws.connect(trainers=actors[:1], engines=actors[1:], source="model", target="model") as sync:
        found = []
        for i in range(rounds + WARM_UP):
            started = time.perf_counter()
            sync.update()
            if i >= WARM_UP:
                found.append(1e3 * (time.perf_counter() - started))
    return {"median": statistics.median(found), "min": min(found), "max": max(found)}


def growth(of: Callable[[int], float]) -> float:
    """The exponent of seconds over ranks, fitted from a hundred ranks on: 1 is linear."""
    return float(np.polyfit(np.log(SIZES[1:]), np.log([of(n) for n in SIZES[1:]]), 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/coordinator.json"))
    arguments = parser.parse_args()
    console = Console()

    seconds = {(n, w): simulated(n, w, max(arguments.rounds // 3, 3)) for w in WIDTHS for n in SIZES}
    exponents = {w: growth(lambda n, w=w: seconds[n, w]) for w in WIDTHS}  # type: ignore[misc]
    table = Table("simulated ranks", *(f"{w} rank(s) an engine, ms (µs a rank)" for w in WIDTHS))
    for n in SIZES:
        table.add_row(f"{n:,}", *(f"{1e3 * seconds[n, w]:.2f} ({1e6 * seconds[n, w] / n:.1f})" for w in WIDTHS))
    table.add_row("exponent of the growth, 100 to 10,000", *(f"{exponents[w]:.2f}" for w in WIDTHS))
    console.print(table)

    start_ray()
    actors = [ray.remote(Party).options(num_cpus=0.01).remote() for _ in range(max(ACTORS))]
    ray.get([actor.ready.remote() for actor in actors])
    updates = {n: real(actors[:n], arguments.rounds) for n in ACTORS}
    ray.shutdown()
    table = Table("real actors", "ms an update", "min", "max", "ms a rank")
    for n, found in updates.items():
        table.add_row(str(n), *(f"{found[key]:.1f}" for key in ("median", "min", "max")), f"{found['median'] / n:.2f}")
    console.print(table)

    write_record(
        arguments.out,
        ("weightsync", "torch", "ray"),
        {
            "rounds": arguments.rounds,
            "simulated": [{"ranks": n, "ranks_an_engine": w, "seconds": value} for (n, w), value in seconds.items()],
            "growth_exponent": {str(w): value for w, value in exponents.items()},
            "real_ms": {str(n): found for n, found in updates.items()},
        },
    )
    console.print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
