"""Direct apply: whatever an engine does with its weights, an update leaves exactly what a reload of everything leaves.

Engines are made up, and load as vLLM does: module by module into tensors of the checkpoint's layout, of which each module then
makes what it computes with. After every update the engine is compared, derived tensors included, with one of the same kind
that was loaded by its own loader alone.
"""

from __future__ import annotations

import functools
import queue
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import weightsync.direct
import weightsync.placement
from weightsync.chunk import WeightChunk, as_bytes
from weightsync.config import SyncConfig
from weightsync.cuda.moves import Moves
from weightsync.digest import ContentDigest
from weightsync.direct import DirectApply, Way
from weightsync.errors import DigestError, EnginePoisonedError, WeightSyncError
from weightsync.interfaces import (
    DirectAdapter,
    LinkContext,
    ReceiverTransport,
    SenderTransport,
    Transfer,
    TransferStats,
)
from weightsync.loadmap import LoadMap
from weightsync.manifest import Manifest, TensorMeta
from weightsync.placement import Live
from weightsync.qualify import LEARNING, NOT_SEEN
from weightsync.reachable import reachable_tensors
from weightsync.recorder import record_load_map
from weightsync.registry import register_transport, unregister_transport
from weightsync.report import RankRow
from weightsync.testing import LocalSync
from weightsync.weightset import SetDigests, SetLayout, WeightSet

Tensors = dict[str, torch.Tensor]
CPU = torch.device("cpu")


# ---- made-up engines ----------------------------------------------------------------------------------------------


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


# ---- a transport of sets in CPU memory ------------------------------------------------------------------------------


class SetSender(SenderTransport):
    """Tells of the tensors where they lie; those called one of `chunked` come in a chunk."""

    name = "sets"
    chunked: ClassVar[frozenset[str]] = frozenset()
    wrong: ClassVar[str | None] = None
    """Of this tensor another digest is told."""
    late_break: ClassVar[bool] = False
    """The link breaks after the tensors, before their digests."""
    inboxes: ClassVar[dict[bytes, list[queue.Queue[Any]]]] = {}

    def open(self, metas: tuple[TensorMeta, ...]) -> bytes:
        self._token = self.context.token.encode()
        self._boxes: list[queue.Queue[Any]] = [queue.Queue() for _ in range(self.context.num_receivers)]
        self.inboxes[self._token] = self._boxes
        self._layout: SetLayout | None = None
        return self._token

    def connect(self) -> None: ...

    def stable(self) -> bool:
        return True

    def send(self, transfer: Transfer, tensors: Iterable[tuple[TensorMeta, torch.Tensor]]) -> TransferStats:
        found = {meta.name: tensor.detach() for meta, tensor in tensors}
        in_set = {name: tensor for name, tensor in found.items() if name not in self.chunked}
        rest = {name: tensor for name, tensor in found.items() if name in self.chunked}
        held = {name: tensor.data_ptr() for name, tensor in in_set.items()}
        if self._layout is None or {n: t.data_ptr() for n, t in self._layout.tensors.items()} != held:
            self._layout = SetLayout(in_set, CPU)
        layout, content = self._layout, ContentDigest()
        digest = self.context.digest
        digests = Moves([(tensor, None) for tensor in in_set.values()], CPU).run(digest=digest)
        content.add_table(layout.digest, layout.nbytes, digests)
        if self.wrong in in_set:
            digests = digests.copy()
            digests[list(in_set).index(self.wrong)] ^= np.uint64(1)
        weight_set = WeightSet(transfer.version, transfer.manifest.digest, layout, self.context.sender)
        messages: list[Any] = [weight_set, TransferError() if self.late_break else SetDigests(weight_set, digests)]
        if rest:
            chunk = WeightChunk.from_tensors(rest, version=transfer.version, manifest=transfer.manifest, digest=digest)
            chunk.stable, chunk.sender = True, self.context.sender
            for piece in chunk.pieces:
                content.add(piece.name, piece.start, piece.nbytes, piece.digest or 0)
            messages.append(chunk)
        for box in self._boxes:
            for message in [*messages, None]:
                box.put(message)
        return TransferStats(sum(tensor.nbytes for tensor in found.values()), content.value)

    def abort(self) -> None:
        for box in getattr(self, "_boxes", []):
            box.put(TransferError())

    def close(self) -> None:
        self.inboxes.pop(getattr(self, "_token", b""), None)


class TransferError(RuntimeError):
    """What the other end of a broken link finds."""


class SetReceiver(ReceiverTransport):
    name = "sets"
    sends_sets = True

    def __init__(self, context: LinkContext, *, receiver: int) -> None:
        super().__init__(context, receiver=receiver)
        self._box: queue.Queue[Any] = queue.Queue()

    def connect(self, address: bytes) -> None:
        self._box = SetSender.inboxes[address][self.receiver]

    def receive(self, transfer: Transfer) -> Iterator[Any]:
        while (message := self._box.get(timeout=self.context.timeout_s)) is not None:
            if isinstance(message, Exception):
                raise message
            yield message

    def abort(self) -> None:
        self._box.put(TransferError())

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def sets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    register_transport("sets", SetSender, SetReceiver)
    yield
    unregister_transport("sets")


# ---- whole updates --------------------------------------------------------------------------------------------------


class Run:
    """A weight sync from a dict of tensors into a made-up engine, with another engine that is always reloaded."""

    def __init__(
        self, make: Callable[[], Plan], names: Mapping[str, tuple[int, ...]] | None = None, **config: Any
    ) -> None:
        self.random = torch.Generator().manual_seed(3)
        self.engine, self.reference = MadeUp(make()), MadeUp(make())
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
def run(make: Callable[[], Plan], **config: Any) -> Iterator[Run]:
    made = Run(make, **config)
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
]
FEW_WAYS = [WAYS[1], WAYS[4]]


@pytest.mark.parametrize("config", WAYS, ids=str)
def test_plain_fused_cast_and_padded_modules_are_copied_after_one_watched_reload(config: dict[str, Any]) -> None:
    with run(lambda: plan(qkv()), **config) as made:
        first, *later = made.updates(5)
        assert (first.num_direct, first.reloads, set(first.reloaded)) == (0, 1, PLAIN | {"odd"})
        assert set(first.reloaded.values()) == {NOT_SEEN}
        for row in later:
            assert (row.num_direct, row.reloads, row.reloaded) == (4, 0, {})
        assert made.engine.reloads == 1


