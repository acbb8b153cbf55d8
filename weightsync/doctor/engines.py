"""Whether engines and actors can take an update as they are."""

from __future__ import annotations

from collections.abc import Iterator

from weightsync.doctor.evidence import Evidence, Trouble
from weightsync.doctor.finding import Check, Finding, some

_SLOW_S = 1.0


def ready(e: Evidence) -> Iterator[Finding]:
    """EPLB, sleep, LoRA, draft models, known bugs of vLLM's reload: what an engine says of itself."""
    check = Check("engines", "state")
    refused: dict[str, list[str]] = {}
    for rank, process in e.engines.items():
        if process.facts.refusal:
            refused.setdefault(process.facts.refusal, []).append(rank)
    for text, ranks in refused.items():
        found, cure = split_cure(text)
        yield check.red(
            found, party=some(ranks), expected="an engine that can be updated", cure=cure or "change that setting"
        )
    if e.loads and not refused:
        yield check.green(f"{len(e.loads)} of {len(e.engines)} engine ranks can be updated")


def sleeping(e: Evidence) -> Iterator[Finding]:
    """An engine that sleeps when an update begins is refused then."""
    able = [rank for rank, process in e.engines.items() if process.facts.engine.get("sleep_mode")]
    if able:
        yield Check("engines", "sleep mode").yellow(
            f"{some(able)} may be put to sleep; an update of a sleeping engine is refused",
            party=some(able),
            expected="engines that are awake during updates",
            cure='call wake_up() before each update (tags=["weights"] will do), or create the engine without enable_sleep_mode',
        )


def prefix_cache(e: Evidence) -> Iterator[Finding]:
    """Blocks that old weights computed must not answer for new ones."""
    check = Check("engines", "prefix cache")
    caching = [rank for rank, process in e.engines.items() if process.facts.engine.get("prefix_caching")]
    if caching and "flush_prefix_cache" not in e.config.on_commit and not e.config.version_salt:
        yield check.red(
            f"{some(caching)} would answer from blocks of the prefix cache that old weights computed: on_commit does not flush "
            "it, and version_salt is off",
            party=some(caching),
            expected="a flush, or a salt",
            cure="add flush_prefix_cache to sync.on_commit, or set sync.version_salt: true",
        )
    elif caching:
        how = "blocks are salted with the version" if e.config.version_salt else "flushed with every commit"
        yield check.green(f"{some(caching)}: {how}")


def actors(e: Evidence) -> Iterator[Finding]:
    """Whether actors answer, and do not generate while weights change."""
    check = Check("engines", "actors")
    faults = 0
    for party, actor in e.actors.items():
        if party.startswith("engine ") and actor.threaded and actor.blocks:
            faults += 1
            yield check.yellow(
                f"{party} runs several calls at once (max_concurrency or concurrency groups): a call that generates may run while "
                "its weights change",
                party=party,
                expected="one call at a time, or an AsyncLLM, which is paused",
                cure="create the actor without max_concurrency, or keep its generating methods from being called during update()",
            )
        if actor.answered_s > _SLOW_S:
            faults += 1
            yield check.yellow(
                f"{party} took {actor.answered_s:.1f} s for a call that does nothing; an update makes about eight, one after another",
                party=party,
                expected=f"less than {_SLOW_S:g} s",
                cure="leave the actor, and a CPU, free while update() runs",
            )
    if e.actors and not faults:
        slowest = max(actor.answered_s for actor in e.actors.values())
        yield check.green(f"{len(e.actors)} actors answer, within {1e3 * slowest:.0f} ms")


def troubles(e: Evidence) -> Iterator[Finding]:
    """What could not be looked at, because a step before failed."""
    seen = set()
    for trouble in e.troubles:
        if (trouble.step, trouble.message) in seen:
            continue
        seen.add((trouble.step, trouble.message))
        parties = [
            other.party for other in e.troubles if (other.step, other.message) == (trouble.step, trouble.message)
        ]
        found, cure = split_cure(trouble.message)
        topic, check, expected = _STEPS["extension" if "worker extension" in found else trouble.step]
        yield Check(topic, check).red(
            f"{found} ({trouble.kind})",
            party=some(parties),
            expected=expected,
            cure=cure or _default_cure(trouble),
        )


_STEPS = {
    "reach": ("engines", "actors", "an actor that answers, with source or target in it"),
    "look": ("engines", "processes", "a rank that answers"),
    "extension": ("engines", "worker extension", "vLLM workers with weightsync in them"),
    "describe": ("weights", "source", "weights() returns a module, a mapping, or (name, tensor) pairs"),
    "agree": ("weights", "trainer ranks", "ranks that describe a tensor alike"),
    "open": ("engines", "load map", "an engine that can be updated from these tensors"),
    "link": ("transports", "links", "links that open"),
}
"""Step -> topic, check, what was expected."""

_CURES = {
    "ConfigError": "change the setting that is named",
    "ManifestError": "make names and shapes of what weights() returns those of the engine's checkpoint",
    "AgreementError": "make the ranks alike in what is named",
    "TransportError": "look into the process's log (run.log_actors=true shows it)",
    "UpdateTimeoutError": "leave the actor free while weightsync talks to it, or raise sync.timeout_s",
}


def _default_cure(trouble: Trouble) -> str:
    if trouble.step == "describe" and trouble.kind == "WeightSyncError":
        return "mend weights(); it raised this"
    return _CURES.get(trouble.kind, "mend what is named; run.log_actors=true shows what the actors print")


def split_cure(message: str) -> tuple[str, str]:
    """(what is wrong, what to do about it) of an error's text, which has the cure as its last clause, if at all."""
    text = " ".join(message.split())
    at = max(text.rfind("; "), text.rfind(". "))
    return (text[:at], text[at + 2 :]) if at > 0 else (text, "")
