"""Products for Hopper GPUs: what is seen as one, what is generated around it, and on such a GPU the kernels."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backends.wgmma import host
from wholestep.backends.kernels import Spec
from wholestep.backends.providers import Region, op_by_op, providers_for
from wholestep.backends.store import Objects
from wholestep.backends.triton.scalars import NoText
from wholestep.backends.wgmma import library, ways
from wholestep.backends.wgmma.products import SHARED, product_of
from wholestep.dialects.step import StepBuilder
from wholestep.dialects.step.base import torch_dtype
from wholestep.dialects.step.bits import UI8, unpacked
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.types import BF16, F16, F32, ScalarType, TensorType

Build = Callable[..., Any]
CASES: dict[str, tuple[list[Any], Build]] = {}
#: share of the largest value by which a result may differ
TOLERANCE = {"bf16": 1e-2, "f16": 2e-3}
M, N, K = 200, 136, 72


def case_in(cases: dict[str, tuple[list[Any], Build]]) -> Callable[..., Callable[[Build], Build]]:
    """A decorator that adds what a function builds to some cases, by a name and with the types of its inputs."""

    def case(name: str, *inputs: Any) -> Callable[[Build], Build]:
        def add(build: Build) -> Build:
            cases[name] = (list(inputs), build)
            return build

        return add

    return case


case = case_in(CASES)


for spec, left, right in (
    ("mk,nk->mn", (M, K), (N, K)),
    ("mk,kn->mn", (M, K), (K, N)),
    ("km,kn->mn", (K, M), (K, N)),
    ("km,nk->mn", (K, M), (N, K)),
    ("abk,nk->abn", (4, 50, K), (N, K)),
):
    case(spec, left, right)(lambda b, x, y, spec=spec: b.contract(x, y, spec=spec))


@case("whole tiles", (256, 128), (256, 128), (256,))
def _(b, x, w, bias):
    return b.contract(x, w, bias, spec="mk,nk->mn")


for kind in ("tanh", "none"):

    @case(f"bias and gelu ({kind}), both kept", (2, 100, K), (N, K), (N,))
    def _(b, x, w, bias, kind=kind):
        y = b.contract(x, w, bias, spec="abk,nk->abn")
        return [y, b.gelu(y, approximate=kind)]

    @case(f"gelu' ({kind}) and sums of columns", (2, 100, K), (K, N), (2, 100, N))
    def _(b, dy, w, pre, kind=kind):
        d = b.gelu_grad(b.contract(dy, w, spec="abk,kn->abn"), pre, approximate=kind)
        return [d, b.mul(b.sum(b.cast(d, dtype=F32), dims=(0, 1)), 0.5)]

    @case(f"gelu' ({kind}), gelu again and sums of columns", (M, K), (K, N), (M, N))
    def _(b, dy, w, pre, kind=kind):
        d = b.gelu_grad(b.contract(dy, w, spec="mk,kn->mn"), pre, approximate=kind)
        bias = b.cast(b.sum(b.cast(d, dtype=F32), dims=(0,)), dtype=pre.type.element)
        return [d, b.gelu(pre, approximate=kind), bias]


@case("gradients of a gated layer", (M, K), (K, N), (M, N), (M, N))
def _(b, dy, w, gate, up):
    d = b.contract(dy, w, spec="mk,kn->mn")
    s = b.silu(gate)
    return [b.silu_grad(b.mul(d, up), gate), b.mul(d, s), b.mul(s, up)]


@case("a gated layer, columns apart", (M, K), (2 * N, K))
def _(b, x, w):
    y = b.contract(x, w, spec="mk,nk->mn")
    gate, up = (b.slice(y, dim=1, start=i * N, end=(i + 1) * N) for i in (0, 1))
    return b.mul(b.silu(gate), up)


@case("a gated layer, columns apart, its product kept", (M, K), (2 * N, K))
def _(b, x, w):
    y = b.contract(x, w, spec="mk,nk->mn")
    gate, up = (b.slice(y, dim=1, start=i * N, end=(i + 1) * N) for i in (0, 1))
    return [y, b.mul(b.silu(gate), up)]


@case("a weight gradient and that of a bias, the first factor's", (2, 150, M), (2, 150, N))
def _(b, dy, x):
    bias = b.mul(b.sum(b.cast(dy, dtype=F32), dims=(0, 1)), 2.0)
    return [b.contract(dy, x, spec="abm,abn->mn"), b.cast(bias, dtype=dy.type.element)]


@case("a weight gradient and that of a bias, the second factor's", (2, 150, M), (2, 150, N))
def _(b, x, dy):
    return [b.contract(x, dy, spec="abm,abn->mn"), b.sum(b.cast(dy, dtype=F32), dims=(0, 1))]


@case("numbers, vectors and conditions", (M, K), (N, K), ((N,), F32), ((), F32), (M, N))
def _(b, x, w, scale, number, r):
    y = b.mul(b.mul(b.cast(b.contract(x, w, spec="mk,nk->mn"), dtype=F32), scale), number)
    kept = b.select(b.lt(y, 0.25), b.cast(r, dtype=F32), b.maximum(b.exp(b.neg(b.abs(y))), b.tanh(y)))
    return b.cast(kept, dtype=x.type.element)


@case("exponentials of rows but at one place, and their sums", (M, K), (N, K), ((M,), F32), ((M,), F32), ((M,), F32))
def _(b, x, w, low, place, more):
    y = b.cast(b.contract(x, w, spec="mk,nk->mn"), dtype=F32)
    numbers = b.iota(start=0, stride=1, type=TensorType((w.type.shape[0],), F32))
    numbers = b.reshape(numbers, shape=(1, w.type.shape[0]))
    kept = b.bit_and(b.ne(numbers, b.unsqueeze(b.floor(b.abs(place)), 1)), b.lt(numbers, 133.0))
    e = b.exp(b.minimum(b.sub(b.mul(y, 0.1), b.unsqueeze(low, 1)), 3.0))
    e = b.cast(b.select(kept, e, 0.0), dtype=x.type.element)
    return [e, b.log(b.add(b.sum(b.cast(e, dtype=F32), dims=(1,)), b.abs(more)))]


@case(
    "rows by numbers of their own, beside a tensor, and sums both ways",
    (2, 100, K),
    (K, N),
    ((2, 100), F32),
    (2, 100, N),
)
def _(b, x, w, scale, r):
    y = b.mul(b.cast(b.contract(x, w, spec="abk,kn->abn"), dtype=F32), b.reshape(scale, shape=(*scale.type.shape, 1)))
    y = b.cast(b.add(y, b.cast(r, dtype=F32)), dtype=x.type.element)
    wide = b.cast(y, dtype=F32)
    return [y, b.sum(wide, dims=(0, 1)), b.cast(b.sum(b.mul(b.mul(wide, wide), 0.01), dims=(2,)), dtype=x.type.element)]


for head in (64, 128):

    @case(
        f"halves of heads of {head} turned by positions", (2, 128, K), (256, K), ((128, head), F32), ((128, head), F32)
    )
    def _(b, x, w, cos, sin):
        (rows, length, _), wide = x.type.shape, cos.type.shape[1]
        y = b.reshape(b.contract(x, w, spec="abk,nk->abn"), shape=(rows, length, w.type.shape[0] // wide, wide))
        low, high = (b.slice(y, dim=3, start=i, end=i + wide // 2) for i in (0, wide // 2))
        turned = b.cast(b.concat([b.neg(high), low], dim=3), dtype=F32)
        cos, sin = (b.reshape(t, shape=(length, 1, wide)) for t in (cos, sin))
        return b.cast(b.add(b.mul(b.cast(y, dtype=F32), cos), b.mul(turned, sin)), dtype=x.type.element)


@case("a table for the rows of each image", (2, 128, K), (256, K), (128, 256))
def _(b, x, w, table):
    y = b.contract(x, w, spec="abk,nk->abn")
    return b.cast(b.add(b.cast(y, dtype=F32), b.cast(table, dtype=F32)), dtype=x.type.element)


@case(
    "bits decide what stays, others are kept, sums of columns",
    (M, K),
    (K, 160),
    ((M, 20), UI8),
    (M, 160),
    ((160,), F32),
)
def _(b, dy, w, bits, beside, scale):
    d = b.add(b.contract(dy, w, spec="mk,kn->mn"), beside)
    d = b.select(b.unpack_bits(bits, dim=1), d, 0.0)
    wide = b.mul(b.cast(d, dtype=F32), scale)
    return [d, b.pack_bits(b.gt(wide, 0.25), dim=1), b.sum(wide, dims=(0,))]


@case("bits of whole tiles", (256, 64), (256, 64), ((256, 32), UI8))
def _(b, x, w, bits):
    y = b.contract(x, w, spec="mk,nk->mn")
    return [b.select(b.unpack_bits(bits, dim=1), 0.0, y), b.pack_bits(b.le(y, 0.0), dim=1)]


@case(
    "a gradient beside what a norm read, mask and sums of columns",
    (2, 100, 128), (2, 100, 64), (2, 100, 32), (N, 224), (2, 100, N), ((N,), F32),
)  # fmt: skip
@case(
    "a gradient beside what a norm read, in whole tiles",
    (2, 128, 64), (2, 128, 128), (2, 128, 64), (256, 256), (2, 128, 256), ((256,), F32),
)  # fmt: skip
def _(b, dy, x, more, w, beside, away):
    y = b.contract(b.concat([dy, x, more], dim=2), w, spec="abk,nk->abn")
    y = b.cast(b.add(b.cast(y, dtype=F32), away), dtype=dy.type.element)
    y = b.select(b.le(beside, 0.0), 0.0, y)
    wide = b.cast(y, dtype=F32)
    return [y, b.sum(wide, dims=(0, 1)), b.sum(b.mul(wide, b.cast(beside, dtype=F32)), dims=(0, 1))]


@case("tensors one below another, along the result", (64, M), (96, M), (160, N))
def _(b, x, more, y):
    return b.contract(b.concat([x, more], dim=0), y, spec="km,kn->mn")


@case("tensors side by side, summed up for a bias", (128, M), (32, M), (160, N))
def _(b, x, more, y):
    both = b.concat([x, more], dim=0)
    return [b.contract(both, y, spec="km,kn->mn"), b.sum(b.cast(both, dtype=F32), dims=(0,))]


def types_of(inputs: Sequence[Any], element: ScalarType) -> list[TensorType]:
    pairs = [(i[0], i[1]) if i[1:] in ((F32,), (UI8,)) else (i, element) for i in inputs]
    return [TensorType(shape, kind) for shape, kind in pairs]


def region_of(types: Sequence[TensorType], build: Build, device: str = "cpu") -> Region:
    function = add_function(module(), "k", list(types))
    made = build(StepBuilder(function.regions[0].block), *function.regions[0].block.arguments)
    results = made if isinstance(made, list) else [made]
    finish_function(function, results)
    specs = [spec_of(t) for t in types]
    return Region(function, None, tuple(specs), tuple(spec_of(r.type) for r in results), torch.device(device))


def spec_of(type: TensorType) -> Spec:
    strides, at = [], 1
    for n in reversed(type.shape):
        strides.insert(0, at)
        at *= n
    return Spec(type.shape, tuple(strides), torch_dtype(type.element))


def tensors_of(region: Region, device: str = "cpu") -> list[torch.Tensor]:
    torch.manual_seed(0)
    given = [torch.randint(0, 256, s.shape).to(device, s.dtype) if s.dtype == torch.uint8 else
             torch.randn(s.shape).to(device, s.dtype) for s in region.operands]  # fmt: skip
    return given + [torch.full(s.shape, float("nan"), device=device).to(s.dtype) for s in region.results]


def assert_right(region: Region, tensors: Sequence[torch.Tensor], element: str) -> None:
    """Against the ops by ATen, in f64 but for casts that the region has."""
    inputs, made = tensors[: len(region.operands)], tensors[len(region.operands) :]
    device = torch.device("cpu")
    exact = [t.cpu() if t.dtype == torch.uint8 else t.cpu().double() for t in inputs]
    wanted = op_by_op(replace(region, device=device))(*exact)
    for got, want in zip(made, wanted, strict=True):
        if want.dtype == torch.uint8:  # rounding decides a few
            assert (unpacked(got.cpu(), 1) != unpacked(want, 1)).float().mean() < 0.01
            continue
        error = ((got.cpu().double() - want.double()).abs().max() / want.double().abs().max()).item()
        assert error <= TOLERANCE[element], error


@pytest.mark.parametrize("name", CASES)
def test_what_is_generated_is_right(name: str, tmp_path: Path) -> None:
    region = region_of(types_of(CASES[name][0], BF16), CASES[name][1])
    tensors = tensors_of(region)
    host.run(product_of(region), tensors, tmp_path)
    assert_right(region, tensors, "bf16")


def test_in_f16(tmp_path: Path) -> None:
    region = region_of(
        types_of(CASES["bias and gelu (none), both kept"][0], F16), CASES["bias and gelu (none), both kept"][1]
    )
    tensors = tensors_of(region)
    host.run(product_of(region), tensors, tmp_path)
    assert_right(region, tensors, "f16")


REFUSED = {
    "no 16-bit numbers": ([((M, K), F32), ((N, K), F32)], lambda b, x, w: b.contract(x, w, spec="mk,nk->mn")),
    "do not begin at multiples of 16 bytes": ([(M, 70), (N, 70)], lambda b, x, w: b.contract(x, w, spec="mk,nk->mn")),
    "computed on the way": ([(M, K), (N, K)], lambda b, x, w: b.contract(b.exp(x), w, spec="mk,nk->mn")),
    "no stretches of whole": ([(2, 99, K), (256, K)], lambda b, x, w: turned(b, b.contract(x, w, spec="abk,nk->abn"))),
    "no matrices": ([(2, M, K), (2, N, K)], lambda b, x, w: b.contract(x, w, spec="bmk,bnk->bmn")),
    "other sums": ([(M, K), (N, K)], lambda b, x, w: all_summed(b, b.contract(x, w, spec="mk,nk->mn"))),
    "counts along something else": ([(M, K), (N, K)], lambda b, x, w: numbered(b, b.contract(x, w, spec="mk,nk->mn"))),
    "holds no 16-bit": ([(M, K), (N, K)], lambda b, x, w: b.cast(b.contract(x, w, spec="mk,nk->mn"), dtype=F32)),
    "meet within what": (
        [(M, 96), (M, 64), (N, 160)],
        lambda b, x, y, w: b.contract(b.concat([x, y], dim=1), w, spec="mk,nk->mn"),
    ),
    "factor is computed": (
        [(M, 64), (M, 64), (N, 128)],
        lambda b, x, y, w: b.contract(b.concat([x, b.exp(y)], dim=1), w, spec="mk,nk->mn"),
    ),
    "is no product": ([(M, K)], lambda b, x: b.exp(x)),
}  # fmt: skip


def all_summed(b: StepBuilder, y: Any) -> list[Any]:
    return [y, b.sum(b.cast(y, dtype=F32), dims=(0, 1))]


def turned(b: StepBuilder, y: Any) -> Any:
    wide = b.reshape(y, shape=(*y.type.shape[:2], y.type.shape[2] // 64, 64))
    low, high = (b.slice(wide, dim=3, start=i, end=i + 32) for i in (0, 32))
    return b.add(wide, b.concat([b.neg(high), low], dim=3))


def numbered(b: StepBuilder, y: Any) -> Any:
    rows = b.iota(start=0, stride=1, type=TensorType((M,), F32))
    return b.cast(b.mul(b.cast(y, dtype=F32), b.reshape(rows, shape=(M, 1))), dtype=y.type.element)


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_refused_says_why(why: str) -> None:
    inputs, build = REFUSED[why]
    with pytest.raises(NoText, match=why):
        product_of(region_of(types_of(inputs, BF16), build))


def test_sizes_are_no_part_of_a_kernel() -> None:
    build = CASES["mk,nk->mn"][1]
    one, other = (
        product_of(region_of([TensorType(s, BF16) for s in sizes], build))
        for sizes in (((256, 64), (128, 64)), ((512, 128), (256, 128)))
    )
    assert one.source(one.shape()) == other.source(other.shape())


@pytest.mark.parametrize("name", CASES)
def test_it_fits_into_shared_memory(name: str) -> None:
    product = product_of(region_of(types_of(CASES[name][0], BF16), CASES[name][1]))
    shape = product.shape()
    assert product.bytes(shape) <= SHARED
    assert shape.stages >= 3


def test_it_competes_where_triton_does() -> None:
    names = [p.name for p in providers_for(torch.device("cuda"), ["aten", "triton"])]
    assert "wgmma" in names
    assert "wgmma" not in [p.name for p in providers_for(torch.device("cuda"), ["triton"])]
    assert "wgmma" not in [p.name for p in providers_for(torch.device("cpu"), None)]


def test_other_gpus_and_missing_compilers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    region = region_of([TensorType((4096, 1024), BF16), TensorType((1024, 1024), BF16)], CASES["mk,nk->mn"][1], "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert ways.why_not(region) == "the GPU is no Hopper GPU" and not ways.is_wide(region)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(library, "driver", object)
    monkeypatch.setattr(library, "compiler", lambda: None)
    assert "run-time compiler" in ways.why_not(region)
    monkeypatch.setattr(library, "compiler", object)
    assert not ways.why_not(region) and ways.is_wide(region)


def test_a_kernel_that_does_not_compile_is_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(source: str) -> bytes:
        raise library.CudaError("product.cu(1): error: no")

    monkeypatch.setattr(library, "compiled", refused)
    region = region_of([TensorType((4096, 1024), BF16), TensorType((1024, 1024), BF16)], CASES["mk,nk->mn"][1], "cuda")
    (made,) = ways.build(ways.ways(region)[:1])
    assert isinstance(made, library.CudaError)


def test_arguments_lie_as_the_kernel_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps of both factors, of what is read and written with one more each, eight tables of pointers, nine numbers."""
    name = "gelu' (tanh), gelu again and sums of columns"
    product = product_of(region_of(types_of(CASES[name][0], BF16), CASES[name][1]))
    monkeypatch.setattr(library, "tensor_map", lambda pointer, *_: pointer.to_bytes(8, "little") + bytes(120))
    shape = product.shape()
    data = ways.arguments_of(product, shape, [1 << (10 + i) for i in range(7)])
    maps = 2 + len(product.reads) + 1 + len(product.writes) + 1
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    assert [w for w in words[: 16 * maps] if w] == [1 << (10 + i) for i in (0, 1, 2, 3, 4)]
    assert words[16 * maps : 16 * maps + 8] == [0, 0, 0, 1 << 16, 0, 0, 1 << 15, 0]
    numbers = data[128 * maps + 80 :]
    found = [int.from_bytes(numbers[i : i + 4], "little") for i in range(0, 36, 4)]
    assert (
        found == [product.m, product.n, product.k, shape.group, product.partials(), 0, 0, 0, 0] and len(data) % 64 == 0
    )


