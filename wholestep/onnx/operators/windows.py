"""Where windows lie on a padded input: what convolutions and pooling share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...ir.core import Value
from ..context import Context
from .support import cut, limited

#: no number of a window is as large as this
LARGEST = 1 << 24


@dataclass(frozen=True)
class Windows:
    """Per spatial dimension: kernel, stride, dilation, padding before and after, and the number of windows."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]
    sizes: tuple[int, ...]
    count: tuple[int, ...]

    @property
    def symmetric(self) -> bool:
        return self.low == self.high

    @property
    def extent(self) -> tuple[int, ...]:
        """How many elements a window spans."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation, strict=True))

    @property
    def after(self) -> tuple[int, ...]:
        """Elements that are missing behind the input so that the last window fits."""
        return tuple(
            max(0, (n - 1) * s + e - size - low)
            for n, s, e, size, low in zip(self.count, self.stride, self.extent, self.sizes, self.low, strict=True)
        )


def windows(c: Context, sizes: Sequence[int], kernel: Sequence[int]) -> Windows:
    """The windows of a node over spatial dimensions of these sizes."""
    rank = len(sizes)
    stride = listed(c, "strides", rank)
    dilation = listed(c, "dilations", rank)
    if len(kernel) != rank:
        raise c.wrong(f"its kernel has {len(kernel)} dimensions, and its input {rank}")
    if any(not 0 < v < LARGEST for v in (*kernel, *stride, *dilation)):
        raise c.wrong("its kernel, strides and dilations must be positive, and not too large")
    extent = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    low, high = padding(c, sizes, extent, stride)
    up = bool(c.attribute("ceil_mode", 0))
    count = []
    for size, e, s, before, after in zip(sizes, extent, stride, low, high, strict=True):
        free = size + before + after - e
        if free < 0 and not (up and free + s > 0):
            raise c.wrong(f"a window of {e} elements does not fit {size} elements with padding {before} and {after}")
        n = (-(-free // s) if up else free // s) + 1
        if up and (n - 1) * s >= size + before:  # a window must not begin in the padding behind
            n -= 1
        count.append(n)
    return Windows(
        tuple(kernel), tuple(stride), tuple(dilation), tuple(low), tuple(high), tuple(sizes), tuple(count)
    )  # fmt: skip


def padding(c: Context, sizes: Sequence[int], extent: Sequence[int], stride: Sequence[int]):
    """Padding before and after, given or found by `auto_pad`."""
    rank, kind = len(sizes), c.attribute("auto_pad", "NOTSET")
    if kind in ("SAME_UPPER", "SAME_LOWER"):
        needed = [(-(-n // s) - 1) * s + e - n for n, e, s in zip(sizes, extent, stride, strict=True)]
        if min(needed) < -1 and "Pool" in c.node.op_type:
            raise c.unsupported(f"with {kind} and windows far apart runtimes begin at different places", "give it pads")
        total = [max(0, n) for n in needed]
        less, more = [t // 2 for t in total], [t - t // 2 for t in total]
        return (less, more) if kind == "SAME_UPPER" else (more, less)
    if kind not in ("NOTSET", "VALID"):
        raise c.wrong(f"{kind!r} is not a way of padding")
    pads = c.attribute("pads")
    if kind == "VALID" or not pads:
        return [0] * rank, [0] * rank
    if len(pads) != 2 * rank or any(not 0 <= p < LARGEST for p in pads):
        raise c.wrong(f"its pads {list(pads)} do not fit {rank} dimensions")
    return list(pads[:rank]), list(pads[rank:])


def listed(c: Context, name: str, rank: int, default: int = 1) -> list[int]:
    """A number per spatial dimension."""
    given = c.attribute(name)
    if not given:
        return [default] * rank
    if len(given) != rank:
        raise c.wrong(f"its {name} {list(given)} do not fit {rank} dimensions")
    return list(given)


def padded(c: Context, x: Value, low: Sequence[int], high: Sequence[int], value: float) -> Value:
    """x with a border around its spatial dimensions, the last ones."""
    lead = x.type.rank - len(low)
    if not any(low) and not any(high):
        return x
    return c.b.pad(x, low=(*(0,) * lead, *low), high=(*(0,) * lead, *high), value=value)


def taps(c: Context, x: Value, w: Windows) -> list[Value]:
    """For each element of the window, that element of every window. x is padded already."""
    lead = x.type.rank - len(w.kernel)
    limited(c, math.prod(w.kernel))
    parts = [x]
    for i, (k, s, d, n) in enumerate(zip(w.kernel, w.stride, w.dilation, w.count, strict=True)):
        parts = [
            cut(c.b, p, lead + i, j * d, j * d + (n - 1) * s + 1, s) for p in parts for j in range(k)
        ]  # fmt: skip
    return parts
