"""The parts of a pipeline that need no Ray: YAML, schema, records, display, culprits."""

from __future__ import annotations

import importlib
import io
import json
import math
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from msgspec.structs import replace
from rich.console import Console

from weightsync.cli import main
from weightsync.errors import TransportError
from weightsync.pipeline.check import load
from weightsync.pipeline.config import schema
from weightsync.pipeline.display import Display
from weightsync.pipeline.document import Document, dump
from weightsync.pipeline.records import Records, config_text, submission_id
from weightsync.ray_actors.pipeline_actors import VllmEngineActor
from weightsync.ray_actors.pipeline_fleet import RunError, explain
from weightsync.report import EngineProgress, LoadSummary, Progress, UpdateReport

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples" / "pipelines").glob("*.yaml"))


def report(*, changed: int | None = 25) -> UpdateReport:
    return UpdateReport(
        version=4,
        nbytes=2_000_000_000,
        seconds=4.0,
        pause_s=0.5,
        phases={"transfer": 3.0},
        apply="staged",
        transports={"trainer 0 -> engine 0 rank 0": "shared_memory"},
        ranks=(),
        load=(),
        total_values=100,
        changed_values=changed,
    )


# YAML


@pytest.mark.parametrize("text", ["3e-5", "1E4", "-2e+3", ".5e1", "1.e-3", "1_0e2"])
def test_numbers_are_numbers_in_files_and_overrides(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"lr: {text}\n")
    expected = float(text)
    assert Document(path, [f"other={text}"]).data == {"lr": expected, "other": expected}


@pytest.mark.parametrize("data", [{"a": "3e-5", "b": 3e-5, "c": "1", "d": "yes", "e": "é", "f": None, "g": "a: b"}])
def test_what_is_dumped_is_read_as_it_was(tmp_path: Path, data: dict[str, object]) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(dump(data), encoding="utf-8")
    assert Document(path, []).data == data


