"""Results over the memory of operands: kernels run number by number, walk after walk, on memory that is really shared.

The interpreter below is as unkind as a generated kernel may be: every walk over a row reads its operands again, points
come in any order, and a result is written as soon as it is known. What is looked up once per row is read before it.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.dialects.loop.programs import Drawn
from tests.dialects.loop.provider import LoopReference, registered
from tests.runtime.runs import adamw, data, fresh
from wholestep.backends.generated import overwritable, region_of, walks_before
from wholestep.backends.kernels import Spec
from wholestep.backends.providers import Launcher, Region
from wholestep.dialects.loop import (
    Apply,
    Constant,
    Index,
    Load,
    NoSchedule,
    Random,
    Reduce,
    Store,
    outputs_of,
    schedule,
    varying,
)
from wholestep.dialects.loop.reference import _FUNCTIONS, run, wide
from wholestep.dialects.loop.schedule import stored_along
from wholestep.dialects.step import StepBuilder, tensor_type, torch_dtype
from wholestep.dialects.strides import row_major
from wholestep.ir import add_function, finish_function, module
from wholestep.ir.core import Op, Value
from wholestep.transforms.loops import NotLoops, lowered, points

CPU = torch.device("cpu")


class Walker:
    """Runs a kernel point by point in walks; memory of results may be that of operands."""

    def __init__(self, kernel: Op, tensors: list[torch.Tensor], seed: int):
        self.block = kernel.regions[0].block
        self.tensors = dict(zip(self.block.arguments, tensors, strict=True))
        self.walk, self.level = schedule(kernel), walks_before(kernel)
        self.pick = random.Random(seed)
        self.ops = [op for op in self.block if op.results]
        self.stores = [op for op in self.block if op.definition is Store]
        self.late = {op for op in self.walk.after}
        self.sums: dict[Op, dict[tuple[int, ...], list[Any]]] = {op: {} for op in self.walk.across}
        dims, row = varying(kernel), set(self.walk.row)
        self.once = {
            op
            for op in self.ops
            if op.definition is Load and op.attributes["dynamic"]
            if not self.level[op.results[0]] and not dims[op.results[0]] & row
        }

    def run(self) -> None:
        sizes = self.walk.sizes
        rows = list(itertools.product(*(range(sizes[d]) for d in self.walk.outer)))
        self.pick.shuffle(rows)
        last = max([self.level[v] for v in self.level], default=0)
        for row in rows:
            known = self.looked_up(row)  # and results of reductions along this row
            for level in range(last + 1):
                gathered: dict[Op, list[Any]] = {}
                inner = list(itertools.product(*(range(sizes[d]) for d in self.walk.row)))
                self.pick.shuffle(inner)
                for place in inner:
                    self.point(self.at(row, place), level, known, gathered, place is inner[-1])
                for op, numbers in gathered.items():
                    known[op] = combined(op, numbers)
        self.finish()

    def looked_up(self, row: tuple[int, ...]) -> dict[Op, Any]:
        at, numbers, found = self.at(row, (0,) * len(self.walk.row)), {}, {}
        for op in self.ops:
            if op.definition is not Reduce and all(v in numbers or v in self.tensors for v in op.operands):
                numbers[op.results[0]] = self.number(op, numbers, at)
                if op in self.once:
                    found[op] = numbers[op.results[0]]
        return found

    def at(self, row: tuple[int, ...], place: tuple[int, ...]) -> dict[int, int]:
        where = dict(zip(self.walk.outer, row, strict=True)) | dict(zip(self.walk.row, place, strict=True))
        return {d: where.get(d, 0) for d in range(len(self.walk.sizes))}

    def point(
        self, at: dict[int, int], level: int, known: dict[Op, Any], gathered: dict[Op, list[Any]], ends: bool
    ) -> None:
        numbers: dict[Value, Any] = {}
        for op in self.ops:
            if op in self.late:
                continue
            if op in self.sums:
                if op.operands[0] in numbers and self.level[op.operands[0]] == level:
                    key = tuple(at[d] for d in at if d not in op.attributes["dims"])
                    self.sums[op].setdefault(key, []).append(numbers[op.operands[0]])
            elif op in known:
                numbers[op.results[0]] = known[op]
            elif op in self.walk.along:
                if op.operands[0] in numbers:
                    gathered.setdefault(op, []).append(numbers[op.operands[0]])
            elif all(v in numbers or v in self.tensors for v in op.operands):
                numbers[op.results[0]] = self.number(op, numbers, at)
        for op in self.stores:
            if not ends and not stored_along(op) & set(self.walk.row):
                continue  # what a row gives is stored once, at its end
            if op not in self.late and self.level[op.operands[0]] == level and op.operands[0] in numbers:
                self.tensors[op.operands[1]][self.places(op, at)] = numbers[op.operands[0]]

    def places(self, op: Op, at: dict[int, int]) -> tuple[int, ...]:
        return tuple(sum(c * at[d] for d, c in enumerate(row[:-1])) + row[-1] for row in op.attributes["map"])

    def number(self, op: Op, numbers: dict[Value, Any], at: dict[int, int]) -> Any:
        kind = op.definition
        if kind is Index:
            return torch.tensor(at[op.attributes["dim"]])
        if kind is Constant:
            return torch.tensor(op.attributes["value"], dtype=wide(torch_dtype(op.attributes["dtype"])))
        if kind is Load:
            tensor = self.tensors[op.operands[0]]
            place = list(self.places(op, at))
            for dim, value in zip(op.attributes["dynamic"], op.operands[1:], strict=True):
                place[dim] += int(numbers[value])
            inside = all(0 <= i < n for i, n in zip(place, tensor.shape, strict=True))
            return (tensor[tuple(place)].clone() if inside else torch.zeros((), dtype=tensor.dtype)).to(
                wide(tensor.dtype)
            )
        assert kind is Apply and kind is not Random
        fn = op.attributes["fn"]
        made = (_FUNCTIONS.get(fn) or getattr(torch, fn))(*[numbers[v] for v in op.operands])
        return made.to(wide(torch_dtype(op.attributes["dtype"])))

    def finish(self) -> None:
        """What comes after sums over all rows: a second kernel, which may read any operand again.

        Each point that one of the sums keeps is a program of its own, which stores all that it knows.
        """
        if not self.sums:
            return
        ranges = [range(n) for n in self.walk.sizes]
        done: set[tuple[object, ...]] = set()
        gone = set(range(len(ranges))).intersection(*(op.attributes["dims"] for op in self.sums))
        for spot in itertools.product(*ranges):
            at = dict(enumerate(spot))
            program = tuple(i for d, i in at.items() if d not in gone)
            numbers: dict[Value, Any] = {}
            for op, kept in self.sums.items():
                key = tuple(at[d] for d in at if d not in op.attributes["dims"])
                if key in kept:
                    numbers[op.results[0]] = combined(op, kept[key])
            for op in self.ops:
                if op.definition is not Reduce and all(v in numbers or v in self.tensors for v in op.operands):
                    numbers.setdefault(op.results[0], self.number(op, numbers, at))
            for op in self.stores:
                if op in self.late and op.operands[0] in numbers and (op, program, self.places(op, at)) not in done:
                    done.add((op, program, self.places(op, at)))
                    self.tensors[op.operands[1]][self.places(op, at)] = numbers[op.operands[0]]


def combined(op: Op, numbers: list[Any]) -> Any:
    all_of = torch.stack(numbers)
    by_kind = {"sum": all_of.sum, "max": all_of.amax, "min": all_of.amin, "prod": all_of.prod}
    return by_kind[op.attributes["kind"]]()


def kernel_of(inputs: list[torch.Tensor], build: Any) -> tuple[Op, list[Spec], list[Spec]]:
    """A kernel with how its operands and results lie."""
    function = add_function(module(), "main", [tensor_type(x) for x in inputs])
    made = build(StepBuilder(function.regions[0].block), *function.regions[0].block.arguments)
    finish_function(function, made if isinstance(made, list) else [made])
    kernel = lowered(function)
    schedule(kernel)
    found = region_of(function, kernel, [Spec(tuple(x.shape), x.stride(), x.dtype) for x in inputs], CPU)
    return kernel, list(found.operands), list(found.results)


def claimed(inputs: list[torch.Tensor], build: Any) -> list[frozenset[int]]:
    return overwritable(*kernel_of(inputs, build))


def right_when_shared(
    kernel: Op, inputs: list[torch.Tensor], specs: list[Spec], over: dict[int, int], seed: int
) -> bool:
    """Whether the results are right when some of them (result -> operand) lie in the memory of operands."""
    wanted = [torch.empty_strided(s.shape, s.strides, dtype=s.dtype) for s in specs]
    run(kernel, inputs, wanted)
    own = [x.clone() for x in inputs]
    results = [
        own[over[i]].as_strided(s.shape, s.strides)
        if i in over
        else torch.empty_strided(s.shape, s.strides, dtype=s.dtype)
        for i, s in enumerate(specs)
    ]
    Walker(kernel, [*own, *results], seed).run()
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-11) for a, b in zip(results, wanted, strict=True))


def f64(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(math.prod(shape)))


def norm_beside_its_gradient(b: StepBuilder, x: Any, dy: Any) -> list[Any]:
    y, _, _ = b.layer_norm(x, None, None, trailing=1, eps=1e-5)
    return [y, row_gradient(b, y, dy)]


def row_gradient(b: StepBuilder, y: Any, dy: Any) -> Any:
    """dy - mean(dy) - y * mean(dy * y): two sums that wait for the norm's own."""
    one = b.mean(dy, dims=(1,), keepdim=True)
    two = b.mean(b.mul(dy, y), dims=(1,), keepdim=True)
    return b.sub(b.sub(dy, one), b.mul(y, two))


