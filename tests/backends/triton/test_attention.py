"""Attention with loops around it against the same ops in float64, in memory with guarded edges.

The kernels run in a child process (`child.py`), which answers with the error per candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backends.triton.child import Ask, asking, serve
from tests.backends.triton.test_contraction import assert_right, errors_of, guarded, strides_of
from wholestep.backends.choose import Choices
from wholestep.backends.kernels import Spec
from wholestep.backends.providers import Aten, Region, Triton, op_by_op
from wholestep.backends.trial import Trial, empty
from wholestep.dialects.step import StepBuilder
from wholestep.dialects.step.base import torch_dtype
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.core import Op
from wholestep.ir.types import BOOL, F32, F64, I64, ScalarType, TensorType
from wholestep.transforms import regions
from wholestep.transforms.around import pieces_around
from wholestep.transforms.attention_sides import ATTENTION

Build = Callable[..., Any]
#: shape of an input; or shape and element type, or shape, element type and how it lies in memory
Input = Any


@dataclass
class Case:
    """A body and its inputs; of gradients also the attention whose result and logsumexp the last inputs are."""

    inputs: list[Input]
    build: Build
    forward: Build | None = None


CASES: dict[str, Case] = {}
#: words of the names of cases that are run in bf16 as well
LOW = ("shared heads", "positions", "as they are")


def case(name: str, *inputs: Input, forward: Build | None = None) -> Callable[[Build], Build]:
    def add(build: Build) -> Build:
        CASES[name] = Case(list(inputs), build, forward)
        return build

    return add


def turned(b: StepBuilder, x: Any, cos: Any, sin: Any) -> Any:
    """Rotary positions, by halves."""
    half = x.type.shape[-1] // 2
    last = x.type.rank - 1
    one, other = (b.slice(x, dim=last, start=i * half, end=(i + 1) * half, stride=1) for i in (0, 1))
    return b.add(b.mul(x, cos), b.mul(b.concat([b.neg(other), one], dim=last), sin))


def turned_back(b: StepBuilder, dx: Any, cos: Any, sin: Any) -> Any:
    """The gradient of `turned`, as autodiff writes it."""
    half = dx.type.shape[-1] // 2
    last = dx.type.rank - 1
    d = b.mul(dx, sin)
    one, other = (b.slice(d, dim=last, start=i * half, end=(i + 1) * half, stride=1) for i in (0, 1))
    back = b.concat([other, b.neg(one)], dim=last)
    return b.add(b.mul(dx, cos), back)


def joined_heads(b: StepBuilder, out: Any) -> Any:
    """[B, H, L, E] as [B, L, H * E]."""
    n, h, rows, e = out.type.shape
    return b.reshape(b.transpose(out, order=(0, 2, 1, 3)), shape=(n, rows, h * e))


# ---- forward ---------------------------------------------------------------------------------------------------------


@case("alone", (2, 3, 37, 20), (2, 3, 45, 20), (2, 3, 45, 24))
def _(b, q, k, v):
    return list(b.attention(q, k, v, scale=0.3))


@case("causal, shared heads", (2, 4, 50, 16), (2, 2, 50, 16), (2, 2, 50, 16))
def _(b, q, k, v):
    return list(b.attention(q, k, v, scale=0.25, causal=True, enable_gqa=True))


@case("causal, more keys than queries", (3, 18, 16), (3, 40, 16), (3, 40, 16))
def _(b, q, k, v):
    return list(b.attention(q, k, v, scale=-0.25, causal=True))


@case("causal, fewer keys than queries, one matrix", (50, 48), (21, 48), (21, 48))
def _(b, q, k, v):
    return list(b.attention(q, k, v, scale=0.25, causal=True))


@case("booleans, with rows that see nothing", (2, 2, 21, 16), (2, 2, 33, 16), (2, 2, 33, 16), ((2, 1, 21, 33), BOOL))
def _(b, q, k, v, seen):
    row = b.reshape(b.iota(start=0, stride=1, type=TensorType((21,), I64)), shape=(21, 1))
    return list(b.attention(q, k, v, b.bit_and(seen, b.ge(row, 2)), scale=0.3))


@case("numbers that are added, for all heads", (2, 2, 21, 16), (2, 2, 33, 16), (2, 2, 33, 16), (33,))
def _(b, q, k, v, bias):
    return list(b.attention(q, k, v, b.mul(bias, 2.0), scale=0.3))


@case(
    "positions on load, heads joined and gated on store",
    ((2, 35, 3, 20), None, "padded"), (2, 35, 3, 20), (2, 35, 3, 20), ((35, 20), F32), ((35, 20), F32), (2, 35, 60),
)  # fmt: skip
def _(b, q, k, v, cos, sin, gate):
    own = q.type.element
    q, k, v = (b.transpose(x, order=(0, 2, 1, 3)) for x in (q, k, v))
    wide = F32 if own.bits < 32 else own
    cos, sin = (b.cast_to(x, wide) for x in (cos, sin))
    q, k = (b.cast_to(turned(b, b.cast_to(x, wide), cos, sin), own) for x in (q, k))
    out, lse = b.attention(q, k, v, scale=0.3, causal=True)
    whole = joined_heads(b, out)
    return [out, b.mul(whole, b.sigmoid(gate)), lse]


@case("slices of one tensor with a bias, positions stored as well", (2, 33, 96), (96,), (33, 16), (33, 16))
def _(b, x, bias, cos, sin):
    x = b.add(x, bias)
    parts = [b.slice(x, dim=2, start=s * 16, end=e * 16, stride=1) for s, e in ((0, 4), (4, 5), (5, 6))]
    q, k, v = (b.transpose(b.reshape(p, shape=(2, 33, p.type.shape[2] // 16, 16)), order=(0, 2, 1, 3)) for p in parts)
    q, k = (turned(b, t, cos, sin) for t in (q, k))
    out, lse = b.attention(q, k, v, scale=0.25, causal=True, enable_gqa=True)
    return [q, k, joined_heads(b, out), lse]


def turned_pairs(b: StepBuilder, x: Any, cos: Any, sin: Any) -> Any:
    """Rotary positions, by neighbours."""
    *lead, d = x.type.shape
    pairs = b.reshape(x, shape=(*lead, d // 2, 2))
    last = len(lead) + 1
    one, other = (
        b.reshape(b.slice(pairs, dim=last, start=i, end=i + 1, stride=1), shape=(*lead, d // 2)) for i in (0, 1)
    )
    parts = b.sub(b.mul(one, cos), b.mul(other, sin)), b.add(b.mul(one, sin), b.mul(other, cos))
    parts = tuple(b.reshape(p, shape=(*lead, d // 2, 1)) for p in parts)
    return b.reshape(b.concat(list(parts), dim=last), shape=tuple(x.type.shape))


@case("neighbours are turned, before and after", (2, 2, 19, 24), (2, 2, 19, 24), (2, 2, 19, 24), (19, 12))
def _(b, q, k, v, angle):
    cos, sin = b.cos(angle), b.sin(angle)
    out, _ = b.attention(*(turned_pairs(b, x, cos, sin) for x in (q, k)), v, scale=0.3)
    return [b.add(turned_pairs(b, out, cos, sin), v)]


@case("norms along heads and positions, sums along columns", (2, 19, 48), (2, 19, 48), (2, 2, 19, 24), (24,), (19, 24))
def _(b, q, k, v, weight, angle):
    made = []
    for x in (q, k):
        x = b.transpose(b.reshape(x, shape=(2, 19, 2, 24)), order=(0, 2, 1, 3))
        size = b.rsqrt(b.add(b.mean(b.mul(x, x), dims=(3,), keepdim=True), 1e-5))
        made.append(turned(b, b.mul(b.mul(x, size), weight), b.cos(angle), b.sin(angle)))
    out, lse = b.attention(*made, v, scale=0.3)
    return [b.sum(b.mul(out, out), dims=(3,)), b.mul(lse, 2.0)]


@case("dropout, and a slice of the columns", ((3,), I64), (2, 2, 33, 32), (2, 2, 33, 32), (2, 2, 33, 32))
def _(b, key, q, k, v):
    out, _ = b.attention(q, k, v, scale=0.3)
    draw = b.random(key, distribution="uniform", stream=3, type=TensorType(out.type.shape, F32))
    dropped = b.select(b.ge(draw, 0.4), b.mul(out, 1 / 0.6), 0.0)
    return [b.slice(dropped, dim=3, start=5, end=24, stride=1)]


@case("operands as they are, and what else is made of them", (2, 33, 2, 16), (2, 33, 1, 16), (2, 33, 1, 16))
def _(b, q, k, v):
    q, k, v = (b.transpose(x, order=(0, 2, 1, 3)) for x in (q, k, v))
    out, _ = b.attention(q, k, v, scale=0.3, causal=True, enable_gqa=True)
    return [out, b.exp(q), b.sum(b.mul(k, k), dims=(3,))]


# ---- gradients -------------------------------------------------------------------------------------------------------


def plain(**options: Any) -> Build:
    def build(b: StepBuilder, dout: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
        *mask, _, _ = rest
        return b.attention(q, k, v, *mask, **options)

    return build


for name, options, shapes in (
    ("gradients", dict(scale=0.3), ((2, 3, 37, 24), (2, 3, 37, 20), (2, 3, 45, 20), (2, 3, 45, 24))),
    ("gradients, causal, shared heads", dict(scale=0.25, causal=True, enable_gqa=True),
     ((2, 4, 50, 16), (2, 4, 50, 16), (2, 2, 50, 16), (2, 2, 50, 16))),
    ("gradients, causal, more keys than queries", dict(scale=0.25, causal=True),
     ((3, 18, 16), (3, 18, 16), (3, 40, 16), (3, 40, 16))),
    ("gradients, causal, fewer keys than queries", dict(scale=0.25, causal=True),
     ((3, 50, 16), (3, 50, 16), (3, 18, 16), (3, 18, 16))),
    ("gradients, booleans", dict(scale=0.3),
     ((2, 2, 21, 16), (2, 2, 21, 16), (2, 2, 33, 16), (2, 2, 33, 16), ((2, 1, 21, 33), BOOL))),
    ("gradients, numbers that are added", dict(scale=0.3),
     ((2, 2, 21, 16), (2, 2, 21, 16), (2, 2, 33, 16), (2, 2, 33, 16), (2, 21, 33))),
):  # fmt: skip

    def build(b, dout, q, k, v, *rest, options=options):
        *mask, out, lse = rest
        return list(b.attention_grad(dout, q, k, v, out, lse, *mask, **options))

    case(name, *shapes, shapes[0], (shapes[0][:-1], "wide"), forward=plain(**options))(build)


def with_positions(b, dout, q, k, v, angle, out, lse):
    q, k = (turned(b, x, b.cos(angle), b.sin(angle)) for x in (q, k))
    return b.attention(q, k, v, scale=0.15, causal=True, enable_gqa=True)


@case(
    "gradients, positions on load and back on store, some stored as well",
    (2, 35, 40), (2, 2, 35, 20), (2, 1, 35, 20), (2, 1, 35, 20), (35, 20), (2, 2, 35, 20), ((2, 2, 35), "wide"),
    forward=with_positions,
)  # fmt: skip
def _(b, dout, q, k, v, angle, out, lse):
    cos, sin = b.cos(angle), b.sin(angle)
    dout = b.mul(b.transpose(b.reshape(dout, shape=(2, 35, 2, 20)), order=(0, 2, 1, 3)), 0.5)
    q, k = (turned(b, x, cos, sin) for x in (q, k))
    dq, dk, dv = b.attention_grad(dout, q, k, v, out, lse, scale=0.15, causal=True, enable_gqa=True)
    dq, dk = (turned_back(b, x, cos, sin) for x in (dq, dk))
    return [dq, joined_heads(b, dk), joined_heads(b, dv), joined_heads(b, b.exp(dout)), k]


# ---- running them ----------------------------------------------------------------------------------------------------


def types_of(inputs: Sequence[Input], element: ScalarType) -> list[TensorType]:
    wide = F64 if element is F64 else F32
    found = []
    for given in inputs:
        shape, own = (given, None) if not isinstance(given[0], tuple) else given[:2]
        own = wide if own == "wide" else own or element
        found.append(TensorType(shape, F64 if element is F64 and own.kind == "float" else own))
    return found


def body_of(types: Sequence[TensorType], build: Build) -> tuple[Op, list[TensorType]]:
    function = add_function(module(), "region", list(types))
    block = function.regions[0].block
    made = build(StepBuilder(block), *block.arguments)
    finish_function(function, list(made))
    for op in block:
        if op.name.startswith("step.attention"):
            op.attributes["kernel"] = "math"
    assert block.last is not None
    return function, [v.type for v in block.last.operands]


def exact(inputs: Sequence[Input], build: Build, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What a body gives in float64."""
    function, _ = body_of(types_of(inputs, F64), build)
    given = [t.cpu().double() if t.is_floating_point() else t.cpu() for t in tensors]
    return op_by_op(Region(function, None, (), (), torch.device("cpu")))(*given)


