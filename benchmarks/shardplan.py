"""What the plan of a sharded transfer costs for Qwen3-235B-A22B on 256 trainer and 128 engine ranks, and what it promises.

    python -m benchmarks.shardplan [--gbps 400] [--out benchmarks/results/shardplan.json]

Names and shapes are the model's; no weights, no GPU, no network. The times of transfers are worked out from bytes and
link rates: no latency, no packing, no contention inside the network.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common import write_record
from weightsync import messages as m
from weightsync.boxes import strides_of
from weightsync.geometry import Region
from weightsync.holdings import Held, Holdings, Place, Split
from weightsync.identity import identify
from weightsync.loadmap import Copy, LoadMap
from weightsync.manifest import Manifest, TensorMeta
from weightsync.needs import Needs, common_groups
from weightsync.report import LoadSummary
from weightsync.routes import orders_of, plan_routes
from weightsync.shardplan import ShardPlan
from weightsync.shardplanner import plan_shards

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 94, 4096, 64, 4, 128
EXPERTS, INTERMEDIATE, VOCAB = 128, 1536, 151_936
TRAINERS, STAGES = 256, 8
REPLICAS, TP = 16, 8
DTYPE = "bfloat16"
STEPS = 256
LOOKED_AT = 77
"""A sender and a receiver whose pulls are expanded."""

Shapes = dict[str, tuple[int, ...]]


def shapes() -> Shapes:
    """Qwen3-235B-A22B as its checkpoint has it."""
    found: Shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        found |= {
            at + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            at + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            at + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            at + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            at + "self_attn.q_norm.weight": (HEAD_DIM,),
            at + "self_attn.k_norm.weight": (HEAD_DIM,),
            at + "mlp.gate.weight": (EXPERTS, HIDDEN),
        }
        for expert in range(EXPERTS):
            of = f"{at}mlp.experts.{expert}."
            found[of + "gate_proj.weight"] = found[of + "up_proj.weight"] = (INTERMEDIATE, HIDDEN)
            found[of + "down_proj.weight"] = (HIDDEN, INTERMEDIATE)
        found |= {at + "input_layernorm.weight": (HIDDEN,), at + "post_attention_layernorm.weight": (HIDDEN,)}
    return found | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}


def fsdp(of: Shapes) -> list[Holdings]:
    """Everything cut along dimension 0 over all trainer ranks."""
    table = tuple(Held(name, DTYPE, shape, 0, (Split(0),)) for name, shape in of.items())
    return [Holdings(table, (Place((TRAINERS,), (rank,)),)) for rank in range(TRAINERS)]


def replicated_fsdp(of: Shapes) -> list[Holdings]:
    """HSDP: 8 replicas of the model, each cut along dimension 0 over 32 ranks."""
    table = tuple(Held(name, DTYPE, shape, 0, (None, Split(0))) for name, shape in of.items())
    return [Holdings(table, (Place((8, TRAINERS // 8), divmod(rank, TRAINERS // 8)),)) for rank in range(TRAINERS)]


def expert_pipeline(of: Shapes) -> list[Holdings]:
    """8 pipeline stages of 32 ranks: whole experts spread over them, everything else cut along dimension 0."""
    width = TRAINERS // STAGES
    layers = np.array_split(np.arange(LAYERS), STAGES)
    # Embedding and head weigh as much as a third of a layer; the first and last stage have the fewest layers.
    counts = sorted((len(part) for part in layers), reverse=True)
    counts = [counts.pop(), *counts[:-1], counts[-1]]
    stage_of = [stage for stage, count in enumerate(counts) for _ in range(count)]
    held: list[list[Held]] = [[] for _ in range(TRAINERS)]
    for name, shape in of.items():
        parts = name.split(".")
        stage = stage_of[int(parts[2])] if parts[1] == "layers" else 0 if "embed" in name else STAGES - 1
        if "experts" in parts:
            rank = stage * width + int(parts[parts.index("experts") + 1]) * width // EXPERTS
            held[rank].append(Held(name, DTYPE, shape))
        else:
            one = Held(name, DTYPE, shape, 0, (Split(0),))
            for i in range(width):
                held[stage * width + i].append(one)
    return [Holdings(tuple(part), (Place((width,), (rank % width,)),)) for rank, part in enumerate(held)]


def reads(of: Shapes, rank: int) -> Iterator[Copy]:
    """What the loader of one of 8 tensor- and expert-parallel engine ranks copies."""
    for name, shape in of.items():
        start, size = [0] * len(shape), list(shape)
        module = name.removesuffix(".weight")
        match name.split(".")[-2]:
            case "q_proj" | "embed_tokens" | "lm_head":
                size[0] = shape[0] // TP
                start[0] = rank * size[0]
            case "k_proj" | "v_proj":
                size[0] = HEAD_DIM
                start[0] = rank * KV_HEADS // TP * HEAD_DIM
            case "o_proj":
                size[1] = shape[1] // TP
                start[1] = rank * size[1]
            case "gate_proj" | "up_proj" | "down_proj":
                if int(name.split(".")[5]) * TP // EXPERTS != rank:
                    continue
                module = name[: name.index(".experts") + len(".experts")]
        for one in ("q_proj", "k_proj", "v_proj"):
            module = module.replace(one, "qkv_proj")
        strides = strides_of(shape)
        offset = sum(a * s for a, s in zip(start, strides, strict=True))
        yield Copy(name, module, "weight", Region(tuple(size), strides, offset), None)


def steps_s(plan: ShardPlan, orders: Sequence[Sequence[int]], rate: float) -> list[float]:
    """Seconds after which each of STEPS equal parts of every receiver's bytes has come, in the orders given.

    In each step the rank with the most bytes to move sets the pace, sender or receiver; steps do not overlap.
    """
    traffic = np.stack([plan.traffic(group) for group in range(len(plan.groups))])
    sent = np.zeros((STEPS, plan.num_senders))
    edges = np.linspace(0, 1, STEPS + 1)
    for j, order in enumerate(orders):
        groups = traffic[list(order), j]
        ends = np.cumsum(groups.sum(axis=1)) / groups.sum()
        starts = np.concatenate([[0], ends[:-1]])
        share = np.minimum(ends, edges[1:, None]) - np.maximum(starts, edges[:-1, None])
        sent += (share.clip(0) / (ends - starts)) @ groups
    received = max(plan.receiver_bytes) / STEPS
    return [float(at) for at in np.cumsum(np.maximum(sent.max(axis=1), received)) / rate]


def measured(case: str, rate: float) -> dict[str, Any]:
    of = shapes()
    manifest = Manifest(tuple(TensorMeta(name, DTYPE, shape) for name, shape in of.items()))
    holdings = CASES[case](of)
    maps = [LoadMap(tuple(reads(of, rank)), (), ()) for rank in range(TP)]
    before = peak_rss()
    started = time.perf_counter()
    needs = [Needs.of(load_map, manifest) for load_map in maps]
    groups = common_groups(manifest, maps)
    needs_s = time.perf_counter() - started
    of_rank = [needs[j % TP] for j in range(REPLICAS * TP)]

    started = time.perf_counter()
    plan = plan_shards(manifest, holdings, of_rank, groups=groups)
    plan_s = time.perf_counter() - started
    started = time.perf_counter()
    digest = plan.digest
    digest_s = time.perf_counter() - started
    peak = peak_rss()

    started = time.perf_counter()
    pulls = [len(found) for found in plan.of_receiver(LOOKED_AT)]
    receiver_s = time.perf_counter() - started
    started = time.perf_counter()
    sent = [len(found) for found in plan.of_sender(LOOKED_AT)]
    sender_s = time.perf_counter() - started
    view_peak = peak_rss()
    runs = sum(int(found.rows["local_runs"].sum()) for found in plan.of_receiver(LOOKED_AT))
    layerwise = plan_shards(manifest, holdings, of_rank)
    routes_s, orders_s, routed_peak = routed(manifest, holdings, needs)
    in_turn = [layerwise.order(j) for j in range(plan.num_receivers)]
    return {
        "needs_s": needs_s,
        "plan_s": plan_s,
        "digest_s": digest_s,
        "digest": digest,
        "rss_before_bytes": before,
        "rss_peak_bytes": peak,
        "rss_peak_with_views_bytes": view_peak,
        "routes_s": routes_s,
        "orders_s": orders_s,
        "rss_peak_with_routes_bytes": routed_peak,
        "module_groups": len(plan.groups),
        "view_of_receiver_s": receiver_s,
        "view_of_sender_s": sender_s,
        "pulls_per_receiver": sum(pulls),
        "pulls_of_a_sender": sum(sent),
        "pulls": sum(plan.num_pulls(j) for j in range(plan.num_receivers)),
        "runs_per_receiver": runs,
        "messages_per_receiver": messages(plan),
        "messages_per_receiver_by_layer": messages(layerwise),
        "sender_max_over_mean": max(plan.sender_bytes) / float(np.mean(plan.sender_bytes)),
        "receiver_max_over_mean": max(plan.receiver_bytes) / float(np.mean(plan.receiver_bytes)),
        "model_bytes": manifest.nbytes,
        "bytes_per_receiver": float(np.mean(plan.receiver_bytes)),
        "bytes": sum(plan.receiver_bytes),
        "busiest_link_s": max(*plan.sender_bytes, *plan.receiver_bytes) / rate,
        "in_turn_s": quarters(steps_s(layerwise, in_turn, rate)),
        "in_one_order_s": quarters(steps_s(layerwise, [sorted(order) for order in in_turn], rate)),
        "broadcast_s": [manifest.nbytes * part / 4 / rate for part in (1, 2, 3, 4)],
    }


def routed(manifest: Manifest, holdings: Sequence[Holdings], needs: Sequence[Needs]) -> tuple[float, float, int]:
    """What whoever opens links makes of the plan: seconds for the receivers' routes, and for what all senders are told; peak
    memory with both."""
    me = identify()
    trainers = [m.Description(identity=me, manifest=manifest, version=0, holdings=of) for of in holdings]
    ranks = {
        (f"engine {i}", rank): m.ReceiverOpened(
            identity=me,
            rank=rank,
            load=LoadSummary(rank=f"engine {i} rank {rank}", num_groups=0),
            order=(),
            version=0,
            needs=needs[rank],
        )
        for i in range(REPLICAS)
        for rank in range(TP)
    }
    started = time.perf_counter()
    routes = plan_routes(manifest, trainers, ranks)
    routes_s = time.perf_counter() - started
    order = [meta.name for meta in manifest.tensors]
    started = time.perf_counter()
    orders = [orders_of([routes[rank].shares[sender] for rank in ranks], order) for sender in range(TRAINERS)]
    assert len(orders) == TRAINERS
    return routes_s, time.perf_counter() - started, peak_rss()


def peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def messages(plan: ShardPlan) -> int:
    """Of one receiver, a message for each module group and sender."""
    return sum(1 for found in plan.of_receiver(LOOKED_AT) for _ in found.batches())


def quarters(seconds: Sequence[float]) -> list[float]:
    return [seconds[len(seconds) * part // 4 - 1] for part in (1, 2, 3, 4)]


CASES: dict[str, Callable[[Shapes], list[Holdings]]] = {
    "FSDP over 256": fsdp,
    "8 stages x 32 expert-parallel": expert_pipeline,
    "HSDP, 8 replicas x 32": replicated_fsdp,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gbps", type=float, default=400, help="Gbit/s of each rank's link")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/shardplan.json"))
    arguments = parser.parse_args()
    found = {}
    for case in CASES:  # each in a process of its own, for its peak memory
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            found[case] = pool.submit(measured, case, arguments.gbps * 1e9 / 8).result()

    console = Console()
    table = Table("", *found)
    for title, text in ROWS.items():
        table.add_row(title, *(text(case) for case in found.values()))
    console.print(table)
    table = Table(f"seconds at {arguments.gbps:g} Gbit/s a rank, for", "1/4", "2/4", "3/4", "all of the bytes")
    for case, of in found.items():
        for title, key in [("in turn", "in_turn_s"), ("all in one order", "in_one_order_s")]:
            table.add_row(f"{case}, {title}", *(f"{at:.2f}" for at in of[key]))
    table.add_row("gather and broadcast", *(f"{at:.2f}" for at in next(iter(found.values()))["broadcast_s"]))
    console.print(table)
    write_record(
        arguments.out,
        ("weightsync", "numpy", "msgspec"),
        {"gbps": arguments.gbps, "trainers": TRAINERS, "engine_ranks": REPLICAS * TP, "cases": found},
    )
    console.print(f"written to {arguments.out}")


ROWS: dict[str, Callable[[dict[str, Any]], str]] = {
    "s to plan": lambda of: f"{of['plan_s']:.2f}",
    "s for the needs of 8 load maps and their groups": lambda of: f"{of['needs_s']:.2f}",
    "MB of memory at the peak (before planning)": lambda of: (
        f"{of['rss_peak_bytes'] / 1e6:.0f} ({of['rss_before_bytes'] / 1e6:.0f})"
    ),
    "s for all receivers' routes": lambda of: f"{of['routes_s']:.1f}",
    "s for all senders' orders": lambda of: f"{of['orders_s']:.1f}",
    "MB at the peak with both": lambda of: f"{of['rss_peak_with_routes_bytes'] / 1e6:,.0f}",
    "s to expand a receiver's pulls": lambda of: f"{of['view_of_receiver_s']:.2f}",
    "s to expand a sender's pulls": lambda of: f"{of['view_of_sender_s']:.2f}",
    "pulls per receiver": lambda of: f"{of['pulls_per_receiver']:,}",
    "of a sender": lambda of: f"{of['pulls_of_a_sender']:,}",
    "in all": lambda of: f"{of['pulls']:,}",
    "contiguous runs per receiver": lambda of: f"{of['runs_per_receiver']:,}",
    "messages per receiver, by module group": lambda of: f"{of['messages_per_receiver']:,}",
    "messages per receiver, by layer": lambda of: f"{of['messages_per_receiver_by_layer']:,}",
    "max over mean bytes, senders": lambda of: f"{of['sender_max_over_mean']:.3f}",
    "max over mean bytes, receivers": lambda of: f"{of['receiver_max_over_mean']:.3f}",
    "GB per receiver (of the model's)": lambda of: (
        f"{of['bytes_per_receiver'] / 1e9:.1f} ({of['model_bytes'] / 1e9:.1f})"
    ),
    "TB in all": lambda of: f"{of['bytes'] / 1e12:.2f}",
    "s that the busiest link needs": lambda of: f"{of['busiest_link_s']:.2f}",
}


if __name__ == "__main__":
    main()
