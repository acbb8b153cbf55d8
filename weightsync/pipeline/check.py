"""What can be known to be wrong before anything is started: classes, contradictions, placement."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weightsync.errors import ConfigError
from weightsync.pipeline.config import EnginesConfig, ModelMaker, PipelineConfig
from weightsync.pipeline.document import Document, near
from weightsync.registry import check_transport

EXTENSION = "weightsync.ray_actors.vllm_worker.WeightSyncWorkerExtension"


def load(path: Path, overrides: list[str]) -> PipelineConfig:
    """The checked pipeline of a file and overrides of a command line; its classes are imported, nothing is started.

    Raises:
        ConfigError: with file and line (or the override), key, value, and what was expected.
    """
    document = Document(path, overrides)
    config = document.read(PipelineConfig)
    _check_model(document, config)
    _check_resources(document, config)
    _check_placement(document, config)
    _check_sync(document, config)
    _check_trainer(document, config)
    _check_engines(document, config)
    _check_run(document, config)
    return config


def resolve(path: str) -> Any:
    """What a class path names; used in the actors, after `load` has checked it."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _check_model(document: Document, config: PipelineConfig) -> None:
    model = config.model
    if isinstance(model, ModelMaker):
        function = _found(document, "model.make", model.make)
        _check_arguments(document, "model.arguments", function, model.arguments)
    elif model is not None:
        if not model:
            raise document.error("model", "expected a path or a name")
        if model.startswith(("/", ".", "~")) and not Path(model).expanduser().is_dir():
            raise document.error("model", "no such folder; expected a checkpoint folder, or a name of a model hub")
    elif config.engines.kind == "vllm":
        raise document.error("model", "is missing; vLLM engines need a checkpoint's path or name")
    if model is not None:
        for party in ("trainer", "engines"):
            if "model" in getattr(config, party).arguments:
                raise document.error(f"{party}.arguments.model", "the file has a model at its top already; remove one")


def _check_resources(document: Document, config: PipelineConfig) -> None:
    for party in ("trainer", "engines"):
        resources, key = getattr(config, party).resources, f"{party}.resources"
        if resources.num_gpus > 1 and resources.num_gpus % 1:
            raise document.error(f"{key}.num_gpus", "expected a whole number, or a fraction below 1 to share a GPU")
        if not resources.num_cpus and not resources.num_gpus:
            raise document.error(key, "num_cpus and num_gpus are both 0, so that Ray has nothing to reserve; set one")
    engines = config.engines
    ways = engines.arguments.get("tensor_parallel_size", 1) if engines.kind == "vllm" else 1
    if isinstance(ways, int) and ways > 1 and 0 < engines.resources.num_gpus < ways:
        raise document.error(
            "engines.arguments.tensor_parallel_size",
            f"needs {ways} GPUs an engine, engines.resources.num_gpus is {engines.resources.num_gpus:g}; make them equal",
        )


def _check_placement(document: Document, config: PipelineConfig) -> None:
    engines, trainer = config.engines, config.trainer
    if engines.placement != "colocated":
        return
    if engines.replicas > trainer.ranks:
        raise document.error(
            "engines.placement",
            f"{engines.replicas} engines cannot each share the bundle of one of {trainer.ranks} trainer ranks; "
            f"set engines.replicas to {trainer.ranks} or less, or engines.placement to apart",
        )
    shares = trainer.resources.num_gpus, engines.resources.num_gpus
    if all(shares) and sum(shares) > 1:
        raise document.error(
            "engines.placement",
            f"trainer.resources.num_gpus {shares[0]:g} and engines.resources.num_gpus {shares[1]:g} do not fit one GPU; "
            "write fractions whose sum is 1 (0.5 and 0.5), or set engines.placement to apart",
        )
    if all(shares) and engines.kind == "vllm" and "gpu_memory_utilization" not in engines.arguments:
        raise document.error(
            "engines.arguments.gpu_memory_utilization",
            "is missing; by default vLLM takes most of the GPU that it shares with the trainer, write for example 0.4",
        )


def _check_sync(document: Document, config: PipelineConfig) -> None:
    transport = config.sync.transport
    names = {"sync.transport": transport} if isinstance(transport, str) else {}
    if not isinstance(transport, str):
        names = {f"sync.transport[{i}].use": rule.use for i, rule in enumerate(transport)}
    for key, name in names.items():
        if name != "auto":
            try:
                check_transport(name)
            except ConfigError as error:
                raise document.error(key, str(error).removeprefix("transport: ")) from None


