"""Numbers as a reader wants them: "3.2 ms", "1.07 GB", "24.5 %"."""

from __future__ import annotations

import time


def took(seconds: float) -> str:
    """ "3.2 ms", "1.45 s", "2 min 5 s"."""
    if seconds < 0.9995:
        return f"{1e3 * seconds:.3g} ms" if seconds else "0"
    if seconds < 119.5:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def size(nbytes: int) -> str:
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes} B"


def speed(gb_per_s: float) -> str:
    return f"{size(round(1e9 * gb_per_s))}/s"


def short(value: float) -> str:
    return f"{value:.3g}"


def whole(value: float) -> str:
    return f"{value:g}"


def percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def when(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix))
