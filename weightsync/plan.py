"""Who sends what: pure functions over names, bytes and places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from weightsync.config import SyncConfig
from weightsync.errors import AgreementError, ConfigError, ManifestError
from weightsync.identity import Identity
from weightsync.manifest import Manifest, TensorMeta
from weightsync.registry import carrier_of, check_transport, is_transport, takes_shards

R = TypeVar("R")

_OLDEST, _SHARES_GPUS = (2, 18), (2, 30)
"""Of NCCL: the oldest that can be used, and the oldest that lets ranks share a GPU."""


def merge_manifests(manifests: Sequence[Manifest]) -> Manifest:
    """The manifest of all trainer ranks together; a rank may hold some names only.

    Raises:
        AgreementError: two ranks describe a tensor differently, or tie it differently; both are named.
    """
    metas: dict[str, tuple[TensorMeta, int]] = {}
    aliases: dict[str, tuple[str, int]] = {}
    for rank, manifest in enumerate(manifests):
        for meta in manifest.tensors:
            known, first = metas.setdefault(meta.name, (meta, rank))
            if known != meta:
                raise AgreementError(
                    f"trainer {first} has {known}, trainer {rank} has {meta}", rank=f"trainer {rank}", field=meta.name
                )
        for alias, canonical in manifest.aliases.items():
            tied, first = aliases.setdefault(alias, (canonical, rank))
            if tied != canonical:
                raise AgreementError(
                    f"trainer {first} ties {alias} to {tied}, trainer {rank} to {canonical}",
                    rank=f"trainer {rank}",
                    field=alias,
                )
    for alias, (canonical, rank) in aliases.items():
        if alias in metas:
            raise AgreementError(
                f"trainer {rank} ties {alias} to {canonical}, trainer {metas[alias][1]} has it as a tensor of its own",
                rank=f"trainer {rank}",
                field=alias,
            )
    if not metas:
        raise ManifestError("the trainers hold no tensors; check source")
    return Manifest(tuple(meta for meta, _ in metas.values()), {alias: name for alias, (name, _) in aliases.items()})


def assign_owners(manifest: Manifest, held: Sequence[Manifest], order: Sequence[str]) -> list[tuple[str, ...]]:
    """For each trainer rank the names that it sends, in *order*: each name once, from a rank that holds it.

    Runs of names that stand together in *order* stay together, so that module groups come whole; bytes are balanced
    over the ranks.
    """
    total = sum(meta.nbytes for meta in manifest.tensors)
    share = total / len(held)
    load = [0] * len(held)
    names: list[list[str]] = [[] for _ in held]
    rank = 0
    for name in order:
        holders = [i for i, part in enumerate(held) if name in part.by_name]
        # Stay with the rank of the name before while it has room: neighbours belong together.
        if rank not in holders or load[rank] >= share:
            rank = min(holders, key=lambda i: load[i])
        load[rank] += manifest.by_name[name].nbytes
        names[rank].append(name)
    return [tuple(part) for part in names]


def may_take_shards(config: SyncConfig) -> bool:
    """Whether a pair may come to use a transport that takes shards."""
    rules = [config.transport] if isinstance(config.transport, str) else [rule.use for rule in config.transport]
    return any(map(takes_shards, rules))


def choose_transports(
    config: SyncConfig, senders: Sequence[Identity], receivers: Mapping[R, Identity]
) -> dict[tuple[int, R], str]:
    """(sender, receiver) -> the name of the transport for that pair.

    A receiver that takes shards from one sender takes them from all: each of them may hold what it needs a slice of. Where a
    pair's own transport takes none, its slicing form does, "sharded_broadcast" for "broadcast", or that of another pair.

    Raises:
        ConfigError: as `choose_transport`.
    """
    found: dict[tuple[int, R], str] = {}
    readers = [count_readers(sender, receivers.values()) for sender in senders]
    for receiver, identity in receivers.items():
        names = [
            choose_transport(config, sender, identity, readers=count)
            for sender, count in zip(senders, readers, strict=True)
        ]
        sharded = next((name for name in names if takes_shards(name)), None)
        for i, name in enumerate(names):
            if sharded is not None and not takes_shards(name):
                form = f"sharded_{name}"
                name = form if is_transport(form) and takes_shards(form) else sharded
                _check_place(name, senders[i], identity)
            found[i, receiver] = name
    return found


def count_readers(sender: Identity, receivers: Iterable[Identity]) -> int:
    """How many other GPUs of its host the weights on *sender*'s GPU are for."""
    return len({of.gpu for of in receivers if of.machine == sender.machine} - {sender.gpu, ""}) if sender.gpu else 0


