"""The layout's promises: linked folders, one top-level name, a light import."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import weightsync

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("transports", "ray_actors")
HEAVY = ("ray", "vllm", "cupy", "nixl")


def imported_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after *statement*."""
    script = f"import json, sys\n{statement}\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("folder", LINKED)
def test_a_linked_folder_is_a_relative_link_to_the_top_level_one(folder: str) -> None:
    link = ROOT / "weightsync" / folder
    assert link.is_symlink(), f"{link} is no link: was the checkout made without symlinks (core.symlinks=false)?"
    assert link.readlink() == Path("..", folder)
    assert link.resolve() == ROOT / folder


@pytest.mark.parametrize("folder", LINKED)
def test_a_linked_folder_imports_under_weightsync_and_only_there(folder: str) -> None:
    module = importlib.import_module(f"weightsync.{folder}")
    assert module.__name__ == f"weightsync.{folder}"
    assert folder not in imported_by(f"import weightsync.{folder}")


def test_every_package_on_disk_is_listed_for_the_wheel() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    # Path.rglob does not follow links, so each linked folder is walked by its own name.
    roots = {"weightsync": ROOT / "weightsync"} | {f"weightsync.{name}": ROOT / name for name in LINKED}
    on_disk = {
        ".".join([name, *init.parent.relative_to(root).parts])
        for name, root in roots.items()
        for init in root.rglob("__init__.py")
    }
    assert sorted(on_disk) == sorted(listed)


def test_importing_weightsync_imports_no_heavy_dependency() -> None:
    loaded = imported_by("import weightsync")
    assert "weightsync" in loaded
    assert not loaded.intersection(HEAVY)


def test_all_is_sorted_and_every_name_in_it_exists() -> None:
    assert list(weightsync.__all__) == sorted(weightsync.__all__)
    assert [name for name in weightsync.__all__ if not hasattr(weightsync, name)] == []
