"""Storages and views: a write through one tensor is seen by every other of the same storage, and by no one else."""

from __future__ import annotations

import pytest
import torch

from wholestep.capture.references import Ref, fresh, view
from wholestep.dialects.step import StepBuilder
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.types import F32, TensorType
from wholestep.runtime.executor import Executable


class Sheet:
    """A function of one 3x4 tensor, built by hand and run."""

    def __init__(self) -> None:
        self.function = add_function(module(), "step", [])
        self.block = self.function.regions[0].block
        self.b = StepBuilder(self.block, phase="forward")
        self.x = fresh(self.block.add_argument(TensorType((3, 4), F32), "x"))

    def look(self, base: Ref, value) -> Ref:
        found = view(base, base.read(self.b), value)
        assert found is not None
        return found

    def run(self, *refs: Ref) -> list[torch.Tensor]:
        finish_function(self.function, [r.read(self.b) for r in refs], [{}], [{} for _ in refs])
        return Executable(self.function)([torch.arange(12.0).reshape(3, 4)])


def test_writing_a_slice_of_a_transpose_reaches_the_base_and_its_other_views():
    s = Sheet()
    turned = s.look(s.x, s.b.transpose(s.x.value, order=(1, 0)))
    row = s.look(turned, s.b.slice(turned.value, dim=0, start=1, end=2, stride=1))
    flat = s.look(s.x, s.b.reshape_to(s.x.value, (12,)))
    row.write(s.b, s.b.full(-1.0, (1, 3), F32))
    base, seen, again = s.run(s.x, flat, row)
    expected = torch.arange(12.0).reshape(3, 4)
    expected[:, 1] = -1
    assert torch.equal(base, expected)
    assert torch.equal(seen, expected.flatten())
    assert torch.equal(again, torch.full((1, 3), -1.0))


def test_a_value_read_before_a_write_keeps_what_it_was():
    s = Sheet()
    old = fresh(s.b.mul(s.x.read(s.b), 2.0))
    s.x.write(s.b, s.b.zeros_like(s.x.value))
    base, kept = s.run(s.x, old)
    assert torch.equal(base, torch.zeros(3, 4))
    assert torch.equal(kept, 2 * torch.arange(12.0).reshape(3, 4))


def test_two_storages_do_not_see_each_other():
    s = Sheet()
    copy = fresh(s.x.value)
    copy.write(s.b, s.b.zeros_like(s.x.value))
    base, _ = s.run(s.x, copy)
    assert torch.equal(base, torch.arange(12.0).reshape(3, 4))


def test_a_result_that_is_no_view_is_not_taken_for_one():
    s = Sheet()
    assert view(s.x, s.x.value, s.b.mul(s.x.value, 2.0)) is None


def test_writing_an_expanded_tensor_is_refused():
    s = Sheet()
    first = s.look(s.x, s.b.slice(s.x.value, dim=0, start=0, end=1, stride=1))
    wide = s.look(first, s.b.broadcast_to(first.value, (5, 4)))
    with pytest.raises(ValueError, match="several elements share one place"):
        wide.write(s.b, s.b.zeros_like(wide.value))
