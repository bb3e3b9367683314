"""`recompute`: computes a value of forward again in backward instead of keeping it.

The copy stands right before its first late reader and reads what forward's op read, which must then be kept itself: the
predicted change counts both. Results do not change: the same op on the same operands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..dialects.step import StepOp
from ..dialects.step.normalization import BatchNorm
from ..errors import InputError
from ..ir.attributes import freeze
from ..ir.core import Block, Op, Value
from .opportunity import Change, Place, Transformation, register_transformation
from .regenerate import EARLY


@register_transformation
class Recompute(Transformation):
    """Level 3: trades bytes and flops for memory between forward and backward."""

    name = "recompute"
    level = 3
    runs_again = True

    def places(self, function: Op) -> Iterator[Place]:
        block = function.regions[0].block
        given_back = set(block.last.operands) if block.last is not None else set()
        kept = given_back | {v for op in block if is_late(op) for v in op.operands}
        for op in block:
            late = self.late(op)
            if not late or not issubclass(op.definition, StepOp):
                continue
            more = [v for v in dict.fromkeys(op.operands) if is_made(v) and v not in kept and bytes_of(v)]
            change = Change(
                bytes=sum(op.definition.bytes(op)),
                saved=sum(map(bytes_of, more)) - sum(map(bytes_of, late)),
                flops=op.definition.flops(op),
            )
            yield op, why_not(op, late, given_back) or change

    def apply(self, op: Op) -> None:
        run_again([(self, op)])

    def makes(self, op: Op) -> Sequence[Value]:
        """Results of an op that readers take from its copy."""
        return op.results

    def late(self, op: Op) -> list[Value]:
        """Those that a later phase reads."""
        made = self.makes(op)
        return [r for r in late_results(op) if r in made]

    def copy(self, op: Op, new: dict[Value, Value]) -> Op:
        """The op once more, on operands as `new` replaces them."""
        return op.clone(new)


def run_again(chosen: Sequence[tuple[Recompute, Op]]) -> list[Op]:
    """Computes ops of one block again, each right before its first late reader; gives the copies.

    Consumers come before their producers, so that a copy counts among the late readers of what it reads. Copies before
    the same reader stand in the order of their originals.
    """
    if not chosen:
        return []
    block = chosen[0][1].parent
    assert block is not None
    lines = list(block)
    place = {op: number for number, op in enumerate(lines)}
    chosen = sorted(chosen, key=lambda c: -place[c[1]])
    read: set[Value] = set()  # by copies; all is checked before anything is changed
    for how, op in chosen:
        if not how.late(op) and read.isdisjoint(how.makes(op)):
            raise InputError(f"{op.name} in {op.loc} cannot be computed again: no later phase reads it")
        read.update(op.operands)
    before: dict[int, list[Op]] = {}  # by the place of the reader, the last copy first
    for how, op in chosen:
        late = how.late(op)
        users = dict.fromkeys(user for r in late for user in r.uses if is_late(user))
        at = min(place[user] for user in users)
        copy = how.copy(op, copies_before(op, lines[at], place))
        copy.attributes["phase"] = lines[at].phase
        copy.attributes["again"] = True
        place[copy] = at
        before.setdefault(at, []).append(copy)
        replaced = {r: copy.results[r.index] for r in late}
        for user in users:
            user.set_operands([replaced.get(v, v) for v in user.operands])
    for at, copies in before.items():
        for copy in reversed(copies):
            block.insert_before(copy, lines[at])
    return [copy for at in sorted(before) for copy in reversed(before[at])]


def copies_before(op: Op, first: Op, place: dict[Op, int]) -> dict[Value, Value]:
    """Operands of an op that were themselves computed again before `first`: the copy reads those."""
    found: dict[Value, Value] = {}
    for value in op.operands:
        if value.op is None or not value.op.operands:
            continue
        for twin in value.op.operands[0].uses:
            if is_copy(twin, value.op) and place[twin] < place[first]:
                found[value] = twin.results[value.op.results.index(value)]
    return found


def is_copy(twin: Op, op: Op) -> bool:
    """Whether an op is another one computed again: the same but for its phase."""
    same = twin.definition is op.definition and twin.operands == op.operands
    return same and twin.attributes == {**op.attributes, "phase": twin.phase, "again": True}


def originals(block: Block) -> dict[Op, Op]:
    """The op of forward that each copy computes again, also where the copy reads copies itself."""
    same: dict[Value, Value] = {}  # a value -> the first one that is computed in the same way
    known: dict[Any, Op] = {}
    found: dict[Op, Op] = {}
    for op in block:
        operands = tuple([same.get(v, v) for v in op.operands])
        attributes = {k: freeze(v) for k, v in op.attributes.items() if k not in ("phase", "again")}
        if op.definition is BatchNorm and op.training:  # running statistics are no part of what is computed again
            there = (op.weight is not None, op.bias is not None)
            operands, attributes["operandSegmentSizes"] = operands[: 1 + sum(there)], there
        key = op.definition, operands, frozenset(attributes.items())
        first = known.setdefault(key, op) if op.definition.pure else op
        if first is not op:
            same.update(zip(op.results, first.results, strict=False))
            if op.attributes.get("again"):
                found[op] = first
    return found


def late_results(op: Op) -> list[Value]:
    """Results of an early op that a later phase reads."""
    if op.phase not in EARLY:
        return []
    return [r for r in op.results if any(is_late(user) for user in r.uses)]


def is_late(op: Op) -> bool:
    return op.phase not in EARLY and not op.definition.terminator


def why_not(op: Op, late: list[Value], given_back: set[Value]) -> str:
    if not op.definition.pure:
        return f"{op.name} has effects"
    if not op.operands:
        return "it is a constant and costs no memory"
    if op.name in ("step.offload", "step.fetch"):
        return "it waits in host memory, and costs none of the device's"
    if any(r in given_back for r in late):
        return "the step gives it back, so it is kept anyway"
    return ""


def is_made(value: Value) -> bool:
    """Whether a value is made by the step, rather than being an argument of it or a constant."""
    return value.op is not None and bool(value.op.operands)


def bytes_of(value: Value) -> int:
    return value.type.bytes
