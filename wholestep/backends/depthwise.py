"""Depthwise convolutions of our own (`triton/depthwise.py`) as a template of the provider `triton`.

A convolution that is depthwise, or a gradient of one, is a region of its own, alone or with loops around it
(`transforms/around.py`); its configurations are timed like others, with neighbours also as kernels one after the other.
Shapes are constants of the kernels: each is a source of its own, compiled in worker processes like generated code.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..dialects.step.base import torch_dtype
from ..dialects.step.convolution import Conv
from ..dialects.strides import row_major, same_places
from ..errors import InputError
from ..ir.core import Op, Value
from ..transforms.around import NotAround, Side, Sides, sides_of
from .convolution_ops import PARTS, laid_out_from, shapes_of
from .kernels import Spec, with_channels_last
from .providers import Launcher, Offer, Progress, Region

#: each takes seconds to compile: the best guesses only
OFFERS = 4
#: Triton's names of pointers
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


def kernels() -> Any:
    """The module of the kernels, which needs Triton."""
    return importlib.import_module("wholestep.backends.triton.depthwise")


@dataclass(frozen=True)
class Problem:
    """One convolution: which part of it, and the types of its image, kernel and output."""

    part: str
    image: tuple[int, ...]
    weight: tuple[int, ...]
    output: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dtype: torch.dtype
    #: elements from one pixel of what is written to the next, where others lie between: it may be a part of something
    pixel: int = 0


def takes(op: Op) -> bool:
    """Whether the op is to be a region of its own."""
    if op.definition not in PARTS or op.groups == 1:
        return False
    if op.transposed or (op.definition is Conv and op.bias is not None):
        return False
    p = problem_of(op)
    return not kernels().why_not(p.image, p.weight, p.stride, p.padding, op.dilation, op.groups, p.dtype)


def problem_of(op: Op) -> Problem:
    dtype = torch_dtype(op.operands[0].type.element)
    return Problem(PARTS[op.definition], *shapes_of(op), tuple(op.stride), tuple(op.padding), dtype)


def why_not(region: Region) -> str:
    """Empty where the kernels can run a region whose op they take, else why they cannot."""
    try:
        sides = sides_of(region.body)
    except NotAround as error:
        return f"what is around a depthwise convolution: {error}"
    arguments = region.body.regions[0].block.arguments
    if any(laid_out_from(v) not in arguments for v in read_by(sides)):
        return "a depthwise convolution of a view; only of a whole tensor"
    problem = problem_of(sides.anchor)
    stored = places_of(region, sides).result
    for number, spec in enumerate(region.specs):
        if number == stored and problem.part != "weight_grad" and pixel_of(spec):
            continue
        if len(spec.shape) == 1 or (spec.shape == problem.weight and spec.shape not in (problem.image, problem.output)):
            if not same_places(spec.shape, spec.strides, row_major(spec.shape)):
                return "the kernel of a depthwise convolution that has gaps, or numbers per channel that have"
        elif not same_places(spec.shape, spec.strides, last(spec.shape)):
            return "a depthwise convolution that is not channels-last"
    return ""


def pixel_of(spec: Spec) -> int:
    """Elements from one pixel of an image to the next; 0 where it is not channels-last."""
    _, channels, height, width = spec.shape
    pixel = spec.strides[3] if width > 1 else spec.strides[2] if height > 1 else spec.strides[0]
    wanted = (height * width * pixel, 1, width * pixel, pixel)
    return pixel if pixel >= channels and same_places(spec.shape, spec.strides, wanted) else 0


def writes_so(body: Op, value: Value, strides: Sequence[int] | None) -> bool:
    """Whether the kernels of a body that is a depthwise convolution with loops after it can write a result so."""
    if strides is None or value.type.rank != 4:
        return False
    try:
        sides = sides_of(body)
    except NotAround:
        return False
    if sides.after is None or sides.stored is not value or sides.anchor.groups == 1:
        return False
    return bool(pixel_of(Spec(value.type.shape, tuple(strides), torch_dtype(value.type.element))))


def read_by(sides: Sides) -> list[Value]:
    """What the kernels of a region read."""
    made = {v for side in (sides.before, sides.after) if side is not None for v in side.piece.outputs}
    made.update(sides.anchor.results)
    inputs = [v for side in (sides.before, sides.after) if side is not None for v in side.piece.inputs]
    return [v for v in (*sides.anchor.operands, *inputs) if laid_out_from(v) not in made]


def last(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of channels-last."""
    return tuple(blank(shape, torch.float32).stride())


