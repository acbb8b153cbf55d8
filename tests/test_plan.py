"""Which transport serves a pair: by where the weights of both lie, or as configured."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from weightsync.config import SyncConfig, TransportRule
from weightsync.errors import ConfigError
from weightsync.identity import Identity
from weightsync.plan import choose_transport, choose_transports
from weightsync.registry import register_transport, unregister_transport
from weightsync.transports.broadcast import BroadcastReceiver, BroadcastSender

AUTO = SyncConfig()


def rank(pid: int, gpu: str = "", **fields: Any) -> Identity:
    """One process; with cupy where its weights lie on a GPU."""
    settings = {"host": "here", "machine": "m", "node": "n", "cupy": "14.0.0" if gpu else ""} | fields
    return Identity(pid=pid, gpu=gpu, weightsync="1", torch="2.11", python="3.12", **settings)


THERE: dict[str, Any] = {"host": "there", "machine": "other", "node": "o"}


@pytest.mark.parametrize(
    ("trainer", "engine", "expected"),
    [
        (rank(1, "A"), rank(2, "A"), "cuda_ipc"),
        (rank(1, "A"), rank(1, "A"), "cuda_ipc"),
        (rank(1, "A", cupy=""), rank(2, "A"), "shared_memory"),
        (rank(1, "A"), rank(2, "A", cupy=""), "shared_memory"),
        (rank(1, "A"), rank(2, "B"), "broadcast"),
        (rank(1, "A", cupy=""), rank(2, "B", cupy=""), "broadcast"),
        (rank(1, "A"), rank(2, "B", reaches=("A",)), "cuda_ipc"),
        (rank(1, "A", reaches=("B",)), rank(2, "B"), "broadcast"),
        (rank(1, "A", cupy=""), rank(2, "B", reaches=("A",)), "broadcast"),
        (rank(1, "A"), rank(2, "B", reaches=("A",), **THERE), "broadcast"),
        (rank(1), rank(2, "A"), "shared_memory"),
        (rank(1, "A"), rank(2), "shared_memory"),
        (rank(1), rank(2), "shared_memory"),
        (rank(1, "A"), rank(2, "A", node="another"), "cuda_ipc"),
        (rank(1, "A"), rank(2, "B", **THERE), "broadcast"),
        (rank(1, "A"), rank(2, "A", **THERE), "broadcast"),
        (rank(1), rank(2, **THERE), "broadcast"),
        (rank(1, "A"), rank(2, **THERE), "broadcast"),
    ],
    ids=[
        "one GPU",
        "one process",
        "one GPU, no cupy at the trainer's",
        "one GPU, no cupy at the engine's",
        "two GPUs of a host",
        "two GPUs of a host, no cupy",
        "two GPUs of a host, the engine's reads the trainer's",
        "two GPUs of a host, only the trainer's reads the engine's",
        "two GPUs of a host that read each other, no cupy at the trainer's",
        "GPUs of two hosts, the name of one read",
        "only the engine on a GPU",
        "only the trainer on a GPU",
        "both on the CPU",
        "one GPU, two Ray nodes of a host",
        "GPUs of two hosts",
        "GPUs of two hosts with one name",
        "CPUs of two hosts",
        "a GPU and a CPU of two hosts",
    ],
)
def test_auto_takes_the_fastest_that_can_serve_the_pair(trainer: Identity, engine: Identity, expected: str) -> None:
    assert choose_transport(AUTO, trainer, engine) == expected
    rules = SyncConfig(transport=(TransportRule(use="auto"),))
    assert choose_transport(rules, trainer, engine) == expected


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        ([rank(2, "B")], ["cuda_ipc"]),
        ([rank(2, "B"), rank(3, "B")], ["cuda_ipc", "cuda_ipc"]),
        ([rank(2, "B"), rank(3, "C")], ["broadcast", "broadcast"]),
        ([rank(2, "B"), rank(3, "A")], ["cuda_ipc", "cuda_ipc"]),
        ([rank(2, "B"), rank(3, "C"), rank(4, "A")], ["broadcast", "broadcast", "cuda_ipc"]),
        ([rank(2, "B"), rank(3, "C", **THERE)], ["cuda_ipc", "broadcast"]),
        ([rank(2, "B"), rank(3)], ["cuda_ipc", "shared_memory"]),
    ],
    ids=["one", "two on one GPU", "two GPUs", "its own too", "two GPUs and its own", "another host", "a CPU too"],
)
def test_one_other_gpu_reads_and_several_are_sent_to(engines: list[Identity], expected: list[str]) -> None:
    """Several readers would share the links of one GPU; NCCL's ranks pass the bytes on."""
    every = ("A", "B", "C")
    receivers = {i: structs.replace(of, reaches=every) for i, of in enumerate(engines)}
    found = choose_transports(AUTO, [rank(1, "A", reaches=every)], receivers)
    assert [found[0, i] for i in receivers] == expected


