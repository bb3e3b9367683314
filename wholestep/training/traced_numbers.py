"""Python numbers that remember how they were computed, for tracing an optimizer's `step`.

A TracedNumber is a float to every reader, so torch accepts it; arithmetic on it builds an expression over the leaves
(hyper-parameters, numbers kept in state). A branch on one whose value is known now is decided and recorded as a guard;
a branch on tensor data is taken both ways, one trace each. Its payload is NaN: a computation that escapes us shows.
"""

from __future__ import annotations

import contextlib
import math
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..torch_private import note_source_line

Expression = Any  # ("leaf", name) | ("const", number) | ("item", index) | (operation, *expressions)


class Refusal(Exception):
    """Something in the user's `step` that a program cannot do; carries the line where known."""

    def __init__(self, message: str, line: tuple[str, int] | None = None):
        super().__init__(message)
        self.line = user_line() if line is None else line


class Unknown:
    """The value of a number that depends on tensor data."""

    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = Unknown()

OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
    "neg": operator.neg,
    "abs": abs,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    **{n: getattr(math, n) for n in ("sqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p")},
    **{n: getattr(math, n) for n in ("sin", "cos", "tanh", "floor", "ceil", "trunc", "isfinite", "isnan", "isinf")},
}


def evaluate(expression: Expression, leaf: Callable[[Any], Any], item: Callable[[int], Any] | None = None) -> Any:
    """The Python value of an expression, `leaf(name)` giving the leaves and `item(index)` numbers read from tensors."""
    kind = expression[0]
    if kind == "leaf":
        return leaf(expression[1])
    if kind == "const":
        return expression[1]
    if kind == "item":
        assert item is not None
        return item(expression[1])
    return OPERATIONS[kind](*(evaluate(e, leaf, item) for e in expression[1:]))


def depends_on_data(expression: Expression) -> bool:
    """Whether a number needs tensor data, so that the host cannot know it."""
    if expression[0] in ("leaf", "const"):
        return False
    return expression[0] == "item" or any(depends_on_data(e) for e in expression[1:])


class TracedNumber(float):
    """A number with its expression. `value` is what it is now, an int or a float, or UNKNOWN."""

    __slots__ = ("expression", "session", "value")
    session: Session
    expression: Expression
    value: Any

    def __new__(cls, session: Session, expression: Expression, value: Any) -> TracedNumber:
        self = float.__new__(cls, math.nan)
        self.session, self.expression, self.value = session, expression, value
        return self

    def __bool__(self) -> bool:
        return self.session.decide("ne", self, 0)

    def __hash__(self) -> int:
        return id(self)

    def __index__(self) -> int:
        if not isinstance(self.value, int):
            raise TypeError("'float' object cannot be interpreted as an integer")
        return self.session.pin(self)

    def __int__(self) -> int:
        return int(self.session.pin(self))

    def __float__(self) -> float:
        return float(self.session.pin(self))

    def __round__(self, digits: Any = None) -> Any:  # type: ignore[override]
        return round(self.session.pin(self), digits)

    def __trunc__(self) -> Any:
        return self.session.apply("trunc", self)

    def __floor__(self) -> Any:
        return self.session.apply("floor", self)

    def __ceil__(self) -> Any:
        return self.session.apply("ceil", self)

    def is_integer(self) -> bool:
        return self.value is not UNKNOWN and float(self.value).is_integer()

    def __repr__(self) -> str:
        return repr(self.value)

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return repr(self.value) if self.value is UNKNOWN else format(self.value, spec)

    def __neg__(self) -> Any:
        return self.session.apply("neg", self)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return self.session.apply("abs", self)

    def __reduce__(self) -> Any:
        raise Refusal("a number of the optimizer is pickled or copied inside step()")

    def __copy__(self) -> TracedNumber:
        return self

    def __deepcopy__(self, memo: Any) -> TracedNumber:
        return self


