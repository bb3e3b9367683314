"""With `tune="max"` products are tried as one kernel with a neighbour, and a gradient with the update it goes to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.transforms.test_fuse import program, regions_of, root_of
from tests.transforms.test_tall_products import Clock, joined
from wholestep.backends.generated import region_of
from wholestep.backends.kernels import Spec
from wholestep.backends.providers import Triton
from wholestep.dialects.step import torch_dtype
from wholestep.dialects.strides import row_major
from wholestep.ir import BF16, F32, TensorType
from wholestep.ir.builtin import lookup
from wholestep.ir.core import Op, Value
from wholestep.transforms.fuse import fuse
from wholestep.transforms.regions import Bodies

TOKENS, ROWS, COLUMNS = 64, 48, 40


def adam(b: Any, g: Value, w: Value, m: Value, v: Value) -> list[Value]:
    wide = b.cast_to(g, F32)
    m = b.add(b.mul(m, 0.9), b.mul(wide, 0.1))
    v = b.add(b.mul(v, 0.99), b.mul(b.mul(wide, wide), 0.01))
    w = b.sub(w, b.mul(b.div(m, b.add(b.sqrt(b.abs(v)), 1e-2)), 1e-3))
    return [w, m, v, b.cast_to(w, BF16)]


def update(b: Any, dy: Value, x: Value, w: Value, m: Value, v: Value) -> list[Value]:
    """A weight's gradient and its update."""
    b.phase = "backward"
    g = b.contract(dy, x, spec="mi,mj->ij")
    b.phase = "update"
    return adam(b, g, w, m, v)


def of(build: Any) -> Op:
    state = TensorType((ROWS, COLUMNS), F32)
    return program([TensorType((TOKENS, ROWS), BF16), TensorType((TOKENS, COLUMNS), BF16), state, state, state], build)


def test_a_gradient_is_tried_with_the_update_it_goes_to() -> None:
    """One kernel where the clock says so, and not asked about without `tune="max"`."""
    assert joined(of(update), Clock(), products=True)[1] == ["mi,mj->ij"]
    assert joined(of(update), Clock(faster=False), products=True)[1] == []
    assert joined(of(update), Clock())[1] == []


def test_a_gradient_that_is_given_back_is_not_made_by_its_update() -> None:
    def shared(b: Any, dy: Value, x: Value, w: Value, m: Value, v: Value) -> list[Value]:
        b.phase = "backward"
        g = b.contract(dy, x, spec="mi,mj->ij")
        other = b.contract(g, x, spec="ij,mj->mi")
        b.phase = "update"
        return [*adam(b, g, w, m, v), other]

    clock = Clock()
    assert joined(of(shared), clock, products=True)[1] == []
    assert not any({op.phase for op in piece.ops} == {"backward", "update"} for piece in clock.asked)


def turned(b: Any, x: Value, w: Value, cos: Value, sin: Value) -> list[Value]:
    """Queries with rotary positions."""
    b.phase = "forward"
    return [rotated(b, b.contract(x, w, spec="abk,nk->abn"), cos, sin)]


def both_turned(b: Any, x: Value, w: Value, cos: Value, sin: Value) -> list[Value]:
    """Two heads of queries and one of keys, by one product."""
    b.phase = "forward"
    both = b.contract(x, w, spec="abk,nk->abn")
    return [rotated(b, b.slice(both, dim=2, start=start, end=end), cos, sin) for start, end in ((0, 32), (32, 48))]


def rotated(b: Any, q: Value, cos: Value, sin: Value) -> Value:
    """Each element goes with the one half a head away."""
    q = b.transpose(b.reshape(q, shape=(2, 21, q.type.shape[2] // 16, 16)), order=(0, 2, 1, 3))
    low, high = (b.slice(q, dim=3, start=at, end=at + 8) for at in (0, 8))
    other = b.cast_to(b.concat([b.neg(high), low], dim=3), F32)
    return b.cast_to(b.add(b.mul(b.cast_to(q, F32), cos), b.mul(other, sin)), BF16)


def rotary(build: Any = turned) -> Op:
    angles = TensorType((21, 16), F32)
    return program([TensorType((2, 21, 40), BF16), TensorType((48, 40), BF16), angles, angles], build)


def test_rotary_positions_are_tried_with_the_product_before_them() -> None:
    """One kernel where the clock says so: what the product makes is then neither written nor read."""
    clock = Clock()
    assert joined(rotary(), clock, products=True)[1] == ["abk,nk->abn"]
    whole, product, rest = clock.asked
    assert {v.type.shape for v in whole.outputs} == {(2, 3, 21, 16)} and len(product.outputs) == len(rest.outputs) == 1
    assert joined(rotary(), Clock(faster=False), products=True)[1] == []


def test_queries_and_keys_of_one_product_are_each_tried_with_their_columns() -> None:
    """No element of the product is computed twice; where the clock says so, two kernels each compute theirs."""
    fusion, found = joined(rotary(both_turned), Clock(), products=True)
    assert found == ["abk,nk->abn"] * 2
    assert joined(rotary(both_turned), Clock(faster=False), products=True)[1] == []
    assert joined(rotary(both_turned), Clock())[1] == []
    recipe = [f"fuse {' + '.join(sites)}" for _, sites in fusion.kernels]
    assert joined(rotary(both_turned), Clock(), products=True, recipe=recipe)[1] == found


def test_slices_that_overlap_are_not_computed_apart() -> None:
    def overlapping(b: Any, x: Value, w: Value, cos: Value, sin: Value) -> list[Value]:
        b.phase = "forward"
        both = b.contract(x, w, spec="abk,nk->abn")
        return [rotated(b, b.slice(both, dim=2, start=start, end=48), cos, sin) for start in (0, 32)]

    assert joined(rotary(overlapping), Clock(), products=True)[1] == []


def test_heads_lie_as_the_product_would_have_written_them() -> None:
    """So that attention reads them, and what it makes, without a copy."""
    function = rotary()
    fusion = fuse(function, bodies=Bodies(), seconds=Clock(), products=True)
    (op,) = regions_of(function)
    specs = [Spec(v.type.shape, row_major(v.type.shape), torch_dtype(v.type.element)) for v in op.operands]
    body, kernel = lookup(root_of(function), op.callee), fusion.bodies[op.callee.name].kernel
    (result,) = region_of(body, kernel, specs, torch.device("cpu")).results
    assert result.strides == (21 * 48, 16, 48, 1)


@pytest.mark.parametrize(
    ("function", "products"), [(of(update), 1), (rotary(), 1), (rotary(both_turned), 2)], ids=["update", "q", "q and k"]
)
def test_triton_has_kernels_for_it(function: Op, products: int) -> None:
    pytest.importorskip("triton")
    fusion = fuse(function, bodies=Bodies(), seconds=Clock(), products=True)
    device, checked = torch.device("cpu"), 0
    for op in regions_of(function):
        body = lookup(root_of(function), op.callee)
        if not any(inner.name == "step.contract" for inner in body.regions[0].block):
            continue
        specs = [
            Spec(v.type.shape, row_major(v.type.shape), torch_dtype(v.type.element))
            for v in (*op.operands, *op.results)
        ]
        region = region_of(body, fusion.bodies[op.callee.name].kernel, specs[: len(op.operands)], device)
        assert Triton().claims(region) == "" and all(way.name.startswith("dot ") for way in Triton().offers(region))
        checked += 1
    assert checked == products
