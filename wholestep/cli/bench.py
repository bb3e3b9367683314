"""`wholestep bench`: training steps against eager PyTorch and torch.compile, or the summary of what was measured.

Results go to a JSON file run by run; tables, plots and the README's part are made from that file alone.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import math
import os
import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from wholestep.bench import page, profile, record, summary
from wholestep.bench.contenders import BUDGETED, CONTENDERS, EAGER, JAX, MODES, OURS, PRECISIONS
from wholestep.bench.field import Field
from wholestep.bench.jax_contender import has_twin
from wholestep.bench.race import Race
from wholestep.bench.rehearsal import bytecode
from wholestep.bench.results import OF_PROFILES, Results, circumstances
from wholestep.bench.runner import Settings
from wholestep.bench.workload import NETWORKS, Case, cases, networks
from wholestep.cli.console import Console
from wholestep.errors import InputError
from wholestep.options import near

HELP = (
    f"contenders beside ours, of {','.join(CONTENDERS[1:])}, or none; with a budget of memory: "
    f"{', '.join(f'{name}:0.7' for name in BUDGETED)} (default: eager and all of torch.compile's modes, on a CPU its "
    "default alone; jax where it is installed and the network has a twin)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="networks (resnet50, resnet50@few) or ONNX files (default: all)")
    add("--against", metavar="A,B", help=HELP)
    add(
        "--size",
        help="the size of networks that are named without one: full, few, cpu, ... (default: full; on a CPU cpu)",
    )
    add("--device", choices=("cuda", "cpu"), help="where to train (default: a GPU if there is one)")
    add("--precision", choices=PRECISIONS, help="bf16 (default on a GPU) or fp32")
    add("--json", metavar="FILE", help="keep results in this file; entries that are not measured now stay")
    add("--html", metavar="FILE", help="write all results of the file as one page")
    add("--record", metavar="FILE", help="write all results of the file as one Markdown page")
    add("--plots", metavar="FOLDER", help="write plots as SVG there")
    add("--readme", metavar="FILE", help="write the summary between the markers of this page")
    add("--summary", metavar="JSON", help="measure nothing: show what is in this file, with the bars that hold")
    add(
        "--profile",
        action="store_true",
        help="also time and bytes by kernel family, ours beside the others (on a CPU instead of times)",
    )
    add(
        "--together",
        nargs="?",
        type=cases_at_once,
        const=1,
        default=0,
        metavar="N",
        help="torch.compile's other modes compile at once, those of up to N cases (default 1), and time kernels in "
        "turn; ours, JAX and its default mode compile alone, and whoever is timed is",
    )
    add(
        "--missing",
        action="store_true",
        help="only contenders that --json has no times of in a run with ours, or that compiled beside others there",
    )
    add("--limit", type=positive, default=300.0, metavar="S", help="seconds that one contender may work (default 300)")
    add("--seconds", type=positive, default=3600.0, metavar="S", help="seconds for everything (default 3600)")
    add("--rounds", type=count, default=7, help="blocks of steps that each contender times (default 7)")
    add("--block", type=positive, default=0.4, metavar="S", help="seconds of one block (default 0.4)")
    add("--steps", type=count, default=50, help="steps whose losses are compared (default 50)")
    add("--threads", type=count, default=0, help="threads on a CPU (default: torch's own)")
    add("--networks", default=NETWORKS, metavar="MODULE", help="a module with build(name, size, device)")
    add("--bind", action="append", default=[], metavar="DIM=N", help="the size of a free dimension of an ONNX file")


def run(args: argparse.Namespace) -> int:
    console = Console()
    if args.summary:
        results = Results.load(existing(args.summary))
        show(console, results, args)
        write_pages(results, args)
        return 0
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda asks for a GPU, and torch sees none; see `wholestep doctor`")
    settings = Settings(
        device=device,
        precision=args.precision or ("bf16" if device == "cuda" else "fp32"),
        steps=args.steps,
        rounds=args.rounds,
        block_seconds=args.block,
        limit=args.limit,
        together=args.together,
        profile=args.profile,
        threads=args.threads,
        networks=args.networks,
        bind=bound(args.bind),
    )
    contenders = [OURS, *rivals(args.against, device)]
    wanted = cases(args.names, args.size or ("full" if device == "cuda" else "cpu"), args.networks)
    check_places(args)
    measured = measure(console, wanted, contenders, settings, args)
    show(console, measured, args)
    write_pages(Results.load(Path(args.json)) if args.json else measured, args)
    return 0 if all(entry["status"] == "agrees" for entry in [*measured.entries, *measured.profiles]) else 1


def measure(
    console: Console,
    wanted: Sequence[Case],
    contenders: Sequence[str],
    settings: Settings,
    args: argparse.Namespace,
) -> Results:
    """Runs all cases that fit the time. What is found of a case goes to the file before the next one begins."""
    began, measured = time.monotonic(), Results()
    results = Results.load(Path(args.json)) if args.json else measured
    command = shlex.join(["wholestep", *sys.argv[1:]]) if sys.argv[1:2] == ["bench"] else "wholestep bench"
    places: dict[Race, dict[str, Any]] = {}

    def say(text: str) -> None:
        console.line(f"[{time.monotonic() - began:6.1f} s] {text}")
        console.stream.flush()  # whoever reads a file of it sees how far it is

    def keep(race: Race) -> None:
        if race not in places:  # who has another try is of the same run
            where = places[race] = circumstances(settings.device, settings.threads, command)
            where["race"] = f"{where['date']} {secrets.token_hex(3)}"
            where["bytecode"] = rehearsed
        merge(race, places[race], settings, measured)
        if args.json:
            times = () if settings.names_kernels else measured.entries
            Results(times, measured.profiles).add_to(Path(args.json))

    where, deadline, races = circumstances(settings.device, settings.threads, command), began + args.seconds, []
    limited = replace(settings, limit=min(settings.limit, args.seconds))
    for case in wanted:
        twin = [JAX] if args.against is None and has_twin(case.network, settings.networks) else []
        those = [*contenders, *twin]
        if args.missing:
            those = [OURS, *results.missing(case, those[1:], settings.precision, where)]
        if args.missing and those == [OURS]:
            say(f"{case}: nobody is missing")
            continue
        known = results.reference(case, settings.precision, where, settings.steps)
        costs = results.costs(case, {*those, EAGER}, settings.precision, where)
        races.append(Race(case, those, limited, say, deadline, known, costs))
    field = Field(races, settings.together, deadline, say, room_of(settings.device))
    took_part = list(dict.fromkeys(name for race in races for name in race.wanted))
    try:
        with bytecode(took_part, settings, say) as rehearsed:
            field.run(work_of(settings), keep)
    except KeyboardInterrupt:
        kept = f"what was finished before is in {args.json}" if args.json else "--json FILE would keep what is finished"
        say(f"stopped in {', '.join(str(race.case) for race in field.open)}; {kept}")
        raise
    return measured


def work_of(settings: Settings) -> Callable[[Race], None]:
    """What is done with a case that is ready."""
    if settings.names_kernels:
        return Race.profiling
    return Race.timing_and_profiling if settings.profile else Race.timing


def room_of(device: str) -> float:
    """Bytes that a GPU has; the host's memory is not looked at."""
    return torch.cuda.get_device_properties(0).total_memory if device == "cuda" else math.inf


