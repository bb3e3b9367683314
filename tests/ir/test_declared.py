"""Types and attributes that a dialect declares: what operands accept, the text, IRDL, the reference page."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from wholestep import ir
from wholestep.dialects import reference
from wholestep.errors import VerifyError
from wholestep.ir.irdl import irdl_text

memory = ir.Dialect("memory", "A dialect with types and attributes of its own.")
AnyBuffer = memory.declare_type("buffer", "a tensor in a space", tensor="type", space="str")
AnyToken = memory.declare_type("token", "something has finished")
PLACE = memory.declare_attribute("place", "where", kind="str", index="int")
TOKEN = ir.DialectType("memory.token")
BUFFER = ir.DialectType("memory.buffer", (ir.TensorType((4,), ir.F32), "hbm"))


@memory.op
class Make(ir.OpDef):
    """A buffer and a token."""

    place = ir.Attr("enum", declared=PLACE)
    buffer = ir.Result(AnyBuffer)
    token = ir.Result(AnyToken)


@memory.op
class Use(ir.OpDef):
    """Takes both."""

    pure = False
    buffer = ir.Operand(AnyBuffer)
    token = ir.Operand(AnyToken)
    done = ir.Result(AnyToken)


def program() -> tuple[ir.Op, ir.Op, ir.Op]:
    root = ir.module()
    main = ir.add_function(root, "main", [])
    b = ir.Builder(main.regions[0].block)
    make = Make.build(b, place=ir.DialectAttribute(PLACE, ("hbm", 0)), result_types=[BUFFER, TOKEN])
    use = Use.build(b, *make.results, result_types=[TOKEN])
    ir.finish_function(main, [])
    return root, make, use


def test_verify() -> None:
    root, make, use = program()
    ir.verify(root)
    make.attributes["place"] = ir.DialectAttribute("memory.time", ("now", 0))
    with pytest.raises(VerifyError, match=r"attribute 'place' is #memory.time<.*>, expected #memory.place"):
        ir.verify(root)
    make.attributes["place"] = "hbm"
    with pytest.raises(VerifyError, match=r"attribute 'place' is \"hbm\", expected #memory.place"):
        ir.verify(root)
    root, make, use = program()
    use.set_operands(reversed(use.operands))
    with pytest.raises(VerifyError, match=r"operand 'buffer' is !memory.token, expected !memory.buffer"):
        ir.verify(root)


def test_round_trip() -> None:
    root, _, use = program()
    use.loc = ir.Location("layer", "model.py", 3)
    text = ir.print_module(root, locations=True)
    assert '-> !memory.token loc("layer"("model.py":3:0))' in text
    again = ir.parse(text, ir.Context([memory]), verify=True)
    assert ir.print_module(again, locations=True) == text


@pytest.mark.parametrize("gap", ["", " ", "\n "])
def test_a_result_type_on_one_line_keeps_its_parameters(gap: str) -> None:
    """The shortcut for an op on one line takes a type without parameters, and leaves one with them to the tokens."""
    text = f'%0 = "memory.make"() {{place = #memory.place<"a", 0 : i64>}} : () -> !memory.buffer{gap}<f32, "hbm">'
    op = ir.parse(text, ir.Context([memory])).regions[0].block.first
    assert op is not None and op.result.type is ir.DialectType("memory.buffer", (ir.F32, "hbm"))


def test_names_are_declared_once() -> None:
    dialect = ir.Dialect("once")
    dialect.declare_type("thing", "a type")
    with pytest.raises(ValueError, match=r"once\.thing is declared twice"):
        dialect.declare_attribute("thing", "an attribute")
    with pytest.raises(ValueError, match=r"once\.thing is declared twice"):

        @dialect.op
        class Thing(ir.OpDef):
            """An op of that name."""


def test_irdl_text() -> None:
    lines = irdl_text(memory).splitlines()
    assert lines[2:19] == [
        "  irdl.type @buffer {",
        '    %c0 = irdl.base "#builtin.type"',
        '    %c1 = irdl.base "#builtin.string"',
        "    irdl.parameters(tensor: %c0, space: %c1)",
        "  }",
        "  irdl.type @token {",
        "  }",
        "  irdl.attribute @place {",
        '    %c0 = irdl.base "#builtin.string"',
        '    %c1 = irdl.base "#builtin.integer"',
        "    irdl.parameters(kind: %c0, index: %c1)",
        "  }",
        "  irdl.operation @make {",
        "    %c0 = irdl.base @memory::@buffer",
        "    %c1 = irdl.base @memory::@token",
        "    %c2 = irdl.base @memory::@place",
        "    irdl.results(buffer: %c0, token: %c1)",
    ]


def test_mlir_opt(mlir_opt: str, tmp_path: Path) -> None:
    root, make, use = program()
    irdl, text = tmp_path / "memory.irdl.mlir", tmp_path / "program.mlir"
    irdl.write_text(irdl_text(memory))

    def accepts() -> bool:
        text.write_text(ir.print_module(root))
        command = [mlir_opt, f"--irdl-file={irdl}", str(text)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60).returncode == 0

    assert accepts()
    make.attributes["place"] = ir.DialectAttribute(PLACE, (0, "hbm"))
    assert not accepts()
    make.attributes["place"] = ir.DialectAttribute(PLACE, ("hbm", 0))
    use.set_operands(reversed(use.operands))
    assert not accepts()


def test_reference_page() -> None:
    page = reference.page(memory)
    assert "- `!memory.buffer<tensor: type, space: str>`: a tensor in a space\n- `!memory.token`: " in page
    assert "- `#memory.place<kind: str, index: int>`: where\n" in page
    assert "| attribute | `place` | #memory.place |" in page
