"""`ws.compile`: the pipeline from a model, a loss and an optimizer to one program, top to bottom."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from . import machine
from .capture.capture import capture, named_state
from .capture.structure import flatten
from .errors import InputError
from .ir.verify import verify as verify_ir
from .runtime.executor import Executable
from .runtime.train_step import Compiled, TrainStep
from .torch_private import has_backward_hooks, has_gradient_hooks
from .training.build import Program, build_step
from .training.optimizer_plan import OptimizerPlan
from .training.optimizers import plan_optimizer


def compile(
    model: nn.Module,
    loss_fn: Any,
    optimizer: torch.optim.Optimizer,
    example_batch: Any,
    *,
    clip_norm: float | None = None,
    verify: bool = False,
) -> TrainStep:
    """Compiles one whole training step: forward, loss, backward, clipping and the optimizer's update.

    loss_fn: `loss_fn(model, *batch)`, or `loss_fn(output, target)`, or None where the model returns its own loss.
    example_batch: a tuple of tensors (or a nesting of them), or a mapping for keyword batches. Later batches have the
        same structure, shapes and dtypes.
    clip_norm: clips gradients by their global norm, as `torch.nn.utils.clip_grad_norm_`.
    verify: runs the first step in eager PyTorch too, on copies, and raises if any tensor differs.

    The model and the optimizer stay the truth: their tensors are updated in place, and compiled and eager steps may be
    mixed in any order. A compile that fails changes nothing.
    """
    machine.protect()
    batch = as_batch(example_batch)
    check_options(clip_norm)
    options = {"clip_norm": clip_norm, "verify": verify}
    return TrainStep(model, loss_fn, optimizer, batch, compile_step, program_key, options)


def compile_step(step: TrainStep) -> Compiled:
    """One compilation, from capture to the executable."""
    check_model(step.model, step.loss_fn, step.optimizer, step.example_batch)
    clock = time.perf_counter
    start = clock()
    captured = capture(step.model, step.loss_fn, step.example_batch)
    captured_at = clock()
    plan = plan_optimizer(step.optimizer, captured.parameters, step.plan)
    program = build_step(captured, plan, step.options["clip_norm"])
    built_at = clock()
    verify_ir(program.module)
    verified_at = clock()
    executable = Executable(
        program.function, device_of(step.model, step.loss_fn), host_numbers(program, step.optimizer)
    )
    done = clock()
    seconds = {
        "capture": captured_at - start,
        "autodiff + update": built_at - captured_at,
        "verify": verified_at - built_at,
        "build": done - verified_at,
    }
    return Compiled(program, plan, executable, program_key(step, plan), seconds)


def host_numbers(program: Program, optimizer: torch.optim.Optimizer) -> list[int]:
    """Arguments that are single numbers on the host: hyper-parameters and the optimizer's own counters."""
    found = []
    for index, slot in enumerate(program.slots):
        if slot.kind in ("hyper", "fresh"):
            found.append(index)
        elif slot.kind == "optimizer_state" and not slot.type.shape and slot.type.element.text in ("f32", "f64"):
            parameter = program.captured.parameters[slot.source[1]]
            state = optimizer.state.get(parameter, {}).get(slot.source[2])
            on_host = state.device.type == "cpu" if isinstance(state, torch.Tensor) else True
            if on_host and parameter.dim():
                found.append(index)
    return found


def program_key(step: TrainStep, plan: OptimizerPlan) -> Any:
    """What a program depends on beside its inputs: modes, frozen layers, the optimizer's structure."""
    roots = (step.model, step.loss_fn) if isinstance(step.loss_fn, nn.Module) else (step.model,)
    modules = [m for root in roots for m in root.modules()]
    parameters = [p for m in modules for p in m._parameters.values() if p is not None]
    buffers = [b for m in modules for b in m._buffers.values() if b is not None]
    return (
        tuple([m.training for m in modules]),
        tuple([(id(p), p.requires_grad, p.shape, p.dtype, p.device) for p in parameters]),
        tuple([(b.shape, b.dtype, b.device) for b in buffers]),
        plan.structure(),
    )


