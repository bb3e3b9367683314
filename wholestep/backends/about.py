"""A region in words: its ops, the shapes of what it reads and writes, and the layers it was met in.

Regions are known to the store by a hash. These words are kept beside it, so that people find what they look for
(`wholestep cache --show softmax`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..dialects.step.base import ir_dtype

if TYPE_CHECKING:
    from .kernels import Spec
    from .providers import Region

#: so many of a kind are named; the rest are counted
MOST = 12


def about(region: Region) -> str:
    """`step.conv, step.gelu: 4x3x8x8 f32, 8x3x3x3 f32 -> 4x8x8x8 f32; first met in layer features.0`."""
    work = [op for op in region.ops if op.operands and not getattr(op.definition, "views", False)]
    ops = work or region.ops  # constants and views are not what a region is about
    tensors = f"{listed(shapes(region.operands))} -> {listed(shapes(region.results))}"
    layers = list(dict.fromkeys(op.loc.layer for op in ops if op.loc.layer))
    where = f"; first met in layer {listed(layers)}" if layers else ""
    return f"{listed(op.name for op in ops)}: {tensors}{where}"


def shapes(specs: Sequence[Spec]) -> list[str]:
    return [f"{'x'.join(map(str, spec.shape)) or 'scalar'} {ir_dtype(spec.dtype)}" for spec in specs]


def listed(names: Iterable[str]) -> str:
    """Each once, in order, with how often it is there."""
    counts = Counter(names) or Counter(["nothing"])
    texts = [name if count == 1 else f"{name} (x{count})" for name, count in counts.items()]
    return ", ".join(texts[:MOST]) + (f" and {len(texts) - MOST} others" if len(texts) > MOST else "")