def region_of(case: Case, element: ScalarType, device: str) -> tuple[Op, list[torch.Tensor], list[torch.Tensor]]:
    """A body with inputs, and memory for its results."""
    function, results = body_of(types_of(case.inputs, element), case.build)
    torch.manual_seed(0)
    inputs = []
    for given, type in zip(case.inputs, types_of(case.inputs, element), strict=True):
        layout = given[2] if isinstance(given[0], tuple) and len(given) > 2 else None
        tensor = guarded(type.shape, strides_of(type.shape, layout), torch_dtype(type.element), device)
        whole = type.element.kind != "float"
        tensor.copy_(torch.randint(0, 2, type.shape) if whole else torch.randn(type.shape))
        inputs.append(tensor)
    if case.forward is not None:
        for tensor, made in zip(inputs[-2:], exact(case.inputs, case.forward, inputs), strict=True):
            tensor.copy_(made)
    outputs = [guarded(t.shape, strides_of(t.shape), torch_dtype(t.element), device) for t in results]
    return function, inputs, outputs


def run_case(
    name: str, element: str, tiles: Sequence[Sequence[int]] = (), tried: bool = False, timed: bool = False
) -> dict[str, Any]:
    """Per candidate: the largest difference as a share of the largest value, over what is allowed.

    tried: what is said against it where it is tried on made-up operands; timed: seconds of it, and of the attention.
    """
    from wholestep.backends.triton import attention

    case, device = CASES[name], "cuda" if torch.cuda.is_available() else "cpu"
    function, inputs, outputs = region_of(case, ScalarType(element), device)
    specs = [Spec(tuple(t.shape), tuple(t.stride()), t.dtype) for t in (*inputs, *outputs)]
    given, made = tuple(specs[: len(inputs)]), tuple(specs[len(inputs) :])
    region = Region(function, None, given, made, torch.device(device))
    if tried:
        return judged(region)
    if timed:
        choices = Choices(region.device, [Aten(), Triton()])
        times = choices.times([region, region_of_attention(function, region.device)])
        _, chosen = choices.compared[choices.store_key(region.key)]
        return {"times": times, "own": chosen.own, "aten": chosen.aten}
    known = attention.Attention(function, specs)
    made = [attention.candidate(known, attention.Tile(*t)) for t in tiles] or attention.candidates(function, specs)
    return errors_of(made, inputs, outputs, exact(case.inputs, case.build, inputs), element)


