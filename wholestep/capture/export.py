"""Runs torch.export on a model and its loss; whatever goes wrong becomes one error that names the user's line."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import CaptureError, InputError, WholestepError
from ..torch_private import graphs_without_code, grouped_products_of_any_type
from .cumulative import cumulative_statistics
from .custom_functions import AppliedFunction, traced_functions
from .explain import explain, forward_line, refuse, user_line
from .export_imports import import_export
from .layerdrop import RandomBranches
from .reads import Reads, names_read, reads_of_modules
from .sandbox import (
    Attributes,
    compiled_not_exported,
    extreme_draws,
    keep_random_state,
    python_random_state,
    quiet,
    random_line,
    without_value_checks,
)
from .structure import find_loss, flatten, unflatten
from .user_lines import user_lines_only


@dataclass(slots=True)
class Interface:
    """How the inputs and outputs of a step are arranged: all that running it needs to know."""

    batch_names: list[str]
    batch_structure: Any
    output_structure: Any
    output_names: list[str]
    loss_index: int


@dataclass(slots=True)
class Exported(Interface):
    """What torch.export gave, beside the arrangement of its inputs and outputs."""

    program: Any
    #: custom autograd functions whose gradients the program refers to
    functions: list[AppliedFunction] = field(default_factory=list)
    reads: Reads = field(default_factory=Reads)


class Wrapper(nn.Module):
    """The function that is captured: flat batch tensors in, flat output tensors out."""

    def __init__(self, model: nn.Module, loss_fn: Any, call: Callable[..., Any], structure: Any, notes: dict[str, Any]):
        super().__init__()
        self.model = model
        if isinstance(loss_fn, nn.Module):
            self.loss_fn = loss_fn
        self._call = call
        self._structure = structure
        self._notes = notes
        self.training = model.training  # not .train(): the user's submodules keep their modes

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        modules = [m for m in self.modules() if m._buffers]
        buffers = [(m, name, b) for m in modules for name, b in m._buffers.items() if b is not None]
        attributes = Attributes(("", self.model), ("loss_fn", self._modules.get("loss_fn")))
        result = self._call(unflatten(self._structure, tensors))
        loss, _ = find_loss(result)
        if not isinstance(loss, torch.Tensor):
            raise InputError(f"the loss is a {type(loss).__name__}, not a tensor; return the tensor itself")
        flat: list[torch.Tensor] = []
        names: list[str] = []
        self._notes["structure"] = flatten(result, flat, names, "output")
        self._notes["names"] = names
        self._notes["loss"] = next(i for i, t in enumerate(flat) if t is loss)
        self._notes["changes"] = attributes.changes()
        self._notes["after"] = Attributes(("", self.model), ("loss_fn", self._modules.get("loss_fn")))
        for module, name, before in buffers:  # `self.buffer = new` becomes a write to the buffer
            now = module._buffers.get(name)
            if now is before or now is None:
                continue
            if now.shape != before.shape or now.dtype != before.dtype:
                raise refuse(
                    f"forward replaces the buffer {name} of {type(module).__name__} by a tensor of another shape or "
                    "dtype",
                    "keep buffers of one size for the whole training",
                    forward_line(module),
                )
            with torch.no_grad():
                before.copy_(now)
            module._buffers[name] = before
        return flat


#: attributes that forward sets without computing with them: transformers notes that its forward hooks are in place
HARMLESS = ("_output_capturing_hooks_installed",)

#: names of a first parameter that is the model, however many parameters follow
MODEL_NAMES = ("model", "module", "net", "network")


def calling_convention(model: nn.Module, loss_fn: Any, batch: Any) -> Callable[[Any], Any]:
    """How a batch goes through model and loss.

    No loss_fn: the model returns the loss, alone or as `.loss`. A function whose first parameter is called `model` or
    that needs one argument more than the batch has parts: `loss_fn(model, *batch)`. Otherwise, and for loss modules,
    `loss_fn(model(*inputs), *targets)`, targets being the last parts. Batches that are mappings go by keyword:
    `loss_fn(model, **batch)` or `loss_fn(model, batch)`.
    """
    if loss_fn is None:
        if isinstance(batch, Mapping):
            return lambda b: _only_loss(model(**b))
        return lambda b: _only_loss(model(*b))
    required, names, more_positional, more_named = _parameters(loss_fn)
    takes_model = bool(names) and names[0] in MODEL_NAMES
    if isinstance(batch, Mapping):
        first = names[0] if names else "model"
        if isinstance(loss_fn, nn.Module) and not takes_model:
            raise InputError(
                f"the batch is a mapping with the keys {list(batch)}, so what is the target of "
                f"{type(loss_fn).__name__} is not known; write a function loss_fn(model, batch) that calls both"
            )
        if len(required) == 2 and not more_named and required[1] not in batch:
            return lambda b: loss_fn(model, b)
        if all(n in batch for n in required[1:]) and (more_named or all(k in names for k in batch)):
            return lambda b: loss_fn(model, **b)
        raise InputError(
            f"loss_fn takes ({', '.join(names)}) but the batch has the keys {list(batch)}; write "
            f"loss_fn({first}, batch) or loss_fn({first}, **batch)"
        )
    count = len(batch)
    if not takes_model and 1 <= len(required) <= count and (isinstance(loss_fn, nn.Module) or not more_positional):
        targets = len(required) - 1
        return lambda b: loss_fn(model(*b[: count - targets]), *b[count - targets :])
    if len(required) <= count + 1 and (more_positional or len(names) >= count + 1):
        return lambda b: loss_fn(model, *b)
    raise InputError(
        f"loss_fn takes {len(required)} arguments ({', '.join(names)}) and the batch has {count} parts; expected "
        f"loss_fn(model, *batch) with {count + 1} arguments or loss_fn(output, target) with at most {count}"
    )


def _only_loss(result: Any) -> Any:
    """Without a loss function only the loss is kept: the model's other outputs need not outlive the step."""
    return find_loss(result)[0]


