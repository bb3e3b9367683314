"""Which ops of an executed function move bytes, which values share memory, and what reading each of them costs.

Views, casts that a kernel beside them does, numbers on the host and tensors fixed at compile time move nothing of their
own. One walk over the block decides it for every value.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from ..dialects.step.attention import AttentionLike
from ..dialects.step.contraction import Contract
from ..dialects.step.pointwise import Detach, Select
from ..dialects.step.shape import Broadcast, Reshape, Slice, Transpose
from ..dialects.step.sources import Source
from ..dialects.strides import Strides, row_major, view_of
from ..ir.core import Op, Value
from ..ir.types import ScalarType
from . import layout


@dataclass(slots=True)
class Executed:
    """A function as a provider runs it.

    `narrow` are casts that are not run because their readers take the tensor before them; `written` are ops whose
    kernel writes another element type, so that the cast after them is not run. `bodies` has the function of each
    `step.micro_batches`. `in_place`: new state is written where the old one lives; if not, it is copied there.
    """

    function: Op
    narrow: Set[Op] = frozenset()
    written: Mapping[Op, ScalarType] = field(default_factory=dict)
    bodies: Mapping[Op, Executed] = field(default_factory=dict)
    in_place: bool = False


def argument_kinds(function: Op) -> list[str]:
    """What each argument is: parameter, batch, optimizer_state, ...; empty where nothing is said."""
    block = function.regions[0].block
    listed = function.attributes.get("arg_attrs") or [{} for _ in block.arguments]
    return [attributes.get("step.kind", "") for attributes in listed]


class Storage:
    """The memory behind the values of one executed function."""

    def __init__(self, executed: Executed):
        self.executed = executed
        block = executed.function.regions[0].block
        kinds = argument_kinds(executed.function)
        #: the value that owns the memory a value is seen in
        self.root: dict[Value, Value] = {}
        #: bytes that reading all of a value costs
        self.bytes: dict[Value, int] = {}
        #: numbers that are Python numbers while the step runs: learning rates, counters and what follows from them
        self.host: set[Value] = set()
        #: tensors made once, when the program is built
        self.fixed: set[Value] = set()
        #: ops that move bytes, in order
        self.kernels: list[Op] = []
        #: operands that a product copies into another layout first, and products that add their addend in a pass more
        self.copied: dict[Op, list[Value]] = {}
        self.extra: set[Op] = set()
        self._strides: dict[Value, Strides] = {}
        counters_on_device = "scaler" in kinds
        for value, kind in zip(block.arguments, kinds, strict=True):
            self._own(value, value.type.element)
            counter = kind == "optimizer_state" and not value.type.rank and not counters_on_device
            if kind in ("hyper", "fresh") or counter:
                self.host.add(value)
        for op in block:
            if op is not block.last and any(r.uses for r in op.results):
                self._take(op)

    def _own(self, value: Value, element: ScalarType, strides: Strides | None = None) -> None:
        self.root[value] = value
        self.bytes[value] = value.type.size * element.bytes
        self._strides[value] = row_major(value.type.shape) if strides is None else strides

    def _see(self, value: Value, source: Value, strides: Strides | None = None) -> None:
        """`value` is the memory of `source`, or a part of it."""
        root = self.root[source]
        self.root[value] = root
        element = self.bytes[root] // max(root.type.size, 1)
        self.bytes[value] = min(self.bytes[source], value.type.size * element)
        self._strides[value] = self._strides[source] if strides is None else strides
        if source in self.fixed:
            self.fixed.add(value)

    def _take(self, op: Op) -> None:
        executed = self.executed
        if issubclass(op.definition, Source):
            self._own(op.result, op.result.type.element)
            self.fixed.add(op.result)
        elif self._on_host(op):
            for result in op.results:
                self._own(result, result.type.element)
                self.host.add(result)
        elif op.definition is Detach or self._absorbed(op):
            self._see(op.result, op.operands[0])
        elif op.definition is Select and op.operands[0] in self.host and not self._broadcasts(op):
            self._see(op.result, op.operands[2])  # the host hands one of two tensors on
        elif not self._is_view(op):
            self.kernels.append(op)
            element = executed.written.get(op)
            strides = self._result_strides(op)
            for result in op.results:
                self._own(result, element or result.type.element, strides if result.index == 0 else None)
            if issubclass(op.definition, AttentionLike):
                for result in op.results:
                    self._strides[result] = heads_inside(result)

    def _absorbed(self, op: Op) -> bool:
        """Whether a cast is done by a kernel beside it."""
        executed = self.executed
        return op in executed.narrow or (op.name == "step.cast" and op.operands[0].op in executed.written)

    def _is_view(self, op: Op) -> bool:
        definition = op.definition
        if definition not in (Reshape, Transpose, Broadcast, Slice):
            return False
        source, result = op.operands[0], op.result
        shape, strides = source.type.shape, self._strides[source]
        seen = view_of(op, shape, strides)
        if seen is None:
            return False
        self._see(result, source, seen[0])
        return True

    def _result_strides(self, op: Op) -> Strides | None:
        """How the first result lies in memory; None for row-major."""
        if op.definition is Contract:
            strides, left, right, extra = layout.contraction(op, self._strides[op.lhs], self._strides[op.rhs])
            copied = [v for v, is_copied in ((op.lhs, left), (op.rhs, right)) if is_copied]
            if copied:
                self.copied[op] = copied
            if extra:
                self.extra.add(op)
            return strides
        if getattr(op.definition, "pointwise", False):
            shape = op.results[0].type.shape
            for value in op.operands:
                if value.type.shape == shape and 0 not in self._strides[value]:
                    return layout.dense_like(shape, self._strides[value])
        return None

    def _on_host(self, op: Op) -> bool:
        """Whether an op computes single numbers from numbers on the host."""
        if any(v.type.rank for v in (*op.operands, *op.results)):
            return False
        known = [v for v in op.operands if v not in self.fixed]
        return bool(known) and all(v in self.host for v in known)

    def _broadcasts(self, op: Op) -> bool:
        return any(v.type is not op.result.type or v in self.host for v in op.operands[1:])

    def is_free(self, value: Value) -> bool:
        """Whether reading a value costs nothing: a number that the kernel is given by the host."""
        return value in self.host or (value in self.fixed and not value.type.rank)


def heads_inside(value: Value) -> Strides:
    """Attention stores [batch, head, length, width] as [batch, length, head, width]."""
    shape = value.type.shape
    if len(shape) != 4:
        return row_major(shape)
    batch, length, head, width = row_major((shape[0], shape[2], shape[1], shape[3]))
    return batch, head, length, width