def judged(region: Region) -> dict[str, str]:
    """What a trial says of the first way to run a region."""
    trial = Trial(region, torch.cuda.synchronize if region.device.type == "cuda" else lambda: None)
    offer = Triton().offers(region)[0]
    assert Triton().claims(region) == "" and Triton().offer(region, offer.name) == offer
    run = Triton().build([offer])[offer.key]
    assert not isinstance(run, Exception), run
    return {offer.name: trial.judge(run, [empty(s, region.device) for s in offer.scratch])[0]}


def region_of_attention(function: Op, device: torch.device) -> Region:
    """The attention of a body, alone."""
    (piece,) = (p for p in pieces_around(function) if any(op.name in ATTENTION for op in p.ops))
    types = [v.type for v in (*piece.inputs, *piece.outputs)]
    specs = [Spec(t.shape, strides_of(t.shape), torch_dtype(t.element)) for t in types]
    count = len(piece.inputs)
    return Region(regions.body_of(piece), None, tuple(specs[:count]), tuple(specs[count:]), device)


# ---- the tests' side -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def child() -> Iterator[Ask]:
    pytest.importorskip("triton")
    with asking("tests.backends.triton.test_attention") as ask:
        yield ask


@pytest.mark.parametrize("name", CASES)
def test_exact_attention(child: Ask, name: str) -> None:
    assert_right(child(name, "f32", [(16, 32, 4, 2)]))


