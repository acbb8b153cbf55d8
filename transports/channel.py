"""A framed message channel over a socket: msgspec structs and file descriptors, every wait bounded.

Within a host a Unix socket: its abstract address carries 128 random bits and lives as long as its process, and both ends
check that the peer belongs to the same user. Between hosts TCP, without descriptors; who may connect is for whoever
listens to find out. A peer's death is seen at once, as the end of the stream.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import threading
from typing import Generic, TypeVar

import msgspec

from weightsync.errors import TransportError, UpdateTimeoutError
from weightsync.wire import pack, unpack

MAX_FRAME_BYTES = 64 << 20
_HEADER = struct.Struct("<IB")
M = TypeVar("M", bound=msgspec.Struct)


class Channel(Generic[M]):
    """One connected socket. `send` may be called from several threads, `receive` from one at a time."""

    def __init__(self, sock: socket.socket, message_type: type[M], peer: str) -> None:
        """*peer* is how errors call the other side."""
        self.peer = peer
        self._socket = sock
        self._decoder = msgspec.msgpack.Decoder(message_type)
        self._sending = threading.Lock()
        self.peer_pid: int | None = None
        """None where it may be on another host."""
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return
        pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        self.peer_pid = pid
        if uid != os.getuid():
            self.close()
            raise TransportError(f"{peer} (pid {pid}) belongs to another user ({uid}); refused")

    def __str__(self) -> str:
        return f"{self.peer} (pid {self.peer_pid})" if self.peer_pid is not None else self.peer

    def is_waiting(self) -> bool:
        """Whether `receive` would find something at once: a message, its beginning, or the end."""
        try:
            return bool(select.select([self._socket], [], [], 0)[0])
        except (OSError, ValueError):  # closed
            return True

    def send(self, message: M, *, fd: int | None = None, timeout_s: float) -> None:
        """Raises TransportError when the peer is gone, UpdateTimeoutError when it does not read."""
        body = pack(message)
        header = _HEADER.pack(len(body), fd is not None)
        with self._sending, self._errors("take a message", timeout_s):
            self._socket.settimeout(timeout_s)
            sent = socket.send_fds(self._socket, [header, body], [fd] if fd is not None else [])
            if sent < len(header) + len(body):
                self._socket.sendall((header + body)[sent:])

    def receive(self, *, timeout_s: float) -> tuple[M, int | None]:
        """(message, file descriptor or None); the caller owns the descriptor.

        Raises:
            TransportError: the peer is gone, or sent something that is no message of this channel.
            UpdateTimeoutError: nothing came.
        """
        fd: int | None = None
        try:
            with self._errors("send a message", timeout_s):
                self._socket.settimeout(timeout_s)
                header, fds, _, _ = socket.recv_fds(self._socket, _HEADER.size, 1)
                fd = fds[0] if fds else None
                header += self._read(_HEADER.size - len(header)) if header else b""
                if not header:
                    raise EOFError
                size, has_fd = _HEADER.unpack(header)
                if size > MAX_FRAME_BYTES or bool(has_fd) != (fd is not None):
                    raise TransportError(f"{self.peer} sent a frame of {size} bytes that is not of this channel")
                body = self._read(size)
            message = self._decode(body)
            kept, fd = fd, None
            return message, kept
        finally:
            if fd is not None:
                os.close(fd)

    def _decode(self, body: bytes) -> M:
        try:
            return unpack(body, self._decoder)
        except TransportError as error:
            raise TransportError(f"{self}: {error}") from error

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._socket.recv_into(view)
            if count == 0:
                raise EOFError
            view = view[count:]
        return bytes(data)

    def _errors(self, what: str, timeout_s: float) -> _Translate:
        return _Translate(str(self), what, timeout_s)

    def fileno(self) -> int:
        """For whoever waits for several channels."""
        return self._socket.fileno()

    def close(self) -> None:
        """Idempotent; wakes a thread that waits in `receive`."""
        with contextlib.suppress(OSError):  # not connected any more: nothing to say goodbye to
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class _Translate:
    """Turns socket errors into ours, with the peer's name."""

    def __init__(self, peer: str, what: str, timeout_s: float) -> None:
        self._peer, self._what, self._timeout_s = peer, what, timeout_s

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TimeoutError):
            raise UpdateTimeoutError(f"{self._peer} did not {self._what} for {self._timeout_s:g} s") from error
        if isinstance(error, (OSError, EOFError)):
            raise TransportError(
                f"the link to {self._peer} is broken: {error or 'it closed the connection'}"
            ) from error


class Listener:
    """Where one sender's receivers connect: on this host, or from others, too."""

    def __init__(self, host: str | None = None) -> None:
        """*host*: the address by which other hosts reach this one; None for a Unix socket."""
        if host is None:
            self.address = f"weightsync-{secrets.token_hex(16)}"
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.bind("\0" + self.address)
        else:
            self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
            try:
                self._socket.bind((host, 0))
            except OSError:  # others reach it by an address that it does not have: a translated one
                self._socket.bind(("", 0))
            self.address = f"{host} {self._socket.getsockname()[1]}"
        self._socket.listen(1024)

    def accept(self, message_type: type[M], *, timeout_s: float) -> Channel[M]:
        """Raises TimeoutError when nobody came, OSError after `close`."""
        self._socket.settimeout(timeout_s)
        connection, _ = self._socket.accept()
        return Channel(connection, message_type, "receiver")

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Idempotent; wakes a thread that waits in `accept`."""
        with contextlib.suppress(OSError):  # already shut
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def dial(address: str, message_type: type[M], *, peer: str, timeout_s: float) -> Channel[M]:
    """Connect to the listener at *address* on this host.

    Raises:
        TransportError: nobody listens there: the process is gone, or runs on another host.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        sock.connect("\0" + address)
    except OSError as error:
        sock.close()
        raise TransportError(
            f"{peer} cannot be reached over shared memory ({error}): it must run in the same network namespace "
            "of the same host; use transport: broadcast for others"
        ) from error
    return Channel(sock, message_type, peer)


def dial_host(address: str, message_type: type[M], *, peer: str, timeout_s: float) -> Channel[M]:
    """Connect to the listener at *address* ("host port").

    Raises:
        TransportError: nobody listens there, or the network does not lead there.
    """
    host, _, port = address.rpartition(" ")
    try:
        sock = socket.create_connection((host, int(port)), timeout=timeout_s)
    except OSError as error:
        raise TransportError(f"{peer} cannot be reached at {host} port {port} ({error})") from error
    return Channel(sock, message_type, peer)
