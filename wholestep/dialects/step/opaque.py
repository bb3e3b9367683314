"""`step.opaque`: any other ATen (or registered custom) op, run as it is; its gradient is traced from autograd."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...ir.core import Op
from ...ir.dialect import AnyType, Attr, Operand, Result
from ...ir.types import ScalarType
from ...torch_private import OpOverload, schema_of
from ..strides import row_major
from .base import StepOp, ir_dtype, step, torch_dtype

# How arguments that are not tensors are written in the `arguments` attribute.
#   {"tensor": n} is operand n; {"dtype": t}, {"device": s}, {"layout": s}, {"memory_format": s} are torch's own values;
#   lists, numbers, strings, booleans and None (`unit`) stand for themselves.


def encode_argument(value: Any, operand: Callable[[Any], int | None]) -> Any:
    """A Python argument of an ATen op as an attribute. `operand(value)` gives the operand number of a tensor."""
    number = operand(value)
    if number is not None:
        return {"tensor": number}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, list | tuple):
        return [encode_argument(v, operand) for v in value]
    if isinstance(value, torch.dtype):
        return {"dtype": ir_dtype(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, torch.layout):
        return {"layout": str(value).removeprefix("torch.")}
    if isinstance(value, torch.memory_format):
        return {"memory_format": str(value).removeprefix("torch.")}
    if isinstance(value, torch.SymInt):
        return int(value)
    if isinstance(value, torch.SymFloat):
        return float(value)
    raise TypeError(f"an argument of type {type(value).__name__} cannot be part of a program")


_LAYOUTS = {"strided": torch.strided}
_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
    "preserve_format": torch.preserve_format,
}


def decode_argument(value: Any, tensors: tuple[Any, ...]) -> Any:
    """The inverse of `encode_argument`."""
    if isinstance(value, list):
        return [decode_argument(v, tensors) for v in value]
    if isinstance(value, dict):
        ((kind, inner),) = value.items()
        if kind == "tensor":
            return tensors[inner]
        if kind == "dtype":
            return torch_dtype(inner)
        if kind == "device":
            return torch.device(inner)
        if kind == "layout":
            return _LAYOUTS[inner]
        if kind == "memory_format":
            return _FORMATS[inner]
        return complex(*inner)
    return value


def resolve(target: str) -> Any:
    """The torch operator that a target such as `aten.sort.default` names; only registered operators can be named."""
    namespace, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


_TARGET = re.compile(r"(aten)\.([A-Za-z0-9_]+)\.([A-Za-z0-9_]+)\Z")
#: copies its operands; that its gradient would be the user's own code does not matter once gradients are taken
_COPIES = "wholestep.custom_function.default"
#: what arguments of an operator on tensors may be; storages, dictionaries and objects are not among them
_ARGUMENT = re.compile(
    r"(Optional\[)?(List\[)?(Optional\[)?(Tensor|int|float|bool|complex|number|str|Device|Generator)\]*\Z"
)
_RESULTS = ("Tensor", "List[Tensor]", "Optional[Tensor]", "int", "float", "bool", "number")


def target_problem(target: str) -> str | None:
    """Why an operator may not be part of a program from a file; None where it may.

    Allowed are PyTorch's own operators from tensors and numbers to tensors, which change nothing and open no file.
    """
    match = _TARGET.match(target)
    if match is None:
        return f"{target} is not an operator of PyTorch's own (namespace aten)"
    _, name, overload = match.groups()
    packet = getattr(torch.ops.aten, name, None) if not name.startswith("__") else None
    operator = getattr(packet, overload, None)
    if not isinstance(operator, OpOverload):
        return f"this PyTorch has no operator {target}"
    schema = schema_of(operator)
    if schema.is_mutable:
        return f"{target} changes its arguments"
    if not any(str(r.type) in _RESULTS[:3] for r in schema.returns):
        return f"{target} gives no tensor"
    if not all(str(r.type) in _RESULTS for r in schema.returns):
        return f"{target} gives something else than tensors and numbers"
    for argument in schema.arguments:
        if argument.name == "filename" or not _ARGUMENT.match(str(argument.type)):
            return f"{target} takes {argument.name}, which is no tensor and no number"
    return None


def opaque_problem(op: Op) -> str | None:
    """What is wrong with a `step.opaque` or `step.opaque_grad` that comes from a file; None where nothing is."""
    if not (op.name == "step.opaque" and op.target == _COPIES):
        problem = target_problem(op.target)
        if problem:
            return problem
        known = [a.name for a in schema_of(resolve(op.target)).arguments]
        if len(op.arguments) > len(known) or any(k not in known for k in op.keywords):
            return f"{op.target} takes {', '.join(known)}, not {len(op.arguments)} arguments and {list(op.keywords)}"
    operands, given, wanted = len(op.operands), (), ()
    if op.name == "step.opaque_grad":
        given, wanted = op.given, op.wanted
        operands -= len(given)
        if len(wanted) != len(op.results) or any(not 0 <= i < operands for i in wanted) or min(given, default=0) < 0:
            return "its gradients do not belong to its operands and results"
    for value in (*op.arguments, *op.keywords.values()):
        problem = argument_problem(value, operands)
        if problem:
            return problem
    if not operands:
        return source_problem(op)
    return None


def argument_problem(value: Any, operands: int) -> str | None:
    """Why an encoded argument cannot be decoded."""
    if isinstance(value, list):
        return next((p for p in (argument_problem(v, operands) for v in value) if p), None)
    if isinstance(value, tuple) or value is None or isinstance(value, bool | int | float | str):
        return None
    if isinstance(value, dict) and len(value) == 1:
        ((kind, inner),) = value.items()
        pair = isinstance(inner, list) and len(inner) == 2 and all(type(v) is float for v in inner)
        if (
            (kind == "tensor" and type(inner) is int and 0 <= inner < operands)
            or (kind == "dtype" and isinstance(inner, ScalarType))
            or (kind == "layout" and inner in _LAYOUTS)
            or (kind == "memory_format" and inner in _FORMATS)
            or (kind == "complex" and pair)
            or (kind == "device" and isinstance(inner, str) and re.match(r"[a-z]+(:[0-9]{1,3})?\Z", inner))
        ):
            return None
    return f"its argument {value} is none"


def source_problem(op: Op) -> str | None:
    """Why an opaque op without operands does not make the tensors it declares: it is asked for them without memory."""
    if not any(a.name == "device" for a in schema_of(resolve(op.target)).arguments):
        return f"{op.target} without tensors makes none"
    try:
        made = flatten_results(Opaque.call(op)(device="meta"))
    except Exception as error:
        return f"{op.target} does not take these arguments: {str(error).splitlines()[0] if str(error) else error!r}"
    found = [(tuple(t.shape), ir_dtype(t.dtype)) for t in made]
    return None if found == [(r.type.shape, r.type.element) for r in op.results] else f"{op.target} makes other tensors"


def flatten_results(out: Any) -> list[Any]:
    """The tensors among what an operator returned, in order."""
    if isinstance(out, torch.Tensor):
        return [out]
    if isinstance(out, list | tuple):
        return [t for part in out for t in flatten_results(part)]
    return []


def as_told(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A result in the shape that torch told when it was traced: some kernels leave dimensions of one out (the hidden
    state of oneDNN's LSTM, torch 2.11)."""
    if tuple(x.shape) == tuple(shape) or [n for n in x.shape if n != 1] != [n for n in shape if n != 1]:
        return x
    return x.reshape(shape)


