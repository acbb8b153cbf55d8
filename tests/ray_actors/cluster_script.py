"""Several Ray nodes on this host: which transport each pair gets, and a node that is lost in mid update.

Run by test_cluster.py in a process of its own, since a process has one Ray.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import weightsync as ws


class Model:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        self.seconds = 0.0

    def step(self, seconds: float) -> None:
        self.seconds = seconds
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(1)

    def source(self) -> Any:
        for name, tensor in self.model.state_dict().items():
            time.sleep(self.seconds)
            yield name, tensor

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: t.clone() for name, t in self.model.state_dict().items()}


def start(seed: int, node: Any) -> Any:
    place = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    return ray.remote(Model).options(num_cpus=0.1, scheduling_strategy=place).remote(seed)


def same(*actors: Any) -> bool:
    first, *others = ray.get([actor.weights.remote() for actor in actors])
    return all(torch.equal(first[name], other[name]) for other in others for name in first)


def failure_of(sync: ws.WeightSync) -> ws.WeightSyncError:
    try:
        sync.update()
    except ws.WeightSyncError as error:
        return error
    raise AssertionError("the loss of a node went unnoticed")


def pull_slices(trainer: Any, near: Any, other: Any) -> None:
    """An engine on another node has its slices pulled by a sidecar there."""
    rules = [{"use": "shared_memory", "same_node": True}, {"use": "sharded_rdt"}]
    config = {"transport": rules, "timeout_s": 60}
    with ws.connect(trainers=[trainer], engines=[near, other], source="model", target="model", config=config) as sync:
        report = sync.update()
        assert same(trainer, near, other)
        assert list(report.transports.values()) == ["shared_memory", "sharded_rdt"], report.transports
        (said,) = sync.status()["transport_details"].values()
        assert said.startswith("NIXL over UCX ("), said
        places = {row["name"].split(" ")[3] for row in ray.util.list_named_actors(True) if "sidecar" in row["name"]}
        assert places == {"trainer", "engine"}, places
    print("slices cross nodes", flush=True)


def main() -> None:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "object_store_memory": 10**8, "include_dashboard": False},
    )
    # With one node there, this process belongs to it, and with it the coordinator.
    ray.init(address=cluster.address, logging_level="error", log_to_driver=False)
    far = cluster.add_node(num_cpus=1, object_store_memory=10**8)
    trainer, near, lost = start(1, cluster.head_node), start(2, cluster.head_node), start(3, far)
    rules = [{"use": "shared_memory", "same_node": True}, {"use": "broadcast"}]
    config = {"transport": rules, "timeout_s": 20}
    if importlib.util.find_spec("nixl_cu12") is not None:
        pull_slices(trainer, near, lost)
    with ws.connect(trainers=[trainer], engines=[near, lost], source="source", target="model", config=config) as sync:
        report = sync.update()
        assert same(trainer, near, lost)
        assert report.transports == {
            "trainer 0 -> engine 0 rank 0": "shared_memory",
            "trainer 0 -> engine 1 rank 0": "broadcast",
        }, report.transports
        nodes = [row.node for row in report.ranks]
        assert nodes == [cluster.head_node.node_id, cluster.head_node.node_id, far.node_id], nodes
        print("transports follow the nodes", flush=True)

        ray.get(trainer.step.remote(1.5))
        before = ray.get(near.weights.remote())
        threading.Timer(0.7, cluster.remove_node, (far,), {"allow_graceful": False}).start()
        started = time.monotonic()
        error = failure_of(sync)
        seconds = time.monotonic() - started
        print(f"{seconds:.1f} s: {type(error).__name__}: {error}", flush=True)
        assert (error.rank or "").startswith("engine 1"), error.rank
        assert far.node_id[:8] in str(error)
        assert seconds < 30
        after = ray.get(near.weights.remote())
        assert all(torch.equal(before[name], after[name]) for name in before), "the other engine has its old version"

        sync.remove_engine(lost)
        ray.get(trainer.step.remote(0.0))
        sync.update()
        assert same(trainer, near)
        late = start(4, cluster.add_node(num_cpus=1, object_store_memory=10**8))
        # Where nothing has gone over broadcast since, the version cannot be proven, and the engine waits.
        report = sync.add_engine(late) or sync.update()
        assert report.joined == ("engine 2",), report
        assert same(trainer, near, late)
        assert report.transports["trainer 0 -> engine 2 rank 0"] == "broadcast"
        print("another node took the lost one's place", flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
