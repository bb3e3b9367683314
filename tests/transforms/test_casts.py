"""The place-casts pass: text in, text out, and the same numbers."""

from __future__ import annotations

import torch

from wholestep import ir
from wholestep.dialects import context
from wholestep.dialects.step import torch_dtype
from wholestep.ir.builtin import lookup
from wholestep.ir.passes import run_pipeline
from wholestep.runtime.executor import Executable


def function(arguments: str, body: str, results: str, types: str) -> ir.Op:
    """A module of one function from the lines of its body."""
    inputs = ", ".join(part.split(": ")[1] for part in arguments.split(", "))
    text = f"""
"builtin.module"() ({{
  "func.func"() ({{
  ^bb0({arguments}):
{body}
    "func.return"({results}) : ({types}) -> ()
  }}) {{sym_name = "main", function_type = ({inputs}) -> ({types})}} : () -> ()
}}) : () -> ()
"""
    return ir.parse(text, context(), verify=True)


def run(module: ir.Op) -> list[torch.Tensor]:
    main = lookup(module, "main")
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for argument in main.regions[0].block.arguments:
        dtype = torch_dtype(argument.type.element)
        if dtype is torch.int64:
            inputs.append(torch.randint(0, 2, argument.type.shape, generator=generator))
        else:
            inputs.append(torch.randn(argument.type.shape, generator=generator).to(dtype))
    return Executable(main)(inputs)


def placed(module: ir.Op) -> list[str]:
    """What is left after the pass, one short line per op: name, operand types, result type. Numbers must not change."""
    before = run(module)
    run_pipeline(module, "place-casts")
    ir.verify(module)
    for mine, want in zip(run(module), before, strict=True):
        assert mine.dtype is want.dtype
        torch.testing.assert_close(mine, want, rtol=0, atol=0)
    lines = []
    for op in lookup(module, "main").regions[0].block:
        if not op.definition.terminator:
            types = ", ".join(str(v.type)[7:-1] for v in op.operands)
            lines.append(f"{op.name[5:]} {types} -> {op.results[0].type.text[7:-1]}")
    return lines


CAST = '"step.cast"({0}) {{dtype = {1}}} : (tensor<{2}>) -> tensor<{3}>'


def cast(name: str, x: str, source: str, target: str) -> str:
    return f"%{name} = " + CAST.format(f"%{x}", target.rpartition("x")[2], source, target)


def test_up_and_down_again_is_nothing() -> None:
    module = function(
        "%x: tensor<2x3xbf16>",
        "\n".join([cast("a", "x", "2x3xbf16", "2x3xf32"), cast("b", "a", "2x3xf32", "2x3xbf16")]),
        "%b",
        "tensor<2x3xbf16>",
    )
    assert placed(module) == []


def test_a_rounding_is_never_folded_away() -> None:
    module = function(
        "%x: tensor<2x3xf32>",
        "\n".join([cast("a", "x", "2x3xf32", "2x3xbf16"), cast("b", "a", "2x3xbf16", "2x3xf32")]),
        "%b",
        "tensor<2x3xf32>",
    )
    assert placed(module) == ["cast 2x3xf32 -> 2x3xbf16", "cast 2x3xbf16 -> 2x3xf32"]


def test_f16_to_bf16_is_not_exact_either_way() -> None:
    module = function(
        "%x: tensor<2x3xf16>",
        "\n".join([cast("a", "x", "2x3xf16", "2x3xbf16"), cast("b", "a", "2x3xbf16", "2x3xf16")]),
        "%b",
        "tensor<2x3xf16>",
    )
    assert len(placed(module)) == 2


def test_a_chain_of_widenings_is_one_cast() -> None:
    lines = [cast("a", "x", "4xf16", "4xf32"), cast("b", "a", "4xf32", "4xf64"), cast("c", "b", "4xf64", "4xbf16")]
    module = function("%x: tensor<4xf16>", "\n".join(lines), "%c", "tensor<4xbf16>")
    assert placed(module) == ["cast 4xf16 -> 4xbf16"]


