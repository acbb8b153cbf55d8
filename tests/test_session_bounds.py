"""How long an update may take: as long as something moves, and no longer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import pytest
import torch

from tests.test_session import config, weights
from weightsync.errors import UpdateTimeoutError, WeightSyncError
from weightsync.interfaces import Transfer, TransferStats
from weightsync.manifest import TensorMeta
from weightsync.registry import register_transport, unregister_transport
from weightsync.testing import LocalSync, module_engine
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
