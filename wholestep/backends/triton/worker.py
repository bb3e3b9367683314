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
import inspect
import json
import linecache
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
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
    "aligned": [0],
    "capability": 90,
}

#: numbers to look up by lie in columns and shifted rows of a batch: no kernel takes them to start at multiples of 16
#: bytes, which half of them do not
ANYWHERE = "*i64"


def assumed(pointers: Sequence[str]) -> list[int]:
    """Those of a kernel's tensors that start at multiples of 16 bytes, unless it is for tensors that start anywhere."""
    return [number for number, pointer in enumerate(pointers) if pointer != ANYWHERE]


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
    attributes = {(i,): [["tt.divisibility", 16]] for i in job["aligned"]}
    target = GPUTarget("cuda", job["capability"], 32)
    options = {"num_warps": job["warps"], "num_stages": job["stages"]}
    with lean(), laid_out(job.get("vector", 0)):
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


#: the Triton whose passes `laid_out` runs
PASSES_OF = "3.6."
#: how threads share a tensor of two dimensions before Triton has looked at its loads
SHARED = re.compile(r"sizePerThread = \[1, 1\], threadsPerWarp = \[\d+, \d+\], warpsPerCTA = \[\d+, 1\]")


@contextmanager
def laid_out(vector: int) -> Iterator[None]:
    """Gives a thread `vector` neighbours of one row of every tensor; 0 leaves that to Triton.

    Triton would find the same, but goes through the whole kernel for every load and store: of a long kernel that takes
    half of the compile. What it does for products and copies to shared memory is left out as well.
    """
    from triton import __version__, knobs
    from triton._C.libtriton import ir, passes

    def hook(backend: Any, stages: dict[str, Any], options: Any, language: Any, capability: int) -> None:
        warps = options.num_warps
        wanted = f"sizePerThread = [1, {vector}], threadsPerWarp = [32, 1], warpsPerCTA = [{warps}, 1]"

        def run(module: Any, *steps: Any) -> None:
            manager = ir.pass_manager(module.context)
            for step in steps:
                step(manager)
            manager.run(module, "wholestep")

        def ttgir(module: Any, metadata: dict[str, Any]) -> Any:
            run(module, lambda m: passes.ttir.add_convert_to_ttgpuir(m, f"cuda:{capability}", warps, 32, 1))
            with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
                file.write(SHARED.sub(wanted, str(module)))
                file.flush()
                found = ir.parse_mlir_module(file.name, module.context)
            found.context = module.context
            run(
                found,
                passes.ttgpuir.add_remove_layout_conversions,
                passes.ttir.add_loop_aware_cse,
                passes.common.add_canonicalizer,
                passes.ttir.add_triton_licm,
                passes.common.add_canonicalizer,
                passes.ttgpuir.add_reorder_instructions,
                passes.ttir.add_loop_aware_cse,
                passes.common.add_symbol_dce,
                passes.common.add_sccp,
                passes.common.add_cse,
                passes.common.add_canonicalizer,
            )
            metadata["tensordesc_meta"] = found.get_tensordesc_metadata()
            return found

        stages["ttgir"] = ttgir

    with knobs.runtime.scope():
        if vector and __version__.startswith(PASSES_OF):
            knobs.runtime.add_stages_inspection_hook = hook
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


def quicken() -> None:
    """Has Triton's front end ask once for the signatures of what kernels call, and leave warnings as they are: it does
    both for every word of a kernel, which takes it half of its time."""
    from triton.compiler import code_generator

    @cache
    def signature(function: Any) -> Any:
        return inspect.signature(function)

    def known(function: Any) -> Any:
        return signature(getattr(function, "__func__", function))  # (of a method, whatever it belongs to)

    def ignore(*_: Any) -> None:
        pass

    code_generator.inspect = SimpleNamespace(**{**vars(inspect), "signature": known})
    code_generator.warnings = SimpleNamespace(
        **{**vars(warnings), "catch_warnings": nullcontext, "simplefilter": ignore}
    )


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
        quicken()
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
