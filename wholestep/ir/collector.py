"""Pausing Python's cyclic garbage collector while a large graph is built or walked.

The graph is full of cycles that stay alive, so each collection is a walk over everything that finds nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the collector and restores it as it was; nests."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