@pytest.mark.parametrize("name", [n for n in CASES if any(w in n for w in LOW) and "and back" not in n])
def test_attention_of_bf16(child: Ask, name: str) -> None:
    assert_right(child(name, "bf16", [(32, 16, 4, 2)]))


@pytest.mark.parametrize("name", [n for n in CASES if "dropout" in n or "gradients, positions" in n])
def test_attention_of_f16(child: Ask, name: str) -> None:
    assert_right(child(name, "f16", [(16, 16, 4, 2)]))


@pytest.mark.parametrize("name", [n for n in CASES if "gradients" in n])
def test_all_gradients_at_once(child: Ask, name: str) -> None:
    assert_right(child(name, "f32", [(64, 16, 4, 1, True), (64, 32, 4, 2, True)]), least=2)


@pytest.mark.parametrize("name", ["causal, shared heads", "gradients"])
def test_every_configuration(child: Ask, name: str) -> None:
    assert_right(child(name, "bf16"), least=2)


@pytest.mark.parametrize("name", [n for n in CASES if "positions" in n or n == "booleans, with rows that see nothing"])
def test_a_trial_finds_them_right(child: Ask, name: str) -> None:
    """By PyTorch's formula, whose gradients read nothing that forward has made."""
    assert list(child(name, "bf16", tried=True).values()) == [""]


