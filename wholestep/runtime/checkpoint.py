"""Whether a checkpoint is of this model and this optimizer, asked before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..errors import InputError


def check_checkpoint(state: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises InputError, naming the first difference, where `state` is not a checkpoint of these two."""
    if not isinstance(state, Mapping) or not all(isinstance(state.get(k), Mapping) for k in ("model", "optimizer")):
        raise InputError(
            "a checkpoint of a step is a dictionary with the state dicts `model` and `optimizer`, as step.state_dict() "
            "gives it; load a model's own state dict with model.load_state_dict"
        )
    check_model_state(state["model"], model)
    check_optimizer_state(state["optimizer"], optimizer)


def check_model_state(state: Mapping[str, Any], model: nn.Module) -> None:
    own = model.state_dict(keep_vars=True)
    name = type(model).__name__
    missing = [k for k in own if k not in state]
    extra = [k for k in state if k not in own]
    if missing or extra:
        first = f"it has no {missing[0]}" if missing else f"it has {extra[0]}, which the model has not"
        raise InputError(
            f"the checkpoint is of another model than this {name}: {first} ({len(missing)} of {len(own)} entries are "
            f"missing, {len(extra)} unknown). Nothing was loaded"
        )
    for key, tensor in own.items():
        given = state[key]
        if isinstance(tensor, torch.Tensor) and (not isinstance(given, torch.Tensor) or given.shape != tensor.shape):
            shape = list(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
            raise InputError(
                f"the checkpoint is of another model than this {name}: {key} is {shape} there and {list(tensor.shape)} "
                "here. Nothing was loaded"
            )


def check_optimizer_state(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not isinstance(state.get("state"), Mapping):
        raise InputError("the optimizer's part of the checkpoint is no state dict of an optimizer. Nothing was loaded")
    have, want = [len(g["params"]) for g in groups], [len(g["params"]) for g in optimizer.param_groups]
    if have != want:
        raise InputError(
            f"the checkpoint's optimizer has groups of {have} parameters, this {name} of {want}. Nothing was loaded"
        )
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    numbers = [i for g in groups for i in g["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in state["state"].get(number, {}).items():
            other = isinstance(value, torch.Tensor) and value.dim() and value.numel() != 1
            if other and key != "step" and looks_like_parameter(value, parameter):
                raise InputError(
                    f"the checkpoint's {key} of parameter {number} has shape {list(value.shape)}, but that parameter "
                    f"of this {name} has {list(parameter.shape)}. Nothing was loaded"
                )


def looks_like_parameter(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a piece of state was as large as its parameter, and this parameter is not; factored state is smaller."""
    return value.dim() == parameter.dim() and value.shape != parameter.shape and value.numel() >= parameter.numel()
