"""Regions in the ledger: they move less for the same bound, and look-ups read the rows they ask for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import torch

from tests.cost.models import language_step, moved
from wholestep.backends.choose import Choices, Chosen
from wholestep.backends.kernels import Spec
from wholestep.backends.providers import Region, providers_for
from wholestep.cost import Movement, movement_of
from wholestep.cost.accesses import elements_read
from wholestep.cost.cache import through_cache, without_cache
from wholestep.dialects.step import StepBuilder
from wholestep.ir import F32, I64, TensorType, add_function, finish_function, module
from wholestep.plan.planner import planned_function
from wholestep.transforms.loops import lowered

CPU = torch.device("cpu")


class Everything(Choices):
    """Takes a generated kernel for every region that has a loop form; nothing is built."""

    def decide(self, regions: Iterable[Region], later: Sequence[Region] = (), aten: bool = True) -> None:
        for region in regions:
            run = None if region.kernel is None else lambda *tensors: None
            self.known[region.key] = Chosen("aten" if run is None else "cpp", "guess", run)


@cache
def fused_language() -> Movement:
    """The language model of the other tests, planned with every kernel fused."""
    compiled = language_step()._compiled
    choices = Everything(CPU, providers_for(CPU, ("aten", "cpp")), None, False)
    return movement_of(planned_function(compiled.program.function, CPU, compiled.numbers, choices=choices))


def test_fusion_changes_what_moves_and_not_the_bound() -> None:
    plain, fused = moved(language_step()), fused_language()
    assert any(k.name == "fused" for k in fused.ledger.kernels)
    assert fused.ledger.total < plain.ledger.total
    assert fused.bound == plain.bound
    assert fused.ratio > 1


def test_a_look_up_reads_its_rows() -> None:
    function = add_function(module(), "main", [TensorType((1000, 8), F32), TensorType((4, 3), I64)])
    b, (table, rows) = StepBuilder(function.regions[0].block), function.regions[0].block.arguments
    finish_function(function, [b.mul(b.embedding(table, rows), 2.0)])
    assert elements_read(lowered(function)) == [4 * 3 * 8, 4 * 3]


def test_views_of_one_tensor_that_a_kernel_reads_count_once() -> None:
    function = add_function(module(), "main", [TensorType((6, 8), F32), TensorType((6, 4), F32)])
    b, (x, y) = StepBuilder(function.regions[0].block), function.regions[0].block.arguments
    halves = [b.slice(x, dim=1, start=n, end=n + 4) for n in (0, 4, 2)]
    finish_function(function, [b.add(b.add(*halves[:2]), b.add(halves[2], y))])
    choices = Everything(CPU, providers_for(CPU, ("aten", "cpp")), None, False)
    (kernel,) = movement_of(planned_function(function, CPU, choices=choices)).ledger.kernels
    assert kernel.bytes == 4 * (6 * 8 + 6 * 4 + 6 * 4)


def test_what_is_read_twice_counts_as_often_up_to_the_whole() -> None:
    function = add_function(module(), "main", [TensorType((6, 8), F32)])
    b, (x,) = StepBuilder(function.regions[0].block), function.regions[0].block.arguments
    finish_function(function, [b.add(b.slice(x, dim=0, start=0, end=2), b.slice(x, dim=0, start=4, end=6))])
    assert elements_read(lowered(function)) == [2 * 2 * 8]


def test_scratch_is_written_and_then_read() -> None:
    class WithScratch(Everything):
        def decide(self, regions: Iterable[Region], later: Sequence[Region] = (), aten: bool = True) -> None:
            super().decide(regions, later, aten)
            for region in regions:
                self.known[region.key].scratch = (Spec((5, 8), (8, 1), torch.float32),)

    function = add_function(module(), "main", [TensorType((6, 8), F32)])
    b, (x,) = StepBuilder(function.regions[0].block), function.regions[0].block.arguments
    finish_function(function, [b.mul(b.exp(x), x)])
    choices = WithScratch(CPU, providers_for(CPU, ("aten", "cpp")), None, False)
    planned = planned_function(function, CPU, choices=choices)
    (kernel,) = movement_of(planned).ledger.kernels
    assert kernel.launches == 1
    assert [(m.written, m.bytes) for m in kernel.moves if m.cause == "workspace"] == [(True, 160), (False, 160)]
    plain, cached = without_cache(planned), through_cache(planned, 1 << 20, warm=False)
    assert plain.read == [192 + 160] and cached.read == [192]  # it is still in the cache when it is read
