"""Convolutions that wait for memory as a template of the provider `triton`: products whose rows are windows.

Such a convolution has few taps or few channels: that of a photograph, whose channels libraries fill up to eight, or of
two samples far apart. It, or the gradient of its kernel, is a region of its own, timed against the library; the
generated product (`triton/contraction.py`) gathers windows from the image as it lies. Where it walks them row by row
(`triton/window_rows.py`) it may sum up what it makes as well.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

from ..dialects.step.convolution import Conv, ConvWeightGrad
from ..ir.core import Op
from ..transforms.around import NotAround, is_work, sides_of
from ..transforms.loops import NotLoops, lowered
from .convolution_ops import shapes_of
from .providers import Launcher, Offer, Progress, Region, Unwritten

#: multiplications per element that is read or written up to which a convolution waits for memory
RIDGE = 256
#: outputs of fewer elements take no time, whatever runs them
SMALL = 1 << 20
#: offers are generated kernels: the provider builds them
Way: tuple[type, ...] = ()


def product() -> Any:
    """The module of products, which needs Triton."""
    return importlib.import_module("wholestep.backends.triton.contraction")


def takes(op: Op) -> bool:
    """Whether the op is to be a region of its own."""
    if op.definition not in (Conv, ConvWeightGrad) or op.groups > 1 or op.transposed or len(op.stride) < 2:
        return False
    if (op.definition is Conv and op.bias is not None) or op.x.type.element.text not in ("bf16", "f16"):
        return False
    image, kernel, output = shapes_of(op)
    moved = sum(map(math.prod, (image, kernel, output)))
    return math.prod(output) >= SMALL and math.prod(output) * math.prod(kernel[1:]) <= RIDGE * moved


def why_not(region: Region) -> str:
    """Empty where the region is a product that can be generated, else why it is not."""
    try:
        if sums_up(region):
            return "" if candidates(region) else "a convolution sums up what it makes where it walks rows of windows"
        return product().why_not(lowered(region.body), region.specs)
    except NotLoops as error:
        return str(error)
    except NotAround as error:
        return f"what is around a convolution as a product: {error}"


def sums_up(region: Region) -> bool:
    """Whether a region is more than a convolution. What makes its image is none of it: that would be for each tap."""
    if sum(map(is_work, region.body.regions[0].block)) == 1:
        return False
    if sides_of(region.body).before is not None:
        raise NotAround("its image would be made once for each tap")
    return True


def candidates(region: Region) -> list[Any]:
    """The kernels worth timing, the best guess first."""
    kernel = lowered(region.body)
    return (product().over_rows if sums_up(region) else product().candidates)(kernel, region.specs)


def offers(region: Region) -> list[Offer]:
    """The tiles worth timing."""
    return [Unwritten(c, f"windows {c.name}") for c in candidates(region)]


def build(offers: Sequence[Offer], report: Progress | None = None) -> dict[str, Launcher | Exception]:
    """What runs each offer, by its key."""
    generate: Any = importlib.import_module("wholestep.backends.triton.generate")
    return generate.build([o.made for o in offers], report)
