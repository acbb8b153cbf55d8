"""What vLLM makes of weights on this machine's processor, or GPU."""

from __future__ import annotations

from functools import cache

import torch

ON_CPU = not torch.cuda.is_available()


@cache
def packs_linear() -> bool:
    """Whether native code packs the weights of linear layers. It does where the processor multiplies bf16: not with AVX2."""
    return _packs(torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16))


@cache
def packs_convolution() -> bool:
    """The same of the weights of causal convolutions."""
    return _packs(torch.nn.Conv1d(64, 64, 4, groups=64, bias=False, dtype=torch.bfloat16))


def _packs(layer: torch.nn.Linear | torch.nn.Conv1d) -> bool:
    if not ON_CPU:
        return False
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    layer.requires_grad_(False)
    loaded = layer.weight.clone()
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    return not torch.equal(layer.weight, loaded)
