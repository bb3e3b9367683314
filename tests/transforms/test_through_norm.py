"""`through_norm`: gradients of a product before a BatchNorm without its result are the same numbers, up to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.plan.networks import Case
from tests.runtime.runs import data
from tests.transforms.test_fuse import program, root_of
from wholestep.dialects.step import torch_dtype
from wholestep.errors import InputError
from wholestep.ir.builtin import module
from wholestep.ir.core import Op, Value
from wholestep.ir.passes import run_pipeline
from wholestep.ir.types import BF16, F32, TensorType
from wholestep.ir.verify import verify
from wholestep.runtime.executor import Executable
from wholestep.transforms import tall_products, through_norm
from wholestep.transforms.opportunity import check_patterns, take, transform
from wholestep.transforms.through_norm import ThroughNorm

NAMES = ("pointwise_convolution", "through_norm")
WIDTH, SIDE = 8, 12


class Block(nn.Module):
    """A bottleneck whose last product widens, with a residual; `short` is a product of its own before a norm."""

    def __init__(self, inputs: int, affine: bool = True):
        super().__init__()
        self.narrow, self.norm1 = nn.Conv2d(inputs, WIDTH, 1, bias=False), nn.BatchNorm2d(WIDTH)
        self.widen, self.norm2 = nn.Conv2d(WIDTH, 4 * WIDTH, 1, bias=False), nn.BatchNorm2d(4 * WIDTH, affine=affine)
        self.short = nn.Conv2d(inputs, 4 * WIDTH, 1, bias=False) if inputs != 4 * WIDTH else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm1(self.narrow(x)))
        return torch.relu(self.norm2(self.widen(y)) + self.short(x))


def network(affine: bool = True) -> nn.Module:
    blocks = [Block(16), Block(4 * WIDTH, affine)]
    ends = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.Conv2d(4 * WIDTH, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    found = nn.Sequential(ends[0], *blocks, *ends[1:])
    with torch.no_grad():
        for norm in (m for m in found.modules() if isinstance(m, nn.BatchNorm2d) and m.affine):
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.uniform_(-0.5, 0.5)
    return found


def case_of(precision: str = "bf16", affine: bool = True) -> Case:
    torch.manual_seed(0)
    target = torch.randint(0, 5, (6,), generator=torch.Generator().manual_seed(0))
    images = data(6, 3, 2 * SIDE, 2 * SIDE)
    case = Case((network(affine), nn.functional.cross_entropy, (images, target)), "sgd", precision=precision)
    transform(case.program.module, force=["channels_last *"])
    return case


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(through_norm, "LEAST", 0)
    monkeypatch.setattr(through_norm, "SMALL", 0)


def changes(case: Case) -> dict[Any, torch.Tensor]:
    """What a step of SGD adds to each parameter."""
    program = case.program
    given = {slot.source: x for slot, x in zip(program.slots, case.inputs, strict=True)}
    made = Executable(program.function, "cpu", case.numbers)([x.clone() for x in case.inputs])
    state = [(r.slot, x) for r, x in zip(program.results, made, strict=True) if r.slot is not None]
    return {slot.source: x.double() - given[slot.source] for slot, x in state if slot.kind == "parameter"}


def counted(function: Op, name: str) -> int:
    return sum(op.name == f"step.{name}" for op in function.regions[0].block)


@pytest.mark.parametrize("affine", [True, False])
def test_a_step_is_as_near_to_f32_as_before(affine: bool) -> None:
    exact = changes(case_of("fp32", affine))
    case = case_of(affine=affine)
    take(case.program.module, NAMES[:1])
    before, norms = changes(case), counted(case.program.function, "batch_norm_grad")
    done = take(case.program.module, NAMES[1:])
    verify(case.program.module)
    run_pipeline(case.program.module, "cse,dce")
    assert len(done) == 2 and all("norm2" in key for key in done)
    assert counted(case.program.function, "batch_norm_grad") == norms - 2
    after = changes(case)
    assert len(after) > 8
    for name, want in exact.items():
        old, new = (float((x[name] - want).norm() / want.norm()) for x in (before, after))
        assert new <= 1.5 * old + 1e-3, (name, old, new)


def test_backward_reads_the_product_no_more() -> None:
    case = case_of()
    take(case.program.module, NAMES)
    run_pipeline(case.program.module, "cse,dce")
    function = case.program.function
    for op in function.regions[0].block:
        if op.name == "step.contract" and op.phase == "forward" and op.loc.layer.endswith("widen"):
            seen, late = [op.result], []
            while seen:
                for user in seen.pop().uses:
                    late += [user.name] if user.phase == "backward" else []
                    seen += user.results if user.name == "step.transpose" else []
            assert late == []


@pytest.mark.parametrize("ridge", [256, 0])
def test_products_with_x_are_one_where_they_wait_for_it(ridge: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are two, so that nobody but an input's gradient reads x beside the norm's."""
    monkeypatch.setattr(tall_products, "RIDGE", ridge)
    case = case_of()
    take(case.program.module, NAMES)
    run_pipeline(case.program.module, "cse,dce")
    joins = [o for o in case.program.function.regions[0].block if o.name == "step.concat" and o.result.type.rank == 4]
    readers = [sorted(bool(u.wide) for u in op.result.uses) for op in joins]
    assert readers == [[False, True] if ridge else [False]] * 2


