"""Backward ops in the form that kernels of our own and the libraries do best; `take` takes all that is possible.

`gradient_as_convolution`: the input gradient of a convolution that visits every pixel is itself a convolution, of the
gradient with the kernel turned round. The library's forward kernels write where they are told; its gradients make their
result elsewhere, and it is copied. Sums are in another order.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..dialects.step import StepBuilder
from ..dialects.step.convolution import ConvInputGrad
from ..ir.builtin import functions
from ..ir.core import Op, Value
from .layout import channels_last, is_wide
from .opportunity import Change, Opportunity, Transformation, matches, register_transformation, site_names, sites
from .pointwise_convolution import StridedGradient, lie_channels_last, taps
from .positions import ShortPositions


@register_transformation
class GradientAsConvolution(Transformation):
    """Level 1: one input gradient."""

    name = "gradient_as_convolution"
    level = 1

    def find(self, module: Op) -> list[Opportunity]:
        found: list[Opportunity] = []
        names = site_names(module)
        for function in functions(module):
            ops = [op for op in function.regions[0].block if op.definition is ConvInputGrad and is_wide(op)]
            wanted = [op for op in ops if set(taps(op)) != {1}]
            last = lie_channels_last(function) if wanted else set()
            for op in wanted:
                reason = why_not(op, last)
                change = Change() if reason else Change(bytes=2 * (op.w.type.bytes - op.dx.type.bytes))
                found.append(Opportunity(self.name, names[op], change, reason))
        return found

    def apply(self, op: Op) -> None:
        assert op.parent is not None
        b = StepBuilder(op.parent, op, op.loc, op.phase)
        rank = op.w.type.rank
        turned = b.flip(b.transpose(op.w, order=(1, 0, *range(2, rank))), dims=tuple(range(2, rank)))
        turned = b.layout(turned, order=channels_last(rank))
        reach = [d * (n - 1) - p for d, n, p in zip(op.dilation, taps(op), op.padding, strict=True)]
        dx = b.conv(op.dy, turned, stride=op.stride, padding=tuple(reach), dilation=op.dilation)
        op.result.replace_by(dx)
        op.erase()


def why_not(op: Op, last: set[Value]) -> str:
    if op.transposed or op.groups > 1:
        return "it is transposed" if op.transposed else f"its channels are in {op.groups} groups"
    if any(n != 1 for n in op.stride):
        return "it skips pixels, so that its windows lie in the result"
    if any(p > d * (n - 1) for p, d, n in zip(op.padding, op.dilation, taps(op), strict=True)):
        return "it pads by more than its window reaches"
    if op.dy.type.element.text not in ("bf16", "f16") or op.dy not in last:
        return "only for 16 bits and channels-last do the libraries have such kernels that write in place"
    return ""


def take(module: Op, forbid: Sequence[str] = ()) -> list[str]:
    """Applies every opportunity of these forms that is possible and not forbidden; gives their keys.

    The last comes first: what an op is called does not change with what comes after it.
    """
    done: list[str] = []
    for how in (ShortPositions(), StridedGradient(), GradientAsConvolution()):
        places = sites(module)
        wanted = [o for o in reversed(how.find(module)) if not o.why_not and not matches(o, forbid)]
        for opportunity in wanted:
            how.apply(places[opportunity.site])
        done += [o.key for o in wanted]
    return done
