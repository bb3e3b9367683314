"""Sample operands and attributes for every op of the step dialect. A new op needs an entry here.

Each entry is a list of (operands, attributes); floats are float64.
"""

from __future__ import annotations

import torch

from wholestep.dialects.step import ir_dtype, step
from wholestep.dialects.step.optimizers import OptimizerUpdate
from wholestep.ir import BF16, F16, F32, F64, I64, TensorType

from .harness import randint, randn

SAMPLES: dict[str, list[tuple[list, dict]]] = {}


def sample(name: str, *operands, **attributes) -> None:
    SAMPLES.setdefault(name, []).append((list(operands), attributes))


def positive(*shape, seed=0):
    return randn(*shape, seed=seed).abs() + 0.1


def booleans(*shape, seed=0):
    return randint(2, *shape, seed=seed).bool()


# ---- pointwise -------------------------------------------------------------------------------------------------------

for name in (
    "neg",
    "abs",
    "sign",
    "exp",
    "exp2",
    "expm1",
    "sin",
    "cos",
    "tanh",
    "sigmoid",
    "erf",
    "relu",
    "floor",
    "ceil",
    "round",
    "trunc",
    "isnan",
    "silu",
    "detach",
    "reciprocal",
):
    sample(name, randn(3, 4))
    sample(name, randn())
for name in ("log", "log2", "log1p", "sqrt", "rsqrt"):
    sample(name, positive(3, 4))
for name in ("neg", "abs", "sign", "relu"):
    sample(name, randint(9, 4) - 4)
sample("bit_not", booleans(5))
sample("bit_not", randint(9, 5))
for name in ("bit_and", "bit_or", "bit_xor"):
    sample(name, booleans(2, 3), booleans(3, seed=1))
    sample(name, randint(9, 2, 3), randint(9, 3, seed=1))
for approximate in ("none", "tanh"):
    sample("gelu", randn(3, 4), approximate=approximate)
    sample("gelu_grad", randn(3, 4), randn(3, 4, seed=1), approximate=approximate)
for name in ("tanh_grad", "sigmoid_grad", "silu_grad"):
    sample(name, randn(3, 4), randn(3, 4, seed=1))
for dtype in (torch.float32, torch.int64, torch.bool, torch.bfloat16):
    sample("cast", randn(3, 4) * 4, dtype=ir_dtype(dtype))
