"""One process's model in `benchmarks.onegpu`, and what is asked of it outside the timed part: change, digest, measure memory."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from weightsync.cuda.moves import Moves
from weightsync.testing.modules import nested_module

SIZES = {  # layers, hidden, intermediate, heads, key-value heads, head size, vocabulary
    "tiny": (4, 256, 512, 4, 2, 64, 1024),
    "1.7b": (28, 2048, 6144, 16, 8, 128, 151936),
    "8b": (36, 4096, 12288, 32, 8, 128, 151936),
    "14b": (40, 5120, 17408, 40, 8, 128, 151936),
}
_SAMPLE_S = 0.002
_COMPARED = 1 << 25  # elements at a time: torch.equal needs a byte for each


def shapes(size: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of Qwen3 of that size, as a checkpoint has them."""
    layers, hidden, intermediate, heads, kv_heads, head, vocabulary = SIZES[size]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for i in range(layers):
        layer = f"model.layers.{i}."
        yield layer + "self_attn.q_proj.weight", (heads * head, hidden)
        yield layer + "self_attn.k_proj.weight", (kv_heads * head, hidden)
        yield layer + "self_attn.v_proj.weight", (kv_heads * head, hidden)
        yield layer + "self_attn.o_proj.weight", (hidden, heads * head)
        yield layer + "self_attn.q_norm.weight", (head,)
        yield layer + "self_attn.k_norm.weight", (head,)
        yield layer + "mlp.gate_proj.weight", (intermediate, hidden)
        yield layer + "mlp.up_proj.weight", (intermediate, hidden)
        yield layer + "mlp.down_proj.weight", (hidden, intermediate)
        yield layer + "input_layernorm.weight", (hidden,)
        yield layer + "post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def layout(size: str) -> tuple[dict[str, tuple[int, tuple[int, ...]]], int]:
    """(name -> (offset, shape) in one block of memory, the block's bytes)."""
    places, end = {}, 0
    for name, shape in shapes(size):
        places[name] = (end, shape)
        end += aligned(2 * math.prod(shape))
    return places, end


def aligned(nbytes: int) -> int:
    return -(-nbytes // 256) * 256


def view(block: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
    return block[offset : offset + 2 * math.prod(shape)].view(torch.bfloat16).view(shape)


class Party:
    """One process's model, random bits, and what is asked of it outside the timed part."""

    def __init__(self, size: str, device: str, seed: int, one_block: bool = False) -> None:
        """*one_block*: all weights lie in one tensor, `block`, else each in its own."""
        self.device = torch.device(device)
        places, nbytes = layout(size)
        self.block = torch.empty(nbytes if one_block else 0, dtype=torch.uint8, device=self.device)
        self.tensors = {
            name: view(self.block, offset, shape)
            if one_block
            else torch.empty(shape, dtype=torch.bfloat16, device=self.device)
            for name, (offset, shape) in places.items()
        }
        torch.manual_seed(seed)
        for tensor in self.tensors.values():
            tensor.view(torch.int16).random_(-(1 << 15), 1 << 15)
        self.model = nested_module(self.tensors)
        self._reads = Moves([(tensor, None) for tensor in self.tensors.values()], self.device)
        self._base = 0
        self._torch_extra = self._device_peak = 0
        self._sampler: threading.Thread | None = None
        self._stop = threading.Event()
        self.wait()

    def about(self) -> dict[str, Any]:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None
        return {"gpu": name, "cuda": torch.version.cuda}

    def pid(self) -> int:
        return os.getpid()

    def wait(self) -> None:
        """For all that this process does on the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # ---- memory ---------------------------------------------------------------------------------------------------

    def used(self) -> int:
        """Bytes in use on the whole GPU, whoever uses them."""
        if self.device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def reset(self) -> None:
        """From now on memory is extra."""
        self.wait()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            self._base = torch.cuda.memory_allocated(self.device)
        self._torch_extra, self._device_peak = 0, self.used()

    def memory(self) -> tuple[int, int]:
        """(peak of `used` while it was sampled, peak of what torch's allocator gave out in syncs, less what it had before)."""
        return self._device_peak, self._torch_extra

    def _sample(self) -> None:
        self._device_peak = max(self._device_peak, self.used())
        while not self._stop.wait(_SAMPLE_S):
            self._device_peak = max(self._device_peak, self.used())

    # ---- rounds ---------------------------------------------------------------------------------------------------

    def before(self, change: bool, sample: bool) -> None:
        """Get ready for a sync: change every value (the trainer), watch the GPU's memory, until `after`."""
        if change:
            for tensor in self.tensors.values():
                tensor.view(torch.int16).add_(1)
        self.wait()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        if sample:
            self._stop.clear()
            self._sampler = threading.Thread(target=self._sample, daemon=True)
            self._sampler.start()

    def after(self) -> list[int]:
        """End what `before` began; a digest of each tensor's bytes."""
        if self._sampler is not None:
            self._device_peak = max(self._device_peak, self.used())
            self._stop.set()
            self._sampler.join()
            self._sampler = None
        self.wait()
        if self.device.type == "cuda":
            extra = torch.cuda.max_memory_allocated(self.device) - self._base
            self._torch_extra = max(self._torch_extra, extra)
        return self.digests()

    def digests(self) -> list[int]:
        return [int(digest) for digest in self._reads.run(digest=True)]

    def lend(self) -> list[tuple[str, Any]]:
        """Each tensor as another process can have it: to be opened by torch's CUDA IPC; on the CPU a copy."""
        return [(n, reduce_tensor(t) if t.is_cuda else t.clone()) for n, t in self.tensors.items()]

    def differing(self, lent: Sequence[tuple[str, Any]]) -> list[str]:
        """Names of the tensors whose bits are not those of `lend`'s, by torch.equal."""
        found = []
        for name, other in lent:
            theirs = (other if isinstance(other, torch.Tensor) else other[0](*other[1])).to(self.device)
            ours = self.tensors[name]
            parts = (t.view(torch.int16).reshape(-1).split(_COMPARED) for t in (ours, theirs))
            if ours.shape != theirs.shape or not all(map(torch.equal, *parts)):
                found.append(name)
        del other, theirs, parts
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return found
