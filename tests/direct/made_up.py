"""Engines that are made up, and load as vLLM does: module by module into tensors of the checkpoint's layout, of which each
module then makes what it computes with.

After every update an engine is compared, derived tensors included, with one of the same kind that was loaded by its own loader
alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from weightsync.chunk import as_bytes
from weightsync.config import SyncConfig
from weightsync.direct import DirectApply
from weightsync.loadmap import LoadMap
from weightsync.manifest import Manifest
from weightsync.placement import Live
from weightsync.reachable import reachable_tensors
from weightsync.recorder import record_load_map
from weightsync.report import RankRow
from weightsync.testing import LocalSync

Tensors = dict[str, torch.Tensor]
CPU = torch.device("cpu")


class Block(torch.nn.Module):
    """Holds parameters, and whatever a test hangs on it."""

    shared: ClassVar[Any] = None


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def rows(start: int, end: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor[start:end]


def keep(module: Any, loaded: Tensors) -> None:
    """The live parameters are what was loaded."""
    for name, tensor in loaded.items():
        getattr(module, name).data.copy_(tensor)


@dataclass
class Part:
    """One module of a made-up engine."""

    params: dict[str, tuple[int, ...]]
    feeds: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]]
    """Checkpoint name -> the parameter that it fills, and which part of it."""
    finish: Callable[[Any, Tensors], None] = keep
    """From the loaded tensors to what the module computes with."""
    setup: Callable[[Any], None] = lambda module: None
    """Of a new module."""
    padded: bool = False
    """The loader fills each parameter with zeros first."""
    load: Callable[[torch.Tensor, torch.Tensor], object] = torch.Tensor.copy_
    dtype: torch.dtype = torch.float32


@dataclass
class Plan:
    parts: dict[str, Part]
    end: Callable[[Any], None] = lambda model: None
    """At the end of each reload."""
    held: Callable[[Any], Any] = lambda model: ()
    """Of the model: what is compared besides parameters."""


class MadeUp:
    """A `DirectAdapter` of a made-up model."""

    device = CPU
    laid_out_as_loaded = False
    copies_load = True

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.model: Any = Block()
        self.reloads = 0
        self.fail_after: int | None = None
        for name, part in plan.parts.items():
            module = Block()
            for parameter, shape in part.params.items():
                module.register_parameter(parameter, torch.nn.Parameter(torch.zeros(shape, dtype=part.dtype), False))
            self.model.add_module(name, module)
            part.setup(module)
        self._part_of = {name: (key, part) for key, part in plan.parts.items() for name in part.feeds}

    def _empty(self, part: Part, device: str) -> Tensors:
        found = {}
        for name, shape in part.params.items():
            tensor = found[name] = torch.empty(shape, dtype=part.dtype, device=device)
            if device == "cpu":
                tensor.fill_(float("nan"))
        return found

    def _load(self, items: Iterable[tuple[str, torch.Tensor]], into: Mapping[str, Tensors]) -> None:
        for key, tensors in into.items():
            if self.plan.parts[key].padded:
                for tensor in tensors.values():
                    tensor.fill_(0)
        for name, tensor in items:
            if name in self._part_of:
                key, part = self._part_of[name]
                parameter, view = part.feeds[name]
                part.load(view(into[key][parameter]), tensor)

    def load_map(self, manifest: Manifest) -> LoadMap:
        into = {key: self._empty(part, "meta") for key, part in self.plan.parts.items()}
        flat = {(key, name): tensor for key, tensors in into.items() for name, tensor in tensors.items()}
        return record_load_map(manifest, flat, lambda items: self._load(items, into))

    def check_ready(self) -> None: ...

    def live(self) -> Live:
        return {
            (key, name): getattr(self.model.get_submodule(key), name).detach()
            for key, part in self.plan.parts.items()
            for name in part.params
            if isinstance(getattr(self.model.get_submodule(key), name, None), torch.Tensor)
        }

    def reachable(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        return reachable_tensors(self.model)

    def synchronize(self) -> None: ...

    def apply(self, groups: Iterable[Iterable[tuple[str, torch.Tensor]]]) -> int:
        self.reloads += 1
        waiting: dict[str, dict[str, torch.Tensor]] = {}
        for count, group in enumerate(groups):
            if count == self.fail_after:
                raise RuntimeError("planted")
            for name, tensor in group:
                waiting.setdefault(self._part_of[name][0] if name in self._part_of else "", {})[name] = tensor.clone()
            for key in [key for key in waiting if key and waiting[key].keys() >= self.plan.parts[key].feeds.keys()]:
                into = {key: self._empty(self.plan.parts[key], "cpu")}
                self._load(waiting.pop(key).items(), into)
                self.plan.parts[key].finish(self.model.get_submodule(key), into[key])
        for key, items in waiting.items():  # a part of the names came only
            if key:
                into = {key: self._empty(self.plan.parts[key], "cpu")}
                self._load(items.items(), into)
                self.plan.parts[key].finish(self.model.get_submodule(key), into[key])
        self.plan.end(self.model)
        return 1

    def snapshot(self) -> Any:
        return plain([{".".join(place): tensor for place, tensor in self.live().items()}, self.plan.held(self.model)])


def plain(value: Any) -> Any:
    match value:
        case torch.Tensor():
            dense = value.detach().to_dense() if value.layout != torch.strided else value.detach()
            return str(dense.dtype), tuple(dense.shape), as_bytes(dense).numpy().tobytes()
        case np.ndarray():
            return value.tobytes()
        case dict():
            return {key: plain(item) for key, item in value.items()}
        case list() | tuple() | deque():
            return [plain(item) for item in value]
        case _:
            return value


class Run:
    """A weight sync from a dict of tensors into a made-up engine, with another engine that is always reloaded."""

    def __init__(
        self,
        make: Callable[[], Plan],
        names: Mapping[str, tuple[int, ...]] | None = None,
        *,
        kind: type[MadeUp] = MadeUp,
        **config: Any,
    ) -> None:
        self.random = torch.Generator().manual_seed(3)
        self.engine, self.reference = kind(make()), kind(make())
        shapes = dict(names or shapes_of(make()))
        self.weights = {name: self.draw(shape) for name, shape in shapes.items()}
        self.manifest = Manifest.from_tensors(self.weights)
        self.groups = self.reference.load_map(self.manifest).groups
        settings: dict[str, Any] = {"timeout_s": 20, "partial": "report"} | config
        self.sync = LocalSync([lambda: self.weights], [[self.engine]], SyncConfig(**settings))
        self.session = self.sync.__enter__()

    def draw(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self.random)

    def step(self, *names: str) -> None:
        """Other values, of all or of some."""
        for name in names or self.weights:
            self.weights[name].copy_(self.draw(tuple(self.weights[name].shape)))

    def update(self) -> RankRow:
        report = self.session.update()
        self.check()
        return next(row for row in report.ranks if row.rank.startswith("engine"))

    def check(self) -> None:
        aliases = self.manifest.aliases
        self.reference.apply(
            [(name, self.weights[aliases.get(name, name)]) for name in group.names] for group in self.groups
        )
        assert self.engine.snapshot() == self.reference.snapshot()

    def updates(self, count: int) -> list[RankRow]:
        """So many, with other values each time; the engine is compared after each."""
        found = []
        for _ in range(count):
            found.append(self.update())
            self.step()
        return found

    @property
    def direct(self) -> DirectApply:
        found = self.sync.receivers[0][0]._direct
        assert found is not None
        return found

    def close(self) -> None:
        self.sync.__exit__()


@contextmanager
def run(make: Callable[[], Plan], *, kind: type[MadeUp] = MadeUp, **config: Any) -> Iterator[Run]:
    made = Run(make, kind=kind, **config)
    try:
        yield made
    finally:
        made.close()


def shapes_of(plan: Plan) -> dict[str, tuple[int, ...]]:
    found = {}
    for part in plan.parts.values():
        for name, (parameter, view) in part.feeds.items():
            found[name] = tuple(view(torch.empty(part.params[parameter], device="meta")).shape)
    return found


def norm() -> Part:
    return Part({"weight": (16,)}, {"norm": ("weight", whole)})


def qkv(**changes: Any) -> Part:
    part = Part(
        {"weight": (24, 4), "bias": (6,)},
        {
            "q": ("weight", rows(0, 8)),
            "k": ("weight", rows(8, 16)),
            "v": ("weight", rows(16, 24)),
            "b": ("bias", whole),
        },
    )
    for name, value in changes.items():
        setattr(part, name, value)
    return part


def plan(odd: Part | None = None, **changes: Any) -> Plan:
    """A norm, fused projections in another dtype than they are sent in, a padded embedding, and an odd module."""
    parts = {
        "norm": norm(),
        "attn": Part(
            {"weight": (12, 8)},
            {f"attn.{n}": ("weight", rows(4 * i, 4 * i + 4)) for i, n in enumerate("qkv")},
            dtype=torch.bfloat16,
        ),
        "embed": Part({"weight": (10, 4)}, {"embed": ("weight", rows(0, 7))}, padded=True),
    }
    return Plan(parts | ({"odd": odd} if odd is not None else {}), **changes)


PLAIN = {"norm", "attn", "embed"}
WAYS: list[dict[str, Any]] = [
    {"transport": "shared_memory", "apply": "staged"},
    {"transport": "shared_memory", "apply": "streaming"},
    {"transport": "broadcast", "apply": "streaming"},
    {"transport": "sets", "apply": "staged"},
    {"transport": "sets", "apply": "streaming"},
    {"transport": "sets", "apply": "streaming", "digest": False},
    {"transport": "sets_and_buckets", "apply": "streaming"},
    {"transport": "sets_and_buckets", "apply": "staged"},
]
FEW_WAYS = [WAYS[1], WAYS[4]]


def swap_halves(module: Any, loaded: Tensors) -> None:
    half = loaded["weight"].shape[0] // 2
    loaded["weight"] = torch.cat([loaded["weight"][half:], loaded["weight"][:half]])
    keep(module, loaded)


def scaled(module: Any, loaded: Tensors) -> None:
    loaded["weight"] = loaded["weight"] * 2
    keep(module, loaded)


def swap_some(module: Any, loaded: Tensors) -> None:
    loaded["weight"][[2, 5]] = loaded["weight"][[5, 2]]
    keep(module, loaded)


def derive(put: Callable[[torch.Tensor], Any], of: str = "weight") -> Callable[[Any, Tensors], None]:
    def finish(module: Any, loaded: Tensors) -> None:
        keep(module, loaded)
        module.cache = put(loaded[of].sum(0, keepdim=loaded[of].dim() == 1).clone())

    return finish
