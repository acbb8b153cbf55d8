"""Pipelines on a real local Ray, as a user runs them: files, exactness, exit codes, signals."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from weightsync.pipeline.stopping import Stopping

PARTS = Path(__file__).parent
ROOT = PARTS.parents[1]


def written(folder: Path, *, trainer: str = "Trainer", arguments: str = "", replicas: int = 2) -> Path:
    """A pipeline in a folder of its own, beside a module `mine` that its trainer is imported from."""
    (folder / "mine.py").write_text((PARTS / "pipeline_parts.py").read_text())
    own = f"{{folder: {folder}{arguments}}}" if trainer == "Trainer" else "{}"
    path = folder / "pipeline.yaml"
    path.write_text(
        f"trainer:\n  class: mine:{trainer}\n  arguments: {own}\n"
        f"engines:\n  kind: torch\n  class: mine:Engine\n  replicas: {replicas}\n  arguments: {{folder: {folder}}}\n"
        "  sampling: {scale: 2.0}\n"
        "sync: {timeout_s: 60}\nrun: {steps: 3, out: out}\n"
    )
    return path


def environment() -> dict[str, str]:
    """As a shell has it: no cluster, no setting of the other tests."""
    return {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "PYTHONPATH")}


@contextlib.contextmanager
def started(path: Path, *overrides: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A run of *path*; what has not ended by then ends with the block, and its pipes are closed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "weightsync", "run", str(path), *overrides],
        cwd=path.parent,
        env=env or environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # it ends its Ray too
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=60)
        process.kill()
        process.communicate()


def hangs_in(folder: Path, process: subprocess.Popen[str]) -> int:
    """Waits until something of the run in *folder* hangs, and returns the id of that process."""
    file, deadline = folder / "hangs", time.monotonic() + 120
    while not file.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert file.exists(), (folder, process.poll())
    return int(file.read_text())


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def processes_of(folder: Path) -> list[str]:
    """Living processes whose working directory is *folder*: the run, and Ray's and its actors, which inherit it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.readlink(entry / "cwd") == str(folder):
                    found.append((entry / "cmdline").read_text().replace("\0", " ")[:100])
            except OSError:
                continue
    return found


def gone_within(folder: Path, seconds: float) -> list[str]:
    deadline = time.monotonic() + seconds
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A run that goes on while the first test does, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    path = written(folder, arguments=", ok: true")
    with started(path, "run.sync_every=2", "run.verify_every=2", "sync.count_changed_values=true") as process:
        yield folder, process


@pytest.mark.usefixtures("whole_run")
def test_a_signal_ends_everything(tmp_path: Path) -> None:
    with started(written(tmp_path, arguments=", hang_at: 1", replicas=1)) as process:
        actor = hangs_in(tmp_path, process)
        assert len(processes_of(tmp_path)) > 4  # the run, Ray's own, and the actors
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert errors.splitlines()[-1].startswith("stopped by SIGTERM at step 1: the trainer learns"), errors
    assert gone_within(tmp_path, 10) == []
    assert not Path(f"/proc/{actor}").exists()
    assert len(lines_of(tmp_path / "out" / "updates.jsonl")) == 1
    assert "stopped by SIGTERM at step 1" in (tmp_path / "out" / "report.html").read_text()


