"""The norm of all gradients is part of what makes them: by the clock, where it is forced, and by loop kernels.

Norms and trained parameters are those of eager PyTorch with `clip_grad_norm_`. Triton reads TRITON_INTERPRET when it is
imported, so its kernels are run in a child process by `main` below.
"""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import wholestep as ws
from tests import warm
from tests.dialects.loop.provider import LoopReference, registered
from tests.runtime.runs import assert_same, data, fresh
from tests.transforms.test_fuse import program, regions_of, root_of
from tests.transforms.test_tall_products import Clock, joined
from wholestep.backends.providers import Triton
from wholestep.backends.store import Objects
from wholestep.cost import make_ledger
from wholestep.ir import BF16, F16, F32, ScalarType, TensorType, verify
from wholestep.ir.builtin import lookup
from wholestep.ir.core import Op, Value
from wholestep.plan import planner
from wholestep.transforms import again, early_sums, tall_products
from wholestep.transforms import fuse as fusing
from wholestep.transforms.fuse import Fusion, fuse
from wholestep.transforms.regions import Bodies

TOKENS, ROWS, COLUMNS = 64, 48, 40
GRADIENT = "mi,mj->ij"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "LEAST", 0)
    monkeypatch.setattr(tall_products, "LEAST", 0)
    monkeypatch.setattr(tall_products, "WORTH", 0.0)


def squares(b: Any, g: Value) -> Value:
    wide = b.cast_to(g, F32)
    return b.sqrt(b.sum(b.mul(wide, wide), dims=tuple(range(g.type.rank))))


def clipped(b: Any, gradients: list[Value], w: Value) -> list[Value]:
    """Updates by gradients that are scaled by their norm, which that of another, small one is part of."""
    bias = b.sum(w, dims=(0,))
    b.phase = "clip"
    norms = [b.reshape_to(squares(b, g), (1,)) for g in (*gradients, bias)]
    stacked = b.concat(norms, dim=0)
    total = b.sqrt(b.sum(b.mul(stacked, stacked), dims=(0,)))
    scale = b.minimum(b.div(b.full(0.5, (), F32), b.add(total, 1e-6)), 1.0)
    made = [b.mul(b.cast_to(g, F32), scale) for g in gradients]
    b.phase = "update"
    return [total, *(b.sub(w, b.mul(g, 0.1)) for g in made)]


def one(b: Any, dy: Value, x: Value, w: Value) -> list[Value]:
    b.phase = "backward"
    return clipped(b, [b.contract(dy, x, spec=GRADIENT)], w)


def of(build: Any, element: ScalarType = BF16) -> Op:
    factors = [TensorType((TOKENS, n), element) for n in (ROWS, COLUMNS)]
    return program([*factors, TensorType((ROWS, COLUMNS), F32)], build)


def fused(function: Op, clock: Clock | None = None, **options: Any) -> tuple[Fusion, list[Op]]:
    """The kernels that are a product and a sum."""
    fusion = fuse(function, bodies=Bodies(), seconds=clock, **options)
    verify(root_of(function))
    found = []
    for op in regions_of(function):
        names = {inner.name for inner in lookup(root_of(function), op.callee).regions[0].block}
        found += [op] if {"step.contract", "step.sum"} <= names else []
    return fusion, found


# ---- by the clock ----------------------------------------------------------------------------------------------------


def test_a_product_sums_up_its_squares_where_the_clock_says_so(small: None) -> None:
    assert joined(of(one), Clock(), products=True)[1] == [GRADIENT]
    fusion, found = joined(of(one), Clock(faster=False), products=True)
    assert found == []
    whys = [why for (_, consumer), why in fusion.refusals.items() if consumer == "main/-/clip/cast#0"]
    assert whys and all(why.startswith("measured: ") for why in whys), fusion.refusals
    assert joined(of(one), Clock())[1] == [GRADIENT]  # it waits for memory


def test_the_kernel_is_one_of_backward(small: None) -> None:
    function = of(one)
    _, (op,) = fused(function, Clock(), products=True)
    assert op.phase == "backward" and sorted(r.type.rank for r in op.results) == [0, 2]
    block = list(function.regions[0].block)
    assert block.index(op) == min(block.index(o) for o in regions_of(function))
    (gradient,) = (r for r in op.results if r.type.rank)
    assert [u.phase for u in gradient.uses] == ["update"], "nobody else reads the gradient"


def test_long_products_are_left_to_libraries_unless_everything_is_tried(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tall_products, "RIDGE", 16)  # (multiplications per element up to which one waits for memory)
    clock = Clock()
    assert fused(of(one), clock)[1] == [] and not clock.asked
    assert len(fused(of(one), Clock(), products=True)[1]) == 1


