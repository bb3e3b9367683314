"""`shared_input`: linear layers that read one input become one product, in forward and in backward.

Forward multiplies the input by the weights below one another; each layer's output is a slice of the result. Backward
puts the outputs' gradients side by side: one product gives the sum of the input's gradients, one all gradients of the
weights, whose slices the updates read. The weights stay the parameters they are. Each of these products is joined only
where that moves fewer bytes. The input's gradient is summed before it is rounded and not after, in another order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..dialects.step import StepBuilder
from ..dialects.step.attention import Attention, AttentionBackward, AttentionGrad
from ..dialects.step.contraction import Contract, parse_spec
from ..dialects.step.pointwise import Add, Cast
from ..dialects.step.reductions import Sum
from ..dialects.step.shape import Concat
from ..dialects.strides import Strides, row_major, view_of
from ..ir.core import Block, Location, Op, Value
from .expand import has_expansion
from .loops import is_primitive
from .opportunity import Change, Place, Transformation, register_transformation
from .recompute import is_late
from .regions import base, is_view

#: parts of a row begin at multiples of so many bytes, as kernels that read them want it
ALIGNED = 16


class Refused(Exception):
    """Why some products must stay apart."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Products of forward that become one."""

    ops: tuple[Op, ...]

    @property
    def weights(self) -> tuple[Value, ...]:
        return tuple(op.rhs for op in self.ops)


@dataclass(frozen=True, slots=True)
class InputGradient:
    """Products of backward whose sum becomes one, the values that are summed, and the sums of theirs by value."""

    ops: tuple[Op, ...]
    summands: tuple[Value, ...]

    @property
    def weights(self) -> tuple[Value, ...]:
        return tuple(op.rhs for op in self.ops)


@dataclass(frozen=True, slots=True)
class WeightGradients:
    """Products of backward that become one, of which each gets its rows."""

    ops: tuple[Op, ...]


Part = Forward | InputGradient | WeightGradients


@dataclass(frozen=True, slots=True)
class Joint:
    """What is joined of some layers that read one input, what that changes, and why the rest is not."""

    parts: tuple[Part, ...]
    change: Change
    reasons: tuple[str, ...]


@register_transformation
class SharedInput(Transformation):
    """Level 2: products that read one input, and the products of backward that they have. The site is the first."""

    name = "shared_input"
    level = 2

    def places(self, function: Op) -> Iterator[Place]:
        block = function.regions[0].block
        position = {op: i for i, op in enumerate(block)}
        for layers in beside_one_another(block):
            joint = joint_of(layers, position)
            yield layers[0], joint.change if joint.parts else "; ".join(dict.fromkeys(joint.reasons))

    def apply(self, op: Op) -> None:
        assert op.parent is not None
        position = {o: i for i, o in enumerate(op.parent)}
        layers = next(found for found in beside_one_another(op.parent) if found[0] is op)
        loc = common(layers)
        parts = joint_of(layers, position).parts
        backward = [part for part in parts if not isinstance(part, Forward)]
        if backward:
            join_backward(backward, position, loc)
        for part in parts:
            if isinstance(part, Forward):
                join_forward(part.ops, loc)


# ---- which layers there are ------------------------------------------------------------------------------------------


def beside_one_another(block: Block) -> list[list[Op]]:
    """Linear layers of forward with the same input, in program order."""
    found: dict[tuple[object, ...], list[Op]] = {}
    for op in block:
        if op.definition is Contract and is_layer(op):
            found.setdefault((op.lhs, op.spec, op.rhs.type.element), []).append(op)
    return [layers for layers in found.values() if len(layers) > 1]


def is_layer(op: Op) -> bool:
    """Whether a product is a linear layer of forward: rows times a weight [outputs, inputs], plus a bias or not."""
    left, right, out = parse_spec(op.spec)
    if is_late(op) or len(left) < 2 or left != out[:-1] + right[1:] or out[-1:] != right[:1] or right[0] in left:
        return False
    if op.addend is not None and (op.addend.type.shape != op.rhs.type.shape[:1] or not is_weight(op.addend)):
        return False
    return is_weight(op.rhs)


