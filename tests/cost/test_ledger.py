"""The ledger against hand counts, against PyTorch's own strides, and against itself: every sum is the same total."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import wholestep as ws
from tests.cost.models import convolution_step, language_step, moved
from tests.runtime.runs import Perceptron, data, fresh, squares
from wholestep.backends.aten import lower
from wholestep.cost import CAUSES, Executed, Ledger, layer_group, make_ledger
from wholestep.cost.movement import heaviest_edges, memory_curve, top_movers
from wholestep.cost.storage import Storage
from wholestep.dialects.step import StepBuilder
from wholestep.dialects.step.attention import AttentionLike
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.core import Location, Value
from wholestep.ir.types import BF16, F32, I64, TensorType
from wholestep.runtime.report import executed_form

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
    return make_ledger(Executed(function))


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


def test_unused_results_are_not_written():
    def build(b, x):
        y, _, _ = b.layer_norm(x, None, None)
        return y

    ledger = ledger_of({"x": f32(6, 8)}, build)
    assert ledger.by_kernel() == {"layer_norm": (4 * 48, 4 * 48)}
    (kernel,) = ledger.kernels
    assert len(kernel.moves) == 2


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
    ledger = ledger_of({"x": f32(10)}, lambda b, x: b.exp(b.cast(b.exp(x), dtype=BF16)))
    assert ledger.by_cause()["casts"] == (40, 20)


def test_an_absorbed_cast_moves_nothing():
    function = add_function(module(), "step", [f32(10)], ["x"])
    b = StepBuilder(function.regions[0].block, phase="forward")
    first = b.exp(function.regions[0].block.arguments[0])
    cast = b.cast(first, dtype=BF16)
    finish_function(function, [b.exp(cast)])
    assert first.op is not None and cast.op is not None
    written = make_ledger(Executed(function, written={first.op: BF16}))
    assert [k.bytes for k in written.kernels] == [40 + 20, 20 + 20]
    narrow = make_ledger(Executed(function, narrow={cast.op}))
    assert [k.bytes for k in narrow.kernels] == [40 + 40, 40 + 20]


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
    # read: forward 43, backward the second weight (15), weight decay 43, update 43, copy into place 43
    # written: update 43, copy into place 43
    assert causes["weights"] == (4 * (43 + 15 + 43 + 43 + 43), 4 * (43 + 43))
    assert causes["gradients"] == (4 * 43, 4 * 43)
    assert causes["batch"] == (2 * 32, 0)  # the first product and its weight gradient
    assert "optimizer state" not in causes and "casts" not in causes


def test_state_in_place_is_not_copied():
    step = language_step()
    compiled = step._compiled
    executed = executed_form(compiled.program.function, compiled.executable.function)
    copied = make_ledger(executed)
    executed.in_place = True
    written = make_ledger(executed)
    state = sum(
        b.bytes for b in copied.buffers if b.kind in ("parameter", "optimizer_state") and b.type != "tensor<f32>"
    )
    assert copied.total - written.total == 2 * state
    assert max(memory_curve(copied)) > max(memory_curve(written))


def test_reshapes_and_products_copy_where_torch_does():
    """The strides we assume are those that PyTorch's kernels give."""
    step = language_step()
    compiled = step._compiled
    executed = executed_form(compiled.program.function, compiled.executable.function)
    storage, block = Storage(executed), executed.function.regions[0].block
    created: dict = {}
    batch = [torch.arange(4 * 9).reshape(4, 9) % 50]
    inputs = [step._fetch(s, compiled, batch, created).detach() for s in compiled.program.slots]
    values = dict(zip(block.arguments, inputs, strict=True))
    checked = 0
    for op in block:
        if op is block.last or not any(r.uses for r in op.results):
            continue
        call = lower(op, torch.device("cpu"))
        out = call.run(*[values[v] for v in call.operands])
        out = [out] if isinstance(out, torch.Tensor) else list(out)
        values.update(zip(op.results, out, strict=True))
        for result, tensor in zip(op.results, out, strict=True):
            if not result.uses or (issubclass(op.definition, AttentionLike) and result.type.rank != 4):
                continue
            want = [s for s, d in zip(storage._strides[result], tensor.shape, strict=True) if d != 1]
            have = [s for s, d in zip(tensor.stride(), tensor.shape, strict=True) if d != 1]
            assert want == have, f"{op} has strides {have}, not {want}"
            checked += 1
    assert checked > 200


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
    assert memory_curve(ledger) == [40 + 40, 40 + 40 + 40, 40 + 40 + 4]


def test_an_op_keeps_the_location_of_its_layer():
    function = add_function(module(), "step", [f32(4)], ["x"])
    b = StepBuilder(function.regions[0].block, loc=Location("head", "model.py", 7), phase="forward")
    finish_function(function, [b.exp(function.regions[0].block.arguments[0])])
    assert make_ledger(Executed(function)).by_layer() == {"head": (16, 16)}


def test_repeated_layers_are_one_group():
    assert layer_group("h.3.attn") == "h.*.attn" and layer_group("0") == "*" and layer_group("") == "(the model itself)"
