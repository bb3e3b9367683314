"""A graph for one set of input shapes, types and a mode, as a function of the step dialect.

`Graph` is what does not change: the model as it was read and what its initializers are. `Specialised` is one function
of inputs, parameters, buffers and constants, with what eager execution needs: it runs by the reference executor, and
its gradients are functions that our own autodiff makes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from onnx import TensorProto

from ..dialects.step import StepBuilder, tensor_type
from ..ir.builtin import finish_function
from ..ir.core import Op, Value
from ..ir.types import TensorType
from .context import Item, Items, Program, Source, Tensor
from .dtypes import CARRIED, TORCH_OWN, dtype_of, type_name
from .errors import DataDependentError, OnnxError, OnnxLimitError, OnnxUnsupportedError
from .files import Model
from .state import State
from .text import Text, text_bytes
from .walk import Limits, Walk

#: how many specialisations of a graph are kept
KEPT = 16


@dataclass(frozen=True, slots=True)
class Given:
    """One tensor of the call: its type, and its value where it is frozen."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    value: bytes | None = None


class Specialised:
    """One function: which tensors it takes, what it gives. Outputs of text are known and no results of it."""

    def __init__(self, program: Program, outputs: list[Item], updates: dict[str, Value]):
        self.function: Op = program.function
        self.sources: list[Source] = []
        #: per output: number of its result, text, a list of such, or None; and the ONNX types of results
        self.structure: list[Any] = []
        self.updated = list(updates)
        values: list[Value] = []
        self.types: list[int] = []

        def flat(item: Item) -> Any:
            if isinstance(item, Items):
                return [flat(part) for part in item]
            if item is None or isinstance(item, Text):
                return item
            values.append(item.value)
            self.types.append(item.type)
            return len(values) - 1

        self.structure = [flat(item) for item in outputs]
        self.outputs = len(values)
        values += updates.values()
        finish_function(self.function, values)
        self.sources = list(program.sources)
        self.result_types: list[TensorType] = [v.type for v in values]
        self.random = any(s.kind == "key" for s in self.sources)
        #: what the operator's call names it by
        self.number = ""
        self._runs: dict[Any, Any] = {}
        self._constants: dict[torch.device, dict[int, torch.Tensor]] = {}

    def constants(self, device: torch.device) -> dict[int, torch.Tensor]:
        """The constants of the graph on a device, by the number of their argument."""
        if device not in self._constants:
            known = [(index, s.tensor) for index, s in enumerate(self.sources) if s.tensor is not None]
            self._constants[device] = {index: tensor.to(device) for index, tensor in known}
        return self._constants[device]

    def run(self, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """Runs the function by the reference executor; the results share no memory with anything."""
        from ..runtime.executor import Executable

        key = ("forward", str(device))
        if key not in self._runs:
            self._runs[key] = Executable(self.function, device)
        executable = self._runs[key]
        seen = {storage(t) for t in (*tensors, *(t for _, t in executable.fixed))}
        out = []
        for tensor in executable(tensors):
            if storage(tensor) in seen or not tensor.is_contiguous() or not tensor.numel():
                tensor = tensor.clone(memory_format=torch.contiguous_format)
            seen.add(storage(tensor))
            out.append(tensor)
        return out

    def pull_back(
        self,
        tensors: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        needed: Sequence[bool],
        device: torch.device,
    ) -> list[torch.Tensor | None]:
        """Gradients of the tensors that need one, from those of the results."""
        from ..runtime.executor import Executable

        given = tuple(g is not None for g in gradients)
        key = ("backward", str(device), given, tuple(needed))
        if key not in self._runs:
            function, kept = self.backward_function(given, needed)
            self._runs[key] = Executable(function, device) if function is not None else None, kept
        executable, kept = self._runs[key]
        if executable is None:
            return [None] * len(tensors)
        found = iter(executable([*tensors, *(g for g in gradients if g is not None)]))
        return [next(found) if k else None for k in kept]

    def backward_function(self, given: Sequence[bool], needed: Sequence[bool]) -> tuple[Op | None, list[bool]]:
        """A function of the arguments and of gradients of results that gives gradients of arguments."""
        from ..training.autodiff import gradients
        from ..training.traced_vjp import VjpCache

        function = self.function.clone()
        block = function.regions[0].block
        assert block.last is not None
        results = block.last.operands
        wrt = [a for a, n in zip(block.arguments, needed, strict=True) if n]
        block.last.erase()
        b = StepBuilder(block, phase="forward")
        total: Value | None = None
        for result, there in zip(results, given, strict=True):
            if not there or result.type.element.kind != "float":
                continue
            seed = block.add_argument(result.type)
            dims = tuple(range(result.type.rank))
            product = b.mul(result, seed)
            part = b.sum(product, dims=dims, keepdim=False) if dims else product
            if total is not None and total.type is not part.type:
                part = b.cast_to(part, total.type.element)
            total = part if total is None else b.add(total, part)
        if total is None:
            return None, [False] * len(needed)
        b.phase = "backward"
        found = iter(gradients(b, total, wrt, VjpCache()))
        per_argument = [next(found) if n else None for n in needed]
        finish_function(function, [g for g in per_argument if g is not None])
        kept = [g is not None for g in per_argument]
        return (function, kept) if any(kept) else (None, kept)


class Graph:
    """A model as it was read; shared by copies of the module, and never changed."""

    def __init__(
        self,
        model: Model,
        state: dict[str, State],
        outputs: Sequence[str] | None,
        as_written: bool,
        frozen_inputs: bool,
        limits: Limits,
    ):
        self.model, self.state, self.as_written, self.limits = model, state, as_written, limits
        self.frozen_inputs = frozen_inputs
        known = [o.name for o in model.proto.graph.output]
        for name in outputs or ():
            if name not in known:
                raise OnnxError(f"the graph has no output {name!r}; it has {', '.join(known)}")
        self.outputs = list(outputs) if outputs is not None else known
        #: inputs of the graph that the import must know the values of
        self.frozen: set[str] = set()
        self.state_types = {name: tensor_type(model.initializers[name]) for name in state}
        self.constants = {n: t for n, t in model.initializers.items() if n not in state}
        self._made: OrderedDict[Any, Specialised] = OrderedDict()

    def __deepcopy__(self, memo: Any) -> Graph:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_made": OrderedDict()}  # what was made can be made again

    def specialise(self, items: Sequence[Any], training: bool) -> Specialised:
        """The function for inputs like these: tensors, lists of them or None, in the order of the graph's inputs."""
        mode = None if self.as_written else training
        while True:
            key = (mode, tuple(self.describe(i.name, x) for i, x in zip(self.model.inputs, items, strict=True)))
            found = self._made.get(key)
            if found is not None:
                self._made.move_to_end(key)
                return found
            try:
                found = self.make(items, mode)
            except DataDependentError as error:
                more = error.inputs - self.frozen if self.frozen_inputs else frozenset()
                if not more or any(is_fake(x) for x in items):
                    raise
                self.frozen.update(more)
                continue
            self._made[key] = found
            if len(self._made) > KEPT:
                self._made.popitem(last=False)
            return found

    def describe(self, name: str, item: Any) -> Any:
        """What a specialisation depends on of one input."""
        if item is None:
            return None
        if isinstance(item, list | tuple):
            return tuple(self.describe(name, part) for part in item)
        if isinstance(item, np.ndarray):
            return item.shape, tuple(item.reshape(-1))
        value = None
        if name in self.frozen:
            flat = item.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
            value = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return Given(tuple(item.shape), item.dtype, value)

    def make(self, items: Sequence[Any], training: bool | None) -> Specialised:
        """Imports the graph for these inputs."""
        program = Program()
        sizes: dict[str, tuple[int, str]] = {}
        named: dict[str, Item] = {}
        count = 0

        def item_of(x: Any, name: str, declared: Any, sizes: dict[str, tuple[int, str]]) -> Item:
            nonlocal count
            if x is None:
                if declared.WhichOneof("value") != "optional_type":
                    raise OnnxError(f"input {name} is None, but it is not optional")
                return None
            if declared.WhichOneof("value") == "optional_type":
                return item_of(x, name, declared.optional_type.elem_type, sizes)
            if isinstance(x, list | tuple):
                if declared.WhichOneof("value") != "sequence_type":
                    raise OnnxError(f"input {name} is a list, but must be a tensor")
                # the parts of a sequence may differ in size
                return Items(item_of(part, name, declared.sequence_type.elem_type, dict(sizes)) for part in x)
            if declared.WhichOneof("value") != "tensor_type":
                raise OnnxUnsupportedError(f"input {name} is neither a tensor nor a sequence of tensors")
            kind = check_tensor(x, name, declared.tensor_type, sizes)
            if isinstance(x, np.ndarray):
                if text_bytes(x) > self.limits.folded_bytes:
                    raise OnnxLimitError(f"input {name}: its text takes more than {self.limits.folded_bytes} bytes")
                return Text(x)
            count += 1
            origin = frozenset((name,))
            if name in self.frozen:
                constant = x.detach().cpu()
                program.argument(Source("input", str(count - 1)), tensor_type(x))
                return Tensor(program, kind, constant=constant, origin=origin)
            value = program.argument(Source("input", str(count - 1)), tensor_type(x))
            return Tensor(program, kind, value=value, origin=origin)

        for declared, x in zip(self.model.inputs, items, strict=True):
            named[declared.name] = item_of(x, declared.name, declared.type, sizes)
        for name in self.state:
            kind = self.model.kinds[name]
            named[name] = Tensor(program, kind, state=(name, self.state_types[name]))
        for name, constant in self.constants.items():
            named[name] = Tensor(program, self.model.kinds[name], constant=constant)
        for name, text in self.model.texts.items():
            named[name] = Text(text)
        buffers = {name for name, found in self.state.items() if found.kind == "buffer"}
        walk = Walk(self.model, program, training, self.limits, buffers)
        outputs = walk.run(named, self.outputs)
        return Specialised(program, outputs, walk.updates)


def check_tensor(x: torch.Tensor | np.ndarray, name: str, declared: Any, sizes: dict[str, tuple[int, str]]) -> int:
    """Checks a tensor against what the graph says of an input; gives its ONNX type."""
    kind = declared.elem_type
    dtype = dtype_of(kind)
    if dtype is None and kind != TensorProto.STRING:
        raise OnnxUnsupportedError(f"input {name} holds {type_name(kind)}, which is not supported")
    if isinstance(x, np.ndarray) != (kind == TensorProto.STRING):
        raise OnnxError(f"input {name} holds {type_name(kind)}, but was given {type(x).__name__}")
    if dtype is not None and x.dtype is not dtype:
        raise OnnxError(f"input {name} must be {dtype}, not {x.dtype}\nTry: x.to({dtype})")
    if not declared.HasField("shape"):
        return kind
    dims = declared.shape.dim
    if len(dims) != len(x.shape):
        raise OnnxError(f"input {name} must have {len(dims)} dimensions, not the shape {list(x.shape)}")
    for index, (dim, size) in enumerate(zip(dims, x.shape, strict=True)):
        which = dim.WhichOneof("value")
        if which == "dim_value" and dim.dim_value != size:
            raise OnnxError(
                f"dimension {index} of input {name} must be {dim.dim_value}, not {size}\n"
                "Try: export the model with a symbolic dimension there (dynamic_axes=, or dynamic_shapes=)"
            )
        if which == "dim_param" and dim.dim_param:
            first, where = sizes.setdefault(dim.dim_param, (int(size), f"dimension {index} of {name}"))
            if first != size:
                raise OnnxError(
                    f"dimension {index} of input {name} is {size}, but {where} is {first}, and the graph calls both "
                    f"{dim.dim_param!r}"
                )
    return kind


def carried_input(x: torch.Tensor, kind: int) -> torch.Tensor:
    """An input in the type that holds it: torch's own 8-bit floats are computed with in float32."""
    return x.to(CARRIED[kind]) if kind in CARRIED and x.dtype is TORCH_OWN.get(kind) else x


def own_output(x: torch.Tensor, kind: int) -> torch.Tensor:
    """An output in torch's own type for its ONNX type, where there is one."""
    return x.to(TORCH_OWN[kind]) if kind in TORCH_OWN else x


def is_fake(x: Any) -> bool:
    """Whether a tensor has no values: it is one of a trace."""
    if isinstance(x, list | tuple):
        return any(is_fake(part) for part in x)
    return isinstance(x, torch.Tensor) and (x.is_meta or type(x) not in (torch.Tensor, torch.nn.Parameter))


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.numel() else 0
