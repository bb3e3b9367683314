"""Ways that end a process: they are noted among the objects (`store.py`), and the next process does without them.

On a CPU nothing can be noted when a signal ends the process. So a file says beforehand which way is tried, Python's
faulthandler adds to it at the end, and the next process notes what it finds (`collect`). A file to which nothing was
added is of a process that was killed, and blames nobody. Where faulthandler is on already it belongs to somebody else
and is left alone: nothing is noted then.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import re
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .providers import Offer, Provider
from .store import Objects, acquire, digest, locked, say_unwritable

#: the kind of notes about ways that have ended a process
BROKEN = "broken"
#: files of processes that try ways: how their names begin, and as much of them as is read
TRYING = "trying-"
LIMIT = 1 << 20
#: the first line: the name of the way's note, and the thread that tries it
FIRST_LINE = re.compile(rb"([0-9a-f]{64}) (0x[0-9a-f]{16})\n")
FIRST_LINE_LENGTH = 64 + 1 + 18 + 1
#: what faulthandler adds; the thread is named where Python knows it, and those that share a kernel's work it does not
FATAL = re.compile(rb"^Fatal Python error: .*", re.MULTILINE)
THREAD = re.compile(rb"^Current thread (0x[0-9a-f]{16})", re.MULTILINE)


def note_name(provider: Provider, offer: Offer) -> str:
    """What a way's note is called. A provider whose code has changed is tried again."""
    return digest(offer.key, provider.version)


@contextmanager
def watched(folder: Path | None) -> Iterator[Callable[[str], None]]:
    """While ways are tried on a CPU; gives what is to be called with the name of each way's note before it runs.

    folder: the objects' in the cache. Where it cannot be written, nothing is noted.
    """
    if folder is None or faulthandler.is_enabled():
        yield lambda name: None
        return
    path = folder / f"{TRYING}{uuid.uuid4().hex}"
    handle = acquire(path, 0.0, fcntl.LOCK_EX)  # which tells others that this process is there
    try:
        if handle is None:
            say_unwritable(folder.parent, "no file, or no lock on it")
            yield lambda name: None
            return
        thread = threading.get_ident()
        os.lseek(handle, FIRST_LINE_LENGTH, os.SEEK_SET)  # faulthandler writes from there on
        faulthandler.enable(handle)

        def tries(name: str) -> None:
            try:
                os.pwrite(handle, f"{name} 0x{thread:016x}\n".encode(), 0)
            except OSError as error:  # the file names another way: nothing may be added to it any more
                faulthandler.disable()
                say_unwritable(folder.parent, error.strerror or str(error))

        try:
            yield tries
        finally:
            faulthandler.disable()
    finally:
        with suppress(OSError):  # without an error in it, the next process removes it
            path.unlink(missing_ok=True)
        if handle is not None:
            os.close(handle)


def collect(folder: Path, objects: Objects) -> None:
    """Makes notes of what processes have left behind that are gone."""
    for path in folder.glob(TRYING + "?" * 32):
        try:
            with locked(path, 0.0, remove=True) as gone:
                if gone and (found := blamed(path)) is not None:
                    objects.write(BROKEN, *found)
        except OSError as error:
            warnings.warn(f"{path} cannot be read and removed: {error.strerror or error}", stacklevel=2)


def blamed(path: Path) -> tuple[str, bytes] | None:
    """The name of the note for the way that ended a process, and what is to be noted; None where none did."""
    with path.open("rb") as file:
        text = file.read(LIMIT)
    first, fatal, thread = FIRST_LINE.match(text), FATAL.search(text, FIRST_LINE_LENGTH), THREAD.search(text)
    if first is None or fatal is None or (thread is not None and thread[1] != first[2]):
        return None
    return first[1].decode(), fatal[0]
