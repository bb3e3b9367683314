"""`wholestep doctor`: what this machine can do, the verdict on AMX, what is missing and what one loses by it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from wholestep.cli.console import Console
from wholestep.machine.describe import Machine, describe

TORCH_SERIES = ((2, 11), (2, 13))  # first and last that Wholestep is tested with


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the same facts as JSON")


def run(args: argparse.Namespace) -> int:
    machine = describe()
    if args.json:
        print(json.dumps(facts(machine), indent=2))
    else:
        show(machine, Console())
    return 0 if machine.torch and machine.amx.safe else 1


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
        found.append(("CUDA device", "training on a GPU; programs run on the CPU through ATen"))
    if not any(machine.compilers.get(tool) for tool in ("g++", "clang++")):
        found.append(("C++ compiler", "nothing yet: the generator of CPU kernels, still to come, will need one"))
    if machine.cuda and not machine.packages.get("triton"):
        found.append(("triton", "nothing yet: the generator of GPU kernels, still to come, will need it"))
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
