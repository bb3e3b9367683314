"""Replays a plan on real memory, to prove it: one arena of bytes, every buffer a view, every launch one ATen call.

Written apart from the planner: it believes nothing but the plan. Memory is filled with NaN before the step and again
whenever a buffer's time is over, so reading too early, too late or from the wrong place shows in the results. What is
on another stream runs as late as it may: when something waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from wholestep.backends.absorption import absorb_casts
from wholestep.backends.aten import lower
from wholestep.backends.host import host_function, with_constants
from wholestep.dialects.step import torch_dtype
from wholestep.dialects.step.control import root_of
from wholestep.ir.builtin import lookup
from wholestep.ir.core import Op
from wholestep.ir.hashing import program_hash
from wholestep.plan.plan import Plan
from wholestep.runtime.executor import chooses_on_host, takes_floats, with_tensors
from wholestep.runtime.micro_batches import MicroBatchLoop
from wholestep.transforms.expand import expanded

POISON = 0xFF  # NaN in every float type


@dataclass
class Replay:
    """What came back, and how many results a kernel laid out otherwise than planned."""

    results: list[torch.Tensor]
    other_layouts: list[str] = field(default_factory=list)


class Memory:
    """The tensors of a plan: views of one arena, of the arguments, and of constants."""

    def __init__(self, plan: Plan, inputs: Sequence[torch.Tensor], arena: torch.Tensor | None):
        self.plan, self.inputs = plan, inputs
        self.arena = torch.empty(plan.arena, dtype=torch.uint8) if arena is None else arena
        assert self.arena.numel() == plan.arena
        self.arena.fill_(POISON)
        self.pinned = torch.full((plan.pinned,), POISON, dtype=torch.uint8)
        self.constants: dict[int, torch.Tensor] = {}
        self.host: dict[int, Any] = {}

    def bytes_of(self, number: int) -> torch.Tensor:
        """The stretch of the arena, or of the host's memory, that a buffer owns."""
        buffer = self.plan.buffers[number]
        assert buffer.space in ("arena", "pinned") and buffer.base < 0
        memory = self.arena if buffer.space == "arena" else self.pinned
        assert buffer.offset >= 0 and buffer.offset + buffer.bytes <= memory.numel()
        assert buffer.offset % self.plan.alignment == 0
        return memory[buffer.offset : buffer.offset + buffer.bytes]

    def __getitem__(self, number: int) -> Any:
        buffer = self.plan.buffers[number]
        if buffer.space == "host":
            return self.host[number]
        dtype = torch_dtype(buffer.type.element)
        inner = 0 if buffer.base < 0 else buffer.offset
        assert inner % dtype.itemsize == 0
        owner = self.plan.owner(number)
        if buffer.space in ("arena", "pinned"):
            if not buffer.type.size:
                return torch.empty(buffer.type.shape, dtype=dtype)
            flat = self.bytes_of(owner).view(dtype)
            return flat.as_strided(buffer.type.shape, buffer.strides, flat.storage_offset() + inner // dtype.itemsize)
        tensor = self.inputs[owner] if buffer.space == "external" else self.constants[owner]
        if number == owner:
            return tensor
        assert tensor.dtype == dtype, "memory of an argument or a constant seen as another type"
        return tensor.as_strided(buffer.type.shape, buffer.strides, tensor.storage_offset() + inner // dtype.itemsize)


def simulate(
    plan: Plan, function: Op, module: Op, inputs: Sequence[torch.Tensor], arena: torch.Tensor | None = None
) -> Replay:
    """Runs a plan. `function` is the expanded function; `inputs` are changed where the plan replaces them."""
    assert plan.fingerprint == program_hash(function, root_of(function))
    memory = Memory(plan, inputs, arena)
    ops = list(function.regions[0].block)
    absorption = absorb_casts(function)
    replay = Replay([])
    host_values: set[Any] = set()
    for number, buffer in enumerate(plan.buffers):
        if buffer.space == "host" and buffer.argument >= 0:
            memory.host[number] = inputs[buffer.argument].item()
            host_values.add(function.regions[0].block.arguments[buffer.argument])
        if buffer.space == "constant" and buffer.base < 0:
            op = ops[buffer.op]
            memory.constants[number] = lower(op, torch.device("cpu")).run()
    dying: dict[int, list[int]] = {}
    for number, buffer in plan.owners():
        dying.setdefault(buffer.last, []).append(number)
    beside: dict[int, Any] = {}  # launches on other streams that nobody has waited for

    def run(launch: Any) -> None:
        operands = [memory[number] for number in launch.reads]
        if launch.provider == "wait":
            made: tuple[Any, ...] = ()
        elif launch.provider == "copy":
            made = (operands[0].clone(),)
        elif launch.provider == "host":
            op = ops[launch.op]
            made = (with_constants(host_function(op), op)(*operands),)
            host_values.update(op.results)
        elif launch.provider == "micro_batches":
            made = run_micro_batches(plan, launch, ops[launch.op], module, operands, memory, replay)
        else:
            made = run_op(ops[launch.op], absorption.written.get(ops[launch.op]), operands, host_values)
        for number, value in zip(launch.writes, made, strict=True):
            if number < 0:
                continue
            buffer = plan.buffers[number]
            if buffer.space == "host":
                memory.host[number] = value
                continue
            assert tuple(value.shape) == buffer.type.shape, launch
            if launch.provider != "copy":
                assert value.dtype == torch_dtype(buffer.type.element), launch
                part = buffer.share == "view"  # of a concatenation: it lies as that does
                if launch.provider == "aten" and not part and not same_layout(value, buffer.strides):
                    replay.other_layouts.append(f"{launch.name} {value.stride()} {buffer.strides}")
            target = memory[number]
            target.copy_(value.clone())

    for position, launch in enumerate(plan.launches):
        for awaited in launch.waits:
            stream = plan.launches[awaited].stream
            for p in [p for p in beside if p <= awaited and plan.launches[p].stream == stream]:
                run(beside.pop(p))
        if launch.stream:
            beside[position] = launch
            continue
        run(launch)
        for number in dying.get(position, ()):
            memory.bytes_of(number).fill_(POISON)
    assert not beside, "the step is over before its copies are"
    for returned in plan.results:
        value = memory[returned.buffer]
        if returned.way == "host":
            dtype = torch_dtype(plan.buffers[returned.buffer].type.element)
            replay.results.append(torch.tensor(value, dtype=dtype))
        elif returned.argument >= 0:
            replay.results.append(inputs[returned.argument])
        else:
            replay.results.append(value.clone())
    return replay


def run_op(op: Op, written: torch.dtype | None, operands: list[Any], host: set) -> tuple[Any, ...]:
    """One ATen call, as the reference executor makes it."""
    call = lower(op, torch.device("cpu"), written)
    run, values = call.run, call.operands
    if chooses_on_host(op, host):
        made = operands[1] if operands[0] else operands[2]
    else:
        if any(v in host for v in values) and not takes_floats(op, host):
            run = with_tensors(run, values, host)
        with torch.no_grad():
            made = run(*operands)
    return (made,) if len(op.results) == 1 else tuple(made)


def run_micro_batches(
    plan: Plan, launch: Any, op: Op, module: Op, operands: list[Any], memory: Memory, replay: Replay
) -> list[torch.Tensor]:
    """The body once per micro-batch, in the workspace of the launch."""
    body = plan.bodies[launch.body]
    function = expanded(lookup(module, op.callee))
    workspace = memory.bytes_of(launch.workspace)

    def once(arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        inner = simulate(body, function, module, [a.clone() for a in arguments], workspace)
        replay.other_layouts += inner.other_layouts
        return inner.results

    return MicroBatchLoop(op, once)(*operands)


def same_layout(value: torch.Tensor, strides: Sequence[int]) -> bool:
    if not value.numel():
        return True
    return all(a == b or n == 1 for n, a, b in zip(value.shape, value.stride(), strides, strict=True))