@pytest.mark.parametrize("name", ["shared_memory", "broadcast", "cuda_ipc"])
def test_a_transport_that_is_named_is_taken(name: str) -> None:
    config = SyncConfig(transport=name)
    assert choose_transport(config, rank(1, "A"), rank(2, "A")) == name
    assert choose_transport(config, rank(1, "A"), rank(2, "B")) == name, "two GPUs may reach each other"


@pytest.mark.parametrize(
    ("trainer", "engine", "place"),
    [
        (rank(11), rank(22), "not both on a GPU"),
        (rank(11), rank(22, "A"), "not both on a GPU"),
        (rank(11, "A"), rank(22), "not both on a GPU"),
        (rank(11, "A"), rank(22, "A", **THERE), "on two hosts"),
        (rank(11), rank(22, **THERE), "on two hosts"),
    ],
)
@pytest.mark.parametrize(
    "transport",
    ["cuda_ipc", "sharded_cuda_ipc", (TransportRule(use="cuda_ipc"),)],
    ids=["named", "for slices", "by a rule"],
)
def test_cuda_ipc_is_refused_where_it_cannot_serve_and_both_are_named(
    transport: Any, trainer: Identity, engine: Identity, place: str
) -> None:
    with pytest.raises(ConfigError, match=f"cuda_ipc cannot serve .* whose weights are {place}") as caught:
        choose_transport(SyncConfig(transport=transport), trainer, engine)
    assert caught.value.key == "transport"
    assert str(trainer) in str(caught.value)
    assert str(engine) in str(caught.value)


def test_a_rule_may_leave_the_pairs_that_cuda_ipc_cannot_serve_to_another() -> None:
    rules = (TransportRule(use="cuda_ipc", same_host=True), TransportRule(use="broadcast"))
    config = SyncConfig(transport=rules)
    assert choose_transport(config, rank(1, "A"), rank(2, "A")) == "cuda_ipc"
    assert choose_transport(config, rank(1, "A"), rank(2, "A", **THERE)) == "broadcast"


def test_a_receiver_of_slices_takes_them_from_every_sender_over_what_serves_the_pair() -> None:
    senders, receivers = [rank(1, "A"), rank(2, "B", **THERE)], {"here": rank(3, "A"), "there": rank(4, "B", **THERE)}
    slices = (TransportRule(use="sharded_cuda_ipc", same_host=True), TransportRule(use="sharded_rdt"))
    assert choose_transports(SyncConfig(transport=slices), senders, receivers) == {
        (0, "here"): "sharded_cuda_ipc",
        (1, "here"): "sharded_rdt",
        (0, "there"): "sharded_rdt",
        (1, "there"): "sharded_cuda_ipc",
    }
    slices_here = (TransportRule(use="sharded_broadcast", same_host=True), TransportRule(use="broadcast"))
    assert set(choose_transports(SyncConfig(transport=slices_here), senders, receivers).values()) == {
        "sharded_broadcast"
    }
    form = (TransportRule(use="sharded_cuda_ipc", same_host=True), TransportRule(use="auto"))
    assert choose_transports(SyncConfig(transport=form), senders, receivers) == {
        (0, "here"): "sharded_cuda_ipc",
        (1, "here"): "sharded_broadcast",
        (0, "there"): "sharded_broadcast",
        (1, "there"): "sharded_cuda_ipc",
    }


def test_a_transport_without_a_slicing_form_is_replaced_by_another_pairs_where_that_serves() -> None:
    register_transport("mine", type("Mine", (BroadcastSender,), {"name": "mine"}), BroadcastReceiver)
    config = SyncConfig(
        transport=(TransportRule(use="sharded_shared_memory", same_node=True), TransportRule(use="mine"))
    )
    senders = [rank(1), rank(2, node="another")]
    try:
        assert set(choose_transports(config, senders, {0: rank(3)}).values()) == {"sharded_shared_memory"}
        with pytest.raises(ConfigError, match=r"sharded_shared_memory cannot serve .* on two hosts; use a rule with"):
            choose_transports(config, [rank(1), rank(2, **THERE)], {0: rank(3)})
    finally:
        unregister_transport("mine")


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown transport 'pigeon'"):
        choose_transport(SyncConfig(transport="pigeon"), rank(1), rank(2))
