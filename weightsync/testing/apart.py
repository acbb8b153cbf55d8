"""Ends of links in processes of their own, used from this one as if they were here.

For the suite, over a transport of which no two ends can share a process, as NCCL's ranks on one GPU cannot:

    class ApartSender(RemoteSender):
        kind = MySender

    class ApartReceiver(RemoteReceiver):
        kind = MyReceiver

    register_transport("mine_apart", ApartSender, ApartReceiver)

A source is read here, tensor by tensor; a chunk is copied here, and released there when it is released here.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import multiprocessing
import os
import pickle
import queue
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import torch

from weightsync.chunk import Piece, WeightChunk
from weightsync.errors import TransportError
from weightsync.interfaces import LinkContext, ReceiverTransport, SenderTransport, Transfer, TransferStats
from weightsync.manifest import TensorMeta

_END_S = 5.0
_MAKE_S = 120.0


class EndProcess:
    """A process that holds ends of links. Any thread may use it; calls do not wait for one another."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "weightsync.testing"])
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._calls: dict[int, queue.SimpleQueue[tuple[str, Any]]] = {}
        self._gone = False
        self._reader = threading.Thread(target=self._read, name="apart", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                number, kind, value = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                break
            if number in self._calls:
                self._calls[number].put((kind, value))
        with self._lock:
            self._gone = True
            for call in self._calls.values():
                call.put(("error", self._gone_error()))

    def _gone_error(self) -> TransportError:
        return TransportError(f"the process of an end (pid {self.pid}) is gone")

    def _write(self, number: int, kind: str, *values: Any) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._connection.send_bytes(pickle.dumps((number, kind, values)))

    @contextlib.contextmanager
    def conversation(self, function: Callable[..., Any], *arguments: Any) -> Iterator[tuple[Any, Any]]:
        """Begin a call; (what says to the other side, what waits for what it says)."""
        number = next(self._numbers)
        heard: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        with self._lock:
            self._calls[number] = heard
            if self._gone:
                heard.put(("error", self._gone_error()))
        self._write(number, "call", function, arguments)

        def hear(timeout_s: float | None = None) -> tuple[str, Any]:
            kind, value = heard.get(timeout=timeout_s)
            if kind == "error":
                raise value
            return kind, value

        try:
            yield lambda kind, *values: self._write(number, kind, *values), hear
        finally:
            with self._lock:
                del self._calls[number]

    def call(self, function: Callable[..., Any], *arguments: Any, timeout_s: float | None = None) -> Any:
        """What *function* (importable by name) returns there, given the ends by name and *arguments*."""
        with self.conversation(function, *arguments) as (_, hear):
            return hear(timeout_s)[1]

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.is_alive()

    @property
    def is_idle(self) -> bool:
        return self.is_alive() and not self._calls

    def signal(self, number: int) -> None:
        if self._process.is_alive():
            os.kill(self.pid, number)

    def close(self) -> None:
        """Idempotent; its end is abrupt."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        self._process.join(_END_S)
        with contextlib.suppress(OSError):
            self._connection.close()
        self._reader.join(_END_S)


def _pack_tensor(tensor: torch.Tensor) -> tuple[Any, bytes]:
    """With its strides; pickle knows neither all dtypes nor keeps to a tensor's own bytes."""
    data = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    form = (tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    return form, data.numpy().tobytes()


def _unpack_tensor(form: Any, data: bytes) -> torch.Tensor:
    dtype, offset, shape, stride = form
    whole = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    found: torch.Tensor = torch.empty(0, dtype=dtype).set_(whole.untyped_storage(), offset, shape, stride)
    return found


Ends = dict[str, Any]


class _Talk:
    """The other side of a conversation, in the end's process."""

    def __init__(self, number: int, write: Callable[..., None]) -> None:
        self._number, self._write = number, write
        self.heard: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()

    def say(self, kind: str, value: Any) -> None:
        self._write(self._number, kind, value)


def _serve(connection: Connection) -> None:
    ends: Ends = {}
    talks: dict[int, _Talk] = {}
    lock = threading.Lock()

    def write(number: int, kind: str, value: Any) -> None:
        data = pickle.dumps((number, kind, value))
        with lock:
            connection.send_bytes(data)

    def run(talk: _Talk, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            wants_talk = getattr(function, "talks", False)
            result = function(ends, talk, *arguments) if wants_talk else function(ends, *arguments)
        except BaseException as error:
            try:
                talk.say("error", error)
            except Exception:
                talk.say("error", TransportError(repr(error)))
        else:
            talk.say("result", result)

    while True:
        try:
            number, kind, values = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        if kind == "call":
            talks[number] = talk = _Talk(number, write)
            threading.Thread(target=run, args=(talk, *values), daemon=True).start()
        else:
            talks[number].heard.put((kind, *values))


# ---- run in the end's process -------------------------------------------------------------------------------------


def run(ends: Ends, function: Callable[..., Any], *arguments: Any) -> Any:
    """For `EndProcess.call`: any function that is importable by name."""
    return function(*arguments)


def footprint(device: str) -> dict[str, int]:
    """What this process holds: open files, threads; and how much of the GPU is free, which all its processes share."""
    found = {"files": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task"))}
    return found if device == "cpu" else found | {"free": torch.cuda.mem_get_info(torch.device(device))[0]}


def warm_up_nccl(context: LinkContext) -> None:
    """What a process does once and takes seconds: a CUDA context, kernels, NCCL itself."""
    from weightsync.transports.nccl_group import warm_up

    warm_up(torch.device(context.device))


def _make(ends: Ends, name: str, kind: Any, prepare: Any, context: LinkContext, options: dict[str, Any]) -> None:
    if prepare is not None:
        prepare(context)
    ends[name] = kind(context, **options)


def _do(ends: Ends, name: str, method: str, *arguments: Any) -> Any:
    return getattr(ends[name], method)(*arguments)


def _forget(ends: Ends, name: str) -> None:
    ends.pop(name).close()


def _send(ends: Ends, talk: _Talk, name: str, transfer: Transfer) -> TransferStats:
    def tensors() -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        while True:
            talk.say("next", None)
            kind, value = talk.heard.get()
            if kind == "end":
                return
            if kind == "raise":
                raise value
            meta, form, data, device = value
            yield meta, _unpack_tensor(form, data).to(device)

    sender = ends[name]
    if not transfer.held:
        stats: TransferStats = sender.send(transfer, tensors())
        return stats
    kept = [(meta, _keep(name, meta.name, tensor)) for meta, tensor in tensors()]
    sender.begin(kept)
    stats = sender.send(transfer, iter(kept))
    return stats


def _keep(end: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, where that of its name lies since the first transfer of that end."""
    kept = _kept.setdefault((end, name), tensor)
    if kept.shape != tensor.shape or kept.dtype != tensor.dtype:
        kept = _kept[end, name] = tensor
    return kept if kept is tensor else kept.copy_(tensor)


_kept: dict[tuple[str, str], torch.Tensor] = {}


def _receive(ends: Ends, talk: _Talk, name: str, transfer: Transfer) -> None:
    for chunk in ends[name].receive(transfer):
        content = (chunk.version, chunk.manifest_digest, chunk.pieces, chunk.sender)
        data = (chunk.payload.cpu().numpy().tobytes(), str(chunk.payload.device))
        talk.say("chunk", (content, data))
        if talk.heard.get()[0] == "leave":
            return
        chunk.release()


_send.talks = _receive.talks = True  # type: ignore[attr-defined]


# ---- used from here -----------------------------------------------------------------------------------------------

_idle: list[EndProcess] = []
_names = itertools.count()


def _take_process() -> EndProcess:
    while _idle:
        process = _idle.pop()
        if process.is_idle:
            return process
        process.close()
    return EndProcess()


@atexit.register
def close_idle() -> None:
    """End the processes that were kept for later."""
    while _idle:
        _idle.pop().close()


class _Remote:
    """What both ends share."""

    kind: ClassVar[Any]
    prepare: ClassVar[Callable[[LinkContext], None] | None] = None
    """Called in the process before the end is made, and counts in no bound; importable by name."""

    @classmethod
    def _here(cls, context: LinkContext, **options: Any) -> Any:
        if cls.prepare is not None:
            cls.prepare(context)
        return cls.kind(context, **options)

    def _start(self, context: LinkContext, process: EndProcess | None, **options: Any) -> None:
        self._owns = process is None
        self.process = process or _take_process()
        self._name = f"end {next(_names)}"
        self._closed = False
        prepare = type(self).prepare
        self.process.call(_make, self._name, self.kind, prepare, context, options, timeout_s=_MAKE_S)

    def _do(self, method: str, *arguments: Any) -> Any:
        return self.process.call(_do, self._name, method, *arguments)

    def abort(self) -> None:
        self._do("abort")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(TransportError):  # its process may be gone
            self.process.call(_forget, self._name)
        if self._owns:
            _idle.append(self.process)


class RemoteSender(_Remote, SenderTransport):
    """A `kind` in another process; in a process of the suite's own, which may have no children, the thing itself."""

    name: ClassVar[str] = "apart"

    def __new__(cls, context: LinkContext, **options: Any) -> Any:
        return cls._here(context) if multiprocessing.current_process().daemon else super().__new__(cls)

    def __init__(self, context: LinkContext, *, process: EndProcess | None = None) -> None:
        super().__init__(context)
        self._start(context, process)

    def open(self, metas: tuple[TensorMeta, ...]) -> bytes:
        address: bytes = self._do("open", metas)
        return address

    def connect(self) -> None:
        self._do("connect")

    def stable(self) -> bool:
        return bool(self._do("stable"))

    def finish(self) -> None:
        self._do("finish")

    def send(self, transfer: Transfer, tensors: Iterable[tuple[TensorMeta, torch.Tensor]]) -> TransferStats:
        pairs = iter(tensors)
        with self.process.conversation(_send, self._name, transfer) as (say, hear):
            while True:
                kind, value = hear()
                if kind == "result":
                    stats: TransferStats = value
                    return stats
                try:
                    meta, tensor = next(pairs)
                except StopIteration:
                    say("end", None)
                except Exception as error:
                    say("raise", error)
                else:
                    say("item", (meta, *_pack_tensor(tensor.detach().cpu()), str(tensor.device)))


class RemoteReceiver(_Remote, ReceiverTransport):
    """A `kind` in another process; in a process of the suite's own, which may have no children, the thing itself."""

    name: ClassVar[str] = "apart"

    def __new__(cls, context: LinkContext, *, receiver: int, **options: Any) -> Any:
        if multiprocessing.current_process().daemon:
            return cls._here(context, receiver=receiver)
        return super().__new__(cls)

    def __init__(self, context: LinkContext, *, receiver: int, process: EndProcess | None = None) -> None:
        super().__init__(context, receiver=receiver)
        self._start(context, process, receiver=receiver)

    def connect(self, address: bytes) -> None:
        self._do("connect", address)

    def receive(self, transfer: Transfer) -> Iterator[WeightChunk]:
        with self.process.conversation(_receive, self._name, transfer) as (say, hear):
            try:
                while True:
                    kind, value = hear()
                    if kind == "result":
                        return
                    yield self._chunk(value, say)
            except GeneratorExit:
                say("leave", None)
                raise

    def _chunk(self, value: Any, say: Callable[..., None]) -> WeightChunk:
        (version, digest, pieces, sender), (data, device) = value
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        found: tuple[Piece, ...] = pieces
        return WeightChunk(
            version, digest, found, payload.to(device), sender=sender, release=lambda: say("released", None)
        )
