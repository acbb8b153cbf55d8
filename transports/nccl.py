"""NCCL through ctypes: the few calls that a link's payload needs, in NCCL's non-blocking mode.

Why not torch's own ProcessGroupNCCL: it has a watchdog thread that may end the user's process when a collective is late, and
whether its waits block, and its abort works, hangs on environment variables that belong to the user's training job. Here
every call returns at once, whoever waits polls, with a bound, and a communicator that is stuck is aborted, kernel and all.

The library is the one that torch has loaded, or one that was preloaded in its place (libnccl.so.2). Nothing here runs, and
the library is not looked for, before a link has both ends on GPUs.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any

import torch

from weightsync.errors import TransportError

UNIQUE_ID_BYTES = 128
_MAGIC = 0xCAFEBEEF
_CONFIG_VERSION = 21800
_UNDEFINED = -(1 << 31)  # NCCL_CONFIG_UNDEF_INT
_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1


class UniqueId(ctypes.Structure):
    """ncclUniqueId; passed by value."""

    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


class Config(ctypes.Structure):
    """ncclConfig_t as of NCCL 2.18; later ones take it, since it says its size and version."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
        ("padding", ctypes.c_int),  # later versions have a field here
    )

    @classmethod
    def non_blocking(cls) -> Config:
        return cls(
            size=ctypes.sizeof(cls),
            magic=_MAGIC,
            version=_CONFIG_VERSION,
            blocking=0,
            cga_cluster_size=_UNDEFINED,
            min_ctas=_UNDEFINED,
            max_ctas=_UNDEFINED,
            net_name=None,
            split_share=_UNDEFINED,
            padding=_UNDEFINED,
        )


@cache
def _library() -> Any:
    try:
        library = ctypes.CDLL("libnccl.so.2")
        comm = ctypes.c_void_p
        for name, arguments in {
            "ncclGetUniqueId": (ctypes.POINTER(UniqueId),),
            "ncclCommInitRankConfig": (
                ctypes.POINTER(comm),
                ctypes.c_int,
                UniqueId,
                ctypes.c_int,
                ctypes.POINTER(Config),
            ),
            "ncclCommGetAsyncError": (comm, ctypes.POINTER(ctypes.c_int)),
            "ncclBroadcast": (
                ctypes.c_void_p,
                ctypes.c_void_p,
                ctypes.c_size_t,
                ctypes.c_int,
                ctypes.c_int,
                comm,
                ctypes.c_void_p,
            ),
            "ncclCommFinalize": (comm,),
            "ncclCommDestroy": (comm,),
            "ncclCommAbort": (comm,),
        }.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
        for name, argument in (("ncclGetErrorString", ctypes.c_int), ("ncclGetLastError", comm)):
            function = getattr(library, name)
            function.argtypes, function.restype = (argument,), ctypes.c_char_p
    except (OSError, AttributeError) as error:
        raise TransportError(f"no NCCL 2.18 or later can be loaded ({error})") from error
    return library


def new_unique_id() -> bytes:
    """What all ranks of a new communicator must be given."""
    found = UniqueId()
    _check("ncclGetUniqueId", _library().ncclGetUniqueId(ctypes.byref(found)))
    return bytes(found)


class Communicator:
    """One rank of one communicator, of which no call waits; any thread may call. It must be destroyed or aborted."""

    def __init__(self, unique_id: bytes, *, rank: int, size: int, device: torch.device) -> None:
        """Begin to join; `is_ready` says when it is done. Raises TransportError."""
        self._lock = threading.Lock()
        self._device = device
        self._handle = ctypes.c_void_p()
        self._config = Config.non_blocking()
        id_ = UniqueId.from_buffer_copy(unique_id)
        with torch.cuda.device(device):
            result = _library().ncclCommInitRankConfig(
                ctypes.byref(self._handle), size, id_, rank, ctypes.byref(self._config)
            )
        try:
            self._check("ncclCommInitRankConfig", result)
        except TransportError:
            self.abort()  # NCCL's own thread may still write the handle
            raise

    def is_ready(self) -> bool:
        """Whether what was called last has been done, or, where it is for a stream, been given to it.

        Raises:
            TransportError: it failed, or something has since, a peer's network connection for example.
        """
        state = ctypes.c_int()
        with self._lock:
            self._check("ncclCommGetAsyncError", self._call("ncclCommGetAsyncError", ctypes.byref(state)))
            self._check("what was begun", state.value)
        return state.value != _IN_PROGRESS

    def broadcast(self, address: int, nbytes: int, *, root: int, stream: torch.cuda.Stream) -> None:
        """Begin to give *stream* the broadcast of the bytes at *address*; nothing else may be given to it before
        `is_ready`."""
        with self._lock, torch.cuda.device(self._device):
            handle = self._of_live()
            result = _library().ncclBroadcast(address, address, nbytes, _UINT8, root, handle, stream.cuda_stream)
            self._check("ncclBroadcast", result)

    def finalize(self) -> None:
        """Begin to end what was given to streams; call `destroy` when `is_ready`."""
        with self._lock:
            self._check("ncclCommFinalize", self._call("ncclCommFinalize"))

    def destroy(self) -> None:
        """Free what is left after `finalize`."""
        with self._lock:
            result = self._call("ncclCommDestroy")
            self._handle = ctypes.c_void_p()
        _check("ncclCommDestroy", result)

    def abort(self) -> None:
        """End everything, kernels that run included; does not raise, may take long, idempotent."""
        with self._lock:
            if self._handle.value:
                with torch.cuda.device(self._device):
                    _library().ncclCommAbort(self._handle)
            self._handle = ctypes.c_void_p()

    def _of_live(self) -> ctypes.c_void_p:
        if not self._handle.value:
            raise TransportError("the NCCL communicator has ended")
        return self._handle

    def _call(self, name: str, *arguments: Any) -> int:
        return int(getattr(_library(), name)(self._of_live(), *arguments))

    def _check(self, what: str, result: int) -> None:
        _check(what, result, self._handle)


def _check(what: str, result: int, handle: ctypes.c_void_p | None = None) -> None:
    if result in (_SUCCESS, _IN_PROGRESS):
        return
    text = _library().ncclGetErrorString(result).decode(errors="replace")
    last = (_library().ncclGetLastError(handle) or b"").decode(errors="replace").strip()
    raise TransportError(f"NCCL: {what} failed: {text}" + (f" ({last})" if last else ""))
