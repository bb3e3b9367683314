"""Made-up operands that ways to run a region are compared and timed on.

Right kernels must agree on them as far as rounding goes: numbers are near 0, and what stands for a whole channel or row
(a vector) is near 1 or -1. A factor near 0 would make a relu cut a whole channel off, and 1 / sqrt(variance + eps) of a
channel that is one number everywhere is what the rounding of a sum makes of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..dialects.step import StepBuilder
from ..dialects.step.attention import AttentionLike
from ..dialects.step.losses import class_dim
from ..dialects.step.pooling import possible_winners
from ..ir.builtin import add_function, finish_function, module
from ..ir.core import Op, Value
from ..transforms.regions import base
from .aten import lower, run_calls

if TYPE_CHECKING:
    from .providers import Region


def smallest_table(region: Region) -> int:
    """How many entries the smallest table has that a region looks something up in."""
    sizes = [2]
    for op in region.ops:
        if op.name == "step.embedding":
            sizes.append(op.weight.type.shape[0])
        elif op.name in ("step.embedding_grad", "step.row_sums"):
            sizes.append(op.rows)
        elif op.name == "step.spread_rows":
            sizes.append(op.sums.type.shape[0])
        elif op.name in ("step.index", "step.index_put"):
            sizes += [op.x.type.shape[d] for d in op.dims]
        elif op.name == "step.gather":
            sizes.append(op.x.type.shape[op.dim])
        elif op.name in ("step.cross_entropy", "step.cross_entropy_grad", "step.nll_loss"):
            sizes.append(op.x.type.shape[min(1, op.x.type.rank - 1)])
    return min(sizes)


#: by how much the size of a vector's numbers differs from 1, at most
SPREAD = 0.1
#: so many numbers are drawn for an operand, and then repeated: a prime, so that they fall on other rows every time
DRAWN = 262_147


def neutral_inputs(region: Region, positive: bool) -> list[torch.Tensor]:
    """Operands to try a region with. Integers are 0, or 1 where every table that is looked up in has that."""
    generator = torch.Generator(device=region.device).manual_seed(1)
    found = []
    for spec in region.operands:
        span = 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.strides, strict=True)) if 0 not in spec.shape else 0
        flat = torch.empty(span, dtype=spec.dtype, device=region.device)
        if spec.dtype.is_floating_point:
            draw(flat[:DRAWN], generator, positive, len(spec.shape) == 1)
            done = DRAWN
            while done < span:  # (drawing takes long)
                flat[done : 2 * done] = flat[: min(done, span - done)]
                done *= 2
        else:
            top = min(2, smallest_table(region))
            flat.copy_(torch.randint(0, top, (span,), generator=generator, device=region.device))
        found.append(flat.as_strided(spec.shape, spec.strides))
    arguments = region.body.regions[0].block.arguments
    for op in region.ops:
        if op.name == "step.max_pool_grad" and op.indices in arguments:
            found[arguments.index(op.indices)].copy_(possible_winners(op, region.device))
        elif op.name == "step.unpack_bits" and op.x in arguments:
            found[arguments.index(op.x)].random_(0, 256, generator=generator)
        elif op.name == "step.cross_entropy_grad" and op.logsumexp in arguments and region.device.type == "cpu":
            total = computed(region, op.x, found).float().logsumexp(class_dim(op.x.type))  # as ATen, which reads none
            found[arguments.index(op.logsumexp)].copy_(total)
        elif op.name == "step.grouped_contract" and op.ends in arguments:
            groups, rows = op.ends.type.shape[0], op.lhs.type.shape[0]
            found[arguments.index(op.ends)].copy_(torch.arange(1, groups + 1) * rows // max(groups, 1))
        elif op.name == "step.attention_grad":
            give_what_forward_makes(region, op, found)
        elif op.name == "step.embedding_grad" and op.indices in arguments and len(op.indices.uses) == 1:
            found[arguments.index(op.indices)].random_(0, op.rows, generator=generator)
        elif op.name == "step.row_sums" or (op.name == "step.index_put" and op.accumulate):
            rows = op.name == "step.row_sums"
            limits = [op.rows for _ in op.indices] if rows else [op.x.type.shape[d] for d in op.dims]
            for index, limit in zip(op.indices, limits, strict=True):
                if index in arguments and len(index.uses) == 1:
                    found[arguments.index(index)].random_(0, limit, generator=generator)
    return found


def computed(region: Region, value: Value, operands: list[torch.Tensor]) -> torch.Tensor:
    """What a region's ops make of operands, up to one value."""
    values: dict[Value, Any] = dict(zip(region.body.regions[0].block.arguments, operands, strict=True))
    for op in region.ops:
        if value in values:
            break
        run_calls([lower(op, region.device)], values)
    return values[value]


def give_what_forward_makes(region: Region, op: Op, operands: list[torch.Tensor]) -> None:
    """Lets what an attention's gradients read of its results be that: some kernels compute it again, others read it."""
    arguments = region.body.regions[0].block.arguments
    given = [op.q, op.k, op.v, op.mask]
    function = add_function(module(), "forward", [v.type for v in given if v is not None])
    block = function.regions[0].block
    options = {name: op.attributes[name] for name in AttentionLike.attribute_fields if name in op.attributes}
    finish_function(function, list(StepBuilder(block).attention(*block.arguments, **options)))
    values: dict[Value, Any] = {
        inside: computed(region, v, operands)
        for inside, v in zip(block.arguments, (v for v in given if v is not None), strict=True)
    }
    first = block.first
    assert first is not None
    run_calls([lower(first, region.device)], values)
    for wanted, made in zip((op.out, op.logsumexp), first.results, strict=True):
        if base(wanted) in arguments:
            computed(region, wanted, operands).copy_(values[made])  # (what is seen through views is the operand)


def draw(into: torch.Tensor, generator: torch.Generator, positive: bool, vector: bool) -> None:
    """Numbers of either sign or positive ones; those of a vector of about one size."""
    if positive:
        into.uniform_(0.05, 1.05, generator=generator)
        return
    into.normal_(generator=generator)
    if vector:
        into.copy_(torch.where(into < 0, -1.0, 1.0) * (1.0 + into.tanh() * SPREAD))


#: ops that hand on the integers they are given
HAND_ON = ("step.cast", "step.select", "step.concat", "step.pad", "step.slice_grad")


def looks_up_what_it_computes(region: Region) -> bool:
    """Whether a region looks something up by numbers that it makes out of operands: made-up operands could then lead
    outside of the table, which on a GPU ends the process."""

    def known(value: Value, constant: bool = False) -> bool:
        op = value.op
        if op is None:
            return not constant
        if op.definition.views or op.name in HAND_ON:  # type: ignore[attr-defined]
            return all(known(v, constant) for v in op.operands if v.type.element.kind == "int")
        return all(known(v, True) for v in op.operands)  # computed from constants alone

    for op in region.ops:
        for name in ("indices", "index", "target"):
            named = any(f.name == name for f in op.definition.operand_fields)
            if named and not all(map(known, listed(getattr(op, name)))):
                return True
    return False


def listed(value: Any) -> list[Value]:
    return list(value) if isinstance(value, list | tuple) else [value]
