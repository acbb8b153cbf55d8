"""A rank's end of its sidecar: memory that both have mapped, and pulls into it. Needs no Ray.

rank                                sidecar (weightsync.transports.sidecar)
NewArena(nbytes)                ->  takes registered memory
                                <-  Arena(id), with its file descriptor
Pull(source, ...)               ->  reads from another sidecar's arena into this one
                                <-  Pulled, or Refused with the reason
"""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec
import torch

from weightsync.errors import ConfigError, TransportError, UpdateTimeoutError
from weightsync.transports.channel import Channel, dial
from weightsync.transports.segment import open_segment

_SET_UP_S = 30.0
"""The least bound for what happens once: NIXL registers memory, and agents meet."""
_GRACE_S = 5.0
STIRRED_S = 10.0
"""For how long a sidecar looks after its peers' reads at short intervals."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Sidecar to rank, first on a channel."""

    actor: str
    """Name of the Ray actor, by which other sidecars find it."""
    backend: str
    """What NIXL was set up with: "UCX (sm,self,tcp)"."""


class Stir(msgspec.Struct, tag=True, frozen=True):
    """Rank to sidecar: somebody is about to read from you."""


class NewArena(msgspec.Struct, tag=True, frozen=True):
    nbytes: int


class Arena(msgspec.Struct, tag=True, frozen=True):
    id: int
    nbytes: int


class Source(msgspec.Struct, frozen=True):
    """An arena, as other sidecars find it."""

    actor: str
    arena: int


class Pull(msgspec.Struct, tag=True, frozen=True):
    source: Source
    offset: int
    nbytes: int
    into: int
    """Where in the rank's own arena."""
    timeout_s: float


class Pulled(msgspec.Struct, tag=True, frozen=True):
    seconds: float


class Refused(msgspec.Struct, tag=True, frozen=True):
    reason: str
    late: bool = False


MESSAGES: Any = Ready | Stir | NewArena | Arena | Pull | Pulled | Refused
"""All that travels on a channel between them."""


class ArenaClient:
    """One arena, for one end of one link. `abort` may come from any thread."""

    def __init__(self, address: str, *, who: str, timeout_s: float) -> None:
        """*address* is the sidecar's; *who* it serves, for errors.

        Raises:
            TransportError: it is gone. ConfigError: this rank was given none.
        """
        if not address:
            raise ConfigError(
                f"{who} has no sidecar: transport sharded_rdt works between Ray actors, or where whoever reaches the ranks "
                "starts sidecars for them (Fleet.helpers)",
                key="transport",
            )
        self.who = f"the sidecar of {who}"
        self._timeout_s = timeout_s
        self._channel: Channel[Any] = dial(address, MESSAGES, peer=self.who, timeout_s=timeout_s)
        try:
            ready = self._hear(max(timeout_s, _SET_UP_S))
        except BaseException:
            self._channel.close()
            raise
        assert isinstance(ready, Ready), ready
        self.backend = ready.backend
        self.nbytes_pulled = 0
        self._actor = ready.actor
        self._pulling: list[Pull] = []
        self._stirred = 0.0

    def take(self, nbytes: int) -> torch.Tensor:
        """Shared memory of that size, registered with NIXL; once."""
        self._channel.send(NewArena(nbytes), timeout_s=self._timeout_s)
        arena, fd = self._channel.receive(timeout_s=max(self._timeout_s, _SET_UP_S))
        if isinstance(arena, Refused):
            raise TransportError(f"{self._channel} has no memory for it: {arena.reason}")
        assert isinstance(arena, Arena) and fd is not None, arena
        try:
            self.source = Source(self._actor, arena.id)
            return open_segment(fd, arena.nbytes)[:nbytes]
        finally:
            os.close(fd)

    def stir(self) -> None:
        """Others are about to read from this arena, or still do; to be said now and then."""
        now = time.monotonic()
        if now - self._stirred > STIRRED_S / 4:
            self._stirred = now
            self._channel.send(Stir(), timeout_s=self._timeout_s)

    def start_pull(self, source: Source, *, offset: int, nbytes: int, into: int, set_up: bool = False) -> None:
        """Begin to read from another arena into this one; `finish_pull` waits for it. *set_up*: for the first time."""
        timeout_s = max(self._timeout_s, _SET_UP_S) if set_up else self._timeout_s
        pull = Pull(source, offset, nbytes, into, timeout_s)
        self._channel.send(pull, timeout_s=self._timeout_s)
        self._pulling.append(pull)

    def finish_pull(self) -> float:
        """Wait until what was begun first is here; seconds that it took.

        Raises:
            TransportError: it cannot be read, or either sidecar is gone. UpdateTimeoutError: it took too long.
        """
        pull = self._pulling.pop(0)
        answer = self._hear(pull.timeout_s + _GRACE_S)
        if isinstance(answer, Refused):
            kind = UpdateTimeoutError if answer.late else TransportError
            raise kind(f"{self._channel} could not pull {pull.nbytes} bytes: {answer.reason}")
        assert isinstance(answer, Pulled), answer
        self.nbytes_pulled += pull.nbytes
        return answer.seconds

    def _hear(self, timeout_s: float) -> Any:
        return self._channel.receive(timeout_s=timeout_s)[0]

    def abort(self) -> None:
        """Make whoever waits raise; the memory goes back to the sidecar when nothing is read into it any more."""
        self._channel.close()
