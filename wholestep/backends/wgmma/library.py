"""NVIDIA's run-time compiler and driver, by their C interfaces: from CUDA C++ to kernels that are launched.

The compiler comes with PyTorch. What it made is kept by its content (`store.py`), as other compiled objects are.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..store import Objects, usable_folder
from ..triton.worker import CudaError, cuda_code

OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17", "-default-device")
#: of the driver's header: the attribute of a kernel for more shared memory, types and modes of a tensor map
MORE_SHARED = 8
ELEMENTS = {torch.float16: 6, torch.bfloat16: 9}
SWIZZLE_128, PROMOTE_256 = 3, 3
MAP_BYTES, MAP_ALIGNMENT = 128, 64


@functools.cache
def compiler() -> ctypes.CDLL | None:
    """None where this PyTorch has no such compiler."""
    if torch.version.cuda is None:
        return None
    major = torch.version.cuda.partition(".")[0]
    try:
        return ctypes.CDLL(f"libnvrtc.so.{major}")
    except OSError:
        return None


@functools.cache
def driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def version() -> str:
    library = compiler()
    if library is None:
        return ""
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def call(name: str, *arguments: object) -> None:
    library = driver()
    assert library is not None
    status = getattr(library, name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        library.cuGetErrorString(status, ctypes.byref(text))
        raise CudaError(f"{name} says {(text.value or b'').decode() or status}")


@functools.cache
def kept() -> Objects:
    return Objects(usable_folder())


def compiled(source: str) -> bytes:
    """The machine code of a source, from before or made now."""
    key, objects = digest_of(source), kept()
    found = objects.read("cubin", key)
    if found is None:
        found = compile_now(source)
        objects.write("cubin", key, found)
    return found


def digest_of(source: str) -> str:
    return hashlib.sha256(f"{version()} {OPTIONS}\n{source}".encode()).hexdigest()


def compile_now(source: str) -> bytes:
    library = compiler()
    if library is None:
        raise CudaError("NVIDIA's run-time compiler is not part of this PyTorch")
    return cuda_code(library, source, OPTIONS)


def jobs_for(source: str) -> dict[str, dict[str, Any]]:
    """What another process has to do for a source (`triton/compiling.py`); nothing where its code is there already."""
    key, path = digest_of(source), compiler_path()
    if not path or kept().read("cubin", key) is not None:
        return {}
    job = {"cuda": source, "library": path, "options": OPTIONS}
    return {f"cuda {key}": job | {"then": lambda code: kept().write("cubin", key, code)}}


@functools.cache
def compiler_path() -> str:
    """The compiler's file, for processes that do not load PyTorch; "" where that cannot be told."""
    if compiler() is None:
        return ""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return ""
    return next((line[line.index("/") :] for line in lines if "/libnvrtc.so" in line), "")


class Kernels:
    """The functions of one source, loaded on the current device."""

    def __init__(self, source: str):
        self.module, self.code = ctypes.c_void_p(), compiled(source)
        call("cuModuleLoadData", ctypes.byref(self.module), self.code)

    def function(self, name: str, shared: int = 0) -> ctypes.c_void_p:
        """A kernel that may have so many bytes of shared memory."""
        found = ctypes.c_void_p()
        call("cuModuleGetFunction", ctypes.byref(found), self.module, name.encode())
        if shared:
            call("cuFuncSetAttribute", found, MORE_SHARED, shared)
        return found


@functools.cache
def kernels_of(source: str, device: int) -> Kernels:
    """Loaded once per device; they stay as long as the process."""
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # (PyTorch's context is then the current one)
        return Kernels(source)


def launch(function: ctypes.c_void_p, grid: int, threads: int, shared: int, stream: int, arguments: int) -> None:
    """Launches with one struct of arguments that lies at an address."""
    given = (ctypes.c_void_p * 1)(arguments)
    call("cuLaunchKernel", function, grid, 1, 1, threads, 1, 1, shared, ctypes.c_void_p(stream), given, None)


def tensor_map(pointer: int, dtype: torch.dtype, sizes: tuple[int, int], stride: int, box: Sequence[int]) -> bytes:
    """How tiles of a matrix are copied: its rows and columns, elements from row to row, columns and rows of a tile."""
    rows, columns = sizes
    return encoded(
        "cuTensorMapEncodeTiled",
        ELEMENTS[dtype],
        2,
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(stride * dtype.itemsize),
        (ctypes.c_uint32 * 2)(*box),
        (ctypes.c_uint32 * 2)(1, 1),
    )


@dataclass(frozen=True, slots=True)
class Gathering:
    """How windows of an image are copied. Dimensions are in the order of memory, channels first, then along a row, from
    row to row, and images; corners are of the box that windows begin in, from those of the image: along a row, then
    from row to row."""

    sizes: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    lower: tuple[int, int]
    upper: tuple[int, int]
    steps: tuple[int, int]


def window_map(pointer: int, dtype: torch.dtype, how: Gathering, channels: int, windows: int) -> bytes:
    """How tiles of windows are copied, so many channels of so many windows at a time."""
    return encoded(
        "cuTensorMapEncodeIm2col",
        ELEMENTS[dtype],
        4,
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * 4)(*how.sizes),
        (ctypes.c_uint64 * 3)(*(s * dtype.itemsize for s in how.strides)),
        (ctypes.c_int * 2)(*how.lower),
        (ctypes.c_int * 2)(*how.upper),
        channels,
        windows,
        (ctypes.c_uint32 * 4)(1, *how.steps, 1),
    )


def encoded(name: str, *arguments: object) -> bytes:
    """A tensor map by a function of the driver; all of ours are swizzled alike and give zeros outside."""
    room = (ctypes.c_char * (MAP_BYTES + MAP_ALIGNMENT))()
    at = -(-ctypes.addressof(room) // MAP_ALIGNMENT) * MAP_ALIGNMENT
    call(name, ctypes.c_void_p(at), *arguments, 0, SWIZZLE_128, PROMOTE_256, 0)
    return ctypes.string_at(at, MAP_BYTES)
