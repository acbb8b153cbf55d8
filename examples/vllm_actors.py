"""Two vLLM engines in Ray actors of your own, an `LLM` and an `AsyncLLM` that goes on generating, and a trainer beside them.

    python -m examples.vllm_actors

On a GPU give each actor its share: `ray.remote(num_gpus=...)`, and `gpu_memory_utilization` where engines share one.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import ray
import torch

import weightsync as ws
from examples.smollm2 import model_dir

EXTENSION = "weightsync.ray_actors.vllm_worker.WeightSyncWorkerExtension"
PROMPT = "Question: What is the capital of France? Answer:"
# Read by vLLM on CPUs, in each engine's actor.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
ARGUMENTS: dict[str, Any] = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 256}


class Trainer:
    """Any class; weightsync reads its attribute `model`, whose names are those of the checkpoint."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)

    def step(self) -> None:
        """In place of a training step."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1 + 0.05 * torch.randn_like(parameter))


class Rollouts:
    """An actor of this class must be free while `update()` runs: its methods block it."""

    def __init__(self, folder: str, **arguments: Any) -> None:
        from vllm import LLM

        self.llm = LLM(folder, **{"worker_extension_cls": EXTENSION, **arguments})

    def generate(self, prompt: str, max_tokens: int = 16) -> str:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
        (output,) = self.llm.generate([prompt], sampling, use_tqdm=False)
        return str(output.outputs[0].text)


class AsyncRollouts:
    """Its methods are async, so Ray makes an async actor of it: requests in flight are paused and go on with the new weights."""

    def __init__(self, folder: str, **arguments: Any) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        settings = {"worker_extension_cls": EXTENSION, **arguments}
        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=folder, **settings))

    async def generate(self, prompt: str, max_tokens: int = 16) -> str:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
        async for output in self.llm.generate(prompt, sampling, request_id=uuid4().hex):
            last = output
        return str(last.outputs[0].text)


def main() -> None:
    ray.init(address="local", num_cpus=4, object_store_memory=10**9, include_dashboard=False, logging_level="warning")
    folder = str(model_dir())
    start = {"num_cpus": 1, "runtime_env": {"env_vars": ENVIRONMENT}}
    trainer = ray.remote(Trainer).options(num_cpus=1).remote(folder)
    engines = [ray.remote(kind).options(**start).remote(folder, **ARGUMENTS) for kind in (Rollouts, AsyncRollouts)]
    ray.get([engine.generate.remote(PROMPT) for engine in engines])  # they have started
    with ws.connect(trainers=[trainer], engines=engines, source="model", target="llm") as sync:
        for _ in range(2):
            ray.get(trainer.step.remote())
            in_flight = engines[1].generate.remote(PROMPT, 200)
            print(sync.update())
            print(f"  in flight meanwhile: {len(ray.get(in_flight))} characters")
            for engine, answer in zip(
                ("LLM", "AsyncLLM"), ray.get([e.generate.remote(PROMPT) for e in engines]), strict=True
            ):
                print(f"  {engine}: {answer!r}")


if __name__ == "__main__":
    main()
