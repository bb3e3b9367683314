"""The expand pass: text in, text out, and the same numbers."""

from __future__ import annotations

import pytest
import torch

import wholestep as ws
from wholestep import ir
from wholestep.dialects import context
from wholestep.errors import IRError
from wholestep.ir.builtin import lookup
from wholestep.ir.passes import run_pipeline
from wholestep.runtime.executor import Executable
from wholestep.transforms.expand import expanded

TEXT = """
"builtin.module"() ({
  "func.func"() ({
  ^bb0(%x: tensor<2x3xf32>):
    %0 = "step.silu"(%x) {phase = "forward"} : (tensor<2x3xf32>) -> tensor<2x3xf32>
    %1 = "step.softmax"(%0) {dim = 1 : i64} : (tensor<2x3xf32>) -> tensor<2x3xf32>
    "func.return"(%1) : (tensor<2x3xf32>) -> ()
  }) {sym_name = "main", function_type = (tensor<2x3xf32>) -> tensor<2x3xf32>} : () -> ()
}) : () -> ()
"""


def names(module: ir.Op) -> list[str]:
    return [op.name for op in lookup(module, "main").regions[0].block]


def test_one_kind() -> None:
    module = ir.parse(TEXT, context())
    run_pipeline(module, "expand{ops=silu}")
    assert names(module) == ["step.sigmoid", "step.mul", "step.softmax", "func.return"]
    first = lookup(module, "main").regions[0].block.first
    assert first is not None and first.phase == "forward"
    ir.verify(module)


def test_everything_gives_the_same_numbers() -> None:
    module = ir.parse(TEXT, context())
    x = torch.randn(2, 3)
    (before,) = Executable(lookup(module, "main"))([x])
    run_pipeline(module, "expand")
    ir.verify(module)
    assert not {"step.silu", "step.softmax"} & set(names(module))
    (after,) = Executable(lookup(module, "main"))([x])
    torch.testing.assert_close(before, after)


def test_required_expands_optimizers_alone() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    step = ws.compile(model, lambda m, x: m(x).sum(), optimizer, (torch.randn(4, 3),))
    module = step.program().clone()
    assert sum(op.name == "step.adam" for op in module.walk()) == 2
    run_pipeline(module, "expand{ops=required},cse")
    ir.verify(module)
    assert not any(op.name == "step.adam" for op in module.walk())
    assert {op.phase for op in module.walk() if op.name == "step.addcdiv"} == {"update"}


@pytest.mark.parametrize(
    ("kind", "fused"),
    [
        (torch.optim.AdamW, "step.fused_adamw"),
        (torch.optim.Adam, "step.fused_adam"),
        (torch.optim.SGD, "step.fused_sgd"),
    ],
)
def test_updates_are_one_kernel_each_on_cuda(kind: type[torch.optim.Optimizer], fused: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    step = ws.compile(model, lambda m, x: m(x).sum(), optimizer, (torch.randn(4, 3),))
    function = lookup(step.program(), "step")
    plain, same, cuda = expanded(function), expanded(function, "cpu"), expanded(function, torch.device("cuda"))
    texts = [[op.name for op in f.regions[0].block] for f in (plain, same, cuda)]
    assert texts[0] == texts[1] and fused not in texts[0]
    assert texts[2].count(fused) == 4
    ours = [op for op in cuda.regions[0].block if op.phase == "update"]
    assert all(op.name == fused or not any(r.type.rank for r in op.results) for op in ours)
    assert [op.name for op in ours if op.name == "step.cast"] == ["step.cast"]  # one rate for all parameters


def test_what_has_no_expansion_is_named() -> None:
    module = ir.parse(TEXT.replace("step.silu", "step.exp"), context())
    with pytest.raises(IRError, match=r"step\.exp has no expansion"):
        run_pipeline(module, "expand{ops=exp}")
