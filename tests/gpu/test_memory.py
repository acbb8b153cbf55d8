"""50 updates over cuda_ipc leave everything flat on both sides: GPU and host memory, open files, mapped GPU memory.

Trainer and engine are processes of their own, started with the allocator's setting under test; this process only drives.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing as mp
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import weightsync as ws
from weightsync.cuda.moves import Moves
from weightsync.engines.torch_module import TorchModuleAdapter
from weightsync.receiver import ReceiverRank
from weightsync.sender import SenderRank
from weightsync.session import Session
from weightsync.testing import LocalFleet, in_process_party

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

DEVICE = "cuda"
AUTO = "cuda_ipc"
FIRST, LAST = 10, 50
"""The updates that are compared. Both are even: memory that is given back every second update looks the same."""
ANSWER_S = 120
MIB = 1 << 20


class Size(NamedTuple):
    """Of one process; all but `device` are its own."""

    allocated: int
    reserved: int
    device: int
    """In use on the whole GPU, whoever uses it: memory that was freed but is still mapped elsewhere counts."""
    rss: int
    files: int
    mappings: int
    """Of other processes' GPU memory: opened less closed."""
    buffers: int
    """GPU memory past torch's allocator: taken less given back."""
    nvidia_maps: int
    """Lines of /proc/self/maps that the driver has made."""


LIMITS = Size(
    allocated=64 << 10,  # a table of moves kept at each update: 480 KiB; a model: 5 GiB
    reserved=20 * MIB,  # one of the allocator's segments
    device=32 * MIB,  # a quarter of a model
    rss=32 * MIB,  # a model kept in host memory: 5 GiB
    files=2,  # one an update: 40, as for the three below
    mappings=0,
    buffers=0,
    nvidia_maps=8,
)
"""By how much each may grow from the tenth update to the fiftieth."""
LEFT_BYTES = 64 * MIB
"""By how much the whole GPU may hold more when all is closed than before: half a model. Kernels stay loaded."""


class CountingRuntime:
    """cupy's runtime as `weightsync.cuda.memory` uses it, with what is open counted."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self.mappings = self.buffers = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def ipcOpenMemHandle(self, handle: bytes) -> int:
        address: int = self._runtime.ipcOpenMemHandle(handle)
        self.mappings += 1
        return address

    def ipcCloseMemHandle(self, address: int) -> None:
        self._runtime.ipcCloseMemHandle(address)
        self.mappings -= 1

    def malloc(self, nbytes: int) -> int:
        address: int = self._runtime.malloc(nbytes)
        self.buffers += 1
        return address

    def free(self, address: int) -> None:
        self._runtime.free(address)
        self.buffers -= 1


def count_runtime() -> CountingRuntime:
    from weightsync.cuda import memory, moves

    counting = CountingRuntime(moves.import_cupy().cuda.runtime)
    vars(memory)["import_cupy"] = lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=counting))
    return counting


def gpu_size() -> tuple[int, int, int]:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free


def has_expandable_segments() -> bool:
    return any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())


def give_back() -> None:
    gc.collect()
    torch.cuda.empty_cache()


class Model(torch.nn.Module):
    """134 MB in large tensors, and some small ones, which share the allocator's blocks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2048, 2048) for _ in range(8))
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm1d(2048) for _ in range(8))
        self.table = torch.nn.Embedding(100, 256)


class Side:
    """One end of the weight sync, in its own process. Its methods are called by name."""

    def __init__(self) -> None:
        self.counting = count_runtime()
        self.model: Any = None
        self._handle: Callable[[bytes], Sequence[bytes]] | None = None

    def warm(self) -> None:
        """Have CUDA, the allocator and the kernels load what stays loaded."""
        source = torch.randn(1000, device=DEVICE)
        Moves([(source, torch.empty_like(source))], source.device).run(digest=True)
        del source
        self.size()

    def start(self, kind: str) -> int:
        """Make the model and a rank around it; returns what the GPU held before."""
        give_back()
        before = gpu_size()[2]
        self.model = Model(seed=len(kind)).to(DEVICE)
        self._handle = in_process_party(self.ranks(kind))
        return before

    def ranks(self, kind: str) -> Any:
        raise NotImplementedError

    def stop(self) -> Size:
        """Forget both; what is left."""
        self.model = self._handle = None
        give_back()
        return self.size()

    def handle(self, payload: bytes) -> Sequence[bytes]:
        assert self._handle is not None
        return self._handle(payload)

    def size(self) -> Size:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed and is kept for later is no leak
        allocated, reserved, device = gpu_size()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return Size(
            allocated=allocated,
            reserved=reserved,
            device=device,
            rss=pages * os.sysconf("SC_PAGE_SIZE"),
            files=len(os.listdir("/proc/self/fd")),
            mappings=self.counting.mappings,
            buffers=self.counting.buffers,
            nvidia_maps=sum("nvidia" in line for line in Path("/proc/self/maps").read_text().splitlines()),
        )

    def digests(self) -> dict[str, int]:
        tensors = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        found = Moves([(tensor, None) for tensor in tensors.values()], torch.device(DEVICE, 0)).run(digest=True)
        return dict(zip(tensors, found.tolist(), strict=True))

    def expandable(self) -> bool:
        return has_expandable_segments()


