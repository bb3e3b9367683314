"""A small dialect for the tests of the core, with one op per feature, and random programs made of it."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from wholestep import ir

toy = ir.Dialect("toy", "One op per feature of the core.")


@toy.op
class Add(ir.OpDef):
    """x + alpha * y."""

    commutative = True
    x = ir.Operand()
    y = ir.Operand()
    alpha = ir.Attr("number", default=1)
    out = ir.Result()

    @staticmethod
    def infer(x: Any, y: Any, alpha: Any) -> Any:
        if x is not y:
            raise ValueError(f"{x} and {y} differ")
        return x


@toy.op
class Sub(ir.OpDef):
    """x - y."""

    x = ir.Operand()
    y = ir.Operand()
    out = ir.Result()

    @staticmethod
    def infer(x: Any, y: Any) -> Any:
        return x


@toy.op
class Neg(ir.OpDef):
    """-x."""

    x = ir.Operand(ir.FloatTensor)
    out = ir.Result(ir.FloatTensor)

    @staticmethod
    def infer(x: Any) -> Any:
        return x


@toy.op
class Split(ir.OpDef):
    """As many copies as there are results."""

    x = ir.Operand()
    parts = ir.Result(variadic=True)


@toy.op
class Join(ir.OpDef):
    """Any number of tensors."""

    xs = ir.Operand(ir.AnyType, variadic=True)
    mode = ir.Attr("str", choices=("stack", "concat"), default="stack")
    dims = ir.Attr("ints", default=())
    out = ir.Result()


@toy.op
class Affine(ir.OpDef):
    """Two operands that may be absent."""

    x = ir.Operand()
    scale = ir.Operand(optional=True)
    shift = ir.Operand(optional=True)
    note = ir.Attr("any", optional=True)
    out = ir.Result()

    @staticmethod
    def infer(x: Any, scale: Any, shift: Any, note: Any) -> Any:
        return x


@toy.op
class Print(ir.OpDef):
    """Has an effect."""

    pure = False
    x = ir.Operand(ir.AnyType)


@toy.op
class Once(ir.OpDef):
    """Holds a region that sees what is outside."""

    region_count = 1
    pure = False


@toy.op
class Constant(ir.OpDef):
    """A value of a type."""

    value = ir.Attr("number")
    type = ir.Attr("type")
    out = ir.Result(ir.AnyType)

    @staticmethod
    def infer(value: Any, type: Any) -> Any:
        return type


def context() -> ir.Context:
    return ir.Context([toy])


T = ir.TensorType((2, 3), ir.F32)


def function(*types: ir.Type, name: str = "main", root: ir.Op | None = None) -> tuple[ir.Op, ir.Op, ir.Builder]:
    """A module, a function in it and a builder in its body."""
    root = ir.module() if root is None else root
    main = ir.add_function(root, name, types or (T, T))
    return root, main, ir.Builder(main.regions[0].block)


def simple() -> tuple[ir.Op, ir.Op]:
    """A module that uses a bit of everything, and its function."""
    root, main, builder = function()
    a, b = main.regions[0].block.arguments
    builder.phase, builder.loc = "forward", ir.Location("layer.0", "model.py", 7)
    c = Add.build(builder, a, b).result
    parts = Split.build(builder, c, result_types=[T, T]).results
    builder.phase = "backward"
    d = Affine.build(builder, parts[1], None, c, note=[1, 1.0, True]).result
    d.name = "d"
    ir.finish_function(main, [d])
    return root, main


shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
elements = st.sampled_from([ir.F32, ir.BF16, ir.I64, ir.BOOL, ir.ScalarType("ui8"), ir.ScalarType("complex<f32>")])
tensor_types = st.builds(ir.TensorType, shapes, elements)
integers = st.integers(-(1 << 63), (1 << 63) - 1)
# surrogates cannot be part of a str that came from anywhere, yet must not break the text
strings = st.text(max_size=6) | st.just("\ud800")
names = st.text("abx_.$-0123 é", max_size=5)
scalars = (
    st.booleans()
    | integers
    | st.floats(allow_nan=True)
    | strings
    | st.none()
    | st.lists(integers, max_size=3).map(tuple)
    | tensor_types
    | elements
    | st.builds(ir.Symbol, strings.filter(bool))
    | st.builds(ir.I32Array, st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=3).map(tuple))
    | st.builds(ir.DialectAttribute, st.just("toy.space"), st.lists(strings | integers, max_size=2).map(tuple))
    | st.builds(ir.DialectType, st.just("toy.buffer"), st.tuples(tensor_types, strings))
    | st.builds(ir.FunctionType, st.lists(tensor_types, max_size=2).map(tuple), st.just((T,)))
)
attributes = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings.filter(bool), inner, max_size=3),
    max_leaves=5,
)
locations = st.builds(ir.Location, strings, st.just("")) | st.builds(
    ir.Location, strings, st.just("a b.py"), st.integers(0, 99)
)


@st.composite
def programs(draw: st.DrawFn) -> ir.Op:
    """A random module that verifies."""
    root = ir.module()
    for index in range(draw(st.integers(0, 2))):
        types = draw(st.lists(tensor_types, min_size=1, max_size=3))
        _, main, builder = function(*types, name=f"f{index}", root=root)
        values = list(main.regions[0].block.arguments)
        for value in values:
            value.name = draw(names)
        _body(draw, builder, values, depth=0)
        ir.finish_function(main, draw(st.lists(st.sampled_from(values), max_size=3)))
    return root


def _body(draw: st.DrawFn, builder: ir.Builder, values: list[ir.Value], depth: int) -> None:
    for _ in range(draw(st.integers(0, 6))):
        builder.phase = draw(st.sampled_from(["", "forward", "backward"]))
        builder.loc = draw(locations)
        x = draw(st.sampled_from(values))
        kind = draw(st.sampled_from(["add", "split", "join", "affine", "print", "once", "constant"]))
        op: ir.Op
        if kind == "add":
            op = Add.build(builder, x, x, alpha=draw(integers | st.floats()))
        elif kind == "split":
            op = Split.build(builder, x, result_types=draw(st.lists(tensor_types, max_size=3)))
        elif kind == "join":
            xs = draw(st.lists(st.sampled_from(values), max_size=3))
            op = Join.build(builder, xs, mode=draw(st.sampled_from(["stack", "concat"])), result_types=[x.type])
        elif kind == "affine":
            op = Affine.build(builder, x, None, draw(st.sampled_from([None, x])), note=draw(attributes))
        elif kind == "print":
            op = Print.build(builder, x, result_types=[])
        elif kind == "constant":
            op = Constant.build(builder, value=draw(st.booleans()), type=draw(tensor_types))
        else:
            block = ir.Block(draw(st.lists(tensor_types, max_size=2)))
            op = builder.create(Once, (), (), {}, [ir.Region([block])])
            if depth < 2:
                _body(draw, ir.Builder(block), [*values, *block.arguments], depth + 1)
            if draw(st.booleans()):
                op.attributes["toy.extra"] = draw(attributes)
        for value in op.results:
            value.name = draw(names)
        values += op.results
