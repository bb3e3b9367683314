"""The graphs that cuDNN is given, computed node by node; which attentions are handed to it, and with what pointers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wholestep.backends.attentions import corner, formula
from wholestep.backends.cudnn import library
from wholestep.backends.cudnn.attention import Options, backward, forward
from wholestep.backends.cudnn.graph import GIVEN, INNER, MATMUL, NUMBER, REDUCTION, RESHAPE, Graph, Node
from wholestep.backends.cudnn.ways import Way, by_aten, graph_of, why_not, why_unsuited
from wholestep.backends.kernels import Spec
from wholestep.backends.made_up import neutral_inputs
from wholestep.backends.providers import Region
from wholestep.dialects.step import StepBuilder
from wholestep.ir import TensorType, add_function, finish_function, module
from wholestep.ir.types import ScalarType

from .recorded import Recorded

BATCH, LENGTH, WIDTH = 2, 128, 64
CUDA = torch.device("cuda")
ELEMENTS = {torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64"}


def spec_of(x: torch.Tensor) -> Spec:
    return Spec(tuple(x.shape), tuple(x.stride()), x.dtype)


def slices(heads: int, own: int, dtype: torch.dtype, width: int = WIDTH, length: int = LENGTH) -> list[torch.Tensor]:
    """q, k and v as a projection makes them: parts of one tensor, [batch, heads, length, width]."""
    rows = torch.randn(BATCH, length, heads + 2 * own, width, dtype=torch.float32).to(dtype)
    return [x.transpose(1, 2) for x in rows.split([heads, own, own], 2)]


def region(tensors: Sequence[torch.Tensor], device: torch.device = CUDA, **options: Any) -> Region:
    """An attention of q, k, v [and a mask] or, of six tensors, its gradients; results lie as PyTorch's or as slices."""
    q, k = tensors[:2] if len(tensors) < 6 else tensors[1:3]
    types = [TensorType(tuple(x.shape), ScalarType(ELEMENTS[x.dtype])) for x in tensors]
    function = add_function(module(), "attention", types)
    block = function.regions[0].block
    options = {"scale": 0.125, "causal": False, "enable_gqa": q.shape[1] != k.shape[1]} | options
    build = StepBuilder(block)
    if len(tensors) < 6:
        finish_function(function, build.attention(*[*block.arguments, None][:4], **options))
        by_row = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        results = [by_row, torch.empty(q.shape[:-1], dtype=torch.float32)]
    else:
        finish_function(function, build.attention_grad(*block.arguments, None, **options))
        results = slices(q.shape[1], k.shape[1], q.dtype, length=q.shape[2])
    return Region(function, None, tuple(map(spec_of, tensors)), tuple(map(spec_of, results)), device)


def gradient_operands(heads: int, own: int, dtype: torch.dtype, length: int = LENGTH) -> list[torch.Tensor]:
    q, k, v = slices(heads, own, dtype, length=length)
    rows = torch.randn(BATCH, length, heads, WIDTH).to(dtype).transpose(1, 2)
    return [rows, q, k, v, rows.clone(), torch.randn(BATCH, heads, length)]


# ---- the graphs ------------------------------------------------------------------------------------------------------

FUNCTIONS = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "exp": torch.exp,
    "log": torch.log,
    "identity": torch.clone,
    "cmp_ge": torch.ge,
    "select": lambda x, other, where: torch.where(where, x, other),
}


