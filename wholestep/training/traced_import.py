"""A traced optimizer's graph as step ops: the importer of captured graphs, taught numbers that are program values.

A call that takes such a number is computed as eager computes it (in f32 or f64, rounded once): see `Arithmetic`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from ..capture.importer import Importer
from ..dialects.step import StepBuilder
from ..dialects.step.optimizers import Arithmetic
from ..ir.core import Value
from ..ir.types import F64
from .traced_numbers import Expression, Refusal, Session

#: numbers as step ops; those absent here map to the op of the same name
RENAMED = {"mod": "rem"}
CALLS: dict[str, Callable[..., Any]] = {}


class OptimizerImporter(Importer):
    """Imports one trace. `leaf(name)` gives the value of a number the program takes as input."""

    differentiable = False

    def __init__(self, b: StepBuilder, session: Session, leaf: Callable[[Any], Value], items: list[fx.Node]):
        super().__init__(b)
        self.session, self.leaf, self.item_nodes = session, leaf, items
        self.item_values: list[Value] = []
        self.numbers: dict[Any, Value] = {}
        self.number_values: set[Value] = set()

    def outputs(self, graph: fx.GraphModule, inputs: list[Value], items: int) -> list[Value]:
        """The values of the graph's outputs; from the `items`-th on they are snapshots of single numbers."""
        out = [ref.read(self.b) for ref in self.run(graph, inputs)]
        self.item_values = out[items:]
        return out

    def number(self, expression: Expression) -> Value:
        """The 0-d f64 value of an expression."""
        found = self.numbers.get(expression)
        if found is None:
            found = self._build(expression)
            self.numbers[expression] = found
            self.number_values.add(found)
        return found

    def _build(self, expression: Expression) -> Value:
        b, (kind, *parts) = self.b, expression
        if kind == "leaf":
            return self.leaf(parts[0])
        if kind == "const":
            return b.full(float(parts[0]), (), F64)
        if kind == "item":
            return self.item_values[parts[0]] if self.item_values else self.env[self.item_nodes[parts[0]]].read(b)
        operands = [self.number(p) for p in parts]
        if kind == "floordiv":
            return b.floor(b.div(*operands))
        if kind == "log10":
            return b.div(b.log(operands[0]), b.full(2.302585092994046, (), F64))
        if kind in ("isfinite", "isinf"):
            infinite = b.eq(b.abs(operands[0]), float("inf"))
            return infinite if kind == "isinf" else b.bit_not(b.bit_or(infinite, b.isnan(operands[0])))
        return getattr(b, RENAMED.get(kind, kind))(*operands)

    # ---- calls that take numbers -----------------------------------------------------------------------------------

    def resolve(self, argument: Any) -> Any:
        if isinstance(argument, int | float) and not isinstance(argument, bool):
            expression = self.session.find(argument)
            return argument if expression is None else self.number(expression)
        return super().resolve(argument)

    def takes_number(self, args: Any, kwargs: Any) -> bool:
        return any(isinstance(v, Value) and v in self.number_values for v in (*args, *kwargs.values()))

    def emit(self, node: fx.Node, target: Any, args: Any, kwargs: Any) -> Any:
        if not self.takes_number(args, kwargs):
            return super().emit(node, target, args, kwargs)
        key = str(target).removeprefix("aten.")
        if key not in CALLS:
            raise Refusal(
                f"{target} takes a number that may change between steps, and only as a constant; "
                "write the call with tensor arithmetic",
                self.line(node),
            )
        want = self.expected[0]
        arithmetic = Arithmetic(self.b, F64 if want.element.kind == "int" else want.element)
        out = CALLS[key](self, arithmetic, *args, **kwargs)
        return self.b.broadcast_to(self.b.cast_to(out, want.element), want.shape)

    def twin(self, node: fx.Node, packet: str, target: Any, old: Value, values: Any, named: Any) -> Value:
        if packet in ("fill_", "copy_") or not self.takes_number(values, named):
            return super().twin(node, packet, target, old, values, named)
        self.expected = [old.type]
        functional = f"aten.{packet[:-1]}.{target._overloadname or 'default'}"
        return self.emit(node, functional, values, named)

    def line(self, node: fx.Node) -> tuple[str, int] | None:
        trace = node.meta.get("stack_trace") or ""
        return self.frame(trace) if trace else None


