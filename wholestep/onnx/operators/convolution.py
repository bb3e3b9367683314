"""Convolutions, transposed, deformed and of quantised integers too."""

from __future__ import annotations

from ...ir.core import Value
from ..context import Context, Tensor
from . import operator
from .casts import shifted, to_integers
from .support import F32, F64, I32, along, cut, one_number, positions
from .vision import sampled
from .windows import Windows, listed, padded, windows


def convolved(c: Context, x: Value, weight: Value, bias: Value | None) -> Value:
    rank = x.type.rank - 2
    if rank < 1 or weight.type.rank != rank + 2:
        raise c.wrong(f"an input of rank {x.type.rank} and a kernel of rank {weight.type.rank} do not fit")
    if rank > 3:
        raise c.unsupported("convolutions over more than three dimensions are not supported", "split it up")
    kernel = c.attribute("kernel_shape") or weight.type.shape[2:]
    if tuple(kernel) != weight.type.shape[2:]:
        raise c.wrong(f"its kernel_shape {list(kernel)} is not that of its kernel, {list(weight.type.shape[2:])}")
    w, groups = windows(c, x.type.shape[2:], kernel), c.attribute("group", 1)
    if groups < 1 or weight.type.shape[1] * groups != x.type.shape[1] or weight.type.shape[0] % groups:
        raise c.wrong(f"{x.type.shape[1]} channels in {groups} groups do not fit the kernel {list(weight.type.shape)}")
    if 0 in x.type.shape or (bias is not None and bias.type.shape != weight.type.shape[:1]):
        raise c.wrong("its input is empty, or its bias does not fit")
    pads: tuple[int, ...] = w.low
    if not w.symmetric:
        x, pads = padded(c, x, w.low, w.high, 0.0), (0,) * rank
    return c.b.conv(x, weight, bias, stride=w.stride, padding=pads, dilation=w.dilation, groups=groups)


@operator("Conv")
def conv(c: Context, x: Tensor, weight: Tensor, bias: Tensor | None = None):
    return convolved(c, x.value, weight.value, None if bias is None else bias.value)


@operator("ConvInteger")
def conv_integer(c: Context, x: Tensor, weight: Tensor, x_zero: Tensor | None = None, w_zero: Tensor | None = None):
    left = shifted(c, x, x_zero, F64)
    right = shifted(c, weight, w_zero, F64, per_output(weight))
    return c.b.cast_to(convolved(c, left, right, None), I32)  # exact in doubles


@operator("QLinearConv")
def qlinear_conv(
    c: Context, x: Tensor, x_scale: Tensor, x_zero: Tensor, weight: Tensor, w_scale: Tensor, w_zero: Tensor,
    y_scale: Tensor, y_zero: Tensor, bias: Tensor | None = None,
):  # fmt: skip
    b = c.b
    left = shifted(c, x, x_zero, F64)
    right = shifted(c, weight, w_zero, F64, per_output(weight))
    whole = convolved(c, left, right, None if bias is None else b.cast_to(bias.value, F64))
    scale = b.cast_to(w_scale.value, F32)
    scale = one_number(b, scale) if w_scale.size == 1 else along(b, scale, 1, x.rank)
    factor = b.div(b.mul(scale, one_number(b, x_scale.value)), one_number(b, y_scale.value))
    product = b.mul(b.cast_to(whole, F32), factor)
    return to_integers(c, product, one_number(b, b.cast_to(y_zero.value, I32)), y_zero.type)


def per_output(weight: Tensor) -> tuple[int, ...]:
    """The shape of one number per output channel of a kernel."""
    return (weight.shape[0], *(1,) * (weight.rank - 1))


@operator("ConvTranspose")
def conv_transpose(c: Context, x: Tensor, weight: Tensor, bias: Tensor | None = None):
    b, rank = c.b, x.rank - 2
    if not 1 <= rank <= 3 or weight.rank != x.rank:
        raise c.wrong(f"an input of rank {x.rank} and a kernel of rank {weight.rank} do not fit")
    kernel = tuple(c.attribute("kernel_shape") or weight.shape[2:])
    if kernel != weight.shape[2:]:
        raise c.wrong(f"its kernel_shape {list(kernel)} is not that of its kernel, {list(weight.shape[2:])}")
    stride, dilation = listed(c, "strides", rank), listed(c, "dilations", rank)
    extra, groups = listed(c, "output_padding", rank, 0), c.attribute("group")
    if min(*stride, *dilation, groups, *x.shape, *weight.shape) < 1 or min(extra) < 0:
        raise c.wrong("its strides, dilations, groups and shapes must be positive")
    if x.shape[1] != weight.shape[0] or x.shape[1] % groups:
        raise c.wrong(f"{x.shape[1]} channels in {groups} groups do not fit the kernel {list(weight.shape)}")
    if bias is not None and bias.shape != (weight.shape[1] * groups,):
        raise c.wrong(f"a bias of shape {list(bias.shape)} does not fit the kernel {list(weight.shape)}")
    full = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(x.shape[2:], stride, kernel, dilation, strict=True)]
    low, high = transposed_padding(c, x, full, stride, extra)
    settings = {"stride": tuple(stride), "dilation": tuple(dilation), "groups": groups, "transposed": True}
    shift = None if bias is None else bias.value
    if low == high and min(low) >= 0 and all(e < max(s, d) for e, s, d in zip(extra, stride, dilation, strict=True)):
        return b.conv(
            x.value, weight.value, shift, padding=tuple(low), output_padding=tuple(extra), **settings
        )  # fmt: skip
    out = b.conv(x.value, weight.value, None, padding=(0,) * rank, output_padding=(0,) * rank, **settings)
    after = [e - h for e, h in zip(extra, high, strict=True)]  # what is added behind: negative where it is cut off
    out = padded(c, out, [max(0, -n) for n in low], [max(0, n) for n in after], 0.0)
    for i in range(rank):
        begin = max(0, low[i])
        out = cut(b, out, 2 + i, begin, begin + full[i] - low[i] + after[i])
    return out if shift is None else b.add(out, along(b, shift, 1, x.rank))