def device_of(model: nn.Module, loss_fn: Any = None) -> torch.device:
    """The one device that the model, and a loss that is a module, are on."""
    parameters, buffers, _ = named_state(model, loss_fn)
    devices: dict[torch.device, str] = {}
    for name, tensor in (*parameters.items(), *buffers.items()):
        devices.setdefault(tensor.device, name)
    if len(devices) > 1:
        shown = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise InputError(f"the model is spread over several devices ({shown}); move it to one with .to(...)")
    return next(iter(devices), torch.device("cpu"))


def as_batch(example: Any) -> Any:
    """A batch as the step keeps it: a mapping, or a tuple of parts."""
    if isinstance(example, Mapping):
        return dict(example)
    if isinstance(example, list | tuple):
        return tuple(example)
    return (example,)


def check_options(clip_norm: float | None) -> None:
    if clip_norm is not None and not (
        isinstance(clip_norm, int | float) and clip_norm > 0 and math.isfinite(clip_norm)
    ):
        raise InputError(f"clip_norm must be a positive number, not {clip_norm!r}")


def check_model(model: nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """Everything that can be said before capture: ownership, devices, hooks, NaN."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if loss_fn is not None and not callable(loss_fn):
        raise InputError(f"loss_fn must be callable or None, not {type(loss_fn).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    parameters, _, _ = named_state(model, loss_fn)
    for name, p in parameters.items():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise InputError(f"parameter {name} has no shape yet (a lazy module); run the model once before compiling")
    if not any(p.requires_grad for p in parameters.values()):
        raise InputError("no parameter of the model requires a gradient; unfreeze one with requires_grad_(True)")
    check_ownership(parameters, optimizer)
    for name, p in parameters.items():
        check_parameter(name, p)
    for path, module in (*model.named_modules(), *(loss_fn.named_modules() if isinstance(loss_fn, nn.Module) else ())):
        if has_backward_hooks(module):
            raise InputError(
                f"module {path or type(module).__name__} has backward hooks, which a compiled step would not call; "
                "remove them (forward hooks are part of the program)"
            )
    device = device_of(model, loss_fn)
    tensors: list[torch.Tensor] = []
    names: list[str] = []
    flatten(batch, tensors, names, "batch")
    for tensor, name in zip(tensors, names, strict=True):
        if tensor.device != device:
            raise InputError(
                f"{name} is on {tensor.device} but the model is on {device}; move one of them with .to(...)"
            )
        if tensor.layout is not torch.strided:
            raise InputError(f"{name} has the layout {tensor.layout}; only dense tensors can be part of a batch")


def check_ownership(parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """The optimizer must hold parameters of this model, and of no other."""
    owned = {id(p) for p in parameters.values()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = sum(id(p) not in owned for p in held)
    if foreign:
        raise InputError(
            f"the optimizer holds {foreign} of {len(held)} parameters that are not the model's; build the optimizer "
            "from model.parameters() after the model is complete and on its device"
        )


def check_parameter(name: str, p: nn.Parameter) -> None:
    if has_gradient_hooks(p):
        raise InputError(
            f"parameter {name} has gradient hooks, which a compiled step would not call; remove them "
            "(clip_norm= clips inside the step)"
        )
    if p.is_meta:
        raise InputError(f"parameter {name} is on the meta device and has no values; materialise the model first")
    if not p.is_floating_point():
        return
    bad = ~torch.isfinite(p.detach()) if p.requires_grad else torch.isnan(p.detach())  # a frozen mask may hold -inf
    count = int(bad.sum())
    if count:
        raise InputError(
            f"parameter {name} holds {count} NaN or infinite values (of {p.numel()}) before the step is compiled; "
            "check its initialisation or the checkpoint it came from"
        )