def is_weight(value: Value) -> bool:
    """Whether a value is an argument of the program or the cast of one."""
    return value.op is None or (value.op.definition is Cast and value.op.operands[0].op is None)


def common(ops: Sequence[Op]) -> Location:
    """The innermost module that holds all the layers."""
    paths = [op.loc.layer.split(".") for op in ops]
    shared = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))
    return replace(ops[0].loc, layer=".".join(names[0] for names in shared) or ops[0].loc.layer)


# ---- what is worth joining -------------------------------------------------------------------------------------------


def joint_of(layers: Sequence[Op], position: Mapping[Op, int]) -> Joint:
    """The products that had best be joined: of all choices the one that moves and keeps the fewest bytes."""
    if any(side_by_side(op) for op in layers):
        return Joint((), Change(), ("they are joined already as far as that moves fewer bytes",))
    reasons: list[str] = []
    alone = [op for op in layers if tied(op)]
    reasons += [f"the weight of {named(op)} is read by others too" for op in alone]
    layers = [op for op in layers if op not in alone]
    parts: list[Part] = [*forward_parts(layers, reasons), *backward_parts(layers, position, reasons)]
    chosen: tuple[Part, ...] = ()
    change, least = Change(), 0
    for count in range(1, len(parts) + 1):
        for some in itertools.combinations(parts, count):
            changed = change_of(some)
            price = changed.bytes + changed.saved + waiting_bytes(some)
            if changed.bytes < 0 and price < least:
                chosen, change, least = some, changed, price
    if parts and not chosen:
        reasons.append("to have weights and gradients side by side costs more than one product saves")
    return Joint(chosen, change, tuple(reasons))


def change_of(parts: Sequence[Part]) -> Change:
    """Bytes: joined products read their input once; what is put side by side is read and written."""
    moved = saved = 0
    weights: dict[tuple[Value, ...], None] = {}
    gradients: dict[tuple[Value, ...], None] = {}
    for part in parts:
        more = len(part.ops) - 1
        if isinstance(part, Forward):
            moved -= more * part.ops[0].lhs.type.bytes
            moved += sum(2 * op.result.type.bytes for op in part.ops if may_take_along(op))
            weights[part.weights] = None
        elif isinstance(part, InputGradient):
            moved -= 2 * more * part.ops[0].result.type.bytes  # written, and read by the sum
            saved += held_weights(part, parts)
            weights[part.weights] = None
        else:
            moved -= more * part.ops[0].rhs.type.bytes
        if not isinstance(part, Forward):
            gradients[tuple(op.lhs for op in part.ops)] = None
    moved += sum(2 * v.type.bytes for values in weights for v in values)
    for values in gradients:
        if not in_place(values):  # the kernel that copies them sums them for the biases too
            moved += sum(v.type.bytes for v in values) * (1 if bias_sums(values) else 2)
    return Change(bytes=moved, saved=saved)


def held_weights(part: InputGradient, parts: Sequence[Part]) -> int:
    """Bytes of the weights below one another that forward has made and backward reads again."""
    made = any(isinstance(other, Forward) and other.weights == part.weights for other in parts)
    return sum(v.type.bytes for v in part.weights) if made else 0


def waiting_bytes(parts: Sequence[Part]) -> int:
    """Bytes of gradients that have to be there all at once where each could be read as soon as it is made."""
    found = [[op.lhs.type.bytes for op in part.ops] for part in parts if not isinstance(part, Forward)]
    return max((sum(sizes) - max(sizes) for sizes in found), default=0)


def in_place(values: Sequence[Value]) -> bool:
    """Whether values can be written side by side by those who make them: attention's gradient and generated kernels."""
    makers = [base(v).op for v in values]
    return all(op is not None and (op.definition is AttentionGrad or generated(op)) for op in makers)


def generated(op: Op) -> bool:
    """Whether an op can be part of a generated kernel; products are left to libraries."""
    return op.definition is not Contract and bool(op.operands) and (is_primitive(op) or has_expansion(op))


