"""Modules whose parameters have given dotted names, for trainers and engines without a model's code."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def nested_module(tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """A module whose `state_dict` is *tensors*; its parameters share their memory."""
    root = torch.nn.Module()
    nest(root, tensors)
    return root


def nest(root: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give *root* the parameters of `nested_module`, in the order of *tensors*."""
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))
