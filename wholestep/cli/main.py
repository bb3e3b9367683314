"""Entry point of `wholestep`: picks a command, runs it, and prints errors of ours as one clean message.

A command's module is imported when the command is chosen, so `--help` is quick.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from wholestep.errors import WholestepError

COMMANDS = {
    "demo": "train a small GPT eagerly and compiled, side by side, for about a minute",
    "explain": "say where every byte of a training step goes, of a script or a saved step",
    "bench": "time training steps against eager PyTorch and torch.compile, each in a process of its own",
    "opt": "run passes on program text, like mlir-opt",
    "doctor": "say what this machine can do and what is missing",
    "cache": "say what is kept of measured kernels, show it, clear it",
    "docs": "write the generated reference pages",
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    rest: list[str] = []
    if arguments[:1] == ["explain"] and "--" in arguments:  # what follows belongs to the script that is explained
        split = arguments.index("--")
        arguments, rest = arguments[:split], arguments[split + 1 :]
    parser, commands = _parser(arguments)
    args, strange = parser.parse_known_args(arguments)
    if strange:
        hint = " (those of the script go after a --)" if args.command == "explain" else ""
        commands.get(args.command, parser).error(f"unrecognized arguments: {' '.join(strange)}{hint}")
    args.rest = rest
    if args.command is None:
        parser.print_help()
        return 2
    try:
        return import_module(f"wholestep.cli.{args.command}").run(args)
    except WholestepError as error:
        if args.traceback:
            raise
        print(error, file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader (head, less) has gone; give Python a place to flush to when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def _parser(arguments: Sequence[str]) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser, and those of commands: all but the one that was named are known by name and help line alone."""
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    parser = argparse.ArgumentParser(
        prog="wholestep", description="Compiles a whole PyTorch training step into one static program."
    )
    parser.add_argument("--version", action="version", version=f"wholestep {_version()}")
    parser.set_defaults(traceback=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        command.add_argument("--traceback", action="store_true", help="show where in Wholestep an error came from")
        if name == chosen:
            import_module(f"wholestep.cli.{name}").add_arguments(command)
    return parser, commands.choices


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("wholestep")
    except metadata.PackageNotFoundError:
        return "(from a checkout)"


if __name__ == "__main__":
    sys.exit(main())
