"""The graph: use lists, linking, erasing, cloning, reading fields by name."""

from __future__ import annotations

import copy
import gc

import pytest

from tests.ir.toy import Add, Affine, Join, Neg, Once, Split, T, function, simple
from wholestep import ir


def body() -> tuple[ir.Block, ir.Builder, ir.Value, ir.Value]:
    _, main, builder = function()
    block = main.regions[0].block
    return block, builder, *block.arguments


def test_uses_follow_operands() -> None:
    _, builder, a, b = body()
    op = Add.build(builder, a, a)
    assert a.uses == {op: 2} and not b.uses
    op.set_operands([a, b])
    assert a.uses == {op: 1} and b.uses == {op: 1}
    a.replace_by(b)
    assert not a.uses and b.uses == {op: 2} and op.operands == (b, b)
    b.replace_by(b)
    assert b.uses == {op: 2}


def test_one_reader_of_a_value_reads_another() -> None:
    _, builder, a, b = body()
    op, other = Join.build(builder, [a, b, a, b, a], result_types=[T]), Neg.build(builder, a)
    op.replace_operand(a, b)
    assert op.operands == (b,) * 5 and b.uses == {op: 5} and a.uses == {other: 1}
    with pytest.raises(KeyError):
        op.replace_operand(a, b)


def test_linking() -> None:
    block, builder, a, b = body()
    first, last = Neg.build(builder, a), Neg.build(builder, b)
    middle = Add.build(ir.Builder(block, last), a, b)
    assert list(block) == [first, middle, last] and list(reversed(block)) == [last, middle, first] and len(block) == 3
    middle.detach()
    assert list(block) == [first, last] and first.next is last and last.prev is first and middle.parent is None
    block.insert_before(middle, first)
    assert block.first is middle
    with pytest.raises(ValueError, match="already in a block"):
        block.append(middle)


def test_erasing_and_walking() -> None:
    block, builder, a, _ = body()
    first = Neg.build(builder, a)
    second = Neg.build(builder, first.result)
    with pytest.raises(ValueError, match="result 0 is still used"):
        first.erase()
    second.erase()
    assert not first.result.uses
    for op in block:
        op.erase()
    assert block.first is None and block.last is None and not a.uses
    inner = ir.Block()
    once = builder.create(Once, [], [], {}, [ir.Region([inner])])
    Neg.build(ir.Builder(inner), a)
    assert [op.name for op in once.walk()] == ["toy.once", "toy.neg"]
    once.erase()
    assert not a.uses


def test_clone_maps_values_and_leaves_the_original() -> None:
    root, main = simple()
    before = ir.print_module(root)
    a, b = main.regions[0].block.arguments
    mapping: dict[ir.Value, ir.Value] = {}
    twin = main.clone(mapping)
    assert mapping[a] is twin.regions[0].block.arguments[0]
    assert twin.parent is None and ir.print_op(twin) == ir.print_op(main)
    op = main.regions[0].block.first
    assert op is not None
    swapped = op.clone({a: b})
    assert swapped.operands == (b, b)
    swapped.attributes["alpha"] = 5
    swapped.erase()
    assert ir.print_module(root) == before
    ir.verify(root)


def test_fields_by_name() -> None:
    _, builder, a, b = body()
    affine = Affine.build(builder, a, None, b)
    assert (affine.x, affine.scale, affine.shift, affine.note) == (a, None, b, None)
    assert affine.out is affine.result
    join = Join.build(builder, [a, b], mode="concat", result_types=[T])
    assert join.xs == [a, b] and join.mode == "concat" and join.dims == ()
    split = Split.build(builder, a, result_types=[T, T])
    assert split.parts == split.results
    with pytest.raises(AttributeError, match=r"toy.add has no operand, result or attribute 'zzz'"):
        _ = Add.build(builder, a, b).zzz
    assert not hasattr(affine, "__array__")


def test_builder_mistakes() -> None:
    _, builder, a, b = body()
    with pytest.raises(TypeError, match="takes 2 operands, 3 were given"):
        Add.build(builder, a, b, a)
    with pytest.raises(TypeError, match="needs its operand 'y'"):
        Add.build(builder, a)
    with pytest.raises(TypeError, match="needs its operand 'x'"):
        Add.build(builder, None, a)
    with pytest.raises(TypeError, match="has no attribute beta"):
        Add.build(builder, a, b, beta=1)
    with pytest.raises(TypeError, match="cannot infer its result types"):
        Split.build(builder, a)


def test_types_are_interned_and_survive_copying() -> None:
    assert ir.TensorType((2, 3), ir.F32) is T
    assert copy.deepcopy(T) is T and copy.copy(ir.F32) is ir.F32
    assert ir.FunctionType((T,), (T,)) is ir.FunctionType((T,), (T,))
    assert ir.DialectType("a.b", (T, "x")) is ir.DialectType("a.b", (T, "x"))
    assert (T.rank, T.size, T.bytes) == (2, 6, 24)
    with pytest.raises(ValueError, match="unknown element type 'f31'"):
        ir.ScalarType("f31")


def test_the_collector_is_left_as_it_was() -> None:
    assert gc.isenabled()
    with ir.collector_paused():
        assert not gc.isenabled()
        with ir.collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), ir.collector_paused():
        raise KeyError
    assert gc.isenabled()


def test_functions_by_name() -> None:
    root, main = simple()
    assert ir.lookup(root, "main") is main is ir.lookup(root, ir.Symbol("main"))
    assert list(ir.functions(root)) == [main]
    with pytest.raises(KeyError, match="no function @gone"):
        ir.lookup(root, "gone")
