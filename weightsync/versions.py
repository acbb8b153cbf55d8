"""The durable log of versions: what was decided is never forgotten, and numbers are never used again.

JSON lines, one a decision, each on disk before the first engine hears of it. A last line that was cut off by a crash was
never acted upon and is dropped.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import msgspec

from weightsync.errors import ConfigError, EngineStateError


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One line: a version was decided on (all ranks had voted for it), or was committed; or an epoch began."""

    event: str
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
        self._path, self._fd = path, -1
        if path is not None:
            self._open(path)

    def _open(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._fd)
            raise EngineStateError(f"{path}: another weight sync uses this version log; close it first") from error
        except OSError as error:
            raise ConfigError(f"version_log: {path} cannot be opened ({error.strerror})", key="version_log") from error
        text = path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                self._note(msgspec.json.decode(line, type=Decision))
            except msgspec.MsgspecError as error:
                os.close(self._fd)
                raise ConfigError(
                    f"version_log: {path}:{number}: not a line of a version log ({error})",
                    key="version_log",
                    file=str(path),
                    line=number,
                ) from error
        os.ftruncate(self._fd, len(whole))

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
            os.lseek(self._fd, 0, os.SEEK_END)
            os.write(self._fd, msgspec.json.encode(decision) + b"\n")
            os.fdatasync(self._fd)
        self._note(decision)

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