def running(b: StepBuilder, x: Any, old: Any) -> Any:
    """A running mean per column."""
    return b.add(b.mul(old, 0.9), b.mul(b.mean(x, dims=(0, 2)), 0.1))


def centred_by_the_old(b: StepBuilder, x: Any, old: Any) -> list[Any]:
    return [b.sub(x, b.reshape(old, shape=(1, 4, 1))), running(b, x, old)]


def totals_beside_columns(b: StepBuilder, x: Any, old: Any) -> list[Any]:
    """A loss to which another is added, beside the gradient of a bias: all columns' programs add it."""
    y = b.softmax(x, dim=1)
    return [b.add(b.sum(b.mul(y, y), dims=(0, 1)), old), b.sum(y, dims=(0,))]


def done_before_the_sums(b: StepBuilder, x: Any, old: Any, y: Any) -> list[Any]:
    """Numbers per column that do not wait for sums of columns, to which others are added when these are over."""
    twice = b.mul(y, 2.0)
    return [b.add(b.sum(x, dims=(0,)), old), twice, b.mul(x, b.reshape(twice, shape=(1, 4)))]


TARGETS = torch.tensor([2, 0, 3])


def loss_and_gradient(b: StepBuilder, x: Any, target: Any, **options: Any) -> list[Any]:
    """Cross entropy, which looks one number of each row up, and its gradient in the same kernel."""
    shape = x.type.shape
    flat = b.reshape(x, shape=(math.prod(shape[:-1]), shape[-1])) if len(shape) != 2 else x
    loss, logsumexp = b.cross_entropy(flat, target, reduction="sum", **options)
    seed = b.full(1.0, (), x.type.element)
    return [loss, b.cross_entropy_grad(seed, flat, target, logsumexp, reduction="sum", **options)]


