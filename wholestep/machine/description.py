"""Descriptions of machines: how fast memory, matrix products, launches and links are, as JSON files.

Some are shipped beside this file; `wholestep doctor --calibrate --write FILE` measures another. WHOLESTEP_MACHINE names
the one to use (a shipped name or a file) where the machine at hand has none. A CPU is known by its name, its cores and
the instructions that change its rates: virtual machines give CPUs that differ one name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from wholestep.errors import InputError
from wholestep.machine.cpu import rate_flags

VARIABLE = "WHOLESTEP_MACHINE"
FORMAT = "wholestep machine"
#: measurements that differ by more than this share are those of a busy machine
STEADY = 0.25
#: figures that a description may leave out
OPTIONAL = (
    "launch_seconds",
    "graph_launch_seconds",
    "read_bandwidth",
    "write_bandwidth",
    "cache_bytes",
    "cache_share",
    "cache_bandwidth",
    "cores",
)
#: links between memories, in bytes per second
LINKS = ("host_to_device", "device_to_host")


@dataclass(frozen=True, slots=True)
class Description:
    """What a machine can do. `sources` says for each figure where it is from."""

    name: str
    kind: str  # "cpu" or "cuda"
    #: bytes read plus bytes written per second, by a plain copy
    bandwidth: float
    #: floating-point operations per second of a large matrix product, by element type
    gemm: dict[str, float] = field(default_factory=dict)
    #: seconds that a call of one small kernel costs; None where nobody measured it
    launch_seconds: float | None = None
    #: the same for a kernel of a CUDA graph
    graph_launch_seconds: float | None = None
    #: launches are queued ahead of the device, so that only the longer of launch and work counts
    overlapped: bool = False
    links: dict[str, float] = field(default_factory=dict)
    #: bytes per second of a kernel that only reads, and of one that only writes
    read_bandwidth: float | None = None
    write_bandwidth: float | None = None
    #: the last cache before memory: its size as the system tells it, the share of it that holds data as a plain
    #: least-recently-used cache would, and bytes read from it per second
    cache_bytes: int | None = None
    cache_share: float | None = None
    cache_bandwidth: float | None = None
    #: of a CPU: the cores that were used
    cores: int | None = None
    #: of a CPU: the instructions it has of those that change its rates (`cpu.RATE_FLAGS`); None where nobody noted them
    instructions: tuple[str, ...] | None = None
    sources: dict[str, str] = field(default_factory=dict)
    #: by which share of their median the repeats of a measurement differed, at most; None where nobody noted it
    spread: float | None = None
    #: what disturbed the measurements, in words; "" where nothing did
    busy: str = ""

    @property
    def effective_cache(self) -> int | None:
        """Bytes of the cache to count on; all of it where its share was not measured."""
        return None if self.cache_bytes is None else int(self.cache_bytes * (self.cache_share or 1.0))

    def behind(self, other: Description) -> tuple[str, float]:
        """The figure that is worst beside another description, and by which share the other is faster."""
        found = {"copies": other.bandwidth / self.bandwidth}
        found |= {f"{e} products": other.gemm[e] / rate for e, rate in self.gemm.items() if e in other.gemm}
        if self.launch_seconds is not None and other.launch_seconds is not None:
            found["calls"] = self.launch_seconds / other.launch_seconds
        worst = max(found, key=lambda what: found[what])
        return worst, found[worst] - 1

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT} | asdict(self), indent=2) + "\n"


def from_json(text: str, where: str) -> Description:
    """A description from its text; InputError says what is wrong with it."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise InputError(f"{where} is not a machine description: {error}") from None
    if not isinstance(given, dict) or given.pop("format", None) != FORMAT:
        raise InputError(f"{where} is not a machine description; `wholestep doctor --calibrate --write FILE` makes one")
    fields = Description.__dataclass_fields__
    strange = [name for name in given if name not in fields]
    absent = [name for name in ("name", "kind", "bandwidth") if name not in given]
    if strange or absent:
        raise InputError(f"{where}: " + (f"it has no {absent[0]}" if absent else f"{strange[0]!r} is not known"))
    numbers = [given["bandwidth"], *entries(given, "gemm", where), *entries(given, "links", where)]
    numbers += [given[name] for name in OPTIONAL if given.get(name) is not None]
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < float("inf"):
            raise InputError(f"{where}: {number!r} is no speed; every figure is a positive number")
    if (given.get("cache_share") or 0) > 1:
        raise InputError(f"{where}: cache_share is {given['cache_share']}; a share is at most 1")
    spread = given.get("spread")
    if spread is not None and (isinstance(spread, bool) or not isinstance(spread, int | float) or not spread >= 0):
        raise InputError(f"{where}: spread is {spread!r}; it is a share, such as 0.1")
    texts = [given["name"], given["kind"], given.get("busy", ""), *entries(given, "sources", where)]
    if not all(isinstance(t, str) for t in texts) or given["kind"] not in ("cpu", "cuda"):
        raise InputError(f'{where}: name, sources and busy are text, kind is "cpu" or "cuda"')
    flags = given.get("instructions")
    if flags is not None and not (isinstance(flags, list) and all(isinstance(f, str) for f in flags)):
        raise InputError(f'{where}: instructions is {flags!r}; it is a list of names, such as ["avx2"]')
    return Description(**given | {"instructions": None if flags is None else tuple(flags)})


