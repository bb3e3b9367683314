"""`place-casts`: casts go where they move the fewest bytes; no number changes.

Casts to a wider type and back vanish, a cast stands before what repeats elements and after what picks some, repeated
casts become one, and what backward reads only in 16 bits is cast in forward, so that it is kept in 16 bits. A cast that
the program itself has (`rounds`) stays one that rounds wherever it goes.
"""

from __future__ import annotations

from ..dialects.loop import compute_type
from ..dialects.step import step
from ..dialects.step.pointwise import Cast
from ..ir.builtin import functions
from ..ir.core import Block, Op, Value
from ..ir.passes import register_pass
from ..ir.passes.cse import cse
from ..ir.passes.dce import dce
from ..ir.rewrite import PatternRewriter, RewritePattern, apply_patterns
from ..ir.types import ScalarType

_BITS = {"bf16": (8, 8), "f16": (5, 11), "f32": (8, 24), "f64": (11, 53)}  # exponent and significand
_LATER = ("backward", "clip", "update")


def keeps_every_value(source: ScalarType, target: ScalarType) -> bool:
    """Whether a cast from one element type to another is exact for every number."""
    if source is target or source.kind == "bool":
        return True
    have, want = _BITS.get(source.text), _BITS.get(target.text)
    return have is not None and want is not None and have[0] <= want[0] and have[1] <= want[1]


def is_cast(value: Value) -> bool:
    return value.op is not None and value.op.name == "step.cast"


def only_use(value: Value, user: Op) -> bool:
    return list(value.uses) == [user]


def narrows(cast: Op) -> bool:
    return cast.dtype.bits < cast.operands[0].type.element.bits


def moves_one(op: Op | None) -> bool:
    """Whether an op gives the elements of its first operand at other places, beside padding that is exact anywhere."""
    if op is None or not getattr(op.definition, "moves", False) or op.name in ("step.concat", "step.slice_update"):
        return False
    return op.attributes.get("value", 0) in (0, float("inf"), -float("inf"))


def rebuilt(op: Op, operands: dict[Value, Value], element: ScalarType, rewriter: PatternRewriter) -> Value:
    """The same op on other operands, with results of this element type."""
    new = op.clone(dict(operands))
    new.results[0].type = op.results[0].type.with_element(element)
    return rewriter.insert(new).results[0]


def recast(rewriter: PatternRewriter, value: Value, like: Op) -> Value:
    """`value` cast as another is, without a cast where one can be undone."""
    element: ScalarType = like.dtype
    if is_cast(value):
        assert value.op is not None
        source = value.op.operands[0]
        if source.type.element is element and keeps_every_value(element, value.type.element):
            return source
    return value if value.type.element is element else cast_like(rewriter, value, like)


def cast_like(rewriter: PatternRewriter, value: Value, like: Op) -> Value:
    """`value` cast as another is: to the same type, and rounded inside of a kernel where that is."""
    return Cast.build(rewriter, value, dtype=like.dtype, rounds=like.rounds).result


class FoldCasts(RewritePattern):
    """A cast of a cast that lost nothing is one cast, or none. Casts that lose nothing, or are to a type that kernels
    compute in, need no word that they round."""

    roots = (Cast,)

    def match_and_rewrite(self, op: Op, rewriter: PatternRewriter) -> None:
        x = op.operands[0]
        if op.rounds and (compute_type(op.dtype) is op.dtype or keeps_every_value(x.type.element, op.dtype)):
            rewriter.replace_op(op, Cast.build(rewriter, x, dtype=op.dtype).result)
        elif x.type.element is op.dtype:
            rewriter.replace_op(op, x)
        elif is_cast(x):
            assert x.op is not None
            source = x.op.operands[0]
            if keeps_every_value(source.type.element, x.type.element):
                rewriter.replace_op(op, recast(rewriter, source, op))


