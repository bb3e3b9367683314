"""Transformations of a program, one file each, runnable as passes by name."""

from __future__ import annotations

from . import expand

__all__ = ["expand"]