def _parameters(loss_fn: Any) -> tuple[list[str], list[str], bool, bool]:
    """Names of required and of all positional parameters; whether more are accepted, by position and by name."""
    target = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return ["output", "target"], ["output", "target"], False, False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p.name for p in positional if p.default is p.empty]
    more_positional = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return required, [p.name for p in positional], more_positional, any(p.kind is p.VAR_KEYWORD for p in parameters)


def export(model: nn.Module, loss_fn: Any, batch: Any, exporting: bool = False) -> Exported:
    """Captures model and loss on this batch. The model, the batch and the random state are left as they were.

    `exporting` is what `torch.compiler.is_exporting()` tells the model (see `compiled_not_exported`).
    """
    tensors: list[torch.Tensor] = []
    names: list[str] = []
    structure = flatten(batch, tensors, names, "batch")
    call = calling_convention(model, loss_fn, batch)
    inputs = tuple(t.detach() for t in tensors)
    attributes = Attributes(("", model), ("loss_fn", loss_fn))
    paths = {id(module): path for path, module in attributes.modules.items()}
    import_export()

    def trace() -> tuple[Any, dict[str, Any]]:
        notes: dict[str, Any] = {}
        told = nullcontext() if exporting else compiled_not_exported()
        wrapper = Wrapper(model, loss_fn, call, structure, notes)
        branches, names, reads = RandomBranches(), names_read(loss_fn), Reads()
        try:
            with torch.inference_mode(False), torch.enable_grad(), told, branches, traced_functions() as functions:
                with (
                    user_lines_only(),
                    graphs_without_code(),
                    cumulative_statistics(),
                    without_value_checks(),
                    grouped_products_of_any_type(),
                    reads_of_modules(paths) as reads,
                ):
                    reads.keep(read.value for read in names)
                    program = torch.export.export(wrapper, inputs, strict=False)
                program.example_inputs = None  # the user's batch is not held
        except WholestepError:
            raise
        except Exception as error:
            if any(isinstance(module, torch.jit.ScriptModule) for module in reads.modules.values()):
                what, instead = "a module of TorchScript (torch.jit) is called", "call the module that it was made from"
                raise refuse(what, instead, user_line(error)) from None
            raise explain(error, branches, paths) from (error if os.environ.get("WHOLESTEP_TRACE") else None)
        finally:
            attributes.restore()
        refuse_wrapped(program.constants)
        reads.names = [read for read in names if read.same()]
        reads.finish(wrapper, program.constants, paths)
        reads.leave_out((id(attributes.modules[path]), name) for path, name in notes["changes"])
        return program, {**notes, "functions": functions, "reads": reads}

    with keep_random_state():
        with quiet():
            before = python_random_state()
            program, notes = trace()
            if python_random_state() != before:
                check_python_random(program, trace)
            counted = [
                where
                for where, (_, now) in notes["changes"].items()
                if isinstance(now, int | float | str) and where[1] not in HARMLESS
            ]
            if counted:
                notes["after"].repeat()
                try:
                    check_python_state(program, trace, counted, attributes)
                finally:
                    attributes.restore()
        check_lost_tensors(notes["changes"], program, attributes)
    made = (program, notes["functions"], notes["reads"])
    return Exported(names, structure, notes["structure"], notes["names"], notes["loss"], *made)


