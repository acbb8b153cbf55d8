"""One link's process group over gloo: rendezvous, headers and, on the CPU, payloads.

The group is the link's own; torch.distributed's default group is never touched. Rank 0 is the sender, which also serves the
rendezvous; receiver i is rank i + 1. Every operation is bounded, and an abort from any thread interrupts it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import xxhash

from weightsync.background import Background
from weightsync.errors import TransportError, UpdateTimeoutError
from weightsync.identity import identify
from weightsync.interfaces import LinkContext
from weightsync.process import own_start_ticks, process_state
from weightsync.ranks import SENDER, receiver_of

_POLL_S = 0.0002
_EAGER_POLL_S, _EAGER_S = 0.00002, 0.003  # most waits within a transfer are for what is nearly there
_GATHER_POLL_S = 0.005
_CLOSE_S = 1.0
_GRACE_S = 0.5
_LATER_S = 0.1  # by which gloo's own bound comes after ours, whose error has names
_DYING_S = 0.1


class Address(msgspec.Struct, frozen=True):
    """Where the link's rendezvous store listens, and by what its payloads travel."""

    host: str
    port: int
    backend: str = "gloo"


@dataclass(slots=True)
class Flight:
    """A payload on its way."""

    event: Any
    what: str


class GlooGroup:
    """One link's group as one of its ranks sees it."""

    def __init__(self, context: LinkContext, address: Address, rank: int) -> None:
        """Raises TransportError where torch has no distributed, or the sender cannot listen."""
        if not dist.is_available():
            raise TransportError("this torch was built without torch.distributed; transport: broadcast needs it")
        self.who = f"broadcast link of sender {context.sender}"
        self.aborted = False
        self.rank, self.size = rank, context.num_receivers + 1
        self.timeout_s = context.timeout_s
        self._device = torch.device(context.device).index or 0
        self._token, self._address = context.token, address
        self.members: list[tuple[int, ...]] = []
        """Of each rank: a number for its host, pid, when the process started, number of its GPU; known when connected."""
        self._group: Any = None
        self._last: object = None
        """Kept as long as the work on it may last."""
        self._store: dist.TCPStore | None = None  # kept until the end: rank 0's serves the others
        if rank == SENDER:
            self._open_store()
        self.port = self._store.port if self._store is not None else address.port

    def _open_store(self) -> None:
        address = self._address
        try:
            if self.rank != SENDER:  # the store's own client tries for the whole bound where nobody listens
                socket.create_connection((address.host, address.port), self.timeout_s).close()
            self._store = dist.TCPStore(
                address.host,
                address.port,
                is_master=self.rank == SENDER,
                timeout=timedelta(seconds=self.timeout_s),
                wait_for_workers=False,
            )
        except Exception as error:
            raise TransportError(f"{self.who}: no rendezvous at {address.host}:{address.port} ({error})") from error

    def connect(self, own_host: str) -> None:
        """Collective: the sender and every receiver call this, or all wait until the bound.

        Raises:
            TransportError: the sender is not there, or a receiver did not come; the message says which.
        """
        # The store's client waits for a server that is stopped without a bound, and no wait of its own can be aborted.
        meeting = Background(self._meet, name="broadcast-meet")
        deadline = time.monotonic() + self.timeout_s + _GRACE_S
        while not meeting.is_done(_GATHER_POLL_S):
            self.check()
            if time.monotonic() > deadline:
                raise TransportError(f"{self.who}: its rendezvous did not answer within {self.timeout_s:g} s")
        meeting.result()
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=self.timeout_s + _LATER_S)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_host)]
        try:
            store = dist.PrefixStore(self._token, self._store)  # type: ignore[arg-type]
            self._group = dist.ProcessGroupGloo(store, self.rank, self.size, options)
        except Exception as error:
            raise TransportError(
                f"{self.who}: rank {self.rank} of {self.size} could not join within {self.timeout_s:g} s ({error})"
            ) from error
        own = (_place(), os.getpid(), own_start_ticks(), self._device)
        values = [0] * len(own) * self.size
        values[self.rank * len(own) : (self.rank + 1) * len(own)] = own
        found = self.sum(values, "meeting the others")
        self.members = [(*found[i : i + len(own)],) for i in range(0, len(found), len(own))]

    def _meet(self) -> None:
        if self._store is None:
            self._open_store()
        self._gather()

    def _gather(self) -> None:
        """Wait for all ends at the store first: that wait can be aborted, and knows who is absent."""
        deadline = time.monotonic() + self.timeout_s
        ends = {f"{self._token}/here/{rank}": f"receiver {rank - 1}" if rank else "sender" for rank in range(self.size)}
        try:
            assert self._store is not None
            self._store.set(f"{self._token}/here/{self.rank}", "")
            while not self._store.check(list(ends)):
                self.check()
                if time.monotonic() > deadline:
                    absent = ", ".join(end for key, end in ends.items() if not self._store.check([key]))
                    raise TransportError(f"{self.who}: {absent} did not connect within {self.timeout_s:g} s")
                time.sleep(_GATHER_POLL_S)
        except RuntimeError as error:
            raise TransportError(f"{self.who}: the rendezvous is gone ({error})") from error

    def check(self) -> None:
        """Raises TransportError after an abort."""
        if self.aborted:
            raise TransportError(f"{self.who} was aborted")

    def start(self, tensor: torch.Tensor, *, root: int = SENDER) -> Any:
        """Collective: begin to broadcast *tensor* (on the CPU) from *root*; returns what `wait` takes."""
        self.check()
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        return self._of_group().broadcast([tensor], options)

    def say_last(self, tensor: torch.Tensor) -> None:
        """From this rank: begin to broadcast *tensor*, for which nobody here will wait."""
        self._last = tensor, self.start(tensor, root=self.rank)

    def sum(self, values: Sequence[int], what: str) -> list[int]:
        """Collective: the ranks' *values*, added one by one; a meeting of all of them.

        Raises:
            TransportError, UpdateTimeoutError: as `wait`.
        """
        self.check()
        tensor = torch.tensor(values, dtype=torch.int64)
        work = self._of_group().allreduce([tensor], dist.AllreduceOptions())
        self.wait(work, what)
        return [int(value) for value in tensor]

    def _of_group(self) -> Any:
        group = self._group
        if group is None:
            raise TransportError(f"{self.who} is not connected, or was closed")
        return group

    def is_done(self, work: Any, what: str) -> bool:
        """Whether what `start` began has ended.

        Raises:
            TransportError: it failed: a peer died or left.
        """
        if not work.is_completed():
            return False
        try:
            work.wait()
        except Exception as error:
            reason = str(error).partition(" This is typically")[0]
            lost = self.lost() or "a peer died or left"
            raise TransportError(f"{self.who} is broken at {what} ({reason}); {lost}") from error
        return True

    def wait(self, work: Any, what: str) -> None:
        """Wait for what `start` began; *what* it is, for errors.

        Raises:
            TransportError: a peer died or left, or the link was aborted. UpdateTimeoutError: a peer is silent.
        """
        began = time.monotonic()
        while not self.is_done(work, what):
            self.check()
            waited = time.monotonic() - began
            if waited > self.timeout_s:
                raise self.late(what)
            time.sleep(_EAGER_POLL_S if waited < _EAGER_S else _POLL_S)

    def late(self, what: str) -> UpdateTimeoutError:
        """The error for *what*, which has not ended within the bound."""
        lost = self.lost()
        return UpdateTimeoutError(
            f"{self.who}: {what} was not taken by all {self.size - 1} receivers within {self.timeout_s:g} s"
            + (f"; {lost}" if lost else "")
        )

    def lost(self) -> str:
        """Which members' processes on this host are gone or stopped, in words; "" where none is known to be."""
        found = self.missed("gone", "stopped")
        if not found:  # a process that dies has closed its connections a moment before
            time.sleep(_DYING_S)
            found = self.missed("gone", "stopped")
        return found

    def missed(self, *states: str) -> str:
        """Which members' processes on this host are in one of these states now (default: gone), in words."""
        return ", ".join(
            f"{_name(rank)} (pid {pid}) is {state}"
            for rank, (place, pid, started, _) in enumerate(self.members)
            if place == _place() and (state := process_state(pid, started)) in (states or ("gone",))
        )

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.aborted = True
        # A gloo group ends only when the broadcasts under way have, at their bound; its abort does nothing (torch 2.13).
        last = [self._group]
        self._group = self._store = None
        Background(last.clear, name="broadcast-close").join(_CLOSE_S)


