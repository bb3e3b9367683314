"""`bit_masks`: backward reads bits for the mask of a relu; every bit of every result stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.dialects.loop.provider import run_fused
from tests.plan.networks import Case
from tests.plan.simulate import simulate
from tests.runtime.runs import data
from tests.transforms.test_fuse import program
from wholestep.dialects.step import tensor_type
from wholestep.ir.core import Op
from wholestep.ir.passes import run_pipeline
from wholestep.ir.verify import verify
from wholestep.plan.planner import planned_function
from wholestep.runtime.executor import Executable
from wholestep.transforms import bit_masks, kept
from wholestep.transforms.fuse import fuse
from wholestep.transforms.loops import NotLoops, lowered
from wholestep.transforms.opportunity import opportunities, take, transform
from wholestep.transforms.recompute import is_late


class Block(nn.Module):
    """A residual sum whose activation is read by the next 1x1 convolution and by the sum after it."""

    def __init__(self, width: int, act: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.narrow, self.norm1 = nn.Conv2d(width, 32, 1, bias=False), nn.BatchNorm2d(32)
        self.widen, self.norm2 = nn.Conv2d(32, width, 1, bias=False), nn.BatchNorm2d(width)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm1(self.narrow(x)))
        return self.act(self.norm2(self.widen(y)) + x)


def case_of(width: int = 64, act: Any = torch.relu, side: int = 12, precision: str = "bf16", cut: bool = True) -> Case:
    torch.manual_seed(0)
    ends = [nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.Conv2d(width, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    network = nn.Sequential(ends[0], *(Block(width, act) for _ in range(3)), *ends[1:])
    target = torch.randint(0, 5, (6,), generator=torch.Generator().manual_seed(0))
    images = data(6, 3, 2 * side, 2 * side)
    case = Case((network, nn.functional.cross_entropy, (images, target)), "sgd", precision=precision)
    transform(case.program.module, force=["channels_last *"])
    take(case.program.module, ["pointwise_convolution"])
    if cut:
        kept.cut(case.program.module)
    run_pipeline(case.program.module, "cse,dce")
    return case


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bit_masks, "LEAST", 0)


def step_of(case: Case) -> list[torch.Tensor]:
    return Executable(case.program.function, "cpu", case.numbers)([x.clone() for x in case.inputs])


def named(function: Op, name: str) -> list[Op]:
    return [op for op in function.regions[0].block if op.name == f"step.{name}"]


def reasons(case: Case) -> set[str]:
    return {o.why_not for o in opportunities(case.program.module, names=["bit_masks"])}


def test_every_bit_of_a_step_stays() -> None:
    case = case_of()
    before = step_of(case)
    done = take(case.program.module, ["bit_masks"])
    verify(case.program.module)
    run_pipeline(case.program.module, "cse,dce")
    function = case.program.function
    packed, asked = named(function, "pack_bits"), named(function, "unpack_bits")
    assert len(done) >= 2 and len(packed) == len(asked) == len(done)
    assert all(not is_late(op) for op in packed) and all(is_late(op) for op in asked)
    assert all(op.dim == 1 for op in packed)  # channels are neighbours in memory
    for old, new in zip(before, step_of(case), strict=True):
        assert torch.equal(old, new)


def test_bytes_are_those_of_bits() -> None:
    found = [o for o in opportunities(case_of().program.module, names=["bit_masks"]) if not o.why_not]
    elements = 6 * 64 * 12 * 12
    assert found and all(o.change.bytes == 2 * elements // 8 - 2 * elements for o in found)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"width": 20, "side": 9}, "20 neighbours in memory are no whole groups of 32"),
        ({"act": lambda x: torch.relu(x) * 2}, "backward reads the tensor for something else as well"),
    ],
)
def test_what_is_refused(options: dict[str, Any], why: str) -> None:
    assert why in reasons(case_of(**options))


def test_small_tensors_and_normalised_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "it is computed from what the norm before it is asked for in backward anyway" in reasons(case_of(cut=False))
    monkeypatch.setattr(bit_masks, "LEAST", 1 << 20)
    assert reasons(case_of()) == {"what it is compared with is too small to be worth a tensor more"}


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_loops_pack_and_ask_bits(dim: int) -> None:
    """The float64 reference of kernels against PyTorch, along every dimension."""

    def build(b: Any, x: Any, bits: Any) -> list[Any]:
        told = b.pack_bits(b.gt(x, 0.0), dim=dim)
        return [told, b.select(b.unpack_bits(bits, dim=dim), x, 0.0)]

    x = torch.randn(64, 32, 96)
    packed = list(x.shape)
    packed[dim] //= 8
    bits = torch.randint(0, 256, packed, dtype=torch.uint8)
    function = program([tensor_type(x), tensor_type(bits)], build)
    wanted = Executable(function)([x, bits])
    fusion = fuse(function)
    assert sum(len(op.results) for op, _ in fusion.kernels) == 2
    for mine, true in zip(run_fused(function, [x, bits], fusion), wanted, strict=True):
        assert torch.equal(mine.to(true.dtype), true)


def test_bits_are_not_read_where_they_are_made() -> None:
    def build(b: Any, x: Any) -> list[Any]:
        return [b.select(b.unpack_bits(b.pack_bits(b.gt(x, 0.0), dim=1), dim=1), x, 0.0)]

    with pytest.raises(NotLoops, match="bits are packed where they are stored"):
        lowered(program([tensor_type(torch.zeros(2, 32))], build))


def test_a_plan_with_bits_gives_the_same() -> None:
    def replayed(case: Case) -> list[torch.Tensor]:
        planned = planned_function(case.program.function, torch.device("cpu"), case.numbers)
        return simulate(planned.plan, planned.function, case.program.module, [x.clone() for x in case.inputs]).results

    before, case = replayed(case_of()), case_of()
    assert take(case.program.module, ["bit_masks"])
    assert all(torch.equal(old, new) for old, new in zip(before, replayed(case), strict=True))
