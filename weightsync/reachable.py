"""Find every tensor that a module reaches: parameters and buffers, and what its attributes, kernels and closures hold.

Looked through are attributes, slots and class attributes of objects, containers, closures, defaults and bound objects, and
modules that the model does not list. NumPy arrays count as tensors, and all floats of a module as one.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch

_PLAIN = (
    str,
    bytes,
    int,
    complex,
    bool,
    type(None),
    type,
    types.ModuleType,
    torch.device,
    torch.dtype,
    torch.Size,
)
_HOLDERS = (torch.Tensor, np.ndarray, Mapping, list, tuple, set, frozenset, deque)
_COMPILERS = ("torch.fx", "torch._dynamo", "torch._inductor", "torch._functorch", "torch._subclasses", "torch._guards")
"""What they make is code: thousands of objects, and tensors without data. It is not looked through."""
_MAX_OBJECTS = 20_000


class Reached(dict[str, dict[str, torch.Tensor]]):
    """Module path -> the tensors that the module holds, by a path for people."""

    def __init__(self, walk: Walk) -> None:
        super().__init__()
        self.walk = walk
        self.unseen: dict[str, str] = {}
        """Module path -> what of it could not be looked at."""


class Walk:
    """The modules of a model as they were, to be looked through again, some or all."""

    def __init__(self, model: torch.nn.Module, skip: frozenset[str]) -> None:
        self._modules = dict(model.named_modules())
        self._listed = {id(module) for module in self._modules.values()}
        self._skip = skip

    def __call__(self, paths: Collection[str] | None = None) -> Reached:
        found = Reached(self)
        for path in self._modules if paths is None else paths:
            if path not in self._modules:
                continue
            tensors: dict[str, torch.Tensor] = {}
            unseen = self._look(self._modules[path], tensors)
            if tensors:
                found[path] = tensors
            if unseen:
                found.unseen[path] = unseen
        return found

    def _look(self, module: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> str:
        """Fill in the module's tensors; returns what could not be looked at, or ""."""
        unseen, floats = "", [0.0]
        seen: dict[int, Any] = {id(module): module}  # kept, so that no id is used again
        queue: deque[tuple[str, Any]] = deque(_attributes(module, self._skip))
        while queue:
            path, value = queue.popleft()
            if isinstance(value, float | np.floating):
                floats.append(float(value))
                continue
            if isinstance(value, complex | np.complexfloating):
                floats += [float(value.real), float(value.imag)]
                continue
            if isinstance(value, _PLAIN) or id(value) in self._listed or id(value) in seen or _is_code(value):
                continue
            if len(seen) >= _MAX_OBJECTS:
                return unseen or f"more than {_MAX_OBJECTS} objects"
            seen[id(value)] = value
            try:
                if isinstance(value, torch.Tensor | np.ndarray) and (tensor := _plain_tensor(value)) is not None:
                    tensors[path] = tensor
                queue.extend((f"{path}{step}", part) for step, part in _parts(value, self._skip))
            except Exception as error:
                unseen = unseen or f"{path} ({type(value).__name__}: {error})"
        if len(floats) > 1:
            tensors["floats"] = torch.tensor(floats, dtype=torch.float64)
        return unseen


def reachable_tensors(model: torch.nn.Module, *, skip: frozenset[str] = frozenset()) -> Reached:
    """The tensors that each module holds itself; submodules stand under their own path.

    Attributes called one of *skip* are left out. What native objects, globals and compiled graphs hold is not seen.
    """
    return Walk(model, skip)()


def _is_code(value: object) -> bool:
    return type(value).__module__.startswith(_COMPILERS)


def _plain_tensor(value: torch.Tensor | np.ndarray[Any, Any]) -> torch.Tensor | None:
    """The value's bytes as a tensor; None where it has none. Raises where it has some that cannot be looked at."""
    if isinstance(value, np.ndarray):
        return (
            torch.from_numpy(value if value.flags.writeable else value.copy()) if value.dtype.kind in "biufc" else None
        )
    if value.is_meta:
        return None
    if value.layout != torch.strided or value.is_quantized:
        raise TypeError(f"a tensor of layout {value.layout}")
    plain = value.detach().resolve_conj().resolve_neg()
    if plain.numel() and not plain.untyped_storage().data_ptr():
        raise TypeError("a tensor without memory of its own")
    return plain


def _attributes(module: torch.nn.Module, skip: frozenset[str]) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers"):
            yield from ((key, tensor) for key, tensor in value.items() if key not in skip)
        elif name != "_modules" and name not in skip:
            yield name, value
    yield from ((step.removeprefix("."), value) for step, value in _of_class(module, skip))


def _parts(value: Any, skip: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """What an object holds, with how to get there."""
    match value:
        case Mapping():
            yield from ((f"[{key!r}]", part) for key, part in list(value.items()))
        case list() | tuple() | set() | frozenset() | deque():
            yield from ((f"[{i}]", part) for i, part in enumerate(value))
        case functools.partial():
            yield from (("()", part) for part in (value.func, *value.args, *value.keywords.values()))
        case types.MethodType():
            yield ".__self__", value.__self__
            yield "", value.__func__
        case types.BuiltinMethodType() | types.MethodWrapperType():
            yield ".__self__", value.__self__
        case types.FunctionType():
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
                try:
                    yield f"<{name}>", cell.cell_contents
                except ValueError:  # not filled yet
                    continue
            yield from (("()", part) for part in value.__defaults__ or ())
            yield from (("()", part) for part in (value.__kwdefaults__ or {}).values())
    for name in list(getattr(value, "__dict__", ())):
        if name not in skip:
            yield f".{name}", value.__dict__[name]
    for kind in type(value).__mro__:
        for name, descriptor in list(vars(kind).items()):
            if isinstance(descriptor, types.MemberDescriptorType) and "__slots__" in vars(kind) and name not in skip:
                try:
                    yield f".{name}", descriptor.__get__(value)
                except AttributeError:  # not filled
                    continue
    yield from _of_class(value, skip)


def _of_class(value: object, skip: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Tensors and containers that the object's classes hold. Those of torch and Python are left out."""
    for kind in type(value).__mro__:
        if kind.__module__.partition(".")[0] in ("torch", "builtins", "collections", "typing", "enum", "abc"):
            continue
        for name, part in list(vars(kind).items()):
            # Underscored on both sides are fields, annotations and schemas.
            if isinstance(part, _HOLDERS) and name not in skip and not name.endswith("__"):
                yield f".{name}", part
