"""What could not be captured, in one error: the user's file and line, what was met there and what to write instead.

`explain` reads an error of torch.export; `refuse` is for what capture itself notices while the model runs.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from ..errors import CaptureError

GUIDE = "docs/capture.md"


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the user's code."""

    file: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}\n    {self.text}\n"


@dataclass(frozen=True, slots=True)
class Advice:
    """A kind of failure: how to recognise it, what it is, what to write instead."""

    marks: tuple[str, ...]
    what: str
    instead: str


ADVICE = (
    Advice(
        ("data-dependent", "GuardOnDataDependent", "Could not guard", "unbacked", "Could not extract specialized"),
        "a Python decision or size (if, while, range(), int(), .item()) depends on the values in a tensor",
        "compute both branches and choose with torch.where, or make the decision outside the model",
    ),
    Advice(
        ("bool() on", "truth value", "__bool__"),
        "a tensor is used as a Python condition",
        "choose with torch.where, or decide outside the model",
    ),
    Advice(
        (".numpy()", "to a NumPy", "to numpy", "not supported for tensor subclasses"),
        "a tensor leaves torch for numpy",
        "stay with torch operations, or do it before the step",
    ),
    Advice(
        ("but got FakeTensor",),
        "a size is made of the values in a tensor, as pack_padded_sequence does with its lengths",
        "pad to one length and mask what is too much, in the loss or with torch.where",
    ),
    Advice(
        ("FakeTensor.__format__",),
        'a tensor is formatted as a number (f"{x:.2f}"), and its value is known only while a step runs',
        "return the tensor from loss_fn beside the loss, and print what step(...) returns",
    ),
    Advice(
        ("UnsupportedOperator", "does not have a fake impl", "no fake impl", "not supported on fake", "meta kernel"),
        "an operator has no shape function, so its result is unknown before it runs",
        "register one with torch.library.register_fake, or replace the operator",
    ),
    Advice(
        ("same dtype", "expected scalar type", "dtype mismatch", "to have the same dtype"),
        "tensors of different dtypes meet in one operation",
        "bring the batch to the model's dtype (batch.to(torch.float32)), or the model to the batch's (model.to(...))",
    ),
    Advice(
        ("FakeTensor Device Propagation", "on different device", "on the same device"),
        "tensors on different devices meet in one operation",
        "create tensors on the device of their neighbours (device=x.device), or make them buffers of the model",
    ),
    Advice(
        ("DynamicOutputShape",),
        "the shape of an operator's result is not known before it runs",
        "replace the operator, or mask with torch.where instead of selecting",
    ),
    Advice(
        ("_apply(): Couldn't swap",),
        "a module is moved or converted (.to(), .half()) inside forward",
        "convert it once, before the step is compiled",
    ),
    Advice(
        ("fake tensor in the exported program constant",),
        "gradients are taken inside the model (torch.autograd.grad), .data of a parameter is read or replaced there, "
        "or a tensor of an earlier capture is read",
        "write the derivative with ordinary operations; change a frozen parameter with p.mul_() or p.copy_() under "
        "torch.no_grad()",
    ),
)


def explain(error: Exception, branches: Any = None, paths: Mapping[int, str] | None = None) -> CaptureError:
    """One error of ours for whatever torch.export raised. paths: the layers of the model, by the id of their module."""
    place = user_line(error)
    text = first_line(error)
    if branches is not None and branches.undecided:
        what, instead = branches.explanation()
    else:
        found = next((a for a in ADVICE if any(m in f"{type(error).__name__} {error}" for m in a.marks)), None)
        if found is None and not type(error).__module__.startswith("torch._"):
            where = failed_layer(error, paths or {})
            return CaptureError(
                f"{place or ''}the model failed while it was captured{where}: {type(error).__name__}: {text}\n"
                "Try: call it eagerly on the example batch: what fails there as well is no matter of compiling"
            )
        what = found.what if found else text
        instead = found.instead if found else f"see {GUIDE} for what can be captured"
    said = f"torch says: {text}; set WHOLESTEP_TRACE=1 for its trace"
    return CaptureError(f"{place or ''}cannot be captured: {what}.\nTry: {instead}.\n({said}; see {GUIDE})")


def refuse(what: str, instead: str, place: Place | None) -> CaptureError:
    """The error for something capture noticed itself."""
    return CaptureError(f"{place or ''}cannot be captured: {what}.\nTry: {instead}.\n(see {GUIDE})")


def first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def user_line(error: BaseException) -> Place | None:
    """The innermost frame of the error (or of what caused it) that is the user's."""
    seen: BaseException | None = error
    while seen is not None:
        for frame in reversed(traceback.extract_tb(seen.__traceback__)):
            if is_users(frame.filename):
                return Place(frame.filename, frame.lineno or 0, frame.name, frame.line or "")
        seen = seen.__cause__ or seen.__context__
    return None


def failed_layer(error: BaseException, paths: Mapping[int, str]) -> str:
    """` in layer head (Linear)`: the innermost layer whose forward was running; empty where there is none."""
    found, step = "", error.__traceback__
    while step is not None:
        module = step.tb_frame.f_locals.get("self")
        if step.tb_frame.f_code.co_name == "forward" and paths.get(id(module)):
            found = f", in layer {paths[id(module)]} ({type(module).__name__})"
        step = step.tb_next
    return found


def current_line() -> Place | None:
    """The user's line that is running now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return place_of(frame)
        frame = frame.f_back
    return None


def forward_line(module: Any) -> Place | None:
    """Where a module's forward begins, for what is not one line's doing."""
    code = getattr(getattr(type(module), "forward", None), "__code__", None)
    if code is None or not is_users(code.co_filename):
        return None
    text = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return Place(code.co_filename, code.co_firstlineno, f"{type(module).__name__}.forward", text)


def in_torch_check() -> bool:
    """Whether torch._check or one of its kin is running: what it reads is only asserted."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        if frame.f_code.co_name.startswith("_check") and frame.f_code.co_filename.startswith(_TORCH):
            return True
        frame = frame.f_back
    return False


def place_of(frame: FrameType) -> Place:
    code, line = frame.f_code, frame.f_lineno
    return Place(code.co_filename, line, code.co_name, linecache.getline(code.co_filename, line).strip())


_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PYTHON = sysconfig.get_path("stdlib") + os.sep


def is_of_model(filename: str) -> bool:
    """Whether a file is the user's or has torch's layers and losses."""
    return is_users(filename) or filename.startswith(_TORCH + "nn" + os.sep)


def is_users(filename: str) -> bool:
    """Whether a file is neither torch's, nor ours, nor Python's own."""
    if filename.startswith((_OWN, _TORCH, "<")):
        return False
    return not filename.startswith(_PYTHON) or "site-packages" in filename or "dist-packages" in filename