sample("cast", randint(9, 4), dtype=F64)
sample("cast", randn(3, 4) * 4, dtype=F16, rounds=True)
for name in ("add", "sub", "mul", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge", "atan2"):
    sample(name, randn(3, 4), randn(3, 4, seed=1))
    sample(name, randn(2, 1, 4), randn(3, 1, seed=1))
    sample(name, randn(), randn(2, 3, seed=1))
    if name != "atan2":
        sample(name, randint(5, 4), randint(5, 2, 1, seed=1))
sample("maximum", torch.tensor([1.0, 2.0, 3.0]).double(), torch.tensor([1.0, 3.0, 2.0]).double())
sample("minimum", torch.tensor([1.0, 2.0, 3.0]).double(), torch.tensor([1.0, 3.0, 2.0]).double())
sample("div", randn(3, 4), positive(4))
sample("div", randn(3, 4), positive(3, 1), rounding="floor")
sample("div", randint(9, 5), randint(3, 5, seed=1) + 1, rounding="trunc")
for rounding in ("floor", "trunc"):
    sample("rem", randn(3, 4) * 5, positive(4), rounding=rounding)
    sample("rem", randint(9, 5) - 4, randint(3, 5, seed=1) + 1, rounding=rounding)
sample("pow", positive(3, 4), randn(4, seed=1))
sample("pow", torch.tensor([0.0, 0.0, 2.0, 0.0]).double(), torch.tensor([0.0, 2.0, 0.0, 3.0]).double())
sample("select", booleans(3, 4), randn(3, 4), randn(3, 4, seed=1))
sample("select", booleans(2, 1, 4), randn(4), randn(3, 1, seed=1))
sample("lerp", randn(3, 4), randn(4, seed=1), positive(3, 1))
sample("axpy", randn(3, 4), randn(3, 4, seed=1), randn(seed=2))
sample("addcmul", randn(3, 4), randn(3, 4, seed=1), randn(3, 4, seed=2), randn(seed=3))
sample("addcdiv", randn(3, 4), randn(3, 4, seed=1), positive(3, 4, seed=2), randn(seed=3))

# ---- shapes ----------------------------------------------------------------------------------------------------------

sample("reshape", randn(3, 4), shape=(2, 6))
sample("reshape", randn(1), shape=())
sample("transpose", randn(2, 3, 4), order=(2, 0, 1))
sample("broadcast", randn(3, 1), shape=(2, 3, 4))
sample("broadcast", randn(), shape=(2, 3))
place = dict(dim=1, start=1, end=6, stride=2)
sample("slice", randn(2, 7), **place)
sample("slice", randn(4), dim=0, start=2, end=2)
sample("slice_grad", randn(2, 3), **place, size=7)
sample("slice_update", randn(2, 7), randn(2, 3, seed=1), **place)
sample("concat", [randn(2, 3), randn(2, 1, seed=1), randn(2, 4, seed=2)], dim=1)
sample("concat", [randn(2)], dim=0)
sample("all_finite", [randn(2, 3), randn(2, 3, seed=1)])
sample("all_finite", [randn()])
sample("pad", randn(2, 3), low=(1, 0), high=(0, 2), value=1.5)
sample("pad", randn(4, 5), low=(-1, 1), high=(0, -2))
sample("flip", randn(2, 3, 4), dims=(0, 2))

# ---- reductions ------------------------------------------------------------------------------------------------------

for name in ("sum", "mean", "amax", "amin", "logsumexp", "variance"):
    for dims in ((0,), (1, 2), (0, 1, 2)):
        for keepdim in (False, True):
            sample(name, randn(2, 3, 4), dims=dims, keepdim=keepdim)
sample("sum", randint(5, 2, 3), dims=(1,))
sample("sum", randn(2, 3), dims=())
sample("amax", torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]]).double(), dims=(1,))
sample("variance", randn(2, 5), dims=(1,), correction=0)
sample("logsumexp", torch.full((2, 3), -float("inf")).double(), dims=(1,))
sample("variance", randn(2, 3), dims=(), correction=0)
sample("variance", torch.cat([randn(2, 5), torch.full((1, 5), 0.1).double()]), dims=(1,), exact_zero=True)
for name in ("any", "all"):
    sample(name, randint(2, 2, 3), dims=())
    sample(name, booleans(2, 3), dims=(1,), keepdim=True)
    sample(name, randint(2, 2, 3), dims=(0, 1))
sample("prod", randn(2, 3), dims=(1,))
sample("prod", randint(5, 2, 3), dims=(0,), keepdim=True)
for name in ("argmax", "argmin"):
    sample(name, randn(2, 3), dim=1)
    sample(name, randn(2, 3), dim=0, keepdim=True)
sample("cumsum", randn(2, 3), dim=1)
sample("cumsum", randint(5, 4), dim=0)
sample("cumsum", randn(), dim=0)
for largest in (False, True):
    sample("topk", randn(3, 5), k=2, dim=1, largest=largest)
    sample("sort", randn(3, 5), dim=0, descending=largest)
sample("topk", randn(), k=1, dim=0)
sample("sort", randn(), dim=0)

# ---- contraction, sources, opaque ------------------------------------------------------------------------------------

