"""Operators with settings drawn at random against onnxruntime: what the official cases do not combine."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper as h

from wholestep.onnx import from_onnx
from wholestep.onnx.errors import OnnxUnsupportedError

from .graphs import expected

pytest.importorskip("onnxruntime")

#: an operator, its inputs (None where one is left out), its attributes, the opset and how many outputs it has
Drawn = tuple[str, list[Any], dict[str, Any], int, int]
ROUNDS = 12


class Draw:
    """Random settings and numbers."""

    def __init__(self, seed: int):
        self.pick, self.numbers = random.Random(seed), np.random.default_rng(seed)

    def floats(self, *shape: int) -> np.ndarray:
        return self.numbers.standard_normal(shape).astype(np.float32)

    def ints(self, low: int, high: int, count: int) -> list[int]:
        return [self.pick.randint(low, high) for _ in range(count)]

    def maybe(self, value: Any) -> Any:
        return self.pick.choice([None, value])


def conv(d: Draw) -> Drawn:
    rank, groups = d.pick.choice([1, 2, 3]), d.pick.choice([1, 2])
    kernel = d.ints(1, 3, rank)
    attributes: dict[str, Any] = {"group": groups, "strides": d.ints(1, 3, rank)}
    attributes |= d.pick.choice(
        [
            {"auto_pad": "SAME_UPPER"},
            {"auto_pad": "SAME_LOWER"},
            {"pads": d.ints(0, 2, 2 * rank), "dilations": d.ints(1, 2, rank)},
        ]
    )
    size = d.ints(5, 9, rank)
    return "Conv", [d.floats(2, 4, *size), d.floats(6, 4 // groups, *kernel), d.maybe(d.floats(6))], attributes, 17, 1


def conv_transpose(d: Draw) -> Drawn:
    rank, groups = d.pick.choice([1, 2, 3]), d.pick.choice([1, 2])
    stride = d.ints(1, 3, rank)
    attributes = {"group": groups, "strides": stride, "dilations": d.ints(1, 2, rank), "pads": d.ints(0, 1, 2 * rank)}
    attributes["output_padding"] = [d.pick.randint(0, s - 1) for s in stride]
    size, kernel = d.ints(3, 5, rank), d.ints(2, 3, rank)
    given = [d.floats(2, 4, *size), d.floats(4, 3, *kernel), d.maybe(d.floats(3 * groups))]
    return "ConvTranspose", given, attributes, 17, 1


def pool(d: Draw) -> Drawn:
    name, rank = d.pick.choice(["MaxPool", "AveragePool", "LpPool"]), d.pick.choice([1, 2, 3])
    kernel = d.ints(1, 3, rank)
    attributes: dict[str, Any] = {"kernel_shape": kernel, "strides": d.ints(1, 3, rank)}
    if d.pick.random() < 0.3:
        attributes["auto_pad"] = d.pick.choice(["SAME_UPPER", "SAME_LOWER", "VALID"])
    else:
        attributes["pads"] = [d.pick.randint(0, k - 1) for k in kernel * 2]
        attributes |= {"ceil_mode": d.pick.randint(0, 1), "dilations": d.ints(1, 2, rank)}
    if name == "AveragePool":
        attributes["count_include_pad"] = d.pick.randint(0, 1)
    if name == "LpPool":
        attributes["p"] = d.pick.choice([1, 2, 3])
    return name, [d.floats(2, 3, *d.ints(6, 9, rank))], attributes, 19, 2 if name == "MaxPool" else 1


def recurrent(d: Draw) -> Drawn:
    name, direction = d.pick.choice(["LSTM", "GRU", "RNN"]), d.pick.choice(["forward", "reverse", "bidirectional"])
    gates, ways = {"LSTM": 4, "GRU": 3, "RNN": 1}[name], 2 if direction == "bidirectional" else 1
    steps, batch, size, hidden = d.ints(1, 4, 4)
    lengths = d.numbers.integers(1, steps + 1, batch).astype(np.int32)
    given = [d.floats(steps, batch, size), d.floats(ways, gates * hidden, size), d.floats(ways, gates * hidden, hidden)]
    given += [d.maybe(d.floats(ways, 2 * gates * hidden)), d.maybe(lengths), d.floats(ways, batch, hidden)]
    attributes: dict[str, Any] = {"direction": direction, "hidden_size": hidden}
    if name == "LSTM":
        given += [d.floats(ways, batch, hidden), d.floats(ways, 3 * hidden)]
    if name == "GRU":
        attributes["linear_before_reset"] = d.pick.randint(0, 1)
    return name, given, attributes, d.pick.choice([13, 17]), 3 if name == "LSTM" else 2


def resize(d: Draw) -> Drawn:
    mode = d.pick.choice(["nearest", "linear", "cubic"])
    kinds = ["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel", "half_pixel_symmetric"]
    attributes: dict[str, Any] = {"mode": mode, "coordinate_transformation_mode": d.pick.choice(kinds)}
    if mode == "nearest":
        attributes["nearest_mode"] = d.pick.choice(["floor", "ceil", "round_prefer_floor", "round_prefer_ceil"])
    if mode == "cubic":
        attributes |= {"cubic_coeff_a": d.pick.choice([-0.5, -0.75]), "exclude_outside": d.pick.randint(0, 1)}
    sizes = np.array([1, 2, *d.ints(1, 9, 2)])
    return "Resize", [d.floats(1, 2, *d.ints(2, 6, 2)), None, None, sizes], attributes, 19, 1


def sample(d: Draw) -> Drawn:
    if d.pick.random() < 0.5:
        grid = (d.numbers.random((2, 3, 6, 2)) * 3 - 1.5).astype(np.float32)
        attributes = {
            "mode": d.pick.choice(["bilinear", "nearest", "bicubic"]),
            "padding_mode": d.pick.choice(["zeros", "border", "reflection"]),
            "align_corners": d.pick.randint(0, 1),
        }
        return "GridSample", [d.floats(2, 3, 4, 5), grid], attributes, 16, 1
    low = d.numbers.random((3, 2)) * 6
    boxes = np.concatenate([low, low + d.numbers.random((3, 2)) * 5 + 0.3], 1).astype(np.float32)
    height, width = d.ints(1, 4, 2)
    attributes = {
        "mode": d.pick.choice(["avg", "max"]), "output_height": height, "output_width": width,
        "sampling_ratio": d.pick.choice([1, 2, 3]), "spatial_scale": d.pick.choice([1.0, 0.5]),
        "coordinate_transformation_mode": d.pick.choice(["half_pixel", "output_half_pixel"]),
    }  # fmt: skip
    return "RoiAlign", [d.floats(2, 3, 9, 8), boxes, np.array([0, 1, 1])], attributes, 16, 1


def reduction(d: Draw) -> Drawn:
    kinds = ["Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "SumSquare"]
    name = f"Reduce{d.pick.choice(kinds)}"
    dtype = d.pick.choice([np.float32, np.int32, np.int64])
    x, axes = (abs(d.floats(2, 3, 4)) * 3 + 0.1).astype(dtype), d.pick.choice([[0], [-1], [0, 2], [1]])
    if d.pick.random() < 0.5 and name != "ReduceSum":
        return name, [x], {"axes": axes, "keepdims": d.pick.randint(0, 1)}, 13, 1
    return name, [x, np.array(axes)], {"keepdims": d.pick.randint(0, 1)}, 18, 1


def arithmetic(d: Draw) -> Drawn:
    name = d.pick.choice(["Add", "Sub", "Mul", "Div", "Mod", "Max", "Min", "BitShift", "Less", "Greater"])
    kinds = [np.int32, np.int64, np.uint32]
    dtype = d.pick.choice([np.uint8, np.uint32] if name == "BitShift" else kinds)
    info = np.iinfo(dtype)
    x, y = (d.numbers.integers(info.min, info.max, s, dtype=dtype, endpoint=True) for s in ((3, 4), (4,)))
    y[y == 0] = 1
    if name == "BitShift":
        return name, [x, (y % 8).astype(dtype)], {"direction": d.pick.choice(["LEFT", "RIGHT"])}, 17, 1
    return name, [x, y], {"fmod": d.pick.randint(0, 1)} if name == "Mod" else {}, 17, 1


def places(d: Draw) -> Drawn:
    x, how = d.floats(3, 4, 5), d.pick.choice(["none", "add", "mul", "max", "min"])
    index = d.numbers.permutation(3)[:2].reshape(2, 1, 1) * np.ones((2, 4, 5), np.int64)
    steps = np.array([d.pick.choice([-2, -1, 1, 2]) for _ in range(2)])
    return d.pick.choice([
        ("Softmax", [x], {"axis": d.pick.randint(0, 2)}, d.pick.choice([7, 11, 13]), 1),
        ("TopK", [np.round(d.floats(3, 6)), np.array([3])], {"largest": d.pick.randint(0, 1)}, 11, 2),
        ("Pad", [x, np.array(d.ints(-1, 2, 6))], {"mode": d.pick.choice(["constant", "reflect", "edge"])}, 13, 1),
        ("Slice", [x, np.array([-5, 4]), np.array([5, -6]), np.array([0, 2]), abs(steps) * [1, -1]], {}, 13, 1),
        ("GatherND", [x, d.numbers.integers(-3, 3, (2, 3, 2))], {}, 13, 1),
        ("ScatterElements", [x, index, d.floats(2, 4, 5)], {"axis": 0, "reduction": how}, 18, 1),
        ("ScatterND", [x, np.array([[0, 1], [2, -1], [1, 0]]), d.floats(3, 5)], {"reduction": how}, 18, 1),
        ("OneHot", [d.numbers.integers(-6, 6, (3, 2)), np.array(5), d.floats(2)], {"axis": 1}, 11, 1),
        ("Trilu", [d.floats(2, 4, 5), np.array(d.pick.randint(-5, 5))], {"upper": d.pick.randint(0, 1)}, 14, 1),
        ("LRN", [d.floats(1, 4, 3, 2)], {"size": d.pick.choice([1, 3]), "alpha": 0.1, "beta": 0.7, "bias": 1.2}, 13, 1),
    ])  # fmt: skip


FAMILIES = [conv, conv_transpose, pool, recurrent, resize, sample, reduction, arithmetic, places]


@pytest.mark.parametrize("family", FAMILIES, ids=[f.__name__ for f in FAMILIES])
def test_onnxruntime_says_the_same(family: Callable[[Draw], Drawn]):
    compared = 0
    for seed in range(ROUNDS):
        name, given, attributes, opset, outputs = family(Draw(seed))
        inputs = [None if x is None else torch.from_numpy(np.array(x)) for x in given]
        model = single(name, given, attributes, opset, outputs)
        there = [x for x in inputs if x is not None]
        try:
            ours = from_onnx(model, mode="as written", frozen_inputs=True)(*there)
        except OnnxUnsupportedError:
            continue
        for got, wanted in zip(ours if isinstance(ours, tuple) else (ours,), expected(model, *there), strict=True):
            where = f"{name} {attributes} {[None if x is None else x.shape for x in given]}"
            assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), where
            tolerance = {"rtol": 2e-3, "atol": 2e-5} if got.is_floating_point() else {"rtol": 0, "atol": 0}
            np.testing.assert_allclose(got.numpy(), wanted.numpy(), **tolerance, err_msg=where)
        compared += 1
    assert compared >= ROUNDS - 2


NUMPY = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.floor_divide, "Mod": np.remainder,
    "Max": np.maximum, "Min": np.minimum, "Less": np.less, "GreaterOrEqual": np.greater_equal, "Equal": np.equal,
}  # fmt: skip


@pytest.mark.parametrize("name", NUMPY)
def test_numbers_above_the_signed_ones(name):
    top = 1 << 63
    x = np.array([0, 1, 7, top - 1, top, top + 5, 2 * top - 1], dtype=np.uint64)
    left, right = (v.reshape(-1) for v in np.meshgrid(x, x[1:]))
    model = single(name, [left, right], {}, 17, 1)
    got = from_onnx(model, mode="as written")(torch.from_numpy(left), torch.from_numpy(right))
    np.testing.assert_array_equal(got.numpy(), NUMPY[name](left, right))


def single(name: str, given: list[Any], attributes: dict[str, Any], opset: int, outputs: int) -> Any:
    """A model of one node."""
    names = ["" if x is None else f"x{i}" for i, x in enumerate(given)]
    made = [f"y{i}" for i in range(outputs)]
    node = h.make_node(name, names, made, **attributes)
    inputs = [
        h.make_tensor_value_info(n, h.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for n, x in zip(names, given, strict=True)
        if x is not None
    ]
    graph = h.make_graph([node], "g", inputs, [onnx.helper.make_empty_tensor_value_info(o) for o in made])
    return h.make_model(graph, opset_imports=[h.make_opsetid("", opset)], ir_version=8)
