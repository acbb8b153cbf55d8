"""A finding: one line of what a doctor says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

Level = Literal["green", "yellow", "red"]
LEVELS: tuple[Level, ...] = ("green", "yellow", "red")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one check found at one party, or at all.

    green: as it should be. yellow: updates will work, at a cost or a risk that is named. red: an update would be refused,
    would fail, or would leave engines with answers from old weights.
    """

    topic: str
    check: str
    level: Level
    party: str = ""
    """ "trainer 0", "engine 1 rank 3", several of them, or "" for the whole."""
    found: str
    expected: str = ""
    cure: str = ""
    """What to change; there is one unless the finding is green."""

    def __post_init__(self) -> None:
        assert self.level == "green" or self.cure, (
            f"{self.topic}: {self.check}: a finding that is not green needs a cure"
        )


class Check:
    """Makes the findings of one check."""

    def __init__(self, topic: str, check: str) -> None:
        self._topic, self._check = topic, check

    def green(self, found: str, *, party: str = "") -> Finding:
        return Finding(topic=self._topic, check=self._check, level="green", found=found, party=party)

    def yellow(self, found: str, *, cure: str, party: str = "", expected: str = "") -> Finding:
        return self.at("yellow", found, cure=cure, party=party, expected=expected)

    def red(self, found: str, *, cure: str, party: str = "", expected: str = "") -> Finding:
        return self.at("red", found, cure=cure, party=party, expected=expected)

    def at(self, level: Level, found: str, *, cure: str, party: str = "", expected: str = "") -> Finding:
        return Finding(
            topic=self._topic, check=self._check, level=level, found=found, party=party, expected=expected, cure=cure
        )


def exit_code(findings: Iterable[Finding]) -> int:
    """1 where any is red, else 0."""
    return int(any(finding.level == "red" for finding in findings))


def some(names: Sequence[str], *, limit: int = 3) -> str:
    """The first few of *names*, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def size(nbytes: float) -> str:
    """Bytes for people: "512 MiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "bytes" or nbytes >= 100 else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
