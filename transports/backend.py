"""By what the payloads of a broadcast link travel: a function of the link alone, which both its ends evaluate."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import cache

from weightsync.identity import cupy_version, nccl_version
from weightsync.interfaces import LinkContext

_OLDEST, _SHARES_GPUS = (2, 18), (2, 30)

_log = logging.getLogger("weightsync")


def why_not_nccl(gpus: tuple[str, ...], *, nccl: str, cupy: bool, environment: Mapping[str, str]) -> str:
    """Why a link between these GPUs cannot use NCCL; "" where it does.

    Equal at both ends of a link: its planning has compared library and environment (`weightsync.identity.check_nccl`).
    """
    if not gpus or not all(gpus):
        return "not all of its weights lie on a GPU"
    if not cupy:
        return "there is no cupy"
    version = tuple(int(part) for part in nccl.split(".")[:2]) if nccl else ()
    if version < _OLDEST:
        return f"NCCL is {nccl}, 2.18 is needed" if nccl else "there is no NCCL"
    if environment.get("NCCL_COMM_BLOCKING", "0") != "0":
        return "NCCL_COMM_BLOCKING is set, so that its calls would wait without a bound"
    if len(set(gpus)) < len(gpus):
        twice = next(gpu for gpu in gpus if gpus.count(gpu) > 1)
        if version < _SHARES_GPUS:
            return f"several of its ranks are on GPU {twice}, and NCCL {nccl} is before 2.30, which allows that"
        if environment.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
            return f"several of its ranks are on GPU {twice}, and NCCL_MULTI_RANK_GPU_ENABLE is not 1"
    return ""


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
