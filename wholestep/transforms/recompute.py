"""`recompute`: computes a value of forward again in backward instead of keeping it.

The copy stands right before its first late reader and reads what forward's op read, which must then be kept itself: the
predicted change counts both. Results do not change: the same op on the same operands.
"""

from __future__ import annotations

from ..dialects.step import StepOp
from ..ir.builtin import functions
from ..ir.core import Op, Value
from .opportunity import Change, Opportunity, Transformation, register_transformation, site_names
from .regenerate import EARLY


@register_transformation
class Recompute(Transformation):
    """Level 3: trades bytes and flops for memory between forward and backward."""

    name = "recompute"
    level = 3

    def find(self, module: Op) -> list[Opportunity]:
        found: list[Opportunity] = []
        names = site_names(module)
        for function in functions(module):
            block = function.regions[0].block
            given_back = set(block.last.operands) if block.last is not None else set()
            kept = given_back | {v for op in block if is_late(op) for v in op.operands}
            for op in block:
                late = late_results(op)
                if not late or not issubclass(op.definition, StepOp):
                    continue
                reason = why_not(op, late, given_back)
                more = [v for v in dict.fromkeys(op.operands) if is_made(v) and v not in kept and bytes_of(v)]
                change = Change(
                    bytes=sum(op.definition.bytes(op)),
                    saved=sum(map(bytes_of, more)) - sum(map(bytes_of, late)),
                    flops=op.definition.flops(op),
                )
                found.append(Opportunity(self.name, names[op], Change() if reason else change, reason))
        return found

    def apply(self, op: Op) -> None:
        late = [user for r in op.results for user in r.uses if is_late(user)]
        block = op.parent
        assert block is not None
        users = set(late)
        place = {other: number for number, other in enumerate(block)}
        first = min(users, key=place.__getitem__)
        copy = op.clone(copies_before(op, first, place))
        copy.attributes["phase"] = first.phase
        copy.attributes["again"] = True
        block.insert_before(copy, first)
        replaced = dict(zip(op.results, copy.results, strict=True))
        for user in users:
            user.set_operands([replaced.get(v, v) for v in user.operands])


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
