"""The IRDL text of a dialect, and what mlir-opt makes of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.ir.toy import toy
from wholestep import ir
from wholestep.ir.irdl import irdl_text


def test_text() -> None:
    dialect = ir.Dialect("mini")

    @dialect.op
    class Mix(ir.OpDef):
        """Everything IRDL can say."""

        region_count = 1
        x = ir.Operand(ir.FloatTensor)
        y = ir.Operand(ir.AnyType, optional=True)
        mode = ir.Attr("str", choices=("a", "b"))
        flag = ir.Attr("bool")
        note = ir.Attr("any", optional=True)
        out = ir.Result(variadic=True)

    assert irdl_text(dialect) == "\n".join(
        [
            "// The mini dialect for mlir-opt 22, generated from its declaration: do not edit.",
            "irdl.dialect @mini {",
            "  irdl.operation @mix {",
            '    %c0 = irdl.base "!builtin.tensor"',
            "    %c1 = irdl.any",
            '    %c2 = irdl.base "!builtin.tensor"',
            '    %c3 = irdl.is "a"',
            '    %c4 = irdl.is "b"',
            "    %c5 = irdl.any_of(%c3, %c4)",
            "    %c6 = irdl.is true",
            "    %c7 = irdl.is false",
            "    %c8 = irdl.any_of(%c6, %c7)",
            "    %c9 = irdl.region",
            "    irdl.operands(x: %c0, y: optional %c1)",
            "    irdl.results(out: variadic %c2)",
            '    irdl.attributes { "mode" = %c5, "flag" = %c8 }',
            "    irdl.regions(region0: %c9)",
            "  }",
            "}",
            "",
        ]
    )


@pytest.mark.parametrize(
    ("op", "accepted"),
    [
        ('"toy.add"(%x, %x) {alpha = 1} : (tensor<f32>, tensor<f32>) -> tensor<f32>', True),
        ('"toy.add"(%x, %x) {alpha = 1.0} : (tensor<f32>, tensor<f32>) -> tensor<f32>', True),
        ('"toy.add"(%x, %x) {alpha = "1"} : (tensor<f32>, tensor<f32>) -> tensor<f32>', False),
        ('"toy.add"(%x, %x) : (tensor<f32>, tensor<f32>) -> tensor<f32>', False),
        ('"toy.add"(%x, %x, %x) {alpha = 1} : (tensor<f32>, tensor<f32>, tensor<f32>) -> tensor<f32>', False),
        ('"toy.affine"(%x) {operandSegmentSizes = array<i32: 1, 0, 0>} : (tensor<f32>) -> tensor<f32>', True),
        ('"toy.affine"(%x) {operandSegmentSizes = array<i32: 1, 1, 0>} : (tensor<f32>) -> tensor<f32>', False),
        ('"toy.affine"(%x) : (tensor<f32>) -> tensor<f32>', False),
        ('"toy.join"(%x, %x) {mode = "stack", dims = array<i64>} : (tensor<f32>, tensor<f32>) -> tensor<f32>', True),
        ('"toy.join"() {mode = "pile", dims = array<i64>} : () -> tensor<f32>', False),
        ('"toy.once"() ({}) : () -> ()', True),
        ('"toy.once"() : () -> ()', False),
        ('"toy.constant"() {value = 1, type = f32} : () -> f32', True),
        ('"toy.constant"() {value = 1, type = 2} : () -> f32', False),
    ],
)
def test_mlir_opt_enforces_what_irdl_can_say(op: str, accepted: bool, mlir_opt: str, tmp_path: Path) -> None:
    declared, program = tmp_path / "toy.irdl.mlir", tmp_path / "program.mlir"
    declared.write_text(irdl_text(toy))
    program.write_text(f"func.func @f(%x: tensor<f32>) {{\n  {op}\n  return\n}}\n")
    command = [mlir_opt, f"--irdl-file={declared}", str(program)]
    verdict = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (verdict.returncode == 0) == accepted, verdict.stderr