def _name(rank: int) -> str:
    return "sender" if rank == SENDER else f"receiver {receiver_of(rank)}"


@cache
def _place() -> int:
    """A number for the host and namespace in which this process has its pid."""
    return xxhash.xxh3_64_intdigest(identify().pid_space.encode()) >> 2


class GlooPayload:
    """Payloads that travel as the headers do: what `NcclGroup` is to GPU memory, for CPU memory."""

    num_buckets = 2
    ahead = False
    """Whether the next buckets are received while one is read; here that would only take the reader's cores."""

    def __init__(self, gloo: GlooGroup, *, bucket_bytes: int, largest_bytes: int) -> None:
        self._gloo, self._bucket_bytes = gloo, bucket_bytes
        self.largest_bytes = largest_bytes
        self._buckets: list[torch.Tensor] = []

    def synchronize(self) -> None: ...

    def begin(self, version: int = 0) -> tuple[int, int]:
        """As `NcclGroup.begin`, but nobody has to meet, and nothing is planned."""
        return version, 0

    def bucket(self, index: int) -> torch.Tensor:
        """One to send from; allocated when first asked for."""
        while len(self._buckets) <= index:
            self._buckets.append(torch.empty(self._bucket_bytes, dtype=torch.uint8))
        return self._buckets[index]

    def room(self, index: int, nbytes: int) -> torch.Tensor:
        """One to receive into, of at least *nbytes*."""
        if len(self._buckets) <= index:
            self._buckets.append(torch.empty(0, dtype=torch.uint8))
        if self._buckets[index].numel() < nbytes:
            self._buckets[index] = torch.empty(nbytes, dtype=torch.uint8)
        return self._buckets[index][:nbytes]

    def start(self, payload: torch.Tensor, what: str) -> Flight:
        return Flight(self._gloo.start(payload), what)

    def wait(self, flight: Flight, meanwhile: Callable[[], None] | None = None) -> None:
        """*meanwhile* is not called: there is nothing to receive ahead."""
        self._gloo.wait(flight.event, flight.what)

    def stop(self) -> None: ...

    def close(self) -> None:
        self._buckets.clear()


def node_host(peer_host: str) -> str:
    """The address of this node from which *peer_host* is reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer_host, 9))  # a datagram socket: sends nothing, only chooses the interface
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