def _arithmetic(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def forward(self: TracedNumber, other: Any, *_: Any) -> Any:
        return self.session.apply(name, self, other) if isinstance(other, int | float) else NotImplemented

    def reflected(self: TracedNumber, other: Any, *_: Any) -> Any:
        return self.session.apply(name, other, self) if isinstance(other, int | float) else NotImplemented

    return forward, reflected


def _comparison(name: str) -> Callable[..., Any]:
    def compare(self: TracedNumber, other: Any) -> Any:
        return self.session.decide(name, self, other) if isinstance(other, int | float) else NotImplemented

    return compare


for _name, _method in {"div": "truediv", **{n: n for n in ("add", "sub", "mul", "floordiv", "mod", "pow")}}.items():
    _forward, _reflected = _arithmetic(_name)
    setattr(TracedNumber, f"__{_method}__", _forward)
    setattr(TracedNumber, f"__r{_method}__", _reflected)
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(TracedNumber, f"__{_name}__", _comparison(_name))


def expression_of(value: Any) -> Expression:
    return value.expression if isinstance(value, TracedNumber) else ("const", value)


def value_of(value: Any) -> Any:
    return value.value if isinstance(value, TracedNumber) else value


class Session:
    """One run of `step`: its guards, the branches on tensor data, and the tags that stand for numbers in the graph."""

    def __init__(self, decisions: tuple[bool, ...] = ()):
        self.decisions = decisions
        self.conditions: list[tuple[Expression, bool, tuple[str, int] | None]] = []
        self.guards: dict[tuple[Expression, Any], tuple[str, int] | None] = {}
        self.items: list[torch.Tensor] = []
        self.tags: dict[float | int, Expression] = {}
        self._by_expression: dict[Any, float | int] = {}

    def leaf(self, name: Any, value: Any) -> TracedNumber:
        return TracedNumber(self, ("leaf", name), value)

    def apply(self, name: str, *operands: Any) -> TracedNumber:
        """The number that an operation gives."""
        values = [value_of(v) for v in operands]
        value = UNKNOWN if any(v is UNKNOWN for v in values) else OPERATIONS[name](*values)
        if isinstance(value, complex):
            raise Refusal("a negative number is raised to a fractional power")
        for v in operands:
            if not isinstance(v, TracedNumber) and isinstance(v, float) and math.isnan(v):
                raise Refusal(ESCAPED)
        return TracedNumber(self, (name, *(expression_of(v) for v in operands)), value)

    def decide(self, name: str, *operands: Any) -> bool:
        """The outcome of a comparison: known now and guarded, or one of two branches on tensor data."""
        values = [value_of(v) for v in operands]
        expression = (name, *(expression_of(v) for v in operands))
        if not any(v is UNKNOWN for v in values):
            outcome = bool(OPERATIONS[name](*values))
            self.guards.setdefault((expression, outcome), user_line())
            return outcome
        return self.fork(expression)

    def fork(self, expression: Expression) -> bool:
        """A branch on tensor data: the outcome this run explores."""
        at = len(self.conditions)
        outcome = self.decisions[at] if at < len(self.decisions) else True
        self.conditions.append((expression, outcome, user_line()))
        return outcome

    def pin(self, number: TracedNumber) -> Any:
        """The number's present value where Python needs one; guarded, so that another value traces again."""
        if number.value is UNKNOWN:
            raise Refusal(
                "Python needs the value of a number that depends on tensor data (int(), float(), range(), an index); "
                "keep it a tensor"
            )
        self.guards.setdefault((number.expression, number.value), user_line())
        return number.value

    def item(self, tensor: torch.Tensor) -> TracedNumber:
        """The number a one-element tensor holds at this moment."""
        snapshot = torch.ops.aten._to_copy.default(tensor.detach().reshape(()), dtype=torch.float64)
        self.items.append(snapshot)
        return TracedNumber(self, ("item", len(self.items) - 1), UNKNOWN)

    def tag(self, number: TracedNumber) -> float | int:
        """An unmistakable constant that stands for this number in the graph; an int for an int."""
        whole = isinstance(number.value, int)
        key = (number.expression, whole)
        tag = self._by_expression.get(key)
        if tag is None:
            at = len(self.tags)
            tag = (1 << 61) + 2 * at + 1 if whole else math.ldexp(1 + at * 2.0**-20, -990)
            self._by_expression[key] = tag
            self.tags[tag] = number.expression
        return tag

    def find(self, constant: Any) -> Expression | None:
        """The expression that a constant of the graph stands for; None for an ordinary constant."""
        if isinstance(constant, bool) or not isinstance(constant, int | float):
            return None
        if constant in self.tags:
            return self.tags[constant]
        if -constant in self.tags:
            return ("neg", self.tags[-constant])
        if isinstance(constant, float) and (math.isnan(constant) or 0 < abs(constant) < 1e-290):
            raise Refusal(ESCAPED)
        return None

    # ---- while step() runs -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def active(self, namespace: dict[str, Any]) -> Iterator[None]:
        """Functions of `math` understand traced numbers, also under the names the optimizer's module gave them."""
        names = [n for n in OPERATIONS if hasattr(math, n) and n not in ("floor", "ceil", "trunc")]
        originals = {n: getattr(math, n) for n in names}
        patched = {n: self._math(n, originals[n]) for n in originals}
        by_original = {f: patched[n] for n, f in originals.items()}
        globals_before = {k: v for k, v in namespace.items() if callable(v) and _hashable(v) and v in by_original}
        try:
            for name, function in patched.items():
                setattr(math, name, function)
            namespace.update({k: by_original[v] for k, v in globals_before.items()})
            with NumberMode(self):
                yield
        finally:
            for name, function in originals.items():
                setattr(math, name, function)
            namespace.update(globals_before)

    def _math(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any) -> Any:
            if not any(isinstance(a, TracedNumber) for a in args):
                return original(*args)
            if name in ("isfinite", "isnan", "isinf"):
                return self.decide(name, *args)
            if name == "log" and len(args) == 2:
                return self.apply("div", self._log(args[0]), self._log(args[1]))
            return self.apply(name, *args)

        return function

    def _log(self, value: Any) -> Any:
        return self.apply("log", value) if isinstance(value, TracedNumber) else math.log(value)


ESCAPED = (
    "a number of the optimizer went through a function that is not traced (for instance numpy's, or a C extension); "
    "use Python arithmetic or the math module"
)


def _hashable(value: Any) -> bool:
    return type(value).__hash__ is not None


ITEM = {torch.Tensor.item}
TRUTH = {torch.Tensor.__bool__, torch.is_nonzero, torch.Tensor.is_nonzero}
VALUES = {torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__index__, torch.Tensor.tolist, torch.Tensor.numpy}

SCALAR_KEYWORDS = {"alpha", "beta", "value"}


class NumberMode(TorchFunctionMode):
    """Lets traced numbers pass into torch calls as tags, and makes numbers of one-element tensors."""

    def __init__(self, session: Session):
        super().__init__()
        self.session = session

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        line = user_line()
        note_source_line(*line) if line else None
        if func in ITEM:
            return self.session.item(args[0])
        if func in TRUTH:
            return self.session.fork(("ne", self.session.item(args[0]).expression, ("const", 0)))
        if func in VALUES:
            raise Refusal("Python needs the values of a tensor (float(), int(), tolist(), numpy()); keep it a tensor")
        if func in (torch.tensor, torch.as_tensor) and args and isinstance(args[0], bool | int | float):
            return self._scalar_tensor(args[0], *args[1:], **kwargs)
        for name in SCALAR_KEYWORDS & kwargs.keys():  # torch takes a tensor's number here by itself
            if isinstance(kwargs[name], torch.Tensor):
                kwargs = {**kwargs, name: self.session.item(kwargs[name])}
        return func(*self._tagged(args), **self._tagged(kwargs))

    def _scalar_tensor(self, value: Any, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
        now = value_of(value)
        if dtype is None:
            kind = type(now)
            dtype = torch.bool if kind is bool else torch.int64 if kind is int else torch.get_default_dtype()
        return torch.full((), self._tagged(value), dtype=dtype, device=device)

    def _tagged(self, value: Any) -> Any:
        if isinstance(value, TracedNumber):
            return self.session.tag(value)
        if isinstance(value, float) and math.isnan(value):
            raise Refusal(ESCAPED)
        if type(value) in (list, tuple):
            return type(value)(self._tagged(v) for v in value)
        if type(value) is dict:
            return {k: self._tagged(v) for k, v in value.items()}
        return value


#: parts of file names that are not the user's code
INSIDE = ("/torch/", "/wholestep/training/", "/wholestep/capture/", "<frozen", "contextlib.py")


def user_line() -> tuple[str, int] | None:
    """File and line of the innermost frame of the optimizer's code; None where `step` is not running."""
    frame, found = sys._getframe(1), None
    while frame is not None:
        code = frame.f_code
        if code.co_name == "run_step" and code.co_filename.endswith("optimizer_trace.py"):
            return found
        if found is None and not any(part in code.co_filename for part in INSIDE):
            found = (code.co_filename, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return None
