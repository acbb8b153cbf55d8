"""The example of a sharded trainer, as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp.py"


def test_the_engine_equals_two_fsdp_ranks() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the engine equals the trainers: True") == 3
