"""Links that carry slices: each at its own pace and in its receivers' order, within one budget, and apart from one another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import pytest
import torch

import weightsync as ws
from tests.test_slices import at_node
from weightsync.config import TransportRule
from weightsync.engines.torch_module import TorchModuleAdapter
from weightsync.geometry import Region
from weightsync.loadmap import Copy, LoadMap, Target
from weightsync.manifest import Manifest
from weightsync.receiver import ReceiverRank
from weightsync.sender import SenderRank
from weightsync.session import Session
from weightsync.testing import LocalFleet, LocalSync, in_process_party, module_engine
from weightsync.testing.link import Tensors
from weightsync.testing.modules import nested_module

ROWS, COLUMNS, LAYERS = 64, 32, 8


def weights(seed: int) -> Tensors:
    torch.manual_seed(seed)
    return {f"layers.{i}.{part}": torch.randn(ROWS, COLUMNS) for part in "xy" for i in range(LAYERS)}


class Slices(TorchModuleAdapter):
    """An engine rank that takes some columns of the tensors whose name ends in one of *parts*."""

    def __init__(self, parts: str = "xy", columns: slice = slice(None)) -> None:
        self.parts, self.columns = parts, columns
        super().__init__(nested_module({name: tensor * 0 for name, tensor in self.of(weights(0)).items()}))

    def of(self, whole: Tensors) -> Tensors:
        return {name: tensor[:, self.columns] for name, tensor in whole.items() if name[-1] in self.parts}

    def load_map(self, manifest: Manifest) -> LoadMap:
        copies, targets = [], []
        for name, view in self.of({name: torch.empty(ROWS, COLUMNS, device="meta") for name in weights(0)}).items():
            module, _, leaf = name.rpartition(".")
            targets.append(Target(module, leaf, "float32", tuple(view.shape)))
            whole = Region.of(torch.empty(view.shape, device="meta"))
            copies.append(Copy(name, module, leaf, Region.of(view), whole))
        return LoadMap.from_copies(manifest, copies, targets)

    def holds(self, whole: Tensors) -> bool:
        live = self._tensors()
        return all(torch.equal(live[name], tensor) for name, tensor in self.of(whole).items())


def sync(
    sources: list[Callable[[], object]], adapters: list[Slices], config: ws.SyncConfig
) -> tuple[Session, LocalFleet]:
    fleet = LocalFleet(
        [in_process_party([SenderRank(i, source)]) for i, source in enumerate(sources)],
        [in_process_party([ReceiverRank(adapter)]) for adapter in adapters],
    )
    session = Session(fleet, config)
    session.open()
    return session, fleet


CONFIG = ws.SyncConfig(transport="sharded_shared_memory", timeout_s=20, bucket_bytes=4096, partial="report")


@pytest.mark.parametrize("transport", ["sharded_shared_memory", "sharded_broadcast"])
@pytest.mark.parametrize("order", [("x", "xy"), ("xy", "x")], ids=str)
def test_each_engine_gets_its_groups_one_after_the_other_whatever_another_takes(
    order: tuple[str, str], transport: str
) -> None:
    """Room for three of one engine's groups, of which the trainer's order would open all eight."""
    held, adapters = weights(0), [Slices(parts) for parts in order]
    limit = 3 * 2 * ROWS * COLUMNS * 4
    config = msgspec.structs.replace(CONFIG, transport=transport, apply="streaming", staging_limit_bytes=limit)
    session, fleet = sync([lambda: held], adapters, config)
    for seed in (1, 2):
        held.update(weights(seed))
        assert session.update().apply == "streaming"
        assert all(adapter.holds(held) for adapter in adapters)
    session.close()
    fleet.close()


def test_links_of_slices_share_the_trainers_budget() -> None:
    held, adapters = weights(0), [Slices(columns=slice(8 * i, 8 * i + 8)) for i in range(4)]
    sender = SenderRank(0, lambda: held)
    fleet = LocalFleet([in_process_party([sender])], [in_process_party([ReceiverRank(a)]) for a in adapters])
    for limit, staged in ((sum(tensor.nbytes for tensor in held.values()), 4), (100_000, 0)):
        session = Session(fleet, msgspec.structs.replace(CONFIG, staging_limit_bytes=limit, apply="streaming"))
        session.open()
        report = session.update()
        assert all(adapter.holds(held) for adapter in adapters)
        assert report.changed_values is None
        segments = [link._segments.values() for link in sender._links.values()]  # type: ignore[attr-defined]
        assert sum(link.stable() for link in sender._links.values()) == staged
        assert sum(segment.payload.numel() for of_link in segments for segment in of_link) <= limit
        session.close()
    fleet.close()


@pytest.mark.parametrize("apply", ["staged", "streaming"])
def test_a_late_engine_is_compared_with_what_came_over_its_own_transport(apply: str) -> None:
    """Two transports cut tensors otherwise, so that digests of the same content differ."""
    held, adapters = weights(0), [Slices(), Slices(), Slices()]
    here, there, late = map(ReceiverRank, adapters)
    fleet = LocalFleet(
        [in_process_party([SenderRank(0, lambda: held)])], [in_process_party([here]), at_node(there, "another")]
    )
    rules = (TransportRule(use="sharded_shared_memory", same_node=True), TransportRule(use="sharded_broadcast"))
    session = Session(fleet, msgspec.structs.replace(CONFIG, transport=rules, apply=apply))
    session.open()
    session.update()
    report = session.add_engine(fleet.add(in_process_party([late])))
    assert report is not None
    assert report.joined == ("engine 2",)
    assert all(adapter.holds(held) for adapter in adapters)
    session.close()
    fleet.close()


def test_a_trainer_of_which_nobody_takes_slices_makes_its_tensors_too() -> None:
    """Making them may be collective."""
    made = [0, 0]
    value = {"w": torch.randn(4, 4)}

    def source(i: int) -> Iterator[tuple[str, torch.Tensor]]:
        yield from value.items()
        made[i] += 1

    taker = torch.nn.Module()
    taker.register_buffer("w", torch.zeros(4, 4))
    with LocalSync(
        [partial(source, i) for i in range(2)],
        [module_engine(taker)],
        msgspec.structs.replace(CONFIG, transport="sharded_broadcast"),
    ) as session:
        made[:] = [0, 0]
        report = session.update()
    assert torch.equal(taker.get_buffer("w"), value["w"])
    assert sum(bool(row.nbytes) for row in report.ranks if row.rank.startswith("trainer")) == 1
    assert made == [1, 1]
