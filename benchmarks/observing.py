"""What it costs to see an update: flight record, records of a run, metrics, live display.

    python -m benchmarks.observing [--rounds 60] [--out benchmarks/results/observing.json]

One trainer and two engines on a real local Ray, SmolLM2-135M's tensors. Updates that are looked at and updates that are not take
turns. Beside the ratio of the two, which a busy machine blurs, stands the processor time that driver and coordinator took for either,
which it does not, and what the parts took by themselves in the same updates, as a share of the fastest; what the coordinator does for an
attempt's record, which is always on, is timed on messages like theirs.
"""

from __future__ import annotations

import argparse
import os
import pickle
import socket
import statistics
import tempfile
import time
from pathlib import Path

import msgspec
import ray
from rich.console import Console

import weightsync as ws
from benchmarks.common import write_record
from benchmarks.cpu import Engine, Trainer
from weightsync import messages as m
from weightsync.flight import Flight
from weightsync.identity import identify
from weightsync.pipeline.config import EnginesConfig, PipelineConfig, RunConfig, TrainerConfig
from weightsync.pipeline.display import LOOK_S, Display
from weightsync.pipeline.records import Records
from weightsync.ray_actors.watching import Watching
from weightsync.report import LoadSummary
from weightsync.update import UpdateMachine

WARM_UP = 4
PARTS = ("record", "metrics", "run", "display")
METRICS = {"reward": 0.5, "loss": 0.1, "gap": 0.04}


