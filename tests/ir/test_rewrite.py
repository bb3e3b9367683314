"""The pattern rewriter: what patterns can do, in which order, and that loops are caught."""

from __future__ import annotations

import pytest

from tests.ir.toy import Add, Neg, Once, Print, Sub, T, function
from wholestep import ir
from wholestep.errors import IRError


class DoubleNegation(ir.RewritePattern):
    """-(-x) is x."""

    roots = (Neg,)

    def match_and_rewrite(self, op: ir.Op, rewriter: ir.PatternRewriter) -> None:
        inner = op.x.op
        if inner is not None and inner.definition is Neg:
            rewriter.replace_op(op, inner.x)


class EraseDead(ir.RewritePattern):
    def match_and_rewrite(self, op: ir.Op, rewriter: ir.PatternRewriter) -> None:
        if op.definition.pure and not any(r.uses for r in op.results):
            rewriter.erase_op(op)


class SubToAdd(ir.RewritePattern):
    """x - y becomes x + (-y)."""

    roots = (Sub,)

    def match_and_rewrite(self, op: ir.Op, rewriter: ir.PatternRewriter) -> None:
        rewriter.replace_op(op, Add.build(rewriter, op.x, Neg.build(rewriter, op.y).result))


class AddToSub(ir.RewritePattern):
    roots = (Add,)

    def match_and_rewrite(self, op: ir.Op, rewriter: ir.PatternRewriter) -> None:
        rewriter.replace_op(op, Sub.build(rewriter, op.x, Neg.build(rewriter, op.y).result))


def names(main: ir.Op) -> list[str]:
    return [op.name for op in main.regions[0].block]


def chain(length: int) -> tuple[ir.Op, ir.Op]:
    root, main, builder = function(T)
    (x,) = main.regions[0].block.arguments
    for _ in range(length):
        x = Neg.build(builder, x).result
    ir.finish_function(main, [x])
    return root, main


def test_rewrites_until_nothing_fits() -> None:
    root, main = chain(7)
    ir.apply_patterns(root, [DoubleNegation(), EraseDead()])
    assert names(main) == ["toy.neg", "func.return"]
    assert main.regions[0].block.first.operands == tuple(main.regions[0].block.arguments)  # type: ignore[union-attr]
    ir.verify(root)
    assert ir.apply_patterns(root, [DoubleNegation(), EraseDead()]) == 0


def test_new_ops_take_place_location_and_phase_of_the_old() -> None:
    root, main, builder = function()
    a, b = main.regions[0].block.arguments
    builder.loc, builder.phase = ir.Location("layer"), "forward"
    op = Sub.build(builder, a, b)
    op.result.name = "difference"
    Print.build(builder, op.result, result_types=[])
    ir.finish_function(main, [op.result])
    assert ir.apply_patterns(root, [SubToAdd()]) == 1
    assert names(main) == ["toy.neg", "toy.add", "toy.print", "func.return"]
    made = [op for op in main.regions[0].block][:2]
    assert {(op.loc, op.phase) for op in made} == {(ir.Location("layer"), "forward")}
    assert made[1].result.name == "difference"
    ir.verify(root)


def test_patterns_that_undo_each_other_are_caught() -> None:
    root, main, builder = function()
    Sub.build(builder, *main.regions[0].block.arguments)
    ir.finish_function(main, [])
    with pytest.raises(IRError, match="did not settle after 50 rewrites") as caught:
        ir.apply_patterns(root, [SubToAdd(), AddToSub()], limit=50)
    assert "SubToAdd on toy.sub" in str(caught.value) and "AddToSub on toy.add" in str(caught.value)


def test_inlining_a_block() -> None:
    class Inline(ir.RewritePattern):
        roots = (Once,)

        def match_and_rewrite(self, op: ir.Op, rewriter: ir.PatternRewriter) -> None:
            block = op.regions[0].block
            outer = main.regions[0].block.arguments
            rewriter.inline_block(block, op, [outer[0]] * len(block.arguments))
            rewriter.erase_op(op)

    root, main, builder = function()
    inner = ir.Block([T])
    builder.create(Once, [], [], {}, [ir.Region([inner])])
    value = Neg.build(ir.Builder(inner), inner.arguments[0]).result
    Print.build(ir.Builder(inner), value, result_types=[])
    ir.finish_function(main, [])
    ir.apply_patterns(root, [Inline()])
    assert names(main) == ["toy.neg", "toy.print", "func.return"]
    ir.verify(root)


def test_insertion_points_and_changes_in_place() -> None:
    class Frame(ir.RewritePattern):
        roots = (Sub,)

        def match_and_rewrite(self, op: ir.Op, rewriter: ir.PatternRewriter) -> None:
            if "toy.framed" in op.attributes:
                return
            op.attributes["toy.framed"] = True
            rewriter.touched(op)
            rewriter.set_operands(op, reversed(op.operands))
            rewriter.insert_after(op)
            Print.build(rewriter, op.result, result_types=[])
            rewriter.insert_at_start(rewriter.block)
            Neg.build(rewriter, op.x)
            rewriter.insert_before(op)
            Neg.build(rewriter, op.y)

    root, main, builder = function()
    a, b = main.regions[0].block.arguments
    op = Sub.build(builder, a, b)
    ir.finish_function(main, [])
    ir.apply_patterns(root, [Frame()])
    assert op.operands == (b, a)
    assert names(main) == ["toy.neg", "toy.neg", "toy.sub", "toy.print", "func.return"]
    ir.verify(root)


def test_replacing_checks_counts_and_types() -> None:
    class Wrong(ir.RewritePattern):
        roots = (Neg,)

        def match_and_rewrite(self, op: ir.Op, rewriter: ir.PatternRewriter) -> None:
            rewriter.replace_op(op, [])

    root, _ = chain(1)
    with pytest.raises(ValueError, match="has 1 results; 0 were given"):
        ir.apply_patterns(root, [Wrong()])
