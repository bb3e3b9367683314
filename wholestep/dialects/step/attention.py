"""Scaled dot-product attention and its gradients, by the fused kernels of CPU and CUDA where one fits.

Shapes are [..., L, D] for q, [..., S, D] for k, [..., S, E] for v. The log-sum-exp of each row of scores is a result:
backward makes the probabilities again from it and no [L, S] tensor is kept. A row in which everything is masked gives
zeros, and 0 as its log-sum-exp. With `enable_gqa` k and v may have fewer heads (dimension -3) than q, each shared by
neighbouring heads of q. Dropout is not part of it: capture expands attention with dropout. Which kernel runs an op
follows from its types, as PyTorch would choose, or from its attribute `kernel` (backends/attentions.py measures).
"""

from __future__ import annotations

import math

import torch

from ...ir.core import Op, Value
from ...ir.dialect import AnyTensor, Attr, FloatTensor, Operand, Result
from ...ir.types import I64, TensorType
from . import attention_cuda
from .base import LABELS, Roles, StepOp, step, torch_dtype
from .support import present, spread, wide

aten = torch.ops.aten

#: the formula, where no fused kernel runs
MATH = "math"
FUSED = (attention_cuda.CUDNN, attention_cuda.FLASH, attention_cuda.EFFICIENT)
KERNELS = (*FUSED, attention_cuda.CUDNN_REPEATED, attention_cuda.FLASH_REPEATED, MATH)


class AttentionLike(StepOp):
    """The attributes and common rules of attention and its gradients."""

    precision = "low"
    causal = Attr("bool", "whether position i sees positions 0 to i only", False)
    scale = Attr("float", "multiplies the scores")
    enable_gqa = Attr("bool", "whether groups of query heads share a head of k and v", False)
    kernel = Attr("str", "what runs it instead of PyTorch's own choice", choices=KERNELS, optional=True)

    @staticmethod
    def check(op):
        q, k, v = op.q.type, op.k.type, op.v.type
        if q.rank < 2 or not q.rank == k.rank == v.rank:
            return "q, k and v must have one rank, at least 2"
        if not q.element is k.element is v.element:
            return "q, k and v differ in element type"
        if q.shape[-1] != k.shape[-1] or k.shape[:-1] != v.shape[:-1]:
            return "q and k must have one width, k and v one length"
        heads = 2 + op.enable_gqa
        if q.shape[:-heads] != k.shape[:-heads]:
            return "q and k differ in a batch dimension"
        if op.enable_gqa and (q.rank < 3 or q.shape[-3] % k.shape[-3]):
            return "the heads of q must be a multiple of those of k"
        if op.mask is None:
            return None
        if op.causal:
            return "a mask and causal exclude one another"
        full, mask = (*q.shape[:-1], k.shape[-2]), op.mask.type.shape
        fits = len(mask) <= len(full) and all(m in (1, f) for m, f in zip(mask[::-1], full[::-1], strict=False))
        return None if fits else f"a mask of shape {mask} does not broadcast to {full}"

    @staticmethod
    def roles(op: Op) -> Roles:
        q, k = op.q.type, op.k.type
        lead = LABELS[: q.rank - 2]
        other = lead[:-1] + "H" if op.enable_gqa and q.shape[-3] != k.shape[-3] else lead
        full = lead + "LS"
        table = {"q": lead + "LD", "k": other + "SD", "v": other + "SE", "out": lead + "LE", "logsumexp": lead + "L"}
        table |= {"dq": table["q"], "dk": table["k"], "dv": table["v"], "dout": table["out"], "y": table["out"]}
        if op.mask is not None:
            shape, sizes = op.mask.type.shape, (*q.shape[:-1], k.shape[-2])
            tail = full[len(full) - len(shape) :]
            sizes = sizes[len(full) - len(shape) :]
            table["mask"] = "".join(" " if d == 1 and n != 1 else c for c, d, n in zip(tail, shape, sizes, strict=True))
            table["dmask"] = table["mask"]
        names = [f.name for f in op.definition.operand_fields if f.name != "mask" or op.mask is not None]
        whole = "SD" + ("" if other == lead else "H" + lead[-1])
        return Roles(
            tuple(table[n] for n in names), tuple(table[f.name] for f in op.definition.result_fields), whole=whole
        )

    @staticmethod
    def flops(op: Op) -> int:
        return op.definition.products * product_flops(op)  # type: ignore[attr-defined]

    products = 2  # matrix products of [L, S] with a width


