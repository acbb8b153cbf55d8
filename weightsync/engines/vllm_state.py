"""Whether a vLLM engine can take an update as it is: what to refuse before anything moves, and the cure.

Known bugs that corrupt in silence cannot be seen by looking for a feature, so here, and nowhere else, vLLM's version is
compared. Numbers are vllm-project/vllm's issues and pull requests.

Imported inside vLLM's workers only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import vllm
from packaging.version import InvalidVersion, Version

from weightsync.errors import EngineStateError
from weightsync.loadmap import Target


def refuse_unfit(worker: Any) -> None:
    """Raises EngineStateError, with the cure, for settings under which an update would be wrong without an error."""
    config = worker.vllm_config
    if getattr(config.parallel_config, "enable_eplb", False):
        raise EngineStateError(
            "expert load balancing (enable_eplb) moves experts behind the loader's back; a reload would permute them. "
            "Create the engine with enable_eplb=False"
        )
    if getattr(config, "lora_config", None) is not None:
        raise EngineStateError(
            "LoRA is enabled: adapters would stay those of the old weights, and modules are wrapped. Create the engine "
            "without enable_lora, and merge adapters before they are sent"
        )
    if getattr(worker, "_weight_update_active", False):
        raise EngineStateError("a weight update of vLLM's own is under way (start_weight_update); finish it first")
    if weights_asleep():
        raise EngineStateError("the engine's weights are asleep; call wake_up() before the update")
    if _drafts(config) and draft_model(worker) is None:
        raise EngineStateError(
            f"a draft model (speculative decoding by {config.speculative_config.method}) would keep its old weights, and this "
            "vLLM does not show it. Create the engine without speculative_config, or with method ngram"
        )
    for bug in KNOWN_BUGS:
        if bug.is_in(vllm.__version__) and bug.hits(worker):
            raise EngineStateError(f"vLLM {vllm.__version__}: {bug.symptom} (vllm#{bug.upstream}). {bug.cure}")


def settings_of(worker: Any) -> dict[str, bool | int | str]:
    """Settings that matter for an update; those that this vLLM does not have are left out."""
    config = worker.vllm_config
    found = {
        "prefix_caching": getattr(config.cache_config, "enable_prefix_caching", None),
        "sleep_mode": getattr(config.model_config, "enable_sleep_mode", None),
        "asleep": weights_asleep(),
        "eplb": getattr(config.parallel_config, "enable_eplb", None),
        "tensor_parallel_size": getattr(config.parallel_config, "tensor_parallel_size", None),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
    }
    return {name: value for name, value in found.items() if value is not None}


# ---- draft models ---------------------------------------------------------------------------------------------------


def draft_model(worker: Any) -> torch.nn.Module | None:
    """The model that proposes tokens, where there is one and this vLLM shows it (0.26 and later)."""
    runner = worker.model_runner
    found = runner.get_draft_model() if hasattr(runner, "get_draft_model") else None
    return found if isinstance(found, torch.nn.Module) else None


def draft_targets(worker: Any, model: torch.nn.Module) -> Iterator[Target]:
    """The draft model's own parameters: an update feeds none of them, so the report lists them as unfed. Their age costs
    speed, not correctness: the target model verifies every token."""
    draft = draft_model(worker) if _drafts(worker.vllm_config) else None
    shared = {id(parameter) for parameter in model.parameters()}
    for path, parameter in draft.named_parameters() if draft is not None else ():
        if id(parameter) not in shared:
            module, _, name = f"draft_model.{path}".rpartition(".")
            yield Target(module, name, str(parameter.dtype).removeprefix("torch."), tuple(parameter.shape))


def _drafts(config: Any) -> bool:
    """Whether tokens are proposed by weights; n-grams and suffixes need none."""
    method = getattr(getattr(config, "speculative_config", None), "method", None)
    return method is not None and not str(method).startswith(("ngram", "suffix"))


# ---- sleep ----------------------------------------------------------------------------------------------------------


def weights_asleep() -> bool | None:
    """Whether the memory of weights is given back, as vLLM's allocator tells; None where it does not."""
    allocator = getattr(sys.modules.get("vllm.device_allocator.cumem"), "CuMemAllocator", None)
    data = getattr(getattr(allocator, "instance", None), "pointer_to_data", {}).values()
    states = [getattr(entry, "is_asleep", None) for entry in data if entry.tag == "weights"]
    return None if not states or None in states else any(states)