@pytest.mark.parametrize("order", [(0, 2, 3, 1), (0, 3, 2, 1), (2, 0, 3, 1)])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
def test_rows_in_any_order(order: tuple[int, ...], turned: bool, swapped: bool) -> None:
    """Products may read BatchNorm's gradient and the weight transposed, and their operands in either order."""
    images, narrow = (3, 4 * WIDTH, 5, 7), (3, 5, 7, WIDTH)
    matrix = (WIDTH, 4 * WIDTH) if turned else (4 * WIDTH, WIDTH)

    def build(b: Any, dy: Value, x: Value, w: Value, scale: Value) -> list[Value]:
        rows = "".join("nohw"[i] for i in order)
        own = "co" if turned else "oc"
        y = b.transpose(b.contract(x, w, spec=f"nhwc,{own}->nhwo"), order=(0, 3, 1, 2))
        _, mean, rstd, *_ = b.batch_norm(y, scale, training=True)
        d, dw, db = b.batch_norm_grad(dy, y, mean, rstd, scale)
        d = b.transpose(d, order=order)
        pixels = rows.replace("o", "")
        seen = b.transpose(x, order=tuple("nhwc".index(c) for c in (*pixels, "c")))
        parts = [(d, rows), (seen, f"{pixels}c")][:: -1 if swapped else 1]
        gradient = b.contract(parts[0][0], parts[1][0], spec=f"{parts[0][1]},{parts[1][1]}->{own}")
        parts = [(d, rows), (w, own)][:: -1 if swapped else 1]
        dx = b.contract(parts[0][0], parts[1][0], spec=f"{parts[0][1]},{parts[1][1]}->{pixels}c")
        return [dx, gradient, dw, db]

    types = [TensorType(images, BF16), TensorType(narrow, BF16), TensorType(matrix, BF16)]
    function = program([*types, TensorType((4 * WIDTH,), F32)], build)
    types = [v.type for v in function.regions[0].block.arguments]
    inputs = [data(*t.shape, seed=i).to(torch_dtype(t.element)) for i, t in enumerate(types)]
    before = Executable(function)(inputs)
    assert len(take(root_of(function), NAMES[1:])) == 1
    verify(root_of(function))
    for old, new in zip(before, Executable(function)(inputs), strict=True):
        torch.testing.assert_close(new.float(), old.float(), rtol=0.03, atol=0.01 * float(old.float().abs().max()))


