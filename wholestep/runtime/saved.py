"""`step.save` and `ws.load`: a compiled step as one readable file of JSON, with the program as MLIR text.

A file holds no code and no weights. Reading it runs nothing of it: no pickle, no import of a name, only operators of
PyTorch on tensors, every claim checked against the model and the optimizer that are given.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from ..capture.capture import OUTSIDE, named_state
from ..capture.reads import names_read, outside_tensors
from ..capture.structure import PLAIN_CONTAINERS, class_name, containers_of, from_plain, short, to_plain, unflatten
from ..dialects.step import torch_dtype
from ..errors import InputError, SavedStepError, WholestepError
from ..training.build import Program
from ..training.optimizer_plan import OptimizerPlan
from ..training.optimizers import plan_optimizer
from .saved_fingerprint import check_constants, check_fingerprints, model_fingerprint, optimizer_fingerprint
from .saved_program import Setting, program_from_plain, program_to_plain

FORMAT, VERSION = "wholestep step", 1
LARGEST_FILE = 1 << 30
MOST_PROGRAMS = 1024
AGAIN = "Try: save the step again with step.save(path), or compile it with ws.compile"


@dataclass(slots=True)
class SavedStep:
    """What a file gave: programs bound to the given model, the optimizer's plan, the options and decisions."""

    programs: list[Program]
    plan: OptimizerPlan
    options: dict[str, Any]
    decisions: list[dict[str, Any]]
    #: the nesting of a batch, with zeros that take no memory
    example_batch: Any


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_step(
    path: str | os.PathLike[str],
    programs: Sequence[Program],
    plan: OptimizerPlan,
    options: dict[str, Any],
    model: nn.Module,
    loss_fn: Any,
    optimizer: torch.optim.Optimizer,
    decisions: Sequence[dict[str, Any]] = (),
) -> None:
    """Writes programs (variants by the shape of the batch) that fit the model and optimizer as they are now.

    SavedStepError where a program cannot be saved. The file appears whole or not at all.
    """
    from .. import __version__

    content = {
        "made_with": {"wholestep": __version__, "torch": torch.__version__},
        "options": plain_values(options, "options"),
        "decisions": plain_values(list(decisions), "decisions"),
        "made_for": {
            "model": model_fingerprint(model, loss_fn),
            "optimizer": optimizer_fingerprint(optimizer, plan),
        },
        "programs": [program_to_plain(p) for p in programs],
    }
    found = [c for p in programs for s in (p.captured.exported,) for c in containers_of(s.batch_structure)]
    found += [c for p in programs for s in (p.captured.exported,) for c in containers_of(s.output_structure)]
    with reading(str(path), "the step cannot be saved", "Try: train with it as it is, and report this"):
        bind(content, plan, model, loss_fn, optimizer, found, str(path))  # what is written can be read
    whole = {"format": FORMAT, "version": VERSION, "sha256": digest(content), "content": content}
    write_whole(Path(path), json.dumps(whole, indent=1, allow_nan=False) + "\n")


