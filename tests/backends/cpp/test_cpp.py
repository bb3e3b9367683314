"""Generated C++ kernels against the float64 reference of the loop dialect, every candidate of every case."""

from __future__ import annotations

import contextlib
import math
import platform
import re
import subprocess

import pytest
import torch

from tests.dialects.loop.programs import Drawn
from wholestep.backends import cpp
from wholestep.backends.cpp.compiler import header, working_compiler
from wholestep.backends.cpp.nest import Options
from wholestep.backends.generated import overwritable
from wholestep.dialects.loop import FUNCTIONS, REDUCTIONS, NoSchedule, schedule
from wholestep.ir.types import BF16, BOOL, F16, F32, F64, I32, I64, ScalarType, TensorType
from wholestep.transforms.loops import NotLoops, lowered

from ..triton.kernels import step_cases
from .kernels import Case, apply, reduction, step, tensor

T = tensor
U8, I8, I16 = ScalarType("ui8"), ScalarType("i8"), ScalarType("i16")
pytestmark = pytest.mark.skipif(bool(cpp.missing()), reason=cpp.missing())


def numbers(n=400, low=-6.0, high=6.0, special=True):
    x = torch.linspace(low, high, n, dtype=torch.float64)
    more = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        -0.5,
        1.5,
        2.5,
        -2.5,
        1e-3,
        -1e-30,
        3e-42,
        1e-44,
        87.0,
        88.9,
        -87.5,
        -103.0,
        1e30,
        -1e30,
    ]
    more += [math.nan, math.inf, -math.inf] if special else []
    return torch.cat([x, torch.tensor(more, dtype=torch.float64)])


def function_cases() -> dict[str, Case]:
    found = {}
    x = numbers().float().double()
    small = x[(x.abs() <= 100) | (x != x)]
    pairs = [v.flatten() for v in torch.meshgrid(small[::9], small[4::9], indexing="ij")]
    ends = torch.cat([torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 2.0, -3.0, 7.5]).double()])
    pairs = [torch.cat([p, e.flatten()]) for p, e in zip(pairs, torch.meshgrid(ends, ends, indexing="ij"), strict=True)]
    whole = torch.tensor([-9, -7, -4, -3, -2, -1, 0, 1, 2, 3, 5, 8, 11])
    wholes = [v.flatten() for v in torch.meshgrid(whole, whole, indexing="ij")]
    bools = [torch.tensor([0, 0, 1, 1]).bool(), torch.tensor([0, 1, 0, 1]).bool()]
    bits = {"bit_and", "bit_or", "bit_xor", "bit_not"}
    compare = ["eq", "ne", "lt", "le", "gt", "ge"]
    unary = [f for f, n in FUNCTIONS.items() if n == 1 and f not in {*bits, "isnan", "cast", "rounded"}]
    binary = [f for f, n in FUNCTIONS.items() if n == 2 and f not in {*bits, *compare}]
    for e in (F32, F64, BF16):
        found[f"of one {e}"] = apply(unary, [x], [e], [e] * len(unary))
    pairs = [(4 * p).round() / 4 for p in pairs]  # no quotient is so near to a whole number that f32 rounds it there
    for e in (F32, F64):
        found[f"of two {e}"] = apply(binary, pairs, [e, e], [e] * len(binary))
    found["comparisons f32"] = apply(compare, pairs, [F32, F32], [BOOL] * 6)
    found["comparisons i32"] = apply(compare, wholes, [I32, I32], [BOOL] * 6)
    found["isnan"] = apply(["isnan"], [x], [F32], [BOOL])
    found["select"] = apply(["select"], [pairs[0] > 0, *pairs], [BOOL, F32, F32], [F32])
    two = sorted(bits - {"bit_not"})
    for e, values in ((I64, wholes), (U8, [w.abs() for w in wholes]), (BOOL, bools)):
        found[f"bits of {e}"] = apply(two, values, [e, e], [e] * 3)
        found[f"bit_not {e}"] = apply(["bit_not"], values[:1], [e], [e])
    arithmetic = ["add", "sub", "mul", "maximum", "minimum"]
    divisions = ["floor_div", "trunc_div", "rem", "fmod"]
    for e in (I64, I32, I8):
        found[f"arithmetic of {e}"] = apply(arithmetic, wholes, [e, e], [e] * 5)
        divisible = [w[wholes[1] != 0] for w in wholes]
        found[f"divisions of {e}"] = apply(divisions, divisible, [e, e], [e] * 4)
        found[f"of one {e}"] = apply(["neg", "abs", "sign", "relu"], [whole], [e], [e] * 4)
    found["pow i64"] = apply(["pow"], [w[wholes[1] >= 0] for w in wholes], [I64, I64], [I64])
    fit = torch.linspace(-100, 100, 301).double()
    types = [F32, F64, BF16, F16, I64, I32, I16, I8, BOOL]
    for e in types:
        found[f"casts of {e}"] = apply(["cast"] * len(types), [fit], [e], types)
    found["casts of u8"] = apply(["cast"] * 2, [fit.abs()], [U8], [F32, I64])
    found["casts to u8"] = apply(["cast"], [fit.abs()], [F32], [U8])
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    for e, d in ((BF16, torch.bfloat16), (F16, torch.float16)):
        found[f"every {e}"] = apply(["cast"], [every.view(d)], [e], [F32])
        near = every.view(d).float().view(torch.int32)
        near = torch.cat([near, near + 1, near - 1, near + 4096, near + 32768, near - 4095]).view(torch.float32)
        found[f"rounded to {e}"] = apply(["cast"], [near], [F32], [e])
        found[f"rounded to {e} on the way"] = step(
            [T(len(near))], lambda b, x, e=e: b.neg(b.cast(b.cast(x, dtype=e, rounds=True), dtype=F32)), given={0: near}
        )
    return found


