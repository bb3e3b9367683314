"""Common subexpression elimination on text."""

from __future__ import annotations

from tests.ir.toy import context
from wholestep import ir
from wholestep.ir.passes import run_pipeline

T = "tensor<2xf32>"


def cse(*lines: str) -> list[str]:
    """The ops of a function body after the pass."""
    body = "\n".join(lines)
    text = (
        f'"func.func"() ({{\n^bb0(%x: {T}, %y: {T}):\n{body}\n"func.return"() : () -> ()\n}}) '
        f'{{sym_name = "f", function_type = ({T}, {T}) -> ()}} : () -> ()'
    )
    root = ir.parse(text, context(), verify=True)
    run_pipeline(root, "cse")
    ir.verify(root)
    main = ir.lookup(root, "f")
    return [line.strip().split(" : ")[0] for line in ir.print_op(main).splitlines()[2:-2]]


def add(name: str, x: str, y: str, extra: str = "alpha = 1") -> str:
    return f'{name} = "toy.add"({x}, {y}) {{{extra}}} : ({T}, {T}) -> {T}'


def use(name: str) -> str:
    return f'"toy.print"({name}) : ({T}) -> ()'


def test_the_earlier_op_stays_and_phase_does_not_count() -> None:
    kept = cse(
        add("%a", "%x", "%y", 'alpha = 1, phase = "forward"'),
        add("%b", "%x", "%y", 'phase = "backward", alpha = 1'),
        use("%b"),
    )
    assert kept == ["// ---- forward ----", '%a = "toy.add"(%x, %y) {alpha = 1', '"toy.print"(%a)']


def test_commutative_ops_and_others() -> None:
    assert len(cse(add("%a", "%x", "%y"), add("%b", "%y", "%x"))) == 1
    sub = f'"toy.sub"(%x, %y) : ({T}, {T}) -> {T}'
    assert len(cse(f"%a = {sub}", f"%b = {sub.replace('%x, %y', '%y, %x')}", f"%c = {sub}")) == 2


def test_attributes_and_types_count() -> None:
    assert len(cse(*(add(f"%{i}", "%x", "%y", f"alpha = {v}") for i, v in enumerate(["1", "1.0", "0.0", "-0.0"])))) == 4
    assert len(cse(add("%a", "%x", "%y"), add("%b", "%x", "%y", "alpha = 1, toy.note = [1]"))) == 2
    join = '"toy.join"(%x) {mode = "stack", dims = array<i64>} : (tensor<2xf32>) -> tensor<'
    assert len(cse(f"%a = {join}2xf32>", f"%b = {join}2xf32>", f"%c = {join}4xf32>")) == 2


def test_chains_collapse() -> None:
    kept = cse(
        add("%a", "%x", "%y"), add("%b", "%x", "%y"), add("%c", "%a", "%x"), add("%d", "%b", "%x"), use("%c"), use("%d")
    )
    assert [line.split('"')[1] for line in kept] == ["toy.add", "toy.add", "toy.print", "toy.print"]


def test_effects_stay() -> None:
    assert len(cse(use("%x"), use("%x"))) == 2


def test_regions_see_outside_and_not_each_other() -> None:
    region = '"toy.once"() ({\n' + add("%a", "%x", "%y") + "\n" + use("%a") + "\n}) : () -> ()"
    assert sum("toy.add" in line for line in cse(region, region)) == 2
    outer = add("%o", "%y", "%x")
    assert sum("toy.add" in line for line in cse(outer, region, region)) == 1
