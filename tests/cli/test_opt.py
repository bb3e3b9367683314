"""`wholestep opt`: text in, passes, text out; and what it says when the text or the request is wrong."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from wholestep.cli import main

IDENTITY = """"builtin.module"() ({
  "func.func"() ({
  ^bb0(%a: tensor<2xf32>):
    "func.return"(%a) : (tensor<2xf32>) -> () loc("out"("model.py":3:0))
  }) {function_type = (tensor<2xf32>) -> tensor<2xf32>, sym_name = "f"} : () -> ()
}) : () -> ()
"""
TWICE = """"builtin.module"() ({
  "func.func"() ({
  ^bb0(%a: tensor<2xf32>):
    %x = "step.exp"(%a) : (tensor<2xf32>) -> tensor<2xf32>
    %y = "step.exp"(%a) : (tensor<2xf32>) -> tensor<2xf32>
    %unused = "step.tanh"(%x) : (tensor<2xf32>) -> tensor<2xf32>
    "func.return"(%x, %y) : (tensor<2xf32>, tensor<2xf32>) -> ()
  }) {function_type = (tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>), sym_name = "f"} : () -> ()
}) : () -> ()
"""
PLAIN = IDENTITY.replace(' loc("out"("model.py":3:0))', "")


@pytest.fixture
def program(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "program.mlir"
        path.write_text(text)
        return str(path)

    return write


def test_round_trip_with_and_without_locations(program, capsys):
    path = program(IDENTITY)
    assert main.main(["opt", path]) == 0
    assert capsys.readouterr().out == PLAIN
    assert main.main(["opt", path, "--locations"]) == 0
    assert capsys.readouterr().out == IDENTITY


def test_standard_input_and_output_file(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(PLAIN))
    output = tmp_path / "out.mlir"
    assert main.main(["opt", "-", "-o", str(output)]) == 0
    assert capsys.readouterr().out == "" and output.read_text() == PLAIN


def test_passes_run_in_order(program, capsys):
    path = program(TWICE)
    assert main.main(["opt", path, "--passes", "cse,dce"]) == 0
    text = capsys.readouterr().out
    assert text.count("step.exp") == 1 and "step.tanh" not in text
    assert main.main(["opt", path, "--passes", "dce"]) == 0
    text = capsys.readouterr().out
    assert text.count("step.exp") == 2 and "step.tanh" not in text


def test_an_unknown_pass_is_named(program, capsys):
    assert main.main(["opt", program(PLAIN), "--passes", "cse,no-such-pass"]) == 1
    printed = capsys.readouterr()
    assert "no-such-pass" in printed.err and printed.out == ""


def test_list_names_every_pass_with_a_line(capsys):
    assert main.main(["opt", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"cse", "dce"} <= {line.split()[0] for line in lines}
    assert all(len(line.split()) > 1 for line in lines)


def test_a_parse_error_points_at_the_place(program, capsys):
    path = program(PLAIN.replace('return"(%a)', 'return"(%b)'))
    assert main.main(["opt", path]) == 1
    printed = capsys.readouterr()
    first, source, caret = printed.err.splitlines()[:3]
    assert first.startswith(f"{path}:4:19: error:") and printed.out == ""
    assert source[caret.index("^") :].startswith("%b")


def test_a_program_that_breaks_a_rule_is_located(program, capsys):
    path = program(PLAIN.replace("function_type = (tensor<2xf32>)", "function_type = (tensor<3xf32>)"))
    assert main.main(["opt", path, "--verify-only"]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith(f"{path}:2:") and "Traceback" not in printed.err


def test_verify_only_prints_nothing(program, capsys):
    assert main.main(["opt", program(PLAIN), "--verify-only"]) == 0
    assert capsys.readouterr() == ("", "")


def test_unregistered_ops_need_permission(program, capsys):
    path = program(PLAIN.replace('    "func.return"', '    "mine.op"() : () -> ()\n    "func.return"'))
    assert main.main(["opt", path]) == 1
    assert "mine.op" in capsys.readouterr().err
    assert main.main(["opt", path, "--allow-unregistered"]) == 0
    assert '"mine.op"() : () -> ()' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no program was named"),
        (["/no/such/file.mlir"], "cannot read /no/such/file.mlir: No such file"),
        (["x", "--verify-only", "--passes", "cse"], "drop"),
    ],
)
def test_bad_requests(arguments, message, capsys):
    assert main.main(["opt", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_text_that_is_not_utf8(tmp_path, capsys):
    path = tmp_path / "binary"
    path.write_bytes(b"module \xff")
    assert main.main(["opt", str(path)]) == 1
    assert "byte 7 is not UTF-8" in capsys.readouterr().err


def test_an_output_that_cannot_be_written(program, tmp_path, capsys):
    assert main.main(["opt", program(PLAIN), "-o", str(tmp_path)]) == 1
    assert f"cannot write {tmp_path}: Is a directory" in capsys.readouterr().err


def test_a_plan_is_proved(program, capsys):
    plan = (Path(__file__).parents[1] / "golden" / "move.mlir").read_text()
    wait = '    "move.wait"(%1) {stream = 0 : i64} : (!move.token) -> ()\n'
    assert wait in plan and main.main(["opt", program(plan), "--verify-only"]) == 0
    assert main.main(["opt", program(plan.replace(wait, "")), "--verify-only"]) == 1
    assert "nothing orders it after copy 0" in capsys.readouterr().err
