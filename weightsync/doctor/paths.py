"""Which way the bytes go, and what stands in it: transports, libraries for them, namespaces, links."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from weightsync.doctor.evidence import Evidence, Process
from weightsync.doctor.facts import ProcessFacts
from weightsync.doctor.finding import Check, Finding, Level, some
from weightsync.errors import AgreementError, ConfigError
from weightsync.identity import Identity, check_nccl
from weightsync.plan import choose_transport, why_not_nccl
from weightsync.registry import takes_shards

_CUPY = 'pip install "weightsync[cuda13]" (or cuda12) in both environments'


def chosen(e: Evidence) -> Iterator[Finding]:
    """Per pair the transport, and why."""
    check = Check("transports", "chosen")
    pairs: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (sender, receiver), transport in e.transports.items():
        of, to = e.processes[sender], e.processes[receiver]
        pair = f"{sender} -> {receiver}"
        if transport:
            pairs[transport, _why(e, of, to)].append(pair)
            continue
        try:
            choose_transport(e.config, of.identity, to.identity)
        except ConfigError as error:
            yield check.red(
                f"{pair}: {str(error).removeprefix('transport: ')}",
                party=f"{sender}, {receiver}",
                expected="a transport for every pair",
                cure="set sync.transport: auto, or add a rule that fits the pair",
            )
    for (transport, why), who in pairs.items():
        yield check.green(f"{transport} for {some(who)}: {why}")


def _why(e: Evidence, sender: Process, receiver: Process) -> str:
    of, to = sender.identity, receiver.identity
    if of.machine != to.machine:
        place = "on two machines"
    elif not (of.gpu and to.gpu):
        on = "in CPU memory" if not (of.gpu or to.gpu) else "not both on a GPU"
        place = f"on one machine, weights {on}"
    elif of.gpu == to.gpu:
        place = "on one GPU"
    else:
        place = f"on two GPUs of one machine, {_reach(e, of, to)}"
    return place if e.config.transport == "auto" else f"as configured; {place}"


def _reach(e: Evidence, of: Identity, to: Identity) -> str:
    readers = e.readers(of)
    if readers > 1:
        return f"and {readers} are to be served at once"
    return "of which one reads the other" if of.gpu in to.reaches else "of which the engine's cannot read the trainer's"


def faster(e: Evidence) -> Iterator[Finding]:
    """Pairs for which there would be a faster way."""
    no_cupy = [
        f"{sender} -> {receiver}"
        for (sender, receiver), transport in e.carriers.items()
        if transport == "shared_memory"
        and (gpu := e.processes[sender].identity.gpu)
        and gpu == e.processes[receiver].identity.gpu
    ]
    if no_cupy:
        yield Check("transports", "cuda_ipc").yellow(
            f"{some(no_cupy)} are on one GPU, and the bytes go through CPU memory: cupy is missing, or shared_memory is configured",
            party=some(no_cupy),
            expected="cuda_ipc",
            cure=f"{_CUPY}, and leave sync.transport at auto, or, for slices, set it to sharded_cuda_ipc",
        )
    gathered = [f"{of} -> {to}" for (of, to), name in e.transports.items() if name and not takes_shards(name)]
    if gathered and (sharded := [rank for rank, process in e.trainers.items() if process.facts.is_sharded]):
        yield Check("transports", "slices").yellow(
            f"{some(sharded)} hold parts of the weights, and every update makes them whole on each for {some(gathered)}",
            party=some(sharded),
            expected="slices: each engine rank takes what it needs of the parts, and nothing is gathered",
            cure="set sync.transport: sharded_shared_memory (one host), sharded_cuda_ipc (its GPUs), sharded_rdt or "
            "sharded_broadcast (several)",
        )
    for sender, ranks in _broadcasts(e):
        yield from _over_nccl(e, sender, ranks)


def _over_nccl(e: Evidence, sender: str, receivers: list[str]) -> Iterator[Finding]:
    """A broadcast link between GPUs: NCCL, or why not."""
    check = Check("transports", "NCCL")
    identities = {rank: e.processes[rank].identity for rank in (sender, *receivers)}
    own = identities[sender]
    gpus = tuple(identity.gpu for identity in identities.values())
    who = f"{sender} -> {some(receivers)}"
    if not all(gpus):
        if any(gpus):
            yield check.yellow(
                f"{who}: not all of its weights lie on a GPU, so that bytes travel over gloo",
                party=who,
                expected="weights on GPUs at both ends",
                cure="move the model to the GPU at the end that has it in CPU memory",
            )
        return
    try:
        check_nccl(identities)
    except AgreementError as error:
        yield check.red(
            str(error), party=error.rank or who, expected="one NCCL, set up alike, on every rank of a link",
            cure=f"install the same NCCL and cupy everywhere, and set {error.field} alike before the processes start"
            if (error.field or "").startswith("NCCL_") else "install the same NCCL and cupy everywhere",
        )  # fmt: skip
        return
    why = why_not_nccl(gpus, nccl=own.nccl, cupy=bool(own.cupy), environment=own.nccl_env)
    if why:
        yield check.yellow(
            f"{who}: bytes travel through CPU memory (gloo), because {why}",
            party=who,
            expected="NCCL",
            cure=_nccl_cure(why),
        )
    else:
        yield check.green(f"{who}: NCCL {own.nccl}, from GPU to GPU")


def _nccl_cure(why: str) -> str:
    if "cupy" in why:
        return _CUPY
    if "NCCL_COMM_BLOCKING" in why:
        return "unset NCCL_COMM_BLOCKING in trainer.env and engines.env"
    if "several of its ranks" in why:
        return "set sync.transport: auto, which uses cuda_ipc on one GPU, or NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL 2.30 or later"
    return "install a torch with NCCL 2.18 or later"


def optional(e: Evidence) -> Iterator[Finding]:
    """Libraries that a transport may use."""
    with_nixl = [rank for rank, p in e.processes.items() if p.facts.libraries.get("nixl")]
    if e.processes:
        where = "in no process" if not with_nixl else f"in {some(with_nixl)}"
        gpus = [rank for rank, p in e.processes.items() if p.identity.gpu]
        cupy = [rank for rank in gpus if e.processes[rank].identity.cupy]
        text = (
            f"; cupy in {len(cupy)} and NCCL in {len([r for r in gpus if e.processes[r].identity.nccl])} of {len(gpus)}"
            if gpus
            else ""
        )
        yield Check("transports", "libraries").green(f"NIXL {where}{text}")


def namespaces(e: Evidence) -> Iterator[Finding]:
    """Containers: two processes under one kernel, and in one another's reach or not."""
    check = Check("transports", "namespaces")
    pairs: dict[str, list[str]] = defaultdict(list)
    for (sender, receiver), transport in e.carriers.items():
        if problem := _between(e.processes[sender].facts, e.processes[receiver].facts, transport):
            pairs[problem].append(f"{sender} -> {receiver}")
    for problem, who in pairs.items():
        level, found, expected, cure = _PROBLEMS[problem]
        yield check.at(level, f"{some(who)}: {found}", party=some(who), expected=expected, cure=cure)
    if e.transports and not pairs:
        yield check.green("trainers and engines of one machine reach each other's memory")


