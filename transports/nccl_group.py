"""One link's payloads over NCCL: a communicator of its own beside the link's gloo group, which keeps all the rest.

    connect     unique id over gloo, join, one broadcast that opens NCCL's connections
    a transfer  all members meet over gloo; where a GPU takes part in several links, they take turns (`turns`)
    a bucket    announced over gloo, so that nobody starts a kernel for which the others are not on their way
    close       finalize and destroy; after a failure, or where that takes long, abort, which ends kernels that run

Waits poll and are bounded; what they raise has ended the communicator, and the link with it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache

import torch

from weightsync.background import Background
from weightsync.cuda.memory import GpuMemory
from weightsync.cuda.moves import Moves, stream_of
from weightsync.errors import TransportError, UpdateTimeoutError, WeightSyncError
from weightsync.interfaces import LinkContext
from weightsync.ranks import SENDER
from weightsync.transports.gloo_group import Flight, GlooGroup
from weightsync.transports.nccl import UNIQUE_ID_BYTES, Communicator, new_unique_id
from weightsync.transports.turns import TURNS

_POLL_S = 0.00005
_SPIN_S = 0.0001  # NCCL takes so long to give a stream what it was called for
_LOOK_S = 0.25
_FINALIZE_S = 1.0
_CLOSE_S = 3.0
_WARM_UP_BYTES = 1 << 20


class _Streams:
    """Streams that links take when they connect and give back: a new one each time would strand cached memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[torch.device, list[torch.cuda.Stream]] = {}

    def take(self, device: torch.device) -> torch.cuda.Stream:
        with self._lock:
            idle = self._idle.setdefault(device, [])
            return idle.pop() if idle else torch.cuda.Stream(device, priority=-1)

    def give(self, stream: torch.cuda.Stream) -> None:
        with self._lock:
            self._idle[stream.device].append(stream)


_streams = _Streams()


