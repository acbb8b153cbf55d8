"""`weightsync doctor` as a user runs it: what is printed, exit codes, and that nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from weightsync.cli import main
from weightsync.doctor.finding import Finding
from weightsync.doctor.run import failed_start
from weightsync.ray_actors.pipeline_fleet import RunError

ROOT = Path(__file__).parents[2]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """From the repository's root, where the examples are imported from; *folder* marks its processes."""
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.Popen(
        [sys.executable, "-m", "weightsync", "doctor", arguments[0], f"run.out={folder}/out", *arguments[1:]],
        cwd=ROOT,
        env=env | {"DOCTOR_TEST": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def left_of(folder: Path) -> list[str]:
    """Command lines of living processes that inherited the mark."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"DOCTOR_TEST={folder}".encode() in (entry / "environ").read_bytes().split(
                b"\0"
            ):
                found.append((entry / "cmdline").read_text().replace("\0", " ")[:100])
        except OSError:
            continue
    return found


def gone_within(folder: Path, seconds: float) -> list[str]:
    deadline = time.monotonic() + seconds
    while (left := left_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def test_examples_are_well_a_fault_is_red_and_a_signal_ends_it(tmp_path: Path) -> None:
    """All at the same time, since each starts a Ray."""
    folders = {name: tmp_path / name for name in ("well", "sharded", "ill", "stopped")}
    for folder in folders.values():
        folder.mkdir()
    well = start(folders["well"], "examples/pipelines/torch_only.yaml", "--json")
    sharded = start(folders["sharded"], "examples/pipelines/sharded_rdt.yaml")
    ill = start(folders["ill"], "examples/pipelines/torch_only.yaml", "engines.arguments={seed: many}")
    stopped = start(folders["stopped"], "examples/pipelines/torch_only.yaml")
    runs = (well, sharded, ill, stopped)
    try:
        check_runs(*runs)
    finally:
        for run in runs:  # where one is not as expected, the others must not be left
            run.terminate()
            run.communicate(timeout=60)
    for folder in folders.values():
        assert gone_within(folder, 20) == []
        assert list(folder.iterdir()) == []  # no records: nothing was run


SLOW = "for a call that does nothing"
"""Four at once on two cores may be told so."""


def check_runs(
    well: subprocess.Popen[str],
    sharded: subprocess.Popen[str],
    ill: subprocess.Popen[str],
    stopped: subprocess.Popen[str],
) -> None:
    assert stopped.stderr is not None
    while (line := stopped.stderr.readline()) and "a local Ray" not in line:
        pass
    stopped.send_signal(signal.SIGTERM)

    output, errors = well.communicate(timeout=200)
    assert well.returncode == 0, errors
    findings = [Finding(**finding) for finding in json.loads(output)]
    assert all(finding.level == "green" or SLOW in finding.found for finding in findings), output
    assert {finding.topic for finding in findings} == {
        "start", "versions", "gpus", "transports", "engines", "weights", "memory", "estimate"
    }  # fmt: skip

    output, errors = sharded.communicate(timeout=200)
    assert sharded.returncode == 0, errors
    assert re.fullmatch(r"\d+ green, \d+ yellow, 0 red", output.splitlines()[-1]), output
    assert all(" took " in line for line in output.splitlines() if line.startswith("  yellow")), output
    assert "sharded_rdt for trainer 0 -> engine 0 rank 0, trainer 0 -> engine 1 rank 0, " in output

    output, errors = ill.communicate(timeout=200)
    assert ill.returncode == 1, errors
    assert "Traceback" not in output + errors
    assert re.search(r"^  red     engine [01]  ValueError: .*'many'", output, re.MULTILINE), output
    assert "cure: mend what the engine does when it is made, or engines.arguments" in output
    assert output.splitlines()[-1] == "0 green, 0 yellow, 1 red"

    _, errors = stopped.communicate(timeout=200)
    assert stopped.returncode == 143, errors
    assert errors.splitlines()[-1].startswith("stopped by SIGTERM at "), errors


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_mistake_in_the_file_ends_with_2_and_nothing_started(
    tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pipeline.yaml"
    path.write_text("trainer: {class: nowhere:Trainer}\nengines: {kind: torch, replicas: two}\nrun: {steps: 1}\n")
    assert main(["doctor", str(path), *flags]) == 2
    told = capsys.readouterr()
    assert "engines.replicas: is 'two'; expected int >= 1" in told.err
    if flags:
        (finding,) = json.loads(told.out)
        assert (finding["topic"], finding["check"], finding["level"]) == ("file", "engines.replicas", "red")
    else:
        assert told.out == ""


@pytest.mark.parametrize(
    ("who", "why", "party", "cure"),
    [
        ("Ray", "no room for {'GPU': 1} within 300 s; available: {'CPU': 2}", "", "lower trainer.ranks"),
        ("Ray", "the pipeline needs 2 GPUs, this machine has 0; see resources.num_gpus", "", "lower trainer.ranks"),
        ("Ray", "cannot connect to RAY_ADDRESS=a:1: ConnectionError", "", "unset RAY_ADDRESS"),
        ("model.make", "OSError: no network", "", "mend the function that model.make names"),
        ("trainer 1", "ModuleNotFoundError: No module named 'peft'", "trainer 1", "install it"),
        ("trainer 1", "ValueError: no (a.py:3 in __init__)", "trainer 1", "mend what trainer.class does"),
        ("engine 0", "torch.OutOfMemoryError: CUDA out of memory", "engine 0", "gpu_memory_utilization"),
        ("engine 0", "its process is gone: The actor died", "engine 0", "Ray's logs"),
    ],
)  # fmt: skip
def test_a_start_that_fails_is_a_red_line_with_a_cure(who: str, why: str, party: str, cure: str) -> None:
    finding = failed_start(RunError(who, why))
    assert (finding.topic, finding.check, finding.level, finding.party) == ("start", who, "red", party)
    assert finding.found == why
    assert cure in finding.cure
