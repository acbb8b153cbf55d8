"""A whole weight sync within one process, without Ray; messages are encoded as on a wire."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weightsync import messages as m
from weightsync.config import SyncConfig
from weightsync.engines.torch_module import TorchModuleAdapter
from weightsync.errors import TransportError, WeightSyncError
from weightsync.identity import Identity
from weightsync.interfaces import EngineAdapter
from weightsync.process import process_state
from weightsync.receiver import ReceiverRank
from weightsync.sender import SenderRank
from weightsync.session import Session

if TYPE_CHECKING:
    from weightsync.transports.sidecar import Sidecars

Handler = Callable[[bytes], Sequence[bytes]]
"""One party: an encoded call in, one encoded reply a rank out."""


class LocalFleet:
    """A `Fleet` whose parties live here, each served by a thread of its own. Messages are encoded as on a wire."""

    def __init__(
        self, trainers: Sequence[Handler], engines: Sequence[Handler], *, sidecars: Sidecars | None = None
    ) -> None:
        """*sidecars*: for transports that need such, of which the caller takes care; without, they are started when needed,
        in the Ray that this process is connected to."""
        self.trainers: list[str] = []
        self.engines: list[str] = []
        self._answers: queue.Queue[tuple[str, int, Sequence[bytes] | WeightSyncError]] = queue.Queue()
        self._inbox: dict[str, queue.Queue[tuple[int, bytes] | None]] = {}
        self._restarts: dict[str, Callable[[], Handler]] = {}
        self._num_engines = 0
        self._sidecars, self._own_sidecars = sidecars, sidecars is None
        for i, handler in enumerate(trainers):
            self.trainers.append(f"trainer {i}")
            self._start(f"trainer {i}", handler)
        for handler in engines:
            self.add(handler)

    def add(self, handler: Handler, *, restart: Callable[[], Handler] | None = None) -> str:
        """Another engine; returns its name. *restart* makes it anew when `reopen` is called."""
        party = f"engine {self._num_engines}"
        self._num_engines += 1
        self.engines.append(party)
        self._start(party, handler)
        if restart is not None:
            self.add_restart(party, restart)
        return party

    def add_restart(self, party: str, restart: Callable[[], Handler]) -> None:
        """How `reopen` brings a party back."""
        self._restarts[party] = restart

    def _start(self, party: str, handler: Handler) -> None:
        inbox = self._inbox[party] = queue.Queue()
        threading.Thread(target=self._serve, args=(party, handler, inbox), daemon=True).start()

    def _serve(self, party: str, handler: Handler, inbox: queue.Queue[tuple[int, bytes] | None]) -> None:
        while (item := inbox.get()) is not None:
            number, payload = item
            try:
                answer: Sequence[bytes] | WeightSyncError = handler(payload)
            except Exception as error:
                answer = error if isinstance(error, WeightSyncError) else WeightSyncError(repr(error))
            self._answers.put((party, number, answer))

    def send(self, party: str, number: int, payload: bytes) -> None:
        self._inbox[party].put((number, payload))

    def replies(self, wait_s: float) -> Iterator[tuple[str, int, Sequence[bytes] | WeightSyncError]]:
        try:
            yield self._answers.get(timeout=wait_s)
        except queue.Empty:
            return

    def reopen(self, party: str) -> None:
        """Raises TransportError where nobody said how to restart the party."""
        if party not in self._restarts:
            raise TransportError(f"{party} cannot be restarted", rank=party)
        self._inbox[party].put(None)
        self._start(party, self._restarts[party]())

    def remove(self, party: str) -> None:
        self.engines.remove(party)
        if self._sidecars is not None:
            self._sidecars.forget(party)

    def use_sidecars(self, sidecars: Sidecars) -> None:
        """As if they had been given when it was made."""
        self._sidecars, self._own_sidecars = sidecars, False

    def helpers(self, ranks: Mapping[str, Identity]) -> Mapping[str, str]:
        from weightsync.transports.sidecar import Sidecars

        if self._sidecars is None:
            self._sidecars = Sidecars(timeout_s=30)
        return self._sidecars.addresses(ranks)

    def process_state(self, identity: Identity) -> str:
        return process_state(identity.pid, identity.started)

    def close(self) -> None:
        """End the threads, and sidecars that were started here."""
        if self._sidecars is not None and self._own_sidecars:
            self._sidecars.close()
        for inbox in self._inbox.values():
            inbox.put(None)


class LocalSync:
    """Trainers and engines in this process, over a real transport. Use with `with`.

    Args:
        sources: per trainer rank, a function that gives a module, a mapping or (name, tensor) pairs.
        engines: per engine, its ranks: adapters, or modules.
    """

    def __init__(
        self,
        sources: Sequence[Callable[[], Any]],
        engines: Sequence[Sequence[EngineAdapter]],
        config: SyncConfig,
        *,
        sidecars: Sidecars | None = None,
    ) -> None:
        self.senders = [SenderRank(i, source) for i, source in enumerate(sources)]
        self.receivers = [[ReceiverRank(adapter, rank=i) for i, adapter in enumerate(ranks)] for ranks in engines]
        self.fleet = LocalFleet(
            [in_process_party([sender]) for sender in self.senders],
            [in_process_party(receivers) for receivers in self.receivers],
            sidecars=sidecars,
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
            replies[i] = m.answer(ranks[i].handle, payload)

        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return replies

    return handle