# ---- modules that are no mere copies --------------------------------------------------------------------------------


def swap_halves(module: Any, loaded: Tensors) -> None:
    half = loaded["weight"].shape[0] // 2
    loaded["weight"] = torch.cat([loaded["weight"][half:], loaded["weight"][:half]])
    keep(module, loaded)


def transposed(module: Any, loaded: Tensors) -> None:
    keep(module, loaded | {"weight": loaded["weight"].t()})


def by_columns(module: Any) -> None:
    module.weight.data = module.weight.data.t().contiguous().t()


def as_rows(module: Any) -> None:
    module.weight.data = module.weight.data.t().contiguous()


def as_doubles(module: Any) -> None:
    module.weight.data = module.weight.data.double()


def nothing(module: Any) -> None: ...


def scaled(module: Any, loaded: Tensors) -> None:
    loaded["weight"] = loaded["weight"] * 2
    keep(module, loaded)


def swap_some(module: Any, loaded: Tensors) -> None:
    loaded["weight"][[2, 5]] = loaded["weight"][[5, 2]]
    keep(module, loaded)


def sort_rows(module: Any, loaded: Tensors) -> None:
    """An order that the values decide."""
    loaded["weight"] = loaded["weight"][loaded["weight"][:, 0].argsort()]
    keep(module, loaded)


def turn_columns(module: Any, loaded: Tensors) -> None:
    keep(module, loaded | {"weight": loaded["weight"].roll(1, 1)})


LAYOUTS = {
    "two rows swapped": (nothing, swap_some, "odd.weight is not laid out as loaded"),
    "rows sorted by their values": (nothing, sort_rows, "odd.weight is not laid out as loaded"),
    "columns turned": (nothing, turn_columns, "odd.weight is not laid out as loaded"),
    "scaled": (nothing, scaled, "odd.weight is not laid out as loaded"),
    "by columns": (by_columns, keep, "odd.weight is not kept as it is loaded"),
    "transposed": (as_rows, transposed, "odd.weight is not kept as it is loaded"),
    "in another dtype": (as_doubles, keep, "odd.weight is not kept as it is loaded"),
}


@pytest.mark.parametrize("config", FEW_WAYS, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_module_that_is_laid_out_otherwise_is_reloaded_and_the_others_copied(
    name: str, config: dict[str, Any]
) -> None:
    setup, finish, reason = LAYOUTS[name]
    with run(lambda: plan(qkv(setup=setup, finish=finish)), **config) as made:
        *_, last = made.updates(5)
        assert last.num_direct == 3
        assert last.reloads == 1
        assert last.reloaded.keys() == {"odd"}
        assert reason in last.reloaded["odd"]


def rows_of_expert(expert: int, start: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor[expert, start : start + 4]


def experts(order: Callable[[torch.Tensor], torch.Tensor], *, fused: bool) -> Part:
    """Two weights of each of three experts in one, 8 rows of 4; sent one by one, or all in one."""
    feeds = {
        f"{expert}.{name}": ("weight", rows_of_expert(expert, start))
        for expert in range(3)
        for name, start in (("gate", 0), ("up", 4))
    }

    def finish(module: Any, loaded: Tensors) -> None:
        keep(module, {"weight": order(loaded["weight"])})

    return Part({"weight": (3, 8, 4)}, {"experts": ("weight", whole)} if fused else feeds, finish=finish)


def swapped(weight: torch.Tensor) -> torch.Tensor:
    return weight.roll(4, 1)


def interleaved(weight: torch.Tensor) -> torch.Tensor:
    return weight.reshape(3, 2, 4, 4).transpose(1, 2).reshape(3, 8, 4)


def experts_first_to_last(weight: torch.Tensor) -> torch.Tensor:
    return weight.roll(-1, 0)


REGULAR: dict[str, Callable[[], Part]] = {
    "halves swapped": lambda: qkv(finish=swap_halves),
    "halves of each expert swapped": lambda: experts(swapped, fused=False),
    "halves of each expert swapped, of one tensor": lambda: experts(swapped, fused=True),
    "halves of each expert interleaved": lambda: experts(interleaved, fused=False),
    "halves of each expert interleaved, of one tensor": lambda: experts(interleaved, fused=True),
    "experts moved up, of one tensor": lambda: experts(experts_first_to_last, fused=True),
    "halves of a vector swapped": lambda: Part(
        {"weight": (8,)},
        {"v": ("weight", whole)},
        lambda module, loaded: keep(module, {"weight": loaded["weight"].roll(4)}),
    ),
}


@pytest.mark.parametrize("config", WAYS, ids=str)
@pytest.mark.parametrize("name", REGULAR)
def test_a_regular_order_of_rows_is_learned_proven_and_then_copied(name: str, config: dict[str, Any]) -> None:
    with run(lambda: plan(REGULAR[name]()), **config) as made:
        first, second, third, *later = made.updates(6)
        assert (first.reloaded["odd"], second.reloaded["odd"], third.reloaded["odd"]) == (NOT_SEEN, LEARNING, NOT_SEEN)
        assert (second.reloads, third.reloads) == (1, 1)
        for row in later:
            assert (row.num_direct, row.reloads, row.reloaded) == (4, 0, {})


def test_what_was_learned_and_then_does_not_hold_is_reloaded() -> None:
    """It is a guess until a further reload proves it."""
    orders = [swapped, swapped, interleaved]

    with run(lambda: plan(experts(lambda weight: orders[0](weight), fused=False))) as made:
        for _ in range(12):
            row = made.update()
            made.step()
            if len(orders) > 1:
                del orders[0]
        assert "odd.weight is not laid out as loaded" in row.reloaded["odd"]
        assert row.num_direct == 3


def test_an_order_that_one_reload_does_not_show_is_waited_for() -> None:
    """Equal rows stand for each other; nothing of it may be taken for a copy in the order of loading."""
    with run(lambda: plan(experts(swapped, fused=True))) as made:
        for step in range(12):
            if step in (1, 2):
                made.weights["experts"].fill_(step)
            row = made.update()
            assert ("odd" in row.reloaded) or step > 3
            made.step()
        assert row.num_direct == 4


def test_an_order_among_padding_is_not_learned() -> None:
    def turned(module: Any, loaded: Tensors) -> None:
        keep(module, {"weight": loaded["weight"].roll(2, 0)})

    odd = Part({"weight": (10, 4)}, {"odd": ("weight", rows(0, 7))}, finish=turned, padded=True)
    with run(lambda: plan(odd)) as made:
        *_, last = made.updates(8)
        assert "odd.weight is not laid out as loaded" in last.reloaded["odd"]


class Kernel:
    """An object with slots."""

    __slots__ = ("__hidden", "cached")

    def __init__(self, cached: Any) -> None:
        self.cached = 0
        self.__hidden = cached

    def get(self) -> Any:
        return self.__hidden


class Table(dict[str, Any]):
    """A container with attributes."""

    cached: torch.Tensor


def closure_over(value: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: value


def function_with(value: torch.Tensor) -> Callable[[], None]:
    def forward(*, weight: torch.Tensor = value) -> None: ...

    return forward


def function_that_carries(value: torch.Tensor) -> Callable[[], None]:
    def forward() -> None: ...

    forward.cached = value  # type: ignore[attr-defined]
    return forward


def hidden_module(value: torch.Tensor) -> Any:
    inner = torch.nn.Linear(1, 1)
    inner.register_buffer("cached", value)
    return [types.SimpleNamespace(inner=torch.nn.Sequential(inner))]


def on_table(value: torch.Tensor) -> Table:
    table = Table()
    table.cached = value
    return table


# How a module may hold a tensor: (how it is put there, how it is read).
HOLDERS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], Any]]] = {
    "attribute": (whole, whole),
    "dict": (lambda t: {"a": [1, (t,)]}, lambda held: held["a"][1][0]),
    "set": (lambda t: {t}, lambda held: next(iter(held))),
    "deque": (lambda t: deque([t]), lambda held: held[0]),
    "closure": (closure_over, lambda held: held()),
    "keyword default": (function_with, lambda held: held.__kwdefaults__["weight"]),
    "function's attribute": (function_that_carries, lambda held: held.cached),
    "wrapped function": (
        lambda t: functools.lru_cache(closure_over(t)),
        lambda held: held.__wrapped__(),
    ),
    "partial": (lambda t: functools.partial(torch.add, t), lambda held: held.args[0]),
    "bound method": (lambda t: Kernel(t).get, lambda held: held()),
    "bound builtin": (lambda t: t.detach().clone, lambda held: held()),
    "kernel object": (Kernel, lambda held: held.get()),
    "container with attributes": (on_table, lambda held: held.cached),
    "hidden module": (hidden_module, lambda held: held[0].inner[0].cached),
    "numpy array": (lambda t: t.numpy().copy(), whole),
    "read-only array": (lambda t: np.frombuffer(t.numpy().tobytes()), whole),
    "float": (lambda t: float(t.sum()), whole),
    "floats in a list": (lambda t: t.tolist(), whole),
    "attribute of a tensor": (
        lambda t: carried(t),
        lambda held: held.cached,
    ),
    "sparse tensor": (lambda t: t.reshape(1, -1).to_sparse(), lambda held: held.to_dense()),
}


