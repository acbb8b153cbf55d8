"""Who a rank is: host, process, device and library versions, as agreed on before anything moves."""

from __future__ import annotations

import os
import socket
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import torch


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
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs this process may use."""


@cache
def package_version(name: str) -> str:
    """The installed version, "source" for a tree that runs uninstalled."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "source"


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/net")
    parts = [boot.read_text().strip() if boot.exists() else socket.gethostname()]
    parts.append(os.readlink(namespace) if namespace.is_symlink() else "")
    return "/".join(parts)


def identify(address: str = "127.0.0.1") -> Identity:
    """This process's identity; *address* is how other nodes reach its node."""
    gpus: tuple[str, ...] = ()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        gpus = tuple(str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count()))
    return Identity(
        host=socket.gethostname(),
        pid=os.getpid(),
        machine=_machine(),
        weightsync=package_version("weightsync"),
        torch=str(torch.__version__),
        python=".".join(map(str, sys.version_info[:3])),
        address=address,
        gpus=gpus,
    )