def test_before_what_repeats() -> None:
    body = '%a = "step.broadcast"(%x) {shape = array<i64: 8, 3>} : (tensor<3xf32>) -> tensor<8x3xf32>\n'
    module = function("%x: tensor<3xf32>", body + cast("b", "a", "8x3xf32", "8x3xbf16"), "%b", "tensor<8x3xbf16>")
    assert placed(module) == ["cast 3xf32 -> 3xbf16", "broadcast 3xbf16 -> 8x3xbf16"]


SLICE = (
    '%b = "step.slice"(%{0}) {{dim = 0 : i64, start = 1 : i64, end = 3 : i64, stride = 1 : i64}} '
    ": (tensor<8x3x{1}>) -> tensor<2x3x{1}>\n"
)


def test_after_what_picks() -> None:
    body = cast("a", "x", "8x3xf32", "8x3xbf16") + "\n" + SLICE.format("a", "bf16")
    module = function("%x: tensor<8x3xf32>", body, "%b", "tensor<2x3xbf16>")
    assert placed(module) == ["slice 8x3xf32 -> 2x3xf32", "cast 2x3xf32 -> 2x3xbf16"]


def test_not_where_the_whole_is_cast_anyway() -> None:
    body = cast("a", "x", "8x3xf32", "8x3xbf16") + "\n" + SLICE.format("a", "bf16")
    module = function("%x: tensor<8x3xf32>", body, "%a, %b", "tensor<8x3xbf16>, tensor<2x3xbf16>")
    assert placed(module) == ["cast 8x3xf32 -> 8x3xbf16", "slice 8x3xbf16 -> 2x3xbf16"]


def test_rows_of_a_table() -> None:
    body = cast("a", "x", "50x3xf32", "50x3xbf16") + "\n"
    body += '%b = "step.embedding"(%a, %i) {padding_idx = -1 : i64} '
    body += ": (tensor<50x3xbf16>, tensor<4xi64>) -> tensor<4x3xbf16>"
    module = function("%x: tensor<50x3xf32>, %i: tensor<4xi64>", body, "%b", "tensor<4x3xbf16>")
    assert placed(module) == ["embedding 50x3xf32, 4xi64 -> 4x3xf32", "cast 4x3xf32 -> 4x3xbf16"]


def test_through_a_transpose_and_back() -> None:
    body = cast("a", "x", "2x3xbf16", "2x3xf32") + "\n"
    body += '%b = "step.transpose"(%a) {order = array<i64: 1, 0>} : (tensor<2x3xf32>) -> tensor<3x2xf32>\n'
    body += '%s = "step.sum"(%b) {dims = array<i64: 0>, keepdim = false} : (tensor<3x2xf32>) -> tensor<2xf32>\n'
    body += cast("c", "b", "3x2xf32", "3x2xbf16")
    module = function("%x: tensor<2x3xbf16>", body, "%c, %s", "tensor<3x2xbf16>, tensor<2xf32>")
    assert placed(module) == ["transpose 2x3xbf16 -> 3x2xbf16", "cast 3x2xbf16 -> 3x2xf32", "sum 3x2xf32 -> 2xf32"]


def test_joined_before_they_are_widened() -> None:
    body = "\n".join(
        [
            cast("a", "x", "2x3xbf16", "2x3xf32"),
            cast("b", "y", "4x3xbf16", "4x3xf32"),
            '%c = "step.concat"(%a, %b) {dim = 0 : i64} : (tensor<2x3xf32>, tensor<4x3xf32>) -> tensor<6x3xf32>',
        ]
    )
    module = function("%x: tensor<2x3xbf16>, %y: tensor<4x3xbf16>", body, "%c", "tensor<6x3xf32>")
    assert placed(module) == ["concat 2x3xbf16, 4x3xbf16 -> 6x3xbf16", "cast 6x3xbf16 -> 6x3xf32"]


def test_a_border_of_numbers_that_round_stays() -> None:
    for value, first in (("0.0", "cast 2xf32 -> 2xbf16"), ("0.1", "pad 2xf32 -> 8xf32")):
        body = (
            f'%a = "step.pad"(%x) {{low = array<i64: 3>, high = array<i64: 3>, value = {value}}} '
            ": (tensor<2xf32>) -> tensor<8xf32>\n"
        )
        module = function("%x: tensor<2xf32>", body + cast("b", "a", "8xf32", "8xbf16"), "%b", "tensor<8xbf16>")
        assert placed(module)[0] == first