class NcclGroup:
    """The communicator of one link as one of its ranks sees it. One thread at a time, but for `close`."""

    num_buckets = 4
    """An announcement takes as long as a bucket of 100 MB between two GPUs; so several are under way."""
    ahead = True
    """The next buckets are received while one is read."""

    def __init__(self, context: LinkContext, gloo: GlooGroup) -> None:
        device = torch.device(context.device)
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._gloo, self._timeout_s, self._token = gloo, context.timeout_s, context.token
        self._comm: Communicator | None = None
        self._stream: torch.cuda.Stream | None = None
        self._memory: list[torch.Tensor] = []
        self._order: list[int] = []
        """Ranks in the order in which they take their turns; of all processes of all links the same."""
        self.in_turns = False
        """Whether a GPU of a member takes part in other links, too; known after `begin`."""
        self.largest_bytes = 0
        """Of a bucket."""
        self._in_flight = 0
        self._not_given: Flight | None = None
        """That NCCL, in a thread of its own, is still giving the stream."""
        self._last_given: torch.cuda.Event | None = None
        """After the last bucket that the stream was given."""
        self.num_landed = 0
        """Buckets, of all transfers."""
        self._lock = threading.Lock()
        self._ending: Background[None] | None = None

    # ---- opening ------------------------------------------------------------------------------------------------

    def connect(self, bucket_bytes: int) -> None:
        """Collective, after the gloo group's. *bucket_bytes*: the sender's, which all use.

        Raises:
            TransportError, UpdateTimeoutError: a member did not join, or the GPU has no room for the buckets.
        """
        gloo, rank = self._gloo, self._gloo.rank
        TURNS.join(str(self.device), self._token)
        hello = torch.zeros(UNIQUE_ID_BYTES + 8, dtype=torch.uint8)
        if rank == SENDER:
            text = new_unique_id() + bucket_bytes.to_bytes(8, "little")
            hello = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        gloo.wait(gloo.start(hello), "NCCL's unique id")
        text = hello.numpy().tobytes()
        self.largest_bytes = max(int.from_bytes(text[UNIQUE_ID_BYTES:], "little"), 1)
        self._order = sorted(range(gloo.size), key=lambda member: (gloo.members[member], member))
        self._stream = _streams.take(self.device)
        for _ in range(self.num_buckets):
            self._memory.append(GpuMemory(self.device).pool(self.largest_bytes))
        self._warm_up_moves()
        with self._ends_on_error():
            self._comm = Communicator(text[:UNIQUE_ID_BYTES], rank=rank, size=gloo.size, device=self.device)
            self._settle("joining")
        payload = self._memory[0][:_WARM_UP_BYTES]
        with self.turn("the first broadcast"):
            self.wait(self.start(payload, "the first broadcast"))

    def _warm_up_moves(self) -> None:
        """Compile and load the kernel that copies and digests, before another one spins on this GPU."""
        source = self._memory[0][:64]
        Moves([(source, self._memory[1][:64])], self.device).run(digest=True)

    def bucket(self, index: int) -> torch.Tensor:
        """One of those to send from."""
        self._of_live()
        return self._memory[index]

    def room(self, index: int, nbytes: int) -> torch.Tensor:
        """One of those to receive into."""
        return self.bucket(index)[:nbytes]

    # ---- a transfer ---------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait for what this process computed, on whichever stream."""
        torch.cuda.synchronize(self.device)

    def begin(self, version: int = 0, plan: int = 0) -> tuple[int, int]:
        """Collective, at the start of each transfer: nobody sends before all have come.

        Args:
            version, plan: of the sender, for all to know: what comes, and by which plan that they were told before; 0: none.

        Returns:
            Both, as the sender said them.

        Raises:
            TransportError, UpdateTimeoutError: a member is gone, or silent.
        """
        links = [0] * self._gloo.size
        links[self._gloo.rank] = TURNS.num_links(str(self.device))
        version, plan, *links = self._gloo.sum([version, plan, *links], "the start of a transfer")
        self.in_turns = max(links) > 1
        return version, plan

    @contextlib.contextmanager
    def turn(self, what: str) -> Iterator[None]:
        """Collective: what is started within comes, on all members' GPUs, after what other links started in their turns before,
        and before what they start in later ones."""
        gloo, taken = self._gloo, False
        deadline = time.monotonic() + self._timeout_s

        def check() -> None:
            gloo.check()
            if time.monotonic() > deadline:
                raise UpdateTimeoutError(f"{gloo.who}: another link kept {self.device} for {self._timeout_s:g} s")

        gloo.sum([0], f"the members for {what}")  # nobody keeps a GPU for one that is reading
        given = None
        try:
            for member in self._order:
                if member == gloo.rank:
                    before, taken = TURNS.take(str(self.device), self._token, check), True
                    if before is not None and self._stream is not None:
                        self._stream.wait_event(before)
                gloo.wait(gloo.start(torch.zeros(1, dtype=torch.uint8), root=member), f"the turn for {what}")
            yield
            self._settle(what)
            given = self._last_given
        finally:
            if taken:
                TURNS.give(str(self.device), self._token, given)

    def start(self, payload: torch.Tensor, what: str) -> Flight:
        """Collective: begin to broadcast *payload* from rank 0; its bytes must be in place when this package's stream has
        done what it was given."""
        self._gloo.check()
        with self._ends_on_error():
            comm, stream = self._of_live(), self._stream
            assert stream is not None
            self._settle(what)
            stream.wait_stream(stream_of(self.device))
            comm.broadcast(payload.data_ptr(), payload.numel(), root=SENDER, stream=stream)
            self._in_flight += 1
            self._not_given = flight = Flight(torch.cuda.Event(), what)
        return flight

    def wait(self, flight: Flight, meanwhile: Callable[[], None] | None = None) -> None:
        """Wait until it has landed; *meanwhile* is called now and then.

        Raises:
            TransportError, UpdateTimeoutError: a member is gone or silent, or the link was aborted.
        """
        self._poll(lambda: self._has_landed(flight), flight.what, meanwhile)
        self._in_flight -= 1
        self.num_landed += 1

    def _has_landed(self, flight: Flight) -> bool:
        self._is_settled()
        return flight is not self._not_given and bool(flight.event.query())

    def _settle(self, what: str) -> None:
        """Wait until NCCL has given the stream what was called last: before that it takes no other call."""
        self._poll(self._is_settled, what)

    def _is_settled(self) -> bool:
        if not self._of_live().is_ready():
            return False
        if self._not_given is not None:
            self._last_given = self._not_given.event
            self._last_given.record(self._stream)
            self._not_given = None
        return True

    def _poll(self, is_done: Callable[[], bool], what: str, meanwhile: Callable[[], None] | None = None) -> None:
        looked = began = time.monotonic()
        deadline = looked + self._timeout_s
        with self._ends_on_error():
            while not is_done():
                self._gloo.check()
                if meanwhile is not None:
                    meanwhile()
                now = time.monotonic()
                if now > deadline:
                    raise self._gloo.late(what)
                if now > looked + _LOOK_S:  # of a process that died while the GPUs talk to each other nobody is told
                    looked = now
                    if lost := self._gloo.missed():
                        raise TransportError(f"{self._gloo.who} is broken at {what}; {lost}")
                if now > began + _SPIN_S:
                    time.sleep(_POLL_S)

    def _of_live(self) -> Communicator:
        comm = self._comm
        if comm is None or self._ending is not None:
            self._gloo.check()
            raise TransportError(f"{self._gloo.who} is not connected, or has ended")
        return comm

    @contextlib.contextmanager
    def _ends_on_error(self) -> Iterator[None]:
        """What is raised ends the communicator, so that no kernel of it goes on spinning; others' errors get a name."""
        try:
            yield
        except WeightSyncError as error:
            self._end(gently=False)
            if type(error) is TransportError and self._gloo.who not in str(error):
                lost = self._gloo.lost() or "a peer may have died"
                raise TransportError(f"{self._gloo.who} is broken ({error}); {lost}") from error
            raise
        except RuntimeError as error:  # a CUDA error
            self._end(gently=False)
            raise TransportError(f"{self._gloo.who}: the GPU failed ({error})") from error

    # ---- ending -------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """The link is broken: end what runs. Does not wait."""
        self._end(gently=False)

    def close(self) -> None:
        """Bounded and idempotent; what takes longer goes on in the background."""
        self._end(gently=self._in_flight == 0)
        assert self._ending is not None
        self._ending.join(_CLOSE_S)

    def _end(self, *, gently: bool) -> None:
        with self._lock:
            if self._ending is None:
                TURNS.leave(str(self.device), self._token)
                self._ending = Background(lambda: self._free(gently), name="nccl-close")

    def _free(self, gently: bool) -> None:
        comm, stream = self._comm, self._stream
        if comm is not None and not (gently and _finalize(comm)):
            comm.abort()
        self._comm = self._stream = None
        if stream is not None:
            stream.synchronize()
            _streams.give(stream)
        self._memory = []  # given back with the last view of it; that waits for all kernels of this process


@cache
def warm_up(device: torch.device) -> None:
    """Load and compile, once in a process, what takes seconds: a link's bound then has not to allow for it."""
    source = torch.zeros(64, dtype=torch.uint8, device=device)
    Moves([(source, torch.empty_like(source))], device).run(digest=True)
    comm = Communicator(new_unique_id(), rank=0, size=1, device=device)
    while not comm.is_ready():
        time.sleep(_POLL_S)
    comm.abort()


def _finalize(comm: Communicator) -> bool:
    """End a communicator of which nothing is under way; False where that fails, or takes long."""
    deadline = time.monotonic() + _FINALIZE_S
    try:
        comm.finalize()
        while not comm.is_ready():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        comm.destroy()
    except TransportError:
        return False
    return True
