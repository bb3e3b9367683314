"""Which dimensions of a kernel are rows, what is summed along and across them, and what one walk cannot do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from wholestep.dialects.loop import NoSchedule, Reduce, Schedule, schedule, varying
from wholestep.dialects.step import StepBuilder, tensor_type
from wholestep.ir import add_function, finish_function, module
from wholestep.ir.core import Op
from wholestep.transforms.loops import NotLoops, lowered

from .programs import Drawn


def kernel(shapes: list[tuple[int, ...]], build: Any) -> Op:
    function = add_function(module(), "main", [tensor_type(torch.zeros(s)) for s in shapes])
    results = build(StepBuilder(function.regions[0].block), *function.regions[0].block.arguments)
    finish_function(function, results if isinstance(results, list) else [results])
    return lowered(function)


def walk(shapes: list[tuple[int, ...]], build: Any) -> Schedule:
    return schedule(kernel(shapes, build))


def test_pointwise_has_no_rows() -> None:
    found = walk([(4, 6)], lambda b, x: b.tanh(x))
    assert (found.outer, found.row, found.along, found.across) == ((0, 1), (), (), ())


def test_a_softmax_walks_rows() -> None:
    found = walk([(4, 6)], lambda b, x: b.softmax(x, dim=1))
    assert (found.outer, found.row) == ((0,), (1,))
    assert [r.attributes["kind"] for r in found.along] == ["max", "sum"] and not found.across


def test_a_softmax_along_the_first_dimension() -> None:
    found = walk([(4, 6)], lambda b, x: b.softmax(x, dim=0))
    assert (found.sizes[found.outer[0]], found.sizes[found.row[0]]) == (6, 4)


def test_column_sums_are_finished_by_a_second_kernel() -> None:
    found = walk([(5, 6)], lambda b, x: b.mul(b.sum(x, dims=(0,)), 0.5))
    assert len(found.across) == 1 and found.row == (1,) and found.outer == (0,)
    assert {op.name for op in found.after} == {"loop.apply", "loop.store"}


def test_row_and_column_sums_from_one_read() -> None:
    found = walk([(5, 6)], lambda b, x: [b.softmax(x, dim=1), b.sum(x, dims=(0,))])
    assert len(found.along) == 2 and len(found.across) == 1 and found.row == (1,)


def test_a_sum_of_everything() -> None:
    found = walk([(5, 6)], lambda b, x: b.sum(x, dims=(0, 1)))
    assert len(found.along) + len(found.across) == 1


@pytest.mark.parametrize(
    ("shapes", "build", "why"),
    [
        ([(4, 6)], lambda b, x: b.add(b.softmax(x, dim=0), b.softmax(x, dim=1)), "along different dimensions"),
        (
            [(4, 6), (6,)],
            lambda b, x, w: b.add(b.softmax(x, dim=1), b.softmax(w, dim=0)),
            "belongs into a kernel before",
        ),
        (
            [(4, 6)],
            lambda b, x: [b.softmax(x, dim=1), b.sum(b.exp(b.sum(x, dims=(0,))), dims=(0,))],
            "what another sum over all rows gives",
        ),
        ([(4, 6, 5)], lambda b, x: [b.softmax(x, dim=2), b.sum(x, dims=(0,))], "some of the rows only"),
        ([(4,), (6,)], lambda b, x, w: b.add(b.sum(x, dims=(0,)), b.sum(w, dims=(0,))), "a reduction along a row"),
        ([(4, 6)], lambda b, x: b.mul(b.amax(x, dims=(0,)), b.sum(x, dims=(0, 1))), "a reduction along a row"),
        ([(4, 6)], lambda b, x: b.div(x, b.sum(b.sum(b.exp(x), dims=(0,), keepdim=True), dims=(1,), keepdim=True)), ""),
    ],
)
def test_what_one_walk_cannot_do(shapes: list[tuple[int, ...]], build: Any, why: str) -> None:
    made = kernel(shapes, build)
    if why:
        with pytest.raises(NoSchedule, match=why):
            schedule(made)
    else:  # two sums of which one is over the other: refused, or one row of everything
        try:
            found = schedule(made)
        except NoSchedule as error:
            assert str(error)
        else:
            assert not found.outer


def test_what_a_schedule_promises_holds_for_random_programs() -> None:
    """Every dimension is outer or of the row; a sum along the row reduces just the row, the others all outer ones;
    nothing that is stored before the end needs a sum over all rows, and nothing at the end one along a row."""
    seen = 0
    for seed in range(400):
        try:
            made = lowered(Drawn(seed).function)
            found = schedule(made)
        except (NotLoops, NoSchedule):
            continue
        seen += 1
        dims = varying(made)
        walked = {d for value in dims.values() for d in value}
        assert set(found.outer) | set(found.row) >= walked and not set(found.outer) & set(found.row)
        reductions = [op for op in made.regions[0].block if op.definition is Reduce]
        assert sorted(map(id, reductions)) == sorted(map(id, (*found.along, *found.across)))
        for op in found.along:
            assert set(op.attributes["dims"]) == set(found.row)
        for op in found.across:
            assert set(op.attributes["dims"]) >= set(found.outer)
        late = {r for op in found.across for r in op.results}
        for op in made.regions[0].block:
            if op not in found.across and any(v in late for v in op.operands):
                assert op in found.after and op not in found.along
                late.update(op.results)
                for result in op.results:
                    assert not dims[result] & set(found.outer), (
                        "what comes after all rows would have to be known in them"
                    )
                known = [v for v in op.operands if v not in late]
                while known:  # what else the end needs is there without the rows
                    value = known.pop()
                    assert value.op not in found.along
                    known += [] if value.op is None else value.op.operands
    assert seen > 250
