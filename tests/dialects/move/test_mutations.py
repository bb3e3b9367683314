"""Random valid plans are accepted; each way to break one is refused, and the message says what and where."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wholestep.dialects.move import move, space, verify_plan
from wholestep.errors import VerifyError
from wholestep.ir import Op, Value

from .build import PlanBuilder, RandomPlan
from .oracle import accesses, valid

SEEDS = range(8)


def refused(plan: PlanBuilder, *words: str) -> str:
    with pytest.raises(VerifyError) as caught:
        verify_plan(plan.module)
    message = str(caught.value)
    for word in words:
        assert word in message, message
    return message


def accepted(module: Op) -> bool:
    try:
        verify_plan(module)
    except VerifyError:
        return False
    return True


def position(plan: PlanBuilder, op: Op) -> int:
    return plan.launches.index(op)


def swap(one: Op, other: Op) -> None:
    """Two ops of a block change places; `one` stands first."""
    block, behind = one.parent, other.next
    block.insert_before(other.detach(), one)
    block.insert_before(one.detach(), behind)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 3), st.integers(1, 40), st.integers(3, 8))
def test_valid_plans_are_accepted(seed: int, streams: int, launches: int, slots: int) -> None:
    plan = RandomPlan(seed, launches, streams, slots)
    assert valid(plan.module)
    verify_plan(plan.module)


@settings(max_examples=250, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 3))
def test_the_verifier_agrees_with_brute_force_on_broken_plans(seed: int, streams: int) -> None:
    """One random change, which may or may not break the plan: both judges say the same."""
    plan = RandomPlan(seed, 12, streams, 4)
    pick = random.Random(seed)
    block = plan.function.regions[0].block
    kind = pick.randrange(4)
    if kind == 0:
        waits = [op for op in block if op.name == "move.wait"]
        if waits:
            pick.choice(waits).erase()
    elif kind == 1:
        allocs = [op for op in block if op.name == "move.alloc"]
        pick.choice(allocs).attributes["offset"] = pick.randrange(0, 7) * 64
    elif kind == 2:
        pick.choice(plan.launches).attributes["stream"] = pick.randrange(streams)
    else:  # two neighbours that use no token change places
        plain = [op for op in plan.launches if op.next in plan.launches]
        if plain:
            first = pick.choice(plain)
            swap(first, first.next)
    assert accepted(plan.module) == valid(plan.module)


def test_random_changes_do_break_plans() -> None:
    """Dropping every wait breaks plans on several streams; so the agreement above is about both verdicts."""
    broken = 0
    for seed in range(30):
        plan = RandomPlan(seed, 12, 2, 4)
        for op in list(plan.function.regions[0].block):
            if op.name == "move.wait":
                op.erase()
        broken += not valid(plan.module)
        assert accepted(plan.module) == valid(plan.module)
    assert broken >= 20


def dependent(plan: RandomPlan) -> tuple[Op, Op]:
    """A launch, and one that reads what it writes."""
    for op in plan.launches:
        for value in accesses(op)[1]:
            if plan.readers.get(value):
                return op, plan.readers[value][0]
    raise AssertionError("no launch reads what another one writes")


@pytest.mark.parametrize("seed", SEEDS)
def test_swap_two_dependent_launches(seed: int) -> None:
    plan = RandomPlan(seed, 30, 1)
    writer, reader = dependent(plan)
    swap(writer, reader)
    message = refused(plan)
    layers = [op.loc.layer for op in plan.launches]
    assert any(f"({layer} at model.py:" in message for layer in layers), message
    assert "before it is written" in message or "afterwards" in message or "still uses" in message, message


def test_swap_names_both_launches_and_the_buffer() -> None:
    plan = PlanBuilder()
    x, h, out = plan.external("x", "batch"), plan.alloc("h", 0), plan.external("loss", "output")
    plan.launch([x], [h], layer="fc")
    plan.launch([h], [out], layer="head")
    plan.finish(out)
    verify_plan(plan.module)
    swap(*plan.launches)
    refused(
        plan,
        "move.launch (head at model.py:2)",
        "launch 0 of head reads buffer %h (tensor<16xf32>, transient) before it is written, by launch 1 of fc",
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_overlap_two_buffers(seed: int) -> None:
    plan = RandomPlan(seed, 30, 1)
    for value, readers in plan.readers.items():
        if value.owner.name != "move.alloc":
            continue
        begin, end = position(plan, plan.writer[value].owner), position(plan, readers[-1])
        for other in plan.writer:
            if other.owner.name == "move.alloc" and begin < position(plan, plan.writer[other].owner) <= end:
                other.owner.attributes["offset"] = value.owner.attributes["offset"]
                refused(plan, "writes buffer %", "at offset", "over buffer %")
                return
    raise AssertionError("no two buffers are live at once")


@pytest.mark.parametrize("shift", [-64, -4, 60])
def test_overlap_by_a_part(shift: int) -> None:
    plan = PlanBuilder()
    x, out = plan.external("x", "batch"), plan.external("loss", "output")
    a, b = plan.alloc("a", 128), plan.alloc("b", 128 + shift)
    plan.module.regions[0].block.first.regions[0].block.first.attributes["alignment"] = 1
    plan.launch([x], [a], layer="one")
    plan.launch([x], [b], layer="two")
    plan.launch([a, b], [out], layer="three")
    plan.finish(out)
    if shift == -64:
        verify_plan(plan.module)
    else:
        refused(
            plan,
            f"launch 1 of two writes buffer %b (tensor<16xf32>, transient) at offset {128 + shift} over buffer %a "
            "(tensor<16xf32>, transient) at 128, which launch 2 of three still uses",
        )


def two_streams() -> PlanBuilder:
    """A value made on stream 0, read on stream 1, and its memory taken on stream 0 after that."""
    plan = PlanBuilder("placed", ("cuda:0", "cuda:0"))
    x, out = plan.external("x", "batch"), plan.external("loss", "output")
    a, b, c = plan.alloc("a", 0), plan.alloc("b", 64), plan.alloc("c", 0)
    made = plan.launch([x], [a], layer="make")
    plan.wait(made, stream=1)
    read = plan.launch([a], [b], stream=1, layer="side")
    plan.wait(read, stream=0)
    plan.launch([x], [c], layer="take")
    plan.launch([b, c], [out], layer="end")
    plan.finish(out)
    return plan


def test_drop_the_wait_before_a_read() -> None:
    plan = two_streams()
    verify_plan(plan.module)
    next(op for op in plan.function.regions[0].block if op.name == "move.wait").erase()
    refused(
        plan,
        "move.launch (side at model.py:2)",
        "launch 1 of side reads buffer %a (tensor<16xf32>, transient) on stream 1, and nothing orders it after "
        "launch 0 of make on stream 0, which writes it",
    )


def test_drop_the_wait_before_memory_is_taken() -> None:
    """The reader's own result is waited for by a token, so that only the reuse of the memory is wrong."""
    plan = PlanBuilder("placed", ("cuda:0", "cuda:0"))
    x, out = plan.external("x", "batch"), plan.external("loss", "output")
    a, b, c = plan.alloc("a", 0), plan.alloc("b", 64), plan.alloc("c", 0)
    made = plan.launch([x], [a], layer="make")
    read = plan.launch([a], [b], [made], stream=1, layer="side")
    wait = plan.wait(read, stream=0)
    plan.launch([x], [c], layer="take")
    plan.launch([b, c], [out], [read], layer="end")
    plan.finish(out)
    verify_plan(plan.module)
    wait.erase()
    refused(
        plan,
        "launch 2 of take writes buffer %c (tensor<16xf32>, transient) at offset 0 over buffer %a",
        "and nothing orders it after launch 1 of side on stream 1, which uses that",
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_shorten_a_lifetime(seed: int) -> None:
    """A value is read once more, by the last launch, after its memory has gone to another one."""
    plan = RandomPlan(seed, 40, 1, 4)
    gone = [v for v in plan.writer if v.owner.name == "move.alloc" and is_overwritten(plan, v)]
    last = plan.launches[-1]
    sizes = last.attributes["operandSegmentSizes"].values
    last.attributes["operandSegmentSizes"] = type(last.attributes["operandSegmentSizes"])((sizes[0] + 1, *sizes[1:]))
    last.set_operands([gone[0], *last.operands])
    message = refused(plan)
    assert "still uses" in message or "reads afterwards" in message, message


def is_overwritten(plan: RandomPlan, value: Value) -> bool:
    offset, begin = value.owner.attributes["offset"], position(plan, plan.writer[value].owner)
    return any(
        other is not value
        and other.owner.name == "move.alloc"
        and other.owner.attributes["offset"] == offset
        and position(plan, plan.writer[other].owner) > begin
        for other in plan.writer
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_in_place_on_a_live_value(seed: int) -> None:
    plan = RandomPlan(seed, 40, 1)
    _, old = plan.in_place[0]
    last = plan.launches[-1]
    last.set_operands([old, *last.operands[1:]])
    refused(plan, f"in the memory of buffer %{old.name}", "which launch 40 of layer.40 reads afterwards")


@pytest.mark.parametrize("lifetime", ["batch", "constant"])
def test_write_what_is_read_only(lifetime: str) -> None:
    plan = PlanBuilder("ordered")
    x, out = plan.external("x", lifetime), plan.external("loss", "output")
    plan.launch([x], [plan.reuse("y", x, lifetime)], in_place=(0, 0), layer="fc")
    plan.launch([x], [out])
    plan.finish(out)
    refused(plan, "launch 0 of fc writes buffer %y of 'x'", f"a {lifetime} is never written")


def test_write_an_external_without_reuse() -> None:
    plan = PlanBuilder("ordered")
    w, x = plan.external("w", "param"), plan.external("x", "batch")
    plan.launch([x], [w], layer="update")
    plan.finish()
    refused(plan, "launch 0 of update writes buffer %w", "a new value goes to a move.reuse of it")


@pytest.mark.parametrize(
    ("unit", "kind", "index", "reached"),
    [
        ("cuda:0", "hbm", 0, True),
        ("cuda:0", "hbm", 1, False),
        ("cuda:1", "hbm", 1, True),
        ("cuda:0", "host", 0, False),
        ("cuda:0", "pinned", 0, True),
        ("cuda:0", "peer", 1, True),
        ("cuda:0", "sram", 0, True),
        ("cuda:0", "reg", 0, True),
        ("cpu", "hbm", 0, False),
        ("cpu", "host", 0, True),
        ("cpu", "pinned", 0, True),
        ("cpu", "peer", 0, False),
        ("cpu", "reg", 0, True),
    ],
)
def test_launch_on_a_space_out_of_reach(unit: str, kind: str, index: int, reached: bool) -> None:
    plan = PlanBuilder("ordered", (unit,))
    x = plan.external("x", "batch", space=space(kind, index))
    plan.launch([x], [], layer="fc")
    plan.finish()
    if reached:
        verify_plan(plan.module)
    else:
        refused(plan, f"launch 0 of fc runs on {unit}, which does not reach buffer %x", f"in {kind} {index}; copy it")


@pytest.mark.parametrize(
    ("unit", "source", "target", "possible"),
    [
        ("cuda:0", ("pinned", 0), ("hbm", 0), True),
        ("cuda:0", ("hbm", 0), ("host", 0), True),
        ("cuda:0", ("hbm", 1), ("hbm", 0), True),
        ("cuda:0", ("hbm", 1), ("host", 0), False),
        ("cpu", ("host", 0), ("pinned", 0), True),
        ("cpu", ("host", 0), ("hbm", 0), False),
    ],
)
def test_copy_between_spaces(unit: str, source: tuple, target: tuple, possible: bool) -> None:
    plan = PlanBuilder("ordered", (unit,))
    x = plan.external("x", "batch", space=space(*source))
    y = plan.alloc("y", space=space(*target), lifetime="transient")
    plan.copy(x, y)
    plan.finish()
    if possible:
        verify_plan(plan.module)
    else:
        refused(plan, f"copy 0 runs on {unit}, which cannot copy buffer %x")


@pytest.mark.parametrize("seed", SEEDS)
def test_offset_out_of_the_arena(seed: int) -> None:
    plan = RandomPlan(seed, 10, 1)
    alloc = next(op for op in plan.function.regions[0].block if op.name == "move.alloc")
    alloc.attributes["offset"] = 6 * 128
    refused(plan, "it covers bytes 768 to 832 of an arena of 768 bytes")
    alloc.attributes["offset"] = 6 * 128 - 4
    refused(plan, "of an arena of 768 bytes")


def test_alignment() -> None:
    plan = PlanBuilder()
    x = plan.external("x", "batch")
    plan.launch([x], [plan.alloc("a", 32)])
    plan.finish()
    refused(plan, "its offset 32 is not a multiple of 64")


@pytest.mark.parametrize("seed", SEEDS)
def test_read_what_nothing_writes(seed: int) -> None:
    plan = RandomPlan(seed, 20, 1)
    for op in plan.launches:
        reads, writes, _ = accesses(op)
        if op.attributes["in_place"] or not plan.readers.get(writes[0]):
            continue
        op.set_operands(reads)
        op.attributes["operandSegmentSizes"] = type(op.attributes["operandSegmentSizes"])((len(reads), 0, 0))
        refused(plan, f"buffer %{writes[0].name}", "which nothing writes")
        return
    raise AssertionError("no launch to take the write from")


def test_token_cycle() -> None:
    plan = two_streams()
    first = plan.launches[0]
    later = plan.launches[-1]
    sizes = first.attributes["operandSegmentSizes"].values
    first.attributes["operandSegmentSizes"] = type(first.attributes["operandSegmentSizes"])((*sizes[:2], 1))
    first.set_operands([*first.operands, later.result])
    refused(plan, "move.launch (make at", "a cycle of tokens: it waits for move.launch (end at model.py:4)", "later")
    first.set_operands([*first.operands[:-1], first.result])
    refused(plan, "a cycle of tokens: it waits for itself")


def test_every_action_is_declared_to_be_one() -> None:
    """What touches buffers runs on a stream and gives a token; the verifier finds actions by that."""
    for definition in move.ops.values():
        touches = {f.name for f in definition.operand_fields} & {"reads", "source", "buffer"}
        assert bool(touches) == hasattr(definition, "accesses"), definition.name
