"""Running a program: the executor and `TrainStep`."""

from __future__ import annotations