def tied(op: Op) -> bool:
    """Whether the weight of a layer is read elsewhere than in this layer, its gradient and its update."""
    others = [u for u in op.rhs.uses if u is not op and not input_gradient_of(op, u) and u.phase != "update"]
    gradients = [u for u in op.rhs.uses if input_gradient_of(op, u)]
    return bool(others) or len(gradients) > 1


def side_by_side(op: Op) -> bool:
    """Whether the weight of a layer or the gradient of its output is joined with others already."""
    gradients = [u.lhs for u in op.rhs.uses if input_gradient_of(op, u)]
    return any(user.definition is Concat for value in (op.rhs, *gradients) for user in value.uses)


def input_gradient_of(op: Op, user: Op) -> bool:
    """Whether a reader of a layer's weight is the product that gives the gradient of its input."""
    left, right, out = parse_spec(op.spec)
    spec = f"{out},{right}->{left}"
    return user.definition is Contract and user.rhs is op.rhs and user.spec == spec and is_late(user)


def weight_gradient_of(op: Op, user: Op) -> bool:
    """Whether a reader of a layer's input is a product that gives the gradient of the weight of such a layer."""
    left, right, out = parse_spec(op.spec)
    spec = f"{out},{left}->{right}"
    return user.definition is Contract and user.rhs is op.lhs and user.spec == spec and is_late(user)


def named(op: Op) -> str:
    return op.loc.layer or op.name


# ---- forward ---------------------------------------------------------------------------------------------------------


def forward_parts(layers: Sequence[Op], reasons: list[str]) -> list[Forward]:
    """Products that can be one: with a bias or not, and their outputs kept for backward or not, as the others.

    A slice keeps the whole alive, so outputs that are not kept must not share memory with one that is.
    """
    alike: dict[tuple[bool, bool], list[Op]] = {}
    for op in layers:
        alike.setdefault((op.addend is None, kept(op.result)), []).append(op)
    found = []
    for ops in alike.values():
        if len(ops) < 2:
            reasons.append(f"no other output is kept for backward as long as that of {named(ops[0])}")
            continue
        try:
            check_readers(ops)
        except Refused as why:
            reasons.append(str(why))
        else:
            found.append(Forward(tuple(ops)))
    return found


def kept(value: Value) -> bool:
    """Whether backward reads a value, or a view of it."""
    return any(kept(user.results[0]) if is_view(user) else is_late(user) for user in value.uses)


def may_take_along(op: Op) -> bool:
    """Whether a product alone might take along what reads its result (`wide_products.py`), such as rotary positions:
    readers of one part of a joined product are not taken."""
    return bool(op.result.type.element.bits == 16) and only_loops_read(op.result)


def only_loops_read(value: Value) -> bool:
    """Whether generated kernels of forward alone read a value, or views of it."""
    users = [u for u in value.uses if not is_view(u)]
    views = [u.results[0] for u in value.uses if is_view(u)]
    return not kept(value) and all(map(generated, users)) and all(map(only_loops_read, views))


def check_readers(ops: Sequence[Op]) -> None:
    """Refused where who reads an output would have to copy a slice."""
    width = sum(op.result.type.shape[-1] for op in ops)
    for op in ops:
        type = op.result.type
        if type.shape[-1] * type.element.bytes % ALIGNED:
            raise Refused(f"rows of {named(op)} have {type.shape[-1]} elements: no multiple of {ALIGNED} bytes")
        strides = row_major((*type.shape[:-1], width))
        check(op, op.result, row_major(type.shape), strides)


def check(layer: Op, value: Value, dense: Strides, strides: Strides) -> None:
    """Refused where a reader of a value must copy it as it will lie, and need not as it lies now."""
    shape = value.type.shape
    for user in value.uses:
        if is_view(user):
            before, after = view_of(user, shape, dense), view_of(user, shape, strides)
            if before is not None and after is not None:
                check(layer, user.results[0], before[0], after[0])
            elif before is not None:
                raise Refused(f"{user.name} of {named(user)} would copy its part of the output of {named(layer)}")
        elif user.definition is Contract:
            if folds(user, value, dense) and not folds(user, value, strides):
                raise Refused(f"a product of {named(user)} would copy its part of the output of {named(layer)}")
        elif user.definition is Attention or issubclass(user.definition, AttentionBackward):
            if strides[-1] != 1:
                raise Refused(f"{user.name} would copy its part of the output of {named(layer)}")
        elif not generated(user):
            what = "the step gives it back" if user.definition.terminator else f"{user.name} reads it"
            raise Refused(f"the output of {named(layer)} must lie on its own: {what}")


