"""The verifier: each rule, broken once in the graph, is reported with the op, its layer and what is expected."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.ir.toy import Add, Affine, Join, Neg, Once, Print, Split, T, function, simple, toy
from wholestep import ir
from wholestep.errors import VerifyError

INTS = ir.TensorType((2, 3), ir.I64)


def problem(root: ir.Op) -> str:
    with pytest.raises(VerifyError) as caught:
        ir.verify(root)
    return str(caught.value)


def body() -> tuple[ir.Op, ir.Builder, ir.Value, ir.Value]:
    root, main, builder = function()
    a, b = main.regions[0].block.arguments
    return root, builder, a, b


def finished(change: Callable[[ir.Builder, ir.Value, ir.Value], object]) -> ir.Op:
    root, main, builder = function()
    a, b = main.regions[0].block.arguments
    change(builder, a, b)
    ir.finish_function(main, [])
    return root


def test_a_good_program_passes() -> None:
    root, main = simple()
    ir.verify(root)
    ir.verify(main)
    for op in root.walk():
        ir.verify(op)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b, x, y: b.create(Add, [x], [T], {"alpha": 1}), "has 1 operands, expected 2 (x, y)"),
        (lambda b, x, y: b.create(Add, [x, y, x], [T], {"alpha": 1}), "has 3 operands, expected 2 (x, y)"),
        (lambda b, x, y: b.create(Add, [x, y], [], {"alpha": 1}), "has 0 results, expected 1"),
        (lambda b, x, y: b.create(Add, [x, y], [T]), "needs its attribute 'alpha' (number)"),
        (lambda b, x, y: b.create(Add, [x, y], [T], {"alpha": "1"}), "attribute 'alpha' is \"1\", expected number"),
        (lambda b, x, y: b.create(Add, [x, y], [T], {"alpha": 1 << 70}), "does not fit in 64 bits"),
        (lambda b, x, y: b.create(Add, [x, y], [T], {"alpha": 1, "beta": 2}), "has no attribute 'beta'"),
        (lambda b, x, y: b.create(Add, [x, y], [INTS], {"alpha": 1}), "has result types (tensor<2x3xi64>), expected"),
        (lambda b, x, y: b.create(Neg, [x], [T], {"phase": 3}), "attribute 'phase' is 3 : i64, expected a string"),
        (lambda b, x, y: b.create(Neg, [x], [T], {"a.b": {1}}), "attribute 'a.b' is a Python set"),
        (lambda b, x, y: b.create(Neg, [x], [T], {"a.b": (1.5,)}), "a tuple of something other than 64-bit integers"),
        (lambda b, x, y: b.create(Neg, [x], [T], {}, [ir.Region()]), "has 1 regions, expected 0"),
        (lambda b, x, y: b.create(Once), "has 0 regions, expected 1"),
        (lambda b, x, y: b.create(Join, [x], [T], {"mode": "pile", "dims": ()}), '"pile", expected "stack" | "concat"'),
        (lambda b, x, y: b.create(Affine, [x], [T]), "needs operandSegmentSizes"),
        (
            lambda b, x, y: b.create(Affine, [x], [T], {"operandSegmentSizes": ir.I32Array((1, 1, 0))}),
            "does not split 1 operands into (x, scale, shift)",
        ),
        (
            lambda b, x, y: b.create(Affine, [x, y, x], [T], {"operandSegmentSizes": ir.I32Array((1, 2, 0))}),
            "gives operand 'scale' 2 values",
        ),
        (
            lambda b, x, y: b.create(Neg, [x], [T], {"operandSegmentSizes": ir.I32Array((1,))}),
            "its operands split without them",
        ),
        (
            lambda b, x, y: b.create(Once, [], [], {}, [ir.Region([ir.Block(), ir.Block()])]),
            "a region has 2 blocks, expected at most one",
        ),
    ],
)
def test_broken_declarations(change: Callable[[ir.Builder, ir.Value, ir.Value], object], message: str) -> None:
    assert message in problem(finished(change))


def test_type_constraints_and_infer_rules() -> None:
    root, main, builder = function(INTS, T)
    ints, floats = main.regions[0].block.arguments
    neg = builder.create(Neg, [ints], [INTS])
    ir.finish_function(main, [])
    assert "operand 'x' is tensor<2x3xi64>, expected float tensor" in problem(root)
    neg.erase()
    builder.before = main.regions[0].block.last
    builder.create(Add, [ints, floats], [INTS], {"alpha": 1})
    assert "its operands do not fit together: tensor<2x3xi64> and tensor<2x3xf32> differ" in problem(root)


def test_the_message_names_layer_and_op() -> None:
    def change(builder: ir.Builder, x: ir.Value, y: ir.Value) -> None:
        builder.loc = ir.Location("blocks.3.mlp", "model.py", 41)
        builder.create(Add, [x, y], [T], {"alpha": None})

    text = problem(finished(change))
    assert text.startswith("toy.add (blocks.3.mlp at model.py:41): ")
    assert '"toy.add"(%arg0, %arg1) {alpha}' in text


def test_equal_keys_of_different_kinds_are_told_apart() -> None:
    """True == 1 == 1.0, so a cache keyed by values alone would let the second op through."""
    dialect = ir.Dialect("kinds")

    @dialect.op
    class Counted(ir.OpDef):
        count = ir.Attr("int")
        dims = ir.Attr("ints")

    root = ir.module()
    builder = ir.Builder(root.regions[0].block)
    builder.create(Counted, [], [], {"count": 1, "dims": (1,)})
    ir.verify(root)
    for bad in ({"count": True, "dims": (1,)}, {"count": 1.0, "dims": (1,)}, {"count": 1, "dims": (True,)}):
        op = builder.create(Counted, [], [], dict(bad))
        assert "kinds.counted" in problem(root)
        op.erase()
    ir.verify(root)


def test_dominance() -> None:
    root, main, builder = function()
    a, b = main.regions[0].block.arguments
    first = Add.build(builder, a, b)
    second = Add.build(builder, first.result, b)
    ir.finish_function(main, [second.result])
    main.regions[0].block.insert_before(second.detach(), first)
    assert "comes from a toy.add further down" in problem(root)


def test_dominance_across_regions() -> None:
    root, main, builder = function()
    a, _ = main.regions[0].block.arguments
    inner = ir.Block([T])
    builder.create(Once, [], [], {}, [ir.Region([inner])])
    made = Neg.build(ir.Builder(inner), a).result  # a region sees what is outside
    Neg.build(ir.Builder(inner), inner.arguments[0])
    ir.finish_function(main, [])
    ir.verify(root)
    Neg.build(ir.Builder(main.regions[0].block, main.regions[0].block.last), made)
    assert "in a block that does not enclose this op" in problem(root)


def test_a_function_sees_nothing_from_outside() -> None:
    root = ir.module()
    _, first, builder = function(name="first", root=root)
    a, _ = first.regions[0].block.arguments
    ir.finish_function(first, [])
    _, second, builder = function(name="second", root=root)
    Neg.build(builder, a)
    ir.finish_function(second, [])
    assert "an argument of a block that does not enclose this op" in problem(root)


def test_symbols_terminators_and_returns() -> None:
    root, main, _ = function()
    ir.finish_function(main, [])
    _, other, builder = function(root=root)
    ir.finish_function(other, [])
    assert "the symbol @main is defined twice" in problem(root)
    other.attributes["sym_name"] = "other"
    ir.verify(root)
    Neg.build(builder, other.regions[0].block.arguments[0])
    assert "it ends its block, yet toy.neg follows" in problem(root)
    block = other.regions[0].block
    block.last.erase()  # type: ignore[union-attr]
    block.last.erase()  # type: ignore[union-attr]
    assert "a function must end in func.return" in problem(root)


def test_links_and_use_lists() -> None:
    root, builder, a, b = body()
    add = Add.build(builder, a, a)
    ir.finish_function(root.regions[0].block.first, [])  # type: ignore[arg-type]
    ir.verify(root)
    a.uses[add] = 1
    assert "lists 1 uses" in problem(root)
    a.uses[add] = 2
    b.uses[add] = 1
    assert "which does not use it so often" in problem(root)
    del b.uses[add]
    add.operands = (a, b)
    assert "but the value lists" in problem(root)
    add.operands = (a, a)
    ir.verify(root)
    detached = Print.build(ir.Builder(ir.Block()), b, result_types=[]).detach()
    assert "is used by a toy.print that is in no block" in problem(root)
    detached.drop_operands()
    block = add.parent
    add.parent = None
    assert "not linked into its block properly" in problem(root)
    add.parent = block
    ir.verify(root)


def test_own_checks_may_fail_in_any_way() -> None:
    dialect = ir.Dialect("own")

    @dialect.op
    class Broken(ir.OpDef):
        @staticmethod
        def check(op: ir.Op) -> str | None:
            return op.attributes["missing"]

    root = ir.module()
    ir.Builder(root.regions[0].block).create(Broken)
    assert "its check failed: KeyError" in problem(root)


def test_deep_nesting_is_refused() -> None:
    root = ir.module()
    block = root.regions[0].block
    for _ in range(150):
        inner = ir.Block()
        ir.Builder(block).create(Once, [], [], {}, [ir.Region([inner])])
        block = inner
    assert "nested more than 100 deep" in problem(root)


def test_variadic_results_and_unregistered_ops() -> None:
    root, builder, a, _ = body()
    Split.build(builder, a, result_types=[])
    main = root.regions[0].block.first
    assert main is not None
    ir.finish_function(main, [])
    ir.verify(root)
    text = ir.print_module(root).replace("toy.split", "foreign.op")
    ir.parse(text, ir.Context([toy], allow_unregistered=True), verify=True)
