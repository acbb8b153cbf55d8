"""Slices over cuda_ipc, where a GPU's memory has a stand-in: read where the shards lie, across processes.

On a GPU its trainers and engines run in tests/gpu/test_sharded.py; over shared memory, gloo and NIXL slices are tested in
tests/test_slices.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import weightsync as ws
from tests.transports.stand_in import StandIn, exportable
from weightsync.engines.torch_module import TorchModuleAdapter
from weightsync.geometry import Region
from weightsync.loadmap import Copy, LoadMap, Target
from weightsync.manifest import Manifest
from weightsync.receiver import ReceiverRank
from weightsync.registry import register_transport, unregister_transport
from weightsync.sender import SenderRank
from weightsync.session import Session
from weightsync.testing import LocalFleet, in_process_party
from weightsync.testing.link import Tensors
from weightsync.testing.modules import nested_module
from weightsync.testing.processes import ProcessParty
from weightsync.transports.sharded import ShardedCudaIpcReceiver, ShardedCudaIpcSender

NAME = "sharded_stand_in"
ROWS, COLUMNS = 33, 20
NUM_TRAINERS = 2


class Sender(ShardedCudaIpcSender):
    name = NAME
    memory_kind = StandIn
    told: ClassVar[list[str]] = []
    """What kinds of messages senders of this process have told, and how many pieces chunks carried."""

    def _tell(self, message: Any, **more: Any) -> None:
        self.told.append(type(message).__name__)
        super()._tell(message, **more)


class Receiver(ShardedCudaIpcReceiver):
    name = NAME
    memory_kind = StandIn


def weights(seed: int) -> Tensors:
    torch.manual_seed(seed)
    sizes = {"layers.0.up": (ROWS, COLUMNS), "layers.1.up": (ROWS, COLUMNS), "layers.0.norm": (ROWS,), "head": (6, 4)}
    return {name: torch.randn(size) for name, size in sizes.items()}


class Trainer:
    """One rank of two: rows of all but the head, which both hold."""

    def __init__(self, rank: int, device: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = init_device_mesh(device.partition(":")[0], (NUM_TRAINERS,))
        self.rank = rank
        part = self.part(0)
        self.local = exportable(part) if device == "cpu" else {name: t.to(device) for name, t in part.items()}
        self.held = {
            name: tensor
            if name == "head"
            else DTensor.from_local(
                tensor,
                mesh,
                [Shard(0)],
                run_check=False,
                shape=weights(0)[name].shape,
                stride=weights(0)[name].stride(),
            )
            for name, tensor in self.local.items()
        }

    def part(self, seed: int) -> Tensors:
        return {
            name: tensor if name == "head" else tensor.chunk(NUM_TRAINERS)[self.rank]
            for name, tensor in weights(seed).items()
        }

    def step(self, seed: int) -> None:
        for name, tensor in self.part(seed).items():
            self.local[name].copy_(tensor)

    def told(self) -> list[str]:
        found, Sender.told[:] = list(Sender.told), []
        return found


def serve(rank: int, store: str, device: str = "cpu") -> tuple[Callable[[bytes], Sequence[bytes]], Trainer]:
    import torch.distributed as dist

    register_transport(NAME, Sender, Receiver)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=NUM_TRAINERS)
    trainer = Trainer(rank, device)
    return in_process_party([SenderRank(rank, lambda: trainer.held)]), trainer


class Columns(TorchModuleAdapter):
    """An engine rank that takes every matrix's columns from *first* on."""

    def __init__(self, first: int, device: str = "cpu") -> None:
        self.first = first
        module = nested_module({name: self.slice_of(tensor) * 0 for name, tensor in weights(0).items()})
        super().__init__(module.to(device))

    def slice_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:, self.first :] if tensor.dim() == 2 else tensor

    def load_map(self, manifest: Manifest) -> LoadMap:
        copies, targets = [], []
        for meta in manifest.tensors:
            module, _, leaf = meta.name.rpartition(".")
            view = self.slice_of(torch.empty(meta.shape, device="meta"))
            targets.append(Target(module, leaf, meta.dtype, tuple(view.shape)))
            copies.append(
                Copy(meta.name, module, leaf, Region.of(view), Region.of(torch.empty(view.shape, device="meta")))
            )
        return LoadMap.from_copies(manifest, copies, targets)

    def check(self, seed: int) -> None:
        live = self._tensors()
        for name, tensor in weights(seed).items():
            assert torch.equal(live[name].cpu(), self.slice_of(tensor)), name


