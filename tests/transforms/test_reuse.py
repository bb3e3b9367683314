"""`reuse`: convolutions of backward read what forward wrote; masks and norms go on computing it again."""

from __future__ import annotations

import torch
from torch import nn

from tests.plan.networks import Case
from tests.runtime.runs import data
from wholestep.ir.core import Op
from wholestep.ir.passes import run_pipeline
from wholestep.ir.verify import verify
from wholestep.runtime.executor import Executable
from wholestep.transforms import kept
from wholestep.transforms.opportunity import opportunities, take, transform
from wholestep.transforms.recompute import is_late
from wholestep.transforms.regions import base


def case_of(groups: int = 1) -> Case:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 16, 3, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, 1, 1, bias=False, groups=groups),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    ]
    batch = data(6, 3, 24, 24), torch.arange(6) % 5
    case = Case((nn.Sequential(*layers), nn.functional.cross_entropy, batch), "sgd", precision="bf16")
    transform(case.program.module, force=["channels_last *"])
    return case


def step_of(case: Case) -> list[torch.Tensor]:
    return Executable(case.program.function, "cpu", case.numbers)([x.clone() for x in case.inputs])


def weight_gradients(function: Op) -> list[Op]:
    return [op for op in function.regions[0].block if op.name == "step.conv_weight_grad"]


def test_every_bit_of_a_step_stays_and_one_image_is_written_once() -> None:
    case = case_of()
    before = step_of(case)
    kept.cut(case.program.module)
    again = [op for op in weight_gradients(case.program.function) if any(is_copied(v) for v in op.operands)]
    assert len(again) == 2
    found = [o for o in opportunities(case.program.module, names=["reuse"]) if not o.why_not]
    activation, photograph = 6 * 16 * 12 * 12 * 2, 6 * 3 * 24 * 24 * 2
    assert [(o.change.bytes, o.change.saved) for o in found] == [(-n, n) for n in (activation, photograph)]
    assert sorted(take(case.program.module, ["reuse"])) == sorted(o.key for o in found)
    verify(case.program.module)
    run_pipeline(case.program.module, "cse,dce")
    assert not any(is_copied(v) for op in weight_gradients(case.program.function) for v in op.operands)
    masks = [op for op in case.program.function.regions[0].block if is_late(op) and op.name == "step.relu"]
    assert masks and all(op.attributes.get("again") for op in masks)
    assert all(torch.equal(old, new) for old, new in zip(before, step_of(case), strict=True))


def is_copied(value: object) -> bool:
    maker = base(value).op  # type: ignore[arg-type]
    return maker is not None and bool(maker.attributes.get("again"))


def test_without_a_budget_it_is_taken() -> None:
    case = case_of()
    assert any(key.startswith("reuse ") for key in kept.cut(case.program.module, limits=kept.WITHOUT_BUDGET))
    case = case_of()
    assert not any(key.startswith("reuse ") for key in kept.cut(case.program.module))


def test_convolutions_of_single_channels_compute_what_they_read() -> None:
    case = case_of(groups=16)
    kept.cut(case.program.module)
    (found,) = (o for o in opportunities(case.program.module, names=["reuse"]) if not o.why_not)
    assert "/0/" in found.site  # that of the photograph
