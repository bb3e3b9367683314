"""Runs torch.export on a model and its loss, and turns whatever goes wrong into one error that names the user's line."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import CaptureError, InputError, WholestepError
from .layerdrop import RandomBranches
from .structure import find_loss, flatten, unflatten


@dataclass(slots=True)
class Exported:
    """What torch.export gave, and how its inputs and outputs are arranged."""

    program: Any
    batch_names: list[str]
    batch_structure: Any
    output_structure: Any
    output_names: list[str]
    loss_index: int


class Wrapper(nn.Module):
    """The function that is captured: flat batch tensors in, flat output tensors out."""

    def __init__(self, model: nn.Module, loss_fn: Any, call: Callable[..., Any], structure: Any, notes: dict[str, Any]):
        super().__init__()
        self.model = model
        if isinstance(loss_fn, nn.Module):
            self.loss_fn = loss_fn
        self._call = call
        self._structure = structure
        self._notes = notes
        self.training = model.training  # not .train(): the user's submodules keep their modes

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        result = self._call(unflatten(self._structure, tensors))
        loss, _ = find_loss(result)
        if not isinstance(loss, torch.Tensor):
            raise InputError(f"the loss is a {type(loss).__name__}, not a tensor")
        flat: list[torch.Tensor] = []
        names: list[str] = []
        self._notes["structure"] = flatten(result, flat, names)
        self._notes["names"] = names
        places = [i for i, t in enumerate(flat) if t is loss]
        self._notes["loss"] = places[0]
        return flat


def calling_convention(model: nn.Module, loss_fn: Any, batch: Any) -> Callable[[Any], Any]:
    """How a batch goes through model and loss.

    No loss_fn: the model returns the loss, alone or as `.loss`. A loss module, or a function with at most as many
    required parameters as the batch has parts: `loss_fn(model(*inputs), *targets)`, targets being the last parts.
    Otherwise `loss_fn(model, *batch)`. Batches that are mappings are passed by keyword.
    """
    if isinstance(batch, Mapping):
        if loss_fn is None:
            return lambda b: _only_loss(model(**b))
        required, names, open_ended = _parameters(loss_fn)
        if len(required) == 2 and not open_ended and required[1] not in batch:
            return lambda b: loss_fn(model, b)
        if open_ended or all(n in batch for n in required[1:]):
            return lambda b: loss_fn(model, **b)
        raise InputError(
            f"loss_fn takes {names} but the batch has the keys {list(batch)}; write loss_fn(model, batch) or "
            "loss_fn(model, **batch)"
        )
    if loss_fn is None:
        return lambda b: _only_loss(model(*b))
    required, names, open_ended = _parameters(loss_fn)
    count = len(batch)
    if isinstance(loss_fn, nn.Module):
        targets = max(0, len(required) - 1)
        return lambda b: loss_fn(model(*b[: count - targets]), *b[count - targets :])
    if open_ended or len(required) == count + 1:
        return lambda b: loss_fn(model, *b)
    if 1 <= len(required) <= count:
        targets = len(required) - 1
        return lambda b: loss_fn(model(*b[: count - targets]), *b[count - targets :])
    raise InputError(
        f"loss_fn takes {len(required)} arguments ({', '.join(names)}) and the batch has {count} parts; expected "
        f"loss_fn(model, *batch) with {count + 1} arguments or loss_fn(output, target) with at most {count}"
    )


def _only_loss(result: Any) -> Any:
    """Without a loss function only the loss is kept: the model's other outputs need not outlive the step."""
    return find_loss(result)[0]


def _parameters(loss_fn: Any) -> tuple[list[str], list[str], bool]:
    """Names of required and of all positional parameters, and whether more are accepted."""
    target = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return ["output", "target"], ["output", "target"], False
    positional = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    open_ended = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in signature.parameters.values())
    required = [p.name for p in positional if p.default is p.empty]
    return required, [p.name for p in positional], open_ended


