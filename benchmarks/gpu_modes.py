"""One mode of `benchmarks.onegpu`: rounds, what is compared after each, and weightsync with and without Ray."""

from __future__ import annotations

import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import weightsync as ws
from benchmarks.gpu_party import Party
from benchmarks.gpu_peers import PEERS, WAIT_S, Remote, Sync, Timing
from weightsync import messages as m
from weightsync.process import process_state
from weightsync.report import UpdateReport
from weightsync.sender import SenderRank
from weightsync.session import Session
from weightsync.testing.local import LocalFleet

Ask = Callable[..., Any]
"""ask("trainer" or "engine", name of a method of `Party`, its arguments)."""
Result = dict[str, Any]

VARIANTS: dict[str, dict[str, Any]] = {
    f"{'verified' if digest else 'raw'}-{apply}": {"digest": digest, "apply": apply}
    for digest in (True, False)
    for apply in ("streaming", "staged")
}
WAYS = {
    "ours": "weightsync",
    "ray": "weightsync through Ray, end to end",
    "nccl": "weightsync over NCCL",
}
NAMES = [*PEERS, *(f"{way}-{name}" for way in WAYS for name in VARIANTS)]
SLOW_ROUNDS = 3
EXIT_S = 20.0
"""Bound of the wait for the end of a process."""


@dataclass(frozen=True, slots=True)
class Asked:
    size: str
    device: str
    """The trainer's."""
    engine_device: str
    rounds: int


def label(name: str) -> str:
    if name in PEERS:
        return PEERS[name].label
    way, _, variant = name.partition("-")
    return f"{WAYS[way]}, {variant.replace('-', ', ')}"


def measure(
    ask: Ask, start: Callable[[], AbstractContextManager[Sync]], rounds: int, *, warm: bool = True, slow: bool = False
) -> Result:
    """Sync a first time, then *rounds* times that count.

    Args:
        warm: load what computes digests before memory is looked at; ours does so itself, in its first update.
        slow: sample memory in every round.
    """
    if warm:
        ask("trainer", "digests")
        ask("engine", "digests")
    ask("engine", "reset")
    ask("trainer", "reset")
    used = ask("trainer", "used")
    timings: list[Timing] = []
    last = rounds if slow else rounds + 1
    began = time.perf_counter()
    with start() as sync:
        setup_s = time.perf_counter() - began
        for i in range(last + 1):
            ask("engine", "before", False, False)
            ask("trainer", "before", True, slow or i in (0, last))
            timings.append(sync())
            check(ask, exact=i in (0, last))
    peak, extra = ask("trainer", "memory")
    counted = timings[1 : rounds + 1]
    return {
        "seconds": [timing["seconds"] for timing in counted],
        "setup_s": setup_s,
        "first_s": timings[0]["seconds"],
        "first": timings[0],
        "median": {key: statistics.median(t[key] for t in counted) for key in counted[0]},
        "used_before_bytes": used,
        "extra_device_bytes": peak - used,
        "extra_torch_bytes": {"trainer": extra, "engine": ask("engine", "memory")[1]},
        "rounds_compared": last + 1,
        "about": ask("trainer", "about"),
    }


def check(ask: Ask, *, exact: bool) -> None:
    """Raises AssertionError where the engine does not hold the trainer's bits."""
    sent, held = ask("trainer", "after"), ask("engine", "after")
    if sent != held:
        raise AssertionError(f"{sum(map(int.__ne__, sent, held))} of {len(sent)} tensors differ from what was sent")
    if exact and (names := ask("trainer", "differing", ask("engine", "lend"))):
        raise AssertionError(f"{len(names)} tensors differ from what was sent though their digests do not: {names[:3]}")


def timing_of(report: UpdateReport, whole: float) -> Timing:
    data_path = report.phases["transfer"] + report.phases.get("apply", 0.0)
    return {"data path": data_path, "update": whole, **report.phases}


