"""Transports are found by name, and an unknown name lists the known ones."""

from __future__ import annotations

import pytest

from weightsync.errors import ConfigError
from weightsync.interfaces import ReceiverTransport, SenderTransport
from weightsync.registry import transport_classes, transport_names


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown transport 'pigeon'") as caught:
        transport_classes("pigeon")
    assert caught.value.key == "transport"
    assert all(name in str(caught.value) for name in ["auto", *transport_names()])


def test_the_built_in_names_are_known_and_sorted() -> None:
    assert {"shared_memory", "broadcast"} <= set(transport_names())
    assert transport_names() == sorted(transport_names())


@pytest.mark.parametrize("name", ["shared_memory", "broadcast"])
def test_a_name_is_a_sender_and_a_receiver_that_call_themselves_so(name: str) -> None:
    sender, receiver = transport_classes(name)
    assert issubclass(sender, SenderTransport)
    assert issubclass(receiver, ReceiverTransport)
    assert sender.name == receiver.name == name
