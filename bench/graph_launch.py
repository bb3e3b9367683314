"""Host time of launching a CUDA graph, by the kinds of its nodes: memsets make it slow (`runtime/graph_nodes.py`).

`python bench/graph_launch.py` on a GPU, in about 10 seconds; bench/results/graph_launch.md holds the record.
"""

from __future__ import annotations

import ctypes
import statistics
import time

import torch

#: kernels, memsets, copies, and copies by a foreach call, spread evenly
CASES = {
    "559 kernels": (559, 0, 0, 0),
    "402 kernels": (402, 0, 0, 0),
    "488 kernels + 71 memsets": (488, 71, 0, 0),
    "473 kernels + 86 memcpys": (473, 0, 86, 0),
    "402 kernels + 71 memsets + 86 memcpys": (402, 71, 86, 0),
    "488 kernels + 1 memset": (488, 1, 0, 0),
    "473 kernels + 86 foreach copies": (473, 0, 0, 86),
    "1219 kernels": (1219, 0, 0, 0),
    "10 kernels": (10, 0, 0, 0),
}


def captured(kernels: int, memsets: int, copies: int, together: int) -> torch.cuda.CUDAGraph:
    x, y = (torch.zeros(4096, device="cuda") for _ in range(2))
    driver = ctypes.CDLL("libcuda.so.1")

    def memset() -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        place, count = ctypes.c_uint64(y.data_ptr()), ctypes.c_size_t(64)
        assert driver.cuMemsetD8Async(place, ctypes.c_ubyte(0), count, stream) == 0

    plan = [lambda: x.add_(1)] * kernels
    for call, count in (
        (memset, memsets),
        (lambda: y.copy_(x), copies),
        (lambda: torch._foreach_copy_([y], [x]), together),
    ):
        for i in range(count):
            plan.insert(i * len(plan) // count, call)
    for call in plan:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in plan:
            call()
    graph.held = (x, y)  # type: ignore[attr-defined]  # it does not keep the tensors it works on
    return graph


def microseconds(graph: torch.cuda.CUDAGraph) -> tuple[float, float]:
    """Of a launch into an empty queue, the median of 200; and per launch of 50 in a row."""
    for _ in range(5):
        graph.replay()
    alone = []
    for _ in range(200):
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        alone.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(50):
        graph.replay()
    row = (time.perf_counter() - start) / 50
    torch.cuda.synchronize()
    return statistics.median(alone) * 1e6, row * 1e6


if __name__ == "__main__":
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, nodes in CASES.items():
        alone, row = microseconds(captured(*nodes))
        print(f"{name:45s} launch, queue empty {alone:7.1f} us; of 50 in a row {row:7.1f} us", flush=True)
