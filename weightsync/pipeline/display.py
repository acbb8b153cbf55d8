"""What a run shows: aligned lines, a step each; on a terminal also what is under way, below them.

Lines are written once: a table that grows and is drawn again and again costs a core after some hundred steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table

from weightsync.report import Progress, UpdateReport

_MAX_METRICS = 6
_MAX_ENGINES = 8
LOOK_S = 0.25
"""From one look at an update under way to the next."""


class Display:
    """A row a step: the version that was sampled, the trainer's metrics, and the update after it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._names: tuple[str, ...] | None = None
        self._widths: tuple[int, ...] = ()
        self._live: Live | None = None
        self.at = "the start"
        """What the run is at, for whoever must say where it stopped."""

    def say(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

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
            self._show(Spinner("dots", text=what))

    @contextmanager
    def following(self, look: Callable[[], Progress | None]) -> Iterator[None]:
        """While an update runs: how far it is, as *look* tells now and then, on a thread of its own that has ended
        afterwards. Elsewhere than on a terminal nobody looks."""
        if self._live is None:
            yield
            return
        over = threading.Event()

        def follow() -> None:
            while not over.wait(LOOK_S):
                if (progress := look()) is not None and not over.is_set():
                    self._show(Group(Spinner("dots", text=f"{self.at}: {_headline(progress)}"), engine_table(progress)))

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _show(self, below: RenderableType) -> None:
        if self._live is not None:
            self._live.update(below)

    def row(
        self, step: int, version: int, metrics: Mapping[str, float], seconds: float, update: UpdateReport | None
    ) -> None:
        """A finished step; the first one's metrics decide which have a column."""
        if self._names is None:
            self._names = tuple(metrics)[:_MAX_METRICS]
            columns = ("step", "version", *self._names, "update s", "pause s", "GB/s", "changed", "step s")
            self._widths = tuple(max(len(column), 9 if column in self._names else 7) for column in columns)
            if self._console.is_terminal:
                self.say("version: of the weights that sampled; update: the one after the step", style="dim")
            self._line(columns, style="bold")
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
        self._line(cells)

    def end(self) -> None:
        """Nothing is under way any more."""
        if self._live is not None:
            self._live.update("")
            self._live.stop()
            self._live = None

    def _line(self, texts: tuple[str, ...], style: str | None = None) -> None:
        self.say("  ".join(text.rjust(width) for text, width in zip(texts, self._widths, strict=True)), style)


def _headline(progress: Progress) -> str:
    to = "" if progress.version is None else f"to version {progress.version}, "
    return f"{to}{progress.phase}, {progress.seconds:.1f} s"


def engine_table(progress: Progress) -> Table:
    """A line an engine: how much has come, how fast, how many module groups are whole."""
    table = Table.grid(padding=(0, 2))
    for i, (engine, at) in enumerate(progress.engines.items()):
        if i == _MAX_ENGINES:
            table.add_row(f"and {len(progress.engines) - i} more")
            break
        speed = decimal(round(at.nbytes / at.seconds)) if at.seconds else "0 bytes"
        table.add_row(
            engine,
            ProgressBar(total=max(at.of_nbytes, 1), completed=at.nbytes, width=24),
            f"{decimal(at.nbytes)} of {decimal(at.of_nbytes)}",
            f"{speed}/s",
            f"{at.groups} of {at.num_groups} groups",
        )
    return table
