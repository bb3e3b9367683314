"""Functionalisation: tensors as the user's code sees them, with views and in-place writes, on top of pure values.

A Box is a storage and holds its current value; a Ref is a tensor: the box seen through a chain of view ops. Reading a
Ref replays its views when the box has changed; writing runs them backwards (a slice becomes a slice_update).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..dialects.step import StepBuilder
from ..ir.core import Op, Value

VIEW_OPS = {"step.reshape", "step.transpose", "step.slice", "step.detach", "step.broadcast"}
#: views that only ATen makes, with the operator that writes through them (as_strided has one with a wrong gradient)
SCATTERS = {"aten.diagonal.default": "aten.diagonal_scatter.default"}
HIDDEN_CHANGE = (
    "a tensor with a gradient is changed in place where gradients are switched off (no_grad or detach), "
    "so its values and its gradient would no longer belong together; change a copy: x = x.detach().clone()"
)


@dataclass(slots=True)
class Box:
    """One storage: what it holds now, and how often it was written."""

    value: Value
    version: int = 0
    name: str = ""


@dataclass(slots=True)
class Ref:
    """One tensor: a box and the view ops that lead from the box's value to this tensor."""

    box: Box
    views: tuple[Op, ...]
    value: Value
    version: int = 0
    opaque_view: str = ""
    strides: tuple[int, ...] | None = field(default=None)

    def read(self, b: StepBuilder) -> Value:
        """The tensor's current value."""
        if self.version == self.box.version:
            return self.value
        if self.opaque_view:
            raise ValueError(f"a tensor that {self.opaque_view} made a view of was changed in place afterwards")
        value = self.box.value
        for op in self.views:
            value = replay(b, op, value)
        self.value, self.version = value, self.box.version
        return value

    def write(self, b: StepBuilder, new: Value) -> None:
        """The tensor now holds `new`; every other tensor of the same storage sees it."""
        if self.opaque_view:
            raise ValueError(f"in-place change through a view that {self.opaque_view} made")
        chain = [self.box.value]
        for op in self.views:
            chain.append(replay(b, op, chain[-1]))
        for op, base in zip(reversed(self.views), reversed(chain[:-1]), strict=True):
            if op.name == "step.detach" and has_history(base):
                raise ValueError(HIDDEN_CHANGE)
            new = undo(b, op, base, new)
        self.box.value = new
        self.box.version += 1


def fresh(value: Value, name: str = "") -> Ref:
    """A tensor with a storage of its own."""
    return Ref(Box(value, 0, name), (), value)


def view(base: Ref, source: Value, result: Value) -> Ref | None:
    """A Ref for `result`, computed from `source` (the value of `base`) by view ops alone; None if others were used."""
    chain: list[Op] = []
    value = result
    while value is not source:
        op = value.op
        if op is None or (op.name not in VIEW_OPS and op.attributes.get("target") not in SCATTERS):
            return None
        chain.append(op)
        value = op.operands[0]
    return Ref(base.box, base.views + tuple(reversed(chain)), result, base.box.version)


def has_history(value: Value) -> bool:
    """Whether a gradient could flow through a value: some op that is differentiable computed it from an argument."""
    seen: set[Value] = set()
    work = [value]
    while work:
        op = work.pop().op
        if op is None or not op.definition.differentiable:  # type: ignore[attr-defined]
            continue
        for operand in op.operands:
            if operand.op is None and operand.type.element.kind in ("float", "complex"):
                return True
            if operand not in seen:
                seen.add(operand)
                work.append(operand)
    return False


def replay(b: StepBuilder, op: Op, x: Value) -> Value:
    """The same view op on another value."""
    if op.name == "step.opaque":
        types = [r.type for r in op.results]
        return b.opaque([x], target=op.target, arguments=op.arguments, keywords=op.keywords, result_types=types)
    attributes = {k: op.attributes[k] for k in op.definition.attribute_fields if k in op.attributes}
    return op.definition.build(b, x, **attributes).result


def undo(b: StepBuilder, op: Op, base: Value, new: Value) -> Value:
    """What `base` becomes when the result of the view op `op` on it is overwritten by `new`."""
    if op.name == "step.detach":
        return new
    if op.name == "step.reshape":
        return b.reshape_to(new, base.type.shape)
    if op.name == "step.transpose":
        back = sorted(range(len(op.order)), key=op.order.__getitem__)
        return b.transpose(new, order=tuple(back))
    if op.name == "step.slice":
        if base.type.shape == new.type.shape:
            return new
        return b.slice_update(base, new, dim=op.dim, start=op.start, end=op.end, stride=op.stride)
    if op.name == "step.opaque":
        arguments = [op.arguments[0], {"tensor": 1}, *op.arguments[1:]]
        return b.opaque(
            [base, new], target=SCATTERS[op.target], arguments=arguments, keywords=op.keywords, result_types=[base.type]
        )
    raise ValueError("in-place change of an expanded tensor: several elements share one place")