def test_layers_of_a_perceptron() -> None:
    """A product whose result is what the norm reads, without transposes between."""
    torch.manual_seed(0)

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow, self.widen = nn.Linear(32, 8, bias=False), nn.Linear(8, 32, bias=False)
            self.norm = nn.BatchNorm1d(32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.norm(self.widen(torch.tanh(self.narrow(x))))

    model = nn.Sequential(Residual(), nn.Linear(32, 5))
    found = []
    for precision in ("fp32", "bf16", "bf16"):
        batch = data(64, 32), torch.arange(64) % 5
        case = Case((model, nn.functional.cross_entropy, batch), "sgd", precision=precision)
        if len(found) == 2:
            assert len(take(case.program.module, NAMES[1:])) == 1
            verify(case.program.module)
        found.append(changes(case))
    exact, before, after = found
    for name, want in exact.items():
        old, new = (float((x[name] - want).norm() / want.norm()) for x in (before, after))
        assert new <= 1.5 * old + 1e-3, (name, old, new)


def sites(**changes: Any) -> list[str]:
    """Why each place of the network is none; empty where it is one."""
    case = case_of(**changes)
    take(case.program.module, NAMES[:1])
    return [str(what) if isinstance(what, str) else "" for _, what in ThroughNorm().places(case.program.function)]


def test_what_does_not_pay_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sites().count("") == 2
    assert "what the product reads is not much smaller than what it makes" in sites()
    assert sites(precision="fp32") == []  # no products there
    monkeypatch.setattr(through_norm, "LEAST", 1 << 30)
    assert sites().count("it is too small to be worth some small kernels more") == 2


def test_a_gradient_that_needs_the_product_stays() -> None:
    """An activation right behind the norm, whose result no product reads: its gradient is computed from the product."""
    torch.manual_seed(0)
    parts = [nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 32, 1, bias=False), nn.BatchNorm2d(32), nn.SiLU()]
    model = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5))
    batch = data(4, 3, 10, 10), torch.zeros(4, dtype=torch.int64)
    case = Case((model, nn.functional.cross_entropy, batch), "sgd", precision="bf16")
    transform(case.program.module, force=["channels_last *"])
    take(case.program.module, NAMES[:1])
    ((_, why),) = ThroughNorm().places(case.program.function)
    assert why == "the gradient is computed from the product, which is read for it anyway"


class Inverted(nn.Module):
    """An expanding product, a norm, an activation and a depthwise convolution, with a residual."""

    def __init__(self, activation: type[nn.Module], stride: int):
        super().__init__()
        self.widen, self.norm = nn.Conv2d(WIDTH, 6 * WIDTH, 1, bias=False), nn.BatchNorm2d(6 * WIDTH)
        self.activation = activation()
        self.depthwise = nn.Conv2d(6 * WIDTH, 6 * WIDTH, 3, stride, 1, groups=6 * WIDTH, bias=False)
        self.narrow, self.last = nn.Conv2d(6 * WIDTH, WIDTH, 1, bias=False), nn.BatchNorm2d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.last(self.narrow(self.depthwise(self.activation(self.norm(self.widen(x))))))
        return y if y.shape != x.shape else x + y


def inverted(precision: str, activation: type[nn.Module], seed: int = 0) -> Case:
    torch.manual_seed(seed)
    blocks = [Inverted(activation, stride) for stride in (1, 2)]
    ends = [nn.Conv2d(3, WIDTH, 3, 2, 1, bias=False), nn.Conv2d(WIDTH, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(ends[0], nn.BatchNorm2d(WIDTH), *blocks, *ends[1:])
    batch = data(6, 3, 2 * SIDE, 2 * SIDE), torch.arange(6) % 5
    case = Case((model, nn.functional.cross_entropy, batch), "sgd", precision=precision)
    transform(case.program.module, force=["channels_last *"])
    return case


@pytest.mark.parametrize("activation", [nn.SiLU, nn.ReLU6])
def test_before_a_depthwise_convolution(activation: type[nn.Module]) -> None:
    """Its gradient's kernel reads the product anyway, and writes the activation's gradient. Distances differ from seed
    to seed: the mean counts. A bias before a product and a norm has a gradient of zero on paper, which is noise."""
    distances: dict[Any, list[tuple[float, float]]] = {}
    for seed in range(3):
        exact = changes(inverted("fp32", activation, seed))
        case = inverted("bf16", activation, seed)
        take(case.program.module, NAMES[:1])
        before = changes(case)
        done = take(case.program.module, NAMES[1:])
        verify(case.program.module)
        run_pipeline(case.program.module, "cse,dce")
        assert len(done) == 2 and all(".norm/" in key for key in done)
        after = changes(case)
        for name, want in exact.items():
            if float(want.abs().max()) < 1e-6:
                continue
            old, new = (float((x[name] - want).norm() / want.norm()) for x in (before, after))
            distances.setdefault(name, []).append((old, new))
    assert len(distances) > 12
    for name, pairs in distances.items():
        old, new = (sum(each) / len(pairs) for each in zip(*pairs, strict=True))
        assert new <= 1.5 * old + 1e-3, (name, old, new)


def test_it_can_be_forbidden_by_its_name_before_it_applies() -> None:
    """What it applies to is there only once convolutions are products: its name is no misspelt pattern."""
    check_patterns(module(), ["through_norm", "through_norm *"])
    with pytest.raises(InputError, match="fits no opportunity"):
        check_patterns(module(), ["through_norm step/nowhere/forward/contract#0"])
    with pytest.raises(InputError, match="through_norm"):
        check_patterns(module(), ["through_nrom"])
