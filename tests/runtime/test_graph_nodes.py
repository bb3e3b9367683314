"""Memsets of a captured graph that become kernels: on a GPU, the same results, and none are left."""

from __future__ import annotations

import ctypes

import pytest
import torch

from wholestep.runtime.graph_nodes import ELEMENTS, MEMSET, Driver, Memory, Node, without_memsets

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


def test_a_memset_is_a_tensor_of_as_many_elements() -> None:
    kind, number = ELEMENTS[4]
    seen = Memory(4096, 12, kind).__cuda_array_interface__
    assert seen["shape"] == (12,) and seen["typestr"] == "<i4" and seen["data"] == (4096, False)
    assert number(0xFFFFFFFF).value == -1 and ELEMENTS[1][1](0x80).value == 128


@gpu
def test_the_graph_does_the_same_without_them() -> None:
    device = torch.device("cuda")
    x = torch.zeros(1, device=device)
    filled = [torch.ones(1000 + 8 * i, device=device) for i in range(20)]
    a, product = (torch.randn(512, 512, device=device, dtype=torch.bfloat16) for _ in range(2))

    def memset(t: torch.Tensor, bits: int) -> None:
        call = Driver().cuMemsetD32Async if bits == 32 else Driver().cuMemsetD8Async
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        count = ctypes.c_size_t(t.nbytes * 8 // bits)
        call(ctypes.c_uint64(t.data_ptr()), ctypes.c_uint(0x40400000 if bits == 32 else 0), count, stream)

    def work() -> None:
        for y in filled:
            y.add_(x)
            memset(y, 32)  # 3.0
            y.add_(x + 2)
        memset(filled[3][:3], 8)
        torch.mm(a, a, out=product)

    work()
    torch.cuda.synchronize()
    found = []
    for change in (False, True):
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            work()
        before = len(Driver().of_kind(Node(graph.raw_cuda_graph()), MEMSET))
        assert before >= 21
        if change:
            assert without_memsets(graph, device) == before
            assert Driver().of_kind(Node(graph.raw_cuda_graph()), MEMSET) == []
        graph.instantiate()
        for y in filled:
            y.fill_(7)
        graph.replay()
        torch.cuda.synchronize()
        found.append([y.clone() for y in [*filled, product]])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert float(found[1][0][0]) == 5.0 and float(found[1][3][0]) == 0.0
