"""Tiny real models on disk, for engines that load from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}


def tiny_moe(seed: int, folder: Path) -> dict[str, torch.Tensor]:
    """Write a random Qwen3-MoE of two layers to *folder*; returns its tensors as transformers holds them.

    The sizes are the smallest that vLLM serves on a CPU. Needs transformers.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def tiny_mla(seed: int, folder: Path) -> None:
    """Write a random DeepSeek-V2: latent attention, experts, and shared ones. vLLM's kernels fix the heads' sizes."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(seed)
    config = DeepseekV2Config(
        **_COMMON,
        **(_ATTENTION | {"num_key_value_heads": 4}),
        **_EXPERTS,
        intermediate_size=128,
        kv_lora_rank=512,
        q_lora_rank=24,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        n_routed_experts=4,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
    )
    _write(DeepseekV2ForCausalLM(config), folder)


def tiny_tied(seed: int, folder: Path) -> None:
    """Write a random Llama whose head is its embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(**(_COMMON | {"tie_word_embeddings": True}), **_ATTENTION, intermediate_size=128, head_dim=32)
    _write(LlamaForCausalLM(config), folder)


def tiny_qwen3_next(seed: int, folder: Path) -> None:
    """Write a random Qwen3-Next: three layers of gated delta rule, one of attention, experts."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(seed)
    config = Qwen3NextConfig(
        **(_COMMON | {"num_hidden_layers": 4}),
        **_ATTENTION,
        **_EXPERTS,
        intermediate_size=128,
        shared_expert_intermediate_size=32,
        head_dim=64,
        num_experts=4,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    )
    _write(Qwen3NextForCausalLM(config), folder)


def tiny_mamba(seed: int, folder: Path) -> None:
    """Write a random Mamba-2."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    torch.manual_seed(seed)
    config = Mamba2Config(**_COMMON, num_heads=4, head_dim=32, state_size=16, n_groups=1)
    _write(Mamba2ForCausalLM(config), folder)


def _write(model: Any, folder: Path) -> None:
    """Save it in bfloat16, with every tensor disturbed: constants would show nothing of how they are loaded."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(torch.bfloat16).save_pretrained(folder)
