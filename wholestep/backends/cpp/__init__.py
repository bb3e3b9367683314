"""Kernels of the loop dialect as C++ for CPUs: vectorised, with OpenMP, compiled at run time by g++ or clang++.

`why_not`, `candidates` and `build` are what a planner asks; `missing` says what is lost where there is no compiler.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...dialects.loop import NoSchedule, Store, outputs_of, schedule, space_of
from ...ir.core import Op
from ..kernels import Spec
from .compiler import CompilerError, build_all, digest, header, working_compiler
from .nest import Options
from .source import Code, source_of
from .text import STORED
from .walk import walk_of

__all__ = ["Candidate", "CompilerError", "build", "candidates", "missing", "why_not"]

NAME = "kernel_name"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to write a kernel. `key` is the digest of its source: equal kernels are built once."""

    name: str
    scratch: tuple[Spec, ...]
    key: str
    source: str


def missing() -> str:
    """What is lost without a compiler, in one line; "" if there is one."""
    found = working_compiler()
    if not isinstance(found, str):
        return ""
    return f"no C++ kernels are generated ({found}): what they would fuse runs op by op through ATen, with more traffic"


def why_not(function: Op, specs: Sequence[Spec]) -> str:
    """Why the kernel cannot be done here; "" if it can."""
    found = working_compiler()
    if isinstance(found, str):
        return f"no C++ compiler works: {found}"
    block = function.regions[0].block
    elements = {a.type.element for a in block.arguments} | {r.type for op in block for r in op.results}
    unknown = sorted(e.text for e in elements if e.text not in STORED)
    if unknown:
        return f"C++ kernels do not compute with {unknown[0]}"
    for op in block:
        if op.definition is Store and op.attributes["dynamic"]:
            return "it writes to places that are computed, and two of them may be the same"
        if op.attributes.get("bits") is not None:
            return "C++ kernels read and write whole bytes"
    outputs = set(outputs_of(function))
    for argument, spec in zip(block.arguments, specs, strict=True):
        if argument in outputs and any(n > 1 and s == 0 for n, s in zip(spec.shape, spec.strides, strict=True)):
            return "an output has several elements at one place"
    try:
        schedule(function)
    except NoSchedule as reason:
        return str(reason)
    return ""


def candidates(function: Op, specs: Sequence[Spec]) -> list[Candidate]:
    """Ways to write a kernel, the best guess first."""
    made = [candidate(function, specs, options) for options in choices(function, specs)]
    return list({c.key: c for c in reversed(made)}.values())[::-1]


def choices(function: Op, specs: Sequence[Spec]) -> list[Options]:
    walk = walk_of(function, specs)
    whole = Options("phases")
    if 0 in space_of(function):
        return [whole]
    if not walk.reductions:
        code = Code(walk, whole)
        order = code.whole_order(walk.row | walk.outer)
        aims = code.writing_aims()
        if order and code.other_fast(order[-1], order, aims) is not None:
            return [Options("phases", 4096, 16), Options("phases", 4096, 64), whole]
        return [whole, Options("phases", 16384)]
    if not walk.along:
        if not any(n.varies for n in walk.across) or not walk.row:
            return [whole]
        return [whole, Options("rows")]
    found = [Options("rows")]
    rows = walk.points(walk.outer)
    code = Code(walk, whole)
    lane = code.fast_outer()
    if lane is not None and not walk.across and all(lane in n.varies for n in walk.along):
        tasks = rows // min(walk.sizes[lane], 64)
        found.insert(0, Options("lanes"))
        return [*found, whole] if tasks >= 16 else [whole, *found]
    if rows < 16 and walk.points(walk.row) > 65536:
        return [whole, *found]
    return [*found, whole]


def candidate(function: Op, specs: Sequence[Spec], options: Options) -> Candidate:
    text, scratch = source_of(walk_of(function, specs), NAME, options)
    memory = (Spec((scratch,), (1,), torch.uint8),) if scratch else ()
    return Candidate(options.name, memory, digest(text, header()), text)


def build(
    candidates: Sequence[Candidate], report: Callable[[int, int], None] | None = None
) -> dict[str, Callable[..., None] | Exception]:
    """By key: a function of tensors (inputs, outputs, scratch), or the exception where it cannot be had."""
    wanted = {c.key: c for c in candidates}
    found = working_compiler()
    if isinstance(found, str):
        return {key: CompilerError(f"no C++ compiler works: {found}") for key in wanted}
    kernels = [(symbol(c), c.source.replace(NAME, symbol(c))) for c in wanted.values()]
    built = build_all(kernels, found, report)
    return {key: launcher(built[symbol(c)]) for key, c in wanted.items()}


def symbol(candidate: Candidate) -> str:
    return f"kernel_{candidate.key[:32]}"


def launcher(function: Any) -> Callable[..., None] | Exception:
    """Calls a kernel with the addresses of tensors. They are read at each call: a tensor may be given new memory."""
    if isinstance(function, Exception):
        return function
    address = torch.Tensor.data_ptr
    layouts: dict[int, Callable[..., bytes]] = {}

    def launch(*tensors: torch.Tensor) -> None:
        pack = layouts.get(len(tensors))
        if pack is None:
            pack = layouts[len(tensors)] = struct.Struct(f"{len(tensors)}P").pack
        if function(pack(*map(address, tensors))):
            raise IndexError("index out of range: a number of the batch lies outside of the table it looks up")

    return launch
