"""`wholestep doctor`: what this machine can do, the verdict on AMX, what is missing and what one loses by it.

`--calibrate` measures how fast it is and `--write FILE` keeps that as a description that reports can price a step with.
Figures of a busy machine are said to be so, and do not replace better ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wholestep.cli.console import Console
from wholestep.errors import InputError
from wholestep.machine.cpu import usable
from wholestep.machine.describe import Machine, describe
from wholestep.machine.description import (
    STEADY,
    VARIABLE,
    Description,
    difference,
    load_description,
    why_undescribed,
)

TORCH_SERIES = ((2, 11), (2, 13))  # first and last that Wholestep is tested with


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the same facts as JSON")
    parser.add_argument("--calibrate", action="store_true", help="measure its speed, in under a minute")
    parser.add_argument("--write", metavar="FILE", help="with --calibrate: write the machine's description")
    parser.add_argument("--force", action="store_true", help="with --write: replace what is in FILE, whatever it is")


def run(args: argparse.Namespace) -> int:
    if args.write is not None and not args.calibrate:
        raise InputError("--write keeps what --calibrate measures. Try: wholestep doctor --calibrate --write FILE")
    if args.force and args.write is None:
        raise InputError("--force is about the FILE of --write. Try: wholestep doctor --calibrate --write FILE --force")
    if args.calibrate:
        return run_calibration(args.json, args.write, args.force)
    machine = describe()
    if args.json:
        print(json.dumps(facts(machine), indent=2))
    else:
        show(machine, Console())
    return 0 if machine.torch and machine.amx.safe else 1


def run_calibration(as_json: bool, file: str | None, force: bool = False) -> int:
    """Measures the first CUDA device where there is one, else the CPU."""
    before = None if file is None else description_in(Path(file), force)  # first: measuring takes up to a minute
    machine = describe()
    if machine.torch is None:
        raise InputError(f"nothing can be measured without torch: {machine.torch_problem}. Try: pip install torch")
    from wholestep.machine.calibrate import calibrate

    found = calibrate("cuda:0" if machine.cuda else "cpu")
    if as_json:
        print(found.to_json(), end="")
    else:
        show_speed(found, Console())
    if found.busy:
        print(f"this machine was busy and looks slower than it is: {found.busy}. Try: again when idle", file=sys.stderr)
    if file is None:
        return 0
    why = "" if before is None or force else why_kept(before, found)
    if why:
        print(f"{file} is kept as it was: {why}. Try: again when idle, or --force to replace it", file=sys.stderr)
        return 1
    try:
        Path(file).write_text(found.to_json(), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror or error}. Try: another FILE") from None
    if not as_json:
        print(f"written to {file}; set {VARIABLE}={file} and reports price a step on this machine")
    return 0


def description_in(file: Path, force: bool) -> Description | None:
    """What a file describes that is to be written; None where there is none yet, or it does not matter."""
    if file.is_dir() or not file.parent.is_dir():
        why = "it is a folder" if file.is_dir() else f"there is no folder {file.parent}"
        raise InputError(f"{file} cannot be written: {why}. Try: another FILE")
    if force or not file.is_file() or not file.stat().st_size:
        return None
    try:
        return load_description(file.absolute())
    except InputError as error:
        raise InputError(f"{error}\nIt is left alone. Try: another FILE, or --force to replace it") from None


def why_kept(before: Description, found: Description) -> str:
    """Why a description is better than a new one; "" where it is not."""
    old, new = titled(before), titled(found)
    if old != new:
        return f"it describes {old}, and this is {new}"
    other = "" if found.instructions is None else difference(before, found.cores, found.instructions)
    if other:
        return f"it describes another {old}: {other}"
    if found.busy and not (before.busy and (found.spread or 0) < (before.spread or 0)):
        repeats = "" if before.spread is None else f", when repeats differed by {before.spread:.0%} at most"
        return f"it was measured on a {'busy' if before.busy else 'quiet'} machine{repeats}"
    what, share = found.behind(before)
    return f"its {what} are {share:.0%} faster" if share > STEADY else ""


def titled(machine: Description) -> str:
    return machine.name + (f", {machine.cores} thread{'' if machine.cores == 1 else 's'}" if machine.cores else "")


def show_speed(found: Description, console: Console) -> None:
    console.heading(titled(found))
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
    if found.instructions is not None:
        rows.append(("instructions for it", " ".join(found.instructions) or "none that change these figures"))
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
    why = why_undescribed(machine.cpu, machine.cores, usable(frozenset(machine.isa), machine.amx))
    if why and not machine.cuda:
        measure = "wholestep doctor --calibrate --write FILE"
        found.append(("description of this CPU", f"the time of a step at its limits: {why}. Try: {measure}"))
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
