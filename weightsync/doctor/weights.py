"""What the load maps say about the manifest: what feeds nothing, what is fed by nothing, and what changes on the way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TypeVar

from weightsync.doctor.evidence import Evidence, party_of
from weightsync.doctor.finding import Check, Finding, Level, size, some
from weightsync.members import read_too_little
from weightsync.report import LoadSummary

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def tensors(e: Evidence) -> Iterator[Finding]:
    if e.manifest is not None:
        groups = max((load.num_groups for load in e.loads.values()), default=0)
        fed = f", {groups} module groups on a rank" if groups else ""
        yield Check("weights", "tensors").green(f"{len(e.manifest.tensors)} tensors, {size(e.manifest.nbytes)}{fed}")


def unmapped(e: Evidence) -> Iterator[Finding]:
    """Names that feed nothing: on no rank of an engine. (A rank of a sharded engine may well read none of a tensor.)"""
    check = Check("weights", "names that feed nothing")
    engines: dict[str, list[LoadSummary]] = defaultdict(list)
    for rank, load in e.loads.items():
        engines[party_of(rank)].append(load)
    unread = {
        party: tuple(sorted(set.intersection(*(set(load.unmapped) for load in loads))))
        for party, loads in engines.items()
    }
    found = [(names, parties) for names, parties in _alike(unread, lambda names: names) if names]
    for names, parties in found:
        yield check.yellow(
            f"{len(names)} of the trainers' names feed nothing in {some(parties)}: {some(names)}",
            party=some(parties),
            expected="each name feeds a parameter",
            cure="rename them as the engine's checkpoint has them, or leave them out of what weights() returns; they travel for "
            "nothing",
        )
    if e.loads and not found:
        yield check.green("none: each name feeds a parameter")


def unfed(e: Evidence) -> Iterator[Finding]:
    check = Check("weights", "parameters that nothing feeds")
    level: Level = "red" if e.config.unfed == "error" else "yellow"
    found = [(names, ranks) for names, ranks in _alike(e.loads, _unfed) if names]
    for names, ranks in found:
        yield check.at(
            level,
            f"{len(names)} parameters of {some(ranks)} keep the values that they were made with: {some(names)}",
            party=some(ranks),
            expected="each parameter is fed",
            cure="have weights() return them, under the names of the engine's checkpoint"
            + ("; or set sync.unfed: report, if they never change" if level == "red" else ""),
        )
    if e.loads and not found:
        yield check.green("none")


def partial(e: Evidence) -> Iterator[Finding]:
    """Parameters that a reload would leave in part as uninitialised memory, and tensors that are not read whole."""
    check = Check("weights", "parameters fed in part")
    level: Level = "red" if e.config.partial == "error" else "yellow"
    cure = "send the names that are missing (all of q, k and v; every expert), or set sync.partial: report, if the rest is padding"
    found = [(names, ranks) for names, ranks in _alike(e.loads, lambda load: load.partial) if names]
    for names, ranks in found:
        yield check.at(
            level,
            f"{len(names)} parameters of {some(ranks)} would be left in part undefined: {some(names)}",
            party=some(ranks),
            expected="all of a parameter, or nothing of it",
            cure=cure,
        )
    short: dict[str, tuple[str, ...]] = {}
    for party in dict.fromkeys(party_of(rank) for rank in e.loads):
        loads = [load for rank, load in e.loads.items() if party_of(rank) == party]
        if e.manifest is not None:
            read = read_too_little(e.manifest, loads)
            short[party] = tuple(
                f"{count} of {e.manifest.meta_of(name).numel} elements of {name}" for name, count in read.items()
            )
    for texts, parties in _alike(short, lambda texts: texts):
        if texts:
            found.append((texts, parties))
            yield check.at(
                level,
                f"{some(parties)} reads {some(texts)}",
                party=some(parties),
                expected="all of each tensor: the loader expects another shape",
                cure="make the trainer's shapes those of the engine's model, or set sync.partial: report, if it cuts on purpose",
            )
    if e.loads and not found:
        yield check.green("none")


def casts(e: Evidence) -> Iterator[Finding]:
    """Tensors whose dtype changes when they land."""
    check = Check("weights", "dtype casts")
    found = [(texts, ranks) for texts, ranks in _alike(e.loads, lambda load: load.casts) if texts]
    for texts, ranks in found:
        kinds = sorted({text.rpartition(": ")[2] for text in texts})
        wire = kinds[0].rpartition("-> ")[2]
        yield check.yellow(
            f"{len(texts)} tensors are cast when they land in {some(ranks)} ({', '.join(kinds)}): "
            f"{some([text.rpartition(': ')[0] for text in texts])}",
            party=some(ranks),
            expected="one dtype at both ends",
            cure=f'cast before they travel, sync.wire_dtype: {{"*": {wire}}}, or load the engine in the trainer\'s dtype',
        )
    if e.loads and not found:
        yield check.green("none: tensors land in the dtype in which they travel")


def ties(e: Evidence) -> Iterator[Finding]:
    if e.manifest is not None:
        told = [f"{alias} is {canonical}" for alias, canonical in e.manifest.aliases.items()]
        yield Check("weights", "ties").green(f"{some(told)}; sent once" if told else "none")


def fallback(e: Evidence) -> Iterator[Finding]:
    for why, ranks in _alike(e.loads, lambda load: load.fallback):
        if why is not None:
            yield Check("weights", "module groups").yellow(
                f"{some(ranks)}: where each tensor lands could not be recorded; {why}",
                party=some(ranks),
                expected="one group a module",
                cure="nothing has to be done, but updates stage more and are always reloads; a loader that only copies can be recorded",
            )


def _unfed(load: LoadSummary) -> tuple[str, ...]:
    partial = set(load.partial)
    return tuple(name for name in load.unfed if name not in partial)


def _alike(values: Mapping[str, T], of: Callable[[T], K]) -> list[tuple[K, list[str]]]:
    """(what some have in common, who they are), in the order in which they come."""
    found: dict[K, list[str]] = {}
    for who, value in values.items():
        found.setdefault(of(value), []).append(who)
    return list(found.items())
