"""Compiles kernels into Triton's cache: a script of its own that needs Triton alone, one JSON job per line of input.

Run by `compiling.py`, several at a time. It never touches a GPU and imports neither torch nor the training program.
CUDA C++ is compiled as well, by NVIDIA's run-time compiler, which does one source at a time in a process: that code is
the answer.
"""

from __future__ import annotations

import base64
import ctypes
import gc
import hashlib
import json
import linecache
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

#: a kernel that does nothing: to compile it loads everything that compiling takes
NOTHING: dict[str, Any] = {
    "source": "@triton.jit\ndef nothing(p):\n    pass\n",
    "file": "<wholestep nothing>",
    "name": "nothing",
    "pointers": ["*fp32"],
    "warps": 1,
    "stages": 1,
    "aligned": True,
    "capability": 90,
}


def compiled(job: dict[str, Any]) -> Any:
    """The kernel of a job, from Triton's cache or compiled."""
    found = kept(job)
    return fresh(job) if found is None else found


def kept(job: dict[str, Any]) -> Any:
    """A kernel that was compiled before, by the name that Triton gave it then: to read its source and work that out
    again takes longer than to load it. None where there is none, or where its files are broken or gone."""
    from triton import knobs
    from triton.compiler import CompiledKernel
    from triton.runtime.cache import get_cache_manager

    if knobs.compilation.always_compile:
        return None
    try:
        name = json.loads(note_of(Path(knobs.cache.dir), digest(job)).read_text())["hash"]
        files = get_cache_manager(name).get_group(f"{job['name'][:150]}.json")
        signature = {f"p{i}": pointer for i, pointer in enumerate(job["pointers"])}
        return CompiledKernel(SimpleNamespace(signature=signature, constants={}), files, name) if files else None
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return None


def digest(job: dict[str, Any]) -> str:
    """Equal for jobs that give the same kernel."""
    import triton
    from triton._C.libtriton import get_cache_invalidating_env_vars

    content = [triton.__version__, get_cache_invalidating_env_vars(), job]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def note_of(folder: Path, key: str) -> Path:
    """The file beside Triton's cache that says what a job needs, and what Triton calls its kernel."""
    return folder / "wholestep" / f"{key}.json"


def fresh(job: dict[str, Any]) -> Any:
    """The kernel of a job as Triton finds it in its cache, or makes it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = functions_of(job["source"], job["file"])[job["name"]]
    signature = dict(zip(function.arg_names, job["pointers"], strict=True))
    attributes = {(i,): [["tt.divisibility", 16]] for i in range(len(signature))} if job["aligned"] else {}
    target = GPUTarget("cuda", job["capability"], 32)
    options = {"num_warps": job["warps"], "num_stages": job["stages"]}
    with lean():
        return triton.compile(ASTSource(function, signature, {}, attributes), target=target, options=options)


@contextmanager
def lean() -> Iterator[None]:
    """Leaves out what nobody reads, unless the environment asks for it: lines of the source, which take a tenth of a
    compile and most bytes of a kernel, and the texts between a source and its kernel."""
    from triton import knobs

    with knobs.compilation.scope():
        for name in ("disable_line_info", "store_binary_only"):
            if f"TRITON_{name.upper()}" not in os.environ:
                setattr(knobs.compilation, name, True)
        yield


def launcher(arguments: int) -> dict[str, Any]:
    """Has what launches kernels with so many pointers in Triton's cache: C code, whose compiler would otherwise be
    waited for by whoever loads the first such kernel."""
    from triton.backends.nvidia.driver import CudaLauncher

    signature = {f"p{i}": "*fp32" for i in range(arguments)}  # (what they point at makes no difference)
    CudaLauncher(SimpleNamespace(signature=signature, constants={}), fresh(NOTHING).metadata)
    return {}


class CudaError(RuntimeError):
    """The compiler or the driver refused; the message is theirs."""


def cuda_code(library: ctypes.CDLL, source: str, options: Sequence[str]) -> bytes:
    """The machine code of a source in CUDA C++."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    if library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"product.cu", 0, None, None):
        raise CudaError("the compiler does not take the source")
    try:
        given = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        if library.nvrtcCompileProgram(program, len(options), given):
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            said = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, said)
            lines = said.value.decode(errors="replace").splitlines()
            raise CudaError(next((line for line in lines if "error" in line), "the compiler failed"))
        library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        made = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, made)
        return made.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def answer_to(job: dict[str, Any]) -> dict[str, Any]:
    if "cuda" in job:
        code = cuda_code(ctypes.CDLL(job["library"]), job["cuda"], job["options"])
        return {"code": base64.b64encode(code).decode()}
    return facts(compiled(job)) if "source" in job else launcher(job["launcher"])


def functions_of(source: str, file: str, stand_ins: dict[str, Any] | None = None) -> dict[str, Any]:
    """The functions that a source defines. Triton reads their text through linecache: no file is written or run."""
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    space: dict[str, Any] = {"triton": triton, "tl": tl, "libdevice": libdevice, "__name__": "wholestep_kernels"}
    space |= stand_ins or {}
    exec(compile(source, file, "exec"), space)
    return space


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of local memory per thread, where what does not fit into registers goes."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file:
            file.write(cubin)
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (
        max(map(int, re.findall(rf"{n}:(\d+)", text)), default=0) for n in ("REG", "STACK", "LOCAL")
    )
    return registers, stack + local


def facts(kernel: Any) -> dict[str, Any]:
    """What a kernel needs, and what Triton calls it."""
    registers, local = resources(kernel.asm["cubin"])
    return {"registers": registers, "spills": local, "shared": kernel.metadata.shared, "hash": kernel.hash}


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what compilers print is no answer
    gc.disable()  # a tenth of a compile, and this process does not live long
    with suppress(Exception):  # whatever is in the way is the answer to the first job
        fresh(NOTHING)
    for line in sys.stdin:
        job = json.loads(line)
        began = time.perf_counter()
        answer: dict[str, Any]
        try:
            answer = answer_to(job)
        except Exception as error:  # whatever a compiler raises is the answer to this job
            answer = {"error": f"{type(error).__name__}: {error}"}
        answer["seconds"] = time.perf_counter() - began
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
