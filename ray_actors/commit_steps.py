"""What a vLLM engine does along with taking new weights: drop what it had computed with the old ones, note the version.

Each step is done where the engine offers it, which is seen by looking. The same for an LLM, whose methods return, and
an AsyncLLM, whose methods are awaited.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from weightsync.config import CommitStep, SyncConfig

Step = Callable[[], Any]
"""Returns, or awaits, False where the engine refused."""

_METHODS: dict[CommitStep, tuple[str, ...]] = {
    "flush_prefix_cache": ("reset_prefix_cache",),
    "reset_mm_cache": ("reset_mm_cache",),
    "reset_encoder_cache": ("reset_encoder_cache",),
    "set_weight_version": ("set_weight_version", "update_weight_version"),
}


def commit_steps(owners: Sequence[Any], config: SyncConfig, version: int) -> Iterator[tuple[CommitStep, Step]]:
    """The steps that *config* asks for, in the order in which they are safe.

    Args:
        owners: the engine and, last, its core, which knows the settings; the first that has a method is asked.
    """
    settings = owners[-1].vllm_config
    steps = set(config.on_commit)
    if not getattr(settings.model_config, "is_multimodal_model", True):
        steps -= {"reset_mm_cache", "reset_encoder_cache"}
    if "reset_encoder_cache" in steps:
        # A request in flight would miss the outputs that it counts on: it must start anew, which the flush makes it do.
        steps.add("flush_prefix_cache")
    for step, names in _METHODS.items():
        method = next((found for owner in owners for name in names if (found := getattr(owner, name, None))), None)
        if step not in steps or method is None:
            continue
        if step == "set_weight_version":
            yield step, lambda method=method: method(str(version))  # type: ignore[misc]
            continue
        # Blocks in use are old, too, and so are those in a KV connector's store. Asked for one that there is not, vLLM
        # refused in earlier versions.
        wanted = ["reset_running_requests"] + ["reset_connector"] * (settings.kv_transfer_config is not None)
        options = dict.fromkeys(inspect.signature(method).parameters.keys() & set(wanted), True)
        yield step, lambda method=method, options=options: method(**options)  # type: ignore[misc]
