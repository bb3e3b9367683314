"""Capture: a PyTorch model and its loss in, a forward program in the step dialect out."""

from __future__ import annotations
