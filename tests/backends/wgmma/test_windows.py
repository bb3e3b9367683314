"""Convolutions for Hopper GPUs, as products of windows: what is gathered, what is generated around it, and on such a
GPU the kernels."""

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
from tests.backends.wgmma.test_wgmma import HERE, Build, assert_right, case_in, region_of, types_of
from wholestep.backends.cudnn.convolution import channels_last
from wholestep.backends.generated import region_of as region_of_body
from wholestep.backends.kernels import Spec
from wholestep.backends.providers import Region, providers_for
from wholestep.backends.triton.scalars import NoText
from wholestep.backends.wgmma import library, ways
from wholestep.backends.wgmma.products import SHARED
from wholestep.backends.wgmma.windows import Convolution, product_of, writes_so
from wholestep.dialects.strides import row_major
from wholestep.ir.types import BF16, F32, ScalarType

CASES: dict[str, tuple[list[Any], Build]] = {}
case = case_in(CASES)
#: rows, columns, images; sizes of images that fill their tiles
H, W, N = 9, 11, 3
WHOLE = (8, 16)


def window(stride: Any = 1, padding: Any = 1, dilation: Any = 1, **more: Any) -> dict[str, Any]:
    pairs = {"stride": stride, "padding": padding, "dilation": dilation}
    return {k: (v, v) if isinstance(v, int) else v for k, v in pairs.items()} | more


for name, image, kernel, how in (
    ("3x3", (N, 64, H, W), (72, 64, 3, 3), window()),
    ("3x3, half a tile of columns", (N, 64, H, W), (64, 64, 3, 3), window()),
    ("3x3, few columns and many channels", (2, 192, 7, 7), (40, 192, 3, 3), window()),
    ("3x3, stride 2", (N, 64, H, W), (136, 64, 3, 3), window(2)),
    ("3x3, stride 2, even sizes", (N, 64, 8, 12), (136, 64, 3, 3), window(2)),
    ("3x3, stride 3 and 2", (N, 64, 10, 12), (72, 64, 3, 3), window((3, 2))),
    ("3x3, dilation 2", (N, 64, H, W), (72, 64, 3, 3), window(padding=2, dilation=2)),
    ("3x3, dilation 3 and 1, stride 1 and 2", (N, 64, 12, W), (72, 64, 3, 3), window((1, 2), (3, 1), (3, 1))),
    ("3x3 without padding", (N, 64, H, W), (72, 64, 3, 3), window(padding=0)),
    ("5x2", (N, 64, H, W), (72, 64, 5, 2), window(1, (2, 1))),
    ("7x7", (1, 64, 20, 20), (72, 64, 7, 7), window(2, 3)),
    ("more zeros behind", (N, 64, H, W), (72, 64, 3, 3), window(2, (0, 1), padding_after=(1, 2))),
    ("more zeros than the window reaches", (N, 64, H, W), (72, 64, 3, 3), window(padding=(3, 4))),
    ("1x1, stride 2", (N, 64, H, W), (72, 64, 1, 1), window(2, 0)),
    ("40 channels", (N, 40, H, W), (72, 40, 3, 3), window()),
    ("72 channels", (N, 72, H, W), (40, 72, 3, 3), window()),
    ("one row", (N, 64, 1, 40), (72, 64, 1, 3), window(1, (0, 1))),
    ("many small images", (40, 64, 2, 3), (72, 64, 3, 3), window()),
):

    @case(name, image, kernel)
    def _(b, x, w, how=how):
        return b.conv(x, w, **how)


@case("bias and relu", (N, 64, H, W), (72, 64, 3, 3), (72,))
def _(b, x, w, bias):
    return b.relu(b.conv(x, w, bias, **window()))


