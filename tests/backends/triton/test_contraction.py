"""Matrix products with their surroundings against the loop dialect's float64 reference, in memory with guarded edges.

The kernels run in a child process (`child.py`), which answers with the error per candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backends.triton.child import Ask, asking, serve
from wholestep.backends.kernels import Spec
from wholestep.dialects.loop.reference import run
from wholestep.dialects.step import StepBuilder
from wholestep.dialects.step.base import ir_dtype, torch_dtype
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.core import Op
from wholestep.ir.types import BF16, F32, F64, I64, ScalarType, TensorType
from wholestep.transforms.loops import lowered

UI8 = ScalarType("ui8")
GUARD = 64
#: share of the largest value by which a result may differ: f32 by its sums alone; the interpreter cuts bf16 off
TOLERANCE = {"f32": 1e-5, "bf16": 2e-2, "f16": 4e-3}
#: stands for the error of a tile that was not run
UNFIT = -1.0

#: shape of an input; or shape and element type; or shape, element type and order of its dimensions in memory
Input = Any
Build = Callable[..., Any]
CASES: dict[str, tuple[list[Input], Build]] = {}


def case(name: str, *inputs: Input) -> Callable[[Build], Build]:
    def add(build: Build) -> Build:
        CASES[name] = (list(inputs), build)
        return build

    return add


# ---- the cases -------------------------------------------------------------------------------------------------------

for spec, left, right in (
    ("mk,nk->mn", (70, 37), (52, 37)),
    ("mk,kn->mn", (70, 37), (37, 52)),
    ("km,kn->mn", (37, 70), (37, 52)),
    ("km,nk->nm", (37, 70), (52, 37)),
    ("bhmk,bhnk->bhmn", (2, 3, 33, 20), (2, 3, 18, 20)),
    ("abk,nk->nab", (5, 13, 21), (40, 21)),
):
    case(spec, left, right)(lambda b, x, y, spec=spec: b.contract(x, y, spec=spec))


@case("many rounds", (70, 330), (52, 330))
def _(b, x, y):
    return b.contract(x, y, spec="mk,nk->mn")


@case("columns in memory, padded rows", ((70, 40), None, (1, 0)), ((52, 40), None, "padded"))
def _(b, x, y):
    return b.contract(x, y, spec="mk,nk->mn")


@case("a factor that is the same in every batch", ((3, 40, 24), None, "repeated"), (3, 24, 36))
def _(b, x, y):
    return b.contract(x, y, spec="bmk,bkn->bmn")


@case("bias, activation and what went in", (5, 14, 40), (52, 40), (52,))
def _(b, x, w, bias):
    y = b.contract(x, w, bias, spec="abk,nk->abn")
    return [y, b.gelu(y, approximate="tanh")]


@case("columns that pieces divide and tiles do not", (70, 40), (96, 40), (96,))
def _(b, x, w, bias):
    return b.relu(b.contract(x, w, bias, spec="mk,nk->mn"))


@case("residual of another type, result of a third", (70, 40), (52, 40), (52,), ((70, 52), F32))
def _(b, x, w, bias, r):
    return b.add(b.cast(b.contract(x, w, bias, spec="mk,nk->mn"), dtype=F32), r)


@case("weight gradient with a long sum", (2, 411, 40), (2, 411, 36))
def _(b, dy, x):
    return b.cast(b.contract(dy, x, spec="abm,abn->mn"), dtype=F32)


@case("weight gradient and what its norm is made of", (2, 411, 40), (2, 411, 36))
def _(b, dy, x):
    g = b.contract(dy, x, spec="abm,abn->mn")
    wide = b.cast(g, dtype=F32)
    return [g, b.sqrt(b.sum(b.mul(wide, wide), dims=(0, 1)))]


@case("16-bit factors, sums in f32", ((2, 411, 40), BF16), ((2, 411, 36), BF16), ((36,), F32))
def _(b, dy, x, scale):
    return b.mul(b.contract(dy, x, spec="abm,abn->mn", wide=True), scale)


@case("long sum, batches, extremes", (2, 300, 40), (2, 300, 36), (2, 40, 36))
def _(b, x, y, r):
    z = b.cast(b.add(b.contract(x, y, spec="bkm,bkn->bmn"), r), dtype=F32)
    return [z, b.sum(z, dims=(0, 1, 2)), b.amax(b.abs(z), dims=(0, 1, 2))]


@case("long sum, batches", (2, 300, 40), (2, 300, 36), (36,))
def _(b, x, y, bias):
    return b.relu(b.add(b.contract(x, y, spec="bkm,bkn->bmn"), bias))


@case("derivative of the activation and column sums", (2, 70, 40), (40, 52), (2, 70, 52))
def _(b, dy, w, pre):
    d = b.gelu_grad(b.contract(dy, w, spec="abk,kn->abn"), pre, approximate="tanh")
    return [d, b.mul(b.sum(b.cast(d, dtype=F32), dims=(0, 1)), 0.5)]


@case("both halves of a gate's gradient, each a part of something, and their sums", (3, 70, 40), (40, 32), (3, 70, 64))
def _(b, dy, w, pre):
    d = b.contract(dy, w, spec="abk,kn->abn")
    one, other = (b.slice(pre, dim=2, start=n, end=n + 32) for n in (0, 32))
    t, g = b.tanh(one), b.sigmoid(other)
    halves = [b.tanh_grad(b.mul(d, g), t), b.sigmoid_grad(b.mul(d, t), g)]
    return [*halves, *(b.sum(half, dims=(0, 1)) for half in halves), b.mul(t, g)]


@case("scale, shift and activation on load, statistics on store", (150, 37), (52, 37), ((37,), F32), ((37,), F32))
def _(b, x, w, scale, shift):
    x = b.cast(b.relu(b.add(b.mul(b.cast(x, dtype=F32), scale), shift)), dtype=w.type.element)
    y = b.cast(b.contract(x, w, spec="mk,nk->mn"), dtype=F32)
    return [y, b.sum(y, dims=(0,)), b.sum(b.mul(y, y), dims=(0,))]


@case("a gate of each image on load, statistics on store", (3, 128, 37), (52, 37), (3, 1, 37))
def _(b, x, w, gate):
    y = b.cast(b.contract(b.mul(b.silu(x), gate), w, spec="imk,nk->imn"), dtype=F32)
    return [y, b.sum(y, dims=(0, 1))]


@case("both factors computed, sums of nothing stay nothing", (70, 37), (52, 37))
def _(b, x, w):
    return b.contract(b.exp(x), b.reciprocal(b.add(w, 9.0)), spec="mk,nk->mn")


@case(
    "residual sum on load and stored as well, statistics on store",
    *((150, 37), (150, 37), (52, 37), ((37,), F32), ((37,), F32)),
)
def _(b, x, r, w, scale, shift):
    normal = b.add(b.mul(b.cast(x, dtype=F32), scale), shift)
    z = b.relu(b.cast(b.add(normal, b.cast(r, dtype=F32)), dtype=w.type.element))
    y = b.cast(b.contract(z, w, spec="mk,nk->mn"), dtype=F32)
    return [z, y, b.sum(y, dims=(0,)), b.sum(b.mul(y, y), dims=(0,))]


@case("residual sum on load and stored, and where it is positive, as bits", (150, 64), (150, 64), (52, 64))
def _(b, x, r, w):
    z = b.relu(b.add(x, r))
    return [z, b.contract(z, w, spec="mk,nk->mn"), b.pack_bits(b.gt(z, 0.0), dim=1)]


@case("columns of a stored factor, as bits", (40, 70), (40, 96))
def _(b, x, y):
    return [b.contract(x, y, spec="km,kn->mn"), b.pack_bits(b.gt(y, 0.0), dim=1)]


@case("bits on store decide what stays, column sums", (70, 40), (40, 96), ((70, 12), UI8))
def _(b, dy, w, bits):
    d = b.select(b.unpack_bits(bits, dim=1), b.contract(dy, w, spec="mk,kn->mn"), 0.0)
    return [d, b.sum(b.cast(d, dtype=F32), dims=(0,))]


@case("residual sum on store, and where it is positive, as bits", (70, 40), (96, 40), (70, 96), ((96,), F32))
def _(b, x, w, r, shift):
    z = b.add(b.cast(b.contract(x, w, spec="mk,nk->mn"), dtype=F32), b.add(b.cast(r, dtype=F32), shift))
    return [b.cast(b.relu(z), dtype=x.type.element), b.pack_bits(b.gt(z, 0.0), dim=1)]


@case(
    "mask of what a norm gives and its sums, of two tensors read beside",
    *((2, 70, 40), (40, 96), (2, 70, 96), (2, 70, 96), ((96,), F32), ((96,), F32)),
)
def _(b, dy, w, x, r, scale, mean):
    x = b.cast(x, dtype=F32)
    g = b.add(b.cast(b.contract(dy, w, spec="abk,kn->abn"), dtype=F32), b.cast(r, dtype=F32))
    g = b.select(b.gt(b.mul(x, scale), 0.0), g, 0.0)
    wide = b.mul(g, b.sub(x, mean))
    sums = [b.sum(v, dims=(0, 1)) for v in (g, wide, b.mul(wide, wide))]
    return [b.cast(g, dtype=dy.type.element), *sums]


@case("bits on load decide what is multiplied", (70, 64), (52, 64), ((70, 8), UI8))
def _(b, x, w, bits):
    return b.contract(b.select(b.unpack_bits(bits, dim=1), x, 0.0), w, spec="mk,nk->mn")


@case("a computed factor beside another, and by itself", (300, 40), (300, 24), ((24,), F32))
def _(b, g, y, shift):
    x = b.relu(b.cast(b.add(b.cast(y, dtype=F32), shift), dtype=g.type.element))
    both = b.contract(b.concat([g, x], dim=1), x, spec="ka,kc->ac")
    return [both, b.mul(b.sum(b.cast(x, dtype=F32), dims=(0,)), 0.5)]


@case("sums of both factors beside a product and of its result", (300, 40), (300, 24))
def _(b, x, y):
    made = b.contract(x, b.exp(y), spec="ka,kc->ac")
    sums = [b.sum(b.cast(v, dtype=F32), dims=(0,)) for v in (x, b.exp(y))]
    return [made, *sums, b.sum(b.cast(made, dtype=F32), dims=(0, 1))]


@case("two tensors side by side on load, of which one is computed and asked once more", (70, 40), (70, 24), (64, 24))
def _(b, g, y, w):
    x = b.relu(y)
    d = b.select(b.le(x, 0.0), 0.0, b.contract(b.concat([g, x], dim=1), w, spec="ma,ac->mc"))
    return [d, b.sum(b.cast(b.mul(d, y), dtype=F32), dims=(0,))]


@case("two tensors side by side on load, each by itself", (150, 64), (150, 32), (96, 48), ((32,), F32), ((48,), F32))
def _(b, g, y, w, scale, shift):
    x = b.relu(b.mul(b.cast(y, dtype=F32), scale))
    made = b.contract(b.concat([g, b.cast(x, dtype=g.type.element)], dim=1), w, spec="ma,ac->mc")
    d = b.add(b.cast(made, dtype=F32), shift)
    return [d, b.sum(d, dims=(0,))]


@case("outputs that nothing of the product is in, as it lies and as a factor does", (70, 37), (52, 37), (70, 52))
def _(b, x, w, r):
    return [b.relu(r), b.add(b.contract(x, w, spec="mk,nk->mn"), r), b.neg(x)]


@case("both factors stored, batches", (2, 70, 37), (2, 52, 37))
def _(b, x, w):
    x, w = b.exp(x), b.relu(w)
    return [x, b.contract(x, w, spec="bmk,bnk->bmn"), w]


@case("something else is computed from factors and stored", (300, 40), (300, 36))
def _(b, x, y):
    return [b.exp(x), b.contract(x, y, spec="km,kn->mn"), b.neg(y)]


@case("sum of squares, row sums, column sums", (2, 70, 20), (2, 20, 36))
def _(b, x, y):
    z = b.cast(b.contract(x, y, spec="bmk,bkn->bmn"), dtype=F32)
    rows = b.sqrt(b.sum(b.mul(z, z), dims=(2,)))
    return [z, b.sum(b.mul(z, z), dims=(0, 1, 2)), rows, b.sum(z, dims=(1,)), b.amax(z, dims=(0, 1))]


@case("merged heads on load", (2, 3, 35, 16), (52, 48))
def _(b, x, w):
    return b.contract(b.reshape(b.transpose(x, order=(0, 2, 1, 3)), shape=(2, 35, 48)), w, spec="abk,nk->abn")


@case("split heads on store", (2, 35, 40), (48, 40), (48,))
def _(b, x, w, bias):
    y = b.reshape(b.contract(x, w, bias, spec="abk,nk->abn"), shape=(2, 35, 3, 16))
    return b.transpose(y, order=(0, 2, 1, 3))


@case("dropout on load", ((3,), I64), (70, 40), (52, 40))
def _(b, key, x, w):
    drawn = b.random(key, distribution="uniform", stream=3, type=TensorType((70, 40), F32))
    kept = b.cast(b.lt(drawn, 0.5), dtype=x.type.element)
    return b.contract(b.mul(x, b.mul(kept, 2.0)), w, spec="mk,nk->mn")


@case("dropout on store", ((3,), I64), (70, 40), (50, 40), (70, 50))
def _(b, key, x, w, r):
    drawn = b.random(key, distribution="uniform", stream=5, type=TensorType((70, 50), F32))
    kept = b.cast(b.lt(drawn, 0.9), dtype=x.type.element)
    return b.add(b.mul(b.contract(x, w, spec="mk,nk->mn"), kept), r)


@case("rows that are looked up", (30, 40), ((70,), I64), (52, 40))
def _(b, table, rows, w):
    return b.contract(b.embedding(table, rows), w, spec="mk,nk->mn")


NHWC = (0, 2, 3, 1)


@case("1x1 convolution channels-last", ((2, 20, 6, 7), None, NHWC), (36, 20, 1, 1), (36,))
def _(b, x, w, bias):
    return b.relu(b.conv(x, w, bias, stride=(1, 1), padding=(0, 0), dilation=(1, 1)))


@case(
    "1x1 convolution channels-last of a sum that is stored",
    *(((2, 20, 6, 7), None, NHWC), ((2, 20, 6, 7), None, NHWC), (36, 20)),
)
def _(b, x, r, w):
    z = b.relu(b.add(x, r))
    y = b.transpose(b.contract(b.transpose(z, order=NHWC), w, spec="nhwc,oc->nhwo"), order=(0, 3, 1, 2))
    return [b.sum(b.cast(y, dtype=F32), dims=(0, 2, 3)), z, y]


@case(
    "3x3 convolution, stride 2, shift on load", ((2, 16, 9, 11), None, NHWC), ((24, 16, 3, 3), None, NHWC), (16, 1, 1)
)
def _(b, x, w, shift):
    return b.conv(b.add(x, shift), w, stride=(2, 2), padding=(1, 1), dilation=(1, 1))


@case("weight gradient of a 3x3 convolution", (2, 16, 8, 9), (2, 24, 8, 9))
def _(b, x, dy):
    how = dict(stride=(1, 1), padding=(1, 1), dilation=(1, 1))
    return b.conv_weight_grad(x, dy, weight_shape=(24, 16, 3, 3), **how)


# ---- the child's side ------------------------------------------------------------------------------------------------


def types_of(inputs: Sequence[Input], element: ScalarType) -> list[TensorType]:
    found = []
    for given in inputs:
        shape, kind = (given[0], given[1]) if isinstance(given[0], tuple) else (given, None)
        found.append(TensorType(shape, kind or element))
    return found


def kernel(name: str, element: ScalarType) -> tuple[Op, list[TensorType]]:
    """The loops of a case, and the types of its results."""
    inputs, build = CASES[name]
    return loops(types_of(inputs, element), build)


def loops(types: Sequence[TensorType], build: Build) -> tuple[Op, list[TensorType]]:
    function = add_function(module(), "k", list(types))
    made = build(StepBuilder(function.regions[0].block), *function.regions[0].block.arguments)
    results = made if isinstance(made, list) else [made]
    finish_function(function, results)
    return lowered(function), [r.type for r in results]


def strides_of(shape: tuple[int, ...], layout: Any = None) -> tuple[int, ...]:
    """Strides of a tensor: row-major, by an order of its dimensions, with padded rows, or repeated along the first."""
    order = layout if isinstance(layout, tuple) else tuple(range(len(shape)))
    strides, at = [0] * len(shape), 1
    for place, dim in enumerate(reversed(order)):
        strides[dim] = at
        at *= shape[dim] + (3 if layout == "padded" and place == 0 else 0)
    return (0, *strides[1:]) if layout == "repeated" else tuple(strides)


def empty(dtype: torch.dtype) -> float | int:
    """What memory holds that nobody has written."""
    if dtype is torch.bool:
        return 1
    return float("nan") if dtype.is_floating_point else min(2**20, torch.iinfo(dtype).max)


def part_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a result that has others beside its columns and more rows behind those of each batch."""
    return ((shape[1] + 2) * 2 * shape[2], 2 * shape[2], 1) if len(shape) == 3 else strides_of(shape)