def test_a_run_leaves_exact_engines_and_its_records(whole_run: tuple[Path, subprocess.Popen[str]]) -> None:
    tmp_path, process = whole_run
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert errors == ""
    assert "sync_every: 2" in output
    assert output.count("verified: every engine holds version") == 1
    assert "verified: every engine holds version 2 (" in output

    # Updates follow steps 1 and 2; the last one is evaluated with rollouts of its own.
    updates = lines_of(tmp_path / "out" / "updates.jsonl")
    assert [(u["ok"], u["step"], u["version"]) for u in updates] == [(True, 1, 1), (True, 2, 2)]
    for update in updates:
        assert set(update["transports"].values()) == {"shared_memory"}
        assert update["nbytes"] == sum(t.nbytes for t in torch.load(tmp_path / "trainer-0.pt").values())
        assert {"transfer", "apply", "commit"} <= update["phases"].keys()
        assert 0 <= update["pause_s"] <= update["seconds"]
        assert update["job"] is None
    steps = lines_of(tmp_path / "out" / "metrics.jsonl")
    assert [(s["step"], s["version"], s["trained"]) for s in steps] == [
        (0, 0, True),
        (1, 0, True),
        (2, 1, True),
        (3, 2, False),
    ]
    assert [s["metrics"]["loss"] for s in steps] == [1.0, 0.5, pytest.approx(1 / 3), 0.0]
    assert [s["metrics"]["reward"] for s in steps] == [1.0, 5.0, 9.0, 13.0]  # prompts, twice their number

    # What is made of the records, at the end.
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (run["exit_code"], run["last_line"], run["reasons"]) == (0, "", ["the loss", "is <2>"])
    assert output.splitlines()[-1] == "verdict: PASS"
    for update in updates:
        (attempt,) = update["attempts"]
        assert (attempt["version"], attempt["error"]) == (update["version"], None)
        assert {"coordinator", "trainer 0", "engine 0", "engine 1 rank 0"} <= {
            span["rank"] for span in attempt["spans"]
        }
    report = (tmp_path / "out" / "report.html").read_text()
    assert "finished in" in report
    assert "<p>is &lt;2&gt;</p>" in report
    assert len(json.loads((tmp_path / "out" / "timeline.json").read_text())["traceEvents"]) > 40
    assert f"records: out, report: {Path('out', 'report.html')}" in output

    # Each engine noted its weights at its rollout (2 of step 1, by engine 0, and so on).
    for prompt, trainer in ((4, 1), (5, 1), (6, 2), (7, 2)):
        engine = torch.load(tmp_path / f"engine-{prompt}.pt")
        expected = torch.load(tmp_path / f"trainer-{trainer}.pt")
        assert engine.keys() == expected.keys()
        assert all(torch.equal(engine[name], expected[name]) for name in expected)
    before = torch.load(tmp_path / "engine-2.pt")
    assert not torch.equal(before["0.weight"], torch.load(tmp_path / "trainer-0.pt")["0.weight"])
    assert gone_within(tmp_path, 10) == []

    # The saved config is a pipeline that says the same.
    command = [sys.executable, "-m", "weightsync", "run", "--check", "out/config.yaml"]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, env=environment())
    assert checked.stdout == (tmp_path / "out" / "config.yaml").read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_remembered_and_handlers_come_back(number: signal.Signals, code: int) -> None:
    before = signal.getsignal(number)
    with Stopping() as stopping:
        stopping.catch()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert (stopping.signal, stopping.exit_code) == (number, code)
        stopping.ignore()
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


# On a cluster


