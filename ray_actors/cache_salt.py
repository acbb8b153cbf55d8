"""Salt the prefix cache with the version, so that blocks of different weights never match.

vLLM hashes a request's `cache_salt` into its first block, and with it into all that follow. What carries the salt
differs with the form of a prompt; this knows the forms that `add_request` takes (0.32: rendered dicts, raw prompts,
EngineCoreRequest, streams of prompts).
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator
from typing import Any

from weightsync.errors import EngineStateError


def salted(prompt: Any, salt: str) -> Any:
    """*prompt* with *salt* added to its own, if it has one; *prompt* itself is left as it is.

    Raises:
        EngineStateError: a form that is not known. Unsalted, it could match blocks of other weights.
    """
    match prompt:
        case str():
            return {"prompt": prompt, "cache_salt": salt}
        case list():
            return {"prompt_token_ids": prompt, "cache_salt": salt}
        case {"type": "enc_dec", "decoder_prompt": decoder}:  # rendered: the decoder's salt counts
            return {**prompt, "decoder_prompt": salted(decoder, salt)}
        case {"encoder_prompt": encoder, "decoder_prompt": decoder}:  # raw: the encoder's, where it has one
            part = "decoder_prompt" if _salt_of(decoder) and not _salt_of(encoder) else "encoder_prompt"
            return {**prompt, part: salted(prompt[part], salt)}
        case {"prompt": _} | {"prompt_token_ids": _} | {"prompt_embeds": _}:
            return {**prompt, "cache_salt": _join(_salt_of(prompt), salt)}
        case AsyncGenerator():
            return _salted_stream(prompt, salt)
        case object(cache_salt=own):
            request = copy.copy(prompt)
            request.cache_salt = _join(own, salt)
            return request
    raise EngineStateError(
        f"version_salt: cannot salt a prompt that is a {type(prompt).__name__}; pass text, token ids or a prompt dict, or set "
        "version_salt: false"
    )


async def _salted_stream(chunks: AsyncGenerator[Any, None], salt: str) -> AsyncGenerator[Any, None]:
    async for chunk in chunks:
        chunk = copy.copy(chunk)
        chunk.prompt = salted(chunk.prompt, salt)
        yield chunk


def _salt_of(prompt: Any) -> str | None:
    return prompt.get("cache_salt") if isinstance(prompt, dict) else None


def _join(own: str | None, salt: str) -> str:
    return f"{own}|{salt}" if own else salt
