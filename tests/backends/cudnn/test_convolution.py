"""The graphs of convolutions that cuDNN is given, computed; which are handed to it, with what, and by which engines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.nn import functional, grad

from wholestep.backends.cudnn import library
from wholestep.backends.cudnn.graph import CONVOLUTION, GIVEN, INPUT_GRADIENT, Graph
from wholestep.backends.cudnn.ways import Way, by_aten, graph_of, ways, why_unsuited
from wholestep.backends.kernels import Spec
from wholestep.backends.providers import Region
from wholestep.dialects.step import StepBuilder
from wholestep.dialects.step.convolution import result_shape
from wholestep.ir import TensorType, add_function, finish_function, module
from wholestep.ir.types import ScalarType

from .recorded import Recorded

CUDA = torch.device("cuda:0")
ELEMENTS = {torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64"}


@dataclass(frozen=True)
class Case:
    """One convolution: shapes of image and kernel, and the window."""

    x: tuple[int, ...] = (2, 4, 9, 8)
    w: tuple[int, ...] = (6, 4, 3, 3)
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (1, 1)
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = ()
    dtype: torch.dtype = torch.bfloat16

    @property
    def options(self) -> dict[str, Any]:
        names = ("stride", "padding", "dilation", "groups", "transposed", "output_padding")
        return {name: getattr(self, name) for name in names}

    @property
    def y(self) -> tuple[int, ...]:
        return result_shape(torch.empty(self.x), torch.empty(self.w), **self.options)

    def tensors(self) -> list[torch.Tensor]:
        """x, w and dy, channels-last."""
        torch.manual_seed(0)
        return [last(torch.randn(s, dtype=torch.float64).to(self.dtype)) for s in (self.x, self.w, self.y)]


def last(x: torch.Tensor) -> torch.Tensor:
    """The same with its channels side by side."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def region(name: str, case: Case, tensors: list[torch.Tensor], device: torch.device = CUDA, **more: Any) -> Region:
    """The op of that name; tensors: its operands and its result."""
    *operands, _ = tensors
    types = [TensorType(tuple(x.shape), ScalarType(ELEMENTS[x.dtype])) for x in operands]
    function = add_function(module(), "convolution", types)
    shapes = {"conv_input_grad": {"input_shape": case.x}, "conv_weight_grad": {"weight_shape": case.w}}
    build = getattr(StepBuilder(function.regions[0].block), name)
    made = build(*function.regions[0].block.arguments, **case.options, **shapes.get(name, {}), **more)
    finish_function(function, [made])
    specs = [Spec(tuple(x.shape), tuple(x.stride()), x.dtype) for x in tensors]
    return Region(function, None, tuple(specs[:-1]), (specs[-1],), device)


def all_of(case: Case, device: torch.device = CUDA) -> list[Region]:
    """The convolution and its gradients."""
    x, w, dy = case.tensors()
    orders = {"conv": [x, w, dy], "conv_input_grad": [dy, w, x], "conv_weight_grad": [x, dy, w]}
    return [region(name, case, tensors, device) for name, tensors in orders.items()]