def carried(value: torch.Tensor) -> torch.Tensor:
    tensor = torch.zeros(1)
    tensor.cached = value  # type: ignore[attr-defined]
    return tensor


def derive(put: Callable[[torch.Tensor], Any], of: str = "weight") -> Callable[[Any, Tensors], None]:
    def finish(module: Any, loaded: Tensors) -> None:
        keep(module, loaded)
        module.cache = put(loaded[of].sum(0, keepdim=loaded[of].dim() == 1).clone())

    return finish


@pytest.mark.parametrize("config", FEW_WAYS, ids=str)
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_tensor_made_from_a_weight_is_found_wherever_its_module_keeps_it(holder: str, config: dict[str, Any]) -> None:
    put, read = HOLDERS[holder]

    def make() -> Plan:
        def setup(module: Any) -> None:
            module.cache = put(torch.zeros(4))

        odd = qkv(finish=derive(put), setup=setup)
        return plan(odd, held=lambda model: read(model.odd.cache))

    with run(make, **config) as made:
        *_, last = made.updates(4)
        assert last.num_direct == 3
        assert last.reloaded.keys() == {"odd"}
        assert "odd" in last.reloaded["odd"]
        assert "which no tensor feeds" in last.reloaded["odd"] or "cannot be looked at" in last.reloaded["odd"]


def test_a_tensor_that_the_modules_class_keeps_is_found() -> None:
    def make() -> Plan:
        class Own(Block):
            pass

        def setup(module: Any) -> None:
            module.__class__ = Own

        def finish(module: Any, loaded: Tensors) -> None:
            keep(module, loaded)
            Own.shared = {"a": loaded["weight"].sum(0)}

        return plan(qkv(finish=finish, setup=setup), held=lambda model: model.odd.shared["a"])

    with run(make) as made:
        *_, last = made.updates(4)
        assert last.reloaded.keys() == {"odd"}


def in_place(module: Any, loaded: Tensors) -> None:
    keep(module, loaded)
    module.cache.copy_(loaded["weight"].sum(0))


def shares_storage(module: Any) -> None:
    """The parameter and a tensor made from it lie side by side in one storage."""
    storage = torch.zeros(24 * 4 + 4)
    module.weight.data = storage[:96].view(24, 4)
    module.cache = storage[96:]


def with_cache(module: Any) -> None:
    module.cache = torch.zeros(4)


@pytest.mark.parametrize("setup", [with_cache, shares_storage])
@pytest.mark.parametrize("config", FEW_WAYS, ids=str)
def test_a_tensor_that_is_written_in_place_is_found(setup: Callable[[Any], None], config: dict[str, Any]) -> None:
    with run(lambda: plan(qkv(finish=in_place, setup=setup), held=lambda m: m.odd.cache), **config) as made:
        *_, last = made.updates(4)
        assert last.num_direct == 3
        assert "also changed odd's cache" in last.reloaded["odd"]


