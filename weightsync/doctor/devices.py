"""Which ranks share a GPU, by its UUID: the same in every process, whatever CUDA_VISIBLE_DEVICES says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from weightsync.doctor.evidence import Evidence, Process, party_of
from weightsync.doctor.finding import Check, Finding, some


def pairing(e: Evidence) -> Iterator[Finding]:
    """Who is where; whether those that were meant to share a GPU do."""
    check = Check("gpus", "pairing")
    apart = set()
    for trainer, engine in e.colocated:
        ranks = {rank: p for rank, p in e.engines.items() if party_of(rank) == engine}
        own = e.processes.get(trainer)
        if own is None or not ranks or not (own.identity.gpu and any(p.identity.gpu for p in ranks.values())):
            continue
        if own.identity.gpu not in {p.identity.gpu for p in ranks.values()}:
            apart.add(engine)
            yield check.yellow(
                f"{_place(trainer, own)} and {', '.join(_place(rank, p) for rank, p in ranks.items())} were to share a GPU, and "
                "do not: their bytes travel",
                party=f"{trainer}, {engine}",
                expected="one GPU",
                cure="make trainer and engine use the first GPU that they see (cuda:0), and leave CUDA_VISIBLE_DEVICES to Ray: "
                "remove it from trainer.env and engines.env",
            )
    for gpu, ranks in _by_gpu(e).items():
        if any(party_of(rank) in apart for rank in ranks):
            continue
        name = next((p.facts.gpu.name for p in ranks.values() if p.facts.gpu is not None), "GPU")
        who = ", ".join(_place(rank, p) for rank, p in ranks.items())
        yield check.green(f"{who}: {'share ' if len(ranks) > 1 else ''}{gpu} ({name})")
    on_cpu = [rank for rank, p in e.processes.items() if not p.identity.gpu]
    if on_cpu and len(on_cpu) == len(e.processes):
        yield check.green(f"all weights lie in CPU memory ({len(on_cpu)} ranks)")


def unused(e: Evidence) -> Iterator[Finding]:
    """Ranks that see a GPU while their weights lie in CPU memory."""
    for role, ranks in (("trainer", e.trainers), ("engines", e.engines)):
        idle = [rank for rank, p in ranks.items() if not p.identity.gpu and p.facts.num_gpus]
        if idle:
            yield Check("gpus", "unused").yellow(
                f"{some(idle)} can use a GPU, but the weights lie in CPU memory",
                party=some(idle),
                expected="weights on the GPU",
                cure=f"move the model to the GPU when it is made, or set {role}.resources.num_gpus to 0",
            )


def duplicates(e: Evidence) -> Iterator[Finding]:
    """Ranks of one NCCL communicator on one GPU: NCCL refuses that ("Duplicate GPU detected"), or waits for ever."""
    check = Check("gpus", "duplicates")
    shared = {gpu: ranks for gpu, ranks in _by_gpu(e).items() if len(ranks) > 1}
    seen = False
    for gpu, ranks in shared.items():
        groups: dict[str, list[str]] = defaultdict(list)
        for rank in ranks:
            groups["trainers" if rank in e.trainers else party_of(rank)].append(rank)
        for group, members in groups.items():
            if len(members) < 2:
                continue
            seen = True
            backends = {ranks[rank].facts.process_group for rank in members}
            nccl = group != "trainers" or any("nccl" in backend for backend in backends)
            found = f"{some(members)} are on one GPU, {gpu}"
            key = "trainer" if group == "trainers" else "engines"
            cure = (
                f"give each rank a GPU of its own: {key}.resources.num_gpus: 1 (for an engine, its tensor_parallel_size), and no "
                f"CUDA_VISIBLE_DEVICES in {key}.env"
            )
            if nccl:
                yield check.red(
                    f"{found}: NCCL makes no group of them", party=some(members), expected="one rank a GPU", cure=cure
                )
            else:
                yield check.yellow(
                    f"{found}: an NCCL group of them would be refused",
                    party=some(members),
                    expected="one rank a GPU",
                    cure=cure,
                )
    if _by_gpu(e) and not seen:
        yield check.green("no two ranks of one group are on one GPU")


def expandable_segments(e: Evidence) -> Iterator[Finding]:
    """torch's expandable segments are virtual memory, for which CUDA gives no IPC handle."""
    check = Check("gpus", "expandable segments")
    senders = {sender for (sender, _), transport in e.carriers.items() if transport == "cuda_ipc"}
    hit = [rank for rank in senders if (gpu := e.processes[rank].facts.gpu) is not None and gpu.expandable]
    if hit:
        yield check.yellow(
            f"{some(sorted(hit))} allocates its weights in expandable segments, which engines cannot map: every update copies "
            "the weights to a stage first",
            party=some(sorted(hit)),
            expected="expandable_segments:False",
            cure="take expandable_segments:True out of PYTORCH_CUDA_ALLOC_CONF (PYTORCH_ALLOC_CONF) of the trainer, or make the "
            "weights before it is switched on",
        )
    elif senders:
        yield check.green("engines can map the trainers' weights where they lie")


def _by_gpu(e: Evidence) -> dict[str, dict[str, Process]]:
    found: dict[str, dict[str, Process]] = defaultdict(dict)
    for rank, process in e.processes.items():
        if process.identity.gpu:
            found[process.identity.gpu][rank] = process
    return found


def _place(rank: str, process: Process) -> str:
    """ "trainer 0 (cuda:0, CUDA_VISIBLE_DEVICES=3)"."""
    device = process.facts.gpu.device if process.facts.gpu is not None else "CPU"
    visible = f", CUDA_VISIBLE_DEVICES={process.facts.visible_gpus}" if process.facts.visible_gpus else ""
    return f"{rank} ({device}{visible})"
