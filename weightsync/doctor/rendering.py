"""Findings for people: topic by topic, coloured on a terminal, plain aligned lines elsewhere; and for programs, as JSON."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.text import Text

from weightsync.doctor.finding import LEVELS, Check, Finding
from weightsync.errors import ConfigError

_INDENT = "  "


def show(findings: Sequence[Finding], console: Console) -> None:
    """One line a finding, with what was expected and the cure below where it is not green; then how many there are."""
    width = max((len(finding.check) for finding in findings), default=0)
    topic = ""
    for finding in findings:
        if finding.topic != topic:
            topic = finding.topic
            _print(console, Text(topic, style="bold"))
        line = Text(f"{_INDENT}{finding.level:<6}", style=f"bold {finding.level}")
        line.append(f"  {finding.check:<{width}}  ", style="default")
        line.append(finding.found, style="default")
        _print(console, line)
        margin = " " * (len(_INDENT) + 8 + width + 2)
        if finding.expected:
            _print(console, Text(f"{margin}expected: {finding.expected}"))
        if finding.cure:
            _print(console, Text(f"{margin}cure: {finding.cure}"))
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    _print(console, Text(", ".join(f"{count} {level}" for level, count in counts.items())))


def as_json(findings: Sequence[Finding]) -> str:
    """A list of objects with the fields of `Finding`."""
    return msgspec.json.format(msgspec.json.encode(list(findings)), indent=2).decode()


def wrong_file(error: ConfigError) -> Finding:
    """A file that cannot be run, for programs; people are told by the error itself."""
    return Check("file", error.key or "file").red(str(error), cure="change what is named, in the file or the override")


def _print(console: Console, text: Text) -> None:
    console.print(text, highlight=False, soft_wrap=True)
