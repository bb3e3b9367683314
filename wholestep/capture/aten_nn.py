"""ATen handlers: matrix products, convolutions, normalisations, losses, attention, pooling."""

from __future__ import annotations

import math
from typing import Any

from ..dialects.step import StepBuilder, normalize_dim, torch_dtype
from ..dialects.step.grouped import ROWS, SUMS, TURNED
from ..ir.core import Value
from ..ir.types import BOOL, TensorType
from .aten_pointwise import reduce_loss
from .aten_random import dropout
from .aten_shape import cut
from .importer import Importer, aten

BATCH = "abcdefgh"  # labels of leading dimensions; m, n, k and l are those of matrices


# ---- contractions ----------------------------------------------------------------------------------------------------


def matmul(b: StepBuilder, x: Value, y: Value) -> Value:
    """torch.matmul: vectors, matrices, and stacks of them with broadcasting."""
    if x.type.rank == 1 and y.type.rank == 1:
        return b.contract(x, y, spec="k,k->")
    if x.type.rank == 1:
        lead = BATCH[: y.type.rank - 2]
        return b.contract(x, y, spec=f"k,{lead}kn->{lead}n")
    if y.type.rank == 1:
        lead = BATCH[: x.type.rank - 2]
        return b.contract(x, y, spec=f"{lead}mk,k->{lead}m")
    if y.type.rank == 2:
        lead = BATCH[: x.type.rank - 2]
        return b.contract(x, y, spec=f"{lead}mk,kn->{lead}mn")
    rank = max(x.type.rank, y.type.rank)
    lead = BATCH[: rank - 2]
    xs, ys = x.type.shape[:-2], y.type.shape[:-2]
    xs, ys = (1,) * (rank - 2 - len(xs)) + xs, (1,) * (rank - 2 - len(ys)) + ys
    # a label stays off the side that broadcasts it, so nothing is repeated in memory
    keep_x = [d != 1 or e == 1 for d, e in zip(xs, ys, strict=True)]
    keep_y = [d != 1 or e == 1 for d, e in zip(ys, xs, strict=True)]
    left = "".join(c for c, keep in zip(lead, keep_x, strict=True) if keep)
    right = "".join(c for c, keep in zip(lead, keep_y, strict=True) if keep)
    x = b.reshape_to(x, (*(d for d, keep in zip(xs, keep_x, strict=True) if keep), *x.type.shape[-2:]))
    y = b.reshape_to(y, (*(d for d, keep in zip(ys, keep_y, strict=True) if keep), *y.type.shape[-2:]))
    return b.contract(x, y, spec=f"{left}mk,{right}kn->{lead}mn")


@aten("mm", "bmm", "matmul", "mv", "dot", "vdot")
def _matmul(imp, x, y):
    return matmul(imp.b, x, y)


@aten("linear")
def _linear(imp, x, weight, bias=None):
    if weight.type.rank == 1:
        return NotImplemented
    lead = BATCH[: x.type.rank - 1]
    return imp.b.contract(x, weight, bias, spec=f"{lead}k,nk->{lead}n")


def _plus(imp: Importer, addend: Value, x: Value, y: Value, beta: Any, alpha: Any, spec: str) -> Value:
    b = imp.b
    if alpha != 1:
        x = b.mul(x, alpha)
    if beta == 0:
        return b.contract(x, y, spec=spec)
    return b.contract(x, y, addend if beta == 1 else b.mul(addend, beta), spec=spec)


@aten("addmm")
def _addmm(imp, addend, x, y, beta=1, alpha=1):
    return _plus(imp, addend, x, y, beta, alpha, "mk,kn->mn")


@aten("baddbmm")
def _baddbmm(imp, addend, x, y, beta=1, alpha=1):
    return _plus(imp, addend, x, y, beta, alpha, "amk,akn->amn")


@aten("addmv")
def _addmv(imp, addend, x, y, beta=1, alpha=1):
    return _plus(imp, addend, x, y, beta, alpha, "mk,k->m")