for columns, image in ((64, (H, W)), (136, (H, W)), (64, WHOLE), (128, WHOLE)):
    tiles = "whole tiles" if image == WHOLE else "tiles"

    @case(f"statistics of {tiles} of {columns}", (N, 64, *image), (columns, 64, 3, 3), ((columns,), F32))
    def _(b, x, w, running):
        y = b.conv(x, w, **window())
        apart = b.sub(b.cast(y, dtype=F32), b.reshape(running, shape=(1, running.type.shape[0], 1, 1)))
        mean = b.mean(apart, dims=(0, 2, 3))
        spread = b.sub(b.mean(b.mul(apart, apart), dims=(0, 2, 3)), b.mul(mean, mean))
        return [y, b.add(mean, running), b.rsqrt(b.add(b.maximum(spread, 0.0), 1e-5)), b.add(b.mul(running, 0.9), mean)]

    @case(
        f"a gradient through relu of {tiles} of {columns}, with sums",
        (N, 64, *image),
        (columns, 64, 3, 3),
        (N, *image, columns),
        ((columns,), F32),
        ((columns,), F32),
    )
    def _(b, dy, w, pre, mean, rstd):
        """What stands before a norm lies as rows of a product; relu's result is written once more."""
        count = mean.type.shape[0]
        g = b.conv(dy, w, **window())
        x = b.cast(b.transpose(pre, order=(0, 3, 1, 2)), dtype=F32)
        mean, rstd = (b.reshape(v, shape=(1, count, 1, 1)) for v in (mean, rstd))
        normal = b.mul(b.sub(x, mean), rstd)
        kept = b.select(b.le(normal, 0.0), 0.0, b.cast(g, dtype=F32))
        sums = [b.sum(v, dims=(0, 2, 3)) for v in (kept, b.mul(kept, normal))]
        return [g, b.cast(b.relu(normal), dtype=dy.type.element), *sums]


def laid(spec: Spec) -> Spec:
    """An image or a kernel channels-last; rows of a product, which have their channels last, as they are."""
    last = len(spec.shape) == 4 and spec.shape[1:3] not in ((H, W), WHOLE)
    return replace(spec, strides=channels_last(spec.shape)) if last else spec


def convolution_of(name: str, element: ScalarType = BF16, device: str = "cpu") -> Region:
    inputs, build = CASES[name]
    region = region_of(types_of(inputs, element), build, device)
    return replace(region, operands=tuple(map(laid, region.operands)), results=tuple(map(laid, region.results)))


def tensors_of(region: Region, device: str = "cpu") -> list[torch.Tensor]:
    torch.manual_seed(0)
    made = [torch.empty_strided(s.shape, s.strides, dtype=s.dtype, device=device) for s in region.specs]
    for tensor in made[: len(region.operands)]:
        tensor.copy_(torch.randn(tensor.shape))
    for tensor in made[len(region.operands) :]:
        tensor.fill_(float("nan"))
    return made


@pytest.mark.parametrize("name", CASES)
def test_what_is_gathered_and_generated_is_right(name: str, tmp_path: Path) -> None:
    region = convolution_of(name)
    tensors, product = tensors_of(region), product_of(region)
    assert isinstance(product, Convolution)
    host.run(product, tensors, tmp_path)
    assert_right(region, tensors, "bf16")


@pytest.mark.parametrize("stride", [1, 2])
def test_it_is_the_convolution_that_autograd_knows(stride: int, tmp_path: Path) -> None:
    """Forward, and with the kernel turned round and stride 1 the gradient of the image, against torch in float64."""
    region = convolution_of("3x3" if stride == 1 else "3x3, stride 2")
    tensors = tensors_of(region)
    host.run(product_of(region), tensors, tmp_path)
    x, w, y = tensors
    wanted = torch.nn.functional.conv2d(x.double(), w.double(), padding=1, stride=stride)
    assert (y.double() - wanted).abs().max() <= 1e-2 * wanted.abs().max()
    if stride == 1:
        image = torch.randn(N, 72, H, W, dtype=torch.float64, requires_grad=True)
        turned = w.double().transpose(0, 1).flip(2, 3)  # the kernel that this is the gradient of
        back = torch.nn.functional.conv2d(image, turned, padding=1)
        (wanted,) = torch.autograd.grad(back, image, x.double())
        assert (y.double() - wanted).abs().max() <= 1e-2 * wanted.abs().max()


