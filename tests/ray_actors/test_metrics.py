"""Metrics as a real Ray exports them, the dashboard that shows them, and the flight record of the same updates."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from weightsync.config import SyncConfig
from weightsync.errors import WeightSyncError
from weightsync.ray_actors import watching
from weightsync.ray_actors.metrics import METRICS
from weightsync.report import UpdateReport

ROOT = Path(__file__).parents[2]
EXPORTED = {name: metric for metric in METRICS for name in metric.exported}
RAYS_OWN = {"Component", "NodeAddress", "SessionName", "Version", "WorkerId", "JobId", "le"}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the exporter said, and the flight record."""
    folder = tmp_path_factory.mktemp("metrics")
    command = [sys.executable, str(Path(__file__).with_name("metrics_script.py")), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, folder / "flights" / "record.jsonl"


def test_the_exporter_has_every_metric_with_few_tags_and_the_right_values(ran: tuple[str, Path]) -> None:
    samples = [sample for family in text_string_to_metric_families(ran[0]) for sample in family.samples]
    assert {sample.name for sample in samples} >= EXPORTED.keys()
    for sample in samples:
        tags = {tag for tag in sample.labels if tag not in RAYS_OWN and not tag.startswith("otel_")}
        assert tags == set(EXPORTED[sample.name].tags), sample

    def values(name: str, tag: str) -> dict[str, float]:
        return {sample.labels[tag]: sample.value for sample in samples if sample.name == name}

    assert values("ray_weightsync_updates_total", "outcome") == {"committed": 3, "failed": 1}
    assert values("ray_weightsync_failed_attempts_total", "phase") == {"prepare": 1}
    assert values("ray_weightsync_version", "engine") == {"engine 0": 2, "engine 1": 2, "engine 2": 2}
    # Two updates of two engines, and one engine that came late; the weights are 64 * 32 + 32 floats.
    assert values("ray_weightsync_bytes_total", "transport") == {"shared_memory": 5 * 4 * (64 * 32 + 32)}
    assert values("ray_weightsync_engine_events_total", "outcome") == {"joined": 1}
    assert values("ray_weightsync_pause_seconds_count", "engine") == {"engine 0": 2, "engine 1": 2, "engine 2": 1}
    assert values("ray_weightsync_phase_seconds_count", "phase")["commit"] == 3


def test_the_flight_record_has_a_line_for_each_of_them(ran: tuple[str, Path]) -> None:
    lines = [json.loads(line) for line in ran[1].read_text().splitlines()]
    assert [(line["ok"], line["version"]) for line in lines] == [(True, 1), (True, 2), (True, 2), (False, None)]
    assert [line["joined"] for line in lines[:3]] == [[], [], ["engine 2"]]
    failed = lines[3]
    assert (failed["error"], failed["culprit"], failed["phase"]) == ("ManifestError", "trainer 0", "prepare")
    assert "bias" in failed["message"]
    for line in lines:
        (attempt,) = line["attempts"]
        assert attempt["manifest_digest"] == lines[0]["attempts"][0]["manifest_digest"]
        assert {span["rank"] for span in attempt["spans"]} > {"coordinator", "trainer 0"}


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    text = (ROOT / "docs" / "grafana.json").read_text()
    shown = set(re.findall(r"ray_weightsync_\w+", text))
    assert shown <= EXPORTED.keys()
    assert {EXPORTED[name].name for name in shown} == {metric.name for metric in METRICS}
    for panel in json.loads(text)["panels"]:
        for target in panel["targets"]:
            (names, grouped) = (
                re.findall(r"ray_weightsync_\w+", target["expr"]),
                re.findall(r"by \(([^)]*)\)", target["expr"]),
            )
            tags = {tag.strip() for tags in grouped for tag in tags.split(",")} - {"le"}
            assert tags <= set(EXPORTED[names[0]].tags), target["expr"]


def test_the_documentation_lists_every_metric_and_no_other() -> None:
    listed = set(re.findall(r"`(ray_weightsync_\w+)`", (ROOT / "docs" / "observability.md").read_text()))
    assert listed == {metric.exported[0].removesuffix("_bucket") for metric in METRICS}


def test_what_cannot_be_recorded_does_not_fail_the_update(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    report = UpdateReport(
        version=1, nbytes=0, seconds=1.0, pause_s=0.0, phases={}, apply="staged", transports={}, ranks=(), load=(), total_values=0
    )  # fmt: skip
    watching.Watching(SyncConfig(flight_record=str(tmp_path / "file" / "record.jsonl"))).committed(report)
    assert "record.jsonl cannot be written" in caplog.text

    def refuse(*_: object) -> None:
        raise ValueError("Ray refuses")

    monkeypatch.setattr("weightsync.ray_actors.metrics.note_commit", refuse)
    monkeypatch.setattr("weightsync.ray_actors.metrics.note_failure", refuse)
    watching.Watching(SyncConfig(metrics=True)).committed(report)
    watching.Watching(SyncConfig(metrics=True)).failed(WeightSyncError("broken"), 1.0)
    assert caplog.text.count("could not be counted") == 2
