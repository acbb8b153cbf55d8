"""A module's `state_dict`, without what makes it slow: it is looked up in every update, on both sides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Module = torch.nn.Module
_Slots = dict[str, tuple[dict[str, Any], str]]


def module_tensors(module: Module) -> dict[str, torch.Tensor]:
    """The tensors of `module.state_dict(keep_vars=True)`: parameters and persistent buffers by name, ties included.

    Read off the modules' own tables, three times as fast, where nothing in them has a say in its state_dict (hooks, extra
    state, methods of its own); else asked for. Extra state that is no tensor is left out.
    """
    return tensor_table(module)()


def tensor_table(module: Module) -> Callable[[], dict[str, torch.Tensor]]:
    """`module_tensors`, as a function that may be asked again, which is quick: parameters and buffers are looked up anew,
    the modules are those that there are now."""
    return plain_table(module) or (
        lambda: {
            name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)
        }
    )


def plain_table(module: Module) -> Callable[[], dict[str, torch.Tensor]] | None:
    """The same where it can be read off the modules' tables. Keeps these, but not *module*. KeyError, when asked, where a
    parameter is gone."""
    slots: _Slots = {}
    if not _read(module, "", slots):
        return None
    places = [(name, table, key) for name, (table, key) in slots.items()]
    return lambda: {name: table[key] for name, table, key in places}


def _read(module: Module, prefix: str, slots: _Slots) -> bool:
    """Whether the module and all below it are plain; *slots* then says where each tensor stands."""
    own: dict[str, Any] = module.__dict__
    kind = type(module)
    if not (_plain_types.get(kind) or _is_plain(kind)) or own["_state_dict_hooks"] or own["_state_dict_pre_hooks"]:
        return False
    table = own["_parameters"]
    for name, tensor in table.items():
        if tensor is not None:
            slots[prefix + name] = (table, name)
    table = own["_buffers"]
    if table:
        passing = own["_non_persistent_buffers_set"]
        for name, tensor in table.items():
            if tensor is not None and name not in passing:
                slots[prefix + name] = (table, name)
    for name, child in own["_modules"].items():
        if child is not None and not _read(child, f"{prefix}{name}.", slots):
            return False
    return True


_plain_types: dict[type, bool] = {}


def _is_plain(kind: type) -> bool:
    return _plain_types.setdefault(
        kind,
        all(
            getattr(kind, name) is getattr(Module, name)
            for name in ("state_dict", "_save_to_state_dict", "get_extra_state")
        ),
    )