def reduction_cases() -> dict[str, Case]:
    found = {}
    for kind in REDUCTIONS:
        for shape, dims in (
            ((7, 37), (1,)),
            ((7, 37), (0,)),
            ((7, 37), (0, 1)),
            ((3, 5, 41), (0, 2)),
            ((3, 50, 41), (1,)),
        ):
            if kind in ("or", "and"):
                found[f"{kind} {shape} {dims}"] = reduction(kind, shape, dims, BOOL, BOOL)
            else:
                found[f"{kind} {shape} {dims}"] = reduction(kind, shape, dims, F32, F32)
        if kind not in ("or", "and"):
            found[f"{kind} ints"] = reduction(kind, (9, 70), (1,), I64, I64)
            found[f"{kind} bf16"] = reduction(kind, (9, 70), (0,), BF16, F32)
            found[f"{kind} f64"] = reduction(kind, (9, 70), (1,), F64, F64)
    for shape, dims in (((200_003,), (0,)), ((40_000, 33), (0,)), ((6, 9000, 5), (1,)), ((8, 20, 30, 40), (0, 2, 3))):
        found[f"sum {shape} {dims}"] = reduction("sum", shape, dims, F32, F32)
    for shape, dims in (((0, 5), (0,)), ((4, 0), (1,)), ((0,), (0,)), ((0, 4), (1,))):
        for kind in ("sum", "prod", "or", "and"):
            e = BOOL if kind in ("or", "and") else F32
            found[f"{kind} nothing {shape}"] = reduction(kind, shape, dims, e, e)
    holes = torch.randn(6, 100, dtype=torch.float64)
    holes[1, 3] = holes[2, 99] = math.nan
    holes[3] = -math.inf
    holes[4, 7] = math.inf
    for kind in ("max", "min", "sum"):
        for dims in ((0,), (1,)):
            case = found[f"{kind} special {dims}"] = reduction(kind, (6, 100), dims, F32, F32)
            case.given[0] = holes
    return found


def rope(b, x, cos, sin):
    half = x.type.shape[-1] // 2
    d = x.type.rank - 1
    turned = b.concat([b.neg(b.slice(x, dim=d, start=half, end=2 * half)), b.slice(x, dim=d, start=0, end=half)], dim=d)
    return b.add(b.mul(x, cos), b.mul(turned, sin))