def test_what_backward_reads_low_is_kept_low() -> None:
    body = """
    %a = "step.exp"(%x) {phase = "forward"} : (tensor<2x3xf32>) -> tensor<2x3xf32>
    %l = "step.sum"(%a) {dims = array<i64: 0, 1>, keepdim = false, phase = "loss"} : (tensor<2x3xf32>) -> tensor<f32>
    %b = "step.cast"(%a) {dtype = bf16, phase = "backward"} : (tensor<2x3xf32>) -> tensor<2x3xbf16>
    %g = "step.neg"(%b) {phase = "backward"} : (tensor<2x3xbf16>) -> tensor<2x3xbf16>"""
    module = function("%x: tensor<2x3xf32>", body, "%l, %g", "tensor<f32>, tensor<2x3xbf16>")
    assert [line.split()[0] for line in placed(module)] == ["exp", "cast", "sum", "neg"]
    phases = [op.phase for op in lookup(module, "main").regions[0].block]
    assert phases[:4] == ["forward", "forward", "loss", "backward"]


def test_one_cast_for_all_readers() -> None:
    body = "\n".join(
        [
            cast("a", "x", "2x3xf32", "2x3xbf16"),
            cast("b", "x", "2x3xf32", "2x3xbf16"),
            '%c = "step.neg"(%a) : (tensor<2x3xbf16>) -> tensor<2x3xbf16>',
            '%d = "step.abs"(%b) : (tensor<2x3xbf16>) -> tensor<2x3xbf16>',
        ]
    )
    module = function("%x: tensor<2x3xf32>", body, "%c, %d", "tensor<2x3xbf16>, tensor<2x3xbf16>")
    assert sum(line.startswith("cast") for line in placed(module)) == 1


def rounding(module: ir.Op) -> list[str]:
    """The casts that round inside of kernels too, after the pass."""
    lines, block = placed(module), lookup(module, "main").regions[0].block
    return [line for line, op in zip(lines, block, strict=False) if op.attributes.get("rounds")]


def of_the_program(line: str) -> str:
    return line.replace("dtype", "rounds = true, dtype")


def test_a_cast_of_the_program_rounds_wherever_it_goes() -> None:
    lines = [cast("a", "x", "8x3xf64", "8x3xf32"), cast("c", "a", "8x3xf32", "8x3xbf16"), SLICE.format("c", "bf16")]
    module = function("%x: tensor<8x3xf64>", of_the_program("\n".join(lines)), "%b", "tensor<2x3xbf16>")
    assert rounding(module) == ["cast 2x3xf32 -> 2x3xbf16"]  # kernels compute in f32: that cast rounds anyway
    body = '%a = "step.broadcast"(%x) {shape = array<i64: 8, 3>} : (tensor<3xf32>) -> tensor<8x3xf32>\n'
    body += of_the_program(cast("b", "a", "8x3xf32", "8x3xbf16"))
    assert rounding(function("%x: tensor<3xf32>", body, "%b", "tensor<8x3xbf16>")) == ["cast 3xf32 -> 3xbf16"]
    lines = [cast("a", "x", "4xbf16", "4xf32"), cast("b", "a", "4xf32", "4xf16")]
    module = function("%x: tensor<4xbf16>", of_the_program("\n".join(lines)), "%b", "tensor<4xf16>")
    assert rounding(module) == ["cast 4xbf16 -> 4xf16"]


def test_a_cast_of_the_program_is_one_with_ours() -> None:
    ours, theirs = cast("a", "x", "4xf32", "4xbf16"), cast("b", "x", "4xf32", "4xbf16")
    more = ['%c = "step.neg"(%a) : (tensor<4xbf16>) -> tensor<4xbf16>']
    more.append('%d = "step.abs"(%b) : (tensor<4xbf16>) -> tensor<4xbf16>')
    body = "\n".join([ours, of_the_program(theirs), *more])
    module = function("%x: tensor<4xf32>", body, "%c, %d", "tensor<4xbf16>, tensor<4xbf16>")
    assert rounding(module) == ["cast 4xf32 -> 4xbf16"]
    assert sum(op.name == "step.cast" for op in lookup(module, "main").regions[0].block) == 1
