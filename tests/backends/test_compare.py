"""Which results are right: ATen's, and those that are nearer to the ops in f32 than ATen's rounding; nothing else.

The region is what a residual block's backward does: a relu's mask from a sum that ATen rounds, and sums under it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from wholestep.backends import compare, made_up
from wholestep.backends.choose import Choices
from wholestep.backends.compare import Exact, difference, in_f32
from wholestep.backends.generated import region_of
from wholestep.backends.kernels import Spec
from wholestep.backends.made_up import neutral_inputs
from wholestep.backends.providers import (
    Aten,
    Launcher,
    Offer,
    Progress,
    Provider,
    Region,
    copying,
    op_by_op,
)
from wholestep.dialects.step import StepBuilder, tensor_type
from wholestep.dialects.step.sources import RANDOM_KEY
from wholestep.dialects.strides import row_major
from wholestep.ir import add_function, finish_function, module
from wholestep.ir.types import BF16, F32, TensorType
from wholestep.transforms.loops import lowered

CPU = torch.device("cpu")
ROWS, COLUMNS = 1 << 13, 64


def region(build: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Region:
    types = [tensor_type(torch.empty(shape, dtype=dtype)) for shape in shapes]
    function = add_function(module(), "region", types)
    finish_function(function, build(StepBuilder(function.regions[0].block), *function.regions[0].block.arguments))
    return region_of(function, lowered(function), [Spec(s, row_major(s), dtype) for s in shapes], CPU)


def masked(b: StepBuilder, x: Any, y: Any, dy: Any) -> list[Any]:
    """relu((1.7 x + 2) + (y - 2)): the gradient of its argument, with sums over rows, plain and by x."""
    s = b.add(b.add(b.mul(x, 1.7), 2.0), b.sub(y, 2.0))
    d = b.select(b.gt(s, 0.0), dy, b.mul(dy, 0.0))
    return [d, b.sum(d, dims=(0,)), b.sum(b.mul(d, x), dims=(0,))]


def block(dtype: torch.dtype = torch.bfloat16) -> Region:
    return region(masked, *[(ROWS, COLUMNS)] * 3, dtype=dtype)


def by_hand(x: torch.Tensor, y: torch.Tensor, dy: torch.Tensor, scale: float = 1.7, wrong: float = 0.0) -> list[Any]:
    """What `masked` says in f32, rounded once. wrong: the share of the mask that is inverted."""
    x, y, dy = x.float(), y.float(), dy.float()
    mask = (x * scale + y > 0) ^ (torch.rand(x.shape, generator=torch.Generator().manual_seed(3)) < wrong)
    d = torch.where(mask, dy, 0.0)
    return [t.bfloat16() for t in (d, d.sum(0), (d * x).sum(0))]


class Precise(Provider):
    """Three ways to run the region, all of them by hand."""

    name, devices = "precise", ("cpu",)

    def claims(self, region: Region) -> str:
        return "" if len(region.operands) == 3 else "it has other operands"

    def offers(self, region: Region) -> list[Offer]:
        return [Offer(name, f"{name} {region.key}") for name in ("first", "second", "third")]

    def build(self, offers: Sequence[Offer], report: Progress | None = None) -> dict[str, Launcher | Exception]:
        return {o.key: copying(by_hand, 3) for o in offers}


def test_a_kernel_that_rounds_less_than_aten_is_right() -> None:
    """And ATen's own 16 bits are not what it is compared with: those are too far away."""
    wanted = block()
    inputs = neutral_inputs(wanted, False)
    rounded, ours = op_by_op(wanted)(*inputs), by_hand(*inputs)
    why = difference(ours, rounded, True)
    assert "result 1 is off by" in why
    assert Exact(wanted, inputs, rounded).judge(ours, why) == ""
    choices = Choices(CPU, [Aten(), Precise()])
    choices.decide([wanted])
    assert choices.known[wanted.key].excluded == []


