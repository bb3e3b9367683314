"""cuDNN, called by the C interface of its graphs: the library that PyTorch has loaded already.

Everything is a descriptor with attributes. A graph becomes an operation graph; heuristics propose engines for it; an
engine becomes a plan, which runs on pointers. Descriptors are destroyed with the objects that hold them.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..c_library import CLibrary
from . import graph as what
from .graph import Graph, Node, Tensor

# the numbers of cuDNN's header: kinds of descriptors
POINTWISE, CONVOLUTION, ENGINE, ENGINE_CONFIG, HEURISTICS, PLAN = 0, 1, 2, 3, 4, 5
CONVOLUTION_OP, WEIGHT_GRADIENT_OP, INPUT_GRADIENT_OP = 10, 11, 12
POINTWISE_OP, OPERATION_GRAPH, VARIANT_PACK, TENSOR = 13, 15, 16, 17
MATMUL, MATMUL_OP, REDUCTION, REDUCTION_OP, RESHAPE_OP = 18, 19, 21, 22, 31
# types of attributes
HANDLE, DATA_TYPE, BOOLEAN, INT64, FLOAT, VOID_PTR, CONVOLUTION_MODE, HEURISTICS_MODE = 0, 1, 2, 3, 4, 6, 7, 8
NUMERICAL_NOTE, POINTWISE_MODE, DESCRIPTOR, REDUCTION_MODE = 11, 14, 15, 18
HELD: dict[int, Any] = {
    BOOLEAN: ctypes.c_bool,
    INT64: ctypes.c_int64,
    FLOAT: ctypes.c_float,
    HANDLE: ctypes.c_void_p,
    VOID_PTR: ctypes.c_void_p,
    DESCRIPTOR: ctypes.c_void_p,
}
# attributes
MODE, PRECISION, AXIS = 0, 1, 9
CONVOLUTION_PRECISION, CONVOLUTION_OF, SPATIAL = 100, 101, 106
DILATION, STRIDE, PADDING_AFTER, PADDING = 102, 103, 104, 105
HEURISTICS_OF, HEURISTICS_GRAPH, HEURISTICS_RESULTS = 200, 201, 202
CONFIG_ENGINE, CONFIG_WORKSPACE, PLAN_HANDLE, PLAN_CONFIG = 300, 303, 400, 401
GRAPH_HANDLE, GRAPH_OPS = 800, 801
ALIGNED, TYPE, SIZES, STRIDES, ID, IS_VIRTUAL, IS_NUMBER = 900, 901, 902, 903, 906, 907, 908
PACK_IDS, PACK_POINTERS, PACK_WORKSPACE = 1000, 1001, 1003
ENGINE_NOTES, MATMUL_PRECISION, REDUCTION_OF, REDUCTION_PRECISION = 1303, 1500, 1600, 1601
#: of each kind of operation: its descriptor, its mode's, its inputs and its output
OPERATIONS = {
    what.POINTWISE: (POINTWISE_OP, 750, (751, 752, 758), 753),
    what.MATMUL: (MATMUL_OP, 1523, (1520, 1521), 1522),
    what.REDUCTION: (REDUCTION_OP, 1612, (1610,), 1611),
    what.RESHAPE: (RESHAPE_OP, None, (2200,), 2201),
    what.CONVOLUTION: (CONVOLUTION_OP, 702, (704, 703), 705),
    what.INPUT_GRADIENT: (INPUT_GRADIENT_OP, 708, (711, 709), 710),
    what.WEIGHT_GRADIENT: (WEIGHT_GRADIENT_OP, 714, (716, 717), 715),
}
#: of convolutions: what the result is multiplied by, and what was there before is
FACTORS = {what.CONVOLUTION: (700, 701), what.INPUT_GRADIENT: (706, 707), what.WEIGHT_GRADIENT: (712, 713)}
#: a kernel is not turned round
CROSS_CORRELATION = 1
POINTWISE_MODES = {"add": 0, "mul": 1, "div": 6, "sub": 9, "exp": 13, "log": 15, "identity": 21}
POINTWISE_MODES |= {"cmp_ge": 303, "gen_index": 501, "select": 601}
REDUCTION_MODES = {"add": 0, "max": 3}
TYPES = {torch.float32: 0, torch.float16: 2, torch.int32: 4, torch.bfloat16: 9, torch.bool: 11}
#: whose proposals are asked for: the library's best model of speed, else its slower one
MODE_A, MODE_B = 3, 1
#: what an engine may do to numbers
TENSOR_CORES, DOWN_CONVERTS, REDUCES_SHORT, FFT, NO_FIXED_ORDER, WINOGRAD = 0, 1, 2, 3, 4, 5
#: where every tensor begins
ALIGNMENT = 16


def explained(library: ctypes.CDLL, status: int) -> str:
    """The library's own words."""
    library.cudnnGetErrorString.restype = ctypes.c_char_p
    library.cudnnGetLastErrorString.restype = None
    said = ctypes.create_string_buffer(4096)
    library.cudnnGetLastErrorString(said, ctypes.c_size_t(len(said)))
    return " ".join(f"{library.cudnnGetErrorString(status).decode()} {said.value.decode(errors='replace')}".split())


