"""Automatic mixed precision: which ops compute in 16 bits, and the casts between them.

One walk over the captured forward program, before autodiff: each op's own rule (`precision`, `widens`) and the user's
overrides decide, operands are cast, result types inferred again. Backward follows: the derivative of a cast is a cast.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..capture.capture import Captured
from ..capture.slots import Slot
from ..dialects.step import StepBuilder, constant_value, torch_dtype
from ..errors import InputError
from ..ir.core import Block, Op, Value
from ..ir.types import BF16, F16, F32, ScalarType, TensorType

PRECISIONS = ("fp32", "bf16", "fp16")
_ELEMENTS = {"bf16": BF16, "fp16": F16}
_MEANT = {"float32": "fp32", "f32": "fp32", "half": "fp16", "float16": "fp16", "f16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Policy:
    """The precision of a step: a default, and overrides by layer or by op, in the order given."""

    default: str
    overrides: tuple[tuple[str, str], ...] = ()

    @property
    def low(self) -> ScalarType | None:
        """The 16-bit element type in use; None where everything stays as the model has it."""
        return next((_ELEMENTS[p] for p in (self.default, *dict(self.overrides).values()) if p in _ELEMENTS), None)

    @property
    def option(self) -> str | dict[str, str]:
        """The policy as plain values: `parse_precision` gives it back."""
        return {**dict(self.overrides), "default": self.default} if self.overrides else self.default

    def choose(self, layer: str, op: str) -> tuple[str, bool]:
        """The precision of an op in a layer, and whether its own name chose it. The longest matching path wins."""
        named: str | None = None
        found: tuple[int, str] | None = None
        for key, precision in self.overrides:
            if names_op(key, op):
                named = precision
            if covers(key, layer) and (found is None or key.count(".") >= found[0]):
                found = (key.count("."), precision)
        if found is not None:
            return found[1], False
        return (self.default, False) if named is None else (named, True)


def names_op(key: str, op: str) -> bool:
    """Whether a key is the name of an op, with or without its dialect."""
    return op in (key, f"step.{key}")


def covers(key: str, layer: str) -> bool:
    """Whether a key names a layer or one that contains it; `*` stands for anything within a path."""
    parts, wanted = layer.split("."), key.split(".")
    return bool(layer) and len(wanted) <= len(parts) and fnmatch.fnmatchcase(".".join(parts[: len(wanted)]), key)


def parse_precision(option: Any) -> Policy:
    """The policy that a `precision=` option means; InputError where it means none."""
    if isinstance(option, Policy):
        return option
    if not isinstance(option, Mapping):
        return Policy(check_name(option, "precision"))
    if not option:
        raise InputError('precision={} says nothing: give a name such as "bf16", or overrides by layer or op')
    for key in option:
        if not isinstance(key, str) or not key:
            raise InputError(f"precision is given by names of layers and ops, not by {key!r}")
    chosen = {key: check_name(value, f"precision[{key!r}]") for key, value in option.items()}
    overrides = tuple((key, value) for key, value in chosen.items() if key != "default")
    default = chosen.get("default") or ("bf16" if all(p == "fp32" for _, p in overrides) else "fp32")
    lows = sorted({p for p in (default, *dict(overrides).values()) if p in _ELEMENTS})
    if len(lows) > 1:
        raise InputError("precision mixes bf16 and fp16 in one step; choose one of them, and fp32 where it must be")
    return Policy(default, overrides)


def check_name(name: Any, what: str) -> str:
    """A precision by its name; InputError with the choices for anything else."""
    if isinstance(name, str) and name in PRECISIONS:
        return name
    text = str(name).removeprefix("torch.").lower()
    near = [_MEANT[text]] if text in _MEANT else difflib.get_close_matches(text, PRECISIONS, 1, 0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise InputError(f"{what} must be one of {', '.join(map(repr, PRECISIONS))}, not {name!r}{hint}")


# ---- the pass --------------------------------------------------------------------------------------------------------


def apply_precision(captured: Captured, policy: Policy) -> None:
    """Rewrites a captured forward program in place: operands are cast to what each op wants, types follow."""
    low = policy.low
    check_keys(captured, policy)
    if low is None:
        return
    block = captured.function.regions[0].block
    caster = _Caster(captured, policy, low)
    for op in block:
        caster.visit(op)
    b = StepBuilder(block, phase="forward")
    captured.changed = [(slot, b.cast_to(value, slot.type.element)) for slot, value in captured.changed]
    if captured.loss.type.element.bits < 32:
        b.phase = "loss"
        captured.loss = b.cast(captured.loss, dtype=F32)
        captured.outputs[captured.exported.loss_index] = captured.loss


class _Caster:
    """One walk in program order. `was` remembers the types the program had, for ops that cannot take others."""

    def __init__(self, captured: Captured, policy: Policy, low: ScalarType):
        self.policy, self.low, self.exact = policy, low, captured.exact
        arguments = dict(zip(captured.function.regions[0].block.arguments, captured.slots, strict=True))
        self.parameters = {v for v, slot in arguments.items() if slot.kind == "parameter"}
        #: values that depend on a parameter or on numbers of the batch; what does not (position tables) stays exact
        self.learned = {v for v, s in arguments.items() if s.kind in ("parameter", "batch") and is_real(v)}
        self.results = {captured.loss, *captured.outputs, *(value for _, value in captured.changed)}
        self.was: dict[Value, TensorType] = {}
        self.copies: dict[tuple[Value, ScalarType], Value] = {}

    def mode(self, op: Op) -> str:
        """What an op does with its operands: "low", "high", "widen", "follow" or "same" (the types it had)."""
        definition: Any = op.definition
        if definition.infer is None:
            return "same"
        if definition.moves:
            return "follow"
        precision, by_name = self.policy.choose(op.loc.layer, op.name)
        if precision == "fp32" or op in self.exact:
            return "high"
        if by_name:
            return "low"
        if definition.precision == "low":
            return "low" if any(v in self.learned for v in op.operands) else "high"
        if definition.precision == "high":
            if definition.widens == "always" or (definition.widens == "for low" and self.leads_to_low(op)):
                return "widen"
            return "high"
        return "high" if op.phase == "loss" else "follow"

    def leads_to_low(self, op: Op) -> bool:
        """Whether all that becomes of an op's first result is read by ops that compute low."""
        pending, seen = [op.results[0]], set()
        while pending:
            value = pending.pop()
            if value in self.results or not value.uses:
                return False
            for user in value.uses:
                rule = user.definition.precision  # type: ignore[attr-defined]
                if self.policy.choose(user.loc.layer, user.name)[0] == "fp32" or user in self.exact:
                    return False
                if user.phase == "loss":
                    return False
                if rule == "follow" and user not in seen and user.name != "step.cast":
                    seen.add(user)
                    pending += [r for r in user.results if is_real(r)]
                elif rule != "low" and user not in seen:
                    return False
        return True

    def visit(self, op: Op) -> None:
        definition: Any = op.definition
        if any(v in self.learned for v in op.operands):
            self.learned.update(op.results)
        if op.name == "step.cast" or not any(is_real(v) for v in op.operands):
            return
        operands = self.operands(op, self.mode(op))
        if all(new is old for new, old in zip(operands, op.operands, strict=True)):
            if all(v not in self.was for v in operands):
                return
        else:
            op.set_operands(operands)
        if definition.infer is None:
            return
        types = definition.infer_types([v.type for v in operands], op.attributes)
        for result, type in zip(op.results, types, strict=True):
            if result.type is not type:
                self.was[result] = result.type
                result.type = type

    def operands(self, op: Op, mode: str) -> list[Value]:
        """The operands as the op takes them."""
        if mode == "same":
            wanted = [self.was.get(v, v.type).element for v in op.operands]
        elif mode == "widen":
            (first, *rest) = op.operands
            wanted = [first.type.element, *(F32 for _ in rest)]
        else:
            element = {"low": self.low, "high": F32}.get(mode) or common(op.operands)
            vectors = op.definition.vectors  # type: ignore[attr-defined]
            kept = [getattr(op, name) for name in vectors] if mode == "low" else ()
            wanted = [F32 if any(v is k for k in kept) else element for v in op.operands]
        b = StepBuilder(op.parent, op, op.loc, op.phase)  # type: ignore[arg-type]
        return [self.cast(b, v, e) if is_real(v) else v for v, e in zip(op.operands, wanted, strict=True)]

    def cast(self, b: StepBuilder, value: Value, element: ScalarType) -> Value:
        """A value in another element type. A parameter is cast once, as autocast does; other casts are merged later,
        so that gradients of several uses are summed in f32."""
        if value.type.element is element:
            return value
        number = constant_value(value)
        if number is not None:
            return b.full(within(float(number), element), value.type.shape, element)
        if is_mask(value):
            assert value.op is not None
            return b.cast(value.op.operands[0], dtype=element)
        if value not in self.parameters:
            return b.cast(value, dtype=element)
        found = self.copies.get((value, element))
        if found is None:
            found = self.copies[value, element] = b.cast(value, dtype=element)
        return found