def test_what_follows_is_written_between_other_pixels(tmp_path: Path) -> None:
    """As a part of a concatenation; what the convolution itself makes, or rows that touch, are not asked for so."""
    region = convolution_of("bias and relu")
    body, gap = region.body, 96
    assert body.regions[0].block.last is not None
    (value,) = body.regions[0].block.last.operands
    strides = (H * W * gap, 1, W * gap, gap)
    made = region_of_body(body, None, region.operands, region.device, [strides])
    assert made.results[0].strides == strides
    whole = torch.full((N, H, W, gap), float("nan"), dtype=torch.bfloat16)
    tensors = [*tensors_of(region)[:-1], whole[..., :72].permute(0, 3, 1, 2)]
    host.run(product_of(made), tensors, tmp_path)
    assert_right(made, tensors, "bf16")
    assert bool(whole[..., 72:].isnan().all())
    for wrong in ((H * W * gap, 1, W * gap + 8, gap), (H * W * 90, 1, W * 90, 90), row_major(value.type.shape)):
        assert not writes_so(body, value, wrong)
    alone = convolution_of("3x3").body
    assert alone.regions[0].block.last is not None
    assert not writes_so(alone, alone.regions[0].block.last.operands[0], strides)


def test_in_f16_and_in_a_part_of_an_image(tmp_path: Path) -> None:
    region = convolution_of("3x3", ScalarType("f16"))
    wide = torch.randn(N, H, W, 128).half()
    image = wide[..., 64:].permute(0, 3, 1, 2)
    region = replace(region, operands=(Spec(image.shape, image.stride(), torch.float16), *region.operands[1:]))
    tensors = tensors_of(region)
    tensors[0] = image
    host.run(product_of(region), tensors, tmp_path)
    assert_right(region, tensors, "f16")


