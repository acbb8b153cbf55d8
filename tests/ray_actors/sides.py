"""A session over engine sides in this process, and the part of an AsyncLLM that such a side touches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from weightsync import messages as m
from weightsync.config import SyncConfig
from weightsync.engines.torch_module import TorchModuleAdapter
from weightsync.ray_actors.engine import ModuleSide
from weightsync.receiver import ReceiverRank
from weightsync.sender import SenderRank
from weightsync.session import Session
from weightsync.testing import LocalFleet, in_process_party

Handler = Callable[[bytes], list[bytes]]
X = torch.ones(2, 4)


def make_module(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def request_of(payload: bytes) -> m.Request:
    return m.decode_call(payload).request


def connect(trainer: torch.nn.Module, *engines: Handler, **settings: Any) -> Session:
    fleet = LocalFleet([in_process_party([SenderRank(0, lambda: trainer)])], engines)
    session = Session(fleet, SyncConfig(**({"timeout_s": 20} | settings)))
    session.open()
    return session


def party(side: ModuleSide, watch: Callable[[m.Request, str], None] = lambda request, when: None) -> Handler:
    """The side as a party; *watch* is called "before" and "after" each request."""

    def handle(payload: bytes) -> list[bytes]:
        request = request_of(payload)
        watch(request, "before")
        replies = side.call(payload)
        watch(request, "after")
        return replies or []

    return handle


class FakeAsyncLlm:
    """The part of vLLM's AsyncLLM that a side touches; the model is a plain module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.queue: list[Any] = []
        self.paused = False
        self.log: list[str] = []
        self.rank = ReceiverRank(TorchModuleAdapter(module))
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_size=1),
            model_config=SimpleNamespace(is_multimodal_model=False, enable_sleep_mode=False),
            kv_transfer_config=None,
        )
        self.busy_s = 0.0
        self.asleep: bool | None = None
        """The weights are; None: nobody can tell."""

    async def add_request(self, request_id: str, prompt: Any, params: Any) -> str:
        self.queue.append(prompt)
        return request_id

    async def collective_rpc(self, method: str, args: tuple[bytes, ...] = ()) -> list[Any]:
        if method == "weightsync_asleep":
            return [self.asleep]
        self.log.append(type(request_of(args[0])).__name__)
        return [await asyncio.to_thread(m.answer, self.rank.handle, args[0])]

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.paused = True
        await asyncio.sleep(self.busy_s)  # until requests in flight have ended

    async def resume_generation(self) -> None:
        self.log.append("resume")
        self.paused = False

    async def is_paused(self) -> bool:
        return self.paused

    async def is_sleeping(self) -> bool:
        return self.paused  # as vLLM's, which does not tell one from the other

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        self.log.append("flush")
        return True

    async def update_weight_version(self, version: str) -> None:
        self.log.append(f"version {version}")