def export(model: nn.Module, loss_fn: Any, batch: Any) -> Exported:
    """Captures model and loss on this batch. The model, the batch and the random state are left as they were."""
    tensors: list[torch.Tensor] = []
    names: list[str] = []
    structure = flatten(batch, tensors, names)
    notes: dict[str, Any] = {}
    call = calling_convention(model, loss_fn, batch)
    wrapper = Wrapper(model, loss_fn, call, structure, notes)
    inputs = tuple(t.detach() for t in tensors)
    branches = RandomBranches()
    with _quiet(), _keep_random_state(), torch.enable_grad():
        try:
            with branches:
                program = torch.export.export(wrapper, inputs, strict=False)
        except WholestepError:
            raise
        except Exception as error:
            raise explain(error, branches) from (error if os.environ.get("WHOLESTEP_TRACE") else None)
    return Exported(program, names, structure, notes["structure"], notes["names"], notes["loss"])


@contextlib.contextmanager
def _keep_random_state() -> Iterator[None]:
    state = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        torch.set_rng_state(state)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch.export logs whole graphs when it fails; what the user needs is in our error."""
    loggers = [logging.getLogger(name) for name in ("torch.export", "torch.fx", "torch._dynamo", "torch._export")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@dataclass(frozen=True, slots=True)
class Advice:
    """A kind of failure: how to recognise it, what it is, what to write instead."""

    marks: tuple[str, ...]
    what: str
    instead: str
    kinds: tuple[str, ...] = field(default=())


ADVICE = (
    Advice(
        ("data-dependent", "GuardOnDataDependent", "Could not guard", "unbacked", "Could not extract specialized"),
        "a Python decision (if, while, int(), .item()) depends on the values in a tensor",
        "compute both branches and choose with torch.where, or make the decision outside the model",
    ),
    Advice(
        ("bool() on", "truth value", "__bool__"),
        "a tensor is used as a Python condition",
        "choose with torch.where, or decide outside the model",
    ),
    Advice(
        ("numpy", "numpy()"),
        "a tensor leaves torch for numpy",
        "stay with torch operations, or do it before the step",
    ),
    Advice(
        ("does not have a fake impl", "no fake impl", "Unsupported operator", "not supported on fake", "meta kernel"),
        "an operator has no shape function, so it cannot be captured",
        "register one with torch.library.register_fake, or replace the operator",
    ),
    Advice(
        ("deepcopy", "pickle", "generator"),
        "Python that cannot be captured",
        "move it out of forward",
    ),
)


def explain(error: Exception, branches: RandomBranches) -> CaptureError:
    """One error of ours: the user's file and line, what was met there, what to write instead."""
    place = user_line(error)
    text = first_line(error)
    at = f"{place[0]}:{place[1]} in {place[2]}\n    {place[3]}\n" if place else ""
    if branches.undecided:
        what, instead = branches.explanation()
    else:
        found = next((a for a in ADVICE if any(m in f"{type(error).__name__} {error}" for m in a.marks)), None)
        if found is None and not type(error).__module__.startswith("torch._"):
            return CaptureError(f"{at}the model failed while it was captured: {type(error).__name__}: {text}")
        what = found.what if found else text
        instead = found.instead if found else "see docs/capture.md for what can be captured"
    return CaptureError(
        f"{at}cannot be captured: {what}.\nTry: {instead}.\n(torch says: {text}; set WHOLESTEP_TRACE=1 for its trace)"
    )


def first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def user_line(error: BaseException) -> tuple[str, int, str, str] | None:
    """The innermost frame of the error that lies outside torch and Wholestep."""
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    torch_home = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
    frames: list[Any] = []
    seen: BaseException | None = error
    while seen is not None:
        frames = [*traceback.extract_tb(seen.__traceback__)] or frames
        outside = [f for f in frames if not f.filename.startswith((own, torch_home, "<"))]
        if outside and "contextlib" not in outside[-1].filename:
            last = outside[-1]
            return last.filename, last.lineno or 0, last.name, last.line or ""
        seen = seen.__cause__ or seen.__context__
    return None