@aten("_grouped_mm", "transformers.grouped_mm_fallback.default")
def _grouped_mm(imp, x, y, offs=None, bias=None, out_dtype=None):
    b = imp.b
    if bias is not None or out_dtype not in (None, torch_dtype(x.type.element)):
        return NotImplemented
    if offs is None:
        return matmul(b, x, y)
    if y.type.rank == 3:
        return by_matrices(b, x, y, offs)
    turned = b.transpose(x, order=(1, 0) if x.type.rank == 2 else (0, 2, 1))
    if x.type.rank == 2:
        return b.grouped_contract(turned, y, offs, spec=SUMS)
    columns = by_matrices(b, b.transpose(y, order=(1, 0)), turned, offs)
    return b.transpose(columns, order=(1, 0))


def by_matrices(b: StepBuilder, x: Value, matrices: Value, ends: Value) -> Value:
    """Rows by the matrix of their group; matrices that were turned around are read as they lie."""
    made = matrices.op
    if made is not None and made.name == "step.transpose" and tuple(made.order) == (0, 2, 1):
        return b.grouped_contract(x, made.operands[0], ends, spec=TURNED)
    return b.grouped_contract(x, matrices, ends, spec=ROWS)


@aten("outer", "ger")
def _outer(imp, x, y):
    if x.type.element is not y.type.element:
        return NotImplemented
    return imp.b.mul(imp.b.unsqueeze(x, 1), y)


@aten("einsum")
def _einsum(imp, equation, tensors, path=None):
    equation = equation.replace(" ", "")
    if "..." in equation or len(tensors) != 2:
        return NotImplemented
    inputs, arrow, out = equation.partition("->")
    left, _, right = inputs.partition(",")
    if not arrow:
        out = "".join(c for c in sorted(set(left + right)) if (left + right).count(c) == 1)
    x, y = tensors
    if any(len(set(s)) != len(s) for s in (left, right, out)) or x.type.element is not y.type.element:
        return NotImplemented
    x, left = _drop_lone(imp.b, x, left, right + out)
    y, right = _drop_lone(imp.b, y, right, left + out)
    sizes: dict[str, int] = {}
    for labels, value in ((left, x), (right, y)):
        for c, d in zip(labels, value.type.shape, strict=True):
            if sizes.setdefault(c, d) != d:
                return NotImplemented  # a broadcast label of size one
    return imp.b.contract(x, y, spec=f"{left},{right}->{out}")


def _drop_lone(b: StepBuilder, x: Value, labels: str, others: str) -> tuple[Value, str]:
    """Sums the labels that nobody else has."""
    lone = tuple(i for i, c in enumerate(labels) if c not in others)
    if not lone:
        return x, labels
    return b.sum(x, dims=lone), "".join(c for i, c in enumerate(labels) if i not in lone)


# ---- convolutions and pooling ----------------------------------------------------------------------------------------


def _tuple(value: Any, n: int) -> tuple[int, ...]:
    value = [value] if isinstance(value, int) else list(value)
    return tuple(value * n if len(value) == 1 else value)


def conv(
    imp: Importer,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    transposed: bool = False,
    output_padding: Any = 0,
) -> Any:
    b, n = imp.b, weight.type.rank - 2
    if x.type.element.kind != "float" or not _uniform(x, weight, bias):
        return NotImplemented
    single = x.type.rank == n + 1
    if single:
        x = b.unsqueeze(x, 0)
    window = dict(dilation=_tuple(dilation, n), output_padding=_tuple(output_padding, n), groups=groups)
    steps, around = _tuple(stride, n), _tuple(padding, n)
    inner = None if transposed else own_padding(x, steps, around)
    if inner is None:
        out = b.conv(x, weight, bias, stride=steps, padding=around, transposed=transposed, **window)
    else:
        x, around, extra = inner
        out = b.conv(x, weight, bias, stride=steps, padding=around, **window)
        for dim, (before, after) in enumerate(extra, 2):
            out = cut(b, out, dim, before, out.type.shape[dim] - after)
    return b.reshape_to(out, out.type.shape[1:]) if single else out