def run(graph: Graph, tensors: list[torch.Tensor]) -> None:
    """Computes a graph of one node where its tensors lie."""
    (node,) = graph.nodes
    assert node.window is not None
    held = {}
    for t, x in zip(graph.of(GIVEN), tensors, strict=True):
        held[t.id] = x.as_strided(t.spec.shape, t.spec.strides)
        assert len(t.spec.shape) == 4 and x.untyped_storage().nbytes() == t.spec.bytes
    left, right = (held[t.id] for t in node.inputs)
    into = held[node.output.id]
    window = (node.window.stride, node.window.padding, node.window.dilation)
    if node.kind == CONVOLUTION:
        made = functional.conv2d(left, right, None, *window, left.shape[1] // right.shape[1])
    elif node.kind == INPUT_GRADIENT:
        made = grad.conv2d_input(into.shape, right, left, *window, into.shape[1] // right.shape[1])
    else:
        made = grad.conv2d_weight(left, into.shape, right, *window, left.shape[1] // into.shape[1])
    into.copy_(made)


CASES = {
    "plain": Case(),
    "strided, of a sliding kernel that is not square": Case(w=(6, 4, 3, 2), stride=(2, 1), padding=(1, 0)),
    "dilated": Case(dilation=(2, 3), padding=(2, 3)),
    "in groups": Case(w=(6, 2, 3, 3), groups=2),
    "one tap": Case(w=(6, 4, 1, 1), stride=(2, 2), padding=(0, 0)),
    "transposed": Case(w=(4, 6, 3, 2), stride=(2, 2), output_padding=(1, 0), transposed=True),
    "transposed, in groups": Case(w=(4, 3, 3, 3), groups=2, transposed=True),
    "of a sequence": Case((2, 4, 9), (6, 4, 3), (2,), (1,), (1,)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_graphs_are_convolutions_in_place(name: str) -> None:
    case = replace(CASES[name], dtype=torch.float64)
    x, w, dy = (t.requires_grad_() for t in case.tensors())
    size, adjoint = len(case.stride), "_transpose" if case.transposed else ""
    function = getattr(functional, f"conv{adjoint}{size}d")
    extra = {"output_padding": case.output_padding or 0} if case.transposed else {}
    window = {n: getattr(case, n) for n in ("stride", "padding", "dilation", "groups")}
    y = function(x, w, **window, **extra)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    with torch.no_grad():
        for place, operands, wanted in zip(all_of(case), ([x, w], [dy, w], [x, dy]), (y, dx, dw), strict=True):
            found = last(torch.zeros_like(wanted))
            run(graph_of(place), [*operands, found])
            torch.testing.assert_close(found, wanted)


# ---- what is handed to the library -----------------------------------------------------------------------------------

LARGE = Case(x=(8, 64, 28, 28), w=(64, 64, 3, 3))


def test_convolutions_that_suit() -> None:
    grouped = replace(LARGE, w=(64, 16, 3, 3), groups=4)
    for case in (LARGE, grouped, replace(LARGE, transposed=True), replace(LARGE, w=(64, 64, 3, 3), stride=(2, 2))):
        assert [why_unsuited(place) for place in all_of(case)] == ["", "", ""]
    # of a kernel of one tap the strides of size 1 tell nothing, but cuDNN reads the layout from them
    place = all_of(replace(LARGE, w=(256, 64, 1, 1), padding=(0, 0)))[0]
    rows = Spec((256, 64, 1, 1), (64, 1, 1, 1), torch.bfloat16)
    place = replace(place, operands=(place.operands[0], rows))
    assert why_unsuited(place) == ""
    assert graph_of(place).tensors[1].spec.strides == (64, 1, 64, 64)


def test_convolutions_that_do_not() -> None:
    place = all_of(LARGE)[0]
    x, w, dy = LARGE.tensors()
    bias = torch.zeros(64, dtype=torch.bfloat16)
    rows = Spec(place.operands[0].shape, (64 * 28 * 28, 28 * 28, 28, 1), torch.bfloat16)
    wide = replace(place.results[0], dtype=torch.float32)
    gaps = replace(place.results[0], strides=(28 * 28 * 96, 1, 28 * 96, 96))
    many = replace(LARGE, x=(1 << 14, 64, 64, 64), padding=(0, 0)).x
    huge = Spec(many, (64 * 64 * 64, 1, 64 * 64, 64), torch.bfloat16)
    cases = {
        "more than an attention or a convolution": replace(place, parts=(place,)),
        "a bias": region("conv", LARGE, [x, w, bias, dy]),
        "as many zeros before as behind": region("conv", LARGE, [x, w, dy], padding_after=(1, 2)),
        "depthwise": all_of(replace(LARGE, w=(64, 1, 3, 3), groups=64))[2],
        "of 16 bits": all_of(replace(LARGE, dtype=torch.float32))[1],
        "other types": replace(place, results=(wide,)),
        "not channels-last": replace(place, operands=(rows, place.operands[1])),
        "are not channels-last": replace(place, results=(gaps,)),
        "more elements": replace(place, operands=(huge, place.operands[1])),
        "too small": all_of(Case())[0],
    }
    for reason, case in cases.items():
        assert reason in why_unsuited(case), reason
    with torch.backends.cudnn.flags(enabled=False):
        assert "switched off" in why_unsuited(place)


def test_engines_that_suit(monkeypatch: pytest.MonkeyPatch) -> None:
    core, mess, wino = library.TENSOR_CORES, library.NO_FIXED_ORDER, library.WINOGRAD
    Recorded(monkeypatch, [(0, [core]), (1 << 29, [core]), (0, []), (64, [core, mess]), (0, [core, wino]), (7, [core])])
    place = all_of(LARGE)[2]
    assert [way.engine.number for way in ways(place)] == [0, 3, 5]
    assert [sum(s.bytes for s in way.scratch) for way in ways(place)] == [0, 64, 7]
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert [way.engine.number for way in ways(place)] == [0, 5]


@pytest.mark.parametrize("number", range(3))
def test_descriptors(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(LARGE, stride=(2, 1), padding=(3, 4), dilation=(2, 5))
    recorded = Recorded(monkeypatch, [(0, [library.TENSOR_CORES])])
    assert len(ways(all_of(case)[number])) == 1
    (window,) = recorded.of(library.CONVOLUTION)
    assert window == {100: [0], 101: [1], 102: [2, 5], 103: [2, 1], 104: [3, 4], 105: [3, 4], 106: [2]}
    first, second, result = recorded.kinds[library.TENSOR]
    conv = recorded.kinds[library.CONVOLUTION]
    kind, told = [
        (10, {702: conv, 704: [first], 703: [second], 705: [result], 700: [1.0], 701: [0.0]}),
        (12, {708: conv, 711: [first], 709: [second], 710: [result], 706: [1.0], 707: [0.0]}),
        (11, {714: conv, 716: [first], 717: [second], 715: [result], 712: [1.0], 713: [0.0]}),
    ][number]
    assert recorded.of(kind) == [told]


def test_tensors_that_begin_anywhere_are_left_to_aten() -> None:
    place = all_of(Case(), torch.device("cpu"))[2]
    x, w, dy = Case().tensors()

    class Plan:
        def run(self, tensors: list[torch.Tensor]) -> None:
            raise AssertionError("this one cannot read it")

    engine: Any = type("Engine", (), {"plan": Plan(), "workspace": 0, "graph": graph_of(place)})
    found = torch.empty(w.numel() + 1, dtype=w.dtype)[1:].as_strided(w.shape, w.stride())
    Way(engine, by_aten(place)).build()(x, dy, found)
    wanted = grad.conv2d_weight(x.float(), list(w.shape), dy.float(), padding=1)
    torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2)
