"""Slices over real NIXL between real Ray actors: the transport's contract, and the traps of RDT."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import ray

from weightsync.errors import DigestError, TransportError, UpdateTimeoutError
from weightsync.identity import identify
from weightsync.interfaces import LinkContext
from weightsync.testing import TransportSuite
from weightsync.testing.link import Tensors, model, receive_all, rows, transfer
from weightsync.transports.arenas import ArenaClient
from weightsync.transports.sharded_rdt import ShardedRdtReceiver, ShardedRdtSender
from weightsync.transports.sidecar import NAMESPACE, Sidecar, Sidecars, check_landed

RANKS = ("trainer 0", "engine 0 rank 0", "engine 1 rank 0")


class TestShardedRdt(TransportSuite):
    transport = "sharded_rdt"
    sidecars: ClassVar[Sidecars]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _have_sidecars(cls, sidecars: Sidecars) -> None:
        cls.sidecars = sidecars

    def context(self, **settings: Any) -> LinkContext:
        addresses = self.sidecars.addresses(dict.fromkeys(RANKS, identify()))
        return super().context(**({"helpers": tuple(addresses.values())} | settings))

    @classmethod
    def on(cls, sidecars: Sidecars) -> TestShardedRdt:
        """For links outside the suite."""
        cls.sidecars = sidecars
        return cls()


@pytest.mark.gpu
class TestFromGpuTensors(TestShardedRdt):
    settings: ClassVar = {"device": "cuda:0"}

    def hold(self, tensors: Tensors) -> Callable[[Tensors], Tensors]:
        return lambda values: {name: value.cuda() for name, value in values.items()}


# ---- the traps of RDT -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fenced", [True, False])
def test_a_slot_that_is_still_read_is_not_written(
    fenced: bool, sidecars: Sidecars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RDT keeps a reference, no copy: without the fence the receiver gets what was packed later, and its digests say so."""
    start = ShardedRdtReceiver._start

    def late(self: ShardedRdtReceiver, message: object) -> Any:
        time.sleep(0.02)
        return start(self, message)

    monkeypatch.setattr(ShardedRdtReceiver, "_start", late)
    if not fenced:
        monkeypatch.setattr(ShardedRdtSender, "_await_pulls", lambda _, stream: stream.unanswered.popleft())
    with TestShardedRdt.on(sidecars).link(rows(), num_receivers=1, timeout_s=5) as link:
        if fenced:
            link.move(1, rows())
        else:
            with pytest.raises(DigestError, match=r"t\d+: bytes .* differ from what the sender read"):
                link.move(1, rows())


def test_bytes_that_ray_reads_elsewhere_are_refused(sidecars: Sidecars) -> None:
    """It refers to targets weakly: one that is gone by then is replaced by new memory, without a word."""

    def pull(source: Any, arena: int, keep: bool) -> bool:
        import torch
        from ray.experimental import set_target_for_ref

        (ref,) = ray.get(source.publish.remote(arena, 0, 4096))
        target = torch.zeros(4096, dtype=torch.uint8)
        given = target if keep else target.clone()
        set_target_for_ref(ref, [given])
        del given
        (found,) = ray.get(ref)
        try:
            check_landed(found, target)
        except TransportError:
            return False
        return True

    context = TestShardedRdt.on(sidecars).context()
    memory = ArenaClient(context.helpers[0], who="a test", timeout_s=10)
    memory.take(4096)
    source = ray.get_actor(memory.source.actor, namespace=NAMESPACE)
    run = ray.remote(num_cpus=0, max_calls=1)(pull)
    arena = memory.source.arena
    try:
        assert ray.get([run.remote(source, arena, True), run.remote(source, arena, False)]) == [True, False]
    finally:
        memory.abort()


@pytest.mark.parametrize("lost", RANKS[:2])
def test_a_sidecar_that_was_killed_is_named_and_a_new_one_takes_its_place(lost: str, sidecars: Sidecars) -> None:
    """Under a new name: to whoever has read from it, a NIXL agent that came back under its own stays unreadable."""
    suite = TestShardedRdt.on(sidecars)
    with suite.link(model(1), num_receivers=1, timeout_s=10) as link:
        link.move(1, model(1))
        name = sidecars.name(lost)
        os.kill(ray.get(sidecars.actor(lost).__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
        sending = link.send(transfer(2, model(2)), model(2))
        with pytest.raises((TransportError, UpdateTimeoutError), match="sidecar of"):
            suite.soon(lambda: receive_all(link.receivers[0], transfer(2, model(2))))
        link.abort()
        with pytest.raises(TransportError):
            suite.end(sending)
    with suite.link(model(1), num_receivers=1, timeout_s=10) as link:
        for version in (3, 4):
            link.move(version, model(version))
    assert sidecars.name(lost) != name


def test_a_sidecar_that_ray_restarts_stays_unreadable_to_who_read_it_before(sidecars: Sidecars) -> None:
    """Why a sidecar is never restarted: its NIXL agent would come back under its old name (Ray 2.60)."""
    context = TestShardedRdt.on(sidecars).context()
    reader = ArenaClient(context.helpers[1], who="a reader", timeout_s=20)
    reader.take(4096)
    kind = ray.remote(num_cpus=0, max_concurrency=4, enable_tensor_transport=True)(Sidecar)
    name = f"a sidecar that restarts {time.time_ns()}"
    writer = kind.options(name=name, namespace=NAMESPACE, max_restarts=1, max_task_retries=-1).remote(name)

    def pull() -> None:
        memory = ArenaClient(ray.get(writer.open.remote()), who="a writer", timeout_s=20)
        try:
            memory.take(4096)
            reader.start_pull(memory.source, offset=0, nbytes=4096, into=0)
            reader.finish_pull()
        finally:
            memory.abort()

    try:
        pull()
        before = ray.get(writer.open.remote())
        ray.kill(writer, no_restart=False)
        deadline = time.monotonic() + 60
        while ray.get(writer.open.remote()) == before:  # the old process still answers for a while
            assert time.monotonic() < deadline, "Ray has not restarted the actor in 60 s"
            time.sleep(0.05)
        for _ in range(2):
            with pytest.raises((TransportError, UpdateTimeoutError)):
                pull()
    finally:
        ray.kill(writer)
        reader.abort()


def test_a_slow_link_is_refused_when_it_opens(sidecars: Sidecars) -> None:
    suite = TestShardedRdt.on(sidecars)
    with (
        suite.open(model(0), num_receivers=1, min_bytes_per_s=1e15) as link,
        pytest.raises(TransportError, match=r"receiver 0 pulls \d.* GB/s from sender 3 over NIXL, UCX \(.*UCX_TLS"),
    ):
        link.connect()


def test_without_nixl_it_is_said_what_to_install() -> None:
    code = (
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *of: None if 'nixl' in name else find(name, *of)\n"
        "from weightsync.transports.sidecar import Sidecar\n"
        "try: Sidecar('alone').open()\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.startswith("ConfigError transport: sharded_rdt needs NIXL on ")
    assert 'pip install "weightsync[rdt]"' in said
