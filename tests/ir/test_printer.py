"""The printer: the exact text, names, phases, locations."""

from __future__ import annotations

from pathlib import Path

from tests.ir.toy import Add, Split, T, function, simple
from wholestep import ir

ROOT = Path(__file__).resolve().parents[2]


def test_text_of_a_module() -> None:
    root, _ = simple()
    t = "tensor<2x3xf32>"
    assert ir.print_module(root) == "\n".join(
        [
            '"builtin.module"() ({',
            '  "func.func"() ({',
            f"  ^bb0(%arg0: {t}, %arg1: {t}):",
            "    // ---- forward ----",
            f'    %0 = "toy.add"(%arg0, %arg1) {{alpha = 1 : i64, phase = "forward"}} : ({t}, {t}) -> {t}',
            f'    %1:2 = "toy.split"(%0) {{phase = "forward"}} : ({t}) -> ({t}, {t})',
            "    // ---- backward ----",
            '    %d = "toy.affine"(%1#1, %0) {note = [1 : i64, 1.0 : f64, true], '
            f'operandSegmentSizes = array<i32: 1, 0, 1>, phase = "backward"}} : ({t}, {t}) -> {t}',
            f'    "func.return"(%d) : ({t}) -> ()',
            f'  }}) {{sym_name = "main", function_type = ({t}, {t}) -> {t}}} : () -> ()',
            "}) : () -> ()",
            "",
        ]
    )


def test_empty_module_and_region_without_a_block() -> None:
    assert ir.print_module(ir.module()) == '"builtin.module"() ({\n^bb0:\n}) : () -> ()\n'
    assert ir.print_op(ir.Op(ir.Module, regions=[ir.Region()])) == '"builtin.module"() ({}) : () -> ()\n'


def test_names_are_unique_and_clean() -> None:
    _, main, builder = function()
    a, b = main.regions[0].block.arguments
    a.name, b.name = "w x", "w_x"
    for name in ("w x", "w_x_1", "0", "é-"):
        Add.build(builder, a, b).result.name = name
    text = ir.print_op(main)
    assert "(%w_x: tensor<2x3xf32>, %w_x_1: tensor<2x3xf32>)" in text
    assert [line.split(" =")[0].strip() for line in text.splitlines() if ' = "toy' in line] == [
        "%w_x_2",
        "%w_x_1_1",
        "%_0",
        "%__",
    ]
    assert "%w_x" not in ir.print_op(main, names=False)


def test_each_function_counts_from_zero() -> None:
    root, main, builder = function()
    a, b = main.regions[0].block.arguments
    Add.build(builder, a, b)
    _, other, builder = function(name="other", root=root)
    Add.build(builder, *other.regions[0].block.arguments)
    assert ir.print_module(root).count("%0 = ") == 2


def test_an_op_alone_prints_on_one_line_and_a_detached_one_too() -> None:
    _, main, builder = function()
    a, _ = main.regions[0].block.arguments
    parts = Split.build(builder, a, result_types=[T, T]).results
    add = Add.build(builder, parts[1], parts[1])
    assert str(add).startswith('%1 = "toy.add"(%0#1, %0#1) {') and "\n" not in str(add)
    assert str(add.detach()).startswith('%1 = "toy.add"(%0#1, %0#1) {')


def test_locations() -> None:
    _, main, builder = function()
    a, b = main.regions[0].block.arguments
    for loc in (ir.Location("l", "f.py", 3), ir.Location("l"), ir.Location("", 'f".py', 3), ir.UNKNOWN):
        builder.loc = loc
        Add.build(builder, a, b)
    ends = [line.split("xf32>")[-1] for line in ir.print_op(main, locations=True).splitlines() if '"toy.add"' in line]
    assert ends == [' loc("l"("f.py":3:0))', ' loc("l")', ' loc("f\\".py":3:0)', ""]
    assert "loc(" not in ir.print_op(main)
