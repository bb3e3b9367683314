"""Step ops as loops: the float64 reference of every kernel against ATen, op by op and for random programs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.dialects.loop.programs import Drawn, outputs_for
from tests.dialects.step.harness import flat, randn, regroup
from tests.dialects.step.samples import SAMPLES
from wholestep.dialects.loop import FUNCTIONS, Load, NoSchedule, Reduce, schedule, space_of
from wholestep.dialects.loop.reference import run
from wholestep.dialects.step import StepBuilder, step, tensor_type
from wholestep.ir import F32, F64, I64, add_function, finish_function, module, verify
from wholestep.ir.core import Op
from wholestep.ir.types import ScalarType
from wholestep.runtime.executor import Executable
from wholestep.transforms.loops import Dimensions, NotLoops, lowered, points

#: floats are computed in float64 by the reference, ATen rounds on the way
BOUNDS = {torch.float64: (1e-8, 1e-10), torch.float32: (1e-5, 1e-6), torch.bfloat16: (2e-2, 1e-2)}


def function_of(name: str, operands: list[Any], attributes: dict[str, Any]) -> Op:
    function = add_function(module(), "main", [tensor_type(t) for t in flat(operands)])
    block = function.regions[0].block
    op = step.ops[name].build(StepBuilder(block), *regroup(operands, block.arguments), **attributes)
    finish_function(function, op.results)
    return function


def root_of(function: Op) -> Op:
    return function.parent.parent.parent


def agree(function: Op, inputs: list[torch.Tensor]) -> Op:
    """The kernel of a function, whose reference gives what ATen gives."""
    kernel = lowered(function)
    verify(root_of(kernel))
    found = outputs_for(function)
    run(kernel, inputs, found)
    for mine, true in zip(found, Executable(function)(inputs), strict=True):
        rtol, atol = BOUNDS.get(true.dtype, (0, 0))
        torch.testing.assert_close(mine.to(true.dtype), true, rtol=rtol, atol=atol, equal_nan=True)
    return kernel


CASES = [pytest.param(name, *case, id=f"{name}-{i}") for name, cases in SAMPLES.items() for i, case in enumerate(cases)]
#: ops that no kernel of loops does yet; a new one is added here on purpose or gets a rule
WITHOUT_LOOPS = {
    "accumulate",
    "argmax", "argmin", "cumsum", "embedding_grad", "fetch", "fused_adam", "fused_adamw", "fused_sgd",
    "grouped_contract", "index_add", "index_put", "muon", "nll_loss_grad", "offload", "opaque", "opaque_grad",
    "scatter", "scatter_add", "row_sums", "sort", "topk",
}  # fmt: skip


@pytest.mark.parametrize(("name", "operands", "attributes"), CASES)
def test_every_sample_of_every_op(name: str, operands: list[Any], attributes: dict[str, Any]) -> None:
    function = function_of(name, operands, attributes)
    block = function.regions[0].block
    if any(0 in v.type.shape for op in block for v in op.operands):
        pytest.skip("an empty tensor is refused before (test_regions.py)")
    try:
        agree(function, flat(operands))
    except NotLoops as error:
        assert name in WITHOUT_LOOPS or "a reshape mixes" in str(error), error


def test_what_has_no_loops_is_known() -> None:
    """Every op has a sample that is lowered, or stands in the list."""
    able = set()
    for name, cases in SAMPLES.items():
        for operands, attributes in cases:
            try:
                lowered(function_of(name, operands, attributes))
                able.add(name)
            except NotLoops:
                pass
    assert not able & WITHOUT_LOOPS
    assert set(SAMPLES) - able <= WITHOUT_LOOPS


def test_a_rounding_of_the_program_that_no_kernel_does_is_refused() -> None:
    narrow = dict(dtype=ScalarType("f8E5M2"), rounds=True)
    with pytest.raises(NotLoops, match="does not round to f8E5M2 on the way"):
        lowered(function_of("cast", [torch.randn(3)], narrow))


SHAPES = [(), (1,), (7,), (3, 5), (1, 6), (4, 1), (2, 3, 4), (2, 1, 3, 2)]


@pytest.mark.parametrize("name", sorted(n for n, d in step.ops.items() if d.pointwise and n in FUNCTIONS))
def test_pointwise_on_random_shapes(name: str) -> None:
    """Every shape beside every shape it broadcasts with, one kernel for all of them where it is cheap."""
    taken = SAMPLES[name][0][0]
    attributes = SAMPLES[name][0][1]
    generator = torch.Generator().manual_seed(len(name))
    for shape in SHAPES:
        operands = []
        for number, sample in enumerate(taken):
            own = shape[number:] if number else shape  # broadcast from the second operand on
            if sample.dtype.is_floating_point:
                operands.append(torch.rand(own, generator=generator, dtype=torch.float64) + 0.05)
            else:
                operands.append(torch.randint(0, 2, own, generator=generator).to(sample.dtype))
        agree(function_of(name, operands, attributes), operands)


@pytest.mark.parametrize("name", ["sum", "amax", "amin", "prod", "mean", "variance", "logsumexp", "any", "all"])
def test_reductions_over_every_set_of_dimensions(name: str) -> None:
    for shape in ((5,), (3, 4), (1, 5), (2, 3, 4)):
        for chosen in range(1, 2 ** len(shape)):
            dims = tuple(d for d in range(len(shape)) if chosen >> d & 1)
            if (name == "prod" and len(dims) > 1) or (name == "variance" and all(shape[d] == 1 for d in dims)):
                continue  # the op takes one dimension; of one number there is no variance
            for keepdim in (False, True):
                x = randn(*shape) > 0 if name in ("any", "all") else randn(*shape)
                kernel = agree(function_of(name, [x], dict(dims=dims, keepdim=keepdim)), [x])
                schedule(kernel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [(1, 1), (3, 7), (2, 3, 5)])
def test_normalisations_and_losses_on_odd_sizes(dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, dy = torch.randn(rows).to(dtype), torch.randn(rows).to(dtype)
    weight = torch.rand(rows[-1:]).to(dtype) + 0.5
    function = add_function(module(), "main", [tensor_type(t) for t in (x, dy, weight)])
    b = StepBuilder(function.regions[0].block)
    xv, dv, wv = function.regions[0].block.arguments
    y, mean, rstd = b.layer_norm(xv, wv, wv, trailing=1, eps=1e-5)
    dx = b.softmax_grad(dv, b.softmax(xv, dim=len(rows) - 1), dim=len(rows) - 1)
    finish_function(function, [y, mean, rstd, dx, b.log_softmax(b.cast(xv, dtype=F32), dim=len(rows) - 1)])
    inputs = [x, dy, weight]
    kernel = lowered(function)
    verify(root_of(kernel))
    found = outputs_for(function)
    run(kernel, inputs, found)
    for mine, true in zip(found, Executable(function)(inputs), strict=True):
        rtol, atol = BOUNDS[dtype]  # ATen keeps statistics of 16-bit rows in 16 bits on a CPU
        torch.testing.assert_close(mine.to(true.dtype), true, rtol=rtol, atol=atol)


@pytest.mark.parametrize("first", range(0, 800, 100))
def test_random_programs_are_right_or_refused(first: int) -> None:
    """What cannot be one kernel says so; whatever is lowered computes what ATen computes."""
    seen: Counter[str] = Counter()
    for seed in range(first, first + 100):
        drawn = Drawn(seed)
        try:
            kernel = lowered(drawn.function)
        except NotLoops as error:
            assert str(error)
            seen["refused"] += 1
            continue
        if points(kernel) > 40_000:  # results that walk different dimensions: regions.py refuses these
            seen["large"] += 1
            continue
        verify(root_of(kernel))
        found = outputs_for(drawn.function)
        run(kernel, drawn.inputs, found)
        for mine, true in zip(found, Executable(drawn.function)(drawn.inputs), strict=True):
            what = f"seed {seed} {drawn.names}: "
            torch.testing.assert_close(mine, true, rtol=1e-9, atol=1e-11, msg=what.__add__)
        try:
            schedule(kernel)
            seen["kernels"] += 1
        except NoSchedule as error:
            assert str(error)
            seen["no schedule"] += 1
    assert seen["kernels"] > 60 and seen["refused"] < 30, seen


# ---- cases that were wrong once, or would be with a simpler rule -----------------------------------------------------


def made(inputs: list[torch.Tensor], build: Any) -> Op:
    function = add_function(module(), "main", [tensor_type(t) for t in inputs])
    results = build(StepBuilder(function.regions[0].block), *function.regions[0].block.arguments)
    finish_function(function, results if isinstance(results, list) else [results])
    return agree(function, inputs)


def test_a_computed_index_does_not_reach_a_dimension_of_size_one() -> None:
    x, y = randn(3, 1), randn(4)
    made([x, y], lambda b, x, y: b.slice_grad(b.add(x, y), dim=1, start=3, end=10, stride=2, size=11))


def test_a_broadcast_row_is_reduced_once_per_column() -> None:
    kernel = made([randn(4)], lambda b, x: b.sum(b.broadcast(x, shape=(3, 4)), dims=(0,)))
    assert [op.attributes["dims"] for op in kernel.regions[0].block if op.definition is Reduce] == [(0,)]


def test_equal_sizes_are_not_equal_dimensions() -> None:
    """x + x.T reads a square matrix along its diagonal if its two dimensions are taken for one."""
    x = randn(4, 4)
    kernel = made([x], lambda b, x: b.add(x, b.transpose(b.exp(x), order=(1, 0))))
    loads = [op.attributes["map"] for op in kernel.regions[0].block if op.definition is Load]
    assert sorted(loads) == [[[0, 1, 0], [1, 0, 0]], [[1, 0, 0], [0, 1, 0]]]
    with pytest.raises(NotLoops, match="walked as one"):
        made([x], lambda b, x: b.sum(b.add(x, b.transpose(x, order=(1, 0))), dims=(1,)))


def test_negative_indices_count_from_the_end_and_computed_ones_are_no_part_of_a_kernel() -> None:
    x, i, j = randn(3, 4, 5), torch.tensor([-4, 3, -1, 0]), torch.tensor([[2], [-5]])
    made([x, i, j], lambda b, x, i, j: b.exp(b.index(x, [i, j], dims=(1, 2))))
    with pytest.raises(NotLoops, match="computed in the same kernel"):
        made([x, i], lambda b, x, i: b.index(x, [b.sub(i, 9)], dims=(1,)))


def test_the_same_tensor_at_two_places() -> None:
    kernel = made(
        [randn(6)],
        lambda b, x: b.sub(b.slice(x, dim=0, start=1, end=6), b.slice(x, dim=0, start=0, end=5)),
    )
    loads = [op.attributes["map"] for op in kernel.regions[0].block if op.definition is Load]
    assert loads == [[[1, 1]], [[1, 0]]]


def test_a_row_of_minus_infinity_and_nan_goes_through() -> None:
    x = randn(3, 4)
    x[0, 1], x[1, 2], x[2, 0] = float("-inf"), float("nan"), float("inf")
    made([x], lambda b, x: [b.softmax(x, dim=1), b.maximum(x, b.relu(x)), b.amax(x, dims=(0,)), b.isnan(x)])


def test_integers_stay_integers() -> None:
    big = torch.tensor([2**62, -(2**62) + 1, 3])
    made([big], lambda b, x: [b.add(x, 1), b.sum(x, dims=(0,)), b.div(x, 3, rounding="floor"), b.rem(x, 7)])
    made([torch.tensor([-7, 7, -8])], lambda b, x: [b.div(x, 2, rounding="trunc"), b.cast(x, dtype=F64)])
    made([randn(5) * 9], lambda b, x: [b.cast(x, dtype=I64), b.cast(b.cast(x, dtype=I64), dtype=F32)])


def test_operands_of_a_function_are_of_one_type() -> None:
    """A sum of 16-bit numbers is wider than they are: a select between both casts (MLIR wants one type)."""
    x = randn(3, 4).bfloat16()
    kernel = made([x], lambda b, x: b.select(b.gt(x, 0.0), x, b.sum(x, dims=(1,), keepdim=True)))
    for op in kernel.regions[0].block:
        if op.name == "loop.apply" and op.attributes["fn"] == "select":
            assert len({v.type for v in op.operands[1:]}) == 1


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_labels_to_be_ignored(reduction: str) -> None:
    """They are looked up nowhere: what lies outside of the table must not get into a sum, not even times zero."""
    logits, labels = randn(5, 4), torch.tensor([0, -100, 3, -100, 1])
    attributes = dict(reduction=reduction, ignore_index=-100)
    function = function_of("cross_entropy", [logits, labels, None], {k: v for k, v in attributes.items()})
    agree(function, [logits, labels])


def test_what_is_looked_up_outside_of_its_table_is_not_a_number() -> None:
    table, index = randn(4, 3), torch.tensor([1, 7, -2, 3])
    function = function_of("embedding", [table, index], {})
    (found,) = outputs_for(function)
    run(lowered(function), [table, index], [found])
    assert found.isnan().all(1).tolist() == [False, True, True, False]
    assert torch.equal(found[[0, 3]], table[[1, 3]])


def test_beside_what_is_looked_up_there_are_zeros_outside() -> None:
    """Windows that reach beyond the edge of an image are no mistake of the numbers that are looked up in it."""
    image, labels = randn(2, 3, 2, 2), torch.tensor([0, 2, 1, 2]).expand(2, 4, 4)
    made([image, labels], lambda b, x, t: b.cross_entropy(b.upsample(x, factors=(2, 2)), t)[0])
    pooled = dict(kernel=(3,), stride=(1,), padding=(1,))
    made([image[0], torch.tensor([[[1, 0]]])], lambda b, x, i: b.gather(b.avg_pool(x, **pooled), i, dim=2))


# ---- dimensions ------------------------------------------------------------------------------------------------------


def test_unify_splits_from_the_innermost() -> None:
    dims = Dimensions()
    flat_, a, b = dims.new(12), dims.new(4), dims.new(3)
    dims.unify(flat_, [*a, *b])
    assert [dims.size[p] for p in dims.resolve(flat_)] == [4, 3]
    dims.unify(a, [*dims.new(2), *dims.new(2)])
    assert [dims.size[p] for p in dims.resolve(flat_)] == [2, 2, 3]
    with pytest.raises(NotLoops, match="mixes dimensions of 3 and 2"):
        dims.unify(flat_, [*dims.new(6), *dims.new(2)])


def test_one_walk_for_what_a_reshape_connects() -> None:
    kernel = made(
        [randn(4, 6)], lambda b, x: [b.neg(x), b.exp(b.reshape(x, shape=(2, 2, 6))), b.reshape(x, shape=(24,))]
    )
    assert space_of(kernel) == (2, 2, 6)
