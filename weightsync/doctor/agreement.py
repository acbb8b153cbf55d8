"""Whether all processes run the same software, and understand what the others send."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from weightsync.doctor.evidence import Evidence, Process
from weightsync.doctor.finding import Check, Finding, Level, some

_REFUSED = {"weightsync": None, "torch": 2}
"""Where a difference is refused when a weight sync opens: how many parts of the version have to be equal; None: all."""
_PER_LINK = {"nccl", "cupy", "nixl"}
"""What concerns the ranks of one link."""
_CURE = "install one version in all environments: one container image, or Ray's runtime_env"


def versions(e: Evidence) -> Iterator[Finding]:
    """Libraries that only some processes have, as vllm, are compared among these."""
    check = Check("versions", "libraries")
    equal = {}
    of = {rank: _libraries(process) for rank, process in e.processes.items()}
    for name in dict.fromkeys(name for libraries in of.values() for name in libraries if name not in _PER_LINK):
        found = {rank: libraries[name] for rank, libraries in of.items() if libraries.get(name)}
        if len(set(found.values())) == 1:
            equal[name] = next(iter(found.values()))
        elif found:
            yield _difference(check, name, found)
    if equal:
        text = ", ".join(f"{name} {version}" for name, version in equal.items())
        yield check.green(f"equal in {len(of)} processes: {text}")


def formats(e: Evidence) -> Iterator[Finding]:
    """Of what travels: control messages and handles."""
    check = Check("versions", "formats")
    names = dict.fromkeys(name for process in e.processes.values() for name in process.facts.formats)
    differing = False
    for name in names:
        found = {rank: process.facts.formats.get(name, "") for rank, process in e.processes.items()}
        if len(set(found.values())) > 1:
            differing = True
            odd, usual = _odd(found)
            yield check.red(
                f"{name}: {some(odd)} would not understand {some(usual)}",
                party=some(odd),
                expected="one format everywhere",
                cure=_CURE.replace("install one version", "install one version of weightsync"),
            )
    code = {rank: process.facts.code for rank, process in e.processes.items() if process.facts.code}
    if not differing and len(set(code.values())) > 1:
        odd, usual = _odd(code)
        differing = True
        yield check.yellow(
            f"the source of weightsync in {some(odd)} is not that in {some(usual)}, though they say the same version",
            party=some(odd),
            cure="ship one tree to all: Ray's working_dir, or one image",
        )
    if names and not differing:
        yield check.green(f"equal everywhere: {', '.join(names)}")


def _libraries(process: Process) -> dict[str, str]:
    identity = process.identity
    known = {"weightsync": identity.weightsync, "torch": identity.torch, "python": identity.python}
    return known | {name: version for name, version in process.facts.libraries.items() if name not in known}


def _difference(check: Check, name: str, found: Mapping[str, str]) -> Finding:
    parts = _REFUSED.get(name)
    keys = {".".join(version.split(".")[:parts]) for version in found.values()}
    level: Level = "red" if name in _REFUSED and len(keys) > 1 else "yellow"
    odd, usual = _odd(found)
    return check.at(
        level,
        f"{name} is {', '.join(sorted({found[rank] for rank in odd}))} in {some(odd)}",
        party=some(odd),
        expected=f"{found[usual[0]]}, as in {some(usual)}",
        cure=_CURE.replace("one version", f"one version of {name}"),
    )


def _odd(values: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """(ranks whose value is not the most frequent one, ranks that have that)."""
    ranks: dict[str, list[str]] = defaultdict(list)
    for rank, value in values.items():
        ranks[value].append(rank)
    usual = max(ranks.values(), key=len)
    return [rank for rank in values if rank not in usual], usual
