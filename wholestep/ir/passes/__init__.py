"""Passes: each a function of a module and options, in a file named like the pass, run by name.

`run_pipeline(module, "cse,dce")` runs them in order; `register_pass` adds one from anyone's code.
"""

from __future__ import annotations

from . import cse, dce
from .registry import PassRun, available, register_pass, run_pipeline

__all__ = ["PassRun", "available", "cse", "dce", "register_pass", "run_pipeline"]
