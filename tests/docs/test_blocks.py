"""What the README and the docs show is run: Python, YAML and JSON, and commands.

A block that cannot be run here has a comment before it, `<!-- not run: REASON -->`, which a reader of the page does not see. Its
commands are checked all the same: that files, modules, targets of make and extras are there.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray
import torch
from markdown_it import MarkdownIt

from weightsync.cli import main
from weightsync.config import SyncConfig
from weightsync.pipeline.config import PipelineConfig
from weightsync.pipeline.document import Document
from weightsync.pipeline.past import UpdateLine
from weightsync.registry import transport_names, unregister_transport

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_RUN = {"README.md": 2, "docs/pipelines.md": 1}
"""How many blocks of each page are not run."""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    reason: str
    """Why it is not run; empty: it is."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    found, reason = [], ""
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        if token.type == "html_block" and (match := re.match(r"<!-- not run: (\S.*) -->\s*$", token.content)):
            reason = match[1]
        elif token.type in ("fence", "code_block") and token.map is not None:
            found.append(Block(page, token.map[0] + 1, token.info, token.content, reason))
            reason = ""
        elif token.nesting == 0 and token.type != "inline":
            reason = ""
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
COMMANDS = [
    (block, command)
    for block in BLOCKS
    if block.language == "sh"
    for line in block.text.splitlines()
    if (command := re.sub(r"(^|\s+)#.*", "", line).strip())
]


def test_every_block_says_what_it_is_and_those_that_are_not_run_are_known() -> None:
    for block in BLOCKS:
        known = ("python", "sh", "yaml", "json", "toml", "text")
        assert block.language in known, f"{block}: {block.language or 'no language'}"
    marked = [str(block.page.relative_to(ROOT)) for block in BLOCKS if block.reason]
    assert {page: marked.count(page) for page in marked} == NOT_RUN
    texts = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert texts.count("<!-- not run") == len(marked), "a mark that stands before no block"


# ---- YAML and JSON ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "yaml"], ids=str)
def test_yaml_is_a_pipeline_or_settings(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "block.yaml"
    path.write_text(block.text)
    if "trainer:" in block.text:
        Document(path, []).read(PipelineConfig)
    else:
        SyncConfig.load(path)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "json"], ids=str)
def test_json_is_a_line_of_a_flight_record(block: Block) -> None:
    line = msgspec.json.decode(block.text, type=UpdateLine)
    assert set(msgspec.json.decode(block.text)) - set(UpdateLine.__struct_fields__) == {"job"}
    assert line.attempts


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "toml"], ids=str)
def test_toml_declares_a_transport(block: Block) -> None:
    assert list(tomllib.loads(block.text)["project"]["entry-points"]) == ["weightsync.transports"]


# ---- Python -------------------------------------------------------------------------------------------------------


