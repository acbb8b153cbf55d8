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

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from weightsync.pipeline import Completion


class OneReloadPerChunk:
    """A vLLM that is loaded by hand, out of a module that weightsync keeps up to date in the same process."""

    def __init__(self, model: str, **arguments: Any) -> None:
        """*arguments* are keywords of vllm.LLM."""
        from transformers import AutoModelForCausalLM
        from vllm import LLM

        self.llm = LLM(model, **arguments)
        self.model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        """What weightsync is pointed at: the last metre, from here into vLLM, is not its own."""
        self._loaded = _copy(self.model)

    def rollout(self, prompts: Sequence[list[int]], *, seed: int, **sampling: Any) -> list[list[Completion]]:
        from vllm import SamplingParams

        if any(not torch.equal(tensor, self._loaded[name]) for name, tensor in self.model.state_dict().items()):
            self._reload()
            self._loaded = _copy(self.model)
        params = [SamplingParams(seed=seed + 1000 * i, **sampling) for i in range(len(prompts))]
        inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        return [[_completion(completion) for completion in output.outputs] for output in outputs]

    def _reload(self) -> None:
        with FilledMemory():
            for chunk in one_parameter_per_chunk(self.model):
                self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(chunk)})
        self.llm.reset_prefix_cache()


def one_parameter_per_chunk(model: torch.nn.Module) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The whole state dict, a tied output head included."""
    for name, tensor in model.state_dict().items():
        yield [(name, tensor)]


def _copy(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _completion(output: Any) -> Completion:
    token_ids = tuple(output.token_ids)
    return Completion(
        text=output.text,
        token_ids=token_ids,
        logprobs=tuple(at[token].logprob for token, at in zip(token_ids, output.logprobs, strict=True)),
        finish_reason=output.finish_reason,
    )


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
