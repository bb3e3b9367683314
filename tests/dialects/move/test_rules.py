"""Each rule of a plan by itself: in place, views, partial writes, lifetimes, phases of planning, what ops declare."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

import wholestep.dialects.move.base as base
from wholestep import dialects, ir
from wholestep.dialects import move as m
from wholestep.errors import VerifyError
from wholestep.ir import F32, Symbol, TensorType

from .build import HBM, PlanBuilder, RandomPlan


def problem(plan: PlanBuilder) -> str:
    with pytest.raises(VerifyError) as caught:
        m.verify_plan(plan.module)
    return str(caught.value)


def start(phase: str = "ordered", **more) -> tuple[PlanBuilder, ir.Value]:
    plan = PlanBuilder(phase, **more)
    return plan, plan.external("x", "batch")


# ---- in place ----


def test_update_in_place() -> None:
    plan, x = start()
    w = plan.external("w")
    new = plan.reuse("w_new", w)
    plan.launch([w, x], [new], in_place=(0, 0))
    plan.launch([new], [])
    plan.finish()
    m.verify_plan(plan.module)


def test_the_same_elements_may_be_read_twice() -> None:
    plan, _ = start()
    w = plan.external("w")
    plan.launch([w, w], [plan.reuse("w_new", w)], in_place=(0, 0))
    plan.finish()
    m.verify_plan(plan.module)


def test_in_place_must_be_declared() -> None:
    plan, _ = start()
    w = plan.external("w")
    plan.launch([w], [plan.reuse("w_new", w)], layer="update")
    plan.finish()
    assert "in the same memory, which its in_place does not say" in problem(plan)


def test_in_place_of_something_else() -> None:
    plan, x = start()
    w = plan.external("w")
    plan.launch([w, x], [plan.reuse("w_new", w)], in_place=(0, 1))
    plan.finish()
    assert "yet it is no move.reuse of it" in problem(plan)


def test_in_place_with_elements_elsewhere() -> None:
    plan, _ = start()
    w = plan.external("w", shape=(4, 4))
    turned = plan.view("w_t", w, (4, 4), strides=(1, 4))
    new = plan.reuse("w_new", turned)
    plan.launch([turned], [new], in_place=(0, 0))
    plan.finish()
    assert "their elements are not in the same places" in problem(plan)
    new.owner.attributes["strides"] = (1, 4)
    m.verify_plan(plan.module)


def test_a_view_of_a_dead_value_is_dead() -> None:
    plan, x = start()
    a = plan.alloc("a")
    seen = plan.view("a_view", a, (4, 4))
    plan.launch([x], [a])
    plan.launch([a], [plan.reuse("b", a, "transient")], in_place=(0, 0), layer="relu")
    plan.launch([seen], [], layer="late")
    plan.finish()
    assert "launch 1 of relu writes buffer %b" in problem(plan)
    assert "which launch 2 of late reads afterwards" in problem(plan)


def test_memory_is_taken_once() -> None:
    plan, x = start()
    w = plan.external("w")
    plan.launch([x], [plan.reuse("one", w)])
    plan.launch([x], [plan.reuse("two", w)])
    plan.finish()
    assert "is taken twice, also by buffer %one" in problem(plan)


def test_taking_memory_waits_for_readers_on_other_streams() -> None:
    plan = PlanBuilder("ordered", ("cuda:0", "cuda:0"))
    w, x = plan.external("w"), plan.external("x", "batch")
    new = plan.reuse("w_new", w)
    read = plan.launch([w, x], [], stream=1, layer="forward")
    wait = plan.wait(read)
    plan.launch([x], [new], layer="update")
    plan.finish()
    m.verify_plan(plan.module)
    wait.erase()
    assert "and nothing orders it after launch 0 of forward on stream 1, which reads that" in problem(plan)


def test_a_result_keeps_its_memory() -> None:
    plan, x = start("placed")
    a, b = plan.alloc("a", 0, "output"), plan.alloc("b", 0)
    plan.launch([x], [a])
    plan.launch([x], [b], layer="late")
    plan.finish(a)
    assert "launch 1 of late writes buffer %b" in problem(plan)
    assert "which is given back at the end" in problem(plan)


def test_a_result_may_not_be_written_over_in_place() -> None:
    plan, x = start()
    a = plan.alloc("a", lifetime="output")
    plan.launch([x], [a])
    plan.launch([a], [plan.reuse("b", a, "transient")], in_place=(0, 0))
    plan.finish(a)
    assert "in the memory of buffer %a (tensor<16xf32>, output), which is given back at the end" in problem(plan)


# ---- writes in parts ----


def halves(strides: tuple[int, int] | None, offset: int, shape: tuple[int, int] = (4, 2)) -> PlanBuilder:
    plan, x = start()
    both = plan.alloc("both", shape=(4, 4))
    plan.launch([x], [plan.view("left", both, shape, 0, strides)], layer="left")
    plan.launch([x], [plan.view("right", both, shape, offset, strides)], layer="right")
    plan.launch([both], [], layer="reader")
    plan.finish()
    return plan


def test_parts_beside_each_other_and_interleaved() -> None:
    m.verify_plan(halves(None, 32, (2, 4)).module)
    m.verify_plan(halves((4, 1), 8).module)


def test_parts_that_meet() -> None:
    assert "launch 0 of left writes buffer %left" in problem(halves((4, 1), 4))
    assert "which meet; a second value in the same memory is a move.reuse" in problem(halves((4, 1), 4))
    assert "which meet" in problem(halves(None, 16, (2, 4)))


@pytest.mark.parametrize("pinwheel", [False, True])
def test_parts_inside_of_parts(pinwheel: bool) -> None:
    """Two beside each other with a third below both, and four of which no cut keeps two apart from the others."""
    places = {"left": (2, 2, 0), "right": (2, 2, 2), "below": (2, 4, 8)}
    if pinwheel:
        places = {"top": (1, 3, 0), "right": (3, 1, 3), "below": (1, 3, 13), "left": (3, 1, 4), "middle": (2, 2, 5)}

    def plan_of(shift: dict[str, int]) -> PlanBuilder:
        plan, x = start()
        both = plan.alloc("both", shape=(4, 4))
        for name, (rows, columns, first) in places.items():
            view = plan.view(name, both, (rows, columns), 4 * (first + shift.get(name, 0)), (4, 1))
            plan.launch([x], [view], layer=name)
        plan.launch([both], [], layer="reader")
        plan.finish()
        return plan

    m.verify_plan(plan_of({}).module)
    for name, further in (("right", -1), ("below", -4)):
        assert "which meet" in problem(plan_of({name: further}))


def test_a_part_is_missing() -> None:
    assert "reads buffer %both (tensor<4x4xf32>, transient), which is written only in part" in problem(
        halves((4, 1), 8, (4, 1))
    )


def heads(offset: int = 16, order: tuple[int, int] = (0, 1)) -> PlanBuilder:
    """Two parts of rows of 8, each written as [batch, heads, rows, columns] and seen as [rows, columns] as well; what
    makes the second reads the first."""
    plan, x = start()
    both = plan.alloc("both", shape=(2, 3, 8), lifetime="output")
    left = plan.view("left", both, (2, 2, 3, 2), 0, (24, 2, 8, 1))
    right = plan.view("right", both, (2, 2, 3, 2), offset, (24, 2, 8, 1))
    rows = plan.view("rows", both, (6, 4), 0, (8, 1))
    launches = [([x], [left]), ([rows], [right])]
    for number in order:
        plan.launch(*launches[number], layer=("left", "right")[number])
    plan.finish(both)
    return plan


def test_parts_may_have_more_dimensions_than_the_whole() -> None:
    m.verify_plan(heads().module)
    assert "reads buffer %rows (tensor<6x4xf32>, output) before it is written" in problem(heads(order=(1, 0)))
    for offset in (8, 12):
        assert "in the same memory" in problem(heads(offset))


def test_what_is_given_back_is_written_whole() -> None:
    plan = heads()
    next(op for op in plan.module.regions[0].block.first.regions[0].block if op.loc.layer == "right").erase()
    assert "it gives back buffer %both (tensor<2x3x8xf32>, output), which is written only in part" in problem(plan)


def test_a_part_may_be_read_before_the_other_is_written() -> None:
    plan, x = start()
    both = plan.alloc("both", shape=(4, 4))
    left, right = plan.view("left", both, (2, 4)), plan.view("right", both, (2, 4), 32)
    plan.launch([x], [left])
    reader = plan.launch([left], [])
    plan.launch([x], [right])
    plan.finish()
    m.verify_plan(plan.module)
    reader.owner.set_operands([right])
    assert "before it is written" in problem(plan)


def work(module: ir.Op) -> int:
    """Instructions that Python runs to verify a plan: a count, where seconds would depend on the machine's mood."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        m.verify_plan(module)
    finally:
        sys.settrace(before)
    return count


