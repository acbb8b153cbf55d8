"""All checks, topic by topic."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from weightsync.doctor import agreement, devices, engines, estimate, memory, paths, weights
from weightsync.doctor.evidence import Evidence
from weightsync.doctor.finding import Finding

TOPICS = ("start", "versions", "gpus", "transports", "engines", "weights", "memory", "estimate")

CHECKS: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    agreement.versions,
    agreement.formats,
    devices.pairing,
    devices.unused,
    devices.duplicates,
    devices.expandable_segments,
    paths.chosen,
    paths.faster,
    paths.optional,
    paths.namespaces,
    paths.links,
    engines.troubles,
    engines.actors,
    engines.ready,
    engines.sleeping,
    engines.prefix_cache,
    weights.tensors,
    weights.unmapped,
    weights.unfed,
    weights.partial,
    weights.casts,
    weights.ties,
    weights.fallback,
    memory.budget,
    memory.host,
    memory.gpu,
    memory.shared_memory,
    estimate.update,
)


def diagnose(evidence: Evidence) -> list[Finding]:
    """What every check finds, in the order of the topics."""
    found = [finding for check in CHECKS for finding in check(evidence)]
    return sorted(found, key=lambda finding: TOPICS.index(finding.topic))
