"""Checks as functions of the evidence: faults that only GPUs, containers or several machines show, and what always holds."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.console import Console

from weightsync.chunk import aligned
from weightsync.config import SyncConfig, TransportRule
from weightsync.doctor.diagnosis import TOPICS, diagnose
from weightsync.doctor.engines import split_cure
from weightsync.doctor.estimate import seconds_of
from weightsync.doctor.evidence import ActorFacts, Evidence, Process, Trouble
from weightsync.doctor.facts import GpuFacts, ProcessFacts, Rates
from weightsync.doctor.finding import Check, Finding, exit_code
from weightsync.doctor.memory import needs_of
from weightsync.doctor.rendering import as_json, show
from weightsync.identity import Identity
from weightsync.manifest import Manifest, TensorMeta
from weightsync.report import LoadSummary

GB = 1 << 30
MANIFEST = Manifest((TensorMeta("a.weight", "bfloat16", (1024, 1024)), TensorMeta("b.weight", "bfloat16", (4, 4))))
NAMESPACES = {"ipc": "ipc:[1]", "mnt": "mnt:[1]", "pid": "pid:[1]", "net": "net:[1]"}


def process(gpu: str = "", *, machine: str = "boot/net", **facts: Any) -> Process:
    """A process that is well; on a GPU where one is named."""
    identity = Identity(
        host="h", pid=1, machine=machine, weightsync="0.1.0", torch="2.11.0", python="3.12.1", gpu=gpu,
        cupy="14.0" if gpu else "", nccl="2.30.1" if gpu else "",
    )  # fmt: skip
    own = GpuFacts(name="H200", device="cuda:0", nbytes=140 * GB, free_bytes=60 * GB) if gpu else None
    common: dict[str, Any] = {
        "libraries": {"torch": "2.11.0", "msgspec": "0.20.0", "ray": "2.50.0"},
        "code": "c0de",
        "formats": {"calls": "1", "replies": "2"},
        "namespaces": NAMESPACES,
        "boot_id": machine.partition("/")[0],
        "cpus": 8,
        "host_bytes": 64 * GB,
        "host_free_bytes": 32 * GB,
        "shm_bytes": 32 * GB,
        "shm_free_bytes": 32 * GB,
        "num_gpus": int(bool(gpu)),
        "gpu": own,
        "rates": Rates(copy=1e10, digest=1e10, copy_and_digest=9e9),
    }
    return Process(identity=identity, facts=ProcessFacts(**(common | facts)))


def evidence(*gpus: str, **changes: Any) -> Evidence:
    """A trainer and its engines, all well; their GPUs in that order, "" for the CPU."""
    trainer, *engines = gpus or ("", "")
    ranks = [f"engine {i} rank 0" for i in range(len(engines))]
    well = Evidence(
        processes={"trainer 0": process(trainer)} | {r: process(g) for r, g in zip(ranks, engines, strict=True)},
        manifest=MANIFEST,
        loads={
            rank: LoadSummary(rank=rank, num_groups=2, largest_group="a", largest_group_bytes=2 << 20) for rank in ranks
        },
        owned={"trainer 0": MANIFEST.nbytes},
        links_s=0.01,
        actors={party: ActorFacts(answered_s=0.002) for party in ("trainer 0", "engine 0")},
    )
    return replace(well, **changes)


def with_rank(e: Evidence, rank: str, *, identity: Any = None, **facts: Any) -> Evidence:
    old = e.processes[rank]
    new = Process(identity=replace(old.identity, **(identity or {})), facts=replace(old.facts, **facts))
    return replace(e, processes={**e.processes, rank: new})


def found(e: Evidence) -> list[Finding]:
    return [finding for finding in diagnose(e) if finding.level != "green"]


@pytest.mark.parametrize("gpus", [("", ""), ("", "", ""), ("A", "A"), ("A", "B"), ("A", "A", "B")])
def test_what_is_well_is_green_and_every_topic_has_its_say(gpus: tuple[str, ...]) -> None:
    findings = diagnose(evidence(*gpus))
    assert [finding for finding in findings if finding.level != "green"] == []
    assert {finding.topic for finding in findings} == set(TOPICS) - {"start"}
    assert exit_code(findings) == 0


ON_GPU = evidence("A", "A")
APART = evidence("A", "B")
EXPANDABLE = replace(process("A").facts.gpu or GpuFacts(name="", device="", nbytes=0, free_bytes=0), expandable=True)
FULL = replace(EXPANDABLE, expandable=False, free_bytes=1 << 20)
FAULTS: list[tuple[str, Evidence, str, str, str, str]] = [
    # name, evidence, level, check, what is found, what the cure says
    ("another GPU than the trainer's", replace(APART, colocated=(("trainer 0", "engine 0"),)), "yellow", "pairing", "were to share a GPU, and do not", "CUDA_VISIBLE_DEVICES"),
    ("two ranks of an engine on one GPU", replace(ON_GPU, processes={**ON_GPU.processes, "engine 0 rank 1": process("A")}), "red", "duplicates", "engine 0 rank 0, engine 0 rank 1 are on one GPU, A", "engines.resources.num_gpus: 1"),
    ("two trainers of an NCCL group on one GPU", replace(evidence("A", "A"), processes={**ON_GPU.processes, "trainer 0": process("A", process_group="nccl"), "trainer 1": process("A", process_group="nccl")}, owned={"trainer 0": 9, "trainer 1": 9}), "red", "duplicates", "trainer 0, trainer 1 are on one GPU", "trainer.resources.num_gpus: 1"),
    ("two trainers of a gloo group on one GPU", replace(ON_GPU, processes={**ON_GPU.processes, "trainer 1": process("A", process_group="gloo")}), "yellow", "duplicates", "would be refused", "trainer.resources.num_gpus: 1"),
    ("expandable segments", with_rank(ON_GPU, "trainer 0", gpu=EXPANDABLE), "yellow", "expandable segments", "trainer 0 allocates its weights in expandable segments", "PYTORCH_CUDA_ALLOC_CONF"),
    ("weights left on the CPU", with_rank(evidence(), "engine 0 rank 0", num_gpus=1), "yellow", "unused", "engine 0 rank 0 can use a GPU", "move the model to the GPU"),
    ("another weightsync", with_rank(evidence("", "", ""), "engine 1 rank 0", identity={"weightsync": "0.0.9"}), "red", "libraries", "weightsync is 0.0.9 in engine 1 rank 0", "one version of weightsync"),
    ("another torch", with_rank(evidence("", "", ""), "engine 1 rank 0", identity={"torch": "2.9.1"}), "red", "libraries", "torch is 2.9.1", "one version of torch"),
    ("another patch of torch", with_rank(evidence("", "", ""), "engine 1 rank 0", identity={"torch": "2.11.1"}), "yellow", "libraries", "torch is 2.11.1", "one version of torch"),
    ("another msgspec", with_rank(evidence("", "", ""), "engine 0 rank 0", libraries={"msgspec": "0.19.0"}), "yellow", "libraries", "msgspec is 0.19.0", "one version of msgspec"),
    ("another format", with_rank(evidence("", "", ""), "engine 1 rank 0", formats={"calls": "9", "replies": "2"}), "red", "formats", "calls: engine 1 rank 0 would not understand", "one version of weightsync"),
    ("another source", with_rank(evidence("", "", ""), "engine 1 rank 0", code="beef"), "yellow", "formats", "engine 1 rank 0 is not that in", "working_dir"),
    ("no rule for the pair", evidence(config=SyncConfig(transport=(TransportRule(use="broadcast", same_host=False),))), "red", "chosen", "no rule fits a pair on one host", "add a rule"),
    ("cuda_ipc without a GPU", evidence(config=SyncConfig(transport="cuda_ipc")), "red", "chosen", "not both on a GPU", "sync.transport: auto"),
    ("one GPU without cupy", with_rank(ON_GPU, "engine 0 rank 0", identity={"cupy": ""}), "yellow", "cuda_ipc", "cupy is missing", "weightsync[cuda13]"),
    ("an old NCCL", with_rank(with_rank(APART, "trainer 0", identity={"nccl": "2.17.1"}), "engine 0 rank 0", identity={"nccl": "2.17.1"}), "yellow", "NCCL", "NCCL is 2.17.1, 2.18 is needed", "2.18 or later"),
    ("two NCCLs", with_rank(APART, "engine 0 rank 0", identity={"nccl": "2.27.3"}), "red", "NCCL", "has NCCL 2.27.3", "the same NCCL"),
    ("NCCL set up in two ways", with_rank(APART, "engine 0 rank 0", identity={"nccl_env": {"NCCL_CUMEM_ENABLE": "0"}}), "red", "NCCL", "NCCL_CUMEM_ENABLE 0", "set NCCL_CUMEM_ENABLE alike"),
    ("NCCL of one GPU twice", evidence("A", "A", config=SyncConfig(transport="broadcast")), "yellow", "NCCL", "NCCL_MULTI_RANK_GPU_ENABLE is not 1", "sync.transport: auto"),
    ("two network namespaces", with_rank(evidence(), "engine 0 rank 0", identity={"machine": "boot/other"}, namespaces={**NAMESPACES, "net": "net:[2]"}), "yellow", "namespaces", "two network namespaces", "--network=host"),
    ("two IPC namespaces", with_rank(ON_GPU, "engine 0 rank 0", namespaces={**NAMESPACES, "ipc": "ipc:[2]"}), "red", "namespaces", "two IPC or PID namespaces", "--ipc=host"),
    ("two /dev/shm", with_rank(evidence(), "engine 0 rank 0", shm_device=7), "yellow", "namespaces", "do not see one /dev/shm", "--ipc=host"),
    ("two users", with_rank(evidence(), "engine 0 rank 0", user_id=1000), "red", "namespaces", "two users", "as one user"),
    ("a small /dev/shm", with_rank(with_rank(APART, "trainer 0", shm_bytes=64 << 20), "engine 0 rank 0", shm_bytes=64 << 20), "yellow", "/dev/shm", "/dev/shm has 64.0 MiB; NCCL", "--shm-size=1g"),
    ("a GPU that is full", with_rank(APART, "engine 0 rank 0", gpu=FULL), "red", "GPU memory", "1.0 MiB of 140 GiB are free", "gpu_memory_utilization"),
    ("a machine that is full", with_rank(evidence(), "trainer 0", host_free_bytes=1 << 20), "red", "host memory", "1.0 MiB of 64.0 GiB are free", "staging_limit_bytes"),
    ("a machine that is nearly full", with_rank(evidence(), "trainer 0", host_free_bytes=MANIFEST.nbytes + 9), "yellow", "host memory", "are free, an update takes", "staging_limit_bytes"),
    ("a group larger than staging", evidence(config=SyncConfig(transport="broadcast", staging_limit_bytes="1MiB")), "red", "staging", "module group a needs 2.0 MiB", "sync.staging_limit_bytes: 2097152"),
    ("a model larger than its stage", evidence(config=SyncConfig(transport="broadcast", staging_limit_bytes="1MiB", apply="staged")), "red", "staging", "apply: staged needs", "sync.apply: auto"),
    ("applied while it arrives", evidence(config=SyncConfig(transport="broadcast", apply="streaming")), "yellow", "staging", "as sync.apply says", "sync.apply: auto"),
    ("shards that are gathered", with_rank(evidence(), "trainer 0", is_sharded=True), "yellow", "slices", "makes them whole on each for trainer 0 -> engine 0 rank 0", "sync.transport: sharded_shared_memory"),
    ("sleep mode", with_rank(evidence(), "engine 0 rank 0", engine={"sleep_mode": True}), "yellow", "sleep mode", "may be put to sleep", "wake_up()"),
    ("a sleeping engine", with_rank(evidence(), "engine 0 rank 0", refusal="the engine's weights are asleep; call wake_up() before the update"), "red", "state", "the engine's weights are asleep", "call wake_up() before the update"),
    ("a prefix cache that stays", with_rank(evidence(config=SyncConfig(on_commit=("set_weight_version",))), "engine 0 rank 0", engine={"prefix_caching": True}), "red", "prefix cache", "blocks of the prefix cache that old weights computed", "flush_prefix_cache"),
    ("no worker extension", evidence(troubles=(Trouble(step="look", party="engine 0", kind="EngineStateError", message="the engine runs without weightsync's worker extension; create it with worker_extension_cls"),)), "red", "worker extension", "without weightsync's worker extension", "create it with worker_extension_cls"),
    ("an actor of several threads", evidence(actors={"engine 0": ActorFacts(threaded=True)}), "yellow", "actors", "runs several calls at once", "max_concurrency"),
    ("a slow actor", evidence(actors={"trainer 0": ActorFacts(answered_s=3.0)}), "yellow", "actors", "took 3.0 s", "free while update() runs"),
    ("half of a parameter", evidence(loads={"engine 0 rank 0": LoadSummary(rank="engine 0 rank 0", num_groups=1, partial=("qkv.weight",))}), "red", "parameters fed in part", "left in part undefined: qkv.weight", "send the names that are missing"),
    ("half of a tensor", evidence(loads={"engine 0 rank 0": LoadSummary(rank="engine 0 rank 0", num_groups=1, read_in_part={"b.weight": 8})}), "red", "parameters fed in part", "8 of 16 elements of b.weight", "shapes those of the engine's model"),
    ("a loader that cannot be recorded", evidence(loads={"engine 0 rank 0": LoadSummary(rank="engine 0 rank 0", num_groups=1, fallback="one group per decoder layer: it wants data")}), "yellow", "module groups", "it wants data", "a loader that only copies"),
    ("an update longer than its bound", evidence(owned={"trainer 0": 10**13}, config=SyncConfig(staging_limit_bytes="100TiB", timeout_s=10)), "yellow", "seconds an update", "about", "sync.timeout_s"),
]  # fmt: skip


@pytest.mark.parametrize(("e", "level", "check", "says", "cure"), [pytest.param(*f[1:], id=f[0]) for f in FAULTS])
def test_a_fault_in_the_facts_is_found_with_its_cure(e: Evidence, level: str, check: str, says: str, cure: str) -> None:
    hits = [finding for finding in found(e) if finding.check == check]
    assert [(f.level, says in f.found, cure in f.cure) for f in hits] == [(level, True, True)], hits
    assert exit_code(diagnose(e)) == (level == "red" or any(f.level == "red" for f in found(e)))


def test_a_rank_that_reads_none_of_a_tensor_leaves_it_to_the_engine_s_others() -> None:
    loads = {
        "engine 0 rank 0": LoadSummary(rank="engine 0 rank 0", num_groups=1, unmapped=("b.weight", "c.weight")),
        "engine 0 rank 1": LoadSummary(rank="engine 0 rank 1", num_groups=1, unmapped=("a.weight", "c.weight")),
    }
    (finding,) = (f for f in found(evidence(loads=loads)) if f.check == "names that feed nothing")
    assert finding.found == "1 of the trainers' names feed nothing in engine 0: c.weight"


def test_what_many_have_in_common_is_said_once() -> None:
    e = evidence(*[""] * 40)
    e = replace(e, loads={rank: replace(load, unfed=("x",)) for rank, load in e.loads.items()})
    (finding,) = found(e)
    assert finding.party == "engine 0 rank 0, engine 1 rank 0, engine 2 rank 0 and 36 more"
    assert len(diagnose(e)) < 40


@pytest.mark.parametrize(
    ("message", "parts"),
    [
        ("it sleeps; call wake_up()", ("it sleeps", "call wake_up()")),
        ("it moves; they permute. Create it without", ("it moves; they permute", "Create it without")),
        ("a.b.c is broken", ("a.b.c is broken", "")),
        ("one\n  two; three", ("one two", "three")),
    ],
)
def test_the_last_clause_of_an_error_is_its_cure(message: str, parts: tuple[str, str]) -> None:
    assert split_cure(message) == parts


def test_slower_copies_and_more_bytes_take_longer() -> None:
    base = seconds_of(evidence())
    slow = evidence()
    for rank in slow.processes:
        slow = with_rank(slow, rank, rates=Rates(copy=1e9, digest=1e9, copy_and_digest=1e9))
    more = seconds_of(evidence(owned={"trainer 0": 10 * MANIFEST.nbytes}))
    late = seconds_of(slow)
    assert base is not None
    assert more is not None
    assert late is not None
    assert base < more
    assert base < late


# ---- what always holds ----------------------------------------------------------------------------------------------

TEXT = st.sampled_from(["", "1", "2", "boot", "nccl"])
SIZES = st.integers(0, 1 << 40)
FACTS: st.SearchStrategy[ProcessFacts] = st.builds(
    ProcessFacts,
    libraries=st.dictionaries(st.sampled_from(["torch", "ray", "vllm", "nixl"]), TEXT),
    code=TEXT,
    formats=st.dictionaries(st.sampled_from(["calls", "replies"]), TEXT),
    namespaces=st.dictionaries(st.sampled_from(list(NAMESPACES)), TEXT),
    boot_id=TEXT,
    user_id=st.integers(0, 1),
    host_bytes=SIZES,
    host_free_bytes=SIZES,
    shm_bytes=SIZES,
    shm_free_bytes=SIZES,
    num_gpus=st.integers(0, 2),
    gpu=st.none()
    | st.builds(GpuFacts, name=TEXT, device=TEXT, nbytes=SIZES, free_bytes=SIZES, expandable=st.booleans()),
    process_group=TEXT,
    shares_memory=st.booleans(),
    engine=st.fixed_dictionaries(
        {}, optional={"prefix_caching": st.booleans(), "tensor_parallel_size": st.integers(1, 4)}
    ),
    refusal=st.sampled_from(["", "no; do it"]),
    rates=st.none() | st.just(Rates(copy=1e9, digest=1e9, copy_and_digest=1e9)),
)
IDENTITIES = st.builds(
    Identity,
    host=TEXT, pid=st.just(1), machine=TEXT, weightsync=TEXT, torch=TEXT, python=TEXT,
    gpu=st.sampled_from(["", "A", "B"]), cupy=TEXT, nccl=st.sampled_from(["", "2.17.1", "2.27.3", "2.30.1"]),
)  # fmt: skip
PROCESSES = st.builds(Process, identity=IDENTITIES, facts=FACTS)
NAMES = st.lists(st.sampled_from(["a.weight", "b.weight"]), unique=True).map(tuple)
LOADS = st.builds(
    LoadSummary,
    rank=st.just(""), num_groups=st.integers(0, 3), largest_group_bytes=SIZES, unmapped=NAMES, unfed=NAMES, partial=NAMES,
    read_in_part=st.dictionaries(st.sampled_from(["a.weight", "b.weight"]), st.integers(0, 20)),
    casts=st.just(()) | st.just(("a.weight: float32 -> bfloat16",)), fallback=st.none() | TEXT,
)  # fmt: skip
CONFIGS = st.builds(
    SyncConfig,
    transport=st.sampled_from(["auto", "broadcast", "shared_memory", "cuda_ipc"]),
    apply=st.sampled_from(["auto", "staged", "streaming"]),
    staging_limit_bytes=st.integers(1, 1 << 34),
    unfed=st.sampled_from(["report", "error"]),
    partial=st.sampled_from(["report", "error"]),
    on_commit=st.sampled_from([(), ("flush_prefix_cache",)]),
)
RANKS = ("trainer 0", "trainer 1", "engine 0 rank 0", "engine 0 rank 1", "engine 1 rank 0")
TROUBLES = st.builds(
    Trouble,
    step=st.sampled_from(["reach", "look", "describe", "agree", "open", "link"]),
    party=st.sampled_from(["trainer 0", "engine 0", ""]),
    kind=st.sampled_from(["ConfigError", "WeightSyncError", "Other"]),
    message=TEXT,
)


@st.composite
def any_evidence(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Evidence:
    """Anything that an examination may come back with, complete or not."""
    processes = draw(st.dictionaries(st.sampled_from(RANKS), PROCESSES))
    engines = [rank for rank in processes if rank.startswith("engine")]
    return Evidence(
        config=draw(CONFIGS),
        processes=processes,
        manifest=draw(st.none() | st.just(MANIFEST)),
        loads={rank: replace(draw(LOADS), rank=rank) for rank in engines if draw(st.booleans())},
        owned={rank: draw(SIZES) for rank in processes if rank.startswith("trainer") and draw(st.booleans())},
        links_s=draw(st.none() | st.just(0.1)),
        stable=draw(st.none() | st.booleans()),
        actors=draw(
            st.dictionaries(st.sampled_from(["trainer 0", "engine 0"]), st.builds(ActorFacts, threaded=st.booleans()))
        ),
        colocated=draw(st.just(()) | st.just((("trainer 0", "engine 0"),))),
        troubles=tuple(draw(st.lists(TROUBLES, max_size=3))),
    )


@settings(max_examples=60)
@given(any_evidence())
def test_whatever_the_evidence_each_finding_that_is_not_green_has_a_cure(e: Evidence) -> None:
    findings = diagnose(e)
    assert all(f.cure for f in findings if f.level != "green")
    assert [TOPICS.index(f.topic) for f in findings] == sorted(TOPICS.index(f.topic) for f in findings)
    assert exit_code(findings) == any(f.level == "red" for f in findings)
    assert not e.troubles or any(f.level == "red" for f in findings)
    assert msgspec.convert(json.loads(as_json(findings)), list[Finding]) == findings
    assert diagnose(msgspec.msgpack.decode(msgspec.msgpack.encode(e), type=Evidence)) == findings


# ---- shown ----------------------------------------------------------------------------------------------------------


def test_findings_are_plain_aligned_lines_where_there_is_no_terminal() -> None:
    one, other = Check("gpus", "pairing"), Check("weights", "ties")
    stream = io.StringIO()
    show(
        [one.green("as it should be"), other.red("two [bold]names", expected="one", cure="remove one")],
        Console(file=stream),
    )
    assert stream.getvalue().splitlines() == [
        "gpus",
        "  green   pairing  as it should be",
        "weights",
        "  red     ties     two [bold]names",
        "                   expected: one",
        "                   cure: remove one",
        "1 green, 0 yellow, 1 red",
    ]


def test_a_finding_that_is_not_green_cannot_be_made_without_a_cure() -> None:
    with pytest.raises(AssertionError, match="needs a cure"):
        Check("a", "b").yellow("c", cure="")


def test_each_link_over_nccl_holds_four_buckets_at_both_ends() -> None:
    one = evidence("A", "B", config=SyncConfig(transport="broadcast", gpu_bucket_bytes="1MiB"))
    two = replace(
        one,
        processes={"trainer 1": one.processes["trainer 0"], **one.processes},
        owned=dict.fromkeys(("trainer 0", "trainer 1"), 8 << 20),
    )
    staged = sum(aligned(meta.nbytes) for meta in MANIFEST.tensors)
    needs = needs_of(two)
    assert needs["trainer 0"].gpu_bytes == needs["trainer 1"].gpu_bytes == 4 << 20
    assert needs["engine 0 rank 0"].gpu_bytes == 2 * (4 << 20) + staged