def test_many_interleaved_parts_take_linear_work() -> None:
    def parts(steps: int) -> ir.Op:
        plan, x = start()
        both = plan.alloc("all", shape=(4, steps))
        for i in range(steps):
            plan.launch([x], [plan.view(f"part{i}", both, (4, 1), 4 * i, (steps, 1))])
        plan.launch([both], [])
        plan.finish()
        return plan.module

    assert work(parts(400)) < 6 * work(parts(100))  # pairs would take sixteen times as much


def test_written_twice() -> None:
    plan, x = start()
    a = plan.alloc("a")
    plan.launch([x], [a], layer="one")
    plan.launch([x], [a], layer="two")
    plan.finish()
    assert "launch 0 of one has written buffer %a" in problem(plan)
    assert "before launch 1 of two writes it again" in problem(plan)


def test_a_broadcast_is_not_written() -> None:
    plan, x = start()
    a = plan.alloc("a")
    plan.launch([x], [plan.view("wide", a, (4, 16), strides=(0, 1))])
    plan.finish()
    assert "writes buffer %wide (tensor<4x16xf32>, transient), a broadcast" in problem(plan)


# ---- lifetimes ----


@pytest.mark.parametrize(("reads_in", "right"), [("forward", True), ("loss", True), ("backward", False), ("", True)])
def test_a_transient_of_the_forward_pass_is_not_read_in_the_backward_pass(reads_in: str, right: bool) -> None:
    plan, x = start()
    a = plan.alloc("a")
    plan.launch([x], [a], phase="forward", layer="fc")
    plan.launch([a], [], phase=reads_in, layer="fc")
    plan.finish()
    if right:
        m.verify_plan(plan.module)
    else:
        assert "(backward) reads buffer %a" in problem(plan)
        assert "written by launch 0 of fc (forward): that is an activation" in problem(plan)