def test_the_clock_is_that_of_one_kernel(child: Ask) -> None:
    """And not of ATen, which runs the same ops apart, and here faster."""
    found = child("dropout, and a slice of the columns", "f32", timed=True)
    together, attention = found["times"]
    assert together == found["own"] != found["aten"] and 0 < together < float("inf")
    assert 0 < attention < float("inf")


# ---- what is refused, and what is written ----------------------------------------------------------------------------

Q = TensorType((2, 3, 20, 16), F32)


def refusal(build: Build, type: TensorType = Q) -> str:
    pytest.importorskip("triton")
    from wholestep.backends.triton import attention

    types = [type, type, type]
    function, results = body_of(types, build)
    specs = [Spec(t.shape, strides_of(t.shape), torch_dtype(t.element)) for t in (*types, *results)]
    return attention.why_not(function, specs)


def attended(after: Build) -> Build:
    return lambda b, q, k, v: after(b, *b.attention(q, k, v, scale=0.3))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (attended(lambda b, out, lse: [b.exp(out), lse]), ""),
        (attended(lambda b, out, lse: [out, lse]), "nothing is computed around"),
        (attended(lambda b, out, lse: [b.transpose(out, order=(0, 2, 1, 3))]), "nothing is computed around"),
        (attended(lambda b, out, lse: [b.mul(out, b.unsqueeze(lse, -1))]), "needs out and logsumexp at once"),
        (attended(lambda b, out, lse: [b.exp(out), b.sum(out, dims=(2,))]), "sum that is not one along its columns"),
        (attended(lambda b, out, lse: [b.softmax(joined_heads(b, out), dim=2)]), "sum that is not one along"),
        (attended(lambda b, out, lse: [b.slice(b.exp(out), dim=2, start=0, end=5, stride=1)]), "fewer rows"),
        (attended(lambda b, out, lse: [b.add(out, b.flip(out, dims=(2,)))]), "another order"),
        (lambda b, q, k, v: [*b.attention(b.softmax(q, dim=2), k, v, scale=0.3)], "sum that is not one along"),
        (lambda b, q, k, v: [*b.attention(b.attention(q, k, v, scale=1.0)[0], k, v, scale=1.0)], "one attention"),
        (lambda b, q, k, v: [*b.attention(b.exp(q), k, v, scale=1.0), b.neg(q)], "made beside the attention"),
    ],
)  # fmt: skip
def test_why_not(build: Build, reason: str) -> None:
    found = refusal(build)
    assert (reason in found and found) if reason else found == ""