def merge(race: Race, where: Mapping[str, Any], settings: Settings, measured: Results) -> None:
    """Puts what was found of a case into the results of this run."""
    who = {"network": race.case.network, "size": race.case.size, "precision": settings.precision}
    for name, entry in race.entries.items():
        whole = who | {"contender": name} | dict(where) | {part: entry[part] for part in entry if part != "profile"}
        if "profile" in entry:
            measured.merge_profile({part: whole[part] for part in OF_PROFILES} | {"profile": entry["profile"]})
        if "profile" not in entry or not settings.names_kernels:
            measured.merge(whole)


# ---- what is shown and written ---------------------------------------------------------------------------------------


def show(console: Console, results: Results, args: argparse.Namespace) -> None:
    if not results.entries and not results.profiles:
        console.line("nothing was measured")
    bars = bars_of(args.networks) if args.summary else ()
    for (device, _, _), entries in summary.machines(results.entries).items():
        table = summary.Table(entries)
        console.heading(summary.about(entries))
        console.table(*summary.contender_rows(table), left=2)
        own = [bar for bar in bars if bar.device == device]
        if own:
            rows = summary.bar_rows(table, own)
            console.table(summary.BAR_COLUMNS, rows, left=2)
            for note in [*summary.notes(rows), *summary.remarks(table, own)]:
                console.line(note)
        for entry in entries:
            if entry["status"] != "agrees":
                case = summary.case_name((entry["network"], entry["size"]))
                console.line(f"{case} {entry['contender']}: {summary.reason(entry)}")
    for case, group in page.by_case(results.profiles).items():
        show_profile(console, case, group)