def _between(of: ProcessFacts, to: ProcessFacts, transport: str) -> str:
    """What stands between two processes under one kernel: a key of `_PROBLEMS`, or ""."""
    if not of.boot_id or of.boot_id != to.boot_id:
        return ""
    other = {name for name in ("ipc", "mnt", "pid", "net") if of.namespaces.get(name) != to.namespaces.get(name)}
    if "net" in other:
        return "network"
    if of.user_id != to.user_id and transport in ("shared_memory", "cuda_ipc"):
        return "user"
    if transport == "cuda_ipc" and other & {"ipc", "pid"}:
        return "cuda_ipc"
    return "shm" if other or of.shm_device != to.shm_device else ""


_PROBLEMS: dict[str, tuple[Level, str, str, str]] = {
    "network": (
        "yellow",
        "one kernel, two network namespaces (two containers): taken as two machines, so that bytes go over the network",
        "one network namespace",
        "run both in one container or pod, or with --network=host and --ipc=host",
    ),
    "user": (
        "red",
        "they run as two users, and each refuses the other's socket",
        "one user",
        "start both as one user, or set sync.transport: broadcast",
    ),
    "cuda_ipc": (
        "red",
        "they are in two IPC or PID namespaces (two containers), where the driver does not open the other's GPU memory",
        "one IPC and one PID namespace",
        "run both in one container or pod, or with --ipc=host and --pid=host; or set sync.transport: broadcast",
    ),
    "shm": (
        "yellow",
        "they do not see one /dev/shm (two containers): what torch, NCCL or Ray share through it is not shared there",
        "one IPC and one mount namespace",
        "run both in one container or pod, or with --ipc=host",
    ),
}
"""Problem -> level, found, expected, cure."""


def links(e: Evidence) -> Iterator[Finding]:
    """Opened for real, and closed again; nothing was sent."""
    if e.links_s is not None:
        yield Check("transports", "links").green(f"all opened, within {1e3 * e.links_s:.0f} ms")


def _broadcasts(e: Evidence) -> Iterator[tuple[str, list[str]]]:
    """Sender and receivers of each broadcast; where slices are sent, of what goes to one receiver, if to no other."""
    whole: dict[str, list[str]] = defaultdict(list)
    for (sender, receiver), transport in e.transports.items():
        if transport == "broadcast":
            whole[sender].append(receiver)
        elif e.carriers[sender, receiver] == "broadcast":
            yield sender, [receiver]
    yield from whole.items()
