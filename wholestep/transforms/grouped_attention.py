"""`grouped_attention`: attention over the heads of keys and values that there are, instead of over copies of them.

Models with fewer heads for keys than for queries often repeat keys first (broadcast and reshape), and their backward
sums the gradients of all copies. Here attention reads the few heads, and its gradient gives theirs: no copies are left,
nor sums over them. Dimensions are followed through reshapes and transposes as products of parts, some of them copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ..dialects.step import StepBuilder
from ..dialects.step.attention import Attention, AttentionBackward, AttentionGrad, AttentionLike, kernels_for
from ..dialects.step.attention_cuda import CUDNN, FLASH
from ..dialects.step.pointwise import Cast
from ..dialects.step.reductions import Sum
from ..dialects.step.shape import Broadcast, Reshape, Transpose
from ..ir.core import Op, Value
from .opportunity import Change, Place, Transformation, register_transformation
from .parts import Dimensions, Part, left, regrouped

#: what may be copies: operands of attention, and what people call them
NAMES = {"k": "keys", "v": "values"}
#: kernels that read few heads as they are; the others would make the copies themselves
READ_FEW = (CUDNN, FLASH)


class Refused(Exception):
    """Why an attention must keep its copies."""


@dataclass(frozen=True, slots=True)
class Followed:
    """Ops that a tensor goes through, each with the dimensions of its result."""

    source: Value
    ops: tuple[tuple[Op, Dimensions], ...] = ()

    def then(self, op: Op, dimensions: Dimensions) -> Followed:
        return replace(self, ops=(*self.ops, (op, dimensions)))

    def without_copies(self, b: StepBuilder, x: Value) -> Value:
        """The same done to x, which is the source without its copies."""
        for op, dimensions in self.ops:
            if op.definition is Transpose:
                x = b.transpose(x, order=op.order)
            elif op.definition is Cast:
                x = b.cast_to(x, op.dtype, op.rounds)
            else:
                x = b.reshape_to(x, own_shape(dimensions))
        return x


@dataclass(frozen=True, slots=True)
class Copies:
    """An attention over copies: how these are made, its gradients, and the ways from there to sums over the copies."""

    group: int
    made: dict[str, Followed]
    backward: tuple[Op, ...]
    sums: dict[str, tuple[Followed, ...]]


@register_transformation
class GroupedAttention(Transformation):
    """Level 2: an attention, the repetition before it, its gradient and the sum behind that."""

    name = "grouped_attention"
    level = 2

    def places(self, function: Op) -> Iterator[Place]:
        for op in function.regions[0].block:
            if op.definition is Attention and any(repetition(v) for v in (op.k, op.v)):
                try:
                    yield op, change(op, copies_of(op))
                except Refused as why:
                    yield op, str(why)

    def why_not_on(self, op: Op, device: torch.device) -> str:
        if any(name in READ_FEW for name in kernels_for(op, device)):
            return ""
        return "no kernel of this device reads few heads of such keys and values: it would copy them itself"

    def apply(self, op: Op) -> None:
        copies = copies_of(op)
        assert op.parent is not None
        b = StepBuilder(op.parent, op, op.loc, op.phase)
        few = {name: made.without_copies(b, made.source) for name, made in copies.made.items()}
        out, logsumexp = b.attention(op.q, few["k"], few["v"], op.mask, **options(op))
        op.out.replace_by(out)
        op.logsumexp.replace_by(logsumexp)
        for old in copies.backward:
            gradients_of_few(old, few, copies)
        op.erase()


def gradients_of_few(old: Op, few: dict[str, Value], copies: Copies) -> None:
    """Puts the gradients of the few heads in the place of those of all copies and of the sums over these."""
    assert old.parent is not None
    b = StepBuilder(old.parent, old, old.loc, old.phase)
    operands = (old.dout, old.q, few["k"], few["v"], old.out, old.logsumexp, old.mask)
    if old.definition is not AttentionGrad:
        old.result.replace_by(b.attention_mask_grad(*operands, **options(old)))
        old.erase()
        return
    dq, dk, dv = b.attention_grad(*operands, **options(old))
    old.dq.replace_by(dq)
    for name, gradient in (("k", dk), ("v", dv)):
        for path in copies.sums[name]:
            if path.source.op is old:
                last = path.ops[-1][0]
                assert last.parent is not None
                at = StepBuilder(last.parent, last, last.loc, last.phase)
                small = path.without_copies(at, gradient)
                last.result.replace_by(at.cast_to(small, last.result.type.element))
                for op, _ in reversed(path.ops):
                    if not op.result.uses:
                        op.erase()
    old.erase()


def options(op: Op) -> dict[str, object]:
    """The attributes of an attention over fewer heads. Which kernel runs it is for others to decide."""
    kept = {k: op.attributes[k] for k in AttentionLike.attribute_fields if k in op.attributes and k != "kernel"}
    return kept | {"enable_gqa": True}


def change(op: Op, copies: Copies) -> Change:
    """Copies are written once and read by each attention; their gradients are written, and read by the sum."""
    more = sum((getattr(op, name).type.bytes // copies.group) * (copies.group - 1) for name in NAMES)
    gradients = sum(o.definition is AttentionGrad for o in copies.backward)
    return Change(bytes=-more * (2 + len(copies.backward) + 2 * gradients), saved=-more if copies.backward else 0)


# ---- what is a copy of what ------------------------------------------------------------------------------------------


def copies_of(op: Op) -> Copies:
    """What an attention reads copies of; Refused where it needs them, or others do."""
    if op.q.type.rank != 4:
        raise Refused(f"its operands have {op.q.type.rank} dimensions: kernels take fewer heads of keys with 4 alone")
    if 0 in op.k.type.shape or 0 in op.v.type.shape:
        raise Refused("its keys or values are empty")
    made, groups = {}, set()
    for name, what in NAMES.items():
        chain = repetition(getattr(op, name))
        if not chain:
            raise Refused(f"its {what} are not repeated, but its {'values' if name == 'k' else 'keys'} are")
        made[name] = followed(chain)
        groups.add(group_of(made[name].ops[-1][1], what))
    if len(groups) > 1:
        raise Refused("keys and values are repeated by different numbers")
    backward = tuple(u for u in op.out.uses if issubclass(u.definition, AttentionBackward) and u.out is op.out)
    if any(u.k is not op.k or u.v is not op.v for u in backward):
        raise Refused("its gradient reads other keys or values than itself")
    (group,) = groups
    sums = {name: tuple(s for u in backward for s in sums_of(u, name, group)) for name in NAMES}
    return Copies(group, made, backward, sums)


def repetition(value: Value) -> list[Op]:
    """The broadcast that a value is made by, and the reshapes, transposes and casts behind it; empty without one."""
    ops: list[Op] = []
    while value.op is not None and value.op.definition in (Reshape, Transpose, Cast, Broadcast):
        ops.insert(0, value.op)
        if value.op.definition is Broadcast:
            return ops
        value = value.op.operands[0]
    return []


def followed(chain: Sequence[Op]) -> Followed:
    """What a broadcast and the ops behind it do to dimensions."""
    first = chain[0]
    shape, have = first.result.type.shape, first.operands[0].type.shape
    new = len(shape) - len(have)
    copied = [n != 1 and (i < new or have[i - new] != n) for i, n in enumerate(shape)]
    dimensions: Dimensions = tuple((Part(n, c),) for n, c in zip(shape, copied, strict=True))
    path = Followed(first.operands[0]).then(first, dimensions)
    for op in chain[1:]:
        dimensions = passed(op, dimensions, "what is repeated")
        path = path.then(op, dimensions)
    return path


def passed(op: Op, dimensions: Dimensions, what: str) -> Dimensions:
    """The dimensions of the result of a reshape, transpose or cast."""
    if op.definition is Transpose:
        return tuple(dimensions[i] for i in op.order)
    if op.definition is not Reshape:
        return dimensions
    found = regrouped(dimensions, op.shape)
    if found is None:
        raise Refused(f"a reshape mixes {what} with copies of it")
    return found


def own_shape(dimensions: Dimensions) -> tuple[int, ...]:
    """The shape without copies."""
    return tuple(map(left, dimensions))


def group_of(dimensions: Dimensions, what: str) -> int:
    """How many copies there are of each head, beside one another."""
    heads = len(dimensions) - 3
    if any(p.gone for i, dimension in enumerate(dimensions) for p in dimension if i != heads):
        raise Refused(f"its {what} are repeated along another dimension than that of heads")
    kinds = [p.gone for p in dimensions[heads]]
    if kinds != sorted(kinds):
        raise Refused(f"its {what} are repeated all heads after one another, not each head beside itself")
    group = math.prod(p.size for p in dimensions[heads] if p.gone)
    if group < 2:
        raise Refused(f"its {what} are not repeated")
    return group


def sums_of(op: Op, name: str, group: int) -> list[Followed]:
    """The ways from the gradient of copied keys or values to the sums over their copies; nothing else may read it."""
    if op.definition is not AttentionGrad:
        return []
    value: Value = getattr(op, f"d{name}")
    batch, heads, *rest = value.type.shape
    split = (Part(heads // group, False), Part(group, True))
    return ways(Followed(value), value, ((Part(batch, False),), split, *((Part(n, False),) for n in rest)), name)


def ways(path: Followed, value: Value, dimensions: Dimensions, name: str) -> list[Followed]:
    """The ways from a value on."""
    found: list[Followed] = []
    for user in value.uses:
        if user.definition in (Reshape, Transpose, Cast):
            after = passed(user, dimensions, f"the gradient of {NAMES[name]}")
            found += ways(path.then(user, after), user.result, after, name)
        elif user.definition is Sum and sums_copies(dimensions, user.dims):
            left = [d for i, d in enumerate(dimensions) if i not in user.dims]
            kept = [() if i in user.dims else d for i, d in enumerate(dimensions)]
            found.append(path.then(user, tuple(kept if user.keepdim else left)))
        else:
            raise Refused(f"{user.name} reads the gradient of each copy of its {NAMES[name]}")
    return found


def sums_copies(dimensions: Dimensions, dims: Sequence[int]) -> bool:
    """Whether a sum is over all copies and nothing else."""
    return all(p.gone == (i in dims) for i, dimension in enumerate(dimensions) for p in dimension if p.size != 1)