def compact(x: torch.Tensor, exact: bool = False) -> torch.Tensor:
    """x without gaps in memory: some kernels take nothing else, and the model's `contiguous` calls are not kept.

    Dimensions of one get the usual strides too: results lie by those of operands, and some operators view theirs.
    """
    if x.layout is not torch.strided or x.stride() == row_major(x.shape):
        return x
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if not exact and x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()]):
        return x
    if x.is_contiguous():
        return x.as_strided(x.shape, row_major(x.shape))
    return x.contiguous()


@step.op
class Opaque(StepOp):
    """One call of a registered torch operator."""

    xs = Operand(AnyType, "the tensors among the arguments", variadic=True)
    ys = Result(AnyType, "the tensors among the results", variadic=True)
    target = Attr("str", "namespace.name.overload of the operator")
    arguments = Attr("list", "positional arguments, tensors by operand number")
    keywords = Attr("dict", "keyword arguments, likewise")

    @staticmethod
    def call(op: Op):
        """The operator's call as a function of tensors, from the attributes that Opaque and OpaqueGrad share."""
        function, arguments, keywords = resolve(op.target), op.arguments, op.keywords
        exact = op.target.startswith("aten.as_strided")  # it counts in memory, so only one layout will do

        def call(*tensors, **more):
            tensors = tuple(compact(t, exact) for t in tensors)
            named = {k: decode_argument(a, tensors) for k, a in keywords.items()}
            return function(*(decode_argument(a, tensors) for a in arguments), **{**named, **more})

        return call

    @staticmethod
    def evaluate(op: Op):
        call, single = Opaque.call(op), len(op.results) == 1
        takes_device = any(a.name == "device" for a in schema_of(resolve(op.target)).arguments)
        shapes = [r.type.shape for r in op.results]

        def run(*tensors, device=None):
            more = {"device": device} if takes_device and device is not None else {}
            made = flatten_results(call(*tensors, **more))
            flat = [as_told(x, shape) for x, shape in zip(made, shapes, strict=True)]
            return flat[0] if single else tuple(flat)

        return run

    @staticmethod
    def check(op):
        return None if op.target.count(".") == 2 else "target must be namespace.name.overload"


@step.op
class OpaqueGrad(StepOp):
    """Gradients of an opaque op, asked of PyTorch's autograd at run time.

    For operators whose backward decides by the data and so cannot be traced; it runs the forward once more.
    """

    xs = Operand(AnyType, "the operands of the forward op, then the gradients of its results", variadic=True)
    dxs = Result(AnyType, "gradients of the wanted operands", variadic=True)
    target = Attr("str", "namespace.name.overload of the operator")
    arguments = Attr("list", "positional arguments of the forward call")
    keywords = Attr("dict", "keyword arguments of the forward call")
    wanted = Attr("ints", "operands whose gradient is asked for")
    given = Attr("ints", "results whose gradient is given")

    @staticmethod
    def evaluate(op: Op):
        forward = Opaque.call(op)
        wanted, given, single = op.wanted, op.given, len(op.results) == 1
        count = len(op.operands) - len(given)

        def run(*tensors):
            operands = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(tensors[:count])]
            with torch.enable_grad():
                out = flatten_results(forward(*operands))
            inputs = [operands[i] for i in wanted]
            got = torch.autograd.grad([out[i] for i in given], inputs, tensors[count:], allow_unused=True)
            grads = tuple(torch.zeros_like(x) if g is None else g for x, g in zip(inputs, got, strict=True))
            return grads[0] if single else grads

        return run


def is_dtype_argument(value: Any) -> bool:
    """Whether an encoded argument is a dtype."""
    return isinstance(value, dict) and isinstance(value.get("dtype"), ScalarType)
