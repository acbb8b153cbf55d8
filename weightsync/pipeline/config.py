"""What a pipeline file says, as types. `weightsync schema` prints them as a JSON Schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from weightsync.config import SyncConfig

Arguments = dict[str, Any]
ClassPath = Annotated[str, Meta(description='a class path: "package.module:Class"')]
Count = Annotated[int, Meta(ge=1, description="a whole number, 1 or more")]


class Resources(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What Ray reserves for each actor."""

    num_cpus: Annotated[float, Meta(ge=0, description="CPUs of each actor")] = 1.0
    num_gpus: Annotated[float, Meta(ge=0, description="GPUs of each actor; a fraction shares one")] = 0.0


class ModelMaker(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How to make the model."""

    make: Annotated[str, Meta(description='a function: "package.module:function"; returns the model\'s path')]
    arguments: Annotated[Arguments, Meta(description="keyword arguments of the function")] = {}


class TrainerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who trains."""

    class_: ClassPath = msgspec.field(name="class")
    ranks: Annotated[Count, Meta(description="how many processes train together")] = 1
    resources: Annotated[Resources, Meta(description="of each rank")] = Resources()
    arguments: Annotated[Arguments, Meta(description="keyword arguments of the class")] = {}
    env: Annotated[dict[str, str], Meta(description="environment variables of each rank")] = {}


class EnginesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who generates."""

    kind: Annotated[Literal["vllm", "torch"], Meta(description="vllm: vllm.LLM. torch: a module of your own")]
    class_: ClassPath | None = msgspec.field(name="class", default=None)
    """Kind torch: a class or function that returns an nn.Module, or an object that has one as `model`."""
    replicas: Annotated[Count, Meta(description="how many engines")] = 1
    resources: Annotated[Resources, Meta(description="of each engine, with all its ranks")] = Resources()
    arguments: Annotated[Arguments, Meta(description="keyword arguments of vllm.LLM, or of the class")] = {}
    sampling: Annotated[
        Arguments, Meta(description="keyword arguments of vllm.SamplingParams, or of the module's rollout()")
    ] = {}
    placement: Annotated[
        Literal["colocated", "apart"],
        Meta(description="colocated: engine i in the placement group bundle of trainer rank i. apart: each in its own"),
    ] = "apart"
    env: Annotated[dict[str, str], Meta(description="environment variables of each engine")] = {}


class RunConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What to do."""

    steps: Annotated[Count, Meta(description="training steps: a whole number, 1 or more")]
    sync_every: Annotated[Count, Meta(description="steps from one update of the engines to the next")] = 1
    verify_every: Annotated[
        int,
        Meta(
            ge=0, description="updates from one proof that the engines hold the trainer's weights to the next; 0: none"
        ),
    ] = 0
    out: Annotated[str, Meta(description="folder for the records; those of an earlier run in it are replaced")] = (
        "runs/pipeline"
    )
    seed: Annotated[int, Meta(ge=0, description="of the sampling")] = 0
    start_timeout_s: Annotated[float, Meta(gt=0, description="how long the cluster may take to have room")] = 300.0
    log_actors: Annotated[bool, Meta(description="show what the actors print")] = False


class PipelineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A pipeline of `weightsync run`."""

    model: Annotated[
        str | ModelMaker | None, Meta(description="a checkpoint's path or name, or how to make one; passed as `model`")
    ] = None
    trainer: Annotated[TrainerConfig, Meta(description="a mapping with class, ranks, resources, arguments, env")]
    engines: Annotated[EnginesConfig, Meta(description="a mapping with kind, replicas, placement and more")]
    sync: Annotated[SyncConfig, Meta(description="settings of the weight sync")] = SyncConfig()
    run: Annotated[RunConfig, Meta(description="a mapping with steps, and sync_every, out, seed if you like")]


def schema() -> dict[str, Any]:
    """JSON Schema of a pipeline file."""
    made = msgspec.json.schema(PipelineConfig)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "weightsync pipeline", **made}
