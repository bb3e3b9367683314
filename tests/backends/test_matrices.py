"""Contractions as matrices where they lie, against einsum; and what lies so that it would have to be copied."""

from __future__ import annotations

import pytest
import torch

from wholestep.backends.cublas.ways import lies_aligned, why_not
from wholestep.backends.kernels import Spec
from wholestep.backends.matrices import NotMatrices, matrices_of, multiply, one_product
from wholestep.backends.providers import Region
from wholestep.dialects.step import StepBuilder
from wholestep.ir import TensorType, add_function, finish_function, module
from wholestep.ir.types import ScalarType

CPU = torch.device("cpu")


def spec_of(x: torch.Tensor) -> Spec:
    return Spec(tuple(x.shape), tuple(x.stride()), x.dtype)


def product(spec: str, operands: list[torch.Tensor], result: torch.Tensor, element: str = "f64") -> Region:
    types = [TensorType(tuple(x.shape), ScalarType(element)) for x in operands]
    function = add_function(module(), "product", types)
    block = function.regions[0].block
    given = [*block.arguments, None][:3]
    finish_function(function, [StepBuilder(block).contract(*given, spec=spec)])
    return Region(function, None, tuple(map(spec_of, operands)), (spec_of(result),), CPU)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


CASES = {
    "rows": ("mk,nk->mn", lambda: [numbers(32, 16), numbers(24, 16)], None),
    "bias": ("mk,nk->mn", lambda: [numbers(32, 16), numbers(24, 16), numbers(24)], None),
    "a transposed factor": ("mk,nk->mn", lambda: [numbers(16, 32).t(), numbers(24, 16)], None),
    "folded rows": ("abk,nk->abn", lambda: [numbers(4, 8, 16), numbers(24, 16), numbers(24)], None),
    "weight gradient": ("abn,abk->nk", lambda: [numbers(4, 8, 16), numbers(4, 8, 24)], None),
    "batch": ("bik,bkj->bij", lambda: [numbers(4, 8, 16), numbers(4, 16, 24)], None),
    "batch of two": ("bhqd,bhkd->bhqk", lambda: [numbers(2, 3, 8, 16), numbers(2, 3, 24, 16)], None),
    "images": ("abc,db->acd", lambda: [numbers(4, 8, 16), numbers(24, 8), numbers(24)], None),
    "images, turned": ("acb,db->adc", lambda: [numbers(4, 16, 8), numbers(24, 8)], None),
    "images second": ("db,abc->acd", lambda: [numbers(24, 8), numbers(4, 8, 16), numbers(24)], None),
    "turned": ("mk,nk->nm", lambda: [numbers(32, 16), numbers(24, 16), numbers(32)], None),
    "a part of a whole": ("mk,nk->mn", lambda: [numbers(32, 16), numbers(24, 16)], lambda: numbers(32, 100)[:, 8:32]),
    "of one row": ("mk,nk->mn", lambda: [numbers(1, 16), numbers(24, 16)], None),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_contraction(case: str) -> None:
    spec, make, where = CASES[case]
    operands = make()
    wanted = torch.einsum(spec, *operands[:2]) + (operands[2] if len(operands) > 2 else 0.0)
    result = torch.empty(wanted.shape, dtype=torch.float64) if where is None else where()
    known = matrices_of(product(spec, operands, result))
    multiply(known, [*operands, result])
    torch.testing.assert_close(result, wanted)
    assert known.z * known.m * known.n == result.numel()


def test_what_would_have_to_be_copied() -> None:
    heads = [numbers(2, 8, 3, 16), numbers(2, 24, 3, 16)]
    region = product("bqhd,bkhd->bhqk", heads, torch.empty(2, 3, 8, 24, dtype=torch.float64))
    with pytest.raises(NotMatrices, match="would have to be copied"):
        matrices_of(region)
    assert one_product(region) is None
    rows = [numbers(32, 16), numbers(24, 16), numbers(32, 24)]
    with pytest.raises(NotMatrices, match="no vector"):
        matrices_of(product("mk,nk->mn", rows, torch.empty(32, 24, dtype=torch.float64)))


def test_rows_that_begin_anywhere_are_left_alone() -> None:
    def aligned(width: int) -> bool:
        left, right = (torch.zeros(32, width, dtype=torch.bfloat16)[:, :16] for _ in range(2))
        return lies_aligned(matrices_of(product("mk,nk->mn", [left, right], left.new_empty(32, 32), "bf16")))

    assert aligned(24) and not aligned(20)


@pytest.mark.skipif(torch.version.cuda is not None, reason="cuBLAS is there")
def test_without_the_library() -> None:
    operands = [numbers(32, 16), numbers(24, 16)]
    assert why_not(product("mk,nk->mn", operands, numbers(32, 24))) == "cuBLASLt is not loaded"