sample("contract", randn(3, 4), randn(5, 4, seed=1), spec="mk,nk->mn")
sample("contract", randn(3, 4), randn(5, 4, seed=1), randn(5, seed=2), spec="mk,nk->mn")
sample("contract", randn(3, 4), randn(5, 4, seed=1), randn(3, 1, seed=2), spec="mk,nk->mn")
sample("contract", randn(2, 3, 4), randn(2, 4, 5, seed=1), spec="bmk,bkn->bmn")
sample("contract", randn(2, 3, 4), randn(2, 4, 5, seed=1), spec="bmk,bkn->bnm")
sample("contract", randn(2, 3, 6, 4), randn(2, 5, 6, 4, seed=1), spec="bqhd,bkhd->bhqk")
sample("contract", randn(2, 3, 4), randn(2, 3, 5, seed=1), spec="abk,abn->kn")
sample("contract", randn(3), randn(4, seed=1), spec="m,n->nm")
sample("contract", randn(3), randn(3, seed=1), spec="k,k->")
sample("contract", randn(3, 4), randn(3, 4, seed=1), spec="ab,ab->ba")
sample("contract", randn(3, 4), randn(4, seed=1), spec="mk,k->m")
sample("contract", randn(3), randn(4, 3, 2, seed=1), spec="k,nkm->mn")
sample("constant", value=1.5, type=TensorType((2, 3), F32))
sample("constant", value=2, type=TensorType((), I64))
sample("iota", start=3, stride=-2, type=TensorType((4,), I64))
sample("iota", start=0.5, stride=0.1, type=TensorType((7,), F32))
sample("iota", start=0, stride=1, type=TensorType((0,), I64))
key = torch.tensor([-42, 7 << 33, 3])
for distribution in ("uniform", "normal", "exponential"):
    for element in (F32, F64, BF16, F16):
        sample("random", key, distribution=distribution, stream=1, type=TensorType((2, 3), element))
sample("random", key, distribution="normal", stream=1, type=TensorType((), BF16))
sample("random", key, distribution="uniform", stream=1, type=TensorType((0, 3), F32))
sample(
    "opaque",
    [randn(3, 3)],
    target="aten.tril.default",
    arguments=[{"tensor": 0}],
    keywords={},
    result_types=[TensorType((3, 3), F64)],
)
sample(
    "opaque_grad",
    [randn(3, 3), randn(3, 3, seed=1)],
    target="aten.tril.default",
    arguments=[{"tensor": 0}],
    keywords={},
    wanted=(0,),
    given=(0,),
    result_types=[TensorType((3, 3), F64)],
)
for ends in ([2, 2, 7], [0, 4, 5], [9, 9, 9]):
    sample("grouped_contract", randn(9, 4), randn(3, 4, 5, seed=1), torch.tensor(ends), spec="mk,gkn->mn")
    sample("grouped_contract", randn(9, 4), randn(3, 5, 4, seed=1), torch.tensor(ends), spec="mk,gnk->mn")
    sample("grouped_contract", randn(9, 4), randn(9, 5, seed=1), torch.tensor(ends), spec="mk,mn->gkn")

# ---- neural networks -------------------------------------------------------------------------------------------------

for name in ("softmax", "log_softmax"):
    sample(name, randn(2, 3, 4), dim=1)
    sample(name + "_grad", randn(2, 3, 4), torch.softmax(randn(2, 3, 4, seed=1), 1), dim=1)
x, w, c = randn(2, 4, 3), randn(3, seed=1), randn(3, seed=2)
sample("layer_norm", x, w, c)
sample("layer_norm", x, trailing=2)
sample("layer_norm_grad", randn(2, 4, 3, seed=3), x, x.mean(-1, True), positive(2, 4, 1), w)
sample("layer_norm_grad", randn(2, 4, 3, seed=3), x, x.mean((1, 2), True), positive(2, 1, 1), trailing=2)
sample("rms_norm", x, w)
sample("rms_norm", x, trailing=3)
sample("rms_norm_grad", randn(2, 4, 3, seed=3), x, positive(2, 4, 1), w)
sample("rms_norm_grad", randn(2, 4, 3, seed=3), x, positive(1, 1, 1), trailing=3)
w, c = randn(4, seed=1), randn(4, seed=2)
sample("group_norm", x, w, c, groups=2)
sample("group_norm", x, groups=4)
sample("group_norm_grad", randn(2, 4, 3, seed=3), x, randn(2, 2), positive(2, 2), w, groups=2)
sample("batch_norm", x, w, c)
sample("batch_norm", x, None, None, randn(4), positive(4))
sample("batch_norm", x, w, c, randn(4), positive(4), training=False)
sample("batch_norm_grad", randn(2, 4, 3, seed=3), x, x.mean((0, 2)), positive(4), w)
sample("batch_norm_grad", randn(2, 4, 3, seed=3), x, x.mean((0, 2)), positive(4))

