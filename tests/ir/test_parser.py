"""The parser: exact round trips, MLIR's own spelling, errors that point, and nothing else that escapes."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ir.toy import context, programs, simple
from wholestep import ir
from wholestep.errors import ParseError, VerifyError

relaxed = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def wrap(body: str, header: str = "^bb0(%x: tensor<2xf32>):", signature: str = "(tensor<2xf32>) -> ()") -> str:
    return (
        f'"builtin.module"() ({{\n  "func.func"() ({{\n  {header}\n    {body}\n    "func.return"() : () -> ()\n'
        f'  }}) {{sym_name = "main", function_type = {signature}}} : () -> ()\n}}) : () -> ()\n'
    )


def first_op(body: str, **options: str) -> ir.Op:
    root = ir.parse(wrap(body, **options), context(), verify=True)
    found = ir.lookup(root, "main").regions[0].block.first
    assert found is not None
    return found


def parse_error(text: str) -> ParseError:
    with pytest.raises(ParseError) as caught:
        ir.parse(text, context())
    return caught.value


@pytest.mark.parametrize("locations", [False, True])
def test_round_trip(locations: bool) -> None:
    root, _ = simple()
    text = ir.print_module(root, locations)
    again = ir.parse(text, context(), verify=True)
    assert ir.print_module(again, locations) == text
    if locations:
        assert ir.structural_hash(again) == ir.structural_hash(root)
        assert [op.loc for op in again.walk()] == [op.loc for op in root.walk()]


@given(programs())
@relaxed
def test_random_programs_round_trip(root: ir.Op) -> None:
    ir.verify(root)
    text = ir.print_module(root, locations=True)
    again = ir.parse(text, context(), verify=True)
    assert ir.print_module(again, locations=True) == text
    assert ir.structural_hash(again) == ir.structural_hash(root)
    bare = ir.print_module(root, names=False)
    assert ir.print_module(ir.parse(bare, context())) == bare


@given(st.data())
@relaxed
def test_mutated_text_raises_only_our_errors(data: st.DataObject) -> None:
    text = ir.print_module(data.draw(programs()), locations=True)
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 12)))
        middle = data.draw(
            st.sampled_from(["", "{", "}", "(", ")", "<", ">", '"', "%", "#", "^bb0:", "@", "-", "0x", "9" * 30, "//"])
            | st.sampled_from(
                [" : f64", "1.0e999", "tensor<", "tensor<99999999999999999999xf32>", "!a.b<", "array<i64: "]
            )
            | st.text(max_size=3)
        )
        text = text[:start] + middle + text[end:]
    try:
        again = ir.parse(text, context(), verify=True)
    except (ParseError, VerifyError):
        return
    printed = ir.print_module(again, locations=True)
    assert ir.print_module(ir.parse(printed, context()), locations=True) == printed


@given(st.text('"%{}()<>=:,#@^!-> \n\\abtensorxf32i641.0eloc', max_size=60))
@relaxed
def test_noise_raises_only_our_errors(text: str) -> None:
    with contextlib.suppress(ParseError, VerifyError):
        ir.parse(text, context(), verify=True)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1", 1),
        ("-9223372036854775808 : i64", -(1 << 63)),
        ("0x10 : i64", 16),
        ("1.000000e+00 : f64", 1.0),
        ("-2.5", -2.5),
        ("0x7FF0000000000000 : f64", float("inf")),
        ("true", True),
        ('"a\\0Ab\\"\\\\\\n\\C3\\A9"', 'a\nb"\\\né'),
        ("array<i64>", ()),
        ("array<i64: -1, 2>", (-1, 2)),
        ("array<i32: 1, 0>", ir.I32Array((1, 0))),
        ("[1, [unit, {}]]", [1, [None, {}]]),
        ('{a, "b c" = 1.5}', {"a": None, "b c": 1.5}),
        ("@main", ir.Symbol("main")),
        ('@"a b"', ir.Symbol("a b")),
        ("f32", ir.F32),
        ("complex<f64>", ir.ScalarType("complex<f64>")),
        ("tensor<0x4xcomplex<f32>>", ir.TensorType((0, 4), ir.ScalarType("complex<f32>"))),
        ("() -> ()", ir.FunctionType((), ())),
        ("(f32) -> ((f32) -> f32)", ir.FunctionType((ir.F32,), (ir.FunctionType((ir.F32,), (ir.F32,)),))),
        ('#toy.space<"hbm", 0 : i64>', ir.DialectAttribute("toy.space", ("hbm", 0))),
        ("!toy.token", ir.DialectType("toy.token")),
    ],
)
def test_attributes(written: str, value: object) -> None:
    op = first_op(f'%0 = "toy.constant"() {{value = 1, type = f32, toy.x = {written}}} : () -> f32')
    found = op.attributes["toy.x"]
    assert ir.freeze(found) == ir.freeze(value)
    assert type(found) is type(value)


def test_unit_and_empty_attributes() -> None:
    op = first_op('%0 = "toy.constant"() {value = 1, type = f32, toy.flag} : () -> f32')
    assert op.attributes == {"value": 1, "type": ir.F32, "toy.flag": None}


def test_mlirs_own_spelling() -> None:
    root = ir.parse(
        """
