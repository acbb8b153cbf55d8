"""`weightsync bench`: what it changes, what it times, and a run of it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from weightsync.bench.figures import figures_of, show
from weightsync.bench.weights import Floor, alternating, flip, floor
from weightsync.cli import main
from weightsync.report import UpdateReport

ROOT = Path(__file__).parents[2]


def actor_with(weights: Any) -> Any:
    return SimpleNamespace(user=SimpleNamespace(weights=weights))


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.head = torch.nn.Linear(4, 7)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.arange(3))


def test_a_flip_changes_the_sign_of_every_value_once_and_a_second_one_brings_it_back() -> None:
    module = Tied()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    actor = actor_with(lambda: module)
    flip(actor)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name] if name == "steps" else -before[name]), name
    assert alternating(actor) is module
    flip(actor)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_values_of_eight_bits_are_flipped_too() -> None:
    tensor = torch.tensor([1.0, -2.0, 0.5]).to(torch.float8_e4m3fn)
    flip(actor_with(lambda: {"a": tensor}))
    assert tensor.float().tolist() == [-1.0, 2.0, -0.5]


def test_weights_that_are_made_come_with_other_signs_every_second_time() -> None:
    def made() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(2)

    actor = actor_with(made)
    flip(actor)
    signs = [next(iter(alternating(actor)))[1][0].item() for _ in range(4)]
    assert signs == [-1, 1, -1, 1]


@pytest.mark.parametrize("kind", [dict, list, iter])
def test_the_floor_copies_each_tensor_once(kind: Any) -> None:
    tensors = {"a": torch.ones(1000), "b": torch.ones(3, 5, dtype=torch.float64).T, "none": torch.ones(0)}
    found = floor(actor_with(lambda: tensors if kind is dict else kind(list(tensors.items()))))
    assert found.nbytes == 4000 + 120
    assert found.seconds > 0
    assert (found.device, found.threads) == ("cpu", torch.get_num_threads())


def test_tied_weights_are_one_copy() -> None:
    assert floor(actor_with(Tied)).nbytes == (7 * 4 + 7) * 4 + 24


def report(seconds: float) -> UpdateReport:
    return UpdateReport(
        version=1, nbytes=2_000_000, seconds=seconds, pause_s=seconds / 2, phases={"transfer": seconds / 4},
        apply="staged", transports={"trainer 0 -> engine 0 rank 0": "shared_memory"}, ranks=(), load=(), total_values=1,
    )  # fmt: skip


def test_figures_are_medians_and_the_floor_is_of_as_many_bytes() -> None:
    """A rank that holds half of the model is timed with half of the bytes."""
    floors = [Floor(nbytes=1_000_000, seconds=seconds, device="cpu", threads=2) for seconds in (0.001, 0.002, 0.009)]
    figures = figures_of(report(9.0), [report(0.01), report(0.04), report(0.02)], floors)
    assert (figures.update.median, figures.update.min, figures.update.max) == (0.02, 0.01, 0.04)
    assert figures.pause.median == 0.01
    assert figures.phases["transfer"].max == 0.01
    assert figures.floor.median == 0.004
    assert figures.ratio == pytest.approx(5.0)
    assert [figures.gb_per_s, figures.floor_gb_per_s] == pytest.approx([0.1, 0.5])
    output = io.StringIO()
    show(figures, Console(file=output, width=80))
    assert "5.00" in output.getvalue()
    assert "trainer 0 -> engine 0 rank 0: shared_memory" in output.getvalue()


def test_sharded_trainers_and_a_colocated_engine_are_measured(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-m", "weightsync", "bench", "examples/pipelines/fsdp.yaml", "--rounds", "2", "--json"],
        cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["rounds"] == 2
    assert found["nbytes"] > 0
    assert found["update"]["min"] <= found["update"]["median"] <= found["update"]["max"]
    assert found["ratio"] == pytest.approx(found["update"]["median"] / found["floor"]["median"])
    assert set(found["transports"].values()) == {"sharded_shared_memory"}
    assert {"prepare", "transfer", "apply", "commit"} <= found["phases"].keys()


def test_a_wrong_file_is_told_and_nothing_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(ROOT / "examples/pipelines/torch_only.yaml"), "run.steps=none"]) == 2
    assert "run.steps" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "any.yaml", "--rounds", "0"])
    assert "--rounds" in capsys.readouterr().err
