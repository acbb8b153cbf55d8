"""What a process tells about itself when it is looked at: plain data, as it travels."""

from __future__ import annotations

import msgspec


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The GPU on which the rank's weights lie. Its UUID is in the rank's identity."""

    name: str
    device: str
    """As the process calls it: "cuda:0"."""
    nbytes: int
    free_bytes: int
    """As the driver has it; torch may hold more in its cache."""
    cached_bytes: int = 0
    """Reserved by torch and not in use."""
    expandable: bool = False
    """torch allocates in expandable segments, which other processes cannot map."""


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Measured by a small probe, bytes a second."""

    copy: float
    """Of memory where the weights lie."""
    digest: float
    copy_and_digest: float


class ProcessFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's process."""

    libraries: dict[str, str] = {}
    """Name -> version; "" where it is not installed."""
    code: str = ""
    """Digest of weightsync's source."""
    formats: dict[str, str] = {}
    """Digests of the types that travel: calls, replies, and the handles of each transport that has some."""
    namespaces: dict[str, str] = {}
    """Of the kernel's: "ipc", "mnt", "pid", "net"."""
    boot_id: str = ""
    """Equal for two processes under one kernel, in whichever containers."""
    user_id: int = 0
    cpus: int = 1
    """How many CPUs the process may use."""
    host_bytes: int = 0
    """Memory that the process may use: the machine's, or its cgroup's limit."""
    host_free_bytes: int = 0
    shm_bytes: int = 0
    """Size of /dev/shm; 0 where there is none."""
    shm_free_bytes: int = 0
    shm_device: int = 0
    """Tells one /dev/shm from another."""
    visible_gpus: str = ""
    """CUDA_VISIBLE_DEVICES; "" where it is not set."""
    num_gpus: int = 0
    """How many torch sees."""
    gpu: GpuFacts | None = None
    """None where the weights lie in CPU memory."""
    process_group: str = ""
    """Backend of torch.distributed's default group, "" where there is none."""
    shares_memory: bool = False
    """Trainers: the weights lie in shared memory, where engines can read them."""
    is_sharded: bool = False
    """Trainers: some weights are DTensors of which each rank has a part."""
    engine: dict[str, bool | int | str] = {}
    """Settings of the engine that matter for an update, where it has such."""
    refusal: str = ""
    """Why the engine cannot take an update as it is, with the cure."""
    rates: Rates | None = None
    """Where a probe was asked for."""
