"""Batches on the side of providers: one region made of several, and how a code generator runs it in few launches.

Parts for which the generator writes the same work are one launch over a table of their tensors, the others are launched
one by one. `transforms/batch.py` says which regions are a batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from ..ir.builtin import add_function, finish_function, module
from ..ir.core import Op, Value
from .kernels import Spec

if TYPE_CHECKING:
    from .providers import Launcher, Region


@dataclass(frozen=True)
class Batch:
    """The parts of a batch, as functions and in loop form, and all their ops as one function."""

    body: Op
    parts: tuple[tuple[Op, Op | None], ...]


def batch_of(parts: Sequence[tuple[Op, Op | None]]) -> Batch:
    """A batch of regions, whose operands and results are those of its parts one after the other."""
    blocks = [body.regions[0].block for body, _ in parts]
    function = add_function(module(), "batch", [a.type for block in blocks for a in block.arguments])
    given = iter(function.regions[0].block.arguments)
    results: list[Value] = []
    for block in blocks:
        mapping = {a: next(given) for a in block.arguments}
        for op in block:
            if op.definition.terminator:
                results += [mapping[v] for v in op.operands]
            else:
                function.regions[0].block.append(op.clone(mapping))
    finish_function(function, results)
    return Batch(function, tuple(parts))


def batched_region(
    batch: Batch,
    operands: Sequence[Spec],
    device: torch.device,
    wanted: Sequence[tuple[int, ...] | None] = (),
) -> Region:
    """The region that a batch is, on operands that lie in a certain way; wanted: as for `region_of`."""
    from .generated import region_of
    from .providers import Region

    parts: list[Region] = []
    at = made = 0
    for body, kernel in batch.parts:
        count = len(body.regions[0].block.arguments)
        parts.append(region_of(body, kernel, operands[at : at + count], device, wanted[made:]))
        at, made = at + count, made + len(parts[-1].results)
    results = tuple(s for part in parts for s in part.results)
    return Region(batch.body, None, tuple(operands), results, device, tuple(parts))


# ---- launches --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """Some parts of a batch as kernels of a generator, which are launched one after the other.

    Each is called with the operands, results and scratch memory of the first part, then of the second, and so on.
    """

    numbers: tuple[int, ...]
    candidates: tuple[Any, ...]
    scratch: tuple[tuple[Spec, ...], ...]

    @property
    def launches(self) -> int:
        return sum(max(1, len(getattr(c, "functions", ()))) for c in self.candidates)


@dataclass(frozen=True)
class Way:
    """A way to run a whole batch."""

    region: Region
    written: tuple[Written, ...]

    @property
    def name(self) -> str:
        launches = sum(w.launches for w in self.written)
        return f"batch of {len(self.region.parts)} in {launches}"

    @property
    def key(self) -> str:
        """Equal for batches that launch the same kernels on the same parts."""
        content = [self.region.key, *(f"{w.numbers} {c.key}" for w in self.written for c in w.candidates)]
        return hashlib.sha256("\n".join(content).encode()).hexdigest()[:32]

    @property
    def scratch(self) -> tuple[Spec, ...]:
        return tuple(s for w in self.written for mine in w.scratch for s in mine)

    @property
    def candidates(self) -> list[Any]:
        return [c for w in self.written for c in w.candidates]


def why_not(code: Any, batches: Any, region: Region) -> str:
    """Empty where a generator can run a batch, else why it cannot. batches: its module that writes them."""
    for part in {part.key: part for part in region.parts}.values():
        reason = code.why_not(part.kernel, part.specs) if part.kernel is not None else "it has no loop form"
        if reason:
            return reason
    met: set[str] = set()
    for _, key in keys_of(batches, region.parts):  # (one pair is enough: to write a key takes as long as a kernel)
        if key in met:
            return ""
        met.add(key)
    return "no two parts of the batch can be one launch"


def keys_of(batches: Any, parts: Sequence[Region]) -> Iterator[tuple[int, str]]:
    """Every part's number and a key; parts with the same key are one launch."""
    known: dict[str, str] = {}
    for number, part in enumerate(parts):
        if part.key not in known:  # most parts are like others
            known[part.key] = batches.key(part.kernel, part.specs)
        yield number, known[part.key] or f"alone {number}"


def grouped(batches: Any, parts: Sequence[Region]) -> list[list[int]]:
    """Numbers of parts that are one launch; a part that can be in none is alone."""
    found: dict[str, list[int]] = {}
    for number, key in keys_of(batches, parts):
        found.setdefault(key, []).append(number)
    return list(found.values())


def way_of(code: Any, batches: Any, region: Region) -> Way:
    """How a generator runs a batch."""
    found: list[Written] = []
    for numbers in grouped(batches, region.parts):
        parts = [region.parts[n] for n in numbers]
        if len(numbers) > 1:
            kernels = {part.key: (part.kernel, part.specs) for part in parts}
            candidates, scratch = batches.ways(kernels, [part.key for part in parts])
            found.append(Written(tuple(numbers), tuple(candidates), tuple(scratch)))
        else:
            candidate = code.candidates(parts[0].kernel, parts[0].specs)[0]
            found.append(Written(tuple(numbers), (candidate,), (tuple(candidate.scratch),)))
    return Way(region, tuple(found))


def launcher(
    way: Way, built: dict[str, Launcher | Exception], again: Callable[[Any], Launcher | Exception]
) -> Launcher | Exception:
    """What runs a batch, out of its built kernels. again: builds a kernel once more."""
    steps: list[tuple[Launcher, list[int]]] = []
    for some, mine in zip(way.written, places_of(way), strict=True):
        for candidate in some.candidates:
            made = built[candidate.key]
            if isinstance(made, Exception):
                return made
            if getattr(candidate, "batched", None) is not None:
                made = ByAddress(made, candidate, again)
            steps.append((made, mine))

    def run(*tensors: torch.Tensor) -> None:
        for call, at in steps:
            call(*[tensors[i] for i in at])

    return run


def places_of(way: Way) -> list[list[int]]:
    """Which of the region's tensors (operands, results, scratch memory) each of its kernels takes, in their order."""
    region = way.region
    operands = [0, *accumulate(len(p.operands) for p in region.parts)]
    results = [len(region.operands) + n for n in (0, *accumulate(len(p.results) for p in region.parts))]
    at, found = len(region.specs), []
    for some in way.written:
        mine: list[int] = []
        for number, scratch in zip(some.numbers, some.scratch, strict=True):
            mine += range(operands[number], operands[number + 1])
            mine += range(results[number], results[number + 1])
            mine += range(at, at + len(scratch))
            at += len(scratch)
        found.append(mine)
    return found


class ByAddress:
    """A kernel that reads addresses from a table, one table per set of tensors: equal batches of a step share a kernel,
    and a CUDA graph reads its tables for as long as it lives."""

    def __init__(self, first: Launcher, candidate: Any, again: Callable[[Any], Launcher | Exception]):
        self.unused: Launcher | None = first
        self.candidate, self.again = candidate, again
        self.ready: dict[tuple[int, ...], Launcher] = {}

    def __call__(self, *tensors: torch.Tensor) -> None:
        pointers = tuple(t.data_ptr() for t in tensors)
        run = self.ready.get(pointers)
        if run is None:
            run = self.ready[pointers] = self.fresh()
        run(*tensors)

    def fresh(self) -> Launcher:
        made: Launcher | Exception = self.again(self.candidate) if self.unused is None else self.unused
        self.unused = None
        if isinstance(made, Exception):
            raise made
        return made