def digest(content: Any) -> str:
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def plain_values(value: Any, where: str) -> Any:
    """Options as JSON has them; infinite numbers as text."""
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {k: plain_values(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(v, where) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return to_plain(value)
    raise SavedStepError(f"the step cannot be saved: {where} is a {type(value).__name__}, which is no plain value")


def given_values(value: Any) -> Any:
    """The inverse of `plain_values`."""
    if isinstance(value, list):
        return [given_values(v) for v in value]
    if isinstance(value, dict) and set(value) != {"float"}:
        return {k: given_values(v) for k, v in value.items()}
    return from_plain(value, {})


def write_whole(path: Path, text: str) -> None:
    """Writes a file beside the path and puts it in place at once; writers at the same time do not meet."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(beside, "x", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        raise SavedStepError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        beside.unlink(missing_ok=True)


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_step(
    path: str | os.PathLike[str],
    model: nn.Module,
    loss_fn: Any,
    optimizer: torch.optim.Optimizer,
    containers: Sequence[type] = (),
) -> SavedStep:
    """Reads a saved step for this model, loss and optimizer; nothing is captured, traced or run.

    `containers`: classes of batches and outputs other than tuples, lists and dictionaries; names in a file are never
    looked up. SavedStepError says what is wrong with the file, or what differs from what it was saved for.
    """
    for given, kind in ((model, nn.Module), (optimizer, torch.optim.Optimizer)):
        if not isinstance(given, kind):
            raise InputError(f"ws.load needs a {kind.__name__}, not a {type(given).__name__}")
    content = read_content(Path(path))
    plan = plan_optimizer(optimizer, named_state(model, loss_fn)[0])
    with reading(str(path)):
        return bind(content, plan, model, loss_fn, optimizer, containers, str(path))


@contextmanager
def reading(path: str, what: str = "the saved step is damaged", hint: str = AGAIN) -> Iterator[None]:
    """Whatever goes wrong while a program from a file is made ready is the file's fault, and says so."""
    try:
        yield
    except SavedStepError as error:
        if str(error).startswith((path, "the step cannot be saved")):
            raise
        raise SavedStepError(f"{path}: {what}: {error}\n{hint}") from error
    except (
        WholestepError,
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise SavedStepError(f"{path}: {what}: {type(error).__name__}: {short_text(error)}\n{hint}") from error


def short_text(error: BaseException) -> str:
    text = str(error)
    return text if len(text) < 2000 else text[:2000] + " ..."


def read_content(path: Path) -> dict[str, Any]:
    """The content of a file whose form, version and checksum are right."""
    text = read_text(path)
    try:
        whole = json.loads(text, parse_constant=not_json)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else short_text(error)
        raise SavedStepError(
            f"{path} is not a saved step: it is no JSON, or was cut short ({reason}).\n{AGAIN}"
        ) from error
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise SavedStepError(
            f"{path} is not a saved step: it does not say it is one.\nTry: a file that step.save wrote"
        )
    if whole.get("version") != VERSION:
        raise SavedStepError(
            f"{path} has version {short(whole.get('version'))} of the format; this Wholestep reads version {VERSION}.\n"
            f"{AGAIN}"
        )
    content = whole.get("content")
    try:
        found = digest(content)
    except (RecursionError, ValueError) as error:
        raise SavedStepError(f"{path}: the content cannot be read: {error}.\n{AGAIN}") from error
    if found != whole.get("sha256"):
        raise SavedStepError(
            f"{path} was changed or damaged: its content does not have the checksum it states.\n{AGAIN}"
        )
    keys = {"made_with", "options", "decisions", "made_for", "programs"}
    if not isinstance(content, dict) or set(content) != keys:
        raise SavedStepError(f"{path} is damaged: its content is not {', '.join(sorted(keys))}.\n{AGAIN}")
    return content


def not_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def read_text(path: Path) -> str:
    try:
        if not path.exists():
            raise SavedStepError(f"{path} does not exist")
        if not path.is_file():
            raise SavedStepError(f"{path} is not a file")
        size = path.stat().st_size
        if size > LARGEST_FILE:
            raise SavedStepError(f"{path} has {size} bytes; a saved step has at most {LARGEST_FILE}")
        data = path.read_bytes()
    except OSError as error:
        raise SavedStepError(f"{path} cannot be read: {error.strerror or error}") from error
    if not data:
        raise SavedStepError(f"{path} is empty.\n{AGAIN}")
    try:
        return data.decode("ascii")
    except UnicodeDecodeError as error:
        raise SavedStepError(f"{path} is not a saved step: it is not text (byte {error.start}).\n{AGAIN}") from error


def bind(
    content: dict[str, Any],
    plan: OptimizerPlan,
    model: nn.Module,
    loss_fn: Any,
    optimizer: torch.optim.Optimizer,
    containers: Sequence[type],
    path: str,
) -> SavedStep:
    """The programs of a file with the tensors of this model."""
    check_fingerprints(
        content["made_for"], model_fingerprint(model, loss_fn), optimizer_fingerprint(optimizer, plan), path
    )
    parameters, buffers, _ = named_state(model, loss_fn)
    device = next(iter(parameters.values())).device
    known = {class_name(c): c for c in containers if c not in PLAIN_CONTAINERS}
    outside = {f"{OUTSIDE}{name}": t for name, t in outside_tensors(names_read(loss_fn)).items()}
    setting = Setting(parameters, buffers, plan, device, known, outside)
    listed, options, decisions = content["programs"], content["options"], content["decisions"]
    if not isinstance(listed, list) or not 0 < len(listed) <= MOST_PROGRAMS:
        raise SavedStepError("it holds no list of programs")
    if not isinstance(options, dict) or not isinstance(decisions, list):
        raise SavedStepError("its options or decisions have another form")
    if not all(isinstance(d, dict) and isinstance(d.get("name"), str) for d in decisions):
        raise SavedStepError("a decision has no name")
    programs = [program_from_plain(p, setting) for p in listed]
    for program in programs:
        check_constants(program.captured.constants, model, loss_fn, path)
    return SavedStep(programs, plan, given_values(options), given_values(decisions), example_batch(programs[0], device))


def example_batch(program: Program, device: torch.device) -> Any:
    """The nesting of a batch, with zeros that take no memory."""
    types = {s.source[1]: s.type for s in program.slots if s.kind == "batch"}
    interface = program.captured.exported
    tensors = []
    for index in range(len(interface.batch_names)):
        known = types.get(index)
        dtype, shape = (torch_dtype(known.element), known.shape) if known else (torch.float32, ())
        tensors.append(torch.zeros((), dtype=dtype, device=device).expand(shape))
    return unflatten(interface.batch_structure, tensors)