def guarded(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """A tensor of NaN amid NaN: what is read beside it shows in the result, what is written there shows as well."""
    size = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    memory = torch.full((size + 2 * GUARD,), empty(dtype), dtype=dtype, device=device)
    return memory.as_strided(shape, strides, GUARD)


def broken_guards(tensor: torch.Tensor) -> bool:
    """Whether memory around a tensor, or between its rows, has been written."""
    size = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.as_strided((size + 2 * GUARD,), (1,), 0)
    beside = torch.ones(memory.shape, dtype=torch.bool, device=tensor.device)
    beside.as_strided(tensor.shape, tensor.stride(), GUARD).fill_(False)
    rest = memory[beside]
    return not bool((rest.isnan() if rest.is_floating_point() else rest == empty(rest.dtype)).all())


def run_case(
    name: str, element: str, every: bool = False, folds: bool = False, tiles: Sequence[dict[str, int]] = ()
) -> dict[str, float]:
    """Per candidate: the largest difference as a share of the largest value, over what is allowed."""
    from wholestep.backends.triton import contraction_text

    if folds:
        contraction_text.MOST_PARTIALS, contraction_text.FOLDED = 0, 2
    return run_built(*CASES[name], element, every, tiles, laid=part_strides if "a part of" in name else strides_of)


def run_built(
    given: Sequence[Input],
    build: Build,
    element: str,
    every: bool = False,
    tiles: Sequence[dict[str, int]] = (),
    formula: Build | None = None,
    laid: Callable[[tuple[int, ...]], tuple[int, ...]] = strides_of,
) -> dict[str, float]:
    """formula: what is computed, in torch; else the loop dialect's reference says it. laid: how results lie."""
    from wholestep.backends.triton import contraction, generate

    device = "cuda" if torch.cuda.is_available() else "cpu"
    own = ScalarType(element)
    function, results = loops(types_of(given, own), build)
    torch.manual_seed(0)
    inputs = []
    for each, type in zip(given, types_of(given, own), strict=True):
        layout = each[2] if isinstance(each[0], tuple) and len(each) > 2 else None
        tensor = guarded(type.shape, strides_of(type.shape, layout), torch_dtype(type.element), device)
        whole = type.element.kind != "float"
        drawn = (
            torch.randint(0, 25 if type.element is not UI8 else 256, type.shape) if whole else torch.randn(type.shape)
        )
        first = slice(0, 1) if layout == "repeated" else slice(None)
        tensor[first].copy_(drawn[first])
        inputs.append(tensor)
    outputs = [guarded(t.shape, laid(t.shape), torch_dtype(t.element), device) for t in results]
    wanted = [torch.zeros(t.shape, dtype=t.dtype if t.dtype is torch.uint8 else torch.float64) for t in outputs]
    if formula is None:
        run(function, [t.cpu() for t in inputs], wanted)
    else:
        wanted = formula(*(t.cpu().double() for t in inputs))
    specs = [Spec(tuple(t.shape), tuple(t.stride()), t.dtype) for t in (*inputs, *outputs)]
    assert contraction.why_not(function, specs) == ""
    made = contraction.candidates(function, specs)
    if tiles:
        product = contraction.Contraction(function, specs)
        made = [generate.candidate(product, contraction.Tile(**t)) for t in tiles]
    return errors_of(made if every else made[:1], inputs, outputs, wanted, element, bool(tiles))


def errors_of(
    candidates: Iterable[Any],
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor],
    element: str,
    unfit: bool = False,
) -> dict[str, float]:
    """Runs each candidate. unfit: a tile that a GPU has no room for is `UNFIT`, which the interpreter never says."""
    from wholestep.backends.triton import generate
    from wholestep.backends.triton.launch import Unfit

    found = {}
    for candidate in candidates:
        call = generate.build([candidate])[candidate.key]
        if unfit and isinstance(call, Unfit):
            found[candidate.name] = UNFIT
            continue
        if isinstance(call, Exception):
            raise call
        scratch = [guarded(s.shape, s.strides, s.dtype, outputs[0].device) for s in candidate.scratch]
        for tensor in outputs:
            tensor.fill_(empty(tensor.dtype))
        call(*inputs, *outputs, *scratch)
        error = max(
            ((o.double().cpu() - w.double()).abs().max() / w.double().abs().max()).nan_to_num(float("inf")).item()
            for o, w in zip(outputs, wanted, strict=True)
        )
        broken = any(broken_guards(t) for t in (*inputs, *outputs, *scratch))
        found[candidate.name] = float("inf") if broken else error / TOLERANCE[element]
    return found


