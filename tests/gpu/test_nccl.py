"""transport: broadcast over NCCL, on one GPU that several ranks share; each rank in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import pytest
import torch

from weightsync.background import Background
from weightsync.errors import TransportError, UpdateTimeoutError
from weightsync.identity import nccl_version
from weightsync.interfaces import LinkContext
from weightsync.manifest import Manifest
from weightsync.plan import why_not_nccl
from weightsync.registry import register_transport, unregister_transport
from weightsync.testing import TransportSuite
from weightsync.testing.apart import (
    EndProcess,
    RemoteReceiver,
    RemoteSender,
    close_idle,
    footprint,
    run,
    warm_up_nccl,
)
from weightsync.testing.link import (
    BUCKET_BYTES,
    Link,
    Pairs,
    Tensors,
    TransportCase,
    items,
    model,
    receive_all,
    transfer,
)
from weightsync.testing.suite import at_most, raises
from weightsync.testing.transport_bytes import MovesExactBytes
from weightsync.transports.broadcast import BroadcastReceiver, BroadcastSender
from weightsync.transports.nccl_group import warm_up

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

NAME = "nccl_apart"
LEAST_S = 3.0
"""The shortest bound: joining a communicator takes a part of a second."""

if multiprocessing.current_process().daemon and torch.cuda.is_available():
    warm_up(torch.device("cuda:0"))  # one of the suite's peers, which imports this before any bound begins


class ApartSender(RemoteSender):
    kind = BroadcastSender
    prepare = warm_up_nccl


class ApartReceiver(RemoteReceiver):
    kind = BroadcastReceiver
    prepare = warm_up_nccl


@pytest.fixture(scope="module", autouse=True)
def nccl() -> Iterator[None]:
    why = why_not_nccl(("one", "one"), nccl=nccl_version(), cupy=True, environment=os.environ)
    if why:
        pytest.skip(f"ranks of NCCL cannot share this GPU: {why}")
    warm_up(torch.device("cuda:0"))
    register_transport(NAME, ApartSender, ApartReceiver)
    yield
    unregister_transport(NAME)
    close_idle()


class OverNccl(TransportCase):
    transport = NAME
    settings: ClassVar = {"device": "cuda:0", "gpu_bucket_bytes": BUCKET_BYTES}
    num_tiny_tensors = 2_000
    patience_s = 60

    def context(self, *, num_receivers: int = 2, timeout_s: float = 20, **others: Any) -> LinkContext:
        uuid = str(torch.cuda.get_device_properties(0).uuid)
        gpus = (uuid,) * (num_receivers + 1)
        return super().context(
            num_receivers=num_receivers, timeout_s=max(timeout_s, LEAST_S), **({"gpus": gpus} | others)
        )


def on_gpu(values: Tensors) -> Tensors:
    return {name: value.cuda() for name, value in values.items()}


class TestFromGpuTensors(OverNccl, TransportSuite):
    """Held: they are read where they lie, in one launch a bucket."""

    held = True

    def hold(self, tensors: Tensors) -> Callable[[Tensors], Tensors]:
        return on_gpu


class TestFromCpuTensors(OverNccl, MovesExactBytes): ...


class TestOneBucketForAll(OverNccl, MovesExactBytes):
    settings: ClassVar = {"device": "cuda:0"}

    def hold(self, tensors: Tensors) -> Callable[[Tensors], Tensors]:
        return on_gpu


ENDED = (TransportError, UpdateTimeoutError)


class TestLosses(OverNccl):
    """A rank is killed, or stopped, in the middle of a transfer."""

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
    @pytest.mark.parametrize("num_receivers", [1, 2, 3])
    def test_a_lost_receiver_is_an_error_for_all_others(self, num_receivers: int, number: signal.Signals) -> None:
        with self.link(model(1), num_receivers=num_receivers, timeout_s=5) as link:
            sending, *reading = self._begin(link)
            lost: EndProcess = link.receivers[-1].process  # type: ignore[attr-defined]
            lost.signal(number)
            self._check_all_end(link, lost, [sending, *reading[:-1]])
        self._check_a_fresh_link(num_receivers)

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
    @pytest.mark.parametrize("num_receivers", [1, 2, 3])
    def test_a_lost_sender_is_an_error_for_all_receivers(self, num_receivers: int, number: signal.Signals) -> None:
        with self.link(model(1), num_receivers=num_receivers, timeout_s=5) as link:
            _, *reading = self._begin(link)
            lost: EndProcess = link.sender.process  # type: ignore[attr-defined]
            lost.signal(number)
            self._check_all_end(link, lost, reading)
        self._check_a_fresh_link(num_receivers)

    def _begin(self, link: Link) -> list[Background[Any]]:
        """A transfer without end that every receiver is in the middle of: the sender's work, and each receiver's."""
        flowing = [threading.Event() for _ in link.receivers]

        def read(receiver: Any, event: threading.Event) -> None:
            for chunk in receiver.receive(transfer(1, model(1))):
                chunk.release()
                event.set()

        works = [self.start(partial(read, *pair)) for pair in zip(link.receivers, flowing, strict=True)]
        sending = link.send_without_end(model(1))
        assert all(event.wait(self.patience_s) for event in flowing), "nothing came"
        return [sending, *works]

    def _check_all_end(self, link: Link, lost: EndProcess, works: list[Background[Any]]) -> None:
        with at_most(5 + 10):
            for work in works:
                with raises(*ENDED, match=rf"link of sender 3.*\(pid {lost.pid}\) is (gone|stopped)"):
                    self.end(work)
        for end in (link.sender, *link.receivers):
            process: EndProcess = end.process  # type: ignore[attr-defined]
            if process is not lost:  # nothing goes on spinning there
                process.call(run, torch.cuda.synchronize, timeout_s=10)
        lost.close()

    def _check_a_fresh_link(self, num_receivers: int) -> None:
        with self.link(model(1), num_receivers=num_receivers) as link:
            for version in (1, 2):
                link.move(version, model(version))


class TestTurns(OverNccl):
    """Two senders, each with a link to the same two receivers: each GPU takes part in both links."""

    @pytest.mark.parametrize("collective", [False, True], ids=["held", "made together"])
    def test_two_senders_reach_two_receivers(self, collective: bool) -> None:
        processes = [EndProcess() for _ in range(4)]
        try:
            links = [self._open(sender, processes) for sender in range(2)]
            for version in range(1, 5):
                self._move(version, links, collective)
            for sender, receivers in links:
                for end in (sender, *receivers):
                    self.soon(end.close)
        finally:
            for process in processes:
                process.close()

    def _open(self, index: int, processes: list[EndProcess]) -> tuple[ApartSender, list[ApartReceiver]]:
        context = self.context(sender=index)
        sender = ApartSender(context, process=processes[index])
        receivers = [ApartReceiver(context, receiver=i, process=processes[2 + i]) for i in range(2)]
        address = sender.open(Manifest.from_tensors(model(0)).tensors)
        works = [self.start(partial(receiver.connect, address)) for receiver in receivers]
        self.end_all(self.start(sender.connect), *works)
        return sender, receivers

    def _move(self, version: int, links: list[tuple[ApartSender, list[ApartReceiver]]], collective: bool) -> None:
        tensors = on_gpu(model(version))
        shares = [dict(list(tensors.items())[index::2]) for index in range(2)]
        of = [transfer(version, tensors, share) for share in shares]
        together = threading.Barrier(2, timeout=20)

        def source(share: Tensors) -> Pairs:
            """Where it is made by all trainers together, nobody gets a tensor before all have asked for it."""
            for name, tensor in tensors.items():
                if collective:
                    together.wait()
                if name in share:
                    yield of[0].manifest.by_name[name], tensor

        receiving = [
            (share, self.start(partial(receive_all, receiver, wanted)))
            for (_, receivers), share, wanted in zip(links, shares, of, strict=True)
            for receiver in receivers
        ]
        sending = [
            self.start(partial(sender.send, wanted, source(share)))
            for (sender, _), share, wanted in zip(links, shares, of, strict=True)
        ]
        self.end_all(*sending, *(work for _, work in receiving))
        for share, work in receiving:
            work.result().check(share)


class TestFootprint(OverNccl):
    def test_twenty_links_leave_nothing_behind(self) -> None:
        processes = [EndProcess() for _ in range(3)]

        def cycle() -> None:
            context = self.context()
            sender = ApartSender(context, process=processes[0])
            receivers = [ApartReceiver(context, receiver=i, process=processes[1 + i]) for i in range(2)]
            address = sender.open(Manifest.from_tensors(model(0)).tensors)
            works = [self.start(partial(receiver.connect, address)) for receiver in receivers]
            self.end_all(self.start(sender.connect), *works)
            of, tensors = transfer(1, model(1)), model(1)
            receiving = [self.start(partial(receive_all, receiver, of)) for receiver in receivers]
            self.end_all(self.start(lambda: sender.send(of, items(tensors))), *receiving)
            for end in (sender, *receivers):
                self.soon(end.close)

        def held() -> list[dict[str, int]]:
            return [process.call(run, footprint, "cuda:0", timeout_s=20) for process in processes]

        try:
            for _ in range(3):
                cycle()
            before = held()
            for _ in range(20):
                cycle()
            for was, now in zip(before, held(), strict=True):
                assert now["files"] <= was["files"] + 2, (was, now)
                assert now["threads"] <= was["threads"] + 2, (was, now)
                assert now["free"] >= was["free"] - (8 << 20), (was, now)
        finally:
            for process in processes:
                process.close()
