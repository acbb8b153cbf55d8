"""A worker extension that also shows its load map, so that a test can look at each rank's slices."""

from __future__ import annotations

import msgspec

from weightsync.engines.vllm import VllmAdapter
from weightsync.manifest import Manifest
from weightsync.ray_actors.vllm_worker import WeightSyncWorkerExtension


class RecordingExtension(WeightSyncWorkerExtension):
    def weightsync_load_map(self, manifest: bytes) -> bytes:
        return msgspec.msgpack.encode(VllmAdapter(self).load_map(msgspec.msgpack.decode(manifest, type=Manifest)))
