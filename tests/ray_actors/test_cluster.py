"""Several Ray nodes on one host."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path


def test_transports_follow_the_nodes_and_a_node_may_be_lost_in_mid_update() -> None:
    script = Path(__file__).with_name("cluster_script.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert importlib.util.find_spec("nixl_cu12") is None or "slices cross nodes" in done.stdout
    assert "transports follow the nodes" in done.stdout
    assert "another node took the lost one's place" in done.stdout
