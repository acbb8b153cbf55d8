"""Shared by all tests: one Ray, tiny models on disk, settings under which vLLM runs on a small CPU machine."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from weightsync.testing.models import tiny_moe

# Read by vLLM and Ray when they are imported, here and in the processes they start.
os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
    RAY_DEDUP_LOGS="0",
    TOKENIZERS_PARALLELISM="false",
)

# A machine that does nothing for a moment is no fault of an example.
hypothesis.settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("unhurried")

Weights = dict[str, torch.Tensor]
ENGINE_ARGUMENTS: dict[str, Any] = {
    "enforce_eager": True,
    "dtype": "bfloat16",
    "max_model_len": 128,
    "max_num_seqs": 8,
    "skip_tokenizer_init": True,
    "enable_prefix_caching": True,
    "num_gpu_blocks_override": 64,  # else each engine that a process keeps holds a GiB of KV cache
    "worker_extension_cls": "weightsync.ray_actors.vllm_worker.WeightSyncWorkerExtension",
}
if torch.cuda.is_available():
    ENGINE_ARGUMENTS["gpu_memory_utilization"] = 0.1  # several engines live side by side in a test process
# More arguments for every engine, as JSON, for a machine that needs them.
ENGINE_ARGUMENTS.update(json.loads(os.environ.get("WEIGHTSYNC_TEST_ENGINE_ARGUMENTS", "{}")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = "needs an NVIDIA GPU, this machine has none"
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One local Ray for the whole run."""
    import ray

    ray.init(
        address="local",  # never one that another program has left running
        num_cpus=8,
        object_store_memory=10**9,
        include_dashboard=False,
        logging_level="warning",
        log_to_driver=False,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def sidecars(ray_cluster: None) -> Iterator[Any]:
    """Sidecars for ranks of this machine, started once: sharded_rdt's."""
    from weightsync.transports.sidecar import Sidecars

    started = Sidecars(timeout_s=60)
    yield started
    started.close()


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of two random tiny Qwen3-MoE models of one shape."""
    folders = (tmp_path_factory.mktemp("moe-old"), tmp_path_factory.mktemp("moe-new"))
    for seed, folder in enumerate(folders):
        torch.save(tiny_moe(seed + 1, folder), folder / "memory.pt")
    return folders


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of SmolLM2-135M-Instruct (dense, tied) and of the same model with all weights disturbed."""
    from safetensors.torch import load_file, save_file

    from examples.smollm2 import model_dir

    old, new = model_dir(), tmp_path_factory.mktemp("smollm2-new")
    for file in old.iterdir():
        if file.suffix != ".safetensors" and file.is_file():
            shutil.copy(file, new)
    torch.manual_seed(0)
    for file in old.glob("*.safetensors"):
        weights = load_file(file)
        changed = {name: (t * (1 + 0.1 * torch.randn(t.shape))).to(t.dtype) for name, t in weights.items()}
        save_file(changed, new / file.name, metadata={"format": "pt"})
    return old, new


@pytest.fixture(scope="session")
def load_weights() -> Callable[[Path], Weights]:
    """The checkpoint tensors in a folder, as they stand on disk."""
    from safetensors.torch import load_file

    def load(folder: Path) -> Weights:
        return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}

    return load


@pytest.fixture(scope="session")
def start_llm(moe: tuple[Path, Path]) -> Callable[..., Any]:
    """Start a vllm.LLM in this process on a folder.

    One with experts goes before, whichever test comes first: vLLM makes the groups that they need for the first engine of a
    process alone.
    """
    first: list[Any] = []

    def start(folder: Path, **arguments: Any) -> Any:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        if not first:
            first.append(LLM(str(moe[0]), **ENGINE_ARGUMENTS))
        return LLM(str(folder), **(ENGINE_ARGUMENTS | arguments))

    return start


@pytest.fixture(scope="session")
def outputs() -> Callable[[Any], Any]:
    """Greedy tokens and all prompt and sample log-probabilities of an LLM, for fixed prompts."""

    def run(llm: Any) -> Any:
        from vllm import SamplingParams

        prompts = [[5, 9, 200, 17, 33, 2], [1, 2, 3, 4], [77] * 20]
        asked = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=0, logprobs=0, detokenize=False)
        found = llm.generate([{"prompt_token_ids": p} for p in prompts], asked, use_tqdm=False)
        return [
            (
                list(request.outputs[0].token_ids),
                [[(k, v.logprob) for k, v in at.items()] for at in request.outputs[0].logprobs],
                [[(k, v.logprob) for k, v in at.items()] for at in request.prompt_logprobs if at],
            )
            for request in found
        ]

    return run


class Reference:
    """What a fresh engine on a folder puts out; each folder's engine is started once.

    Engines are kept: the end of one in-process vLLM engine takes down what the others of the process share.
    """

    def __init__(self, start_llm: Callable[..., Any], outputs: Callable[[Any], Any]) -> None:
        self._start_llm, self._outputs = start_llm, outputs
        self._known: dict[Path, Any] = {}
        self._engines: list[Any] = []

    def start(self, folder: Path, **arguments: Any) -> Any:
        """A new engine, whose outputs are noted while it is fresh."""
        llm = self._start_llm(folder, **arguments)
        self._engines.append(llm)
        self._known[folder] = self._outputs(llm)
        return llm

    def __call__(self, folder: Path, **arguments: Any) -> Any:
        if folder not in self._known:
            self.start(folder, **arguments)
        return self._known[folder]


@pytest.fixture(scope="session")
def reference(start_llm: Callable[..., Any], outputs: Callable[[Any], Any]) -> Reference:
    return Reference(start_llm, outputs)


@pytest.fixture(scope="session")
def engine_arguments() -> dict[str, Any]:
    """Arguments of every vLLM engine in the tests."""
    return dict(ENGINE_ARGUMENTS)


@pytest.fixture(scope="session")
def vllm_party() -> Callable[[Any], Callable[[bytes], list[bytes]]]:
    """An LLM of this process as a party of a LocalFleet."""
    from weightsync.ray_actors.engine import VllmSide

    def party(llm: Any) -> Callable[[bytes], list[bytes]]:
        side = VllmSide(llm, lambda: llm)
        return lambda payload: side.call(payload) or []

    return party