def is_real(value: Value) -> bool:
    """Whether mixed precision may change the element type: 16 and 32-bit floats."""
    element = value.type.element
    return element.kind == "float" and element.bits in (16, 32)


def is_mask(value: Value) -> bool:
    """Whether a value is a boolean turned into numbers: exact in every float type."""
    op = value.op
    return op is not None and op.name == "step.cast" and op.operands[0].type.element.kind == "bool"


def common(values: Iterable[Value]) -> ScalarType:
    """The element type that values of different types meet in, as PyTorch promotes: 0-d values have no say."""
    real = [v for v in values if is_real(v)]
    voters = [v for v in real if v.type.rank and not is_mask(v)] or [v for v in real if v.type.rank] or real
    elements = {v.type.element for v in voters}
    return elements.pop() if len(elements) == 1 else F32


def within(number: float, element: ScalarType) -> float:
    """A number that stays finite in an element type: masks such as finfo(float32).min must not become infinite."""
    limit = torch.finfo(torch_dtype(element)).max
    return max(-limit, min(limit, number)) if abs(number) != float("inf") else number


def check_keys(captured: Captured, policy: Policy) -> None:
    """Each key must name a layer or an op of the program; InputError with the nearest names otherwise."""
    ops = {op.name.removeprefix("step.") for op in captured.function.regions[0].block}
    layers: dict[str, None] = {}
    names = [op.loc.layer for op in captured.function.regions[0].block]
    names += [name.rpartition(".")[0] for name in (*captured.parameters, *captured.buffers)]
    for name in names:
        parts = name.split(".")
        layers.update(dict.fromkeys(".".join(parts[: i + 1]) for i in range(len(parts)) if name))
    for key, _ in policy.overrides:
        if key.removeprefix("step.") in ops or any(covers(key, layer) for layer in layers):
            continue
        near = difflib.get_close_matches(key, [*layers, *sorted(ops)], 3, 0.5)
        tails = [layer for layer in layers if layer.rpartition(".")[2] == key.rpartition(".")[2]]
        near = list(dict.fromkeys([*tails[:2], *near]))[:3]
        hint = f"; the nearest are {', '.join(map(repr, near))}" if near else ""
        raise InputError(f"precision names {key!r}, which is no layer and no op of this program{hint}")


