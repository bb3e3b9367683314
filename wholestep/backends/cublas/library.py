"""cuBLASLt, called by its C interface: the library that PyTorch has loaded already. Matrices there lie by columns."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..c_library import CLibrary
from ..matrices import Matrices

#: the numbers of cuBLASLt's header: types, attributes, epilogues
TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
COMPUTE_F32, SCALE_F32 = 68, 0
TRANSPOSED_A, TRANSPOSED_B, EPILOGUE, BIAS_POINTER, BIAS_TYPE = 3, 4, 7, 8, 26
PLAIN, BIASED = 1, 4
BATCHES, BATCH_STRIDE = 5, 6
WORKSPACE, ALIGNMENTS = 1, (5, 6, 7, 8)
#: memory that an algorithm may take beside its matrices: as much as PyTorch gives it on such GPUs
MOST_WORKSPACE = 32 << 20
#: where every matrix begins
ALIGNMENT = 16


class Algorithm(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64 * 8)]


class Heuristic(ctypes.Structure):
    _fields_ = [
        ("algorithm", Algorithm),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


LIBRARY = CLibrary("cublasLt", f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}")
call, handle = LIBRARY.call, LIBRARY.handle


@dataclass(slots=True)
class Layout:
    """How one matrix lies, for the library."""

    pointer: ctypes.c_void_p
    transposed: bool


def layout(known: Matrices, sizes: tuple[int, int], strides: tuple[int, int, int]) -> Layout:
    """A matrix of these sizes, the one along which a result is written first."""
    batch, first, second = strides
    transposed = first != 1
    rows, columns = sizes if not transposed else sizes[::-1]
    lead = second if not transposed else first
    found = ctypes.c_void_p()
    numbers = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(max(lead, rows))
    call("cublasLtMatrixLayoutCreate", ctypes.byref(found), TYPES[known.dtype], *numbers)
    if known.z > 1:
        for attribute, value in ((BATCHES, ctypes.c_int32(known.z)), (BATCH_STRIDE, ctypes.c_int64(batch))):
            call("cublasLtMatrixLayoutSetAttribute", found, attribute, ctypes.byref(value), ctypes.sizeof(value))
    return Layout(found, transposed)


class Product:
    """A product of matrices that lie so, as the library sees it: result, by columns, is right^T left^T."""

    def __init__(self, known: Matrices, device: torch.device):
        self.known, self.device = known, torch.cuda.current_device() if device.index is None else device.index
        self.description = ctypes.c_void_p()
        call("cublasLtMatmulDescCreate", ctypes.byref(self.description), COMPUTE_F32, SCALE_F32)
        z, k, n = known.right
        self.first = layout(known, (known.n, known.k), (z, n, k))
        z, m, k = known.left
        self.second = layout(known, (known.k, known.m), (z, k, m))
        z, m, n = known.result
        self.made = layout(known, (known.n, known.m), (z, n, m))
        self.set(TRANSPOSED_A, ctypes.c_int32(self.first.transposed))
        self.set(TRANSPOSED_B, ctypes.c_int32(self.second.transposed))
        self.set(EPILOGUE, ctypes.c_uint32(BIASED if known.biased else PLAIN))
        if known.biased:
            self.set(BIAS_TYPE, ctypes.c_int32(TYPES[known.dtype]))
        self.one, self.zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

    def set(self, attribute: int, value: ctypes._SimpleCData) -> None:
        call("cublasLtMatmulDescSetAttribute", self.description, attribute, ctypes.byref(value), ctypes.sizeof(value))

    @property
    def layouts(self) -> list[ctypes.c_void_p]:
        return [x.pointer for x in (self.first, self.second, self.made, self.made)]

    def algorithms(self, most: int) -> list[Heuristic]:
        """What the library thinks best, in its order."""
        preference, found, count = ctypes.c_void_p(), (Heuristic * most)(), ctypes.c_int()
        call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        wishes = [(WORKSPACE, ctypes.c_uint64(MOST_WORKSPACE)), *((a, ctypes.c_uint32(ALIGNMENT)) for a in ALIGNMENTS)]
        for attribute, value in wishes:
            size = ctypes.sizeof(value)
            call("cublasLtMatmulPreferenceSetAttribute", preference, attribute, ctypes.byref(value), size)
        wanted = (preference, most, found, ctypes.byref(count))
        call("cublasLtMatmulAlgoGetHeuristic", handle(self.device), self.description, *self.layouts, *wanted)
        call("cublasLtMatmulPreferenceDestroy", preference)
        return [h for h in found[: count.value] if h.state == 0]

    def run(self, by: Heuristic, tensors: Sequence[torch.Tensor]) -> None:
        """Multiplies a region's tensors, the last of which is the workspace where there is one."""
        left, right = tensors[:2] if not self.known.swapped else (tensors[1], tensors[0])
        result = tensors[3 if self.known.biased else 2]
        if self.known.biased:
            self.set(BIAS_POINTER, ctypes.c_void_p(tensors[2].data_ptr()))
        first, second, made, _ = self.layouts
        factors = [(right, first), (left, second)]
        space = tensors[-1].data_ptr() if by.workspace else None
        call(
            "cublasLtMatmul",
            handle(self.device),
            self.description,
            ctypes.byref(self.one),
            *(x for t, lies in factors for x in (ctypes.c_void_p(t.data_ptr()), lies)),
            ctypes.byref(self.zero),
            *(ctypes.c_void_p(result.data_ptr()), made) * 2,
            ctypes.byref(by.algorithm),
            ctypes.c_void_p(space),
            ctypes.c_size_t(by.workspace),
            ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream),
        )

    def __del__(self) -> None:
        found = LIBRARY.loaded
        if found is not None and self.description:
            found.cublasLtMatmulDescDestroy(self.description)
            for lies in (self.first, self.second, self.made):
                found.cublasLtMatrixLayoutDestroy(lies.pointer)
