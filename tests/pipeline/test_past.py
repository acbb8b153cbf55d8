"""A run read back: its timeline, its page, and what is said where there is none."""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from weightsync.cli import main
from weightsync.pipeline.charts import nice_ticks
from weightsync.pipeline.page import page
from weightsync.pipeline.past import Past, UpdateLine, read_past
from weightsync.pipeline.timeline import timeline
from weightsync.report import Attempt

RANKS = ["trainer 0", "engine 0 rank 0", "engine 1 rank 0"]


# Timeline


def tracks_of(trace: dict[str, Any]) -> dict[int, str]:
    names = [event for event in trace["traceEvents"] if event["ph"] == "M" and event["name"] == "thread_name"]
    return {event["tid"]: event["args"]["name"] for event in names}


def test_a_timeline_is_of_the_trace_event_format(run_folder: Path) -> None:
    trace = json.loads((run_folder / "timeline.json").read_text())
    assert trace["displayTimeUnit"] in ("ms", "ns")
    tracks = tracks_of(trace)
    assert list(tracks.values()) == ["loop", "coordinator", *RANKS]
    slices = defaultdict(list)
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert event["pid"] == 1
        match event["ph"]:
            case "M":
                assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            case "X":
                assert event["tid"] in tracks
                assert event["ts"] >= 0
                assert event["dur"] >= 0
                slices[event["tid"]].append(event)
            case "i":
                assert event["s"] == "g"
            case other:
                pytest.fail(f"no event of phase {other!r} was expected")
    # Viewers nest slices of a track, so they may lie within each other, or apart.
    for events in slices.values():
        open_until = [float("inf")]
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            while event["ts"] >= open_until[-1] - 0.01:
                open_until.pop()
            end = event["ts"] + event["dur"]
            assert end <= open_until[-1] + 0.01, event
            open_until.append(end)


def test_a_timeline_tells_phases_bytes_transports_and_failures(run_folder: Path) -> None:
    trace = timeline(read_past(run_folder))
    tracks = tracks_of(trace)
    sent = [
        e for e in trace["traceEvents"] if e["ph"] == "X" and tracks[e["tid"]] == "trainer 0" and e["cat"] == "transfer"
    ]
    assert [e["args"]["version"] for e in sent] == [1, 2, 3, 3, 4, 5, 6, 6]
    assert [e["name"] for e in sent].count("transfer (failed)") == 3
    assert sent[0]["args"]["transports"] == ["shared_memory"]
    assert sent[0]["args"]["nbytes"] == 4 * (256 * 300 + 300 + 300 * 7 + 7)
    failures = [e for e in trace["traceEvents"] if e["ph"] == "i"]
    assert [e["name"] for e in failures] == ["TransportError: trainer 0"] * 3
    assert "the source broke" in failures[0]["args"]["message"]
    loop = [e for e in trace["traceEvents"] if e["ph"] == "X" and tracks[e["tid"]] == "loop"]
    assert [e["name"] for e in loop] == ["rollouts", "train"] * 12
    last = timeline(read_past(run_folder), last=2)
    assert {e["args"]["version"] for e in last["traceEvents"] if e.get("cat") == "transfer"} == {5, 6}
    assert min(e["ts"] for e in last["traceEvents"] if e["ph"] == "X") == 0


# Page


