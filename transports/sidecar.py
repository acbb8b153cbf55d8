"""Sidecars: Ray actors of ours, one beside each rank, that read each other's memory over Ray Direct Transport (NIXL).

A rank need not be a Ray actor (vLLM's workers are none), and a user's actor is not made for tensor transports. So ranks
pack into and read from shared memory, and the sidecar on the same node registers that memory with NIXL.

    once                 the process and its NIXL agent, which is named after the actor: never restarted, always a new one
    per arena            memory, registered and kept: NIXL and Ray know memory by its address alone
    per run of an arena  a ref, pulled again for each update: RDT keeps a reference to the memory, no copy of it
    per pull             a target, referred to until it is filled: Ray refers to it weakly, and else reads elsewhere

RDT has no fence: whoever writes an arena must know that nobody reads it (`weightsync.transports.sharded_rdt`).
"""

from __future__ import annotations

import contextlib
import functools
import glob
import importlib
import importlib.util
import inspect
import os
import secrets
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from weightsync.errors import ConfigError, TransportError, UpdateTimeoutError, WeightSyncError
from weightsync.identity import Identity
from weightsync.transports.arenas import MESSAGES, STIRRED_S, Arena, NewArena, Pull, Pulled, Ready, Refused, Source
from weightsync.transports.channel import Channel, Listener
from weightsync.transports.segment import make_segment

NAMESPACE = "weightsync"
_PAGE_BYTES = 64 << 10
_MAX_REFS = 4096
_LONG_S = 1e6
_BUSY_S, _IDLE_S = 0.0005, 0.01
"""How often an agent looks after its peers: 0.5 ms takes 4 % of a core and moves 67 MB in 20 ms, where NIXL's own thread takes
all of a core, and 25 to 60 ms (2 cores, shared memory; 2026-11)."""


def choose_tls() -> str:
    """The UCX transports to use on this node; "" leaves the choice to UCX.

    UCX aborts on a verbs device that a container shows and cannot use, and falls to slow paths without a word; so it gets a
    short list where there is no active RDMA port. What the environment says (UCX_TLS) goes first.
    """
    if chosen := os.environ.get("UCX_TLS"):
        return chosen
    for state in glob.glob("/sys/class/infiniband/*/ports/*/state"):
        with contextlib.suppress(OSError):
            if "ACTIVE" in Path(state).read_text():
                return ""
    return "sm,self,tcp" + (",cuda_copy,cuda_ipc" if os.path.exists("/dev/nvidiactl") else "")


def find_nixl() -> None:
    """Make `nixl` importable, as Ray does it, also where one of its builds alone is installed: the package of that name
    only chooses between them, and requires them all.

    Raises:
        ImportError: there is none.
    """
    if importlib.util.find_spec("nixl") is not None:
        return
    for build in ("nixl_cu12", "nixl_cu13"):
        if importlib.util.find_spec(build) is not None:
            sys.modules["nixl"] = importlib.import_module(build)
            sys.modules["nixl._api"] = importlib.import_module(f"{build}._api")
            return
    raise ImportError("no module named nixl")


def without_spinning() -> bool:
    """Have agents of this process made without NIXL's progress thread, and safe for several threads, as Ray has no setting
    for that. False where this NIXL has none either."""
    api: Any = importlib.import_module("nixl._api")
    if not {"enable_prog_thread", "sync_mode"} <= inspect.signature(api.nixl_agent_config).parameters.keys():
        return False
    strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    api.nixl_agent_config = functools.partial(api.nixl_agent_config, enable_prog_thread=False, sync_mode=strict)
    return True


@dataclass(eq=False, slots=True)
class _Memory:
    """An arena; `fd` lets the rank map it."""

    id: int
    fd: int
    payload: torch.Tensor


@dataclass(eq=False, slots=True)
class _Ref:
    """A ref of another sidecar's. One pull at a time: the target is the ref's."""

    ref: Any
    lock: threading.Lock = field(default_factory=threading.Lock)


