"""Parties in processes of their own, so that they can really be killed and stopped."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from weightsync.errors import RestartedError, TransportError
from weightsync.testing.local import Handler

_END_S = 5.0

Serve = Callable[[], tuple[Handler, Any]]
"""Makes, in the process, the party's handler and an object that `ask` gives to its functions; importable by name."""


class ProcessParty:
    """A party of a `LocalFleet` that lives in a process of its own: a `Handler`.

    Once killed it answers that it is gone; after `restart` that it was restarted, until `reopen` is called, as an actor
    does.
    """

    def __init__(self, name: str, serve: Serve) -> None:
        self.name = name
        self._serve = serve
        self._lock = threading.Lock()
        self._reopened = True
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "weightsync.testing"])
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(self._serve, theirs), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def __call__(self, payload: bytes) -> Sequence[bytes]:
        if not self._reopened:
            raise RestartedError(f"{self.name} was restarted", rank=self.name)
        answer: Sequence[bytes] = self._request("call", payload)
        return answer

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What *function* (importable by name) returns in the process, given the party's object and *arguments*."""
        return self._request("ask", function, *arguments)

    def _request(self, *request: Any) -> Any:
        connection = self._connection
        try:
            with self._lock:
                connection.send(request)
                kind, answer = connection.recv()
        except (EOFError, OSError) as error:
            self._process.join(_END_S)
            raise TransportError(f"the process of {self.name} (pid {self.pid}) is gone", rank=self.name) from error
        if kind == "error":
            raise answer
        return answer

    def signal(self, number: int) -> None:
        """Send a signal; a dead process is left alone."""
        if self._process.is_alive():
            os.kill(self.pid, number)
            if number == signal.SIGKILL:
                self._process.join(_END_S)

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def restart(self) -> None:
        """A new process in place of one that is gone."""
        self.close()
        self._lock = threading.Lock()
        self._reopened = False
        self._start()

    def reopen(self) -> Handler:
        """Take part again after a restart, with the weights that the process started with."""
        self._reopened = True
        return self

    def close(self) -> None:
        """Idempotent."""
        self.signal(signal.SIGKILL)
        self._connection.close()


def _run(serve: Serve, connection: Connection) -> None:
    handler, subject = serve()
    while True:
        try:
            kind, *request = connection.recv()
        except EOFError:
            return
        try:
            answer = handler(*request) if kind == "call" else request[0](subject, *request[1:])
            connection.send(("answer", answer))
        except Exception as error:
            connection.send(("error", error))
