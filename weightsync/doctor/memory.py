"""Whether an update has room: staging within its limit, and memory that is free on each machine and GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import msgspec

from weightsync.chunk import aligned
from weightsync.doctor.evidence import Evidence, Process
from weightsync.doctor.finding import Check, Finding, size, some

_NUM_BUCKETS = 2
_NUM_NCCL_BUCKETS = 4
_NCCL_SHM_BYTES = 1 << 30  # NVIDIA's advice for containers: --shm-size=1g
_VLLM_SHM_BYTES = 256 << 20  # message queues of a tensor-parallel engine; Docker's default of 64 MiB is too little
_TIGHT = 0.8


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank holds during an update, besides its weights."""

    host_bytes: int = 0
    gpu_bytes: int = 0
    what: str = ""


def budget(e: Evidence) -> Iterator[Finding]:
    """Staging against `staging_limit_bytes`: on trainers, and on engines where bytes are copied before they are applied."""
    check, limit = Check("memory", "staging"), e.config.staging_limit
    if e.manifest is None or not e.loads:
        return
    model = _model_bytes(e)
    stable = _is_stable(e)
    load = max(e.loads.values(), key=lambda load: load.largest_group_bytes)
    if not stable and e.config.apply == "staged" and model > limit:
        yield check.red(
            f"apply: staged needs {size(model)} on each engine rank, staging_limit_bytes allows {size(limit)}",
            party="engines",
            expected=f"{size(model)} or more",
            cure=f"set sync.staging_limit_bytes: {model}, or sync.apply: auto",
        )
    elif not stable and load.largest_group_bytes > limit:
        yield check.red(
            f"module group {load.largest_group} needs {size(load.largest_group_bytes)} on an engine rank, staging_limit_bytes "
            f"allows {size(limit)}",
            party="engines",
            expected=f"{size(load.largest_group_bytes)} or more",
            cure=f"set sync.staging_limit_bytes: {load.largest_group_bytes} or more",
        )
    elif not _is_staged(e):
        way = (
            "as sync.apply says"
            if e.config.apply == "streaming"
            else f"the model does not fit {size(limit)} of staging"
        )
        yield check.yellow(
            f"weights are applied while they arrive ({way}): engines are paused for the whole transfer, and a failure poisons",
            party="engines",
            expected="staged: a vote over the whole model before the first byte is applied",
            cure=f"set sync.staging_limit_bytes: {model}, with sync.apply: auto",
        )
    else:
        needs = needs_of(e)
        trainers = max((n.host_bytes + n.gpu_bytes for rank, n in needs.items() if rank in e.trainers), default=0)
        engines = max((n.host_bytes + n.gpu_bytes for rank, n in needs.items() if rank in e.engines), default=0)
        yield check.green(
            f"at most {size(trainers)} on a trainer and {size(engines)} on an engine rank, of {size(limit)}; the largest module "
            f"group is {load.largest_group} ({size(load.largest_group_bytes)})"
        )


def host(e: Evidence) -> Iterator[Finding]:
    """Free memory of each machine against what its ranks stage there together."""
    yield from _room(e, "host", _by_machine(e))


def gpu(e: Evidence) -> Iterator[Finding]:
    """The same for each GPU."""
    by_gpu: dict[str, list[str]] = defaultdict(list)
    for rank, process in e.processes.items():
        if process.identity.gpu:
            by_gpu[process.identity.gpu].append(rank)
    yield from _room(e, "GPU", by_gpu)


def _room(e: Evidence, what: str, places: dict[str, list[str]]) -> Iterator[Finding]:
    check, needs = Check("memory", f"{what} memory"), needs_of(e)
    for ranks in places.values():
        needed = sum(
            needs[rank].gpu_bytes if what == "GPU" else needs[rank].host_bytes for rank in ranks if rank in needs
        )
        free = min(_free(e.processes[rank], what) for rank in ranks)
        total = max(_total(e.processes[rank], what) for rank in ranks)
        if not total:
            continue
        where = f"{some(ranks)}: {size(free)} of {size(total)} are free, an update takes up to {size(needed)} more"
        cure = (
            "lower engines.arguments.gpu_memory_utilization, sync.gpu_bucket_bytes or sync.staging_limit_bytes"
            if what == "GPU"
            else "lower sync.staging_limit_bytes, use share_parameters(model) in the trainer, or give the container more memory"
        )
        if needed > free:
            yield check.red(where, party=some(ranks), expected=f"{size(needed)} free", cure=cure)
        elif needed > _TIGHT * free:
            yield check.yellow(
                where, party=some(ranks), expected=f"{size(needed / _TIGHT)} free, with a margin", cure=cure
            )
        else:
            yield check.green(where)