LIBRARY = CLibrary("cudnn", "libcudnn.so.9", explained)
call, handle = LIBRARY.call, LIBRARY.handle


class Descriptor:
    """One object of the library, with attributes. Those that it refers to live as long as it does."""

    def __init__(self, kind: int) -> None:
        self.pointer = ctypes.c_void_p()
        self.refers: list[Descriptor] = []
        call("cudnnBackendCreateDescriptor", kind, ctypes.byref(self.pointer))
        # (at the end of the process the library may be gone before)
        weakref.finalize(self, call, "cudnnBackendDestroyDescriptor", self.pointer).atexit = False

    def set(self, attribute: int, type: int, *values: Any) -> None:
        if type == DESCRIPTOR:
            self.refers += values
            values = tuple([d.pointer.value for d in values])
        array = (HELD.get(type, ctypes.c_int) * len(values))(*values)
        call("cudnnBackendSetAttribute", self.pointer, attribute, type, ctypes.c_int64(len(values)), array)

    def get(self, attribute: int, type: int, array: Any) -> int:
        """Fills an array; how many there were to give."""
        count, room = ctypes.c_int64(), ctypes.c_int64(0 if array is None else len(array))
        call("cudnnBackendGetAttribute", self.pointer, attribute, type, room, ctypes.byref(count), array)
        return count.value

    def finish(self) -> Descriptor:
        call("cudnnBackendFinalize", self.pointer)
        return self


def belongs_to(descriptor: Descriptor, attribute: int, device: int) -> None:
    """Says on which device something runs."""
    descriptor.set(attribute, HANDLE, handle(device).value)


# ---- graphs ----------------------------------------------------------------------------------------------------------


def tensor(of: Tensor) -> Descriptor:
    made, spec = Descriptor(TENSOR), of.spec
    made.set(TYPE, DATA_TYPE, TYPES[spec.dtype])
    made.set(SIZES, INT64, *spec.shape)
    made.set(STRIDES, INT64, *spec.strides)
    made.set(ID, INT64, of.id)
    made.set(ALIGNED, INT64, ALIGNMENT)
    if of.kind == what.NUMBER:
        made.set(IS_NUMBER, BOOLEAN, True)
    if of.kind == what.VIRTUAL:
        made.set(IS_VIRTUAL, BOOLEAN, True)
    return made.finish()


def mode_of(node: Node) -> Descriptor | None:
    """What an operation does, beside the tensors it does it with. All are computed in f32."""
    precision = TYPES[torch.float32]
    if node.kind == what.POINTWISE:
        made = Descriptor(POINTWISE)
        made.set(MODE, POINTWISE_MODE, POINTWISE_MODES[node.mode])
        truth = node.output.spec.dtype is torch.bool
        made.set(PRECISION, DATA_TYPE, TYPES[torch.bool] if truth else precision)
        if node.axis is not None:
            made.set(AXIS, INT64, node.axis)
    elif node.kind == what.REDUCTION:
        made = Descriptor(REDUCTION)
        made.set(REDUCTION_OF, REDUCTION_MODE, REDUCTION_MODES[node.mode])
        made.set(REDUCTION_PRECISION, DATA_TYPE, precision)
    elif node.kind == what.MATMUL:
        made = Descriptor(MATMUL)
        made.set(MATMUL_PRECISION, DATA_TYPE, precision)
    elif node.window is not None:
        made, window = Descriptor(CONVOLUTION), node.window
        made.set(CONVOLUTION_PRECISION, DATA_TYPE, precision)
        made.set(CONVOLUTION_OF, CONVOLUTION_MODE, CROSS_CORRELATION)
        made.set(SPATIAL, INT64, len(window.stride))
        made.set(STRIDE, INT64, *window.stride)
        made.set(DILATION, INT64, *window.dilation)
        made.set(PADDING, INT64, *window.padding)
        made.set(PADDING_AFTER, INT64, *window.padding)
    else:
        return None
    return made.finish()


