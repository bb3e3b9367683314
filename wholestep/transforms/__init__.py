"""Transformations of a program, one file each, runnable as passes by name."""

from __future__ import annotations

from . import casts, expand, regenerate

__all__ = ["casts", "expand", "regenerate"]