def adam(b, p, g, m, v):
    m = b.add(b.mul(m, 0.9), b.mul(g, 0.1))
    v = b.add(b.mul(v, 0.999), b.mul(b.mul(g, g), 0.001))
    p = b.sub(b.mul(p, 0.99), b.mul(b.div(m, b.add(b.sqrt(v), 1e-8)), 1e-3))
    return [p, m, v, b.cast(p, dtype=BF16)]


POOL = dict(kernel=(3, 3), stride=(2, 2), padding=(1, 1), dilation=(1, 1))


def pointwise_cases() -> dict[str, Case]:
    nchw, nhwc = (240, 48, 8, 1), (240, 1, 40, 5)  # of (2, 5, 6, 8)
    add = lambda b, x, y: b.add(x, y)  # noqa: E731
    picked = torch.tensor([3, -1, 0, 99, 5, 2, 2])
    return {
        "broadcast": step([T(4, 5), T(5)], add),
        "broadcast both": step([T(4, 1), T(1, 5)], add),
        "scalar": step([T(), T(33)], add),
        "nothing but a scalar": step([T(), T()], add),
        "empty": step([T(4, 0), T(1, 0)], add),
        "odd": step([T(3, 7, 11), T(7, 1)], add),
        "long": step([T(300, 301), T(301)], add),
        "mixed": step(
            [T(6, 9, e=BF16), T(6, 9), T(6, 9, e=F16), T(6, 9, e=BOOL)],
            lambda b, x, y, z, m: [
                b.select(m, b.cast(x, dtype=F32), y),
                b.cast(b.add(b.cast(x, dtype=F32), b.cast(z, dtype=F32)), dtype=F16),
                b.gt(y, 0.0),
            ],
        ),
        "channels last": step([T(2, 5, 6, 8), T(5, 1, 1)], add, {0: nhwc, 2: nhwc}),
        "layouts differ": step([T(2, 5, 6, 8), T(2, 5, 6, 8)], add, {0: nhwc, 1: nchw, 2: nhwc}),
        "transposed": step([T(70, 90), T(70, 90)], add, {0: (1, 70)}),
        "transposed large": step(
            [T(150, 260, e=BF16), T(150, 260)], lambda b, x, y: b.add(b.cast(x, dtype=F32), y), {0: (1, 150)}
        ),
        "padded rows": step([T(6, 10), T(6, 10)], add, {0: (16, 1), 2: (12, 1)}),
        "zero stride": step([T(6, 10), T(6, 10)], add, {0: (0, 1), 1: (1, 0)}),
        "gelu": step([T(40, 50)], lambda b, x: b.gelu(x), scale=3),
        "gelu bf16": step([T(40, 50, e=BF16)], lambda b, x: b.gelu(x), scale=3),
        "gelu gradient": step([T(40, 50), T(40, 50)], lambda b, dy, x: b.gelu_grad(dy, x), scale=3),
        "gelu tanh": step([T(40, 50)], lambda b, x: b.gelu(x, approximate="tanh"), scale=3),
        "adam": step([T(1003), T(1003, e=BF16), T(1003), T(1003)], adam, {}, {3: torch.rand(1003).double()}),
        "rope": step([T(2, 3, 4, 16), T(4, 16), T(4, 16)], rope),
        "rope bf16": step([T(2, 3, 4, 16, e=BF16), T(4, 16, e=BF16), T(4, 16, e=BF16)], rope),
        "reshape": step(
            [T(6, 8)],
            lambda b, x: b.reshape(
                b.transpose(b.reshape(b.exp(x), shape=(2, 3, 2, 4)), order=(0, 2, 1, 3)), shape=(4, 12)
            ),
        ),
        "heads": step(
            [T(6, 4, 24, e=BF16)],
            lambda b, x: b.transpose(b.reshape(b.mul(x, 2.0), shape=(6, 4, 3, 8)), order=(0, 2, 1, 3)),
        ),
        "concat": step([T(5, 3), T(5, 40), T(5, 2)], lambda b, x, y, z: b.concat([x, b.exp(y), z], dim=1)),
        "concat rows": step([T(2, 30), T(3, 30)], lambda b, x, y: b.concat([x, b.exp(y)], dim=0)),
        "pad": step([T(6, 8)], lambda b, x: b.pad(b.exp(x), low=(1, 0), high=(2, -1), value=3.0)),
        "pad channels last": step(
            [T(2, 5, 6, 8)],
            lambda b, x: b.pad(b.exp(x), low=(0, 0, 1, 2), high=(0, 0, 2, -1), value=3.0),
            {0: nhwc, 1: (405, 1, 45, 5)},
        ),
        "pad channels last too": step(
            [T(2, 5, 6, 8, e=F64), T(5, 1, 1, e=F64)],
            lambda b, x, y: b.mul(b.pad(b.exp(x), low=(0, 2, 1, 0), high=(0, 1, 0, 2), value=3.0), b.sum(y, dims=(0,))),
            {0: nhwc, 2: (560, 1, 80, 8)},
        ),
        "slice": step([T(9, 40)], lambda b, x: b.exp(b.slice(x, dim=1, start=3, end=38, stride=3))),
        "slice gradient": step([T(6, 3)], lambda b, x: b.slice_grad(b.exp(x), dim=1, start=1, end=7, stride=2, size=8)),
        "flip": step([T(6, 8)], lambda b, x: b.flip(b.exp(x), dims=(1,))),
        "embedding": step([T(6, 40), T(7, e=I64)], lambda b, w, i: b.mul(b.embedding(w, i), 2.0), given={1: picked}),
        "embedding bf16": step([T(6, 40, e=BF16), T(7, e=I32)], lambda b, w, i: b.embedding(w, i), given={1: picked}),
        "parts of a table": step(
            [T(2, 9), T(4, 9), T(7, e=I64)],
            lambda b, x, y, i: b.embedding(b.concat([x, b.pad(y, low=(1, 0), high=(2, 0), value=3.0)], dim=0), i),
            given={2: torch.tensor([0, 8, 2, 7, 1, 6, 3])},
        ),
        "gather": step(
            [T(6, 9), T(6, 4, e=I64)],
            lambda b, x, i: b.gather(x, i, dim=1),
            given={1: torch.tensor([[0, 8, 9, -1]] * 6)},
        ),
        "max pooling": step(
            [T(2, 5, 7, 6)], lambda b, x: b.max_pool(b.exp(x), in_window=True, **POOL), {0: (210, 1, 30, 5)}
        ),
        "its gradient": step(
            [T(2, 5, 4, 3), T(2, 5, 4, 3, e=ScalarType("ui8"))],
            lambda b, dy, i: b.exp(b.max_pool_grad(dy, i, input_shape=(2, 5, 7, 6), **POOL)),
            given={1: torch.arange(120).reshape(2, 5, 4, 3).remainder(9).to(torch.uint8)},
        ),
        "two sets of points": step([T(30, 40), T(40)], lambda b, x, y: [b.add(x, y), b.exp(y)]),
        "iota": step(
            [T(50)], lambda b, x: b.mul(x, b.cast(b.iota(type=TensorType((50,), I64), start=3, stride=2), dtype=F32))
        ),
        "f64": step([T(9, 20, e=F64)], lambda b, x: b.tanh(b.mul(x, 0.1))),
    }


