"""Every request to an engine carries its version in the cache's salt, whatever the form of its prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightsync.errors import EngineStateError
from weightsync.ray_actors.cache_salt import salted

EMBEDS = torch.ones(2, 4)
PROMPTS: dict[str, tuple[Any, Any]] = {
    "text": ("hi", {"prompt": "hi", "cache_salt": "s"}),
    "token ids": ([1, 2], {"prompt_token_ids": [1, 2], "cache_salt": "s"}),
    "text dict": ({"prompt": "hi"}, {"prompt": "hi", "cache_salt": "s"}),
    "token dict": ({"prompt_token_ids": [1]}, {"prompt_token_ids": [1], "cache_salt": "s"}),
    "embeds": ({"prompt_embeds": EMBEDS}, {"prompt_embeds": EMBEDS, "cache_salt": "s"}),
    "rendered": (
        {"type": "token", "prompt_token_ids": [1], "cache_salt": "mine"},
        {"type": "token", "prompt_token_ids": [1], "cache_salt": "mine|s"},
    ),
    "rendered encoder-decoder": (
        {"type": "enc_dec", "encoder_prompt": {"prompt_token_ids": []}, "decoder_prompt": {"prompt_token_ids": [1]}},
        {
            "type": "enc_dec",
            "encoder_prompt": {"prompt_token_ids": []},
            "decoder_prompt": {"prompt_token_ids": [1], "cache_salt": "s"},
        },
    ),
    "encoder-decoder": (
        {"encoder_prompt": "hi", "decoder_prompt": None},
        {"encoder_prompt": {"prompt": "hi", "cache_salt": "s"}, "decoder_prompt": None},
    ),
    "encoder-decoder, salted": (
        {"encoder_prompt": "hi", "decoder_prompt": {"prompt": "ho", "cache_salt": "mine"}},
        {"encoder_prompt": "hi", "decoder_prompt": {"prompt": "ho", "cache_salt": "mine|s"}},
    ),
    "engine core request": (SimpleNamespace(cache_salt="mine"), SimpleNamespace(cache_salt="mine|s")),
}


@pytest.mark.parametrize("form", PROMPTS)
def test_every_form_of_prompt_is_salted_and_the_callers_is_left_alone(form: str) -> None:
    prompt, expected = PROMPTS[form]
    before = repr(prompt)
    assert salted(prompt, "s") == expected
    assert repr(prompt) == before


def test_a_stream_of_prompts_is_salted_chunk_by_chunk() -> None:
    async def chunks() -> AsyncGenerator[Any, None]:
        yield SimpleNamespace(prompt=[1])
        yield SimpleNamespace(prompt=[2])

    async def collect() -> list[Any]:
        stream = salted(chunks(), "s")
        assert isinstance(stream, AsyncGenerator)
        return [chunk.prompt["cache_salt"] async for chunk in stream]

    assert asyncio.run(collect()) == ["s", "s"]


@pytest.mark.parametrize("prompt", [b"hi", {"data": 1}, None, 7])
def test_a_prompt_of_unknown_form_is_refused_rather_than_left_unsalted(prompt: Any) -> None:
    with pytest.raises(EngineStateError, match="version_salt"):
        salted(prompt, "s")