# ---- the tests' side -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def child() -> Iterator[Ask]:
    pytest.importorskip("triton")
    with asking("tests.backends.triton.test_contraction") as ask:
        yield ask


def assert_right(errors: dict[str, float], least: int = 1) -> None:
    assert len(errors) >= least
    assert all(error <= 1 for error in errors.values()), errors


@pytest.mark.parametrize("name", CASES)
def test_exact_products(child: Ask, name: str) -> None:
    assert_right(child(name, "f32"))


@pytest.mark.parametrize("name", [n for n in CASES if "->" not in n])
def test_products_of_bf16(child: Ask, name: str) -> None:
    assert_right(child(name, "bf16"))


def test_products_of_f16(child: Ask) -> None:
    assert_right(child("bias, activation and what went in", "f16"))


def test_every_configuration(child: Ask) -> None:
    assert_right(child("derivative of the activation and column sums", "bf16", every=True), least=4)


@pytest.mark.parametrize(
    "name",
    [
        "weight gradient with a long sum",
        "weight gradient and what its norm is made of",
        "long sum, batches, extremes",
        "long sum, batches",
        "something else is computed from factors and stored",
        "a computed factor beside another, and by itself",
        "sums of both factors beside a product and of its result",
    ],
)
def test_split_sums(child: Ask, name: str) -> None:
    """Evenly and not, with and without a rest of the last tile."""
    tiles = [dict(m=64, n=32, k=k, warps=4, stages=2, split=s) for k, s in ((64, 2), (32, 5), (16, 20))]
    assert_right(child(name, "f32", tiles=tiles, every=True), least=3)