def blank(shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool = True) -> torch.Tensor:
    """A tensor without memory."""
    tensor = torch.empty(shape, dtype=dtype, device="meta")
    laid = with_channels_last(tensor) if channels_last else tensor
    assert laid is not None
    return laid


def offers(region: Region) -> list[Offer]:
    """The configurations worth timing; with neighbours also without them: one kernel after the other."""
    sides = sides_of(region.body)
    neighbours = neighbours_of(region, sides)
    problem = placed(problem_of(sides.anchor), region, sides)
    found = []
    for config in configs(problem)[: OFFERS - bool(neighbours.hooks)]:
        way = Single(problem, places_of(region, sides), config, neighbours)
        name = f"depthwise {config.columns}x{config.rows} v{config.vector} i{config.images}"
        name += " ahead" * config.prefetch + " around" * bool(neighbours.hooks)
        found.append(Offer(name, way.key, way.scratch, way))
    if neighbours.hooks:
        parts = apart(region, sides)
        found.insert(1, Offer("depthwise apart", parts.key, parts.scratch, parts))
    return found


def placed(problem: Problem, region: Region, sides: Sides) -> Problem:
    """The problem with where its image is written."""
    if problem.part == "weight_grad":
        return problem
    return replace(problem, pixel=pixel_of(region.specs[places_of(region, sides).result]))


def configs(problem: Problem) -> list[Any]:
    return kernels().configs(problem.part, problem.image, problem.weight[2:], problem.stride, problem.dtype)


@dataclass(frozen=True)
class Places:
    """Where the tensors of a convolution are among those of its region; scratch memory comes from `scratch` on."""

    first: int
    second: int
    result: int
    scratch: int


def places_of(region: Region, sides: Sides) -> Places:
    block = region.body.regions[0].block
    image = laid_out_from(sides.anchor.operands[0])
    if sides.before is not None:
        (image,) = sides.before.images
    first, second = (block.arguments.index(laid_out_from(v)) for v in (image, sides.anchor.operands[1]))
    assert block.last is not None
    result = len(region.operands) + block.last.operands.index(sides.stored)
    return Places(first, second, result, len(region.specs))


@dataclass(frozen=True)
class Neighbours:
    """What a convolution does on its loads and its stores: functions, and where what they read and write is.

    Pointers are those of the region's tensors.
    """

    pointers: tuple[str, ...]
    before: Any = None
    before_reads: tuple[int, ...] = ()
    after: Any = None
    after_reads: tuple[int, ...] = ()
    beside: tuple[int, ...] = ()
    #: the last kernel, which turns sums into results
    ends: str = ""
    ends_tensors: tuple[int, ...] = ()

    @property
    def hooks(self) -> list[Any]:
        return [hook for hook in (self.before, self.after) if hook is not None]


def neighbours_of(region: Region, sides: Sides) -> Neighbours:
    text = importlib.import_module("wholestep.backends.triton.around")
    found = Neighbours(tuple(POINTERS[s.dtype] for s in region.specs))
    if (before := sides.before) is not None:
        tensors = tensors_of(region, before.piece.inputs)
        hook = text.hook(before.kernel, before.piece.inputs.index(before.images[0]), "before")
        found = replace(found, before=hook, before_reads=tuple(tensors[i] for i in hook.vectors))
    if (after := sides.after) is not None:
        made = sides.anchor.results[0]
        tensors = tensors_of(region, [*after.piece.inputs, *after.piece.outputs], made, sides.stored)
        hook = text.hook(after.kernel, after.piece.inputs.index(made), "after")
        ends, reads, writes = text.ends(after.kernel, "end")
        found = replace(
            found,
            after=hook,
            after_reads=tuple(tensors[i] for i in hook.vectors),
            beside=tuple(tensors[i] for i in hook.beside),
            ends=ends,
            ends_tensors=tuple(tensors[i] for i in (*reads, *writes)),
        )
    return found


