"""Ends in processes of their own move the same bytes as ends in this one: their stand-ins here can be put to the suite."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from functools import partial

import pytest

from weightsync.errors import TransportError, UpdateTimeoutError
from weightsync.registry import register_transport, unregister_transport
from weightsync.testing.apart import EndProcess, RemoteReceiver, RemoteSender, close_idle
from weightsync.testing.link import model
from weightsync.testing.suite import raises
from weightsync.testing.transport_bytes import MovesExactBytes
from weightsync.testing.transport_faults import release_all
from weightsync.transports.broadcast import BroadcastReceiver, BroadcastSender


class ApartSender(RemoteSender):
    kind = BroadcastSender


class ApartReceiver(RemoteReceiver):
    kind = BroadcastReceiver


@pytest.fixture(scope="module", autouse=True)
def apart() -> Iterator[None]:
    register_transport("apart", ApartSender, ApartReceiver)
    yield
    unregister_transport("apart")
    close_idle()


class TestBroadcastApart(MovesExactBytes):
    transport = "apart"
    num_tiny_tensors = 500


@pytest.mark.parametrize(("number", "state"), [(signal.SIGKILL, "gone"), (signal.SIGSTOP, "stopped")])
def test_a_lost_process_is_named_with_what_became_of_it(number: signal.Signals, state: str) -> None:
    case = TestBroadcastApart()
    with case.link(model(1), timeout_s=3) as link:
        lost: EndProcess = link.receivers[1].process  # type: ignore[attr-defined]
        reading = case.start(partial(release_all, link.receivers[0]))
        case.start(partial(release_all, link.receivers[1]))
        sending = link.send_without_end(model(1))
        time.sleep(0.2)
        lost.signal(number)
        with raises(TransportError, UpdateTimeoutError, match=rf"receiver 1 \(pid {lost.pid}\) is {state}"):
            case.end(sending)
        with raises(TransportError, UpdateTimeoutError, match="sender 3"):
            case.end(reading)
        lost.close()
