"""The command line: `weightsync run FILE.yaml [key.sub=value ...]`, `doctor` and `bench` of the same, `report`, `timeline` and `schema`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weightsync.errors import ConfigError

if TYPE_CHECKING:
    from weightsync.pipeline.config import PipelineConfig


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0, or 1 when the run failed, 2 when something is wrong with what was asked for."""
    parser = argparse.ArgumentParser(prog="weightsync", description="Weight sync from RL trainers to rollout engines.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run the pipeline of a YAML file")
    run.add_argument("file", type=Path, help="the pipeline")
    run.add_argument("overrides", nargs="*", metavar="key.sub=value", help="change a key; the value is YAML")
    run.add_argument("--check", action="store_true", help="check the file, print the effective config, start nothing")
    doctor = commands.add_parser("doctor", help="start a pipeline and look what would go wrong, without an update")
    doctor.add_argument("file", type=Path, help="the pipeline")
    doctor.add_argument("overrides", nargs="*", metavar="key.sub=value", help="change a key; the value is YAML")
    doctor.add_argument("--json", action="store_true", help="print the findings as a JSON list")
    bench = commands.add_parser("bench", help="start a pipeline and measure updates, beside a plain copy of the bytes")
    bench.add_argument("file", type=Path, help="the pipeline")
    bench.add_argument("overrides", nargs="*", metavar="key.sub=value", help="change a key; the value is YAML")
    bench.add_argument("--rounds", type=int, default=10, help="updates that count (default: 10)")
    bench.add_argument("--json", action="store_true", help="print the figures as JSON, in seconds and bytes")
    report = commands.add_parser("report", help="make an HTML page of a run, or of a flight record")
    report.add_argument("past", type=Path, metavar="RUN_DIR", help="the folder of a run, or a flight record (.jsonl)")
    report.add_argument("-o", "--output", type=Path, help="default: report.html in the folder, or beside the record")
    timeline = commands.add_parser("timeline", help="make a timeline that ui.perfetto.dev opens")
    timeline.add_argument("past", type=Path, metavar="RUN_DIR", help="the folder of a run, or a flight record (.jsonl)")
    timeline.add_argument(
        "-o", "--output", type=Path, help="default: timeline.json in the folder, or beside the record"
    )
    timeline.add_argument("--last", type=int, default=0, metavar="N", help="only so many updates, the newest")
    commands.add_parser("schema", help="print the JSON Schema of a pipeline file, for editors")
    options = parser.parse_args(arguments)
    if options.command == "schema":
        from weightsync.pipeline.config import schema

        print(json.dumps(schema(), indent=2))
        return 0
    if options.command in ("report", "timeline"):
        return _tell(options)
    if options.command == "doctor":
        return _doctor(options.file, options.overrides, json=options.json)
    if options.command == "bench":
        if options.rounds < 1:
            parser.error("--rounds must be 1 or more")
        return _bench(options.file, options.overrides, rounds=options.rounds, json=options.json)
    return _run(options.file, options.overrides, only_check=options.check)


def _tell(options: argparse.Namespace) -> int:
    from weightsync.pipeline.records import write_report, write_timeline

    past: Path = options.past
    name = {"report": "report.html", "timeline": "timeline.json"}[options.command]
    to: Path = options.output or (past if past.is_dir() else past.parent) / name
    try:
        if options.command == "report":
            write_report(past, to)
        else:
            write_timeline(past, to, last=max(options.last, 0))
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(to)
    return 0


def _doctor(file: Path, overrides: list[str], *, json: bool) -> int:
    from weightsync.doctor.rendering import as_json, wrong_file

    loaded = _load(file, overrides)
    if isinstance(loaded, ConfigError):
        if json:
            print(as_json([wrong_file(loaded)]))
        return 2
    from weightsync.doctor.run import doctor

    return doctor(loaded, json=json)


def _bench(file: Path, overrides: list[str], *, rounds: int, json: bool) -> int:
    config = _load(file, overrides)
    if isinstance(config, ConfigError):
        return 2
    from weightsync.bench.run import bench

    return bench(config, rounds=rounds, json=json)


def _run(file: Path, overrides: list[str], *, only_check: bool) -> int:
    config = _load(file, overrides)
    if isinstance(config, ConfigError):
        return 2
    if only_check:
        from weightsync.pipeline.records import config_text

        print(config_text(config), end="")
        return 0
    # Ray is imported from here on: nothing of it is there while a file is only checked.
    from rich.console import Console

    from weightsync.pipeline.run import run

    return run(config, Console())


def _load(file: Path, overrides: list[str]) -> PipelineConfig | ConfigError:
    """What is wrong with the file, where something is, was said on stderr."""
    from weightsync.pipeline.check import load
    from weightsync.pipeline.document import excerpt

    try:
        return load(file, overrides)
    except ConfigError as error:
        if line := excerpt(error):
            print(line, file=sys.stderr)
        print(f"error: {error}", file=sys.stderr)
        return error
