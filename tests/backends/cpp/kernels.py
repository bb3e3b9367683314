"""Kernels to test a generator with: from ops of the step dialect or made directly; arguments lie as asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from wholestep.backends.kernels import Spec
from wholestep.dialects.loop import Apply, Load, Reduce, Space, Store
from wholestep.dialects.loop.reference import run
from wholestep.dialects.step import StepBuilder
from wholestep.dialects.step.base import torch_dtype
from wholestep.dialects.strides import row_major
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.core import Builder, Op
from wholestep.ir.types import F32, ScalarType, TensorType
from wholestep.ir.verify import verify
from wholestep.transforms.loops import lowered

TRUTH: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "sum": lambda x, d: x.sum(d),
    "prod": lambda x, d: x.prod(d),
    "max": lambda x, d: x.amax(d),
    "min": lambda x, d: x.amin(d),
    "or": lambda x, d: x.any(d),
    "and": lambda x, d: x.all(d),
}


def tensor(*shape: int, e: ScalarType = F32) -> TensorType:
    return TensorType(shape, e)


@dataclass
class Case:
    """A kernel with its arguments; `strides` overrides how an argument lies, `given` what an input holds."""

    function: Op
    strides: dict[int, tuple[int, ...]] = field(default_factory=dict)
    given: dict[int, torch.Tensor] = field(default_factory=dict)
    scale: float = 1.0
    truth: Callable[..., torch.Tensor] | None = None  # instead of the reference
    labels: tuple[str, ...] = ()  # of its outputs, for messages

    @property
    def specs(self) -> list[Spec]:
        found = []
        for i, argument in enumerate(self.function.regions[0].block.arguments):
            shape = argument.type.shape
            found.append(Spec(shape, self.strides.get(i, row_major(shape)), torch_dtype(argument.type.element)))
        return found

    def arguments(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Inputs with numbers, outputs with a mark that must vanish; all at an odd place in larger memory."""
        outputs = {op.operands[1] for op in self.function.regions[0].block if op.definition is Store}
        generator = torch.Generator().manual_seed(0)
        ins, outs = [], []
        for i, (argument, spec) in enumerate(zip(self.function.regions[0].block.arguments, self.specs, strict=True)):
            memory = torch.full((spec.bytes // spec.dtype.itemsize + 9,), 7, dtype=torch.float64).to(spec.dtype)
            made = memory.as_strided(spec.shape, spec.strides, 5)
            if argument in outputs:
                outs.append(made)
                continue
            if i in self.given:
                values = self.given[i]
            elif spec.dtype.is_floating_point:
                values = torch.randn(spec.shape, dtype=torch.float64, generator=generator) * self.scale
            else:
                values = torch.randint(0, 2, spec.shape, generator=generator)
            unique = tuple(slice(None) if s else slice(0, 1) for s in spec.strides)
            if spec.shape:
                made[unique] = values[unique].to(spec.dtype)
            else:
                made.copy_(values)
            ins.append(made)
        return ins, outs

    def expected(self, ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = [o.clone(memory_format=torch.contiguous_format) for o in outs]
        if self.truth is not None:
            found[0].copy_(self.truth(*(x.double() if x.is_floating_point() else x for x in ins)))
            return found
        run(self.function, ins, found)
        return found


def step(
    types: Sequence[TensorType], body: Callable[..., Any], strides: Any = None, given: Any = None, scale: float = 1.0
) -> Case:
    """What a function of the step dialect computes, as one kernel."""
    root = module()
    function = add_function(root, "k", types)
    block = function.regions[0].block
    made = body(StepBuilder(block), *block.arguments)
    finish_function(function, made if isinstance(made, list | tuple) else [made])
    kernel = lowered(function)
    verify(kernel.parent.parent.parent)  # type: ignore[union-attr]
    return Case(kernel, strides or {}, given or {}, scale)


def apply(
    fns: Sequence[str], values: Sequence[torch.Tensor], types: Sequence[ScalarType], results: Sequence[ScalarType]
) -> Case:
    """Functions of the same vectors, each with its own output."""
    root = module()
    size = values[0].numel()
    function = add_function(root, "k", [TensorType((size,), t) for t in (*types, *results)])
    block = function.regions[0].block
    b = Builder(block)
    Space.build(b, sizes=(size,))
    ins, outs = block.arguments[: len(types)], block.arguments[len(types) :]
    read = [Load.build(b, x, [], map=[[1, 0]]).result for x in ins]
    for fn, out in zip(fns, outs, strict=True):
        Store.build(b, Apply.build(b, read, fn=fn, dtype=out.type.element).result, out, [], map=[[1, 0]])
    finish_function(function, [])
    return Case(
        function, given=dict(enumerate(values)), labels=tuple(f"{f} {r}" for f, r in zip(fns, results, strict=True))
    )


def reduction(kind: str, shape: tuple[int, ...], dims: tuple[int, ...], type: ScalarType, result: ScalarType) -> Case:
    """A single reduction, with torch's own as the truth."""
    root = module()
    kept = tuple(n for d, n in enumerate(shape) if d not in dims)
    function = add_function(root, "k", [TensorType(shape, type), TensorType(kept, result)])
    block = function.regions[0].block
    b = Builder(block)
    Space.build(b, sizes=shape)
    x, y = block.arguments
    rows = [[int(d == e) for e in range(len(shape))] + [0] for d in range(len(shape))]
    number = Load.build(b, x, [], map=rows).result
    total = Reduce.build(b, number, kind=kind, dims=dims, dtype=result).result
    Store.build(b, total, y, [], map=[row for d, row in enumerate(rows) if d not in dims])
    finish_function(function, [])

    def truth(x: torch.Tensor) -> torch.Tensor:
        for d in sorted(dims, reverse=True):
            x = TRUTH[kind](x, d)
        return x

    return Case(function, truth=truth)