# ---- known bugs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBug:
    """A reload that leaves wrong values behind and raises nothing."""

    upstream: str
    fixed_in: str | None
    """None: not fixed in any release that was looked at (0.32)."""
    symptom: str
    cure: str
    hits: Callable[[Any], bool]
    """Whether the worker's engine is of the kind that has it."""

    def is_in(self, version: str) -> bool:
        """False for builds from source that do not know their version ("dev", 0.1.dev1+g...)."""
        try:
            found = Version(version)
        except InvalidVersion:
            return False
        return found >= Version("0.20") and (self.fixed_in is None or found < Version(self.fixed_in))


def _has_graphs(worker: Any) -> bool:
    mode = worker.vllm_config.compilation_config.cudagraph_mode
    return getattr(mode, "name", "NONE") != "NONE" and not worker.vllm_config.model_config.enforce_eager


def _is_moe(worker: Any) -> bool:
    return bool(worker.vllm_config.model_config.get_num_experts())


def _is_recurrent(worker: Any) -> bool:
    config = worker.vllm_config.model_config
    return bool(config.is_hybrid or config.is_attention_free)


def _is_gemma4(worker: Any) -> bool:
    return any(name.startswith("Gemma4") for name in worker.vllm_config.model_config.architectures)


def _kernels_keep_tensors(worker: Any) -> bool:
    """Quantised experts whose kernel has tensors of its own, beside the layer's, or is of a kind that cannot be looked
    at. A reload makes a new kernel, and captured graphs go on reading the old one's."""
    if worker.vllm_config.model_config.quantization is None or not _is_moe(worker):
        return False
    methods = {
        id(method): method
        for module in worker.model_runner.get_model().modules()
        if (method := getattr(module, "quant_method", None)) is not None and hasattr(method, "moe_kernel")
    }
    experts = [getattr(method.moe_kernel, "fused_experts", None) for method in methods.values()]
    return not experts or any(
        found is None or any(isinstance(value, torch.Tensor) for value in vars(found).values()) for found in experts
    )


KNOWN_BUGS = (
    KnownBug(
        upstream="40390",
        fixed_in="0.21",
        symptom="after a reload CUDA graphs go on reading the experts' old weights",
        cure="Use vLLM 0.21 or later, or enforce_eager=True",
        hits=lambda worker: _has_graphs(worker) and _is_moe(worker),
    ),
    KnownBug(
        upstream="48251",
        fixed_in="0.28",
        symptom="after a reload CUDA graphs go on reading MLA's old absorbed weights",
        cure="Use vLLM 0.28 or later, or enforce_eager=True",
        hits=lambda worker: _has_graphs(worker) and worker.vllm_config.model_config.use_mla,
    ),
    KnownBug(
        upstream="41670, vllm#48312",
        fixed_in=None,
        symptom="after a reload CUDA graphs go on reading the scales and strides of the quantised experts' old kernel",
        cure="Use enforce_eager=True, or another moe_backend (triton)",
        hits=lambda worker: _has_graphs(worker) and _kernels_keep_tensors(worker),
    ),
    KnownBug(
        upstream="44814",
        fixed_in="0.24",
        symptom="a reload leaves parts of state-space layers (Mamba) unwritten",
        cure="Use vLLM 0.24 or later",
        hits=_is_recurrent,
    ),
    KnownBug(
        upstream="44371",
        fixed_in="0.26",
        symptom="a reload overwrites buffers that Gemma 4 computes at run time",
        cure="Use vLLM 0.26 or later",
        hits=_is_gemma4,
    ),
)