class CastBefore(RewritePattern):
    """cast(move(x)) becomes move(cast(x)): before what repeats elements, and a narrowing cast next to its producer."""

    roots = (Cast,)

    def match_and_rewrite(self, op: Op, rewriter: PatternRewriter) -> None:
        moved = op.operands[0].op
        if moved is None or not moves_one(moved):
            return
        x = moved.operands[0]
        grows = moved.results[0].type.size > x.type.size
        even = moved.results[0].type.size == x.type.size
        view = moved.name in ("step.broadcast", "step.reshape", "step.transpose")
        alone = only_use(moved.results[0], op)
        if ((grows or recast_is_free(x, op.dtype)) and (alone or view)) or (even and alone and narrows(op)):
            rewriter.insert_before(moved)
            low = recast(rewriter, x, op)
            rewriter.insert_before(op)
            rewriter.replace_op(op, rebuilt(moved, {x: low}, op.dtype, rewriter))
            if not moved.results[0].uses:
                rewriter.erase_op(moved)


def recast_is_free(value: Value, element: ScalarType) -> bool:
    """Whether `recast` would find the value in this element type."""
    if not is_cast(value):
        return False
    assert value.op is not None
    return value.op.operands[0].type.element is element and keeps_every_value(element, value.type.element)


class CastAfter(RewritePattern):
    """move(cast(x)) becomes cast(move(x)): after what picks some elements, and a widening cast next to its reader."""

    roots = tuple(d for d in step.ops.values() if getattr(d, "moves", False))

    def match_and_rewrite(self, op: Op, rewriter: PatternRewriter) -> None:
        if op.name == "step.concat":
            self.concat(op, rewriter)
            return
        if not moves_one(op) or not is_cast(op.operands[0]):
            return
        cast = op.operands[0].op
        assert cast is not None
        x = cast.operands[0]
        size, out = x.type.size, op.results[0].type.size
        if not only_use(cast.result, op) or out > size or (out == size and (narrows(cast) or not widens(cast))):
            return
        moved = rebuilt(op, {cast.result: x}, x.type.element, rewriter)
        rewriter.replace_op(op, cast_like(rewriter, moved, cast))
        rewriter.erase_op(cast)

    def concat(self, op: Op, rewriter: PatternRewriter) -> None:
        """Tensors that are all widened alike are joined before they are widened."""
        casts = [v.op for v in op.operands if is_cast(v)]
        if len(casts) < len(op.operands) or len({c.operands[0].type.element for c in casts}) > 1:  # type: ignore[union-attr]
            return
        if not all(widens(c) and only_use(c.result, op) for c in casts if c is not None):
            return
        sources = {c.result: c.operands[0] for c in casts if c is not None}
        (element,) = {x.type.element for x in sources.values()}
        joined = rebuilt(op, sources, element, rewriter)
        rewriter.replace_op(op, Cast.build(rewriter, joined, dtype=op.results[0].type.element).result)


def widens(cast: Op) -> bool:
    """Whether a cast goes to a wider float type."""
    source, target = cast.operands[0].type.element, cast.dtype
    return source.kind == target.kind == "float" and source.bits < target.bits


def keep_low(block: Block) -> None:
    """Casts in forward what later phases read only through one narrowing cast."""
    for op in block:
        if op.name != "step.cast" or op.phase not in _LATER or not narrows(op):
            continue
        value = op.operands[0]
        maker = value.op
        if maker is None or maker.phase in _LATER or maker.parent is not block:
            continue
        readers = [user for user in value.uses if user.phase in _LATER or user.definition.terminator]
        if readers == [op]:
            block.insert_before(op.detach(), maker.next)
            op.attributes["phase"] = maker.phase


def round_alike(block: Block) -> None:
    """Of a value that the program casts, all casts to that type round, so that they are one."""
    for op in block:
        if op.name == "step.cast" and op.rounds:
            for other in op.operands[0].uses:
                if other.name == "step.cast" and other.dtype is op.dtype:
                    other.attributes["rounds"] = True


@register_pass("place-casts")
def place_casts(module: Op) -> None:
    """Moves casts to where they move the fewest bytes, without changing a number."""
    apply_patterns(module, [FoldCasts(), CastBefore(), CastAfter()])
    for function in functions(module):
        round_alike(function.regions[0].block)
    cse(module)
    for function in functions(module):
        keep_low(function.regions[0].block)
    cse(module)
    dce(module)
