"""Slots are shared with capture, where arguments are first named."""

from __future__ import annotations

from ..capture.slots import Slot

__all__ = ["Slot"]
