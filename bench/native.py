"""The suite of generated kernels on a GPU instead of the interpreter, and a sample of it under compute-sanitizer.

`python bench/native.py [--out FILE.md]`, in some minutes. The sample
runs with PyTorch's cache of memory switched off, so that what is read or written beside a tensor is seen.
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

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
#: where CUDA puts the tool if it is not on the path
SANITIZERS = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")
SUITE = "tests/backends/triton/generated_cases.py"


def ran(command: list[str], **environment: str) -> tuple[int, str, float]:
    """A command's status, output and seconds."""
    start = time.perf_counter()
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout, time.perf_counter() - start


def pytest(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", *arguments]


def last(output: str, pattern: str) -> str:
    """The last line of an output that a pattern is found in."""
    return next((line.strip() for line in reversed(output.splitlines()) if re.search(pattern, line)), "nothing")


def sample(every: int) -> list[str]:
    """Every so manieth test of generated kernels."""
    status, output, _ = ran(pytest("--collect-only", SUITE))
    found = [line for line in output.splitlines() if line.startswith(SUITE)]
    if status or not found:
        sys.exit(f"no tests were found:\n{output}")
    return found[::every]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=8, help="of so many tests one is run under compute-sanitizer")
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    sanitizer = next(filter(None, map(shutil.which, SANITIZERS)), None)
    if not torch.cuda.is_available() or sanitizer is None:
        sys.exit("this needs a GPU and compute-sanitizer")
    suite = ran(pytest(SUITE))
    print(suite[1][-3000:], flush=True)
    chosen = sample(options.every)
    check = [sanitizer, "--tool", "memcheck", "--error-exitcode", "9", *pytest(*chosen)]
    checked = ran(check, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    print(checked[1][-3000:])
    lines = [
        "# Generated kernels on a GPU",
        "",
        f"`python {' '.join(['bench/native.py', *sys.argv[1:]])}` on {torch.cuda.get_device_name()}, torch "
        f"{torch.__version__}, Python {sys.version.split()[0]}.",
        "",
        "| what | tests | result | seconds |",
        "|---|---|---|---|",
        f"| the suite of generated kernels, natively | {SUITE} | {last(suite[1], 'passed|failed')} | {suite[2]:.0f} |",
        f"| under compute-sanitizer (memcheck, no cache of memory) | {len(chosen)}, one of {options.every} of "
        f"{SUITE} | {last(checked[1], 'passed|failed')}; {last(checked[1], 'ERROR SUMMARY').strip('= ')} | "
        f"{checked[2]:.0f} |",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    sys.exit(suite[0] or checked[0])


if __name__ == "__main__":
    main()
