"""A whole weight sync within one process, without Ray; messages are encoded as on a wire."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from weightsync import messages as m
from weightsync.config import SyncConfig
from weightsync.engines.torch_module import TorchModuleAdapter
from weightsync.errors import WeightSyncError
from weightsync.interfaces import EngineAdapter
from weightsync.messages import decode_reply, decode_request, encode
from weightsync.receiver import ReceiverRank
from weightsync.sender import SenderRank
from weightsync.session import Session

Handler = Callable[[bytes], list[bytes]]
"""One party: an encoded request in, one encoded reply a rank out."""


class LocalFleet:
    """A `Fleet` whose parties live here, each served by a thread of its own. Messages are encoded as on a wire."""

    def __init__(self, trainers: Sequence[Handler], engines: Sequence[Handler]) -> None:
        self.trainers = [f"trainer {i}" for i in range(len(trainers))]
        self.engines = [f"engine {i}" for i in range(len(engines))]
        self._answers: queue.Queue[tuple[str, int, tuple[m.Reply, ...] | WeightSyncError]] = queue.Queue()
        self._current: dict[str, int] = {}
        self._inbox: dict[str, queue.Queue[tuple[int, bytes] | None]] = {}
        handlers = dict(zip([*self.trainers, *self.engines], [*trainers, *engines], strict=True))
        for party, handler in handlers.items():
            inbox = self._inbox[party] = queue.Queue()
            threading.Thread(target=self._serve, args=(party, handler, inbox), daemon=True).start()

    def _serve(self, party: str, handler: Handler, inbox: queue.Queue[tuple[int, bytes] | None]) -> None:
        while (item := inbox.get()) is not None:
            number, payload = item
            try:
                answer: tuple[m.Reply, ...] | WeightSyncError = tuple(decode_reply(reply) for reply in handler(payload))
            except Exception as error:
                answer = error if isinstance(error, WeightSyncError) else WeightSyncError(repr(error))
            self._answers.put((party, number, answer))

    def send(self, party: str, request: m.Request) -> None:
        number = self._current[party] = self._current.get(party, 0) + 1
        self._inbox[party].put((number, encode(request)))

    def replies(self, wait_s: float) -> Iterator[tuple[str, tuple[m.Reply, ...] | WeightSyncError]]:
        try:
            party, number, answer = self._answers.get(timeout=wait_s)
        except queue.Empty:
            return
        if number == self._current[party]:
            yield party, answer

    def close(self) -> None:
        """End the threads."""
        for inbox in self._inbox.values():
            inbox.put(None)


class LocalSync:
    """Trainers and engines in this process, over a real transport. Use with `with`.

    Args:
        sources: per trainer rank, a function that gives a module, a mapping or (name, tensor) pairs.
        engines: per engine, its ranks: adapters, or modules.
    """

    def __init__(
        self, sources: Sequence[Callable[[], Any]], engines: Sequence[Sequence[EngineAdapter]], config: SyncConfig
    ) -> None:
        self.senders = [SenderRank(i, source) for i, source in enumerate(sources)]
        self.receivers = [[ReceiverRank(adapter, rank=i) for i, adapter in enumerate(ranks)] for ranks in engines]
        self.fleet = LocalFleet(
            [in_process_party([sender]) for sender in self.senders],
            [in_process_party(receivers) for receivers in self.receivers],
        )
        self.session = Session(self.fleet, config)

    def __enter__(self) -> Session:
        try:
            self.session.open()
        except BaseException:
            self.__exit__()
            raise
        return self.session

    def __exit__(self, *_: object) -> None:
        self.session.close()
        self.fleet.close()


def module_engine(module: Any) -> list[EngineAdapter]:
    """An engine of one rank that is a torch module."""
    return [TorchModuleAdapter(module)]


def in_process_party(ranks: Sequence[SenderRank] | Sequence[ReceiverRank]) -> Handler:
    """A party whose ranks are objects of this process."""

    def handle(payload: bytes) -> list[bytes]:
        # Ranks of one engine answer side by side, as processes do: links may be collective.
        replies: list[bytes] = [b""] * len(ranks)

        def one(i: int) -> None:
            replies[i] = encode(ranks[i].handle(decode_request(payload)))

        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return replies

    return handle
