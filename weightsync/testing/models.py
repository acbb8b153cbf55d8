"""Tiny real models on disk, for engines that load from a folder."""

from __future__ import annotations

from pathlib import Path

import torch


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