def row_cases() -> dict[str, Case]:
    softmax = lambda b, x: b.softmax(x, dim=x.type.rank - 1)  # noqa: E731
    inf = torch.randn(6, 70, dtype=torch.float64)
    inf[1, 5:] = -math.inf
    inf[2] = -math.inf
    inf[3, 9] = math.nan
    inf[4, 9] = math.inf
    found = {
        "softmax": step([T(6, 70)], softmax),
        "written again and again": step([T(6, 17)], lambda b, x: again_and_again(b, x, 1)),
        "lanes written again and again": step([T(17, 6)], lambda b, x: again_and_again(b, x, 0)),
        "softmax special": step([T(6, 70)], softmax, given={0: inf}),
        "softmax bf16": step([T(6, 70, e=BF16)], softmax),
        "softmax f16": step([T(2, 5, 33, e=F16)], softmax),
        "softmax long": step([T(3, 50_257)], softmax),
        "softmax longer": step([T(2, 70_001)], softmax),
        "softmax across": step([T(4, 30, 70)], lambda b, x: b.softmax(x, dim=1)),
        "softmax gradient": step([T(6, 70), T(6, 70)], lambda b, dy, y: b.softmax_grad(dy, y, dim=1)),
        "softmax transposed": step([T(60, 70)], softmax, {0: (1, 60), 1: (1, 60)}),
        "log softmax": step([T(5, 41)], lambda b, x: b.log_softmax(x, dim=1)),
        "masked softmax": step(
            [T(2, 3, 10, 20), T(10, 20, e=BOOL)],
            lambda b, x, m: b.softmax(b.select(m, x, b.neg(b.exp(b.mul(b.abs(x), 80.0)))), dim=3),
        ),
        "layer norm": step([T(4, 6, 48), T(48), T(48)], lambda b, x, w, c: b.layer_norm(b.mul(x, 2.0), w, c)),
        "layer norm bf16": step(
            [T(40, 33, e=BF16), T(33, e=BF16), T(33, e=BF16)], lambda b, x, w, c: b.layer_norm(x, w, c)
        ),
        "rms norm": step([T(24, 48), T(48)], lambda b, x, w: b.rms_norm(x, w)),
        "rms norm gradient": step(
            [T(24, 37), T(24, 37), T(24, 1), T(37)], lambda b, dy, x, r, w: b.rms_norm_grad(dy, x, r, w)
        ),
        "cross entropy": step(
            [T(30, 157), T(30, e=I64)], lambda b, x, t: b.cross_entropy(x, t), given={1: torch.randint(0, 157, (30,))}
        ),
        "cross entropy bf16": step(
            [T(30, 157, e=BF16), T(30, e=I64)],
            lambda b, x, t: b.cross_entropy(b.cast(x, dtype=F32), t),
            given={1: torch.tensor([3, -100] * 15)},
        ),
        "column sums": step([T(60, 80), T(60, 80)], lambda b, x, y: [b.mul(x, y), b.sum(b.mul(x, y), dims=(0,))]),
        "column sums of rows": step(
            [T(300, 80)], lambda b, x: [b.softmax(x, dim=1), b.sum(b.softmax(x, dim=1), dims=(0,))]
        ),
        "norm": step([T(900)], lambda b, x: b.sqrt(b.sum(b.mul(x, x), dims=(0,)))),
        "scaled by its norm": step(
            [T(9, 40)], lambda b, x: b.div(x, b.sqrt(b.sum(b.mul(x, x), dims=(0, 1), keepdim=True)))
        ),
    }
    for name, e, n in (("", F32, 48), (" odd", F32, 37), (" bf16", BF16, 48)):
        types = [T(9, 6, n, e=e), T(9, 6, n, e=e), T(9, 6, 1), T(9, 6, 1), T(n, e=e), T(9, 6, n, e=e)]

        def with_residual(b, dy, x, m, r, w, residual):
            dx, dw, db = b.layer_norm_grad(dy, x, m, r, w)
            return [b.add(dx, residual), dw, db]

        found[f"layer norm gradient{name}"] = step(types, with_residual, given={3: torch.rand(9, 6, 1) + 0.5})
    for name, strides in (("nchw", (3000, 100, 10, 1)), ("nhwc", (3000, 1, 300, 30))):
        lies = {0: strides, 1: strides}
        found[f"statistics {name}"] = step(
            [T(4, 30, 10, 10)],
            lambda b, x: [b.sum(x, dims=(0, 2, 3)), b.sum(b.mul(x, x), dims=(0, 2, 3))],
            {0: strides},
        )

        def normalise(b, x):
            centred = b.sub(x, b.mean(x, dims=(0, 2, 3), keepdim=True))
            var = b.mean(b.mul(centred, centred), dims=(0, 2, 3), keepdim=True)
            return b.mul(centred, b.rsqrt(b.add(var, 1e-5)))

        found[f"normalised {name}"] = step([T(4, 30, 10, 10)], normalise, lies)
        found[f"written beside its sums {name}"] = step(
            [T(4, 30, 10, 10), T(4, 30, 1, 1), T(4, 30, 10, 10)],
            lambda b, x, w, y: [
                b.mul(b.silu(b.mul(x, w)), y),
                b.sum(b.mul(b.silu(b.mul(x, w)), y), dims=(2, 3), keepdim=True),
                b.sum(b.silu(x), dims=(2, 3), keepdim=True),
            ],
            dict.fromkeys((0, 2, 3), strides),
        )

    def before_pooling(b, dy, taps, x):  # places of windows are divisions, each along one dimension of the row
        into = b.max_pool_grad(dy, taps, input_shape=x.type.shape, **POOL)
        g = b.select(b.gt(x, 0.0), b.mul(into, b.exp(x)), b.mul(into, 0.0))
        return [g, b.sum(g, dims=(0, 2, 3)), b.sum(b.mul(g, x), dims=(0, 2, 3))]

    found["sums of a pooling's gradient"] = step(
        [T(2, 5, 4, 3), T(2, 5, 4, 3, e=ScalarType("ui8")), T(2, 5, 7, 6)],
        before_pooling,
        given={1: torch.arange(120).reshape(2, 5, 4, 3).remainder(9).to(torch.uint8)},
    )
    found["sums of an uneven pooling's gradient"] = step(
        [T(3, 6, 2, 3)],
        lambda b, dy: b.sum(b.adaptive_avg_pool_grad(dy, size=(2, 3), input_shape=(3, 6, 11, 10)), dims=(0, 2, 3)),
        {0: (36, 1, 18, 6)},
    )
    found["kept along parts of the row"] = step(
        [T(3, 5, 7), T(3, 5, 1), T(3, 1, 7)],
        lambda b, x, y, z: b.softmax(b.reshape(b.mul(b.mul(x, b.exp(y)), b.exp(z)), shape=(3, 35)), dim=1),
    )
    return found