#: what a kernel may get wrong, of its operands and of its results
WRONG: dict[str, Callable[..., list[torch.Tensor]]] = {
    "2 % of the mask": lambda x, y, dy: by_hand(x, y, dy, wrong=0.02),
    "1 % of the mask, in sums alone": lambda x, y, dy: [by_hand(x, y, dy)[0], *by_hand(x, y, dy, wrong=0.01)[1:]],
    "a missing term": lambda x, y, dy: by_hand(x, torch.zeros_like(y), dy),
    "a missing factor": lambda x, y, dy: by_hand(x, y, dy, scale=1.0),
    "a factor that is off by little": lambda x, y, dy: by_hand(x, y, dy, scale=1.8),
    "the next row": lambda x, y, dy: by_hand(x, y.roll(1, 0), dy),
    "the next column in one result": lambda x, y, dy: [*by_hand(x, y, dy)[:2], by_hand(x, y, dy)[2].roll(1)],
    "rows left out at the end": lambda x, y, dy: [by_hand(x, y, dy)[0], *by_hand(x[:-512], y[:-512], dy[:-512])[1:]],
    "a sum of half the terms": lambda x, y, dy: [*by_hand(x, y, dy)[:2], by_hand(x[::2], y[::2], dy[::2])[2]],
    "nothing": lambda x, y, dy: [torch.zeros_like(t) for t in by_hand(x, y, dy)],
}


@pytest.fixture(scope="module")
def judged() -> tuple[list[torch.Tensor], Exact]:
    wanted = block()
    inputs = neutral_inputs(wanted, False)
    return inputs, Exact(wanted, inputs, op_by_op(wanted)(*inputs))


@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_kernel_is_wrong_by_both(how: str, judged: tuple[list[torch.Tensor], Exact]) -> None:
    inputs, exact = judged
    found = WRONG[how](*inputs)
    why = difference(found, exact.rounded, True)
    assert why.startswith("wrong") and exact.judge(found, why).startswith("wrong")


def test_as_far_as_aten_is_right_and_much_farther_is_not(judged: tuple[list[torch.Tensor], Exact]) -> None:
    """A kernel that rounds at other places than ATen: on the way, to nearest."""
    inputs, exact = judged
    x, y, dy = (t.float() for t in inputs)
    for steps, right in ((256, True), (8, False)):  # steps in which the product is rounded
        product = torch.round(x * 1.7 * steps / 4) / (steps / 4)
        d = torch.where(product + y > 0, dy, 0.0)
        found = [t.bfloat16() for t in (d, d.sum(0), (d * x).sum(0))]
        assert difference(found, exact.rounded, True)
        assert (exact.judge(found, "why") == "") == right


def test_noise_is_no_excuse() -> None:
    """Where ATen's result is nothing but rounding, what has nothing to do with it is not taken for right."""
    wanted = region(lambda b, x, y: [b.sub(b.add(b.mul(x, 300.0), y), b.mul(x, 300.0))], (512, 8), (512, 8))
    inputs = neutral_inputs(wanted, False)
    exact = Exact(wanted, inputs, op_by_op(wanted)(*inputs))
    assert exact.judge([inputs[1]], "why") == ""
    for found in (torch.zeros_like(inputs[1]), -inputs[1], inputs[1].roll(1, 0)):
        assert exact.judge([found], "why").startswith("wrong")


def test_f32_is_made_once_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Region] = []
    true = compare.in_f32
    monkeypatch.setattr(compare, "in_f32", lambda r: made.append(r) or true(r))
    wanted = block()
    Choices(CPU, [Aten(), Precise()], products=True).decide([wanted])
    assert len(made) == 2  # the best guess, then the other two
    like_aten = region(lambda b, x, y, z: masked(b, x, y, z)[:1], *[(64, 8)] * 3, dtype=torch.float32)
    Choices(CPU, [Aten(), type("One", (Precise,), {"build": one_result})()]).decide([like_aten])
    assert len(made) == 2


