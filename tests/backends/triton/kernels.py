"""Kernels of every family, with inputs, for the tests of generated Triton code: in small sizes that have odd edges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wholestep.backends.kernels import Spec
from wholestep.backends.triton.families import Blocks, Config, Rows, Sums, Tiles
from wholestep.dialects.loop import FUNCTIONS, Apply, Load, Space, Store
from wholestep.dialects.step import StepBuilder
from wholestep.dialects.step.base import torch_dtype
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.core import Builder, Op
from wholestep.ir.types import BF16, BOOL, F16, F32, F64, I32, I64, ScalarType, TensorType
from wholestep.transforms.loops import lowered

I8, UI8 = ScalarType("i8"), ScalarType("ui8")


def T(*shape: int, e: ScalarType = F32) -> TensorType:
    return TensorType(shape, e)


def of_step(types: Sequence[TensorType], body: Callable[..., Any]) -> Op:
    """The kernel of some step ops."""
    function = add_function(module(), "k", list(types))
    block = function.regions[0].block
    made = body(StepBuilder(block), *block.arguments)
    finish_function(function, made if isinstance(made, list | tuple) else [made])
    return lowered(function)


@dataclass
class Case:
    """A kernel, its argument types, orders of their memory, and configurations to run beside the first guess."""

    kernel: Op
    types: list[TensorType]
    #: per argument: its dimensions from slowest to fastest, or strides
    layouts: dict[int, Any]
    configs: tuple[Config, ...]
    integers: int = 2

    def tensors(self) -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [self.tensor(i, t) for i, t in enumerate(self.types)]

    def tensor(self, i: int, type: TensorType) -> torch.Tensor:
        dtype = torch_dtype(type.element)
        made = torch.randint(0, self.integers, type.shape).to(dtype)
        if type.element.kind == "float":
            made = torch.randn(type.shape, dtype=torch.float64).to(dtype)
        layout = self.layouts.get(i)
        if layout == "padded":  # rows with a gap between them
            room = torch.full((*type.shape[:-1], type.shape[-1] + 3), 7, dtype=dtype)
            room[..., : type.shape[-1]] = made
            return room[..., : type.shape[-1]]
        if layout == "same":  # one row for all: a stride of zero
            return made[:1].expand(type.shape)
        if layout is not None:
            back = sorted(range(len(layout)), key=layout.__getitem__)
            return made.permute(layout).contiguous().permute(back)
        return made

    def specs(self, tensors: Sequence[torch.Tensor]) -> list[Spec]:
        return [Spec(tuple(t.shape), tuple(t.stride()), t.dtype) for t in tensors]


def case(types, body, layouts=None, configs=(), integers=2) -> Case:
    kernel = of_step(types, body)
    every = [a.type for a in kernel.regions[0].block.arguments]
    return Case(kernel, every, layouts or {}, tuple(configs), integers)


def rope(b, x, c, s):
    half = x.type.shape[3] // 2
    turned = b.concat([b.neg(b.slice(x, dim=3, start=half, end=2 * half)), b.slice(x, dim=3, start=0, end=half)], dim=3)
    return b.add(b.mul(x, c), b.mul(turned, s))


def dropout(b, key, x):
    kept = b.lt(b.random(key, distribution="uniform", stream=3, type=x.type), 0.5)
    return b.mul(x, b.cast(kept, dtype=x.type.element))


def norm_grad(b, dy, x, mean, rstd, w, more):
    dx, dw, db = b.layer_norm_grad(dy, x, mean, rstd, w)
    return b.add(dx, more), dw, db


def gelus(b, x, dy):
    forms = ("none", "tanh")
    return [*(b.gelu(x, approximate=f) for f in forms), *(b.gelu_grad(dy, x, approximate=f) for f in forms)]


def statistics(b, x):
    return b.sum(x, dims=(0, 2, 3)), b.sum(b.mul(x, x), dims=(0, 2, 3))


def normal_sum(b, x, mean, rstd, w, c):
    """Sums of a normalised image with an activation, and a chain that begins with the numbers per channel."""
    y = b.add(b.mul(b.mul(b.sub(b.cast(x, dtype=F32), mean), rstd), w), c)
    z = b.mul(b.sub(c, b.mul(b.sub(w, y), rstd)), mean)
    return b.sum(b.mul(y, b.sigmoid(y)), dims=(0, 2, 3)), b.sum(z, dims=(0, 2, 3))


def rms(b, x, w):
    return b.mul(b.mul(x, b.rsqrt(b.add(b.mean(b.mul(x, x), dims=(1,), keepdim=True), 1e-5))), w)


def rms_grad(b, dy, x, w):
    """By hand: the row's gradient and the column sums of the weight's."""
    r = b.rsqrt(b.add(b.mean(b.mul(x, x), dims=(1,), keepdim=True), 1e-5))
    g = b.mul(dy, w)
    mean = b.mean(b.mul(g, x), dims=(1,), keepdim=True)
    dx = b.sub(b.mul(g, r), b.mul(b.mul(x, mean), b.mul(b.mul(r, r), r)))
    return dx, b.sum(b.mul(b.mul(dy, x), r), dims=(0,))


def pooled(b, x):
    pool = dict(kernel=(3, 3), stride=(2, 2), padding=(1, 1), dilation=(1, 1))
    values, places = b.max_pool(b.relu(x), in_window=True, **pool)
    return [values, places]


def unpooled(b, dy, taps, x):
    pool = dict(kernel=(3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 1))
    return b.mul(x, b.max_pool_grad(dy, b.cast(taps, dtype=ScalarType("ui8")), input_shape=x.type.shape, **pool))


CHANNELS_LAST = (0, 2, 3, 1)
LOOPED = (Rows(1, 16, 1, looped=True), Rows(4, 8, 1, looped=True, stages=3))
SHARED = (Rows(1, 32, 1, programs=3), Rows(2, 32, 1, programs=2, stages=3))
SPLIT = (Sums(8, 8, 3, 1), Sums(16, 1, 2, 1))


def rounded(b, x, y):
    low = b.cast(b.mul(x, y), dtype=F16, rounds=True)
    return [b.mul(b.cast(low, dtype=F32), y), low]


def enlarged_loss(factors):
    """The gradient of a loss over enlarged images, summed by cells of pixels for each of four neighbours."""

    def body(b, x, target, logsumexp, dy):
        y = b.upsample(b.cast_to(x, F32), factors=factors)
        dy = b.cross_entropy_grad(dy, y, target, logsumexp, None, reduction="sum", ignore_index=2)
        return [b.sum(part, dims=(2, 4)) for part in b.upsample_shares(dy, factors=factors)]

    return body


def loss_enlarged(b, x, target):
    y = b.upsample(b.cast_to(x, F32), factors=(4, 5))
    return b.cross_entropy(y, target, reduction="mean", ignore_index=2)


def typed_cases(e: ScalarType) -> dict[str, Case]:
    """Kernels that are tried in every type of floats; statistics of rows are f32 in all of them."""
    rows, column, vector, index = T(4, 6, 21, e=e), T(4, 6, 1), T(21, e=e), T(13, e=I64)
    shared_rows = [Rows(1, 8, 1, looped=True, programs=3), Rows(4, 16, 1, looped=True, programs=2)]
    return {
        "embedding": case([T(6, 8, e=e), T(5, e=I64)], lambda b, w, i: b.mul(b.embedding(w, i), 2.0), integers=6),
        "gather": case([T(5, 7, e=e), T(5, 3, e=I64)], lambda b, x, i: b.gather(x, i, dim=1), integers=7),
        "layer_norm": case([T(2, 6, 21, e=e), vector, vector], lambda b, x, w, c: b.layer_norm(b.mul(x, 2.0), w, c),
                           {}, LOOPED),
        "layer_norm_grad": case([rows, rows, column, column, vector, rows], norm_grad, {}, SHARED),
        "cross_entropy": case([T(13, 37, e=e), index], lambda b, x, t: b.cross_entropy(x, t), {}, shared_rows, 37),
        "cross_entropy_grad": case([T(e=e), T(13, 37, e=e), index, T(13)], lambda b, dy, x, t, s:
            b.cross_entropy_grad(dy, x, t, s, reduction="sum"), integers=37),
    }  # fmt: skip


def step_cases() -> dict[str, Case]:
    softmax = lambda dim: lambda b, x: b.softmax(x, dim=dim)  # noqa: E731
    transposed = lambda b, x: b.transpose(b.exp(x), order=(1, 0))  # noqa: E731
    image = T(3, 5, 4, 7)
    typed = {f"{name}_{e}": made for e in (F32, BF16, F16) for name, made in typed_cases(e).items()}
    return typed | {
        "rounded": case([T(9, 18), T(9, 18)], rounded),
        "broadcast": case([T(4, 5), T(5), T(4, 1)], lambda b, x, y, z: b.add(b.mul(x, y), z)),
        "gelu_bf16": case([T(33, 9, e=BF16), T(33, 9, e=BF16)], gelus),
        "silu_f16": case([T(33, 9, e=F16)], lambda b, x: b.mul(x, b.sigmoid(x))),
        "f64": case([T(7, 9, e=F64)], lambda b, x: [b.exp(x), b.sum(b.mul(x, 0.1), dims=(1,))]),
        "mixed_types": case([T(5, 6, e=BF16), T(5, 6), T(6, e=I64)], lambda b, x, y, n: [
            b.add(b.cast(x, dtype=F32), y), b.lt(y, 0.0), b.mul(y, b.cast(n, dtype=F32))]),
        "max_pool": case([T(2, 5, 7, 6, e=BF16)], pooled, {0: CHANNELS_LAST, 1: CHANNELS_LAST, 2: CHANNELS_LAST}),
        "max_pool_grad": case([T(2, 5, 4, 5), T(2, 5, 4, 5, e=I64), T(2, 5, 7, 6)], unpooled,
            {0: CHANNELS_LAST, 2: CHANNELS_LAST}, integers=6),
        "bits": case([T(3, 32, 4, 7, e=BF16), T(3, 32, 4, 7, e=BF16)], lambda b, x, y: [
            b.add(x, y), b.pack_bits(b.gt(b.add(x, y), 0.0), dim=1)], {i: CHANNELS_LAST for i in range(4)},
            [Blocks(64, 1)]),
        "bits_in_rows": case([T(19, 96), T(96)], lambda b, x, w: b.pack_bits(b.gt(b.mul(x, w), 0.0), dim=1), {},
            [Blocks(32, 1), Blocks(128, 1), Tiles(2, 32, 1), Tiles(2, 64, 1)]),
        "masked_by_bits": case([T(3, 32, 4, 7), T(3, 4, 4, 7, e=UI8)], lambda b, x, m: [
            b.select(b.unpack_bits(m, dim=1), x, 0.0),
            b.sum(b.select(b.unpack_bits(m, dim=1), x, 0.0), dims=(0, 2, 3))],
            {0: CHANNELS_LAST, 1: CHANNELS_LAST, 2: CHANNELS_LAST}, SPLIT, 256),
        "upsample": case([T(2, 5, 3, 4)], lambda b, x: b.upsample(b.relu(x), factors=(3, 2))),
        "upsample_grad": case([T(2, 3, 4, 40)], lambda b, dy: b.upsample_grad(dy, factors=(1, 8))),
        "enlarged_loss": case([T(2, 5, 3, 2, e=BF16), T(2, 12, 10, e=I64), T(2, 12, 10), T()], enlarged_loss((4, 5)),
            {0: CHANNELS_LAST}, [Sums(16, 8, 1, 1), Sums(4, 32, 1, 1)], 5),
        "loss_enlarged": case([T(2, 5, 3, 2, e=BF16), T(2, 12, 10, e=I64)], loss_enlarged, {0: CHANNELS_LAST},
            [Rows(8, 1, 1, looped=True, programs=3), Rows(16, 8, 1, programs=2)], 5),
        "avg_pool_grad": case([T(2, 5, 3, 4)], lambda b, dy: b.avg_pool_grad(dy, input_shape=(2, 5, 6, 7),
            kernel=(3, 2), stride=(2, 2), padding=(1, 1), ceil_mode=False, count_include_pad=False)),
        "scalar": case([T(), T()], lambda b, x, y: b.add(x, y)),
        "ones": case([T(1, 1), T(1, 5)], lambda b, x, y: b.add(x, y)),
        "empty": case([T(0, 5), T(5)], lambda b, x, y: b.add(x, y)),
        "padded_rows": case([T(6, 5), T(6, 5)], lambda b, x, y: b.add(x, y), {0: "padded", 2: "padded"}),
        "zero_stride": case([T(6, 5), T(6, 5)], lambda b, x, y: b.mul(x, y), {0: "same"}),
        "broadcast_sum": case([T(3, 1, 5)], lambda b, x: b.sum(b.broadcast(x, shape=(3, 4, 5)), dims=(0, 1))),
        "broadcast_sum_alone": case([T(3, 1, 5)], lambda b, x: b.sum(b.broadcast(x, shape=(3, 4, 5)), dims=(1,))),
        "broadcast_sum_row": case([T(3, 1)], lambda b, x: b.sum(b.broadcast(b.exp(x), shape=(3, 4)), dims=(1,))),
        "broadcast_sum_kept": case([T(3, 1, 5)], lambda b, x: [
            b.exp(x), b.sum(b.broadcast(x, shape=(3, 4, 5)), dims=(0, 1))]),
        "broadcast_sum_all": case([T(1, 1)], lambda b, x: b.sum(b.broadcast(x, shape=(9, 7)), dims=(0, 1))),
        "zero_stride_sum": case([T(6, 5)], lambda b, x: b.sum(x, dims=(0,)), {0: "same"}, SPLIT),
        "transposed_memory": case([T(6, 5), T(6, 5)], lambda b, x, y: b.add(x, y), {0: (1, 0), 1: (1, 0), 2: (1, 0)}),
        "disagree": case([T(19, 35), T(19, 35)], lambda b, x, y: b.add(x, y), {0: (1, 0)},
                         [Tiles(8, 16, 1), Blocks(64, 1)]),
        "transpose": case([T(2, 19, 35)], lambda b, x: b.transpose(b.exp(x), order=(2, 0, 1)), {}, [Tiles(16, 8, 1)]),
        "transpose_bf16": case([T(19, 35, e=BF16)], transposed),
        "channels_last": case([image, T(5)], lambda b, x, y: b.relu(b.add(x, b.reshape(y, shape=(5, 1, 1)))),
                              {0: CHANNELS_LAST, 2: CHANNELS_LAST}, [Tiles(4, 8, 1), Tiles(4, 4, 1)]),
        "excited": case([T(3, 6, 4, 2, e=BF16), T(3, 6, 1, 1, e=BF16), T(6, 1, 1, e=BF16)],
                        lambda b, x, s, w: b.add(b.mul(x, b.sigmoid(s)), w), {0: CHANNELS_LAST, 3: CHANNELS_LAST},
                        [Tiles(4, 4, 1)]),
        "to_channels_last": case([image], lambda b, x: b.neg(x), {1: CHANNELS_LAST}, [Tiles(4, 8, 1)]),
        "rope": case([T(2, 3, 4, 8), T(4, 8), T(4, 8)], rope),
        "reshape": case([T(6, 8)], lambda b, x: b.reshape(
            b.transpose(b.reshape(b.exp(x), shape=(2, 3, 2, 4)), order=(0, 2, 1, 3)), shape=(4, 12))),
        "pad": case([T(6, 8)], lambda b, x: b.pad(b.exp(x), low=(1, 0), high=(2, -1), value=3.0)),
        "flip": case([T(6, 8)], lambda b, x: b.flip(b.exp(x), dims=(1,))),
        "slice": case([T(6, 8)], lambda b, x: b.slice(b.exp(x), dim=1, start=1, end=8, stride=3)),
        "slice_grad": case([T(6, 3)], lambda b, x: b.slice_grad(b.exp(x), dim=1, start=1, end=7, stride=2, size=8)),
        "slice_grad_sum": case([T(6, 3)], lambda b, x: b.sum(
            b.slice_grad(b.exp(x), dim=1, start=1, end=7, stride=2, size=8), dims=(0,))),
        "concat": case([T(3, 2), T(3, 5), T(3, 1)], lambda b, x, y, z: b.exp(b.concat([x, y, z], dim=1))),
        "embedding_norm": case([T(6, 8), T(5, e=I64), T(8)], lambda b, w, i, g: rms(b, b.embedding(w, i), g),
                               integers=6),
        "dropout": case([T(3, e=I64), T(6, 8)], dropout, integers=2**16),
        "dropout_odd": case([T(3, e=I64), T(5, 7)], dropout, integers=2**16),
        "dropout_bf16": case([T(3, e=I64), T(6, 10, e=BF16)], dropout, {1: (1, 0)}, [Tiles(4, 8, 1)]),
        "dropout_runs": case([T(3, e=I64), T(6, 12), T(12)], lambda b, k, x, w: b.mul(dropout(b, k, x), w), {},
                             [Tiles(2, 8, 1)], 2**16),
        "dropout_softmax": case([T(3, e=I64), T(6, 12)], lambda b, k, x: dropout(b, k, b.softmax(x, dim=1)),
                                {}, LOOPED),
        "softmax": case([T(4, 6, 21)], softmax(2), {}, LOOPED),
        "softmax_bf16": case([T(24, 21, e=BF16)], softmax(1)),
        "softmax_middle": case([T(4, 21, 5)], softmax(1), {}, LOOPED),
        "softmax_one": case([T(4, 1)], softmax(1)),
        "softmax_empty": case([T(0, 4)], softmax(1)),
        "rms_norm": case([T(9, 21, e=BF16), T(21)], lambda b, x, w: rms(b, b.cast(x, dtype=F32), w), {}, LOOPED),
        "rms_norm_grad": case([T(23, 21), T(23, 21), T(21)], rms_grad, {}, SHARED),
        "group_sums": case([T(4, 6, 8)], lambda b, x: [
            b.sub(x, b.amax(x, dims=(1, 2), keepdim=True)),
            b.sum(b.mul(x, b.amax(x, dims=(1, 2), keepdim=True)), dims=(0, 2))], {}, [Rows(2, 64, 1, programs=2)]),
        "column_sum": case([T(26, 18), T(26, 18)], lambda b, x, y: [b.mul(x, y), b.sum(b.mul(x, y), dims=(0,))],
                           {}, SPLIT),
        "column_sum_bf16": case([T(26, 18, e=BF16)], lambda b, x: b.sum(x, dims=(0,)), {}, SPLIT),
        "column_sum_turned": case([T(26, 18)], lambda b, x: b.sum(x, dims=(0,)), {0: (1, 0)}, SPLIT),
        "statistics": case([image], statistics, {}, SPLIT),
        "statistics_channels_last": case([image], statistics, {0: CHANNELS_LAST}, SPLIT),
        "normal_sum": case([T(3, 5, 4, 7, e=BF16), *[T(5, 1, 1)] * 4], normal_sum, {0: CHANNELS_LAST}, SPLIT),
        "excited_sum": case([image, T(3, 5, 1, 1)], lambda b, x, s: b.sum(b.mul(x, s), dims=(0, 2, 3)),
                            {0: CHANNELS_LAST}, [Sums(4, 8, 3, 1), Sums(4, 1, 1, 1)]),
        "row_sum": case([T(6, 50)], lambda b, x: b.sum(x, dims=(1,)), {}, SPLIT),
        "norm": case([T(26, 18)], lambda b, x: b.sqrt(b.sum(b.mul(x, x), dims=(0, 1))), {}, [Sums(64, 1, 3, 1)]),
        "both_sums": case([T(26, 18)], lambda b, x: [b.sum(x, dims=(0,)), b.sum(x, dims=(0, 1))]),
        "rows_and_columns": case([T(26, 18)], lambda b, x: [b.sum(x, dims=(0,)), b.sum(x, dims=(1,))], {}, SHARED),
        "extremes": case([T(9, 18)], lambda b, x: [b.amax(x, dims=(1,)), b.amin(x, dims=(1,))], {}, [Sums(4, 2, 1, 1)]),
        "truths": case([T(9, 18)], lambda b, x: [b.any(b.gt(x, 1.0), dims=(1,)), b.all(b.gt(x, -1.0), dims=(1,))]),
        "whole_sum": case([T(9, 18, e=I64), T(9, 18, e=I32)], lambda b, x, y: [
            b.sum(x, dims=(0,)), b.sum(b.mul(x, 3), dims=(0,)), b.amax(x, dims=(0,))], {}, SPLIT, 100),
    }  # fmt: skip


# ---- functions -------------------------------------------------------------------------------------------------------

SPECIAL = [0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1.5, 2.5, -2.5, 3.0, -7.25, 1e-3, 20.0, -20.0, 88.5, -87.0, 1e-30, 3e38,
           float("inf"), float("-inf"), float("nan")]  # fmt: skip
WHOLE = [-128, -7, -3, -2, -1, 1, 2, 3, 5, 100, 127]
FLOAT_ONLY = ("exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tanh",
              "sigmoid", "erf", "div", "pow", "atan2")  # fmt: skip
BITS = ("bit_not", "bit_and", "bit_or", "bit_xor")
TRUTHS = ("eq", "ne", "lt", "le", "gt", "ge", "isnan")


def function_kernel(fn: str, element: ScalarType, count: int, result: ScalarType | None = None) -> Op:
    """z[i] = fn(x[i], y[i], ...)."""
    out = result or (BOOL if fn in TRUTHS else element)
    inputs = [element] * FUNCTIONS[fn] if fn != "select" else [BOOL, element, element]
    function = add_function(module(), fn, [T(count, e=e) for e in (*inputs, out)])
    block = function.regions[0].block
    b = Builder(block)
    Space.build(b, sizes=(count,))
    loaded = [Load.build(b, a, [], map=[[1, 0]]).result for a in block.arguments[:-1]]
    made = Apply.build(b, loaded, fn=fn, dtype=out).result
    Store.build(b, made, block.arguments[-1], [], map=[[1, 0]])
    finish_function(function, [])
    return function


def function_inputs(fn: str, element: ScalarType) -> list[torch.Tensor]:
    """Every pair of special values, of the types that a function takes."""
    dtype = torch_dtype(element)
    if element.kind == "float":
        values = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
        if element.bits == 16 and FUNCTIONS[fn] == 1:  # what is computed more roughly has seams
            values = torch.cat([values, torch.linspace(-4, 4, 1601).to(dtype)])
    elif element.kind == "bool":
        values = torch.tensor([False, True])
    else:
        values = torch.tensor([v % 256 if element is UI8 else v for v in WHOLE], dtype=torch.int64).to(dtype)
    if FUNCTIONS[fn] == 1:
        return [values]
    pairs = torch.cartesian_prod(values, values)
    x, y = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
    return [x, y] if FUNCTIONS[fn] == 2 else [torch.arange(len(x)) % 3 == 0, x, y]


def function_cases() -> dict[str, tuple[Op, list[torch.Tensor], ScalarType]]:
    made = {}
    for fn in FUNCTIONS:
        if fn == "rounded":  # (what is stored is rounded anyway)
            continue
        elements: list[ScalarType] = [F32, F64] if fn not in BITS else []
        if fn in ("add", "exp", "maximum", "cast", "erf", "tanh", "sigmoid"):  # 16 bits are computed as f32
            elements += [BF16, F16]
        if fn not in FLOAT_ONLY:
            elements += [I64, I8, UI8]
        if fn in (*BITS, "select", "eq", "maximum"):
            elements.append(BOOL)
        for element in elements:
            results = [F32, I32, BOOL] if fn == "cast" else [None]
            for result in results:
                inputs = function_inputs(fn, element)
                if result is not None and result.kind == "int" and element.kind == "float":
                    inputs = [x[x.abs() < 1e4] for x in inputs]
                kernel = function_kernel(fn, element, len(inputs[0]), result)
                out = kernel.regions[0].block.arguments[-1].type.element
                made[f"{fn}_{element}" + (f"_{result}" if result else "")] = kernel, inputs, out
    return made
