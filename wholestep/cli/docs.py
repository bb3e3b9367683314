"""`wholestep docs`: writes the pages and IRDL files that are generated from the dialect declarations."""

from __future__ import annotations

import argparse
from pathlib import Path

from wholestep.errors import WholestepError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", type=Path, default=Path(), help="the checkout to write into (default: here)")


def run(args: argparse.Namespace) -> int:
    if not (args.root / "wholestep").is_dir():
        raise WholestepError(
            f"{args.root.resolve()} is not a checkout of Wholestep (it has no folder 'wholestep'); "
            "run this from the checkout, or name it with --root"
        )
    from wholestep.dialects.reference import write_all

    written = write_all(args.root)
    for path in written or ():
        print(path)
    return 0
