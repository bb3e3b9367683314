"""Kernels along stretches of a dimension: together they write what the whole kernel writes, and none chooses."""

from __future__ import annotations

import pytest
import torch

from wholestep.backends.kernels import Spec
from wholestep.backends.triton.cases import FEWEST, stretches
from wholestep.backends.triton.configs import configs
from wholestep.backends.triton.families import Cases, Family
from wholestep.dialects.loop.reference import run
from wholestep.dialects.step import StepBuilder
from wholestep.dialects.strides import row_major
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.core import Op
from wholestep.ir.types import F32, I64, TensorType
from wholestep.transforms.loops import lowered

ROWS, WIDTH = 5, 3


def kernel(*widths: int, dim: int = 1, low: int = 0) -> Op:
    """Rows of a table and other tensors, one behind the other, padded."""
    shapes = [(ROWS, n, WIDTH) if dim == 1 else (n, ROWS, WIDTH) for n in widths]
    types = [TensorType((7, WIDTH), F32), TensorType(shapes[0][:2], I64), *(TensorType(s, F32) for s in shapes[1:])]
    function = add_function(module(), "f", types)
    block = function.regions[0].block
    b = StepBuilder(block, phase="forward")
    table, indices, *others = block.arguments
    joined = b.concat([b.embedding(table, indices), *map(b.sin, others)], dim=dim)
    widths_before = tuple(low if d == dim else 0 for d in range(3))
    padded = b.pad(joined, low=widths_before, high=(0, 0, 0), value=2.0) if low else joined
    return lowered(finish_function(function, [padded]))


def specs_of(function: Op) -> list[Spec]:
    types = [a.type for a in function.regions[0].block.arguments]
    return [Spec(t.shape, row_major(t.shape), torch.int64 if t.element is I64 else torch.float32) for t in types]


@pytest.mark.parametrize(
    "widths, more, count", [((2, 1, 4, 3), {}, 4), ((1, 1, 1), {"low": 2}, 4), ((2, 2, 1, 1, 1), {"dim": 0}, 5)]
)
def test_stretches_write_together_what_the_kernel_writes(widths, more, count) -> None:
    whole = kernel(*widths, **more)
    specs = specs_of(whole)
    parts = stretches(whole, specs)
    assert len(parts) == count
    for part in parts:
        assert not [op for op in part.regions[0].block if op.attributes.get("fn") in ("select", "lt", "bit_and")]
    torch.manual_seed(0)
    given = [torch.randint(0, 7, s.shape) if s.dtype is torch.int64 else torch.randn(s.shape) for s in specs]
    wanted, found = given[-1].clone().fill_(float("nan")), given[-1].clone().fill_(float("nan"))
    run(whole, given[:-1], [wanted])
    for part in parts:
        run(part, given[:-1], [found])
    assert not wanted.isnan().any() and torch.equal(found, wanted)


def test_programs_are_shared_out_where_there_are_enough_tensors() -> None:
    many, few = kernel(2, 1, 4, 3), kernel(*[2] * (FEWEST - 1))
    family = Family(many, specs_of(many))
    first = configs(family)[0]
    assert isinstance(first, Cases)
    (function,) = family.generate(first).functions
    assert function.grid == 4 and not Family(few, specs_of(few)).cases