def test_a_workspace_belongs_to_one_launch() -> None:
    plan, x = start()
    space = plan.alloc("scratch", lifetime="workspace")
    plan.launch([x], [space], layer="one")
    plan.launch([space], [], layer="two")
    plan.finish()
    assert "launch 1 of two uses buffer %scratch (tensor<16xf32>, workspace), the workspace of launch 0" in problem(
        plan
    )


def test_what_is_given_back() -> None:
    plan, x = start()
    a = plan.alloc("a")
    plan.launch([x], [a])
    plan.finish(a)
    assert "it gives back buffer %a (tensor<16xf32>, transient); what is given back is output or grad" in problem(plan)
    plan, x = start()
    plan.finish(plan.alloc("a", lifetime="output"))
    assert "it gives back buffer %a (tensor<16xf32>, output), which nothing writes" in problem(plan)


def test_lifetime_of_reused_memory() -> None:
    plan, x = start()
    w = plan.external("w")
    plan.launch([x], [plan.reuse("t", w, "transient")])
    plan.finish()
    assert "lies in an external that is param, so that is its lifetime" in problem(plan)
    plan, x = start()
    a = plan.alloc("a")
    plan.launch([x], [a])
    plan.launch([x], [plan.reuse("t", a, "param")])
    plan.finish()
    assert "lies in memory of the plan, which holds no param" in problem(plan)


