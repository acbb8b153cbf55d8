"""By what the payloads of a broadcast link travel: a function of the link alone, which both its ends evaluate."""

from __future__ import annotations

import logging
import os
from functools import cache

from weightsync.identity import cupy_version, nccl_version
from weightsync.interfaces import LinkContext
from weightsync.plan import why_not_nccl

_log = logging.getLogger("weightsync")


def backend_of(context: LinkContext) -> str:
    """ "nccl" or "gloo": by what the link's payloads travel. Why it is gloo between GPUs is logged, once."""
    if not context.gpus or not all(context.gpus) or not context.device.startswith("cuda"):
        return "gloo"
    why = why_not_nccl(context.gpus, nccl=nccl_version(), cupy=bool(cupy_version()), environment=os.environ)
    if why:
        _say_once(why)
    return "gloo" if why else "nccl"


@cache
def _say_once(why: str) -> None:
    _log.warning("transport broadcast: bytes travel through CPU memory (gloo), not over NCCL: %s", why)
