"""What a process with its weights on a GPU tells about itself."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest
import torch

from weightsync.doctor.facts import ProcessFacts
from weightsync.doctor.look import look

pytestmark = pytest.mark.gpu

SCRIPT = """
import sys, msgspec, torch
from weightsync.doctor.look import look
weights = torch.ones(64 << 20, device="cuda")
sys.stdout.buffer.write(msgspec.json.encode(look(weights.device)))
"""


def looked(**env: str) -> ProcessFacts:
    """In a process of its own, since torch's allocator is set up once."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=os.environ | env, capture_output=True, check=True)
    return msgspec.json.decode(done.stdout, type=ProcessFacts)


def test_a_gpu_is_seen_with_its_memory_and_a_probe_leaves_it_as_it_was() -> None:
    weights = torch.ones(1 << 20, device="cuda")
    facts = look(weights.device, probe_bytes=32 << 20)
    assert facts.gpu is not None
    assert facts.rates is not None
    assert facts.gpu.name == torch.cuda.get_device_name()
    assert 0 < facts.gpu.free_bytes < facts.gpu.nbytes
    assert facts.rates.copy > 1e10
    assert facts.libraries["cuda"] == torch.version.cuda
    assert torch.equal(weights, torch.ones_like(weights))


@pytest.mark.parametrize("expandable", [True, False])
def test_expandable_segments_are_seen_where_the_weights_lie(expandable: bool) -> None:
    facts = looked(PYTORCH_CUDA_ALLOC_CONF=f"expandable_segments:{expandable}")
    assert facts.gpu is not None
    assert facts.gpu.expandable is expandable
