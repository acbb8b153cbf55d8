"""vLLM's side of a weight sync. Every use of what is private to vLLM stands in this file and in `vllm_state` beside it.

Private names used, the same from 0.20 to 0.32: `model_loader.reload.layerwise` (get_layerwise_info,
initialize_layerwise_reload, _get_original_loader, _place_kernel_tensors, LOADING_LAYERS), `reload.utils`
(get_layer_tensors) and `reload.meta` (to_meta_tensor, SKIP_LOAD_TENSORS). What differs between versions is found by
looking; numbers are compared for known bugs alone, in `vllm_state`. Run on 0.32 (CPU) and 0.26 (H200, eager and CUDA
graphs).

Imported inside vLLM's workers only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload import meta as reload_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from weightsync.engines.vllm_state import draft_targets, refuse_unfit, settings_of
from weightsync.loadmap import LoadMap
from weightsync.manifest import Manifest
from weightsync.ranks import rank_in_engine
from weightsync.reachable import reachable_tensors
from weightsync.recorder import record_load_map


class VllmAdapter:
    """One vLLM worker as an engine rank. *worker* offers `model_runner`, `vllm_config` and `rank`."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        parallel = worker.vllm_config.parallel_config
        # data_parallel_rank is 0 on every replica of a dense model; the index is not.
        replica = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)
        self.rank: int = rank_in_engine(replica, worker.rank, parallel.world_size)
        self.device = torch.device(worker.device)
        self._fed: dict[tuple[str, str], torch.nn.Module] = {}
        """(module path, parameter) -> the module, of all that the load map feeds."""
        self._ties: dict[str, str] = {}
        """Checkpoint name -> the name of the tied parameter that it feeds besides."""

    def load_map(self, manifest: Manifest) -> LoadMap:
        """Run the model's loader over meta tensors, with vLLM's own machinery for reloading out of the way.

        Where the model ties its head to its embeddings and the trainer sends the embeddings only, the adapter feeds
        the head too: vLLM on CPU keeps a packed copy there, which would stay stale.

        Raises:
            ManifestError: the loader refuses a name or a shape.
            EngineStateError: the engine is in the middle of another update.
        """
        self.check_ready()
        self._ties = {}
        load_map = self._record(manifest)
        head = "lm_head.weight"
        text_config = self._worker.vllm_config.model_config.hf_text_config
        if head in load_map.unfed and getattr(text_config, "tie_word_embeddings", False):
            embeddings = {
                c.name for c in load_map.copies if c.module.endswith("embed_tokens") and c.parameter == "weight"
            }
            if len(embeddings) == 1:
                self._ties = {embeddings.pop(): head}
                load_map = self._record(manifest)
        return load_map

    def _record(self, manifest: Manifest) -> LoadMap:
        model = self._model()
        passing = set()
        never_reloaded: Any = getattr(reload_meta, "SKIP_LOAD_TENSORS", ()) or getattr(reload_meta, "SKIP_TENSORS", ())
        layerwise.initialize_layerwise_reload(model)
        try:
            destinations = {}
            for module_path, module in model.named_modules():
                for name, tensor in get_layer_tensors(module).items():
                    if not tensor.is_meta:  # biases, and what vLLM never reloads, are left in place by it
                        tensor = reload_meta.to_meta_tensor(tensor)
                        (module._parameters if name in module._parameters else module._buffers)[name] = tensor
                    tensor.weight_loader = layerwise._get_original_loader(tensor)
                    destinations[module_path, name] = tensor
                    private = name in module._buffers and name.startswith("_")  # attention's scales, one by default
                    if private or name in module._non_persistent_buffers_set or name in never_reloaded:
                        passing.add((module_path, name))
            with set_current_vllm_config(self._worker.vllm_config):
                load_map = record_load_map(
                    manifest, destinations, lambda items: model.load_weights(self._with_ties(items))
                )
        finally:
            self._abort_reload()
        # Caches such as a rotary embedding's are no weights; they matter only where a tensor feeds them.
        fed = {(copy.module, copy.parameter) for copy in load_map.copies}
        self._fed = {(path, name): model.get_submodule(path) for path, name in fed}
        kept = tuple(
            t for t in load_map.targets if (t.module, t.parameter) in fed or (t.module, t.parameter) not in passing
        )
        targets = (*kept, *draft_targets(self._worker, model))
        return msgspec.structs.replace(load_map, targets=targets, whole_modules=True)

    def _with_ties(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in pairs:
            yield name, tensor
            if name in self._ties:
                yield self._ties[name], tensor

    laid_out_as_loaded = False
    copies_load = True

    def live(self) -> dict[tuple[str, str], torch.Tensor]:
        return {
            (path, name): tensor.detach()
            for (path, name), module in self._fed.items()
            if isinstance(tensor := getattr(module, name, None), torch.Tensor)
        }

    def reachable(self) -> dict[str, dict[str, torch.Tensor]]:
        """KV caches are left out: nothing generates during an update."""
        return reachable_tensors(self._model(), skip=frozenset({"kv_cache", "kv_caches"}))

    def synchronize(self) -> None:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def check_ready(self) -> None:
        refuse_unfit(self._worker)
        if any(layerwise.get_layerwise_info(module).can_load() for module in self._model().modules()):
            self._abort_reload()  # left behind by a reload that failed outside weightsync

    def settings(self) -> dict[str, bool | int | str]:
        """For `weightsync doctor`."""
        return settings_of(self._worker)

    def apply(self, groups: Iterable[Iterable[tuple[str, torch.Tensor]]]) -> int:
        """One `reload_weights`, fed by a generator of whole groups.

        vLLM keeps references to what it was given until the module is complete, which is at a group's last tensor.
        """
        reloads = 0
        try:
            with set_current_vllm_config(self._worker.vllm_config), _cpu_moe_prepacks(self._model()), _quiet_reload():
                reloads += 1
                self._worker.model_runner.reload_weights(
                    weights_iterator=self._with_ties(pair for group in groups for pair in group)
                )
        except BaseException:
            self._abort_reload()
            raise
        self.synchronize()
        return reloads

    def _model(self) -> Any:
        return self._worker.model_runner.get_model()

    def _abort_reload(self) -> None:
        """Put the live tensors back and forget all counters. Modules that were complete keep their new weights."""
        model = self._model()
        for module in model.modules():
            info = layerwise.get_layerwise_info(module)
            if info.can_load():
                if info.kernel_tensors is not None:
                    layerwise._place_kernel_tensors(module, info)
                info.reset()
        getattr(layerwise, "LOADING_LAYERS", set()).clear()
        if hasattr(model, "_original_do_torchao_reload"):
            model._do_torchao_reload = model._original_do_torchao_reload


@contextmanager
def _cpu_moe_prepacks(model: torch.nn.Module) -> Iterator[None]:
    """Make a reload on CPU pack expert weights again, where vLLM does that at the first load only (0.28 to 0.32).

    There the kernel expects packed weights and a reload copies unpacked ones over them: even reloading the same
    weights changes the outputs. Seen by behaviour: the experts' own post-processing did not run. Then the kernel is
    set up as at the first load, which is safe on CPU, where no captured graph holds its addresses.
    """
    changed: dict[int, Any] = {}
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None and hasattr(method, "_setup_kernel"):
            changed.setdefault(id(method), method)
    for method in changed.values():
        method._setup_kernel = _packing_setup(method, method._setup_kernel)
    try:
        yield
    finally:
        for method in changed.values():
            del method._setup_kernel


def _packing_setup(method: Any, setup: Any) -> Any:
    def packing_setup(layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
        experts = method.moe_kernel.fused_experts
        process, ran = experts.process_weights_after_loading, False

        def watched(*args: Any, **kwargs: Any) -> None:
            nonlocal ran
            ran = True
            process(*args, **kwargs)

        experts.process_weights_after_loading = watched
        try:
            setup(layer=layer, w13=w13, w2=w2)
        finally:
            del experts.process_weights_after_loading
        if not ran and w13.device.type == "cpu":
            method.moe_kernel = None
            setup(layer=layer, w13=w13, w2=w2)

    return packing_setup


@contextmanager
def _quiet_reload() -> Iterator[None]:
    """Drop vLLM's "Failed to load weights" for modules that nothing feeds: every sound reload prints it for rotary
    embeddings, and completeness is proven by the load map."""
    logger = logging.getLogger(layerwise.__name__)

    def keep(record: logging.LogRecord) -> bool:
        return "Failed to load weights" not in str(record.msg)

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