def tensors_of(
    region: Region, values: Sequence[Value], made: Value | None = None, stored: Value | None = None
) -> list[int]:
    """Where values are among the tensors of a region; in place of what a convolution made what is stored of it."""
    block = region.body.regions[0].block
    assert block.last is not None
    found = []
    for value in values:
        own = laid_out_from(value)
        if own in block.arguments:
            found.append(block.arguments.index(own))
        else:
            found.append(len(region.operands) + block.last.operands.index(stored if own is made else own))
    return found


@dataclass(frozen=True)
class Function:
    """A launch: the kernel with what is known of its arguments, and which tensors of the region the others are."""

    kernel: str
    given: str
    constants: dict[str, Any]
    tensors: tuple[int, ...]
    pointers: tuple[str, ...]
    grid: tuple[int, int]
    warps: int
    #: functions of this source alone
    own: str = ""

    @property
    def source(self) -> str:
        """A function `main` of tensors alone."""
        from .triton.compiling import alone

        names = ", ".join(f"p{i}" for i in range(len(self.tensors)))
        constants = ", ".join(f"{name}={value!r}" for name, value in self.constants.items())
        call = f"@triton.jit\ndef main({names}):\n    {self.kernel}({self.given}, {constants})\n"
        return alone(f"{sources()}\n\n{self.own}{call}", "main")

    @functools.cached_property
    def assumed(self) -> list[int]:
        """The tensors whose addresses say which kernel runs."""
        from .triton.worker import assumed

        return assumed(self.pointers)

    def job(self, capability: int, aligned: bool = True) -> dict[str, Any]:
        """What a compiling process is told. `aligned`: tensors start at multiples of 16 bytes (`assumed`)."""
        from .triton.compiling import file_name

        return {
            "source": self.source,
            "file": file_name(self.source),
            "name": "main",
            "pointers": list(self.pointers),
            "warps": self.warps,
            "stages": 1,
            "aligned": self.assumed if aligned else [],
            "capability": capability,
            # (where tensors may start anywhere, threads that hold neighbours would still read one at a time)
            "vector": self.constants.get("VECTOR", 0) if aligned else 0,
        }


@functools.cache
def sources() -> str:
    """The text of all kernels and of what they call."""
    found = [v for v in vars(kernels()).values() if type(v).__name__ in JITTED]
    return "\n\n".join(inspect.getsource(f.fn) for f in found)


#: what Triton makes of a function: compiled, interpreted, or run while another is compiled
JITTED = ("JITFunction", "InterpretedFunction", "ConstexprFunction")


class Way:
    """One way to run a region."""

    functions: Sequence[Any]