@pytest.mark.parametrize(
    "name",
    [
        "bias, activation and what went in",
        "sum of squares, row sums, column sums",
        "dropout on store",
        "columns that pieces divide and tiles do not",
    ],
)
def test_pieces(child: Ask, name: str) -> None:
    tiles = [dict(m=64, n=64, k=32, warps=4, stages=2, pieces=p) for p in (2, 4)]
    assert_right(child(name, "f32", tiles=tiles, every=True), least=2)


@pytest.mark.parametrize(
    "name",
    [
        "derivative of the activation and column sums",
        "residual of another type, result of a third",
        "sum of squares, row sums, column sums",
        "bits on store decide what stays, column sums",
        "residual sum on store, and where it is positive, as bits",
        "mask of what a norm gives and its sums, of two tensors read beside",
        "scale, shift and activation on load, statistics on store",
    ],
)
def test_pieces_in_the_order_of_memory_and_of_tensor_cores(child: Ask, name: str) -> None:
    """Whole columns and a part of them, rows that several sixteens of a warp have; bits fill no byte of two tiles."""
    sizes = [(m, n, 2) for m, n in ((64, 64), (128, 64), (64, 128))] + [(64, 128, 4)]
    tiles = [dict(m=m, n=n, k=32, warps=4, stages=2, pieces=p, at_once=a) for m, n, p in sizes for a in (False, True)]
    assert_right(child(name, "bf16", tiles=tiles, every=True), least=8)


