"""Small charts as inline SVG: lines over steps, stacked bars over updates. Colours are the page's CSS classes.

A chart is 360 units wide, so that on a phone a unit is about a pixel; what it is of is told in its title and, for each point, in
a <title>, which browsers show as a tooltip. Long runs are drawn as means of equal parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from markupsafe import Markup, escape

_WIDTH, _HEIGHT = 360, 190
_RIGHT, _TOP, _BOTTOM = 12, 12, 24
_LETTER = 6.3  # of a tick's label, at most
_MAX_POINTS, _MAX_BARS = 160, 60


@dataclass(frozen=True, slots=True)
class Bar:
    """One update."""

    label: str
    """What the x axis calls it."""
    parts: Mapping[str, float]
    """Class -> height, from the bottom up."""
    failed: bool = False
    title: str = ""


def line_chart(values: Sequence[tuple[int, float | None]], *, name: str, tell: Callable[[float], str]) -> Markup:
    """*values* by step; None breaks the line. *tell* writes a value out."""
    points = _thinned(values)
    numbers = [value for _, value in points if value is not None]
    if not numbers:
        return Markup("")
    low, high = min(numbers), max(numbers)
    frame = _Frame(points[0][0], points[-1][0], low if low < 0 or high > low > 0.5 * high else 0.0, high, tell)
    runs: list[list[tuple[float, float]]] = [[]]
    for step, value in points:
        if value is None:
            runs.append([])
        else:
            runs[-1].append((frame.x(step), frame.y(value)))
    parts = [frame.axes(), _x_label(frame, points[0][0]), _x_label(frame, points[-1][0], end=True)]
    for run in runs:
        if len(run) > 1:
            parts.append(
                Markup('<polyline class="line" points="{}"/>').format(" ".join(f"{x:.1f},{y:.1f}" for x, y in run))
            )
    half = max((frame.x(points[-1][0]) - frame.x(points[0][0])) / max(len(points) - 1, 1) / 2, 3)
    for step, value in points:
        if value is None:
            continue
        x, y = frame.x(step), frame.y(value)
        title = f"step {step}: {tell(value)}"
        # The tall rectangle is what the pointer finds; the dot shows where it is.
        parts.append(
            Markup(
                '<g class="point"><rect x="{:.1f}" y="{}" width="{:.1f}" height="{}"/><circle cx="{:.1f}" cy="{:.1f}" '
                'r="{}"/><title>{}</title></g>'
            ).format(x - half, _TOP, 2 * half, _HEIGHT - _TOP - _BOTTOM, x, y, 3 if len(points) <= 40 else 2, title)
        )
    return _svg(parts, f"{name}, {len(values)} values, last {tell(numbers[-1])}")


def bar_chart(bars: Sequence[Bar], *, name: str, tell: Callable[[float], str]) -> Markup:
    """Stacked bars in their order, a cross where one failed."""
    shown = _merged(bars)
    high = max((sum(bar.parts.values()) for bar in shown), default=0.0)
    if not high:
        return Markup("")
    frame = _Frame(0, len(shown), 0.0, high, tell)
    width = (frame.x(1) - frame.x(0)) * 0.8
    width, gap = min(width, 24.0), 1.0 if width > 4 else 0.0
    parts = [frame.axes()]
    for i, bar in enumerate(shown):
        x, bottom, inner = frame.x(i + 0.5) - width / 2, 0.0, []
        for kind, height in bar.parts.items():
            y0, y1 = frame.y(bottom), frame.y(bottom + height)
            # Thin parts touch; others are set off by the surface.
            inset = gap if y0 - y1 > 3 else 0.0
            inner.append(
                Markup('<rect class="{}" x="{:.1f}" y="{:.2f}" width="{:.1f}" height="{:.2f}"/>').format(
                    kind, x, y1, width, max(y0 - y1 - inset, 0.0)
                )
            )
            bottom += height
        if bar.failed:
            inner.append(
                Markup('<text class="cross" x="{:.1f}" y="{:.1f}">✕</text>').format(
                    frame.x(i + 0.5), max(frame.y(bottom) - 3, _TOP)
                )
            )
        inner.append(Markup("<title>{}</title>").format(bar.title))
        parts.append(Markup("<g>{}</g>").format(Markup("").join(inner)))
    parts += [_text(frame.x(0.5), _HEIGHT - 8, shown[0].label, "start")]
    if len(shown) > 1:
        parts += [_text(_WIDTH - _RIGHT, _HEIGHT - 8, shown[-1].label, "end")]
    return _svg(parts, f"{name}, {len(bars)} updates, at most {tell(high)}")


class _Frame:
    """Where values lie in a chart."""

    def __init__(self, first: float, last: float, low: float, high: float, tell: Callable[[float], str]) -> None:
        self.first, self.last = first, last if last > first else first + 1
        ticks = nice_ticks(low, high)
        self._low, self._high = ticks[0], ticks[-1]
        self._labels = [(tick, tell(tick)) for tick in ticks]
        self._left = 12 + _LETTER * max(len(label) for _, label in self._labels)

    def x(self, value: float) -> float:
        return self._left + (value - self.first) / (self.last - self.first) * (_WIDTH - self._left - _RIGHT)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - self._low) / (self._high - self._low) * (_HEIGHT - _TOP - _BOTTOM)

    def axes(self) -> Markup:
        drawn = []
        for tick, label in self._labels:
            y = self.y(tick)
            drawn.append(
                Markup('<line class="grid" x1="{:.1f}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(
                    self._left, _WIDTH - _RIGHT, y, y
                )
            )
            drawn.append(_text(self._left - 6, y + 4, label, "end"))
        return Markup("").join(drawn)


def nice_ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers that hold both."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / 4
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _thinned(values: Sequence[tuple[int, float | None]]) -> list[tuple[int, float | None]]:
    size = math.ceil(len(values) / _MAX_POINTS)
    thin: list[tuple[int, float | None]] = []
    for i in range(0, len(values), max(size, 1)):
        part = values[i : i + size]
        numbers = [value for _, value in part if value is not None]
        thin.append((part[-1][0], fmean(numbers) if numbers else None))
    return thin


def _merged(bars: Sequence[Bar]) -> list[Bar]:
    size = max(math.ceil(len(bars) / _MAX_BARS), 1)
    if size == 1:
        return list(bars)
    merged = []
    for i in range(0, len(bars), size):
        part = bars[i : i + size]
        kinds = dict.fromkeys(kind for bar in part for kind in bar.parts)
        means = {kind: sum(bar.parts.get(kind, 0.0) for bar in part) / len(part) for kind in kinds}
        title = f"mean of {len(part)}: {part[0].label} to {part[-1].label}"
        label = part[0].label if i == 0 else part[-1].label
        merged.append(Bar(label, means, any(bar.failed for bar in part), title))
    return merged


def _svg(parts: Sequence[Markup], label: str) -> Markup:
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        _WIDTH, _HEIGHT, label, Markup("").join(parts)
    )


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(x, y, anchor, escape(text))


def _x_label(frame: _Frame, step: int, *, end: bool = False) -> Markup:
    if end and step == frame.first:
        return Markup("")
    return _text(frame.x(step), _HEIGHT - 8, f"{step}" if end else f"step {step}", "end" if end else "start")
