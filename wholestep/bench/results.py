"""What benchmarks found, as one JSON file that grows run by run: an entry per machine, network, size and contender.

Each entry has the command, date, machine and versions it was measured with. A later run replaces entries of the same
key and keeps the others, so that a machine can be used a little at a time, and by several runs one after the other.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..errors import InputError
from ..machine.cpu import cpu_field
from ..machine.describe import usable_cores
from .agreement import TELLING
from .contenders import EAGER
from .race import Reference
from .workload import Case

FORMAT = "wholestep bench 1"
Entry = dict[str, Any]
#: what makes two entries the same one
KEY = ("device", "machine", "precision", "network", "size", "contender")
PACKAGES = ("torch", "triton", "transformers", "jax", "wholestep")


def machine_name(device: str, threads: int = 0) -> str:
    """The GPU, or the CPU with the number of threads that work."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    count = threads or usable_cores()
    return f"{cpu_field('model name') or platform.machine()}, {count} {'thread' if count == 1 else 'threads'}"


def circumstances(device: str, threads: int, command: str) -> Entry:
    """What every entry of a run says of where it comes from."""
    found: Entry = {"device": device, "machine": machine_name(device, threads), "command": command}
    found["versions"] = {"python": platform.python_version()} | {name: version_of(name) for name in PACKAGES}
    if device == "cuda":
        found["versions"]["cuda"] = torch.version.cuda
    found["date"] = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    found["load"] = round(os.getloadavg()[0], 2)
    return found


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


class Results:
    """The entries and profiles of a file, or of one run."""

    def __init__(self, entries: Iterable[Entry] = (), profiles: Iterable[Entry] = ()):
        self.entries = list(entries)
        self.profiles = list(profiles)

    @classmethod
    def load(cls, path: Path) -> Results:
        """A file's results; none where it is not there."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls()
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise InputError(f"{path} cannot be read as results of a benchmark: {error}") from error
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise InputError(f"{path} does not hold results of `wholestep bench`; name another file")
        return cls(found["entries"], found["profiles"])

    def add_to(self, path: Path) -> Results:
        """Puts these into a file, whatever other runs have put there meanwhile, and returns all that it holds then."""
        with locked(path):
            whole = Results.load(path)
            for entry in self.entries:
                whole.merge(entry)
            for entry in self.profiles:
                whole.merge_profile(entry)
            whole.save(path)
        return whole

    def save(self, path: Path) -> None:
        text = json.dumps(
            {"format": FORMAT, "entries": plain(self.entries), "profiles": plain(self.profiles)}, indent=1
        )
        try:
            part = path.with_name(path.name + ".part")
            part.write_text(text + "\n", encoding="utf-8")
            part.replace(path)
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror or error}") from None

    def merge(self, entry: Entry) -> None:
        """Puts an entry in the place of the one it replaces, or at the end.

        One for which there was no time (`unfinished`) says nothing, and leaves what was measured before.
        """
        if entry.get("unfinished") and any("ms" in other for other in self.entries if key(other) == key(entry)):
            return
        replace(self.entries, entry)

    def merge_profile(self, entry: Entry) -> None:
        replace(self.profiles, entry)

    def reference(self, case: Case, precision: str, where: Mapping[str, Any], steps: int) -> Reference | None:
        """Eager's losses of an earlier run on the same machine with the same torch, where they are known.

        Those that have one limit for all steps, and such a wide one that it says little, are not.
        """
        for entry in self.entries:
            same = (entry["network"], entry["size"]) == (case.network, case.size) and entry["precision"] == precision
            place = entry["machine"] == where["machine"] and entry["versions"]["torch"] == where["versions"]["torch"]
            if same and place and entry["contender"] == EAGER and entry["status"] == "agrees":
                losses, limits = entry["losses"], entry.get("limits", ())
                telling = limits or entry["tolerance"] <= TELLING
                if len(losses) == steps and None not in losses and telling:
                    return Reference(losses, max([*limits, entry["tolerance"]]), entry.get("rounding", {}), limits)
        return None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Other runs that write results into the file's folder wait meanwhile. The folder is made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path.parent, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from None
    try:
        yield
    finally:
        os.close(handle)


def key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(entry[name] for name in KEY)


def replace(listed: list[Entry], entry: Entry) -> None:
    for number, other in enumerate(listed):
        if key(other) == key(entry):
            listed[number] = entry
            return
    listed.append(entry)


def plain(value: Any) -> Any:
    """Without numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value