@dataclass(frozen=True)
class RunningCluster:
    gcs: str
    dashboard: str
    env: dict[str, str]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    """A head node as `ray start` makes it, with a token of its own, and room for one pipeline at a time."""
    env = environment() | {"PYTHONUNBUFFERED": "1", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    ports = free_ports(4)
    names = ("port", "dashboard-port", "ray-client-server-port", "dashboard-agent-listen-port")
    options = [f"--{name}={port}" for name, port in zip(names, ports, strict=True)]
    # Ray's sockets lie in its folder, and their paths must be short.
    with tempfile.TemporaryDirectory(prefix="ws", dir="/tmp") as folder, open(f"{folder}/log", "w") as log:
        options += [
            "--num-cpus=2",
            "--object-store-memory=100000000",
            "--disable-usage-stats",
            f"--temp-dir={folder}/r",
        ]
        ray = subprocess.Popen(
            [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", *options],
            env=env,
            stdout=log,
            stderr=log,
            text=True,
        )
        try:
            address = address_of(Path(log.name), ports[0], ray)
            yield RunningCluster(address, f"http://127.0.0.1:{ports[1]}", env)
        finally:
            ray.terminate()
            try:
                ray.wait(timeout=60)
            finally:
                ray.kill()
                ray.wait()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [s.getsockname()[1] for s in sockets]


def address_of(log: Path, port: int, ray: subprocess.Popen[str]) -> str:
    """What `ray start` says once all of it runs."""
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline and ray.poll() is None:
        text = log.read_text()
        if "This command will now block" in text and (found := re.search(rf"[\d.]+:{port}\b", text)):
            return found[0]
        time.sleep(0.1)
    raise AssertionError(f"the cluster did not start: {log.read_text()}")


def test_a_trainer_that_fails_is_the_last_line(tmp_path: Path, cluster: RunningCluster) -> None:
    path = written(tmp_path, arguments=", fail_at: 1", replicas=1)
    with started(path, env=cluster.env | {"RAY_ADDRESS": cluster.gcs}) as process:
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    last = errors.splitlines()[-1]
    assert last.startswith("error: trainer 0: ValueError: the loss is not finite (mine.py:"), errors
    assert last.endswith("in step)")
    assert f"Ray at {cluster.gcs}" in output
    assert len(lines_of(tmp_path / "out" / "metrics.jsonl")) == 1
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (run["exit_code"], run["last_line"]) == (1, last)
    assert "trainer 0: ValueError: the loss is not finite" in (tmp_path / "out" / "report.html").read_text()


def test_a_signal_that_ray_catches_while_it_starts_is_remembered() -> None:
    with Stopping() as stopping:
        with pytest.raises(KeyboardInterrupt):
            stopping.over(lambda: sys.exit(signal.SIGTERM))
        assert stopping.exit_code == 143
        with pytest.raises(SystemExit):
            stopping.over(lambda: sys.exit(2))


def test_a_verdict_that_is_not_ok_fails_the_run(tmp_path: Path, cluster: RunningCluster) -> None:
    path = written(tmp_path, arguments=", ok: false", replicas=1)
    with started(path, "run.steps=1", env=cluster.env | {"RAY_ADDRESS": cluster.gcs}) as process:
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert errors.splitlines()[-1] == "error: verdict: FAIL: the loss; is <1>"
    assert "PASS" not in output
    assert "verdict: FAIL: the loss; is &lt;1&gt;" in (tmp_path / "out" / "report.html").read_text()


STOPS = {
    "start": (signal.SIGINT, "1 trainer ranks, 1 torch engines"),
    "transfer": (signal.SIGTERM, "step 1: the engines are updated"),
    "apply": (signal.SIGINT, "step 1: the engines are updated"),
    "commit": (signal.SIGTERM, "step 1: the engines are updated"),
}


def test_a_signal_in_any_phase_leaves_nothing_behind(tmp_path: Path, cluster: RunningCluster) -> None:
    """All at once, each in a process of its own, on a cluster that lives on."""
    before = set(os.listdir("/dev/shm"))
    actors = {}
    with contextlib.ExitStack() as stack:
        runs = {}
        for where in STOPS:
            folder = tmp_path / where
            folder.mkdir()
            path = written(folder, replicas=1)
            own = f"{{folder: {folder}, where: {where}}}"
            keys = ["trainer.class=mine:HangingTrainer", "engines.class=mine:HangingEngine", "engines.sampling={}"]
            keys += [f"trainer.arguments={own}", f"engines.arguments={own}"]
            keys += ["trainer.resources.num_cpus=0.1", "engines.resources.num_cpus=0.1"]
            env = cluster.env | {"RAY_ADDRESS": cluster.gcs}
            runs[where] = stack.enter_context(started(path, *keys, env=env))
        for where, process in runs.items():
            actors[where] = hangs_in(tmp_path / where, process)
            process.send_signal(STOPS[where][0])
        for where, process in runs.items():
            number, at = STOPS[where]
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 128 + number, errors
            assert errors.splitlines()[-1].startswith(f"stopped by {number.name} at {at};"), errors
            run = json.loads((tmp_path / where / "out" / "run.json").read_text())
            assert run["exit_code"] == 128 + number
            assert (tmp_path / where / "out" / "report.html").exists()
            updates = lines_of(tmp_path / where / "out" / "updates.jsonl")
            assert [update["version"] for update in updates] == ([] if where == "start" else [1])
            assert gone_within(tmp_path / where, 10) == []
            assert not Path(f"/proc/{actors[where]}").exists()
    script = (
        "import ray; from ray.util.state import list_actors; ray.init(logging_level='error'); "
        "print([a.class_name for a in list_actors(limit=1000) if a.state != 'DEAD'], "
        "[g for g in ray.util.placement_group_table().values() if g['state'] != 'REMOVED'])"
    )
    asked = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert asked.stdout.split("\n")[-2] == "[] []", asked.stdout + asked.stderr
    assert [name for name in set(os.listdir("/dev/shm")) - before if "weightsync" in name] == []


def test_two_methods_are_enough_and_a_bundle_is_shared(tmp_path: Path, cluster: RunningCluster) -> None:
    path = written(tmp_path, trainer="Minimal", replicas=1)
    with started(path, "engines.placement=colocated", env=cluster.env | {"RAY_ADDRESS": cluster.gcs}) as process:
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, output + errors
    assert [update["version"] for update in lines_of(tmp_path / "out" / "updates.jsonl")] == [1, 2, 3]
    (first, *_) = lines_of(tmp_path / "out" / "metrics.jsonl")
    assert (first["num_rollouts"], first["metrics"]) == (0, {})


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("smollm2")  # made before the clock of the job runs
def test_ray_job_submit_runs_the_file_of_make_demo(tmp_path: Path, cluster: RunningCluster) -> None:
    """Two short steps, with one engine, from a copy of the sources. There is room only if the runs before gave theirs back."""
    for name in ("weightsync", "transports", "ray_actors", "examples"):
        ignored = shutil.ignore_patterns("__pycache__", "runs")
        shutil.copytree(ROOT / name, tmp_path / "tree" / name, symlinks=True, ignore=ignored)
    submit = [str(Path(sys.executable).with_name("ray")), "job", "submit", "--address", cluster.dashboard]
    keys = ["run.steps=2", f"run.out={tmp_path}/out", "engines.replicas=1", "engines.placement=colocated"]
    keys += ["engines.sampling.n=4", "trainer.arguments.questions_per_step=2"]
    run = [sys.executable, "-m", "weightsync", "run", "examples/pipelines/rl_smollm2.yaml", *keys]
    command = [*submit, "--working-dir", ".", "--", *run]
    done = subprocess.run(
        command, cwd=tmp_path / "tree", env=cluster.env, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verdict: PASS" in done.stdout
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()
    updates = lines_of(tmp_path / "out" / "updates.jsonl")
    assert [update["version"] for update in updates] == [1, 2]
    submission = re.search(r"raysubmit_\w+", done.stdout)
    assert submission is not None
    assert {update["job"] for update in updates} == {submission[0]}
