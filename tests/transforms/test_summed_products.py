"""`summed_products`: outputs of layers that are added up are one product of what the layers read, side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench.bytes import planned
from tests.runtime.runs import data
from tests.transforms.test_fuse import ops_of, program, root_of
from wholestep.bench.workload import Case, build
from wholestep.dialects.step import StepBuilder
from wholestep.ir import BF16, F32, TensorType, verify
from wholestep.ir.core import Op, Value
from wholestep.runtime.executor import Executable
from wholestep.transforms import summed_products  # noqa: F401  (it registers)
from wholestep.transforms.opportunity import take, transformations

ROWS, INNER, OUTER, COUNT = 32, 8, 24, 4
Layer = Callable[[StepBuilder, Value, Value, Value], Value]


def skips(b: StepBuilder, *given: Value, layer: Layer | None = None, count: int = COUNT, first: Any = 0) -> Value:
    """Layers, each on what the one before has made, whose second outputs are added up."""
    x, *rest = given
    total = first if not isinstance(first, int) else None
    for weight, bias in list(zip(rest[::2], rest[1::2], strict=True))[:count]:
        x = b.tanh(x)
        y = (layer or linear)(b, x, weight, bias)
        total = b.add(y, 0.0) if total is None else b.add(total, y)
    return total


def linear(b: StepBuilder, x: Value, weight: Value, bias: Value) -> Value:
    return b.reshape(b.contract(x, weight, bias, spec="mk,nk->mn"), shape=(4, ROWS // 4, OUTER))


def types(element: Any = F32, inner: int = INNER) -> list[TensorType]:
    layer = [TensorType((OUTER, inner), element), TensorType((OUTER,), element)]
    return [TensorType((ROWS, inner), element), *layer * COUNT]


def inputs() -> list[torch.Tensor]:
    return [data(*t.shape, seed=i) for i, t in enumerate(types())]


def reasons(function: Op) -> list[str]:
    return [o.why_not for o in transformations()["summed_products"].find(root_of(function))]


@pytest.mark.parametrize("others", [False, True])
def test_one_product_of_what_layers_read(others: bool) -> None:
    def built(b: StepBuilder, x: Value, *rest: Value) -> Value:
        if not others:
            return skips(b, x, *rest)
        return b.add(
            skips(b, x, *rest), b.reshape(b.contract(x, rest[0], spec="mk,nk->nm"), shape=(4, ROWS // 4, OUTER))
        )

    function = program(types(), built)
    wanted = Executable(function)(inputs())
    (found,) = transformations()["summed_products"].find(root_of(function))
    weights = COUNT * OUTER * INNER * 4
    assert not found.why_not and found.change.bytes == 2 * weights - 2 * COUNT * ROWS * OUTER * 4
    assert take(root_of(function), ["summed_products"])
    verify(root_of(function))
    names = [op.name.removeprefix("step.") for op in ops_of(function)]
    assert names.count("contract") == 1 + others and names.count("concat") == 2 and names.count("tanh") == COUNT
    (product,) = (op for op in ops_of(function) if op.name == "step.contract" and op.addend is not None)
    assert product.lhs.type.shape == (ROWS, COUNT * INNER) and product.rhs.type.shape == (OUTER, COUNT * INNER)
    torch.testing.assert_close(Executable(function)(inputs())[0], wanted[0], rtol=1e-5, atol=1e-5)
    assert not reasons(function)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("last_first", [False, True])
def test_gradients_of_their_weights_are_one_product(turned: bool, last_first: bool) -> None:
    """Whichever comes first in the program, and on whichever side what they share stands."""

    def built(b: StepBuilder, x: Value, *rest: Value) -> list[Value]:
        read: list[Value] = []

        def layer(b: StepBuilder, x: Value, weight: Value, bias: Value) -> Value:
            read.append(x)
            return linear(b, x, weight, bias)

        total = skips(b, x, *rest, layer=layer)
        g = b.reshape(b.tanh(total), shape=(ROWS, OUTER))
        made = {}
        for number, each in sorted(enumerate(read), reverse=last_first):
            made[number] = b.contract(each, g, spec="mk,mn->kn") if turned else b.contract(g, each, spec="mn,mk->nk")
        return [total, *(made[number] for number in range(COUNT))]

    function = program(types(), built)
    wanted = Executable(function)(inputs())
    (found,) = transformations()["summed_products"].find(root_of(function))
    weights, wide = COUNT * OUTER * INNER * 4, ROWS * OUTER * 4
    assert found.change.bytes == 2 * weights - 2 * COUNT * wide - (COUNT - 1) * wide
    assert take(root_of(function), ["summed_products"])
    verify(root_of(function))
    assert [op.name for op in ops_of(function)].count("step.contract") == 2
    for mine, other in zip(Executable(function)(inputs()), wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["one is missing", "others are shared", "before the sum"])
def test_products_that_are_no_such_gradients_stay(kind: str) -> None:
    def built(b: StepBuilder, x: Value, *rest: Value) -> list[Value]:
        read: list[Value] = []

        def layer(b: StepBuilder, x: Value, weight: Value, bias: Value) -> Value:
            read.append(x)
            return linear(b, x, weight, bias)

        early = b.full(0.5, (ROWS, OUTER), F32)
        if kind == "before the sum":
            made: list[Value] = []

            def eager(b: StepBuilder, x: Value, weight: Value, bias: Value) -> Value:
                made.append(b.contract(early, x, spec="mn,mk->nk"))
                return linear(b, x, weight, bias)

            return [skips(b, x, *rest, layer=eager), *made]
        total = skips(b, x, *rest, layer=layer)
        g = [b.reshape(b.tanh(total), shape=(ROWS, OUTER)) for _ in read]
        if kind == "others are shared":
            g = [b.mul(v, float(n + 2)) for n, v in enumerate(g)]
        count = COUNT - (kind == "one is missing")
        made = [b.contract(v, each, spec="mn,mk->nk") for v, each in list(zip(g, read, strict=True))[:count]]
        return [total, *made]

    function = program(types(), built)
    wanted = Executable(function)(inputs())
    assert take(root_of(function), ["summed_products"])
    verify(root_of(function))
    kept = {"one is missing": COUNT - 1}.get(kind, COUNT)
    assert [op.name for op in ops_of(function)].count("step.contract") == 1 + kept
    for mine, other in zip(Executable(function)(inputs()), wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def changed(layer: Layer) -> Callable[..., Value]:
    return lambda b, *given: skips(b, *given, layer=layer)


REFUSED: dict[str, tuple[Any, str]] = {
    "two": (lambda b, *given: skips(b, *given, count=2), ""),
    "turned": (changed(lambda b, x, w, a: b.contract(b.transpose(x, order=(1, 0)), w, a, spec="km,nk->mn")), "columns"),
    "one input": (
        lambda b, x, *rest: b.add(b.add(*(linear(b, b.tanh(x), w, a) for w, a in ((rest[0], rest[1]),) * 2)), 0.0),
        "",
    ),
    "read by others": (lambda b, *given: read_by_others(b, *given), ""),
    "by a library": (
        changed(lambda b, x, w, a: linear(b, b.contract(x, b.full(0.5, (INNER, INNER), F32), spec="mk,kn->mn"), w, a)),
        "library",
    ),
}


def read_by_others(b: StepBuilder, *given: Value) -> list[Value]:
    kept: list[Value] = []

    def layer(b: StepBuilder, x: Value, weight: Value, bias: Value) -> Value:
        kept.append(linear(b, x, weight, bias))
        return kept[-1]

    return [skips(b, *given, layer=layer), *kept]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_left_alone(name: str) -> None:
    build_it, why = REFUSED[name]
    function = program(types(), build_it)
    found = reasons(function)
    assert (why in found[0]) if why else not found
    assert not take(root_of(function), ["summed_products"])


def test_rows_that_would_not_be_aligned_or_wait_in_more_memory() -> None:
    assert "16 bytes" in reasons(program(types(BF16, inner=4), skips))[0]
    assert "more memory" in reasons(program(types(inner=2 * OUTER), skips))[0]


def test_a_plan_has_it_written_side_by_side() -> None:
    """WaveNet on a GPU that is not here: nothing is copied for its skip connections."""
    found = planned(build(Case("wavenet", "small"), "cpu"))
    ops = list(found.function.regions[0].block)
    (wide,) = (i for i, op in enumerate(ops) if op.name == "step.concat" and op.result.type.shape[-1] == 6 * 16)
    assert wide not in [launch.op for launch in found.plan.launches]