def transposed_padding(c: Context, x: Tensor, full: list[int], stride: list[int], extra: list[int]):
    rank, kind = x.rank - 2, c.attribute("auto_pad")
    wanted = c.attribute("output_shape")
    if wanted:
        wanted = list(wanted[-rank:])
    elif kind in ("SAME_UPPER", "SAME_LOWER"):
        wanted = [n * s for n, s in zip(x.shape[2:], stride, strict=True)]
    if wanted:
        total = [f + e - w for f, e, w in zip(full, extra, wanted, strict=True)]
        if min(total) < (0 if kind != "NOTSET" else -1):  # runtimes differ about where the rest goes
            raise c.unsupported("a result that is larger than its windows reach is not supported", "give pads")
        less, more = [t // 2 for t in total], [t - t // 2 for t in total]
        return (less, more) if kind == "SAME_UPPER" else (more, less)
    pads = c.attribute("pads")
    if kind == "VALID" or not pads:
        return [0] * rank, [0] * rank
    if len(pads) != 2 * rank:
        raise c.wrong(f"its pads {list(pads)} do not fit {rank} dimensions")
    return list(pads[:rank]), list(pads[rank:])


@operator("DeformConv")
def deform_conv(
    c: Context, x: Tensor, weight: Tensor, offset: Tensor, bias: Tensor | None = None, mask: Tensor | None = None
):
    """Each element of the window is read where an offset moves it, between pixels, and then convolved as usual."""
    b = c.b
    if x.rank != 4 or weight.rank != 4:
        raise c.unsupported("only deformable convolutions of images are supported", "use two spatial dimensions")
    n, channels, *sizes = x.shape
    kernel = tuple(c.attribute("kernel_shape") or weight.shape[2:])
    w, groups, fields = windows(c, sizes, kernel), c.attribute("group"), c.attribute("offset_group")
    count, (oh, ow) = kernel[0] * kernel[1], w.count
    if channels % fields or channels % groups or offset.shape != (n, fields * count * 2, oh, ow):
        raise c.wrong(f"offsets of shape {list(offset.shape)} do not fit")
    moved = b.reshape_to(offset.value, (n, fields, count, 2, oh, ow))
    places = [self_places(c, x, w, d) for d in (0, 1)]
    ys, xs = (b.add(b.reshape_to(cut(b, moved, 3, d, d + 1), (n, fields, count, oh, ow)), places[d]) for d in (0, 1))
    per = channels // fields
    image = b.reshape_to(x.value, (n * fields, per, *sizes))
    which = b.reshape_to(positions(b, n * fields), (n, fields, 1, 1, 1))
    values = sampled(c, image, b.broadcast_to(which, (n, fields, count, oh, ow)), ys, xs)  # [n, f, k, h, w, per]
    if mask is not None:
        values = b.mul(values, b.unsqueeze(b.reshape_to(mask.value, (n, fields, count, oh, ow)), 5))
    values = b.transpose(values, order=(0, 1, 5, 2, 3, 4))
    values = b.reshape_to(values, (n, groups, channels // groups * count, oh * ow))
    filters = b.reshape_to(weight.value, (groups, weight.shape[0] // groups, channels // groups * count))
    out = b.reshape_to(b.contract(filters, values, spec="gok,agkp->agop"), (n, weight.shape[0], oh, ow))
    return out if bias is None else b.add(out, along(b, bias.value, 1, 4))


def self_places(c: Context, x: Tensor, w: Windows, dim: int) -> Value:
    """The coordinate of each element of each window along one dimension: [kernel elements, windows...]."""
    b = c.b
    first = b.add(b.mul(positions(b, w.count[dim]), w.stride[dim]), -w.low[dim])
    within = b.mul(positions(b, w.kernel[dim]), w.dilation[dim])
    grid = b.add(along(b, within, dim, 4), along(b, first, 2 + dim, 4))
    whole = b.broadcast_to(grid, (*w.kernel, *w.count))
    return b.cast_to(b.reshape_to(whole, (w.kernel[0] * w.kernel[1], *w.count)), x.element)
