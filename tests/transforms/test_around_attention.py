"""Attention takes neighbours along where that is said to be faster or forced; what is computed stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.transforms.test_fuse import program, regions_of, root_of
from tests.transforms.test_tall_products import Clock
from wholestep.dialects.step import torch_dtype
from wholestep.errors import InputError
from wholestep.ir import BF16, F32, TensorType, verify
from wholestep.ir.builtin import lookup
from wholestep.ir.core import Op, Value
from wholestep.runtime.executor import Executable
from wholestep.transforms import again, tall_products
from wholestep.transforms.around import divide
from wholestep.transforms.around_attention import TOO_LITTLE, UNMEASURED
from wholestep.transforms.fuse import Fusion, dissolve, fuse
from wholestep.transforms.regions import Bodies, Piece

HEADS, ROWS, WIDTH = 2, 12, 8
SPLIT, WHOLE = (2, HEADS, ROWS, WIDTH), (2, ROWS, HEADS * WIDTH)
TYPES = [*(TensorType(SPLIT, BF16) for _ in range(3)), TensorType((ROWS, WIDTH), F32), TensorType(WHOLE, BF16)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "LEAST", 0)
    monkeypatch.setattr(tall_products, "LEAST", 0)


def scaled(b: Any, x: Value, by: Value) -> Value:
    return b.cast_to(b.mul(b.cast_to(x, F32), by), BF16)


def gated(b: Any, out: Value, gate: Value) -> Value:
    whole = b.reshape(b.transpose(out, order=(0, 2, 1, 3)), shape=WHOLE)
    return b.mul(whole, b.sigmoid(gate))


def forward(b: Any, q: Value, k: Value, v: Value, by: Value, gate: Value) -> list[Value]:
    out, _ = b.attention(scaled(b, q, by), k, v, scale=0.3)
    return [gated(b, out, gate)]


def both(b: Any, q: Value, k: Value, v: Value, by: Value, gate: Value) -> list[Value]:
    """A value that attention reads, forward and backward, and nobody else."""
    scaled_q = scaled(b, q, by)
    out, lse = b.attention(scaled_q, k, v, scale=0.3)
    loss = gated(b, out, gate)
    b.phase = "backward"
    dout = b.transpose(b.reshape(b.mul(loss, 2.0), shape=(2, ROWS, HEADS, WIDTH)), order=(0, 2, 1, 3))
    dq, dk, dv = b.attention_grad(dout, scaled_q, k, v, out, lse, scale=0.3)
    return [loss, scaled(b, dq, by), dk, dv]


def joined(function: Op, clock: Clock | None, **options: Any) -> tuple[Fusion, list[list[str]]]:
    """Fuses and gives the ops of every kernel that has an attention; results stay as they were."""
    torch.manual_seed(0)
    types = [v.type for v in function.regions[0].block.arguments]
    inputs = [torch.randn(t.shape).to(torch_dtype(t.element)) for t in types]
    wanted = Executable(function)(inputs)
    bodies = Bodies()
    fusion = fuse(function, bodies=bodies, seconds=clock, **({"attends": True} | options))
    verify(root_of(function))
    found = []
    for op in regions_of(function):
        names = [inner.name.removeprefix("step.") for inner in lookup(root_of(function), op.callee).regions[0].block]
        found += [names] if any(n.startswith("attention") for n in names) else []
    assert len(divide(function, fusion, bodies, lambda op: True)) >= 2 * len(found)  # (an attention, what is beside it)
    verify(root_of(function))
    dissolve(function, lambda op: True)
    for mine, true in zip(Executable(function)(inputs), wanted, strict=True):
        torch.testing.assert_close(mine, true, rtol=2e-2, atol=2e-2)
    return fusion, found


def test_what_is_faster_is_one_kernel() -> None:
    fusion, ((*names, _),) = joined(program(TYPES, forward), Clock())
    assert {"mul", "attention", "sigmoid"} <= set(names)
    assert len(fusion.bodies) == 4  # the kernel, and the three that it was taken apart into


def test_what_is_not_faster_stays_apart_and_says_so() -> None:
    fusion, found = joined(program(TYPES, forward), Clock(faster=False))
    assert found == []
    pairs = {pair: why for pair, why in fusion.refusals.items() if any("attention" in site for site in pair)}
    assert len(pairs) == 2 and all("us as one kernel" in why for why in pairs.values())


def test_what_nobody_runs_stays_apart_and_says_so() -> None:
    class Never(Clock):
        def __call__(self, pieces: Any, strides: Any) -> list[float]:
            return [float("inf") if len(p.ops) > 1 and is_attended(p) else 1.0 for p in pieces]

    fusion, found = joined(program(TYPES, forward), Never())
    assert found == [] and list(fusion.refusals.values()).count(tall_products.NOBODY) == 2


def is_attended(piece: Piece) -> bool:
    return any(op.name == "step.attention" for op in piece.ops)


def test_nothing_is_joined_where_nothing_is_measured() -> None:
    fusion, found = joined(program(TYPES, forward), None)
    assert found == [] and list(fusion.refusals.values()).count(UNMEASURED) == 2
    fusion, found = joined(program(TYPES, forward), None, attends=False)
    assert found == [] and UNMEASURED not in fusion.refusals.values()  # (nobody could: a library runs it)


def test_few_bytes_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tall_products, "LEAST", 1 << 20)
    clock = Clock()
    fusion, found = joined(program(TYPES, forward), clock)
    assert found == [] and not clock.asked and list(fusion.refusals.values()).count(TOO_LITTLE) == 2


def test_what_is_forced_is_joined_without_a_clock() -> None:
    _, ((*names, _),) = joined(program(TYPES, forward), None, force=["fuse *attention#0 <- *"])
    assert "mul" in names and "sigmoid" not in names
    _, ((*names, _),) = joined(program(TYPES, forward), None, force=["fuse * <- *attention#0"])
    assert "sigmoid" in names and names.count("mul") == 1


def test_what_is_forbidden_stays_apart() -> None:
    fusion, ((*names, _),) = joined(program(TYPES, forward), Clock(), forbid=["fuse *attention#0 <- *"])
    assert "sigmoid" in names and names.count("mul") == 1
    assert "it is forbidden" in fusion.refusals.values()


def test_all_attentions_compute_what_only_they_read() -> None:
    """Nobody writes it: their kernels give what they gave, and read what it is made of."""
    function = program(TYPES, both)
    fuse(function, bodies=Bodies(), seconds=Clock(), attends=True)
    own = {op.callee.name: op for op in regions_of(function) if function.regions[0].block.arguments[0] in op.operands}
    assert [len(op.results) for op in own.values()] == [2, 3]  # out and logsumexp; dq, dk and dv
    _, found = joined(program(TYPES, both), Clock())
    assert [[n for n in names if n.startswith("attention")] for names in found] == [["attention"], ["attention_grad"]]
    assert all("mul" in names and "cast" in names for names in found)


class Dislikes(Clock):
    """A clock for which kernels that compute keys take long."""

    def __call__(self, pieces: Any, strides: Any) -> list[float]:
        keys = [any(op.name == "step.attention" and op.k.op in p.ops for op in p.ops) for p in pieces]
        return [1e9 * bad + own for bad, own in zip(keys, super().__call__(pieces, strides), strict=True)]


def test_queries_are_computed_on_load_where_keys_are_better_made_before() -> None:
    def build(b: Any, q: Value, k: Value, v: Value, by: Value, gate: Value) -> list[Value]:
        out, _ = b.attention(scaled(b, q, by), scaled(b, k, by), v, scale=0.3)
        return [gated(b, out, gate)]

    _, ((*names, _),) = joined(program(TYPES, build), Dislikes())
    assert names.count("mul") == 2 and "sigmoid" in names  # queries and the gate
    _, ((*names, _),) = joined(program(TYPES, build), Clock())
    assert names.count("mul") == 3 and "sigmoid" in names


def test_what_others_read_as_well_is_stored_on_the_way() -> None:
    def build(b: Any, q: Value, k: Value, v: Value, by: Value, gate: Value) -> list[Value]:
        scaled_k = scaled(b, k, by)
        return [b.attention(q, scaled_k, v, scale=0.3)[0], scaled_k]

    function = program(TYPES, build)
    fuse(function, bodies=Bodies(), seconds=Clock(), attends=True)
    (region,) = regions_of(function)
    assert len(region.results) == 2


def refused(build: Any, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        fuse(program(TYPES, build), bodies=Bodies(), attends=True, **options)
    return str(caught.value)


def test_what_no_tile_can_do_is_refused() -> None:
    def rows(b: Any, q: Value, k: Value, v: Value, by: Value, gate: Value) -> list[Value]:
        out, _ = b.attention(q, k, v, scale=0.3)
        return [b.softmax(out, dim=2)]

    def again_from_it(b: Any, q: Value, k: Value, v: Value, by: Value, gate: Value) -> list[Value]:
        """The keys of the second are made of what the first gives, in another kernel."""
        out, _ = b.attention(q, k, v, scale=0.3)
        more = b.cumsum(out, dim=2)
        return [b.mul(out, more)]

    assert "not one along its columns" in refused(rows, force=["fuse * <- *attention#0"])
    assert "must run between" in refused(again_from_it, force=["fuse *mul#0 <- *attention#0"])
    fusion, found = joined(program(TYPES, again_from_it), Clock())
    assert found == [] and any("must run between" in why for why in fusion.refusals.values())
