"""A worker extension that also shows its load map, and that lets a test plant a fault in its next apply."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from weightsync.engines.vllm import VllmAdapter
from weightsync.manifest import Manifest
from weightsync.ray_actors.vllm_worker import WeightSyncWorkerExtension
from weightsync.receiver import ReceiverRank


class FaultyAdapter(VllmAdapter):
    fault: tuple[str, int] | None = None

    def apply(self, groups: Iterable[Iterable[tuple[str, Any]]]) -> int:
        fault, self.fault = self.fault, None
        return super().apply(groups if fault is None else self._faulty(groups, *fault))

    def _faulty(self, groups: Iterable[Iterable[tuple[str, Any]]], kind: str, at: int) -> Iterator[Any]:
        for i, group in enumerate(groups):
            if i == at:
                if kind == "raise":
                    raise RuntimeError("planted")
                if kind == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(float(kind))
            yield group


class RecordingExtension(WeightSyncWorkerExtension):
    def weightsync_handle(self, payload: bytes) -> bytes:
        if self.weightsync_rank is None:
            adapter = FaultyAdapter(self)
            self.weightsync_rank = ReceiverRank(adapter, rank=adapter.rank)
        return super().weightsync_handle(payload)

    def weightsync_load_map(self, manifest: bytes) -> bytes:
        return msgspec.msgpack.encode(VllmAdapter(self).load_map(msgspec.msgpack.decode(manifest, type=Manifest)))

    def weightsync_plant(self, rank: int, kind: str, at: int) -> None:
        """In the next apply on *rank*, before group *at*: "raise", "die", or seconds to wait."""
        receiver: Any = self.weightsync_rank
        if receiver._rank == rank:
            receiver._adapter.fault = (kind, at)
