"""The site of the docs: built strictly, with every page and every public name."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import weightsync
from weightsync import pipeline, testing

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason='needs MkDocs: pip install "weightsync[docs]"'
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return folder


def test_every_page_is_there_and_in_the_navigation(site: Path) -> None:
    start = (site / "index.html").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix("").as_posix()
        if name != "index":
            assert (site / name / "index.html").exists(), name
            assert f'href="{name}/"' in start, f"{name} is not in the navigation"


def test_the_reference_has_every_public_name_and_nothing_private(site: Path) -> None:
    text = "".join(page.read_text() for page in (site / "reference").rglob("index.html"))
    names = re.findall(r'id="weightsync\.([\w.]+)"', text)
    assert {name.rpartition(".")[2] for name in names} >= {*weightsync.__all__, *pipeline.__all__, *testing.__all__}
    assert [name for name in names if re.search(r"(^|\.)_(?!_init__)", name)] == []


def test_the_marks_of_blocks_that_are_not_run_are_not_seen(site: Path) -> None:
    text = re.sub(r"<!--.*?-->", "", (site / "pipelines" / "index.html").read_text(), flags=re.DOTALL)
    assert "not run:" not in text
