"""A bar chart of a record of `benchmarks.onegpu`: the median of each mode, on a logarithmic scale.

python -m benchmarks.plot benchmarks/results/onegpu.json docs/images/onegpu.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

FLOOR, OURS, OTHERS = "#8a8f98", "#1f77b4", "#d9a05b"


def colour(name: str) -> str:
    if name in ("floor", "memcpy"):
        return FLOOR
    return OURS if name.startswith(("ours-", "ray-")) else OTHERS


def chart(record: Mapping[str, Any]) -> Figure:
    """Modes that failed or were skipped are left out; the fastest is at the top."""
    medians = {
        name: (result["label"], 1e3 * result["median"]["seconds"])
        for name, result in record["modes"].items()
        if "median" in result
    }
    names = sorted(medians, key=lambda name: medians[name][1], reverse=True)
    labels, values = zip(*(medians[name] for name in names), strict=True)
    figure = Figure(figsize=(9, 1.2 + 0.34 * len(names)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(labels, values, color=[colour(name) for name in names], height=0.72)
    axes.bar_label(bars, [f"{value:.3g} ms" if value < 1000 else f"{value:,.0f} ms" for value in values], padding=4)
    axes.set_xscale("log")
    axes.set_xlim(min(values) / 2, max(values) * 4)  # room for the text beside the longest bar
    axes.set_xlabel("ms per sync, median, logarithmic scale")
    axes.set_title(
        f"{record['nbytes'] / 1e9:.1f} GB of bf16 in {record['tensors']} tensors from one process to another, "
        f"{record.get('gpu') or record['device']}",
        fontsize=11,
        loc="right",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("image", type=Path)
    given = parser.parse_args()
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "weightsync", "font.size": 10})
    given.image.parent.mkdir(parents=True, exist_ok=True)
    chart(json.loads(given.record.read_text())).savefig(given.image, metadata={"Date": None})
    print(f"written to {given.image}")


if __name__ == "__main__":
    main()
