"""Input gradients of convolutions of stride 2 for Hopper GPUs: products of windows by the parity of a pixel, against
PyTorch; on such a GPU the kernels."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backends.wgmma import host
from tests.backends.wgmma.test_wgmma import HERE, TOLERANCE, Build, assert_right, case_in, region_of, types_of
from wholestep.backends.cudnn.convolution import channels_last
from wholestep.backends.generated import region_of as region_of_body
from wholestep.backends.providers import Region, providers_for
from wholestep.backends.triton.scalars import NoText
from wholestep.backends.wgmma import library, ways
from wholestep.backends.wgmma.products import SHARED
from wholestep.backends.wgmma.windows import Convolution, product_of, windows_of, writes_so
from wholestep.dialects.step.bits import UI8
from wholestep.ir.types import BF16, F32, ScalarType

CASES: dict[str, tuple[list[Any], Build]] = {}
case = case_in(CASES)
aten = torch.ops.aten


def window(stride: Any = 2, padding: Any = 1, dilation: Any = 1, **more: Any) -> dict[str, Any]:
    pairs = {"stride": stride, "padding": padding, "dilation": dilation}
    return {k: (v, v) if isinstance(v, int) else v for k, v in pairs.items()} | more


for name, gradient, kernel, size, how in (
    ("3x3", (3, 64, 5, 6), (64, 72, 3, 3), (10, 12), window()),
    ("3x3, whole tiles", (4, 64, 8, 8), (64, 128, 3, 3), (16, 16), window()),
    ("3x3, half a tile of columns", (3, 64, 5, 6), (64, 64, 3, 3), (10, 12), window()),
    ("3x3, two columns of tiles", (3, 128, 5, 6), (128, 136, 3, 3), (10, 12), window()),
    ("3x3, 72 channels", (3, 72, 5, 6), (72, 40, 3, 3), (10, 12), window()),
    ("3x3 without padding", (3, 64, 4, 5), (64, 72, 3, 3), (10, 12), window(padding=0)),
    ("3x3, zeros behind alone", (3, 64, 5, 6), (64, 72, 3, 3), (10, 12), window(padding=0, padding_after=(1, 1))),
    ("5x5", (3, 64, 5, 6), (64, 72, 5, 5), (10, 12), window(padding=2)),
    ("2x4", (3, 64, 5, 6), (64, 72, 2, 4), (10, 12), window(padding=(0, 1))),
    ("stride 2 and 1", (3, 64, 5, 12), (64, 72, 3, 3), (10, 12), window((2, 1))),
    ("stride 1", (3, 64, 10, 12), (64, 72, 3, 3), (10, 12), window(1)),
    ("stride 1 and 4", (3, 64, 10, 3), (64, 72, 3, 5), (10, 12), window((1, 4))),
    ("many small images", (40, 64, 1, 2), (64, 72, 3, 3), (2, 4), window()),
):
    given = {"input_shape": (gradient[0], kernel[1], *size)} | how
    case(name, gradient, kernel)(lambda b, dy, w, given=given: b.conv_input_grad(dy, w, **given))


for columns, images, size in ((64, 3, (10, 12)), (136, 3, (10, 12)), (64, 4, (16, 32)), (128, 4, (16, 32))):
    image = (images, columns, *size)
    tiles = f"{'whole ' if size == (16, 32) else ''}tiles of {columns}"
    small = (images, 64, size[0] // 2, size[1] // 2)

    @case(
        f"through relu, with sums, {tiles}",
        small,
        (64, columns, 3, 3),
        (images, *size, columns),
        ((columns,), F32),
        ((columns,), F32),
    )
    def _(b, dy, w, pre, mean, rstd, image=image):
        """What stands before a norm lies as rows of a product; relu's result is written once more."""
        g = b.conv_input_grad(dy, w, input_shape=image, **window())
        x = b.cast(b.transpose(pre, order=(0, 3, 1, 2)), dtype=F32)
        mean, rstd = (b.reshape(v, shape=(1, image[1], 1, 1)) for v in (mean, rstd))
        normal = b.mul(b.sub(x, mean), rstd)
        kept = b.select(b.le(normal, 0.0), 0.0, b.cast(g, dtype=F32))
        sums = [b.sum(v, dims=(0, 2, 3)) for v in (kept, b.mul(kept, normal))]
        return [g, b.cast(b.relu(normal), dtype=dy.type.element), *sums]