def product_flops(op: Op) -> int:
    """Flops of one [L, D] x [D, S] product over all heads; about half of it is needed under a causal mask."""
    q, k, v = op.q.type, op.k.type, op.v.type
    width = (q.shape[-1] + v.shape[-1]) / 2
    pairs = math.prod(q.shape[:-1]) * k.shape[-2]
    return int(2 * pairs * width * (0.5 if op.causal else 1))


# ---- how it runs -----------------------------------------------------------------------------------------------------


def flash_fits(op: Op) -> bool:
    """Whether eager PyTorch would take its fused CPU kernel: 4-d, equal widths, a mask of rank 2 or 4."""
    q, k, v = op.q.type, op.k.type, op.v.type
    if q.rank != 4 or q.shape[-1] != v.shape[-1]:
        return False
    if 0 in q.shape or 0 in k.shape:
        return False
    if op.causal and op.scale <= 0:  # its causal mask is minus infinity times the scale: eager gives NaN here
        return False
    return op.mask is None or op.mask.type.rank in (2, 4)


def additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A boolean mask as numbers to add: 0 where it holds, minus infinity elsewhere."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))


def cuda_kernel(op: Op, device: torch.device) -> str:
    """The fused kernel that PyTorch prefers for an op on this device; "" on others, and where none fits."""
    return attention_cuda.fused_kernel(op, *attention_cuda.gpu_of(device)) if device.type == "cuda" else ""


def kernels_for(op: Op, device: torch.device) -> list[str]:
    """What can run an op on this device, PyTorch's own choice first."""
    if device.type == "cuda":
        return attention_cuda.fused_kernels(op, *attention_cuda.gpu_of(device)) or [MATH]
    if device.type != "cpu" or not flash_fits(op):
        return [MATH]
    repeated = [attention_cuda.FLASH_REPEATED] if op.q.type.shape[1] != op.k.type.shape[1] else []
    return [attention_cuda.FLASH, *repeated, MATH]


def kernel_of(op: Op, device: torch.device) -> str:
    """What runs an op on this device: what was chosen for it, else PyTorch's own choice.

    A name that was chosen for another device, which this one does not have, counts as absent.
    """
    known, chosen = kernels_for(op, device), op.attributes.get("kernel")
    return chosen if chosen in known or chosen == MATH else known[0]


def packed(x: torch.Tensor) -> torch.Tensor:
    """The fused kernels want neighbours in the last dimension to be neighbours in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()


def row_logsumexp(q, k, mask, causal: bool, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """The log-sum-exp of each row of scores, where no fused kernel gave it."""
    if k.dim() > 2 and k.shape[-3] != q.shape[-3]:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    scores = torch.matmul(q.to(dtype), k.to(dtype).mT) * scale
    if mask is not None:
        scores = scores + mask
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(seen.logical_not(), float("-inf"))
    out = torch.logsumexp(scores, -1)
    return out.masked_fill(out.eq(float("-inf")), 0.0)


def math_gradients(op: Op, wanted: list[str]):
    """Gradients by PyTorch's own formula and autograd: f(dout, q, k, v, mask) -> one gradient per wanted name."""
    causal, scale, gqa = op.causal, op.scale, op.enable_gqa

    def run(dout, q, k, v, mask):
        inputs = {"q": q, "k": k, "v": v, "mask": additive(mask, q.dtype)}
        with torch.enable_grad():
            for name in wanted:
                inputs[name] = inputs[name].detach().requires_grad_()
            out = aten._scaled_dot_product_attention_math.default(
                *inputs.values(), 0.0, causal, scale=scale, enable_gqa=gqa
            )[0]
            return torch.autograd.grad(out, [inputs[name] for name in wanted], dout)

    return run


# ---- the same in smaller ops -----------------------------------------------------------------------------------------


def _labels(op: Op) -> str:
    return LABELS[: op.q.type.rank - 2]


def expand_heads(b, op: Op, x: Value) -> Value:
    """k or v with each head repeated for the query heads that share it."""
    shape, heads = x.type.shape, op.q.type.shape[-3] if op.q.type.rank > 2 else 0
    if not op.enable_gqa or shape[-3] == heads:
        return x
    group = heads // shape[-3]
    split = (*shape[:-2], group, *shape[-2:])
    return b.reshape(b.broadcast_to(b.unsqueeze(x, -3), split), shape=(*shape[:-3], heads, *shape[-2:]))


