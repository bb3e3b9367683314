"""step.micro_batches and step.all_finite: their rules, their text, what they refuse."""

from __future__ import annotations

import subprocess

import pytest
import torch

from wholestep.dialects import context, reference
from wholestep.errors import VerifyError
from wholestep.ir import parse, print_module, verify
from wholestep.ir.builtin import lookup
from wholestep.runtime.executor import Executable
from wholestep.transforms.expand import expand_where

TEXT = """
"builtin.module"() ({
  "func.func"() ({
  ^bb0(%x: tensor<2x3xf32>, %n: tensor<f32>):
    %more = "step.add"(%n, %n) : (tensor<f32>, tensor<f32>) -> tensor<f32>
    %y = "step.mul"(%x, %n) : (tensor<2x3xf32>, tensor<f32>) -> tensor<2x3xf32>
    "func.return"(%y, %y, %n, %n, %more) : (tensor<2x3xf32>, tensor<2x3xf32>, tensor<f32>, tensor<f32>, tensor<f32>) -> ()
  }) {sym_name = "part", function_type = (tensor<2x3xf32>, tensor<f32>) -> (tensor<2x3xf32>, tensor<2x3xf32>, tensor<f32>, tensor<f32>, tensor<f32>)} : () -> ()
  "func.func"() ({
  ^bb0(%x: tensor<6x3xf32>, %n: tensor<f32>):
    %r:5 = "step.micro_batches"(%x, %n) {callee = @part, count = 3 : i64, given = ["split", "same"], taken = ["sum", "concat", "mean", "last", "last"], carried = array<i64: -1, 4>} : (tensor<6x3xf32>, tensor<f32>) -> (tensor<2x3xf32>, tensor<6x3xf32>, tensor<f32>, tensor<f32>, tensor<f32>)
    "func.return"(%r#0, %r#1, %r#2, %r#3, %r#4) : (tensor<2x3xf32>, tensor<6x3xf32>, tensor<f32>, tensor<f32>, tensor<f32>) -> ()
  }) {sym_name = "step", function_type = (tensor<6x3xf32>, tensor<f32>) -> (tensor<2x3xf32>, tensor<6x3xf32>, tensor<f32>, tensor<f32>, tensor<f32>)} : () -> ()
}) : () -> ()
"""  # noqa: E501


def read(text: str = TEXT):
    root = parse(text, context())
    verify(root)
    return root


def test_what_a_loop_over_micro_batches_computes():
    x = torch.arange(18.0).reshape(6, 3)
    total, rows, mean, last, carried = Executable(lookup(read(), "step"))([x, torch.tensor(1.0)])
    parts = [part * factor for part, factor in zip(x.chunk(3), (1, 2, 4), strict=True)]  # n is doubled every time
    assert torch.equal(total, sum(parts)) and torch.equal(rows, torch.cat(parts))
    assert float(mean) == pytest.approx(7 / 3) and float(last) == 4.0 and float(carried) == 8.0


def test_text_is_read_back():
    root = read()
    assert print_module(parse(print_module(root), context())) == print_module(root)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("@part", "@absent", "no function @absent"),
        ("count = 3", "count = 2", "does not give 2 micro-batches"),
        ('["split", "same"]', '["split", "often"]', "given one of"),
        ('["split", "same"]', '["split"]', "one entry per input or result"),
        ('"sum", "concat"', '"concat", "concat"', "do not make a"),
        ("array<i64: -1, 4>", "array<i64: -1, 0>", "cannot take the place of"),
        ("array<i64: -1, 4>", "array<i64: -1, 7>", "cannot take the place of"),
    ],
)
def test_loops_that_do_not_fit_are_refused(old, new, message):
    with pytest.raises(VerifyError, match=message):
        read(TEXT.replace(old, new))


def test_mlir_opt_accepts_a_loop(mlir_opt, tmp_path):
    """With one type per group, which is all IRDL can say."""
    text = """
"builtin.module"() ({
  "func.func"() ({
  ^bb0(%x: tensor<2x3xf32>):
    "func.return"(%x) : (tensor<2x3xf32>) -> ()
  }) {sym_name = "part", function_type = (tensor<2x3xf32>) -> tensor<2x3xf32>} : () -> ()
  "func.func"() ({
  ^bb0(%x: tensor<6x3xf32>):
    %r = "step.micro_batches"(%x) {callee = @part, count = 3 : i64, given = ["split"], taken = ["sum"], carried = array<i64: -1>} : (tensor<6x3xf32>) -> tensor<2x3xf32>
    "func.return"(%r) : (tensor<2x3xf32>) -> ()
  }) {sym_name = "step", function_type = (tensor<6x3xf32>) -> tensor<2x3xf32>} : () -> ()
}) : () -> ()
"""  # noqa: E501
    irdl, program = tmp_path / "step.irdl.mlir", tmp_path / "loop.mlir"
    irdl.write_text(reference.pages()["docs/dialects/step.irdl.mlir"])
    program.write_text(print_module(read(text)))
    command = [mlir_opt, f"--irdl-file={irdl}", "--mlir-print-op-generic", str(program)]
    verdict = subprocess.run(command, capture_output=True, text=True, check=False)
    assert verdict.returncode == 0, verdict.stderr[:2000]
    verify(parse(verdict.stdout, context()))


FINITE = """
"builtin.module"() ({
  "func.func"() ({
  ^bb0(%x: tensor<3xf32>, %y: tensor<3xf32>):
    %r = "step.all_finite"(%x, %y) : (tensor<3xf32>, tensor<3xf32>) -> tensor<i1>
    "func.return"(%r) : (tensor<i1>) -> ()
  }) {sym_name = "f", function_type = (tensor<3xf32>, tensor<3xf32>) -> tensor<i1>} : () -> ()
}) : () -> ()
"""


@pytest.mark.parametrize("bad", [None, float("inf"), float("-inf"), float("nan"), 3.4e38])
@pytest.mark.parametrize("expanded", [False, True])
def test_all_finite(bad, expanded):
    function = lookup(read(FINITE), "f")
    if expanded:
        assert expand_where(function, lambda op: op.name == "step.all_finite")
    x, y = torch.ones(3), torch.zeros(3)
    if bad is not None:
        y[1] = bad
    (found,) = Executable(function)([x, y])
    assert bool(found) == (bad is None or bad == 3.4e38)
