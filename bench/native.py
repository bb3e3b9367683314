"""The suite of generated kernels on a GPU instead of the interpreter, and a sample of it under compute-sanitizer.

`python bench/native.py [--out FILE.md]`, in some minutes; bench/results/native.md holds the record. The sample runs
with PyTorch's cache of memory switched off, so that what is read or written beside a tensor is seen.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
#: where CUDA puts the tool if it is not on the path
SANITIZERS = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")
FOLDER = "tests/backends"
GENERATED = (
    "generated_cases",
    "test_attention",
    "test_contraction",
    "test_depthwise",
    "test_unrolled",
    "test_window_rows",
)
OTHERS = ("test_embedding_grad", "wgmma/test_wgmma", "wgmma/test_windows", "wgmma/test_input_gradients")
SUITE = [*(f"{FOLDER}/triton/{name}.py" for name in GENERATED), *(f"{FOLDER}/{name}.py" for name in OTHERS)]
#: processes that share the tests
AT_ONCE = 14
#: seconds after which a test says where it is
SLOW = 90
#: what compute-sanitizer ends with, as if it were an error, where tests have run no kernel
IDLE = "terminated before first instrumented API call"


def ran(command: list[str], limit: float | None = None, **environment: str) -> tuple[int, str]:
    """A command's status and output; 124 where it did not end in time."""
    how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, timeout=limit, **how)
    except subprocess.TimeoutExpired as late:
        return 124, (late.stdout or b"").decode(errors="replace")
    return done.returncode, done.stdout.decode(errors="replace")


def pytest(*arguments: str) -> list[str]:
    usual = ["-p", "no:cacheprovider", "--no-header", "-o", f"faulthandler_timeout={SLOW}"]
    return [sys.executable, "-m", "pytest", *usual, *arguments]


def tests() -> list[str]:
    """The tests of generated kernels."""
    status, output = ran(pytest("-q", "--collect-only", *SUITE))
    found = [line for line in output.splitlines() if line.startswith(FOLDER)]
    found = [line for line in found if "/wgmma/" not in line or "natively" in line]  # others need no GPU
    if status or not found:
        sys.exit(f"no tests were found:\n{output}")
    return found


def outcome(before: list[str], chosen: list[str], limit: float, **environment: str) -> tuple[bool, str, float]:
    """Tests shared by some processes: whether all went well, what came out, and seconds."""
    start, parts = time.perf_counter(), [part for i in range(AT_ONCE) if (part := chosen[i::AT_ONCE])]

    def share(part: list[str]) -> tuple[int, str]:
        status, output = ran([*before, *pytest("-v", "--durations=3", *part)], limit, **environment)
        if IDLE in output and re.search(r"^=+ \d+ passed in ", output, re.M):  # (and none failed)
            status = 0
        slowest = re.findall(r"^(\d+\.\d+s) call +(\S+)", output, re.M)
        print(
            f"{len(part)} tests after {time.perf_counter() - start:.0f} s, exit code {status}:",
            *slowest[:2],
            flush=True,
        )
        if status:
            print(output[-3000:], flush=True)
        return status, output

    with ThreadPoolExecutor(len(parts)) as pool:
        done = list(pool.map(share, parts))
    counts: dict[str, int] = {}
    if late := sum(status == 124 for status, _ in done):
        counts["processes that did not end"] = late
    for _, output in done:
        told = next((line for line in reversed(output.splitlines()) if re.search(r" in \d+\.\d+s", line)), "")
        for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", told):
            counts[word] = counts.get(word, 0) + int(number)
        if IDLE in output:
            counts["processes without a kernel"] = counts.get("processes without a kernel", 0) + 1
        for number in re.findall(r"ERROR SUMMARY: (\d+) errors?", output):
            counts["errors of memory"] = counts.get("errors of memory", 0) + int(number)
    words = ", ".join(f"{count} {word}" for word, count in counts.items())
    return not any(status for status, _ in done), words, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=8, help="of so many tests one is run under compute-sanitizer")
    parser.add_argument("--sample", action="store_true", help="that sample alone")
    parser.add_argument("--limit", type=float, default=900, help="seconds for each of the two")
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    sanitizer = next(filter(None, map(shutil.which, SANITIZERS)), None)
    if not torch.cuda.is_available() or sanitizer is None:
        sys.exit("this needs a GPU and compute-sanitizer")
    lines = [
        "# Generated kernels on a GPU",
        "",
        f"`python {' '.join(['bench/native.py', *sys.argv[1:]])}` on {torch.cuda.get_device_name()}, torch "
        f"{torch.__version__}, Python {sys.version.split()[0]}; {AT_ONCE} processes share the tests of {FOLDER}.",
        "",
        "| what | tests | result | seconds |",
        "|---|---|---|---|",
    ]
    everything, right = tests(), True
    checker = [sanitizer, "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "9"]
    kinds: list[tuple[str, list[str], list[str], dict[str, str]]] = [
        ("the suite of generated kernels, natively", [], everything, {}),
        (
            f"one of {options.every} under compute-sanitizer (memcheck, no cache of memory)",
            checker,
            everything[:: options.every],
            {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        ),
    ]
    for what, before, chosen, environment in kinds[1:] if options.sample else kinds:
        well, words, seconds = outcome(before, chosen, options.limit, **environment)
        right &= well
        lines.append(f"| {what} | {len(chosen)} | {words} | {seconds:.0f} |")
        print(lines[-1], flush=True)
        if options.out is not None:
            options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.exit(not right)


if __name__ == "__main__":
    main()