def entries(given: dict[str, Any], name: str, where: str) -> list[Any]:
    found = given.get(name, {})
    if not isinstance(found, dict):
        raise InputError(f"{where}: {name} must be a table of names and values")
    return list(found.values())


def shipped() -> Iterator[tuple[str, Description]]:
    """The descriptions that come with Wholestep, by name."""
    for path in sorted(Path(__file__).parent.glob("*.json")):
        yield path.stem, from_json(path.read_text(encoding="utf-8"), path.name)


def load_description(name_or_file: str | os.PathLike[str]) -> Description:
    """A shipped description by its name, or one from a file."""
    known = dict(shipped())
    if str(name_or_file) in known:
        return known[str(name_or_file)]
    path = Path(name_or_file)
    try:
        return from_json(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        raise InputError(
            f"there is no machine description {str(name_or_file)!r}: give a file, or one of {', '.join(known)}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None


def find_description(
    name: str, cores: int | None = None, instructions: Sequence[str] | None = None
) -> Description | None:
    """The description of this machine: the one WHOLESTEP_MACHINE names, else a shipped one of its kind.

    instructions: those of a CPU that change its rates; left out, those of this one.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen:
        try:
            return load_description(chosen)
        except InputError as error:
            raise InputError(f"{VARIABLE}={chosen}: {error}. Try: unset {VARIABLE}") from None
    alike = [d for _, d in shipped() if d.name == name and not difference(d, cores, instructions)]
    return alike[0] if alike else None


def difference(description: Description, cores: int | None, instructions: Sequence[str] | None = None) -> str:
    """What tells a machine from a described one of its name, in words; "" where it is that one."""
    if description.cores not in (None, cores):
        return f"it is of {description.cores} cores, not of {cores}"
    if description.instructions is None:
        return ""
    here, there = set(rate_flags() if instructions is None else instructions), set(description.instructions)
    parts = [("it has", there - here, "this one has not"), ("it has no", here - there, "this one has")]
    return "; ".join(f"{its} {', '.join(sorted(flags))}, and {ours}" for its, flags, ours in parts if flags)


def why_undescribed(name: str, cores: int | None, instructions: Sequence[str] | None = None) -> str:
    """Why no description applies although one of a machine's name is shipped; "" where one does, or none is."""
    if os.environ.get(VARIABLE) or find_description(name, cores, instructions) is not None:
        return ""
    found = [f"{own}: {difference(d, cores, instructions)}" for own, d in shipped() if d.name == name]
    return f"another {name} is described as {found[0]}" if found else ""