def product_of(name: str) -> Any:
    """The product of a case, of bf16."""
    pytest.importorskip("triton")
    from wholestep.backends.triton.contraction import Contraction

    function, results = kernel(name, BF16)
    types = [*types_of(CASES[name][0], BF16), *results]
    return Contraction(function, [Spec(t.shape, strides_of(t.shape), torch_dtype(t.element)) for t in types])


def test_two_sums_of_columns_are_exchanged_at_once() -> None:
    """Three in two rounds, and what is read goes through shared memory once with what was multiplied."""
    from wholestep.backends.triton.contraction import Tile

    product = product_of("mask of what a norm gives and its sums, of two tensors read beside")
    for tile, rounds in ((Tile(64, 64, 32, 4, 2, pieces=2), 4), (Tile(64, 64, 32, 4, 2, pieces=2, at_once=True), 2)):
        source = product.generate(tile).source.partition("finish")[0]
        assert source.count("0, keep_dims=True)") == rounds, source
        assert source.count("held0 = (") == (1 if tile.at_once else 2)
    bits = product_of("bits on store decide what stays, column sums")
    assert "held0" not in bits.generate(Tile(64, 64, 32, 4, 2, pieces=2)).source


def test_long_vectors_are_read_for_every_tile_of_rows() -> None:
    """Those with an element for each thread, unless warps share rows; short ones are kept, unless they are many."""
    from wholestep.backends.triton.contraction import Tile

    product = product_of("scale, shift and activation on load, statistics on store")

    def kept(m: int, k: int, warps: int) -> int:
        source = product.generate(Tile(m, 64, k, warps, 2, programs=2)).source
        return source.partition("for row in")[0].count("= tl.load(p2") + source.partition("for row in")[0].count(
            "= tl.load(p3"
        )

    assert [kept(64, 64, 4), kept(64, 128, 4), kept(64, 128, 8), kept(64, 256, 8), kept(128, 256, 8)] == [2, 0, 2, 2, 0]


