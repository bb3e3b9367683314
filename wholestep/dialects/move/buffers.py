"""Memory: arenas, buffers in them, tensors of the user, other ways to see a buffer, and new values in old memory.

Bytes are never stored: they follow from the tensor and its strides. A buffer holds one value; memory that takes a
second one is `move.reuse`, so that reading a value which is gone can be seen.
"""

from __future__ import annotations

from ...ir.core import Op
from ...ir.dialect import Attr, OpDef, Operand, Result
from ...ir.types import Type
from .base import (
    ALLOC_LIFETIMES,
    ARENA,
    BUFFER,
    EXTERNAL_LIFETIMES,
    AnyArena,
    AnyBuffer,
    extent,
    maker,
    move,
    space_field,
    space_problem,
    strides_field,
    strides_of,
    strides_problem,
    type_of,
)


class BufferOp(OpDef):
    """Base of the ops that make a buffer."""

    pure = False

    @staticmethod
    def infer(*operands: Type, **attributes: object) -> Type:
        return BUFFER


@move.op
class Arena(OpDef):
    """One block of memory, allocated once and for all steps. Its size is 0 until buffers are placed in it."""

    pure = False
    space = space_field("where it is")
    size = Attr("int", "bytes", default=0)
    alignment = Attr("int", "every offset is a multiple of it", default=64)
    arena = Result(AnyArena)

    @staticmethod
    def infer(**attributes: object) -> Type:
        return ARENA

    @staticmethod
    def check(op: Op) -> str | None:
        if op.size < 0:
            return f"its size is {op.size} bytes"
        if op.alignment < 1 or op.alignment & (op.alignment - 1):
            return f"its alignment is {op.alignment}, which is not a power of two"
        return space_problem(op.attributes["space"])


@move.op
class Alloc(BufferOp):
    """Memory of the plan for one value. `offset` is its place in the arena, -1 until it has one."""

    arena = Operand(AnyArena, "the arena it lies in", optional=True)
    type = Attr("type", "the tensor it holds")
    space = space_field("where it is")
    lifetime = Attr("str", "what it is for", choices=ALLOC_LIFETIMES)
    offset = Attr("int", "bytes from the start of the arena", default=-1)
    strides = strides_field()
    buffer = Result(AnyBuffer)

    @staticmethod
    def check(op: Op) -> str | None:
        if op.offset < -1:
            return f"its offset is {op.offset}"
        arena = op.operands[0].op if op.operands else None
        if op.operands and (arena is None or arena.definition is not Arena):
            return "its arena is made by something other than move.arena"
        if arena is not None and arena.attributes["space"] != op.attributes["space"]:
            return "its arena is in another space"
        return space_problem(op.attributes["space"]) or strides_problem(op.type, op.strides, written=True)


@move.op
class External(BufferOp):
    """A tensor of the user's: argument number `index` of the program. It holds a value, unless it is an output."""

    type = Attr("type", "the tensor it holds")
    space = space_field("where it is")
    lifetime = Attr("str", "what it is to the step", choices=EXTERNAL_LIFETIMES)
    slot = Attr("str", "its name, such as the path of a parameter in the model")
    index = Attr("int", "number of the argument")
    strides = strides_field()
    buffer = Result(AnyBuffer)

    @staticmethod
    def check(op: Op) -> str | None:
        if op.index < 0:
            return f"its argument number is {op.index}"
        return space_problem(op.attributes["space"]) or strides_problem(op.type, op.strides, written=False)


@move.op
class View(BufferOp):
    """The same value in the same memory, seen as another tensor: a slice, a transpose, a broadcast (stride 0)."""

    base = Operand(AnyBuffer, "what it looks at")
    type = Attr("type", "the tensor it shows")
    strides = strides_field()
    offset = Attr("int", "bytes from the first byte of the base", default=0)
    buffer = Result(AnyBuffer)

    @staticmethod
    def check(op: Op) -> str | None:
        problem = strides_problem(op.type, op.strides, written=False)
        if problem or maker(op.base) is None:
            return problem or "its base is not made by a move op"
        whole, needed = extent(type_of(op.base), strides_of(op.base)), op.offset + extent(op.type, op.strides)
        if op.offset < 0 or needed > whole:
            return f"it covers bytes {op.offset} to {needed} of a buffer of {whole} bytes"
        return None


@move.op
class Reuse(BufferOp):
    """The memory of a buffer, from its first byte on, for a new value. When that is written, the old value is gone.

    Results in place and updates of parameters and optimizer state are written through it.
    """

    old = Operand(AnyBuffer, "whose memory it takes")
    type = Attr("type", "the tensor it holds")
    lifetime = Attr("str", "what it is for", choices=tuple(dict.fromkeys((*EXTERNAL_LIFETIMES, *ALLOC_LIFETIMES))))
    strides = strides_field()
    buffer = Result(AnyBuffer)

    @staticmethod
    def check(op: Op) -> str | None:
        problem = strides_problem(op.type, op.strides, written=True)
        if problem or maker(op.old) is None:
            return problem or "its old buffer is not made by a move op"
        whole, needed = extent(type_of(op.old), strides_of(op.old)), extent(op.type, op.strides)
        return f"it needs {needed} bytes and the old buffer has {whole}" if needed > whole else None
