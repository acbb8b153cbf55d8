"""The table that grows while the loop runs: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from examples.rl.verdict import Row

COLUMNS = ("step", "version", "reward", "gap", "update s", "pause s", "GB/s", "changed", "step s")
# The heads are narrower than what may stand below them (a gap in break mode, a rate).
WIDTHS = tuple(max(len(column), 7) for column in COLUMNS)


def cells(row: Row) -> tuple[str, ...]:
    """One row as text; ``-`` where there is nothing to say."""
    update = row.update
    share = update.changed_share if update else None
    total_s = row.rollout_s + row.train_s + (update.seconds if update else 0.0)
    return (
        str(row.step),
        str(row.version),
        f"{row.reward:.2f}",
        f"{row.gap:.3f}",
        f"{update.seconds:.2f}" if update else "-",
        f"{update.pause_s:.2f}" if update else "-",
        f"{update.gb_per_s:.2f}" if update else "-",
        f"{share:.1%}" if share is not None else "-",
        f"{total_s:.1f}",
    )


class Progress:
    """Says what is going on. Use as a context manager around the loop."""

    def __init__(self, console: Console) -> None:
        self._console = console
        # No lines between columns: all of them then fit into 80 characters.
        caption = "version: of the weights that sampled; update: the one after the step"
        self._table = Table(*COLUMNS, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False, caption=caption)
        for column in self._table.columns:
            column.justify = "right"
            column.no_wrap = True
        self._live = Live(console=console, auto_refresh=True, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        else:
            self._line(COLUMNS)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._console.is_terminal:
            self._live.update(self._table)
            self._live.stop()

    def doing(self, what: str) -> None:
        """Show what the loop is at; only where a line can be overwritten."""
        if self._console.is_terminal:
            self._live.update(Group(self._table, Spinner("dots", text=what)))

    def add(self, row: Row) -> None:
        """Show a finished row."""
        self._table.add_row(*cells(row))
        if not self._console.is_terminal:
            self._line(cells(row))

    def _line(self, texts: tuple[str, ...]) -> None:
        padded = (text.rjust(width) for text, width in zip(texts, WIDTHS, strict=True))
        self._console.print("  ".join(padded), highlight=False)


@contextmanager
def stage(console: Console, what: str) -> Iterator[None]:
    """Announce a slow part of the start and say how long it took."""
    started = time.perf_counter()
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        console.print(f"{what} ...", highlight=False)
        yield
    console.print(f"{what}: {time.perf_counter() - started:.1f} s", highlight=False)