target = torch.tensor([[0, -100, 2], [3, 1, 1]])
for reduction in ("none", "mean", "sum"):
    dy = randn(2, 3) if reduction == "none" else randn()
    lse = torch.logsumexp(x, 1)
    for smoothing in (0.0, 0.1):
        options = dict(reduction=reduction, label_smoothing=smoothing)
        sample("cross_entropy", x, target, w.abs(), **options)
        sample("cross_entropy", x, target, **options)
        sample("cross_entropy_grad", dy, x, target, lse, w.abs(), **options)
        sample("cross_entropy_grad", dy, x, target, lse, **options)
    sample("nll_loss", x, target, reduction=reduction)
    sample("nll_loss", x, target, w.abs(), reduction=reduction)
    sample("nll_loss_grad", dy, target, w.abs(), classes=4, reduction=reduction)
sample("accumulate", x, x.flip(0))

q, k, v = randn(2, 3, 5, 4), randn(2, 3, 6, 4, seed=1), randn(2, 3, 6, 4, seed=2)
shared_k, shared_v = k[:, :1], v[:, :1]
for operands, options in (
    ((q, k, v), {}),
    ((q, k, v), dict(causal=True)),
    ((q, k, v[..., :2]), {}),
    ((q, k, v, randn(5, 6, seed=3)), {}),
    ((q, k, v, randn(3, 1, 6, seed=3)), {}),
    ((q, k, v, booleans(2, 1, 5, 6)), {}),
    ((q, shared_k, shared_v), dict(enable_gqa=True)),
):
    sample("attention", *operands, scale=0.5, **options)
    mask = operands[3] if len(operands) > 3 else None
    repeated = [t.expand(2, 3, -1, -1) for t in operands[1:3]]
    out, lse = (
        torch.nn.functional.scaled_dot_product_attention(
            operands[0], *repeated, mask, is_causal=bool(options.get("causal")), scale=0.5
        ),
        0.5 * operands[0] @ repeated[0].mT,
    )
    if options.get("causal"):
        lse = lse.masked_fill(~torch.ones(5, 6).bool().tril(), -float("inf"))
    if mask is not None:
        lse = lse.masked_fill(~mask, -float("inf")) if mask.dtype is torch.bool else lse + mask
    lse = torch.logsumexp(lse, -1).masked_fill_(lse.amax(-1) == -float("inf"), 0)
    backward = [randn(*out.shape, seed=4), *operands[:3], out, lse, *operands[3:]]
    sample("attention_grad", *backward, scale=0.5, **options)
    if mask is not None and mask.dtype is not torch.bool:
        sample("attention_mask_grad", *backward, scale=0.5, **options)

window = dict(stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2)
x, w = randn(2, 4, 6, 7), randn(6, 2, 3, 2, seed=1)
y = torch.nn.functional.conv2d(x, w, **window)
sample("conv", x, w, randn(6), **window)
sample("conv", x, w, **window)
sample("conv_input_grad", torch.randn_like(y), w, input_shape=(2, 4, 6, 7), **window)
sample("conv_weight_grad", x, torch.randn_like(y), weight_shape=(6, 2, 3, 2), **window)
window = dict(stride=(2,), padding=(1,), dilation=(1,), output_padding=(1,), transposed=True)
sample("conv", randn(2, 4, 6), randn(4, 3, 3, seed=1), **window)
sample("conv_input_grad", randn(2, 3, 12), randn(4, 3, 3, seed=1), input_shape=(2, 4, 6), **window)
sample("conv_weight_grad", randn(2, 4, 6), randn(2, 3, 12), weight_shape=(4, 3, 3), **window)

