"""The ledger against hand counts and against itself: every sum is the same total. `test_executed.py` watches steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import wholestep as ws
from tests.cost.models import convolution_step, language_step, moved
from tests.runtime.runs import Perceptron, data, fresh, squares
from wholestep.cost import CAUSES, Ledger, layer_group, make_ledger
from wholestep.cost.counting import host_arguments
from wholestep.cost.movement import heaviest_edges, memory_curve, movement_of, size_text, top_movers
from wholestep.dialects.step import StepBuilder
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.core import Location, Value
from wholestep.ir.types import BF16, F32, I64, TensorType
from wholestep.machine.description import Description
from wholestep.plan.planner import planned_function

STEPS: dict[str, Callable[[], ws.TrainStep]] = {
    "language model": language_step,
    "dropout and clipping": lambda: language_step(dropout=0.1, clip_norm=1.0),
    "bf16": lambda: language_step(precision="bf16"),
    "fp16, accumulated": lambda: language_step(precision="fp16", accumulate=2),
    "averaged": lambda: language_step(ema=0.9),
    "convolutions": convolution_step,
}


def f32(*shape: int) -> TensorType:
    return TensorType(shape, F32)


def ledger_of(
    types: dict[str, TensorType], build: Callable[..., Value | tuple[Value, ...]], kinds: dict[str, str] | None = None
) -> Ledger:
    """The ledger of a small function; `build(builder, *arguments)` gives its results."""
    function = add_function(module(), "step", list(types.values()), list(types))
    b = StepBuilder(function.regions[0].block, phase="forward")
    out = build(b, *function.regions[0].block.arguments)
    described = [{"step.kind": (kinds or {}).get(name, "batch")} for name in types]
    finish_function(function, [out] if isinstance(out, Value) else list(out), described)
    return make_ledger(planned_function(function, numbers=host_arguments(function), reorder=False))


def kernels(ledger: Ledger) -> dict[str, tuple[int, int]]:
    return ledger.by_kernel()


def test_views_move_nothing_and_parts_cost_their_own_bytes():
    def build(b, x, row):
        part = b.slice(b.transpose(b.reshape(x, shape=(8, 4)), order=(1, 0)), dim=0, start=0, end=2)
        return b.exp(part), b.add(x, b.broadcast(row, shape=(2, 16)))

    ledger = ledger_of({"x": f32(2, 16), "row": f32(16)}, build)
    assert kernels(ledger) == {"add": ((32 + 16) * 4, 32 * 4), "exp": (16 * 4, 16 * 4)}


def test_broadcast_operands_count_their_own_bytes_and_equal_operands_once():
    ledger = ledger_of({"x": f32(6, 8), "row": f32(8)}, lambda b, x, row: b.mul(b.add(x, row), b.mul(x, x)))
    assert [(k.name, k.bytes) for k in ledger.kernels] == [
        ("add", 4 * (48 + 8 + 48)),
        ("mul", 4 * (48 + 48)),
        ("mul", 4 * (48 + 48 + 48)),
    ]


def test_a_product_of_a_matrix_with_itself_reads_it_once():
    """As one that many tiles read; of other parts of a matrix each counts, whether or not they overlap."""

    def build(b, x):
        seen, whole = b.reshape(x, shape=(24, 8)), b.reshape(x, shape=(4, 6, 8))
        upper, lower = (b.slice(seen, dim=0, start=start, end=start + 16) for start in (0, 8))
        return (
            b.contract(seen, seen, spec="kz,kc->zc"),
            b.contract(whole, seen, spec="ijz,cz->ijc"),
            b.contract(upper, lower, spec="kz,kc->zc"),
        )

    ledger = ledger_of({"x": f32(24, 8)}, build)
    read = [sum(m.bytes for m in k.moves if not m.written) for k in ledger.kernels]
    assert read == [4 * 24 * 8, 4 * 24 * 8, 2 * 4 * 16 * 8]


def test_what_an_operator_allocates_is_copied_to_its_place():
    """On a CPU LayerNorm makes its results itself: 6x8 values, and two numbers per row that nobody reads."""

    def build(b, x):
        y, _, _ = b.layer_norm(x, None, None)
        return y

    ledger = ledger_of({"x": f32(6, 8)}, build)
    made = 4 * (48 + 6 + 6)
    assert ledger.by_kernel() == {"layer_norm": (4 * 48 + made, made + made)}
    assert ledger.by_cause() == {"workspace": (made, made + 4 * 12), "batch": (192, 0), "transients": (0, 192)}
    assert ledger.launches == 4  # the operator and three copies


def test_a_kernel_of_several_operators_counts_each():
    """The gradient of a slice: zeros, then a copy of the part. The view that it is written through is free."""

    def build(b, x):
        return b.slice_grad(x, dim=0, start=1, end=3, size=6)

    (kernel,) = ledger_of({"x": f32(2, 8)}, build).kernels
    assert [(m.written, m.bytes) for m in kernel.moves] == [(True, 6 * 8 * 4), (False, 64), (True, 64)]


def test_a_reshape_that_no_strides_can_say_is_a_copy():
    def build(b, x):
        return b.reshape(b.transpose(x, order=(1, 0)), shape=(24,))

    assert ledger_of({"x": f32(4, 6)}, build).by_kernel() == {"reshape": (96, 96)}


def test_an_embedding_reads_the_rows_it_gives():
    ledger = ledger_of(
        {"table": f32(1000, 8), "ids": TensorType((3,), I64)},
        lambda b, table, ids: b.embedding(table, ids),
        {"table": "parameter"},
    )
    assert ledger.by_cause() == {"weights": (96, 0), "transients": (0, 96), "batch": (24, 0)}


def test_numbers_and_constants_are_free():
    ledger = ledger_of(
        {"x": f32(5), "lr": f32()}, lambda b, x, lr: b.mul(b.add(x, 1.0), b.mul(lr, 2.0)), {"lr": "hyper"}
    )
    assert [(k.name, k.bytes) for k in ledger.kernels] == [("add", 40), ("mul", 40)]


def test_a_saved_activation_is_made_before_and_read_after():
    def build(b, x):
        kept, passing = b.exp(x), None
        passing = b.sin(kept)
        b.phase = "backward"
        return b.mul(b.cos(x), b.add(kept, 1.0)), passing

    causes = ledger_of({"x": f32(10)}, build).by_cause()
    assert causes["saved activations"] == (80, 40)  # written by exp, read by sin and by add
    assert causes["batch"] == (80, 0)
    assert causes["transients"] == (80, 40 + 120)


def test_casts_count_as_casts_on_both_sides():
    types = {"x": f32(4, 6), "w": TensorType((6, 3), BF16)}
    ledger = ledger_of(types, lambda b, x, w: b.contract(b.cast(x, dtype=BF16), w, None, spec="ab,bc->ac"))
    assert ledger.by_cause()["casts"] == (4 * 24, 2 * 24)


def test_an_absorbed_cast_moves_nothing():
    ledger = ledger_of({"x": f32(10)}, lambda b, x: b.exp(b.cast(b.exp(x), dtype=BF16)))
    assert [(k.name, k.bytes) for k in ledger.kernels] == [("exp", 40 + 20), ("exp", 20 + 20)]


@pytest.mark.parametrize("name", STEPS)
def test_every_sum_is_the_total(name):
    step = STEPS[name]()
    ledger = moved(step).ledger
    total = ledger.total
    assert total == ledger.read + ledger.written > 0
    for table in (
        ledger.by_cause(), ledger.by_phase(), ledger.by_layer(), ledger.by_layer_group(), ledger.by_kernel()
    ):  # fmt: skip
        assert sum(r for r, _ in table.values()) == ledger.read
        assert sum(w for _, w in table.values()) == ledger.written
    assert set(ledger.by_cause()) <= set(CAUSES)
    assert "other" not in ledger.by_phase()
    assert step.report().bytes == total


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}])
def test_casts_are_those_the_executor_runs(options):
    step = language_step(precision="bf16", **options)
    assert sum(moved(step).ledger.by_cause()["casts"]) == step._compiled.executable.casts.executed > 0


def test_micro_batches_count_once_for_each():
    one, two = moved(language_step()).ledger, moved(language_step(accumulate=2)).ledger
    for ledger, times in ((one, 1), (two, 2)):
        found = [k for k in ledger.kernels if k.name == "contract"]
        assert found and all(k.times == times for k in found)
    # activations halve and run twice; weights are read twice as often
    assert two.by_kernel()["gelu"] == one.by_kernel()["gelu"]
    assert two.by_kernel()["contract"][0] > one.by_kernel()["contract"][0]
    sums = [k for k in two.kernels if k.name == "sum over micro-batches"]
    parameters = sum(b.bytes for b in two.buffers if b.kind == "parameter")
    assert sum(k.bytes for k in sums) == 5 * parameters  # copy: read, write; add: read both, write
    assert {m.cause for k in sums for m in k.moves} == {"gradients"}


def test_causes_of_a_perceptron_by_hand():
    model = fresh(Perceptron)  # 4 -> 5 -> 3, 43 parameters
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ledger = moved(ws.compile(model, squares, optimizer, (data(2, 4),))).ledger
    causes = ledger.by_cause()
    # read: forward 43, backward the second weight (15), weight decay 43, update 43; written: update 43, where they live
    assert causes["weights"] == (4 * (43 + 15 + 43 + 43), 4 * 43)
    assert causes["gradients"] == (4 * 43, 4 * 43)
    assert causes["batch"] == (2 * 32, 0)  # the first product and its weight gradient
    assert "optimizer state" not in causes and "casts" not in causes


def test_state_is_written_where_it_lives():
    ledger = moved(language_step()).ledger
    parameters = sum(b.bytes for b in ledger.buffers if b.kind == "parameter")
    assert ledger.by_cause()["weights"][1] == parameters
    assert not [k for k in ledger.kernels if k.name == "copy into place"]
    step = language_step(precision="fp16", accumulate=2)  # an update that may be skipped is made beside the state
    copied = {r.buffer for r in step.plan().results if r.way == "copy"}
    copies = [k for k in moved(step).ledger.kernels if k.name == "copy into place"]
    assert len(copies) == len(copied) > 0
    sizes = sum(step.plan().buffers[n].type.bytes for n in copied)
    assert sum(m.bytes for k in copies for m in k.moves if m.written) == sizes


def test_top_movers_name_the_users_line():
    rows = top_movers(moved(language_step()).ledger, 40)
    assert [r["bytes"] for r in rows] == sorted((r["bytes"] for r in rows), reverse=True)
    up = next(r for r in rows if r["kernel"] == "contract" and r["layer"] == "*.up" and r["phase"] == "forward")
    assert up["file"].endswith("models.py") and up["calls"] == 2
    source = Path(up["file"]).read_text().splitlines()[up["line"] - 1]
    assert "self.up(x)" in source


def test_edges_join_makers_and_readers():
    ledger = moved(language_step()).ledger
    edges = heaviest_edges(ledger, 1000)
    reads = sum(k.times * m.bytes for k in ledger.kernels for m in k.moves if not m.written and not m.inside)
    assert sum(e["bytes"] for e in edges) <= reads
    assert any(e["from"] == "contract" and e["to"] == "gelu" for e in edges)
    assert any(e["from"].startswith("parameter") and e["to"] == "contract" for e in edges)


def test_memory_curve_by_hand():
    def build(b, x):
        a = b.exp(x)
        c = b.sin(a)
        return b.sum(c, dims=(0,))

    ledger = ledger_of({"x": f32(10)}, build)
    # addresses are multiples of 64; sin is written over its operand
    assert ledger.lasting == 40 and memory_curve(ledger) == [40 + 64, 40 + 64, 40 + 64 + 64]


@pytest.mark.parametrize("name", STEPS)
def test_the_memory_curve_is_that_of_the_plan(name):
    step = STEPS[name]()
    ledger, plan = moved(step).ledger, step.plan()
    assert ledger.lasting + plan.lower_bound <= max(memory_curve(ledger)) <= plan.peak


def test_an_op_keeps_the_location_of_its_layer():
    function = add_function(module(), "step", [f32(4)], ["x"])
    b = StepBuilder(function.regions[0].block, loc=Location("head", "model.py", 7), phase="forward")
    finish_function(function, [b.exp(function.regions[0].block.arguments[0])])
    assert make_ledger(planned_function(function)).by_layer() == {"head": (16, 16)}


def test_a_described_cache_lets_less_through():
    planned = language_step()._compiled.static.planned
    plain = movement_of(planned, Description("toy", "cpu", 1e9))
    assert plain.cached is None and plain.to_dict()["through cache"] is None
    small, large = (movement_of(planned, Description("toy", "cpu", 1e9, cache_bytes=n)) for n in (1 << 12, 1 << 30))
    assert small.cached is not None and large.cached is not None
    assert 0 == large.cached.total < small.cached.total < small.ledger.total
    assert "through a cache of 4.1 kB: " in str(small) and f"of the {size_text(small.ledger.total)} reach" in str(small)
    assert small.to_dict()["through cache"] == {
        "capacity": 1 << 12,
        "read": sum(small.cached.read),
        "written": sum(small.cached.written),
        "total": small.cached.total,
    }


def test_a_step_of_the_reference_executor_says_whose_bytes_these_are():
    model = fresh(Perceptron)
    step = ws.compile(model, squares, torch.optim.SGD(model.parameters(), lr=0.1), (data(2, 4),))
    planned = moved(step)
    step._compiled.static = None
    found = moved(step)
    assert found.ledger.total == planned.ledger.total and not planned.note
    assert "those of the plan" in str(found) and "those of the plan" in found.to_dict()["note"]


def test_repeated_layers_are_one_group():
    assert layer_group("h.3.attn") == "h.*.attn" and layer_group("0") == "*" and layer_group("") == "(the model itself)"
