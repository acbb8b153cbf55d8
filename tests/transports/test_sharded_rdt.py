"""Slices over real NIXL between real Ray actors: the transport's contract, and the traps of RDT."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from weightsync.identity import identify
from weightsync.interfaces import LinkContext
from weightsync.testing import TransportSuite
from weightsync.transports.sidecar import Sidecars

pytest.importorskip("nixl", reason='needs NIXL: pip install "weightsync[rdt]"')
pytestmark = pytest.mark.usefixtures("sidecars")

RANKS = ("trainer 0", "engine 0 rank 0", "engine 1 rank 0")
_shared: list[Sidecars] = []


@pytest.fixture(scope="module")
def sidecars(ray_cluster: None) -> Iterator[Sidecars]:
    started = Sidecars(timeout_s=30)
    started.addresses(dict.fromkeys(RANKS, identify()))
    _shared.append(started)
    yield started
    _shared.clear()
    started.close()


class TestShardedRdt(TransportSuite):
    transport = "sharded_rdt"

    def context(self, **settings: Any) -> LinkContext:
        addresses = _shared[0].addresses(dict.fromkeys(RANKS, identify()))
        return super().context(**({"helpers": tuple(addresses.values())} | settings))