def cases_of_triton() -> dict[str, Case]:
    """What the other generator of kernels is tested with."""
    found = {}
    for name, it in step_cases().items():
        tensors = it.tensors()
        strides = {i: t.stride() for i, t in enumerate(tensors)}
        found[name] = Case(it.kernel, strides, {i: t.double() for i, t in enumerate(tensors)})
    return found


def again_and_again(b, x, dim):
    """A row's sum in five copies, beside the row: nothing but what is written changes along the copies."""
    total = b.sum(x, dims=(dim,))
    return [b.softmax(x, dim=dim), b.broadcast(b.reshape(total, shape=(1, *total.type.shape)), shape=(5, 6))]


def drawn_cases() -> dict[str, Case]:
    """Kernels that nobody thought of."""
    found = {}
    for seed in range(40):
        drawn = Drawn(seed, ops=3 + seed % 9, float64=False)
        with contextlib.suppress(NotLoops, NoSchedule):
            kernel = lowered(drawn.function)
            if schedule(kernel).along or schedule(kernel).across:
                found[f"drawn {seed}"] = Case(kernel, {}, dict(enumerate(x.double() for x in drawn.inputs)))
    return found


def random_cases() -> dict[str, Case]:
    key = torch.tensor([0x123456789ABCDEF, (5 << 32) + 77, 3])

    def dropout(b, k, x):
        kept = b.lt(b.random(k, distribution="uniform", stream=3, type=x.type), 0.7)
        return b.mul(x, b.cast(kept, dtype=x.type.element))

    found = {}
    for e in (F32, BF16, F16):
        drawn = TensorType((7, 37), e)
        found[f"random {e}"] = step(
            [T(3, e=I64)], lambda b, k, t=drawn: b.random(k, distribution="uniform", stream=9, type=t), given={0: key}
        )
        found[f"dropout {e}"] = step([T(3, e=I64), T(6, 33, e=e)], dropout, given={0: key})
    return found


