"""Every error Wholestep raises on purpose.

Each message names the user's layer or line and the next thing to try; anything else that escapes is a bug of ours.
"""

from __future__ import annotations


class WholestepError(Exception):
    """Base of all errors that Wholestep raises on purpose."""


class IRError(WholestepError):
    """The program text or graph is malformed."""


class ParseError(IRError):
    """Text that is not a well-formed program; the message carries file, line, column and a caret."""

    def __init__(self, message: str, filename: str, line: int, column: int, source_line: str):
        self.filename, self.line, self.column = filename, line, column
        caret = " " * (column - 1) + "^"
        super().__init__(f"{filename}:{line}:{column}: error: {message}\n{source_line}\n{caret}")


class VerifyError(IRError):
    """A program that parses but breaks a rule of its dialect."""


class CaptureError(WholestepError):
    """The model or loss could not be turned into a program."""


class InputError(WholestepError):
    """What was passed to `compile` or to a step does not fit: batch, device, dtype, optimizer."""


class MemoryBudgetError(InputError):
    """No way to run the step fits the memory budget; the message says the least that would do."""


class SavedStepError(InputError):
    """A file that should hold a saved step does not: damaged, edited, or made for another model or optimizer."""


class OptimizerError(WholestepError):
    """The optimizer cannot be part of a static program."""


class DifferentiationError(WholestepError):
    """A gradient is needed through an operation that has none."""


class MismatchError(WholestepError):
    """`verify=True` found a tensor that differs from eager execution."""


class StaleCopyError(WholestepError):
    """A parameter was changed unseen, and a step has used the old low-precision copy of it."""


class LossScaleError(WholestepError):
    """The dynamic loss scale of fp16 training has fallen so far that no update will ever be taken."""