# ---- weight copies ---------------------------------------------------------------------------------------------------

#: ops through which the low copy of a parameter is read instead of casting what they give
_VIEWS = ("step.reshape", "step.transpose", "step.broadcast", "step.slice", "step.flip")


def split_weight_copies(block: Block, captured: Captured, argument: Callable[[Slot], Value]) -> dict[str, Slot]:
    """Replaces casts of parameters by arguments that hold the low copy from step to step; gives their slots by name.

    `argument(slot)` adds an argument to the program and gives its value. The update writes the copies anew.
    """
    parameters = {v: s for v, s in zip(block.arguments, captured.slots, strict=False) if s.kind == "parameter"}
    kept = {*captured.outputs, *(value for _, value in captured.changed)}
    copies: dict[str, Slot] = {}

    def low_of(value: Value, element: ScalarType, b: StepBuilder) -> Value | None:
        """The value in a low element type, read from a copy; None where it does not come from a parameter."""
        slot = parameters.get(value)
        if slot is not None:
            fqn = slot.source[1]
            type = value.type.with_element(element)
            if fqn in copies and copies[fqn].type is not type:  # the model's own cast to the other 16-bit type
                return None
            copies[fqn] = Slot("copy", f"{fqn} as {element}", ("copy", fqn), type)
            return argument(copies[fqn])
        op = value.op
        if op is None or op.name not in _VIEWS:
            return None
        source = low_of(op.operands[0], element, b)
        if source is None:
            return None
        attributes = {k: v for k, v in op.attributes.items() if k in op.definition.attribute_fields}
        return op.definition.build(b, source, **attributes).result

    for op in block:
        if op.name != "step.cast" or op.result in kept or op.operands[0].type.element is not F32:
            continue
        if op.dtype.kind != "float" or op.dtype.bits != 16:
            continue
        low = low_of(op.operands[0], op.dtype, StepBuilder(block, op, op.loc, op.phase))
        if low is not None:
            op.result.replace_by(low)
            op.erase()
    return copies
