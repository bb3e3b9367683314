"""The choice as an integer program over templates, for any solver of linear ones.

Per op of a template one number: in how many instances, counted from the first layer, it runs again. The first layers'
backward comes last, when least is held. Memory has two rows per template: forward and backward in its last instance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .choice import Segments

Term = tuple[int, float]  # a variable's number, its coefficient


@dataclass(slots=True)
class Program:
    """Least cost over variables from 0 to `upper`, all integers, under rows `terms + constant <= limit`."""

    cost: list[float] = field(default_factory=list)
    upper: list[int] = field(default_factory=list)
    #: the wiring: sum of terms <= limit
    rows: list[tuple[list[Term], float]] = field(default_factory=list)
    #: bytes held at different moments: terms and a constant
    memory: list[tuple[list[Term], int]] = field(default_factory=list)
    #: per template and op of it: the variable that counts the instances in which it runs again; -1 for never
    again: list[list[int]] = field(default_factory=list)

    def variable(self, upper: int, cost: float = 0.0) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        return len(self.cost) - 1

    def at_most(self, terms: Sequence[Term], limit: float) -> None:
        self.rows.append((list(terms), limit))

    def nodes_again(self, segments: Segments, values: Sequence[float]) -> list[int]:
        """The ops that run again by a solution."""
        counts = [[round(values[v]) if v >= 0 else 0 for v in row] for row in self.again]
        return [n for n, (t, place, instance, _) in enumerate(segments.where) if instance < counts[t][place]]


def program_of(segments: Segments) -> Program:
    """The integer program of a graph in segments."""
    return _Writer(segments).program


class _Writer:
    def __init__(self, segments: Segments):
        self.segments, self.graph = segments, segments.graph
        self.program = Program()
        self.flags: dict[tuple[str, int], int] = {}
        self.kept: dict[int, int] = {}  # memory of the first instance -> how many instances keep it beside their duty
        self.extra: dict[int, int] = {}  # memory -> whether it is kept for another segment
        for template in segments.templates:
            nodes = [self.graph.nodes[n] for n in range(template.start, template.start + template.length)]
            self.program.again.append(
                [self.program.variable(template.count, n.seconds) if n.again else -1 for n in nodes]
            )
        done: set[tuple[int, ...]] = set()
        for node in range(len(self.graph.nodes)):
            if self.variable(node) >= 0:
                for memory in self.graph.nodes[node].reads:
                    self.wire(node, memory, done)
        self.hold()

    def variable(self, node: int) -> int:
        template, place, _, _ = self.segments.where[node]
        return self.program.again[template][place]

    def count(self, node: int) -> int:
        return self.segments.templates[self.segments.where[node][0]].count

    def flag(self, node: int, kind: str) -> int:
        """A variable that must be 1 where an op runs again in `any` instance, or in `all` of them."""
        variable, count = self.variable(node), self.count(node)
        if count == 1:
            return variable
        if (kind, variable) not in self.flags:
            flag = self.flags[kind, variable] = self.program.variable(1)
            if kind == "any":
                self.program.at_most([(variable, 1), (flag, -count)], 0)
            else:
                self.program.at_most([(variable, 1), (flag, -1)], count - 1)
        return self.flags[kind, variable]

    def first_instance(self, memory: int) -> int:
        """The same memory in the first instance of its template."""
        node = self.graph.memories[memory].node
        template, place, _, _ = self.segments.where[node]
        first = self.segments.templates[template].start + place
        return self.graph.nodes[first].makes[memory - self.graph.nodes[node].makes[0]]

    def wire(self, node: int, memory: int, done: set[tuple[int, ...]]) -> None:
        """An op that runs again needs what it reads."""
        made = self.graph.memories[memory]
        if made.fixed:
            return
        program, reader, maker = self.program, self.variable(node), self.variable(made.node)
        template, _, instance, segment = self.segments.where[node]
        other, _, other_instance, other_segment = self.segments.where[made.node]
        first, distance = self.first_instance(memory), instance - other_instance
        key = (reader, first, distance) if other == template else (reader, memory, -1)
        if key in done:
            return
        done.add(key)
        if other == template:
            terms = [(reader, 1.0)]
            if segment == other_segment:
                terms += [(maker, -1.0)] if maker >= 0 else []
            elif maker >= 0:
                program.at_most([(self.flag(node, "any"), 1), (self.flag(made.node, "any"), 1)], 1)
            if not made.late:
                if first not in self.kept:
                    self.kept[first] = program.variable(self.count(node))
                program.at_most([*terms, (self.kept[first], -1)], distance)
            return
        if maker >= 0:  # what another segment reads is kept
            free = self.count(made.node) - other_instance
            program.at_most([(maker, 1), (self.flag(node, "any"), free)], other_instance + free)
        if not made.late:
            table = self.kept if self.count(made.node) == 1 else self.extra
            if memory not in table:
                table[memory] = program.variable(1)
            program.at_most([(self.flag(node, "any"), 1), (table[memory], -1)], 0)

    def made_again(self, nodes: range) -> list[Term]:
        """Bytes made again while backward is in the last instance of a template, as `measure` counts them."""
        program, graph = self.program, self.graph
        made = [m for n in nodes if self.variable(n) >= 0 for m in graph.nodes[n].makes]
        made = [m for m in made if graph.memories[m].late and not graph.memories[m].fixed]
        unit = math.gcd(*[graph.memories[m].bytes for m in made])
        if not unit:
            return []
        short = program.variable(max(graph.memories[m].bytes for m in made) // unit)
        terms: list[Term] = [(short, unit)]
        for memory in made:
            size, maker = graph.memories[memory].bytes, self.flag(graph.memories[memory].node, "all")
            readers = [n for n in nodes if memory in graph.nodes[n].reads and self.variable(n) >= 0]
            long = program.variable(1)
            for reader in readers:
                program.at_most([(maker, 1), (self.flag(reader, "all"), 1), (long, -1)], 1)
            program.at_most([(maker, size // unit), (long, -(size // unit)), (short, -1)], 0)
            terms.append((long, size))
        return terms

    def hold(self) -> None:
        """The memory rows."""
        program, graph = self.program, self.graph
        by_template: dict[int, list[Term]] = {}
        for table in (self.kept, self.extra):
            for memory, variable in table.items():
                made = graph.memories[memory]
                by_template.setdefault(self.segments.where[made.node][0], []).append((variable, made.bytes))
        held: list[Term] = []
        constant, segment = 0, -1
        for number, template in enumerate(self.segments.templates):
            held = held + by_template.get(number, [])
            nodes = range(template.start, template.start + template.length)
            for node in nodes:
                size, variable = graph.late_bytes(node), self.variable(node)
                constant += template.count * size
                if size and variable >= 0:
                    held.append((variable, -size))
            back = self.made_again(nodes)
            segment += template.count
            program.memory.append((held + back, constant + self.segments.backward[segment]))
            program.memory.append((held, constant + self.segments.forward[segment]))