def operation(node: Node, tensors: dict[int, Descriptor]) -> Descriptor:
    kind, does, reads, writes = OPERATIONS[node.kind]
    made, mode = Descriptor(kind), mode_of(node)
    if mode is not None and does is not None:
        made.set(does, DESCRIPTOR, mode)
    for attribute, value in zip(reads, node.inputs, strict=False):
        made.set(attribute, DESCRIPTOR, tensors[value.id])
    made.set(writes, DESCRIPTOR, tensors[node.output.id])
    for attribute, factor in zip(FACTORS.get(node.kind, ()), (1.0, 0.0), strict=False):
        made.set(attribute, FLOAT, factor)
    return made.finish()


def operation_graph(graph: Graph, device: int) -> Descriptor:
    made, tensors = Descriptor(OPERATION_GRAPH), {t.id: tensor(t) for t in graph.tensors}
    made.set(GRAPH_OPS, DESCRIPTOR, *(operation(node, tensors) for node in graph.nodes))
    belongs_to(made, GRAPH_HANDLE, device)
    return made.finish()


# ---- plans -----------------------------------------------------------------------------------------------------------


class Engine:
    """One way of the library's to run a graph, which is built when it is first asked for: that compiles a kernel."""

    def __init__(self, graph: Graph, config: Descriptor, device: int, number: int) -> None:
        self.graph, self.config, self.device = graph, config, device
        #: its place among all proposals
        self.number = number
        size = (ctypes.c_int64 * 1)()
        config.get(CONFIG_WORKSPACE, INT64, size)
        #: bytes that it needs beside the tensors of the graph
        self.workspace: int = size[0]

    @functools.cached_property
    def notes(self) -> frozenset[int]:
        """What it does to numbers."""
        engine, notes = Descriptor(ENGINE), (ctypes.c_int * 16)()
        self.config.get(CONFIG_ENGINE, DESCRIPTOR, (ctypes.c_void_p * 1)(engine.pointer.value))
        count = engine.get(ENGINE_NOTES, NUMERICAL_NOTE, notes)
        return frozenset(notes[:count])

    @functools.cached_property
    def plan(self) -> Plan:
        return Plan(self)  # (one engine makes one plan: asked for another it fails)


class Plan:
    """What an engine launches."""

    def __init__(self, engine: Engine) -> None:
        self.device, self.workspace = engine.device, engine.workspace
        self.described = Descriptor(PLAN)
        self.described.set(PLAN_CONFIG, DESCRIPTOR, engine.config)
        belongs_to(self.described, PLAN_HANDLE, engine.device)
        self.described.finish()
        self.ids = [t.id for t in engine.graph.of(what.GIVEN, what.INNER)]
        self.numbers = {t.id: ctypes.c_float(t.value) for t in engine.graph.of(what.NUMBER)}

    def run(self, tensors: Sequence[torch.Tensor]) -> None:
        """tensors: those of the graph that have memory, and then the workspace where there is one."""
        places = [t.data_ptr() for t in tensors[: len(self.ids)]]
        places += [ctypes.addressof(number) for number in self.numbers.values()]
        pack = Descriptor(VARIANT_PACK)
        pack.set(PACK_IDS, INT64, *self.ids, *self.numbers)
        pack.set(PACK_POINTERS, VOID_PTR, *places)
        if self.workspace:
            pack.set(PACK_WORKSPACE, VOID_PTR, tensors[len(self.ids)].data_ptr())
        pack.finish()
        own, stream = handle(self.device), torch.cuda.current_stream(self.device).cuda_stream
        call("cudnnSetStream", own, ctypes.c_void_p(stream))
        call("cudnnBackendExecute", own, self.described.pointer, pack.pointer)


def engines(
    graph: Graph, device: torch.device, most: int, suits: Callable[[Engine], bool] = lambda engine: True
) -> list[Engine]:
    """What suits of that which the library thinks best, in its order; an error where it has nothing."""
    index = torch.cuda.current_device() if device.index is None else device.index
    described = operation_graph(graph, index)
    configs = proposals(described, MODE_A) or proposals(described, MODE_B)
    if not configs:
        raise RuntimeError("cuDNN has no engine for this graph")
    found = (Engine(graph, config, index, number) for number, config in enumerate(configs))
    return list(itertools.islice(filter(suits, found), most))


def proposals(graph: Descriptor, mode: int) -> list[Descriptor]:
    """Engines, with their settings."""
    asked = Descriptor(HEURISTICS)
    asked.set(HEURISTICS_GRAPH, DESCRIPTOR, graph)
    asked.set(HEURISTICS_OF, HEURISTICS_MODE, mode)
    asked.finish()
    found = [Descriptor(ENGINE_CONFIG) for _ in range(asked.get(HEURISTICS_RESULTS, DESCRIPTOR, None))]
    array = (ctypes.c_void_p * len(found))(*[d.pointer.value for d in found])
    given = asked.get(HEURISTICS_RESULTS, DESCRIPTOR, array)
    return found[:given]
