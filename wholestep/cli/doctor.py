"""`wholestep doctor`: what this machine can do, the verdict on AMX, what is missing and what one loses by it.

`--calibrate` measures how fast it is and `--write FILE` keeps that as a description that reports can price a step with.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wholestep.cli.console import Console
from wholestep.errors import InputError
from wholestep.machine.describe import Machine, describe
from wholestep.machine.description import VARIABLE, Description

TORCH_SERIES = ((2, 11), (2, 13))  # first and last that Wholestep is tested with


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the same facts as JSON")
    parser.add_argument("--calibrate", action="store_true", help="measure its speed, in under a minute")
    parser.add_argument("--write", metavar="FILE", help="with --calibrate: write the machine's description")


def run(args: argparse.Namespace) -> int:
    if args.write and not args.calibrate:
        raise InputError("--write keeps what --calibrate measures; give both")
    if args.calibrate:
        return run_calibration(args.json, args.write)
    machine = describe()
    if args.json:
        print(json.dumps(facts(machine), indent=2))
    else:
        show(machine, Console())
    return 0 if machine.torch and machine.amx.safe else 1


def run_calibration(as_json: bool, file: str | None) -> int:
    """Measures the first CUDA device where there is one, else the CPU."""
    machine = describe()
    if machine.torch is None:
        raise InputError(f"nothing can be measured without torch: {machine.torch_problem}")
    from wholestep.machine.calibrate import calibrate

    found = calibrate("cuda:0" if machine.cuda else "cpu")
    if file:
        try:
            Path(file).write_text(found.to_json(), encoding="utf-8")
        except OSError as error:
            raise InputError(f"{file} cannot be written: {error.strerror or error}") from None
    if as_json:
        print(found.to_json(), end="")
        return 0
    console = Console()
    show_speed(found, console)
    if file:
        console.line(f"written to {file}; set {VARIABLE}={file} and reports price a step on this machine")
    return 0


def show_speed(found: Description, console: Console) -> None:
    console.heading(f"{found.name}" + (f", {found.cores} threads" if found.cores else ""))
    rows = [("copy, read plus written", f"{found.bandwidth / 1e9:.1f} GB/s")]
    for what, speed in (("reading alone", found.read_bandwidth), ("writing alone", found.write_bandwidth)):
        if speed is not None:
            rows.append((what, f"{speed / 1e9:.1f} GB/s"))
    rows += [(f"matrix products in {name}", f"{rate / 1e9:.1f} Gflop/s") for name, rate in found.gemm.items()]
    if found.launch_seconds is not None:
        rows.append(("one call of a small kernel", f"{found.launch_seconds * 1e6:.2f} us"))
    if found.graph_launch_seconds is not None:
        rows.append(("the same in a CUDA graph", f"{found.graph_launch_seconds * 1e6:.2f} us"))
    if found.cache_bytes is not None:
        rows.append(("last cache", f"{found.cache_bytes / 1e6:.1f} MB"))
    if found.cache_share is not None:
        rows.append(("share of it that holds data", f"{found.cache_share:.0%}"))
    if found.cache_bandwidth is not None:
        rows.append(("reading from it", f"{found.cache_bandwidth / 1e9:.1f} GB/s"))
    rows += [(name.replace("_", " "), f"{speed / 1e9:.1f} GB/s") for name, speed in found.links.items()]
    console.table(("what", "measured"), rows)


def facts(machine: Machine) -> dict[str, Any]:
    amx = machine.amx
    return asdict(machine) | {
        "amx": asdict(amx) | {"safe": amx.safe, "verdict": amx.verdict},
        "missing": [{"what": what, "loss": loss} for what, loss in missing(machine)],
    }


def show(machine: Machine, console: Console) -> None:
    console.heading("This machine")
    rows = [
        ("system", machine.system),
        ("CPU", f"{machine.cpu}, {machine.cores} usable cores"),
        ("instructions", " ".join(machine.isa) or "not listed by this system"),
        ("memory", gib(machine.memory_bytes)),
        ("Python", machine.python),
        ("torch", machine.torch or "absent"),
    ]
    rows += [
        (f"CUDA device {index}", f"{device.name}, {gib(device.memory_bytes)}, compute capability {device.capability}")
        for index, device in enumerate(machine.cuda)
    ]
    rows += [(tool, version or "absent") for tool, version in machine.compilers.items()]
    rows.append(("mlir-opt", machine.mlir_opt or "absent"))
    rows += [(name, version or "absent") for name, version in machine.packages.items()]
    console.table(("what", "found"), rows, left=2)

    console.heading("AMX")
    console.line(machine.amx.verdict)

    console.heading("Missing")
    absent = missing(machine)
    if absent:
        console.table(("what", "what you lose by it"), absent, left=2)
    else:
        console.line("nothing")


def missing(machine: Machine) -> list[tuple[str, str]]:
    """What is not here, with the loss in one line each; the gravest first."""
    found: list[tuple[str, str]] = []
    if machine.torch is None:
        found.append(("torch", f"everything but `opt` and `doctor`: {machine.torch_problem}"))
    elif not TORCH_SERIES[0] <= series(machine.torch) <= TORCH_SERIES[1]:
        first, last = (".".join(map(str, numbers)) for numbers in TORCH_SERIES)
        found.append((f"torch {first} to {last}", f"certainty: torch {machine.torch} is outside what is tested"))
    if not machine.cuda:
        found.append(("CUDA device", "training on a GPU; programs run on the CPU"))
    if not any(machine.compilers.get(tool) for tool in ("g++", "clang++")):
        found.append(("C++ compiler", "generated CPU kernels: steps run op by op through ATen, with more traffic"))
    if machine.cuda and not machine.packages.get("triton"):
        found.append(("triton", "generated GPU kernels: steps run op by op through ATen, with more traffic"))
    if machine.mlir_opt is None:
        found.append(("mlir-opt", "tests that have stock MLIR judge our text (Debian package mlir-22-tools)"))
    if not machine.packages.get("rich"):
        found.append(("rich", "drawn tables and live progress bars"))
    tools = [name for name in ("xdsl", "transformers", "hypothesis") if not machine.packages.get(name)]
    if tools:
        found.append((", ".join(tools), "part of the test suite; `make test` installs them"))
    return found


def series(version: str) -> tuple[int, int]:
    """(2, 13) of "2.13.0+cpu"."""
    major, minor = version.split(".")[:2]
    return int(major), int("".join(character for character in minor if character.isdigit()))


def gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.1f} GiB"
