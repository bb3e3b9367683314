"""Tall products take neighbours along where that is said to be faster; what is computed stays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.transforms.test_fuse import program, regions_of, root_of
from wholestep.backends.generated import region_of
from wholestep.backends.kernels import Spec
from wholestep.backends.providers import Triton, op_by_op
from wholestep.dialects.step import torch_dtype
from wholestep.ir import BF16, F32, TensorType, verify
from wholestep.ir.builtin import lookup
from wholestep.ir.core import Op, Value
from wholestep.runtime.executor import Executable
from wholestep.transforms import again, regions, tall_products
from wholestep.transforms.around import divide
from wholestep.transforms.fuse import Fusion, dissolve, fuse
from wholestep.transforms.regions import HELD, Bodies, Piece
from wholestep.transforms.tall_products import is_tall, likely_orders, strides_of

N, SIDE, WIDE, NARROW = 3, 16, 32, 16
IMAGE, SMALL = (N, WIDE, SIDE, SIDE), (N, NARROW, SIDE, SIDE)
DIMS = (0, 2, 3)
LAST, BACK = (0, 2, 3, 1), (0, 3, 1, 2)


def per_channel(b: Any, v: Value) -> Value:
    return b.reshape(v, shape=(*v.type.shape, 1, 1))


def normal(b: Any, x: Value, scale: Value, shift: Value) -> Value:
    return b.add(b.mul(b.cast_to(x, F32), per_channel(b, scale)), per_channel(b, shift))


def sums(b: Any, y: Value, other: Value) -> list[Value]:
    wide = b.cast_to(y, F32)
    return [b.sum(wide, dims=DIMS), b.sum(b.mul(wide, b.cast_to(other, F32)), dims=DIMS)]


def product(b: Any, x: Value, w: Value, spec: str) -> Value:
    return b.transpose(b.contract(b.transpose(x, order=LAST), w, spec=spec), order=BACK)


def forward(b: Any, x: Value, z: Value, w: Value, scale: Value, shift: Value) -> list[Value]:
    """An activation on load, statistics on store, and a normalisation that waits for them."""
    y = product(b, b.relu(b.cast_to(normal(b, x, scale, shift), BF16)), w, "nhwc,oc->nhwo")
    first, second = sums(b, y, y)
    return [b.cast_to(normal(b, y, first, second), BF16)]


def backward(b: Any, x: Value, z: Value, w: Value, scale: Value, shift: Value) -> list[Value]:
    """A gradient that two products read, and sums of the image's gradient with another image."""
    d = b.cast_to(normal(b, x, scale, shift), BF16)
    dx = product(b, d, w, "nhwc,oc->nhwo")
    dw = b.contract(b.transpose(d, order=LAST), b.transpose(z, order=LAST), spec="nhwc,nhwo->co")
    return [b.add(dx, z), dw, *sums(b, b.add(dx, z), z)]


def residual(b: Any, x: Value, z: Value, w: Value, scale: Value, shift: Value) -> list[Value]:
    """A sum that one product reads and that is added to what another makes, and statistics between the two."""
    s = b.relu(b.add(b.cast_to(normal(b, x, scale, shift), BF16), x))
    y = product(b, s, w, "nhwc,oc->nhwo")
    y = b.cast_to(normal(b, y, *sums(b, y, y)), BF16)
    return [s, b.add(product(b, y, b.transpose(w, order=(1, 0)), "nhwc,oc->nhwo"), s)]


def told(b: Any, x: Value, z: Value, w: Value, scale: Value, shift: Value) -> list[Value]:
    """A sum that a product reads and that is kept, with bits that say where it is positive; bits of another."""
    x = b.layout(x, order=LAST)
    s = b.relu(b.add(b.cast_to(normal(b, x, scale, shift), BF16), x))
    bits = b.pack_bits(b.le(s, 0.0), dim=1)
    y = product(b, s, w, "nhwc,oc->nhwo")
    back = product(b, y, b.transpose(w, order=(1, 0)), "nhwc,oc->nhwo")
    return [s, bits, y, b.select(b.unpack_bits(b.pack_bits(b.le(x, 0.0), dim=1), dim=1), 0.0, back)]


