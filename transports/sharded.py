"""Slices over transports of whole tensors: a slice that an engine rank needs is a tensor of its own to them.

What receivers of a link take is the same for all of them, so ranks that take other slices have other links. Over cuda_ipc, and
over shared_memory where the trainer's parameters lie in such, a slice that is contiguous is read where the shard lies; others are
packed into the stage first.
"""

from __future__ import annotations

from typing import ClassVar

from weightsync.transports.broadcast import BroadcastReceiver, BroadcastSender
from weightsync.transports.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from weightsync.transports.shared_memory import SharedMemoryReceiver, SharedMemorySender


class ShardedSharedMemorySender(SharedMemorySender):
    name: ClassVar[str] = "sharded_shared_memory"
    takes_shards: ClassVar[bool] = True
    takes_boxes: ClassVar[bool] = True


class ShardedSharedMemoryReceiver(SharedMemoryReceiver):
    name: ClassVar[str] = "sharded_shared_memory"


class ShardedCudaIpcSender(CudaIpcSender):
    name: ClassVar[str] = "sharded_cuda_ipc"
    takes_shards: ClassVar[bool] = True
    takes_boxes: ClassVar[bool] = True


class ShardedCudaIpcReceiver(CudaIpcReceiver):
    name: ClassVar[str] = "sharded_cuda_ipc"


class ShardedBroadcastSender(BroadcastSender):
    name: ClassVar[str] = "sharded_broadcast"
    takes_shards: ClassVar[bool] = True
    takes_boxes: ClassVar[bool] = True


class ShardedBroadcastReceiver(BroadcastReceiver):
    name: ClassVar[str] = "sharded_broadcast"