CASES = {
    **{f"function {k}": v for k, v in function_cases().items()},
    **{f"reduce {k}": v for k, v in reduction_cases().items()},
    **{f"pointwise {k}": v for k, v in pointwise_cases().items()},
    **{f"rows {k}": v for k, v in row_cases().items()},
    **random_cases(),
    **drawn_cases(),
    # (C++ kernels read and write whole bytes, and say so)
    **{f"triton {k}": v for k, v in cases_of_triton().items() if "bits" not in k},
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """All candidates of all cases, from one call."""
    patch = pytest.MonkeyPatch()
    patch.setenv("WHOLESTEP_CACHE", str(tmp_path_factory.mktemp("cache")))
    found = {name: cpp.candidates(case.function, case.specs) for name, case in CASES.items()}
    progress = []
    made = cpp.build([c for cs in found.values() for c in cs], lambda done, total: progress.append((done, total)))
    patch.undo()
    assert progress[0] == (0, len(made)) and progress[-1] == (len(made), len(made))
    return {name: [(c, made[c.key]) for c in cs] for name, cs in found.items()}


def tolerance(case: Case, dtype: torch.dtype) -> dict[str, float]:
    if not dtype.is_floating_point:
        return {"rtol": 0, "atol": 0}
    eps = torch.finfo(dtype).eps
    smallest = 3e-45 if dtype is torch.float32 else 0  # two steps of the smallest numbers
    return {"rtol": (4 if dtype in (torch.float32, torch.float64) else 1) * eps, "atol": smallest}


@pytest.mark.parametrize("name", CASES)
def test_case(name, built):
    case = CASES[name]
    assert cpp.why_not(case.function, case.specs) == ""
    assert built[name]
    for candidate, kernel in built[name]:
        ins, outs = case.arguments()
        before = [x.clone() for x in ins]
        expected = case.expected(ins, outs)
        scratch = [torch.full(s.shape, 255, dtype=s.dtype) for s in candidate.scratch]
        assert not isinstance(kernel, Exception), kernel
        if name.startswith(
            ("pointwise embedding", "pointwise gather")
        ):  # some numbers are outside of the table: they are seen
            with pytest.raises(IndexError, match="outside of the table"):
                kernel(*ins, *outs, *scratch)
        else:
            kernel(*ins, *outs, *scratch)
        for x, y in zip(ins, before, strict=True):
            assert torch.equal(x.nan_to_num(), y.nan_to_num()), "an input was written"
        for number, (got, want) in enumerate(zip(outs, expected, strict=True)):
            label = case.labels[number] if case.labels else f"output {number}"
            limits = tolerance(case, got.dtype)
            if not name.startswith("function") and got.dtype.is_floating_point:
                summed = max(max((x.numel() for x in ins), default=1) / max(got.numel(), 1), 1)
                limits = {"rtol": 8 * limits["rtol"], "atol": 8 * torch.finfo(got.dtype).eps * math.sqrt(summed)}
            torch.testing.assert_close(
                got, want, equal_nan=True, **limits, msg=lambda m, what=f"{candidate.name}, {label}": f"{what}: {m}"
            )


@pytest.mark.parametrize("name", [n for n in CASES if not n.startswith(("function", "pointwise embedding"))])
def test_results_over_operands(name, built):
    """Where a result may take an operand's memory, all structures read that before they write."""
    case = CASES[name]
    count = len(case.arguments()[0])
    over = overwritable(case.function, case.specs[:count], case.specs[count:])
    taken = {}
    for result, operands in enumerate(over):
        free = sorted(operands - set(taken.values()))
        taken.update({result: free[0]} if free else {})
    if not taken or name.startswith("pointwise gather"):
        return
    for candidate, kernel in built[name]:
        scratch = [torch.full(s.shape, 255, dtype=s.dtype) for s in candidate.scratch]
        ins, outs = case.arguments()
        kernel(*ins, *outs, *scratch)
        shared = [
            ins[taken[i]].as_strided(o.shape, o.stride()) if i in taken else o.clone() for i, o in enumerate(outs)
        ]
        kernel(*ins, *shared, *scratch)
        for mine, want in zip(shared, outs, strict=True):
            assert torch.equal(mine.nan_to_num(), want.nan_to_num()), f"{candidate.name}, {taken}"


def test_what_is_summed_and_written_is_computed_once():
    """What a sum is of is written on the way; rows have a loop for vectors and one for what is left over."""
    body = lambda b, x, y: [b.mul(b.exp(x), y), b.sum(b.mul(b.exp(x), y), dims=(0, 2, 3))]  # noqa: E731
    last = (6400, 1, 640, 64)
    case = step([T(4, 64, 10, 10), T(4, 64, 10, 10)], body, dict.fromkeys(range(3), last))
    made = cpp.candidates(case.function, case.specs)
    assert {c.name.partition(" ")[0]: c.source.count("exp_(") for c in made} == {"phases": 1, "lanes": 1, "rows": 2}


def test_conditions_of_outer_loops_make_no_branches():
    case = CASES["pointwise pad channels last"]
    for candidate in cpp.candidates(case.function, case.specs):
        assert "either(" in candidate.source and "? get(" not in candidate.source


@pytest.mark.skipif(platform.machine() != "x86_64", reason="it looks for instructions of x86-64")
@pytest.mark.parametrize("name", ["pointwise", "rows", "columns"])
def test_loops_become_vector_instructions(name):
    """gelu in polynomials, a softmax of rows and sums of columns: many elements are multiplied at once, in threads."""
    body = {
        "pointwise": lambda b, x: b.gelu(x),
        "rows": lambda b, x: b.softmax(x, dim=1),
        "columns": lambda b, x: b.sum(b.mul(x, x), dims=(0,)),
    }[name]
    case = step([T(4096, 1024)], body)
    using, candidate = working_compiler(), cpp.candidates(case.function, case.specs)[0]
    flags = [flag for flag in using.flags if flag != "-shared"]
    source = f"{header()}\n{candidate.source}"
    made = subprocess.run([using.command, *flags, "-S", "-o", "-", "-"], input=source, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert re.search(r"\bv?mulps\b.*%[xyz]mm|\bvfn?madd\d+ps\b", made.stdout)
    assert "GOMP_parallel" in made.stdout or "__kmpc_fork_call" in made.stdout


def loss_and_gradient(reduction):
    def body(b, x, target):
        loss, logsumexp = b.cross_entropy(x, target, reduction=reduction, label_smoothing=0.1)
        seed = b.full(1.0, loss.type.shape, x.type.element)
        gradient = b.cross_entropy_grad(seed, x, target, logsumexp, reduction=reduction, label_smoothing=0.1)
        return [gradient, loss]

    return body


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("classes", [37, 9001])
@pytest.mark.parametrize("element", [F32, BF16], ids=str)
@pytest.mark.parametrize("side_by_side", [False, True])
def test_a_gradient_over_its_logits(reduction, classes, element, side_by_side, tmp_path, monkeypatch):
    """All structures read the target's logit before they write over it; rows lie one by one or side by side."""
    monkeypatch.setenv("WHOLESTEP_CACHE", str(tmp_path))
    target = torch.randint(0, classes, (30,))
    target[4] = -100
    strides = {i: (1, 30) for i in (0, 2)} if side_by_side else {}
    case = step([T(30, classes, e=element), T(30, e=I64)], loss_and_gradient(reduction), strides, {1: target})
    assert overwritable(case.function, case.specs[:2], case.specs[2:]) == [{0}, set()]
    ways = [cpp.candidate(case.function, case.specs, Options(s)) for s in ("phases", "rows")]
    ways += [c for c in cpp.candidates(case.function, case.specs) if c.name.startswith("lanes")]
    assert len(ways) == 2 + (side_by_side and reduction == "none")
    for way, kernel in zip(ways, cpp.build(ways).values(), strict=True):
        scratch = [torch.full(s.shape, 255, dtype=s.dtype) for s in way.scratch]
        (logits, wanted), (gradient, loss) = case.arguments()
        kernel(logits, wanted, gradient, loss, *scratch)
        again = torch.empty_like(loss)
        kernel(logits, wanted, logits, again, *scratch)
        assert torch.equal(logits, gradient) and torch.equal(again, loss), way.name
