"""The worker extension: weightsync inside every vLLM worker process.

    vllm.LLM(..., worker_extension_cls="weightsync.ray_actors.vllm_worker.WeightSyncWorkerExtension")

vLLM mixes the class into its worker and refuses names that a worker has already, so every attribute starts with
`weightsync_`.
"""

from __future__ import annotations

from weightsync.engines.vllm import VllmAdapter
from weightsync.engines.vllm_state import weights_asleep
from weightsync.messages import answer
from weightsync.receiver import ReceiverRank


class WeightSyncWorkerExtension:
    """Called by `collective_rpc`."""

    weightsync_rank: ReceiverRank | None = None

    def weightsync_asleep(self) -> bool | None:
        """Whether the weights of this worker are asleep; None where vLLM does not tell."""
        return weights_asleep()

    def weightsync_handle(self, payload: bytes) -> bytes:
        """Answer one control message of `weightsync.messages`, bytes in and bytes out, so that no pickling is needed; never raises
        for what a message asks."""
        if self.weightsync_rank is None:
            adapter = VllmAdapter(self)
            self.weightsync_rank = ReceiverRank(adapter, rank=adapter.rank)
        return answer(self.weightsync_rank.handle, payload)