def test_tensors_side_by_side_have_a_map_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of their own columns and rows, and where each begins among what is summed comes last."""
    name = "a gradient beside what a norm read, mask and sums of columns"
    product = product_of(region_of(types_of(CASES[name][0], BF16), CASES[name][1]))
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(library, "tensor_map", lambda *given: made.append(given) or bytes(128))
    data = ways.arguments_of(product, product.shape(), [1 << (10 + i) for i in range(11)])
    assert made[:3] == [
        (1 << (10 + i), torch.bfloat16, (200, wide), wide, (64, 128)) for i, wide in enumerate((128, 64, 32))
    ]
    assert made[3][0] == 1 << 13 and made[3][2] == (N, 224)
    text = product.source(product.shape())
    assert "#define SIDES 3\n" in text and product.source(product.shape()).count("224") == 0
    numbers = [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]
    at = next(i for i in range(len(numbers)) if numbers[i : i + 3] == [product.m, product.n, product.k])
    assert numbers[at + 7 : at + 12] == [0, 0, 0, 128, 192]  # behind strides of bits


def test_sums_of_one_column_of_tiles_are_added_up_by_warpgroups() -> None:
    """So a few hundred partial sums are left, however many rows there are, and zeros of warpgroups without a tile."""
    build = CASES["gelu' (tanh), gelu again and sums of columns"][1]

    def partials(m: int, n: int, blocks: int = 132) -> tuple[int, ...]:
        product = product_of(region_of([TensorType(s, BF16) for s in ((m, 64), (64, n), (m, n))], build))
        return product.partials(blocks), product.scratch[0].shape[0]

    assert partials(128 * 1000, 128) == (264, 264)
    assert partials(128 * 1000, 128, 114) == (228, 264)
    assert partials(128 * 3, 128) == (6, 6)
    assert partials(128 * 1000, 256) == (1000, 1000)


COMPILED = [
    "bias and gelu (none), both kept",
    "gelu' (tanh), gelu again and sums of columns",
    "gradients of a gated layer",
    "a gated layer, columns apart, its product kept",
    "km,kn->mn",
    "a weight gradient and that of a bias, the second factor's",
    "halves of heads of 64 turned by positions",
    "bits decide what stays, others are kept, sums of columns",
    "bits of whole tiles",
    "a gradient beside what a norm read, in whole tiles",
    "tensors side by side, summed up for a bias",
]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed: kernels are not compiled here")
@pytest.mark.parametrize("name", [*COMPILED, "exponentials of rows but at one place, and their sums"])
def test_it_compiles_without_spills(name: str, tmp_path: Path) -> None:
    whole = [*map(TensorType, [(256, 64)] * 2 + [(256,)] * 3, [BF16] * 2 + [F32] * 3)]  # no tile reaches over the edge
    types = types_of(CASES[name][0], BF16) if name in COMPILED else whole
    product = product_of(region_of(types, CASES[name][1]))
    source = tmp_path / "product.cu"
    source.write_text(product.source(product.shape()))
    command = [
        "nvcc",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-cubin",
        "-Xptxas",
        "-v",
        "-o",
        "made.cubin",
        source.name,
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("0 bytes spill stores") == 4, done.stderr


# ---- on a Hopper GPU -------------------------------------------------------------------------------------------------

HERE = pytest.mark.skipif(bool(ways.why_absent()), reason=ways.why_absent() or "-")


@HERE
@pytest.mark.parametrize("element", ["bf16", "f16"])
@pytest.mark.parametrize("name", CASES)
def test_natively(name: str, element: str) -> None:
    region = region_of(types_of(CASES[name][0], ScalarType(element)), CASES[name][1], "cuda")
    launch_all(region, element)


@HERE
@pytest.mark.parametrize("name", ["a gated layer, columns apart", "gelu' (tanh), gelu again and sums of columns"])
@pytest.mark.parametrize(
    "sizes", [(128, 128, 64), (16, 16, 16), (129, 16, 1000), (4096, 768, 264), (2000, 2056, 520), (50001, 104, 64)]
)
def test_sizes_natively(name: str, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for letter, size in zip("MNK", sizes, strict=True):
        monkeypatch.setitem(globals(), letter, size)
    m, n, k = sizes
    shapes = [(m, k), (2 * n, k)] if "gated" in name else [(m, k), (k, n), (m, n)]
    launch_all(region_of([TensorType(s, BF16) for s in shapes], CASES[name][1], "cuda"), "bf16")


def launch_all(region: Region, element: str) -> None:
    for way in ways.ways(region):
        (launch,) = ways.build([way])
        if isinstance(launch, Exception):
            raise launch
        tensors = tensors_of(region, "cuda")
        scratch = [torch.full(s.shape, float("nan"), dtype=s.dtype, device="cuda") for s in way.product.scratch]
        for _ in range(2):
            for tensor in (*tensors[len(region.operands) :], *scratch):
                tensor.fill_(float("nan") if tensor.is_floating_point() else 255)
            launch(*tensors, *scratch)
            assert_right(region, tensors, element)


FAKE = r"""
#include <cstdlib>
#include <cstring>
extern "C" {
int nvrtcVersion(int* major, int* minor) { *major = 1, *minor = 2; return 0; }
int nvrtcCreateProgram(char** p, const char* source, const char*, int, void*, void*) { *p = strdup(source); return 0; }
int nvrtcCompileProgram(char* p, int count, const char** options) { return count != 3 || strstr(p, "bad"); }
int nvrtcGetProgramLogSize(char*, size_t* n) { *n = 64; return 0; }
int nvrtcGetProgramLog(char*, char* to) { strcpy(to, "product.cu(7): error: a bad source\n"); return 0; }
int nvrtcGetCUBINSize(char* p, size_t* n) { *n = strlen(p); return 0; }
int nvrtcGetCUBIN(char* p, char* to) { memcpy(to, p, strlen(p)); return 0; }
int nvrtcDestroyProgram(char** p) { free(*p); return 0; }
}
"""


def test_other_processes_compile_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a compiler whose code is its source: what they make is found by content, what they refuse is said again."""
    pytest.importorskip("triton")
    if "/libnvrtc.so" in Path("/proc/self/maps").read_text():
        pytest.skip("NVIDIA's own compiler is loaded in this process")
    from wholestep.backends.triton.compiling import Compilers

    made = tmp_path / "libnvrtc.so.1"
    (tmp_path / "fake.cpp").write_text(FAKE)
    subprocess.run(["g++", "-shared", "-fPIC", "-o", made, tmp_path / "fake.cpp"], check=True)
    objects, loaded = Objects(tmp_path), ctypes.CDLL(str(made))
    monkeypatch.setattr(library, "kept", lambda: objects)
    monkeypatch.setattr(library, "compiler", lambda: loaded)
    library.compiler_path.cache_clear()
    try:
        assert library.compiler_path() == str(made)
        good, bad = library.jobs_for("good"), library.jobs_for("bad")
        with Compilers(1, launchers=False) as compilers:
            compilers.add(good | bad)
            answers = compilers.wait([*good, *bad])
    finally:
        library.compiler_path.cache_clear()
    assert "a bad source" in answers[next(iter(bad))]["error"] and "error" not in answers[next(iter(good))]
    assert not library.jobs_for("good") and library.jobs_for("bad")
    monkeypatch.setattr(library, "compile_now", lambda source: b"now: " + library.cuda_code(loaded, source, "abc"))
    assert library.compiled("good") == b"good" and library.compiled("other") == b"now: other"
    with pytest.raises(library.CudaError, match="a bad source"):
        library.compiled("bad")
