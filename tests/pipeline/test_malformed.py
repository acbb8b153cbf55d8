"""Each mistake in a pipeline file is told in one screen, with line, key, value and cure; nothing is started."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from weightsync.cli import main
from weightsync.errors import ConfigError
from weightsync.pipeline.check import load

PARTS = Path(__file__).parent
GOOD = """\
trainer:
  class: pipeline_parts:Trainer
  ranks: 1
  arguments: {folder: OUT}
engines:
  kind: torch
  class: pipeline_parts:Engine
  replicas: 1
  arguments: {folder: OUT}
  placement: apart
sync:
  timeout_s: 30
  transport: auto
run:
  steps: 3
  sync_every: 1
  out: OUT
"""
VLLM = [
    ("kind: torch\n  class: pipeline_parts:Engine", "kind: vllm"),
    ("  arguments: {folder: OUT}\n  placement", "  arguments: {}\n  placement"),
]
GPUS = [("  ranks: 1", "  ranks: 1\n  resources: {num_gpus: 0.5}"), ("apart", "colocated")]


@dataclass(frozen=True)
class Case:
    name: str
    edits: list[tuple[str, str]]
    line: int | None
    says: list[str]
    overrides: tuple[str, ...] = ()


def case(name: str, old: str, new: str, line: int, *says: str, also: list[tuple[str, str]] | None = None) -> Case:
    return Case(name, [*(also or []), (old, new)], line, list(says))


def override(text: str, *says: str) -> Case:
    return Case(f"override {text}", [], None, list(says), (text,))


CASES = [
    # Types and values
    case("text for a number", "replicas: 1", "replicas: two", 8, "engines.replicas: is 'two'; expected int >= 1 (how many engines)"),
    case("a fraction of a rank", "ranks: 1", "ranks: 1.5", 3, "trainer.ranks: is 1.5; expected int"),
    case("no engine", "replicas: 1", "replicas: 0", 8, "engines.replicas: is 0; expected int >= 1"),
    case("negative steps", "steps: 3", "steps: -3", 15, "run.steps: is -3; expected int >= 1"),
    case("a list for a mapping", "arguments: {folder: OUT}\nengines", "arguments: [3]\nengines", 4, "trainer.arguments: is a list of 1; expected mapping"),
    case("null for a mapping", "sync:\n  timeout_s: 30\n  transport: auto\n", "sync:\n", 11, "sync: is null; expected mapping"),
    case("a text for a flag", "timeout_s: 30", "digest: sure", 12, "sync.digest: is 'sure'; expected bool"),
    case("a text for a time", "timeout_s: 30", "timeout_s: soon", 12, "sync.timeout_s: is 'soon'; expected float"),
    case("no time at all", "timeout_s: 30", "timeout_s: 0", 12, "sync.timeout_s: is 0; must be more than 0"),
    case("a bad size", "timeout_s: 30", "bucket_bytes: 16 cows", 12, "sync.bucket_bytes: is '16 cows'; '16 cows' is not a size; write for example"),
    case("a near enum", "placement: apart", "placement: colocate", 10, "engines.placement: is 'colocate'; expected one of", "colocated, apart", "did you mean 'colocated'?"),
    case("an unknown kind", "kind: torch", "kind: sglang", 6, "engines.kind: is 'sglang'; expected one of", "vllm, torch"),
    case("a number for env", "replicas: 1", "env: {OMP_NUM_THREADS: 1}", 8, "engines.env", "expected str"),
    case("a negative seed", "sync_every: 1", "seed: -1", 16, "run.seed: is -1; expected int >= 0"),
    # Keys
    case("a near key at the top", "engines:", "engine:", 5, "engine: is a mapping of 5; unknown key; did you mean 'engines'?"),
    case("a near key below", "ranks: 1", "rank: 1", 3, "trainer.rank: is 1; unknown key; did you mean 'ranks'?"),
    case("a near key of sync", "timeout_s: 30", "timeout: 30", 12, "sync.timeout: is 30; unknown key; did you mean 'timeout_s'?"),
    case("a near key of resources", "ranks: 1", "resources: {num_gpu: 1}", 3, "trainer.resources.num_gpu: is 1; unknown key; did you mean 'num_gpus'?"),
    case("a key of a rule", "transport: auto", "transport:\n    - use: broadcast\n      samehost: true", 15, "sync.transport[0].samehost", "did you mean 'same_host'?"),
    case("a key in the wrong place", "trainer:", "steps: 3\ntrainer:", 1, "steps: is 3; unknown key; did you mean run.steps?"),
    case("a key like no other", "ranks: 1", "zzz: 1", 3, "trainer.zzz: is 1; unknown key; known: class, ranks"),
    case("no steps", "steps: 3", "seed: 3", 14, "run.steps: is missing; expected training steps"),
    case("no trainer", "trainer:\n  class: pipeline_parts:Trainer\n  ranks: 1\n  arguments: {folder: OUT}\n", "", 1, "trainer: is missing; expected a mapping with class"),
    case("no class", "  class: pipeline_parts:Trainer\n", "", 1, "trainer.class: is missing; expected a class path"),
    case("a key twice", "ranks: 1", "ranks: 1\n  ranks: 2", 4, "trainer.ranks: stands twice, first in line 3; remove one"),
    case("a section twice", "run:", "sync: {}\nrun:", 14, "sync: stands twice, first in line 11"),
    case("a key that is a number", "trainer:", "3: x\ntrainer:", 1, "all keys must be texts"),
    # Classes
    case("no class path", "pipeline_parts:Trainer", "pipeline_parts.Trainer", 2, "trainer.class: is 'pipeline_parts.Trainer'; expected a class path such as"),
    case("no such module", "pipeline_parts:Trainer", "pipelin_parts:Trainer", 2, "there is no module 'pipelin_parts'", "PYTHONPATH"),
    case("no such class", "pipeline_parts:Trainer", "pipeline_parts:Trainr", 2, "pipeline_parts has no 'Trainr'; did you mean 'Trainer'?"),
    case("no class but a number", "pipeline_parts:Trainer", "pipeline_parts:a_number", 2, "this is no class"),
    case("a class without weights", "pipeline_parts:Trainer", "pipeline_parts:NoWeights", 2, "NoWeights has no method weights(); add it"),
    case("a class with steps", "pipeline_parts:Trainer", "pipeline_parts:NearMiss", 2, "NearMiss has no method step(step, rollouts); did you mean 'steps'?"),
    case("a step of no arguments", "pipeline_parts:Trainer", "pipeline_parts:WrongStep", 2, "WrongStep.step cannot be called as step(step, rollouts)"),
    case("an async step", "pipeline_parts:Trainer", "pipeline_parts:AsyncStep", 2, "AsyncStep.step is async; expected a plain method"),
    case("an unknown argument", "{folder: OUT}\nengines", "{folder: OUT, fail: 3}\nengines", 4, "trainer.arguments.fail: is 3; Trainer takes no argument 'fail'; did you mean 'fail_at'?"),
    case("an argument too few", "{folder: OUT}\nengines", "{}\nengines", 4, "trainer.arguments: is a mapping of 0; Trainer cannot be made with these", "'folder'"),
    case("a module that breaks", "pipeline_parts:Trainer", "pipeline_broken:Trainer", 2, "importing pipeline_broken failed: ZeroDivisionError"),
    case("torch without a class", "  class: pipeline_parts:Engine\n", "", 5, "engines.class: is missing; kind torch needs"),
    case("vllm with a class", "kind: torch", "kind: vllm", 8, "engines.class: is 'pipeline_parts:Engine'; engines of kind vllm are vllm.LLM", also=[("trainer:\n", "model: some/model\ntrainer:\n"), ("class: pipeline_parts:Trainer", "class: pipeline_parts:Trainer")]),
    # Model
    case("vllm without a model", "ranks: 1", "ranks: 1", 1, "model: is missing; vLLM engines need", also=VLLM),
    case("no such folder", "trainer:\n", "model: ./no-such-folder\ntrainer:\n", 1, "model: is './no-such-folder'; no such folder"),
    case("a model of a wrong type", "trainer:\n", "model: 3\ntrainer:\n", 1, "model: is 3; expected str | mapping | null"),
    case("a model twice", "{folder: OUT}\nengines", "{folder: OUT, model: m}\nengines", 5, "trainer.arguments.model: is 'm'; the file has a model at its top already", also=[("trainer:\n", "model: hub/name\ntrainer:\n")]),
    case("a maker that is not there", "trainer:\n", "model: {make: 'pipeline_parts:make'}\ntrainer:\n", 1, "model.make", "did you mean 'make_path'?"),
    case("a maker's argument", "trainer:\n", "model: {make: 'pipeline_parts:make_path', arguments: {nam: x}}\ntrainer:\n", 1, "model.arguments.nam: is 'x'", "did you mean 'name'?"),
    # Contradictions
    case("more engines than ranks", "replicas: 1", "replicas: 3", 10, "engines.placement: is 'colocated'; 3 engines cannot each share", "set engines.replicas to 1", also=[("apart", "colocated")]),
    case("two whole GPUs in one", "replicas: 1", "resources: {num_gpus: 1}", 11, "engines.placement: is 'colocated'", "do not fit one GPU", "0.5 and 0.5", also=GPUS),
    case("a GPU and a half", "ranks: 1", "resources: {num_gpus: 1.5}", 3, "trainer.resources.num_gpus: is 1.5; expected a whole number"),
    case("nothing to reserve", "ranks: 1", "resources: {num_cpus: 0}", 3, "trainer.resources: is a mapping of 1; num_cpus and num_gpus are both 0"),
    case("vllm's memory beside a trainer", "replicas: 1", "resources: {num_gpus: 0.5}", 10, "engines.arguments.gpu_memory_utilization: is missing", also=[*VLLM, *GPUS, ("trainer:\n", "model: hub/name\ntrainer:\n")]),
    case("fewer GPUs than ways", "arguments: {}", "resources: {num_gpus: 1}\n  arguments: {tensor_parallel_size: 2}", 10, "engines.arguments.tensor_parallel_size: is 2; needs 2 GPUs", also=[*VLLM, ("trainer:\n", "model: hub/name\ntrainer:\n")]),
    case("another worker extension", "arguments: {}", "arguments: {worker_extension_cls: a.B}", 9, "engines.arguments.worker_extension_cls: is 'a.B'", "remove the key", also=[*VLLM, ("trainer:\n", "model: hub/name\ntrainer:\n")]),
    case("an unknown transport", "transport: auto", "transport: carrier_pigeon", 13, "sync.transport: is 'carrier_pigeon'; unknown transport 'carrier_pigeon'; known: auto, broadcast"),
    case("a folder that is a file", "out: OUT", "out: /dev/null/out", 17, "run.out: is '/dev/null/out'", "name another"),
    # No YAML
    case("no YAML", "ranks: 1", "ranks: [1", 4, "not YAML"),
    case("a tab", "  ranks: 1", "\tranks: 1", 3, "not YAML"),
    case("a Python object", "folder: OUT}\nengines", "folder: !!python/object/apply:os.getcwd []}\nengines", 4, "not YAML"),
    Case("a list at the top", [(GOOD, "- trainer\n- engines\n")], 1, ["the file holds a list of 2; expected keys: model"]),
    Case("an empty file", [(GOOD, "# nothing yet\n")], 1, ["trainer: is missing"]),
    # Overrides
    override("run.steps", 'override "run.steps": expected key=value'),
    override("=3", "expected key=value"),
    override("run..steps=3", "expected key=value"),
    override("run.steps=many", 'override "run.steps=many": run.steps: is \'many\'; expected int'),
    override("run.stepz=3", 'override "run.stepz=3": run.stepz: is 3; unknown key; did you mean \'steps\'?'),
    override("run.steps.x=3", "run.steps is 3, which has no 'x'"),
    override("run={steps: [}", "is not a YAML value"),
    override("engines.class=pipeline_parts:Engin", 'override "engines.class=pipeline_parts:Engin": engines.class', "did you mean 'Engine'"),
    override("sync.bucket_bytes=0", 'override "sync.bucket_bytes=0": sync.bucket_bytes: is 0; must be more than 0 bytes'),
    override("egines.kind=vllm", 'override "egines.kind=vllm": egines: is a mapping of 1; unknown key; did you mean \'engines\'?'),
]  # fmt: skip


def written(tmp_path: Path, one: Case) -> Path:
    text = GOOD
    for old, new in one.edits:
        assert old in text, f"{one.name}: {old!r} is not in the text"
        text = text.replace(old, new, 1)
    path = tmp_path / "pipeline.yaml"
    path.write_text(text.replace("OUT", str(tmp_path / "out")))
    (tmp_path / "pipeline_broken.py").write_text("1 / 0\n")
    return path


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(PARTS))
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_a_mistake_is_told_with_its_line_and_cure(
    tmp_path: Path, one: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, one)
    assert main(["run", str(path), *one.overrides]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    *_, last = lines = told.err.splitlines()
    for text in one.says:
        assert text in last, last
    assert len(lines) <= 2
    assert len(last) < 700
    if one.line is not None:
        assert last.startswith(f"error: {path}:{one.line}: ")
        source = path.read_text().splitlines()
        assert lines[0].endswith(source[one.line - 1][:140] if one.line <= len(source) else "")
    assert not (tmp_path / "out").exists()


def test_a_mistake_carries_its_place(tmp_path: Path) -> None:
    path = written(tmp_path, Case("", [("ranks: 1", "ranks: x")], 3, []))
    with pytest.raises(ConfigError) as caught:
        load(path, [])
    assert (caught.value.file, caught.value.line, caught.value.key) == (str(path), 3, "trainer.ranks")


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none.yaml"
    if content is not None:
        path.write_bytes(content)
    assert main(["run", str(path)]) == 2
    assert re.fullmatch(rf"error: {re.escape(str(path))}: (cannot be read|not YAML): .+\n", capsys.readouterr().err)


def test_nothing_of_ray_is_there_after_all_mistakes(tmp_path: Path) -> None:
    files = []
    for i, one in enumerate(CASES):
        folder = tmp_path / str(i)
        folder.mkdir()
        files.append(["run", str(written(folder, one)), *one.overrides])
    script = (
        f"import json, sys; sys.path[:0] = [{str(PARTS)!r}]\n"
        "from weightsync.cli import main\n"
        "codes = {main(arguments) for arguments in json.loads(sys.argv[1])}\n"
        "print(codes, [name for name in ('ray', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(files)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "{2} []\n"
    assert len(done.stderr.splitlines()) <= 2 * len(CASES)