@dataclass(frozen=True)
class Single(Way):
    """A configuration for a convolution, alone or with its neighbours."""

    problem: Problem
    places: Places
    config: Any
    neighbours: Neighbours

    @property
    def key(self) -> str:
        text = repr((self.problem, self.places, self.config, self.neighbours))
        return "depthwise " + hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def sums(self) -> tuple[int, int, int] | None:
        """The shape of partial sums over what is stored."""
        if self.neighbours.after is None:
            return None
        p = self.problem
        stored = p.image if p.part == "input_grad" else p.output
        return kernels().sums_shape(stored, self.neighbours.after.sums, self.config)

    @property
    def scratch(self) -> tuple[Spec, ...]:
        shapes: list[tuple[int, ...]] = []
        if self.problem.part == "weight_grad":
            shapes.append(kernels().partials_shape(self.problem.output, self.problem.weight, self.config))
        if self.sums is not None:
            shapes.append(self.sums)
            if self.sums[0] > MANY:
                shapes.append((-(-self.sums[0] // CHUNK), *self.sums[1:]))
        return tuple(Spec(shape, row_major(shape), torch.float32) for shape in shapes)

    @functools.cached_property
    def functions(self) -> list[Function]:  # type: ignore[override]
        """What it launches, in order."""
        p, config, module, near = self.problem, self.config, kernels(), self.neighbours
        n, c, height, width = p.image
        image, output = blank(p.image, p.dtype), blank(p.output, p.dtype)
        constants = module.geometry(image, blank(p.weight, p.dtype, False), output, p.stride, p.padding, config)
        lanes = 32 * config.warps
        constants |= {"COLUMNS": config.columns, "ROWS": config.rows, "LANES": lanes, "VECTOR": config.vector}
        constants |= {"N": n, "PREFETCH": config.prefetch}
        walked_h, walked_w = (height, width) if p.part == "input_grad" else p.output[2:]
        items = -(-n // config.images) if p.part == "weight_grad" else n
        strips = module.strips_of(walked_w, config.columns)
        grid = (-(-items * strips * (c // config.vector) // lanes), -(-walked_h // config.rows))
        at = self.places
        pointers = Pointers([at.first, at.second, at.scratch if p.part == "weight_grad" else at.result])
        first, second, out = "p0", "p1", "p2"
        if p.part != "input_grad":
            constants |= module.NOTHING_BEFORE
            if near.before is not None:
                constants |= {"BEFORE_ONCE": Name("before_once"), "BEFORE": Name("before")}
        if p.part != "weight_grad":
            constants |= module.NOTHING_AFTER | {"PIXEL": p.pixel or c}
            if near.after is not None:
                constants |= {"AFTER_ONCE": Name("after_once"), "AFTER": Name("after")}
                constants |= {"SUMS": near.after.sums, "BESIDE": len(near.beside), "STORES": near.after.stores}
        if p.part == "weight_grad":
            constants["IMAGES"] = config.images
            given = [first, second, pointers.several(near.before_reads), out]
        else:
            given = [first, second, out]
            given += [pointers.several(near.before_reads)] if p.part == "forward" else []
            given += [pointers.several(near.after_reads), pointers.several(near.beside)]
            given.append("None" if self.sums is None else pointers.one(at.scratch))
        text, own = ", ".join(given), "".join(hook.source for hook in near.hooks)
        tensors = tuple(pointers.tensors)
        types = tuple(map(self.pointer, tensors))
        found = [Function(f"{p.part}_kernel", text, constants, tensors, types, grid, config.warps, own)]
        if p.part == "weight_grad":
            parts, taps, _ = module.partials_shape(p.output, p.weight, config)
            columns = 8 if taps * c < 4096 else 32
            sizes = {"PARTS": parts, "C": c, "TAPS": taps, "ROWS": 2048 // columns, "COLUMNS": columns}
            pair = at.scratch, at.result
            ends = (-(-taps * c // columns), 1)
            found.append(Function("finish_kernel", "p0, p1", sizes, pair, tuple(map(self.pointer, pair)), ends, 8))
        return found + self.ending()

    def ending(self) -> list[Function]:
        """What turns partial sums into results."""
        near, c = self.neighbours, self.problem.image[1]
        if self.sums is None:
            return []
        found, (parts, count, _), partials = [], self.sums, self.places.scratch
        columns, rows = 8, 256
        if parts > MANY:
            chunks, width = -(-parts // CHUNK), count * c
            sizes = {"PARTS": parts, "WIDTH": width, "CHUNK": CHUNK, "ROWS": rows, "COLUMNS": columns}
            wide = POINTERS[torch.float32]
            grid = (-(-width // columns), chunks)
            found.append(Function("fold_kernel", "p0, p1", sizes, (partials, partials + 1), (wide, wide), grid, 8))
            parts, partials = chunks, partials + 1
        sizes = {"PARTS": parts, "C": c, "ROWS": rows, "COLUMNS": columns}
        tensors = (partials, *near.ends_tensors)
        given = ", ".join(f"p{i}" for i in range(len(tensors)))
        types = tuple(map(self.pointer, tensors))
        found.append(Function("end", given, sizes, tensors, types, (-(-c // columns), 1), 8, near.ends))
        return found

    def pointer(self, tensor: int) -> str:
        """The type of a tensor of the region, or of scratch memory."""
        if tensor >= self.places.scratch:
            return POINTERS[torch.float32]
        return self.neighbours.pointers[tensor]


class Name(str):
    """A name in the source: it is written without quotes."""

    def __repr__(self) -> str:
        return str(self)


@dataclass
class Pointers:
    """The tensors that a kernel is called with, in the making."""

    tensors: list[int]

    def one(self, tensor: int) -> str:
        self.tensors.append(tensor)
        return f"p{len(self.tensors) - 1}"

    def several(self, tensors: Sequence[int]) -> str:
        return f"({''.join(self.one(t) + ', ' for t in tensors)})" if tensors else "None"


#: partial sums that are many are added up in two steps, so many rows at a time
MANY, CHUNK = 2048, 512


# ---- one after the other ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Apart(Way):
    """The loops and the convolution as kernels of their own, one after the other: what a region has to beat.

    steps: a convolution or a generated kernel, and where its tensors are among those of the region and its scratch.
    """

    steps: tuple[tuple[Any, tuple[int, ...]], ...]
    scratch: tuple[Spec, ...]

    @property
    def key(self) -> str:
        text = repr([(made.key, places) for made, places in self.steps])
        return "depthwise apart " + hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def functions(self) -> list[Any]:  # type: ignore[override]
        found: list[Any] = []
        for made, _ in self.steps:
            own = made.functions
            found += own if isinstance(made, Single) else [Generated(made, f) for f in own if f.grid]
        return found


@dataclass(frozen=True)
class Generated:
    """A function of a generated kernel, for those who compile."""

    candidate: Any
    function: Any

    def job(self, capability: int, aligned: bool = True) -> dict[str, Any]:
        from .triton.compiling import job_of

        return job_of(self.candidate, self.function, capability, aligned)


def apart(region: Region, sides: Sides) -> Apart:
    """The best guess for each kernel."""
    from .triton.generate import candidates

    steps: list[tuple[Any, tuple[int, ...]]] = []
    scratch: list[Spec] = []
    begin = len(region.specs)

    def more(specs: Sequence[Spec]) -> tuple[int, ...]:
        scratch.extend(specs)
        return tuple(range(begin + len(scratch) - len(specs), begin + len(scratch)))

    def generated(side: Side, places: Sequence[int], specs: Sequence[Spec]) -> None:
        made = candidates(side.kernel, list(specs))[0]
        steps.append((made, (*places, *more(made.scratch))))

    at, problem = places_of(region, sides), problem_of(sides.anchor)
    image = at.first
    if (before := sides.before) is not None:
        (image,) = more([Spec(problem.image, last(problem.image), problem.dtype)])
        places = tensors_of(region, before.piece.inputs)
        generated(before, (*places, image), [*(region.specs[i] for i in places), scratch[0]])
    plain = Neighbours((POINTERS[problem.dtype],) * 3)
    made, stored = at.result, sides.stored
    if stored is not sides.anchor.results[0]:
        (made,) = more([Spec(stored.type.shape, last(stored.type.shape), problem.dtype)])
    else:
        problem = placed(problem, region, sides)
    single = Single(problem, Places(0, 1, 2, 3), configs(problem)[0], plain)
    steps.append((single, (image, at.second, made, *more(single.scratch))))
    if (after := sides.after) is not None:
        values = [*after.piece.inputs, *after.piece.outputs]
        places = tensors_of(region, values, sides.anchor.results[0], stored)
        places[after.piece.inputs.index(sides.anchor.results[0])] = made
        specs = [*region.specs, *scratch]
        generated(after, places, [specs[i] for i in places])
    return Apart(tuple(steps), tuple(scratch))


# ---- building --------------------------------------------------------------------------------------------------------


def build(offers: Sequence[Offer], report: Progress | None = None) -> dict[str, Launcher | Exception]:
    """What runs each offer, by its key."""
    from .triton.generate import interpreting

    if interpreting():
        return {o.key: interpreted(o.made) for o in offers}
    if not torch.cuda.is_available():
        error = InputError("depthwise kernels run on an NVIDIA GPU and there is none here")
        return {o.key: error for o in offers}
    major, minor = torch.cuda.get_device_capability()
    capability = 10 * major + minor
    refused = compile_for(offers, capability, report)
    return {o.key: refused.get(o.key) or loaded(o.made, capability) for o in offers}


def compile_for(offers: Sequence[Offer], capability: int, report: Progress | None = None) -> dict[str, Exception]:
    """Compiles into Triton's cache, in worker processes and without a GPU; the exceptions of what is no use."""
    from .triton.compiling import CompileError, digest, run
    from .triton.launch import MOST_SPILLS, Unfit

    jobs = {o.key: [digest(f.job(capability)) for f in o.made.functions] for o in offers}
    every = {digest(f.job(capability)): f.job(capability) for o in offers for f in o.made.functions}
    answers = run(every, report, 0)
    refused: dict[str, Exception] = {}
    for key, wanted in jobs.items():
        for answer in (answers[j] for j in wanted):
            if "error" in answer:
                refused[key] = CompileError(answer["error"])
            elif answer["spills"] > MOST_SPILLS:
                refused[key] = Unfit(f"{answer['spills']} bytes per thread do not fit into registers")
    return refused


def interpreted(way: Way) -> Launcher | Exception:
    """Runs the same source in Triton's interpreter."""
    from .triton.compiling import file_name
    from .triton.interpreted import STAND_INS
    from .triton.worker import functions_of

    if isinstance(way, Apart):
        return one_after_the_other(way, interpreted)
    libdevice = {"libdevice": STAND_INS["libdevice"]}
    mains = [functions_of(f.source, file_name(f.source), libdevice)["main"] for f in way.functions]

    def run(*tensors: torch.Tensor) -> None:
        for main, function in zip(mains, way.functions, strict=True):
            main[function.grid](*(tensors[i] for i in function.tensors))

    return run


def one_after_the_other(way: Apart, single: Callable[[Way], Launcher | Exception]) -> Launcher | Exception:
    """Launches the kernels of all steps."""
    from .triton.generate import build

    runs: list[tuple[Launcher, tuple[int, ...]]] = []
    for made, places in way.steps:
        run = single(made) if isinstance(made, Single) else build([made])[made.key]
        if isinstance(run, Exception):
            return run
        runs.append((run, places))

    def all_of_them(*tensors: torch.Tensor) -> None:
        for run, places in runs:
            run(*(tensors[i] for i in places))

    return all_of_them


def loaded(way: Way, capability: int) -> Launcher | Exception:
    try:
        if isinstance(way, Apart):
            return one_after_the_other(way, lambda single: loaded(single, capability))
        return Launch(way, capability)
    except Exception as error:  # a driver or the C compiler of the launcher: this way is out, others go on
        return error


class Launch:
    """Launches the kernels of a way on torch's current stream. It allocates nothing."""

    def __init__(self, way: Way, capability: int):
        from triton.runtime import driver

        self.functions, self.capability = way.functions, capability
        self.device = driver.active.get_current_device()
        self.stream = driver.active.get_current_stream
        self.variants = {True: self.load(True)}

    def load(self, aligned: bool) -> list[tuple[Any, ...]]:
        """The kernels for tensors that start at multiples of 16 bytes, or anywhere."""
        from triton import knobs

        from .triton.compiling import triton_cache
        from .triton.worker import compiled

        found: list[tuple[Any, ...]] = []
        with knobs.cache.scope():  # the user's own kernels keep their cache
            knobs.cache.dir = str(triton_cache())
            for function in self.functions:
                kernel = compiled(function.job(self.capability, aligned))
                run = kernel.run  # loads the kernel
                found.append((run, kernel.function, kernel.packed_metadata, function.grid, function.tensors))
        return found

    def __call__(self, *tensors: torch.Tensor) -> None:
        pointers = [t.data_ptr() for t in tensors]
        aligned = not any(p & 15 for p in pointers)
        if aligned not in self.variants:  # compiled when they are first seen
            self.variants[aligned] = self.load(aligned)
        stream = self.stream(self.device)
        for run, function, metadata, (x, y), wanted in self.variants[aligned]:
            run(x, y, 1, stream, function, metadata, None, None, None, *[pointers[i] for i in wanted])