def beside(b: Any, x: Value, z: Value, w: Value, scale: Value, shift: Value) -> list[Value]:
    """A factor whose elements are also summed up, and a product of it that is not rounded."""
    d = b.cast_to(normal(b, x, scale, shift), BF16)
    rows = b.transpose(d, order=LAST), b.transpose(z, order=LAST)
    return [b.contract(*rows, spec="nhwc,nhwo->co", wide=True), b.sum(b.cast_to(d, F32), dims=DIMS)]


def side_by_side(b: Any, x: Value, z: Value, w: Value, scale: Value, shift: Value) -> list[Value]:
    """As `through_norm` leaves it: an activation beside a gradient, in one memory, that two products read; one of them
    reads the activation as well, and it is summed up."""
    g = b.transpose(b.exp(z), order=LAST)
    d = b.transpose(b.relu(b.cast_to(normal(b, x, scale, shift), BF16)), order=LAST)
    both = b.concat([g, d], dim=3)
    both.op.attributes[HELD] = 0
    wide = b.concat([w, b.slice(w, dim=1, start=0, end=NARROW)], dim=1)
    back = b.contract(both, wide, spec="nhwc,oc->nhwo")
    made = b.contract(both, d, spec="nhwa,nhwc->ac", wide=True)
    return [g, back, made, b.sum(b.cast_to(d, F32), dims=(0, 1, 2))]


def of(build: Callable[..., list[Value]]) -> Op:
    images = [TensorType(IMAGE, BF16), TensorType(SMALL, BF16), TensorType((NARROW, WIDE), BF16)]
    return program([*images, TensorType((WIDE,), F32), TensorType((WIDE,), F32)], build)


class Clock:
    """Says that fewer bytes are faster, or slower, and remembers what it was asked."""

    def __init__(self, faster: bool = True):
        self.sign, self.asked = 1 if faster else -1, list[Piece]()

    def __call__(self, pieces: Sequence[Piece], strides: Any) -> list[float]:
        self.asked += pieces
        return [self.sign * sum(v.type.bytes for v in (*p.inputs, *p.outputs)) for p in pieces]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "LEAST", 0)
    monkeypatch.setattr(tall_products, "LEAST", 0)
    monkeypatch.setattr(regions, "STREWN_ROW", 16)


def joined(function: Op, clock: Clock | None, **options: Any) -> tuple[Fusion, list[str]]:
    """Fuses and gives the products that are part of a larger kernel; results stay as they were."""
    torch.manual_seed(0)
    types = [v.type for v in function.regions[0].block.arguments]
    inputs = [(torch.randn(t.shape) / 4).to(torch_dtype(t.element)) for t in types]
    wanted = Executable(function)(inputs)
    bodies = Bodies()
    fusion = fuse(function, bodies=bodies, seconds=clock, **options)
    verify(root_of(function))
    found = []
    for op in regions_of(function):
        body = lookup(root_of(function), op.callee)
        found += [inner.spec for inner in body.regions[0].block if inner.name == "step.contract"]
        if found:
            assert fusion.bodies[op.callee.name].kernel is not None
    dissolve(function, lambda op: True)
    for mine, true in zip(Executable(function)(inputs), wanted, strict=True):
        torch.testing.assert_close(mine, true, rtol=2e-2, atol=2e-2)
    return fusion, found


def test_what_is_faster_is_one_kernel() -> None:
    fusion, found = joined(of(forward), Clock())
    assert found == ["nhwc,oc->nhwo"]
    assert len(fusion.bodies) == 2  # the product with both sides; what waits for the sums
    fusion, found = joined(of(backward), Clock())
    assert sorted(found) == ["nhwc,nhwo->co", "nhwc,oc->nhwo"]
    assert len(fusion.bodies) == 2


