"""Stock mlir-opt judges plans by the generated IRDL file."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from wholestep import dialects, ir
from wholestep.dialects import reference
from wholestep.dialects.move import move, verify_plan

from .build import RandomPlan

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "move.mlir"


def judge(mlir_opt: str, tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    irdl, program = tmp_path / "all.irdl.mlir", tmp_path / "plan.mlir"
    irdl.write_text("".join(page for name, page in reference.pages().items() if name.endswith(".irdl.mlir")))
    program.write_text(text)
    command = [mlir_opt, f"--irdl-file={irdl}", "--mlir-print-op-generic", str(program)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_golden_plan_has_every_op_and_is_proven() -> None:
    root = ir.parse(GOLDEN.read_text(), dialects.context(), verify=True)
    verify_plan(root)
    assert {op.name for op in root.walk()} >= {definition.name for definition in move.ops.values()}


def test_mlir_opt_hands_back_a_random_plan(mlir_opt: str, tmp_path: Path) -> None:
    plan = RandomPlan(5, 40, 3)
    verdict = judge(mlir_opt, tmp_path, ir.print_module(plan.module, locations=True))
    assert verdict.returncode == 0, verdict.stderr[:2000]
    again = ir.parse(verdict.stdout, dialects.context(), verify=True)
    assert ir.structural_hash(again) == ir.structural_hash(plan.module)
    verify_plan(again)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('lifetime = "grad"', 'lifetime = "eternal"'),
        ('#move.space<"pinned", 0 : i64>', '#move.space<0 : i64, "pinned">'),
        ("array<i32: 2, 2, 0>", "array<i32: 2, 2, 1>"),
        ("stream = 2 : i64, ", ""),
        ('"move.wait"(%1)', '"move.halt"(%1)'),
        ("(!move.token) -> ()", "(!move.ticket) -> ()"),
        ('kind = "all_reduce"', 'kind = "all_reduced"'),
    ],
)
def test_mlir_opt_refuses_what_irdl_can_see(old: str, new: str, mlir_opt: str, tmp_path: Path) -> None:
    text = GOLDEN.read_text()
    assert old in text
    assert judge(mlir_opt, tmp_path, text.replace(old, new, 1)).returncode != 0
