"""Transports are found by name, and an unknown name lists the known ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from weightsync.config import SyncConfig
from weightsync.errors import ConfigError
from weightsync.interfaces import ReceiverTransport, SenderTransport
from weightsync.registry import register_transport, transport_classes, transport_names, unregister_transport
from weightsync.transports.broadcast import BroadcastReceiver, BroadcastSender

BUILT_IN = (
    "shared_memory",
    "broadcast",
    "cuda_ipc",
    "sharded_shared_memory",
    "sharded_broadcast",
    "sharded_cuda_ipc",
    "sharded_rdt",
)


class Sender(BroadcastSender):
    name = "mine"


class Receiver(BroadcastReceiver):
    name = "mine"


class HalfASender(SenderTransport):
    def connect(self) -> None: ...


@pytest.fixture
def mine() -> Iterator[None]:
    register_transport("mine", Sender, Receiver)
    yield
    unregister_transport("mine")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown transport 'pigeon'") as caught:
        transport_classes("pigeon")
    assert caught.value.key == "transport"
    assert all(name in str(caught.value) for name in ["auto", *transport_names()])


def test_the_built_in_names_are_known_and_sorted() -> None:
    assert set(BUILT_IN) <= set(transport_names())
    assert transport_names() == sorted(transport_names())


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_name_is_a_sender_and_a_receiver_that_call_themselves_so(name: str) -> None:
    sender, receiver = transport_classes(name)
    assert issubclass(sender, SenderTransport)
    assert issubclass(receiver, ReceiverTransport)
    assert sender.name == receiver.name == name


@pytest.mark.usefixtures("mine")
def test_a_registered_transport_is_known_to_everybody_who_asks() -> None:
    assert transport_classes("mine") == (Sender, Receiver)
    assert "mine" in transport_names()
    assert SyncConfig(transport="mine").transport == "mine"
    with pytest.raises(ConfigError, match="known: auto, broadcast, cuda_ipc, mine, sharded_broadcast, "):
        transport_classes("pigeon")


def test_a_registered_transport_hides_a_known_one_until_it_is_unregistered() -> None:
    known, names = transport_classes("broadcast"), transport_names()
    register_transport("broadcast", Sender, Receiver)
    try:
        assert transport_classes("broadcast") == (Sender, Receiver)
        assert transport_names() == names
        register_transport("broadcast", Sender, BroadcastReceiver)
        assert transport_classes("broadcast") == (Sender, BroadcastReceiver), "the last one counts"
    finally:
        unregister_transport("broadcast")
    assert transport_classes("broadcast") == known


@pytest.mark.parametrize(
    ("name", "sender", "receiver", "match"),
    [
        ("mine", Receiver, Receiver, "'mine': .*Receiver'> is no subclass of SenderTransport"),
        ("mine", Sender, Sender, "'mine': .*Sender'> is no subclass of ReceiverTransport"),
        ("mine", Sender, None, "'mine': None is no subclass of ReceiverTransport"),
        ("mine", lambda context: None, Receiver, "is no subclass of SenderTransport"),
        ("mine", HalfASender, Receiver, "HalfASender lacks abort, close, open, send, stable"),
        ("auto", Sender, Receiver, "cannot be called 'auto'"),
        ("", Sender, Receiver, "cannot be called ''"),
    ],
)
def test_what_is_no_transport_is_not_registered(name: str, sender: Any, receiver: Any, match: str) -> None:
    names = transport_names()
    with pytest.raises(ConfigError, match=match) as caught:
        register_transport(name, sender, receiver)
    assert caught.value.key == "transport"
    assert transport_names() == names


def test_to_unregister_what_was_not_registered_changes_nothing() -> None:
    names = transport_names()
    for name in ("pigeon", "broadcast"):
        unregister_transport(name)
    assert transport_names() == names