@pytest.mark.parametrize(
    "name",
    [
        "scale, shift and activation on load, statistics on store",
        "derivative of the activation and column sums",
        "both halves of a gate's gradient, each a part of something, and their sums",
        "residual sum on load and stored as well, statistics on store",
        "a gate of each image on load, statistics on store",
        "two tensors side by side on load, each by itself",
    ],
)
def test_programs_that_stay_for_many_tiles(child: Ask, name: str) -> None:
    """Whole columns and parts of them, more programs than tiles and fewer, rows that several warps or one have; all
    that is summed at once, and in rounds of which the last is not whole."""
    sizes = [(64, 64, 64, 4, 2), (64, 32, 64, 8, 4), (128, 64, 64, 4, 1), (64, 64, 64, 4, 5), (64, 64, 16, 4, 2)]
    sizes.append((64, 64, 128, 4, 2))
    tiles = [dict(m=m, n=n, k=k, warps=w, stages=2, programs=p) for m, n, k, w, p in sizes]
    for element in ("f32", "bf16"):
        assert_right(child(name, element, tiles=tiles, every=True), least=4)


def test_of_tensors_side_by_side_each_round_reads_one() -> None:
    """Where rounds end with them; otherwise all are read under conditions."""
    pytest.importorskip("triton")
    from wholestep.backends.triton.contraction import Contraction, Tile

    name = "two tensors side by side on load, each by itself"
    function, results = kernel(name, ScalarType("bf16"))
    types = types_of(CASES[name][0], ScalarType("bf16"))
    specs = [Spec(t.shape, strides_of(t.shape), torch_dtype(t.element)) for t in (*types, *results)]
    product = Contraction(function, specs)
    assert product.joints == [64]
    for tile, loops in ((Tile(64, 64, 32, 4, 2), 2), (Tile(64, 64, 64, 4, 2), 2), (Tile(64, 64, 128, 4, 2), 1)):
        source = product.generate(tile).source.partition("finish")[0]
        assert source.count("for k in") == loops and ("tl.where(a_v" in source) == (loops == 1), source
    stay = product.generate(Tile(64, 64, 32, 4, 2, programs=2)).source.partition("finish")[0]
    assert stay.count("tl.load(p0") == 2 and stay.count("tl.load(p1") == 1 and "g1" not in stay


