"""Attention on CUDA without a GPU: which kernel is chosen, what it is given, and what is made of what it gives.

A stand-in for PyTorch's kernels computes their documented results by formula and checks what the real ones demand
(alignment, padding, one number of heads). `bench/attention_cuda.py` runs the real ones.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from wholestep.dialects.step import StepBuilder, attention_cuda, step
from wholestep.dialects.step.attention import additive, cuda_kernel, kernel_of
from wholestep.ir import BF16, BOOL, F16, F32, F64, TensorType, add_function, module
from wholestep.torch_private import FakeTensorMode, TorchDispatchMode, schema_of

from .harness import randint, randn

H200 = ((9, 0), 91900)
KERNELS = (attention_cuda.CUDNN, attention_cuda.FLASH, attention_cuda.EFFICIENT)
REPEATED = attention_cuda.CUDNN_REPEATED
aten = torch.ops.aten


def attention_op(q, k, v, element=BF16, mask=None, mask_element=BOOL, **options):
    """Forward and backward ops on operands of these shapes."""
    types = [TensorType(shape, element) for shape in (q, k, v)]
    masks = [] if mask is None else [TensorType(mask, mask_element)]
    block = add_function(module(), "main", [*types, *masks]).regions[0].block
    b = StepBuilder(block)
    op = step.ops["attention"].build(b, *block.arguments, *([] if masks else [None]), scale=0.3, **options)
    grad = step.ops["attention_grad"].build(
        b, op.out, *block.arguments[:3], op.out, op.logsumexp, *(block.arguments[3:] or [None]), scale=0.3, **options
    )
    return op, grad


GPT2 = ((8, 12, 1024, 64),) * 3
CROSS = ((2, 4, 33, 64), (2, 4, 50, 64), (2, 4, 50, 64))
GROUPED = ((2, 8, 64, 64), (2, 2, 64, 64), (2, 2, 64, 64))
CHOICES = [
    (GPT2, dict(causal=True), H200, "cudnn"),
    (GPT2, dict(causal=True, element=F16), H200, "cudnn"),
    (GPT2, dict(causal=True), ((9, 0), 91000), "flash"),
    (GPT2, dict(causal=True), ((8, 9), 91900), "flash"),
    (GPT2, dict(causal=True), ((7, 5), 91900), ""),
    (GPT2, dict(element=F16), ((7, 5), 91900), "efficient"),
    (GPT2, dict(element=F32, causal=True), H200, "efficient"),
    (GPT2, dict(element=F64), H200, ""),
    (GPT2, dict(mask=(8, 1, 1, 1024)), H200, "efficient"),
    (CROSS, {}, H200, "cudnn"),
    (CROSS, dict(causal=True), H200, "efficient"),
    (GROUPED, dict(enable_gqa=True), H200, "cudnn"),
    (GROUPED, dict(enable_gqa=True), ((8, 0), 91900), "flash"),
    (GROUPED, dict(enable_gqa=True, mask=(2, 1, 1, 64)), H200, "efficient"),
    (GROUPED, dict(enable_gqa=True, element=F32), H200, "efficient"),
    (((2, 4, 64, 37),) * 3, {}, H200, "cudnn"),
    (((2, 4, 64, 200),) * 3, {}, H200, "flash"),
    (((2, 4, 64, 200),) * 3, {}, ((8, 6), 91900), "efficient"),
    (((2, 4, 64, 200),) * 3, {}, ((12, 0), 91900), "efficient"),
    (((2, 4, 64, 512),) * 3, {}, H200, "efficient"),
    (((2, 4, 64, 64), (2, 4, 64, 64), (2, 4, 64, 32)), {}, H200, "efficient"),
    (((2, 4, 5, 64), (2, 4, 1, 64), (2, 4, 1, 64)), {}, H200, "flash"),
    (((4, 64, 64),) * 3, {}, H200, ""),
    (((2, 4, 0, 64), (2, 4, 5, 64), (2, 4, 5, 64)), {}, H200, ""),
    (((70000, 1, 4, 8),) * 3, {}, H200, ""),
]


@pytest.mark.parametrize(("shapes", "options", "gpu", "kernel"), CHOICES)
def test_forward_and_backward_choose_alike(shapes, options, gpu, kernel):
    op, grad = attention_op(*shapes, **options)
    assert attention_cuda.fused_kernel(op, *gpu) == attention_cuda.fused_kernel(grad, *gpu) == kernel


def test_a_negative_scale_has_no_kernel():
    op, _ = attention_op(*GPT2)
    op.attributes["scale"] = -0.3
    assert attention_cuda.fused_kernel(op, *H200) == ""


def test_other_devices_have_none():
    op, _ = attention_op(*GPT2)
    assert cuda_kernel(op, torch.device("cpu")) == ""


# ---- what the kernels are given --------------------------------------------------------------------------------------


def positional(func, args):
    """All positional arguments of a call: the dispatcher leaves out those that have their defaults."""
    declared = [a for a in schema_of(func).arguments if not a.kwarg_only]
    return [*args, *(a.default_value for a in declared[len(args) :])]


class Kernels(TorchDispatchMode):
    """PyTorch's CUDA kernels by formula, in float64, with their demands on operands and the shapes of their results."""

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []
        self.heads: list[int] = []  # those of k and v in each call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        for kernel in KERNELS:
            if name == f"_scaled_dot_product_{kernel}_attention":
                return self.forward(kernel, *positional(func, args), **kwargs)
            if name == f"_scaled_dot_product_{kernel}_attention_backward":
                return self.backward(kernel, *positional(func, args), **kwargs)
        return func(*args, **(kwargs or {}))

    def demand(self, kernel, *tensors, bias=None):
        for t in tensors:
            word = 16 // t.element_size()
            assert t.data_ptr() % 16 == 0 and t.shape[-1] % word == 0 and t.stride(-1) == 1
            assert all(s > 0 and s % word == 0 for s in t.stride()[:-1])
        if kernel == "efficient":
            assert len({t.shape[1] for t in tensors}) == 1, "one number of heads"
        if bias is not None:
            assert bias.dtype is tensors[0].dtype and bias.stride(-1) == 1 and bias.dim() == 4
            assert all(s % 8 == 0 for s in bias.stride()[:-1]) and bias.data_ptr() % 16 == 0

    def scores(self, q, k, bias, causal, scale):
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = q.double() @ k.double().mT * scale
        if bias is not None:
            scores = scores + bias
        if causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
        return scores

    def forward(self, kernel, q, k, v, *rest, scale):
        bias = rest[0] if kernel != "flash" else None
        causal = rest[1] if kernel == "flash" else rest[3]
        self.seen.append(kernel)
        self.heads.append(k.shape[1])
        self.demand(kernel, q, k, v, bias=bias)
        scores = self.scores(q, k, bias, causal, scale)
        lse = torch.logsumexp(scores, -1)
        p = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
        out = (p @ v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)).to(q.dtype)
        out, lse = out if kernel == "cudnn" else out.transpose(1, 2).contiguous().transpose(1, 2), lse.float()
        if kernel == "flash":
            return out, lse, None, None, q.shape[2], k.shape[2], None, None, None
        if kernel == "cudnn":
            return out, lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], None, None, None
        return out, F.pad(lse, (0, -q.shape[2] % 32), value=math.inf), None, None

    def read_by_position(self, out):
        """The result as the efficient kernel reads it: strides of batch and heads as given, H * D between rows."""
        (batch, heads, length, width), stride = out.shape, out.stride()
        end = (batch - 1) * stride[0] + (heads - 1) * stride[1] + (length - 1) * heads * width + width
        assert (out.storage_offset() + end) * out.element_size() <= out.untyped_storage().nbytes(), "reads past the end"
        return out.as_strided(out.shape, (stride[0], stride[1], heads * width, 1))

    def backward(self, kernel, dout, q, k, v, *rest, scale):
        if kernel == "efficient":
            bias, out, lse, _, _, dropout, wanted, causal = rest
            assert wanted == [True, True, True, False]
            assert lse.shape == (*q.shape[:2], -(-q.shape[2] // 32) * 32) and lse.is_contiguous()
            assert bool((lse[..., q.shape[2] :] == math.inf).all())
            assert lse.data_ptr() % 16 == 0
            assert dout.transpose(1, 2).is_contiguous(), "rows of dout lie H * D apart"
            out = self.read_by_position(out)
            lse = lse[..., : q.shape[2]]
        elif kernel == "flash":
            out, lse, _, _, length, keys, dropout, causal, _, _ = rest
            bias = None
            assert lse.is_contiguous() and lse.data_ptr() % 16 == 0
            assert lse.shape == q.shape[:3] and (length, keys) == (q.shape[2], k.shape[2])
        else:
            out, lse, _, _, bias, _, _, length, keys, dropout, causal = rest
            assert lse.is_contiguous() and lse.data_ptr() % 16 == 0
            assert lse.shape == (*q.shape[:3], 1) and (length, keys) == (q.shape[2], k.shape[2])
            lse = lse.squeeze(-1)
        assert dropout == 0.0
        self.seen.append(kernel)
        self.heads.append(k.shape[1])
        self.demand(kernel, dout, q, k, v, out, bias=bias)
        group = q.shape[1] // k.shape[1]
        p = (self.scores(q, k, bias, causal, scale) - lse.double().unsqueeze(-1)).exp()
        wide = [t.double().repeat_interleave(group, 1) for t in (k, v)]
        delta = (dout.double() * out.double()).sum(-1, keepdim=True)
        ds = p * (dout.double() @ wide[1].mT - delta) * scale
        dq, dk, dv = ds @ wide[0], ds.mT @ q.double(), p.mT @ dout.double()
        dk, dv = (t.unflatten(1, (k.shape[1], group)).sum(2) for t in (dk, dv))
        gradients = tuple(t.to(q.dtype) for t in (dq, dk, dv))
        return (*gradients, None) if kernel == "efficient" else gradients


def reference(q, k, v, mask, causal, scale, dout):
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    out = aten._scaled_dot_product_attention_math.default(
        *leaves, None if mask is None else mask.double(), 0.0, causal, scale=scale, enable_gqa=True
    )[0]
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.double())]


