"""Reference execution: a flat list of calls over numbered slots, each tensor dropped after its last use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..backends.absorption import CastBytes, absorb_casts, cast_bytes, is_float_cast
from ..backends.aten import lower
from ..backends.host import host_function, with_constants
from ..dialects.step import constant_value, torch_dtype
from ..dialects.step.control import root_of
from ..errors import WholestepError
from ..ir.builtin import lookup
from ..ir.core import Op, Value
from ..transforms.expand import expanded
from .micro_batches import MicroBatchLoop


@dataclass(slots=True)
class Instruction:
    """One call: which slots it reads and writes, which hold nothing anybody reads afterwards."""

    run: Callable[..., Any]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    op: Op
    frees: tuple[int, ...] = ()


class Executable:
    """A function of the program, ready to run: tensors in, tensors out, nothing decided while it runs.

    `numbers` are the arguments that hold single numbers kept on the host (hyper-parameters, step counters); what is
    computed from them alone stays a Python number.
    """

    def __init__(self, function: Op, device: torch.device | str = "cpu", numbers: Iterable[int] = ()):
        self.device = torch.device(device)
        self.function = expanded(function, self.device)
        block = self.function.regions[0].block
        assert block.last is not None
        self.arguments = len(block.arguments)
        slots: dict[Value, int] = {a: i for i, a in enumerate(block.arguments)}
        host: set[Value] = {block.arguments[i] for i in numbers}
        self.numbers = tuple(sorted(numbers))
        self.fixed: list[tuple[int, Any]] = []
        instructions: list[Instruction] = []
        absorption = absorb_casts(self.function)
        absorbed = absorption.casts
        #: what the casts of one run cost, and what they would cost if none was absorbed by the kernels beside it
        self.casts = CastBytes()
        for op in block:
            if op is block.last or not any(r.uses for r in op.results):
                continue
            if op in absorbed:
                slots[op.result] = slots[op.operands[0]]
                self.casts = self.casts.plus(CastBytes(absorbed=cast_bytes(op)))
                continue
            on_host = host_function(op) if any(v in host for v in op.operands) else None
            if on_host is not None and all(v in host or constant_value(v) is not None for v in op.operands):
                run = with_constants(on_host, op)
                operands = tuple(v for v in op.operands if constant_value(v) is None)
                host.update(op.results)
            else:
                if chooses_on_host(op, host):
                    run, operands = (lambda condition, x, y: x if condition else y), op.operands
                elif op.name == "step.micro_batches":
                    body = Executable(lookup(root_of(function), op.callee), device)
                    run, operands = MicroBatchLoop(op, body), op.operands
                    self.casts = self.casts.plus(body.casts, times=op.count)
                else:
                    call = lower(op, self.device, absorption.written.get(op))
                    run, operands = call.run, call.operands
                    if is_float_cast(op) and op.result.type.rank:
                        self.casts = self.casts.plus(CastBytes(executed=cast_bytes(op), count=1))
                if any(v in host for v in operands) and not takes_floats(op, host) and not chooses_on_host(op, host):
                    run = with_tensors(run, operands, host)
            for result in op.results:
                slots[result] = len(slots)
            if operands:
                reads, writes = tuple(slots[v] for v in operands), tuple(slots[r] for r in op.results)
                instructions.append(Instruction(run, reads, writes, op))
            else:
                self.fixed.append((slots[op.results[0]], run()))
        #: results that are numbers on the host, with the type of the tensor they stand for
        self.results = tuple(
            (slots[v], torch_dtype(v.type.element) if v in host else None) for v in block.last.operands
        )
        self.slots = len(slots)
        mark_last_uses(instructions, {slot for slot, _ in (*self.fixed, *self.results)})
        self.calls = [
            (i.run, i.reads, i.writes if len(i.writes) > 1 else i.writes[0], i.frees, i.op) for i in instructions
        ]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if len(inputs) != self.arguments:
            raise WholestepError(f"the program takes {self.arguments} tensors, {len(inputs)} were given")
        slots: list[Any] = [None] * self.slots
        slots[: self.arguments] = inputs
        for index in self.numbers:
            slots[index] = slots[index].item()
        for slot, tensor in self.fixed:
            slots[slot] = tensor
        op = None
        try:
            with torch.no_grad():
                for run, reads, writes, frees, op in self.calls:  # noqa: B007 - the handler below names the op
                    out = run(*[slots[i] for i in reads])
                    if isinstance(writes, int):
                        slots[writes] = out
                    else:
                        for slot, value in zip(writes, out, strict=True):
                            slots[slot] = value
                    for slot in frees:
                        slots[slot] = None
        except Exception as error:
            if op is None or isinstance(error, WholestepError) or op.name == "step.micro_batches":
                raise  # (an error of a micro-batch names its op already)
            raise kept_class(error)(f"{op.name} of layer {op.loc}: {error}") from error
        return [slots[i] if dtype is None else torch.tensor(slots[i], dtype=dtype) for i, dtype in self.results]


def chooses_on_host(op: Op, host: set[Value]) -> bool:
    """Whether a select only has to hand on one of two tensors, by a condition that is a number on the host."""
    if op.name != "step.select" or op.operands[0] not in host:
        return False
    return all(v not in host and v.type is op.result.type for v in op.operands[1:])


def takes_floats(op: Op, host: set[Value]) -> bool:
    """Whether the op's ATen call takes Python numbers in place of these 0-d tensors."""
    if op.name in ("step.axpy", "step.addcmul", "step.addcdiv", "step.lerp"):
        return not any(v in host for v in op.operands[:-1])
    return getattr(op.definition, "takes_numbers", False) and not all(v in host for v in op.operands)


def with_tensors(run: Callable[..., Any], operands: tuple[Value, ...], host: set[Value]) -> Callable[..., Any]:
    """A function that turns numbers from the host into tensors of their type before it runs."""
    dtypes = [torch_dtype(v.type.element) if v in host else None for v in operands]

    def convert(*given: Any) -> Any:
        return run(*[x if d is None else torch.tensor(x, dtype=d) for x, d in zip(given, dtypes, strict=True)])

    return convert


def mark_last_uses(instructions: list[Instruction], kept: set[int]) -> None:
    """Notes at each instruction the slots that nobody reads after it."""
    last: dict[int, int] = {}
    for index, instruction in enumerate(instructions):
        for slot in (*instruction.reads, *instruction.writes):
            last[slot] = index
    frees: dict[int, list[int]] = {}
    for slot, index in sorted(last.items()):
        if slot not in kept:
            frees.setdefault(index, []).append(slot)
    for index, slots in frees.items():
        instructions[index].frees = tuple(slots)


def kept_class(error: Exception) -> type[Exception]:
    """The class to raise again with the layer's name: torch's out-of-memory and runtime errors stay what they are."""
    for kind in (torch.OutOfMemoryError, MemoryError, IndexError, RuntimeError):
        if isinstance(error, kind):
            return kind
    return WholestepError
