"""Who a rank is: host, process, device and library versions, as agreed on before anything moves."""

from __future__ import annotations

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
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs this process may use."""
    node: str = ""
    """Id of the Ray node, "" outside Ray."""
    started: int = 0
    """When the process started, in clock ticks since boot; tells it from a later one with the same pid."""

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


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/net")
    parts = [boot.read_text().strip() if boot.exists() else socket.gethostname()]
    parts.append(os.readlink(namespace) if namespace.is_symlink() else "")
    return "/".join(parts)


def identify(address: str = "127.0.0.1", node: str = "") -> Identity:
    """This process's identity; *address* is how other nodes reach its node, *node* the node's id."""
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
        node=node,
        started=own_start_ticks(),
    )


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
