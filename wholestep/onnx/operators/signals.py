"""Fourier transforms, and mel weights."""

from __future__ import annotations

import math

import torch
from onnx import TensorProto

from ...dialects.step.support import wide
from ...ir.core import Value
from ..context import Context, Tensor
from ..dtypes import dtype_of
from . import operator
from .support import cut, joined, positions


@operator("DFT", until=19)
def dft_by_attribute(c: Context, x: Tensor, length: Tensor | None = None):
    return dft(c, x, length, c.attribute("axis"))


@operator("DFT", since=20)
def dft_by_input(c: Context, x: Tensor, length: Tensor | None = None, axis: Tensor | None = None):
    return dft(c, x, length, -2 if axis is None else int(c.number(axis, "axis")))


def dft(c: Context, x: Tensor, length: Tensor | None, axis: int) -> Value:
    dim = c.axis(axis, x.rank)
    if x.rank < 2 or dim == x.rank - 1 or x.shape[-1] not in (1, 2):
        raise c.wrong("its input ends in the real, or the real and the imaginary part; its axis is another one")
    inverse, onesided = bool(c.attribute("inverse")), bool(c.attribute("onesided"))
    default = 2 * (x.shape[dim] - 1) if inverse and onesided else x.shape[dim]
    count = default if length is None else int(c.number(length, "length"))
    if count < 1 or (onesided and not inverse and x.shape[-1] == 2):
        raise c.wrong("a one-sided transform is that of a real signal, and its length positive")
    return transformed(c, x.value, dim, count, inverse, onesided)


def transformed(c: Context, x: Value, dim: int, count: int, inverse: bool, onesided: bool) -> Value:
    """The transform along a dimension of pairs (or of single numbers); it cuts off, or adds zeros behind."""
    b, last, element = c.b, x.type.rank - 1, x.type.element
    if 0 in x.type.shape:
        raise c.wrong(f"a signal of shape {list(x.type.shape)} is empty")
    x = b.cast_to(x, wide(element))
    parts = [b.reshape_to(cut(b, x, last, i, i + 1), x.type.shape[:-1]) for i in range(x.type.shape[-1])]
    signal = c.opaque("aten.complex.default", *parts) if len(parts) == 2 else parts[0]
    name = {(False, False): "fft_fft", (False, True): "fft_rfft", (True, False): "fft_ifft", (True, True): "fft_irfft"}
    out = c.opaque(f"aten.{name[inverse, onesided]}.default", signal, count, dim)
    if out.type.element.kind == "complex":
        pairs = [c.opaque("aten.real.default", out), c.opaque("aten.imag.default", out)]
    else:
        pairs = [out]
    return b.cast_to(joined(b, [b.unsqueeze(v, last) for v in pairs], last), element)


@operator("STFT")
def stft(c: Context, x: Tensor, step: Tensor, window: Tensor | None = None, length: Tensor | None = None):
    b, stride = c.b, int(c.number(step, "step"))
    if x.rank == 2:
        value = b.unsqueeze(x.value, 2)
    elif x.rank == 3 and x.shape[2] in (1, 2):
        value = x.value
    else:
        raise c.wrong("its signal must be [batch, length] or [batch, length, parts]")
    size = int(c.number(length, "frame length")) if length is not None else window.shape[0] if window else x.shape[1]
    if stride < 1 or not 1 <= size <= x.shape[1] or (window is not None and window.shape != (size,)):
        raise c.wrong("its frames do not fit its signal or its window")
    frames = (x.shape[1] - size) // stride + 1
    index = b.add(b.unsqueeze(b.mul(positions(b, frames), stride), 1), b.unsqueeze(positions(b, size), 0))
    value = b.index(value, [index], dims=(1,))  # [batch, frames, size, parts]
    if window is not None:
        value = b.mul(value, b.reshape_to(window.value, (size, 1)))
    onesided = bool(c.attribute("onesided"))
    if onesided and value.type.shape[-1] == 2:
        raise c.wrong("a one-sided transform is that of a real signal")
    return transformed(c, value, 2, size, False, onesided)


@operator("MelWeightMatrix")
def mel_weights(c: Context, bins: Tensor, length: Tensor, rate: Tensor, low: Tensor, high: Tensor):
    count, size = int(c.number(bins, "number of bins")), int(c.number(length, "length"))
    sampling = int(c.number(rate, "sample rate"))
    lower, upper = float(c.number(low, "lower edge")), float(c.number(high, "upper edge"))
    if count < 1 or size < 1 or sampling < 1 or count * size > 1 << 26:
        raise c.wrong("its numbers must be positive, and not too large")
    spectrum = size // 2 + 1
    mel = [2595 * math.log10(1 + f / 700) for f in (lower, upper)]
    step = (mel[1] - mel[0]) / (count + 2)
    edges = torch.tensor([mel[0] + step * i for i in range(count + 2)], dtype=torch.float64)
    places = torch.floor((size + 1) * 700 * (10 ** (edges / 2595) - 1) / sampling).long()
    row = torch.arange(spectrum)[:, None]
    start, centre, end = places[:-2], places[1:-1], places[2:]
    rising = torch.where(
        centre == start, (row == centre).double(), (row - start) / (centre - start).clamp(min=1).double()
    )
    falling = (end - row) / (end - centre).clamp(min=1).double()
    out = torch.zeros(spectrum, count, dtype=torch.float64)
    out = torch.where((row >= start) & (row <= centre), rising, out)
    out = torch.where((row >= centre) & (row < end) & (end != centre), falling, out)
    dtype = dtype_of(c.attribute("output_datatype", TensorProto.FLOAT))
    return c.constant(out.to(dtype))