def test_little_is_not_tried() -> None:
    clock = Clock()
    assert fused(of(one), clock, products=True)[1] == [] and not clock.asked


def test_a_pass_over_all_gradients_costs_its_bytes(small: None) -> None:
    """A kernel by itself takes as long as its launch, the pass over many gradients does not."""

    class Launches(Clock):
        def __call__(self, pieces: Any, strides: Any) -> list[float]:
            super().__call__(pieces, strides)
            found = []
            for piece in pieces:
                product = any(op.name == "step.contract" for op in piece.ops)
                size = max(v.type.size for v in piece.inputs)
                passing = any(op.name == "step.sum" for op in piece.ops)
                found.append(100.0 + 2 * passing if product else 10.0 if size < 10_000 else 20.0)
            return found

    def two(b: Any, dy: Value, x: Value, w: Value) -> list[Value]:
        b.phase = "backward"
        long = b.contract(b.concat([dy] * 40, dim=1), x, spec=GRADIENT)
        g = b.contract(dy, x, spec=GRADIENT)
        b.phase = "clip"
        total = b.add(squares(b, g), squares(b, long))
        b.phase = "update"
        return [total, b.mul(g, b.cast_to(total, BF16)), b.mul(long, b.cast_to(total, BF16))]

    _, found = fused(of(two), Launches(), products=True)
    assert [op.results[0].type.shape for op in found] == [(40 * ROWS, COLUMNS)], "0.5 of a pass is less than 2 more"


def test_tied_weights(small: None) -> None:
    """The sum of two gradients is summed up by the product that makes the second; the first would wait for it."""

    def tied(b: Any, dy: Value, x: Value, w: Value) -> list[Value]:
        b.phase = "backward"
        first = b.contract(dy, x, spec=GRADIENT)
        second = b.contract(b.relu(dy), b.exp(x), spec=GRADIENT)
        return clipped(b, [b.add(b.cast_to(first, F32), b.cast_to(second, F32))], w)

    function = of(tied)
    _, (op,) = fused(function, Clock(), products=True)
    inner = [o for o in lookup(root_of(function), op.callee).regions[0].block if o.name == "step.contract"]
    assert len(inner) == 1 and any(v.op is not None and v.op.name == "step.contract" for v in op.operands)
    assert joined(of(tied), Clock(), products=True)[1] == [GRADIENT]

    def late(b: Any, dy: Value, x: Value, w: Value) -> list[Value]:
        b.phase = "backward"
        first = b.contract(dy, x, spec=GRADIENT)
        other = b.cumsum(b.cast_to(b.contract(dy, b.exp(x), spec=GRADIENT), F32), dim=0)
        return clipped(b, [b.add(b.cast_to(first, F32), other)], w)

    assert fused(of(late), Clock(), products=True)[1] == []