def measured(rounds: int, folder: Path) -> dict[str, list[float]]:
    """Seconds by name, one a round: updates alone, updates that are looked at, and the parts of the looking."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ray.init(
        address="local", num_cpus=4, object_store_memory=10**8, include_dashboard=False, log_to_driver=False, _metrics_export_port=port
    )  # fmt: skip
    trainer = ray.remote(Trainer).remote("272 tensors")
    engines = [ray.remote(Engine).remote("272 tensors") for _ in range(2)]
    ray.get([actor.digest.remote() for actor in (trainer, *engines)])
    config = PipelineConfig(
        trainer=TrainerConfig(class_="a:B"),
        engines=EnginesConfig(kind="torch", class_="a:C", replicas=2),
        run=RunConfig(steps=rounds),
    )
    records = Records(folder / "run", config)
    record, metrics = (
        Watching(ws.SyncConfig(flight_record=str(folder / "record.jsonl"))),
        Watching(ws.SyncConfig(metrics=True)),
    )
    found: dict[str, list[float]] = {
        name: [] for name in ("alone", "looked_at", "alone_cpu", "looked_at_cpu", *PARTS, "look_cpu")
    }
    with (
        open(os.devnull, "w") as nowhere,
        ws.connect(trainers=[trainer], engines=engines, source="model", target="model") as sync,
    ):
        (coordinator,) = filter(is_coordinator, map(int, filter(str.isdigit, os.listdir("/proc"))))

        def cpu_s() -> float:
            return time.process_time() + run_s(coordinator)

        display = Display(Console(file=nowhere, force_terminal=True, width=130))
        for i in range(WARM_UP + rounds):
            ray.get(trainer.change.remote(i))
            seconds = {}
            for name in ("alone", "looked_at") if i % 2 else ("looked_at", "alone"):
                cpu, started = cpu_s(), time.perf_counter()
                if name == "alone":
                    sync.update()
                else:
                    display.doing(f"step {i}: the engines are updated")
                    with display.following(sync.progress):
                        report = sync.update()
                    marks = [time.perf_counter()]
                    record.committed(report)
                    marks.append(time.perf_counter())
                    metrics.committed(report)
                    marks.append(time.perf_counter())
                    records.update(i, report)
                    records.step({"step": i, "version": report.version, "metrics": METRICS, "trained": True})
                    marks.append(time.perf_counter())
                    display.row(i, report.version, METRICS, 1.0, report)
                    marks.append(time.perf_counter())
                    for part, begin, end in zip(PARTS, marks, marks[1:], strict=False):
                        seconds[part] = end - begin
                seconds[name] = time.perf_counter() - started
                seconds[f"{name}_cpu"] = cpu_s() - cpu
            if i >= WARM_UP:
                for name, value in seconds.items():
                    found[name].append(value)
        display.end()
        for _ in range(50):  # the live display's look at the coordinator; its process does as much again
            began = time.process_time()
            sync.progress()
            found["look_cpu"].append(time.process_time() - began)
    ray.shutdown()
    return found


def is_coordinator(pid: int) -> bool:
    try:
        return b"ray::Coordinator" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return False


def run_s(pid: int) -> float:
    """Seconds that the threads of a process have run, those that have ended left out."""
    found = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found += int((task / "schedstat").read_text().split()[0])
        except OSError:  # it has ended
            continue
    return found / 1e9


def flight_s(num_engines: int, polls: int) -> float:
    """Seconds for one attempt's record: the coordinator's notes at each message, making it, and bringing it to the driver."""
    here = identify()
    opened = {
        f"engine {i}": [
            m.ReceiverOpened(
                identity=here, rank=0, load=LoadSummary(rank=f"engine {i} rank 0", num_groups=120), order=(), version=1
            )
        ]
        for i in range(num_engines)
    }
    parties = ["trainer 0", *opened]
    identities = {"trainer 0": here} | {ranks[0].load.rank: here for ranks in opened.values()}
    machine = UpdateMachine(
        version=2, epoch=1, manifest_digest="m", trainers=parties[:1], engines=list(opened), staged=True, timeout_s=9, plan_digests={}
    )  # fmt: skip
    vote = m.Vote(nbytes=1, content_digests={1: 1}, peak_staging_bytes=0, began=time.monotonic(), seconds=0.01)
    asked: list[tuple[m.Request, m.Reply]] = [
        (m.Prepare(version=2, staged=True), m.Prepared(version=1, epoch=1, manifest_digest="m", plan_digest="p", began=1.0)),
        (m.Transfer(version=2), m.Pending(progress=1)),
        *[(m.Poll(), m.Pending(progress=i, groups=i)) for i in range(polls)],
        (m.Poll(), vote),
        (m.Apply(version=2), m.Applied(vote=vote, began=1.0, seconds=0.01, reloads=1)),
        (m.Commit(version=2), m.Ok(began=1.0)),
    ]  # fmt: skip
    times = []
    for _ in range(200):
        started = time.perf_counter()
        flight = Flight()
        flight.begin(
            machine, epoch=1, manifest_digest="m", nbytes=1, links=(), trainers=parties[:1], engines=opened, identities=identities
        )  # fmt: skip
        for request, reply in asked:
            for party in parties:
                flight.sent(party, request)
                flight.answered(party, [reply])
        pickle.loads(pickle.dumps(flight.record()))  # it goes to the driver with the report
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def quartile(values: list[float]) -> float:
    """The lowest: other work on the machine only ever adds."""
    return statistics.quantiles(values, n=4)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/observing.json"))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measured(asked.rounds, Path(folder))
    ms = {name: round(1e3 * statistics.median(values), 4) for name, values in found.items()}
    ms["flight"] = round(1e3 * flight_s(2, 10), 4)
    fastest_ms = 1e3 * min(*found["alone"], *found["looked_at"])
    result = {
        "rounds": asked.rounds,
        "median_ms": ms,
        "min_ms": {name: round(1e3 * min(found[name]), 4) for name in ("alone", "looked_at")},
        "looked_at_over_alone": round(ms["looked_at"] / ms["alone"], 4),
        "looked_at_over_alone_quartile": round(quartile(found["looked_at"]) / quartile(found["alone"]), 4),
        "cpu_over_alone": round((ms["looked_at_cpu"] - ms["alone_cpu"]) / ms["alone"], 4),
        "median_of_ratios": round(
            statistics.median(a / b for a, b in zip(found["looked_at"], found["alone"], strict=True)), 4
        ),
        "parts_over_fastest": round(sum(ms[name] for name in (*PARTS, "flight")) / fastest_ms, 5),
        "look_share": round(2 * statistics.median(found["look_cpu"]) / LOOK_S, 5),
    }
    print(msgspec.json.format(msgspec.json.encode(result), indent=1).decode())
    write_record(asked.out, ("weightsync", "torch", "ray", "rich", "msgspec"), result)


if __name__ == "__main__":
    main()
