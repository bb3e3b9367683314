"""What an operator's rule sees: the node's inputs as `Tensor`s, its attributes, and the builder of step ops.

A `Program` is where ops go: the program of the model, or a small one in which a node with constant inputs is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..dialects.step import StepBuilder, ir_dtype, tensor_type, torch_dtype
from ..dialects.step.opaque import encode_argument, flatten_results
from ..dialects.step.sources import RANDOM_KEY
from ..ir.builtin import add_function, module
from ..ir.core import Op, Value
from ..ir.types import ScalarType, TensorType
from .dtypes import CARRIED, dtype_of, onnx_type, type_name
from .errors import DataDependentError, OnnxGraphError, OnnxLimitError, OnnxUnsupportedError
from .text import STRING_BYTES, Text, text_bytes

if TYPE_CHECKING:
    from .walk import Walk


@dataclass(frozen=True, slots=True)
class Source:
    """Where an argument of a program comes from.

    `kind` is "input" (name: its number), "state" (name: the initializer), "constant" (the tensor) or "key".
    """

    kind: str
    name: str = ""
    tensor: torch.Tensor | None = field(default=None, compare=False)


class Program:
    """A function under construction, whose arguments appear when they are first used."""

    def __init__(self) -> None:
        self.root = module()
        self.function: Op = add_function(self.root, "model", [])
        self.block = self.function.regions[0].block
        self.b = StepBuilder(self.block, phase="forward")
        self.sources: list[Source] = []
        self.streams = 0
        self._known: dict[Any, Value] = {}
        self._held: list[torch.Tensor] = []

    def argument(self, source: Source, type: TensorType, key: Any = None) -> Value:
        """The argument for a source, added where it is new."""
        key = (source.kind, source.name) if key is None else key
        found = self._known.get(key)
        if found is None:
            self.sources.append(source)
            found = self._known[key] = self.block.add_argument(type, source.name or source.kind)
        return found

    def constant(self, tensor: torch.Tensor) -> Value:
        """A known tensor as a value: one number or evenly spaced whole numbers are ops, anything else an argument."""
        found = self._known.get(id(tensor))
        if found is not None:
            return found
        type = tensor_type(tensor)
        made = self._as_op(tensor, type)
        if made is None:
            return self.argument(Source("constant", f"constant_{len(self.sources)}", tensor), type, key=id(tensor))
        self._held.append(tensor)  # its id must stay its own
        self._known[id(tensor)] = made
        return made

    def _as_op(self, tensor: torch.Tensor, type: TensorType) -> Value | None:
        if type.element.kind == "complex":
            return None
        flat = tensor.reshape(-1)
        first = flat[0].item() if flat.numel() else 0
        if type.element.bits == 64 and type.element.text.startswith("ui") and abs(int(first)) >= 1 << 63:
            return None
        wide = flat if flat.dtype not in (torch.uint16, torch.uint32, torch.uint64) else flat.to(torch.int64)
        if not flat.numel() or bool((wide == wide[0]).all()):
            if type.element.kind == "float" and first != first:
                return self.b.full(float("nan"), type.shape, type.element)
            if first == 0 and type.element.kind == "float" and bool(torch.signbit(flat).any()):
                return None  # the sign of a zero counts
            return self.b.full(first, type.shape, type.element)
        if type.element.text in ("i64", "i32") and type.rank == 1:
            stride = int(flat[1]) - int(flat[0])
            if bool((flat.to(torch.int64).diff() == stride).all()):
                return self.b.iota(start=int(flat[0]), stride=stride, type=type)
        return None

    def random(self, distribution: str, type: TensorType) -> Value:
        """Random numbers with a stream of their own."""
        self.streams += 1
        key = self.argument(Source("key"), RANDOM_KEY)
        return self.b.random(key, distribution=distribution, stream=self.streams, type=type)


class Tensor:
    """A tensor of the graph while it is imported: its type and shape, always known, and its value.

    `constant` is the tensor itself (torch, on the CPU, in the type that holds it) where it is known now, else None.
    `value` is its value in the program under construction; asking for it makes a constant part of that program.
    """

    __slots__ = ("_program", "_value", "constant", "origin", "shape", "state", "type")

    def __init__(
        self,
        program: Program,
        type: int,
        *,
        constant: torch.Tensor | None = None,
        value: Value | None = None,
        state: tuple[str, TensorType] | None = None,
        origin: frozenset[str] = frozenset(),
    ):
        #: the inputs of the graph that it depends on
        self.origin = origin
        self._program, self._value, self.type, self.constant = program, value, type, constant
        #: name and type of the initializer that this is, where it is a parameter or buffer of the model
        self.state = state
        if constant is not None:
            self.shape = tuple(constant.shape)
        else:
            self.shape = value.type.shape if value is not None else state[1].shape  # type: ignore[index]

    @property
    def value(self) -> Value:
        if self._value is None:
            if self.state is not None:
                self._value = self._program.argument(Source("state", self.state[0]), self.state[1])
            else:
                assert self.constant is not None
                self._value = self._program.constant(self.constant)
        return self._value

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        size = 1
        for d in self.shape:
            size *= d
        return size

    @property
    def dtype(self) -> torch.dtype:
        """The torch type that holds it."""
        found = dtype_of(self.type)
        assert found is not None
        return found

    @property
    def element(self) -> ScalarType:
        """The element type of its value."""
        return ir_dtype(self.dtype)

    @property
    def is_float(self) -> bool:
        return self.element.kind == "float"

    def __repr__(self) -> str:
        known = " constant" if self.constant is not None else ""
        return f"<{type_name(self.type)} {list(self.shape)}{known}>"


class Items(list["Item"]):
    """A sequence of the graph: its length is known, its parts are tensors (or sequences)."""


#: what a name of the graph can stand for; None is an optional that is not there
Item = Tensor | Text | Items | None


class Context:
    """One node while its rule runs; see `operators/__init__.py` for the contract."""

    def __init__(
        self, walk: Walk, program: Program, node: Any, schema: Any, opset: int, attributes: dict[str, Any], where: str
    ):
        self.walk, self.program, self.node, self.schema = walk, program, node, schema
        #: the builder of step ops
        self.b = program.b
        self.name: str = node.op_type
        #: version of the operator (the opset in which its present form appeared), and of the model's opset
        self.version: int = schema.since_version if schema is not None else opset
        self.opset = opset
        #: True or False by model.train() or model.eval(); None where the node itself decides
        self.training: bool | None = walk.training
        self.attributes = attributes
        #: how the node is named in messages
        self.where = where
        #: number of outputs that the node lists (some may be unnamed: `wants`)
        self.outputs = len(node.output)

    def wants(self, index: int) -> bool:
        """Whether anybody can see this output."""
        return index < len(self.node.output) and bool(self.node.output[index])

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute by name (int, float, str, list, torch.Tensor or GraphProto), or the schema's default."""
        found = self.attributes.get(name)
        return default if found is None else found

    # ---- constants ---------------------------------------------------------------------------------------------------

    def known(self, x: Tensor, what: str) -> torch.Tensor:
        """The known value of an input; an error that names it where it depends on the data."""
        if x.constant is None:
            raise DataDependentError(
                f"{self.where}: its {what} depends on the data, and a static program needs to know it\n"
                "Try: give it as an initializer or compute it from shapes alone; or from_onnx(..., frozen_inputs="
                "True), which imports anew for every value of such an input",
                x.origin,
            )
        return x.constant

    def ints(self, x: Tensor, what: str) -> list[int]:
        """The known whole numbers of an input (shape, axes, sizes), flat."""
        tensor = self.known(x, what)
        if tensor.is_floating_point() or tensor.is_complex():
            raise self.wrong(f"its {what} must be whole numbers, not {type_name(x.type)}")
        if tensor.numel() > 1 << 20:
            raise self.wrong(f"its {what} has {tensor.numel()} numbers")
        return [int(v) for v in tensor.reshape(-1).tolist()]

    def number(self, x: Tensor, what: str) -> Any:
        """The known single number of an input."""
        tensor = self.known(x, what)
        if tensor.numel() != 1:
            raise self.wrong(f"its {what} must be a single number, not of shape {list(tensor.shape)}")
        return tensor.reshape(()).item()

    def constant(self, tensor: Any, type: int | None = None) -> Tensor:
        """A tensor that is known now (torch tensor, on the CPU), as an output; `type` where torch cannot say it."""
        tensor = torch.as_tensor(tensor)
        return Tensor(self.program, onnx_type(tensor.dtype) if type is None else type, constant=tensor)

    def text(self, array: np.ndarray) -> Text:
        """Strings that are known now, as an output."""
        self.walk.afford(text_bytes(array), self.where)
        return Text(array)

    def afford_text(self, strings: int, characters: int) -> None:
        """An error where a rule is about to make more text than an import may."""
        self.walk.afford(strings * STRING_BYTES + 4 * characters, self.where, counted=False)

    def tensor(self, value: Value, type: int | None = None) -> Tensor:
        """A value as a tensor of the graph; `type` where it carries a type that torch does not have."""
        return Tensor(self.program, onnx_type(torch_dtype(value.type.element)) if type is None else type, value=value)

    # ---- what rules need -----------------------------------------------------------------------------------------

    def axis(self, axis: int, rank: int) -> int:
        """An axis counted from the front; an error where there is none such."""
        if not -rank <= axis < rank:
            raise self.wrong(f"axis {axis} is out of range for rank {rank}")
        return axis % rank

    def random(self, distribution: str, shape: Sequence[int], element: ScalarType) -> Value:
        """Random numbers: "uniform" on [0, 1), "normal" or "exponential", of a real floating-point type."""
        return self.program.random(distribution, TensorType(tuple(shape), element))

    def opaque(self, target: str, *args: Any, **kwargs: Any) -> Any:
        """A call of an ATen operator such as `aten.grid_sampler_2d.default`; values among the arguments are tensors.

        Gives a value, or a tuple of them. It has a gradient where PyTorch has one, but no kernel is made of it: a last
        resort for operators that step ops cannot say.
        """
        from ..dialects.step.opaque import resolve

        operands: list[Value] = []

        def operand(value: Any) -> int | None:
            if not isinstance(value, Value):
                return None
            if value not in operands:
                operands.append(value)
            return operands.index(value)

        def meta(value: Any) -> Any:
            if isinstance(value, Value):
                return torch.empty(value.type.shape, dtype=torch_dtype(value.type.element), device="meta")
            return [meta(v) for v in value] if isinstance(value, list | tuple) else value

        arguments = [encode_argument(a, operand) for a in args]
        keywords = {k: encode_argument(v, operand) for k, v in kwargs.items()}
        made = resolve(target)(*[meta(a) for a in args], **{k: meta(v) for k, v in kwargs.items()})
        types = [tensor_type(t) for t in flatten_results(made)]
        return self.b.opaque(operands, target=target, arguments=arguments, keywords=keywords, result_types=types)

    def is_state(self, x: Tensor | None) -> bool:
        """Whether an input is an initializer that the model keeps as a parameter or buffer."""
        return x is not None and x.state is not None

    def update(self, x: Tensor, value: Value) -> None:
        """A new value for a buffer of the model (running statistics), written after the call of the model."""
        assert x.state is not None
        name = x.state[0]
        if name in self.walk.updates or not self.walk.is_buffer(name):
            raise self.unsupported(
                f"its running statistic {name} is used elsewhere in the graph too, so that it cannot be updated: the "
                "exporter has merged tensors that were equal",
                "export the model after a step of training, when they differ, or call eval() on this one",
            )
        self.walk.updates[name] = value

    def subgraph(self, graph: Any, inputs: Sequence[Item]) -> list[Item]:
        """Imports a subgraph (an attribute of the node) with these inputs; names outside of it are visible in it."""
        results = self.walk.subgraph(graph, inputs)
        if self.name != "If" and any(isinstance(item, Text) for item in results):
            raise self.unsupported("a body that gives text is not supported")
        return results

    def apply(self, function: Callable[..., Any], *inputs: Item) -> Any:
        """Runs `function(c, *inputs)` as the rule of a node would: at import where all inputs are known."""
        return self.walk.apply(function, self, inputs)

    # ---- errors ------------------------------------------------------------------------------------------------------

    def unsupported(self, reason: str, advice: str = "") -> OnnxUnsupportedError:
        """To be raised: this use of the operator is right but not supported."""
        return OnnxUnsupportedError(f"{self.where}: {reason}" + (f"\nTry: {advice}" if advice else ""))

    def limit(self, reason: str) -> OnnxLimitError:
        """To be raised: the node asks for too much while it is imported."""
        return OnnxLimitError(f"{self.where}: {reason}")

    def wrong(self, reason: str) -> OnnxGraphError:
        """To be raised: the node breaks the rules of its operator."""
        return OnnxGraphError(f"{self.where}: {reason}")


def carried(type: int) -> bool:
    """Whether an ONNX type is held by a wider one."""
    return type in CARRIED


Rule = Callable[..., Any]