def test_an_argument_is_named_once() -> None:
    plan, _ = start()
    plan.external("y", "batch", index=0)
    plan.finish()
    assert "'x' and 'y' are both argument 0" in problem(plan)


# ---- what is in a module ----


def test_phase_and_streams_must_be_said() -> None:
    plan, x = start()
    plan.launch([x], [])
    plan.finish()
    plan.module.attributes["move.phase"] = "done"
    assert "expected one of tensor, ordered, placed" in problem(plan)
    plan.module.attributes["move.phase"] = "ordered"
    plan.module.attributes["move.streams"] = ["gpu"]
    assert "'gpu' is no unit" in problem(plan)
    del plan.module.attributes["move.streams"]
    assert 'it needs "move.streams"' in problem(plan)


def test_a_module_without_a_plan() -> None:
    root = ir.module()
    root.attributes["move.phase"] = "placed"
    with pytest.raises(VerifyError, match="it holds no plan"):
        m.verify_plan(root)


def test_streams_exist() -> None:
    plan, x = start()
    plan.launch([x], [], stream=1)
    plan.finish()
    assert "it runs on stream 1; move.streams lists 1" in problem(plan)


def test_callee_and_its_ops() -> None:
    plan, x = start()
    plan.launch([x], [], callee=Symbol("step"), ops=(0,), layer="fc")
    plan.finish()
    assert "launch 0 of fc runs @step, which is no function of this module" in problem(plan)
    ir.finish_function(ir.add_function(plan.module, "step", []), [])
    m.verify_plan(plan.module)
    plan.launches[0].attributes["ops"] = (0, 1)
    assert "runs ops [0, 1] of the 1 of @step" in problem(plan)


def test_foreign_ops_and_arguments_have_no_place() -> None:
    from wholestep.dialects.step import StepBuilder

    plan, x = start()
    plan.launch([x], [])
    StepBuilder(plan.function.regions[0].block).full(0, (), F32)
    plan.finish()
    assert "it has no place in a plan" in problem(plan)
    plan, x = start()
    plan.finish()
    plan.function.regions[0].block.add_argument(base.BUFFER)
    plan.function.attributes["function_type"] = ir.FunctionType((base.BUFFER,), ())
    assert "a plan has no arguments" in problem(plan)


def test_nothing_follows_the_result() -> None:
    plan, x = start()
    plan.finish()
    b = ir.Builder(plan.function.regions[0].block, plan.function.regions[0].block.last)
    m.Launch.build(b, [x], [], [], provider="aten")
    assert "it follows move.result" in problem(plan)


# ---- phases ----


def tensor_plan() -> tuple[PlanBuilder, list[ir.Value]]:
    plan, x = start("tensor")
    a, b, out = plan.alloc("a"), plan.alloc("b"), plan.alloc("out", lifetime="output")
    plan.launch([b], [out], layer="three")
    plan.launch([a], [b], layer="two")
    plan.launch([x], [a], layer="one")
    return plan, [x, a, b, out]


def test_tensor_phase_has_no_order() -> None:
    plan, values = tensor_plan()
    plan.finish(values[-1])
    m.verify_plan(plan.module)
    plan.module.attributes["move.phase"] = "ordered"
    assert "before it is written" in problem(plan)


def test_tensor_phase_cycle() -> None:
    plan, (_, a, b, out) = tensor_plan()
    plan.finish(out)
    plan.launches[2].set_operands([b, a])
    assert re.search(
        r"launch \d of \w+ reads buffer %\w \(.*\), which cannot be made without it: a cycle", problem(plan)
    )


