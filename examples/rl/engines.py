"""A rollout engine without vLLM: an ordinary user class, with nothing of weightsync in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from examples.rl.task import MAX_NEW_TOKENS, Group, Sample


class TorchEngine:
    """A transformers model and a sampling loop, which returns with each token the log-probability that it had."""

    def __init__(self, model_dir: Path, *, device: str) -> None:
        from transformers import AutoModelForCausalLM

        self.device = torch.device(device)
        self.model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).to(self.device).eval()

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
                engine=0,
                token_ids=tuple(token_rows[row][:length]),
                logprobs=tuple(logprob_rows[row][:length]),
                ended=bool(ended[row]),
            )
            for row, length in enumerate(lengths.tolist())
        )