def over_another_row(b: StepBuilder, x: Any, target: Any) -> Any:
    """The target is looked up in the row before: that row may have been written already."""
    before = b.concat([b.slice(x, dim=0, start=1, end=3), b.slice(x, dim=0, start=0, end=1)], dim=0)
    picked = b.gather(before, b.reshape(target, shape=(3, 1)), dim=1)
    return b.mul(b.softmax(x, dim=1), picked)


# name: inputs, the kernel, what each result may be written over
KERNELS: dict[str, tuple[list[torch.Tensor], Any, list[set[int]]]] = {
    "pointwise": ([f64(3, 4), f64(3, 4)], lambda b, x, y: b.mul(x, y), [{0, 1}]),
    "a shifted read": (
        [f64(5)],
        lambda b, x: b.add(x, b.pad(b.slice(x, dim=0, start=1, end=5), low=(0,), high=(1,), value=0.0)),
        [set()],
    ),
    "reversed": ([f64(5)], lambda b, x: b.flip(x, dims=(0,)), [set()]),
    "a read along one dimension": ([f64(4), f64(3, 4)], lambda b, x, y: b.mul(x, y), [{1}]),
    "softmax": ([f64(3, 4)], lambda b, x: b.softmax(x, dim=1), [{0}]),
    "stored before the sum is read": ([f64(3, 4)], lambda b, x: [b.relu(x), b.softmax(x, dim=1)], [set(), {0}]),
    "a row sum beside": ([f64(3, 4)], lambda b, x: [b.relu(x), b.sum(x, dims=(1,))], [None, set()]),
    "norm beside its gradient": ([f64(3, 4), f64(3, 4)], norm_beside_its_gradient, [set(), {0, 1}]),
    "column sums": ([f64(3, 4)], lambda b, x: [b.mul(x, 2.0), b.sum(x, dims=(0,))], [{0}, set()]),
    "a running mean": ([f64(3, 4, 2), f64(4)], running, [{1}]),
    "a running mean that rows are centred by": ([f64(3, 4, 2), f64(4)], centred_by_the_old, [None, set()]),
    "a total and what is added to it": (
        [f64(3, 4), f64()], lambda b, x, y: b.add(b.sum(b.softmax(x, dim=1), dims=(0, 1)), y), [{1}]
    ),
    "a total beside sums of columns": ([f64(3, 4), f64()], totals_beside_columns, [set(), set()]),
    "numbers per column before sums of columns": (
        [f64(3, 4), f64(4), f64(4)], done_before_the_sums, [{1}, set(), {0}]
    ),
    "a loss and its gradient": ([f64(3, 4), TARGETS], loss_and_gradient, [set(), {0}]),
    "a smoothed loss and its gradient": (
        [f64(3, 4), TARGETS],
        lambda b, x, t: loss_and_gradient(b, x, t, label_smoothing=0.1, ignore_index=0),
        [set(), {0}],
    ),
    "a loss of rows in two dimensions": ([f64(1, 3, 4), TARGETS], loss_and_gradient, [set(), {0}]),
    "what is looked up in another row": ([f64(3, 4), TARGETS], over_another_row, [set()]),
    "a shape that has changed": (
        [f64(2, 3, 4)], lambda b, x: b.softmax(b.reshape(x, shape=(6, 4)), dim=1), [{0}]
    ),
    "a transposition into the same shape": (
        [f64(2, 3, 4)], lambda b, x: b.reshape(b.transpose(x, order=(1, 0, 2)), shape=(6, 4)), [set()]
    ),
    "a scalar over everything": ([f64(3, 4), f64()], lambda b, x, y: b.mul(x, y), [{0}]),
    "a row written over one of many": (
        [f64(1, 4), f64(1, 4)],
        lambda b, x, y: [b.add(x, y), b.softmax(b.mul(x, y), dim=1)],
        [set(), {0, 1}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_what_may_be_written_over(name: str) -> None:
    inputs, build, allowed = KERNELS[name]
    for found, most in zip(claimed(inputs, build), allowed, strict=True):
        assert most is None or found == most
    kernel, _, specs = kernel_of(inputs, build)
    assert right_when_shared(kernel, inputs, specs, {}, 0)  # the walker itself is right
    for result, over in enumerate(claimed(inputs, build)):
        for operand in over:
            assert right_when_shared(kernel, inputs, specs, {result: operand}, 1), f"result {result} over {operand}"


def test_the_walker_sees_what_a_naive_rule_would_do() -> None:
    """Same shape and type is not enough: the first result of these would spoil what is read later."""
    for name in ("stored before the sum is read", "norm beside its gradient", "reversed", "a shifted read"):
        inputs, build, _ = KERNELS[name]
        kernel, _, specs = kernel_of(inputs, build)
        spoilt = [not right_when_shared(kernel, inputs, specs, {0: o}, s) for o in range(len(inputs)) for s in range(4)]
        assert any(spoilt), name


def test_other_layouts_and_types_are_not_taken() -> None:
    x = f64(4, 4)
    assert claimed([x], lambda b, x: b.neg(x)) == [{0}]
    assert claimed([x, f64(4, 4).t()], lambda b, x, y: b.add(x, y)) == [{0}]
    assert claimed([x[:, :3], f64(4, 3)], lambda b, x, y: b.add(x, y)) == [{1}]
    assert claimed([f64(1, 4).expand(4, 4)], lambda b, x: b.neg(x)) == [set()]
    assert claimed([x], lambda b, x: b.gt(x, 0.0)) == [set()]


def test_heads_of_an_attention_lie_side_by_side() -> None:
    """What it makes is read row by row: by the product behind it, and where heads are put together. Numbers per row
    are not; whoever asks for another layout gets it."""
    type = tensor_type(torch.empty(2, 3, 5, 4))
    function = add_function(module(), "region", [type, type, type])
    block = function.regions[0].block
    b = StepBuilder(block)
    out, lse = b.attention(b.mul(block.arguments[0], 2.0), *block.arguments[1:], scale=1.0)
    finish_function(function, [out, lse])
    specs = [Spec(type.shape, row_major(type.shape), torch.float32)] * 3
    found = region_of(function, None, specs, torch.device("cpu"))
    assert [s.strides for s in found.results] == [(60, 4, 12, 1), (15, 5, 1)]
    asked = region_of(function, None, specs, torch.device("cpu"), [(60, 20, 4, 1), None])
    assert [s.strides for s in asked.results] == [(60, 20, 4, 1), (15, 5, 1)]


def test_random_kernels_stay_right_on_shared_memory() -> None:
    tried = 0
    for seed in range(500):
        drawn = Drawn(seed, ops=3 + seed % 5)
        try:
            kernel = lowered(drawn.function)
            schedule(kernel)
        except (NotLoops, NoSchedule):
            continue
        if points(kernel) > 300:
            continue
        specs = [Spec(v.type.shape, row_major(v.type.shape), torch.float64) for v in drawn.results]
        if any(v.type.element.text != "f64" for v in drawn.results):
            continue
        given = [Spec(tuple(x.shape), x.stride(), x.dtype) for x in drawn.inputs]
        assert len(outputs_of(kernel)) == len(specs)
        over = overwritable(kernel, given, specs)
        taken: dict[int, int] = {}
        for result, operands in enumerate(over):
            free = operands - set(taken.values())
            if free:
                taken[result] = min(free)
        if not taken:
            continue
        tried += 1
        assert right_when_shared(kernel, drawn.inputs, specs, {}, seed), f"seed {seed}: the walker"
        assert right_when_shared(kernel, drawn.inputs, specs, taken, seed), f"seed {seed}: {drawn.names} {taken}"
    assert tried > 40, tried


class Walked(LoopReference):
    """Kernels run by the walker, on the plan's own memory."""

    name = "walked"
    shared = 0

    def launcher(self, region: Region) -> Launcher:
        def launch(*tensors: torch.Tensor) -> None:
            operands = {x.data_ptr() for x in tensors[: len(region.operands)]}
            Walked.shared += any(y.data_ptr() in operands for y in tensors[len(region.operands) :])
            Walker(region.kernel, list(tensors), 1).run()

        return launch


def test_a_step_is_right_when_its_kernels_are_walked() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 4), nn.Softmax(1))

    def losses(**options: Any) -> list[float]:
        model, x = fresh(net).double(), data(3, 3).double()
        step = ws.compile(model, lambda m, x: (m(x) - x.sum()).pow(2).mean(), adamw(model), (x,), **options)
        return [float(step(x)) for _ in range(2)]

    Walked.shared = 0
    with registered(Walked):
        found = losses(providers=["aten", "walked"], tune=False)
    assert Walked.shared > 4  # results did take the memory of operands
    torch.testing.assert_close(found, losses(), rtol=1e-9, atol=1e-9)
