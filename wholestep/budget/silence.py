"""Keeps lines off standard output that HiGHS prints whatever it is told (`printf` in its integer solver).

Standard output is a file meanwhile; what others wrote to it, in other threads, is written again afterwards.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

#: how the lines begin that are dropped: with a function's name
HIGHS = b"Highs"
#: two threads that redirect at once would leave standard output at the file of one of them
_ONE_AT_A_TIME = threading.Lock()


@contextmanager
def without_highs_lines() -> Iterator[None]:
    """Drops lines of HiGHS from standard output, at the level of the file descriptor."""
    if os.name != "posix":
        yield
        return
    with _ONE_AT_A_TIME:
        try:
            real = os.dup(1)
        except OSError:  # there is no standard output
            yield
            return
        library = ctypes.CDLL(None)
        try:
            with _memory() as held:
                _flush(library)
                os.dup2(held.fileno(), 1)
                try:
                    yield
                finally:
                    _flush(library)
                    os.dup2(real, 1)
                    held.seek(0)
                    others = b"".join(line for line in held if not line.startswith(HIGHS))
                    while others:
                        others = others[os.write(1, others) :]
        finally:
            os.close(real)


def _memory() -> IO[bytes]:
    """A file that takes no disk, where the system has such."""
    return os.fdopen(os.memfd_create("stdout"), "w+b") if sys.platform == "linux" else tempfile.TemporaryFile()


def _flush(library: ctypes.CDLL) -> None:
    """What Python and C hold back belongs to where standard output goes now."""
    if sys.stdout is not None:
        sys.stdout.flush()
    library.fflush(None)
