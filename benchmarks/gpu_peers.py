"""How others bring weights from a trainer's process to an engine's on one GPU, and the floor; for `benchmarks.onegpu`."""

from __future__ import annotations

import importlib
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.gpu_party import Party, aligned, layout, view
from benchmarks.gpu_path import ReceivingEnd, data_path
from weightsync import messages as m
from weightsync.engines.torch_module import TorchModuleAdapter
from weightsync.interfaces import LinkContext
from weightsync.manifest import Manifest
from weightsync.receiver import ReceiverRank

Timing = dict[str, float]
"""Seconds of one sync: "seconds" is what modes are compared by, the rest is shown beside it."""
Sync = Callable[[], Timing]

WAIT_S = 60.0
"""Bound of each wait of one process for the other."""
BUCKET_BYTES = 1 << 30


class Engine(Party):
    """The engine, with what it does in a sync of each kind."""

    def __init__(self, size: str, device: str, seed: int, one_block: bool = False) -> None:
        super().__init__(size, device, seed, one_block)
        self._places = layout(size)[0]
        self._rank: ReceiverRank | None = None
        self._path: ReceivingEnd | None = None
        self._lent: torch.Tensor | None = None
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def handle(self, payload: bytes) -> list[bytes]:
        """weightsync: answer a call of the coordinator."""
        if self._rank is None:
            self._rank = ReceiverRank(TorchModuleAdapter(self.model))
        return [m.answer(self._rank.handle, payload)]

    def open_path(self, context: LinkContext, address: bytes, manifest: Manifest) -> None:
        self._path = ReceivingEnd(self.model, context, address, manifest)

    def load_path(self, version: int) -> None:
        assert self._path is not None
        self._path.load(version)

    def close_path(self) -> None:
        if self._path is not None:
            self._path.close()
        self._path = None

    def keep(self, lent: torch.Tensor | None) -> None:
        """The trainer's memory, mapped until the next `keep`."""
        self._lent, self._pairs = lent, []

    def copy_slices(self) -> None:
        assert self._lent is not None
        if not self._pairs:
            places = self._places.items()
            self._pairs = [(self.tensors[name], view(self._lent, *place)) for name, place in places]
        for destination, source in self._pairs:
            destination.copy_(source, non_blocking=True)
        self.wait()

    def copy_block(self) -> float:
        """Seconds of one copy of everything."""
        assert self._lent is not None
        started = time.perf_counter()
        self.block.copy_(self._lent, non_blocking=True)
        self.wait()
        return time.perf_counter() - started

    def load_bucket(self, entries: list[tuple[str, int, tuple[int, ...]]]) -> None:
        assert self._lent is not None
        self.load([(name, view(self._lent, offset, shape)) for name, offset, shape in entries])

    def load(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.tensors[name].copy_(tensor, non_blocking=True)
        self.wait()

    def load_checkpoint(self, paths: list[tuple[str, str]]) -> None:
        """checkpoint-engine's own engine side."""
        zmq, worker = importlib.import_module("zmq"), importlib.import_module("checkpoint_engine.worker")
        path = dict(paths)[f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"]
        worker.update_weights_from_ipc(zmq.Context.instance(), path, 0, run=self.load, post_hook=self.wait)


def serve(connection: Connection, size: str, device: str, one_block: bool) -> None:
    """The engine's process: answers calls of its methods until the other end is gone."""
    engine: Engine | None = None
    answer: tuple[bool, Any]
    while True:
        try:
            if engine is None:
                engine, answer = Engine(size, device, 2, one_block), (True, None)
            else:
                method, arguments = connection.recv()
                answer = True, getattr(engine, method)(*arguments)
        except (EOFError, ConnectionError):
            return
        except Exception:
            answer = False, traceback.format_exc()
        arguments = ()  # memory that was lent for the call is unmapped before it is answered
        try:
            connection.send(answer)
        except ConnectionError:
            return
        if engine is None:
            return


class Remote:
    """The engine's process, as the trainer's sees it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def start(self, method: str, *arguments: Any) -> None:
        self._connection.send((method, arguments))

    def result(self) -> Any:
        """Raises RuntimeError, with the engine's traceback, where the call failed; TimeoutError."""
        if not self._connection.poll(WAIT_S):
            raise TimeoutError(f"the engine's process did not answer for {WAIT_S:g} s")
        try:
            succeeded, value = self._connection.recv()
        except EOFError as error:
            raise RuntimeError("the engine's process is gone") from error
        if not succeeded:
            raise RuntimeError(f"in the engine's process:\n{value}")
        return value

    def ask(self, method: str, *arguments: Any) -> Any:
        with self._lock:
            self.start(method, *arguments)
            return self.result()


# ---- how others do it -----------------------------------------------------------------------------------------------


@contextmanager
def floor(trainer: Party, engine: Remote) -> Iterator[Sync]:
    """One handle, opened once; the engine copies slices in a plain loop."""
    engine.ask("keep", trainer.block)

    def sync() -> Timing:
        started = time.perf_counter()
        engine.ask("copy_slices")
        return {"seconds": time.perf_counter() - started}

    yield sync
    engine.ask("keep", None)


@contextmanager
def memcpy(trainer: Party, engine: Remote) -> Iterator[Sync]:
    """One copy of everything as one tensor; timed in the engine's process, without a message."""
    engine.ask("keep", trainer.block)
    yield lambda: {"seconds": engine.ask("copy_block")}
    engine.ask("keep", None)


@contextmanager
def packed(trainer: Party, engine: Remote) -> Iterator[Sync]:
    """One staging buffer behind one handle, a message and its answer for each bucket."""
    sizes = [aligned(tensor.nbytes) for tensor in trainer.tensors.values()]
    stage = torch.empty(max(*sizes, min(BUCKET_BYTES, sum(sizes) // 4)), dtype=torch.uint8, device=trainer.device)
    engine.ask("keep", stage)

    def sync() -> Timing:
        started = time.perf_counter()
        entries: list[tuple[str, int, tuple[int, ...]]] = []
        end = 0
        for name, tensor in trainer.tensors.items():
            if end + tensor.nbytes > stage.numel():
                trainer.wait()
                engine.ask("load_bucket", entries)
                entries, end = [], 0
            view(stage, end, tuple(tensor.shape)).copy_(tensor, non_blocking=True)
            entries.append((name, end, tuple(tensor.shape)))
            end += aligned(tensor.nbytes)
        trainer.wait()
        engine.ask("load_bucket", entries)
        return {"seconds": time.perf_counter() - started}

    yield sync
    engine.ask("keep", None)


@contextmanager
def per_tensor(trainer: Party, engine: Remote) -> Iterator[Sync]:
    """A new handle for each tensor in each sync."""

    def sync() -> Timing:
        started = time.perf_counter()
        engine.ask("load", list(trainer.tensors.items()))
        return {"seconds": time.perf_counter() - started}

    yield sync


@contextmanager
def checkpoint_engine(trainer: Party, engine: Remote, *, pool: bool) -> Iterator[Sync]:
    """MoonshotAI's checkpoint-engine with a world size of 1, driven as its README does; *pool*: its shared pinned pool."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    bucket = str(BUCKET_BYTES / (1 << 30))
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", PS_MAX_BUCKET_SIZE_GB=bucket)
    importlib.import_module("loguru").logger.remove()
    server = importlib.import_module("checkpoint_engine.ps").ParameterServer(auto_pg=True, master_port=port)

    def sync() -> Timing:
        started = time.perf_counter()
        server.register_checkpoint("weights", named_tensors=trainer.tensors, use_shared_memory_pool=pool)
        registered = time.perf_counter() - started
        server.gather_metas("weights")
        server.update("weights", lambda paths: engine.start("load_checkpoint", paths))
        seconds = time.perf_counter() - started
        engine.result()
        server.unregister_checkpoint("weights")
        return {"seconds": seconds, "register": registered}

    yield sync


@dataclass(frozen=True, slots=True)
class Peer:
    """A way to bring weights over. `blocks`: whether the trainer's, the engine's weights lie in one tensor."""

    label: str
    start: Callable[[Party, Remote], AbstractContextManager[Sync]]
    blocks: tuple[bool, bool] = (False, False)
    gpu_only: bool = False
    slow: bool = False


PEERS = {
    "floor": Peer("floor: one handle, slices copied", floor, (True, False)),
    "memcpy": Peer("one copy of one tensor", memcpy, (True, True)),
    "checkpoint-engine": Peer("checkpoint-engine", partial(checkpoint_engine, pool=False), gpu_only=True, slow=True),
    "checkpoint-engine-pool": Peer(
        "checkpoint-engine, pinned pool", partial(checkpoint_engine, pool=True), gpu_only=True, slow=True
    ),
    "packed": Peer("packed: one buffer, bucket by bucket", packed),
    "per-tensor": Peer("a handle per tensor", per_tensor),
    "path-verified": Peer("weightsync, transport and load alone, verified", partial(data_path, digest=True)),
    "path-raw": Peer("weightsync, transport and load alone, digests off", partial(data_path, digest=False)),
}
