"""Grouped products by the C++ provider against PyTorch's products of each group in float64."""

from __future__ import annotations

import pytest
import torch

from wholestep.backends import cpp
from wholestep.backends.cpp import grouped
from wholestep.backends.kernels import Spec
from wholestep.backends.made_up import neutral_inputs
from wholestep.backends.providers import Region
from wholestep.dialects.step import StepBuilder, tensor_type
from wholestep.dialects.step.grouped import ROWS, SPECS, SUMS, TURNED
from wholestep.ir.builtin import add_function, finish_function, module

pytestmark = pytest.mark.skipif(bool(cpp.missing()), reason=cpp.missing())

DRAW = torch.Generator().manual_seed(5)
#: where groups end, of so many rows
ENDS = {
    "even": ([20, 40, 60], 60),
    "empty ones": ([0, 0, 37, 37], 37),
    "rows of none": ([5, 9], 33),
    "all of none": ([0, 0], 4),
    "one": ([700], 700),
    "more than there are": ([5, 99], 30),
    "back": ([20, 10, 30], 30),
}


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=DRAW)


def operands_of(spec: str, groups: int, rows: int, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    right = {ROWS: (groups, k, n), TURNED: (groups, n, k), SUMS: (rows, n)}[spec]
    return numbers(rows, k), numbers(*right)


def expected(spec: str, x: torch.Tensor, y: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """By a product of each group."""
    made = x.new_zeros((len(ends), x.shape[1], y.shape[1]) if spec == SUMS else (len(x), y.shape[2 - (spec == TURNED)]))
    start = 0
    for group, end in enumerate(ends):
        rows = slice(start, max(start, min(end, len(x))))
        if spec == SUMS:
            made[group] = x[rows].T @ y[rows]
        else:
            made[rows] = x[rows] @ (y[group].T if spec == TURNED else y[group])
        start = rows.stop
    return made


def region_of(spec, tensors, result):
    function = add_function(module(), "grouped", [tensor_type(x) for x in tensors])
    finish_function(
        function, [StepBuilder(function.regions[0].block).grouped_contract(*function_arguments(function), spec=spec)]
    )
    specs = [Spec(tuple(x.shape), x.stride(), x.dtype) for x in (*tensors, result)]
    return Region(function, None, tuple(specs[:-1]), (specs[-1],), torch.device("cpu"))


def function_arguments(function):
    return function.regions[0].block.arguments


def run(spec, tensors, result):
    """By the provider; what lies behind its scratch memory stays."""
    it = region_of(spec, tensors, result)
    assert grouped.runs(it) and grouped.why_not(it) == ""
    (offer,) = grouped.offers(it)
    (scratch,) = offer.scratch
    (size,) = scratch.shape
    memory = torch.full((size + 64,), 3.5)
    grouped.build([offer])[offer.key](*tensors, result, memory[:size])
    assert (memory[size:] == 3.5).all()
    return result


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("sizes", [(24, 40), (29, 51), (600, 33), (1, 1)])
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("spec", SPECS)
def test_it_is_a_product_per_group(spec, ends, sizes, index, threads):
    where, rows = ENDS[ends]
    x, y = operands_of(spec, len(where), rows, *sizes)
    wanted = expected(spec, x.double(), y.double(), where)
    size = expected(spec, x.double().abs(), y.double().abs(), where)
    found = run(spec, (x, y, torch.tensor(where, dtype=index)), torch.full(wanted.shape, float("nan")))
    assert ((found.double() - wanted).abs() <= 1e-6 * size).all()


@pytest.mark.parametrize("spec", SPECS)
def test_tensors_lie_anywhere(spec):
    x, y = operands_of(spec, 3, 50, 20, 70)
    ends = torch.tensor([12, 30, 44])
    wanted = expected(spec, x, y, ends.tolist())
    turned = [t.mT.contiguous().mT for t in (x, y)]
    whole = torch.full((*wanted.shape[:-1], wanted.shape[-1] + 5), 2.5)
    torch.testing.assert_close(run(spec, (*turned, ends), whole[..., 2:-3]), wanted)
    assert (whole[..., :2] == 2.5).all() and (whole[..., -3:] == 2.5).all()


def test_what_is_not_taken():
    x, y = operands_of(ROWS, 3, 50, 20, 70)
    ends = torch.tensor([12, 30, 44])

    def why(x, y, ends, result):
        return grouped.why_not(region_of(ROWS, (x, y, ends), result))

    assert "float32" in why(x.bfloat16(), y.bfloat16(), ends, torch.empty(50, 70, dtype=torch.bfloat16))
    assert "float32" in why(x, y, ends.short(), torch.empty(50, 70))
    assert "neighbours" in why(x, y, ends, torch.empty(70, 50).t())
    assert "no product" in why(x[:, :0], y[:, :0], ends, torch.empty(50, 70))


def test_groups_are_of_about_one_size_where_it_is_timed():
    x, y = operands_of(ROWS, 3, 50, 20, 70)
    *_, ends = neutral_inputs(region_of(ROWS, (x, y, torch.zeros(3, dtype=torch.int32)), torch.empty(50, 70)), False)
    assert ends.tolist() == [16, 33, 50] and ends.dtype is torch.int32
