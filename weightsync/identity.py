"""Who a rank is: host, process, device and library versions, as agreed on before anything moves."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import torch

from weightsync.errors import AgreementError
from weightsync.process import own_start_ticks


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """One process. `machine` is equal for two processes exactly when they share a kernel and network namespace."""

    host: str
    pid: int
    machine: str
    weightsync: str
    torch: str
    python: str
    address: str = "127.0.0.1"
    """How other nodes reach this one."""
    gpu: str = ""
    """UUID of the GPU on which the rank's weights lie; "" for the CPU."""
    reaches: tuple[str, ...] = ()
    """UUIDs of the other GPUs whose memory that GPU reads directly, of those that the process sees."""
    cupy: str = ""
    """Version of cupy, "" where there is none; looked for where the weights lie on a GPU."""
    nccl: str = ""
    """Version of NCCL, "" where there is none; looked for where the weights lie on a GPU, as its environment is."""
    nccl_env: dict[str, str] = {}
    """Those of `NCCL_VARIABLES` that are set to other than their default."""
    node: str = ""
    """Id of the Ray node, "" outside Ray."""
    pids: str = ""
    """The namespace in which `pid` is one: containers that share a network may count processes each for itself."""
    started: int = 0
    """When the process started, in clock ticks since boot; tells it from a later one with the same pid."""

    @property
    def pid_space(self) -> str:
        """Equal for processes that know each other by their pids."""
        return f"{self.machine}/{self.pids}"

    def __str__(self) -> str:
        node = f"node {self.node[:8]}, " if self.node else ""
        return f"{node}host {self.host}, pid {self.pid}"


@cache
def package_version(name: str) -> str:
    """The installed version, "source" for a tree that runs uninstalled."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "source"


NCCL_VARIABLES = (
    # How two ranks reach each other: each end of a connection chooses by itself, and must come to the same.
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_P2P_DIRECT_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_IB_DISABLE",
    "NCCL_NET",
    "NCCL_NET_PLUGIN",
    "NCCL_PXN_DISABLE",
    "NCCL_NVB_DISABLE",
    "NCCL_MNNVL_ENABLE",
    "NCCL_COLLNET_ENABLE",
    # How memory is allocated and exported to peers: one end cannot open what the other made in another way. Some releases
    # of vLLM set the first in their workers, and a trainer that does not differs from them.
    "NCCL_CUMEM_ENABLE",
    "NCCL_CUMEM_HOST_ENABLE",
    "NCCL_NVLS_ENABLE",
    "NCCL_LOCAL_REGISTER",
    # What every rank must compute alike: algorithm, protocol, and how the bytes are cut.
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_BUFFSIZE",
    "NCCL_LL_BUFFSIZE",
    "NCCL_LL128_BUFFSIZE",
    "NCCL_NTHREADS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS",
    # By which a link chooses between NCCL and gloo: whether ranks may share a GPU, and whether calls wait.
    "NCCL_MULTI_RANK_GPU_ENABLE",
    "NCCL_COMM_BLOCKING",
)
"""Variables by which NCCL hangs, fails or crashes where they differ between the ranks of a communicator."""

_OFF_BY_DEFAULT = ("_DISABLE", "NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_COMM_BLOCKING")


def nccl_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Those of `NCCL_VARIABLES` that are set in *environment*, without those set to their default."""
    found = {name: environment[name].strip() for name in NCCL_VARIABLES if name in environment}
    return {name: value for name, value in found.items() if not (value == "0" and name.endswith(_OFF_BY_DEFAULT))}


@cache
def nccl_version() -> str:
    """Of the NCCL that this process has loaded, or would load; "" where there is none."""
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return ""
    return "" if failed else format_nccl_version(number.value)


def format_nccl_version(number: int) -> str:
    """As NCCL encodes it: 21805 is 2.18.5; before 2.9 it was 2804."""
    major, rest = divmod(number, 10_000 if number >= 10_000 else 1_000)
    return f"{major}.{rest // 100}.{rest % 100}"


