"""Gradients through imported operators equal PyTorch's, in float64, each for every input that has one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto
from onnx import helper as h

from wholestep.onnx import from_onnx


@dataclass
class Check:
    """An operator with the torch function that it must agree with; integers among the shapes are tensors of indices."""

    operator: str
    shapes: list[Any]
    function: Callable[..., torch.Tensor]
    attributes: dict[str, Any] = field(default_factory=dict)
    opset: int = 18
    positive: bool = False


def gru(x, w, r, bias):
    """torch's GRU with the gates in ONNX's order (update, reset, new) and the reset after the product."""
    size = r.shape[-1]
    order = [1, 0, 2]

    def turned(t):
        return torch.cat([t[i * size : (i + 1) * size] for i in order])

    layer = torch.nn.GRU(x.shape[-1], size, dtype=x.dtype)
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    parts = (turned(w[0]), turned(r[0]), turned(bias[0, : 3 * size]), turned(bias[0, 3 * size :]))
    return torch.func.functional_call(layer, dict(zip(names, parts, strict=True)), (x,))[0].unsqueeze(1)


def lstm(x, w, r, bias):
    """torch's LSTM with the gates in ONNX's order (input, output, forget, cell)."""
    size = r.shape[-1]

    def turned(t):
        return torch.cat([t[i * size : (i + 1) * size] for i in (0, 2, 3, 1)])

    layer = torch.nn.LSTM(x.shape[-1], size, dtype=x.dtype)
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    parts = (turned(w[0]), turned(r[0]), turned(bias[0, : 4 * size]), turned(bias[0, 4 * size :]))
    return torch.func.functional_call(layer, dict(zip(names, parts, strict=True)), (x,))[0].unsqueeze(1)


def capped(q, k, v):
    """Causal attention whose scores are bounded."""
    scores = 4 * torch.tanh(q @ k.mT / 2**0.5 / 4)
    hidden = ~torch.ones(3, 3).tril().bool()
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


INDEX = torch.tensor([[0, 2], [1, -1]])
TARGET = torch.tensor([[0, 2, 1], [3, 1, 1]])
CHECKS = [
    Check("Add", [(2, 3), (3,)], torch.add),
    Check("Div", [(2, 3), (2, 1)], torch.div, positive=True),
    Check("Pow", [(2, 3), (3,)], torch.pow, positive=True),
    Check("Max", [(2, 3), (3,)], torch.maximum),
    Check("Exp", [(2, 3)], torch.exp),
    Check("Asinh", [(2, 3)], torch.asinh),
    Check("Erf", [(2, 3)], torch.erf),
    Check("Clip", [(4, 5)], lambda x: x.clamp(-0.5, 0.75), {"min": -0.5, "max": 0.75}, opset=10),
    Check("Gelu", [(2, 3)], lambda x: F.gelu(x, approximate="tanh"), {"approximate": "tanh"}, opset=20),
    Check("Elu", [(4, 5)], lambda x: F.elu(x, 0.75), {"alpha": 0.75}),
    Check("Softplus", [(4, 5)], F.softplus),
    Check("Mish", [(4, 5)], F.mish),
    Check("LeakyRelu", [(4, 5)], lambda x: F.leaky_relu(x, 0.125), {"alpha": 0.125}),
    Check("PRelu", [(2, 3, 4), (3, 1)], lambda x, s: torch.where(x < 0, x * s, x)),
    Check("HardSigmoid", [(4, 5)], lambda x: (0.25 * x + 0.5).clamp(0, 1), {"alpha": 0.25}),
    Check("MatMul", [(2, 3, 4), (4, 5)], torch.matmul),
    Check("Gemm", [(3, 4), (5, 4), (5,)], lambda x, y, z: 0.5 * x @ y.T + 2 * z,
          {"alpha": 0.5, "beta": 2.0, "transB": 1}),
    Check("Einsum", [(2, 3, 4), (2, 4, 5)], lambda x, y: torch.einsum("bij,bjk->kb", x, y),
          {"equation": "bij,bjk->kb"}),
    Check("Softmax", [(2, 3, 4)], lambda x: x.flatten(1).softmax(1).view_as(x), {"axis": 1}, opset=11),
    Check("LogSoftmax", [(2, 3, 4)], lambda x: x.log_softmax(1), {"axis": 1}),
    Check("ReduceL2", [(2, 3, 4)], lambda x: torch.linalg.vector_norm(x, keepdim=True)),
    Check("ReduceMax", [(2, 3, 4)], lambda x: x.amax((0, 1, 2), keepdim=True)),
    Check("CumSum", [(3, 4), torch.tensor(1)], lambda x: x.flip(1).cumsum(1).flip(1), {"reverse": 1}),
    Check("Transpose", [(2, 3, 4)], lambda x: x.permute(2, 0, 1), {"perm": [2, 0, 1]}),
    Check("Concat", [(2, 3), (2, 2)], lambda x, y: torch.cat([x, y], 1), {"axis": 1}),
    Check("Pad", [(3, 4), torch.tensor([1, 2, 0, -1])], lambda x: F.pad(x[None], (2, 0, 1, 0), "reflect")[0][:, :-1],
          {"mode": "reflect"}),
    Check("Gather", [(4, 3), INDEX], lambda x: x[INDEX]),
    Check("ScatterND", [(4, 3), torch.tensor([[1], [3]]), (2, 3)],
          lambda x, u: x.index_put((torch.tensor([1, 3]),), u, accumulate=True), {"reduction": "add"}),
    Check("Where", [torch.tensor([[True], [False]]), (2, 3), (3,)],
          lambda x, y: torch.where(torch.tensor([[True], [False]]), x, y)),
    Check("Conv", [(1, 4, 6, 5), (6, 2, 3, 2), (6,)],
          lambda x, w, b: F.conv2d(F.pad(x, (0, 1, 1, 0)), w, b, stride=(2, 1), groups=2),
          {"pads": [1, 0, 0, 1], "strides": [2, 1], "group": 2}),
    Check("ConvTranspose", [(1, 2, 4, 3), (2, 3, 3, 2)],
          lambda x, w: F.conv_transpose2d(x, w, stride=2)[:, :, 1:, :-1], {"pads": [1, 0, 0, 1], "strides": [2, 2]}),
    Check("MaxPool", [(1, 2, 7, 6)], lambda x: F.max_pool2d(F.pad(x, (0, 1, 1, 0), value=-9e9), 3, 2),
          {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 0, 0, 1]}),
    Check("AveragePool", [(1, 2, 6)], lambda x: F.avg_pool1d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
          {"kernel_shape": [3], "strides": [2], "pads": [1, 1], "ceil_mode": 1}),
    Check("LayerNormalization", [(2, 3, 4), (4,), (4,)], lambda x, w, b: F.layer_norm(x, (4,), w, b, 1e-3),
          {"epsilon": 1e-3}),
    Check("GroupNormalization", [(2, 4, 5), (4,), (4,)], lambda x, w, b: F.group_norm(x, 2, w, b), {"num_groups": 2},
          opset=21),
    Check("RMSNormalization", [(2, 3, 4), (4,)], lambda x, w: F.rms_norm(x, (4,), w, 1e-5), opset=23),
    Check("InstanceNormalization", [(2, 3, 5), (3,), (3,)], lambda x, w, b: F.instance_norm(x, weight=w, bias=b)),
    Check("Resize", [(1, 2, 3, 4), None, None, torch.tensor([1, 2, 5, 7])],
          lambda x: F.interpolate(x, (5, 7), mode="bilinear"), {"mode": "linear"}),
    Check("GridSample", [(1, 2, 4, 5), (1, 3, 3, 2)], lambda x, g: F.grid_sample(x, g, align_corners=False), opset=20),
    Check("SoftmaxCrossEntropyLoss", [(2, 4, 3), TARGET], lambda x: F.cross_entropy(x, TARGET, ignore_index=1),
          {"ignore_index": 1}),
    Check("Attention", [(1, 4, 3, 2), (1, 2, 5, 2), (1, 2, 5, 2)],
          lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), opset=23),
    Check("Attention", [(1, 2, 3, 2), (1, 2, 3, 2), (1, 2, 3, 2)],
          capped, {"softcap": 4.0, "is_causal": 1}, opset=23),
    Check("GRU", [(3, 2, 4), (1, 9, 4), (1, 9, 3), (1, 18)], gru, {"hidden_size": 3, "linear_before_reset": 1}),
    Check("LSTM", [(3, 2, 4), (1, 12, 4), (1, 12, 3), (1, 24)], lstm, {"hidden_size": 3}),
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=[f"{i}-{c.operator}" for i, c in enumerate(CHECKS)])
def test_the_gradient_is_pytorchs(check):
    torch.manual_seed(3)
    inputs: list[Any] = []
    for shape in check.shapes:
        if isinstance(shape, tuple):
            x = torch.rand(shape, dtype=torch.float64) + 0.5 if check.positive else torch.randn(shape).double()
            inputs.append(x.requires_grad_())
        else:
            inputs.append(shape)
    ours = from_onnx(single(check, inputs), mode="as written", frozen_inputs=True)(
        *(x for x in inputs if x is not None)
    )
    ours = ours[0] if isinstance(ours, tuple) else ours
    floats = [x for x in inputs if x is not None and x.is_floating_point()]
    theirs = check.function(*floats)
    torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=1e-9, atol=1e-9)
    seed = torch.randn_like(theirs)
    mine = torch.autograd.grad(ours, floats, seed)
    for got, wanted in zip(mine, torch.autograd.grad(theirs, floats, seed), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8)


def single(check: Check, inputs: list[Any]) -> Any:
    """A model of one node."""
    kinds = {torch.float64: TensorProto.DOUBLE, torch.int64: TensorProto.INT64, torch.bool: TensorProto.BOOL}
    names = ["" if x is None else f"x{i}" for i, x in enumerate(inputs)]
    node = h.make_node(check.operator, names, ["y"], **check.attributes)
    given = [
        h.make_tensor_value_info(n, kinds[x.dtype], list(x.shape))
        for n, x in zip(names, inputs, strict=True)
        if x is not None
    ]
    graph = h.make_graph([node], "g", given, [onnx.helper.make_empty_tensor_value_info("y")])
    return h.make_model(graph, opset_imports=[h.make_opsetid("", check.opset)], ir_version=10)