for columns in (64, 128, 256):

    @case(
        f"masked by what a norm reads, with its sums, of {columns}",
        (4, 64, 8, 16),
        (64, columns, 3, 3),
        (4, 16, 32, columns),
        ((columns,), F32),
        ((columns,), F32),
        (columns,),
        (columns,),
    )
    def _(b, dy, w, pre, mean, rstd, weight, bias):
        """As behind the first convolution of a block: its gradient is written as it is."""
        count = mean.type.shape[0]
        g = b.conv_input_grad(dy, w, input_shape=(4, count, 16, 32), **window())
        x = b.cast(b.transpose(pre, order=(0, 3, 1, 2)), dtype=F32)
        mean, rstd, *rest = (b.reshape(v, shape=(1, count, 1, 1)) for v in (mean, rstd, weight, bias))
        weight, bias = (b.cast(v, dtype=F32) for v in rest)
        normal = b.mul(b.sub(x, mean), rstd)
        y = b.relu(b.cast(b.add(b.mul(normal, weight), bias), dtype=dy.type.element))
        kept = b.select(b.le(y, 0.0), 0.0, b.cast(g, dtype=F32))
        sums = [b.sum(v, dims=(0, 2, 3)) for v in (kept, b.mul(kept, b.sub(x, mean)))]
        return [g, sums[0], b.mul(sums[1], b.reshape(rstd, shape=(count,)))]


