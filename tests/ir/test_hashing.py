"""The structural hash: blind to names, places and attribute order; sensitive to everything that is computed."""

from __future__ import annotations

from hypothesis import given, settings

from tests.ir.toy import Add, Neg, Sub, T, function, programs, simple
from wholestep import ir


def layer(swap: bool = False, alpha: float = 1, name: str = "", phase: str = "") -> tuple[ir.Op, list[ir.Op]]:
    root, main, builder = function()
    a, b = main.regions[0].block.arguments
    a.name, builder.loc, builder.phase = name, ir.Location(name), phase
    first = Add.build(builder, a, b, alpha=alpha)
    second = Sub.build(builder, *((b, first.result) if swap else (first.result, b)))
    return root, [first, second]


def test_names_and_locations_do_not_count() -> None:
    assert ir.structural_hash(layer()[0]) == ir.structural_hash(layer(name="other")[0])


def test_wiring_attributes_and_types_count() -> None:
    variants = [
        layer()[1],
        layer(swap=True)[1],
        layer(alpha=2)[1],
        layer(alpha=1.0)[1],
        layer(alpha=True)[1],
        layer(phase="x")[1],
        layer()[1][:1],
        layer()[1][1:],
    ]
    _, main, builder = function(ir.TensorType((2, 4), ir.F32), ir.TensorType((2, 4), ir.F32))
    variants.append([Add.build(builder, *main.regions[0].block.arguments)])
    assert len({ir.structural_hash(ops) for ops in variants}) == len(variants)
    assert ir.structural_hash(layer(phase="x")[1], ignore=["phase"]) == ir.structural_hash(layer()[1])


def test_layers_with_their_own_weights_hash_alike() -> None:
    _, main, builder = function(T, T, T)
    x, w0, w1 = main.regions[0].block.arguments
    first = [Add.build(builder, x, w0)]
    first.append(Neg.build(builder, first[0].result))
    second = [Add.build(builder, first[1].result, w1)]
    second.append(Neg.build(builder, second[0].result))
    assert ir.structural_hash(first) == ir.structural_hash(second)
    shared = Add.build(builder, x, x)
    assert ir.structural_hash([shared]) != ir.structural_hash(first[:1])


def test_attribute_order_does_not_count() -> None:
    root, main = simple()
    before = ir.structural_hash(root)
    main.attributes = dict(reversed(main.attributes.items()))
    assert ir.structural_hash(root) == before
    block = main.regions[0].block
    assert len({ir.structural_hash(main), ir.structural_hash(main.regions[0]), ir.structural_hash(block), before}) == 4


@given(programs())
@settings(max_examples=30, deadline=None)
def test_a_clone_hashes_and_prints_alike(root: ir.Op) -> None:
    copy = root.clone()
    ir.verify(copy)
    ir.verify(root)
    assert ir.structural_hash(copy) == ir.structural_hash(root)
    assert ir.print_module(copy, locations=True) == ir.print_module(root, locations=True)