def collapse_heads(b, op: Op, dx: Value, shape: tuple[int, ...]) -> Value:
    """The adjoint of `expand_heads`."""
    if dx.type.shape == shape:
        return dx
    group = dx.type.shape[-3] // shape[-3]
    split = (*shape[:-2], group, *shape[-2:])
    return b.sum(b.reshape(dx, shape=split), dims=(len(split) - 3,))


def expand_scores(b, op: Op, k: Value) -> Value:
    """Masked scores in the element type of statistics."""
    element, lead = wide(op.q.type.element), _labels(op)
    scores = b.contract(op.q, k, spec=f"{lead}LD,{lead}SD->{lead}LS")
    scores = b.mul(b.cast_to(scores, element), op.scale)
    if op.mask is not None and op.mask.type.element.kind == "bool":
        scores = b.select(op.mask, scores, float("-inf"))
    elif op.mask is not None:
        scores = b.add(scores, b.cast_to(op.mask, element))
    if op.causal:
        length, keys = scores.type.shape[-2:]
        row = b.reshape(b.iota(start=0, stride=1, type=TensorType((length,), I64)), shape=(length, 1))
        column = b.iota(start=0, stride=1, type=TensorType((keys,), I64))
        scores = b.select(b.ge(row, column), scores, float("-inf"))
    return scores


def expand_backward(b, op: Op) -> tuple[Value, Value, Value, Value]:
    """Probabilities and the gradient of the scores, then k and v with repeated heads."""
    lead = _labels(op)
    k, v = expand_heads(b, op, op.k), expand_heads(b, op, op.v)
    p = b.exp(b.sub(expand_scores(b, op, k), b.unsqueeze(op.logsumexp, -1)))
    element = p.type.element
    dp = b.cast_to(b.contract(op.dout, v, spec=f"{lead}LE,{lead}SE->{lead}LS"), element)
    products = b.mul(b.cast_to(op.dout, element), b.cast_to(op.out, element))
    delta = b.sum(products, dims=(op.q.type.rank - 1,), keepdim=True)
    return p, b.mul(p, b.sub(dp, delta)), k, v


# ---- ops -------------------------------------------------------------------------------------------------------------


@step.op
class Attention(AttentionLike):
    """softmax(scale * q k^T + mask) v. With `enable_gqa` neighbouring heads of q share a head of k and v."""

    q = Operand(FloatTensor, "[..., L, D]")
    k = Operand(FloatTensor, "[..., S, D]; fewer heads with enable_gqa")
    v = Operand(FloatTensor, "[..., S, E]; as many heads as k")
    mask = Operand(AnyTensor, "numbers to add, or booleans that say what is seen", optional=True)
    out = Result()
    logsumexp = Result(doc="of each row of scores")

    @staticmethod
    def infer(q, k, v, mask, causal, scale, enable_gqa, kernel):
        return q.with_shape((*q.shape[:-1], v.shape[-1])), TensorType(q.shape[:-1], wide(q.element))

    @staticmethod
    def evaluate(op):
        causal, scale, gqa = op.causal, op.scale, op.enable_gqa
        dtype, saved = torch_dtype(op.logsumexp.type.element), bool(op.logsumexp.uses)

        def run(q, k, v, mask):
            mask = additive(mask, q.dtype)
            kernel = kernel_of(op, q.device)
            if kernel != MATH and q.device.type == "cuda":
                return attention_cuda.forward(kernel, q, k, v, mask, causal, scale)
            if kernel != MATH:
                _, k, v = attention_cuda.heads_for(kernel, q, k, v)
                return aten._scaled_dot_product_flash_attention_for_cpu.default(
                    packed(q), packed(k), packed(v), 0.0, causal, attn_mask=mask, scale=scale
                )
            out = aten._scaled_dot_product_attention_math.default(
                q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=gqa
            )[0]
            return out, row_logsumexp(q, k, mask, causal, scale, dtype) if saved else None

        return spread(op, run)

    @staticmethod
    def derivative(b, op, dout, dlogsumexp=None):
        if dlogsumexp is not None:
            raise NotImplementedError("attention gives no gradient through its logsumexp")
        options = {k: op.attributes[k] for k in AttentionLike.attribute_fields if k in op.attributes}
        operands = (dout, op.q, op.k, op.v, op.out, op.logsumexp, op.mask)
        dq, dk, dv = b.attention_grad(*operands, **options)
        dmask = None
        if op.mask is not None and op.mask.type.element.kind == "float":
            dmask = b.attention_mask_grad(*operands, **options)
        return present(op, dq, dk, dv, dmask)

    @staticmethod
    def expand(b, op):
        lead, rank = _labels(op), op.q.type.rank
        scores = expand_scores(b, op, expand_heads(b, op, op.k))
        top = b.amax(scores, dims=(rank - 1,), keepdim=True)
        top = b.select(b.eq(top, float("-inf")), 0.0, top)
        power = b.exp(b.sub(scores, top))
        total = b.sum(power, dims=(rank - 1,), keepdim=True)
        empty = b.eq(total, 0.0)
        p = b.cast_to(b.div(power, b.select(empty, 1.0, total)), op.v.type.element)
        out = b.contract(p, expand_heads(b, op, op.v), spec=f"{lead}LS,{lead}SE->{lead}LE")
        lse = b.select(empty, 0.0, b.add(b.log(total), top))
        return out, b.reshape_to(lse, op.logsumexp.type.shape)


