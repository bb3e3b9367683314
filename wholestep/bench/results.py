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
from .contenders import EAGER, MODES, OURS, compiles_alone, split
from .race import Cost, Reference
from .workload import Case

FORMAT = "wholestep bench 1"
Entry = dict[str, Any]
#: what makes two entries the same one
KEY = ("device", "machine", "precision", "network", "size", "contender")
PACKAGES = ("torch", "triton", "transformers", "jax", "wholestep")
#: what a profile says of where it comes from
OF_PROFILES = (*KEY, "status", "command", "versions", "date", "race", "load")
#: figures that are compared
FIGURES = {"ms": "step time", "peak_bytes": "peak memory", "compile_seconds": "cold compile time"}


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
                if not entry.get("unfinished"):  # nothing is known of it
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

        One for which there was no time (`unfinished`) says nothing, and leaves what was measured before. Those that
        raced an entry of ours keep its figures when a later one takes its place: a ratio is one of a single run.
        """
        before = next((other for other in self.entries if key(other) == key(entry)), None)
        if before is not None and entry.get("unfinished") and "ms" in before:
            return
        if before is not None and entry["contender"] == OURS and before["status"] == "agrees":
            for other in self.entries:
                if other is not before and of_case(other) == of_case(before) and raced(other, before):
                    other.setdefault("ours", {name: median(before.get(name)) for name in FIGURES})
        replace(self.entries, entry)

    def merge_profile(self, entry: Entry) -> None:
        replace(self.profiles, entry)

    def reference(self, case: Case, precision: str, where: Mapping[str, Any], steps: int) -> Reference | None:
        """Eager's losses of an earlier run on the same machine with the same torch, where they are known.

        Those that have one limit for all steps, and such a wide one that it says little, are not.
        """
        for entry in self.rows(case, precision, where):
            if entry["contender"] == EAGER and entry["status"] == "agrees":
                losses, limits = entry["losses"], entry.get("limits", ())
                telling = limits or entry["tolerance"] <= TELLING
                if len(losses) == steps and None not in losses and telling:
                    return Reference(losses, max([*limits, entry["tolerance"]]), entry.get("rounding", {}), limits)
        return None

    def costs(self, case: Case, contenders: Iterable[str], precision: str, where: Mapping[str, Any]) -> dict[str, Cost]:
        """What contenders took on the same machine, where that is known: of torch.compile's modes one tells of others,
        and eager of those that have no row."""
        rows = {entry["contender"]: entry for entry in self.rows(case, precision, where) if entry.get("peak_bytes")}
        found = {}
        for name in contenders:
            akin = [each for each in MODES if each in rows] if name in MODES else [split(name)[0], EAGER]
            told = [rows[each] for each in ([name] if name in rows else akin) if each in rows]
            if told:
                most = max(told, key=lambda entry: entry["peak_bytes"])
                found[name] = Cost(most["peak_bytes"], most["compile_seconds"] if name in rows else None)
        return found

    def missing(self, case: Case, contenders: Iterable[str], precision: str, where: Mapping[str, Any]) -> list[str]:
        """Those of some contenders that have no times of a run with ours, by the same torch on the same machine, or
        compiled beside others where they are to do so alone."""
        rows = {entry["contender"]: entry for entry in self.rows(case, precision, where)}
        ours = rows.get(OURS)

        def known(name: str) -> bool:
            entry = rows.get(name)
            if entry is None or "ms" not in entry or ours is None or (compiles_alone(name) and entry.get("beside")):
                return False
            return "ours" in entry or raced(entry, ours)

        return [name for name in contenders if not known(name)]

    def rows(self, case: Case, precision: str, where: Mapping[str, Any]) -> Iterator[Entry]:
        """Entries of a case, of a precision, on the same machine with the same torch."""
        for entry in self.entries:
            same = (entry["network"], entry["size"]) == (case.network, case.size) and entry["precision"] == precision
            place = entry["machine"] == where["machine"] and entry["versions"]["torch"] == where["versions"]["torch"]
            if same and place:
                yield entry


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


def of_case(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(entry[name] for name in KEY if name != "contender")


def raced(entry: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two entries of a case were measured in one run."""
    return entry.get("race") is not None and entry["race"] == other.get("race")


def median(value: Any) -> Any:
    """A figure: of one with a spread the middle."""
    return value["median"] if isinstance(value, Mapping) else value


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
