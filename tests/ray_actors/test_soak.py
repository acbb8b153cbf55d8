"""Many updates, a random fault in every fifth: each committed one is bit-exact, and nothing grows."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import pytest
import ray
import torch

import weightsync as ws
from weightsync.testing.faults import Fault
from weightsync.testing.link import Footprint

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(600)]

UPDATES = int(os.environ.get("WEIGHTSYNC_SOAK_UPDATES", "120"))
ROUNDS = UPDATES * 5 // 12
"""Of each of two transports; each fifth makes two updates."""
FAULTS = [
    *(("trainer", Fault(action=action, place="tensor", nth=1, seconds=0.05)) for action in ("drop", "raise", "flip", "delay")),
    *(
        ("engine", Fault(action=action, place="chunk", seconds=0.05))
        for action in ("drop", "flip", "truncate", "duplicate", "reorder", "raise")
    ),
    ("engine", Fault(action="raise", place="group", nth=1)),
    ("engine", Fault(action="kill", place="group", nth=1)),
    ("engine", Fault(action="kill", place="chunk")),
    ("trainer", Fault(action="kill", place="tensor", nth=2)),
    ("engine", Fault(action="stop", place="chunk")),
]  # fmt: skip


class Model:
    """A trainer or an engine, in whose process faults can be armed."""

    def __init__(self) -> None:
        from weightsync.engines.torch_module import TorchModuleAdapter
        from weightsync.testing.faults import Faults, FaultyAdapter, faulty_transports

        self.faults = faults = Faults()
        self.registered = faulty_transports(self.faults, ["shared_memory", "broadcast"])
        self.registered.__enter__()
        plain = TorchModuleAdapter.apply

        class Plain:
            def __init__(self, adapter: Any) -> None:
                self.apply = lambda groups: plain(adapter, groups)

        TorchModuleAdapter.apply = lambda adapter, groups: FaultyAdapter(Plain(adapter), faults).apply(groups)  # type: ignore[method-assign, assignment, arg-type]
        self.model = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(4))

    def set(self, seed: int) -> None:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn_like(parameter))

    def arm(self, *faults: Fault) -> None:
        self.faults.arm(*faults)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: t.clone() for name, t in self.model.state_dict().items()}

    def pid(self) -> int:
        return os.getpid()

    def size(self) -> Size:
        return size(self)


Size = tuple[int, int, int, int, int]
LIMITS = (16, 6, 60, 8, 8)
"""By how much a process may differ: open files, threads, MiB, shared mappings, Ray objects. The last failed update may still
hold one gloo group, which has 13 files; if each did, some hundred would be open. A process that was started again since weighs
up to 35 MiB more or less; the model weighs 1, so an update that kept it would show as 75."""


def size(actor: Any = None) -> Size:
    """Open files, threads, MiB, mappings of shared memory, and Ray objects that this process refers to."""
    core = ray._private.worker.global_worker.core_worker
    with open("/proc/self/statm") as file:
        mib = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
    footprint = Footprint.now().counts
    objects = len(core.get_all_reference_counts())
    return footprint["open files"], threading.active_count(), mib, footprint["shared mappings"], objects


def sizes_of(sync: ws.WeightSync, actors: list[Any]) -> list[Size]:
    """Of the coordinator and of every actor."""
    coordinator = sync._coordinator.__ray_call__.remote(size)
    found: list[Size] = ray.get([coordinator, *(actor.size.remote() for actor in actors)])
    return found


def grown(before: list[Size], after: list[Size]) -> bool:
    return any(
        b - a > limit for one in zip(before, after, strict=True) for a, b, limit in zip(*one, LIMITS, strict=True)
    )


def settled(actor: Any) -> None:
    """Wait until a process that died is back."""
    deadline = time.monotonic() + 60
    while True:
        try:
            ray.get(actor.arm.remote(), timeout=30)
            return
        except ray.exceptions.RayActorError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.parametrize("transport", ["shared_memory", "broadcast"])
def test_updates_with_a_fault_in_every_fifth_leave_everything_flat(transport: str) -> None:
    dice = random.Random(transport)
    trainer, *engines = (ray.remote(Model).options(num_cpus=0.1, max_restarts=-1).remote() for _ in range(3))
    actors = [trainer, *engines]
    ray.get([actor.pid.remote() for actor in actors])
    config = {"timeout_s": 3, "transport": transport}
    failed = committed = 0
    before: list[Size] = []
    with ws.connect(trainers=[trainer], engines=engines, source="model", target="model", config=config) as sync:
        version = sync.version
        for round_ in range(ROUNDS):
            ray.get(trainer.set.remote(round_))
            fault = None
            if round_ % 5 == 4:
                who, fault = dice.choice(FAULTS)
                victim = trainer if who == "trainer" else dice.choice(engines)
                pid = ray.get(victim.pid.remote())
                ray.get(victim.arm.remote(fault))
                if fault.action == "stop":
                    threading.Timer(5, os.kill, (pid, signal.SIGCONT)).start()
            try:
                report = sync.update()
            except ws.WeightSyncError:
                if fault is None:
                    raise
                failed += 1
            else:
                assert report.version > version
                version = report.version
                committed += 1
                assert exact(trainer, engines), f"version {version} is not exact"
            if fault is not None:
                for actor in actors:
                    settled(actor)
                ray.get(trainer.set.remote(round_ + 10_000))
                version = sync.update().version
                committed += 1
                assert exact(trainer, engines), f"the retry after {fault} is not exact"
            if round_ == UPDATES // 8:
                before = sizes_of(sync, actors)
        assert sync.version == version
        after = sizes_of(sync, actors)
        deadline = time.monotonic() + 30  # what gloo was given up for ends at its bound
        while grown(before, after) and time.monotonic() < deadline:
            time.sleep(1)
            after = sizes_of(sync, actors)
        assert not grown(before, after), (before, after)
    assert failed > 0
    assert committed >= ROUNDS
    for actor in actors:
        ray.kill(actor)


def exact(trainer: Any, engines: list[Any]) -> bool:
    wanted, *held = ray.get([actor.weights.remote() for actor in (trainer, *engines)])
    return all(torch.equal(wanted[name], one[name]) for one in held for name in wanted)
