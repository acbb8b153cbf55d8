"""Slices over transports of whole tensors: a slice that an engine rank needs is a tensor of its own to them.

What receivers of a link take is the same for all of them, so ranks that take other slices have other links. Over cuda_ipc, and
over shared_memory where the trainer's parameters lie in such, a slice that is contiguous is read where the shard lies; others are
packed into the stage first.
"""

from __future__ import annotations

from typing import ClassVar

from weightsync.interfaces import SenderTransport
from weightsync.transports.broadcast import BroadcastReceiver, BroadcastSender
from weightsync.transports.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from weightsync.transports.shared_memory import SharedMemoryReceiver, SharedMemorySender


class _TakesBoxes(SenderTransport):
    takes_shards: ClassVar[bool] = True
    takes_boxes: ClassVar[bool] = True


class ShardedSharedMemorySender(_TakesBoxes, SharedMemorySender):
    name: ClassVar[str] = "sharded_shared_memory"


class ShardedSharedMemoryReceiver(SharedMemoryReceiver):
    name: ClassVar[str] = "sharded_shared_memory"


class ShardedCudaIpcSender(_TakesBoxes, CudaIpcSender):
    name: ClassVar[str] = "sharded_cuda_ipc"


class ShardedCudaIpcReceiver(CudaIpcReceiver):
    name: ClassVar[str] = "sharded_cuda_ipc"


class ShardedBroadcastSender(_TakesBoxes, BroadcastSender):
    name: ClassVar[str] = "sharded_broadcast"


class ShardedBroadcastReceiver(BroadcastReceiver):
    name: ClassVar[str] = "sharded_broadcast"
