"""The ways to run a product with what follows it, and their launches."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from ...transforms.tall_products import RIDGE
from ..triton.scalars import NoText
from . import library
from .products import ALIGNMENT, BLOCKS, PIECE, ROWS, SUMMED, Matrix, Product, Shape, Vector
from .windows import Convolution, product_of

if TYPE_CHECKING:
    from ..providers import Launcher, Progress, Region

#: multiplications below which a product takes no time worth measuring, and per byte below which it waits for memory
LEAST, FEW = 1 << 28, 32
THREADS, FINISHING, FINISHED = 384, 1024, 32
#: compute capability of the GPUs that have the instruction
HOPPER = 9
#: what may run alone, or with what follows
OPS = ("step.contract", "step.conv", "step.conv_input_grad")


def why_absent() -> str:
    """Why no such kernel runs here; empty where it does."""
    if not torch.cuda.is_available():
        return "there is no GPU here"
    if torch.cuda.get_device_capability()[0] != HOPPER:
        return "the GPU is no Hopper GPU"
    if library.compiler() is None or library.driver() is None:
        return "NVIDIA's run-time compiler is not part of this PyTorch"
    return ""


def why_not(region: Region) -> str:
    """ "" where a region may be run, else why not."""
    try:
        product = product_of(region)
    except NoText as error:
        return str(error)
    if product.m * product.n * product.k * product.parts < max(LEAST, FEW * region.bytes):
        return "it is too small to be worth measuring, or waits for memory"
    return why_absent()


def is_wide(region: Region) -> bool:
    """Whether a region is a product that may be run and that keeps tensor cores busy, or a convolution: with what
    follows, nobody else runs one."""
    if why_absent() or not any(op.name in OPS for op in region.ops) or why_not(region):
        return False
    p = product_of(region)
    return p.windowed or p.m * p.n * p.k > RIDGE * (p.m * p.n + p.m * p.k + p.n * p.k)


@dataclass(frozen=True, eq=False)
class Way:
    """One configuration for one region."""

    region: Region
    product: Product
    shape: Shape

    @property
    def name(self) -> str:
        return f"turns {ROWS}x{self.product.columns}x{SUMMED} {self.shape}"

    @cached_property
    def source(self) -> str:
        return self.product.source(self.shape)

    def jobs(self) -> dict[str, dict[str, Any]]:
        """What there is to compile for it."""
        return library.jobs_for(self.source)


def ways(region: Region) -> list[Way]:
    product = product_of(region)
    shape, kept = product.shape(), product.shape(stays=True) if product.windowed else None
    assert shape is not None
    shapes = [shape] if kept is None else [kept, shape]
    if product.tiles > 512 and product.n > product.columns:  # (one column of tiles is walked in one order)
        shapes.append(replace(shape, group=16))
    return [Way(region, product, s) for s in shapes]


def build(wanted: Sequence[Way], report: Progress | None = None) -> list[Launcher | Exception]:
    """What launches each way. Most were compiled ahead (`Way.jobs`)."""
    made: list[Launcher | Exception] = []
    with ThreadPoolExecutor(max_workers=8) as pool:
        codes = {source: pool.submit(library.compiled, source) for source in dict.fromkeys(w.source for w in wanted)}
        for done, way in enumerate(wanted, 1):
            try:
                codes[way.source].result()
                made.append(Launch(way))
            except (library.CudaError, OSError) as error:
                made.append(error)
            if report is not None:
                report(done, len(wanted))
    return made


class Launch:
    """Launches a way on torch's current stream. It allocates nothing on the device."""

    def __init__(self, way: Way):
        self.product, self.shape = way.product, way.shape
        self.region = way.region
        device = way.region.device
        self.device = torch.cuda.current_device() if device.index is None else device.index
        kernels = library.kernels_of(way.source, self.device)
        self.shared = self.product.bytes(self.shape)
        self.run = kernels.function("product", self.shared)
        lengths = {"finish": self.product.n if self.product.sums else 0}
        lengths["finish_aside"] = (0, self.product.m, self.product.n)[self.product.aside]
        lengths["finish_across"] = self.product.m if self.product.crossed else 0
        self.finish = [(kernels.function(name), -(-n // FINISHED)) for name, n in lengths.items() if n]
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.grid = min(processors, self.product.tiles, BLOCKS)
        self.pointers: tuple[int, ...] = ()
        self.arguments: Any = None
        self.at = 0

    def __call__(self, *tensors: torch.Tensor) -> None:
        pointers = tuple(t.data_ptr() for t in tensors)
        if any(p % ALIGNMENT for p in pointers):  # such as a parameter of the user's that is part of another
            self.op_by_op(tensors)
            return
        if pointers != self.pointers:
            self.place(pointers)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        library.launch(self.run, self.grid, THREADS, self.shared, stream, self.at)
        for finish, grid in self.finish:
            library.launch(finish, grid, FINISHING, 0, stream, self.at)

    def op_by_op(self, tensors: Sequence[torch.Tensor]) -> None:
        from ..providers import copying, op_by_op

        copying(op_by_op(self.region), len(self.region.operands))(*tensors)

    def place(self, pointers: tuple[int, ...]) -> None:
        """Writes the struct of arguments for tensors that lie so."""
        data = arguments_of(self.product, self.shape, pointers, self.grid)
        self.arguments = ctypes.create_string_buffer(len(data) + library.MAP_ALIGNMENT)
        self.at = -(-ctypes.addressof(self.arguments) // library.MAP_ALIGNMENT) * library.MAP_ALIGNMENT
        ctypes.memmove(self.at, data, len(data))
        self.pointers = pointers


def arguments_of(product: Product, shape: Shape, pointers: Sequence[int], blocks: int = BLOCKS) -> bytes:
    """`Args` of product.cu: maps of tiles, pointers, sizes. pointers: of the region's tensors, then of scratch."""

    def pointer_of(own: Matrix | Vector) -> int:
        place = product.places[own.argument]
        return pointers[place.argument] + (place.begin + own.begin) * place.spec.dtype.itemsize

    def mapped(matrix: Matrix, *box: int) -> bytes:
        dtype = product.specs[matrix.argument].dtype
        return library.tensor_map(pointer_of(matrix), dtype, (matrix.rows, matrix.columns), matrix.stride, box)

    def beside(matrix: Matrix, parity: int) -> bytes:
        if product.parities == 1:
            return mapped(matrix, PIECE, ROWS)
        assert isinstance(product, Convolution)
        dtype = product.specs[matrix.argument].dtype
        begin, how = product.pixels(matrix, parity)
        return library.window_map(pointer_of(matrix) + begin * dtype.itemsize, dtype, how, PIECE, ROWS)

    rows = (PIECE, SUMMED) if product.along_a else (SUMMED, ROWS)
    columns = (PIECE, SUMMED) if product.along_b else (SUMMED, product.columns // product.parts)
    if isinstance(product, Convolution):
        windows = (product.specs[product.a.argument].dtype, product.gathering, SUMMED, ROWS)
        data = library.window_map(pointer_of(product.a), *windows) + mapped(product.b, *columns)
    else:
        data = b"".join(mapped(side, *rows) for side in product.sides) + mapped(product.b, *columns)
    for tensors in (product.reads, product.writes):
        each = [(t, parity) for parity in range(product.parities) for t in tensors]
        data += b"".join(beside(*own) for own in each) + bytes(library.MAP_BYTES)
    scratch = pointers[1 + max(p.argument for p in product.places) :]
    own = len(scratch) - product.crossed
    tables = [[*map(pointer_of, kind), 0] for kind in (product.vectors, product.heights, product.tables)]
    tables += [[*scratch[:own], *([] if product.aside else [0])], [*scratch[own:], 0]]
    tables += [[*map(pointer_of, own_kind), 0] for own_kind in (product.ends, product.masks, product.packed)]
    for table in tables:
        data += b"".join(p.to_bytes(8, "little") for p in table)
    height = product.m // product.parities
    numbers = (height, product.n, product.k, shape.group, product.partials(blocks), *(*product.begins, 0)[:2])
    numbers += (*(m.stride for m in product.masks), 0, *(m.stride for m in product.packed), 0)
    numbers += product.window(blocks) if isinstance(product, Convolution) else ()
    numbers += (0, *product.product.joints) if len(product.sides) > 1 else ()
    data += b"".join(n.to_bytes(4, "little", signed=True) for n in numbers)
    return data + bytes(-len(data) % library.MAP_ALIGNMENT)
