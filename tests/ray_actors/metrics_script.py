"""Updates of every outcome with metrics on, on a Ray of its own; prints what its exporter says. Run by test_metrics.py."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import ray
import torch

import weightsync as ws
from weightsync.ray_actors.metrics import METRICS


class Model:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(64, 32)
        self.layers = {"weight": self.model.weight, "bias": self.model.bias}

    def drop(self) -> None:
        self.layers.pop("bias")


def main(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ray.init(
        address="local",
        num_cpus=4,
        object_store_memory=10**8,
        include_dashboard=False,
        log_to_driver=False,
        _metrics_export_port=port,
        _system_config={"metrics_report_interval_ms": 500},
    )
    trainer, *engines = [ray.remote(Model).options(num_cpus=0.1).remote(seed) for seed in range(4)]
    config = {"metrics": True, "flight_record": str(folder / "flights" / "record.jsonl")}
    with ws.connect(trainers=[trainer], engines=engines[:2], source="layers", target="model", config=config) as sync:
        sync.update()
        sync.update()
        sync.add_engine(engines[2])
        ray.get(trainer.drop.remote())
        with contextlib.suppress(ws.ManifestError):
            sync.update()
        print(read(port))
    ray.shutdown()


def read(port: int) -> str:
    """The exporter's text, as soon as it has all of ours."""
    wanted = [name for metric in METRICS for name in metric.exported]
    text, deadline = "", time.monotonic() + 40
    while time.monotonic() < deadline and not all(name in text for name in wanted):
        time.sleep(0.5)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                text = answer.read().decode()
        except (urllib.error.URLError, TimeoutError):
            continue
    return "\n".join(line for line in text.splitlines() if line.startswith("ray_weightsync"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