class AttentionBackward(AttentionLike):
    """The operands of attention's gradients."""

    dout = Operand(FloatTensor)
    q = Operand(FloatTensor)
    k = Operand(FloatTensor)
    v = Operand(FloatTensor)
    out = Operand(FloatTensor, "as the forward op made it")
    logsumexp = Operand(FloatTensor, "as the forward op made it")
    mask = Operand(AnyTensor, optional=True)


@step.op
class AttentionGrad(AttentionBackward):
    """dq, dk and dv of attention; dk and dv have the heads of k, summed over the heads of q that share them."""

    products = 5
    dq = Result()
    dk = Result()
    dv = Result()

    @staticmethod
    def infer(dout, q, k, v, out, logsumexp, mask, causal, scale, enable_gqa, kernel):
        return q, k, v

    @staticmethod
    def evaluate(op):
        causal, scale = op.causal, op.scale
        reference = math_gradients(op, ["q", "k", "v"])

        def run(dout, q, k, v, out, logsumexp, mask):
            mask = additive(mask, q.dtype)
            kernel = kernel_of(op, q.device)
            if kernel != MATH and q.device.type == "cuda":
                return attention_cuda.backward(kernel, dout, q, k, v, out, logsumexp, mask, causal, scale)
            if kernel != MATH:
                own = k.shape[1]
                _, k, v = attention_cuda.heads_for(kernel, q, k, v)
                operands = (*map(packed, (dout, q, k, v, out)), logsumexp.contiguous())
                dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
                    *operands, 0.0, causal, attn_mask=mask, scale=scale
                )
                return dq, attention_cuda.summed_heads(dk, own), attention_cuda.summed_heads(dv, own)
            return reference(dout, q, k, v, mask)

        return spread(op, run)

    @staticmethod
    def expand(b, op):
        lead, low = _labels(op), op.q.type.element
        p, ds, k, _ = expand_backward(b, op)
        p, ds = b.cast_to(p, low), b.cast_to(b.mul(ds, op.scale), low)
        dq = b.contract(ds, k, spec=f"{lead}LS,{lead}SD->{lead}LD")
        dk = b.contract(ds, op.q, spec=f"{lead}LS,{lead}LD->{lead}SD")
        dv = b.contract(p, op.dout, spec=f"{lead}LS,{lead}LE->{lead}SE")
        return dq, collapse_heads(b, op, dk, op.k.type.shape), collapse_heads(b, op, dv, op.v.type.shape)


@step.op
class AttentionMaskGrad(AttentionBackward):
    """The gradient of a float mask, such as a learned position bias: that of the scores, summed to the mask's shape."""

    products = 2
    dmask = Result()

    @staticmethod
    def infer(dout, q, k, v, out, logsumexp, mask, causal, scale, enable_gqa, kernel):
        return mask

    @staticmethod
    def check(op):
        if op.mask is None or op.mask.type.element.kind != "float":
            return "only a float mask has a gradient"
        return AttentionLike.check(op)

    @staticmethod
    def evaluate(op):
        reference = math_gradients(op, ["mask"])
        return lambda dout, q, k, v, out, logsumexp, mask: reference(dout, q, k, v, mask)[0]

    @staticmethod
    def expand(b, op):
        _, ds, _, _ = expand_backward(b, op)
        return b.cast_to(b.sum_to(ds, op.mask.type.shape), op.mask.type.element)