REFUSED: dict[str, Any] = {
    "over all channels": ([(N, 64, H, W), (64, 32, 3, 3)], window(groups=2)),
    "no 16-bit numbers": ([((N, 64, H, W), F32), ((64, 64, 3, 3), F32)], window()),
    "too few channels": ([(N, 24, H, W), (64, 24, 3, 3)], window()),
    "multiples of 16 bytes": ([(N, 36, H, W), (64, 36, 3, 3)], window()),
    "reach further": ([(N, 64, H, 400), (64, 64, 1, 3)], window(1, (0, 130), (1, 130))),
    "than a map of them": ([(N, 64, 20, 20), (64, 64, 3, 3)], window(9)),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_refused_says_why(why: str) -> None:
    inputs, how = REFUSED[why]
    region = region_of(types_of(inputs, BF16), lambda b, x, w: b.conv(x, w, **how))
    region = replace(region, operands=tuple(map(laid, region.operands)), results=tuple(map(laid, region.results)))
    with pytest.raises(NoText, match=why):
        product_of(region)


def test_it_competes_alone_and_with_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    def region(pixels: int) -> Region:
        shapes = [(32, 64, pixels, pixels), (64, 64, 3, 3)]
        found = region_of(types_of(shapes, BF16), lambda b, x, w: b.conv(x, w, **window()), "cuda")
        return replace(found, operands=tuple(map(laid, found.operands)), results=tuple(map(laid, found.results)))

    (provider,) = (p for p in providers_for(torch.device("cuda"), ["aten", "triton"]) if p.name == "wgmma")
    monkeypatch.setattr(ways, "why_absent", lambda: "there is no GPU here")
    assert "step.conv" in provider.alone and provider.claims(region(56)) == "there is no GPU here"
    monkeypatch.setattr(ways, "why_absent", lambda: "")
    assert provider.claims(region(56)) == "" and provider.follows(region(56))
    assert "too small" in provider.claims(region(4)) and not provider.follows(region(4))
    assert [o.name for o in provider.offers(region(56))] == [f"turns 128x64x64 s6 a1 g8{s}" for s in (" stays", "")]


def test_other_layouts_are_refused() -> None:
    region = convolution_of("3x3")
    x, w = region.operands
    rows = [replace(s, strides=row_major(s.shape)) for s in region.specs]
    with pytest.raises(NoText, match="its image is not channels-last"):
        product_of(replace(region, operands=(rows[0], w)))
    with pytest.raises(NoText, match="its weights are not channels-last"):
        product_of(replace(region, operands=(x, rows[1])))
    with pytest.raises(NoText):
        product_of(replace(region, results=(rows[2],)))


def test_sizes_are_no_part_of_a_kernel() -> None:
    one, other = (product_of(convolution_of(name)) for name in ("3x3", "7x7"))
    assert one.source(one.shape()) == other.source(other.shape())


@pytest.mark.parametrize("name", CASES)
def test_it_fits_into_shared_memory(name: str) -> None:
    for way in ways.ways(convolution_of(name)):
        assert way.product.bytes(way.shape) <= SHARED and way.shape.stages >= 3


def test_weights_stay_where_they_fit() -> None:
    """Of one column of tiles, up to 96 KB; the clock decides against fetching them for each tile."""
    fits, wide, long = (
        ways.ways(convolution_of(f"3x3{rest}"))
        for rest in (", half a tile of columns", "", ", few columns and many channels")
    )
    assert [way.shape.stays for way in fits] == [True, False] and fits[0].name.endswith("stays")
    assert not any(way.shape.stays for way in (*wide, *long))


def test_a_map_of_windows_is_what_the_driver_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays begin with the channels or, for corners, along a row; strides are bytes, steps are those of the window."""
    given: list[Any] = []
    monkeypatch.setattr(library, "call", lambda *arguments: given.extend(arguments))
    name = "3x3, dilation 3 and 1, stride 1 and 2"
    product = product_of(convolution_of(name))
    assert isinstance(product, Convolution)
    library.window_map(4096, torch.bfloat16, product.gathering, 64, 128)
    plain = [list(g) if isinstance(g, ctypes.Array) else getattr(g, "value", g) for g in given]
    assert plain[0] == "cuTensorMapEncodeIm2col" and plain[1] % 64 == 0
    assert plain[2:5] == [9, 4, 4096]
    assert plain[5:7] == [[64, W, 12, N], [128, 128 * W, 128 * W * 12]]
    assert plain[7:9] == [[-1, -3], [(6 - 1) * 2 + 1 - W - 1, (12 - 1) + 1 - 12 - 3]]
    assert plain[9:12] == [64, 128, [1, 2, 1, 1]]
    assert plain[12:] == [0, 3, 3, 0]
    assert [type(g)._type_ for g in given[5:9]] == [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int, ctypes.c_int]


def test_arguments_lie_as_the_kernel_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps of windows, weights and results, pointers, nine numbers, then those of the window."""
    product = product_of(convolution_of("3x3, dilation 3 and 1, stride 1 and 2"))
    for name in ("tensor_map", "window_map"):
        monkeypatch.setattr(library, name, lambda pointer, *_: pointer.to_bytes(8, "little") + bytes(120))
    shape = product.shape()
    assert shape is not None
    data = ways.arguments_of(product, shape, [1 << 10, 1 << 11, 1 << 12])
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    assert [w for w in words[: 16 * 5] if w] == [1 << 10, 1 << 11, 1 << 12]
    numbers = data[16 * 5 * 8 + 8 * 8 :]
    found = [int.from_bytes(numbers[i : i + 4], "little") for i in range(0, 112, 4)]
    assert found[:9] == [product.m, product.n, product.k, shape.group, product.partials(), 0, 0, 0, 0]
    assert found[9:23] == [64, 12, 6, 1, 2, 3, 1, 3, 1, 3, 1, 1, 1, 132]
    assert found[23:] == [3, 9, 0, 0, 0]
    assert len(data) % 64 == 0


COMPILED = ["3x3", "3x3, half a tile of columns", *(name for name in CASES if "whole tiles" in name)]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed: kernels are not compiled here")
@pytest.mark.parametrize("name", COMPILED)
def test_it_compiles_without_spills(name: str, tmp_path: Path) -> None:
    options = ["-gencode=arch=compute_90a,code=sm_90a", "-cubin", "-Xptxas", "-v", "-o", "made.cubin"]
    for way in ways.ways(convolution_of(name)):
        source = tmp_path / "product.cu"
        source.write_text(way.source)
        done = subprocess.run(["nvcc", *options, source.name], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("0 bytes spill stores") == 4, done.stderr


# ---- on a Hopper GPU -------------------------------------------------------------------------------------------------


@HERE
@pytest.mark.parametrize("element", ["bf16", "f16"])
@pytest.mark.parametrize("name", CASES)
def test_natively(name: str, element: str) -> None:
    region = convolution_of(name, ScalarType(element), "cuda")
    for way in ways.ways(region):
        (launch,) = ways.build([way])
        if isinstance(launch, Exception):
            raise launch
        tensors = tensors_of(region, "cuda")
        scratch = [torch.full(s.shape, float("nan"), dtype=s.dtype, device="cuda") for s in way.product.scratch]
        for _ in range(2):
            for tensor in (*tensors[len(region.operands) :], *scratch):
                tensor.fill_(float("nan"))
            launch(*tensors, *scratch)
            assert_right(region, tensors, element)
