"""`regenerate`: no mask is stored. What backward needs of the random numbers that forward drew, it draws again.

A value made of random numbers and constants alone, by cheap ops (pointwise, shape, reduction), is computed again right
before its first use in a later phase. `step.random` is a pure function, so the copy is the same to the last bit.
"""

from __future__ import annotations

from ..dialects.step.reductions import Reduction
from ..dialects.step.shape import Concat, Shape, SliceUpdate
from ..dialects.step.sources import Random, Source
from ..ir.builtin import functions
from ..ir.core import Block, Op, Value
from ..ir.passes import register_pass

EARLY = ("forward", "loss")
LATE = ("backward", "clip", "update")
CHEAP = (Source, Shape, SliceUpdate, Concat, Reduction)


@register_pass("regenerate")
def regenerate(module: Op) -> None:
    """Computes masks and other values made of random numbers alone again in backward, so that none is kept for it."""
    for function in functions(module):
        regenerate_in(function.regions[0].block)


def regenerate_in(block: Block) -> dict[Value, Value]:
    """Gives the later phases of a straight line of ops their own copies of what the earlier ones drew; tells which."""
    drawn: set[Value] = set()
    fixed: set[Value] = set()
    copies: dict[Value, Value] = {}
    for op in block:
        if op.phase in EARLY:
            note(op, drawn, fixed)
        elif op.phase in LATE and any(v in drawn for v in op.operands):
            for value in op.operands:
                compute_again(value, op, drawn, copies)
            op.set_operands([copies.get(v, v) for v in op.operands])
    return copies


def note(op: Op, drawn: set[Value], fixed: set[Value]) -> None:
    """Adds the results of an op to what is made of random numbers, or to what is made of constants, if it is either."""
    if op.definition is Random:
        drawn.update(op.results)
    elif is_cheap(op) and all(v in drawn or v in fixed for v in op.operands):
        (drawn if any(v in drawn for v in op.operands) else fixed).update(op.results)


def is_cheap(op: Op) -> bool:
    """Whether computing the op again costs no more than reading its operands."""
    return getattr(op.definition, "pointwise", False) or issubclass(op.definition, CHEAP)


def compute_again(value: Value, user: Op, drawn: set[Value], copies: dict[Value, Value]) -> None:
    """Puts a copy of all it takes to make a drawn value before the op that uses it, where there is none yet."""
    if value not in drawn or value in copies:
        return
    maker, block = value.op, user.parent
    assert maker is not None and block is not None
    for operand in maker.operands:
        compute_again(operand, user, drawn, copies)
    copy = maker.clone(copies)
    copy.attributes["phase"] = user.phase
    block.insert_before(copy, user)