CASES = [
    # lengths, widths of q and v, heads of q and k, mask, causal
    pytest.param(32, 32, 8, 8, 2, 2, None, True, id="plain"),
    pytest.param(33, 33, 8, 8, 2, 2, None, True, id="odd length"),
    pytest.param(5, 7, 8, 8, 2, 2, None, False, id="cross"),
    pytest.param(6, 6, 5, 5, 2, 2, None, True, id="odd width"),
    pytest.param(6, 6, 8, 8, 4, 2, None, True, id="grouped"),
    pytest.param(6, 6, 5, 5, 3, 1, None, False, id="one head of keys, odd width"),
    pytest.param(5, 7, 8, 6, 2, 2, None, True, id="other width of v"),
    pytest.param(5, 7, 8, 8, 2, 2, (2, 1, 1, 7), False, id="padding mask"),
    pytest.param(5, 8, 8, 8, 2, 2, (5, 8), False, id="aligned mask"),
    pytest.param(5, 8, 8, 8, 2, 2, (2, 2, 5, 1), False, id="mask without keys"),
    pytest.param(5, 7, 5, 5, 4, 2, (4, 1, 7), False, id="grouped, masked, odd"),
]


def may_be_chosen(kernel, length, keys, width, value_width, heads, own, mask, causal):
    special = mask is not None or width != value_width or (causal and length != keys)
    return kernel == "efficient" or not (special or (kernel == REPEATED and heads == own))


