"""A random Qwen3-MoE of some GB for tests and benchmarks on a GPU: a trainer that holds it there, and an engine.

Plain classes, for a Ray actor each. Nothing is downloaded; transformers writes the configuration, vllm runs the engine.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

MOE_3_65_GB = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 2048,
}
"""843 checkpoint tensors in bf16."""

MOE_16_2_GB = MOE_3_65_GB | {
    "vocab_size": 151_936,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
"""12 of the 48 layers of Qwen3-30B-A3B: 4,719 checkpoint tensors in bf16."""

CUDA_GRAPHS: dict[str, Any] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
"""CUDA graphs without torch.compile, which takes a minute to start and changes nothing of a reload."""

Outputs = list[tuple[list[int], list[dict[int, float]], list[dict[int, float]]]]
"""For each prompt: greedy tokens, top log-probabilities of each, log-probabilities of the prompt's tokens."""


def moe_shapes(sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor, as checkpoints hold them: one for each expert and projection."""
    hidden, head, expert = sizes["hidden_size"], sizes["head_dim"], sizes["moe_intermediate_size"]
    queries, keys = sizes["num_attention_heads"] * head, sizes["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (sizes["vocab_size"], hidden)}
    for i in range(sizes["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        attention, mlp = layer + "self_attn.", layer + "mlp."
        shapes |= {
            layer + "input_layernorm.weight": (hidden,),
            attention + "q_proj.weight": (queries, hidden),
            attention + "k_proj.weight": (keys, hidden),
            attention + "v_proj.weight": (keys, hidden),
            attention + "o_proj.weight": (hidden, queries),
            attention + "q_norm.weight": (head,),
            attention + "k_norm.weight": (head,),
            layer + "post_attention_layernorm.weight": (hidden,),
            mlp + "gate.weight": (sizes["num_experts"], hidden),
        }
        for j in range(sizes["num_experts"]):
            shapes |= {
                f"{mlp}experts.{j}.gate_proj.weight": (expert, hidden),
                f"{mlp}experts.{j}.up_proj.weight": (expert, hidden),
                f"{mlp}experts.{j}.down_proj.weight": (hidden, expert),
            }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (sizes["vocab_size"], hidden)}


def moe_weights(sizes: Mapping[str, int], seed: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one version of the model, in bf16, in the order of `moe_shapes`."""
    generator = torch.Generator(device).manual_seed(seed)
    for name, shape in moe_shapes(sizes).items():
        tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
        mean, deviation = (1.0, 0.1) if len(shape) == 1 else (0.0, sizes["hidden_size"] ** -0.5)
        yield name, tensor.normal_(mean, deviation, generator=generator)


class MoeTrainer:
    """Holds the model in bf16 on one device; another seed is another version of it, in the same memory."""

    def __init__(self, sizes: Mapping[str, int], device: str) -> None:
        self._sizes = dict(sizes)
        self._device = torch.device(device)
        self.weights = {
            name: torch.empty(shape, dtype=torch.bfloat16, device=self._device)
            for name, shape in moe_shapes(sizes).items()
        }

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.weights.values())

    def set(self, seed: int) -> None:
        for name, tensor in moe_weights(self._sizes, seed, self._device):
            self.weights[name].copy_(tensor)

    def made(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors as a trainer makes them that has to gather each: one at a time. Last ones first."""
        for name, tensor in reversed(self.weights.items()):
            yield name, tensor.clone()

    def write(self, folder: str) -> None:
        """The model as a checkpoint."""
        from safetensors.torch import save_file
        from transformers import Qwen3MoeConfig

        config = Qwen3MoeConfig(**self._sizes, tie_word_embeddings=False, norm_topk_prob=True)
        config.architectures = ["Qwen3MoeForCausalLM"]
        config.save_pretrained(folder)
        held = {name: tensor.cpu() for name, tensor in self.weights.items()}
        save_file(held, Path(folder) / "model.safetensors", metadata={"format": "pt"})


class MoeEngine:
    """A vllm.LLM on a checkpoint."""

    def __init__(self, folder: str, arguments: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        """*environment* is set before vllm is imported."""
        os.environ.update(environment)
        from vllm import LLM

        self.llm = LLM(folder, **arguments)

    def outputs(self) -> Outputs:
        """For fixed prompts, asked one after another, so that each batch is the same each time."""
        from vllm import SamplingParams

        asked = SamplingParams(
            temperature=0, max_tokens=16, ignore_eos=True, prompt_logprobs=0, logprobs=5, detokenize=False
        )
        found: Outputs = []
        for prompt in ([5, 9, 200, 17, 33, 2], [1, 2, 3, 4], [77] * 20, [1 + 3 * i for i in range(70)]):
            (request,) = self.llm.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
            said = request.outputs[0]
            tops = ({token: entry.logprob for token, entry in at.items()} for at in said.logprobs)
            read = ({token: entry.logprob for token, entry in at.items()} for at in request.prompt_logprobs if at)
            found.append((list(said.token_ids), list(tops), list(read)))
        return found

    def on_worker(self, function: Callable[..., Any], *args: Any) -> Any:
        """What *function* makes of vLLM's first worker, in its process; every worker runs it. The engine needs
        VLLM_ALLOW_INSECURE_SERIALIZATION=1 where that is another one."""
        found, *_ = self.llm.collective_rpc(function, args=args)
        return found

    def forget_prompts(self) -> None:
        self.llm.reset_prefix_cache()

    def stop(self) -> None:
        """End the engine's processes; the actor's own is for its owner to end."""
        with contextlib.suppress(Exception):
            self.llm.llm_engine.engine_core.shutdown()
