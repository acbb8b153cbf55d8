"""The bug that weightsync exists for: one ``reload_weights`` for each chunk of one parameter.

This is how receivers used to load a model that comes in many chunks, written
out against bare vLLM. Each reload finishes every module it touched. A fused module
(``qkv_proj``, ``gate_up_proj``) that was given one of its shards is rebuilt in
uninitialised memory, gets that one shard, and goes over the live tensor. After the
last reload each fused module holds only the shard that came last. Nothing raises.

What uninitialised memory holds is luck: often NaN or another tensor, sometimes a
freed copy of the right one, and then the bug hides. So that every run shows the same,
the memory is filled here with numbers of the size of weights before vLLM gets it. The
reloads are vLLM's own, and none of the values that vLLM does write is touched.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Self

import ray
import torch
from torch.overrides import TorchFunctionMode

from examples.rl.updates import UpdateFigures

Chunk = list[tuple[str, torch.Tensor]]

NOTE = (
    "break mode: weightsync is not used; each engine reloads once per parameter. Uninitialised memory is filled "
    "with fixed random numbers first, so that every run shows the same; without that, luck decides what it holds."
)


class OneReloadPerChunk:
    """Stands where weightsync would, and does what was done before it."""

    def __init__(self, trainer: Any, engines: Sequence[Any]) -> None:
        self._trainer = trainer
        self._engines = list(engines)
        self._version = 0

    def update(self) -> UpdateFigures:
        """Block until all engines have reloaded once per parameter."""
        started = time.perf_counter()
        chunks = self._trainer.__ray_call__.remote(one_parameter_per_chunk)
        ray.wait([chunks])
        sent = time.perf_counter()
        sizes = ray.get([engine.__ray_call__.remote(reload_each_chunk, chunks) for engine in self._engines])
        self._version += 1
        finished = time.perf_counter()
        return UpdateFigures(
            version=self._version, nbytes=sizes[0], seconds=finished - started, pause_s=finished - sent
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


def one_parameter_per_chunk(trainer: Any) -> list[Chunk]:
    """Run in the trainer: its whole state dict, the tied output head included."""
    return [[(name, tensor.detach().cpu())] for name, tensor in trainer.model.state_dict().items()]


def reload_each_chunk(engine: Any, chunks: list[Chunk]) -> int:
    """Run in an engine: one whole reload for each chunk; returns the bytes loaded."""
    with FilledMemory():
        for chunk in chunks:
            engine.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(chunk)})
    engine.llm.reset_prefix_cache()
    return sum(tensor.nbytes for chunk in chunks for _, tensor in chunk)


class FilledMemory(TorchFunctionMode):
    """While active, ``torch.empty_strided`` (with which vLLM rebuilds a module) returns seeded random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._seed = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.empty_strided and result.is_floating_point() and not result.is_meta:
            self._seed += 1
            result.normal_(0.0, 0.1, generator=torch.Generator(result.device).manual_seed(self._seed))
        return result
