"""`row_gradients`: the gradient of an embedding as the rows that somebody has read, and a table of their places.

The whole gradient is as large as the table and mostly zeros. Who reads it, such as the update, looks rows up instead,
so that it is never written where kernels fuse. Tables of one size that are read by parts of one tensor, and whose
gradients are parts of another, are one op: what it makes is small enough to wait for its readers.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..dialects.step import StepBuilder
from ..dialects.step.indexing import EmbeddingGrad, RowSums
from ..dialects.step.pointwise import Cast
from ..ir.core import Op, Value
from .opportunity import Change, Place, Transformation, register_transformation
from .regions import is_view

#: more tokens than that are sorted better by a library, which does not say where the rows are
MOST_TOKENS = 1 << 15
ELEMENTS = ("f32", "bf16", "f16")


@register_transformation
class RowGradients(Transformation):
    """Level 2: the gradient of one embedding, those of tables beside it, and its readers."""

    name = "row_gradients"
    level = 2

    def places(self, function: Op) -> Iterator[Place]:
        for op in function.regions[0].block:
            if op.definition is EmbeddingGrad:
                less = (1 + len(op.result.uses)) * op.result.type.bytes
                yield op, why_not(op) or Change(bytes=2 * op.dy.type.bytes - less)

    def apply(self, op: Op) -> None:
        assert op.parent is not None
        b = StepBuilder(op.parent, op, op.loc, op.phase)
        other = beside(op)
        dys, indices = [op.dy, *(other.dys if other else ())], [op.indices, *(other.indices if other else ())]
        dtype = op.result.type.element
        made = list(
            b.row_sums(
                [again(b, v, without=True) for v in dys],
                [again(b, v) for v in indices],
                rows=op.rows,
                padding_idx=op.padding_idx,
                dtype=dtype,
            )
        )
        sums, places = made[: len(dys)], made[len(dys) :]
        for user in dict.fromkeys(op.result.uses):
            assert user.parent is not None
            reader = StepBuilder(user.parent, user, op.loc, user.phase if user.attributes.get("phase") else op.phase)
            whole = reader.spread_rows(sums[0], places[0])
            user.set_operands([whole if v is op.result else v for v in user.operands])
        if other is not None:
            for old, new in zip(other.results, (*sums[1:], *places[1:]), strict=True):
                old.replace_by(new)
            other.erase()
        op.erase()


def why_not(op: Op) -> str:
    if op.dy.type.element.text not in ELEMENTS:
        return f"sums of {op.dy.type.element}"
    if op.dy.type.shape != (*op.indices.type.shape, op.result.type.shape[-1]):
        return "its rows have more than one dimension"
    if not 1 < op.indices.type.size <= MOST_TOKENS:
        return f"{op.indices.type.size:,} tokens: from 2 to {MOST_TOKENS:,} are sorted"
    if op.indices.type.size * 2 > op.rows:
        return f"{op.indices.type.size:,} tokens may name most of its {op.rows:,} rows"
    return ""


def beside(op: Op) -> Op | None:
    """The rows of tables that those of this one can be joined with; they are made later in the program."""
    later = op.next
    while later is not None:
        if later.definition is RowSums and kind(later) == kind(op):
            return later
        later = later.next
    return None


def kind(op: Op) -> tuple[object, ...]:
    """Equal where tables can be one op: sizes, and which tensors the gradient and the indices are parts of."""
    if op.definition is RowSums:
        dy, indices, dtype = op.dys[0], op.indices[0], op.dtype
    else:
        dy, indices, dtype = op.dy, op.indices, op.result.type.element
    views = [(v.op.name, v.type.shape) for v in (dy, indices) if v.op is not None and is_view(v.op)]
    roots = root(dy, casts=True), root(indices)
    return *roots, dy.type.shape, indices.type.shape, tuple(views), op.rows, op.padding_idx, dtype


def root(value: Value, casts: bool = False) -> Value:
    """What a value is a part of, before it was cast."""
    while value.op is not None and (is_view(value.op) or (casts and widens(value.op))):
        value = value.op.operands[0]
    return value


def widens(op: Op) -> bool:
    """Whether an op is a cast that loses nothing: sums are in f32 anyway."""
    return op.definition is Cast and op.operands[0].type.element.text in ("bf16", "f16") and op.dtype.text == "f32"


def again(b: StepBuilder, value: Value, without: bool = False) -> Value:
    """The same part of the same tensor, here; `without`: not cast."""
    op = value.op
    if op is None or not (is_view(op) or (without and widens(op))):
        return value
    under = again(b, op.operands[0], without)
    if not is_view(op):
        return under
    attributes = {k: v for k, v in op.attributes.items() if k in op.definition.attribute_fields and k != "phase"}
    return getattr(b, op.name.partition(".")[2])(under, **attributes)