def choose_transport(config: SyncConfig, sender: Identity, receiver: Identity, *, readers: int = 1) -> str:
    """The name of the transport for one pair.

    Args:
        readers: `count_readers` of all receivers. One reads the sender's GPU faster than NCCL sends; several would share the
            links of that GPU, while NCCL passes the bytes on from one to the next.

    Raises:
        ConfigError: the configured transport is unknown, or no rule fits the pair.
    """
    same_host = sender.machine == receiver.machine
    if isinstance(config.transport, str):
        name = config.transport
    else:
        same_node = same_host and sender.node == receiver.node
        fitting = [
            rule.use
            for rule in config.transport
            if rule.same_host in (None, same_host) and rule.same_node in (None, same_node)
        ]
        if not fitting:
            place = ("on one host" if same_host else "on two hosts") + ("" if same_node else " and on two nodes")
            raise ConfigError(
                f"transport: no rule fits a pair {place}; add one without same_host and same_node", key="transport"
            )
        name = fitting[0]
    if name == "auto":
        return _fastest(sender, receiver, readers)
    check_transport(name)
    _check_place(name, sender, receiver)
    return name


def _check_place(name: str, sender: Identity, receiver: Identity) -> None:
    same_host = sender.machine == receiver.machine
    reaches = {"cuda_ipc": same_host and sender.gpu and receiver.gpu, "shared_memory": same_host}
    if not reaches.get(carrier_of(name), True):
        place = "on two hosts" if not same_host else "not both on a GPU"
        raise ConfigError(
            f"transport: {name} cannot serve a trainer ({sender}) and an engine ({receiver}) whose weights are {place}; use "
            + ("a rule with sharded_rdt or sharded_broadcast" if takes_shards(name) else "auto, or a rule")
            + " for such pairs",
            key="transport",
        )


def _fastest(sender: Identity, receiver: Identity, readers: int) -> str:
    if sender.machine != receiver.machine:
        return "broadcast"
    if not (sender.gpu and receiver.gpu):
        return "shared_memory"
    if sender.gpu == receiver.gpu:
        return "cuda_ipc" if sender.cupy and receiver.cupy else "shared_memory"
    reads = readers == 1 and sender.gpu in receiver.reaches and sender.cupy and receiver.cupy
    return "cuda_ipc" if reads else "broadcast"


def why_not_nccl(gpus: tuple[str, ...], *, nccl: str, cupy: bool, environment: Mapping[str, str]) -> str:
    """Why a link between these GPUs cannot use NCCL; "" where it does.

    Equal at both ends of a link: its planning has compared library and environment (`weightsync.identity.check_nccl`).
    """
    if not gpus or not all(gpus):
        return "not all of its weights lie on a GPU"
    if not cupy:
        return "there is no cupy"
    version = tuple(int(part) for part in nccl.split(".")[:2]) if nccl else ()
    if version < _OLDEST:
        return f"NCCL is {nccl}, 2.18 is needed" if nccl else "there is no NCCL"
    if environment.get("NCCL_COMM_BLOCKING", "0") != "0":
        return "NCCL_COMM_BLOCKING is set, so that its calls would wait without a bound"
    if len(set(gpus)) < len(gpus):
        twice = next(gpu for gpu in gpus if gpus.count(gpu) > 1)
        if version < _SHARES_GPUS:
            return f"several of its ranks are on GPU {twice}, and NCCL {nccl} is before 2.30, which allows that"
        if environment.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
            return f"several of its ranks are on GPU {twice}, and NCCL_MULTI_RANK_GPU_ENABLE is not 1"
    return ""
