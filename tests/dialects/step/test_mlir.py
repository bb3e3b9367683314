"""Stock mlir-opt accepts every op of the dialect, each with all its samples, and hands back the same program."""

from __future__ import annotations

import subprocess

from wholestep.dialects import context, reference
from wholestep.dialects.step import StepBuilder, step, tensor_type
from wholestep.ir import add_function, finish_function, module, parse, print_module, verify

from .harness import flat, regroup
from .samples import SAMPLES


def mixed_group(op) -> bool:
    """IRDL gives all values of a variadic group one type (see docs/architecture.md)."""
    groups = op.definition.segments(op.operands, op.attributes)
    declared = [f for f in op.definition.result_fields if f.variadic]
    groups += [list(op.results[len(op.definition.result_fields) - 1 :])] if declared else []
    return any(isinstance(g, list) and len({v.type for v in g}) > 1 for g in groups)


def test_mlir_opt_accepts_every_op(mlir_opt, tmp_path):
    root, left_out, seen = module(), set(), set()
    for name, cases in SAMPLES.items():
        for index, (operands, attributes) in enumerate(cases):
            function = add_function(root, f"{name}_{index}", [tensor_type(t) for t in flat(operands)])
            block = function.regions[0].block
            op = step.ops[name].build(StepBuilder(block), *regroup(operands, block.arguments), **attributes)
            finish_function(function, op.results)
            if mixed_group(op):
                left_out.add(name)
                function.erase()
            else:
                seen.add(name)
    verify(root)
    assert set(step.ops) - seen <= {"adafactor", "fused", "micro_batches", "row_sums"}, sorted(set(step.ops) - seen)
    irdl, program = tmp_path / "step.irdl.mlir", tmp_path / "all.mlir"
    irdl.write_text(reference.pages()["docs/dialects/step.irdl.mlir"])
    text = print_module(root)
    program.write_text(text)
    command = [mlir_opt, f"--irdl-file={irdl}", "--mlir-print-op-generic", str(program)]
    verdict = subprocess.run(command, capture_output=True, text=True, check=False)
    assert verdict.returncode == 0, verdict.stderr[:2000]
    again = parse(verdict.stdout, context())
    assert [f.attributes["sym_name"] for f in again.regions[0].block] == [
        f.attributes["sym_name"] for f in root.regions[0].block
    ]
    verify(again)
