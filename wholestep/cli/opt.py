"""`wholestep opt`: reads a program as text, runs passes on it, prints it again. Our mlir-opt.

The program is verified before the first pass and after the last, and a plan is proved by the rules of its phase; an
error in the text names file, line and column.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from wholestep.errors import InputError

if TYPE_CHECKING:
    from wholestep.ir import Op


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", help="program text in MLIR's generic form; - reads standard input")
    parser.add_argument("--passes", default="", metavar="A,B{option=1}", help="passes to run, in order")
    parser.add_argument("--list", action="store_true", help="list the passes and stop")
    parser.add_argument("--verify-only", action="store_true", help="parse and check the program, print nothing")
    parser.add_argument("--locations", action="store_true", help="print where in the user's code each op came from")
    parser.add_argument("--allow-unregistered", action="store_true", help="let ops of unknown dialects through")
    parser.add_argument("-o", "--output", metavar="FILE", help="write there instead of to standard output")


def run(args: argparse.Namespace) -> int:
    if args.list:
        return _list()
    if args.file is None:
        raise InputError("no program was named; give a file, or - for standard input (--list shows the passes)")
    if args.verify_only and (args.passes or args.output):
        raise InputError("--verify-only prints and changes nothing; drop it, or drop --passes and --output")

    from wholestep import dialects, ir, transforms  # noqa: F401  (transforms registers its passes)

    text, filename = _read(args.file)
    context = dialects.context(allow_unregistered=args.allow_unregistered)
    module = ir.parse(text, context, filename, verify=True)
    _prove(module)
    if args.verify_only:
        return 0
    if args.passes:
        from wholestep.ir import passes

        passes.run_pipeline(module, args.passes)
        ir.verify(module)
        _prove(module)
    _write(ir.print_module(module, locations=args.locations), args.output)
    return 0


def _prove(module: Op) -> None:
    """Checks a plan as a whole; a program without one passes."""
    if "move.phase" in module.attributes:
        from wholestep.dialects.move import verify_plan

        verify_plan(module)


def _list() -> int:
    from wholestep import transforms  # noqa: F401  (transforms registers its passes)
    from wholestep.ir import passes

    available = passes.available()
    width = max((len(name) for name in available), default=0)
    for name, doc in sorted(available.items()):
        first_line = (doc or "").strip().partition("\n")[0]
        print(f"{name:<{width}}  {first_line}".rstrip())
    return 0


def _read(file: str) -> tuple[str, str]:
    try:
        if file == "-":
            return sys.stdin.read(), "<stdin>"
        return Path(file).read_text(encoding="utf-8"), file
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read {file}: byte {error.start} is not UTF-8; program text is UTF-8 text") from error


def _write(text: str, output: str | None) -> None:
    text = text if text.endswith("\n") else text + "\n"
    if output is None:
        sys.stdout.write(text)
        return
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {output}: {error.strerror}") from error