def config_of(name: str, device: str) -> ws.SyncConfig:
    way, _, variant = name.partition("-")
    transport = "broadcast" if way == "nccl" else "shared_memory" if device == "cpu" else "cuda_ipc"
    return ws.SyncConfig(**VARIANTS[variant], transport=transport, timeout_s=WAIT_S / 2)


@contextmanager
def ours(trainer: Party, engine: Remote, config: ws.SyncConfig) -> Iterator[Sync]:
    """A whole session in the trainer's process, whose engine answers over the pipe."""
    sender = SenderRank(0, lambda: trainer.model)
    fleet = LocalFleet(
        [lambda payload: [m.answer(sender.handle, payload)]], [lambda payload: engine.ask("handle", payload)]
    )
    session = Session(fleet, config)
    session.open()

    def sync() -> Timing:
        started = time.perf_counter()
        report = session.update()
        timing = timing_of(report, time.perf_counter() - started)
        return {"seconds": timing.pop("data path"), **timing}

    yield sync
    session.close()
    fleet.close()


def run_local(name: str, asked: Asked, results: Connection, engine_end: Connection) -> None:
    """The trainer's process: one mode."""

    def run() -> Result:
        remote = Remote(engine_end)
        peer = PEERS.get(name)
        trainer = Party(asked.size, asked.device, 1, peer is not None and peer.blocks[0])
        remote.result()  # the engine's model is there

        def ask(who: str, method: str, *arguments: Any) -> Any:
            return getattr(trainer, method)(*arguments) if who == "trainer" else remote.ask(method, *arguments)

        if peer is not None:
            rounds = min(asked.rounds, SLOW_ROUNDS) if peer.slow else asked.rounds
            return measure(ask, lambda: peer.start(trainer, remote), rounds, slow=peer.slow)
        return measure(ask, lambda: ours(trainer, remote, config_of(name, asked.device)), asked.rounds, warm=False)

    results.send(attempt(run))


def run_ray(names: Sequence[str], asked: Asked, results: Connection) -> None:
    """Ray's driver: modes one after the other, each with new actors."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    on_gpu = asked.device != "cpu"
    ray.init(
        address="local",
        num_cpus=8,
        num_gpus=int(on_gpu),
        object_store_memory=5 * 10**8,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )
    # An actor without a GPU of its own sees all of them.
    shared = on_gpu and asked.device == asked.engine_device
    start = ray.remote(Party).options(num_cpus=1, num_gpus=0.4 if shared else 0)

    def run(name: str) -> Result:
        actors = {
            "trainer": start.remote(asked.size, asked.device, 1),
            "engine": start.remote(asked.size, asked.engine_device, 2),
        }

        def ask(who: str, method: str, *arguments: Any) -> Any:
            return ray.get(getattr(actors[who], method).remote(*arguments), timeout=WAIT_S)

        @contextmanager
        def connected() -> Iterator[Sync]:
            trainers, engines, config = [actors["trainer"]], [actors["engine"]], config_of(name, asked.device)
            with ws.connect(trainers=trainers, engines=engines, source="model", target="model", config=config) as sync:

                def timed() -> Timing:
                    started = time.perf_counter()
                    report = sync.update()
                    timing = timing_of(report, time.perf_counter() - started)
                    return {"seconds": timing.pop("update"), **timing}

                yield timed

        pids: list[int] = []
        try:
            pids += [ask(who, "pid") for who in actors]
            return measure(ask, connected, 2 * asked.rounds, warm=False)
        finally:
            for actor in actors.values():
                ray.kill(actor)
            deadline = time.monotonic() + EXIT_S  # their memory must be free before the next mode looks at it
            while time.monotonic() < deadline and any(process_state(pid) != "gone" for pid in pids):
                time.sleep(0.05)

    for name in names:
        results.send(attempt(lambda name=name: run(name)))  # type: ignore[misc]
    ray.shutdown()


def attempt(run: Callable[[], Result]) -> Result:
    try:
        return run()
    except Exception as error:
        traceback.print_exc()
        lines = [line for line in str(error).splitlines() if line.strip()]
        return {"error": f"{type(error).__name__}: {lines[-1] if lines else ''}"}
