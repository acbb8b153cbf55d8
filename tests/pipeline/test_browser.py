"""The report in a real browser: nothing on its console, charts drawn, no sideways scrolling, light and dark."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium or google-chrome on PATH")

# A frame may be as narrow as a phone; a window of headless Chromium may not.
FRAME = """<!doctype html><meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">
<script>onmessage = event => document.body.dataset.measured = event.data</script>
<iframe src="page.html" style="width: WIDTHpx; height: 4000px; border: 0"></iframe>"""
# Appended to a copy of the page: what a reader would see, measured where it is laid out.
MEASURE = """<script>
const shown = [...document.querySelectorAll("svg")].map(svg => {
  const marks = [...svg.querySelectorAll("polyline, g > rect:not(.point rect)")].filter(mark => {
    const box = mark.getBoundingClientRect(), style = getComputedStyle(mark);
    return box.width > 0 && (style.fill !== "none" || style.stroke !== "none");
  });
  const box = svg.getBoundingClientRect();
  return {marks: marks.length, width: box.width, height: box.height,
          text: Math.min(...[...svg.querySelectorAll("text")].map(t => t.getBoundingClientRect().height))};
});
const style = getComputedStyle(document.body);
parent.postMessage(JSON.stringify({
  charts: shown, overflow: document.documentElement.scrollWidth - innerWidth, width: innerWidth,
  background: style.backgroundColor, color: style.color, columns: getComputedStyle(document.querySelector(".charts")).gridTemplateColumns.split(" ").length,
  bars: [...document.querySelectorAll(".bar")].filter(bar => bar.getBoundingClientRect().width >= 2).length,
}), "*");
</script>"""


def opened(path: Path, profile: Path, *, dark: bool) -> tuple[str, list[str]]:
    """The page's DOM after it was laid out, and what was said on its console."""
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
        f"--user-data-dir={profile}", "--window-size=1400,1200", "--virtual-time-budget=3000", f"--blink-settings=preferredColorScheme={int(not dark)}",
        "--enable-logging=stderr", "--dump-dom", path.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (1280, False), (1280, True)])
def test_the_report_is_readable(run_folder: Path, tmp_path: Path, width: int, dark: bool) -> None:
    (tmp_path / "page.html").write_text((run_folder / "report.html").read_text() + MEASURE)
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.replace("WIDTH", str(width)))
    dom, console = opened(frame, tmp_path / "profile", dark=dark)
    assert console == []
    found = re.search(r'data-measured="([^"]*)"', dom)
    assert found is not None
    seen: dict[str, Any] = json.loads(unescape(found[1]))
    assert (seen["width"], seen["overflow"]) == (width, 0)
    assert seen["columns"] == (1 if width == 390 else 3)
    assert len(seen["charts"]) >= 8
    for chart in seen["charts"]:
        assert chart["marks"] >= 1
        assert chart["width"] > 280
        assert chart["height"] > 120
        assert chart["text"] > 8  # pixels
    assert seen["bars"] > 10
    brightness = sum(map(int, re.findall(r"\d+", seen["background"])[:3])) / 3
    assert (brightness < 60) == dark
    assert (sum(map(int, re.findall(r"\d+", seen["color"])[:3])) / 3 > 200) == dark


def test_an_error_on_the_console_would_be_seen(tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text("<script>console.error('seen'); none();</script>")
    _, console = opened(bad, tmp_path / "profile", dark=False)
    assert len(console) == 2
