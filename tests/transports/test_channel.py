"""The framed channel: messages and descriptors arrive as sent, anything else is a bounded, named error."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import xxhash

from weightsync.errors import TransportError, UpdateTimeoutError
from weightsync.transports.channel import MAX_FRAME_BYTES, Channel, Listener, dial
from weightsync.wire import pack


class Text(msgspec.Struct, tag=True, frozen=True):
    text: str


class Number(msgspec.Struct, tag=True, frozen=True):
    number: int


Message = Text | Number
Ends = tuple[Channel[Message], Channel[Message]]


@pytest.fixture
def ends() -> Iterator[Ends]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    pair: Ends = (Channel(left, Message, "left's peer"), Channel(right, Message, "right's peer"))  # type: ignore[arg-type]
    yield pair
    for end in pair:
        end.close()


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Channel[Message]]]:
    """A bare socket that writes whatever it likes, and the channel that has to bear it."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channel: Channel[Message] = Channel(right, Message, "the liar")  # type: ignore[arg-type]
    yield left, channel
    left.close()
    channel.close()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_messages_arrive_in_order_and_whole(ends: Ends) -> None:
    sent: list[Message] = [Text("x" * size) for size in (0, 1, 5, 300_000)] + [Number(i) for i in range(100)]

    def send() -> None:
        for message in sent:
            ends[0].send(message, timeout_s=5)

    thread = threading.Thread(target=send)
    thread.start()
    assert [ends[1].receive(timeout_s=5)[0] for _ in sent] == sent
    thread.join()


def test_messages_of_several_threads_do_not_mix(ends: Ends) -> None:
    def send(letter: str) -> None:
        for size in range(200):
            ends[0].send(Text(letter * size), timeout_s=5)

    threads = [threading.Thread(target=send, args=(letter,)) for letter in "abc"]
    for thread in threads:
        thread.start()
    texts = [
        message.text for message, _ in (ends[1].receive(timeout_s=5) for _ in range(600)) if isinstance(message, Text)
    ]
    for thread in threads:
        thread.join()
    assert [[text for text in texts if letter in text] for letter in "abc"] == [
        [letter * size for size in range(1, 200)] for letter in "abc"
    ]


def test_a_descriptor_travels_with_its_message_and_with_no_other(ends: Ends) -> None:
    fd = os.memfd_create("test")
    os.write(fd, b"inside")
    ends[0].send(Number(1), timeout_s=5)
    ends[0].send(Number(2), fd=fd, timeout_s=5)
    ends[0].send(Number(3), timeout_s=5)
    os.close(fd)
    received = [ends[1].receive(timeout_s=5) for _ in range(3)]
    assert [message for message, _ in received] == [Number(1), Number(2), Number(3)]
    first, second, third = (fd for _, fd in received)
    assert (first, third) == (None, None)
    assert second is not None
    assert os.pread(second, 10, 0) == b"inside"
    os.close(second)


def test_an_oversized_frame_is_refused_before_it_is_read(raw: tuple[socket.socket, Channel[Message]]) -> None:
    raw[0].sendall(struct.pack("<IB", MAX_FRAME_BYTES + 1, 0))
    with pytest.raises(TransportError, match="the liar sent a frame of 67108865 bytes"):
        raw[1].receive(timeout_s=5)


@pytest.mark.parametrize("body", [b"\xc1", b"", msgspec.msgpack.encode({"type": "Other"}), msgspec.msgpack.encode(3)])
def test_a_malformed_message_is_refused_with_the_senders_name(
    raw: tuple[socket.socket, Channel[Message]], body: bytes
) -> None:
    body = xxhash.xxh3_64_digest(body) + body
    raw[0].sendall(struct.pack("<IB", len(body), 0) + body)
    with pytest.raises(TransportError, match=r"the liar \(pid \d+\): a malformed message came"):
        raw[1].receive(timeout_s=5)


def test_a_damaged_message_is_refused_with_the_senders_name(raw: tuple[socket.socket, Channel[Message]]) -> None:
    body = pack(Number(1))
    for at in range(len(body)):
        damaged = body[:at] + bytes([body[at] ^ 4]) + body[at + 1 :]
        raw[0].sendall(struct.pack("<IB", len(damaged), 0) + damaged)
        with pytest.raises(TransportError, match=r"the liar \(pid \d+\): .*damaged"):
            raw[1].receive(timeout_s=5)