#: a convolution may make so much more than is asked for, as a share, where that saves a padded copy of its input
MORE = 1 / 16


def own_padding(
    x: Value, stride: tuple[int, ...], padding: tuple[int, ...]
) -> tuple[Value, tuple[int, ...], list[tuple[int, int]]] | None:
    """What a convolution of a value that was padded with zeros is without that: the value before, how the convolution
    pads it on both sides, and how many results that gives too many before and after. None where that is not the same.
    """
    op = x.op
    if op is None or op.name != "step.pad" or op.value != 0 or min(*op.low, *op.high) < 0:
        return None
    if any((*op.low[:2], *op.high[:2])):  # batch or channels
        return None
    around, extra, share = [], [], 1.0
    for low, high, step, own, size in zip(op.low[2:], op.high[2:], stride, padding, x.type.shape[2:], strict=True):
        wide = max(low, high)
        if low != high and step > 1:
            return None
        around.append(wide + own)
        extra.append((wide - low, wide - high))
        share *= 1 + abs(high - low) / size
    return (op.x, tuple(around), extra) if share <= 1 + MORE else None


@aten("conv1d", "conv2d", "conv3d")
def _conv(imp, x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    return conv(imp, x, weight, bias, stride, padding, dilation, groups)


@aten("conv1d.padding", "conv2d.padding", "conv3d.padding")
def _conv_padding(imp, x, weight, bias=None, stride=1, padding="valid", dilation=1, groups=1):
    n = weight.type.rank - 2
    if padding == "valid":
        return conv(imp, x, weight, bias, stride, 0, dilation, groups)
    total = [d * (k - 1) for d, k in zip(_tuple(dilation, n), weight.type.shape[2:], strict=True)]
    odd = [t % 2 for t in total]
    if any(odd):
        lead = x.type.rank - n
        x = imp.b.pad(x, low=(0,) * x.type.rank, high=(*(0,) * lead, *odd), value=0.0)
    return conv(imp, x, weight, bias, stride, [t // 2 for t in total], dilation, groups)


@aten("conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input")
def _conv_transpose(imp, x, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
    return conv(imp, x, weight, bias, stride, padding, dilation, groups, True, output_padding)


@aten("convolution")
def _convolution(imp, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    return conv(imp, x, weight, bias, stride, padding, dilation, groups, transposed, output_padding)


def _window(x: Value, n: int, kernel: Any, stride: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    kernel = _tuple(kernel, n)
    return kernel, _tuple(stride, n) if stride not in (None, []) else kernel


def _batched(imp: Importer, x: Value, n: int) -> Value | None:
    """x with a batch dimension where it has none."""
    if x.type.rank == n + 1:
        return imp.b.unsqueeze(x, 0)
    return x if x.type.rank == n + 2 else None


def _max_pool(imp: Importer, n: int, given: Value, kernel, stride, padding, dilation, ceil_mode, indices: bool) -> Any:
    b, x = imp.b, _batched(imp, given, n)
    if x is None:
        return NotImplemented
    kernel, stride = _window(x, n, kernel, stride)
    out = b.max_pool(
        x, kernel=kernel, stride=stride, padding=_tuple(padding, n), dilation=_tuple(dilation, n), ceil_mode=ceil_mode
    )
    out = [b.reshape_to(v, t.shape) for v, t in zip(out, [imp.expected[0]] * 2, strict=True)]
    return out if indices else out[0]


def _register_pools() -> None:
    def one(n: int) -> None:
        @aten(f"max_pool{n}d")
        def max_pool(imp, x, kernel_size, stride=(), padding=0, dilation=1, ceil_mode=False):
            return _max_pool(imp, n, x, kernel_size, list(stride), padding, dilation, ceil_mode, False)

        @aten(f"max_pool{n}d_with_indices")
        def max_pool_with_indices(imp, x, kernel_size, stride=(), padding=0, dilation=1, ceil_mode=False):
            return _max_pool(imp, n, x, kernel_size, list(stride), padding, dilation, ceil_mode, True)

        @aten(f"avg_pool{n}d")
        def avg_pool(
            imp, x, kernel_size, stride=(), padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None
        ):
            b, x = imp.b, _batched(imp, x, n)
            if x is None or x.type.element.kind != "float":
                return NotImplemented
            kernel, step = _window(x, n, kernel_size, list(stride) if not isinstance(stride, int) else stride)
            out = b.avg_pool(
                x, kernel=kernel, stride=step, padding=_tuple(padding, n), ceil_mode=ceil_mode,
                count_include_pad=count_include_pad, divisor_override=divisor_override,
            )  # fmt: skip
            return b.reshape_to(out, imp.expected[0].shape)

        @aten(f"adaptive_avg_pool{n}d", f"_adaptive_avg_pool{n}d")
        def adaptive_avg_pool(imp, x, output_size):
            b, x = imp.b, _batched(imp, x, n)
            if x is None or x.type.element.kind != "float":
                return NotImplemented
            size = _tuple(output_size, n)
            if all(s == 1 for s in size):
                out = b.mean(x, dims=tuple(range(2, n + 2)), keepdim=True)
            else:
                out = b.adaptive_avg_pool(x, size=imp.expected[0].shape[-n:])
            return b.reshape_to(out, imp.expected[0].shape)

    for n in (1, 2, 3):
        one(n)


_register_pools()


def _whole_factors(imp, x, *scales):
    """By how much an image is made larger, or None. The scales are looked at too: they may be others, or none, beside a
    size."""
    large, small = imp.expected[0].shape[2:], x.type.shape[2:]
    given = [s for s in (scales[0] if scales and isinstance(scales[0], list | tuple) else scales) if s is not None]
    if x.type.element.kind != "float" or any(n % m for n, m in zip(large, small, strict=True)):
        return None
    factors = tuple(n // m for n, m in zip(large, small, strict=True))
    return None if given and list(map(float, given)) != list(map(float, factors)) else factors


@aten("upsample_bilinear2d", "upsample_bilinear2d.vec")
def _upsample(imp, x, output_size, align_corners, *scales):
    factors = None if align_corners else _whole_factors(imp, x, *scales)
    return NotImplemented if factors is None else imp.b.upsample(x, factors=factors)


@aten("upsample_nearest2d", "upsample_nearest2d.vec")
def _repeat_pixels(imp, x, output_size, *scales):
    factors = _whole_factors(imp, x, *scales)
    return NotImplemented if factors is None else imp.b.repeat_pixels(x, factors=factors)


# ---- normalisations --------------------------------------------------------------------------------------------------


@aten("softmax.int", "_softmax")
def _softmax(imp, x, dim, dtype=None):
    return imp.b.softmax(imp.b.cast_to(x, imp.expected[0].element), dim=normalize_dim(dim, x.type.rank))


@aten("_safe_softmax")
def _safe_softmax(imp, x, dim, dtype=None):
    return safe_softmax(imp.b, imp.b.cast_to(x, imp.expected[0].element), normalize_dim(dim, x.type.rank))


def safe_softmax(b: StepBuilder, x: Value, dim: int) -> Value:
    """A softmax that gives zeros, not NaN, where all of its input is minus infinity."""
    dims = (dim,) if x.type.rank else ()
    empty = b.eq(b.amax(x, dims=dims, keepdim=True), -math.inf)
    return b.select(empty, 0.0, b.softmax(b.select(empty, 0.0, x), dim=dim))


@aten("log_softmax.int", "_log_softmax")
def _log_softmax(imp, x, dim, dtype=None):
    return imp.b.log_softmax(imp.b.cast_to(x, imp.expected[0].element), dim=normalize_dim(dim, x.type.rank))


def _uniform(*values: Value | None) -> bool:
    """Whether all tensors given share one element type."""
    return len({v.type.element for v in values if v is not None}) == 1


@aten("layer_norm")
def _layer_norm(imp, x, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
    if not _uniform(x, weight, bias) or (weight is None and bias is not None):
        return NotImplemented
    return imp.b.layer_norm(x, weight, bias, trailing=len(normalized_shape), eps=eps)[0]


@aten("native_layer_norm")
def _native_layer_norm(imp, x, normalized_shape, weight, bias, eps):
    if not _uniform(x, weight, bias) or (weight is None and bias is not None):
        return NotImplemented
    y, *statistics = imp.b.layer_norm(x, weight, bias, trailing=len(normalized_shape), eps=eps)
    return [y, *(imp.b.detach(s) for s in statistics)]  # autograd lets no gradient through the statistics


@aten("rms_norm")
def _rms_norm(imp, x, normalized_shape, weight=None, eps=None):
    if not _uniform(x, weight):
        return NotImplemented
    import torch

    from ..dialects.step import torch_dtype

    eps = torch.finfo(torch_dtype(x.type.element)).eps if eps is None else eps
    return imp.b.rms_norm(x, weight, trailing=len(normalized_shape), eps=eps)[0]


@aten("group_norm")
def _group_norm(imp, x, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True):
    if not _uniform(x, weight, bias):
        return NotImplemented
    return imp.b.group_norm(x, weight, bias, groups=num_groups, eps=eps)[0]


@aten("batch_norm")
def _batch_norm(imp, x, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled=True):
    """Gives the result and the new running statistics (None where they do not change)."""
    if x.type.rank < 2:
        raise ValueError("batch norm of a tensor without a channel dimension is not supported")
    y, _, _, *statistics = imp.b.batch_norm(
        x, weight, bias, running_mean, running_var, training=training, momentum=momentum, eps=eps
    )
    if not training or running_mean is None:
        statistics = [None, None]
    return y, statistics


@aten("instance_norm")
def _instance_norm(imp, x, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled=True):
    # a batch norm of one sample with n * c channels; the running statistics are the mean over the samples
    b, (n, c, *rest) = imp.b, x.type.shape
    flat = b.reshape_to(x, (1, n * c, *rest))
    vectors = [
        None if v is None else b.reshape_to(b.broadcast_to(v, (n, c)), (n * c,))
        for v in (weight, bias, running_mean, running_var)
    ]
    y, _, _, *new = b.batch_norm(flat, *vectors, training=use_input_stats, momentum=momentum, eps=eps)
    statistics: list[Value | None] = [None, None]
    if use_input_stats and running_mean is not None:
        statistics = [b.mean(b.reshape_to(v, (n, c)), dims=(0,)) for v in new]
    return b.reshape_to(y, x.type.shape), statistics


# ---- losses ----------------------------------------------------------------------------------------------------------

REDUCTIONS = ("none", "mean", "sum")


@aten("cross_entropy_loss")
def _cross_entropy(imp, x, target, weight=None, reduction=1, ignore_index=-100, label_smoothing=0.0):
    b = imp.b
    if target.type.element.kind == "float" or target.type.shape == x.type.shape:
        return _cross_entropy_probabilities(imp, x, target, weight, reduction, label_smoothing)
    return b.cross_entropy(
        x, target, weight, ignore_index=ignore_index, reduction=REDUCTIONS[reduction],
        label_smoothing=float(label_smoothing),
    )[0]  # fmt: skip


def _cross_entropy_probabilities(imp, x, target, weight, reduction, label_smoothing):
    b = imp.b
    dim = 0 if x.type.rank == 1 else 1
    classes = x.type.shape[dim]
    if label_smoothing > 0:
        target = b.add(b.mul(target, 1 - label_smoothing), label_smoothing / classes)
    terms = b.mul(b.log_softmax(x, dim=dim), target)
    if weight is not None:
        terms = b.mul(terms, b.reshape_to(weight, tuple(classes if i == dim else 1 for i in range(x.type.rank))))
    out = b.neg(b.sum(terms, dims=(dim,)))
    if reduction == 1:
        return b.div(b.sum(out, dims=tuple(range(out.type.rank))), float(max(1, x.type.size // classes)))
    return reduce_loss(b, out, reduction)


@aten("nll_loss", "nll_loss_nd", "nll_loss2d")
def _nll_loss(imp, x, target, weight=None, reduction=1, ignore_index=-100):
    return imp.b.nll_loss(x, target, weight, ignore_index=ignore_index, reduction=REDUCTIONS[reduction])


@aten("binary_cross_entropy_with_logits")
def _bce_with_logits(imp, x, target, weight=None, pos_weight=None, reduction=1):
    b = imp.b
    log_sigmoid = b.sub(b.select(b.lt(x, 0), x, 0.0), b.log1p(b.exp(b.neg(b.abs(x)))))
    rest = b.mul(b.sub(1.0, target), x)
    if pos_weight is None:
        loss = b.sub(rest, log_sigmoid)
    else:
        factor = b.add(b.mul(b.sub(pos_weight, 1.0), target), 1.0)
        loss = b.sub(rest, b.mul(factor, log_sigmoid))
    if weight is not None:
        loss = b.mul(loss, weight)
    return reduce_loss(b, loss, reduction)


# ---- attention -------------------------------------------------------------------------------------------------------


@aten("scaled_dot_product_attention")
def _attention(imp, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    b = imp.b
    scale = 1 / math.sqrt(q.type.shape[-1]) if scale is None else float(scale)
    mask = attn_mask
    if mask is not None and mask.type.element.kind not in ("bool", "float"):
        return NotImplemented
    if mask is not None and mask.type.element is not BOOL:
        mask = b.cast_to(mask, q.type.element)
    if enable_gqa and k.type.shape[-3] != v.type.shape[-3]:  # the op has one number of heads for both
        k, v = (_repeat_heads(b, t, q.type.shape[-3]) for t in (k, v))
    if dropout_p == 0.0 and q.type.rank == k.type.rank == v.type.rank == 4:
        few = enable_gqa and q.type.shape[1] != k.type.shape[1]
        same = slice(1 if few else 2)
        if q.type.shape[same] == k.type.shape[same] == v.type.shape[same]:
            return b.attention(q, k, v, mask, causal=is_causal, scale=scale, enable_gqa=few)[0]
    if enable_gqa:
        k, v = (_repeat_heads(b, t, q.type.shape[-3]) for t in (k, v))
    return _attention_by_parts(imp, q, k, v, mask, dropout_p, is_causal, scale)


def _repeat_heads(b: StepBuilder, x: Value, heads: int) -> Value:
    """Each head repeated so that there are as many as the queries have."""
    *lead, own, length, size = x.type.shape
    if own == heads:
        return x
    wide = b.broadcast_to(b.unsqueeze(x, len(lead) + 1), (*lead, own, heads // own, length, size))
    return b.reshape_to(wide, (*lead, heads, length, size))


def _attention_by_parts(imp: Importer, q, k, v, mask, dropout_p, is_causal, scale):
    """Attention with dropout or unusual shapes, as the matrix products and the softmax it consists of."""
    b = imp.b
    scores = matmul(b, b.mul(q, math.sqrt(scale)), b.mul(b.swap(k), math.sqrt(scale)))
    length, other = scores.type.shape[-2:]
    if is_causal:
        from ..ir.types import I64

        row = b.unsqueeze(b.iota(start=0, stride=1, type=TensorType((length,), I64)), 1)
        column = b.iota(start=0, stride=1, type=TensorType((other,), I64))
        mask = b.le(column, row)
    if mask is not None:
        scores = b.select(mask, scores, -math.inf) if mask.type.element is BOOL else b.add(scores, mask)
    last = scores.type.rank - 1
    masked = mask is not None and mask.type.element is BOOL
    weights = safe_softmax(b, scores, last) if masked else b.softmax(scores, dim=last)
    if dropout_p > 0:
        weights = dropout(imp, weights, dropout_p)
    return matmul(b, weights, v)