def test_a_view_of_a_parameter_is_no_tensor_of_its_own() -> None:
    def setup(module: Any) -> None:
        module.cache = {"view": module.weight.data[3:5], "bits": module.weight.data.view(torch.int32)}

    with run(lambda: plan(qkv(setup=setup), held=lambda m: m.odd.cache)) as made:
        *_, last = made.updates(4)
        assert last.num_direct == 4


def scale_of(module: Any, loaded: Tensors) -> None:
    """Made anew in each reload, and mostly the same."""
    keep(module, loaded)
    module.scale = (loaded["weight"].abs().max() > 100).float() + 1


def test_a_scalar_that_is_made_anew_counts_as_changed_though_it_came_out_the_same() -> None:
    def setup(module: Any) -> None:
        module.scale = torch.ones(())

    with run(lambda: plan(qkv(finish=scale_of, setup=setup), held=lambda m: m.odd.scale)) as made:
        made.updates(3)
        made.weights["k"][0, 0] = 1000
        last = made.update()
        assert last.reloaded.keys() == {"odd"}
        assert "odd's scale" in last.reloaded["odd"]


# Who else may hold a tensor that is made from a module's weight.


class Elsewhere(MadeUp):
    """The odd module's weight decides what is kept in another module."""

    maker, keeper = "odd", "norm"

    def __init__(self, plan: Plan) -> None:
        odd = plan.parts[self.maker]

        def finish(module: Any, loaded: Tensors) -> None:
            keep(module, loaded)
            self.model.get_submodule(self.keeper).cache = loaded["weight"].sum(0).clone()

        odd.finish = finish
        plan.held = lambda model: getattr(model.get_submodule(self.keeper), "cache", None)
        super().__init__(plan)
        if self.keeper == "other":
            self.model.other = Block()


class OnAModuleThatIsLoadedLater(Elsewhere):
    maker, keeper = "norm", "odd"


class OnAnUnfedModule(Elsewhere):
    keeper = "other"


class OnTheModel(Elsewhere):
    keeper = ""


@pytest.mark.parametrize("kind", [Elsewhere, OnAModuleThatIsLoadedLater, OnAnUnfedModule, OnTheModel])
@pytest.mark.parametrize("config", FEW_WAYS, ids=str)
def test_a_tensor_that_another_module_keeps_may_be_made_from_any_weight(
    kind: type[Elsewhere], config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "MadeUp", kind)
    with run(lambda: plan(qkv()), **config) as made:
        rows = made.updates(4)
        assert [row.num_direct for row in rows] == [0] * 4
        assert all("cache, which no tensor feeds" in reason for reason in rows[-1].reloaded.values())
        for name in ("q", "norm", "k"):
            made.step(name)
            made.update()


def test_what_is_made_at_the_end_of_a_reload_may_be_made_from_any_weight() -> None:
    def end(model: Any) -> None:
        model.norm.cache = model.attn.weight.float().sum(0)

    with run(lambda: plan(end=end, held=lambda model: getattr(model.norm, "cache", None))) as made:
        rows = made.updates(4)
        assert [row.num_direct for row in rows] == [0] * 4


def test_an_object_that_two_modules_share_belongs_to_both() -> None:
    def make() -> Plan:
        kernel = types.SimpleNamespace(cached=torch.zeros(4))

        def setup(module: Any) -> None:
            module.kernel = kernel

        def finish(module: Any, loaded: Tensors) -> None:
            keep(module, loaded)
            kernel.cached = loaded["weight"].sum(0).clone()

        made = plan(qkv(finish=finish, setup=setup), held=lambda model: model.odd.kernel.cached)
        made.parts["norm"].setup = setup
        return made

    with run(make) as made:
        *_, last = made.updates(4)
        assert {"odd", "norm"} <= last.reloaded.keys()


def test_a_module_with_too_many_objects_to_look_through_is_reloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.reachable._MAX_OBJECTS", 100)

    def setup(module: Any) -> None:
        module.things = [[i] for i in range(200)]

    def finish(module: Any, loaded: Tensors) -> None:
        keep(module, loaded)
        module.things[-1] = loaded["weight"].sum(0)

    with run(lambda: plan(qkv(finish=finish, setup=setup), held=lambda model: model.odd.things[-1])) as made:
        *_, last = made.updates(4)
        assert last.reloaded == {"odd": "what odd holds cannot be looked at: more than 100 objects"}


def test_compiled_code_and_tensors_without_data_are_not_looked_through() -> None:
    module: Any = Block()
    module.code = [torch.fx.symbolic_trace(torch.nn.Linear(2, 2))]
    module.shape_only = torch.empty(3, device="meta")
    found = reachable_tensors(module)
    assert (dict(found), found.unseen) == ({}, {})


# ---- values that show nothing ---------------------------------------------------------------------------------------


def test_frozen_weights_qualify_when_they_have_changed() -> None:
    with run(lambda: plan(qkv())) as made:
        for _ in range(4):
            row = made.update()
            made.step(*(name for name in made.weights if name not in ("q", "embed")))
        assert row.num_direct == 4, "the first update changed everything"
    with run(lambda: plan(qkv())) as made:
        made.engine.apply([[(name, made.weights[name]) for name in group.names] for group in made.groups])
        moving = [name for name in made.weights if name not in ("q", "embed")]
        for _ in range(4):
            row = made.update()
            made.step(*moving)
        assert row.reloaded == {"odd": NOT_SEEN, "embed": NOT_SEEN}
        assert row.num_direct == 2
        *_, last = made.updates(10)
        assert last.num_direct == 4


def test_what_one_reload_shows_of_a_group_adds_up_with_what_another_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weightsync.direct, "_MAX_PATIENCE", 0)
    with run(lambda: plan(qkv())) as made:
        made.engine.apply([[(name, made.weights[name]) for name in group.names] for group in made.groups])
        names = ["q", "k", "v", "b"]
        for i in range(5):
            made.step(names[i % 4], "norm", "attn.q", "attn.k", "attn.v", "embed")
            row = made.update()
            assert ("odd" in row.reloaded) is (i < 4)
        assert row.num_direct == 4


def test_a_group_of_which_one_tensor_changed_is_not_proven_for_the_others() -> None:
    """The tensor made from the frozen weight did not change either."""
    odd = qkv(finish=in_place, setup=with_cache)
    with run(lambda: plan(odd, held=lambda model: model.odd.cache)) as made:
        made.engine.apply([[(name, made.weights[name]) for name in group.names] for group in made.groups])
        for _ in range(3):
            made.step("b", "norm")
            assert "odd" in made.update().reloaded
        for _ in range(8):
            made.step()
            row = made.update()
        assert "also changed odd's cache" in row.reloaded["odd"]