def test_what_lies_along_images_is_loaded_once_for_rows_of_one() -> None:
    """In rounds, where tiles end with images: 128 rows have two tiles of 64, and none of 256."""
    pytest.importorskip("triton")
    from wholestep.backends.triton.contraction import Contraction, Tile

    function, results = kernel("a gate of each image on load, statistics on store", ScalarType("bf16"))
    types = [TensorType(s, ScalarType("bf16")) for s in ((3, 128, 37), (52, 37), (3, 1, 37))]
    specs = [Spec(t.shape, strides_of(t.shape), torch_dtype(t.element)) for t in (*types, *results)]
    product = Contraction(function, specs)

    def images(m: int, k: int) -> list[str]:
        source = product.generate(Tile(m, 64, k, 4, 2, programs=2)).source
        return sorted({line.split(" = ")[1] for line in source.splitlines() if line.strip().startswith("a_i0 = ")})

    assert images(64, 16) == ["row * 64 // 128"]
    assert images(64, 64) == ["m // 128"] and images(256, 16) == ["m // 128"]


def test_many_partial_sums_are_folded(child: Ask) -> None:
    """After it, in the same child, everything is folded: it comes last."""
    assert_right(child("sum of squares, row sums, column sums", "f32", folds=True))
    assert_right(child("scale, shift and activation on load, statistics on store", "bf16", folds=True))


def test_the_judge_sees_what_is_written_beside_a_tensor() -> None:
    spilled = guarded((4, 5), (8, 1), torch.float32, "cpu")
    assert not broken_guards(spilled)
    for place in (GUARD - 1, GUARD + 5):
        beside = spilled.as_strided((1,), (1,), place)
        beside.fill_(1.0)
        assert broken_guards(spilled)
        beside.fill_(float("nan"))


# ---- what is refused, and what is chosen -----------------------------------------------------------------------------


def refusal(types: Sequence[TensorType], build: Build) -> str:
    pytest.importorskip("triton")
    from wholestep.backends.triton import contraction

    function, results = loops(types, build)
    specs = [Spec(t.shape, strides_of(t.shape), torch_dtype(t.element)) for t in (*types, *results)]
    return contraction.why_not(function, specs)


def centred(b: StepBuilder, y: Any) -> Any:
    return b.sub(y, b.sum(y, dims=(1,), keepdim=True))


X, W = TensorType((40, 24), F32), TensorType((32, 24), F32)


@pytest.mark.parametrize(
    ("types", "build", "reason"),
    [
        ([X, W], lambda b, x, w: b.contract(x, w, spec="mk,nk->mn"), ""),
        ([X], lambda b, x: b.sum(b.mul(x, x), dims=(1,)), "no matrix product"),
        ([X], lambda b, x: b.softmax(x, dim=1), "no matrix product"),
        ([X, TensorType((24,), F32)], lambda b, x, w: b.contract(x, w, spec="mk,k->m"), "no matrix product"),
        ([X, TensorType((9, 24), F32)], lambda b, x, w: b.contract(x, w, spec="mk,nk->mn"), "side below 16"),
        ([X.with_element(F64), W.with_element(F64)], lambda b, x, w: b.contract(x, w, spec="mk,nk->mn"), "f64"),
        ([X, W], lambda b, x, w: b.softmax(b.contract(x, w, spec="mk,nk->mn"), dim=1), "made of a sum of the product"),
        ([X, W], lambda b, x, w: centred(b, b.contract(x, w, spec="mk,nk->mn")), "used for elements of it"),
        ([X, W], lambda b, x, w: b.contract(b.softmax(x, dim=1), w, spec="mk,nk->mn"), "sum of its own"),
        ([X, W], lambda b, x, w: b.add(b.contract(x, w, spec="mk,nk->mn"), b.contract(b.exp(x), w, spec="mk,nk->mn")),
         "several"),
        ([X, W], lambda b, x, w: [b.contract(x, w, spec="mk,nk->mn"), b.sum(x, dims=(0,))], "beside the product"),
        ([X, W], lambda b, x, w: [b.contract(x, w, spec="mk,nk->mn"), b.exp(x)], ""),
        ([X, W, TensorType((40, 1), F32)],
         lambda b, x, w, v: [b.contract(b.mul(x, b.exp(v)), w, spec="mk,nk->mn"), b.exp(v)], "rows and columns"),
        ([X, W, TensorType((24,), F32)],
         lambda b, x, w, v: [b.contract(b.mul(x, b.exp(v)), w, spec="mk,nk->mn"), b.exp(v)], "part of a factor"),
        ([TensorType((3, 40, 24), F32), TensorType((3, 24, 32), F32), TensorType((24, 32), F32)],
         lambda b, x, y, v: [b.contract(x, b.mul(y, b.exp(v)), spec="bmk,bkn->bmn"), b.exp(v)],
         "part of a factor"),
        ([TensorType((4, 10, 24), F32), W], lambda b, x, w: b.sum(b.contract(x, w, spec="abk,nk->abn"), dims=(1,)),
         "part of the rows"),
    ],
)  # fmt: skip
def test_why_not(types: Sequence[TensorType], build: Build, reason: str) -> None:
    found = refusal(types, build)
    assert (reason in found and found) if reason else found == ""


