"""The gradient of an embedding by kernels of our own (`triton/embedding.py`), as a template of the provider `triton`.

It is a region of its own, and so is that of `x[indices]` or `x[:, i, j]`: values added to zeros where indices say. All
index tensors together name a row of a table; what is taken whole before or behind them are its columns. Every token is
compared with every other, so there may not be too many of them; then ATen's sort is better. Rows that are named may
also be all that is written (`step.row_sums`), of several tables in one launch. Sizes are constants of the kernels,
which are compiled and launched as those of `depthwise.py` are.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..dialects.step.base import constant_value, torch_dtype
from ..dialects.step.indexing import EmbeddingGrad, IndexPut, RowSums
from ..dialects.strides import Strides, row_major, same_places, view_of
from ..errors import InputError
from ..ir.core import Op, Value
from . import depthwise
from .kernels import Spec
from .providers import Launcher, Offer, Progress, Region

#: comparing more with one another would take longer than all the rest
MOST_TOKENS = 1 << 15
#: rows are compared as f32 numbers
MOST_ROWS = (1 << 24) - 2
#: tokens and columns of a row of many tokens that are read at once
SUMMED, SUMMED_COLUMNS = 32, 64
#: indices that a program collects, and rows whose start it looks for
COLLECTED, SEARCHED = 256, 256
#: the kernel that reads indices one by one, wherever they start: a column of a tensor, often
COLLECT = "collect_kernel"
#: Triton's names of pointers
POINTERS = {**depthwise.POINTERS, torch.int64: "*i64", torch.int32: "*i32"}


@dataclass(frozen=True)
class Config:
    """How the work is cut."""

    #: elements of a row block, which are written at once
    tile: int = 4096
    #: the most columns of one
    columns: int = 256
    #: rows that more tokens name are summed by programs of their own
    few: int = 8
    #: tokens of a part of such a row, which another program sums
    part: int = 64
    #: groups of `few` tokens in which one program looks for such rows
    windows: int = 4
    #: tokens that a program of the sort owns, and how many it compares those with at once
    own: int = 16
    others: int = 256


#: how many tokens are a group, the distance of groups, and that of tokens in a group
Walk = tuple[int, int, int]
CONFIGS = (Config(), Config(tile=2048), Config(tile=2048, columns=128))
#: where rows are neighbours in memory
ACROSS = (Config(tile=2048, columns=16), Config(columns=16), Config(columns=64))


@dataclass(frozen=True)
class Problem:
    """One gradient: where its tokens lie in dy and in the indices, and how far a column of dy is from the next."""

    tokens: int
    rows: int
    columns: int
    padding: int
    dy: Walk
    column: int
    indices: Walk
    dtype: torch.dtype
    index: torch.dtype
    #: whether negative indices count from the end of the table
    from_end: bool = False
    #: sizes of the indexed dimensions, an index tensor each, and how those after the first are walked
    sizes: tuple[int, ...] = ()
    more: tuple[Walk, ...] = ()
    #: whether a row is a column of the result in memory: columns are what comes before the indexed dimensions
    across: bool = False
    #: of rows without the others: the dtype of their sums, and how many tables there are
    alone: torch.dtype | None = None
    tables: int = 1

    @property
    def apart(self) -> bool:
        """Whether indices do not lie side by side, or there are several for a token."""
        return bool(self.more) or self.indices[1:] != (self.indices[0], 1)

    @property
    def out(self) -> tuple[int, int]:
        """From one row of the result to the next, and from one column to the next."""
        return (1, self.rows) if self.across else (self.columns, 1)


@dataclass(frozen=True)
class Places:
    """Where the tensors of a gradient are among those of its region; scratch memory comes after the results.

    Of several tables: dy and the index tensor of each, and all results, those of sums first.
    """

    dy: tuple[int, ...]
    indices: tuple[int, ...]
    out: tuple[int, ...]


@dataclass(frozen=True)
class Sums:
    """What an op sums: rows of dy, at the places that indices name in a table of zeros."""

    dy: Value
    indices: tuple[Value, ...]
    sizes: tuple[int, ...]
    padding: int
    from_end: bool
    #: dimensions of dy before those of the indices
    before: int = 0
    dtype: torch.dtype | None = None

    @property
    def tokens(self) -> int:
        return self.indices[0].type.size

    @property
    def rows(self) -> int:
        return math.prod(self.sizes)

    @property
    def columns(self) -> int:
        return self.dy.type.size // max(1, self.tokens)


def tables_of(op: Op) -> list[Sums]:
    """An op as sums of rows, of each of its tables; empty where it is something else."""
    if op.definition is RowSums:
        rows, padding, dtype = (op.rows,), op.padding_idx, torch_dtype(op.dtype)
        return [Sums(dy, (i,), rows, padding, False, 0, dtype) for dy, i in zip(op.dys, op.indices, strict=True)]
    found = sums_of(op)
    return [] if found is None else [found]


def sums_of(op: Op) -> Sums | None:
    """A gradient as sums of rows; None where it is something else."""
    if op.definition is EmbeddingGrad:
        return Sums(op.dy, (op.indices,), (op.rows,), op.padding_idx, False)
    if op.definition is not IndexPut or not op.accumulate or constant_value(op.x) != 0:
        return None
    first, last, x = op.dims[0], op.dims[-1] + 1, op.x.type.shape
    common = op.indices[0].type.shape
    if op.dims != tuple(range(first, last)) or any(i.type.shape != common for i in op.indices):
        return None
    if op.values.type.shape != (*x[:first], *common, *x[last:]) or min(math.prod(x[:first]), math.prod(x[last:])) > 1:
        return None
    return Sums(op.values, tuple(op.indices), tuple(x[first:last]), -1, True, first)


def takes(op: Op) -> bool:
    """Whether the op is to be a region of its own. (A table of one row is not: operands to try it with have two.)"""
    tables = tables_of(op)
    return bool(tables) and all(map(fits, tables))


def fits(sums: Sums) -> bool:
    if not {torch_dtype(sums.dy.type.element), sums.dtype or torch.float32} <= set(depthwise.POINTERS):
        return False
    elements = {torch_dtype(i.type.element) for i in sums.indices}
    if len(elements) > 1 or not elements <= {torch.int64, torch.int32} or not sums.dy.type.size:
        return False
    return sums.tokens <= MOST_TOKENS and min(sums.sizes) >= 2 and sums.rows <= MOST_ROWS


def taken(region: Region) -> Op:
    """The op of a region that is taken."""
    return next(op for op in region.ops if takes(op))


def seen(value: Value, region: Region) -> tuple[int, Strides] | None:
    """The number of the operand that a value of a region is a view of, and its strides.

    None where it is no view, or one that does not begin where the operand does.
    """
    arguments = region.body.regions[0].block.arguments
    if value in arguments:
        number = arguments.index(value)
        return number, tuple(region.operands[number].strides)
    if value.op is None or not value.op.operands:
        return None
    under = seen(value.op.operands[0], region)
    found = None if under is None else view_of(value.op, value.op.operands[0].type.shape, under[1])
    return None if under is None or found is None or found[1] else (under[0], found[0])


def walk_of(shape: Sequence[int], strides: Sequence[int]) -> Walk | None:
    """How elements are walked in order; None where that takes more than two distances."""
    merged: list[tuple[int, int]] = []
    for n, stride in zip(shape, strides, strict=True):
        if merged and merged[-1][1] == n * stride:
            merged[-1] = (merged[-1][0] * n, stride)
        elif n > 1:
            merged.append((n, stride))
    if len(merged) < 2:
        ((n, stride),) = merged or [(1, 1)]
        return n, n * stride, stride
    return (merged[1][0], merged[0][1], merged[1][1]) if len(merged) == 2 else None


def problem_of(region: Region) -> tuple[Problem, Places] | None:
    """What is to be done, and the places of its tensors; None where tokens lie unevenly, or not as other tables'."""
    op = taken(region)
    tables = [problem_of_table(sums, region) for sums in tables_of(op)]
    found = [t for t in tables if t is not None]
    if len(found) < len(tables) or len({problem for problem, _ in found}) > 1:
        return None
    first = len(region.operands)
    places = [where for _, where in found]
    dys, indices = (tuple(i for where in places for i in getattr(where, name)) for name in ("dy", "indices"))
    return replace(found[0][0], tables=len(tables)), Places(dys, indices, tuple(range(first, first + len(op.results))))


