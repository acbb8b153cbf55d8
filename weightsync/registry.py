"""Transports by name. The module of a transport is imported only when it is chosen."""

from __future__ import annotations

import inspect
import pkgutil
from importlib.metadata import entry_points

from weightsync.errors import ConfigError
from weightsync.interfaces import ReceiverTransport, SenderTransport

# Entry points (group "weightsync.transports") serve third parties only: they do not exist in a tree that Ray
# shipped and nobody installed.
_BUILT_IN: dict[str, tuple[str, str]] = {
    "shared_memory": (
        "weightsync.transports.shared_memory:SharedMemorySender",
        "weightsync.transports.shared_memory:SharedMemoryReceiver",
    ),
    "cuda_ipc": (
        "weightsync.transports.cuda_ipc:CudaIpcSender",
        "weightsync.transports.cuda_ipc:CudaIpcReceiver",
    ),
    "broadcast": (
        "weightsync.transports.broadcast:BroadcastSender",
        "weightsync.transports.broadcast:BroadcastReceiver",
    ),
    "sharded_shared_memory": (
        "weightsync.transports.sharded:ShardedSharedMemorySender",
        "weightsync.transports.sharded:ShardedSharedMemoryReceiver",
    ),
    "sharded_cuda_ipc": (
        "weightsync.transports.sharded:ShardedCudaIpcSender",
        "weightsync.transports.sharded:ShardedCudaIpcReceiver",
    ),
    "sharded_broadcast": (
        "weightsync.transports.sharded:ShardedBroadcastSender",
        "weightsync.transports.sharded:ShardedBroadcastReceiver",
    ),
    "sharded_rdt": (
        "weightsync.transports.sharded_rdt:ShardedRdtSender",
        "weightsync.transports.sharded_rdt:ShardedRdtReceiver",
    ),
}
_registered: dict[str, tuple[type[SenderTransport], type[ReceiverTransport]]] = {}


def transport_names() -> list[str]:
    """All known names, third parties' included."""
    points = entry_points(group="weightsync.transports")
    return sorted(_BUILT_IN.keys() | _registered.keys() | {point.name for point in points})


def register_transport(name: str, sender: type[SenderTransport], receiver: type[ReceiverTransport]) -> None:
    """Make a transport known by *name* in this process, in place of any other of that name.

    Every process that holds an end of a link looks the name up for itself, so each trainer and engine rank, and the
    process that reads the configuration, has to call this. A package that offers an entry point need not.

    Raises:
        ConfigError: the classes are not a whole sender and a whole receiver, or the name is not to be had.
    """
    if not name or name == "auto":
        raise ConfigError(f"transport: a transport cannot be called {name!r}", key="transport")
    for kind, base in ((sender, SenderTransport), (receiver, ReceiverTransport)):
        if not (isinstance(kind, type) and issubclass(kind, base)):
            raise ConfigError(f"transport {name!r}: {kind!r} is no subclass of {base.__name__}", key="transport")
        if inspect.isabstract(kind):
            missing = ", ".join(sorted(kind.__abstractmethods__))
            raise ConfigError(f"transport {name!r}: {kind.__name__} lacks {missing}", key="transport")
    _registered[name] = sender, receiver


def unregister_transport(name: str) -> None:
    """Forget what `register_transport` made known; another of that name is known again."""
    _registered.pop(name, None)


def is_transport(name: str) -> bool:
    """Whether a transport has this name. Asked for every pair of ranks; what is installed is looked through, which takes
    milliseconds, for a third party's only."""
    return name in _BUILT_IN or name in _registered or bool(entry_points(group="weightsync.transports", name=name))


def check_transport(name: str) -> None:
    """Raises ConfigError where no transport has this name; the known ones are listed."""
    if not is_transport(name):
        raise ConfigError(
            f"transport: unknown transport {name!r}; known: auto, {', '.join(transport_names())}", key="transport"
        )


def takes_shards(name: str) -> bool:
    """Whether the transport of this name takes shards; "auto" chooses none that does."""
    return name != "auto" and transport_classes(name)[0].takes_shards


def takes_boxes(name: str) -> bool:
    """Whether links of this transport are apart where their receivers take different slices."""
    return transport_classes(name)[0].takes_boxes


def carrier_of(name: str) -> str:
    """The transport of whole tensors that this one gives slices to; itself, where it does not."""
    return name.removeprefix("sharded_") if takes_boxes(name) else name


def needs_helpers(name: str) -> bool:
    """Whether links of this transport need helper processes."""
    return transport_classes(name)[0].needs_helpers


def transport_classes(name: str) -> tuple[type[SenderTransport], type[ReceiverTransport]]:
    """(sender class, receiver class) of a transport.

    A third party's entry point names a function or constant that is such a pair.

    Raises:
        ConfigError: no transport has this name; the known ones are listed.
    """
    if name in _registered:
        return _registered[name]
    if name in _BUILT_IN:
        sender, receiver = map(pkgutil.resolve_name, _BUILT_IN[name])
        return sender, receiver
    for point in entry_points(group="weightsync.transports", name=name):
        sender, receiver = point.load()
        return sender, receiver
    check_transport(name)
    raise AssertionError(name)
