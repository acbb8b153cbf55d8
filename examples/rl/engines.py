"""The rollout engines: ordinary user classes, with nothing of weightsync in them.

``VllmEngine.llm`` and ``TorchEngine.model`` are what weightsync is pointed at.
Both return, with each sampled token, the log-probability they gave it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from examples.rl.task import MAX_NEW_TOKENS, Group, Sample

MAX_MODEL_TOKENS = 256


class Engine(Protocol):
    """What the loop asks of an engine actor."""

    def ready(self) -> str:
        """Return once the model is loaded."""
        ...

    def sample(self, prompts: Sequence[tuple[int, ...]], *, num_samples: int, seed: int) -> list[Group]:
        """Answer every prompt *num_samples* times at temperature 1."""
        ...


class VllmEngine:
    """A vLLM engine in a Ray actor."""

    def __init__(self, number: int, model_dir: Path, *, seed: int, gpu_memory_utilization: float) -> None:
        from vllm import LLM

        self.number = number
        self.llm = LLM(
            str(model_dir),
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=MAX_MODEL_TOKENS,
            gpu_memory_utilization=gpu_memory_utilization,
            # Small blocks, so that the short prompts of this demo are cached at
            # all: keys and values of old weights must not outlive an update.
            enable_prefix_caching=True,
            block_size=32,
            worker_extension_cls="weightsync.ray_actors.vllm_worker.WeightSyncWorkerExtension",
            seed=seed,
        )

    def ready(self) -> str:
        """Return once the model is loaded (Ray runs an actor's calls in order)."""
        return type(self.llm).__name__

    def sample(self, prompts: Sequence[tuple[int, ...]], *, num_samples: int, seed: int) -> list[Group]:
        """Answer every prompt *num_samples* times at temperature 1."""
        from vllm import SamplingParams

        # At temperature 1 without top-k or top-p, vLLM's raw log-probs (its
        # default) are those of the distribution that was sampled from.
        # The n answers to one prompt are drawn with seed, seed + 1, and so on.
        params = [
            SamplingParams(
                n=num_samples, temperature=1.0, max_tokens=MAX_NEW_TOKENS, logprobs=0, seed=seed + i * num_samples
            )
            for i in range(len(prompts))
        ]
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        return [
            Group(prompt_ids=prompt, samples=tuple(self._sample(completion) for completion in output.outputs))
            for prompt, output in zip(prompts, outputs, strict=True)
        ]

    def _sample(self, completion: Any) -> Sample:
        token_ids = tuple(completion.token_ids)
        return Sample(
            engine=self.number,
            token_ids=token_ids,
            logprobs=tuple(at[token].logprob for token, at in zip(token_ids, completion.logprobs, strict=True)),
            ended=completion.finish_reason == "stop",
        )


class TorchEngine:
    """The same engine without vLLM: a transformers model and a sampling loop."""

    def __init__(self, number: int, model_dir: Path, *, num_threads: int, device: str) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(num_threads)
        self.number = number
        self.device = torch.device(device)
        self.model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).to(self.device).eval()

    def ready(self) -> str:
        """Return once the model is loaded (Ray runs an actor's calls in order)."""
        return type(self.model).__name__

    @torch.inference_mode()
    def sample(self, prompts: Sequence[tuple[int, ...]], *, num_samples: int, seed: int) -> list[Group]:
        """Answer every prompt *num_samples* times at temperature 1."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return [Group(prompt_ids=prompt, samples=self._answers(prompt, num_samples, generator)) for prompt in prompts]

    def _answers(self, prompt: tuple[int, ...], num_samples: int, generator: torch.Generator) -> tuple[Sample, ...]:
        end = self.model.generation_config.eos_token_id
        ends = torch.tensor([end] if isinstance(end, int) else end, device=self.device)
        inputs = torch.tensor([prompt] * num_samples, device=self.device)
        ended = torch.zeros(num_samples, dtype=torch.bool, device=self.device)
        lengths = torch.zeros(num_samples, dtype=torch.long, device=self.device)
        tokens, logprobs, cache = [], [], None
        for _ in range(MAX_NEW_TOKENS):
            output = self.model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            scores = torch.log_softmax(output.logits[:, -1].float(), dim=-1)
            inputs = torch.multinomial(scores.exp(), 1, generator=generator)
            tokens.append(inputs[:, 0])
            logprobs.append(scores.gather(-1, inputs)[:, 0])
            lengths += ~ended
            ended |= torch.isin(inputs[:, 0], ends)
            if bool(ended.all()):
                break
        token_rows, logprob_rows = torch.stack(tokens, dim=1).tolist(), torch.stack(logprobs, dim=1).tolist()
        return tuple(
            Sample(
                engine=self.number,
                token_ids=tuple(token_rows[row][:length]),
                logprobs=tuple(logprob_rows[row][:length]),
                ended=bool(ended[row]),
            )
            for row, length in enumerate(lengths.tolist())
        )
