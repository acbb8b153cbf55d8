"""vLLM's own weight transfer over CUDA IPC, as a peer: a trainer that sends by it, and an engine that takes what it sends.

Its calls are those of vLLM's documentation for a trainer and an engine that are Ray actors. Nothing pauses or resumes the engine
and nothing is verified, so an update's time is that of the three calls alone, during which the engine must not generate.
"""

from __future__ import annotations

import time
from typing import Any

import ray

from weightsync.testing.random_moe import MoeEngine, MoeTrainer

ENGINE_ARGUMENTS: dict[str, Any] = {"weight_transfer_config": {"backend": "ipc"}}
WAYS = {"vLLM's ipc": False, "vLLM's ipc, packed": True}
"""Name -> whether it packs."""


class IpcTrainer(MoeTrainer):
    def send(self, engine: Any, packed: bool) -> None:
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

        arguments = {"send_mode": "ray", "llm_handle": engine, "packed": packed}
        IPCWeightTransferEngine.trainer_send_weights(iter(self.weights.items()), arguments)


class IpcEngine(MoeEngine):
    def init_weight_transfer_engine(self) -> None:
        self.llm.init_weight_transfer_engine({"init_info": {}})

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, request: dict[str, Any]) -> None:
        """Called by vLLM in the trainer."""
        self.llm.update_weights(request)

    def finish_weight_update(self) -> None:
        self.llm.finish_weight_update()


def timed_update(trainer: Any, engine: Any, packed: bool) -> float:
    """Seconds of one update with the trainer's present weights."""
    start = time.perf_counter()
    ray.get(engine.start_weight_update.remote())
    ray.get(trainer.send.remote(engine, packed))
    ray.get(engine.finish_weight_update.remote())
    return time.perf_counter() - start
