"""One program of a saved step: to plain values that JSON knows, and back with every claim checked.

The text of the program is parsed and verified as any other; on top of that a file may name only operators of PyTorch
on tensors, tensors of a bounded size, and state that the given model and optimizer have.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..capture.capture import OUTSIDE, Captured
from ..capture.export import Interface
from ..capture.slots import Slot
from ..capture.structure import Leaf, Structure, from_plain, short, to_plain
from ..cost.bound import NOTED, is_bound
from ..dialects import context
from ..dialects.step import ir_dtype, tensor_type, torch_dtype
from ..dialects.step.opaque import opaque_problem
from ..errors import InputError, SavedStepError
from ..ir.attributes import Symbol
from ..ir.builtin import functions, lookup
from ..ir.core import Op, Value
from ..ir.parser import parse
from ..ir.printer import print_op
from ..ir.types import I64, ScalarType, TensorType
from ..training.build import EMA_WEIGHT, Program, Result, describe
from ..training.optimizer_plan import OptimizerPlan
from ..training.scaling import SCALE, SKIPPED, TRACKER
from ..training.traced_vjp import VjpCache

#: tensors that a model makes while it is captured and that are part of the file, together, in bytes
MOST_CONSTANTS = 64 << 20
#: tensors that a program makes out of nothing when it is loaded (masks, zeros), together, in bytes
MOST_SOURCES = 4 << 30
LARGEST_TENSOR = 1 << 44
MOST_DIMENSIONS = 64
#: what forward may change, and what a step writes
CHANGED = ("buffer", "constant")
WRITTEN = (*CHANGED, "parameter", "optimizer_state", "copy", "ema", "scaler")
KEYS = {
    "text", "entry", "slots", "results", "updated", "untouched", "batch", "batch_names", "output", "output_names",
    "loss_index", "constants", "opaque",
}  # fmt: skip


@dataclass(slots=True)
class Setting:
    """What a program from a file is for."""

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    plan: OptimizerPlan
    device: torch.device
    containers: Mapping[str, type]
    #: tensors that its loss function reads from outside
    outside: Mapping[str, torch.Tensor]


# ---- writing ---------------------------------------------------------------------------------------------------------


def program_to_plain(program: Program) -> dict[str, Any]:
    """Everything that running the program needs and that the model and optimizer do not have."""
    captured, interface = program.captured, program.captured.exported
    check_operators(program.module, "the step cannot be saved: ")
    place = {slot.source: i for i, slot in enumerate(program.slots)}
    return {
        "entry": program.function.sym_name,
        "slots": [
            {"kind": s.kind, "name": s.name, "source": list(s.source), "type": s.type.text} for s in program.slots
        ],
        "results": [
            {"kind": r.kind} if r.slot is None else {"kind": r.kind, "slot": place[r.slot.source]}
            for r in program.results
        ],
        "updated": program.updated,
        "untouched": program.untouched,
        "batch": to_plain(interface.batch_structure),
        "batch_names": interface.batch_names,
        "output": to_plain(interface.output_structure),
        "output_names": interface.output_names,
        "loss_index": interface.loss_index,
        "constants": {name: constant_to_plain(name, t) for name, t in captured.constants.items()},
        "opaque": dict(captured.opaque),
        "text": print_op(program.module, locations=True).splitlines(),
    }


def constant_to_plain(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    form = {"dtype": ir_dtype(tensor.dtype).text, "shape": list(tensor.shape)}
    if name.startswith(OUTSIDE):  # the loss function that it is loaded for has it
        return form
    if isinstance(tensor, nn.Parameter):
        raise SavedStepError(
            f"the step cannot be saved: its loss function reads a parameter of shape {list(tensor.shape)} of a module "
            "that is not the model's and that it does not name. Make both parts of one nn.Module"
        )
    if tensor.numel() * tensor.element_size() > MOST_CONSTANTS:
        raise SavedStepError(
            f"the step cannot be saved: it holds the tensor {name} of shape {list(tensor.shape)}, which the model "
            f"makes in forward; more than {MOST_CONSTANTS >> 20} MB of that do not go into a file. Make it a buffer "
            "(register_buffer)"
        )
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {**form, "data": base64.b64encode(data).decode("ascii")}


# ---- reading ---------------------------------------------------------------------------------------------------------


def program_from_plain(plain: Any, setting: Setting) -> Program:
    """A program for this model and optimizer; InputError says what a file claims that is not so."""
    need(isinstance(plain, dict) and set(plain) == KEYS, f"a program has the entries {', '.join(sorted(KEYS))}")
    module, function = program_text(plain["text"], plain["entry"])
    interface = read_interface(plain, setting.containers)
    constants = read_constants(plain["constants"], setting.device, setting.outside)
    leaves = len(interface.batch_names)
    updated, untouched = names(plain["updated"], "updated"), names(plain["untouched"], "untouched")
    known = set(setting.plan.parameters)
    for name in (*updated, *untouched):
        need(name in known, f"the optimizer has no parameter {short(name)}")
    for name in updated:
        need(setting.parameters[name].requires_grad, f"parameter {name} is frozen, yet the program updates it")
    need(isinstance(plain["slots"], list) and isinstance(plain["results"], list), "slots and results are lists")
    kept = {s for name in updated for s in setting.plan.slots(name)} | own_slots(setting, updated)
    slots = [read_slot(entry, setting, constants, leaves, kept) for entry in plain["slots"]]
    need(len({s.source for s in slots}) == len(slots), "two arguments have the same source")
    results = [read_result(entry, slots) for entry in plain["results"]]
    frozen = {name for name, parameter in setting.parameters.items() if not parameter.requires_grad}
    check_signature(function, slots, results, interface, updated, frozen)
    opaque = plain["opaque"]
    need(
        isinstance(opaque, dict) and all(type(n) is int for n in opaque.values()),
        "opaque counts operators by their name",
    )
    block = function.regions[0].block
    assert block.last is not None
    outputs = list(block.last.operands)[: len(interface.output_names)]
    kept_by_forward = {("parameter", name) for name in frozen}
    changed = [
        (r.slot, value)
        for r, value in zip(results, block.last.operands, strict=True)
        if r.slot is not None and (r.slot.kind in CHANGED or r.slot.source in kept_by_forward)
    ]
    captured = Captured(
        module,
        function,
        [s for s in slots if s.kind in ("parameter", "buffer", "constant", "batch", "random_key")],
        outputs[interface.loss_index],
        outputs,
        changed,
        constants,
        interface,
        setting.parameters,
        setting.buffers,
        dict(opaque),
    )
    return Program(module, function, slots, results, captured, updated, untouched, VjpCache(setting.device))


def need(condition: bool, message: str) -> None:
    if not condition:
        raise SavedStepError(message)


def names(value: Any, what: str) -> list[str]:
    need(isinstance(value, list) and all(isinstance(v, str) for v in value), f"{what} is no list of names")
    need(len(set(value)) == len(value), f"{what} has a name twice")
    return list(value)


def program_text(lines: Any, entry: Any) -> tuple[Op, Op]:
    """Parses and verifies the program; refuses what only a file could bring in."""
    need(
        isinstance(lines, list) and all(isinstance(line, str) for line in lines),
        "the program's text is no list of lines",
    )
    module = parse("\n".join(lines) + "\n", context(), "<program>", verify=True)
    for value in values_of(module):
        kind = value.type
        need(isinstance(kind, TensorType), f"a value has the type {short(kind.text)}, which is no tensor")
        need(kind.rank <= MOST_DIMENSIONS, f"a tensor has {kind.rank} dimensions")
        need(
            kind.bytes <= LARGEST_TENSOR,
            f"a tensor of shape {list(kind.shape)[:8]} is larger than anything that could be trained",
        )
    check_operators(module, "")
    check_calls(module)
    try:
        function = lookup(module, entry)
    except (KeyError, TypeError):
        raise SavedStepError(f"the program has no function {short(entry)}") from None
    noted = function.attributes.get(NOTED)
    need(noted is None or is_bound(noted), f"{short(noted)} is no bound of what a step moves")
    return module, function


def values_of(module: Op) -> Iterator[Value]:
    for op in module.walk():
        yield from op.results
        for region in op.regions:
            for block in region.blocks:
                yield from block.arguments


def check_operators(module: Op, prefix: str) -> None:
    """Refuses operators that a file may not name, and tensors out of nothing that are too large."""
    made = 0
    for op in module.walk():
        if op.name in ("step.opaque", "step.opaque_grad"):
            problem = opaque_problem(op)
            if problem:
                raise SavedStepError(f"{prefix}layer {op.loc}: {problem}")
        if not op.operands and op.name.startswith("step."):
            made += sum(r.type.bytes for r in op.results)
    need(
        made <= MOST_SOURCES,
        f"{prefix}the program makes {made} bytes of constant tensors; at most {MOST_SOURCES} bytes go with a file",
    )


def check_calls(module: Op) -> None:
    """Functions call one another in one direction: a program always ends."""
    calls = {f.sym_name: set[str]() for f in functions(module)}
    for function in functions(module):
        for op in function.walk():
            calls[function.sym_name] |= {v.name for v in op.attributes.values() if isinstance(v, Symbol)}
    while calls:
        ready = [name for name, called in calls.items() if not called & calls.keys()]
        need(bool(ready), "functions of the program call one another in a circle")
        for name in ready:
            del calls[name]


def read_interface(plain: dict[str, Any], containers: Mapping[str, type]) -> Interface:
    batch_names, output_names = plain["batch_names"], plain["output_names"]
    need(
        all(isinstance(n, list) and all(isinstance(v, str) for v in n) for n in (batch_names, output_names)),
        "the names of the batch and of the outputs are lists of names",
    )
    structures = []
    for part, listed in (("batch", batch_names), ("output", output_names)):
        try:
            structure = from_plain(plain[part], containers)
        except InputError as error:
            raise SavedStepError(f"the {part} of the step: {error}") from error
        need(sorted(leaves_of(structure)) == list(range(len(listed))), f"the {part} does not hold each tensor once")
        structures.append(structure)
    need(
        isinstance(structures[0], Structure) and structures[0].kind in (tuple, dict),
        "a batch is a tuple or a dictionary of tensors",
    )
    loss = plain["loss_index"]
    need(type(loss) is int and 0 <= loss < len(output_names), f"there is no output {short(loss)} to be the loss")
    return Interface(batch_names, structures[0], structures[1], output_names, loss)


def leaves_of(structure: Any) -> list[int]:
    if isinstance(structure, Leaf):
        return [structure.index]
    return [i for part in structure.parts for i in leaves_of(part)] if isinstance(structure, Structure) else []


def read_type(text: Any) -> TensorType:
    match = re.fullmatch(r"tensor<((?:[0-9]{1,15}x)*)([A-Za-z0-9<>]+)>", text) if isinstance(text, str) else None
    need(match is not None, f"{short(text)} is no type of a tensor")
    assert match is not None
    shape = tuple(int(d) for d in match[1].split("x")[:-1])
    need(len(shape) <= MOST_DIMENSIONS, f"{short(text)} has too many dimensions")
    try:
        return TensorType(shape, ScalarType(match[2]))
    except ValueError as error:
        raise SavedStepError(str(error)) from error


def read_constants(plain: Any, device: torch.device, outside: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    need(isinstance(plain, dict), "constants are tensors by name")
    found, total = {}, 0
    for name, entry in plain.items():
        if name in outside and isinstance(entry, dict) and set(entry) == {"dtype", "shape"}:
            tensor, what = outside[name], f"{name.removeprefix(OUTSIDE)} of the loss function is"
            have = {"dtype": ir_dtype(tensor.dtype).text, "shape": list(tensor.shape)}
            need(have == entry, f"{what} {have} here and was {short(entry)}")
            need(tensor.device == device, f"{what} on {tensor.device} and the model on {device}")
            found[name] = tensor
            continue
        need(
            isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data"},
            f"the loss function has no tensor {short(name.removeprefix(OUTSIDE))}"
            if name.startswith(OUTSIDE)
            else f"the constant {short(name)} is none",
        )
        shape, data = entry["shape"], entry["data"]
        need(
            isinstance(shape, list)
            and all(type(d) is int and 0 <= d < 1 << 40 for d in shape)
            and isinstance(data, str),
            f"the constant {short(name)} has no shape or no data",
        )
        need(isinstance(entry["dtype"], str), f"the constant {short(name)} has no dtype")
        claimed = read_type(f"tensor<{''.join(f'{d}x' for d in shape)}{entry['dtype']}>")
        total += claimed.bytes
        need(total <= MOST_CONSTANTS, f"its constants are larger than {MOST_CONSTANTS >> 20} MB")
        try:
            raw = base64.b64decode(data, validate=True)
        except binascii.Error as error:
            raise SavedStepError(f"the data of the constant {short(name)} is not base64: {error}") from error
        need(
            len(raw) == claimed.bytes,
            f"the constant {short(name)} has {len(raw)} bytes, its shape asks for {claimed.bytes}",
        )
        flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        found[name] = flat.view(torch_dtype(claimed.element)).reshape(claimed.shape).to(device)
    return found


def read_slot(entry: Any, setting: Setting, constants: dict[str, torch.Tensor], leaves: int, kept: set[Slot]) -> Slot:
    """An argument of the program, whose source must exist and have this type."""
    need(isinstance(entry, dict) and set(entry) == {"kind", "name", "source", "type"}, f"{short(entry)} is no argument")
    kind, name, source = entry["kind"], entry["name"], entry["source"]
    need(isinstance(kind, str) and isinstance(name, str) and isinstance(source, list), f"{short(entry)} is no argument")
    need(all(isinstance(part, str | int) for part in source), f"{short(source)} is no source")
    slot = Slot(kind, name, tuple(source), read_type(entry["type"]))
    problem = slot_problem(slot, setting, constants, leaves, kept)
    need(problem is None, f"argument {short(name)}: {problem}")
    return slot


def slot_problem(
    slot: Slot, setting: Setting, constants: dict[str, torch.Tensor], leaves: int, kept: set[Slot]
) -> str | None:
    """Why nothing can be passed for an argument; None where it can."""
    kind, source, what = slot.kind, slot.source, f"source {short(slot.source)}"
    tables: dict[str, Mapping[str, torch.Tensor]] = {
        "parameter": setting.parameters,
        "buffer": setting.buffers,
        "constant": constants,
    }
    if kind in tables:
        if len(source) != 2 or source[0] != kind or source[1] not in tables[kind]:
            return f"there is no {kind} for its {what}"
        have = tensor_type(tables[kind][source[1]])
        return None if have is slot.type else f"{kind} {source[1]} is a {have}, not a {slot.type}"
    if kind == "batch":
        fits = len(source) == 2 and source[0] == kind and type(source[1]) is int and 0 <= source[1] < leaves
        return None if fits else f"the batch has no part for its {what}"
    if kind == "random_key":
        fits = source == ("random_key",) and slot.type.rank == 1 and slot.type.size <= 4 and slot.type.element is I64
        return None if fits else f"{slot.type} with {what} is no random key"
    if slot in kept:
        return None
    if kind == "copy":
        return copy_problem(slot, setting)
    return f"{kind} with {what} and type {slot.type} is nothing that this optimizer or step keeps"


def own_slots(setting: Setting, updated: list[str]) -> set[Slot]:
    """Arguments that the step keeps itself: averages, the loss scale."""
    kept = {EMA_WEIGHT, SCALE, TRACKER, SKIPPED}
    for name in updated:
        kept.add(Slot("ema", f"{name} averaged", ("ema", name), tensor_type(setting.parameters[name])))
    return kept


def copy_problem(slot: Slot, setting: Setting) -> str | None:
    """A low-precision copy of a parameter: of its shape, in another floating-point type."""
    parameter = setting.parameters.get(slot.source[1]) if len(slot.source) >= 2 else None
    if parameter is None or slot.source[0] != "copy":
        return f"there is no parameter for its source {short(slot.source)}"
    fits = tuple(parameter.shape) == slot.type.shape and slot.type.element.kind == "float"
    return None if fits else f"{slot.type} is no copy of parameter {slot.source[1]}"


def read_result(entry: Any, slots: list[Slot]) -> Result:
    need(isinstance(entry, dict) and set(entry) - {"slot"} == {"kind"}, f"{short(entry)} is no result")
    kind, index = entry["kind"], entry.get("slot")
    need(
        isinstance(kind, str) and re.fullmatch("[a-z_]{1,40}", kind) is not None, f"{short(kind)} is no kind of result"
    )
    if index is None:
        need(kind != "state", "a result that is state does not say which")
        return Result(kind)
    need(kind == "state" and type(index) is int and 0 <= index < len(slots), f"there is no argument {short(index)}")
    need(slots[index].kind in WRITTEN, f"argument {slots[index].name} is a {slots[index].kind}, which no step changes")
    return Result(kind, slots[index])


def check_signature(
    function: Op, slots: list[Slot], results: list[Result], interface: Interface, updated: list[str], frozen: set[str]
) -> None:
    """The function's arguments and results are those that the file lists. Forward may change frozen parameters."""
    signature = function.function_type
    need([s.type for s in slots] == list(signature.inputs), "the program's arguments are not those that the file lists")
    need(
        len(results) == len(signature.results),
        f"the program has {len(signature.results)} results, the file lists {len(results)}",
    )
    for result, given in zip(results, signature.results, strict=True):
        if result.slot is not None:
            need(
                result.slot.type is given, f"the new value of {result.slot.name} is a {given}, not a {result.slot.type}"
            )
    written = [r.slot.source for r in results if r.slot is not None]
    need(len(set(written)) == len(written), "the program gives two new values for one argument")
    trained = [s[1] for s in written if s[0] == "parameter" and s[1] not in frozen]
    need(sorted(trained) == sorted(updated), "the parameters that the program changes are not those listed as updated")
    wanted = ["output"] * len(interface.output_names)
    wanted[interface.loss_index] = "loss"
    kinds = [r.kind for r in results]
    need(kinds[: len(wanted)] == wanted, "the program's first results are not the outputs that the file lists")
    need(not {"output", "loss"} & set(kinds[len(wanted) :]), "the program has more outputs than the file lists")
    args, res = describe(slots, results)
    need(
        function.attributes.get("arg_attrs") == args and function.attributes.get("res_attrs") == res,
        "the program's own description of its arguments and results is not the one that the file lists",
    )