def problem_of_table(sums: Sums, region: Region) -> tuple[Problem, Places] | None:
    dy, indices = seen(sums.dy, region), [found for i in sums.indices if (found := seen(i, region)) is not None]
    if dy is None or len(indices) < len(sums.indices):
        return None
    first, last = sums.before, sums.before + sums.indices[0].type.rank
    (shape, strides), common = (sums.dy.type.shape, dy[1]), sums.indices[0].type.shape
    tokens, walks = walk_of(common, strides[first:last]), [walk_of(common, i[1]) for i in indices]
    column = walk_of((*shape[:first], *shape[last:]), (*strides[:first], *strides[last:]))
    named = [walk for walk in walks if walk is not None]
    if tokens is None or len(named) < len(walks) or column is None or column[1] != column[0] * column[2]:
        return None
    problem = Problem(
        sums.tokens, sums.rows, sums.columns, sums.padding, tokens, column[2], named[0],
        torch_dtype(sums.dy.type.element), torch_dtype(sums.indices[0].type.element), sums.from_end,
        sums.sizes, tuple(named[1:]), math.prod(shape[:first]) > 1, sums.dtype,
    )  # fmt: skip
    return problem, Places((dy[0],), tuple(i[0] for i in indices), ())


def why_not(region: Region) -> str:
    """Empty where the kernels can run a region whose op they take, else why they cannot."""
    last = region.body.regions[0].block.last
    assert last is not None
    if list(last.operands) != list(taken(region).results):
        return "the gradient of an embedding together with something else"
    if problem_of(region) is None:
        return "the gradient of an embedding whose tokens lie at more than two distances in memory"
    if not all(same_places(result.shape, result.strides, row_major(result.shape)) for result in region.results):
        return "the gradient of an embedding that is not written row by row"
    return ""