CHOSEN = [
    pytest.param(kernel, *case.values, id=f"{kernel}, {case.id}")
    for kernel in (*KERNELS, REPEATED)
    for case in CASES
    if may_be_chosen(kernel, *case.values)
]


@pytest.mark.parametrize(("kernel", "length", "keys", "width", "value_width", "heads", "own", "mask", "causal"), CHOSEN)
def test_results_and_gradients(kernel, length, keys, width, value_width, heads, own, mask, causal):
    q = randn(2, length, heads, width, seed=1).float().transpose(1, 2)
    k, v = randn(2, own, keys, width, seed=2).float(), randn(2, own, keys, value_width, seed=3).float()
    dout = randn(2, heads, length, value_width, seed=4).float()
    masks = [None]
    if mask is not None:
        seen = randint(3, *mask, seed=3) > 0
        masks = [additive(seen, torch.float32), randn(*mask, seed=5).float()]
    for bias in masks:
        with Kernels() as stand_in:
            out, lse = attention_cuda.forward(kernel, q, k, v, bias, causal, 0.3)
            gradients = attention_cuda.backward(kernel, dout, q, k, v, out, lse, bias, causal, 0.3)
        assert stand_in.seen == [kernel.removesuffix("_repeated")] * 2
        assert stand_in.heads == [own if kernel in ("cudnn", "flash") else heads] * 2
        scores = stand_in.scores(q, k, bias, causal, 0.3)
        truth = reference(q, k, v, bias, causal, 0.3, dout)
        empty = torch.isinf(torch.logsumexp(scores, -1))
        want = torch.logsumexp(scores, -1).masked_fill(empty, 0.0).float()
        torch.testing.assert_close(lse, want, check_stride=False)
        for mine, true in zip((out, *gradients), truth, strict=True):
            true = true.nan_to_num(0.0) if mine is out else true
            assert mine.shape == true.shape
            if not empty.any():  # the formula gives NaN gradients for rows that see nothing
                torch.testing.assert_close(mine, true.float(), rtol=1e-4, atol=1e-5, check_stride=False)


