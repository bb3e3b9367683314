"""Whether a kernel's results are right: as ATen's are, or nearer to the truth than ATen's own rounding lets those be.

First results are compared with what ATen computes op by op (`difference`). ATen rounds to 16 bits after every op and a
kernel does not: where a relu's mask comes from a sum, some elements of the mask differ, and what is summed up under it
differs by several percent. So where the first comparison fails the ops run once more with f32 between them, and a
kernel is right that is near those results, or not much farther from them than ATen is (`Exact`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..dialects.step import torch_dtype
from ..ir.attributes import Attribute
from ..ir.core import Op, Value
from ..ir.types import F32, ScalarType, TensorType
from .aten import Call, lower
from .convolutions import by_quick_kernels
from .providers import Region

#: the share of windows in which two elements may be equal once they are rounded to 16 bits
TIED = 0.05
#: the share of whole numbers that may differ, because a comparison falls otherwise where rounding decides
TURNED = 0.001
#: a kernel may be so many times as far from the ops in f32 as ATen is, up to so many times what is usual
AS_FAR, AT_MOST = 2.0, 5.0
#: element types that are compared as they are
SUBTRACTED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
#: ops that run as they are among others in f32: numbers are drawn by their type, and of others nothing is known
AS_THEY_ARE = ("step.random", "step.opaque")


def runs_as_it_is(op: Op) -> bool:
    """Whether an op keeps its types among others in f32: those above, and casts that round because the program does."""
    return op.name in AS_THEY_ARE or bool(op.attributes.get("rounds"))


Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Distance:
    """How far a result is from the one that was wanted."""

    #: the share of elements that are wrong: of whole numbers all that differ, of others those that are far off
    off: float
    #: the mean difference, in means of what was wanted
    mean: float
    told: str


#: what no rounding explains
BEYOND = math.inf


def distance(x: torch.Tensor, y: torch.Tensor, low: bool, number: int) -> Distance:
    """How far x is from y; low: they were rounded to 16 bits."""
    if x.shape != y.shape:
        return Distance(BEYOND, BEYOND, f"result {number} has another shape")
    if not x.is_floating_point():
        wrong = int((x != y).sum())
        return Distance(wrong / max(x.numel(), 1), 0.0, f"wrong: {wrong:,} elements of result {number} differ")
    good = y.isfinite()
    if not torch.equal(x.isfinite(), good):
        return Distance(BEYOND, BEYOND, f"wrong: result {number} is finite at other places")
    if not bool(good.all()):  # (picking elements out takes long)
        if not torch.equal(x[~good].nan_to_num(0.0), y[~good].nan_to_num(0.0)):
            return Distance(BEYOND, BEYOND, f"wrong: result {number} has other infinities")
        x, y = x[good], y[good]
    if not x.numel():
        return Distance(0.0, 0.0, "")
    b = y.float()
    apart = (x.float() - b).abs_()
    b = b.abs_() if b is not y else b.abs()
    # rounding may turn a comparison, and what hangs on it, around: at few places
    far = (apart > far_off(low) * (b.max() + 1e-12)).sum(dtype=torch.float64)
    numbers = torch.stack([far, *(t.double() for t in (apart.mean(), apart.max(), b.mean(), b.max()))])
    wrong_at, mean, most, typical, scale = numbers.tolist()  # (waits for the device once)
    told = f"wrong: result {number} is off by up to {most:.3g}, and the largest is {scale:.3g}"
    return Distance(wrong_at / x.numel(), mean / (typical + 1e-12), told)


def far_off(low: bool) -> float:
    """From how far on an element is off, as a share of the largest."""
    return 0.1 if low else 2e-3


def usual(result: torch.Tensor, low: bool, turned: float) -> tuple[float, float]:
    """How far a right result may be: the share of elements that are off, and the mean."""
    if not result.is_floating_point():
        return turned, 0.0
    return (2e-3, 0.02) if low else (1e-4, 1e-3)


def are_near(found: Tensors, wanted: Tensors, low: bool) -> list[bool]:
    """Of results those that are finite and near everywhere, told by four numbers of each. Of others nothing is known.

    It is quick: a few passes over what is compared, and the device is waited for once.
    """
    numbers: dict[int, torch.Tensor] = {}
    for number, (x, y) in enumerate(zip(found, wanted, strict=True)):
        if x.shape == y.shape and x.numel() and x.dtype == y.dtype and x.dtype in SUBTRACTED:
            apart, size = (x - y).abs_(), y.abs()
            exact = torch.promote_types(x.dtype, torch.float32)
            parts = (apart.amax(), size.amax(), apart.mean(dtype=exact), size.mean(dtype=exact))
            numbers[number] = torch.stack([t.to(exact) for t in parts]).double()
    near = [False] * len(wanted)
    rows = torch.stack(list(numbers.values())).tolist() if numbers else []
    for number, (most, scale, mean, typical) in zip(numbers, rows, strict=True):  # (nothing is less than NaN)
        limit = usual(wanted[number], low, 0.0)[1] * typical
        near[number] = most <= far_off(low) * scale < math.inf and mean <= limit
    return near


def difference(found: Tensors, wanted: Tensors, low: bool, turned: float = TURNED) -> str:
    """Empty where results agree as far as rounding lets them (`low`: to 16 bits), else what is wrong."""
    near = are_near(found, wanted, low)
    for number, (x, y) in enumerate(zip(found, wanted, strict=True)):
        if near[number]:
            continue
        apart, (off, mean) = distance(x, y, low, number), usual(y, low, turned)
        if apart.off > off or apart.mean > mean:
            return apart.told
    return ""


class Exact:
    """Results of a region with f32 between its ops, rounded once: made when they are first asked for."""

    def __init__(self, region: Region, inputs: Tensors, rounded: Tensors):
        self.region, self.inputs = region, inputs
        #: what ATen makes of the same inputs, op by op
        self.rounded = rounded
        #: the results, with how far ATen's are from them; or why there are none; None where nobody asked yet
        self.known: tuple[Tensors, list[Distance]] | str | None = None

    def judge(self, found: Tensors, why: str, turned: float = TURNED) -> str:
        """What is wrong with results in which the first comparison found `why`; empty where they are right."""
        if self.known is None:
            self.known = self.results()
        if isinstance(self.known, str):
            return f"{why} (compared with ATen's ops in 16 bits alone: {self.known})"
        wanted, aten = self.known
        for number, (x, y) in enumerate(zip(found, wanted, strict=True)):
            apart, limits = distance(x, y, True, number), usual(y, True, turned)
            for own, theirs, limit in zip(
                (apart.off, apart.mean), (aten[number].off, aten[number].mean), limits, strict=True
            ):
                if own > min(max(limit, AS_FAR * theirs), AT_MOST * limit):
                    return apart.told
        return ""

    def results(self) -> tuple[Tensors, list[Distance]] | str:
        try:
            with by_quick_kernels(self.region):
                wanted = in_f32(self.region)(*self.inputs)
            apart = [distance(x, y, True, n) for n, (x, y) in enumerate(zip(self.rounded, wanted, strict=True))]
        except torch.OutOfMemoryError:
            return "there is no memory for f32"
        except Exception as error:  # such as a kernel that knows 16 bits alone
            return f"in f32 they fail with {first_line(error)}"
        return wanted, apart


def in_f32(region: Region) -> Callable[..., list[torch.Tensor]]:
    """A function that runs the ops of a region through ATen with f32 wherever they have 16 bits.

    Its results are rounded to their own types. What is no longer needed is given back on the way.
    """
    body = region.body.clone()
    block = body.regions[0].block
    assert block.last is not None
    results, ops = block.last.operands, [op for op in block if not op.definition.terminator]
    calls: dict[Any, Call] = {op: lower(op, region.device) for op in ops if runs_as_it_is(op)}
    narrow = {op: [torch_dtype(v.type.element) for v in call.operands] for op, call in calls.items()}
    for value in (*block.arguments, *(r for op in ops for r in op.results)):
        value.type = wide(value.type)
    for op in ops:
        if op not in calls:
            op.attributes.update({name: wide(a) for name, a in op.attributes.items()})
            calls[op] = lower(op, region.device)
    left = Counter[Value](v for op in ops for v in calls[op].operands)
    left.update(results)

    def run(*operands: torch.Tensor) -> list[torch.Tensor]:
        values: dict[Value, Any] = dict(zip(block.arguments, operands, strict=True))
        uses = left.copy()
        for op in ops:
            call = calls[op]
            given = [widened(values[v]) for v in call.operands]
            if op in narrow:
                given = [x.to(dtype) for x, dtype in zip(given, narrow[op], strict=True)]
            made = call.run(*given)
            made = made if isinstance(made, list | tuple) else (made,)
            values.update((v, widened(x)) for v, x in zip(call.results, made, strict=True) if uses[v])
            del given, made
            for value in call.operands:
                uses[value] -= 1
                if not uses[value]:
                    del values[value]
        return [values[v].to(spec.dtype) for v, spec in zip(results, region.results, strict=True)]

    return run


def wide(of: Attribute) -> Any:
    """A type with f32 for 16-bit floats; anything else as it is."""
    if isinstance(of, TensorType):
        return of.with_element(wide(of.element))
    return F32 if isinstance(of, ScalarType) and of.kind == "float" and of.bits == 16 else of


def widened(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def rounds(region: Region) -> bool:
    """Whether ATen rounds something to 16 bits on the way."""
    values = [v for op in region.ops for v in (*op.operands, *op.results)]
    return any(v.type.element.kind == "float" and v.type.element.bits < 32 for v in values)


def spoilt(tensor: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Memory for a result, with something in it that is wrong everywhere."""
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    return tensor.copy_(wanted == 0)


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:160]}" if text else type(error).__name__
