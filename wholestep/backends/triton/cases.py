"""A kernel as several, one per stretch of an iteration dimension along which its comparisons with that are decided.

A concatenation asks at every point which of its tensors lies there. Along each of them the answer is known, so that
only that one is read; programs of one launch share the stretches out.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ...dialects.loop import Apply, Constant, Index, Load, Space, Store
from ...ir.builtin import module
from ...ir.core import Builder, Op, Value
from ...ir.passes import run_pipeline
from ...ir.types import BOOL, I64
from ..kernels import Spec
from .walk import Form, Walk

#: fewer stretches are as fast by masks; more are too much text
FEWEST, MOST = 4, 64


def stretches(function: Op, specs: Sequence[Spec]) -> list[Op]:
    """The kernels; empty where no dimension is compared with so many numbers."""
    walk = Walk(function, specs)
    points: dict[int, set[int]] = {}
    for op in walk.ops:
        if op.definition is Apply and op.attributes["fn"] == "lt":
            found = point_of(walk, op)
            if found is not None:
                points.setdefault(found[0], {0, walk.sizes[found[0]]}).add(found[1])
    if not points:
        return []
    dim = max(points, key=lambda d: len(points[d]))
    if not FEWEST <= len(points[dim]) - 1 <= MOST:
        return []
    return [along(function, specs, dim, *ends) for ends in itertools.pairwise(sorted(points[dim]))]


def point_of(walk: Walk, op: Op) -> tuple[int, int] | None:
    """The dimension of a comparison, and its first index for which that is false."""
    form, limit = (walk.forms.get(v) for v in op.operands)
    if form is None or limit is None or limit.dims or len(form.dims) != 1:
        return None
    (dim,) = form.dims
    point = -(-(limit.constant - form.constant) // form.terms[dim]) if form.terms[dim] > 0 else 0
    return (dim, point) if 0 < point < walk.sizes[dim] else None


def along(function: Op, specs: Sequence[Spec], dim: int, begin: int, end: int) -> Op:
    """The kernel for indices from `begin` to `end` of a dimension."""
    root = module()
    made = function.clone()
    root.regions[0].block.append(made)
    block = made.regions[0].block
    for op in list(block):
        if op.definition is Space:
            sizes = list(op.attributes["sizes"])
            sizes[dim] = end - begin
            op.attributes["sizes"] = tuple(sizes)
        elif op.definition in (Load, Store):
            op.attributes["map"] = [[*row[:-1], row[-1] + row[dim] * begin] for row in op.attributes["map"]]
        elif op.definition is Index and op.attributes["dim"] == dim and begin:
            b = Builder(block, op.next, op.loc)
            shifted = Apply.build(
                b, [op.results[0], Constant.build(b, value=begin, dtype=I64).result], fn="add", dtype=I64
            )
            for user in [u for u in dict.fromkeys(op.results[0].uses) if u is not shifted]:
                user.set_operands([shifted.result if v is op.results[0] else v for v in user.operands])
    decide(made, specs)
    run_pipeline(root, "cse,dce")
    return made


def decide(function: Op, specs: Sequence[Spec]) -> None:
    """Takes out choices whose condition is known."""
    walk = Walk(function, specs)
    known: dict[Value, bool] = {}
    for op in walk.ops:
        if op.definition is not Apply or not op.results:
            continue
        fn, result, first = op.attributes["fn"], op.results[0], op.operands[0]
        if fn == "lt" and all(v in walk.forms for v in op.operands):
            truth = below(walk, *(walk.forms[v] for v in op.operands))
            if truth is not None:
                known[result] = truth
        elif fn == "bit_not" and result.type is BOOL and first in known:
            known[result] = not known[first]
        elif fn == "bit_and" and result.type is BOOL and any(v in known for v in op.operands):
            if False in (known.get(v) for v in op.operands):
                known[result] = False
            elif all(v in known for v in op.operands):
                known[result] = True
            else:
                result.replace_by(next(v for v in op.operands if v not in known))
        elif fn == "select" and first in known:
            chosen = op.operands[1 if known[first] else 2]
            if chosen.type is result.type:
                result.replace_by(chosen)


def below(walk: Walk, form: Form, limit: Form) -> bool | None:
    """Whether an index is below a limit everywhere, or nowhere; None where that changes."""
    low, high = form.range(walk.sizes)
    least, most = limit.range(walk.sizes)
    return True if high < least else False if low >= most else None