def show_profile(console: Console, case: str, group: Mapping[str, Mapping[str, Any]]) -> None:
    console.heading(f"{case}: a step by kernel family")
    console.table(*profile.table_of(group))
    for line in profile.differences(group, OURS):
        console.line(f"  {line}")
    for name, found in group.items():
        console.heading(f"{case}: what takes longest, {name}")
        console.table(profile.TOP_COLUMNS, profile.top_rows(found, 20), left=2)


def write_pages(results: Results, args: argparse.Namespace) -> None:
    """The files that were asked for, from all results."""
    if not (args.html or args.plots or args.readme or args.record):
        return
    bars = bars_of(args.networks)
    if args.html:
        write(Path(args.html), page.page(results.entries, results.profiles, bars))
    plots = page.plots(results.entries) if args.plots else {}
    for name, drawn in plots.items():
        write(Path(args.plots) / name, drawn)
    if args.record:
        beside = args.plots and Path(args.plots).resolve() == Path(args.record).resolve().parent
        write(Path(args.record), record.record(results.entries, list(plots) if beside else (), results.profiles))
    if args.readme:
        summary.write_between_markers(Path(args.readme), summary.markdown(results.entries, bars))
        print(f"written: {args.readme}", file=sys.stderr)


def bars_of(module: str) -> Sequence[summary.Bar]:
    """The bars that the networks' module sets: `BARS` of its module `bars`; none where it has no such."""
    networks(module)
    try:
        return importlib.import_module(f"{module}.bars").BARS
    except ModuleNotFoundError as error:
        if error.name != f"{module}.bars":
            raise
        return ()


def write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from None
    print(f"written: {path}", file=sys.stderr)


# ---- arguments -------------------------------------------------------------------------------------------------------


def rivals(given: str | None, device: str) -> list[str]:
    """The contenders beside ours."""
    if given is None:
        return [EAGER, *MODES] if device == "cuda" else [EAGER, "compile"]
    names = [name for name in given.split(",") if name not in ("", "none", OURS)]
    for text in names:
        name, colon, share = text.partition(":")
        if name not in CONTENDERS:
            hint = near(name, CONTENDERS)
            raise InputError(f"--against names {text!r}; contenders are {', '.join(CONTENDERS[1:])}{hint}")
        if colon and (name not in BUDGETED or not is_share(share)):
            raise InputError(
                f"--against names {text!r}; a budget of memory is a share such as 0.7, of {' or '.join(BUDGETED)}"
            )
    return list(dict.fromkeys(names))


def bound(given: Sequence[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for text in given:
        name, _, size = text.partition("=")
        if not name or not size.isdigit() or int(size) < 1:
            raise InputError(f"--bind takes a dimension and its size, such as batch=8, not {text!r}")
        found[name] = int(size)
    return found


def is_share(text: str) -> bool:
    try:
        return 0 < float(text) <= 1
    except ValueError:
        return False


def check_places(args: argparse.Namespace) -> None:
    """What cannot be written is said before anything is measured."""
    files = [Path(file) for file in (args.json, args.html, args.record) if file]
    files += [Path(args.plots) / "any.svg"] if args.plots else []
    for path in files:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path.parent):
                pass
            if path.exists() and not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror or error}") from None
    if args.readme:
        summary.between_markers(Path(args.readme))


def existing(file: str) -> Path:
    if not Path(file).is_file():
        raise InputError(f"{file} is not there: `wholestep bench --json {file}` measures and writes it")
    return Path(file)


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def cases_at_once(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"{text} is no number of cases; name networks before it, or write --together=1"
        )
    return int(text)


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return value