def big(m: int, n: int, k: int, spec: str = "mk,nk->mn", after: Build | None = None) -> list[Any]:
    pytest.importorskip("triton")
    from wholestep.backends.triton import contraction

    half = ir_dtype(torch.bfloat16)
    sizes = {"m": m, "n": n, "k": k}
    types = [TensorType(tuple(sizes[c] for c in part), half) for part in spec.split("->")[0].split(",")]

    def build(b: StepBuilder, x: Any, y: Any) -> Any:
        z = b.contract(x, y, spec=spec)
        return z if after is None else after(b, z)

    function, results = loops(types, build)
    specs = [Spec(t.shape, strides_of(t.shape), torch_dtype(t.element)) for t in (*types, *results)]
    return contraction.candidates(function, specs)


def test_long_sums_are_split_where_tiles_are_few() -> None:
    made = big(768, 768, 8192, "km,kn->mn")
    assert all(c.functions[0].grid >= 100 for c in made)
    assert made[0].scratch and len({c.name for c in made}) == len(made) == len({c.key for c in made})
    assert not big(8192, 3072, 768)[0].scratch


def test_programs_stay_where_memory_is_waited_for() -> None:
    statistics = lambda b, z: [z, b.sum(b.cast(z, dtype=F32), dims=(0,))]  # noqa: E731
    made = big(200_000, 256, 64, after=statistics)
    assert all(" by" in c.name for c in made[:2])
    assert all(c.functions[0].grid <= 4 * 132 for c in made[:2])
    assert not any(" by" in c.name for c in [*big(8192, 3072, 768), *big(8192, 256, 64), *big(64, 256, 200_000)])


def stored_sum(m: int, n: int, k: int) -> tuple[Op, list[Spec]]:
    """A product of a sum that is stored as well."""
    half = ir_dtype(torch.bfloat16)
    types = [TensorType(shape, half) for shape in ((m, k), (m, k), (n, k))]

    def build(b: StepBuilder, x: Any, r: Any, w: Any) -> Any:
        z = b.add(x, r)
        return [z, b.contract(z, w, spec="mk,nk->mn")]

    function, results = loops(types, build)
    return function, [Spec(t.shape, strides_of(t.shape), torch_dtype(t.element)) for t in (*types, *results)]


def test_a_factor_is_stored_once() -> None:
    """By the programs of one column, none of whose operands it may lie over: those of other columns read them still."""
    pytest.importorskip("triton")
    from wholestep.backends.generated import overwritable
    from wholestep.backends.triton.contraction import Contraction, Tile, candidates

    function, specs = stored_sum(4096, 128, 128)
    product = Contraction(function, specs)
    for programs in (0, 8):
        for n, where in ((128, ""), (64, ", mask=(column == 0)")):
            made = product.generate(Tile(64, n, 128, 4, 2, programs=programs)).source
            (line,) = (line for line in made.splitlines() if "tl.store(p3 " in line)
            assert line.endswith(f"{where})") and ("mask" in line) == bool(where)
    assert overwritable(function, specs[:3], specs[3:]) == [frozenset(), frozenset()]
    first, *_ = candidates(*stored_sum(50176, 256, 1024))
    assert "x256x" in first.name  # the tiles of one column read it all once


def test_candidates_are_the_same_every_time() -> None:
    assert [(c.name, c.key) for c in big(512, 256, 300)] == [(c.name, c.key) for c in big(512, 256, 300)]


def test_compiles_for_hopper() -> None:
    """The best guess for a large layer: it fits, nothing spills, and tensor cores multiply. Rows that are looked up. A
    sum that is stored as well."""
    triton = pytest.importorskip("triton")
    if not Path(triton.knobs.nvidia.ptxas.path).exists():
        pytest.skip("Triton has no ptxas here")
    from wholestep.backends.triton import contraction
    from wholestep.backends.triton.generate import compile_for

    def after(b: StepBuilder, z: Any) -> Any:
        return [z, b.sum(b.cast(z, dtype=F32), dims=(0,))]

    name, low = "rows that are looked up", ScalarType("bf16")
    lookup, results = kernel(name, low)
    types = [*types_of(CASES[name][0], low), *results]
    specs = [Spec(tuple(t.shape), strides_of(t.shape), torch_dtype(t.element)) for t in types]
    stored = contraction.candidates(*stored_sum(65536, 64, 256))[0]
    made = [big(8192, 256, 768, after=after)[0], contraction.candidates(lookup, specs)[0], stored]
    for info in compile_for(made, 90).values():
        assert not isinstance(info, Exception), info
        assert info.spills == 0 and info.shared <= 227 * 1024


if __name__ == "__main__":
    serve(run_case)
