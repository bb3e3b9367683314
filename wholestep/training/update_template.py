"""Templates: a traced update as a small block of step ops, tidied, named by its content and copied into programs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..dialects.step import StepBuilder
from ..ir.attributes import attribute_text, freeze
from ..ir.core import Block, Location, Op, Value
from .traced_numbers import Expression, evaluate


@dataclass
class Trace:
    """One parameter's update as a template: a block whose arguments are named, and its results."""

    block: Block
    arguments: dict[Any, Value]  # "parameter", "gradient", ("tensor state", key), ("group tensor", key), leaf names
    parameter: Value
    states: dict[str, Value]  # new value of each tensor state that changes
    created: dict[str, Any]  # initial value of state the run creates: a Value, ("number", expression) or a constant
    kinds: dict[str, tuple[Any, ...]]  # shape, stride, dtype, device of created tensors
    host: dict[Any, Expression]  # numbers the host computes after the step: ("state", key) or ("group", ...)
    guards: dict[tuple[Expression, Any], tuple[str, int] | None]
    paths: list[Any]  # the runs it was made from
    digest: str = ""
    used: list[Any] = field(default_factory=list)  # names of the arguments the results depend on

    def holds(self, leaf: Callable[[Any], Any]) -> bool:
        """Whether every branch would go the way it went."""
        try:
            return all(evaluate(expression, leaf) == outcome for expression, outcome in self.guards)
        except (ArithmeticError, ValueError):  # the number it was decided on does not exist now
            return False


def tidy(trace: Trace) -> None:
    """Keeps what the results need, each computation once; then names the trace by its content."""
    roots = [trace.parameter, *trace.states.values(), *(v for v in trace.created.values() if isinstance(v, Value))]
    block, mapping = distinct(trace.block, roots)
    trace.block = block
    trace.arguments = {name: mapping[v] for name, v in trace.arguments.items()}
    trace.parameter = mapping[trace.parameter]
    trace.states = {k: mapping[v] for k, v in trace.states.items()}
    trace.created = {k: mapping[v] if isinstance(v, Value) else v for k, v in trace.created.items()}
    trace.used = used_arguments(trace, [trace.parameter, *trace.states.values()])
    trace.digest = digest(trace)


def meeting_line(trace: Trace, strangers: list[Value]) -> tuple[str, int] | None:
    """The line where a bystander's values first meet the parameter's own."""
    own = {v for n, v in trace.arguments.items() if isinstance(n, tuple) and n[0] == "target"}
    foreign = set(strangers)
    for op in trace.block:
        mine, theirs = any(v in own for v in op.operands), any(v in foreign for v in op.operands)
        if mine and theirs:
            return (op.loc.file, op.loc.line) if op.loc.file else None
        if mine:
            own.update(op.results)
        if theirs:
            foreign.update(op.results)
    return None


def reachable(roots: list[Value]) -> set[Op]:
    seen: set[Op] = set()
    pending = [v.op for v in roots if v.op is not None]
    while pending:
        op = pending.pop()
        if op is None or op in seen:
            continue
        seen.add(op)
        pending += [v.op for v in op.operands if v.op is not None]
    return seen


def distinct(block: Block, roots: list[Value]) -> tuple[Block, dict[Value, Value]]:
    """A copy of the block with only what the roots need, equal ops merged."""
    fresh = Block([a.type for a in block.arguments])
    mapping: dict[Value, Value] = dict(zip(block.arguments, fresh.arguments, strict=True))
    known: dict[Any, Op] = {}
    wanted = reachable(roots)
    for op in block:
        if op not in wanted:
            continue
        operands = tuple(mapping[v] for v in op.operands)
        if op.name == "step.select" and operands[1] is operands[2] and operands[1].type is op.results[0].type:
            mapping[op.results[0]] = operands[1]  # both branches agree
            continue
        if op.name == "step.detach":
            mapping[op.results[0]] = operands[0]  # there are no gradients here
            continue
        key = (op.name, freeze(op.attributes), operands, tuple(r.type for r in op.results))
        new = known.get(key)
        if new is None:
            new = Op(op.definition, operands, [r.type for r in op.results], dict(op.attributes), (), op.loc)
            known[key] = fresh.append(new)
        mapping.update(zip(op.results, new.results, strict=True))
    return fresh, mapping


def used_arguments(trace: Trace, roots: list[Value]) -> list[Any]:
    """Names of the arguments that the roots depend on, in order."""
    needed = {v for op in reachable(roots) for v in op.operands} | set(roots)
    return [name for name, value in trace.arguments.items() if value in needed]


def digest(trace: Trace) -> str:
    """A name that traces share which compute the same, in whatever order."""

    def short(text: str) -> str:
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    names: dict[Value, str] = {value: str(name) for name, value in trace.arguments.items()}
    for op in trace.block:
        text = attribute_text({k: op.attributes[k] for k in sorted(op.attributes)})
        name = short(f"{op.name} {text} {[names[v] for v in op.operands]} {[r.type.text for r in op.results]}")
        names |= {r: f"{name}:{r.index}" for r in op.results}
    states = [(k, names[v]) for k, v in trace.states.items()]
    return short(f"{names[trace.parameter]} {states} {trace.host}")


def instantiate(b: StepBuilder, trace: Trace, values: dict[Any, Value]) -> dict[Value, Value]:
    """The template's ops at the builder's place, on these argument values; gives template value -> new value."""
    mapping = {trace.arguments[name]: value for name, value in values.items()}
    wanted = reachable([trace.parameter, *trace.states.values()])
    for op in trace.block:
        if op not in wanted:
            continue
        new = op.clone(mapping)
        new.loc = Location(b.loc.layer, op.loc.file, op.loc.line) if op.loc.file else b.loc
        if b.phase:
            new.attributes["phase"] = b.phase
        b.insert(new)
    return mapping


def same_results(first: Trace, steady: Trace) -> bool:
    """Whether the first step computes what a later one would from the state as created."""
    if set(first.states) != set(steady.states) or first.host != steady.host:
        return False
    block = Block()
    values: dict[Any, Value] = {}
    for name, argument in {**first.arguments, **steady.arguments}.items():
        if name not in values and not (isinstance(name, tuple) and name[0] == "target" and name[1] in first.created):
            values[name] = block.add_argument(argument.type)
    b = StepBuilder(block)
    mapping = {first.arguments[n]: values[n] for n in first.arguments}
    for op in first.block:
        b.insert(op.clone(mapping))
    start = dict(values)
    for key, value in first.created.items():
        if isinstance(value, Value):
            start["target", key] = mapping[value]
    again = instantiate(b, steady, {n: start[n] for n in steady.used})
    pairs = [(mapping[first.parameter], again.get(steady.parameter, steady.parameter))]
    pairs += [(mapping[first.states[k]], again[steady.states[k]]) for k in steady.states]
    _, merged = distinct(block, [v for pair in pairs for v in pair])
    return all(merged[x] is merged[y] for x, y in pairs)