def gated(b: Any, x: Value, z: Value, w: Value, scale: Value, shift: Value) -> list[Value]:
    """A factor out of what is also summed up, and that alone is read by a product."""
    a = b.relu(b.cast_to(normal(b, x, scale, shift), BF16))
    factor = b.mul(a, b.cast_to(per_channel(b, shift), BF16))
    rows = b.transpose(factor, order=LAST), b.transpose(z, order=LAST)
    return [b.contract(*rows, spec="nhwc,nhwo->co", wide=True), b.sum(b.cast_to(a, F32), dims=DIMS)]


@pytest.mark.parametrize(
    "moved, seconds, taken", [(2, 1.02, True), (2, 1.13, False), (4, 0.98, True), (4, 1.02, False)]
)
def test_what_moves_less_wins_a_tie(moved: int, seconds: float, taken: bool) -> None:
    function = of(forward)
    pieces = [Piece([], [v] * n, []) for v in function.regions[0].block.arguments[:1] for n in (3, moved)]
    done: list[bool] = []
    fuser: Any = SimpleNamespace(
        block=function.regions[0].block, expect=None, seconds=lambda asked, laid: [1.0, seconds], refuse=None
    )
    tall_products.take_faster(fuser, [tall_products.Choice(pieces[:1], pieces[1:], lambda: done.append(True))])
    assert bool(done) == taken


def test_what_only_a_factor_needed_is_not_written_for_it() -> None:
    fusion, found = joined(of(gated), Clock())
    assert found == ["nhwc,nhwo->co"]
    assert not any(r.type.shape == IMAGE for op, _ in fusion.kernels for r in op.results)


def widened(b: Any, x: Value, z: Value, w: Value, scale: Value, shift: Value) -> list[Value]:
    """Something wide that is made of less, its sums with another image, and what waits for those."""
    g = product(b, z, w, "nhwc,co->nhwo")
    return [b.cast_to(normal(b, b.add(g, x), *sums(b, g, x)), BF16)]


