"""vLLM's own update path beside weightsync, fault by fault (benchmarks/peers.py): what each makes of the engine.

What is pinned for vLLM is its release 0.32 on CPU. The cases run in a process of their own, once for the whole file.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peers import EXPERT_SHARD, LAYOUTS, SHARD, WHOLE_MODULE
from tests.vllm.processor import packs_linear

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.is_available(), reason="each case runs in a fork, which CUDA does not allow"),
    pytest.mark.parametrize("layout", LAYOUTS),
]

Found = dict[str, dict[str, dict[str, dict[str, Any]]]]
"""Layout -> case -> "vllm" or "weightsync" -> outcome."""


def is_plain(layout: str) -> bool:
    """Whether linear weights stay as they are loaded."""
    return layout.startswith("plain") or not packs_linear()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    out = tmp_path_factory.mktemp("peers") / "peers.json"
    command = [sys.executable, "-m", "benchmarks.peers", "--out", str(out)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], check=False, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-5000:]
    outcomes: Found = json.loads(out.read_text())["outcomes"]
    return outcomes


def test_both_are_exact_when_nothing_goes_wrong(layout: str, found: Found) -> None:
    for outcome in found[layout]["nothing goes wrong"].values():
        assert outcome["words"] == "exact"


@pytest.mark.parametrize("case", ["a shard of qkv never comes", "a shard of an expert never comes"])
def test_vllm_accepts_an_update_that_lacks_a_shard_and_serves_memory_that_nobody_wrote(
    case: str, layout: str, found: Found
) -> None:
    outcome = found[layout][case]["vllm"]
    assert outcome["words"] == "WRONG, silent"
    if "expert" in case or is_plain(layout):  # packed weights of Linear layers cannot be looked into
        assert outcome["unwritten"] > 0


def test_vllm_accepts_an_update_that_lacks_a_module_and_serves_a_mixture(layout: str, found: Found) -> None:
    outcome = found[layout]["a whole module never comes"]["vllm"]
    assert outcome["words"] == "WRONG, silent"
    assert outcome["unwritten"] == 0


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("a shard of qkv never comes", SHARD),
        ("a shard of an expert never comes", EXPERT_SHARD),
        ("a whole module never comes", WHOLE_MODULE),
    ],
)
def test_weightsync_names_what_never_came_and_the_old_version_is_served(
    case: str, name: str, layout: str, found: Found
) -> None:
    outcome = found[layout][case]["weightsync"]
    assert outcome["words"] == "IncompleteUpdateError, then old version served"
    assert f"missing: {name}" in outcome["error"]


def test_vllm_counts_a_tensor_that_comes_twice_as_two(layout: str, found: Found) -> None:
    assert found[layout]["a shard of an expert comes twice"]["vllm"]["words"] == "WRONG, silent"
    outcome = found[layout]["a shard of qkv comes twice"]["vllm"]
    if is_plain(layout):
        assert outcome["words"] == "exact", "the late shard goes straight into the live weights, which have its layout"
    else:
        assert outcome["words"] == "AttributeError, then crash (NotImplementedError)"


@pytest.mark.parametrize(
    ("case", "name"), [("a shard of qkv comes twice", SHARD), ("a shard of an expert comes twice", EXPERT_SHARD)]
)
def test_weightsync_names_what_came_twice_and_the_old_version_is_served(
    case: str, name: str, layout: str, found: Found
) -> None:
    outcome = found[layout][case]["weightsync"]
    assert outcome["words"] == "IncompleteUpdateError, then old version served"
    assert f"{name} came twice" in outcome["error"]


def test_vllm_cannot_serve_after_a_transfer_that_broke(layout: str, found: Found) -> None:
    outcome = found[layout]["the transfer breaks half way"]["vllm"]
    assert outcome["words"] == "ConnectionError, then crash (NotImplementedError)"


def test_weightsync_serves_the_old_version_after_a_transfer_that_broke(layout: str, found: Found) -> None:
    outcome = found[layout]["the transfer breaks half way"]["weightsync"]
    assert outcome["served"] == "old"
    assert "trainer 0: ConnectionError: planted" in outcome["error"]


def test_a_whole_retry_with_vllm_goes_on_counting_where_the_broken_update_ended(layout: str, found: Found) -> None:
    assert found[layout]["it breaks within the experts, then a whole retry"]["vllm"]["words"] == "WRONG, silent"
    outcome = found[layout]["it breaks within qkv, then a whole retry"]["vllm"]
    if is_plain(layout):
        assert outcome["words"] == "exact", "by luck, as when a shard comes twice"
    else:
        assert outcome["words"] == "AttributeError, then crash (NotImplementedError)"


@pytest.mark.parametrize(
    "case", ["it breaks within qkv, then a whole retry", "it breaks within the experts, then a whole retry"]
)
def test_a_whole_retry_with_weightsync_is_exact(case: str, layout: str, found: Found) -> None:
    assert found[layout][case]["weightsync"]["words"] == "exact"


def test_vllm_refuses_a_trainer_that_starts_anew_and_cannot_serve(layout: str, found: Found) -> None:
    outcome = found[layout]["the trainer dies half way and starts anew"]["vllm"]
    assert outcome["words"] == "RuntimeError, then crash (NotImplementedError)"
    assert "already active" in outcome["error"]


def test_weightsync_takes_a_trainer_that_starts_anew(layout: str, found: Found) -> None:
    assert found[layout]["the trainer dies half way and starts anew"]["weightsync"]["words"] == "exact"


def test_a_request_in_the_middle_of_an_update_ends_vllm_and_is_served_by_weightsync(layout: str, found: Found) -> None:
    outcomes = found[layout]["a request comes half way"]
    assert outcomes["vllm"]["words"] == "crash (NotImplementedError)"
    assert outcomes["weightsync"]["words"] == "old version served"


def test_vllm_leaves_the_flush_of_its_prefix_cache_to_the_caller_and_weightsync_does_it(
    layout: str, found: Found
) -> None:
    outcomes = found[layout]["a prompt is in the prefix cache, the caller does not flush"]
    assert outcomes["vllm"]["words"] == "WRONG, silent"
    assert outcomes["weightsync"]["words"] == "exact"


def test_vllm_on_cpu_does_not_pack_experts_again_and_weightsync_sees_to_it(layout: str, found: Found) -> None:
    outcomes = found[layout]["nothing goes wrong, CPU experts as shipped"]
    assert outcomes["vllm"]["words"] == "WRONG, silent"
    assert outcomes["weightsync"]["words"] == "exact"