def refuse_wrapped(constants: Mapping[str, Any]) -> None:
    """Tensors of torch.func's own have no memory, and nothing can be said about them any more."""
    for tensor in constants.values():
        try:
            isinstance(tensor, torch.Tensor) and tensor.data_ptr()
        except RuntimeError:
            raise refuse(
                "a transformation of torch.func (grad, jacrev, vmap) is used in forward",
                "write it with ordinary operations; the step differentiates the loss itself",
                None,
            ) from None


def check_python_random(program: Any, trace: Callable[[], tuple[Any, Any]]) -> None:
    """Refuses a program that depends on draws of Python's `random` or numpy, which would be the same at every step.

    The model is captured again with the lowest and with the highest draws there are; where all three programs are one,
    no draw matters (a probability of 0).
    """
    for high in (False, True):
        extreme_draws(high)
        try:
            same = same_program(program, trace()[0])
        except CaptureError:
            same = False
        if not same:
            raise refuse(
                "a random number of Python's `random` or of numpy decides what is computed, and would be drawn only "
                "once, now",
                "draw with torch.rand and use the tensor (multiply a layer's result by a random 0/1 tensor), or set "
                "the probability to 0",
                random_line(trace),
            )


def check_python_state(
    program: Any, trace: Callable[[], tuple[Any, Any]], counted: list[tuple[str, str]], attributes: Attributes
) -> None:
    """Refuses a program that depends on a Python attribute which forward itself changes, such as a step counter.

    The modules are as forward left them: what is captured now is the next step.
    """
    try:
        same = same_program(program, trace()[0])
    except CaptureError:
        same = False
    if not same:
        names = ", ".join(".".join(part for part in where if part) for where in counted)
        raise refuse(
            f"forward changes the Python attribute {names} of the model and computes with it; a compiled step would "
            "always see its present value",
            "make it a buffer: self.register_buffer(name, torch.tensor(0.0)), changed with add_",
            forward_line(attributes.modules[counted[0][0]]),
        )


def same_program(one: Any, other: Any) -> bool:
    """Whether two captures are the same calls with the same constants."""
    if one.graph_module.code != other.graph_module.code or one.constants.keys() != other.constants.keys():
        return False
    pairs = ((t, other.constants[k]) for k, t in one.constants.items() if isinstance(t, torch.Tensor))
    return all(a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all()) for a, b in pairs)


def check_lost_tensors(changes: dict[tuple[str, str], tuple[Any, Any]], program: Any, attributes: Attributes) -> None:
    """Tensors that forward keeps in plain attributes: refused where the program reads them, else said in a warning."""
    used = {t.data_ptr() for t in program.constants.values() if isinstance(t, torch.Tensor) and t.numel()}
    lost = []
    for where, (before, now) in changes.items():
        if not isinstance(now, torch.Tensor):
            continue
        name = ".".join(part for part in where if part)
        if isinstance(before, torch.Tensor) and before.numel() and before.data_ptr() in used:
            raise refuse(
                f"forward reads and replaces the tensor {name}, which is neither a parameter nor a buffer",
                f"register it with self.register_buffer({where[1]!r}, ...), so that the step carries it along",
                forward_line(attributes.modules[where[0]]),
            )
        lost.append(name)
    if lost:
        warnings.warn(
            f"forward keeps tensors in {', '.join(lost)}; a compiled step does not (a buffer would last)", stacklevel=2
        )
