"""What a run shows: a table that grows, live on a terminal, plain aligned lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from weightsync.report import UpdateReport

_MAX_METRICS = 6


class Display:
    """A row a step: the version that was sampled, the trainer's metrics, and the update after it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._names: tuple[str, ...] | None = None
        self._widths: tuple[int, ...] = ()
        self._table: Table | None = None
        self._live: Live | None = None
        self.at = "the start"
        """What the run is at, for whoever must say where it stopped."""

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def stage(self, what: str) -> Iterator[None]:
        """A slow part of the start, and how long it took."""
        started = time.perf_counter()
        self.at = what
        if self._console.is_terminal:
            with self._console.status(what):
                yield
        else:
            self.say(f"{what} ...")
            yield
        self.say(f"{what}: {time.perf_counter() - started:.1f} s")

    def doing(self, what: str) -> None:
        """What the loop is at; shown only where a line can be overwritten."""
        self.at = what
        if self._console.is_terminal:
            if self._live is None:
                self._live = Live(console=self._console, refresh_per_second=4)
                self._live.start()
            spinner = Spinner("dots", text=what)
            self._live.update(Group(self._table, spinner) if self._table is not None else spinner)

    def row(
        self, step: int, version: int, metrics: Mapping[str, float], seconds: float, update: UpdateReport | None
    ) -> None:
        """A finished step; the first one's metrics decide which have a column."""
        if self._names is None:
            self._names = tuple(metrics)[:_MAX_METRICS]
            columns = ("step", "version", *self._names, "update s", "pause s", "GB/s", "changed", "step s")
            self._widths = tuple(max(len(column), 9 if column in self._names else 7) for column in columns)
            caption = "version: of the weights that sampled; update: the one after the step"
            self._table = Table(*columns, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False, caption=caption)
            for column in self._table.columns:
                column.justify, column.no_wrap = "right", True
            if not self._console.is_terminal:
                self._line(columns)
        changed = update.changed_values if update else None
        cells = (
            str(step),
            str(version),
            *(f"{metrics[name]:.4g}" if name in metrics else "-" for name in self._names),
            f"{update.seconds:.2f}" if update else "-",
            f"{update.pause_s:.2f}" if update else "-",
            f"{update.gb_per_s:.2f}" if update else "-",
            f"{changed / update.total_values:.1%}" if update and changed is not None and update.total_values else "-",
            f"{seconds + (update.seconds if update else 0):.1f}",
        )
        assert self._table is not None
        self._table.add_row(*cells)
        if not self._console.is_terminal:
            self._line(cells)

    def end(self) -> None:
        """Leave the finished table on a terminal."""
        if self._live is not None:
            self._live.update(self._table or "")
            self._live.stop()
            self._live = None

    def _line(self, texts: tuple[str, ...]) -> None:
        self.say("  ".join(text.rjust(width) for text, width in zip(texts, self._widths, strict=True)))