@pytest.mark.parametrize("what", ["wait", "reuse", "stream", "token", "in_place", "offset", "arena"])
def test_tensor_phase_refuses_what_comes_later(what: str) -> None:
    plan, (x, a, _, out) = tensor_plan()
    if what == "wait":
        plan.wait(plan.launches[0].result)
    elif what == "reuse":
        plan.reuse("new", a, "transient")
    elif what == "stream":
        plan.launches[0].attributes["stream"] = 1
    elif what == "token":
        plan.launch([x], [], [plan.launches[0].result])
    elif what == "in_place":
        plan.launches[0].attributes["in_place"] = (0, 0)
    elif what == "offset":
        a.owner.attributes["offset"] = 0
    else:
        m.Arena.build(plan.b, space=HBM)
    plan.finish(out)
    assert 'has no place in a plan with move.phase = "tensor"' in problem(plan)


def test_tensor_phase_writes_once_and_reads_what_is_written() -> None:
    plan, (x, a, _, out) = tensor_plan()
    plan.launch([x], [a], layer="again")
    plan.finish(out)
    assert "buffer %a (tensor<16xf32>, transient) is written by launch 2 of one and launch 3 of again" in problem(plan)
    plan, (x, a, _, out) = tensor_plan()
    plan.launch([plan.alloc("c")], [], layer="again")
    plan.finish(out)
    assert "launch 3 of again reads buffer %c (tensor<16xf32>, transient), which nothing writes" in problem(plan)


def test_ordered_phase_has_no_addresses_and_placed_has_all() -> None:
    plan, x = start("placed")
    a = plan.alloc("a", 0)
    plan.launch([x], [a])
    plan.finish()
    m.verify_plan(plan.module)
    plan.module.attributes["move.phase"] = "ordered"
    assert "it has an offset" in problem(plan)
    plan.module.attributes["move.phase"] = "placed"
    a.owner.attributes["offset"] = -1
    assert "it has no place; in a placed plan every alloc has an arena and an offset" in problem(plan)


# ---- ops ----


def test_declared_checks() -> None:
    def refuses(expected: str, build) -> None:
        plan, x = start()
        build(plan, x)
        plan.finish()
        with pytest.raises(VerifyError) as caught:
            ir.verify(plan.module)
        assert expected in str(caught.value)

    t = TensorType((4, 4), F32)
    bare = dict(type=t, space=HBM, lifetime="transient")
    refuses("bytes 4 to 68 of a buffer of 64", lambda p, x: p.view("v", x, (16,), 4))
    refuses("bytes -4 to 60", lambda p, x: p.view("v", x, (16,), -4))
    refuses("bytes 0 to 124", lambda p, x: p.view("v", x, (16,), 0, (2,)))
    refuses("strides [1] do not fit", lambda p, x: p.view("v", x, (4, 4), 0, (1,)))
    refuses("needs 256 bytes and the old buffer has 64", lambda p, x: p.reuse("r", x, "batch", (64,)))
    refuses("put several elements", lambda p, x: m.Alloc.build(p.b, None, **bare, strides=(0, 1)))
    refuses("put several elements", lambda p, x: m.Alloc.build(p.b, None, **bare, strides=(3, 1)))
    refuses("its offset is -2", lambda p, x: m.Alloc.build(p.b, None, **bare, offset=-2))
    refuses("a buffer holds a tensor, not f32", lambda p, x: m.Alloc.build(p.b, None, **{**bare, "type": F32}))
    refuses("the space must be", lambda p, x: m.Alloc.build(p.b, None, **{**bare, "space": m.space("disk")}))
    refuses("its arena is in another space", lambda p, x: p.alloc("a", arena=p.arena, space=m.space("host")))
    refuses("is not a power of two", lambda p, x: m.Arena.build(p.b, space=HBM, alignment=48))
    refuses("its size is -1", lambda p, x: m.Arena.build(p.b, space=HBM, size=-1))
    refuses("cannot copy tensor<16xf32> to tensor<8xf32>", lambda p, x: p.copy(x, p.alloc("a", shape=(8,))))
    refuses("is no list of pairs", lambda p, x: p.launch([x], [], in_place=(0, 0)))
    refuses("is no list of pairs", lambda p, x: p.launch([x], [p.alloc("a")], in_place=(0,)))
    refuses("names a read out of 1", lambda p, x: p.launch([x], [p.alloc("a")], in_place=(0, 1)))
    refuses("stream -1 does not exist", lambda p, x: p.launch([x], [], stream=-1))
    refuses("stream -1 does not exist", lambda p, x: p.wait(stream=-1))
    refuses("operand 'reads' is !move.memory, expected !move.buffer", lambda p, x: p.launch([p.arena], []))
    refuses("its argument number is -1", lambda p, x: p.external("y", index=-1))
    refuses("expected #move.space", lambda p, x: p.alloc("a", space=ir.DialectAttribute("move.place", ("hbm", 0))))


