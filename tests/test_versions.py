"""The durable log of versions: what was decided outlives the process, and nothing else passes for it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.errors import ConfigError, EngineStateError
from weightsync.versions import VersionLog


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "versions"


def written(path: Path) -> bytes:
    """A log of two committed versions and one that was only decided; returns its text."""
    log = VersionLog(path)
    log.write("epoch", version=0, epoch=1)
    for version in (1, 2):
        log.write("decide", version=version, epoch=1, manifest_digest="abc")
        log.write("commit", version=version, epoch=1, manifest_digest="abc")
    log.write("decide", version=3, epoch=2)
    log.close()
    return path.read_bytes()


def found(path: Path) -> tuple[int, int, int]:
    """(decided, committed, epoch) as the next coordinator reads them."""
    log = VersionLog(path)
    log.close()
    return (log.decided, log.committed, log.epoch)


def test_what_was_written_is_found_again(path: Path) -> None:
    written(path)
    for _ in range(2):
        assert found(path) == (3, 2, 2)


def test_an_epoch_alone_decides_nothing(path: Path) -> None:
    log = VersionLog(path)
    log.write("epoch", version=9, epoch=4)
    log.close()
    assert found(path) == (0, 0, 4)


def test_without_a_path_it_lives_in_memory(tmp_path: Path) -> None:
    log = VersionLog(None)
    log.write("decide", version=1, epoch=1)
    log.write("commit", version=1, epoch=1)
    assert (log.decided, log.committed, log.epoch) == (1, 1, 1)
    log.close()
    assert not list(tmp_path.iterdir())


def test_a_last_line_that_was_cut_off_anywhere_is_dropped_and_the_next_takes_its_place(path: Path) -> None:
    text = written(path)
    last = text[:-1].rfind(b"\n") + 1
    for size in range(last, len(text)):
        path.write_bytes(text[:size])
        log = VersionLog(path)
        assert (log.decided, log.committed, log.epoch) == (2, 2, 1)
        log.write("decide", version=3, epoch=5)
        log.close()
        assert path.read_bytes().startswith(text[:last])
        assert found(path) == (3, 2, 5)


def test_zeros_where_a_power_cut_left_no_line_are_dropped(path: Path) -> None:
    text = written(path)
    for cut in (b"\0" * 50, b'{"event":"dec' + b"\0" * 50):
        path.write_bytes(text + cut)
        assert found(path) == (3, 2, 2)
        assert path.read_bytes() == text


@given(st.lists(st.tuples(st.sampled_from(["epoch", "decide", "commit"]), st.integers(0, 9), st.integers(0, 9))))
def test_numbers_only_grow_whatever_is_written(events: list[tuple[str, int, int]]) -> None:
    log, seen = VersionLog(None), (0, 0, 0)
    for event, version, epoch in events:
        log.write(event, version=version, epoch=epoch)
        now = (log.decided, log.committed, log.epoch)
        assert all(new >= old for new, old in zip(now, seen, strict=True))
        assert log.decided >= log.committed
        seen = now


@pytest.mark.parametrize(
    "line",
    [
        b"transport: broadcast",
        b'{"event":"commit"}',
        b'{"event":"publish","version":3,"epoch":1}',
        b'{"event":"commit","version":"3","epoch":1}',
        b'{"event":"comm\xff\xfe","version":3,"epoch":1}',
        b"[]",
        b"",
        b"\0" * 20,
    ],
)
@pytest.mark.parametrize("before", [0, 2])
def test_a_file_that_holds_something_else_is_refused_with_the_line_and_left_as_it_is(
    path: Path, line: bytes, before: int
) -> None:
    text = b"".join(written(path).splitlines(keepends=True)[:before]) + line + b"\n"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=f"{path}:{before + 1}: not a line of a version log") as caught:
        VersionLog(path)
    assert (caught.value.file, caught.value.line, caught.value.key) == (str(path), before + 1, "version_log")
    assert path.read_bytes() == text


def test_a_foreign_file_without_an_end_of_line_is_no_cut_off_log(path: Path) -> None:
    path.write_bytes(b"weights that nobody has a copy of")
    with pytest.raises(ConfigError, match=f"{path}:1: not a line of a version log"):
        VersionLog(path)
    assert path.read_bytes() == b"weights that nobody has a copy of"


@pytest.mark.parametrize(
    "prepare", [lambda p: p.mkdir(), lambda p: os.mkfifo(p), lambda p: p.symlink_to(p.parent / "no" / "where")]
)
def test_a_path_that_cannot_be_a_log_is_refused(path: Path, prepare: Callable[[Path], None]) -> None:
    prepare(path)
    with pytest.raises(ConfigError, match=f"version_log: {path} cannot be opened") as caught:
        VersionLog(path)
    assert caught.value.key == "version_log"


def test_a_refused_log_can_be_opened_once_the_reason_is_gone(path: Path) -> None:
    path.write_bytes(b"something else\n")
    with pytest.raises(ConfigError):
        VersionLog(path)
    path.unlink()
    assert found(path) == (0, 0, 0)


def test_two_weight_syncs_of_one_process_cannot_share_a_log(path: Path) -> None:
    log = VersionLog(path)
    with pytest.raises(EngineStateError, match="another weight sync uses this version log"):
        VersionLog(path)
    log.write("decide", version=1, epoch=1)
    log.close()
    assert found(path) == (1, 0, 1)


def test_a_log_that_another_process_holds_is_refused_until_that_process_ends_however_it_ends(path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from weightsync.versions import VersionLog\n"
        "log = VersionLog(Path(sys.argv[1])); log.write('decide', version=7, epoch=2); print(flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    try:
        holder.stdout.readline()
        with pytest.raises(EngineStateError, match="another weight sync uses this version log"):
            VersionLog(path)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert found(path) == (7, 0, 2)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def test_closing_is_idempotent_and_frees_the_log(path: Path) -> None:
    log = VersionLog(path)
    log.close()
    log.close()
    assert found(path) == (0, 0, 0)


@pytest.mark.parametrize("room", [0, 20])
def test_a_full_disk_decides_nothing_and_leaves_nothing_that_a_later_line_runs_into(
    path: Path, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = written(path)
    log, pwrite = VersionLog(path), os.pwrite

    def full(fd: int, data: bytes, offset: int) -> int:
        if not (left := room - (offset - len(text))):
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(fd, data[:left], offset)

    monkeypatch.setattr(os, "pwrite", full)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            log.write("decide", version=4, epoch=3)
        assert (log.decided, log.committed, log.epoch) == (3, 2, 2)
    assert path.read_bytes() == text
    monkeypatch.undo()
    log.write("decide", version=4, epoch=3)
    log.close()
    assert found(path) == (4, 2, 3)


def test_a_line_that_was_written_but_not_synced_was_not_decided(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = written(path)
    log = VersionLog(path)

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", broken)
    with pytest.raises(OSError, match="Input/output error"):
        log.write("decide", version=4, epoch=3)
    assert log.decided == 3
    log.close()
    assert path.read_bytes() == text


def test_a_line_that_the_disk_takes_in_pieces_is_written_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:7], offset))
    written(path)
    assert found(path) == (3, 2, 2)


def test_each_line_is_on_disk_before_write_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(path.read_bytes()))
    written(path)
    assert [text.count(b"\n") for text in synced] == [1, 2, 3, 4, 5, 6]
