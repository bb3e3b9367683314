"""`early_norm`: BatchNorm's statistics of a product from what it reads are those of the product, up to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.plan.networks import Case
from tests.runtime.runs import data
from tests.transforms.test_fuse import program
from tests.transforms.test_through_norm import NAMES, case_of, changes, counted
from wholestep.dialects.loop.reference import run
from wholestep.ir.core import Op
from wholestep.ir.passes import run_pipeline
from wholestep.ir.types import BF16, F32, TensorType
from wholestep.ir.verify import verify
from wholestep.runtime.executor import Executable
from wholestep.transforms import early_norm, through_norm
from wholestep.transforms.loops import lowered
from wholestep.transforms.opportunity import opportunities, take, transform
from wholestep.transforms.regions import readers_of
from wholestep.transforms.through_norm import in_two, small_product


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((through_norm, "LEAST"), (through_norm, "SMALL"), (early_norm, "LEAST")):
        monkeypatch.setattr(owner, name, 0)


def products(function: Op) -> list[Op]:
    return [op for op in function.regions[0].block if op.name == "step.contract"]


@pytest.mark.parametrize("affine", [True, False])
def test_a_step_is_as_near_to_f32_as_before(affine: bool) -> None:
    exact = changes(case_of("fp32", affine))
    case = case_of(affine=affine)
    take(case.program.module, NAMES[:1])
    before, norms = changes(case), counted(case.program.function, "batch_norm")
    done = take(case.program.module, ["early_norm", "through_norm"])
    verify(case.program.module)
    run_pipeline(case.program.module, "cse,dce")
    assert [key.split()[0] for key in done] == ["early_norm"] + ["through_norm"] * 2
    assert counted(case.program.function, "batch_norm") == norms - 1
    after = changes(case)
    for name, want in exact.items():
        old, new = (float((x[name] - want).norm() / want.norm()) for x in (before, after))
        assert new <= 1.5 * old + 1e-3, (name, old, new)


def test_running_statistics_are_those_of_before() -> None:
    def statistics(case: Case) -> list[torch.Tensor]:
        made = Executable(case.program.function, "cpu", case.numbers)([x.clone() for x in case.inputs])
        found = [(r.slot, x) for r, x in zip(case.program.results, made, strict=True) if r.slot is not None]
        return [x for slot, x in found if slot.kind == "buffer" and x.is_floating_point()]

    case = case_of()
    take(case.program.module, NAMES[:1])
    before = statistics(case)
    take(case.program.module, ["early_norm"])
    assert len(before) == 8
    for old, new in zip(before, statistics(case), strict=True):
        assert float((old - new).abs().max()) <= 2e-2 * float(old.abs().max())


def test_nobody_but_what_follows_the_norm_reads_the_product() -> None:
    case = case_of()
    take(case.program.module, (NAMES[0], "early_norm", "through_norm"))
    run_pipeline(case.program.module, "cse,dce")
    widened = [op for op in products(case.program.function) if op.phase == "forward" and op.result.type.shape[-1] == 32]
    made = [op for op in widened if op.loc.layer.endswith("2.widen")]  # the first block adds a product without a norm
    assert len(made) == 1
    assert [user.name for user in readers_of(made[0].result)] == ["step.cast"]


def test_backward_has_the_covariance_from_forward() -> None:
    case = case_of()
    take(case.program.module, (NAMES[0], "early_norm", "through_norm"))
    run_pipeline(case.program.module, "cse,dce")
    squares = [op for op in products(case.program.function) if op.lhs is op.rhs]
    assert len(squares) == 1 and squares[0].phase == "forward"


def test_of_two_norms_of_one_sum_one_is_early() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow, self.norm1 = nn.Conv2d(16, 8, 1, bias=False), nn.BatchNorm2d(8)
            self.widen, self.norm2 = nn.Conv2d(8, 32, 1, bias=False), nn.BatchNorm2d(32)
            self.short, self.norm3 = nn.Conv2d(16, 32, 1, bias=False), nn.BatchNorm2d(32)
            self.out = nn.Conv2d(32, 5, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm2(self.widen(torch.relu(self.norm1(self.narrow(x)))))
            y = torch.relu(y + self.norm3(self.short(x)))
            return (self.out(y) + y[:, :5]).mean((2, 3))

    torch.manual_seed(0)
    batch = data(6, 16, 12, 12).requires_grad_(False), torch.arange(6) % 5
    model = nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1, bias=False), Both())
    case = Case((model, nn.functional.cross_entropy, batch), "sgd", precision="bf16")
    transform(case.program.module, force=["channels_last *"])
    take(case.program.module, NAMES[:1])
    found = {o.site: o.why_not for o in opportunities(case.program.module, names=["early_norm"])}
    norms = {site: why for site, why in found.items() if "norm2" in site or "norm3" in site}
    assert sorted(bool(why) for why in norms.values()) == [False, True]
    (early,) = (site for site, why in norms.items() if not why)
    assert "norm2" in early  # which reads half as much
    assert "what it is added to is a product too, which ends with the sum" in norms.values()
    assert len(take(case.program.module, ["early_norm"])) == 1


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def reasons() -> set[str]:
        case = case_of()
        take(case.program.module, NAMES[:1])
        return {o.why_not for o in opportunities(case.program.module, names=["early_norm"])}

    assert any(why.startswith("backward reads the product") for why in reasons())
    monkeypatch.setattr(early_norm, "LEAST", 1 << 30)
    assert "it is too small to be worth some small kernels more" in reasons()


def test_a_product_with_itself_is_one_kernel() -> None:
    """Computed on the way for both factors, with its sums: rows and columns are told apart."""

    def build(b: Any, x: Any, scale: Any) -> list[Any]:
        y = b.relu(b.mul(b.cast(x, dtype=F32), scale))
        return [b.contract(y, y, spec="az,ac->zc"), b.sum(y, dims=(0,))]

    function = program([TensorType((40, 6), BF16), TensorType((6,), F32)], build)
    x, scale = torch.randn(40, 6).to(torch.bfloat16), torch.randn(6)
    outputs = [torch.zeros(6, 6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)]
    run(lowered(function), [x, scale], outputs)
    y = (x.double() * scale.double()).relu()
    assert torch.allclose(outputs[0], y.T @ y) and torch.allclose(outputs[1], y.sum(0))


@pytest.mark.parametrize("much", [0, 1 << 40])
def test_small_matrices_lose_few_digits_on_tensor_cores(much: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(through_norm, "MUCH", much)

    def build(b: Any, one: Any, short: Any) -> list[Any]:
        return [small_product(b, one, b.cast(short, dtype=F32), BF16, "zc,oz->oc")]

    function = program([TensorType((48, 40), F32), TensorType((64, 48), BF16)], build)
    run_pipeline(function.parent.parent.parent, "cse,dce")  # type: ignore[union-attr]
    assert len(products(function)) == (1 if much else 2)
    one, short = torch.randn(48, 40), torch.randn(64, 48).to(torch.bfloat16)
    (made,) = Executable(function)([one, short])
    want = short.double() @ one.double()
    assert float((made - want).abs().max() / want.abs().max()) < 2e-5


def test_one_kernel_of_both_parts_leaves_something() -> None:
    """Kernels go on with 32 bits where nothing else is said."""
    function = program([TensorType((48, 40), F32)], lambda b, x: list(in_two(b, b.mul(x, x), BF16)))
    run_pipeline(function.parent.parent.parent, "cse,dce")  # type: ignore[union-attr]
    x = torch.randn(48, 40)
    high, low = (torch.zeros(48, 40, dtype=torch.float64) for _ in range(2))
    run(lowered(function), [x], [high, low])
    want = x.double() * x.double()
    assert float((high - want).abs().max() / want.max()) > 1e-4
    assert float((high + low - want).abs().max() / want.max()) < 1e-5
