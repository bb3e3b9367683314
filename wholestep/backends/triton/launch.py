"""From the source of a candidate to what can be called with tensors: through the interpreter, or as a launch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ...errors import InputError
from .compiling import CompileInfo, compile_for, file_name, job_of, triton_cache, write
from .worker import assumed, digest, facts, fresh, functions_of, kept

if TYPE_CHECKING:
    from .families import Function
    from .generate import Batched, Candidate

Report = Callable[[int, int], None] | None
#: bytes per thread outside of registers above which a kernel is not worth timing
MOST_SPILLS = 512


class Tables:
    """What a batched launch reads: per kernel its tensors' addresses and its size, per program its kernel and place.

    Made when addresses are first seen, and again if they change.
    """

    def __init__(self, batched: Batched):
        self.batched = batched
        self.pointers: list[int] = []
        self.tensors: tuple[torch.Tensor, ...] = ()

    def of(self, pointers: list[int], device: torch.device) -> tuple[torch.Tensor, ...]:
        if pointers == self.pointers:
            return self.tensors
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise InputError("tensors of a batched kernel moved. Try: run one step before a CUDA graph is captured")
        width, step = self.batched.tensors, self.batched.block
        rows, blocks = [], []
        for k, size in enumerate(self.batched.sizes):
            rows.append([*pointers[k * width : (k + 1) * width], size])
            first = torch.arange(0, size, step, dtype=torch.int32)
            blocks.append(torch.stack([torch.full_like(first, k), first], 1))
        table = torch.tensor(rows, dtype=torch.int64).to(device)
        self.tensors = (table, torch.cat(blocks).to(device))
        self.pointers = pointers
        return self.tensors


class Unfit(Exception):
    """A kernel that compiles but needs more of a GPU than there is, or too much of it to be fast."""


# ---- interpreted -----------------------------------------------------------------------------------------------------


def interpreted(candidates: Sequence[Candidate], report: Report) -> dict[str, Callable[..., None] | Exception]:
    from .interpreted import STAND_INS

    made: dict[str, Callable[..., None] | Exception] = {}
    for done, candidate in enumerate(candidates, 1):
        source = candidate.source.replace("tl.range(", "range(")  # (the interpreter's own takes no computed bounds)
        space = functions_of(source, file_name(source), dict(STAND_INS))
        made[candidate.key] = interpreter(candidate, space)
        if report is not None:
            report(done, len(candidates))
    return made


def interpreter(candidate: Candidate, space: dict[str, Any]) -> Callable[..., None]:
    tables = Tables(candidate.batched) if candidate.batched is not None else None

    def run(*tensors: torch.Tensor) -> None:
        if tables is not None:
            tensors = tables.of([t.data_ptr() for t in tensors], torch.device("cpu"))
        for function in candidate.functions:
            if function.grid:
                space[function.name][(function.grid,)](*(tensors[i] for i in function.arguments))

    return run


# ---- native ----------------------------------------------------------------------------------------------------------


def native(candidates: Sequence[Candidate], report: Report) -> dict[str, Callable[..., None] | Exception]:
    if not torch.cuda.is_available():
        error = InputError("generated Triton kernels run on an NVIDIA GPU and there is none here")
        return {c.key: error for c in candidates}
    from triton.runtime import driver

    major, minor = torch.cuda.get_device_capability()
    capability = 10 * major + minor
    room = driver.active.utils.get_device_properties(torch.cuda.current_device())["max_shared_mem"]
    infos = compile_for(candidates, capability, report)
    made: dict[str, Callable[..., None] | Exception] = {}
    for candidate in candidates:
        info = infos[candidate.key]
        made[candidate.key] = info if isinstance(info, Exception) else loaded(candidate, info, capability, room)
    return made


def loaded(candidate: Candidate, info: CompileInfo, capability: int, room: int) -> Callable[..., None] | Exception:
    if info.shared > room:
        return Unfit(f"it needs {info.shared} bytes of shared memory where {room} are")
    if info.spills > MOST_SPILLS:
        return Unfit(f"{info.spills} bytes per thread do not fit into registers")
    try:
        return Launch(candidate, capability)
    except Exception as error:  # a driver or the C compiler of the launcher: this candidate is out, others go on
        return error


class Launch:
    """Launches the kernels of a candidate on torch's current stream. It allocates nothing."""

    def __init__(self, candidate: Candidate, capability: int):
        from triton.runtime import driver

        self.candidate = candidate
        self.capability = capability
        self.functions = [f for f in candidate.functions if f.grid]
        self.device = driver.active.get_current_device()
        self.stream = driver.active.get_current_stream
        batched = candidate.batched
        self.tables = Tables(batched) if batched is not None else None
        #: the tensors whose addresses say which variant runs
        self.assumed = assumed(candidate.pointers) if batched is None else range(batched.tensors * len(batched.sizes))
        self.variants = {True: [self.load(f, True) for f in self.functions]}

    def load(self, function: Function, aligned: bool) -> tuple[Any, ...]:
        """The kernel, from Triton's cache or compiled here, on the GPU; what its launcher takes."""
        from triton import knobs

        from .generate import UNALIGNED

        if self.tables is not None and not aligned:
            function = replace(function, name=UNALIGNED)
        with knobs.cache.scope():  # the user's own kernels keep their cache
            knobs.cache.dir = str(triton_cache())
            job = job_of(self.candidate, function, self.capability, aligned)
            kernel = kept(job)
            if kernel is None:  # (tensors that start at an odd element, or a file that is gone)
                start = time.perf_counter()
                kernel = fresh(job)
                write(triton_cache(), digest(job), {**facts(kernel), "seconds": time.perf_counter() - start})
            run = kernel.run  # loads the kernel
        return run, kernel.function, kernel.packed_metadata, function.grid, function.arguments

    def __call__(self, *tensors: torch.Tensor) -> None:
        pointers = [t.data_ptr() for t in tensors]
        bits = 0
        for i in self.assumed:
            bits |= pointers[i]
        aligned = not bits & 15
        if self.tables is not None:
            pointers = [t.data_ptr() for t in self.tables.of(pointers, tensors[0].device)]
        kernels = self.variants.get(aligned)
        if kernels is None:  # tensors that start at an odd element: compiled when they are first seen
            kernels = self.variants[aligned] = [self.load(f, aligned) for f in self.functions]
        stream = self.stream(self.device)
        for run, function, metadata, grid, arguments in kernels:
            run(grid, 1, 1, stream, function, metadata, None, None, None, *[pointers[i] for i in arguments])