def offers(region: Region) -> list[Offer]:
    """The configurations worth timing."""
    found = problem_of(region)
    assert found is not None
    widest = power_of_two(found[0].columns)
    chosen = ACROSS if found[0].across else CONFIGS
    configs = dict.fromkeys(replace(config, columns=min(config.columns, widest)) for config in chosen)
    return [offer(*found, config) for config in configs]


def offer(problem: Problem, places: Places, config: Config) -> Offer:
    """A configuration, with memory for what lies between its kernels: the sorted tokens, their rows, where the tokens
    of each row start, indices side by side, sums of parts; of each table."""
    sizes = (problem.tokens, problem.tokens, problem.rows + 1, problem.tokens if problem.apart else 1)
    shapes = [(problem.tables, size) for size in sizes]
    scratch = [Spec(shape, row_major(shape), torch.int32) for shape in shapes]
    sums = (problem.tables, max(1, problem.tokens // config.part) * problem.columns)
    scratch.append(Spec(sums, row_major(sums), torch.float32))
    key = hashlib.sha256(repr((problem, places, config)).encode()).hexdigest()[:32]
    name = f"embedding gradient {config.tile} by {config.columns}, {config.few} of {config.part}"
    return Offer(name, f"embedding {key}", tuple(scratch), Way(problem, places, config))


@dataclass(frozen=True)
class Argument:
    """What a kernel is given: a tensor per table, or one that holds all tables', so many elements each."""

    pointer: str
    tensors: tuple[int, ...]
    step: int = 0


@dataclass(frozen=True)
class Function(depthwise.Function):
    """A launch, as those of depthwise convolutions are, with kernels of this family."""

    arguments: tuple[Argument, ...] = ()
    tables: int = 1

    @property
    def source(self) -> str:
        names = ", ".join(f"p{i}" for i in range(len(self.tensors)))
        lines, at = ["    table = tl.program_id(1)"] if self.tables > 1 else [], 0
        for number, argument in enumerate(self.arguments):
            step = f" + table * {argument.step}" if argument.step and self.tables > 1 else ""
            lines.append(f"    a{number} = p{at}{step}")
            for table in range(1, len(argument.tensors)):
                lines += [f"    if table == {table}:", f"        a{number} = p{at + table}"]
            at += len(argument.tensors)
        given = [f"a{i}" for i in range(len(self.arguments))]
        given += [f"{name}={value!r}" for name, value in self.constants.items()]
        body = "\n".join([*lines, f"    {self.kernel}({', '.join(given)})"])
        return f"{sources()}\n\n@triton.jit\ndef main({names}):\n{body}\n"

    def job(self, capability: int, aligned: bool = True) -> dict[str, Any]:
        return super().job(capability, aligned and self.kernel != COLLECT)


def launch(kernel: str, constants: dict[str, Any], arguments: Sequence[Argument], blocks: int, tables: int) -> Function:
    tensors = tuple(t for a in arguments for t in a.tensors)
    pointers = tuple(a.pointer for a in arguments for _ in a.tensors)
    return Function(kernel, "", constants, tensors, pointers, (blocks, tables), 4, "", tuple(arguments), tables)


@functools.cache
def sources() -> str:
    """The text of all kernels and of what they call."""
    kernels = importlib.import_module("wholestep.backends.triton.embedding")
    found = [v for v in vars(kernels).values() if type(v).__name__ in depthwise.JITTED]
    return "\n\n".join(inspect.getsource(f.fn) for f in found)


@dataclass(frozen=True)
class Way:
    """A configuration for a gradient."""

    problem: Problem
    places: Places
    config: Config

    @functools.cached_property
    def functions(self) -> list[Function]:
        """What it launches, in order."""
        p, c = self.problem, self.config
        scratch = self.places.out[-1] + 1
        own, index, whole, real = (POINTERS[t] for t in (p.dtype, p.index, torch.int32, torch.float32))
        dy, indices = Argument(own, self.places.dy), Argument(index, self.places.indices)
        out = Argument(POINTERS[p.alone or p.dtype], self.places.out[: p.tables])
        lengths = p.tokens, p.tokens, p.rows + 1, p.tokens
        order, named, starts, near = (Argument(whole, (scratch + i,), n) for i, n in enumerate(lengths))
        partials = Argument(real, (scratch + 4,), max(1, p.tokens // c.part) * p.columns)
        places = Argument(whole, self.places.out[p.tables :]) if p.alone else starts
        found = []
        if p.apart:
            for number, walk in enumerate((p.indices, *p.more)):
                given = {"INDICES": walk, "TOKENS": p.tokens, "SIZE": (p.sizes or (p.rows,))[number]}
                given |= {"FROM_END": p.from_end, "FURTHER": number > 0, "BLOCK": COLLECTED}
                some = replace(indices, tensors=indices.tensors[number:][: p.tables])
                found.append(launch(COLLECT, given, (some, near), up(p.tokens, COLLECTED), p.tables))
            indices = near
        sizes = {"TOKENS": p.tokens, "ROWS": p.rows}
        given = {**sizes, "FROM_END": p.from_end and not p.apart, "OWN": c.own, "OTHERS": c.others}
        found.append(launch("sort_kernel", given, (indices, order, named), up(p.tokens, c.own), p.tables))

        width = power_of_two(p.columns)
        narrow, wide = min(SUMMED_COLUMNS, width), min(c.columns, width)
        both = {"DY": p.dy, "DY_COLUMN": p.column, **sizes, "COLUMNS": p.columns, "PART": c.part}
        both |= {"PADDING": p.padding, "ALONE": p.alone is not None}
        given = {**both, "STEPS": p.tokens.bit_length(), "BLOCK_ROWS": SEARCHED, "BLOCK_COLUMNS": narrow}
        blocks = p.tokens // c.part * up(p.columns, narrow) + up(p.rows + 1, SEARCHED)
        read = (dy, order, named, starts, partials)
        found.append(launch("runs_kernel", given, (*read, places), blocks, p.tables))

        owned, written = max(1, c.tile // wide), p.rows if p.alone is None else p.tokens
        given = {**both, "FEW": c.few, "WINDOWS": c.windows, "BLOCK_ROWS": owned, "BLOCK_TOKENS": SUMMED}
        given |= {"BLOCK_COLUMNS": narrow, "ROW_COLUMNS": wide, "OUT": p.out}
        blocks = up(p.tokens, c.few * c.windows) * up(p.columns, narrow) + up(written, owned) * up(p.columns, wide)
        found.append(launch("rows_kernel", given, (*read, out), blocks, p.tables))
        return found


def up(number: int, size: int) -> int:
    """How many blocks of a size there are."""
    return -(-number // size)


def power_of_two(number: int) -> int:
    return 1 << math.ceil(math.log2(number))


# ---- building --------------------------------------------------------------------------------------------------------


def build(offers: Sequence[Offer], report: Progress | None = None) -> dict[str, Launcher | Exception]:
    """What runs each offer, by its key."""
    from .triton.generate import interpreting

    if interpreting():
        return {o.key: interpreted(o.made) for o in offers}
    if not torch.cuda.is_available():
        error = InputError("the kernels of an embedding's gradient run on an NVIDIA GPU and there is none here")
        return {o.key: error for o in offers}
    major, minor = torch.cuda.get_device_capability()
    capability = 10 * major + minor
    refused = depthwise.compile_for(offers, capability, report)
    return {o.key: refused.get(o.key) or loaded(o.made, capability) for o in offers}


def interpreted(way: Way) -> Launcher:
    """Runs the same source in Triton's interpreter."""
    from .triton.compiling import file_name
    from .triton.interpreted import STAND_INS
    from .triton.worker import functions_of

    mains = [functions_of(f.source, file_name(f.source), dict(STAND_INS))["main"] for f in way.functions]

    def run(*tensors: torch.Tensor) -> None:
        for main, function in zip(mains, way.functions, strict=True):
            main[function.grid](*(tensors[i] for i in function.tensors))

    return run


def loaded(way: Way, capability: int) -> Launcher | Exception:
    try:
        return Launch(way, capability)
    except Exception as error:  # a driver or the C compiler of the launcher: this way is out, others go on
        return error


class Launch:
    """Launches the kernels of a way on torch's current stream. It allocates nothing.

    Each kernel asks for itself whether its tensors start at multiples of 16 bytes: that of some is no loss to others.
    """

    def __init__(self, way: Way, capability: int):
        from triton.runtime import driver

        self.capability = capability
        self.device = driver.active.get_current_device()
        self.stream = driver.active.get_current_stream
        self.functions = [(f, {True: self.load(f, True)}) for f in way.functions]

    def load(self, function: Function, aligned: bool) -> tuple[Any, Any, Any]:
        from triton import knobs

        from .triton.compiling import triton_cache
        from .triton.worker import compiled

        with knobs.cache.scope():  # the user's own kernels keep their cache
            knobs.cache.dir = str(triton_cache())
            kernel = compiled(function.job(self.capability, aligned))
            run = kernel.run  # loads the kernel
        return run, kernel.function, kernel.packed_metadata

    def __call__(self, *tensors: torch.Tensor) -> None:
        stream = self.stream(self.device)
        for function, variants in self.functions:
            pointers = [tensors[i].data_ptr() for i in function.tensors]
            aligned = function.kernel == COLLECT or not any(pointers[i] & 15 for i in function.assumed)
            if aligned not in variants:  # compiled when they are first seen
                variants[aligned] = self.load(function, aligned)
            run, kernel, metadata = variants[aligned]
            run(*function.grid, 1, stream, kernel, metadata, None, None, None, *pointers)
