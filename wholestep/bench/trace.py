"""Reads a torch.profiler trace: what ran, for how long, inside which operators, and the bytes those operators name.

On a GPU what ran are kernels, copies and fills; on a CPU the operators themselves, by the time they spend on their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

HOST = ("cpu_op", "user_annotation")
LAUNCHES = ("cuda_runtime", "cuda_driver")
#: operators that touch no memory, though they name tensors
NOTHING = ("aten::empty", "aten::item", "aten::_local_scalar")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass
class Ran:
    """One kernel, or on a CPU one operator. `inside`: operators around it, outermost first, by name and number."""

    name: str
    us: float
    inside: list[tuple[str, int]] = field(default_factory=list)


@dataclass
class Open:
    """An operator that is running at a point of the trace."""

    name: str
    number: int
    end: float
    us: float
    cat: str
    children: float = 0.0
    moving: float = 0.0  # the part of them in operators that move bytes


def ran_on_device(events: Iterable[Mapping[str, Any]]) -> list[Ran]:
    """Kernels, copies and fills in the order they began, each with the operators that were running at its launch."""
    hosts: dict[Any, list[Mapping[str, Any]]] = {}
    device: list[Mapping[str, Any]] = []
    for event in events:
        cat = event.get("cat")
        if cat in HOST or (cat in LAUNCHES and "correlation" in event.get("args", {})):
            hosts.setdefault(event["tid"], []).append(event)
        elif cat in DEVICE:
            device.append(event)
    inside: dict[int, list[tuple[str, int]]] = {}
    for listed in hosts.values():
        stack: list[Open] = []
        for event in in_order(listed):
            while stack and stack[-1].end < event["ts"] + event.get("dur", 0.0):
                stack.pop()
            if event["cat"] in HOST:
                stack.append(opened(event))
            else:
                inside[event["args"]["correlation"]] = [(o.name, o.number) for o in stack]
    return [
        Ran(event["name"], float(event["dur"]), inside.get(event.get("args", {}).get("correlation"), []))
        for event in sorted(device, key=lambda event: event["ts"])
    ]


def ran_on_host(events: Iterable[Mapping[str, Any]], moved: Mapping[int, int]) -> list[Ran]:
    """Operators, each with the time that is not inside another one. Those that do the work are `inside` themselves.

    moved: the bytes of operators, by number. Who spends most of its time in others that move bytes hands on its work.
    """
    threads: dict[Any, list[Mapping[str, Any]]] = {}
    for event in events:
        if event.get("cat") in HOST:
            threads.setdefault(event["tid"], []).append(event)
    found: list[Ran] = []

    def close(done: Open) -> None:
        works = done.cat == "cpu_op" and done.moving <= done.us / 2
        found.append(Ran(done.name, done.us - done.children, [(done.name, done.number)] if works else []))
        if stack:
            stack[-1].children += done.us
            stack[-1].moving += done.us if done.number in moved else done.moving

    for listed in threads.values():
        stack: list[Open] = []
        for event in in_order(listed):
            while stack and stack[-1].end < event["ts"] + event["dur"]:
                close(stack.pop())
            stack.append(opened(event))
        while stack:
            close(stack.pop())
    return found


def in_order(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """By their beginning; what is around another comes before it."""
    return sorted(events, key=lambda event: (event["ts"], -event.get("dur", 0.0)))


def opened(event: Mapping[str, Any]) -> Open:
    number = int(event.get("args", {}).get("Record function id", -1))
    return Open(event["name"], number, event["ts"] + event["dur"], event["dur"], event["cat"])


def bytes_of(nodes: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """Bytes of the tensors that each operator of an execution trace reads and writes, by its number.

    A tensor given to be written into counts once. Operators that only look at memory otherwise move nothing.
    """
    found: dict[int, int] = {}
    for node in nodes:
        attributes = {a["name"]: a["value"] for a in node.get("attrs", ())}
        number = attributes.get("rf_id", 0)
        given, made = tensors(node.get("inputs", {})), tensors(node.get("outputs", {}))
        if not number or not (given or made) or node.get("name", "").startswith(NOTHING):
            continue
        storages = {tensor[1] for tensor in given}
        writes_into = "!) out" in str(attributes.get("op_schema", ""))
        inside = str(attributes.get("op_schema", "")).partition("(")[0].partition(".")[0].endswith("_")
        if made and all(tensor[1] in storages for tensor in made) and not (writes_into or inside):
            continue
        if writes_into:
            made = [tensor for tensor in made if tensor[1] not in storages]
        found[int(number)] = sum(tensor[3] * tensor[4] for tensor in [*given, *made])
    return found


def tensors(part: Mapping[str, Any]) -> list[list[Any]]:
    """The tensors among operands or results: (number, storage, offset, elements, bytes of one, device)."""
    found: list[list[Any]] = []

    def look(values: Any, kinds: Any) -> None:
        for value, kind in zip(values, kinds if isinstance(kinds, list) else [], strict=False):
            if isinstance(kind, str) and kind.startswith("Tensor("):
                found.append(value)
            elif isinstance(kind, str) and kind.startswith("GenericList[") and isinstance(value, list):
                look(value, kind.removeprefix("GenericList[").removesuffix("]").split(","))

    look(part.get("values", []), part.get("types", []))
    return found
