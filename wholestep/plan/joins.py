"""Concatenations in place: who makes a part writes it where the concatenation lies, and joining them costs nothing.

`held_back` says before ops become kernels which concatenations are worth it. `find_joins` says where the parts of those
that are left lie; strides follow backwards through reshapes and transposes to the kernel that makes a part, and into
concatenations that are parts of others. Whether a kernel can write so is seen when it is built; what cannot, and
constants, are copied to their place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..backends.kernels import COPY, NEW, OUT, VIEW, Kernel, Spec, Step
from ..dialects.step import constant_value
from ..dialects.step.attention import AttentionLike
from ..dialects.step.contraction import Contract
from ..dialects.step.fused import Fused
from ..dialects.step.pointwise import Pointwise
from ..dialects.step.reductions import Sum
from ..dialects.step.shape import Concat
from ..dialects.step.transfer import Fetch, Offload
from ..dialects.strides import Strides, is_dense, reshaped, row_major, same_places, view_of
from ..ir.core import Op, Value
from ..torch_private import schema_of
from ..transforms.regions import base, follows_product, is_library, is_source, is_view, readers_of

#: parts and their rows begin at multiples of so many bytes: kernels of a GPU read and write whole words
WORDS = {"cpu": 1, "cuda": 16}
#: bytes of a concatenation that is worth a thought
LEAST = 256
#: at most so many parts are copied to their place, and no more bytes than are written there
COPIES = 2
#: elements of a sum over rows: one number for each of their columns
TOTALS = 1 << 14
#: what is saved where a concatenation is kept out of kernels, as a share of it
GAIN = 0.1
#: ops whose every element is rounded once: ATen computes others in words along a row and one by one at its end, and the
#: last bit may hang on which of the two it was
EXACT = frozenset(
    f"step.{n}" for n in ("abs", "add", "cast", "div", "maximum", "minimum", "mul", "neg", "select", "sub")
)
#: a part waits for the others, in memory that is theirs too: not from one half of the step to the other
HALVES = {"": "", "forward": "forward", "loss": "forward", "backward": "backward"}


@dataclass(frozen=True, slots=True)
class Part:
    """Where the result of an op lies in the concatenation that it is a part of."""

    join: Op
    strides: Strides
    offset: int  # in elements


@dataclass(slots=True)
class Joins:
    """Concatenations whose parts are to be written in place: how each lies, and the results that are parts of one."""

    strides: dict[Op, Strides] = field(default_factory=dict)
    parts: dict[Value, Part] = field(default_factory=dict)
    #: concatenations inside of others, and where each lies there
    inner: dict[Op, Part] = field(default_factory=dict)
    #: why others are not, by op
    refused: dict[Op, str] = field(default_factory=dict)


def find_joins(
    function: Op, laid: Mapping[Op, Strides], given_up: Mapping[Op, str], device: torch.device, loops: bool = False
) -> Joins:
    """The concatenations of a function that can be in place.

    laid: how they lie; others are not looked at. given_up: why some are not wanted so. loops: ops that can be are
    going to be part of a kernel. The last comes first: of concatenations that share parts it is the largest.
    """
    found = Joins()
    block = function.regions[0].block
    for op in reversed([o for o in block if o in laid and o.result.uses]) if laid else ():
        if op in found.inner:
            continue
        reason = given_up.get(op) or found_reason(op, laid[op], device, loops, found)
        if reason:
            found.refused[op] = reason
    return found


def found_reason(op: Op, laid: Strides, device: torch.device, loops: bool, found: Joins) -> str:
    """Adds a concatenation to those that are found, or says why it is none of them."""
    reason = why_not(op, laid)
    if reason:
        return reason
    parts: dict[Value, Part] = {}
    inner: dict[Op, Part] = {}
    copied, refused = [], ""
    pending = [(op, Part(op, laid, 0))]
    while pending:
        join, place = pending.pop()
        for value, offset in zip(join.operands, offsets_of(join, place.strides), strict=True):
            maker = base(value)
            placed = placed_part(op, value, place.strides, place.offset + offset, device, loops)
            if isinstance(placed, str) or maker in found.parts or maker in parts or maker.op in inner:
                refused = placed if isinstance(placed, str) else f"{named(maker.op)} is a part of another one"
                copied.append(value)
            elif maker.op is not None and maker.op.definition is Concat:
                inner[maker.op] = placed
                pending.append((maker.op, placed))
            else:
                parts[maker] = placed
    if len(copied) > COPIES or 2 * sum(v.type.bytes for v in copied) > op.result.type.bytes:
        return f"{len(copied)} of its {len(op.operands)} parts would be copied: {refused}"
    found.strides[op] = laid
    found.parts |= parts
    found.inner |= inner
    return ""


def why_not(op: Op, laid: Strides) -> str:
    """Why a concatenation is made as a whole, whatever its parts are."""
    users = list(op.result.uses)
    if op.phase not in HALVES:
        return f"it is part of {op.phase or 'no phase'}"
    if op.result.type.bytes < LEAST:
        return f"it has {op.result.type.bytes} bytes"
    if any(user.definition.terminator for user in users):
        return "the step gives it back"
    return "" if is_dense(op.result.type.shape, laid) else "it does not fill its memory"


def offsets_of(op: Op, laid: Strides) -> list[int]:
    """Where each operand of a concatenation begins, in elements."""
    found, at = [], 0
    for value in op.operands:
        found.append(at * laid[op.dim])
        at += value.type.shape[op.dim]
    return found


def placed_part(op: Op, value: Value, laid: Strides, offset: int, device: torch.device, loops: bool) -> Part | str:
    """Where the result lies that an operand of a concatenation shows, or why it cannot lie there."""
    whole, maker = base(value), base(value).op
    if maker is None:
        return "an argument of the step lies where it is"
    if (
        is_source(maker)
        or maker.definition in (Offload, Fetch)
        or (maker.definition is Concat and len(readers_of(whole)) > 1)
        or maker.definition.name == "step.micro_batches"
    ):
        return f"{named(maker)} writes its own memory"
    if not value.type.size or whole.type.element is not op.result.type.element:
        return "it is empty, or of another type"
    if issubclass(maker.definition, Pointwise) and not follows_strides(maker, device, loops):
        return f"{named(maker)} is exact to the last bit only where it fills its memory"
    if HALVES.get(maker.phase) != HALVES.get(op.phase):
        return f"{named(maker)} is part of {maker.phase or 'no phase'}"
    steps = [offset, *[s for n, s in zip(value.type.shape, laid, strict=True) if n > 1 and s > 1]]
    if any(step * op.result.type.element.bytes % WORDS[device.type] for step in steps):
        return f"it would begin at byte {offset * op.result.type.element.bytes}, and its rows in the middle of words"
    strides = strides_behind(value, laid)
    if strides is None:
        return f"a view of what {named(maker)} makes cannot lie so"
    return why_unreadable(whole, strides, device, loops) or Part(op, strides, offset)


def strides_behind(value: Value, strides: Strides) -> Strides | None:
    """How the result must lie that a value shows through views, so that the value lies in this way."""
    wanted, chain = strides, []
    while (op := value.op) is not None and is_view(op):
        (x,) = op.operands
        if op.name == "step.reshape":
            found = reshaped(value.type.shape, wanted, x.type.shape)
        elif op.name == "step.transpose":
            found = tuple([wanted[op.order.index(d)] for d in range(len(wanted))])
        else:
            found = wanted if op.name == "step.detach" else None
        if found is None:
            return None
        chain.append(op)
        value, wanted = x, found
    shown = wanted
    for op in reversed(chain):
        seen = view_of(op, op.operands[0].type.shape, shown)
        if seen is None:
            return None
        shown = seen[0]
    return wanted if same_places(chain[0].result.type.shape if chain else value.type.shape, shown, strides) else None


def why_unreadable(value: Value, strides: Strides, device: torch.device, loops: bool) -> str:
    """Why somebody could not read a value that lies so: views stay views, and the rest follows strides.

    Libraries copy images that do not fill their memory, and ATen adds up in another order then.
    """
    pending = [(value, strides)]
    while pending:
        value, strides = pending.pop()
        for user in value.uses:
            if is_view(user):
                seen = view_of(user, value.type.shape, strides)
                if seen is None:
                    return f"{named(user)} would have to copy it"
                pending.append((user.result, seen[0]))
            elif user.definition.terminator:
                return "the step gives it back"
            elif not follows_strides(user, device, loops):
                return f"{named(user)} reads it too, and wants it to fill its memory"
    return ""


def follows_strides(op: Op, device: torch.device, loops: bool) -> bool:
    """Whether an op reads and writes tensors with strides, and gives the same bits then."""
    if op.definition in (Fused, Contract, Concat) or issubclass(op.definition, AttentionLike):
        return True
    if loops and not is_library(op):
        return True
    return issubclass(op.definition, Pointwise) and (device.type != "cpu" or op.name in EXACT)


def named(op: Op | None) -> str:
    """An op in words."""
    if op is None:
        return "an argument"
    return f"{op.name.removeprefix('step.')}{f' of {op.loc.layer}' if op.loc.layer else ''}"


# ---- before ops become kernels ---------------------------------------------------------------------------------------


def held_back(function: Op, device: torch.device) -> dict[Op, int]:
    """Concatenations that should be no part of a kernel, and the bytes of their parts that are copied.

    One that a library reads lies in memory in any case, and what libraries make, or read as well, would be written and
    read once more for it. A kernel that makes the parts itself would write nothing but the concatenation either, and
    one that goes on to add it up need not read it. Sums over rows alone are worth it for any reader: no kernel that
    makes them goes on with them.
    """
    laid = {op: row_major(op.result.type.shape) for op in function.regions[0].block if op.definition is Concat}
    joins = find_joins(function, laid, {}, device, loops=True)
    found: dict[Op, int] = {}
    for op in joins.strides:
        inner = [join for join, place in joins.inner.items() if place.join is op]
        gains = [v for v, part in joins.parts.items() if part.join is op and is_in_memory(v, (op, *inner))]
        readers, whole = readers_of(op.result), op.result.type.bytes
        again = 0 if all(map(is_library, readers)) else whole
        saved = 2 * sum(v.type.bytes for v in gains) - again
        if (any(map(is_library, readers)) and saved > GAIN * whole) or all(map(is_total, op.operands)):
            for join in (op, *inner):
                rest = [v for v in join.operands if base(v) not in joins.parts and base(v).op not in inner]
                found[join] = sum(v.type.bytes for v in rest)
    return found


def is_total(value: Value) -> bool:
    """Whether a value is a sum over rows, which is there only at the end of a kernel."""
    return value.op is not None and value.op.definition is Sum and 0 in value.op.dims and value.type.size <= TOTALS


def is_in_memory(value: Value, joins: Sequence[Op]) -> bool:
    """Whether a value is written whether or not it is a part: a library makes it, others read it as well, or a product
    ends with it, which writes no zeros beside it."""
    assert value.op is not None
    if is_library(value.op) or any(user not in joins for user in readers_of(value)):
        return True
    return follows_product(value) and any(constant_value(base(v)) is not None for join in joins for v in join.operands)


# ---- kernels that write so -------------------------------------------------------------------------------------------


def relaid(kernel: Kernel, asked: Mapping[int, Strides], device: torch.device) -> Kernel:
    """A kernel of ATen whose results lie as asked, as far as it can write them so.

    Views of such a result that its own call takes are left out: nothing reads them.
    """
    memory, specs, idle = dict(kernel.memory), list(kernel.specs), set[int]()
    for result, strides in asked.items():
        number, spec = kernel.results[result], kernel.specs[result]
        views = None if number < 0 else views_alone(kernel, number, device)
        laid = None if views is None else laid_inside(spec, memory[number], strides)
        if views is not None and laid is not None and 1 in laid:  # (of a product rows or columns are neighbours)
            idle |= views
            memory[number] = Spec(memory[number].shape, laid, spec.dtype)
            specs[result] = Spec(spec.shape, strides, spec.dtype)
    kept = [step for at, step in enumerate(kernel.steps) if at not in idle]

    def moved(at: int) -> int:
        return at - sum(i < at for i in idle)

    scratch = [(number, moved(first), moved(last)) for number, first, last in kernel.scratch]
    return Kernel(kernel.operands, kept, memory, kernel.results, specs, kernel.over, scratch)


def views_alone(kernel: Kernel, number: int, device: torch.device) -> set[int] | None:
    """Positions of the steps that only look at a tensor which one operator writes, in any strides; None where more is
    done with it."""
    if kernel.results.count(number) > 1:
        return None
    seen, views, writers = {number}, set[int](), 0
    for at, step in enumerate(kernel.steps):
        if step.kind == VIEW and not seen.isdisjoint(step.reads()):
            seen.update(step.makes)
            views.add(at)
        elif number in step.makes:
            reads = step.reads() - ({number} if step.kind == COPY else set())
            if not seen.isdisjoint(reads) or not writes_anywhere(step, device):
                return None
            writers += 1
        elif not seen.isdisjoint(step.reads()) or not seen.isdisjoint(step.makes):
            return None
    return views if writers == 1 else None


def writes_anywhere(step: Step, device: torch.device) -> bool:
    """Whether an operator takes results with any strides: it is copied, goes element by element, or is a product whose
    library takes the distance of rows."""
    if step.kind in (NEW, COPY) or (step.kind == OUT and step.elementwise):
        return True
    if step.kind != OUT or not hasattr(step.call, "overloadpacket"):
        return False
    products = (
        ("aten::mm", "aten::addmm") if device.type == "cpu" else ("aten::mm",)
    )  # (cuBLAS adds up only dense rows)
    return schema_of(step.call).name in products


def laid_inside(shown: Spec, memory: Spec, strides: Strides) -> Strides | None:
    """Strides of a tensor without gaps, of which a result shows all in another shape or order, so that the result lies
    as asked."""
    here, there = ([d for _, d in sorted((-s, d) for d, s in enumerate(spec.strides))] for spec in (shown, memory))
    found = reshaped([shown.shape[d] for d in here], [strides[d] for d in here], [memory.shape[d] for d in there])
    if found is None:
        return None
    return tuple([found[there.index(d)] for d in range(len(there))])