def test_what_was_seen_once_to_be_no_copy_is_not_forgotten_when_another_reload_does_not_show_it() -> None:
    def finish(module: Any, loaded: Tensors) -> None:
        keep(module, loaded)
        module.cache.fill_((loaded["weight"] > 100).float().sum())

    odd = qkv(finish=finish, setup=with_cache)
    with run(lambda: plan(odd, held=lambda model: model.odd.cache)) as made:
        made.weights["norm"].fill_(1)  # is watched again and again
        made.weights["k"][0, 0] = 1000
        made.update()
        for _ in range(8):
            made.step(*(name for name in made.weights if name != "norm"))
            row = made.update()
            assert "also changed odd's cache" in row.reloaded["odd"]
        assert row.num_direct == 2


@pytest.mark.parametrize("make_values", [torch.zeros_like, torch.ones_like], ids=["zeros", "ones"])
def test_constant_weights_show_nothing(make_values: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with run(lambda: plan(qkv(finish=swap_some))) as made:
        for name in "qkv":
            made.weights[name].copy_(make_values(made.weights[name]))
        assert made.update().num_direct == 0
        for _ in range(3):
            made.step("norm", "attn.q", "attn.k", "attn.v", "embed")
            assert made.update().reloaded["odd"] == NOT_SEEN
        *_, last = made.updates(6)
        assert "not laid out as loaded" in last.reloaded["odd"]


def swap_q_and_k(module: Any, loaded: Tensors) -> None:
    loaded["weight"] = torch.cat([loaded["weight"][8:16], loaded["weight"][:8], loaded["weight"][16:]])
    keep(module, loaded)


def test_twins_may_have_changed_places() -> None:
    with run(lambda: plan(qkv(finish=swap_q_and_k))) as made:
        made.weights["k"].copy_(made.weights["q"])
        made.update()
        made.step("norm")
        assert made.update().reloaded == {"odd": NOT_SEEN}
        *_, last = made.updates(12)
        assert last.reloaded == {}, "the order is regular, and was learned"


def permute_experts(module: Any, loaded: Tensors) -> None:
    loaded["weight"] = loaded["weight"][[1, 2, 0]]
    keep(module, loaded)


@pytest.mark.parametrize("values", ["alike in all experts", "alike in both halves", "alike in all rows"])
def test_values_that_repeat_show_nothing(values: str) -> None:
    """As of experts that all begin as one."""

    def make() -> Plan:
        finish = {"alike in all experts": permute_experts, "alike in both halves": swap_halves}.get(values, swap_rows)
        shape = (4, 5, 6) if values == "alike in both halves" else (3, 5, 7)
        return plan(Part({"weight": shape}, {"experts": ("weight", whole)}, finish=finish))

    def swap_rows(module: Any, loaded: Tensors) -> None:
        loaded["weight"] = loaded["weight"][:, [1, 0, 2, 3, 4]]
        keep(module, loaded)

    with run(make) as made:
        weight = made.weights["experts"]
        if values == "alike in all experts":
            weight.copy_(weight[:1].clone().expand_as(weight))
        elif values == "alike in both halves":
            weight[2:] = weight[:2]
        else:
            weight.copy_(weight[:, :1].clone().expand_as(weight))
        made.update()
        made.step("norm", "embed")
        assert made.update().reloaded == {"odd": NOT_SEEN}
        *_, last = made.updates(12)
        assert last.reloaded == {}, "the order is regular, and was learned"


# ---- loaders --------------------------------------------------------------------------------------------------------


def test_a_parameter_that_the_names_cover_in_part_is_reloaded() -> None:
    def finish(module: Any, loaded: Tensors) -> None:
        keep(module, {name: tensor.nan_to_num(7) for name, tensor in loaded.items()})

    part = Part({"weight": (10, 4)}, {"odd": ("weight", rows(0, 7))}, finish=finish)
    with run(lambda: plan(part)) as made:
        *_, last = made.updates(3)
        assert last.reloaded == {"odd": "its tensors cover odd.weight in part"}


def test_a_parameter_that_the_loader_computes_is_reloaded() -> None:
    part = Part({"weight": (5, 4)}, {"odd": ("weight", whole)}, load=lambda to, of: to.copy_(of * 2))
    with run(lambda: plan(part)) as made:
        *_, last = made.updates(3)
        assert last.reloaded == {"odd": "the loader computes odd.weight"}


def test_without_a_load_map_everything_is_reloaded() -> None:
    def load(to: torch.Tensor, of: torch.Tensor) -> None:
        if float(of.sum()) < float("inf"):
            to.copy_(of)

    part = Part({"weight": (5, 4)}, {"odd": ("weight", whole)}, load=load)
    with run(lambda: plan(part)) as made:
        for row in made.updates(3):
            assert row.num_direct == 0
            assert set(row.reloaded) == {group.key for group in made.groups}
            assert all("the loader cannot run without data" in reason for reason in row.reloaded.values())


@pytest.mark.parametrize("config", FEW_WAYS, ids=str)
def test_memory_that_two_tensors_fill_is_reloaded(config: dict[str, Any]) -> None:
    """The last wins. At first both are the same, so that no reload tells."""

    def make() -> Plan:
        weight = torch.zeros(6, 3)

        def setup(module: Any) -> None:
            module.weight.data = weight

        parts = {
            name: Part({"weight": (6, 3)}, {name: ("weight", whole)}, setup=setup, finish=keep)
            for name in ("one", "two")
        }
        return Plan(plan().parts | parts)

    with run(make, **config) as made:
        made.weights["two"].copy_(made.weights["one"])
        made.update()
        *_, last = made.updates(4)
        assert last.reloaded.keys() == {"one", "two"}
        assert last.reloaded["one"] == "several tensors fill one.weight"


@pytest.mark.parametrize("config", FEW_WAYS, ids=str)
def test_parameters_that_share_a_part_of_their_memory_are_reloaded(config: dict[str, Any]) -> None:
    def make() -> Plan:
        storage = torch.zeros(30)

        def at(start: int) -> Callable[[Any], None]:
            return lambda module: setattr(module.weight, "data", storage[start : start + 18].view(6, 3))

        parts = {
            name: Part({"weight": (6, 3)}, {name: ("weight", whole)}, setup=at(12 * i))
            for i, name in enumerate(("one", "two"))
        }
        return Plan(plan().parts | parts)

    with run(make, **config) as made:
        for _ in range(3):
            made.weights["two"].view(-1)[:6] = made.weights["one"].view(-1)[12:]
            made.update()
            made.step()
        *_, last = made.updates(2)
        assert last.reloaded == {
            "one": "one.weight shares memory with another",
            "two": "two.weight shares memory with another",
        }


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("config", FEW_WAYS, ids=str)
def test_a_tie_of_the_trainer_fills_both_ends(config: dict[str, Any], tied: bool) -> None:
    def make() -> Plan:
        weight = torch.zeros(6, 3)

        def setup(module: Any) -> None:
            if tied:
                module.weight.data = weight

        ends = {name: Part({"weight": (6, 3)}, {name: ("weight", whole)}, setup=setup) for name in ("in", "out")}
        return Plan(plan().parts | ends)

    made = Run(make, **config)
    made.close()
    made.weights["out"] = made.weights["in"]
    made.manifest = Manifest.from_tensors(made.weights)
    assert made.manifest.aliases
    made.groups = made.reference.load_map(made.manifest).groups
    made.sync = LocalSync([lambda: made.weights], [[made.engine]], SyncConfig(timeout_s=20, **config))
    made.session = made.sync.__enter__()
    try:
        *_, last = made.updates(4)
        assert last.num_direct == len(made.groups)
        assert last.reloaded == {}
    finally:
        made.close()


def test_a_name_that_feeds_two_parameters_is_copied_to_both() -> None:
    class Twice(MadeUp):
        def _load(self, items: Iterable[tuple[str, torch.Tensor]], into: Mapping[str, Tensors]) -> None:
            for name, tensor in items:
                super()._load([(name, tensor)], into)
                if name == "b" and "odd" in into:
                    into["odd"]["again"].copy_(tensor)

    def make() -> Plan:
        return plan(Part({"bias": (6,), "again": (6,)}, {"b": ("bias", whole)}))

    original = globals()["MadeUp"]
    globals()["MadeUp"] = Twice
    try:
        with run(make) as made:
            made.engine.plan.parts["embed"].padded = made.reference.plan.parts["embed"].padded = True
            *_, last = made.updates(3)
            assert "odd" not in last.reloaded
    finally:
        globals()["MadeUp"] = original


# ---- layouts that change --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", FEW_WAYS, ids=str)
def test_a_parameter_that_moved_between_updates_is_watched_anew(config: dict[str, Any]) -> None:
    with run(lambda: plan(qkv()), **config) as made:
        made.updates(3)
        old = made.engine.model.odd.weight.data
        kept = old.clone()
        made.engine.model.odd.weight.data = torch.zeros_like(old)
        row = made.update()
        assert (row.num_direct, row.reloads) == (0, 1)
        assert torch.equal(old, kept), "nothing is written where it lay before"
        made.step()
        assert made.update().num_direct == 4


def test_a_reload_that_moves_a_parameter_each_time_is_never_copied() -> None:
    keeps: list[torch.Tensor] = []

    def finish(module: Any, loaded: Tensors) -> None:
        keeps.append(loaded["weight"])
        module.weight.data = loaded.pop("weight")
        keep(module, loaded)

    with run(lambda: plan(qkv(finish=finish))) as made:
        for row in made.updates(5):
            assert row.num_direct == 0


@pytest.mark.parametrize("config", FEW_WAYS, ids=str)
@pytest.mark.parametrize("way", [Way.OBSERVE, "later"])
def test_a_parameter_that_moves_after_the_plan_ends_the_update_before_anything_changed(
    config: dict[str, Any], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run(lambda: plan(qkv()), **config) as made:
        if way == "later":
            made.updates(3)
        before = made.engine.snapshot()
        plain_plan = DirectApply.plan

        def move(self: DirectApply, *, sets: bool) -> Way:
            found = plain_plan(self, sets=sets)
            made.engine.model.odd.weight.data = made.engine.model.odd.weight.data.clone()
            return found

        with monkeypatch.context() as patch:
            patch.setattr(DirectApply, "plan", move)
            with pytest.raises(WeightSyncError, match="moved during the update"):
                made.session.update()
        assert made.engine.snapshot() == before
        assert not made.sync.receivers[0][0].poisoned
        made.updates(3)


# ---- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", WAYS, ids=str)
@pytest.mark.parametrize("odd", [keep, swap_some], ids=["all copied", "one reloaded"])
def test_a_failure_in_the_middle_of_the_copies_poisons_and_the_next_update_is_exact(
    config: dict[str, Any], odd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run(lambda: plan(qkv(finish=odd)), **config) as made:
        made.updates(3)
        plain_copy = torch.Tensor.copy_
        for count in (1, 2):
            before, calls = made.engine.snapshot(), 0
            ours = {tensor.data_ptr() for tensor in made.engine.live().values()}

            def broken(self: torch.Tensor, *args: Any, count: int = count, ours: set[int] = ours) -> torch.Tensor:
                nonlocal calls
                calls += self.data_ptr() in ours
                if calls > count:
                    raise RuntimeError("planted")
                return plain_copy(self, *args)

            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "copy_", broken)
                with pytest.raises(EnginePoisonedError, match="planted"):
                    made.session.update()
            assert made.sync.receivers[0][0].poisoned
            assert made.engine.snapshot() != before
            made.updates(2)
            assert not made.sync.receivers[0][0].poisoned


@pytest.mark.parametrize("config", FEW_WAYS, ids=str)
@pytest.mark.parametrize("after", [0, 1])
def test_a_reload_of_the_rest_that_fails_poisons_and_the_next_update_is_exact(
    config: dict[str, Any], after: int
) -> None:
    def make() -> Plan:
        made = plan(qkv(finish=swap_some))
        made.parts["norm"].finish = scaled
        return made

    with run(make, **config) as made:
        made.updates(3)
        made.engine.fail_after = after
        with pytest.raises(EnginePoisonedError, match="planted"):
            made.session.update()
        made.engine.fail_after = None
        assert made.updates(2)[-1].num_direct == 2


def test_a_watched_reload_that_fails_is_watched_again() -> None:
    with run(lambda: plan(qkv())) as made:
        made.engine.fail_after = 2
        with pytest.raises(EnginePoisonedError, match="planted"):
            made.session.update()
        made.engine.fail_after = None
        made.step()
        assert made.update().num_direct == 0
        made.step()
        assert made.update().num_direct == 4


@pytest.mark.parametrize("name", ["norm", "k"])
@pytest.mark.parametrize("apply", ["staged", "streaming"])
def test_a_wrong_digest_is_named_and_the_next_update_is_exact(
    apply: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run(lambda: plan(qkv(finish=swap_some)), transport="sets", apply=apply) as made:
        made.updates(3)
        before = made.engine.snapshot()
        with monkeypatch.context() as patch:
            patch.setattr(SetSender, "wrong", name)
            with pytest.raises((DigestError, EnginePoisonedError), match=f"{name}: its bytes differ"):
                made.session.update()
        assert made.sync.receivers[0][0].poisoned is (apply == "streaming")
        assert (made.engine.snapshot() == before) is (apply == "staged")
        made.updates(2)


@pytest.mark.parametrize("apply", ["staged", "streaming"])
def test_a_link_that_breaks_between_tensors_and_digests(apply: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with run(lambda: plan(qkv()), transport="sets", apply=apply) as made:
        made.updates(3)
        with monkeypatch.context() as patch:
            patch.setattr(SetSender, "late_break", True)
            with pytest.raises(WeightSyncError):
                made.session.update()
        assert apply == "streaming" or not made.sync.receivers[0][0].poisoned
        made.updates(2)


@pytest.mark.parametrize("digest", [True, False])
@pytest.mark.parametrize("apply", ["staged", "streaming"])
@pytest.mark.parametrize(
    "chunked",
    [set(), {"norm"}, {"q", "embed"}, {"norm", "embed", "q", "k", "v", "b"}],
    ids=lambda names: " ".join(sorted(names)) or "none",
)
@pytest.mark.parametrize("odd", [keep, swap_some], ids=["all copied", "one reloaded"])
def test_sets_and_chunks_may_be_mixed_with_groups_that_are_reloaded(
    odd: Any, chunked: set[str], apply: str, digest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SetSender, "chunked", frozenset(chunked))
    with run(lambda: plan(qkv(finish=odd)), transport="sets", apply=apply, digest=digest) as made:
        *_, last = made.updates(4)
        assert last.num_direct == (4 if odd is keep else 3)
        assert last.reloads == int(odd is not keep)


def test_two_trainers_send_a_set_each() -> None:
    made = Run(lambda: plan(qkv(finish=swap_some)))
    made.close()
    names = list(made.weights)
    parts = [{name: made.weights[name] for name in names[i::2]} for i in range(2)]
    made.sync = LocalSync(
        [lambda: parts[0], lambda: parts[1]], [[made.engine]], SyncConfig(timeout_s=20, transport="sets")
    )
    made.session = made.sync.__enter__()
    try:
        *_, last = made.updates(4)
        assert last.num_direct == 3
    finally:
        made.close()


def test_names_that_feed_nothing_come_and_are_dropped() -> None:
    for transport in ("sets", "shared_memory"):
        shapes = shapes_of(plan(qkv())) | {"nothing": (5,)}
        made = Run(lambda: plan(qkv()), shapes, transport=transport)
        try:
            *_, last = made.updates(3)
            assert last.num_direct == 4
        finally:
            made.close()


# ---- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shared_memory", "sets"])
def test_off_reloads_everything_and_says_so(transport: str) -> None:
    with run(lambda: plan(qkv()), direct_apply="off", transport=transport) as made:
        for row in made.updates(3):
            assert (row.num_direct, row.reloads) == (0, 1)
            assert set(row.reloaded.values()) == {"direct_apply is off"}


def test_an_adapter_that_does_not_show_its_tensors_is_reloaded() -> None:
    class Closed(MadeUp):
        copies_load = False

    original = globals()["MadeUp"]
    globals()["MadeUp"] = Closed
    try:
        with run(lambda: plan(qkv())) as made:
            for row in made.updates(2):
                assert row.num_direct == 0
                assert set(row.reloaded.values()) == {"the engine's adapter does not show its live tensors"}
    finally:
        globals()["MadeUp"] = original


@pytest.mark.parametrize("transport", ["shared_memory", "sets"])
def test_an_audit_does_both_every_so_many_updates(transport: str) -> None:
    with run(lambda: plan(qkv(finish=swap_some)), direct_apply="audit", audit_every=3, transport=transport) as made:
        before = made.engine.reloads
        rows = made.updates(9)
        assert [row.num_direct for row in rows] == [0, 0] + [3] * 7
        assert made.engine.reloads - before == 9
    with run(lambda: plan(qkv()), direct_apply="audit", audit_every=3, transport=transport) as made:
        reloads = [row.reloads for row in made.updates(9)]
        assert reloads == [1, 0, 1, 0, 0, 1, 0, 0, 1]


def test_an_audit_whose_update_failed_is_made_up_for() -> None:
    with run(lambda: plan(qkv()), direct_apply="audit", audit_every=3) as made:
        assert [row.reloads for row in made.updates(2)] == [1, 0]
        made.engine.fail_after = 1
        with pytest.raises(EnginePoisonedError, match="planted"):
            made.session.update()
        made.engine.fail_after = None
        assert [row.reloads for row in made.updates(4)] == [1, 0, 0, 1]


CHANGES: dict[str, tuple[Callable[[Any, Tensors], None], str]] = {
    "another layout": (swap_halves, ""),
    "other values": (scaled, ""),
    "a tensor made from the weight": (derive(whole), "also changed odd's cache"),
}


@pytest.mark.parametrize("transport", ["shared_memory", "sets"])
@pytest.mark.parametrize("change", CHANGES)
def test_an_audit_finds_an_engine_that_changed_its_ways(change: str, transport: str) -> None:
    finish, why = CHANGES[change]
    with run(lambda: plan(qkv()), direct_apply="audit", audit_every=4, transport=transport) as made:
        assert made.updates(3)[-1].num_direct == 4
        for adapter in (made.engine, made.reference):
            adapter.plan.parts["odd"].finish = finish
            adapter.plan.held = lambda model: getattr(model.odd, "cache", None)
        message = f"direct apply differs from a reload in module group odd.*{why}.*Update again"
        with pytest.raises(EnginePoisonedError, match=message):
            made.session.update()
        assert made.sync.receivers[0][0].poisoned
        for row in made.updates(3):
            assert (row.num_direct, row.reloads) == (0, 1)
            assert set(row.reloaded.values()) == {"an audit found that copies and a reload differ"}
        assert not made.sync.receivers[0][0].poisoned


def test_an_audit_finds_a_copy_that_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_copies = weightsync.placement.run_copies

    def wrong(copies: Any, sources: Any, live: Any, *aliases: Any) -> None:
        plain_copies([copy for copy in copies if copy.name != "k"], sources, live, *aliases)

    with run(lambda: plan(qkv()), direct_apply="audit", audit_every=2) as made:
        made.updates(1)
        monkeypatch.setattr(weightsync.direct, "run_copies", wrong)
        with pytest.raises(EnginePoisonedError, match="module group odd"):
            made.session.update()
        made.updates(2)


def test_made_up_engines_are_what_direct_apply_asks_for() -> None:
    assert isinstance(MadeUp(plan()), DirectAdapter)


# ---- anything -------------------------------------------------------------------------------------------------------


@dataclass
class Drawn:
    """A module of a random engine."""

    cuts: list[int]
    order: list[int]
    """Where each shard's rows stand in the live parameter."""
    derived: str
    dtype: torch.dtype
    padded: int
    steps: list[list[bool]] = field(default_factory=list)


DERIVED = ["none", "none", "none", "attribute", "in place", "scalar", "norm's", "model's", "at the end", "float"]


@st.composite
def drawn_modules(draw: st.DrawFn) -> list[Drawn]:
    found = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
        straight = draw(st.booleans())
        order = list(range(sum(cuts))) if straight else draw(st.permutations(range(sum(cuts))))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
        found.append(Drawn(cuts, list(order), draw(st.sampled_from(DERIVED)), dtype, draw(st.integers(0, 2))))
    return found


def random_plan(modules: list[Drawn]) -> Plan:
    box: list[Any] = []

    def model() -> Any:
        return box[0]

    parts: dict[str, Part] = {"norm": norm()}
    for i, drawn in enumerate(modules):
        feeds, start = {}, 0
        for j, size in enumerate(drawn.cuts):
            feeds[f"m{i}.{j}"] = ("weight", rows(start, start + size))
            start += size

        def finish(module: Any, loaded: Tensors, drawn: Drawn = drawn, i: int = i) -> None:
            weight = loaded["weight"]
            order = [*drawn.order, *range(len(drawn.order), len(weight))]
            keep(module, {"weight": weight[order]})
            value = weight.float().sum(0)
            match drawn.derived:
                case "attribute":
                    module.cache = value
                case "in place":
                    module.buffer_of.copy_(value)
                case "scalar":
                    module.cache = value.abs().max()
                case "float":
                    module.cache = float(value.abs().max())
                case "norm's":
                    setattr(module.norm_of(), f"cache{i}", value)
                case "model's":
                    setattr(model(), f"cache{i}", value)

        def setup(module: Any, i: int = i) -> None:
            module.buffer_of = torch.zeros(5)
            module.norm_of = lambda: model().norm

        parts[f"m{i}"] = Part(
            {"weight": (start + drawn.padded, 5)}, feeds, finish, setup, bool(drawn.padded), dtype=drawn.dtype
        )

    def end(found: Any) -> None:
        for i, drawn in enumerate(modules):
            if drawn.derived == "at the end":
                found.norm.late = {**getattr(found.norm, "late", {}), i: getattr(found, f"m{i}").weight.float().sum(0)}

    def held(found: Any) -> Any:
        of_modules = [[getattr(m, "cache", None), getattr(m, "buffer_of", None)] for m in found.children()]
        numbered = [getattr(at, f"cache{i}", None) for at in (found, found.norm) for i in range(len(modules))]
        return [of_modules, numbered, getattr(found.norm, "late", None)]

    made = Plan(parts, end, held)
    made.box = box  # type: ignore[attr-defined]
    return made


class Boxed(MadeUp):
    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        getattr(plan, "box", []).append(self.model)


@settings(max_examples=25, deadline=None)
@given(
    modules=drawn_modules(),
    config=st.sampled_from(WAYS[:2] + WAYS[3:]),
    mode=st.sampled_from(["auto", "auto", "audit"]),
    data=st.data(),
)
def test_random_engines_are_as_after_a_reload(
    modules: list[Drawn], config: dict[str, Any], mode: str, data: st.DataObject
) -> None:
    original = globals()["MadeUp"]
    globals()["MadeUp"] = Boxed
    register_transport("sets", SetSender, SetReceiver)
    try:
        with run(lambda: random_plan(modules), direct_apply=mode, audit_every=3, **config) as made:
            if data.draw(st.booleans()):  # the engine begins on the trainer's weights
                made.engine.apply([[(name, made.weights[name]) for name in group.names] for group in made.groups])
            for _ in range(6):
                changes = data.draw(st.lists(st.sampled_from(sorted(made.weights)), unique=True))
                if changes:
                    made.step(*changes)
                if data.draw(st.integers(0, 5)) == 0:
                    first = made.engine.model.m0.weight
                    first.data = first.data.clone()
                try:
                    made.update()
                except (
                    EnginePoisonedError
                ):  # it does not know from which weight a tensor was made that had not changed before
                    assert mode == "audit"
    finally:
        globals()["MadeUp"] = original


@settings(max_examples=10, deadline=None)
@given(modules=drawn_modules(), config=st.sampled_from(WAYS[:2] + WAYS[3:]))
def test_random_engines_that_only_copy_are_copied(modules: list[Drawn], config: dict[str, Any]) -> None:
    for drawn in modules:
        drawn.order, drawn.derived = list(range(sum(drawn.cuts))), "none"
    with run(lambda: random_plan(modules), **config) as made:
        assert made.updates(2)[-1].num_direct == len(modules) + 1