def test_overrides_reach_keys_that_are_there_and_that_are_not(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("run: {steps: 3}\nsync:\nlist: [{use: a}, {use: b}]\n")
    overrides = ["run.steps=4", "sync.transport=auto", "new.deep.key={a: [1, x]}", "list[1].use=c", "run.steps=5"]
    assert Document(path, overrides).data == {
        "run": {"steps": 5},
        "sync": {"transport": "auto"},
        "list": [{"use": "a"}, {"use": "c"}],
        "new": {"deep": {"key": {"a": [1, "x"]}}},
    }


def test_an_alias_is_no_duplicate_and_a_merge_may_come_twice(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}\n")
    assert Document(path, []).data["c"] == {"x": 1, "y": 2}


# Examples and schema


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_right_and_its_effective_config_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    config = load(path, [])
    saved = tmp_path / "config.yaml"
    saved.write_text(config_text(config))
    assert load(saved, []) == config
    validator = importlib.import_module("jsonschema")
    validator.validate(yaml.safe_load(path.read_text()), schema())


def test_the_schema_is_printed_and_refuses_what_run_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    made = json.loads(capsys.readouterr().out)
    validator = importlib.import_module("jsonschema")
    good = {"trainer": {"class": "a:B"}, "engines": {"kind": "torch"}, "run": {"steps": 1}}
    validator.validate(good, made)
    for bad in ({**good, "zzz": 1}, {**good, "run": {"steps": 0}}, {**good, "engines": {"kind": "x"}}, {}):
        with pytest.raises(validator.ValidationError):
            validator.validate(bad, made)


def test_check_prints_the_effective_config(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["run", "--check", "examples/pipelines/torch_only.yaml", "run.steps=7"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["run"]["steps"] == 7
    assert printed["sync"]["timeout_s"] == 120.0


# Records


def test_records_replace_those_of_an_earlier_run_and_write_nan_as_null(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = load(ROOT / "examples" / "pipelines" / "torch_only.yaml", [])
    Records(tmp_path, config).step({"step": 9})
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"metadata": {"job_submission_id": "raysubmit_x"}}')
    records = Records(tmp_path, config)
    records.step({"step": 0, "metrics": {"loss": math.nan}})
    records.update(0, report())
    error = TransportError("engine 1: gone\nfor good", rank="engine 1 rank 0", phase="transfer")
    records.failure(1, error, seconds=2.5, why=explain(error))
    (step,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (step["metrics"], step["job"]) == ({"loss": None}, "raysubmit_x")
    update, failure = [json.loads(line) for line in (tmp_path / "updates.jsonl").read_text().splitlines()]
    assert (update["ok"], update["version"], update["nbytes"], update["gb_per_s"]) == (True, 4, 2_000_000_000, 0.5)
    assert (failure["ok"], failure["culprit"], failure["phase"]) == (False, "engine 1 rank 0", "transfer")
    assert failure["message"] == "engine 1: gone for good (TransportError)"


@pytest.mark.parametrize("text", ["", "{}", "no json", "[]", '{"metadata": {}}'])
def test_outside_of_a_job_there_is_no_submission_id(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", text)
    assert submission_id() is None


def test_a_culprit_is_one_line_and_named_once() -> None:
    assert str(RunError("trainer 0", ValueError("a\n b"))) == "trainer 0: ValueError: a b"
    error = TransportError("engine 1: gone", rank="engine 1")
    assert str(RunError("update after step 3", error)) == "update after step 3: engine 1: gone (TransportError)"
    assert len(str(RunError("x", ValueError("y" * 10_000)))) < 700


# Display


@pytest.mark.parametrize("terminal", [True, False])
def test_rows_are_aligned_and_the_finished_table_stays(terminal: bool) -> None:
    out = io.StringIO()
    display = Display(Console(file=out, force_terminal=terminal, width=120))
    with display.stage("a start"):
        pass
    display.doing("step 0: a wait")
    display.row(0, 0, {"reward": 0.25, "loss": 1234567.0}, 1.0, report())
    display.row(13, 4, {"reward": math.nan}, 1.0, None)
    display.end()
    text = out.getvalue()
    for cell in ("0.25", "1.235e+06", "4.00", "0.50", "25.0%", "nan", "13"):
        assert cell in text
    if not terminal:
        head, first, last = text.splitlines()[-3:]
        assert len(head) == len(first) == len(last)
        assert last.split() == ["13", "4", "nan", "-", "-", "-", "-", "-", "1.0"]
    assert display.at == "step 0: a wait"


def at_half() -> Progress:
    engine = EngineProgress(nbytes=10**9, of_nbytes=2 * 10**9, groups=3, num_groups=7, seconds=0.5)
    return Progress(phase="transfer", seconds=0.6, version=5, nbytes=10**9, engines={"engine 0": engine})


def test_an_update_under_way_is_shown_on_a_terminal_and_followed_nowhere_else() -> None:
    for terminal in (True, False):
        out, looks = io.StringIO(), threading.Event()

        def look(looks: threading.Event = looks) -> Progress:
            looks.set()
            return at_half()

        display = Display(Console(file=out, force_terminal=terminal, width=120))
        display.doing("step 3: the engines are updated")
        with display.following(look):
            assert looks.wait(5 if terminal else 0.6) == terminal
            deadline = time.monotonic() + 10
            while terminal and "3 of 7 groups" not in out.getvalue() and time.monotonic() < deadline:
                time.sleep(0.05)
        display.end()
        told = ("to version 5, transfer, 0.6 s", "engine 0", "1.0 GB of 2.0 GB", "2.0 GB/s", "3 of 7 groups")
        assert [text in out.getvalue() for text in told] == [terminal] * len(told)
        assert not any("follow" in thread.name for thread in threading.enumerate())


def test_the_file_in_the_documentation_fits_the_schema() -> None:
    text = (ROOT / "docs" / "pipelines.md").read_text()
    block = text.split("```yaml\n")[1].split("```")[0]
    importlib.import_module("jsonschema").validate(yaml.safe_load(block.replace("3e-5", "0.00003")), schema())


def test_a_report_says_what_no_trainer_feeds() -> None:
    assert "nothing" not in str(report())
    load = LoadSummary(rank="engine 0 rank 0", num_groups=1, largest_group="a", largest_group_bytes=1, unfed=("b", "c"))
    assert "2 engine parameters fed by nothing" in str(replace(report(), load=(load,)))


@pytest.mark.parametrize(
    ("arguments", "backend"),
    [
        ({}, None),
        ({"tensor_parallel_size": 2}, "mp"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, "ray"),
    ],
)
def test_ranks_of_a_vllm_are_processes_of_its_actor(
    arguments: dict[str, Any], backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What vLLM is asked for; with several GPUs in one bundle its own choice would not start."""
    asked: dict[str, Any] = {}
    module = SimpleNamespace(LLM=lambda **given: asked.update(given), SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", module)
    VllmEngineActor().build("a model", arguments, {})
    assert asked.get("distributed_executor_backend") == backend
    assert asked["worker_extension_cls"].endswith("WeightSyncWorkerExtension")
