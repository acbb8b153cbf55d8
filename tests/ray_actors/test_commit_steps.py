"""What an engine does with its caches and its version as it commits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.config import SyncConfig
from weightsync.ray_actors.commit_steps import commit_steps


class Owner:
    def __init__(self, *, multimodal: bool, connector: object = None) -> None:
        model_config = SimpleNamespace(is_multimodal_model=multimodal)
        self.vllm_config = SimpleNamespace(model_config=model_config, kv_transfer_config=connector)
        self.calls: list[Any] = []

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        self.calls.append(("prefix", reset_running_requests, reset_connector))
        return True

    def reset_mm_cache(self) -> None:
        self.calls.append("mm")

    def set_weight_version(self, weight_version: str) -> None:
        self.calls.append(weight_version)


class OwnerWithEncoder(Owner):
    def reset_encoder_cache(self) -> None:
        self.calls.append("encoder")


PREFIX = ("prefix", True, False)


@pytest.mark.parametrize(
    ("owner", "steps", "calls"),
    [
        (OwnerWithEncoder(multimodal=True), None, [PREFIX, "mm", "encoder", "7"]),
        (OwnerWithEncoder(multimodal=True), ("reset_encoder_cache",), [PREFIX, "encoder"]),
        (OwnerWithEncoder(multimodal=False), None, [PREFIX, "7"]),
        (Owner(multimodal=True), None, [PREFIX, "mm", "7"]),
        (Owner(multimodal=False, connector=object()), None, [("prefix", True, True), "7"]),
        (Owner(multimodal=True), (), []),
    ],
    ids=["all", "encoder alone", "text only", "no encoder", "connector", "none"],
)
def test_steps_are_taken_where_asked_for_and_offered(owner: Owner, steps: Any, calls: list[Any]) -> None:
    config = SyncConfig() if steps is None else SyncConfig(on_commit=steps)
    for _, step in commit_steps([owner], config, 7):
        step()
    assert owner.calls == calls
