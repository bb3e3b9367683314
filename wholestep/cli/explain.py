"""`wholestep explain FILE`: where every byte of a training step goes.

A saved step is read as data: its program is planned as `ws.load` would, without timing kernels, and priced; nothing of
it runs. A Python script runs as `__main__`
until its first compiled step has been called `--steps` times; then it is stopped there and the step's report printed.
An ONNX model is trained for `--steps` steps on a made-up batch.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from wholestep.errors import InputError, WholestepError
from wholestep.machine.description import Description, load_description

if TYPE_CHECKING:
    from wholestep.plan.planner import Planned


class Stop(BaseException):
    """Ends the script; no `except Exception` of it can hold this."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", help="a Python script, a file that step.save wrote, or an ONNX model (.onnx)"
    )
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON")
    parser.add_argument("--html", metavar="FILE", help="write one HTML file with charts")
    parser.add_argument("--machine", metavar="NAME", help="price the step on a described machine (h200, or a file)")
    parser.add_argument("--steps", type=int, default=1, metavar="N", help="stop a script after N steps (default 1)")
    parser.add_argument(
        "--bind", action="append", default=[], metavar="NAME=SIZE", help="size of a symbolic dimension of an ONNX model"
    )
    parser.epilog = "What follows a -- is given to the script."


def run(args: argparse.Namespace) -> int:
    path = Path(args.file)
    if args.steps < 1:
        raise InputError(f"--steps must be a positive number, not {args.steps}")
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is not there"
        raise InputError(f"{path} {what}: give a Python script, a file that step.save wrote, or an ONNX model")
    if args.bind and path.suffix != ".onnx":
        raise InputError(f"--bind gives sizes to an ONNX model, and {path} is none. Try: without --bind")
    for file in filter(None, (args.json, args.html)):  # first: a script may take long
        if Path(file).is_dir() or not Path(file).parent.is_dir():
            why = "it is a folder" if Path(file).is_dir() else f"there is no folder {Path(file).parent}"
            raise InputError(f"{file} cannot be written: {why}. Try: another FILE")
    machine = load_description(args.machine) if args.machine else None
    if path.suffix in (".py", ".pyw"):
        text, as_json, as_html = explain_script(path, args.rest, args.steps, machine)
    elif path.suffix == ".onnx":
        text, as_json, as_html = explain_onnx(path, args.bind, args.steps, machine)
    elif looks_saved(path):
        text, as_json, as_html = explain_saved(path, machine)
    else:
        raise InputError(
            f"{path} is neither a Python script (.py) nor an ONNX model (.onnx) nor a saved step.\n"
            "Try: a file with one of these endings, or one that step.save wrote"
        )
    print(text)
    for file, content in ((args.json, as_json), (args.html, as_html)):
        if file:
            write(file, content)
    return 0


def write(file: str, content: str) -> None:
    try:
        Path(file).write_text(content, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror or error}. Try: another FILE") from None
    print(f"written: {file}", file=sys.stderr)


def looks_saved(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(64).lstrip().startswith(b"{")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}. Try: another FILE") from None


# ---- a saved step ----------------------------------------------------------------------------------------------------


def explain_saved(path: Path, machine: Description | None) -> tuple[str, str, str]:
    """Text, JSON and HTML of the program in a file that was used last."""
    import json

    from wholestep.cost import movement_of
    from wholestep.cost.html import page
    from wholestep.runtime.fusions import recipe_of
    from wholestep.runtime.report import done_rows, recipe_lines
    from wholestep.runtime.saved import read_content, reading

    content = read_content(path)
    with reading(str(path)):
        planned, note = plan_saved(content)
        movement = movement_of(planned, machine, note)
        recipe = [*[str(d["name"]) for d in content["decisions"]], *recipe_of(planned)]
    lines = [f"{path}: a step saved by Wholestep {content['made_with'].get('wholestep')}"]
    if len(content["programs"]) > 1:
        count = len(content["programs"])
        lines.append(f"it holds {count} programs, one per shape of the batch; this is the one used last")
    text = "\n".join([*lines, *recipe_lines(recipe), str(movement)])
    plain = movement.to_dict() | {"recipe": recipe}
    return text, json.dumps(plain, indent=1) + "\n", page(movement, path.name, None, text, done_rows(recipe))