def call(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers how calls with a number among their arguments are computed: `f(importer, arithmetic, ...)`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        CALLS.update({n if "." in n else f"{n}.default": function for n in names})
        return function

    return register


def wide(m: Arithmetic, x: Any) -> Value:
    """A tensor or number in the computing type."""
    return m.wide(x) if isinstance(x, Value) else m.b.full(x, (), m.compute)


def scaled(m: Arithmetic, x: Any, factor: Any) -> Value:
    unscaled = isinstance(factor, int | float) and factor == 1
    return wide(m, x) if unscaled else m.b.mul(wide(m, x), wide(m, factor))


@call("add.Tensor", "add.Scalar")
def _add(imp, m, x, y, alpha=1):
    return m.b.add(wide(m, x), scaled(m, y, alpha))


@call("sub.Tensor", "sub.Scalar")
def _sub(imp, m, x, y, alpha=1):
    return m.b.sub(wide(m, x), scaled(m, y, alpha))


@call("rsub.Tensor", "rsub.Scalar")
def _rsub(imp, m, x, y, alpha=1):
    return m.b.sub(wide(m, y), scaled(m, x, alpha))


@call("mul.Tensor", "mul.Scalar")
def _mul(imp, m, x, y):
    return m.b.mul(wide(m, x), wide(m, y))


@call("div.Tensor", "div.Scalar")
def _div(imp, m, x, y):
    return m.b.div(wide(m, x), wide(m, y))


@call("pow.Tensor_Scalar", "pow.Scalar", "pow.Tensor_Tensor")
def _pow(imp, m, x, y):
    return m.b.pow(wide(m, x), wide(m, y))


@call("remainder.Tensor", "remainder.Scalar")
def _remainder(imp, m, x, y):
    return m.b.rem(wide(m, x), wide(m, y))


@call("addcmul")
def _addcmul(imp, m, x, y, z, value=1):
    return m.b.add(wide(m, x), m.b.mul(scaled(m, y, value), wide(m, z)))


@call("addcdiv")
def _addcdiv(imp, m, x, y, z, value=1):
    return m.b.add(wide(m, x), m.b.div(scaled(m, y, value), wide(m, z)))


@call("lerp.Scalar", "lerp.Tensor")
def _lerp(imp, m, x, y, weight):
    return m.b.lerp(wide(m, x), wide(m, y), wide(m, weight))


@call("clamp", "clamp.Tensor")
def _clamp(imp, m, x, min=None, max=None):
    x = wide(m, x)
    if min is not None:
        x = m.b.maximum(x, wide(m, min))
    return x if max is None else m.b.minimum(x, wide(m, max))


@call("clamp_min", "clamp_min.Tensor", "maximum")
def _clamp_min(imp, m, x, min):
    return _clamp(imp, m, x, min=min)


@call("clamp_max", "clamp_max.Tensor", "minimum")
def _clamp_max(imp, m, x, max):
    return _clamp(imp, m, x, max=max)


@call("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def _where(imp, m, condition, x, y):
    return m.b.select(condition, wide(m, x), wide(m, y))


@call("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(imp, m, x, mask, value):
    return m.b.select(mask, wide(m, value), wide(m, x))


@call("full", "full_like", "new_full")
def _full(imp, m, _, *rest, fill_value=None, **__):
    return wide(m, rest[-1] if rest and isinstance(rest[-1], Value) else fill_value)


@call("scalar_tensor")
def _scalar_tensor(imp, m, value, **_):
    return wide(m, value)


@call("fill.Scalar", "fill.Tensor")
def _fill(imp, m, x, value):
    return wide(m, value)


@call("addmm")
def _addmm(imp, m, x, lhs, rhs, beta=1, alpha=1):
    product = m.b.contract(lhs, rhs, spec="mk,kn->mn")
    return m.b.add(scaled(m, x, beta), scaled(m, product, alpha))


def _register_comparison(name: str) -> None:
    @call(f"{name}.Scalar", f"{name}.Tensor")
    def compare(imp: OptimizerImporter, m: Arithmetic, x: Any, y: Any) -> Value:
        # torch compares in the tensor's own type; only a number has f64 to give up
        tensors = [v for v in (x, y) if isinstance(v, Value) and v not in imp.number_values]
        element = tensors[0].type.element if tensors else F64
        return getattr(m.b, name)(*(m.b.cast_to(v, element) if isinstance(v, Value) else v for v in (x, y)))


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _register_comparison(_name)
