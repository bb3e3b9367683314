"""What every move op is made of: memory spaces and who reaches them, lifetimes, layouts.

A buffer is one value in memory. All buffers have one type, since mlir-opt gives a variadic group a single one; the
tensor a buffer holds is the attribute `type` of the op that makes it.
"""

from __future__ import annotations

import re
from typing import Any

from ...ir.attributes import DialectAttribute
from ...ir.core import Op, Value
from ...ir.dialect import Attr, Dialect
from ...ir.types import DialectType, TensorType
from ..strides import runs

move = Dialect("move", "Which bytes travel, when and where: buffers in memory, launches and copies on streams.")

AnyBuffer = move.declare_type(
    "buffer", "one value in memory; the op that makes it says which tensor it holds and where"
)
AnyToken = move.declare_type("token", "that a launch or a copy has finished")
AnyArena = move.declare_type("memory", "one block of memory, allocated once, in which buffers lie at offsets")
SPACE = move.declare_attribute("space", "a memory: its kind and the number of its device", kind="str", index="int")

BUFFER, TOKEN, ARENA = DialectType("move.buffer"), DialectType("move.token"), DialectType("move.memory")

#: numbers in the call itself, shared memory, memory of a device, of the host, page-locked, of another device
SPACES = ("reg", "sram", "hbm", "host", "pinned", "peer")
#: what an external tensor is to the training step
EXTERNAL_LIFETIMES = ("param", "opt_state", "state", "grad", "batch", "constant", "output")
#: what memory of the plan is for; a workspace is scratch of one launch, an activation waits for the backward pass
ALLOC_LIFETIMES = ("grad", "activation", "transient", "output", "workspace")
#: externals whose value no step may change
READ_ONLY = ("batch", "constant")
#: lifetimes of plan memory that may be handed back
GIVEN_BACK = ("output", "grad")
#: parts of the step before the backward pass; a transient made in one of them does not outlive them
BEFORE_BACKWARD = ("forward", "loss")

_UNIT = re.compile(r"(cpu|cuda:([0-9]+))\Z")


def space(kind: str, index: int = 0) -> DialectAttribute:
    """`#move.space<"hbm", 0 : i64>`."""
    return DialectAttribute(SPACE, (kind, index))


def space_field(doc: str) -> Attr:
    return Attr("enum", doc, declared=SPACE)


def strides_field() -> Attr:
    return Attr("ints", "elements between neighbours, per dimension; absent: contiguous", optional=True)


def space_problem(value: DialectAttribute) -> str | None:
    """What is wrong with a space; None where nothing is."""
    parameters = value.parameters
    if len(parameters) != 2 or parameters[0] not in SPACES or type(parameters[1]) is not int or parameters[1] < 0:
        return f"the space must be #{SPACE}<kind, index : i64>, with a kind out of {', '.join(SPACES)}"
    return None


def space_text(value: DialectAttribute) -> str:
    """`hbm 0`."""
    return f"{value.parameters[0]} {value.parameters[1]}"


# ---- units: who runs a stream ----


def unit_problem(unit: Any) -> str | None:
    if type(unit) is str and _UNIT.match(unit):
        return None
    return f'{unit!r} is no unit; streams run on "cpu" or "cuda:<number>"'


def reaches(unit: str, where: DialectAttribute) -> bool:
    """Whether code that runs on a unit can read and write a space."""
    kind, index = where.parameters
    if kind == "reg":  # numbers that travel in the call itself
        return True
    if unit == "cpu":
        return kind in ("host", "pinned")
    return kind in ("pinned", "peer") or (kind in ("hbm", "sram") and index == int(unit[5:]))


def can_copy(unit: str, source: DialectAttribute, target: DialectAttribute) -> bool:
    """Whether a copy on a unit can join two spaces: a device moves between what it reaches and anything else."""
    if unit == "cpu":
        return reaches(unit, source) and reaches(unit, target)
    return reaches(unit, source) or reaches(unit, target)


# ---- layouts ----

Layout = tuple[tuple[int, int], ...]


def extent(type: TensorType, strides: tuple[int, ...] | None = None) -> int:
    """Bytes from the first to the last of a tensor in memory."""
    if strides is None or type.size == 0:
        return type.bytes
    last = sum([(size - 1) * stride for size, stride in zip(type.shape, strides, strict=True)])
    return (last + 1) * type.element.bytes


def layout(type: TensorType, strides: tuple[int, ...] | None = None) -> Layout:
    """Equal for two tensors of one element size whose elements are in the same places in the same order."""
    return ((type.size, 1),) if strides is None else runs(type.shape, strides)


def strides_problem(type: TensorType, strides: tuple[int, ...] | None, written: bool) -> str | None:
    """What is wrong with the strides of a buffer; a buffer that is written has each element in a place of its own."""
    if not isinstance(type, TensorType):
        return f"a buffer holds a tensor, not {type}"
    if strides is None:
        return None
    if len(strides) != type.rank or any(s < 0 for s in strides):
        return f"strides {list(strides)} do not fit {type}"
    if written:
        reached = 0
        for stride, size in sorted(zip(strides, type.shape, strict=True)):
            if size > 1 and stride <= reached:
                return f"strides {list(strides)} put several elements of {type} in one place"
            reached += (size - 1) * stride
    return None


# ---- buffers ----


def maker(value: Value) -> Op | None:
    """The move op that makes a buffer; None for a value from elsewhere."""
    op = value.op
    return op if op is not None and op.definition.dialect == "move" else None


def type_of(value: Value) -> TensorType:
    """The tensor that a buffer holds."""
    op = maker(value)
    if op is None:
        raise ValueError("a buffer is made by move.alloc, move.external, move.view or move.reuse")
    return op.attributes["type"]


def strides_of(value: Value) -> tuple[int, ...] | None:
    """The strides of a buffer; None for a contiguous one."""
    op = maker(value)
    return None if op is None else op.attributes.get("strides")
