"""What a bench found: medians of updates and of the floor, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from weightsync.bench.weights import Floor
from weightsync.pipeline.numbers import size, took
from weightsync.report import UpdateReport


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Spread:
        values = list(seconds)
        return cls(median=median(values), min=min(values), max=max(values))


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one bench."""

    rounds: int
    nbytes: int
    """Of the model, as it travels."""
    apply: str
    transports: dict[str, str]
    """Pair -> transport."""
    num_direct: int
    """Module groups that an update copied instead of reloading them, on all ranks."""
    num_reloaded: int
    first_s: float
    """The first update, which opens links."""
    update: Spread
    pause: Spread
    phases: dict[str, Spread]
    floor: Spread
    """A plain copy of as many bytes, where the first trainer rank's weights lie."""
    floor_device: str
    floor_threads: int
    gb_per_s: float
    """Of the median update."""
    floor_gb_per_s: float
    ratio: float
    """Median update over median floor."""


def figures_of(first: UpdateReport, reports: Sequence[UpdateReport], floors: Sequence[Floor]) -> Figures:
    """*reports* of all rounds, *floors* of the first trainer rank, which may hold a part of the model only."""
    last = reports[-1]
    update = Spread.of(report.seconds for report in reports)
    floor = Spread.of(each.seconds * last.nbytes / max(each.nbytes, 1) for each in floors)
    return Figures(
        rounds=len(reports),
        nbytes=last.nbytes,
        apply=last.apply,
        transports=last.transports,
        num_direct=sum(row.num_direct for row in last.ranks),
        num_reloaded=sum(len(row.reloaded) for row in last.ranks),
        first_s=first.seconds,
        update=update,
        pause=Spread.of(report.pause_s for report in reports),
        phases={name: Spread.of(report.phases.get(name, 0.0) for report in reports) for name in last.phases},
        floor=floor,
        floor_device=floors[0].device,
        floor_threads=floors[0].threads,
        gb_per_s=last.nbytes / update.median / 1e9,
        floor_gb_per_s=last.nbytes / floor.median / 1e9,
        ratio=update.median / floor.median,
    )


def show(figures: Figures, console: Console) -> None:
    """A table of medians, and below it what they are of."""
    table = Table("", "median", "min", "max", "GB/s", "x floor", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns:
        column.no_wrap = True
        column.justify = "right" if column.header else "left"

    def row(name: str, spread: Spread, gb_per_s: float | None = None) -> None:
        rate = "" if gb_per_s is None else f"{gb_per_s:.3g}"
        times = "" if gb_per_s is None else f"{spread.median / figures.floor.median:.2f}"
        table.add_row(name, took(spread.median), took(spread.min), took(spread.max), rate, times)

    row("plain copy (the floor)", figures.floor, figures.floor_gb_per_s)
    row("update", figures.update, figures.gb_per_s)
    for name, spread in figures.phases.items():
        row(f"  {name}", spread)
    row("engines paused", figures.pause)
    console.print(table)
    threads = f", {figures.floor_threads} threads" if figures.floor_device == "cpu" else ""
    for line in (
        f"{size(figures.nbytes)}, {figures.rounds} rounds, other values in each; apply: {figures.apply}",
        f"the floor: the same bytes copied once on {figures.floor_device}{threads}, in the process of trainer 0",
        f"the first update, which opens links: {took(figures.first_s)}",
        f"module groups loaded by copies: {figures.num_direct}, by the engine's loader: {figures.num_reloaded}",
        *(f"{pair}: {transport}" for pair, transport in figures.transports.items()),
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
