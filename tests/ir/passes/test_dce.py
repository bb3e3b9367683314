"""Dead code elimination."""

from __future__ import annotations

from tests.ir.toy import Add, Neg, Once, Print, Split, T, function
from wholestep import ir
from wholestep.ir.passes import run_pipeline


def test_chains_of_unused_ops_go_and_effects_stay() -> None:
    root, main, builder = function()
    a, b = main.regions[0].block.arguments
    kept = Split.build(builder, a, result_types=[T, T])
    Neg.build(builder, Neg.build(builder, Add.build(builder, kept.results[0], b).result).result)
    Print.build(builder, kept.results[1], result_types=[])
    ir.finish_function(main, [])
    (run,) = run_pipeline(root, "dce")
    assert [op.name for op in main.regions[0].block] == ["toy.split", "toy.print", "func.return"]
    assert (run.name, run.ops_before - run.ops_after) == ("dce", 3)
    ir.verify(root)


def test_what_only_dead_code_in_a_region_used_goes_too() -> None:
    root, main, builder = function()
    a, _ = main.regions[0].block.arguments
    outer = Neg.build(builder, a)
    inner = ir.Block()
    builder.create(Once, [], [], {}, [ir.Region([inner])])
    Neg.build(ir.Builder(inner), outer.result)
    ir.finish_function(main, [])
    run_pipeline(root, "dce")
    assert [op.name for op in root.walk()] == ["builtin.module", "func.func", "toy.once", "func.return"]
    ir.verify(root)