class Reader(HTMLParser):
    """Checks that tags are closed in turn; keeps texts, elements and attributes."""

    VOID = ("meta", "link", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_tells_what_happened_and_escapes_everything(run_folder: Path) -> None:
    text = (run_folder / "report.html").read_text()
    read = Reader(text)
    tags = [tag for tag, _ in read.elements]
    assert "script" not in tags
    said = " ".join(" ".join(read.texts).split())
    for expected in (
        "run & 1",
        "failed after",
        "exit code 1: update after step 11: trainer 0: the source broke: </title><script>console.error('x')</script>",
        "Update after step 11 failed: TransportError",
        "culprit: trainer 0",
        "phase: transfer",
        "Update after step 5: an attempt failed and was made again: TransportError",
        "Update after step 11, rank by rank",
        "engine 1 rank 0",
        "Staleness",
        "step 4: 0.333",  # the tooltip of a reward
        "prompt: </title><script>",  # in the config
    ):
        assert expected in said, expected
    charts = [attributes["aria-label"] for tag, attributes in read.elements if tag == "svg"]
    names = [str(label).split(",")[0] for label in charts]
    assert names[:4] == ["time by phase", "Pause share", "Throughput", "reward"]
    assert {"Staleness", "loss", "Rollouts", "Training"} <= set(names)
    # Self-contained: nothing is fetched.
    assert [a for _, a in read.elements if a.get("src") or str(a.get("href", "data:,")) != "data:,"] == []
    assert re.findall(r"url\(|@import|https?://", text) == []


def test_staleness_is_in_steps_of_training(run_folder: Path) -> None:
    text = (run_folder / "report.html").read_text()
    (chart,) = re.findall(r'<svg[^>]*aria-label="Staleness.*?</svg>', text, re.DOTALL)
    told = dict(re.findall(r"<title>step (\d+): (\d+)</title>", chart))
    # Every second step is followed by an update; the first ran on the initial weights.
    assert [told[str(step)] for step in range(6)] == ["0", "1", "0", "1", "0", "1"]


def test_a_page_of_many_steps_stays_small_and_of_none_says_so() -> None:
    empty = page(Past(name="none", updates=()))
    assert "0 of 0 updates failed" in empty
    assert "<svg" not in empty
    updates = tuple(
        UpdateLine(ok=True, time=float(i), seconds=1.0, step=i, version=i + 1, phases={"transfer": 0.5, "commit": 0.5}, nbytes=10)
        for i in range(5000)
    )  # fmt: skip
    many = page(Past(name="many", updates=updates))
    Reader(many)
    assert len(many) < 300_000
    assert "The last 200; 4800 before them are in the records." in many
    assert "mean of 84" in many


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 1.0, [0, 0.25, 0.5, 0.75, 1]),
        (-0.4, 0.1, [-0.4, -0.2, 0, 0.2]),
        (3.0, 3.0, [3, 4, 5, 6]),
        (0.0, 0.0007, [0, 0.0002, 0.0004, 0.0006, 0.0008]),
        (0.0, 0.0, [0, 0.25, 0.5, 0.75, 1]),
    ],
)
def test_ticks_are_round_and_hold_the_values(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high) == ticks


def test_the_line_in_the_documentation_is_one() -> None:
    text = (Path(__file__).parents[2] / "docs" / "observability.md").read_text()
    line = json.loads(text.split("```json\n")[1].split("```")[0])
    (attempt,) = msgspec.convert(line, UpdateLine).attempts
    assert attempt.links[0].receivers == ("engine 0 rank 0", "engine 1 rank 0")
    for data, kind in ((line, UpdateLine), (line["attempts"][0], Attempt)):
        assert data.keys() - {"job"} <= {field.name for field in msgspec.structs.fields(kind)}


# The command line


def test_report_and_timeline_are_made_again_also_of_a_flight_record(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(run_folder / "updates.jsonl", tmp_path / "record.jsonl")
    with (tmp_path / "record.jsonl").open("a") as record:
        record.write('{"ok": tr')  # as it is while a line is written, or after a kill
    assert main(["report", str(tmp_path / "record.jsonl")]) == 0
    assert main(["timeline", str(tmp_path / "record.jsonl"), "-o", str(tmp_path / "t.json")]) == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "report.html"), str(tmp_path / "t.json")]
    assert "1 of 6 updates failed" in (tmp_path / "report.html").read_text()
    assert list(tracks_of(json.loads((tmp_path / "t.json").read_text())).values()) == ["coordinator", *RANKS]


def test_what_is_no_run_is_refused_with_the_cure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "has no updates.jsonl; expected the folder that a run wrote (run.out)" in capsys.readouterr().err
    assert main(["timeline", str(tmp_path / "none")]) == 2
    assert "none does not exist" in capsys.readouterr().err
    (tmp_path / "updates.jsonl").write_text('{"ok": true, "time": 1, "seconds": 1}\n{"ok": 3}\n')
    assert main(["report", str(tmp_path)]) == 2
    assert "updates.jsonl:2: no UpdateLine of weightsync" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()