@cache
def cupy_version() -> str:
    """Of the cupy that this process can import; "" where there is none."""
    try:
        import cupy
    except ImportError:
        return ""
    return str(cupy.__version__)


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip() if boot.exists() else socket.gethostname()}/{_namespace('net')}"


def _namespace(kind: str) -> str:
    path = Path("/proc/self/ns") / kind
    return os.readlink(path) if path.is_symlink() else ""


def identify(address: str = "127.0.0.1", node: str = "") -> Identity:
    """This process's identity; *address* is how other nodes reach its node, *node* the node's id."""
    return Identity(
        host=socket.gethostname(),
        pid=os.getpid(),
        machine=_machine(),
        weightsync=package_version("weightsync"),
        torch=str(torch.__version__),
        python=".".join(map(str, sys.version_info[:3])),
        address=address,
        node=node,
        pids=_namespace("pid"),
        started=own_start_ticks(),
    )


def on_device(identity: Identity, device: torch.device) -> Identity:
    """The identity of a rank whose weights lie on *device*."""
    if device.type != "cuda":
        return msgspec.structs.replace(identity, gpu="", reaches=(), cupy="", nccl="", nccl_env={})
    index = torch.cuda.current_device() if device.index is None else device.index
    return msgspec.structs.replace(
        identity,
        gpu=_gpu(index),
        reaches=tuple(
            _gpu(other)
            for other in range(torch.cuda.device_count())
            if other != index and torch.cuda.can_device_access_peer(index, other)
        ),
        cupy=cupy_version(),
        nccl=nccl_version(),
        nccl_env=nccl_environment(os.environ),
    )


def _gpu(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def check_versions(ranks: Mapping[str, Identity]) -> None:
    """Refuse processes whose libraries do not understand each other.

    Raises:
        AgreementError: weightsync differs, or the minor version of torch; both ranks are named.
    """
    for field, part in (("weightsync", None), ("torch", 2)):
        first: tuple[str, str] | None = None
        for rank, identity in ranks.items():
            found = getattr(identity, field)
            key = ".".join(found.split(".")[:part])
            if first is None:
                first = rank, found
                wanted = key
            elif key != wanted:
                raise AgreementError(
                    f"{rank} ({identity}) runs {field} {found}, {first[0]} runs {first[1]}; install the same everywhere",
                    rank=rank,
                    field=field,
                )


def check_nccl(ranks: Mapping[str, Identity]) -> None:
    """Refuse ranks that cannot be of one NCCL communicator: that hangs or crashes, seldom says why, and may do so late.

    Raises:
        AgreementError: NCCL's version or environment differs, or only some have cupy; both ranks and values are named.
    """
    first = next(iter(ranks), "")
    for rank, identity in ranks.items():
        ours = ranks[first]
        installed = (
            ("nccl", "NCCL", identity.nccl, ours.nccl),
            ("cupy", "cupy", identity.cupy and "installed", ours.cupy and "installed"),
        )
        for field, what, theirs, wanted in installed:
            if theirs != wanted:
                raise AgreementError(
                    f"{rank} ({identity}) has {_having(what, theirs)}, {first} has {_having(what, wanted)}; the link between "
                    "their GPUs needs the same: install it everywhere",
                    rank=rank,
                    field=field,
                )
        for name in NCCL_VARIABLES:
            theirs, wanted = identity.nccl_env.get(name, ""), ours.nccl_env.get(name, "")
            if theirs != wanted:
                raise AgreementError(
                    f"{rank} ({identity}) has {name} {theirs or 'not set'}, {first} has {wanted or 'it not set'}; ranks of one "
                    "NCCL communicator need the same: set it before the processes start",
                    rank=rank,
                    field=name,
                )


def _having(what: str, version: str) -> str:
    return f"{what} {version}" if version else f"no {what}"