for columns, images, size in ((96, 3, (10, 12)), (128, 4, (16, 32))):
    image = (images, columns, *size)

    @case(
        f"beside a gradient, by bits, others kept, of {columns}",
        (images, 64, size[0] // 2, size[1] // 2),
        (64, columns, 3, 3),
        image,
        ((images, columns // 8, *size), UI8),
    )
    def _(b, dy, w, other, bits, image=image):
        g = b.add(b.conv_input_grad(dy, w, input_shape=image, **window()), other)
        kept = b.select(b.unpack_bits(bits, dim=1), g, 0.0)
        return [kept, b.pack_bits(b.gt(g, 0.25), dim=1), b.sum(b.cast(kept, dtype=F32), dims=(0, 2, 3))]


#: what lies as rows of a product, not as an image
ROWS_OF_A_PRODUCT = ((10, 12), (16, 32))


def laid(region: Region) -> Region:
    def last(spec: Any) -> Any:
        image = len(spec.shape) == 4 and spec.shape[1:3] not in ROWS_OF_A_PRODUCT
        return replace(spec, strides=channels_last(spec.shape)) if image else spec

    return replace(region, operands=tuple(map(last, region.operands)), results=tuple(map(last, region.results)))


def gradient_of(name: str, element: ScalarType = BF16, device: str = "cpu") -> Region:
    inputs, build = CASES[name]
    return laid(region_of(types_of(inputs, element), build, device))


def product_named(name: str) -> Convolution:
    product = product_of(gradient_of(name))
    assert isinstance(product, Convolution)
    return product


def tensors_of(region: Region, device: str = "cpu") -> list[torch.Tensor]:
    torch.manual_seed(0)
    made = [torch.empty_strided(s.shape, s.strides, dtype=s.dtype, device=device) for s in region.specs]
    for number, tensor in enumerate(made):
        if tensor.dtype == torch.uint8:
            tensor.copy_(torch.randint(0, 256, tensor.shape))
        elif number < len(region.operands):
            tensor.copy_(torch.randn(tensor.shape))
        else:
            tensor.fill_(float("nan"))
    return made


# ---- what is gathered, generated and written -------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_what_is_gathered_and_generated_is_right(name: str, tmp_path: Path) -> None:
    region = gradient_of(name)
    tensors = tensors_of(region)
    host.run(product_of(region), tensors, tmp_path)
    assert_right(region, tensors, "bf16")


def test_taps_of_each_parity() -> None:
    """Of 3x3 taps with padding 1: one, two, two and four, in windows that begin with the pixel itself."""
    how = windows_of(product_named("3x3").op)
    assert how.grid == (5, 6) and how.before == (0, 0) and how.apart == (2, 2)
    assert [(t.across, t.all, t.over, t.down, t.first) for t in how.taps] == [
        (1, 1, 0, 0, 4),
        (2, 2, 0, 0, 5),
        (1, 2, 0, 0, 7),
        (2, 4, 0, 0, 8),
    ]
    assert how.weights == (-6, -2)


@pytest.mark.parametrize("name", ["3x3", "stride 2 and 1", "stride 1 and 4", "many small images"])
def test_pixels_of_a_parity_lie_where_their_rows_are(name: str) -> None:
    """Every pixel is written once, in the order of the rows of its parity's tiles."""
    product = product_named(name)
    images, _, height, width = product.op.dx.type.shape
    down, over = product.how.apart
    numbers = torch.arange(product.m).view(images, height, width)
    for matrix in product.writes:
        met = []
        for parity in range(product.parities):
            begin, how = product.pixels(matrix, parity)
            assert how.lower == how.upper == (0, 0) and how.steps == (1, 1) and how.sizes[0] == product.n
            at = torch.tensor(begin)
            for n, stride in zip(how.sizes[:0:-1], how.strides[::-1], strict=True):
                at = at[..., None] + torch.arange(n) * stride
            wanted = numbers[:, parity // over :: down, parity % over :: over] * matrix.stride
            assert torch.equal(at, wanted)
            met.append(at.flatten())
        assert torch.equal(torch.cat(met).sort().values, numbers.flatten() * matrix.stride)


ARGS = r"""
struct Args { int m, n, group; struct { int turn; } window; };
"""
VISITS = r"""
extern "C" void visits(int m, int n, int group, int turn, int* found) {
    const Args args{m, n, group, {turn}};
    const Places places(args);
    for (int tile = 0; tile < places.tiles; ++tile, found += 3) {
        places.of(tile, found[0], found[1]);
        found[2] = places.parity(args, tile);
    }
}
"""


@pytest.mark.parametrize("blocks", [3, 33, 114, 132])
def test_every_tile_is_made_once_and_blocks_have_all_parities(blocks: int, tmp_path: Path) -> None:
    product = product_named("3x3, two columns of tiles")
    text = product.source(product.shape())  # type: ignore[arg-type]
    places = text[text.index("struct Places") : text.index("// the row of a tensor that")]
    source, made = tmp_path / "places.cpp", tmp_path / "places.so"
    source.write_text(f"#define BM 128\n#define WIDTH 128\n#define PARITIES 4\n{host.TYPES}{ARGS}{places}{VISITS}")
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-w", "-o", str(made), str(source)], check=True)
    rows, columns = 61, 3
    turn = product.window(blocks)[13] if blocks % 2 == 0 else 4 * rows * columns
    found = torch.zeros(4 * rows * columns, 3, dtype=torch.int32)
    ctypes.CDLL(str(made)).visits(rows * 128 - 5, columns * 128, 8, turn, ctypes.c_void_p(found.data_ptr()))
    assert len({tuple(t) for t in found.tolist()}) == len(found)
    assert found.max(0).values.tolist() == [rows - 1, columns - 1, 3]
    turns = [found[block::blocks, 2].tolist() for block in range(blocks)]
    for own in turns:
        counts = [own.count(parity) for parity in range(4)]
        assert max(counts) - min(counts) <= 2


def test_arguments_lie_as_the_kernel_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A map of the gradient, one of weights by rows of a channel, four of each tensor beside, by parity."""
    product = product_named("through relu, with sums, tiles of 136")
    maps: list[tuple[Any, ...]] = []
    for name in ("tensor_map", "window_map"):

        def encoded(pointer: int, *how: Any, name: str = name) -> bytes:
            maps.append((name, pointer, *how))
            return pointer.to_bytes(8, "little") + bytes(120)

        monkeypatch.setattr(library, name, encoded)
    shape = product.shape()
    assert shape is not None
    pointers = [n << 20 for n in range(1, 12)]
    data = ways.arguments_of(product, shape, pointers)
    assert maps[1] == ("tensor_map", pointers[1], torch.bfloat16, (64, 9 * 136), 9 * 136, (64, 64))
    beside = [m[1] - pointers[2] for m in maps[2:6]]
    assert beside == [2 * 136 * n for n in (0, 1, 12, 13)] and all(m[0] == "window_map" for m in maps[2:])
    assert [m[1] for m in maps[6:8]] == [pointers[5], pointers[6]]  # both results of a parity, then the next
    assert len(maps) == 2 + 4 + 8
    first = 128 * (2 + 5 + 9) + 8 * (3 + 1 + 1 + 3 + 1 + 3 + 1 + 1)
    count = 9 + 14 + 20
    numbers = [int.from_bytes(data[first + 4 * i :][:4], "little", signed=True) for i in range(count)]
    assert numbers[:9] == [90, 136, product.k, shape.group, product.partials(), 0, 0, 0, 0]
    assert numbers[9:23] == [64, 5, 6, 1, 1, 0, 0, 1, 1, -6, -2, 2, 2, 33]
    assert numbers[23:] == [1, 1, 0, 0, 4, 2, 2, 0, 0, 5, 1, 2, 0, 0, 7, 2, 4, 0, 0, 8]


def test_it_is_what_autograd_gives(tmp_path: Path) -> None:
    region = gradient_of("3x3")
    tensors = tensors_of(region)
    host.run(product_of(region), tensors, tmp_path)
    dy, w, dx = tensors
    x = torch.zeros(dx.shape, dtype=torch.float64, requires_grad=True)
    y = torch.nn.functional.conv2d(x, w.double(), stride=2, padding=1)
    (wanted,) = torch.autograd.grad(y, x, dy.double())
    assert (dx.double() - wanted).abs().max() <= 1e-2 * wanted.abs().max()


def test_what_follows_is_written_between_other_pixels(tmp_path: Path) -> None:
    region = gradient_of("beside a gradient, by bits, others kept, of 96")
    block, gap = region.body.regions[0].block, 160
    assert block.last is not None
    strides = (120 * gap, 1, 12 * gap, gap)
    assert writes_so(region.body, block.last.operands[0], strides)
    made = region_of_body(region.body, None, region.operands, region.device, [strides])
    assert made.results[0].strides == strides
    whole = torch.full((3, 10, 12, gap), float("nan"), dtype=torch.bfloat16)
    tensors = tensors_of(made)
    tensors[len(made.operands)] = whole[..., :96].permute(0, 3, 1, 2)
    product = product_of(made)
    host.run(product, tensors, tmp_path)
    assert_right(made, tensors, "bf16")
    assert bool(whole[..., 96:].isnan().all())
    assert isinstance(product, Convolution) and product.pixels(product.writes[0], 3)[0] == 13 * gap


# ---- what is taken ---------------------------------------------------------------------------------------------------

REFUSED: dict[str, Any] = {
    "some of its pixels no window sees": ((3, 64, 5, 6), (64, 72, 1, 1), (10, 12), window(padding=0)),
    "not equally many": ((3, 64, 5, 6), (64, 72, 3, 3), (9, 11), window()),
    "taps are apart": ((3, 64, 4, 5), (64, 72, 3, 3), (10, 12), window(dilation=2)),
    "more than 4 parities": ((3, 64, 4, 4), (64, 72, 3, 3), (12, 12), window(3)),
    "over all channels": ((3, 64, 5, 6), (64, 32, 3, 3), (10, 12), window(groups=2)),
    "too few channels": ((3, 24, 5, 6), (24, 72, 3, 3), (10, 12), window()),
    "multiples of 16 bytes": ((3, 36, 5, 6), (36, 72, 3, 3), (10, 12), window()),
    "weights of a tap do not begin": ((3, 64, 5, 6), (64, 36, 3, 3), (10, 12), window()),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_refused_says_why(why: str) -> None:
    gradient, kernel, size, how = REFUSED[why]
    shape = (gradient[0], kernel[1] * how.get("groups", 1), *size)
    region = region_of(
        types_of([gradient, kernel], BF16), lambda b, dy, w: b.conv_input_grad(dy, w, input_shape=shape, **how)
    )
    with pytest.raises(NoText, match=why):
        product_of(laid(region))


def test_rows_by_numbers_of_their_own_are_refused() -> None:
    def build(b: Any, dy: Any, w: Any, scale: Any) -> Any:
        g = b.conv_input_grad(dy, w, input_shape=(3, 72, 10, 12), **window())
        return b.mul(g, scale)

    region = region_of(types_of([(3, 64, 5, 6), (64, 72, 3, 3), (3, 1, 10, 12)], BF16), build)
    with pytest.raises(NoText, match="several parities"):
        product_of(laid(region))


def test_it_competes_alone_and_with_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    def region(pixels: int) -> Region:
        shape = (32, 128, 2 * pixels, 2 * pixels)
        inputs = [(32, 128, pixels, pixels), (128, 128, 3, 3)]
        how = window()
        build = lambda b, dy, w: b.conv_input_grad(dy, w, input_shape=shape, **how)  # noqa: E731
        return laid(region_of(types_of(inputs, BF16), build, "cuda"))

    (provider,) = (p for p in providers_for(torch.device("cuda"), ["aten", "triton"]) if p.name == "wgmma")
    monkeypatch.setattr(ways, "why_absent", lambda: "")
    assert "step.conv_input_grad" in provider.alone
    assert provider.claims(region(28)) == "" and provider.follows(region(28))
    assert "too small" in provider.claims(region(2)) and not provider.follows(region(2))
    assert [o.name for o in provider.offers(region(28))] == ["turns 128x128x64 s6 a2 g8"]


@pytest.mark.parametrize("name", CASES)
def test_it_fits_into_shared_memory(name: str) -> None:
    for way in ways.ways(gradient_of(name)):
        assert way.product.bytes(way.shape) <= SHARED and way.shape.stages >= 3


COMPILED = [
    "3x3",
    "3x3, half a tile of columns",
    *(n for n in CASES if "tiles of 136" in n or "masked" in n or n.endswith("kept, of 128")),
]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed: kernels are not compiled here")
@pytest.mark.parametrize("name", COMPILED)
def test_it_compiles_without_spills(name: str, tmp_path: Path) -> None:
    options = ["-gencode=arch=compute_90a,code=sm_90a", "-cubin", "-Xptxas", "-v", "-o", "made.cubin"]
    for way in ways.ways(gradient_of(name)):
        (tmp_path / "product.cu").write_text(way.source)
        done = subprocess.run(["nvcc", *options, "product.cu"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("0 bytes spill stores") == 4, done.stderr


# ---- on a Hopper GPU -------------------------------------------------------------------------------------------------


def launch_all(region: Region, element: str) -> None:
    for way in ways.ways(region):
        (launch,) = ways.build([way])
        if isinstance(launch, Exception):
            raise launch
        tensors = tensors_of(region, "cuda")
        scratch = [torch.full(s.shape, float("nan"), dtype=s.dtype, device="cuda") for s in way.product.scratch]
        for _ in range(2):
            for tensor in (*tensors[len(region.operands) :], *scratch):
                tensor.fill_(255 if tensor.dtype == torch.uint8 else float("nan"))
            launch(*tensors, *scratch)
            assert_right(region, tensors, element)


@HERE
@pytest.mark.parametrize("element", ["bf16", "f16"])
@pytest.mark.parametrize("name", CASES)
def test_natively(name: str, element: str) -> None:
    launch_all(gradient_of(name, ScalarType(element), "cuda"), element)


@HERE
@pytest.mark.parametrize(
    ("images", "channels", "columns", "pixels"),
    [(16, 128, 128, 28), (15, 256, 256, 28), (32, 512, 512, 7), (33, 256, 320, 14), (3, 192, 64, 30)],
)
def test_stages_of_a_network_natively(images: int, channels: int, columns: int, pixels: int) -> None:
    """Blocks that make many tiles, of all parities; some end with a part of a tile. Nothing is written behind it."""
    shape = (images, columns, 2 * pixels, 2 * pixels)
    types = types_of([(images, channels, pixels, pixels), (channels, columns, 3, 3), shape], BF16)

    def build(b: Any, dy: Any, w: Any, y: Any) -> Any:
        g = b.conv_input_grad(dy, w, input_shape=shape, **window())
        kept = b.select(b.le(y, 0.0), 0.0, b.cast(g, dtype=F32))
        return [g, b.sum(kept, dims=(0, 2, 3)), b.sum(b.mul(kept, b.cast(y, dtype=F32)), dims=(0, 2, 3))]

    region = laid(region_of(types, build, "cuda"))
    for way in ways.ways(region):
        (launch,) = ways.build([way])
        if isinstance(launch, Exception):
            raise launch
        tensors = tensors_of(region, "cuda")
        more = torch.full((images + 1, 2 * pixels, 2 * pixels, columns), float("nan")).to("cuda", torch.bfloat16)
        tensors[3] = more[:images].permute(0, 3, 1, 2)
        scratch = [torch.full(s.shape, float("nan"), dtype=s.dtype, device="cuda") for s in way.product.scratch]
        launch(*tensors, *scratch)
        assert bool(more[images].isnan().all())
        dy, w, y, *made = tensors
        exact = (dy.double(), torch.zeros_like(y, dtype=torch.float64), w.double(), None, (2, 2), (1, 1), (1, 1))
        g = aten.convolution_backward(*exact, False, (0, 0), 1, [True, False, False])[0]
        kept = torch.where(y <= 0, 0.0, g)
        wanted = [g, kept.sum((0, 2, 3)), (kept * y).sum((0, 2, 3))]
        for got, want in zip(made, wanted, strict=True):
            assert ((got.double() - want).abs().max() / want.abs().max()).item() <= TOLERANCE["bf16"]