window = dict(kernel=(3, 2), stride=(2, 2), padding=(1, 1), ceil_mode=True)
sample("max_pool", x, dilation=(1, 2), **window)
values, places = torch.nn.functional.max_pool2d(x, (3, 2), 2, 1, 1, True, True)
sample("max_pool_grad", values, places, dilation=(1, 1), input_shape=(2, 4, 6, 7), **window)
sample("max_pool", x, dilation=(1, 2), in_window=True, **window)
starts = [torch.arange(n) * 2 - 1 for n in values.shape[2:]]
taps = (places // 7 - starts[0].view(-1, 1)) * 2 + places % 7 - starts[1]  # the same, counted through windows of 3 x 2
sample("max_pool_grad", values, taps.to(torch.uint8), dilation=(1, 1), input_shape=(2, 4, 6, 7), **window)
sample("pack_bits", torch.rand(3, 32, 2) > 0.5, dim=1)
sample("unpack_bits", torch.randint(0, 256, (3, 4, 5), dtype=torch.uint8), dim=1)
sample("avg_pool", x, **window)
sample("avg_pool", x, divisor_override=3, **window)
sample("avg_pool", x[0, 0], kernel=(2,), stride=(2,), padding=(1,), count_include_pad=False)
sample("avg_pool_grad", torch.nn.functional.avg_pool2d(x, (3, 2), 2, 1, True), input_shape=(2, 4, 6, 7), **window)
sample("adaptive_avg_pool", x, size=(3, 3))
sample("adaptive_avg_pool", x, size=(1, 1))
sample("adaptive_avg_pool_grad", randn(2, 4, 3, 3), size=(3, 3), input_shape=(2, 4, 6, 7))
sample("upsample", x, factors=(2, 3))
sample("upsample_grad", randn(2, 4, 6, 9), factors=(2, 1))
sample("upsample_cells_grad", randn(2, 3, 8, 15), factors=(4, 5))
sample("repeat_pixels", x, factors=(2, 3))
sample("repeat_pixels_grad", randn(2, 4, 6, 9), factors=(2, 1))
sample("upsample_shares", randn(2, 3, 8, 15), factors=(4, 5))

sample("embedding", randn(5, 4), randint(5, 2, 3), padding_idx=1)
sample("embedding_grad", randn(2, 3, 4), randint(5, 2, 3), rows=5, padding_idx=1)
sample("row_sums", [randn(2, 3, 4)], [randint(5, 2, 3)], rows=7, padding_idx=1, dtype=F32)
sample("spread_rows", randn(4, 3), torch.tensor([2, -1, 0, 0, 3], dtype=torch.int32))
index = randint(3, 2, 4)
sample("gather", randn(3, 4), index, dim=0)
sample("scatter_add", randn(3, 4), index, randn(2, 4, seed=1), dim=0)
sample("scatter", randn(3, 4), torch.tensor([[2, 0, 1, 2], [0, 1, 2, 1]]), randn(2, 4, seed=1), dim=0)
sample("index_add", randn(3, 4), randint(4, 6), randn(3, 6, seed=1), dim=1)
pair = [randint(3, 2, 1), randint(2, 5, seed=1)]
sample("index", randn(3, 4, 2), pair, dims=(0, 2))
sample("index", randn(4, 3, 2), pair, dims=(1, 2))
sample("index", randn(3, 4), [torch.tensor([2, 0, 2])], dims=(0,))
sample("index_put", randn(3, 4, 2), pair, randn(2, 5, 4, seed=1), dims=(0, 2), accumulate=True)
sample("index_put", randn(3, 4), [torch.tensor([2, 0])], randn(4, seed=1), dims=(0,))

# ---- transfers -------------------------------------------------------------------------------------------------------

for name in ("offload", "fetch"):
    sample(name, randn(3, 4))
    sample(name, randint(9, 4))

# ---- layout ----------------------------------------------------------------------------------------------------------

sample("layout", randn(2, 3, 4, 5), order=(0, 2, 3, 1))

# ---- optimizers: operands follow from the declared fields ------------------------------------------------------------

_OPTIONS = {"muon": dict(coefficients=[3.4445, -4.775, 2.0315])}
_ADAFACTOR = {"row_var": positive(3, 1), "col_var": positive(1, 4), "variance": None}


def optimizer_operand(name: str, field) -> torch.Tensor | None:
    if name == "adafactor" and field.name in _ADAFACTOR:
        return _ADAFACTOR[field.name]
    if field.name in getattr(step.ops[name], "device_numbers", ()):
        return torch.tensor(3.0 if field.name == "new_step" else 0.5)
    if field.type.rank == 0:
        return torch.tensor(3.0 if field.name in ("step", "eta", "ax") else 0.5, dtype=torch.float64)
    return positive(3, 4, seed=len(field.name))


for name, definition in step.ops.items():
    if issubclass(definition, OptimizerUpdate):
        sample(name, *(optimizer_operand(name, f) for f in definition.operand_fields), **_OPTIONS.get(name, {}))
