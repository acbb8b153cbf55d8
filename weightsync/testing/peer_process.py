"""One end of a link in a process of its own, to be killed or stopped."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from weightsync.background import Background
from weightsync.chunk import WeightChunk
from weightsync.interfaces import LinkContext, ReceiverTransport, SenderTransport, Transfer, TransferStats
from weightsync.testing.link import Received, endless, model, receive_all, transfer
from weightsync.testing.processes import ProcessParty
from weightsync.weightset import SetDigests, WeightSet


@dataclass(frozen=True)
class ClassReference:
    """A class of which another process can find the module, which may be a test file."""

    module: str
    file: str
    name: str

    @classmethod
    def of(cls, kind: type) -> ClassReference:
        assert "<locals>" not in kind.__qualname__, (
            f"{kind.__qualname__}: other processes find module-level classes only"
        )
        file = getattr(sys.modules[kind.__module__], "__file__", None) or ""
        return cls("__mp_main__" if kind.__module__ == "__main__" else kind.__module__, file, kind.__qualname__)

    def load(self) -> Any:
        try:
            module = importlib.import_module(self.module)
            found = getattr(module, "__file__", None) == self.file
        except ImportError:
            found = False
        if not found:
            spec = importlib.util.spec_from_file_location(self.module, self.file)
            assert spec is not None and spec.loader is not None, f"{self.module} cannot be imported from {self.file}"
            module = sys.modules[self.module] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        kind: Any = module
        for part in self.name.split("."):
            kind = getattr(kind, part)
        return kind


class Ends:
    """What a peer does when asked: it is one end of a link. Each method is a function for `Peer.ask`."""

    kind: Any
    receiver: ReceiverTransport
    sender: SenderTransport
    chunks: Iterator[WeightChunk | WeightSet | SetDigests]
    lent: WeightChunk | WeightSet | SetDigests
    sending: Background[TransferStats]

    def load(self, kind: ClassReference) -> None:
        """Before all others, so that importing counts in no bound."""
        self.kind = kind.load()

    def connect_receiver(self, context: LinkContext, index: int, address: bytes) -> None:
        self.receiver = self.kind(context, receiver=index)
        self.receiver.connect(address)

    def receive(self, of: Transfer) -> Received:
        return receive_all(self.receiver, of)

    def take_one_chunk(self, of: Transfer) -> None:
        """And do not release it."""
        self.chunks = iter(self.receiver.receive(of))
        self.lent = next(self.chunks)

    def close_receiver(self) -> None:
        self.receiver.close()

    def open_sender(self, context: LinkContext) -> bytes:
        self.sender = self.kind(context)
        return self.sender.open(transfer(1, model(1)).manifest.tensors)

    def connect_sender(self) -> None:
        self.sender.connect()

    def send_without_end(self) -> None:
        self.sending = Background(lambda: self.sender.send(transfer(1, model(1)), endless(model(1))), name="suite")


def _serve() -> tuple[Callable[[bytes], Sequence[bytes]], Ends]:
    return lambda payload: [payload], Ends()


class Peer(ProcessParty):
    """The process, seen from the suite's. Use with `with`; its end is abrupt."""

    def __init__(self, kind: type) -> None:
        """*kind* is the class of the end that it is to hold."""
        super().__init__(f"a peer with a {kind.__name__}", _serve)
        self.ask(Ends.load, ClassReference.of(kind))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