class Actor:
    """A trainer and an engine of the docs."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = self.llm = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))

    def value(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in self.model.state_dict().values()]


@pytest.fixture(scope="module")
def names(ray_cluster: None) -> Iterator[dict[str, Any]]:
    """What the docs take as given."""
    kind = ray.remote(num_cpus=0)(Actor)
    made = {name: kind.remote(seed) for seed, name in enumerate(("trainer", "engine_0", "engine_1"))}
    yield {**made, "model": torch.nn.Linear(4, 4)}
    for actor in made.values():
        ray.kill(actor)


@pytest.fixture
def own_transports() -> Iterator[None]:
    """What a page registers is forgotten with it."""
    before = set(transport_names())
    yield
    for name in set(transport_names()) - before:
        unregister_transport(name)


PYTHON = [page for page in PAGES if any(b.page == page and b.language == "python" and not b.reason for b in BLOCKS)]


@pytest.mark.usefixtures("own_transports")
@pytest.mark.parametrize("page", PYTHON, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_runs(
    page: Path,
    names: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The blocks of a page run in their order, in one namespace. One that begins with "# NAME.py" becomes that file, and
    a file of tests is run by pytest."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    scope: dict[str, Any] = {"__name__": "block", **names}
    for block in BLOCKS:
        if block.page != page or block.language != "python" or block.reason:
            continue
        code = textwrap.dedent(block.text)
        if file := re.match(r"# (\w+\.py)\n", code):
            (tmp_path / file[1]).write_text(code)
            if file[1].startswith("test_"):
                command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file[1]]
                done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=120)
                assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"
            else:  # Ray's workers run elsewhere
                ray.cloudpickle.register_pickle_by_value(importlib.import_module(file[1].removesuffix(".py")))
            continue
        exec(compile(code, f"{block}", "exec"), scope)  # noqa: S102 - the docs are ours
    if "sync" in scope:
        if "report" not in scope:
            scope["sync"].update()
        sent, got = ray.get([names["trainer"].value.remote(), names["engine_0"].value.remote()])
        assert all(map(torch.equal, sent, got))
        scope["sync"].close()
    if page.name == "doctor.md":
        assert "green libraries" in capsys.readouterr().out


# ---- commands -----------------------------------------------------------------------------------------------------


RUN = list(dict.fromkeys(command for block, command in COMMANDS if not block.reason))
FIRST = "python -m weightsync run examples/pipelines/torch_only.yaml run.steps=40"
"""What it leaves is RUN_DIR."""


@pytest.fixture(scope="module")
def folder(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the commands of the docs mean something."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "FILE.yaml").write_text((ROOT / "examples/pipelines/torch_only.yaml").read_text())
    (folder / "RUN_DIR").symlink_to("runs/torch_only")
    started(folder, FIRST)
    return folder


def started(folder: Path, command: str) -> None:
    """In a process of its own, on the tests' Ray: each of its own would take seconds to start."""
    words = [sys.executable, *shlex.split(command)[1:]]
    env = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, timeout=120, env=env)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def called(folder: Path, command: str) -> None:
    """In this process, which has imported all that it needs."""
    arguments = shlex.split(command.partition(">")[0].removeprefix("python -m ").removeprefix("weightsync "))
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), redirect_stdout(output), redirect_stderr(errors):
        assert main(arguments) == 0, f"{command}\n{output.getvalue()}{errors.getvalue()}"
    assert output.getvalue()


@pytest.mark.parametrize("command", [command for command in RUN if command != FIRST])
def test_a_command_ends_well(command: str, folder: Path) -> None:
    starts = re.match(r"python (-m weightsync (run(?! --check)|doctor|bench) |examples)", command)
    (started if starts else called)(folder, command)


def test_the_first_command_is_in_the_docs(folder: Path) -> None:
    assert FIRST in RUN
    assert (folder / "RUN_DIR" / "report.html").exists()


@pytest.mark.parametrize(("block", "command"), [(b, c) for b, c in COMMANDS if b.reason], ids=str)
def test_what_a_command_that_is_not_run_names_is_there(block: Block, command: str, folder: Path) -> None:
    if command.startswith("make "):
        done = subprocess.run(["make", "-n", *command.split()[1:]], cwd=ROOT, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
    else:
        called(folder, f"run --check {command.partition('-m weightsync run ')[2].replace('/a/shared/folder', 'runs')}")


EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
FOLDERS = "weightsync|examples|docs|tests|benchmarks|transports|ray_actors"
INLINE = [
    (page, token.content)
    for page in PAGES
    for inline in MarkdownIt().enable("table").parse(page.read_text(encoding="utf-8"))
    for token in inline.children or ()
    if token.type == "code_inline"
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_modules_files_and_extras_that_the_text_names_are_there(page: Path) -> None:
    for text in [text for at, text in INLINE if at == page]:
        if module := re.match(r"python -m ([\w.]+)", text):
            assert importlib.util.find_spec(module[1]), f"{page}: {text}"
        for path in re.findall(rf"(?<![\w./])(?:{FOLDERS})/[\w./-]+", text):
            assert (ROOT / path).exists(), f"{page}: {text}"
        for extra in re.findall(r"weightsync\[(.+?)\]", text):
            assert extra in EXTRAS, f"{page}: {text}"
    for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert link.startswith("https://") or (page.parent / link).exists(), f"{page}: {link}"