def test_who_must_wait_for_other_readers_multiplies_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the product makes is then not written."""
    wide = (N, SIDE, SIDE, WIDE)
    for times, count in ((1, 2), (4, 1)):
        monkeypatch.setattr(tall_products, "WIDER", times)
        fusion, found = joined(of(widened), Clock())
        assert found == ["nhwc,co->nhwo"] * count
        made = [r.type.shape for op, _ in fusion.kernels for r in op.results]
        assert (wide in made) == (count == 1)
    monkeypatch.setattr(tall_products, "WIDER", 1)
    assert joined(of(widened), Clock(), forbid=["fuse *add#* <- *contract#0"])[1].count("nhwc,co->nhwo") < 2


def test_a_factor_that_others_read_is_made_and_written_by_the_product() -> None:
    function = of(residual)
    fuse(function, bodies=Bodies(), seconds=Clock())
    first, second = regions_of(function)
    body = lookup(root_of(function), first.callee).regions[0].block
    assert [op.name for op in body if op.name in ("step.relu", "step.contract", "step.sum")] == [
        *("step.relu", "step.contract"),
        *("step.sum", "step.sum"),  # (which it took along before)
    ]
    assert sorted(r.type.shape for r in first.results) == sorted([IMAGE, (N, SIDE, SIDE, NARROW), (NARROW,), (NARROW,)])
    (image,) = (r for r in first.results if r.type.shape == IMAGE)
    assert image in second.operands
    assert joined(of(residual), Clock())[1] == ["nhwc,oc->nhwo", "nhwc,oc->nhwo"]


def test_what_may_be_asked_for_next_is_told_ahead() -> None:
    """So that it can be compiled meanwhile: most of it is the same whatever is decided now."""
    clock, told = Clock(), list[set[tuple[Op, ...]]]()
    asked: list[set[tuple[Op, ...]]] = []

    def kinds(pieces: Sequence[Piece]) -> set[tuple[Op, ...]]:
        return {tuple(p.ops) for p in pieces}

    def seconds(pieces: Sequence[Piece], strides: Any) -> list[float]:
        asked.append(kinds(pieces))
        return clock(pieces, strides)

    fuse(of(residual), bodies=Bodies(), seconds=seconds, expect=lambda pieces, strides: told.append(kinds(pieces)))
    assert len(asked) == len(told) > 1
    ahead = set().union(*told[:-1])
    assert ahead & set().union(*asked[1:]) and not told[-1] & asked[0]


def test_bits_of_a_factor_are_written_by_the_product() -> None:
    function = of(told)
    fuse(function, bodies=Bodies(), seconds=Clock())
    packed = (N, WIDE // 8, SIDE, SIDE)
    made = [{r.type.shape for r in op.results} for op in regions_of(function)]
    assert any({IMAGE, packed, (N, SIDE, SIDE, NARROW)} <= shapes for shapes in made), made
    assert any(packed in [v.type.shape for v in op.operands] for op in regions_of(function))
    assert len(joined(of(told), Clock())[1]) == 2


def test_a_factor_is_not_written_where_another_kernel_must_run_between() -> None:
    """The weight of the product is made of what reads the factor."""

    def build(b: Any, x: Value, z: Value, w: Value, scale: Value, shift: Value) -> list[Value]:
        s = b.relu(b.add(b.cast_to(normal(b, x, scale, shift), BF16), x))
        more = b.cast_to(b.sum(b.cast_to(s, F32), dims=DIMS), BF16)
        return [product(b, s, b.add(w, more), "nhwc,oc->nhwo"), s]

    assert joined(of(build), Clock())[1] == []


def test_what_makes_a_factor_may_read_it_too() -> None:
    """It is computed by the product and by the kernel that sums it up, and written by none."""
    fusion, found = joined(of(beside), Clock())
    assert found == ["nhwc,nhwo->co"] and len(fusion.bodies) == 2
    made = [[r.type.shape for r in op.results] for op, _ in fusion.kernels]
    assert sorted(map(len, made)) == [1, 1]


@pytest.mark.parametrize("build", [beside, side_by_side])
def test_sums_of_what_a_product_reads_are_taken_along(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "LEAST", 4096)  # (what is smaller is no reason against it)
    function = of(build)
    fuse(function, bodies=Bodies(), seconds=Clock(), alone=is_held)
    inside = [{op.name for op in lookup(root_of(function), r.callee).regions[0].block} for r in regions_of(function)]
    assert sum({"step.sum", "step.contract"} <= names for names in inside) == 1
    assert sum("step.sum" in names for names in inside) == 1
    joined(of(build), Clock(), alone=is_held)


def is_held(op: Op) -> bool:
    return HELD in op.attributes


def test_a_part_of_what_lies_in_one_memory_is_computed_on_load() -> None:
    """The concatenation is then read from its parts, of which one is made on the way; nothing else writes it."""
    fusion, found = joined(of(side_by_side), Clock(), alone=is_held)
    assert sorted(found) == ["nhwa,nhwc->ac", "nhwc,oc->nhwo"]
    image = (N, SIDE, SIDE, WIDE)
    for op, _ in fusion.kernels:
        assert not any(sorted(r.type.shape) in (sorted(image), [N, SIDE, SIDE, WIDE + NARROW]) for r in op.results)
    function = of(side_by_side)
    fuse(function, bodies=Bodies(), seconds=Clock(), alone=is_held)
    assert not any(map(is_held, function.regions[0].block))
    bodies = [lookup(root_of(function), op.callee).regions[0].block for op in regions_of(function)]
    assert not any(is_held(op) for body in bodies for op in body)


def test_what_lies_in_one_memory_stays_there_for_other_readers() -> None:
    def build(b: Any, *values: Value) -> list[Value]:
        made = side_by_side(b, *values)
        both = next(op for op in b.block if is_held(op))
        return [*made, b.amax(both.results[0], dims=(3,))]

    function = of(build)
    fuse(function, bodies=Bodies(), seconds=Clock(), alone=is_held)
    lookups = [lookup(root_of(function), op.callee).regions[0].block for op in regions_of(function)]
    assert sum(any(map(is_held, body)) for body in lookups) == 1


def test_kernels_that_are_alike_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    plain = tall_products.heavy

    def heavy(fuser: Any, found: Iterable[Any]) -> list[Any]:
        choices = list(found)
        seen.extend(choice.saved for choice in choices)
        return plain(fuser, choices)

    def both(b: Any, x: Value, z: Value, w: Value, scale: Value, shift: Value, *other: Value) -> list[Value]:
        return [*forward(b, x, z, w, scale, shift), *forward(b, *other)]

    monkeypatch.setattr(tall_products, "heavy", heavy)
    joined(of(forward), Clock())
    monkeypatch.setattr(tall_products, "LEAST", 2 * max(seen))
    assert joined(of(forward), Clock())[1] == []
    types = [v.type for v in of(forward).regions[0].block.arguments]
    assert len(joined(program([*types, *types], both), Clock())[1]) == 2


def test_a_part_of_a_value_is_no_reason_to_write_it() -> None:
    def build(b: Any, x: Value, z: Value, w: Value, scale: Value, shift: Value) -> list[Value]:
        s = b.relu(b.add(b.cast_to(normal(b, x, scale, shift), BF16), x))
        return [product(b, b.slice(s, dim=2, start=0, end=SIDE, stride=2), w, "nhwc,oc->nhwo"), s]

    clock = Clock()
    assert joined(of(build), clock)[1] == [] and not clock.asked


def test_what_is_not_faster_stays_apart() -> None:
    for build in (forward, backward, residual):
        assert joined(of(build), Clock(faster=False))[1] == []
        assert joined(of(build), None)[1] == []


def test_little_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tall_products, "LEAST", 1 << 26)
    clock = Clock()
    assert joined(of(forward), clock)[1] == []
    assert not clock.asked


def test_what_is_forbidden_is_not_measured() -> None:
    clock = Clock()
    for build in (forward, residual):
        assert joined(of(build), clock, forbid=["fuse *contract* <- *", "fuse * <- *contract*"])[1] == []
    assert not clock.asked


def test_a_recipe_replays() -> None:
    for build in (forward, backward, residual):
        fusion, found = joined(of(build), Clock())
        lines = [f"fuse {' + '.join(sites)}" for _, sites in fusion.kernels]
        assert joined(of(build), Clock(), recipe=lines)[1] == found


def test_what_nobody_runs_comes_apart_again() -> None:
    for build, parts in ((forward, 4), (backward, 5), (residual, 6)):
        function = of(build)
        types = [v.type for v in function.regions[0].block.arguments]
        inputs = [(torch.randn(t.shape) / 4).to(torch_dtype(t.element)) for t in types]
        wanted = Executable(function)(inputs)
        bodies = Bodies()
        fusion = fuse(function, bodies=bodies, seconds=Clock())
        made = divide(function, fusion, bodies, lambda op: True)
        verify(root_of(function))
        assert len(regions_of(function)) == parts
        assert all(part.kernel is not None for part in made.values())
        dissolve(function, lambda op: True)
        for mine, true in zip(Executable(function)(inputs), wanted, strict=True):
            torch.testing.assert_close(mine, true, rtol=2e-2, atol=2e-2)


def test_a_convolution_of_few_channels_sums_up_what_it_makes() -> None:
    def build(b: Any, x: Value, w: Value) -> list[Value]:
        y = b.conv(x, w, stride=(2, 2), padding=(3, 3), dilation=(1, 1))
        return [b.cast_to(normal(b, y, *sums(b, y, y)), BF16)]

    def first(channels: int, faster: bool, recipe: Sequence[str] = ()) -> tuple[list[str], list[str]]:
        """The anchor and the sums of the first kernel, and the recipe."""
        function = program([TensorType(s, BF16) for s in ((N, channels, 64, 64), (16, channels, 7, 7))], build)
        clock, alone = Clock(faster), lambda op: op.name == "step.conv"
        fusion = fuse(function, bodies=Bodies(), seconds=clock, alone=alone, recipe=recipe)
        body = lookup(root_of(function), regions_of(function)[0].callee).regions[0].block
        lines = [f"fuse {' + '.join(sites)}" for _, sites in fusion.kernels]
        return [op.name for op in body if op.name in ("step.conv", "step.sum")], lines

    joined, lines = first(3, faster=True)
    assert joined == ["step.conv", "step.sum", "step.sum"]
    assert first(3, faster=True, recipe=lines)[0] == joined
    assert first(3, faster=False)[0] == first(16, faster=True)[0] == ["step.conv"]


def test_only_products_that_wait_for_memory() -> None:
    def one(spec: str, *shapes: tuple[int, ...]) -> bool:
        function = program([TensorType(s, BF16) for s in shapes], lambda b, x, w: [b.contract(x, w, spec=spec)])
        return any(is_tall(op) for op in function.regions[0].block)

    assert one("nhwc,oc->nhwo", (8, 56, 56, 256), (64, 256))
    assert one("nhwo,nhwc->oc", (8, 56, 56, 256), (8, 56, 56, 64))
    assert not one("mk,nk->mn", (8192, 768), (3072, 768))  # multiplications
    assert not one("mk,nk->mn", (64, 64), (64, 64))  # not tall
    assert not one("bmk,bkn->bmn", (4, 4096, 64), (4, 64, 64))  # many products


def test_values_lie_as_they_are_written() -> None:
    """Channels-last comes from the rows of a product, through what is computed from it; broadcasts lie nowhere."""

    def build(b: Any, x: Value, w: Value, v: Value) -> list[Value]:
        y = product(b, x, w, "nhwc,oc->nhwo")
        wide = b.broadcast(per_channel(b, v), shape=y.type.shape)
        return [b.add(b.relu(y), b.cast_to(wide, BF16))]

    shapes = [TensorType(IMAGE, BF16), TensorType((NARROW, WIDE), BF16), TensorType((NARROW,), F32)]
    block = program(shapes, build).regions[0].block
    assert block.last is not None
    (result,) = block.last.operands
    area = SIDE * SIDE
    assert strides_of(result, likely_orders(block)) == (area * NARROW, 1, SIDE * NARROW, NARROW)


def test_triton_writes_what_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel that is offered to the clock can be written, on images that lie channels-last."""
    pytest.importorskip("triton")
    refused = []

    def clock(pieces: Sequence[Piece], strides: Callable[[Value], tuple[int, ...]]) -> list[float]:
        for piece in pieces:
            body = bodies(piece)
            assert body.function is not None
            specs = [Spec(v.type.shape, strides(v), torch_dtype(v.type.element)) for v in piece.inputs]
            region = region_of(body.function, body.kernel, specs, torch.device("cpu"))
            refused.append(Triton().claims(region))
            assert len(op_by_op(region)(*(torch.zeros(s.shape, dtype=s.dtype) for s in specs))) == len(region.results)
        return [float(sum(v.type.bytes for v in (*p.inputs, *p.outputs))) for p in pieces]

    monkeypatch.setattr(tall_products, "WIDER", 1)
    builds = (forward, backward, residual, beside, told, side_by_side)
    for least, build in [(0, b) for b in builds] + [(4096, b) for b in (*builds, gated, widened)]:
        monkeypatch.setattr(again, "LEAST", least)
        bodies = Bodies()
        fuse(of(build), bodies=bodies, seconds=clock, alone=is_held)
    assert len(refused) > 12
    assert not {*refused} - {""}
