"""How long an update may take: as long as something moves, and no longer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator

import pytest
import torch

from tests.test_session import config, weights
from weightsync.engines.torch_module import TorchModuleAdapter
from weightsync.errors import UpdateTimeoutError, WeightSyncError
from weightsync.interfaces import Transfer, TransferStats
from weightsync.manifest import TensorMeta
from weightsync.receiver import ReceiverRank
from weightsync.registry import register_transport, unregister_transport
from weightsync.sender import SenderRank
from weightsync.session import Session
from weightsync.testing import LocalFleet, LocalSync, in_process_party, module_engine
from weightsync.transports.broadcast import BroadcastReceiver, BroadcastSender


def test_a_transfer_may_take_longer_than_the_bound_of_one_wait() -> None:
    slow = False
    values = {f"{i}.t": torch.randn(3) for i in range(6)}

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for pair in values.items():
            if slow:
                time.sleep(0.6)
            yield pair

    engine = torch.nn.Sequential(*(torch.nn.ParameterDict({"t": torch.zeros(3)}) for _ in values))
    settings = config(timeout_s=3, apply="staged", bucket_bytes=1)
    with LocalSync([source], [module_engine(engine)], settings) as session:
        slow = True
        session.update()
    assert all(torch.equal(engine.state_dict()[name], value) for name, value in values.items())


class AtOnceSender(BroadcastSender):
    """Asks for all tensors before the first moves, and sends them slowly."""

    name = "at_once"
    tells = True
    num_sent = 0

    @property
    def progress(self) -> int:
        return self.num_sent if self.tells else 0

    def send(self, transfer: Transfer, tensors: Iterable[tuple[TensorMeta, torch.Tensor]]) -> TransferStats:
        def slowly(known: list[tuple[TensorMeta, torch.Tensor]]) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
            for item in known:
                time.sleep(0.6)
                self.num_sent += 1
                yield item

        return super().send(transfer, slowly(list(tensors)))


class AtOnceReceiver(BroadcastReceiver):
    name = "at_once"


@pytest.mark.parametrize("tells", [True, False])
def test_a_transport_may_say_itself_that_something_moves(tells: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AtOnceSender, "tells", tells)
    register_transport("at_once", AtOnceSender, AtOnceReceiver)
    values = {f"{i}.t": torch.randn(3) for i in range(6)}
    engine = torch.nn.Sequential(*(torch.nn.ParameterDict({"t": torch.zeros(3)}) for _ in values))
    settings = config(transport="at_once", timeout_s=2.5, apply="streaming", bucket_bytes=1)
    try:
        with LocalSync([lambda: values], [module_engine(engine)], settings) as session:
            if tells:
                session.update()
                assert all(torch.equal(engine.state_dict()[name], value) for name, value in values.items())
            else:
                with pytest.raises(WeightSyncError, match=r"made no progress|did not answer"):
                    session.update()
    finally:
        unregister_transport("at_once")


def test_a_source_that_hangs_is_named_within_the_bound() -> None:
    hang = False

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", torch.ones(2, 2)
        if hang:
            time.sleep(6)
        yield "bias", torch.ones(2)

    engine = torch.nn.Linear(2, 2)
    before = weights(engine)
    with LocalSync([source], [module_engine(engine)], config(timeout_s=1.5)) as session:
        hang = True
        started = time.monotonic()
        with pytest.raises(UpdateTimeoutError, match=r"trainer 0|sender 0|bias"):
            session.update()
        assert time.monotonic() - started < 15
    assert weights(engine) == before


def test_a_source_that_an_earlier_weight_sync_still_reads_is_not_read_beside_that() -> None:
    reading, ends = 0, threading.Event()

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal reading
        yield "weight", torch.ones(2, 2)
        if described:
            reading += 1
            assert reading == 1
            ends.wait(20)
            reading -= 1
        yield "bias", torch.ones(2)

    described = False
    engine = torch.nn.Linear(2, 2)
    first = LocalSync([source], [module_engine(engine)], config(timeout_s=1))
    with first as session:
        described = True
        with pytest.raises(UpdateTimeoutError):
            session.update()
        later = SenderRank(0, source)
        later.take_over(first.senders[0])
        described = False
        fleet = LocalFleet([in_process_party([later])], [in_process_party([ReceiverRank(TorchModuleAdapter(engine))])])
        with pytest.raises(UpdateTimeoutError, match="still makes tensors for an earlier update that was given up"):
            Session(fleet, config(timeout_s=1)).open()
        ends.set()
        while reading:
            time.sleep(0.01)
        second = Session(fleet, config(timeout_s=5))
        second.open()
        second.update()
        assert torch.equal(engine.weight, torch.ones(2, 2))
        second.close()
        fleet.close()
