"""Batches of updates: which regions become one, how long gradients wait, and that they come apart again."""

import pytest

from wholestep.dialects.step import StepBuilder
from wholestep.dialects.step.control import root_of
from wholestep.dialects.step.fused import Fused
from wholestep.ir.builtin import add_function, finish_function, lookup, module
from wholestep.ir.types import F32, TensorType
from wholestep.ir.verify import verify
from wholestep.transforms.batch import WAIT, batch, common, unbatch, work
from wholestep.transforms.fuse import dissolve, fuse


def program(shapes, norm=False, early=None, tied=False):
    """A loss-like chain that makes one gradient per shape, then an update per shape: p - lr * g, and g kept."""
    root = module()
    types = [TensorType(shape, F32) for shape in shapes]
    function = add_function(root, "main", [*types, *types, TensorType((), F32)])
    arguments = function.regions[0].block.arguments
    count = len(shapes)
    b = StepBuilder(function.regions[0].block, phase="backward")
    grads = [b.cumsum(x, dim=0) for x in arguments[:count]]  # (no op of a kernel)
    out = []
    if norm:
        b.phase = "clip"
        squares = [b.reshape_to(b.sum(b.mul(g, g), dims=tuple(range(g.type.rank))), (1,)) for g in grads]
        total = b.sqrt(b.sum(b.concat(squares, dim=0), dims=(0,)))
        grads = [b.div(g, total) for g in grads]
    b.phase = "update"
    for number, grad in enumerate(grads):
        old = arguments[count] if tied else arguments[count + number]
        new = b.sub(old, b.mul(grad, arguments[-1]))
        out.append(new)
        if early == number:
            out.append(b.cumsum(new, dim=0))
    finish_function(function, out)
    return function


def fused(function):
    return [op for op in function.regions[0].block if op.definition is Fused]


def sizes(function, found):
    return sorted(len(found.parts[op.callee.name]) for op in fused(function) if op.callee.name in found.parts)


def test_updates_of_any_size_are_one_region():
    function = program([(3, 5), (7,), (2, 2, 2)])
    fusion = fuse(function)
    found = batch(function, fusion, None)
    assert sizes(function, found) == [3]
    verify(root_of(function))
    (whole,) = fused(function)
    assert len(whole.operands) == 9  # the learning rate is an operand of every part
    assert [op for op, _ in fusion.kernels] == [whole] * 3


def test_other_work_is_not_in_the_batch():
    function = program([(3, 5), (7,), (4, 4)])
    block = function.regions[0].block
    last = [op for op in block if op.name == "step.sub"][-1]
    last.set_operands(reversed(last.operands))
    found = batch(function, fuse(function), None)
    assert sizes(function, found) == [2]


def test_a_tensor_that_two_updates_read_is_not_overwritten_by_one_launch():
    function = program([(4, 4), (4, 4)], tied=True)
    assert batch(function, fuse(function), None).parts == {}


def test_who_is_needed_before_the_others_can_run_stays_alone():
    function = program([(4, 4), (5,), (6,)], early=0)
    found = batch(function, fuse(function), None)
    assert sizes(function, found) == [2]
    verify(root_of(function))


def test_gradients_do_not_wait_for_long():
    shapes = [(1024, 64)] * 8  # 256 KB each
    function = program(shapes)
    assert sizes(function, batch(function, fuse(function), None)) == [8]
    function = program(shapes)  # one percent of the peak is less than one gradient
    found = batch(function, fuse(function), WAIT)
    assert max(sizes(function, found), default=1) <= 2
    function = program([(16,)] * 50 + [(1024, 64)])
    assert max(sizes(function, batch(function, fuse(function), WAIT))) >= 40  # small ones may


def test_norms_are_one_region_and_so_are_updates_that_wait_for_them():
    function = program([(3, 5), (7,), (64, 64)], norm=True)
    found = batch(function, fuse(function), WAIT)
    assert sizes(function, found) == [3, 3]
    verify(root_of(function))
    for op in fused(function):
        assert op.phase in ("clip", "update")


def test_forbidden():
    function = program([(3, 5), (7,)])
    fusion = fuse(function)
    assert batch(function, fusion, None, ["fuse batch"]).parts == {}
    assert fusion.forbidden == {"fuse batch"}


def test_apart_again():
    function = program([(3, 5), (7,), (2, 2, 2)], norm=True)
    fusion = fuse(function)
    before = [(op.callee.name, op.phase) for op in fused(function)]
    found = batch(function, fusion, None)
    assert unbatch(function, fusion, found, lambda op: False) == 0
    assert unbatch(function, fusion, found, lambda op: True) == 2
    verify(root_of(function))
    assert sorted((op.callee.name, op.phase) for op in fused(function)) == sorted(before)
    assert {op for op, _ in fusion.kernels} == set(fused(function))
    dissolve(function, lambda op: True)
    verify(root_of(function))
    assert not fused(function)


def test_work_says_what_is_done_and_not_how_large():
    function = program([(3, 5), (7,)], norm=True)
    fuse(function)
    root = root_of(function)
    kinds = [work(lookup(root, op.callee)) for op in fused(function)]
    assert kinds[0] == kinds[1] != "" and kinds[-1] == kinds[-2] != ""  # squares, updates
    assert kinds[0] != kinds[-1]


@pytest.mark.parametrize(
    ("layers", "wanted"), [(["a.b.c", "a.b.d"], "a.b"), (["a", "b"], ""), (["a.b", "a.b"], "a.b"), (["a1", "a2"], "")]
)
def test_the_layer_of_a_batch(layers, wanted):
    assert common(layers) == wanted
