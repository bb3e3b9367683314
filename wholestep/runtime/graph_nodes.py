"""Memsets of a captured CUDA graph become kernels: libraries fill workspaces so, and each one makes the launch slow.

On an H200 a graph of 500 kernels is launched in 8 us; 71 memsets among them make that 130 us. The fills are captured
beside the graph, and their kernel nodes take the places of the memsets. Of the CUDA driver its graph calls are used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

KERNEL, MEMSET = 0, 2
#: array interface's and C's types of what a memset writes, by its bytes
ELEMENTS = {1: ("|u1", ctypes.c_uint8), 2: ("<i2", ctypes.c_int16), 4: ("<i4", ctypes.c_int32)}
Node = ctypes.c_void_p
CALLS = (
    "cuGraphGetNodes",
    "cuGraphNodeGetType",
    "cuGraphNodeGetDependencies",
    "cuGraphNodeGetDependentNodes",
    "cuGraphMemsetNodeGetParams",
    "cuGraphKernelNodeGetParams_v2",
    "cuGraphAddKernelNode_v2",
    "cuGraphAddDependencies",
    "cuGraphDestroyNode",
)


class DriverError(RuntimeError):
    """A call of the CUDA driver failed."""


class Memset(ctypes.Structure):
    """Parameters of a memset node."""

    _fields_ = (
        ("dst", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element_size", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class Kernel(ctypes.Structure):
    """Parameters of a kernel node."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("sizes", ctypes.c_uint * 7),  # of the grid, of a block, and bytes of shared memory
        ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class Memory:
    """Device memory that torch can look at as a tensor."""

    address: int
    count: int
    kind: str

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.count,), "typestr": self.kind, "data": (self.address, False), "version": 3}


class Driver:
    """The driver's graph calls; an answer other than success raises."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.library, name)

        def call(*arguments: Any) -> None:
            if code := function(*arguments):
                raise DriverError(f"{name} failed with CUDA error {code}")

        return call

    def listed(self, name: str, of: Node) -> list[Node]:
        """What a call that fills a list of nodes gives."""
        count = ctypes.c_size_t()
        getattr(self, name)(of, None, ctypes.byref(count))
        nodes = (Node * count.value)()
        if count.value:
            getattr(self, name)(of, nodes, ctypes.byref(count))
        return [Node(n) for n in nodes]

    def of_kind(self, graph: Node, wanted: int) -> list[Node]:
        found = []
        for node in self.listed("cuGraphGetNodes", graph):
            kind = ctypes.c_int()
            self.cuGraphNodeGetType(node, ctypes.byref(kind))
            if kind.value == wanted:
                found.append(node)
        return found


def without_memsets(graph: torch.cuda.CUDAGraph, device: torch.device) -> int:
    """Replaces memsets in a graph that is captured with `keep_graph=True` and not instantiated; says how many."""
    driver, whole = Driver(), Node(graph.raw_cuda_graph())
    if not all(hasattr(driver.library, name) for name in CALLS):
        return 0  # a driver of another time: the graph is right as it is, and is launched more slowly
    memsets: list[tuple[Node, Memset]] = []
    for node in driver.of_kind(whole, MEMSET):
        asked = Memset()
        driver.cuGraphMemsetNodeGetParams(node, ctypes.byref(asked))
        if asked.height == 1 and asked.element_size in ELEMENTS and asked.width:
            memsets.append((node, asked))
    if not memsets:
        return 0
    fills = captured_fills([asked for _, asked in memsets], device)
    kernels = driver.of_kind(Node(fills.raw_cuda_graph()), KERNEL)
    if len(kernels) != len(memsets):
        raise DriverError(f"{len(memsets)} fills were captured as {len(kernels)} kernels")
    for (memset, _), kernel in zip(memsets, in_order(driver, kernels), strict=True):
        replace(driver, whole, memset, kernel)
    return len(memsets)


def captured_fills(memsets: Sequence[Memset], device: torch.device) -> torch.cuda.CUDAGraph:
    """A graph with one fill after the other."""
    tensors = []
    for asked in memsets:
        kind, number = ELEMENTS[asked.element_size]
        memory = torch.as_tensor(Memory(asked.dst, asked.width, kind), device=device)
        tensors.append((memory, number(asked.value).value))
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for tensor, value in tensors:
            tensor.fill_(value)
    return graph


def in_order(driver: Driver, nodes: list[Node]) -> list[Node]:
    """The nodes of a chain, first to last."""
    after: dict[int | None, Node] = {}
    for node in nodes:
        before = driver.listed("cuGraphNodeGetDependencies", node)
        after[before[0].value if before else None] = node
    chain: list[Node] = []
    at: int | None = None
    while at in after:
        chain.append(after.pop(at))
        at = chain[-1].value
    if after:
        raise DriverError("the captured fills are no chain")
    return chain


def replace(driver: Driver, graph: Node, memset: Node, kernel: Node) -> None:
    """Adds a copy of a kernel node between the neighbours of a memset node, which goes."""
    params = Kernel()
    driver.cuGraphKernelNodeGetParams_v2(kernel, ctypes.byref(params))
    before = driver.listed("cuGraphNodeGetDependencies", memset)
    after = driver.listed("cuGraphNodeGetDependentNodes", memset)
    new = Node()
    driver.cuGraphAddKernelNode_v2(
        ctypes.byref(new), graph, (Node * len(before))(*before), ctypes.c_size_t(len(before)), ctypes.byref(params)
    )
    if after:
        here = (Node * len(after))(*[new.value] * len(after))
        driver.cuGraphAddDependencies(graph, here, (Node * len(after))(*after), ctypes.c_size_t(len(after)))
    driver.cuGraphDestroyNode(memset)