def one_result(self: Precise, offers: Sequence[Offer], report: Progress | None = None) -> dict[str, Launcher]:
    return {o.key: copying(lambda *tensors: by_hand(*tensors)[:1], 3) for o in offers}


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            torch.OutOfMemoryError("no 3 GiB"),
            "(compared with ATen's ops in 16 bits alone: there is no memory for f32)",
        ),
        (RuntimeError("half only\nand more"), "in 16 bits alone: in f32 they fail with RuntimeError: half only)"),
    ],
)
def test_without_f32_the_first_comparison_decides_and_says_so(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(region: Region) -> Any:
        raise error

    monkeypatch.setattr(compare, "in_f32", failing)
    wanted = block()
    choices = Choices(CPU, [Aten(), Precise()])
    choices.decide([wanted])
    reasons = {timed.why for timed in choices.known[wanted.key].excluded}
    assert len(reasons) == 1 and reasons.pop().endswith(told)


def test_ops_in_f32_are_torchs() -> None:
    """Casts do not round, results do; numbers are drawn as they are in 16 bits."""

    def build(b: StepBuilder, x: Any, w: Any) -> list[Any]:
        y = b.softmax(b.cast(b.cast(b.mul(x, w), dtype=F32), dtype=BF16), dim=1)
        return [b.mul(y, 3.0), b.cast(b.sum(y, dims=(0,)), dtype=BF16), b.gt(y, 0.1)]

    wanted = region(build, (64, 8), (8,))
    x, w = inputs = neutral_inputs(wanted, False)
    y = (x.float() * w.float()).softmax(1)
    for found, true in zip(in_f32(wanted)(*inputs), (y * 3, y.sum(0), y > 0.1), strict=True):
        assert torch.equal(found, true.bfloat16() if true.is_floating_point() else true)
    assert inputs[0].dtype == torch.bfloat16  # (they are as they were)

    function = add_function(module(), "region", [RANDOM_KEY])
    b = StepBuilder(function.regions[0].block)
    key = function.regions[0].block.arguments[0]
    drawn = b.random(key, distribution="uniform", stream=4, type=TensorType((64, 8), BF16))
    finish_function(function, [b.mul(drawn, 1.0)])
    numbers = Region(function, None, (Spec((3,), (1,), torch.int64),), (Spec((64, 8), (8, 1), torch.bfloat16),), CPU)
    given = torch.tensor([1, 2, 3])
    assert torch.equal(in_f32(numbers)(given)[0], op_by_op(numbers)(given)[0])


def test_memory_is_given_back_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long chain two results are there at a time, beside the operand."""
    import weakref

    alive: list[Any] = []
    most = 0
    true = compare.widened

    def watched(x: torch.Tensor) -> torch.Tensor:
        nonlocal most
        found = true(x)
        alive.append(weakref.ref(found))
        most = max(most, len({id(t) for r in alive if (t := r()) is not None}))
        return found

    def chain(b: StepBuilder, x: Any) -> list[Any]:
        for _ in range(12):
            x = b.tanh(x)
        return [x]

    wanted = region(chain, (64, 8))
    monkeypatch.setattr(compare, "widened", watched)
    in_f32(wanted)(*neutral_inputs(wanted, False))
    assert most <= 3 and len(alive) >= 24


def test_infinities_are_compared() -> None:
    x = torch.tensor([1.0, float("inf"), float("nan")])
    assert difference([x], [x.clone()], False) == ""
    assert "other infinities" in difference([-x.abs() * torch.tensor([-1.0, 1.0, 1.0])], [x], False)
    assert "other infinities" in difference([torch.tensor([1.0, float("nan"), float("nan")])], [x], False)


def test_sixteen_bits_are_given_their_rounding_and_no_more() -> None:
    torch.manual_seed(0)
    true = torch.randn(1000)
    assert difference([true.bfloat16()], [true], True) == ""
    assert difference([true.bfloat16()], [true], False) != ""
    assert difference([true * 1.1], [true], True) != ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_near_at_first_sight_is_finite_and_near_everywhere(dtype: torch.dtype) -> None:
    low, y = dtype is not torch.float32, torch.randn(64, 64).to(dtype)
    nothing, inside = torch.empty(0, dtype=dtype), torch.full_like(y, float("inf"))
    found = {"right": (y.clone(), y), "zero": (0 * y, 0 * y), "none": (nothing, nothing), "infinite": (inside, inside)}
    for name, index, value in (("far", 5, 9.0), ("nan", 0, float("nan")), ("infinity", 9, float("inf"))):
        x = y.clone()
        x.view(-1)[index] = value
        found[name] = (x, y)
    found["a little everywhere"] = (y * 1.1, y)
    near = compare.are_near(*zip(*found.values(), strict=True), low)
    assert dict(zip(found, near, strict=True)) == {name: name in ("right", "zero") for name in found}


def test_numbers_are_drawn_once_and_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_up, "DRAWN", 5)
    for positive in (False, True):
        for operand in neutral_inputs(region(lambda b, x: [b.tanh(x)], (7, 9), dtype=torch.float32), positive):
            flat = operand.view(-1)
            assert len(set(flat[:5].tolist())) == 5 and torch.equal(flat, flat[:5].repeat(13)[:63])


CHANNELS = 96


def statistics(b: StepBuilder, x: Any, *vectors: Any) -> list[Any]:
    """1 / deviation of a normalised image behind a relu6, from sums around a number of each channel."""
    mean, rstd, scale, shift, around = (b.reshape(v, shape=(CHANNELS, 1, 1)) for v in vectors)
    y = b.add(b.mul(b.mul(b.sub(x, mean), rstd), scale), shift)
    off = b.sub(b.minimum(b.maximum(y, 0.0), 6.0), around)
    first, second = (b.mean(v, dims=(0, 2, 3)) for v in (off, b.mul(off, off)))
    return [b.rsqrt(b.add(b.maximum(b.sub(second, b.mul(first, first)), 0.0), 1e-5))]


def one_after_the_other(x: torch.Tensor, *vectors: torch.Tensor) -> torch.Tensor:
    """The same with sums that add one number after the other in f32, as a thread does."""
    mean, rstd, scale, shift, around = (v.view(-1, 1, 1) for v in vectors)
    off = ((x - mean) * rstd * scale + shift).clamp(0.0, 6.0) - around
    rows = [v.transpose(0, 1).reshape(CHANNELS, -1).numpy() for v in (off, off * off)]
    first, second = (torch.from_numpy(v.cumsum(1, dtype="float32")[:, -1] / v.shape[1]) for v in rows)
    return (second - first * first).clamp_min(0.0).add(1e-5).rsqrt()


def test_made_up_channels_are_not_all_one_number() -> None:
    """Of one that is, the deviation is rounding alone: kernels were taken for wrong that are right."""
    shapes = [(8, CHANNELS, 28, 28)] + [(CHANNELS,)] * 5
    inputs = neutral_inputs(region(statistics, *shapes, dtype=torch.float32), False)
    (wanted,) = op_by_op(region(statistics, *shapes, dtype=torch.float32))(*inputs)
    assert float(wanted.max()) < 100 and difference([one_after_the_other(*inputs)], [wanted], True) == ""
    for vector in inputs[1:]:
        assert float(vector.abs().min()) >= 0.9 and float(vector.abs().max()) <= 1.1
        assert 0.2 < float((vector > 0).float().mean()) < 0.8
    generator = torch.Generator().manual_seed(1)  # numbers as those of images are: some channels are cut off
    (wanted,) = op_by_op(region(statistics, *shapes, dtype=torch.float32))(
        inputs[0], *(normal := [torch.randn(CHANNELS, generator=generator) for _ in inputs[1:]])
    )
    assert "is off by up to" in difference([one_after_the_other(inputs[0], *normal)], [wanted], True)
