"""The loop reference as a provider, so that whole steps run through it; and a function run with it op by op."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from wholestep.backends.aten import lower
from wholestep.backends.providers import Launcher, Offer, Progress, Provider, Region, forget_provider, register_provider
from wholestep.dialects.loop.reference import run as run_loops
from wholestep.dialects.step import torch_dtype
from wholestep.dialects.step.fused import Fused
from wholestep.ir.core import Op
from wholestep.transforms.fuse import Fusion

CPU = torch.device("cpu")


class LoopReference(Provider):
    """Runs the loop form of a region in float64."""

    name = "loops"
    devices = ("cpu",)

    def claims(self, region: Region) -> str:
        return "" if region.kernel is not None else "it has no loop form"

    def offers(self, region: Region) -> list[Offer]:
        return [Offer("float64", f"{self.name} {region.key}", made=region)]

    def build(self, offers: Sequence[Offer], report: Progress | None = None) -> dict[str, Launcher | Exception]:
        return {o.key: self.launcher(o.made) for o in offers}

    def launcher(self, region: Region) -> Launcher:
        inputs, results = len(region.operands), len(region.results)

        def run(*tensors: torch.Tensor) -> None:
            run_loops(region.kernel, tensors[:inputs], tensors[inputs : inputs + results])

        return run


@contextmanager
def registered(*classes: type[Provider]) -> Iterator[None]:
    """Providers that are known for a while."""
    for cls in classes:
        register_provider(cls)
    try:
        yield
    finally:
        for cls in classes:
            forget_provider(cls.name)


def run_fused(function: Op, inputs: Sequence[torch.Tensor], fusion: Fusion) -> list[torch.Tensor]:
    """Runs a function whose regions go through the loop reference and whose other ops go through ATen."""
    block = function.regions[0].block
    values: dict[Any, torch.Tensor] = dict(zip(block.arguments, inputs, strict=True))
    for op in block:
        if op.definition.terminator:
            return [values[v] for v in op.operands]
        if op.definition is Fused:
            kernel = fusion.bodies[op.callee.name].kernel
            assert kernel is not None, f"{op.callee.name} has no loop form"
            made: Any = [torch.empty(r.type.shape, dtype=torch_dtype(r.type.element)) for r in op.results]
            run_loops(kernel, [values[v] for v in op.operands], made)
        else:
            call = lower(op, CPU)
            made = call.run(*[values[v] for v in call.operands])
            made = made if isinstance(made, list | tuple) else [made]
        values.update(zip(op.results, made, strict=True))
    raise AssertionError("the function has no end")
