"""Engines whose tensors or loaders are unusual: an update leaves them as it should, or says that it cannot."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

import weightsync as ws
from weightsync.engines.torch_module import TorchModuleAdapter
from weightsync.errors import EngineStateError, ManifestError
from weightsync.loadmap import LoadMap, Target
from weightsync.manifest import Manifest
from weightsync.testing import LocalSync, module_engine
from weightsync.testing.modules import nested_module

Tensors = dict[str, torch.Tensor]
Groups = Iterable[Iterable[tuple[str, torch.Tensor]]]


def values(seed: int) -> Tensors:
    torch.manual_seed(seed)
    return {"layers.0.image": torch.randn(4, 3, 2, 2), "layers.1.up": torch.randn(5, 6), "norm": torch.randn(5)}


@pytest.mark.parametrize("apply", ["staged", "streaming"])
@pytest.mark.parametrize("transport", ["shared_memory", "sharded_shared_memory", "sharded_broadcast"])
def test_parameters_with_strides_of_their_own_are_loaded_and_nothing_beside_them(transport: str, apply: Any) -> None:
    beside = torch.zeros(5, 12)
    engine = nested_module(
        {
            "layers.0.image": torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last),
            "layers.1.up": beside[:, :6],
            "norm": torch.zeros(5),
        }
    )
    trainer = values(0)
    with LocalSync([lambda: trainer], [module_engine(engine)], ws.SyncConfig(transport=transport, apply=apply)) as sync:
        for seed in (1, 2, 3):
            for name, value in values(seed).items():
                trainer[name].copy_(value)
            sync.update()
            for name, tensor in engine.state_dict().items():
                assert torch.equal(tensor, trainer[name]), name
    assert not beside[:, 6:].any()


class Writes(TorchModuleAdapter):
    """Its loader writes into what it is given, and says when it has."""

    copies_load = False
    laid_out_as_loaded = False

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.has_written = threading.Event()

    def apply(self, groups: Groups) -> int:
        return super().apply(self._written(groups))

    def _written(self, groups: Groups) -> Iterator[Sequence[tuple[str, torch.Tensor]]]:
        for group in groups:
            given = [(name, tensor.mul_(2)) for name, tensor in group]
            self.has_written.set()
            yield given


@pytest.mark.parametrize("digest", [True, False])
def test_what_comes_to_the_page_that_a_loader_has_written_to_is_loaded(digest: bool) -> None:
    sizes = {"first.weight": (33_001,), "second.weight": (30,)}  # which end and begin in one page of the stage
    trainer = {name: torch.zeros(size) for name, size in sizes.items()}
    engine = Writes(nested_module({name: torch.zeros(size) for name, size in sizes.items()}))

    updating = threading.Event()

    def made() -> Iterator[tuple[str, torch.Tensor]]:
        yield "first.weight", trainer["first.weight"].clone()
        assert not updating.is_set() or engine.has_written.wait(5)
        yield "second.weight", trainer["second.weight"].clone()

    config = ws.SyncConfig(transport="shared_memory", apply="streaming", digest=digest, bucket_bytes=4096)
    with LocalSync([made], [[engine]], config) as sync:
        for number in (1, 2, 3):
            engine.has_written.clear()
            updating.set()
            for tensor in trainer.values():
                tensor.fill_(number)
            sync.update()
            for path, tensor in engine.live().items():
                assert bool((tensor == 2 * number).all()), path


def test_a_module_whose_state_dict_gives_copies_is_refused() -> None:
    trainer, engine = values(0), nested_module(values(1))
    engine.register_state_dict_post_hook(
        lambda module, found, *_: found.update({name: tensor.clone() for name, tensor in found.items()})
    )
    config = ws.SyncConfig(transport="shared_memory")
    with (
        pytest.raises(EngineStateError, match=r"engine 0 rank 0.*state_dict gives a new tensor for norm"),
        LocalSync([lambda: trainer], [module_engine(engine)], config),
    ):
        pass


class ShowsNothing:
    """An adapter as vLLM's where the loader could not be followed: nothing of what it loads can be looked at."""

    laid_out_as_loaded, copies_load = False, True
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.held = torch.zeros(8)

    def load_map(self, manifest: Manifest) -> LoadMap:
        return LoadMap.from_fallback(manifest, [Target("m", "w", "float32", (8,))], "it was not followed")

    def check_ready(self) -> None: ...

    def live(self) -> Mapping[tuple[str, str], torch.Tensor]:
        return {}

    def reachable(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        return {}

    def synchronize(self) -> None: ...

    def apply(self, groups: Groups) -> int:
        for group in groups:
            for _, tensor in group:
                self.held = tensor.clone()
        return 1


def test_an_engine_that_shows_nothing_of_its_weights_is_sent_all_of_them() -> None:
    trainer, engine = {"w": torch.arange(8.0)}, ShowsNothing()
    config = ws.SyncConfig(transport="shared_memory", skip_unchanged=True)
    with LocalSync([lambda: trainer], [[engine]], config) as sync:
        for _ in range(3):
            engine.held.zero_()  # as after a deep sleep
            sync.update()
            assert torch.equal(engine.held, trainer["w"])


def synced(trainer: Tensors, engine: torch.nn.Module, *steps: Any, **config: Any) -> None:
    """An update, and one after each of *steps*."""
    settings: dict[str, Any] = {"transport": "shared_memory", "timeout_s": 20} | config
    with LocalSync([lambda: trainer], [module_engine(engine)], ws.SyncConfig(**settings)) as sync:
        sync.update()
        for step in steps:
            step()
            sync.update()


TRANSPORTS = ["shared_memory", "broadcast", "sharded_shared_memory"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_lazy_conjugates_and_negatives_are_tensors_of_their_own(transport: str) -> None:
    x, y = torch.randn(4, dtype=torch.complex64), torch.randn(4)
    trainer = {"a": x, "b": x.conj(), "c": y, "d": torch._neg_view(y)}
    engine = nested_module({name: torch.zeros(4, dtype=tensor.dtype) for name, tensor in trainer.items()})
    synced(trainer, engine, lambda: x.mul_(2), transport=transport)
    for name, tensor in engine.state_dict().items():
        assert torch.equal(tensor, trainer[name].resolve_conj().resolve_neg()), name


@pytest.mark.parametrize("apply", ["staged", "streaming"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_element_may_have_any_stride(transport: str, apply: str) -> None:
    held, kept = torch.randn(3, 5), torch.zeros(3, 5)
    trainer = {"w": held[1:2, 2], "v": torch.randn(6)}
    engine = nested_module({"w": kept[1:2, 2], "v": torch.zeros(6)})
    assert trainer["w"].stride() == (5,)
    synced(trainer, engine, lambda: held.mul_(3), lambda: held.mul_(3), transport=transport, apply=apply)
    assert kept[1, 2] == held[1, 2]
    assert kept.count_nonzero() == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_parameter_that_has_another_shape_now_is_not_filled_by_broadcasting(transport: str) -> None:
    trainer, engine = {"scale": torch.randn(1)}, torch.nn.Module()
    engine.register_buffer("scale", torch.zeros(1))

    def widen() -> None:
        engine.scale = torch.zeros(3)

    with pytest.raises(ws.WeightSyncError, match=r"scale has shape \[3\] now, the trainers send \[1\]; connect again"):
        synced(trainer, engine, widen, transport=transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_equal_bits_of_another_dtype_have_changed(side: str, transport: str) -> None:
    trainer = {"w": torch.randn(100).to(torch.bfloat16)}
    engine: Any = torch.nn.Module()
    engine.register_buffer("w", torch.zeros(100, dtype=torch.bfloat16))

    def reinterpret() -> None:
        if side == "trainer":
            trainer["w"] = trainer["w"].view(torch.float16)
        else:
            engine.w = engine.w.view(torch.float16)

    config = {"skip_unchanged": True, "wire_dtype": {"*": "bfloat16"}, "transport": transport}
    synced(trainer, engine, lambda: None, reinterpret, **config)
    assert torch.equal(engine.w, trainer["w"].to(torch.bfloat16).to(engine.w.dtype))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_tensor_that_torch_has_quantized_is_refused() -> None:
    trainer = {"w": torch.quantize_per_tensor(torch.randn(6), 0.1, 3, torch.quint8)}
    with pytest.raises(ManifestError, match=r"w is quantized by torch.*dequantize\(\)"):
        synced(trainer, nested_module({"w": torch.zeros(6)}))
