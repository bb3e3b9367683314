"""`short_positions`: max pooling keeps for backward which element of its window won, in one byte instead of eight.

PyTorch's kernels count positions through the whole image. Kernels of our own ask each window by its elements, so that
the number in the window is enough; nothing else may read the positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..dialects.step import StepBuilder
from ..dialects.step.pooling import MaxPool, MaxPoolGrad
from ..dialects.step.windows import ONE_BYTE, WRITTEN_OUT
from ..ir.core import Op
from .opportunity import Change, Place, Transformation, register_transformation


@register_transformation
class ShortPositions(Transformation):
    """Level 3: one max pooling and its gradient."""

    name = "short_positions"
    level = 3

    def places(self, function: Op) -> Iterator[Place]:
        for op in function.regions[0].block:
            if op.definition is MaxPool and op.indices.uses and not op.in_window:
                less = op.indices.type.size - op.indices.type.bytes
                yield op, why_not(op) or Change(bytes=2 * less, saved=less)

    def apply(self, op: Op) -> None:
        assert op.parent is not None
        options = {**{k: op.attributes[k] for k in MaxPool.attribute_fields}, "in_window": True}
        made = StepBuilder(op.parent, op, op.loc, op.phase).max_pool(op.x, **options)
        for old, new in zip(op.results, made, strict=True):
            old.replace_by(new)
        op.erase()


def why_not(op: Op) -> str:
    if any(user.definition is not MaxPoolGrad for user in op.indices.uses):
        return "something other than its gradient reads the positions"
    taps = math.prod(op.kernel)
    if taps > min(ONE_BYTE, WRITTEN_OUT):
        return f"its window has {taps} elements, too many for a kernel of its own"
    return ""
