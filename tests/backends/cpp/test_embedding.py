"""Gradients of embeddings by the C++ provider against PyTorch's, to the last bit; what it takes, and what not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import wholestep as ws
from wholestep.backends import cpp
from wholestep.backends.cpp import embedding
from wholestep.backends.generated import region_of
from wholestep.backends.kernels import Spec
from wholestep.backends.providers import op_by_op
from wholestep.dialects.step import StepBuilder
from wholestep.dialects.strides import row_major
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.types import BF16, F32, I32, I64, TensorType

pytestmark = pytest.mark.skipif(bool(cpp.missing()), reason=cpp.missing())

DTYPES = {F32: torch.float32, I64: torch.int64, I32: torch.int32}
#: shape of the indices, rows, columns, padding, element of the indices, strides of dy and of the indices
CASES = {
    "odd sizes": ((37,), 11, 5, -1, I64, None, None),
    "two dimensions, a row of padding": ((6, 7), 90, 17, 3, I32, None, None),
    "slices": ((40,), 12, 6, -1, I64, (24, 1), (5,)),
    "columns apart": ((40,), 12, 6, -1, I64, (1, 40), (1,)),
    "transposed": ((4, 3), 20, 6, -1, I64, (6, 24, 1), (3, 1)),
    "work for threads": ((700,), 301, 33, 5, I64, None, None),
    "many tokens": ((20_000,), 64, 3, -1, I32, None, None),
}


def gradient(tokens, rows, columns, padding=-1, index=I64, dy=None, indices=None, element=F32):
    """The gradient of an embedding as a region by itself."""
    types = TensorType((*tokens, columns), element), TensorType(tokens, index)
    function = add_function(module(), "f", list(types))
    block = function.regions[0].block
    b = StepBuilder(block, phase="backward")
    finish_function(function, [b.embedding_grad(*block.arguments, rows=rows, padding_idx=padding)])
    laid = dy or row_major(types[0].shape), indices or row_major(tokens)
    specs = [Spec(t.shape, s, DTYPES[t.element]) for t, s in zip(types, laid, strict=True)]
    return region_of(function, None, specs, torch.device("cpu"))


def put(shape, dims, tokens, values):
    """Values added to zeros of a shape at what index tensors name along some dimensions, as a region by itself."""
    kinds = [TensorType(values, F32), *(TensorType(tokens, I64) for _ in dims)]
    function = add_function(module(), "f", kinds)
    block = function.regions[0].block
    b = StepBuilder(block, phase="backward")
    given, *indices = block.arguments
    finish_function(function, [b.index_put(b.full(0, shape, F32), indices, given, dims=dims, accumulate=True)])
    specs = [Spec(t.shape, row_major(t.shape), DTYPES[t.element]) for t in kinds]
    return region_of(function, None, specs, torch.device("cpu"))


def drawn(it, limits):
    """Operands of a region: numbers, then indices below limits."""
    draw = torch.Generator().manual_seed(3)
    found = [torch.empty_strided(s.shape, s.strides, dtype=s.dtype) for s in it.operands]
    found[0].normal_(generator=draw)
    for index, (low, high) in zip(found[1:], limits, strict=True):
        index.random_(low, high, generator=draw)
    return found


def run(it, inputs):
    assert embedding.takes(next(op for op in it.ops if embedding.takes(op))) and embedding.why_not(it) == ""
    (offer,) = embedding.offers(it)
    way = embedding.build([offer])[offer.key]
    out = torch.full(it.results[0].shape, 7.0)
    way(*inputs, out, *(torch.full(s.shape, -5, dtype=s.dtype) for s in offer.scratch))
    return out


@pytest.mark.parametrize("name", CASES)
def test_is_as_by_pytorch_with_any_number_of_threads(name, threads):
    tokens, rows, columns, padding, *rest = CASES[name]
    it = gradient(tokens, rows, columns, padding, *rest)
    inputs = drawn(it, [(0, rows)])
    (expected,) = op_by_op(it)(*inputs)
    assert torch.equal(run(it, inputs), expected)


def test_values_that_several_index_tensors_place(threads):
    for shape, dims, values in (((300, 9, 8), (1, 2), (300, 36)), ((9, 8, 70), (0, 1), (36, 70))):
        it = put(shape, dims, (36,), values)
        inputs = drawn(it, [(-9, 9), (-8, 8)])
        (expected,) = op_by_op(it)(*inputs)
        torch.testing.assert_close(run(it, inputs), expected)


def test_an_index_outside_of_the_table_is_an_error():
    it = gradient((40,), 12, 6)
    inputs = drawn(it, [(0, 12)])
    for wrong in (12, -1):
        inputs[1][7] = wrong
        with pytest.raises(IndexError, match="outside of the table"):
            run(it, inputs)


def test_what_is_taken():
    def taken(**more):
        kind = {"tokens": (6,), "rows": 9, "columns": 4} | more
        function = add_function(
            module(), "f", [TensorType((*kind["tokens"], 4), kind.get("element", F32)), TensorType(kind["tokens"], I64)]
        )
        block = function.regions[0].block
        return embedding.takes(StepBuilder(block).embedding_grad(*block.arguments, rows=kind["rows"]).op)

    assert taken()
    assert not taken(element=BF16) and not taken(rows=1) and not taken(tokens=(0,))


def test_a_step_writes_gradients_of_tables_in_place():
    torch.manual_seed(0)
    tables = nn.ModuleList(nn.Embedding(50, 8) for _ in range(2))

    def loss(tables, x):
        return sum(table(x[:, i]).square().sum() for i, table in enumerate(tables))

    x = torch.randint(0, 50, (30, 2))
    optimizer = torch.optim.AdamW(tables.parameters())
    step = ws.compile(tables, loss, optimizer, (x,), providers=["aten", "cpp"], tune=False)
    launches = [launch for launch in step.plan().launches if launch.provider in ("aten", "cpp")]
    assert not any(launch.makes for launch in launches)
    assert not any(launch.name == "step.embedding_grad" for launch in launches)
    twin = [table.weight.detach().clone().requires_grad_() for table in tables]
    other = torch.optim.AdamW(twin)
    for _ in range(3):
        step(x)
        other.zero_grad()
        sum(w[x[:, i]].square().sum() for i, w in enumerate(twin)).backward()
        other.step()
    for table, w in zip(tables, twin, strict=True):
        torch.testing.assert_close(table.weight, w)
