"""Slices over real NIXL between real Ray actors: the transport's contract, and the traps of RDT."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from weightsync.identity import identify
from weightsync.interfaces import LinkContext
from weightsync.testing import TransportSuite
from weightsync.transports.sidecar import Sidecars

RANKS = ("trainer 0", "engine 0 rank 0", "engine 1 rank 0")


class TestShardedRdt(TransportSuite):
    transport = "sharded_rdt"
    sidecars: ClassVar[Sidecars]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _have_sidecars(cls, sidecars: Sidecars) -> None:
        cls.sidecars = sidecars

    def context(self, **settings: Any) -> LinkContext:
        addresses = self.sidecars.addresses(dict.fromkeys(RANKS, identify()))
        return super().context(**({"helpers": tuple(addresses.values())} | settings))
