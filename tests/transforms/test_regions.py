"""Pieces of programs as kernel bodies: what goes in and out, which bodies are equal, what is refused and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dialects.loop.programs import Drawn
from wholestep.dialects.step import StepBuilder
from wholestep.ir import BOOL, F32, F64, I64, TensorType, add_function, finish_function, module, verify
from wholestep.ir.core import Op, Value
from wholestep.runtime.executor import Executable
from wholestep.transforms.regions import Bodies, Piece, base, body_of, is_source, is_view, piece_of

MATRIX = TensorType((6, 8), F32)


def program(types: list[TensorType], build: Any) -> Op:
    function = add_function(module(), "main", types)
    results = build(StepBuilder(function.regions[0].block), *function.regions[0].block.arguments)
    finish_function(function, results if isinstance(results, list) else [results])
    return function


def work(function: Op) -> list[Op]:
    """The ops that are no views, constants or the end."""
    block = function.regions[0].block
    return [op for op in block if not (op.definition.terminator or is_view(op) or is_source(op))]


def piece(function: Op, *members: Op) -> Piece:
    position = {op: i for i, op in enumerate(function.regions[0].block)}
    return piece_of(members or work(function), position)


def names(values: list[Value]) -> list[str]:
    return [v.op.name if v.op is not None else f"argument {v.index}" for v in values]


def test_constants_and_views_come_along() -> None:
    function = program([MATRIX], lambda b, x: b.exp(b.mul(b.transpose(x, order=(1, 0)), 0.5)))
    found = piece(function)
    assert [op.name for op in found.ops].count("step.transpose") == 1
    assert names(found.inputs) == ["argument 0"] and names(found.outputs) == ["step.exp"]


def test_a_slice_of_something_else_is_left_to_strides() -> None:
    function = program([MATRIX], lambda b, x: b.exp(b.slice(x, dim=0, start=1, end=3)))
    assert names(piece(function).inputs) == ["step.slice"]
    beside = program([MATRIX], lambda b, x: [b.exp(b.slice(x, dim=0, start=1, end=3)), b.tanh(x)])
    assert names(piece(beside).inputs) == ["argument 0"]  # read whole anyway


def test_what_is_read_through_a_view_outside_is_an_output() -> None:
    def build(b: StepBuilder, x: Any) -> Any:
        y = b.tanh(x)
        turned = b.transpose(y, order=(1, 0))
        return [b.exp(turned), b.reshape(turned, shape=(48,))]

    found = piece(program([MATRIX], build))
    assert names(found.outputs) == ["step.tanh", "step.exp"]


def test_base_looks_through_every_view() -> None:
    function = program([MATRIX], lambda b, x: b.reshape(b.transpose(x, order=(1, 0)), shape=(4, 12)))
    last = function.regions[0].block.last
    assert last is not None and base(last.operands[0]) is function.regions[0].block.arguments[0]


def test_bodies_compute_what_the_piece_computes() -> None:
    """Any stretch of a random program, cut out and run alone on what it reads."""
    cut = 0
    for seed in range(60):
        drawn = Drawn(seed, ops=10)
        whole = [op for op in drawn.function.regions[0].block if not op.definition.terminator]
        values: dict[Value, torch.Tensor] = {}
        everything = program_of_all(drawn)
        for value, tensor in zip(
            [*drawn.function.regions[0].block.arguments, *(r for op in whole for r in op.results)],
            [*drawn.inputs, *Executable(everything)(drawn.inputs)],
            strict=True,
        ):
            values[value] = tensor
        members = work(drawn.function)[2:7]
        if not members:
            continue
        found = piece(drawn.function, *members)
        if not found.outputs:
            continue
        body = body_of(found)
        verify(body.parent.parent.parent)
        for mine, value in zip(Executable(body)([values[v] for v in found.inputs]), found.outputs, strict=True):
            assert torch.equal(mine, values[value]), seed
        cut += 1
    assert cut > 40


def program_of_all(drawn: Drawn) -> Op:
    """The same program, giving back every value."""
    function = add_function(module(), "all", [a.type for a in drawn.function.regions[0].block.arguments])
    block = function.regions[0].block
    mapping = dict(zip(drawn.function.regions[0].block.arguments, block.arguments, strict=True))
    made: list[Value] = []
    for op in drawn.function.regions[0].block:
        if not op.definition.terminator:
            copy = op.clone(mapping)
            block.append(copy)
            mapping.update(zip(op.results, copy.results, strict=True))
            made += copy.results
    finish_function(function, made)
    return function


# ---- equal bodies ----------------------------------------------------------------------------------------------------


def test_equal_pieces_have_one_body() -> None:
    bodies = Bodies()
    one = bodies(piece(program([MATRIX], lambda b, x: b.exp(b.tanh(x)))))
    assert bodies(piece(program([MATRIX], lambda b, x: b.exp(b.tanh(x))))) is one
    others: list[tuple[list[TensorType], Any]] = [
        ([TensorType((6, 9), F32)], lambda b, x: b.exp(b.tanh(x))),
        ([TensorType((6, 8), F64)], lambda b, x: b.exp(b.tanh(x))),
        ([MATRIX], lambda b, x: b.tanh(b.exp(x))),
        ([MATRIX], lambda b, x: (lambda y: [b.exp(y), y])(b.tanh(x))),  # the inner value is wanted as well
    ]
    for types, build in others:
        assert bodies(piece(program(types, build))) is not one


def test_operands_that_are_the_same_are_not_two() -> None:
    bodies = Bodies()
    two = bodies(piece(program([MATRIX, MATRIX], lambda b, x, y: b.add(b.exp(x), y))))
    same = bodies(piece(program([MATRIX, MATRIX], lambda b, x, y: b.add(b.exp(x), x))))
    assert two is not same
    assert len(two.function.regions[0].block.arguments) == 2 and len(same.function.regions[0].block.arguments) == 1


def test_what_is_reduced_is_part_of_the_body() -> None:
    """Sums of other lengths have results of the same type."""
    bodies = Bodies()
    found = [bodies(piece(program([TensorType((n, 4), F32)], lambda b, x: b.exp(b.sum(x, dims=(0,)))))) for n in (3, 5)]
    assert found[0] is not found[1]


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("types", "build", "why"),
    [
        ([TensorType((0, 4), F32)], lambda b, x: b.exp(x), "an empty tensor"),
        ([MATRIX], lambda b, x: b.sort(x, dim=1, descending=False)[0], "sort cannot be written as loops"),
        (
            [TensorType((6, 4), F32), TensorType((4, 6), F32)],
            lambda b, x, y: b.exp(b.reshape(b.add(x, b.transpose(y, order=(1, 0))), shape=(8, 3))),
            "a reshape mixes dimensions",
        ),
        ([MATRIX, TensorType((5,), F32)], lambda b, x, y: [b.exp(x), b.exp(y)], "they walk different dimensions"),
        ([TensorType((2, 1 << 18), F32)], lambda b, x: b.softmax(x, dim=1), "a row of 262,144 elements"),
        ([MATRIX], lambda b, x: b.add(b.softmax(x, dim=0), b.softmax(x, dim=1)), "along different dimensions"),
    ],
)
def test_refusals_say_why(types: list[TensorType], build: Any, why: str) -> None:
    found = Bodies()(piece(program(types, build)))
    assert why in found.why_not and found.kernel is None


def test_too_many_tensors_or_ops() -> None:
    def many(b: StepBuilder, *xs: Any) -> Any:
        total = xs[0]
        for x in xs[1:]:
            total = b.add(total, x)
        return total

    assert "more than 30 tensors" in Bodies()(piece(program([MATRIX] * 31, many))).why_not
    assert not Bodies()(piece(program([MATRIX] * 29, many))).why_not

    def long(b: StepBuilder, x: Any) -> Any:
        for _ in range(250):
            x = b.tanh(x)
        return x

    assert "more than 240 ops" in Bodies()(piece(program([MATRIX], long))).why_not


def test_integers_and_booleans_are_no_reason() -> None:
    def build(b: StepBuilder, x: Any, m: Any) -> Any:
        return b.select(m, b.add(x, 1), x)

    types = [TensorType((6, 8), I64), TensorType((6, 8), BOOL)]
    assert not Bodies()(piece(program(types, build))).why_not


# ---- pieces that differ in sizes alone -------------------------------------------------------------------------------


def normalised(b: StepBuilder, x: Value) -> Value:
    """Something with a reduction whose result comes back to its row."""
    return b.mul(x, b.exp(b.sum(x, dims=(1,), keepdim=True)))


def summed(b: StepBuilder, x: Value) -> list[Value]:
    return [b.silu(x), b.sum(b.mul(x, x), dims=(0,))]


def transposed(b: StepBuilder, x: Value) -> Value:
    return b.sum(b.add(x, b.transpose(b.exp(x), order=(1, 0))), dims=(1,))


@pytest.mark.parametrize(
    ("build", "shapes", "looked_at"),
    [
        (normalised, [(6, 8), (5, 9), (5, 200_000), (9, 5)], 1),
        (summed, [(6, 8), (12, 3), (4, 7)], 1),
        (transposed, [(6, 6), (7, 7)], 2),  # the reason says the sizes
        (lambda b, x: b.exp(b.reshape(x, shape=(x.type.size,))), [(6, 8), (5, 9)], 2),
        (lambda b, x: b.exp(b.reshape(x, shape=(6, 1, 8))), [(6, 8)], 1),
        (lambda b, x: b.exp(b.sum(x, dims=(1,))), [(6, 8), (6, 1), (1, 6)], 3),
    ],
)
def test_the_verdict_is_the_same_as_with_a_look_at_each_size(
    build: Any, shapes: list[tuple[int, int]], looked_at: int
) -> None:
    bodies = Bodies()
    for shape in shapes:
        found = piece(program([TensorType(shape, F32)], build))
        assert bodies.why_not(found) == Bodies()(found).why_not
    assert len(bodies.known) == looked_at


def test_which_value_is_larger_is_part_of_the_form() -> None:
    bodies = Bodies()
    for a, b in (((64, 2), (2, 64)), ((2, 64), (64, 2))):
        types = [TensorType(a, F32), TensorType((a[0], 1), F32), TensorType(b, F32)]
        function = program(types, lambda b, x, y, z: [b.mul(x, y), b.sum(b.mul(z, z), dims=(1,))])
        assert bodies.why_not(piece(function)) == Bodies()(piece(function)).why_not
