"""What has become of a process, tried on real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightsync.process import own_start_ticks, process_state, start_ticks


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def wait_for(pid: int, state: str) -> None:
    """Signals take a moment."""
    deadline = time.monotonic() + 5
    while process_state(pid) != state and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process_state(pid) == state


def test_this_process_runs() -> None:
    assert process_state(os.getpid(), own_start_ticks()) == "running"
    assert own_start_ticks() == start_ticks(os.getpid()) > 0


def test_a_process_is_running_then_stopped_then_running_then_gone(child: subprocess.Popen[bytes]) -> None:
    started = start_ticks(child.pid)
    assert process_state(child.pid, started) == "running"
    child.send_signal(signal.SIGSTOP)
    wait_for(child.pid, "stopped")
    assert process_state(child.pid, started) == "stopped"
    child.send_signal(signal.SIGCONT)
    wait_for(child.pid, "running")
    child.kill()
    child.wait()
    assert process_state(child.pid, started) == "gone"


def test_a_process_that_died_and_was_not_waited_for_is_gone(child: subprocess.Popen[bytes]) -> None:
    started = start_ticks(child.pid)
    child.kill()
    wait_for(child.pid, "gone")
    assert Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    assert process_state(child.pid, started) == "gone"


def test_another_process_under_the_same_pid_is_not_the_one_that_was_meant(child: subprocess.Popen[bytes]) -> None:
    started = start_ticks(child.pid)
    assert process_state(child.pid, started - 1) == "gone"
    assert process_state(child.pid, started) == "running"
    assert process_state(child.pid) == "running", "nobody said when it started"


def test_a_later_process_started_later() -> None:
    assert start_ticks(1) <= own_start_ticks()


def test_a_pid_that_nobody_has_is_gone_and_started_never() -> None:
    nobody = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    assert process_state(nobody) == "gone"
    assert start_ticks(nobody) == 0


def test_a_name_with_spaces_and_parentheses_does_not_confuse(tmp_path: Path) -> None:
    odd = tmp_path / "a) Z (b"
    odd.symlink_to("/bin/sleep")
    process = subprocess.Popen([str(odd), "60"])
    try:
        wait_for(process.pid, "running")
        assert "a) Z (b" in Path(f"/proc/{process.pid}/stat").read_text()
        assert process_state(process.pid, start_ticks(process.pid)) == "running"
    finally:
        process.kill()
        process.wait()