def test_a_descriptor_that_was_not_announced_is_refused_and_closed(
    raw: tuple[socket.socket, Channel[Message]],
) -> None:
    fd = os.memfd_create("test")
    before = open_files()
    body = pack(Number(1))
    socket.send_fds(raw[0], [struct.pack("<IB", len(body), 0) + body], [fd])
    with pytest.raises(TransportError, match="not of this channel"):
        raw[1].receive(timeout_s=5)
    assert open_files() == before
    os.close(fd)


def test_a_descriptor_of_a_malformed_message_is_closed(raw: tuple[socket.socket, Channel[Message]]) -> None:
    fd = os.memfd_create("test")
    before = open_files()
    socket.send_fds(raw[0], [struct.pack("<IB", 1, 1) + b"\xc1"], [fd])
    with pytest.raises(TransportError, match="damaged"):
        raw[1].receive(timeout_s=5)
    assert open_files() == before
    os.close(fd)


def test_a_frame_that_ends_half_way_is_a_broken_link(raw: tuple[socket.socket, Channel[Message]]) -> None:
    raw[0].sendall(struct.pack("<IB", 100, 0) + b"only this")
    raw[0].close()
    with pytest.raises(TransportError, match=r"the link to the liar \(pid \d+\) is broken"):
        raw[1].receive(timeout_s=5)


def test_a_frame_that_comes_byte_by_byte_is_read(raw: tuple[socket.socket, Channel[Message]]) -> None:
    body = pack(Text("slow"))

    def drip() -> None:
        for byte in struct.pack("<IB", len(body), 0) + body:
            raw[0].sendall(bytes([byte]))
            time.sleep(0.002)

    thread = threading.Thread(target=drip)
    thread.start()
    assert raw[1].receive(timeout_s=5) == (Text("slow"), None)
    thread.join()


def test_a_silent_peer_is_a_timeout_with_its_name(ends: Ends) -> None:
    with pytest.raises(UpdateTimeoutError, match=r"right's peer \(pid \d+\) did not send a message for 0.1 s"):
        ends[1].receive(timeout_s=0.1)


def test_a_peer_that_does_not_read_is_a_timeout_with_its_name(ends: Ends) -> None:
    with pytest.raises(UpdateTimeoutError, match=r"left's peer .* did not take a message"):
        ends[0].send(Text("x" * 10_000_000), timeout_s=0.2)


def test_close_wakes_a_thread_that_waits_and_may_be_repeated(ends: Ends) -> None:
    errors: list[Exception] = []

    def wait() -> None:
        try:
            ends[0].receive(timeout_s=20)
        except TransportError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    ends[0].close()
    ends[0].close()
    thread.join(5)
    assert len(errors) == 1
    with pytest.raises(TransportError):
        ends[1].receive(timeout_s=5)
    with pytest.raises(TransportError):
        ends[0].send(Number(1), timeout_s=1)


def test_the_death_of_the_other_process_is_seen_at_once_with_its_pid() -> None:
    listener = Listener()
    script = f"""
import os, socket
s = socket.socket(socket.AF_UNIX); s.connect("\\0{listener.address}"); os.read(0, 1); os._exit(9)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as process:
        channel: Channel[Message] = listener.accept(Message, timeout_s=30)  # type: ignore[arg-type]
        assert channel.peer_pid == process.pid
        assert process.stdin is not None
        process.stdin.write(b"x")
        process.stdin.close()
        with pytest.raises(TransportError, match=f"pid {process.pid}"):
            channel.receive(timeout_s=20)
    channel.close()
    listener.close()


def test_a_listener_waits_at_most_its_bound_and_close_wakes_it() -> None:
    listener = Listener()
    with pytest.raises(TimeoutError):
        listener.accept(Message, timeout_s=0.05)  # type: ignore[arg-type]
    closing = threading.Timer(0.1, listener.close)
    closing.start()
    with pytest.raises(OSError, match=r".") as caught:
        listener.accept(Message, timeout_s=20)  # type: ignore[arg-type]
    assert not isinstance(caught.value, TimeoutError)
    listener.close()
    closing.join()


def test_dialling_where_nobody_listens_says_what_to_do() -> None:
    listener = Listener()
    listener.close()
    with pytest.raises(TransportError, match=r"sender 0 cannot be reached .* transport: broadcast"):
        dial(listener.address, Message, peer="sender 0", timeout_s=1)  # type: ignore[arg-type]