def test_why_not_by_types_and_sizes() -> None:
    exp = attended(lambda b, out, lse: [b.exp(out)])
    assert "f64" in refusal(exp, Q.with_element(F64))
    assert "too wide" in refusal(exp, TensorType((2, 20, 300), F32))
    assert "single rows" in refusal(exp, TensorType((2, 1, 16), F32))
    assert refusal(exp, TensorType((2, 20, 256), F32)) == ""


def big(rows: int, heads: int, shared: int, width: int) -> list[list[Any]]:
    """Ways to run an attention with positions, forward and backward."""
    from wholestep.backends.triton import attention

    def forward(b: StepBuilder, q: Any, k: Any, v: Any, cos: Any, sin: Any) -> Any:
        q, k, v = (b.transpose(x, order=(0, 2, 1, 3)) for x in (q, k, v))
        q, k = (turned(b, x, cos, sin) for x in (q, k))
        out, lse = b.attention(q, k, v, scale=0.1, causal=True, enable_gqa=True)
        return [joined_heads(b, out), lse]

    def backward(b: StepBuilder, q: Any, k: Any, v: Any, cos: Any, sin: Any, dout: Any, out: Any, lse: Any) -> Any:
        q, k, v, dout, out = (b.transpose(x, order=(0, 2, 1, 3)) for x in (q, k, v, dout, out))
        q, k = (turned(b, x, cos, sin) for x in (q, k))
        dq, dk, dv = b.attention_grad(dout, q, k, v, out, lse, scale=0.1, causal=True, enable_gqa=True)
        return [joined_heads(b, x) for x in (turned_back(b, dq, cos, sin), turned_back(b, dk, cos, sin), dv)]

    q, k, angle = (2, rows, heads, width), (2, rows, shared, width), (rows, width)
    made = []
    for inputs, build in (([], forward), ([q, q, ((2, heads, rows), "wide")], backward)):
        types = types_of([q, k, k, angle, angle, *inputs], ScalarType("bf16"))
        function, results = body_of(types, build)
        specs = [Spec(t.shape, strides_of(t.shape), torch_dtype(t.element)) for t in (*types, *results)]
        made.append(attention.candidates(function, specs))
    return made


def test_compiles_for_hopper() -> None:
    """The best guess for a large layer fits and spills nothing. Gradients, which take longer, are compiled once."""
    triton = pytest.importorskip("triton")
    if not Path(triton.knobs.nvidia.ptxas.path).exists():
        pytest.skip("Triton has no ptxas here")
    from wholestep.backends.triton.generate import compile_for

    (forward, *_), (*_, backward) = big(2048, 16, 4, 64)
    assert [len(c.functions) for c in (forward, backward)] == [1, 2]
    infos = compile_for([forward, backward], 90)
    for info in infos.values():
        assert not isinstance(info, Exception), info
        assert info.shared <= 227 * 1024 and info.spills <= 512
    assert infos[forward.key].spills == 0


def test_large_tensors_have_wide_offsets() -> None:
    pytest.importorskip("triton")
    for rows, wide in ((1024, False), (1 << 21, True)):
        for made in big(rows, 16, 4, 64):
            lines = [line for c in made for line in c.source.splitlines() if "pid = tl.program_id(0)" in line]
            assert lines and all(line.endswith(".to(tl.int64)") == wide for line in lines)


def test_tiles_are_those_that_fit() -> None:
    pytest.importorskip("triton")
    for width, least in ((64, 4), (128, 2), (256, 1)):
        for made in big(2048, 16, 4, width):
            assert len({c.name for c in made}) == len({c.key for c in made}) == len(made) >= least


if __name__ == "__main__":
    serve(run_case)
