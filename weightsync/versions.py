"""The durable log of versions: what was decided is never forgotten, and numbers are never used again.

JSON lines, one a decision, each on disk before the first engine hears of it. A last line that was cut off by a crash, or
by a disk that refused, was never acted upon and is dropped.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from pathlib import Path
from typing import Annotated

import msgspec

from weightsync.errors import ConfigError, EngineStateError

_LINE_STARTS = b'{"event":"'


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One line: a version was decided on (all ranks had voted for it), or was committed; or an epoch began."""

    event: Annotated[str, msgspec.Meta(pattern="^(epoch|decide|commit)$")]
    version: int
    epoch: int
    manifest_digest: str = ""
    time: float = 0.0


class VersionLog:
    """Append-only. Without a path it lives in memory, and versions survive only as long as some rank does."""

    def __init__(self, path: Path | None) -> None:
        """Open the log and read it.

        Raises:
            ConfigError: the file cannot be used, or holds something else. EngineStateError: another process has it.
        """
        self.decided = 0
        self.committed = 0
        self.epoch = 0
        self._fd = -1
        self._size = 0
        """Of what was written whole."""
        if path is not None:
            self._open(path)

    def _open(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise OSError(errno.EINVAL, "it is no regular file")
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read(path)
            _sync_folder(path.parent)
        except BlockingIOError as error:
            self.close()
            raise EngineStateError(f"{path}: another weight sync uses this version log; close it first") from error
        except OSError as error:
            self.close()
            raise ConfigError(f"version_log: {path} cannot be opened ({error.strerror})", key="version_log") from error
        except ConfigError:
            self.close()
            raise

    def _read(self, path: Path) -> None:
        text = path.read_bytes()
        self._size = text.rfind(b"\n") + 1
        lines = text[: self._size].splitlines()
        for number, line in enumerate(lines, start=1):
            try:
                self._note(msgspec.json.decode(line, type=Decision))
            except msgspec.MsgspecError as error:
                raise _foreign(path, number, str(error)) from error
        cut = text[self._size :].rstrip(b"\0")  # blocks of a file that grew just before a power cut may hold zeros
        if not (cut.startswith(_LINE_STARTS) or _LINE_STARTS.startswith(cut)):
            raise _foreign(path, len(lines) + 1, "it does not begin as one, and has no end")
        os.ftruncate(self._fd, self._size)

    def _note(self, decision: Decision) -> None:
        self.epoch = max(self.epoch, decision.epoch)
        if decision.event != "epoch":
            self.decided = max(self.decided, decision.version)
        if decision.event == "commit":
            self.committed = max(self.committed, decision.version)

    def write(self, event: str, *, version: int, epoch: int, manifest_digest: str = "") -> None:
        """Note "epoch", "decide" or "commit"; on disk when this returns. Raises OSError when the disk refuses."""
        decision = Decision(
            event=event, version=version, epoch=epoch, manifest_digest=manifest_digest, time=time.time()
        )
        if self._fd >= 0:
            self._append(msgspec.json.encode(decision) + b"\n")
        self._note(decision)

    def _append(self, line: bytes) -> None:
        """All of *line*, or, where the disk refuses, nothing that a later line could be taken for a part of."""
        try:
            os.ftruncate(self._fd, self._size)
            written = 0
            while written < len(line):
                written += os.pwrite(self._fd, line[written:], self._size + written)
            os.fdatasync(self._fd)
        except OSError:
            with contextlib.suppress(OSError):  # the next one begins with it
                os.ftruncate(self._fd, self._size)
            raise
        self._size += len(line)

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def _foreign(path: Path, line: int, why: str) -> ConfigError:
    text = f"version_log: {path}:{line}: not a line of a version log ({why})"
    return ConfigError(text, key="version_log", file=str(path), line=line)


def _sync_folder(folder: Path) -> None:
    """Have a file that was just made outlive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
