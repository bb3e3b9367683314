"""`wide_loss`: a loss reads the rows of a filled product whole, so that one kernel makes it and its gradient.

`pad` cuts the zeros off behind a product and fills the gradient up again before the next: rows of two lengths, which
are two kernels and two reads of the logits. Here classes that nobody has get the lowest number, so that their
probability is 0, and their gradient too: cut and fill go.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..dialects.step import StepBuilder, torch_dtype
from ..dialects.step.contraction import Contract
from ..dialects.step.losses import CrossEntropy, CrossEntropyGrad
from ..dialects.step.pointwise import Cast
from ..dialects.step.shape import Pad, Reshape, Slice
from ..ir.core import Op, Value
from ..ir.types import I32, TensorType
from .opportunity import Change, Place, Transformation, register_transformation

#: what may lie between a product and its loss
BETWEEN = (Cast, Reshape)


@register_transformation
class WideLoss(Transformation):
    """Level 2: one loss, its gradient, and the product before them."""

    name = "wide_loss"
    level = 2

    def places(self, function: Op) -> Iterator[Place]:
        for op in function.regions[0].block:
            if op.definition is CrossEntropy and cut_of(op.x) is not None:
                yield op, why_not(op) or Change(bytes=-op.x.type.bytes)

    def apply(self, op: Op) -> None:
        cut, gradient = cut_of(op.x), gradient_of(op)
        assert cut is not None and gradient is not None and op.parent is not None
        b = StepBuilder(op.parent, op, op.loc, op.phase)
        (product,), count = cut.operands, op.x.type.shape[1]
        missing = product.type.shape[-1] - count
        numbers = b.iota(start=0, stride=1, type=TensorType((count + missing,), I32))
        lowest = torch.finfo(torch_dtype(op.x.type.element)).min
        x = b.select(b.lt(numbers, count), replayed(b, product, path(op.x, cut)), lowest)
        for old, new in zip(op.results, b.cross_entropy(x, op.target, **options(op)), strict=True):
            old.replace_by(new)
        at = StepBuilder(op.parent, gradient, gradient.loc, gradient.phase)
        dx = at.cross_entropy_grad(gradient.dy, x, gradient.target, gradient.logsumexp, **options(gradient))
        for fill, way in fills(gradient.result, missing):
            here = StepBuilder(op.parent, fill, fill.loc, fill.phase)
            # reshapes first: the kernel then writes a tensor like the logits, and may write over them
            way.sort(key=lambda op: op.definition is Cast)
            fill.result.replace_by(replayed(here, dx, way))
            fill.erase()
        gradient.result.replace_by(at.slice(dx, dim=1, start=0, end=count))
        gradient.erase()
        op.erase()


def options(op: Op) -> dict[str, object]:
    return {name: op.attributes[name] for name in ("ignore_index", "reduction", "label_smoothing")}


def why_not(op: Op) -> str:
    if op.x.type.rank != 2:
        return "the classes are not the last dimension"
    if op.weight is not None or op.label_smoothing:
        return "it looks at all classes: some have weights, or a share of the target"
    gradient = gradient_of(op)
    if gradient is None or not alike(gradient.x, op.x) or gradient.parent is not op.parent:
        return "its gradient is not in this program, or reads something else"
    return ""


def alike(x: Value, y: Value) -> bool:
    """Whether two values are the same one, or the same casts, reshapes and cuts of it, done again for backward."""
    if x is y or x.op is None or y.op is None:
        return x is y
    same = x.op.definition is y.op.definition and x.op.definition in (*BETWEEN, Slice)
    return same and x.type == y.type and options_of(x.op) == options_of(y.op) and alike(*x.op.operands, *y.op.operands)


def options_of(op: Op) -> tuple[object, ...]:
    return (op.start, op.stride, op.dim) if op.definition is Slice else ()


def cut_of(x: Value) -> Op | None:
    """The slice that cuts off what a product was filled up with, before the casts and reshapes that make x."""
    op = x.op
    while op is not None and op.definition in BETWEEN and op.operands[0].type.shape[-1:] == x.type.shape[-1:]:
        op = op.operands[0].op
    if op is None or op.definition is not Slice or op.start != 0 or op.stride != 1 or op.dim != op.result.type.rank - 1:
        return None
    made = op.operands[0].op
    return op if made is not None and made.definition is Contract else None


def gradient_of(op: Op) -> Op | None:
    """The one gradient of a loss."""
    found = [user for user in op.logsumexp.uses if user.definition is CrossEntropyGrad]
    return found[0] if len(found) == 1 else None


def path(x: Value, start: Op) -> list[Op]:
    """The ops from a value that an op makes to x."""
    found: list[Op] = []
    while x.op is not None and x.op is not start:
        found.insert(0, x.op)
        x = x.op.operands[0]
    return found


def replayed(b: StepBuilder, value: Value, ops: list[Op]) -> Value:
    """Casts and reshapes of another value, whose rows may be longer."""
    for op in ops:
        if op.definition is Cast:
            value = b.cast(value, dtype=op.dtype, rounds=op.rounds)
        else:
            value = b.reshape(value, shape=(*op.result.type.shape[:-1], value.type.shape[-1]))
    return value


def fills(value: Value, missing: int, way: tuple[Op, ...] = ()) -> list[tuple[Op, list[Op]]]:
    """What fills a gradient up with zeros, and the casts and reshapes before that."""
    found: list[tuple[Op, list[Op]]] = []
    for user in list(value.uses):
        if user.definition is Pad and user.value == 0 and user.high == (*[0] * (value.type.rank - 1), missing):
            found += [(user, list(way))] if not any(user.low) else []
        elif user.definition in BETWEEN and user.result.type.shape[-1] == value.type.shape[-1]:
            found += fills(user.result, missing, (*way, user))
    return found