def compute(node: Node, inputs: list[torch.Tensor]) -> torch.Tensor:
    x = inputs[0]
    if node.kind == MATMUL:
        return x @ inputs[1].repeat_interleave(x.shape[1] // inputs[1].shape[1], 1)
    if node.kind == RESHAPE:
        return x.mT
    if node.kind == REDUCTION and node.output.spec.shape[-1] == 1:
        return x.amax(-1, keepdim=True) if node.mode == "max" else x.sum(-1, keepdim=True)
    if node.kind == REDUCTION:
        own = node.output.spec.shape[1]
        return x.unflatten(1, (own, x.shape[1] // own)).sum(2)
    if node.mode == "gen_index":
        assert node.axis is not None
        sizes = [x.shape[d] if d == node.axis else 1 for d in range(4)]
        return torch.arange(x.shape[node.axis]).view(sizes).expand(x.shape)
    return FUNCTIONS[node.mode](*inputs)


def run(graph: Graph, tensors: Sequence[torch.Tensor]) -> None:
    """Computes a graph in the precision of what is given, where that lies."""
    held = {t.id: torch.tensor(t.value) for t in graph.of(NUMBER)}
    for t, x in zip(graph.of(GIVEN), tensors, strict=True):
        held[t.id] = x.as_strided(t.spec.shape, t.spec.strides)
    for node in graph.nodes:
        made = compute(node, [held[t.id] for t in node.inputs])
        assert made.shape == node.output.spec.shape, node
        if node.output.kind == GIVEN:
            held[node.output.id].copy_(made)
        else:
            held[node.output.id] = made


@pytest.mark.parametrize(("heads", "own", "causal"), [(3, 3, False), (3, 3, True), (4, 2, True)])
def test_the_graphs_are_attention_in_place(heads: int, own: int, causal: bool) -> None:
    q, k, v = slices(heads, own, torch.float64)
    place = region([q, k, v], causal=causal)
    out, dout = (torch.randn(BATCH, LENGTH, heads, WIDTH, dtype=torch.float64).transpose(1, 2) for _ in range(2))
    logsumexp = torch.empty(BATCH, heads, LENGTH, dtype=torch.float64)
    op = place.ops[0]
    wanted = formula(op, *[corner(x, op) for x in (q, k, v, dout)], None, backward=True)
    options = Options(0.125, causal)
    tensors = [q, k, v, out, logsumexp]
    run(forward(list(map(spec_of, tensors)), options), tensors)
    gradients = slices(heads, own, torch.float64)
    tensors = [dout, q, k, v, out, logsumexp, *gradients]
    run(backward(list(map(spec_of, tensors)), options), tensors)
    for found, right in zip([out, logsumexp, *gradients], wanted, strict=True):
        torch.testing.assert_close(corner(found, op), right)


def test_what_is_in_memory_and_what_it_is_multiplied_in() -> None:
    graph = graph_of(region(gradient_operands(4, 2, torch.bfloat16), causal=True))
    assert [t.id for t in graph.tensors] == list(range(1, len(graph.tensors) + 1))
    rows, dense = (BATCH, 4, LENGTH), (4 * LENGTH, LENGTH, 1)
    assert graph.scratch == (
        Spec((*rows, 1), (*dense, 1), torch.float32),
        Spec((*rows, WIDTH), (*(s * WIDTH for s in dense), 1), torch.float32),
    )
    assert [t.value for t in graph.of(NUMBER)] == [1.0, 0.125, float("-inf")]
    written = [n.output for n in graph.nodes if n.output.kind in (GIVEN, INNER)]
    assert [t.spec.shape[1] for t in written] == [4, 2, 2, 4, 4]  # delta, dv, dk, sums for dq, dq
    narrow = [n.inputs[0].spec.dtype for n in graph.nodes if n.kind == MATMUL]
    assert narrow.count(torch.bfloat16) == 4  # q, dout, and the probabilities and slopes that are turned


# ---- what is handed to the library -----------------------------------------------------------------------------------


def test_attentions_that_suit() -> None:
    assert why_unsuited(region(slices(4, 4, torch.bfloat16, length=512), causal=True)) == ""
    assert why_unsuited(region(slices(4, 2, torch.bfloat16, length=512), kernel="cudnn_repeated")) == ""
    assert why_unsuited(region(gradient_operands(4, 2, torch.bfloat16, length=512))) == ""


def test_attentions_that_do_not() -> None:
    q, k, v = slices(4, 4, torch.bfloat16)
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.bfloat16)
    apart = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    double = region([q, k, v])
    cases = {
        "more than an attention": Region(double.body, None, double.operands, double.results, CUDA, (double,)),
        "a mask": region([q, k, v, mask]),
        "another kernel": region([q, k, v], kernel="flash"),
        "of 16 bits": Region(double.body, None, tuple(map(spec_of, slices(4, 4, torch.float32))), double.results, CUDA),
        "too small": double,
        "multiples of 16 bytes": region(apart),
    }
    for reason, case in cases.items():
        assert reason in why_unsuited(case)
    assert "another kernel" in why_unsuited(region(slices(4, 4, torch.float32)))
    assert "multiples of 16" in why_unsuited(region(slices(4, 4, torch.bfloat16, width=60)))


def test_gradients_in_a_fixed_order_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "no fixed order" in why_unsuited(region(gradient_operands(4, 4, torch.bfloat16)))


@pytest.mark.skipif(torch.version.cuda is not None, reason="cuDNN is there")
def test_without_the_library() -> None:
    assert why_not(region(slices(4, 4, torch.bfloat16))) == "cuDNN is not loaded"


def test_tensors_that_begin_anywhere_are_left_to_aten() -> None:
    place = region(slices(2, 2, torch.bfloat16), torch.device("cpu"))
    inputs = neutral_inputs(place, False)
    ran: list[int] = []
    plan = SimpleNamespace(run=lambda tensors: ran.append(len(tensors)))
    engine: Any = SimpleNamespace(plan=plan, workspace=256, graph=graph_of(place))
    way = Way(engine, by_aten(place))
    assert way.scratch == (Spec((256,), (1,), torch.uint8),)
    results = [torch.empty_strided(s.shape, s.strides, dtype=s.dtype) for s in place.results]
    way.build()(*inputs, *results, torch.empty(256, dtype=torch.uint8))
    assert ran == [6]
    moved = torch.empty(results[0].numel() + 1, dtype=torch.bfloat16)[1:].as_strided(
        results[0].shape, results[0].stride()
    )
    way.build()(*inputs, moved, results[1], torch.empty(256, dtype=torch.uint8))
    assert ran == [6]
    wanted = torch.nn.functional.scaled_dot_product_attention(*inputs, scale=0.125)
    torch.testing.assert_close(moved, wanted)


def test_descriptors_and_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch, [(512, ())])
    operands = gradient_operands(2, 2, torch.bfloat16)
    place = region(operands, torch.device("cuda:0"))
    graph = graph_of(place)
    engine = library.engines(graph, place.device, 2)[0]
    laid = {t[library.ID][0]: t[library.STRIDES] for t in recorded.of(library.TENSOR)}
    assert laid == {t.id: list(t.spec.strides) for t in graph.tensors}
    assert len(recorded.of(library.OPERATION_GRAPH)[0][library.GRAPH_OPS]) == len(graph.nodes)
    results = slices(2, 2, torch.bfloat16)
    scratch = [torch.empty(s.shape, dtype=s.dtype) for s in graph.scratch]
    tensors = [*operands, *results, *scratch, torch.empty(512, dtype=torch.uint8)]
    engine.plan.run(tensors)
    (pack,) = recorded.of(library.VARIANT_PACK)
    assert pack[library.PACK_POINTERS][:11] == [t.data_ptr() for t in tensors[:11]]
    assert pack[library.PACK_IDS][:11] == [t.id for t in graph.of(GIVEN, INNER)]
    numbers = [ctypes.c_float.from_address(p).value for p in pack[library.PACK_POINTERS][11:]]
    assert numbers == [1.0, 0.125]
    assert pack[library.PACK_WORKSPACE] == [tensors[-1].data_ptr()]
