"""`wholestep cache`: what is kept of measured kernels on this machine; `--show` lists choices, `--clear` removes all.

Choices are found by what they are about: ops, shapes, layers, candidates, machine. It reads the store that compiles
write (`backends/store.py`). Nothing is made where there is nothing yet.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from wholestep.backends.store import (
    DATABASE,
    OBJECTS,
    Choice,
    Row,
    Store,
    Unavailable,
    Unwritable,
    cache_folder,
    why_unwritable,
)
from wholestep.cli.console import Console
from wholestep.cost.movement import size_text
from wholestep.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--show",
        nargs="*",
        metavar="TEXT",
        help="list choices that hold every TEXT in their ops, shapes, layers, candidates or machine (softmax, 8x128, "
        "triton; * stands for anything), with all candidates; all choices without a TEXT",
    )
    what.add_argument("--clear", action="store_true", help="remove everything that is kept")
    what.add_argument("--path", action="store_true", help="print the folder")
    parser.add_argument("--winner", metavar="TEXT", help="with --show: only choices whose winner holds this text")


def run(args: argparse.Namespace) -> int:
    if args.winner is not None and args.show is None:
        raise InputError("--winner narrows what --show lists. Try: wholestep cache --show --winner " + args.winner)
    folder = cache_folder()
    if args.path:
        print(folder)
        return 0
    console = Console()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        store = open_store(folder)
        try:
            if store is None:
                console.line(f"{folder}: nothing is kept yet; the first ws.compile that measures kernels fills it")
            elif args.clear:
                clear(store, folder, console)
            elif args.show is not None:
                show(store, args.show, args.winner, console)
            else:
                summarise(store, folder, console)
        except Unwritable:
            raise
        except Unavailable as error:
            raise InputError(f"{error}. Try: again when no other process compiles") from None
    for warning in said:
        print(warning.message, file=sys.stderr)
    return 0


def open_store(folder: Path) -> Store | None:
    """The store in a folder, or None if nothing was ever kept there."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file, so nothing can be kept there. Try: set WHOLESTEP_CACHE to a folder")
    if not (folder / DATABASE).exists() and not (folder / OBJECTS).exists():
        return None
    if why := why_unwritable(folder):
        raise Unwritable(folder, why)
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


def show(store: Store, patterns: Sequence[str], winner: str | None, console: Console) -> None:
    rows = store.rows()
    found = [
        row
        for row in rows
        if all(is_found(row, p) for p in patterns) and (winner is None or matches(row.choice.winner, winner))
    ]
    for row in found:
        console.line()
        for text in (row.choice.about, row.key):
            if text:
                console.line(text)
        console.line(row.machine)
        console.table(("candidate", "", "time"), candidate_rows(row.choice), left=2)
    console.line(f"{len(found)} of {counted(len(rows), 'measured choice')}")
    if rows and not found:
        plain = sum(not row.choice.about for row in rows)
        without = f" ({plain} without words for their ops: an older version measured them)" if plain else ""
        console.line(f"Try: one TEXT alone, or `wholestep cache --show` for all that is kept{without}")


def is_found(row: Row, pattern: str) -> bool:
    return any(matches(text, pattern) for text in row.texts)


def clear(store: Store, folder: Path, console: Console) -> None:
    before = database_bytes(folder)
    objects, size = store.objects.clear()
    choices = store.clear()
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
    """Whether a text holds a pattern, whatever letters are large or small."""
    text, pattern = text.lower(), pattern.lower()
    return pattern in text or fnmatch.fnmatchcase(text, f"*{pattern}*")


def database_bytes(folder: Path) -> int:
    """The database, and files that were put aside."""
    return sum(path.stat().st_size for path in folder.glob(f"{DATABASE}*"))


def counted(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def time_text(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us"
