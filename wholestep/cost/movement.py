"""All that is known of a step's data movement in one record, and its text: tables by cause and phase, heaviest kernels.

`Movement.to_dict()` is what `step.report(format="json")` holds; `cost/html.py` draws it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..ir.core import Location
from ..machine.description import Description
from ..plan.planner import Planned
from .bound import Bound, bound_of
from .cache import Traffic, through_cache
from .counting import make_ledger
from .ledger import CAUSES, Ledger, group_of
from .roofline import Roofline, roofline


@dataclass(slots=True)
class Movement:
    """The ledger of one step, its bound, and its time on a machine where one is described.

    `cached` is what reaches DRAM through that machine's cache, where its size is known. `note` says what is counted
    where that is not what runs.
    """

    ledger: Ledger
    bound: Bound
    planned: Planned = field(repr=False)
    roofline: Roofline | None = None
    cached: Traffic | None = None
    cache_bytes: int = 0
    note: str = ""

    @property
    def ratio(self) -> float:
        """moved / bound."""
        return self.bound.ratio(self.ledger.total)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them."""
        ledger = self.ledger
        return {
            "moved": {"read": ledger.read, "written": ledger.written, "total": ledger.total},
            "bound": {
                "heavy ops": self.bound.heavy,
                "state read": self.bound.state_read,
                "state written": self.bound.state_written,
                "total": self.bound.total,
            },
            "moved / bound": None if self.bound.total == 0 else self.ratio,
            "flops": ledger.flops,
            "kernels": ledger.launches,
            "by cause": {cause: _pair(ledger.by_cause().get(cause, (0, 0))) for cause in CAUSES},
            "by phase": {name: _pair(value) for name, value in ledger.by_phase().items()},
            "by layer group": {name: _pair(value) for name, value in ledger.by_layer_group().items()},
            "by layer": {name: _pair(value) for name, value in ledger.by_layer().items()},
            "by kernel": {name: _pair(value) for name, value in ledger.by_kernel().items()},
            "top movers": top_movers(ledger, 20),
            "heaviest edges": heaviest_edges(ledger, 20),
            "memory": {"peak": max(memory_curve(ledger), default=0), "curve": memory_curve(ledger)},
            "roofline": None if self.roofline is None else _roofline_dict(self.roofline),
            "through cache": None if self.cached is None else _cached_dict(self.cached, self.cache_bytes),
            "note": self.note,
        }

    def lines(self, movers: int = 6, groups: int = 0) -> list[str]:
        """The tables as text."""
        ledger, total = self.ledger, max(self.ledger.total, 1)
        lines = ["moved per step                read    written  share"]
        lines += _rows(ledger.by_cause(), total)
        lines.append(_row("in all", (ledger.read, ledger.written), total))
        if self.bound.total:
            lines.append(
                f"moved / bound: {size_text(ledger.total)} / {size_text(self.bound.total)} = {self.ratio:.2f}   "
                f"(bound: heavy ops {size_text(self.bound.heavy)}, update "
                f"{size_text(self.bound.state_read + self.bound.state_written)})"
            )
        lines.append("by phase                      read    written  share")
        lines += _rows(ledger.by_phase(), total)
        if groups:
            lines.append("by layer group                read    written  share")
            found = ledger.by_layer_group()
            lines += _rows(dict(list(found.items())[:groups]), total)
            if len(found) > groups:
                lines.append(f"  ... and {len(found) - groups} more")
        lines.append("heaviest kernels             bytes  calls")
        lines += [
            f"  {shorten(row['kernel'], 22):<22} {size_text(row['bytes']):>9} {row['calls']:>6}  "
            + mover_place(row | {"file": Path(row["file"]).name if row["file"] else ""})
            for row in top_movers(ledger, movers)
        ]
        lines.append(f"{ledger.launches} kernels, {flops_text(ledger.flops)}, {memory_text(ledger)}")
        if self.cached is not None:
            lines.append(self.cache_line())
        if self.note:
            lines.append(self.note)
        return lines

    def cache_line(self) -> str:
        """What reaches DRAM through the machine's cache, beside what the step moves."""
        assert self.cached is not None
        read, written = size_text(sum(self.cached.read)), size_text(sum(self.cached.written))
        return (
            f"through a cache of {size_text(self.cache_bytes)}: {size_text(self.cached.total)} of the "
            f"{size_text(self.ledger.total)} reach DRAM, predicted ({read} read, {written} written)"
        )

    def price(self, machine: Description) -> None:
        """Notes the time of a step on a machine, and what its cache lets through."""
        self.roofline = roofline(self.ledger, machine)
        capacity = machine.effective_cache
        self.cached, self.cache_bytes = None, capacity or 0
        if capacity is not None:
            self.cached = through_cache(self.planned, capacity)

    def __str__(self) -> str:
        lines = self.lines(movers=10, groups=12)
        if self.roofline is not None:
            lines += roofline_lines(self.roofline, None)
        return "\n".join(lines)


