"""Ranks of one NCCL communicator must agree on NCCL and its environment; it is compared before a link is opened."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from weightsync import messages as m
from weightsync.config import SyncConfig
from weightsync.errors import AgreementError
from weightsync.identity import (
    NCCL_VARIABLES,
    Identity,
    check_nccl,
    format_nccl_version,
    identify,
    nccl_environment,
    on_device,
)
from weightsync.links import Link, plan_links
from weightsync.manifest import Manifest
from weightsync.plan import choose_transports
from weightsync.report import LoadSummary


def rank(gpu: str, **fields: Any) -> Identity:
    settings = {"gpu": gpu, "cupy": "14.0.0", "nccl": "2.28.9"} | fields
    return msgspec.structs.replace(identify(), **settings)


def opened(identity: Identity, engine: int, number: int) -> m.ReceiverOpened:
    summary = LoadSummary(rank=f"engine {engine} rank {number}", num_groups=1)
    return m.ReceiverOpened(identity=identity, rank=number, load=summary, order=("w",), version=0)


def plan(trainer: Identity, *engines: Identity, transport: str = "broadcast") -> list[Link]:
    held = m.Description(identity=trainer, manifest=Manifest.from_tensors({"w": torch.zeros(1)}), version=0)
    ranks = {f"engine {i}": (opened(identity, i, 0),) for i, identity in enumerate(engines)}
    receivers = {(f"engine {i}", 0): identity for i, identity in enumerate(engines)}
    transports = choose_transports(SyncConfig(transport=transport), [trainer], receivers)
    return plan_links([held], [("w",)], ranks, transports, 1)


@pytest.mark.parametrize("transport", ["broadcast", "auto"])
def test_ranks_that_agree_get_a_link_that_knows_their_gpus(transport: str) -> None:
    (link,) = plan(rank("a"), rank("b"), rank("c"), transport=transport)
    assert (link.plan.transport, link.plan.gpus) == ("broadcast", ("a", "b", "c"))


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"nccl": "2.30.7"}, "nccl", r"engine 1 rank 0 \(.*\) has NCCL 2\.30\.7, trainer 0 has NCCL 2\.28\.9"),
        ({"nccl": ""}, "nccl", r"engine 1 rank 0 \(.*\) has no NCCL, trainer 0 has NCCL 2\.28\.9"),
        ({"cupy": ""}, "cupy", r"engine 1 rank 0 \(.*\) has no cupy, trainer 0 has cupy"),
        (
            {"nccl_env": {"NCCL_CUMEM_ENABLE": "0"}},
            "NCCL_CUMEM_ENABLE",
            r"engine 1 rank 0 \(.*\) has NCCL_CUMEM_ENABLE 0, trainer 0 has it not set",
        ),
        (
            {"nccl_env": {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}},
            "NCCL_MULTI_RANK_GPU_ENABLE",
            r"engine 1 rank 0 \(.*\) has NCCL_MULTI_RANK_GPU_ENABLE 1, trainer 0 has it not set",
        ),
    ],
    ids=str,
)
def test_a_rank_that_differs_is_named_with_both_values(fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(AgreementError, match=message) as caught:
        plan(rank("a"), rank("b"), rank("c", **fields))
    assert (caught.value.rank, caught.value.field) == ("engine 1 rank 0", field)


def test_every_variable_is_compared() -> None:
    for name in NCCL_VARIABLES:
        set_here = {"nccl_env": {name: "5"}}
        with pytest.raises(AgreementError, match=f"{name} 6, trainer 0 has 5; .*set it before"):
            check_nccl({"trainer 0": rank("a", **set_here), "engine 0 rank 0": rank("b", nccl_env={name: "6"})})
        check_nccl({"trainer 0": rank("a", **set_here), "engine 0 rank 0": rank("b", **set_here)})


def test_links_that_do_not_use_nccl_ask_for_no_agreement() -> None:
    other = {"nccl": "2.30.7", "nccl_env": {"NCCL_ALGO": "Tree"}}
    plan(rank("a"), rank("", **other))
    plan(rank(""), rank("b", **other))
    plan(rank("a"), rank("b", **other), transport="shared_memory")


def test_only_what_differs_from_the_default_counts_as_set() -> None:
    environment = {
        "NCCL_P2P_DISABLE": "0",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_MULTI_RANK_GPU_ENABLE": "0",
        "NCCL_ALGO": " Ring ",
        "NCCL_DEBUG": "INFO",
        "PATH": "/bin",
    }
    assert nccl_environment(environment) == {
        "NCCL_SHM_DISABLE": "1",
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_ALGO": "Ring",
    }


def test_versions_read_as_nccl_writes_them() -> None:
    assert [format_nccl_version(number) for number in (2804, 21805, 22809, 23007, 23203)] == [
        "2.8.4",
        "2.18.5",
        "2.28.9",
        "2.30.7",
        "2.32.3",
    ]


def test_ranks_on_the_cpu_do_not_look_for_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise AssertionError("NCCL was looked for")

    monkeypatch.setattr("weightsync.identity.nccl_version", fail)
    found = on_device(rank("a", nccl_env={"NCCL_ALGO": "Ring"}), torch.device("cpu"))
    assert (found.gpu, found.nccl, found.nccl_env, found.cupy) == ("", "", {}, "")