def collective(kind: str, reduction: str, read: tuple, write: tuple, group=(0, 1)) -> str:
    plan, _ = start()
    a, b = plan.external("a", "grad", shape=read), plan.alloc("b", shape=write)
    m.Collective.build(plan.b, [a], [b], [], kind=kind, reduction=reduction, group=group)
    plan.finish()
    try:
        m.verify_plan(plan.module)
    except VerifyError as error:
        return str(error)
    return ""


def test_collectives() -> None:
    assert not collective("all_reduce", "sum", (8,), (8,))
    assert not collective("all_gather", "none", (8,), (16,))
    assert not collective("reduce_scatter", "mean", (16,), (8,))
    assert not collective("broadcast", "none", (8,), (8,))
    assert not collective("all_to_all", "none", (8,), (8,))
    assert "cannot make" in collective("all_reduce", "sum", (8,), (16,))
    assert "cannot make" in collective("all_gather", "none", (8,), (8,))
    assert "cannot make" in collective("reduce_scatter", "sum", (8,), (8,))
    assert "cannot make" in collective("all_to_all", "none", (7,), (7,))
    assert "needs a reduction" in collective("all_reduce", "none", (8,), (8,))
    assert "has no reduction" in collective("broadcast", "sum", (8,), (8,))
    assert "no list of different devices" in collective("broadcast", "none", (8,), (8,), (1, 1))


def test_send_and_receive_take_part_in_the_order() -> None:
    plan = PlanBuilder("ordered", ("cuda:0", "cuda:0"))
    a = plan.alloc("a")
    got = m.Recv.build(plan.b, a, [], peer=1, stream=1)
    send = m.Send.build(plan.b, a, [got.result], peer=1, stream=0)
    plan.finish()
    m.verify_plan(plan.module)
    send.set_operands([a])
    assert "send 1 reads buffer %a" in problem(plan) and "nothing orders it after recv 0" in problem(plan)
    send.attributes["peer"] = -1
    assert "there is no device -1" in problem(plan)


def test_layouts() -> None:
    t = TensorType((2, 3, 4), F32)
    assert base.layout(t) == base.layout(t, (12, 4, 1)) == ((24, 1),)
    assert base.layout(t, (24, 8, 2)) == ((24, 2),)
    assert base.layout(t, (16, 4, 1)) == ((2, 16), (12, 1))
    assert base.layout(TensorType((1, 1), F32), (5, 7)) == base.layout(TensorType((), F32), ()) == ((1, 1),)
    assert m.extent(t) == 96 and m.extent(t, (16, 4, 1)) == 4 * (16 + 8 + 3 + 1)
    assert m.extent(TensorType((0, 3), F32), (3, 1)) == 0


# ---- text and size ----


def test_text_round_trip() -> None:
    plan = RandomPlan(3, 30, 2)
    text = ir.print_module(plan.module, locations=True)
    again = ir.parse(text, dialects.context(), verify=True)
    assert ir.print_module(again, locations=True) == text
    m.verify_plan(again)


def test_work_grows_with_the_plan_and_no_faster() -> None:
    def plan(launches: int) -> ir.Op:
        return RandomPlan(1, launches, 2, slots=launches // 10).module

    assert work(plan(800)) < 6 * work(plan(200))  # four times the launches; pairs would take sixteen times as much