def test_rows_that_see_nothing():
    """Zeros come out, zero is their log-sum-exp, and they give no gradient."""
    q, k, v, dout = (randn(1, 2, 5, 8, seed=i).float() for i in range(4))
    seen = torch.ones(5, 5, dtype=torch.bool)
    seen[2] = False
    bias = additive(seen, torch.float32)
    with Kernels():
        out, lse = attention_cuda.forward("efficient", q, k, v, bias, False, 0.3)
        dq, dk, dv = attention_cuda.backward("efficient", dout, q, k, v, out, lse, bias, False, 0.3)
    assert out[:, :, 2].abs().max() == 0 and lse[:, :, 2].abs().max() == 0 and dq[:, :, 2].abs().max() == 0
    rows = [0, 1, 3, 4]
    truth = reference(q[:, :, rows], k, v, None, False, 0.3, dout[:, :, rows])
    for mine, true in zip((out[:, :, rows], dq[:, :, rows], dk, dv), truth, strict=True):
        torch.testing.assert_close(mine, true.float(), rtol=1e-4, atol=1e-5)


def shifted(x, by=1):
    """The same numbers in the same layout, `by` elements into their storage."""
    storage = torch.zeros(x.untyped_storage().nbytes() // x.element_size() + by, dtype=x.dtype)
    return storage.as_strided(x.shape, x.stride(), by).copy_(x)


def packed_projection(width, dtype):
    """q, k and v as views of one projection [B, L, 3 * H * D]."""
    projection = randn(2, 6, 3 * 2 * width, seed=7).to(dtype)
    return [t.unflatten(-1, (2, width)).transpose(1, 2) for t in projection.split(2 * width, dim=-1)]


def lone_head(x):
    """The first head, with a stride that no kernel takes where it looks at it."""
    return x[:, :1].as_strided((x.shape[0], 1, *x.shape[2:]), (x.stride(0), 3, *x.stride()[2:]))


#: changes of q, k, v and dout [2, 2, 6, 8] to the same shapes, otherwise in memory
LAYOUTS = {
    "as they come": lambda q, k, v, d: (q, k, v, d),
    "q transposed": lambda q, k, v, d: (q.mT.contiguous().mT, k, v, d),
    "k at an odd address": lambda q, k, v, d: (q, shifted(k), v, d),
    "v at half a word": lambda q, k, v, d: (q, k, shifted(v, 2), d),
    "v repeated": lambda q, k, v, d: (q, k, v[:, :1].expand(2, 2, 6, 8), d),
    "dout at an odd address": lambda q, k, v, d: (q, k, v, shifted(d)),
    "dout by position, at an odd address": lambda q, k, v, d: (
        (q, k, v, shifted(d.transpose(1, 2).contiguous()).transpose(1, 2))
    ),
    "dout of a sum": lambda q, k, v, d: (q, k, v, d[:1, :1, :1, :1].expand(d.shape)),
    "dout permuted": lambda q, k, v, d: (q, k, v, d.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)),
    "heads innermost": lambda q, k, v, d: tuple(
        t.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) for t in (q, k, v, d)
    ),
    "heads innermost, odd width": lambda q, k, v, d: tuple(
        t[..., :5].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) for t in (q, k, v, d)
    ),
    "one head, odd stride": lambda q, k, v, d: tuple(lone_head(t) for t in (q, k, v, d)),
    "packed": lambda q, k, v, d: (*packed_projection(8, d.dtype), d),
    "packed, odd width": lambda q, k, v, d: (*packed_projection(5, d.dtype), d[..., :5]),
    "packed, rows at half words": lambda q, k, v, d: (*packed_projection(6, d.dtype), d[..., :6]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", LAYOUTS)
def test_layouts_that_kernels_cannot_read(change, dtype):
    q, k, v, dout = LAYOUTS[change](*(randn(2, 2, 6, 8, seed=i).to(dtype) for i in range(4)))
    truth = reference(q, k, v, None, True, 0.3, dout)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for kernel in KERNELS:
        with Kernels():
            out, lse = attention_cuda.forward(kernel, q, k, v, None, True, 0.3)
            gradients = attention_cuda.backward(kernel, dout, q, k, v, out, lse, None, True, 0.3)
        for mine, true in zip((out, *gradients), truth, strict=True):
            torch.testing.assert_close(mine.double(), true, rtol=tolerance, atol=tolerance, check_stride=False)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("length", [6, 32])
def test_results_that_lie_elsewhere_in_backward(kernel, length):
    """The result and its log-sum-exp may come back in other layouts, as a plan places them."""
    q, k, v, dout = (randn(2, 2, length, 8, seed=i).float() for i in range(4))
    truth = reference(q, k, v, None, True, 0.3, dout)[1:]
    with Kernels():
        out, lse = attention_cuda.forward(kernel, q, k, v, None, True, 0.3)
        for other in (
            out.contiguous(),
            shifted(out.contiguous()),
            out.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        ):
            for rows in (lse, shifted(lse.contiguous()), lse.mT.contiguous().mT):
                gradients = attention_cuda.backward(kernel, dout, q, k, v, other, rows, None, True, 0.3)
                for mine, true in zip(gradients, truth, strict=True):
                    torch.testing.assert_close(mine, true.float(), rtol=1e-4, atol=1e-5, check_stride=False)


@pytest.mark.parametrize("keys", [8, 7])
@pytest.mark.parametrize("change", ["odd address", "transposed", "expanded", "heads innermost", "part of a wider one"])
def test_layouts_of_masks(change, keys):
    q, dout = randn(2, 2, 6, 8, seed=1).float(), randn(2, 2, 6, 8, seed=2).float()
    k, v = randn(2, 2, keys, 8, seed=3).float(), randn(2, 2, keys, 8, seed=4).float()
    mask = randn(2, 2, 6, keys, seed=5).float()
    if change == "odd address":
        mask = shifted(mask)
    elif change == "transposed":
        mask = mask.mT.contiguous().mT
    elif change == "heads innermost":  # a learned position bias, as Swin looks it up
        mask = mask.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    elif change == "expanded":
        mask = mask[:1, :, :1].expand(2, 2, 6, keys)
    else:
        mask = randn(2, 2, 6, keys + 3, seed=5).float()[..., 3:]
    truth = reference(q, k, v, mask, False, 0.3, dout)
    with Kernels():
        out, lse = attention_cuda.forward("efficient", q, k, v, mask, False, 0.3)
        gradients = attention_cuda.backward("efficient", dout, q, k, v, out, lse, mask, False, 0.3)
    for mine, true in zip((out, *gradients), truth, strict=True):
        torch.testing.assert_close(mine, true.float(), rtol=1e-4, atol=1e-5, check_stride=False)


# ---- shapes and layouts by torch's own shape functions ---------------------------------------------------------------


@pytest.mark.parametrize(("element", "own"), [(F32, 4), (BF16, 4), (F64, 4), (F32, 2), (BF16, 2)])
@pytest.mark.parametrize("masked", [False, True])
def test_on_fake_tensors(element, own, masked):
    """Types are the inferred ones; heads split off by a transpose give results that lie the same way."""
    if torch.cuda.is_available():
        pytest.skip("the choice would be this GPU's")
    shape, few = (2, 4, 33, 64), (2, own, 33, 64)
    mask = (2, 1, 1, 33) if masked else None
    op, grad = attention_op(shape, few, few, element=element, mask=mask, causal=not masked, enable_gqa=own != 4)
    dtype = {F32: torch.float32, BF16: torch.bfloat16, F64: torch.float64}[element]
    with FakeTensorMode(), torch.no_grad():
        q, k, v = (torch.empty(2, 33, h, 64, dtype=dtype, device="cuda").transpose(1, 2) for h in (4, own, own))
        masks = [torch.empty(mask, dtype=torch.bool, device="cuda")] if masked else []
        out, lse = op.definition.evaluate(op)(q, k, v, *masks)
        if element is not F64:
            gradients = grad.definition.evaluate(grad)(out, q, k, v, out, lse, *masks)
            if own == 4 or kernel_of(op, torch.device("cuda")) != "efficient":  # a sum over copies lies otherwise
                assert [g.stride() for g in gradients] == [t.stride() for t in (q, k, v)]
            assert out.stride() == q.stride()
            assert [tuple(g.shape) for g in gradients] == [shape, few, few]
            assert all(g.dtype is dtype for g in gradients)
    assert tuple(out.shape) == shape and out.dtype is dtype and tuple(lse.shape) == shape[:3]
    assert lse.dtype is (torch.float64 if element is F64 else torch.float32)
