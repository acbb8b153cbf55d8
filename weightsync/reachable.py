"""Find every tensor that a module reaches: parameters and buffers, and what its attributes, kernels and closures hold."""

from __future__ import annotations

import contextlib
import functools
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_PLAIN = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    type,
    types.ModuleType,
    torch.device,
    torch.dtype,
    torch.Size,
)
_MAX_OBJECTS = 20_000


def reachable_tensors(
    model: torch.nn.Module, *, skip: frozenset[str] = frozenset()
) -> dict[str, dict[str, torch.Tensor]]:
    """Module path -> the tensors that the module holds itself, by a path for people; submodules stand under their own.

    Attributes called one of *skip* are left out. What native objects hold is not seen.
    """
    found = {}
    for path, module in model.named_modules():
        tensors = dict(_tensors_of(module, skip))
        if tensors:
            found[path] = tensors
    return found


def _tensors_of(module: torch.nn.Module, skip: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]]:
    seen: dict[int, Any] = {id(module): module}  # kept, so that no id is used again
    queue: deque[tuple[str, Any]] = deque(_attributes(module, skip))
    while queue and len(seen) < _MAX_OBJECTS:
        path, value = queue.popleft()
        if isinstance(value, (*_PLAIN, torch.nn.Module)) or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor) and not value.is_meta and value.layout == torch.strided:
            yield path, value.detach()
        queue.extend((f"{path}{step}", part) for step, part in _parts(value, skip))


def _attributes(module: torch.nn.Module, skip: frozenset[str]) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers"):
            yield from ((key, tensor) for key, tensor in value.items() if key not in skip)
        elif name != "_modules" and name not in skip:
            yield name, value


def _parts(value: Any, skip: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """What an object holds, with how to get there."""
    match value:
        case torch.Tensor() if not isinstance(value, torch.nn.Parameter) and not hasattr(value, "__dict__"):
            return
        case Mapping():
            yield from ((f"[{key!r}]", part) for key, part in list(value.items()))
        case list() | tuple() | set() | frozenset() | deque():
            yield from ((f"[{i}]", part) for i, part in enumerate(value))
        case functools.partial():
            yield from (("()", part) for part in (value.func, *value.args, *value.keywords.values()))
        case types.MethodType():
            yield ".__self__", value.__self__
            yield "", value.__func__
        case types.FunctionType():
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
                try:
                    yield f"<{name}>", cell.cell_contents
                except ValueError:  # not filled yet
                    continue
            yield from (("()", part) for part in value.__defaults__ or ())
        case _:
            names = list(vars(value)) if hasattr(value, "__dict__") else []
            names += [
                name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if isinstance(name, str)
            ]
            for name in names:
                if name not in skip and not name.startswith("__"):
                    with contextlib.suppress(Exception):  # a slot that is empty, a property that fails
                        yield f".{name}", getattr(value, name)