@pytest.fixture
def trainers(tmp_path: Path) -> Iterator[list[ProcessParty]]:
    register_transport(NAME, Sender, Receiver)
    started = [ProcessParty(f"trainer {i}", partial(serve, i, str(tmp_path / "store"))) for i in range(NUM_TRAINERS)]
    yield started
    for party in started:
        party.close()
    unregister_transport(NAME)


@pytest.mark.parametrize("apply", ["staged", "streaming"])
def test_contiguous_slices_are_read_where_the_shards_lie_and_others_are_packed(
    apply: Any, trainers: list[ProcessParty], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = [Columns(0), Columns(0), Columns(2)]
    fleet = LocalFleet(trainers, [in_process_party([ReceiverRank(engine)]) for engine in engines])
    session = Session(fleet, ws.SyncConfig(transport=NAME, apply=apply, timeout_s=20, partial="report"))
    session.open()
    monkeypatch.setattr(StandIn, "opened", [])
    for seed in (1, 2, 3):
        for trainer in trainers:
            trainer.ask(Trainer.step, seed)
        report = session.update()
        for engine in engines:
            engine.check(seed)
    told = [trainer.ask(Trainer.told) for trainer in trainers]
    for messages in told:
        # One link for the first two engines, one for the third: a layout each, and a stage for the third's columns.
        assert messages.count("Layout") == 2
        assert messages.count("Set") == 6
        assert messages.count("Chunk") == 3
        assert messages.count("Segment") == 3
    whole = sum(tensor.nbytes for tensor in weights(0).values())
    less = sum(tensor[:, 2:].nbytes if tensor.dim() == 2 else tensor.nbytes for tensor in weights(0).values())
    rows = {row.rank: row for row in report.ranks}
    assert [rows[f"engine {i} rank 0"].nbytes for i in range(3)] == [whole, whole, less]
    assert sum(rows[f"trainer {i}"].nbytes for i in range(2)) == whole + less, "twins are served at once"
    assert all(rows[f"engine {i} rank 0"].peak_staging_bytes == 0 for i in range(3)), (
        "what is stable stays where it lies"
    )
    session.close()
    fleet.close()


class Loader(Columns):
    """Its live weights are not what it is given: the head is kept doubled, so it has to be loaded; the rest are copies."""

    laid_out_as_loaded = False
    copies_load = True

    def apply(self, groups: Iterable[Iterable[tuple[str, torch.Tensor]]]) -> int:
        tensors = self._tensors()
        with torch.no_grad():
            for group in groups:
                for name, value in group:
                    assert value.shape == weights(0)[name].shape, "a loader is given whole tensors"
                    tensors[name].copy_(self.slice_of(value) * (2 if name == "head" else 1))
        return 1

    def check(self, seed: int) -> None:
        live = self._tensors()
        for name, tensor in weights(seed).items():
            assert torch.equal(live[name], self.slice_of(tensor) * (2 if name == "head" else 1)), name


@pytest.mark.parametrize(("apply", "has_room"), [("staged", True), ("streaming", True), ("streaming", False)])
def test_what_only_copies_is_copied_from_the_shards_and_the_rest_loaded(
    apply: Any, has_room: bool, trainers: list[ProcessParty]
) -> None:
    """*has_room*: for a stage of all columns; else they come in buckets, beside the rows that are read where they lie."""
    engines = [Loader(0), Loader(2)]
    fleet = LocalFleet(trainers, [in_process_party([ReceiverRank(engine)]) for engine in engines])
    limit = (1 << 20) if has_room else 3_000
    config = ws.SyncConfig(transport=NAME, apply=apply, timeout_s=20, partial="report", staging_limit_bytes=limit)
    session = Session(fleet, config)
    session.open()
    for seed in (1, 2, 3, 4):
        for trainer in trainers:
            trainer.ask(Trainer.step, seed)
        report = session.update()
        for engine in engines:
            engine.check(seed)
    told = [trainer.ask(Trainer.told) for trainer in trainers]
    assert all(messages.count("Set") == 8 and messages.count("Chunk") >= 4 for messages in told)
    assert has_room or all(messages.count("Chunk") > 4 for messages in told)
    of_engines = [row for row in report.ranks if row.rank.startswith("engine")]
    assert [(row.num_direct, len(row.reloaded), row.reloads) for row in of_engines] == [(2, 1, 1)] * 2, "the head alone"
    session.close()
    fleet.close()