class Sidecar:
    """The actor. Each end of a link talks to it over a channel of its own, served by a thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._listener: Listener | None = None
        self._backend = ""
        self._arenas: dict[int, _Memory] = {}
        self._free: list[_Memory] = []
        self._published: OrderedDict[tuple[int, int, int], Any] = OrderedDict()
        self._borrowed: OrderedDict[tuple[Source, int, int], _Ref] = OrderedDict()
        self._nbytes_pulled = 0
        self._stirred = time.monotonic()

    def open(self) -> str:
        """Where ranks of this node connect. Idempotent.

        Raises:
            ConfigError: NIXL is not installed here, or cannot be started.
        """
        with self._lock:
            if self._listener is None:
                self._backend = self._start_nixl()
                self._listener = Listener()
                threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()
            return self._listener.address

    def _start_nixl(self) -> str:
        tls = choose_tls()
        if tls:
            os.environ["UCX_TLS"] = tls  # read when UCX starts, which is now
        host = os.uname().nodename
        try:
            find_nixl()
            from ray.experimental import register_nixl_memory
            from ray.experimental.rdt.util import get_tensor_transport_manager
        except ImportError as error:
            raise ConfigError(
                f'transport: sharded_rdt needs NIXL on {host} ({error}): pip install "weightsync[rdt]" there',
                key="transport",
            ) from error
        try:
            manager = get_tensor_transport_manager("NIXL")
            by_hand = manager.select_backend() == "UCX" and without_spinning()
            self._first = torch.zeros(_PAGE_BYTES, dtype=torch.uint8)
            register_nixl_memory(self._first)
        except Exception as error:
            raise ConfigError(
                f"transport: NIXL cannot start on {host} with UCX_TLS={tls or '(not set)'}: {error}", key="transport"
            ) from error
        backend = getattr(manager, "_backend", None) or "NIXL"
        if by_hand:
            threading.Thread(target=self._progress, args=(manager.get_nixl_agent(),), daemon=True).start()
        return f"{backend} ({tls or 'its own choice of transports'})"

    def _progress(self, agent: Any) -> None:
        """Serve what others want of this agent: to connect, and to read where the wire has no one-sided reads. NIXL's own
        thread for that spins, on a core for each sidecar (1.5)."""
        while True:
            with contextlib.suppress(Exception):  # a peer that is gone; whoever pulls from it hears so
                agent.get_new_notifs()
            time.sleep(_BUSY_S if time.monotonic() - self._stirred < STIRRED_S else _IDLE_S)

    def _accept(self, listener: Listener) -> None:
        while True:
            try:
                channel = listener.accept(MESSAGES, timeout_s=_LONG_S)
            except TransportError:  # another user's process; refused
                continue
            except TimeoutError:
                continue
            threading.Thread(target=self._serve, args=(channel,), daemon=True).start()

    def _serve(self, channel: Channel[Any]) -> None:
        """One end of one link, until it closes the channel."""
        memory: _Memory | None = None
        try:
            channel.send(Ready(self._name, self._backend), timeout_s=_LONG_S)
            while True:
                message, _ = channel.receive(timeout_s=_LONG_S)
                self._stirred = time.monotonic()
                match message:
                    case NewArena():
                        try:
                            memory = self._take(message.nbytes)
                        except Exception as error:
                            channel.send(Refused(str(error)), timeout_s=_LONG_S)
                            continue
                        channel.send(Arena(memory.id, memory.payload.numel()), fd=memory.fd, timeout_s=_LONG_S)
                    case Pull() if memory is not None:
                        channel.send(self._answer(message, memory), timeout_s=_LONG_S)
        except (TransportError, UpdateTimeoutError):
            pass  # the rank has closed it, or is gone
        finally:
            channel.close()
            if memory is not None:
                with self._lock:
                    self._free.append(memory)

    def _take(self, nbytes: int) -> _Memory:
        """A free arena of about that size, or a new one."""
        with self._lock:
            fitting = [m for m in self._free if nbytes <= m.payload.numel() <= 4 * max(nbytes, _PAGE_BYTES)]
            if fitting:
                memory = min(fitting, key=lambda m: m.payload.numel())
                self._free.remove(memory)
                return memory
            from ray.experimental import register_nixl_memory

            fd, payload = make_segment(-(-max(nbytes, 1) // _PAGE_BYTES) * _PAGE_BYTES)
            register_nixl_memory(payload)
            memory = _Memory(len(self._arenas), fd, payload)
            self._arenas[memory.id] = memory
            return memory

    def publish(self, arena: int, offset: int, nbytes: int) -> list[Any]:
        """A ref, in a list, to a run of an arena; the same again while it is remembered."""
        import ray

        key = (arena, offset, nbytes)
        self._stirred = time.monotonic()
        with self._lock:
            if key not in self._published:
                view = self._arenas[arena].payload[offset : offset + nbytes]
                self._published[key] = ray.put([view], _tensor_transport="nixl")
                if len(self._published) > _MAX_REFS:
                    self._published.popitem(last=False)
            self._published.move_to_end(key)
            return [self._published[key]]

    def _answer(self, pull: Pull, memory: _Memory) -> Pulled | Refused:
        from ray.exceptions import GetTimeoutError

        start = time.perf_counter()
        try:
            self._pull(pull, memory.payload[pull.into : pull.into + pull.nbytes])
        except GetTimeoutError:
            return Refused(f"nothing came from {pull.source.actor} for {pull.timeout_s:g} s", late=True)
        except Exception as error:
            return Refused(f"{pull.source.actor}: {_first_line(error)}")
        return Pulled(time.perf_counter() - start)

    def _pull(self, pull: Pull, target: torch.Tensor) -> None:
        import ray
        from ray.experimental import set_target_for_ref

        key = (pull.source, pull.offset, pull.nbytes)
        known = self._borrow(*key, timeout_s=pull.timeout_s)
        try:
            with known.lock:
                set_target_for_ref(known.ref, [target])
                (found,) = ray.get(known.ref, timeout=pull.timeout_s)
        except BaseException:
            with self._lock:
                self._borrowed.pop(key, None)
            raise
        check_landed(found, target)
        self._nbytes_pulled += pull.nbytes

    def _borrow(self, source: Source, offset: int, nbytes: int, *, timeout_s: float) -> _Ref:
        import ray

        key = (source, offset, nbytes)
        with self._lock:
            if key in self._borrowed:
                self._borrowed.move_to_end(key)
                return self._borrowed[key]
        owner = ray.get_actor(source.actor, namespace=NAMESPACE)
        (ref,) = ray.get(owner.publish.remote(source.arena, offset, nbytes), timeout=timeout_s)
        with self._lock:
            known = self._borrowed.setdefault(key, _Ref(ref))
            if len(self._borrowed) > _MAX_REFS:
                self._borrowed.popitem(last=False)
            return known

    def nbytes_pulled(self) -> int:
        """Over NIXL, in all, as counted by what was read."""
        return self._nbytes_pulled


def check_landed(found: torch.Tensor, target: torch.Tensor) -> None:
    """Raises TransportError where Ray has read into memory of its own: it refers to targets weakly."""
    if found.data_ptr() != target.data_ptr() or found.numel() != target.numel():
        raise TransportError(
            f"Ray read {found.numel()} bytes into memory of its own, not into the {target.numel()} that were meant: the "
            "target was gone, or does not fit"
        )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = f" ... {lines[-1]}" if len(lines) > 1 else ""
    return f"{type(error).__name__}: {lines[0] if lines else ''}{last}"


@dataclass(frozen=True, slots=True)
class _Started:
    node: str
    name: str
    actor: Any


class Sidecars:
    """The sidecars of one weight sync; they end with the process that holds this."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._known: dict[str, _Started] = {}

    def addresses(self, ranks: Mapping[str, Identity]) -> dict[str, str]:
        """Rank -> where its sidecar listens; one is started beside each rank that has none, or whose own is gone.

        Raises:
            ConfigError: NIXL is missing on a node. UpdateTimeoutError, TransportError: a sidecar cannot be started.
        """
        found: dict[str, str] = {}
        for last in (False, True):
            started = {rank: self._beside(rank, identity) for rank, identity in ranks.items() if rank not in found}
            opening = {rank: actor.open.remote() for rank, actor in started.items()}
            deadline = time.monotonic() + max(self._timeout_s, 60.0)
            for rank, ref in opening.items():
                try:
                    found[rank] = _result(ref, rank, deadline)
                except (TransportError, UpdateTimeoutError):
                    self._end(rank)  # it was killed, or hangs: a new one, under a new name
                    if last:
                        raise
        return found

    def _beside(self, rank: str, identity: Identity) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = identity.node or ray.get_runtime_context().get_node_id()
        known = self._known.get(rank)
        if known is not None and known.node == node:
            return known.actor
        self._end(rank)
        name = f"weightsync sidecar of {rank} {secrets.token_hex(8)}"
        kind = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=8, enable_tensor_transport=True)(Sidecar)
        actor = kind.options(
            name=name, namespace=NAMESPACE, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(name)
        self._known[rank] = _Started(node, name, actor)
        return actor

    def actor(self, rank: str) -> Any:
        """The handle of a rank's sidecar."""
        return self._known[rank].actor

    def name(self, rank: str) -> str:
        """Of that actor; never given again."""
        return self._known[rank].name

    def _end(self, rank: str) -> None:
        known = self._known.pop(rank, None)
        if known is not None:
            import ray

            ray.kill(known.actor)

    def forget(self, party: str) -> None:
        """End those of a party ("engine 1") with all its ranks."""
        for rank in [rank for rank in self._known if rank == party or rank.startswith(f"{party} rank ")]:
            self._end(rank)

    def close(self) -> None:
        """End them all. Idempotent."""
        for rank in list(self._known):
            self._end(rank)


def _result(ref: Any, rank: str, deadline: float) -> str:
    import ray
    from ray.exceptions import RayTaskError

    try:
        return str(ray.get(ref, timeout=max(deadline - time.monotonic(), 0.001)))
    except RayTaskError as error:
        if isinstance(error.cause, WeightSyncError):
            raise error.cause from None
        raise TransportError(f"the sidecar of {rank} failed: {_first_line(error)}", rank=rank) from error
    except TimeoutError as error:
        raise UpdateTimeoutError(f"the sidecar of {rank} did not start in time", rank=rank) from error
    except Exception as error:
        raise TransportError(f"the sidecar of {rank} is gone: {_first_line(error)}", rank=rank) from error
