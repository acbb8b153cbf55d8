"""What has become of a process, as the kernel tells it."""

from __future__ import annotations

import os
from pathlib import Path


def start_ticks(pid: int) -> int:
    """When the process started, in clock ticks since boot (proc(5)); 0 where that is unknown. Tells a process from a
    later one with the same pid."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def process_state(pid: int, started: int = 0) -> str:
    """ "running", "stopped" (SIGSTOP, or a debugger), "gone", or "unknown" where /proc does not tell.

    *started* is what `start_ticks` gave when the process was alive; a process that started at another time is another.
    """
    if not Path("/proc/self/stat").exists():
        return "unknown"
    fields = _stat(pid)
    if not fields or fields[0] in "ZX" or (started and int(fields[19]) != started):
        return "gone"
    return "stopped" if fields[0] in "Tt" else "running"


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third (state) on; the second may contain spaces."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def own_start_ticks() -> int:
    return start_ticks(os.getpid())
