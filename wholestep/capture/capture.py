"""Model, loss and batch to a forward program: one function of parameters, buffers, constants and batch."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..dialects.step import StepBuilder, ir_dtype, tensor_type
from ..dialects.step.sources import RANDOM_KEY
from ..errors import CaptureError, InputError
from ..ir.builtin import add_function, module
from ..ir.collector import collector_paused
from ..ir.core import Op, Value
from ..ir.types import TensorType
from . import aten_nn, aten_pointwise, aten_random, aten_shape  # noqa: F401  (they register their handlers)
from .export import Interface, export
from .importer import Importer
from .reads import Reads, outside_tensors
from .references import Ref, fresh
from .slots import Slot

#: how constants are called that a loss function reads from outside, a teacher's weights for instance
OUTSIDE = "outside."


@dataclass(slots=True)
class Captured:
    """A forward program and what its arguments and results are."""

    module: Op
    function: Op
    slots: list[Slot]
    loss: Value
    outputs: list[Value]
    #: arguments that the forward pass changes (BatchNorm statistics), with their new values
    changed: list[tuple[Slot, Value]]
    constants: dict[str, torch.Tensor]
    exported: Interface
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    opaque: dict[str, int] = field(default_factory=dict)
    #: ops that the user keeps out of mixed precision
    exact: set[Op] = field(default_factory=set)
    #: Python values that the program was made from; None where it was not captured here
    reads: Reads | None = None


@collector_paused()
def capture(model: nn.Module, loss_fn: Any, batch: Any) -> Captured:
    """Captures the forward pass and the loss.

    The model is told that it is compiled; where that gives no program, that it is exported, and a warning says so.
    """
    try:
        return capture_as(model, loss_fn, batch, exporting=False)
    except CaptureError as error:
        failure = str(error)
    captured = capture_as(model, loss_fn, batch, exporting=True)
    warnings.warn(
        "the model was captured with torch.compiler.is_exporting() true, where a library may compute more than a step "
        f"needs, such as masks; with is_compiling() alone it could not be: {failure}",
        stacklevel=2,
    )
    return captured


def capture_as(model: nn.Module, loss_fn: Any, batch: Any, exporting: bool) -> Captured:
    """One attempt to capture; `exporting` is what `torch.compiler.is_exporting()` tells the model."""
    exported = export(model, loss_fn, batch, exporting)
    program = exported.program
    parameters, buffers, aliases = named_state(model, loss_fn)
    device = next((t.device for t in (*parameters.values(), *buffers.values())), torch.device("cpu"))
    root = module()
    function = add_function(root, "step", [])
    block = function.regions[0].block
    b = StepBuilder(block, phase="forward")
    slots: list[Slot] = []
    arguments: dict[tuple[Any, ...], Ref] = {}
    constants: dict[str, torch.Tensor] = {}
    held = {
        place(r.value): ("", r.value) for r in exported.reads.settings.values() if isinstance(r.value, torch.Tensor)
    }
    held |= {place(t): (f"{OUTSIDE}{name}", t) for name, t in outside_tensors(exported.reads.names).items()}

    def argument(kind: str, name: str, source: tuple[Any, ...], type: TensorType) -> Ref:
        """The argument for a source; the same source twice (a tied parameter) is one argument."""
        found = arguments.get(source)
        if found is None:
            found = fresh(block.add_argument(type, name), name)
            arguments[source] = found
            slots.append(Slot(kind, name, source, type))
        return found

    inputs: list[Any] = []
    batch_index = 0
    for spec in program.graph_signature.input_specs:
        kind, target = spec.kind.name, spec.target
        if kind == "PARAMETER":
            name = aliases[target]
            inputs.append(argument("parameter", name, ("parameter", name), tensor_type(parameters[name])))
        elif kind == "BUFFER":
            if target not in aliases:
                raise CaptureError(f"buffer {target} of the captured program is not a buffer of the model")
            name = aliases[target]
            inputs.append(argument("buffer", name, ("buffer", name), tensor_type(buffers[name])))
        elif kind == "CONSTANT_TENSOR":
            tensor = program.constants[target]
            lives = tensor.numel() == 1 and not written_out(program, spec)  # its owner may fill it between steps
            away = lives and tensor.device != device
            if tensor.numel() <= 1 and not tensor.is_complex() and (away or not lives):
                value = tensor.item() if tensor.numel() else 0
                if away:
                    exported.reads.numbers.append((tensor, value))
                inputs.append(fresh(b.full(value, tuple(tensor.shape), ir_dtype(tensor.dtype))))
            else:
                name, tensor = held.get(place(tensor), ("", tensor))  # torch gives another tensor of that memory
                target = name or target
                constants[target] = tensor
                inputs.append(argument("constant", target, ("constant", target), tensor_type(tensor)))
        elif kind == "USER_INPUT":
            if isinstance(spec.arg, torch.export.graph_signature.TensorArgument):
                name = exported.batch_names[batch_index]
                node_type = tensor_type(_placeholder(program, spec.arg.name))
                inputs.append(argument("batch", name, ("batch", batch_index), node_type))
                batch_index += 1
            else:
                inputs.append(getattr(spec.arg, "value", None))
        else:
            raise CaptureError(f"the captured program has an input of kind {kind}, which is not supported")

    def random_key() -> Value:
        return argument("random_key", "random key", ("random_key",), RANDOM_KEY).value

    importer = Importer(b, random_key, strip="model")
    results = importer.run(program.graph_module, inputs)
    values = [r.read(b) if isinstance(r, Ref) else None for r in results]
    outputs = user_outputs(program, values)
    loss = outputs[exported.loss_index]
    check_loss(loss)
    changed = changed_arguments(slots, arguments, parameters)
    exported.reads.tensors = list(constants.values())
    captured = Captured(
        root, function, slots, loss, outputs, changed, constants, exported, parameters, buffers,
        importer.opaque_targets, importer.exact, exported.reads,
    )  # fmt: skip
    mark_loss_phase(captured)
    return captured


def changed_arguments(
    slots: list[Slot], arguments: dict[tuple[Any, ...], Ref], parameters: dict[str, nn.Parameter]
) -> list[tuple[Slot, Value]]:
    """Arguments that the forward pass changes, with their new values."""
    changed = []
    for slot in slots:
        ref = arguments[slot.source]
        if ref.box.version:
            if slot.kind == "parameter" and parameters[slot.source[1]].requires_grad:
                raise CaptureError(
                    f"the forward pass changes parameter {slot.name} in place; change parameters in the optimizer, "
                    "or freeze it (requires_grad_(False)) where forward keeps it up to date"
                )
            changed.append((slot, ref.box.value))
    return changed


def named_state(
    model: nn.Module, loss_fn: Any
) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor], dict[str, str]]:
    """Parameters and buffers by name, each once, and the name for every path (tied tensors have several paths)."""
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[int, str] = {}
    roots = [("model", "", model)]
    if isinstance(loss_fn, nn.Module):
        roots.append(("loss_fn", "loss_fn", loss_fn))
    for path, shown, root in roots:
        prefix = shown + "." if shown else ""
        for name, parameter in root.named_parameters(remove_duplicate=False):
            own = seen.setdefault(id(parameter), prefix + name)
            parameters[own] = parameter
            aliases[f"{path}.{name}"] = own
        for name, buffer in root.named_buffers(remove_duplicate=False):
            own = seen.setdefault(id(buffer), prefix + name)
            buffers[own] = buffer
            aliases[f"{path}.{name}"] = own
    return parameters, buffers, aliases


def written_out(program: Any, spec: Any) -> bool:
    """Whether a constant is one that forward makes (`torch.tensor(0.5)`), not a tensor that its owner may fill."""
    node = next(n for n in program.graph.nodes if n.op == "placeholder" and n.name == spec.arg.name)
    return all("lift_fresh" in str(user.target) for user in node.users)


def place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor lies and how."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _placeholder(program: Any, name: str) -> torch.Tensor:
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name == name:
            return node.meta["val"]
    raise CaptureError(f"the captured program has no input {name}")


def user_outputs(program: Any, values: list[Value | None]) -> list[Value]:
    """The values of the user's outputs, leaving out those that stand for mutations."""
    out = []
    for spec, value in zip(program.graph_signature.output_specs, values, strict=True):
        if spec.kind.name == "USER_OUTPUT":
            if value is None:
                raise CaptureError("an output of the model is not a tensor")
            out.append(value)
    return out


def check_loss(loss: Value) -> None:
    """The loss must be one floating-point number."""
    if loss.type.size != 1:
        raise InputError(
            f"the loss has shape {list(loss.type.shape)}; it must be a single number: take .mean() or .sum() of it"
        )
    if loss.type.element.kind != "float":
        raise InputError(f"the loss is {loss.type}; a loss must be a real floating-point number to have a gradient")


def mark_loss_phase(captured: Captured) -> None:
    """Ops that belong to no submodule and lead to the loss alone are the loss; the rest is forward."""
    kept = {id(v) for v in captured.outputs if v is not captured.loss} | {id(v) for _, v in captured.changed}
    loss_ops: dict[Op, None] = {}
    work = [captured.loss.op] if captured.loss.op is not None else []
    while work:
        op = work.pop()
        if op in loss_ops or op.loc.layer not in ("", "loss_fn") or any(id(r) in kept for r in op.results):
            continue
        if any(user not in loss_ops for r in op.results for user in r.uses):
            continue
        loss_ops[op] = None
        op.attributes["phase"] = "loss"
        work += [v.op for v in op.operands if v.op is not None]