def test_parts_of_a_product_are_summed_up_apart(small: None) -> None:
    """Weights whose gradients are one product: each part would be a product of its own in the kernel."""

    def parts(b: Any, dy: Value, x: Value, w: Value) -> list[Value]:
        b.phase = "backward"
        whole = b.contract(dy, x, spec=GRADIENT)
        halves = [b.slice(whole, dim=0, start=i, end=i + ROWS // 2) for i in (0, ROWS // 2)]
        return clipped(b, halves, b.slice(w, dim=0, start=0, end=ROWS // 2))

    clock = Clock()
    assert fused(of(parts), clock, products=True)[1] == [] and not clock.asked


def test_what_is_too_large_for_f16_must_be_seen(small: None) -> None:
    """A sum in the kernel is one of numbers before they are rounded, and those may be finite."""
    clock = Clock()
    assert fused(of(one, F16), clock, products=True)[1] == [] and not clock.asked


def test_what_is_forbidden(small: None) -> None:
    forbidden = ["fuse */clip/* <- */backward/contract#*"]
    assert fused(of(one), Clock(), products=True, forbid=forbidden)[1] == []


def test_in_parts(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long program is joined part by part: sums are drawn to what they sum up."""

    def many(b: Any, dy: Value, x: Value, w: Value) -> list[Value]:
        b.phase = "backward"
        gradients = [b.contract(b.mul(dy, float(i + 1)), x, spec=GRADIENT) for i in range(8)]
        return clipped(b, gradients, w)

    monkeypatch.setattr(fusing, "WINDOW", 24)
    assert len(fused(of(many), Clock(), products=True)[1]) == 8
    assert joined(of(many), Clock(), products=True)[1] == [GRADIENT] * 8
    function = of(many)
    fusion, found = fused(function)
    assert found == []
    kernels = {tuple(n.split("/")[-1].split("#")[0] for n in names) for _, names in fusion.kernels}
    assert ("cast", "mul", "sum", "sqrt") in kernels, "as without parts"


def test_a_kernel_that_is_remembered_is_one_of_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_sums, "LEAST", 0)

    def build(b: Any, dy: Value, x: Value, w: Value) -> list[Value]:
        b.phase = "loss"
        y = b.exp(w)
        b.phase = "backward"
        return [y, *clipped(b, [b.tanh(y)], w)]

    phases = []
    for _ in range(2):
        function = of(build)
        fuse(function, bodies=Bodies(), kept=Objects(tmp_path))
        verify(root_of(function))
        phases.append([op.phase for op in regions_of(function)])
    assert phases[0] == phases[1] and phases[0][0] == "backward"


# ---- whole steps -----------------------------------------------------------------------------------------------------


class Words(nn.Module):
    """Linear layers, a norm and an embedding that is tied to the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.a, self.n = nn.Embedding(32, 16), nn.Linear(16, 24), nn.LayerNorm(24)
        self.b, self.h = nn.Linear(24, 16), nn.Linear(16, 32, bias=False)
        self.h.weight = self.e.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.h(self.b(F.gelu(self.n(self.a(self.e(x))))))


class Positive(nn.Module):
    """A weight that is made of its parameter: a loop kernel makes the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.a = nn.Parameter(torch.randn(16, 24)), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(F.linear(x, F.softplus(self.v)))


def words(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


def force(precision: str) -> list[str]:
    """The squares of the gradients of two layers, by the products that make them."""
    first = "fuse */clip/sum#* <- */clip/mul#*"
    if precision == "fp32":
        return [first, "fuse */clip/mul#* <- */[ab]/backward/contract#*"]
    casts = ["fuse */clip/mul#* <- */backward/cast#*", "fuse */[ab]/backward/cast#* <- */[ab]/backward/contract#1"]
    return [first, *casts]


def train(
    provider: str, precision: str, limit: float = 0.5, steps: int = 3, bad: bool = False, **options: Any
) -> tuple[ws.TrainStep, list[float]]:
    """A step that was compared with eager training, and its norms."""
    model = fresh(Words)
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, twin))
    x = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = ws.compile(
            *(model, words, optimizer, (x, x)),
            **dict(clip_norm=limit, precision=precision, providers=["aten", provider], tune=False) | options,
        )
        norms = []
        for _ in range(steps):
            for m in (model, twin) if bad else ():
                m.a.bias.data[0] = math.inf
            loss = step(x, x)
            other.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                expected = words(twin(x), x)
            expected.backward()
            norm = nn.utils.clip_grad_norm_(twin.parameters(), limit)
            other.step()
            near = dict(rtol=1e-5, atol=1e-6) if precision == "fp32" else dict(rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(loss, expected.detach(), equal_nan=True, **near)
            torch.testing.assert_close(step.last.grad_norm, norm, equal_nan=True, **near)
            norms.append(float(norm))
    if not bad:
        assert_same(model, twin, *((1e-5, 1e-6) if precision == "fp32" else (5e-2, 5e-2)))
    return step, norms


def kernels_of(step: ws.TrainStep) -> list[str]:
    return [line for line in step.recipe if line.startswith("fuse ") and "/contract#" in line and "/clip/sum#" in line]


def passes_over(step: ws.TrainStep, shape: tuple[int, ...]) -> int:
    """Launches of clipping that read a tensor of this shape."""
    plan = step.plan()
    found = [launch for launch in plan.launches if launch.phase == "clip"]
    return sum(any(plan.buffers[b].type.shape == shape for b in launch.reads) for launch in found)


@pytest.fixture
def loops() -> Iterator[None]:
    with registered(LoopReference):
        yield


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_forced_step_is_eagers_and_moves_fewer_bytes(loops: None, precision: str) -> None:
    step, _ = train("loops", precision, force=force(precision))
    plain, _ = train("loops", precision)
    assert len(kernels_of(step)) == 2 and not kernels_of(plain)
    assert passes_over(plain, (24, 16)) and not passes_over(step, (24, 16))
    size = 2 * 24 * 16 * (4 if precision == "fp32" else 2)
    saved = moved(plain) - moved(step)
    assert abs(saved - size) <= 64, "the read of both gradients, but for single numbers"
    replayed, _ = train("loops", precision, recipe=step.recipe)
    assert kernels_of(replayed) == kernels_of(step) and moved(replayed) == moved(step)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_by_the_clock_is_eagers(
    loops: None, small: None, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the clock prefers fewer bytes, in everything; and its recipe, which has what was taken along apart."""

    def timed(*args: Any, **named: Any) -> Fusion:
        return fuse(*args, **named | {"seconds": Clock(), "products": True})

    monkeypatch.setattr(planner, "fuse", timed)
    step, _ = train("loops", precision)
    replayed, _ = train("loops", precision, recipe=step.recipe)
    for one in (step, replayed):
        plan = one.plan()
        found = [launch for launch in plan.launches if launch.phase == "backward" and launch.provider == "loops"]
        made = [{plan.buffers[b].type.shape for b in launch.writes} for launch in found]
        assert {(24, 16), ()} in made and {(16, 24), ()} in made, "gradients, each with a number"
        assert not passes_over(one, (24, 16))


def moved(step: ws.TrainStep) -> int:
    return make_ledger(step._compiled.planned).total


def test_a_limit_that_clips_nothing_and_gradients_that_are_not_finite(loops: None) -> None:
    assert kernels_of(train("loops", "fp32", math.inf, force=force("fp32"))[0])
    assert kernels_of(train("loops", "fp32", 100.0, force=force("fp32"))[0])
    _, norms = train("loops", "fp32", steps=1, bad=True, force=force("fp32"))
    assert not math.isfinite(norms[0])


def test_the_norm_of_accumulated_gradients(loops: None) -> None:
    """Each micro-batch makes a part of them: nobody has their squares before the end."""
    step, _ = train("loops", "fp32", accumulate=2)
    assert not kernels_of(step)
    with pytest.raises(ws.WholestepError, match="fits no fusion"):
        train("loops", "fp32", accumulate=2, force=force("fp32"))


def test_a_question_about_it(loops: None) -> None:
    step, _ = train("loops", "fp32")
    assert "library" in step.why_not("step/-/clip/mul#1", "step/a/backward/contract#1")
    assert "so small a gradient" in step.why_not("step/-/clip/sum#2", "step/a/backward/sum#0")


# ---- loop kernels ----------------------------------------------------------------------------------------------------


def test_a_loop_kernel_sums_up_the_gradient_that_it_makes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By C++ kernels, against eager; bytes fall by the read of the gradient."""
    x, plans = data(8, 24), []
    for least in (0, 1 << 23):
        monkeypatch.setattr(early_sums, "LEAST", least)
        monkeypatch.setenv("WHOLESTEP_CACHE", str(tmp_path / str(least)))  # (what was joined is remembered)
        model = fresh(Positive)
        twin = copy.deepcopy(model)
        optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
        options: Any = dict(clip_norm=0.5, providers=["aten", "cpp"], tune=False)
        step = ws.compile(model, lambda m, x: m(x).square().mean(), optimizer, (x,), **options)
        for _ in range(3):
            step(x)
            other.zero_grad()
            twin(x).square().mean().backward()
            norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
            other.step()
            torch.testing.assert_close(step.last.grad_norm, norm, rtol=1e-5, atol=1e-7)
        assert_same(model, twin, 1e-5)
        plans.append(step)
    one, plain = plans
    assert passes_over(plain, (16, 24)) and not passes_over(one, (16, 24))
    assert abs(moved(plain) - moved(one) - 16 * 24 * 4) <= 64


def test_where_nobody_has_such_a_kernel_it_comes_apart() -> None:
    """No C++ kernel sums what a product makes: every product is a launch of its own."""
    step, _ = train("cpp", "fp32", force=force("fp32"))
    names = [launch.name for launch in step.plan().launches if launch.phase == "backward"]
    of_pieces = step.report().kernels.families["contraction"].launches
    assert names.count("step.contract") + of_pieces == 6


# ---- Triton ----------------------------------------------------------------------------------------------------------


def test_triton_in_the_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "WHOLESTEP_CACHE": str(tmp_path)}
    done = warm.run(["-m", "tests.transforms.test_early_sums"], environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def main() -> None:
    class Interpreted(Triton):
        name, devices = "interpreted", ("cpu",)

    with registered(Interpreted):
        for precision in ("fp32", "bf16"):
            step, _ = train("interpreted", precision, force=force(precision))
            assert len(kernels_of(step)) == 2 and not passes_over(step, (24, 16))
            products = [launch.provider for launch in step.plan().launches if launch.name == "step.contract"]
            assert len(products) == 9 - 2


if __name__ == "__main__":
    main()