def folds(op: Op, value: Value, strides: Strides) -> bool:
    """Whether a product can see an operand as matrices without a copy."""
    left, right, out = parse_spec(op.spec)
    for operand, labels, other in ((op.lhs, left, right), (op.rhs, right, left)):
        if operand is not value:
            continue
        place = {c: i for i, c in enumerate(labels)}
        kinds: dict[tuple[bool, bool], list[int]] = {}
        for c in out + labels:
            dims = kinds.setdefault((c in out, c in other), [])
            if c in place and place[c] not in dims and value.type.shape[place[c]] != 1:
                dims.append(place[c])
        for dims in kinds.values():
            if any(strides[i] != strides[j] * value.type.shape[j] for i, j in itertools.pairwise(dims)):
                return False
    return True


def join_forward(ops: Sequence[Op], loc: Location) -> None:
    """One product in the place of the first."""
    first = ops[0]
    assert first.parent is not None
    b = StepBuilder(first.parent, first, loc, first.phase)
    bias = None if first.addend is None else below(b, [op.addend for op in ops])
    y = b.contract(first.lhs, below(b, [op.rhs for op in ops]), bias, spec=first.spec)
    replace_by_slices(b, [op.result for op in ops], y, y.type.rank - 1)
    for op in ops:
        op.erase()


def below(b: StepBuilder, weights: Sequence[Value]) -> Value:
    """Weights below one another. They are cast here, where theirs may come later."""
    made = [v if v.op is None else b.cast_to(v.op.operands[0], v.type.element, v.op.rounds) for v in weights]
    return b.concat(made, dim=0)


def replace_by_slices(b: StepBuilder, values: Sequence[Value], whole: Value, dim: int) -> None:
    """Who reads one of the values reads its part of the whole."""
    at = 0
    for value in values:
        end = at + value.type.shape[dim]
        value.replace_by(b.slice(whole, dim=dim, start=at, end=end))
        at = end


# ---- backward --------------------------------------------------------------------------------------------------------


def backward_parts(layers: Sequence[Op], position: Mapping[Op, int], reasons: list[str]) -> Iterator[Part]:
    """The products of backward of all those layers that have the same ones."""
    if not layers:
        return
    first = layers[0]
    inputs = {u.lhs: u for op in layers for u in op.rhs.uses if input_gradient_of(op, u)}
    uses = sorted((u for u in first.lhs.uses if weight_gradient_of(first, u)), key=position.__getitem__)
    weights = {u.lhs: u for u in uses}
    # a frozen weight has no gradient: its layer stays as it is, so that all have the same gradients side by side
    both = [dy for dy in inputs if dy in weights] if inputs and weights else [*inputs, *weights]
    apart = [dy for dy in (*inputs, *weights) if dy not in both]
    if apart:
        reasons.append("a layer has no gradient of its weight, or is not the only one with its gradient")
    if len(both) < 2:
        return
    products = [gradients[dy] for gradients in (inputs, weights) for dy in both if dy in gradients]
    replaced = products + bias_sums(both)
    if any(op in replaced for op in waiting(replaced, position)):
        reasons.append("the gradient of one of the outputs is computed from that of another")
        return
    if weights:
        yield WeightGradients(tuple(weights[dy] for dy in both))
    try:
        if inputs:
            ops = tuple(inputs[dy] for dy in both)
            yield InputGradient(ops, summands_of(ops))
    except Refused as why:
        reasons.append(str(why))


