"""In a trainer's process: other values before each update, and what a plain copy of them costs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import torch

from weightsync.module_tensors import module_tensors

_TARGET_BYTES = 1 << 30
"""What copies are made into, at most, unless a tensor is larger."""


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    """One plain copy of all that a trainer rank holds, on the device where it lies."""

    nbytes: int
    seconds: float
    device: str
    threads: int


def alternating(actor: Any) -> Any:
    """A trainer actor's weights, as `run` sends them. Where they are made as they are asked for, every second time with
    their signs flipped; those that stay are flipped by `flip`."""
    weights = actor.user.weights()
    if _held(weights) is not None:
        return weights
    actor.flips = not getattr(actor, "flips", False)
    return ((name, -tensor) for name, tensor in weights) if actor.flips else weights


def flip(actor: Any) -> None:
    """Flip the sign of every value that stays, so that an update has something to bring."""
    with torch.no_grad():
        for tensor in _unique(_held(actor.user.weights()) or ()):
            if tensor.dtype.is_floating_point and tensor.itemsize == 1:
                tensor.view(torch.uint8).bitwise_xor_(0x80)
            elif tensor.dtype.is_floating_point:
                tensor.neg_()


def floor(actor: Any) -> Floor:
    """Copy each tensor once into memory of ours, on its device. Weights that are made are not timed as they are made."""
    weights = actor.user.weights()
    held = _held(weights)
    copier = _Copier()
    if held is not None:
        tensors = _unique(held)
        copier.room_for(tensors)
        copier.copy(tensors)
    else:
        for _, tensor in weights:
            part = _unique([tensor])
            copier.room_for(part)
            copier.copy(part)
    return Floor(
        nbytes=copier.nbytes, seconds=copier.seconds, device=str(copier.device), threads=torch.get_num_threads()
    )


class _Copier:
    def __init__(self) -> None:
        self.nbytes, self.seconds, self.device = 0, 0.0, torch.device("cpu")
        self._target = torch.empty(0, dtype=torch.uint8)

    def room_for(self, tensors: list[torch.Tensor]) -> None:
        largest, total = max((t.nbytes for t in tensors), default=0), sum(t.nbytes for t in tensors)
        size = max(largest, min(total, _TARGET_BYTES))
        self.device = tensors[0].device if tensors else self.device
        if self._target.numel() < size or self._target.device != self.device:
            self._target = torch.empty(size, dtype=torch.uint8, device=self.device).zero_()  # pages that are there

    def copy(self, tensors: list[torch.Tensor]) -> None:
        offset, pairs = 0, []
        for tensor in tensors:
            offset = -(-offset // 16) * 16
            if offset + tensor.nbytes > self._target.numel():
                offset = 0
            pairs.append((self._target[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape), tensor))
            offset += tensor.nbytes
        self._wait()
        begun = time.perf_counter()
        for target, tensor in pairs:
            target.copy_(tensor)
        self._wait()
        self.seconds += time.perf_counter() - begun
        self.nbytes += sum(tensor.nbytes for tensor in tensors)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _held(weights: Any) -> Iterable[torch.Tensor] | None:
    """Tensors that stay; None of weights that are made when they are asked for."""
    if isinstance(weights, torch.nn.Module):
        return module_tensors(weights).values()
    if isinstance(weights, Mapping):
        return weights.values()
    return [tensor for _, tensor in weights] if isinstance(weights, list | tuple) else None


def _unique(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Local and plain, without those that lie where another does; of tied weights, one."""

    def local() -> Iterator[torch.Tensor]:
        for tensor in tensors:
            own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            yield own.detach()

    return list({(t.data_ptr(), t.numel(), t.stride()): t for t in local() if t.numel()}.values())
