"""Receivers in processes of their own, for `test_conformance`: a server that has imported torch forks one a connection.

    python receiver_process.py SOCKET

A connection carries pickled (command, arguments) to the process and ("ok", value) or ("error", kind, text) back.
"""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import Connection, Listener
from typing import Any

from weightsync.chunk import as_bytes
from weightsync.coalescer import Coalescer
from weightsync.interfaces import LinkContext, ReceiverTransport, Transfer
from weightsync.loadmap import ModuleGroup
from weightsync.registry import transport_classes

Received = dict[str, tuple[str, tuple[int, ...], bytes]]
"""name -> (dtype, shape, row-major bytes)."""


def receive_all(receiver: ReceiverTransport, transfer: Transfer) -> Received:
    """One version, whole and verified as the context says."""
    manifest = transfer.manifest
    target = Coalescer(
        manifest,
        (ModuleGroup("(model)", manifest.all_names),),
        version=transfer.version,
        staging_limit_bytes=1 << 30,
        timeout_s=receiver.context.timeout_s,
        verify=receiver.context.digest,
    )
    for chunk in receiver.receive(transfer):
        target.put(chunk)
    target.producer_done()
    found: Received = {}
    for group in target.groups():
        for name, tensor in group:
            found[name] = (str(tensor.dtype), tuple(tensor.shape), as_bytes(tensor).numpy().tobytes())
    target.close()
    return found


class _Ends:
    receiver: ReceiverTransport

    def pid(self) -> int:
        return os.getpid()

    def connect(self, transport: str, context: LinkContext, index: int, address: bytes) -> None:
        self.receiver = transport_classes(transport)[1](context, receiver=index)
        self.receiver.connect(address)

    def receive(self, transfer: Transfer) -> Received:
        return receive_all(self.receiver, transfer)

    def die_after_one_chunk(self, transfer: Transfer) -> None:
        next(iter(self.receiver.receive(transfer)))
        os._exit(1)

    def close(self) -> None:
        self.receiver.close()


def serve(connection: Connection[Any, Any]) -> None:
    ends = _Ends()
    while True:
        try:
            command, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer: tuple[str, ...] | tuple[str, Any] = ("ok", getattr(ends, command)(*arguments))
        except Exception as error:
            answer = ("error", type(error).__name__, str(error))
        connection.send(answer)


def main(path: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with Listener(path, "AF_UNIX") as listener:
        while True:
            connection = listener.accept()
            if os.fork() == 0:
                serve(connection)
                os._exit(0)
            connection.close()


if __name__ == "__main__":
    main(sys.argv[1])
