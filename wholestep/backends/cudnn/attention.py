"""Attention and its gradients as graphs that cuDNN's fused kernels recognise: the formula, in their order.

Scores are made in f32 and multiplied by v, dout, q and k in 16 bits. The log-sum-exp is PyTorch's: of scaled scores, by
the natural logarithm. Nothing but results and what is kept for a moment (INNER) is ever in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...dialects.strides import row_major
from ..kernels import Spec
from .graph import GIVEN, INNER, Graph, Tensor, transposed


@dataclass(frozen=True, slots=True)
class Options:
    """What is not told by tensors."""

    scale: float
    causal: bool


def forward(tensors: Sequence[Spec], options: Options) -> Graph:
    """q, k, v -> out, logsumexp."""
    q, k, v, out, logsumexp = tensors
    graph = Graph()
    given = [graph.tensor(GIVEN, spec) for spec in (q, transposed(k), v, out, column(logsumexp))]
    scores = graph.pointwise("mul", graph.matmul(*given[:2]), graph.number(options.scale))
    scores = masked(graph, scores, options)
    top = graph.reduction("max", scores)
    power = graph.pointwise("exp", graph.pointwise("sub", scores, top))
    total = graph.reduction("add", power)
    graph.pointwise("add", top, graph.pointwise("log", total), into=given[4])
    share = graph.virtual(scores.spec.shape, q.dtype)
    graph.matmul(graph.pointwise("div", power, total, into=share), given[2], into=given[3])
    return graph


def backward(tensors: Sequence[Spec], options: Options) -> Graph:
    """dout, q, k, v, out, logsumexp -> dq, dk, dv.

    Sums for dq come from many blocks of keys: they are added up in f32, in no fixed order, and then rounded.
    """
    dout, q, k, v, out, logsumexp, dq, dk, dv = tensors
    graph = Graph()
    lies = (dout, q, transposed(k), transposed(v), out, column(logsumexp), dq, dk, dv)
    given = [graph.tensor(GIVEN, spec) for spec in lies]
    d_out, queries, keys, values, made, lse = given[:6]

    products = graph.reduction("add", graph.pointwise("mul", d_out, made))
    delta = graph.tensor(INNER, products.spec)
    graph.pointwise("mul", products, graph.number(1.0), into=delta)

    scale = graph.number(options.scale)
    scores = graph.pointwise("sub", graph.pointwise("mul", graph.matmul(queries, keys), scale), lse)
    power = graph.pointwise("exp", masked(graph, scores, options))
    per_head(graph, graph.turned(power, q.dtype), d_out, given[8])

    slope = graph.pointwise("sub", graph.matmul(d_out, values), delta)
    slope = graph.pointwise("mul", slope, power)
    slope = graph.pointwise("mul", slope, scale)
    per_head(graph, graph.turned(slope, q.dtype), queries, given[7])

    sums = graph.tensor(INNER, Spec(q.shape, row_major(q.shape), torch.float32))
    graph.matmul(slope, graph.turned(keys, torch.float32), into=sums)
    graph.pointwise("identity", sums, into=given[6])
    return graph


def masked(graph: Graph, scores: Tensor, options: Options) -> Tensor:
    """Scores, minus infinity where a causal mask hides a key."""
    if not options.causal:
        return scores
    shape = scores.spec.shape
    row, key = (
        graph.pointwise("gen_index", scores, into=graph.virtual(shape, torch.int32), axis=axis) for axis in (2, 3)
    )
    seen = graph.pointwise("cmp_ge", row, key, into=graph.virtual(shape, torch.bool))
    return graph.pointwise("select", scores, graph.number(-math.inf), seen)


def per_head(graph: Graph, left: Tensor, right: Tensor, into: Tensor) -> None:
    """A product for every head of q, summed over those that share a head of the result."""
    heads = left.spec.shape[1]
    if into.spec.shape[1] == heads:
        graph.matmul(left, right, into=into)
        return
    batch, _, *sizes = into.spec.shape
    each = graph.virtual((batch, heads, *sizes), right.spec.dtype)
    graph.reduction("add", graph.matmul(left, right, into=each), into=into)


def column(spec: Spec) -> Spec:
    """One number per row, as a matrix of one column."""
    return Spec((*spec.shape, 1), (*spec.strides, 1), spec.dtype)