def _check_trainer(document: Document, config: PipelineConfig) -> None:
    trainer = config.trainer
    kind = _found(document, "trainer.class", trainer.class_)
    if not inspect.isclass(kind):
        raise document.error("trainer.class", "this is no class; expected one with step(step, rollouts) and weights()")
    for name, arguments in (("step", ("step", "rollouts")), ("weights", ())):
        call = f"{name}({', '.join(arguments)})"
        method = getattr(kind, name, None)
        if not callable(method):
            own = [other for other in dir(kind) if not other.startswith("_") and other != name]
            hint = near(name, own)
            raise document.error(
                "trainer.class",
                f"{kind.__name__} has no method {call}" + (f"; {hint}" if "mean" in hint else "; add it"),
            )
        if inspect.iscoroutinefunction(method):
            raise document.error("trainer.class", f"{kind.__name__}.{name} is async; expected a plain method")
        if (problem := _unfit(method, (None, *arguments), {})) is not None:
            raise document.error("trainer.class", f"{kind.__name__}.{name} cannot be called as {call}: {problem}")
    _check_arguments(document, "trainer.arguments", kind, _with_model(trainer.arguments, config))


def _check_engines(document: Document, config: PipelineConfig) -> None:
    engines = config.engines
    if engines.kind == "torch":
        if engines.class_ is None:
            raise document.error("engines.class", 'is missing; kind torch needs "package.module:Class" of an nn.Module')
        made = _found(document, "engines.class", engines.class_)
        if not callable(made):
            raise document.error("engines.class", "expected a class or function that returns an nn.Module")
        _check_arguments(document, "engines.arguments", made, _with_model(engines.arguments, config))
    else:
        _check_vllm(document, engines)


def _check_vllm(document: Document, engines: EnginesConfig) -> None:
    if engines.class_ is not None:
        raise document.error(
            "engines.class", "engines of kind vllm are vllm.LLM; remove it, or set engines.kind to torch"
        )
    if engines.arguments.get("worker_extension_cls", EXTENSION) != EXTENSION:
        raise document.error("engines.arguments.worker_extension_cls", f"a pipeline needs {EXTENSION}; remove the key")
    if engines.arguments.get("enable_sleep_mode"):
        raise document.error("engines.arguments.enable_sleep_mode", "a pipeline never wakes an engine; remove the key")
    if not os.environ.get("RAY_ADDRESS") and importlib.util.find_spec("vllm") is None:
        raise document.error(
            "engines.kind", "vllm is not installed here; pip install 'weightsync[vllm]', or kind: torch"
        )


def _check_run(document: Document, config: PipelineConfig) -> None:
    run = config.run
    out = Path(run.out).expanduser()
    there = next((folder for folder in (out, *out.parents) if folder.exists()), out)
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise document.error("run.out", f"{there} is no folder that can be written; name another")


def _with_model(arguments: dict[str, Any], config: PipelineConfig) -> dict[str, Any]:
    return arguments if config.model is None else {**arguments, "model": config.model}


def _found(document: Document, key: str, path: str) -> Any:
    """What a class path names. Raises ConfigError where it names nothing."""
    if not re.fullmatch(r"[\w.]+:\w+", path):
        raise document.error(key, 'expected a class path such as "package.module:Class"')
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent is not None and f"{module_name}.".startswith(f"{absent}."):
            raise document.error(
                key, f"there is no module {absent!r}; run from the folder that holds it, or set PYTHONPATH"
            ) from None
        raise document.error(key, f"importing {module_name} failed: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        public = [other for other in vars(module) if not other.startswith("_")]
        raise document.error(key, f"{module_name} has no {name!r}; {near(name, public)}")
    return getattr(module, name)


def _check_arguments(document: Document, key: str, made: Callable[..., Any], arguments: dict[str, Any]) -> None:
    name = getattr(made, "__name__", str(made))
    try:
        parameters = inspect.signature(made).parameters
    except (TypeError, ValueError):  # of a built-in
        return
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        for unknown in arguments.keys() - parameters.keys():
            hint = near(unknown, list(parameters)) if parameters else "it takes none"
            # `model` comes from the top of the file
            where = f"{key}.{unknown}" if document.has(f"{key}.{unknown}") else unknown
            raise document.error(where, f"{name} takes no argument {unknown!r}; {hint}")
    if (problem := _unfit(made, (), arguments)) is not None:
        raise document.error(key, f"{name} cannot be made with these: {problem}")


def _unfit(made: Callable[..., Any], positional: tuple[Any, ...], keywords: dict[str, Any]) -> str | None:
    try:
        signature = inspect.signature(made)
    except (TypeError, ValueError):  # of a built-in
        return None
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        return str(error)
    return None