def shared_memory(e: Evidence) -> Iterator[Finding]:
    """/dev/shm. weightsync's own segments are anonymous and need none of it; NCCL, vLLM and torch do."""
    check = Check("memory", "/dev/shm")
    transports = e.carriers
    fine = []
    for ranks in _by_machine(e).values():
        facts = e.processes[ranks[0]].facts
        users = {}
        over_nccl = [
            r
            for pair, t in transports.items()
            if t == "broadcast"
            for r in pair
            if r in ranks and e.processes[r].identity.gpu
        ]
        if over_nccl:
            users["NCCL between GPUs of one machine"] = _NCCL_SHM_BYTES
        if any(int(e.processes[rank].facts.engine.get("tensor_parallel_size", 1)) > 1 for rank in ranks):
            users["a tensor-parallel vLLM"] = _VLLM_SHM_BYTES
        needed = sum(users.values())
        if facts.shm_bytes < needed:
            yield check.yellow(
                f"{some(ranks)}: /dev/shm has {size(facts.shm_bytes)}; {' and '.join(users)} may need {size(needed)}",
                party=some(ranks),
                expected=size(needed),
                cure=f"start the container with --shm-size={-(-needed // 2**30)}g or --ipc=host (Kubernetes: an emptyDir of medium "
                "Memory at /dev/shm)",
            )
            continue
        shared = sum(e.owned.get(rank, 0) for rank in ranks if rank in e.trainers)
        if any(t == "shared_memory" and sender in ranks for (sender, _), t in transports.items()) and shared:
            own = [rank for rank in ranks if rank in e.trainers]
            if all(e.processes[rank].facts.shares_memory for rank in own):
                fine.append("the weights lie in shared memory: nothing is staged")
            else:
                fits = "would fit" if shared <= facts.shm_free_bytes else "would not fit"
                fine.append(
                    f"{size(facts.shm_free_bytes)} of {size(facts.shm_bytes)} are free; the stage needs none of it, share_parameters "
                    f"({size(shared)}) {fits}"
                )
    for text in dict.fromkeys(fine):
        yield check.green(text)


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def needs_of(e: Evidence) -> dict[str, Need]:
    """Rank -> what it holds at most."""
    limit, config = e.config.staging_limit, e.config
    senders: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    """Rank -> transport -> at whose links it has an end."""
    for (sender, receiver), transport in e.carriers.items():
        for rank in (sender, receiver):
            senders[rank][transport].add(sender)
    needs = {}
    for rank, process in e.processes.items():
        host_bytes = gpu_bytes = 0
        for transport, linked in senders[rank].items():
            on_gpu = bool(process.identity.gpu) and transport in ("broadcast", "cuda_ipc")
            number = _NUM_NCCL_BUCKETS if on_gpu and transport == "broadcast" else _NUM_BUCKETS
            bucket = min(config.gpu_bucket if on_gpu else config.bucket, limit // number)
            if transport == "broadcast":
                links = _num_kinds(e) if rank in e.trainers else 1
                held = links * sum(number * min(bucket, e.owned.get(s, _model_bytes(e))) for s in linked)
            elif rank in e.trainers:
                owned = e.owned.get(rank, 0)
                lent = process.facts.shares_memory if transport == "shared_memory" else _lent(process)
                held = 0 if lent else owned if owned <= limit else _NUM_BUCKETS * bucket
            else:
                held = 0
            host_bytes, gpu_bytes = (host_bytes, gpu_bytes + held) if on_gpu else (host_bytes + held, gpu_bytes)
        if rank in e.engines and not _is_stable(e) and rank in e.loads:
            staged = _model_bytes(e) if _is_staged(e) else min(limit, _model_bytes(e))
            over_nccl = bool(process.identity.gpu) and "broadcast" in senders[rank]
            host_bytes, gpu_bytes = (host_bytes, gpu_bytes + staged) if over_nccl else (host_bytes + staged, gpu_bytes)
        needs[rank] = Need(host_bytes=host_bytes, gpu_bytes=gpu_bytes)
    return needs


def _num_kinds(e: Evidence) -> int:
    """How many links a trainer has over one transport: one, or, for slices, one for each rank of an engine."""
    sliced = {receiver for (sender, receiver), name in e.transports.items() if name != e.carriers[sender, receiver]}
    return max(len({rank.rpartition(" ")[2] for rank in sliced}), 1)


def _lent(process: Process) -> bool:
    """Whether engines read the weights on a GPU where they lie."""
    return process.facts.gpu is not None and not process.facts.gpu.expandable


def _model_bytes(e: Evidence) -> int:
    return sum(aligned(meta.nbytes) for meta in e.manifest.tensors) if e.manifest is not None else 0


def _is_stable(e: Evidence) -> bool:
    """As the links said; by arithmetic where they were not opened."""
    if e.stable is not None:
        return e.stable
    return all(
        transport in ("shared_memory", "cuda_ipc")
        and (
            e.owned.get(sender, 0) <= e.config.staging_limit or (transport == "cuda_ipc" and _lent(e.processes[sender]))
        )
        for (sender, _), transport in e.carriers.items()
    )


def _is_staged(e: Evidence) -> bool:
    if e.config.apply == "auto":
        return _is_stable(e) or _model_bytes(e) <= e.config.staging_limit
    return e.config.apply == "staged"


def _by_machine(e: Evidence) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for rank, process in e.processes.items():
        found[process.facts.boot_id or process.identity.machine].append(rank)
    return found


def _free(process: Process, what: str) -> int:
    if what == "host":
        return process.facts.host_free_bytes
    return process.facts.gpu.free_bytes if process.facts.gpu is not None else 0


def _total(process: Process, what: str) -> int:
    if what == "host":
        return process.facts.host_bytes
    return process.facts.gpu.nbytes if process.facts.gpu is not None else 0