def plan_saved(content: dict[str, Any]) -> tuple[Planned, str]:
    """The plan of the program that was used last, as `ws.load` would make it, and what is to be said of it.

    Who runs a region is what was measured on this machine, or the best guess where nothing was: no kernel is timed. As
    the model is not at hand, its tensors count as lying row by row.
    """
    import torch

    from wholestep.api import attentions_of, choices_of
    from wholestep.cost.counting import host_arguments
    from wholestep.options import Options
    from wholestep.plan.planner import planned_function
    from wholestep.runtime.saved import given_values
    from wholestep.runtime.saved_program import program_text
    from wholestep.transforms.fusion_wishes import Wishes
    from wholestep.transforms.layout import own_strides

    saved = content["programs"][-1]
    module, function = program_text(saved["text"], saved["entry"])
    options = replace(Options.from_json(given_values(content["options"])), tune=False)
    on_gpu, here = "cuda" in content["made_for"]["model"]["device"], torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu and here else "cpu")
    notes = ["the bytes are those of its plan for a " + ("GPU" if device.type == "cuda" else "CPU")]
    if on_gpu and not here:
        notes.append("the GPU it was saved for is not here")
        options = replace(options, providers=None, recipe=(), force=(), forbid=())
    step: Any = SimpleNamespace(options=options, lost=set(), choices=None)  # what is asked of a step here
    try:
        choices = choices_of(step, device)
    except InputError as error:  # a provider of the user's own
        choices, step.options = None, replace(options, providers=("aten",))
        notes.append(str(error))
    attentions_of(step, SimpleNamespace(module=module), device)  # type: ignore[arg-type]
    notes.append("ATen runs every op" if choices is None else "kernels that were not timed on this machine are guessed")
    if not options.level:
        notes.append("though the reference executor runs the step")
    if options.late:
        notes.append("updates are counted in their own step, though they wait for the next forward")
    laid = own_strides(function)
    strides = [laid.get(i) for i in range(len(function.regions[0].block.arguments))]
    wishes = Wishes() if choices is None else Wishes.among(options.recipe, options.force, options.forbid)
    numbers = host_arguments(function)
    return planned_function(function, device, numbers, strides, choices=choices, wishes=wishes), "; ".join(notes)


# ---- an ONNX model ---------------------------------------------------------------------------------------------------


def explain_onnx(path: Path, bindings: Sequence[str], steps: int, machine: Description | None) -> tuple[str, str, str]:
    """Trains a model of a file on a made-up batch; text, JSON and HTML of the step's report."""
    import torch

    import wholestep as ws
    from wholestep.onnx import example

    sizes = {}
    for binding in bindings:
        name, _, size = binding.rpartition("=")
        if not name or not size.isdigit() or not int(size):
            raise InputError(f"--bind takes NAME=SIZE, such as batch=8, not {binding!r}")
        sizes[name] = int(size)
    model, loss_fn, batch = example(path, sizes)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise InputError(f"{path} has no parameters to train: see docs/onnx.md for what counts as one")
    step = ws.compile(model, loss_fn, torch.optim.AdamW(parameters), batch)
    for _ in range(steps):
        step(*batch)
    return rendered(step, machine)


# ---- a script --------------------------------------------------------------------------------------------------------


def explain_script(
    path: Path, arguments: Sequence[str], steps: int, machine: Description | None
) -> tuple[str, str, str]:
    """Runs the script until its first step has run; text, JSON and HTML of that step's report."""
    return rendered(first_step(path, arguments, steps), machine)


def rendered(step: Any, machine: Description | None) -> tuple[str, str, str]:
    """A step's report as text, JSON and HTML, priced on a described machine where one is given."""
    from wholestep.runtime.report import report_of

    report = report_of(step)
    if machine is not None and report.movement is not None:
        report.movement.price(machine)
    return str(report), report.rendered("json"), report.rendered("html")


def first_step(path: Path, arguments: Sequence[str], steps: int) -> Any:
    """The first compiled step of a script, after it has run a few times or the script has ended."""
    seen: list[Any] = []
    with watched_steps(seen, steps), as_main(path, arguments):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except Stop:
            pass
        except SystemExit as end:
            if not seen and end.code not in (None, 0):
                raise InputError(f"{path} ended with {end.code!r} before it compiled a step") from end
        except WholestepError:
            raise
        except Exception as error:
            if not seen or not seen[0]._variants:
                raise InputError(
                    f"{path} failed before a step was compiled: {type(error).__name__}: {error}\n"
                    f"Try: run it with python {path} first, or see where it failed with --traceback"
                ) from error
            print(f"{path} stopped with {type(error).__name__}: {error}", file=sys.stderr)
    if not seen or not seen[0]._variants:
        raise InputError(
            f"{path} ended without compiling a step: explain looks for a call of ws.compile (or ws.load) in a script.\n"
            f"Try: a script that trains; what it takes is given after --: wholestep explain {path} -- ARGUMENTS"
        )
    return seen[0]


@contextmanager
def watched_steps(seen: list[Any], steps: int) -> Iterator[None]:
    """While the block runs, notes each step that is made and stops the script after the first has run enough."""
    from wholestep.runtime.train_step import TrainStep

    make, call = TrainStep.__init__, TrainStep.__call__

    def noted_init(self: TrainStep, *args: Any, **named: Any) -> None:
        make(self, *args, **named)
        seen.append(self)

    def noted_call(self: TrainStep, *batch: Any, **named: Any) -> Any:
        result = call(self, *batch, **named)
        if self is seen[0] and len(self._durations) >= steps:
            raise Stop
        return result

    TrainStep.__init__, TrainStep.__call__ = noted_init, noted_call  # type: ignore[method-assign]
    try:
        yield
    finally:
        TrainStep.__init__, TrainStep.__call__ = make, call  # type: ignore[method-assign]


@contextmanager
def as_main(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    """The arguments and import path a script has when Python runs it."""
    kept_arguments, kept_path = sys.argv, list(sys.path)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, os.fspath(path.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = kept_arguments, kept_path