def waiting(ops: Sequence[Op], position: Mapping[Op, int]) -> list[Op]:
    """Ops up to the last of these that read what one of them makes, directly or through others, in program order."""
    op, last = min(ops, key=position.__getitem__), max(ops, key=position.__getitem__)
    made = {r for o in ops for r in o.results}
    found: list[Op] = []
    while op is not last.next and op is not None:
        if any(v in made for v in op.operands):
            found.append(op)
            made.update(op.results)
        op = op.next  # type: ignore[assignment]
    return found


def summands_of(ops: Sequence[Op]) -> tuple[Value, ...]:
    """What a sum adds of these products, each maybe cast; Refused where they are not all summed, and nothing else."""
    values = []
    for op in ops:
        value = op.result
        user = only_reader(value)
        if user is not None and user.definition is Cast and not user.rounds:
            value = user.result
        values.append(value)
    trees = [sums_over(value) for value in values]
    if len({v.type for v in values}) > 1 or not all(any(o in trees[0] for o in tree) for tree in trees):
        raise Refused("the gradients of the input are not summed, or somebody else reads one of them")
    return tuple(values)


def sums_over(value: Value) -> list[Op]:
    """The sums that a value is added up in, one after the other."""
    found: list[Op] = []
    user = only_reader(value)
    while user is not None and user.definition is Add and all(v.type is value.type for v in user.operands):
        found.append(user)
        user = only_reader(user.result)
    return found


def other(b: StepBuilder, part: InputGradient | WeightGradients) -> Value:
    """What the gradients side by side are multiplied by."""
    return below(b, part.weights) if isinstance(part, InputGradient) else part.ops[0].rhs


def only_reader(value: Value) -> Op | None:
    """Who alone reads a value, and once."""
    return next(iter(value.uses)) if sum(value.uses.values()) == 1 else None


def join_backward(parts: Sequence[InputGradient | WeightGradients], position: Mapping[Op, int], loc: Location) -> None:
    """One product for each part behind the last of them; whoever reads their results before goes behind it too."""
    gradients = [op.lhs for op in parts[0].ops]
    biases = bias_sums(gradients)
    replaced = [op for part in parts for op in part.ops] + biases
    last = max(replaced, key=position.__getitem__)
    block, behind = last.parent, last.next
    assert block is not None
    moved = waiting(replaced, position)
    b = StepBuilder(block, behind, loc, last.phase)
    rank = gradients[0].type.rank
    dy = b.concat(gradients, dim=rank - 1)
    made = [b.contract(dy, other(b, part), spec=part.ops[0].spec) for part in parts]
    for part, product in zip(parts, made, strict=True):
        if isinstance(part, WeightGradients):
            replace_by_slices(b, [op.result for op in part.ops], product, 0)
    if biases:
        total = b.sum(dy, dims=tuple(range(rank - 1)), keepdim=False)
        replace_by_slices(b, [op.result for op in biases], total, 0)
    made = [
        b.cast_to(dx, p.summands[0].type.element) if isinstance(p, InputGradient) else dx
        for p, dx in zip(parts, made, strict=True)
    ]
    for op in moved:
        block.insert_before(op.detach(), behind)
    for part, product in zip(parts, made, strict=True):
        if isinstance(part, InputGradient):
            add_once(part, product)
    for op in replaced:
        op.erase()


def bias_sums(gradients: Sequence[Value]) -> list[Op]:
    """The gradients of biases, if all layers have one."""
    found = []
    for dy in gradients:
        rows = tuple(range(dy.type.rank - 1))
        sums = [u for u in dy.uses if u.definition is Sum and tuple(u.dims) == rows and not u.keepdim]
        found += sums[:1]
    return found if len(found) == len(gradients) and len({op.result.type.element for op in found}) == 1 else []


def add_once(part: InputGradient, dx: Value) -> None:
    """Puts the gradient in the place of the last summand, and takes the others out of the sums."""
    *others, last = part.summands
    for value in others:
        (add,) = value.uses
        (rest,) = [v for v in add.operands if v is not value]
        add.result.replace_by(rest)
        add.erase()
    last.replace_by(dx)
    for value in part.summands:
        if value.op is not None and value.op.definition is Cast:
            value.op.erase()
