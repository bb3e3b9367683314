"""Depthwise convolutions of our own (`triton/depthwise.py`) as a template of the provider `triton`.

A convolution that is depthwise, or a gradient of one, is a region of its own; its configurations are timed like others.
Shapes are constants of the kernels: each is a source of its own, compiled in worker processes like generated code.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..dialects.step.base import torch_dtype
from ..dialects.step.convolution import Conv, ConvInputGrad, ConvWeightGrad
from ..dialects.step.layout import Layout
from ..dialects.strides import row_major, same_places
from ..errors import InputError
from ..ir.core import Op, Value
from .kernels import Spec, with_channels_last
from .providers import Launcher, Offer, Progress, Region

#: what each op is called by the kernels
PARTS: dict[type, str] = {Conv: "forward", ConvInputGrad: "input_grad", ConvWeightGrad: "weight_grad"}
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


def takes(op: Op) -> bool:
    """Whether the op is to be a region of its own."""
    if op.definition not in PARTS or op.groups == 1:
        return False
    if op.transposed or (op.definition is Conv and op.bias is not None):
        return False
    p = problem_of(op)
    return not kernels().why_not(p.image, p.weight, p.stride, p.padding, op.dilation, op.groups, p.dtype)


def problem_of(op: Op) -> Problem:
    if op.definition is Conv:
        shapes = op.x.type.shape, op.w.type.shape, op.y.type.shape
    elif op.definition is ConvInputGrad:
        shapes = op.input_shape, op.w.type.shape, op.dy.type.shape
    else:
        shapes = op.x.type.shape, op.weight_shape, op.dy.type.shape
    image, weight, output = map(tuple, shapes)
    dtype = torch_dtype(op.operands[0].type.element)
    return Problem(PARTS[op.definition], image, weight, output, tuple(op.stride), tuple(op.padding), dtype)


def convolution(region: Region) -> Op:
    """The op of a region that is taken."""
    return next(op for op in region.ops if op.definition in PARTS)


def laid_out_from(value: Value) -> Value:
    """What a value is before a change of layout; where that is channels-last already, the change is none."""
    while value.op is not None and value.op.definition is Layout:
        value = value.op.operands[0]
    return value


def why_not(region: Region) -> str:
    """Empty where the kernels can run a region whose op they take, else why they cannot."""
    op = convolution(region)
    arguments = region.body.regions[0].block.arguments
    if any(laid_out_from(v) not in arguments for v in op.operands):
        return "a depthwise convolution of a view; only of a whole tensor"
    problem = problem_of(op)
    for spec in region.specs:
        if spec.shape == problem.weight and spec.shape not in (problem.image, problem.output):
            if not same_places(spec.shape, spec.strides, row_major(spec.shape)):
                return "the kernel of a depthwise convolution that has gaps"
        elif not same_places(spec.shape, spec.strides, last(spec.shape)):
            return "a depthwise convolution that is not channels-last"
    return ""


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
    """The configurations worth timing."""
    op = convolution(region)
    problem = problem_of(op)
    arguments = region.body.regions[0].block.arguments
    first, second = (arguments.index(laid_out_from(v)) for v in op.operands)
    places = (first, second)
    found = []
    for config in kernels().configs(problem.part, problem.image, problem.weight[2:], problem.stride, problem.dtype)[
        :OFFERS
    ]:
        scratch: tuple[Spec, ...] = ()
        if problem.part == "weight_grad":
            shape = kernels().partials_shape(problem.output, problem.weight, config)
            scratch = (Spec(shape, row_major(shape), torch.float32),)
        key = hashlib.sha256(repr((problem, places, config)).encode()).hexdigest()[:32]
        name = f"depthwise {config.columns}x{config.rows} v{config.vector} i{config.images}"
        way = Way(problem, places, config)
        found.append(Offer(name + " ahead" * config.prefetch, f"depthwise {key}", scratch, way))
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

    @property
    def source(self) -> str:
        """A function `main` of tensors alone."""
        names = ", ".join(f"p{i}" for i in range(len(self.tensors)))
        constants = ", ".join(f"{name}={value!r}" for name, value in self.constants.items())
        return f"{sources()}\n\n@triton.jit\ndef main({names}):\n    {self.kernel}({self.given}, {constants})\n"

    def job(self, capability: int, aligned: bool = True) -> dict[str, Any]:
        """What a compiling process is told. `aligned`: all tensors start at multiples of 16 bytes."""
        from .triton.compiling import file_name

        return {
            "source": self.source,
            "file": file_name(self.source),
            "name": "main",
            "pointers": list(self.pointers),
            "warps": self.warps,
            "stages": 1,
            "aligned": aligned,
            "capability": capability,
        }


@functools.cache
def sources() -> str:
    """The text of all kernels and of what they call."""
    found = [v for v in vars(kernels()).values() if type(v).__name__ in JITTED]
    return "\n\n".join(inspect.getsource(f.fn) for f in found)


#: what Triton makes of a function: compiled, interpreted, or run while another is compiled
JITTED = ("JITFunction", "InterpretedFunction", "ConstexprFunction")


@dataclass(frozen=True)
class Way:
    """A configuration for a convolution; `places` are those of its operands among the tensors of the region."""

    problem: Problem
    places: tuple[int, int]
    config: Any

    @functools.cached_property
    def functions(self) -> list[Function]:
        """What it launches, in order."""
        p, config, module = self.problem, self.config, kernels()
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
        result = len(set(self.places))
        tensors = (*self.places, result)
        own, wide = POINTERS[p.dtype], POINTERS[torch.float32]
        types = (own, own, own)
        if p.part == "input_grad":
            return [Function("input_grad_kernel", "p0, p1, p2", constants, tensors, types, grid, config.warps)]
        constants |= {"scale": None, "shift": None, "SCALED": False, "ACTIVATION": "none"}
        if p.part == "forward":
            constants |= {"sums": None, "SUMS": False}
            return [Function("forward_kernel", "p0, p1, p2", constants, tensors, types, grid, config.warps)]
        constants["IMAGES"] = config.images
        parts, taps, _ = module.partials_shape(p.output, p.weight, config)
        columns = 8 if taps * c < 4096 else 32
        sizes = {"PARTS": parts, "C": c, "TAPS": taps, "ROWS": 2048 // columns, "COLUMNS": columns}
        scratch, given, ends = result + 1, "p0, p1, partials=p2", (-(-taps * c // columns), 1)
        products = (*self.places, scratch), (own, own, wide)
        return [
            Function("weight_grad_kernel", given, constants, *products, grid, config.warps),
            Function("finish_kernel", "p0, p1", sizes, (scratch, result), (wide, own), ends, 8),
        ]


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


def interpreted(way: Way) -> Launcher:
    """Runs the same source in Triton's interpreter."""
    from .triton.compiling import file_name
    from .triton.worker import functions_of

    mains = [functions_of(f.source, file_name(f.source))["main"] for f in way.functions]

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
