"""Every transport is put to the shipped suite, in each way in which it can move a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch

from weightsync.registry import carrier_of, transport_names
from weightsync.testing import TransportSuite
from weightsync.testing.link import BUCKET_BYTES, Tensors
from weightsync.transports.shared_memory import share_parameters


class TestSharedMemoryStage(TransportSuite):
    transport = "shared_memory"


class TestSharedMemoryBuckets(TestSharedMemoryStage):
    settings: ClassVar = {"staging_limit_bytes": 2 * BUCKET_BYTES}


class TestSharedMemoryParameters(TestSharedMemoryStage):
    """The trainer called `share_parameters`."""

    num_tiny_tensors = 500  # each is a buffer of the module here

    def hold(self, tensors: Tensors) -> Callable[[Tensors], Tensors]:
        module = torch.nn.Module()
        for name, tensor in tensors.items():
            module.register_buffer(name, tensor.clone())
        share_parameters(module)
        own = dict(module.named_buffers())

        def update(values: Tensors) -> Tensors:
            for name, value in values.items():
                own[name].copy_(value)
            return own

        return update


class TestBroadcast(TransportSuite):
    transport = "broadcast"


TESTED_ELSEWHERE = frozenset({"cuda_ipc", "sharded_rdt"})
"""On a GPU, in tests/gpu/test_cuda_ipc.py; beside Ray, in tests/transports/test_sharded_rdt.py."""


def test_every_transport_is_held_to_the_contract() -> None:
    suites = (TestSharedMemoryStage, TestSharedMemoryBuckets, TestSharedMemoryParameters, TestBroadcast)
    assert {carrier_of(name) for name in transport_names()} == {suite.transport for suite in suites} | TESTED_ELSEWHERE
