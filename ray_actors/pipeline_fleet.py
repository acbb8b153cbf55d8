"""Ray for a pipeline: a cluster that is there or one of its own, the actors in their bundles, and their end."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from weightsync.errors import WeightSyncError
from weightsync.pipeline.config import PipelineConfig, Resources
from weightsync.ray_actors.pipeline_actors import TorchEngineActor, TrainerActor, VllmEngineActor

Calls = dict[str, Any]
"""Who -> the reference of a call that it works on."""


class RunError(Exception):
    """A run failed. `who` and `why` are one line each."""

    def __init__(self, who: str, error: BaseException | str) -> None:
        self.who, self.error, self.why = who, error, error if isinstance(error, str) else explain(error)
        super().__init__(self.who if self.why.startswith(self.who) else f"{self.who}: {self.why}")


def explain(error: BaseException) -> str:
    """What went wrong, in a line: the remote error's kind and text, and where it was raised."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, RayActorError):
        text = "its process is gone: " + re.sub(r"Some common causes include.*", "", str(cause), flags=re.DOTALL)
    elif isinstance(cause, WeightSyncError):
        return f"{_line(str(cause))} ({type(cause).__name__})"
    else:
        text = f"{type(cause).__name__}: {cause}"
    places = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', str(error)) if isinstance(error, RayTaskError) else []
    where = f" ({os.path.basename(places[-1][0])}:{places[-1][1]} in {places[-1][2]})" if places else ""
    return _line(text) + where


def _line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 600 else text[:597] + "..."


def ask(calls: Calls) -> list[Any]:
    """The answers, in order. The first that fails ends the wait, so that a rank which waits for it is not waited for.

    Raises:
        RunError: with who failed.
    """
    pending = {ref: who for who, ref in calls.items()}
    while pending:
        ready, _ = ray.wait(list(pending), num_returns=1)
        for ref in ready:
            who = pending.pop(ref)
            try:
                ray.get(ref)
            except Exception as error:
                raise RunError(who, error) from error
    return [ray.get(ref) for ref in calls.values()]


class Fleet:
    """Trainer ranks and engines of one pipeline."""

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config
        self._group: Any = None
        self.trainers: list[Any] = []
        self.engines: list[Any] = []
        address = os.environ.get("RAY_ADDRESS", "")
        self.address = "" if address == "local" else address
        """Of the cluster to join; empty: a Ray of our own, on this machine."""

    def connect(self) -> None:
        """Join the cluster, or start one that has room for the pipeline.

        Raises:
            RunError: no cluster at the address, or no room.
        """
        options: dict[str, Any] = {"log_to_driver": self._config.run.log_actors, "logging_level": logging.ERROR}
        if not self.address:
            num_cpus = int(sum(bundle.get("CPU", 0) for bundle in self._bundles()) + 0.999)
            options |= {
                "address": "local",
                "num_cpus": max(num_cpus, len(os.sched_getaffinity(0))),  # slots; no thread is bound to a core
                "object_store_memory": 500 * 1024**2,
                "include_dashboard": False,
            }
        else:
            options["address"] = self.address
        try:
            ray.init(**options)
        except Exception as error:
            place = f"RAY_ADDRESS={self.address}" if self.address else "a local Ray"
            raise RunError("Ray", f"cannot connect to {place}: {explain(error)}") from error
        needed = sum(bundle.get("GPU", 0) for bundle in self._bundles())
        there = ray.cluster_resources().get("GPU", 0)
        if not self.address and needed > there:
            raise RunError(
                "Ray", f"the pipeline needs {needed:g} GPUs, this machine has {there:g}; see resources.num_gpus"
            )

    def _bundles(self) -> list[dict[str, float]]:
        """Trainer ranks first; colocated engines in theirs, others in bundles of their own."""
        trainer, engines = self._config.trainer, self._config.engines
        bundles = [_bundle(trainer.resources) for _ in range(trainer.ranks)]
        for i in range(engines.replicas):
            own = _bundle(engines.resources)
            if engines.placement == "colocated":
                bundles[i] = {name: bundles[i].get(name, 0) + own.get(name, 0) for name in {*bundles[i], *own}}
            else:
                bundles.append(own)
        return bundles

    def start(self, model: str | None) -> None:
        """Reserve the bundles, make the actors and have them load, all at the same time.

        Raises:
            RunError: no room, or who could not load and why.
        """
        config = self._config
        self._group = placement_group(self._bundles(), strategy="PACK")
        try:
            ray.get(self._group.ready(), timeout=config.run.start_timeout_s)
        except GetTimeoutError:
            needs = ", ".join(str(bundle) for bundle in self._bundles())
            raise RunError(
                "Ray",
                f"no room for {needs} within {config.run.start_timeout_s:g} s; available: {ray.available_resources()}",
            ) from None
        engines = config.engines
        kind = VllmEngineActor if engines.kind == "vllm" else TorchEngineActor
        first = 0 if engines.placement == "colocated" else config.trainer.ranks
        self.trainers = [
            self._actor(TrainerActor, rank, config.trainer.resources, config.trainer.env)
            for rank in range(config.trainer.ranks)
        ]
        self.engines = [self._actor(kind, first + i, engines.resources, engines.env) for i in range(engines.replicas)]
        with_model = {} if model is None else {"model": model}
        address, port = ask({"trainer 0": self.trainers[0].address.remote()})[0]
        calls = {}
        for rank, actor in enumerate(self.trainers):
            env = {
                "RANK": rank,
                "WORLD_SIZE": len(self.trainers),
                "LOCAL_RANK": 0,
                "MASTER_ADDR": address,
                "MASTER_PORT": port,
            }
            calls[f"trainer {rank}"] = actor.build.remote(
                config.trainer.class_, {**config.trainer.arguments, **with_model}, {k: str(v) for k, v in env.items()}
            )
        for i, actor in enumerate(self.engines):
            if engines.kind == "vllm":
                call = actor.build.remote(model, {"seed": config.run.seed, **engines.arguments}, engines.sampling)
            else:
                call = actor.build.remote(engines.class_, {**engines.arguments, **with_model}, engines.sampling)
            calls[f"engine {i}"] = call
        ask(calls)

    def _actor(self, kind: type, bundle: int, resources: Resources, env: dict[str, str]) -> Any:
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        options: dict[str, Any] = {
            "num_cpus": resources.num_cpus,
            "num_gpus": resources.num_gpus,
            "scheduling_strategy": place,
        }
        if env:
            options["runtime_env"] = {"env_vars": env}
        return ray.remote(kind).options(**options).remote()

    def stop(self) -> None:
        """End the actors, give the bundles back, and leave the cluster, or end ours. Never raises."""
        if not ray.is_initialized():
            return
        with contextlib.suppress(Exception):
            for actor in (*self.engines, *self.trainers):
                ray.kill(actor)
        with contextlib.suppress(Exception):
            if self._group is not None:
                remove_placement_group(self._group)
        with contextlib.suppress(Exception):
            ray.shutdown()


def _bundle(resources: Resources) -> dict[str, float]:
    named = {"CPU": resources.num_cpus, "GPU": resources.num_gpus}
    return {name: number for name, number in named.items() if number}