#loc1 = loc("model.py":3:8)
module_is_implicit // a comment
"""[:29]
        + """
"func.func"() <{function_type = (tensor<f32>) -> tensor<f32>, sym_name = "f"}> ({
^bb0(%arg0: tensor<f32> loc("x.py":1:1)):
  %a, %b = "toy.split"(%arg0) : (tensor<f32>) -> (tensor<f32>, tensor<f32>) loc(#loc2)
  %0:1 = "toy.sub"(%a#0, %b) : (tensor<f32>, tensor<f32>) -> (tensor<f32>) loc(unknown)
  "func.return"(%0#0) : (tensor<f32>) -> () loc(#loc1)
}) : () -> () loc("name"(#loc1))
#loc2 = loc("layer"(#loc1))
""",
        context(),
        verify=True,
    )
    main = ir.lookup(root, "f")
    assert main.loc == ir.Location("name", "model.py", 3)
    assert [op.loc for op in main.regions[0].block] == [
        ir.Location("layer", "model.py", 3),
        ir.UNKNOWN,
        ir.Location("", "model.py", 3),
    ]


def test_no_text_is_an_empty_module() -> None:
    assert ir.print_module(ir.parse("  // nothing\n", context())) == ir.print_module(ir.module())


def test_names_survive_and_numbers_do_not() -> None:
    text = wrap(
        '%7 = "toy.neg"(%x) : (tensor<2xf32>) -> tensor<2xf32>\n%w.1 = "toy.neg"(%7) : (tensor<2xf32>) -> tensor<2xf32>'
    )
    printed = ir.print_module(ir.parse(text, context()))
    assert "%0 = " in printed and "%w.1 = " in printed and "%7" not in printed


def test_sibling_regions_may_reuse_a_name() -> None:
    region = '"toy.once"() ({\n %y = "toy.neg"(%x) : (tensor<2xf32>) -> tensor<2xf32>\n }) : () -> ()\n'
    root = ir.parse(wrap(region + region), context(), verify=True)
    assert "%y_1 = " in ir.print_module(root)
    leak = parse_error(wrap(region + '"toy.print"(%y) : (tensor<2xf32>) -> ()'))
    assert "%y is not defined" in str(leak)


@pytest.mark.parametrize(
    ("body", "message", "line", "column"),
    [
        ('%0 = "toy.ngg"(%x) : (tensor<2xf32>) -> tensor<2xf32>', "unknown op 'toy.ngg'; did you mean toy.neg?", 4, 10),
        ('%0 = "toy.neg"(%y) : (tensor<2xf32>) -> tensor<2xf32>', "%y is not defined", 4, 20),
        ('%0 = "toy.neg"(%x) : (tensor<3xf32>) -> tensor<3xf32>', "%x is defined as tensor<2xf32> but used as", 4, 20),
        (
            '%0 = "toy.add"(%x, %x) : (tensor<2xf32>, f32) -> f32',
            "%x is defined as tensor<2xf32> but used as f32",
            4,
            24,
        ),
        ('%x = "toy.neg"(%x) : (tensor<2xf32>) -> tensor<2xf32>', "%x is defined twice", 4, 5),
        ('%0 = "toy.neg"(%x) : () -> tensor<2xf32>', "toy.neg has 1 operands but 0 operand types", 4, 5),
        ('%0:2 = "toy.neg"(%x) : (tensor<2xf32>) -> tensor<2xf32>', "toy.neg has 1 results but 2 are named", 4, 5),
        ('%0 = "toy.neg"(%x) : (tensor<2xf32>) -> ()', "toy.neg has 0 results but 1 are named", 4, 5),
        ('%0 = "toy.neg"(%x#1) : (tensor<2xf32>) -> tensor<2xf32>', "%x has one result", 4, 20),
        ('%0 = "toy.neg"(%x,) : (tensor<2xf32>) -> tensor<2xf32>', "expected a value after ','", 4, 23),
        ('%0 = "toy.neg"(%x) {a = 1, a = 2} : (tensor<2xf32>) -> f32', "the attribute 'a' is given twice", 4, 32),
        ('%0 = "toy.neg"(%x) {a = 1 : i32} : (tensor<2xf32>) -> f32', "integer attributes are i64 here", 4, 29),
        ('%0 = "toy.neg"(%x) {a = 99999999999999999999} : (f32) -> f32', "does not fit in 64 bits", 4, 29),
        ('%0 = "toy.neg"(%x) {a = 1.0e999} : (f32) -> f32', "does not fit in f64", 4, 29),
        ('%0 = "toy.neg"(%x) {a = "\\FF"} : (f32) -> f32', "not UTF-8", 4, 29),
        ('%0 = "toy.neg"(%x) {a = "\\q"} : (f32) -> f32', "unknown escape", 4, 29),
        ('%0 = "toy.neg"(%x) {a = "b} : (f32) -> f32', "this string is not closed", 4, 29),
        ('%0 = "toy.neg"(%x) {a = #loc} : (f32) -> f32', "expected a dialect's attribute", 4, 29),
        ('%0 = "toy.neg"(%x) : (tensor<?xf32>) -> f32', "static shape", 4, 27),
        ('%0 = "toy.neg"(%x) : (tensor<2xq7>) -> f32', "unknown element type 'q7'", 4, 27),
        ('%0 = "toy.neg"(%x) [^bb1] : (f32) -> f32', "successor blocks are not supported", 4, 24),
        (
            '%0 = "toy.neg"(%x) : (tensor<2xf32>) -> tensor<2xf32> loc(#gone)',
            "the location #gone is not defined",
            4,
            59,
        ),
        ("/", "unexpected character '/'", 4, 5),
    ],
)
def test_errors_point_at_the_place(body: str, message: str, line: int, column: int) -> None:
    error = parse_error(wrap(body))
    assert message in str(error)
    assert (error.line, error.column) == (line, column)
    source, caret = str(error).splitlines()[-2:]
    assert source == "    " + body.splitlines()[0]
    assert caret == " " * (column - 1) + "^"


def test_errors_of_verification_point_too() -> None:
    text = wrap('%0 = "toy.neg"(%x) {beta = 1} : (tensor<2xf32>) -> tensor<2xf32>')
    with pytest.raises(VerifyError) as caught:
        ir.parse(text, context(), "a.mlir", verify=True)
    first, source, caret = str(caught.value).splitlines()
    assert first.startswith("a.mlir:4:5: error: toy.neg: has no attribute 'beta'")
    assert source.startswith('    %0 = "toy.neg"') and caret == "    ^"


@pytest.mark.parametrize(
    "text",
    [
        '"toy.once"() ({ ' * 5000,
        '"toy.print"() {a = ' + "[" * 100_000,
        '"toy.print"() {a = ' + "{a = " * 100_000,
        '"toy.print"() : ' + "(" * 100_000,
        '"toy.print"() {a = ' + "!a.b<" * 100_000,
        '"toy.print"() : () -> () loc(' + '"a"(' * 100_000,
        '"toy.print"() : () -> () loc(#a)\n#a = loc("x"(#a))',
    ],
)
def test_deep_nesting_is_refused(text: str) -> None:
    parse_error(text)


def test_the_same_op_reads_the_same_on_one_line_and_on_many() -> None:
    line = (
        '%0 = "toy.join"(%x, %x) {mode = "concat", dims = array<i64: 0>} : '
        "(tensor<2xf32>, tensor<2xf32>) -> tensor<4xf32>"
    )
    spread = line.replace(" ", "\n // spread\n ")
    assert ir.print_module(ir.parse(wrap(line), context())) == ir.print_module(ir.parse(wrap(spread), context()))


def test_attributes_of_equal_text_are_not_shared() -> None:
    line = '"toy.print"(%x) {toy.a = 1} : (tensor<2xf32>) -> ()\n'
    first = first_op(line + line)
    assert first.next is not None
    first.attributes["toy.a"] = 2
    assert first.next.attributes["toy.a"] == 1