class TrainerSide(Side):
    def ranks(self, kind: str) -> Any:
        return [SenderRank(0, self.made if kind == "made" else lambda: self.model)]

    def made(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.model.state_dict().items():
            yield name, tensor.clone()

    def change(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_()

    def reallocate(self, number: int) -> None:
        """New memory for every parameter; every second time the old is given back to the driver."""
        moved = [torch.randn_like(parameter) for parameter in self.model.parameters()]
        for parameter, tensor in zip(self.model.parameters(), moved, strict=True):
            parameter.data = tensor
        del moved, parameter, tensor
        if number % 2:
            give_back()


class ByGroups:
    """A module's adapter that offers no live tensors, as vLLM's does not: it is given groups, with copies of its own."""

    def __init__(self, model: torch.nn.Module) -> None:
        adapter = TorchModuleAdapter(model)
        self.device = adapter.device
        self.load_map, self.check_ready, self.apply = adapter.load_map, adapter.check_ready, adapter.apply


class EngineSide(Side):
    def ranks(self, kind: str) -> Any:
        return [ReceiverRank(ByGroups(self.model) if kind == "by groups" else TorchModuleAdapter(self.model))]


SIDES: dict[str, type[Side]] = {"trainer": TrainerSide, "engine": EngineSide}


def serve(connection: Any, name: str) -> None:
    side = SIDES[name]()
    with contextlib.suppress(EOFError):  # this process's maker is gone
        while True:
            method, *arguments = connection.recv()
            try:
                connection.send((None, getattr(side, method)(*arguments)))
            except Exception as error:
                connection.send((f"{name}: {error!r}", None))


class SideProcess:
    """A `Side` in a process of its own, which gets this one's environment as it is now."""

    def __init__(self, name: str) -> None:
        context = mp.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, name), daemon=True)
        self._process.start()
        theirs.close()
        self._lock = threading.Lock()

    def ask(self, *what: Any) -> Any:
        with self._lock:
            self._connection.send(what)
            assert self._connection.poll(ANSWER_S), f"no answer to {what[0]} within {ANSWER_S} s"
            failed, answer = self._connection.recv()
        assert failed is None, failed
        return answer

    def end(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.join()


@dataclass
class Sides:
    trainer: SideProcess
    engine: SideProcess
    expandable: bool


@pytest.fixture(scope="module", params=[False, True], ids=["segments", "expandable segments"])
def sides(request: pytest.FixtureRequest) -> Iterator[Sides]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"expandable_segments:{request.param}")
        found = Sides(SideProcess("trainer"), SideProcess("engine"), request.param)
    try:
        found.trainer.ask("warm")
        found.engine.ask("warm")
        yield found
    finally:
        found.trainer.end()
        found.engine.end()


@dataclass(frozen=True)
class Case:
    source: str = "held"
    """"held": the module, read where it lies or copied to the stage; "made": one tensor after the other."""
    engine: str = "in place"
    reallocate: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


CASES = {
    "held": Case(),
    "held, loaded by groups": Case(engine="by groups"),
    "made, over the stage": Case("made"),
    # One group is 16.8 MB, so that one at a time is staged.
    "made, over buckets": Case(
        "made", settings={"apply": "streaming", "staging_limit_bytes": "20MiB", "gpu_bucket_bytes": "4MiB"}
    ),
    "reallocated": Case(reallocate=True),
    "reallocated, loaded by groups": Case(engine="by groups", reallocate=True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_fifty_updates_leave_both_processes_flat(case: Case, sides: Sides) -> None:
    trainer, engine = sides.trainer, sides.engine
    empty = min(trainer.ask("start", case.source), engine.ask("start", case.engine))
    assert (trainer.ask("expandable"), engine.ask("expandable")) == (sides.expandable, sides.expandable)
    fleet = LocalFleet(*([lambda payload, side=side: side.ask("handle", payload)] for side in (trainer, engine)))
    session = Session(fleet, ws.SyncConfig(**({"timeout_s": 60} | case.settings)))
    sizes: dict[int, tuple[Size, Size]] = {}
    try:
        session.open()
        for number in range(1, LAST + 1):
            if case.reallocate:
                trainer.ask("reallocate", number)
            else:
                trainer.ask("change")
            report = session.update()
            assert set(report.transports.values()) == {AUTO}
            if number in (1, FIRST, LAST):
                sizes[number] = trainer.ask("size"), engine.ask("size")
                assert trainer.ask("digests") == engine.ask("digests")
    finally:
        session.close()
        fleet.close()
    for name, before, after in zip(SIDES, sizes[FIRST], sizes[LAST], strict=True):
        for what, one, other, limit in zip(Size._fields, before, after, LIMITS, strict=True):
            assert other - one <= limit, f"{name}: {what} grew from {one} to {other}; {before} {after}"
    left = trainer.ask("stop"), engine.ask("stop")
    assert [(size.mappings, size.buffers) for size in left] == [(0, 0), (0, 0)]
    assert left[1].device - empty <= LEFT_BYTES, f"{left[1].device - empty} bytes stay in use when all is closed"
