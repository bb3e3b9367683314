"""`wholestep cache`: what is kept of measured kernels on this machine; `--show` lists choices, `--clear` removes all.

It reads the store that compiles write (`backends/store.py`). Nothing is made where there is nothing yet.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import warnings
from collections import Counter
from pathlib import Path

from wholestep.backends.store import DATABASE, OBJECTS, Choice, Store, cache_folder, why_unwritable
from wholestep.cli.console import Console
from wholestep.cost.movement import size_text
from wholestep.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--show",
        metavar="PATTERN",
        help="list choices whose region or machine holds this text (* stands for anything), with all candidates",
    )
    what.add_argument("--clear", action="store_true", help="remove everything that is kept")
    what.add_argument("--path", action="store_true", help="print the folder")


def run(args: argparse.Namespace) -> int:
    folder = cache_folder()
    if args.path:
        print(folder)
        return 0
    console = Console()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        store = open_store(folder)
        if store is None:
            console.line(f"{folder}: nothing is kept yet")
        elif args.clear:
            clear(store, folder, console)
        elif args.show is not None:
            show(store, args.show, console)
        else:
            summarise(store, folder, console)
    for warning in said:
        print(warning.message, file=sys.stderr)
    return 0


def open_store(folder: Path) -> Store | None:
    """The store in a folder, or None if nothing was ever kept there."""
    if not (folder / DATABASE).exists() and not (folder / OBJECTS).exists():
        return None
    if why := why_unwritable(folder):
        raise InputError(f"{folder} cannot be written ({why}), so nothing is kept there. Try: set WHOLESTEP_CACHE")
    return Store("", folder)


def summarise(store: Store, folder: Path, console: Console) -> None:
    rows = store.rows()
    sizes = store.objects.sizes()
    console.line(str(folder))
    console.heading(f"{counted(len(rows), 'measured choice')}, {size_text(database_bytes(folder))}")
    if rows:
        machines = Counter(row.machine for row in rows)
        console.table(("machine", "choices"), [(machine, str(count)) for machine, count in machines.most_common()])
    objects = sum(count for count, _ in sizes.values())
    console.heading(f"{counted(objects, 'object')}, {size_text(sum(size for _, size in sizes.values()))}")
    if sizes:
        table = [(kind, str(count), size_text(size)) for kind, (count, size) in sizes.items()]
        console.table(("kind", "objects", "size"), table)


def show(store: Store, pattern: str, console: Console) -> None:
    rows = store.rows()
    found = [row for row in rows if matches(row.key, pattern) or matches(row.machine, pattern)]
    for row in found:
        console.heading(row.key)
        console.line(row.machine)
        console.table(("candidate", "", "time"), candidate_rows(row.choice), left=2)
    console.line(f"{len(found)} of {counted(len(rows), 'measured choice')}")


def clear(store: Store, folder: Path, console: Console) -> None:
    before = database_bytes(folder)
    choices = store.clear()
    objects, size = store.objects.clear()
    size += before - database_bytes(folder)
    console.line(
        f"{folder}: removed {counted(choices, 'measured choice')} and {counted(objects, 'object')}, {size_text(size)}"
    )


def candidate_rows(choice: Choice) -> list[tuple[str, str, str]]:
    """Who took part, the fastest first, the excluded last."""
    if not choice.candidates:
        return [(choice.winner, "chosen", time_text(choice.seconds))]
    return [
        (c.name, c.why or ("chosen" if c.name == choice.winner else ""), "" if c.why else time_text(c.seconds))
        for c in sorted(choice.candidates, key=lambda c: (bool(c.why), c.seconds))
    ]


def matches(text: str, pattern: str) -> bool:
    return pattern in text or fnmatch.fnmatchcase(text, f"*{pattern}*")


def database_bytes(folder: Path) -> int:
    """The database, and files that were put aside."""
    return sum(path.stat().st_size for path in folder.glob(f"{DATABASE}*"))


def counted(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def time_text(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us"
