"""MLIR text in generic form: `%0 = "step.add"(%x, %y) {phase = "forward"} : (tensor<f32>, tensor<f32>) -> tensor<f32>`.

Attributes are always plain `{...}`: dialects that mlir-opt loads from IRDL have no properties. Output depends on the
graph alone: names come from hints, made unique, or from counting.
"""

from __future__ import annotations

import re

from .attributes import entry_text, string_text
from .builtin import Func
from .collector import collector_paused
from .core import UNKNOWN, Block, Location, Op, Region, Value
from .types import FunctionType, Type

_NOT_NAME = re.compile(r"[^A-Za-z0-9_$.]")


def print_op(op: Op, locations: bool = False, names: bool = True) -> str:
    """MLIR text of an op and all it holds. `names=False` ignores name hints and numbers every value."""
    printer = _Printer(locations, names)
    with collector_paused():
        printer.op(op, "")
    return "\n".join(printer.lines) + "\n" if op.regions else "\n".join(printer.lines)


print_module = print_op


def location_text(loc: Location) -> str:
    """` loc("layer"("file":line:0))`, with a leading space; nothing for an unknown location."""
    place = f"{string_text(loc.file)}:{loc.line}:0" if loc.file else ""
    if loc.layer:
        return f" loc({string_text(loc.layer)}({place}))" if place else f" loc({string_text(loc.layer)})"
    return f" loc({place})" if place else ""


class _Printer:
    """Collects lines. Names live per isolated op, so every function counts from zero."""

    def __init__(self, locations: bool, hints: bool):
        self.locations, self.hints = locations, hints
        self.lines: list[str] = []
        self.entries: dict[tuple[str, object], str] = {}
        self.enter_scope()

    def enter_scope(self) -> None:
        self.names: dict[Value, str] = {}
        self.taken: dict[str, int] = {}  # name -> next suffix to try
        self.count = self.argument_count = 0

    def unique(self, name: str) -> str:
        taken = self.taken
        if name not in taken:
            taken[name] = 1
            return name
        suffix = taken[name]
        while f"{name}_{suffix}" in taken:
            suffix += 1
        taken[name] = suffix + 1
        name = f"{name}_{suffix}"
        taken[name] = 1
        return name

    def hint(self, value: Value) -> str | None:
        if not value.name or not self.hints:
            return None
        name = _NOT_NAME.sub("_", value.name)
        return self.unique(f"_{name}" if name[0].isdigit() else name)

    def name_results(self, op: Op) -> str:
        """Names the results of an op; returns what stands left of the equals sign."""
        results = op.results
        name = self.hint(results[0])
        if name is None:
            name = str(self.count)
            self.count += 1
        if len(results) == 1:
            self.names[results[0]] = name = f"%{name}"
            return name
        for i, value in enumerate(results):
            self.names[value] = f"%{name}#{i}"
        return f"%{name}:{len(results)}"

    def name_argument(self, value: Value) -> str:
        name = self.hint(value) or self.unique(f"arg{self.argument_count}")
        self.argument_count += 1
        self.names[value] = name = f"%{name}"
        return name

    def reference(self, value: Value) -> str:
        """The name of a value; one from outside what is printed gets its name here."""
        if value not in self.names:
            if isinstance(value.owner, Op) and value in value.owner.results:
                self.name_results(value.owner)
            else:
                self.name_argument(value)
        return self.names[value]

    def op(self, op: Op, pad: str) -> None:
        operands = op.operands
        if operands:
            names = self.names
            try:
                uses = ", ".join([names[v] for v in operands])
            except KeyError:
                uses = ", ".join([self.reference(v) for v in operands])
            types = ", ".join([v.type.text for v in operands])
        else:
            uses = types = ""
        results = op.results
        head = f"{pad}{self.name_results(op)} = " if results else pad
        line = f'{head}"{op.definition.name}"({uses})'
        if op.regions:
            line = self.regions(op, line, pad)
        attributes = self.attributes(op) if op.attributes else ""
        if len(results) == 1:
            made = _result_text(results[0].type)
        else:
            made = f"({', '.join([r.type.text for r in results])})"
        loc = location_text(op.loc) if self.locations and op.loc is not UNKNOWN else ""
        self.lines.append(f"{line}{attributes} : ({types}) -> {made}{loc}")

    def attributes(self, op: Op) -> str:
        entries = self.entries
        parts = []
        for key, value in op.attributes.items():
            if type(value) is str or type(value) is tuple:
                text = entries.get((key, value))
                if text is None:
                    text = entries[(key, value)] = entry_text(key, value)
                parts.append(text)
            else:
                parts.append(entry_text(key, value))
        return f" {{{', '.join(parts)}}}"

    def regions(self, op: Op, line: str, pad: str) -> str:
        """Prints the regions of an op and returns the line to carry on with."""
        saved = (self.names, self.taken, self.count, self.argument_count)
        line += " ("
        for index, region in enumerate(op.regions):
            if op.definition.isolated:
                self.enter_scope()
            line += ", {" if index else "{"
            if region.blocks:
                self.lines.append(line)
                self.region(region, pad, op.definition is Func)
                line = pad
            line += "}"
        if op.definition.isolated:
            self.names, self.taken, self.count, self.argument_count = saved
        return line + ")"

    def region(self, region: Region, pad: str, is_function: bool) -> None:
        for index, block in enumerate(region.blocks):
            if block.arguments or block.first is None or index:
                self.lines.append(f"{pad}^bb{index}{self.block_arguments(block)}:")
            inner = pad + "  "
            phase = ""
            for op in block:
                if is_function and op.attributes.get("phase", phase) != phase:
                    phase = op.attributes["phase"]
                    self.lines.append(f"{inner}// ---- {_one_line(phase)} ----")
                self.op(op, inner)

    def block_arguments(self, block: Block) -> str:
        listed = ", ".join([f"{self.name_argument(a)}: {a.type.text}" for a in block.arguments])
        return f"({listed})" if listed else ""


def _result_text(type: Type) -> str:
    return f"({type.text})" if isinstance(type, FunctionType) else type.text


def _one_line(phase: object) -> str:
    return str(phase).replace("\n", " ").replace("\r", " ")
