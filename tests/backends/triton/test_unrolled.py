"""Products that are read at several places at once, such as rotary positions, against torch in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backends.triton.child import Ask, asking, serve
from tests.backends.triton.test_contraction import Input, assert_right, loops, refusal, run_built, strides_of
from wholestep.backends.kernels import Spec
from wholestep.dialects.step.base import torch_dtype
from wholestep.ir.core import Op
from wholestep.ir.types import BF16, F32, TensorType

WIDTH = 40

#: inputs, what is computed as step ops, and as torch
Case = tuple[list[Input], Callable[..., Any], Callable[..., list[torch.Tensor]]]


# ---- rotary positions ------------------------------------------------------------------------------------------------


def heads_first(b: Any, y: Any, heads: int) -> Any:
    rows, length, width = y.type.shape
    return b.transpose(b.reshape(y, shape=(rows, length, heads, width // heads)), order=(0, 2, 1, 3))


def half_turned(b: Any, x: Any) -> Any:
    size = x.type.shape[-1]
    parts = [b.slice(x, dim=3, start=at, end=at + size // 2) for at in (size // 2, 0)]
    return b.concat([b.neg(parts[0]), parts[1]], dim=3)


def turned(b: Any, x: Any, cos: Any, sin: Any) -> Any:
    """Rotary positions in f32."""
    wide = b.cast_to(x, F32)
    return b.cast_to(b.add(b.mul(wide, cos), b.mul(half_turned(b, wide), sin)), x.type.element)


def split(y: torch.Tensor, heads: int) -> torch.Tensor:
    return y.unflatten(-1, (heads, -1)).transpose(1, 2)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def rotary(rows: int, length: int, heads: int, size: int) -> Case:
    def build(b: Any, x: Any, w: Any, cos: Any, sin: Any) -> Any:
        return turned(b, heads_first(b, b.contract(x, w, spec="abk,nk->abn"), heads), cos, sin)

    def formula(x: torch.Tensor, w: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
        return [rotated(split(x @ w.T, heads), cos, sin)]

    angles = ((length, size), F32)
    return [(rows, length, WIDTH), (heads * size, WIDTH), angles, angles], build, formula


def keys_alone() -> Case:
    """The last head of a product; nobody asks for the others."""

    def build(b: Any, x: Any, w: Any, cos: Any, sin: Any) -> Any:
        keys = b.slice(b.contract(x, w, spec="abk,nk->abn"), dim=2, start=32, end=48)
        return turned(b, heads_first(b, keys, 1), cos, sin)

    def formula(x: torch.Tensor, w: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
        return [rotated(split(x @ w[32:].T, 1), cos, sin)]

    angles = ((21, 16), F32)
    return [(2, 21, WIDTH), (48, WIDTH), angles, angles], build, formula


def with_bias_and_what_went_in() -> Case:
    """As weights lie in GPT-2, with a bias; the product itself is an output too."""

    def build(b: Any, x: Any, w: Any, bias: Any, cos: Any, sin: Any) -> Any:
        q = b.contract(x, w, bias, spec="abk,kn->abn")
        return [q, turned(b, heads_first(b, q, 3), cos, sin)]

    def formula(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, *angles: torch.Tensor) -> list[torch.Tensor]:
        q = x @ w + bias
        return [q, rotated(split(q, 3), *angles)]

    angles = ((21, 16), F32)
    return [(2, 21, WIDTH), (WIDTH, 48), (48,), angles, angles], build, formula


def a_part_of_each_head() -> Case:
    """Half of each head is turned, the other half stays."""

    def build(b: Any, x: Any, w: Any, cos: Any, sin: Any) -> Any:
        q = heads_first(b, b.contract(x, w, spec="abk,nk->abn"), 2)
        near, far = (b.slice(q, dim=3, start=at, end=at + 16) for at in (0, 16))
        return b.concat([turned(b, near, cos, sin), far], dim=3)

    def formula(x: torch.Tensor, w: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
        near, far = split(x @ w.T, 2).chunk(2, -1)
        return [torch.cat([rotated(near, cos, sin), far], -1)]

    angles = ((21, 16), F32)
    return [(2, 21, WIDTH), (64, WIDTH), angles, angles], build, formula


def neighbours_turned() -> Case:
    """Pairs of neighbours are turned instead of halves, as in GPT-J."""

    def build(b: Any, x: Any, w: Any, cos: Any, sin: Any) -> Any:
        q = heads_first(b, b.contract(x, w, spec="abk,nk->abn"), 3)
        pairs = b.reshape(q, shape=(2, 3, 21, 8, 2))
        first, second = (b.slice(pairs, dim=4, start=i, end=i + 1) for i in (0, 1))
        other = b.reshape(b.concat([b.neg(second), first], dim=4), shape=(2, 3, 21, 16))
        return b.add(b.mul(q, cos), b.mul(other, sin))

    def formula(x: torch.Tensor, w: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
        q = split(x @ w.T, 3)
        return [q * cos + torch.stack([-q[..., 1::2], q[..., ::2]], -1).flatten(-2) * sin]

    return [(2, 21, WIDTH), (48, WIDTH), (21, 16), (21, 16)], build, formula


def queries_times_keys() -> Case:
    """One product that gives both, side by side: four places at once, not evenly apart."""

    def build(b: Any, x: Any, w: Any, cos: Any, sin: Any) -> Any:
        both = b.contract(x, w, spec="abk,nk->abn")
        parts = [b.slice(both, dim=2, start=at, end=at + 48) for at in (0, 48)]
        return b.mul(*(turned(b, heads_first(b, part, 3), cos, sin) for part in parts))

    def formula(x: torch.Tensor, w: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
        queries, keys = (rotated(split(part, 3), cos, sin) for part in (x @ w.T).chunk(2, -1))
        return [queries * keys]

    angles = ((21, 16), F32)
    return [(2, 21, WIDTH), (96, WIDTH), angles, angles], build, formula


def gated() -> Case:
    """Two halves of a product that go into one result, and sums of its columns."""

    def build(b: Any, x: Any, w: Any) -> Any:
        both = b.contract(x, w, spec="mk,nk->mn")
        gate, up = (b.slice(both, dim=1, start=at, end=at + 48) for at in (0, 48))
        y = b.mul(b.silu(gate), up)
        return [y, b.sum(b.cast_to(y, F32), dims=(0,))]

    def formula(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        gate, up = (x @ w.T).chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
        return [y, y.sum(0)]

    return [(70, WIDTH), (96, WIDTH)], build, formula


def turned_back(of_weight: bool) -> Case:
    """The gradient of rotary positions on the way into products: of their input, and of their weight."""

    def build(b: Any, d: Any, other: Any, cos: Any, sin: Any) -> Any:
        wide = b.cast_to(d, F32)
        scaled = b.mul(wide, sin)
        low, high = (b.slice(scaled, dim=3, start=at, end=at + 8) for at in (0, 8))
        d = b.cast_to(b.add(b.mul(wide, cos), b.concat([high, b.neg(low)], dim=3)), d.type.element)
        d = b.reshape(b.transpose(d, order=(0, 2, 1, 3)), shape=(2, 21, 48))
        return b.contract(d, other, spec="abn,abk->nk" if of_weight else "abn,nk->abk")

    def formula(d: torch.Tensor, other: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
        low, high = (d * sin).chunk(2, -1)
        d = (d * cos + torch.cat([high, -low], -1)).transpose(1, 2).flatten(2)
        return [d.flatten(0, 1).T @ other.flatten(0, 1) if of_weight else d @ other]

    angles = ((21, 16), F32)
    return [(2, 3, 21, 16), (2, 21, WIDTH) if of_weight else (48, WIDTH), angles, angles], build, formula


CASES: dict[str, Case] = {
    **{f"{r}x{t}, {h} of {d}": rotary(r, t, h, d) for r, t, h, d in ((2, 21, 1, 16), (1, 37, 3, 8), (2, 19, 3, 64))},
    "keys alone": keys_alone(),
    "bias": with_bias_and_what_went_in(),
    "part": a_part_of_each_head(),
    "neighbours": neighbours_turned(),
    "both": queries_times_keys(),
    "gated": gated(),
    "gradient of the input": turned_back(False),
    "gradient of the weight": turned_back(True),
}


def run_case(name: str, element: str, every: bool = False, tiles: Sequence[dict[str, int]] = ()) -> dict[str, float]:
    inputs, build, formula = CASES[name]
    return run_built(inputs, build, element, every, tiles, formula)


@pytest.fixture(scope="module")
def child() -> Iterator[Ask]:
    pytest.importorskip("triton")
    with asking("tests.backends.triton.test_unrolled") as ask:
        yield ask


@pytest.mark.parametrize("element", ["f32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_what_is_computed(child: Ask, name: str, element: str) -> None:
    assert_right(child(name, element))


def test_every_configuration(child: Ask) -> None:
    assert_right(child("2x19, 3 of 64", "bf16", every=True), least=4)


@pytest.mark.parametrize("name", ["2x19, 3 of 64", "both", "gated"])
def test_pieces(child: Ask, name: str) -> None:
    """Each piece has columns of every place."""
    assert_right(child(name, "f32", every=True, tiles=[dict(m=64, n=64, k=32, warps=4, stages=2, pieces=2)]))


# ---- what is refused, and what is chosen -----------------------------------------------------------------------------


def made(case: Case, element: Any = BF16) -> tuple[Op, list[Spec]]:
    inputs, build, _ = case
    types = [TensorType(*i) if isinstance(i[0], tuple) else TensorType(i, element) for i in inputs]
    function, results = loops(types, build)
    return function, [Spec(t.shape, strides_of(t.shape), torch_dtype(t.element)) for t in (*types, *results)]


@pytest.mark.parametrize(("name", "places"), [("2x19, 3 of 64", 2), ("part", 4), ("neighbours", 2), ("both", 4)])
def test_each_element_of_the_product_is_computed_once(name: str, places: int) -> None:
    pytest.importorskip("triton")
    from wholestep.backends.triton.contraction import Contraction

    function, specs = made(CASES[name])
    product = Contraction(function, specs)
    assert product.parts == places
    columns = specs[1].shape[0]
    assert product.size["n"] * places == columns
    source = product.generate(product.tiles()[0]).source
    assert source.count("tl.dot(") == 1 and source.count("tl.load(p1 ") == 1


def test_what_is_not_several_places_of_one_product() -> None:
    """Overlapping places would be computed twice, thirds are no part of a tile, other weights are other products."""
    x, w = TensorType((40, 24), F32), TensorType((64, 24), F32)

    def blurred(b: Any, x: Any, w: Any) -> Any:
        y = b.contract(x, w, spec="mk,nk->mn")
        return b.add(b.slice(y, dim=1, start=0, end=63), b.slice(y, dim=1, start=1, end=64))

    def three(b: Any, x: Any, w: Any) -> Any:
        y = b.contract(x, b.slice(w, dim=0, start=0, end=48), spec="mk,nk->mn")
        parts = [b.slice(y, dim=1, start=at, end=at + 16) for at in (0, 16, 32)]
        return b.add(b.mul(parts[0], parts[1]), parts[2])

    def two(b: Any, x: Any, w: Any, v: Any) -> Any:
        return b.mul(b.contract(x, w, spec="mk,nk->mn"), b.contract(x, v, spec="mk,nk->mn"))

    assert "several times" in refusal([x, w], blurred)
    assert "at 3 places" in refusal([x, w], three)
    assert "several matrix products" in refusal([x, w, w], two)


def test_compiles_for_hopper() -> None:
    """Queries of a large layer: nothing spills."""
    triton = pytest.importorskip("triton")
    if not Path(triton.knobs.nvidia.ptxas.path).exists():
        pytest.skip("Triton has no ptxas here")
    from wholestep.backends.triton import contraction
    from wholestep.backends.triton.generate import compile_for

    inputs, build, formula = rotary(4, 2048, 32, 64)
    large = [(4, 2048, 2048), (2048, 2048), *inputs[2:]]
    for info in compile_for(contraction.candidates(*made((large, build, formula)))[:2], 90).values():
        assert not isinstance(info, Exception), info
        assert info.spills == 0 and info.shared <= 227 * 1024


if __name__ == "__main__":
    serve(run_case)
