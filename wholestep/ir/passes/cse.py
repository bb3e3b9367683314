"""Common subexpression elimination: of two pure ops that compute the same, the earlier one stays.

One walk in program order with a table of what was computed; a region sees the table of what encloses it, unless its op
is isolated. The `phase` of an op does not count, as backward may reuse what forward computed, except for ops that each
phase computes for itself (`regenerated`).
"""

from __future__ import annotations

from typing import Any

from ..attributes import freeze
from ..core import Block, Op
from .registry import register_pass

_PLAIN = (str, type(None))


@register_pass("cse")
def cse(module: Op) -> None:
    """Merges pure ops that compute the same value; the earlier op stays."""
    for region in module.regions:
        for block in region.blocks:
            _merge(block, {})


def _merge(block: Block, known: dict[Any, Op]) -> None:
    added: list[Any] = []
    for op in block:
        if op.regions:
            for region in op.regions:
                for inner in region.blocks:
                    _merge(inner, {} if op.definition.isolated else known)
            continue
        if not op.definition.pure or not op.results:
            continue
        key = _key(op)
        earlier = known.get(key)
        if earlier is None:
            known[key] = op
            added.append(key)
            continue
        for old, new in zip(op.results, earlier.results, strict=True):
            old.replace_by(new)
        op.erase()
    for key in added:
        del known[key]


def _key(op: Op) -> Any:
    operands: Any = op.operands
    if op.definition.commutative and len(operands) == 2 and id(operands[0]) > id(operands[1]):
        operands = (operands[1], operands[0])
    attributes, by_phase = op.attributes, op.definition.regenerated
    frozen = frozenset(
        [(k, v if type(v) in _PLAIN else freeze(v)) for k, v in attributes.items() if k != "phase" or by_phase]
    )
    return op.definition, operands, frozen, tuple([r.type for r in op.results])
