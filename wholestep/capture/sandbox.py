"""What capture must not leave behind, and what it must notice: random state, module attributes, torch's own noise.

A model runs once while it is captured. Its Python side effects are undone here, and where they or Python's random
numbers would change the program from step to step, capture is refused instead of freezing them.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn

from .explain import Place, current_line, is_of_model, is_users, place_of

# ---- random state ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def keep_random_state() -> Iterator[None]:
    """Leaves the random state of torch, Python and numpy as it was."""
    state, python, numpy = torch.get_rng_state(), random.getstate(), _numpy_generator()
    legacy = numpy.get_state() if numpy else None
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    failed = True
    try:
        yield
        failed = False
    finally:
        torch.set_rng_state(state)
        random.setstate(python)
        if numpy:
            numpy.set_state(legacy)
        if cuda is not None:
            # a device that answers nothing any more takes no state either: what broke it is the error to tell
            with contextlib.suppress(RuntimeError) if failed else contextlib.nullcontext():
                torch.cuda.set_rng_state_all(cuda)


def python_random_state() -> tuple[Any, ...]:
    """A value that changes when Python's or numpy's global generator is drawn from."""
    numpy = _numpy_generator()
    if numpy is None:
        return (random.getstate(),)
    kind, keys, position, *rest = numpy.get_state()
    return random.getstate(), kind, keys.tobytes(), position, rest


def _numpy_generator() -> Any:
    """numpy's global generator, where numpy is in use at all."""
    return getattr(sys.modules.get("numpy"), "random", None)


def extreme_draws(high: bool) -> None:
    """Makes the next few hundred draws of Python's and numpy's global generators the lowest or the highest ones."""
    word = _untemper(0xFFFFFFFF) if high else 0
    random.setstate((3, (word,) * 624 + (0,), None))
    numpy = _numpy_generator()
    if numpy:
        numpy.set_state(("MT19937", [word] * 624, 0))


def _untemper(y: int) -> int:
    """The state word of the Mersenne Twister that is output as y."""
    y ^= y >> 18
    y ^= (y << 15) & 0xEFC60000
    x = y
    for _ in range(5):
        x = y ^ ((x << 7) & 0x9D2C5680)
    y = x
    for _ in range(3):
        x = y ^ (x >> 11)
    return x & 0xFFFFFFFF


def random_line(run: Callable[[], Any]) -> Place | None:
    """The user's line on which Python's or numpy's global generator is drawn from, found by running once more."""
    found: list[Place] = []
    state = [python_random_state()]
    last: dict[FrameType, Place] = {}

    def follow(frame: FrameType, event: str, arg: Any) -> Any:
        if found or not is_users(frame.f_code.co_filename):
            return None
        now = python_random_state()
        if now != state[0]:
            found.append(last.get(frame) or place_of(frame))
            return None
        if event == "return":
            last.pop(frame, None)
        else:
            last[frame] = place_of(frame)
        return follow

    before = sys.gettrace()
    sys.settrace(follow)
    try:
        with contextlib.suppress(Exception):
            run()
    finally:
        sys.settrace(before)
    return found[0] if found else None


# ---- what the model is told ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def compiled_not_exported() -> Iterator[None]:
    """`torch.compiler.is_exporting()` answers False to all but torch itself; `is_compiling()` stays True.

    An exported program may meet other lengths, so libraries make it more general than a step needs: transformers then
    builds causal masks instead of asking for causal attention. While they compile they still read no values of the
    batch and fill no caches with traced tensors.
    """
    truth = torch.compiler.is_exporting

    def is_exporting() -> bool:
        code = sys._getframe(1).f_code
        # (TorchScript asks from C++, where the frame is that of a caller who does not speak of exporting)
        return truth() and not (is_users(code.co_filename) and "is_exporting" in code.co_names)

    torch.compiler.is_exporting = is_exporting
    try:
        yield
    finally:
        torch.compiler.is_exporting = truth


@contextlib.contextmanager
def without_value_checks() -> Iterator[None]:
    """`torch.distributions` checks the values of its parameters in Python, unless it is told not to."""
    distribution = torch.distributions.Distribution
    before = distribution._validate_args
    distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        distribution.set_default_validate_args(before)


# ---- attributes of modules -------------------------------------------------------------------------------------------

_CONTAINERS = (list, dict, set, OrderedDict, defaultdict)
_TABLES = ("_parameters", "_buffers", "_modules")


class Attributes:
    """The attributes of a model's modules at one moment: what has changed since, and how to go back."""

    def __init__(self, *roots: Any):
        self.modules = {
            f"{name}.{path}".strip("."): module
            for name, root in roots
            if isinstance(root, nn.Module)
            for path, module in root.named_modules()
        }
        self.saved = {path: _contents(vars(module)) for path, module in self.modules.items()}

    def changes(self) -> dict[tuple[str, str], tuple[Any, Any]]:
        """Attributes that are not parameters, buffers or modules and differ now: (path, name) to (before, now)."""
        found = {}
        for path, module in self.modules.items():
            before, now = self.saved[path], vars(module)
            for name in dict.fromkeys((*before, *now)):
                if name in _TABLES:
                    continue
                old = before[name][0] if name in before else None
                if name not in now or now[name] is not old:
                    found[path, name] = (old, now.get(name))
        return found

    def repeat(self) -> None:
        """Puts the modules into this state, as the next step would find them, but for tensors and their tables."""
        for path, module in self.modules.items():
            for name, (value, contents) in self.saved[path].items():
                if name in _TABLES or isinstance(value, torch.Tensor):
                    continue
                vars(module)[name] = value
                if contents is not None:
                    _refill(value, contents)

    def restore(self) -> None:
        for path, module in self.modules.items():
            saved, now = self.saved[path], vars(module)
            for name in [n for n in now if n not in saved]:
                del now[name]
            for name, (value, contents) in saved.items():
                now[name] = value
                if contents is not None:
                    _refill(value, contents)


def _contents(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Each attribute with, for a plain container, a copy of what it holds."""
    return {k: (v, v.copy() if type(v) in _CONTAINERS else None) for k, v in attributes.items()}


def _refill(container: Any, contents: Any) -> None:
    if isinstance(container, list):
        container[:] = contents
    elif isinstance(container, set) or [*map(id, container.values())] != [*map(id, contents.values())]:
        container.clear()
        container.update(contents)


# ---- noise -----------------------------------------------------------------------------------------------------------

_LOGGERS = ("torch.export", "torch.fx", "torch._dynamo", "torch._export", "torch._subclasses")


def keep_of_model(said: dict[str, tuple[Any, ...]], message: Any, category: Any, file: str, line: int, *_: Any) -> None:
    """Keeps a warning if a layer or a loss gives it, with the user's line; it stands in for `warnings.showwarning`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == warnings.__file__:
        frame = frame.f_back
    if frame is not None and is_of_model(frame.f_code.co_filename):
        place = current_line()
        said.setdefault(str(message), (message, category, *((place.file, place.line) if place else (file, line))))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """torch.export warns, logs and prints whole graphs when it fails; what the user needs is in our error."""
    if os.environ.get("WHOLESTEP_TRACE"):
        yield
        return
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    printed = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(printed):
            warnings.simplefilter("always")
            said: dict[str, tuple[Any, ...]] = {}
            warnings.showwarning = partial(keep_of_model, said)
            yield
        for message, category, filename, line in said.values():
            warnings.warn_explicit(message, category, filename, line)
        if printed.getvalue():
            print(printed.getvalue(), end="", file=sys.stderr)  # nothing failed: it was the user's
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
