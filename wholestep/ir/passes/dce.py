"""Dead code elimination: pure ops whose results nobody uses go.

One walk against program order is enough: an op is met after everything that could use it.
"""

from __future__ import annotations

from ..core import Block, Op
from .registry import register_pass


@register_pass("dce")
def dce(module: Op) -> None:
    """Removes pure ops whose results are unused."""
    for region in module.regions:
        for block in region.blocks:
            _remove_dead(block)


def _remove_dead(block: Block) -> None:
    for op in reversed(block):
        if op.definition.pure and not op.definition.terminator and not any([r.uses for r in op.results]):
            op.erase()
            continue
        for region in op.regions:
            for inner in region.blocks:
                _remove_dead(inner)