def movement_of(planned: Planned, machine: Description | None = None, note: str = "") -> Movement:
    """The data movement of a planned step, priced on a machine if one is given."""
    ledger = make_ledger(planned)
    movement = Movement(ledger, bound_of(planned.function), planned, note=note)
    if machine is not None:
        movement.price(machine)
    return movement


def roofline_lines(found: Roofline, measured: float | None) -> list[str]:
    """Time at the machine's limits beside the time a step takes."""
    parts = {"memory": found.memory, "products": found.compute, "calls": found.launch}
    shown = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in parts.items())
    line = f"at the limits of {found.machine}: {seconds_text(found.seconds)} per step ({shown})"
    if measured is not None:
        line += f"; measured {seconds_text(measured)}"
    return [line] + ([f"  its description does not tell: {', '.join(found.unknown)}"] if found.unknown else [])


def top_movers(ledger: Ledger, count: int = 10) -> list[dict[str, Any]]:
    """The heaviest kernels; the same op of repeated layers in the same line of code is one row."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for kernel in ledger.kernels:
        loc = kernel.loc
        key = (kernel.name, kernel.phase, group_of(kernel), loc.file, loc.line)
        row = rows.setdefault(
            key,
            {"kernel": kernel.name, "phase": kernel.phase, "layer": key[2], "file": loc.file, "line": loc.line}
            | {"calls": 0, "bytes": 0, "flops": 0},
        )
        row["calls"] += kernel.times
        row["bytes"] += kernel.bytes
        row["flops"] += kernel.times * kernel.flops
    return sorted(rows.values(), key=lambda row: -row["bytes"])[:count]


def heaviest_edges(ledger: Ledger, count: int = 20) -> list[dict[str, Any]]:
    """What travels from one kernel to the next: bytes read per step, by producer and consumer."""
    found: dict[tuple[int, int], int] = {}
    for index, kernel in enumerate(ledger.kernels):
        for move in kernel.moves:
            if not move.written and not move.inside:
                key = (move.buffer, index)
                found[key] = found.get(key, 0) + kernel.times * move.bytes
    heaviest = sorted(found.items(), key=lambda item: (-item[1], item[0]))[:count]
    return [edge(ledger, buffer, consumer, size) for (buffer, consumer), size in heaviest]


def edge(ledger: Ledger, buffer: int, consumer: int, size: int) -> dict[str, Any]:
    memory, reader = ledger.buffers[buffer], ledger.kernels[consumer]
    maker = ledger.kernels[memory.producer] if memory.producer >= 0 else None
    made_by = maker.name if maker is not None else f"{memory.kind or 'argument'} {memory.name}"
    return {
        "from": made_by,
        "from_layer": maker.loc.layer if maker is not None else "",
        "to": reader.name,
        "to_layer": reader.loc.layer,
        "type": memory.type,
        "cause": memory.cause,
        "bytes": size,
        "file": reader.loc.file,
        "line": reader.loc.line,
    }


def memory_curve(ledger: Ledger) -> list[int]:
    """Bytes in use while each kernel runs: what lasts from step to step, the batch, what the plan holds in its arena
    then, and what the kernel allocates by itself."""
    return [kernel.live for kernel in ledger.kernels]


def mover_place(row: Mapping[str, Any]) -> str:
    """Phase, layer and source line of a row of `top_movers`."""
    return f"{row['phase']} {Location(row['layer'], row['file'], row['line'])}"


def size_text(count: float) -> str:
    """Bytes in words."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def flops_text(count: float) -> str:
    for unit, size in (("Tflop", 1e12), ("Gflop", 1e9), ("Mflop", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e3:.1f} kflop"


def seconds_text(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def memory_text(ledger: Ledger) -> str:
    curve = memory_curve(ledger)
    if not curve:
        return "no kernel"
    peak = max(curve)
    kernel = ledger.kernels[curve.index(peak)]
    place = f"{kernel.phase} {kernel.name}" + (f" of {kernel.loc.layer}" if kernel.loc.layer else "")
    return f"at most {size_text(peak)} in use, in {place}"


def shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _rows(table: Mapping[str, tuple[int, int]], total: int) -> list[str]:
    return [_row(name, pair, total) for name, pair in table.items() if sum(pair)]


def _row(name: str, pair: tuple[int, int], total: int) -> str:
    read, written = pair
    return f"  {shorten(name, 22):<22} {size_text(read):>9}  {size_text(written):>9} {(read + written) / total:>6.1%}"


def _pair(pair: Sequence[int]) -> dict[str, int]:
    return {"read": pair[0], "written": pair[1]}


def _roofline_dict(found: Roofline) -> dict[str, Any]:
    return {
        "machine": found.machine,
        "seconds": found.seconds,
        "memory": found.memory,
        "compute": found.compute,
        "launch": found.launch,
        "unknown": list(found.unknown),
    }


def _cached_dict(found: Traffic, capacity: int) -> dict[str, Any]:
    return {"capacity": capacity, "read": sum(found.read), "written": sum(found.written), "total": found.total}
