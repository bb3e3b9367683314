"""A plan as text: to and from a module of the move dialect, in files, and the difference of two plans in words.

What the dialect has no word for (numbers on the host, the order's name) stands in attributes beside it. Bytes and
lifetimes are not written: they follow from the launches. A file begins with the checksum of the rest.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

from ..dialects import context
from ..dialects.move import Alloc, Arena, Copy, External, Results, Reuse, View, Wait, space, verify_plan
from ..dialects.move import Launch as LaunchOp
from ..dialects.strides import row_major
from ..errors import SavedStepError, WholestepError
from ..ir.builtin import add_function, finish_function, functions, module
from ..ir.collector import collector_paused
from ..ir.core import UNKNOWN, Builder, Location, Op, Value
from ..ir.parser import parse
from ..ir.printer import print_op
from .plan import SHARES, SPACES, WAYS, Buffer, Launch, Plan, Returned

NAME = "plan"
VERSION = 1
#: bytes beside the plan, as measured; in the text only where there are any
BESIDE = ("kept_by_libraries", "handed_beyond")
FIRST_LINE = re.compile(r"// wholestep plan (\d+), sha256 ([0-9a-f]{64})\n")


# ---- plan to module --------------------------------------------------------------------------------------------------


def plan_to_module(plan: Plan) -> Op:
    """The plan as a module in phase "placed": @plan, and one more function for each plan that it runs inside."""
    with collector_paused():
        root = module()
        root.attributes["move.phase"] = "placed"
        root.attributes["move.streams"] = ["cuda:0" if plan.device == "cuda" else "cpu"] * plan.streams
        for number, each in enumerate([plan, *plan.bodies]):
            if each.bodies and number:
                raise WholestepError("a plan inside a plan runs no plans of its own")
            _Writer(each, root, NAME if not number else f"{NAME}_body_{number - 1}")
        return root


class _Writer:
    """Adds one plan to a module."""

    def __init__(self, plan: Plan, root: Op, name: str):
        self.plan = plan
        function = add_function(root, name, [])
        self.b = Builder(function.regions[0].block)
        self.where = space("hbm" if plan.device == "cuda" else "host")
        self.arena = Arena.build(self.b, space=self.where, size=plan.arena, alignment=plan.alignment).result
        self.pinned: Value | None = None
        if plan.pinned:
            where = space("pinned")
            self.pinned = Arena.build(self.b, space=where, size=plan.pinned, alignment=plan.alignment).result
        self.values: dict[int, Value] = {}
        self.tokens: list[Value | None] = []  # per launch; None for a wait
        self.constants = sum(b.argument >= 0 for b in plan.buffers)  # constants are numbered after the arguments
        for number in range(len(plan.buffers)):
            self.buffer(number)
        for launch in plan.launches:
            self.launch(launch)
        Results.build(self.b, [self.values[r.buffer] for r in plan.results if r.way != "host"], result_types=())
        finish_function(function, [])
        function.attributes["move.plan"] = {
            "function": plan.function,
            "fingerprint": plan.fingerprint,
            "device": plan.device,
            "order": plan.order,
            "placer": plan.placer,
            "lower_bound": plan.lower_bound,
            "program_order_bound": plan.program_order_bound,
            "numbers": [
                [number, b.type, b.op, b.argument, b.lifetime, b.name]
                for number, b in enumerate(plan.buffers)
                if b.space == "host"
            ],
            "assumed": list(plan.assumed),
            "results": [[r.buffer, r.argument, r.way] for r in plan.results],
            **{name: getattr(plan, name) for name in BESIDE if getattr(plan, name)},
        }

    def buffer(self, number: int) -> Value | None:
        """The op that makes a buffer, and before it what the buffer is made of."""
        b = self.plan.buffers[number]
        if b.space == "host" or number in self.values:
            return self.values.get(number)
        fields: dict[str, Any] = {"type": b.type}
        if b.strides != row_major(b.type.shape):
            fields["strides"] = b.strides
        if b.share == "view":
            op = View.build(self.b, self.buffer(b.of), offset=b.offset, **fields)
        elif b.base >= 0:
            op = Reuse.build(self.b, self.buffer(b.of), lifetime=b.lifetime, **fields)
        elif b.space in ("arena", "pinned"):
            arena, where = (self.arena, self.where) if b.space == "arena" else (self.pinned, space("pinned"))
            op = Alloc.build(self.b, arena, space=where, lifetime=b.lifetime, offset=b.offset, **fields)
        else:
            index = b.argument
            if b.space == "constant":
                index, self.constants = self.constants, self.constants + 1
            slot = b.name or f"{b.space} {index}"
            op = External.build(self.b, space=self.where, lifetime=b.lifetime, slot=slot, index=index, **fields)
        op.attributes["plan.number"] = number
        if b.op >= 0:
            op.attributes["plan.made_by"] = b.op
        self.values[number] = op.result
        return op.result

    def launch(self, launch: Launch) -> None:
        buffers, b = self.plan.buffers, self.b
        b.loc = Location(launch.layer) if launch.layer else UNKNOWN
        b.phase = launch.phase
        reads = [self.values[n] for n in launch.reads if buffers[n].space != "host"]
        writes = [self.values[n] for n in launch.writes if n >= 0 and buffers[n].space != "host"]
        tokens = [self.tokens[p] for p in launch.waits]
        if launch.provider == "wait":
            wait = Wait.build(b, tokens, stream=launch.stream, result_types=())
            wait.attributes["plan.reads"] = launch.reads
            self.tokens.append(None)
            return
        if launch.provider == "copy" and buffers[launch.reads[0]].type is buffers[launch.writes[0]].type:
            copy = Copy.build(b, reads[0], writes[0], tokens, stream=launch.stream)
            if launch.op >= 0:
                copy.attributes["plan.op"], copy.attributes["plan.what"] = launch.op, launch.name
            self.tokens.append(copy.result)
            return
        if launch.workspace >= 0:
            writes.append(self.values[launch.workspace])
        at = _positions(launch.reads, buffers)
        to = _positions(launch.writes, buffers)
        pairs = tuple([i for w, r in launch.in_place for i in (to[w], at[r])])
        op = LaunchOp.build(
            b,
            reads,
            writes,
            tokens,
            ops=(launch.op,) if launch.op >= 0 else (),
            provider=launch.provider,
            stream=launch.stream,
            in_place=pairs,
        )
        self.tokens.append(op.result)
        op.attributes["plan.what"] = launch.name
        for key, numbers in (("plan.host_reads", launch.reads), ("plan.host_writes", launch.writes)):
            found = [(p, n) for p, n in enumerate(numbers) if n >= 0 and buffers[n].space == "host"]
            if found:
                op.attributes[key] = tuple([i for pair in found for i in pair])
        unwritten = tuple([p for p, n in enumerate(launch.writes) if n < 0])
        if unwritten:
            op.attributes["plan.unwritten"] = unwritten
        if launch.body >= 0:
            op.attributes["plan.body"] = launch.body
        if launch.workspace >= 0:
            op.attributes["plan.workspace"] = True
        if launch.makes:
            op.attributes["plan.makes"] = launch.makes
        if launch.takes:
            op.attributes["plan.takes"] = launch.takes


def _positions(reads: tuple[int, ...], buffers: list[Buffer]) -> list[int]:
    """For each operand its place among those that are not numbers of the host, nor left out."""
    out, count = [], 0
    for n in reads:
        out.append(count)
        count += n >= 0 and buffers[n].space != "host"
    return out


# ---- module to plan --------------------------------------------------------------------------------------------------


def module_to_plan(root: Op) -> Plan:
    """The plan that a module of the move dialect holds, as `plan_to_module` makes them; it is verified first."""
    with collector_paused():
        verify_plan(root)
        found = {f.attributes["sym_name"]: f for f in functions(root) if "move.plan" in f.attributes}
        try:
            plan = _read(found.pop(NAME))
            plan.bodies = [_read(found.pop(f"{NAME}_body_{i}")) for i in range(len(found))]
            _check(plan)
        except WholestepError:
            raise
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise SavedStepError(f"the module holds no whole plan: {error!r} is missing or wrong") from error
        return plan


def _read(function: Op) -> Plan:
    about = function.attributes["move.plan"]
    block = function.regions[0].block
    (arena,) = [op for op in block if op.definition is Arena and not is_pinned(op)]
    plan = Plan(
        about["function"],
        about["fingerprint"],
        about["device"],
        arena.attributes["alignment"],
        about["order"],
        about["placer"],
        arena.attributes["size"],
        about["lower_bound"],
        about["program_order_bound"],
        assumed=about["assumed"],
        **{name: about.get(name, 0) for name in BESIDE},
    )
    numbered: dict[int, Buffer] = {}
    for number, type, op, argument, lifetime, name in about["numbers"]:
        numbered[number] = Buffer(type, row_major(type.shape), "host", lifetime, op=op, argument=argument, name=name)
    number_of: dict[Value, int] = {}
    made = (Alloc, External, View, Reuse)
    ops = [op for op in block if op.definition in made]
    for op in ops:
        number = op.attributes["plan.number"]
        if number in numbered:
            raise SavedStepError(f"two buffers have the number {number}")
        number_of[op.result] = number
        numbered[number] = _buffer(op, number_of, numbered)
    plan.buffers = [numbered[i] for i in range(len(numbered))]
    taken = {pair for op in block if op.definition is LaunchOp for pair in _taken(op, number_of)}
    for number, buffer in numbered.items():
        if buffer.share == "donated" and (number, buffer.of) in taken:
            buffer.share = "in_place"
    position: dict[Value, int] = {}  # of the launch that gives a token
    for op in block:
        if op.definition is LaunchOp:
            found = _launch(op, number_of)
            tokens = LaunchOp.accesses(op)[2]
        elif op.definition is Copy:
            source, target = (number_of[v] for v in op.operands[:2])
            what, made_by = op.attributes.get("plan.what", "copy"), op.attributes.get("plan.op", -1)
            found = Launch(made_by, (source,), (target,), "copy", (), op.stream, what, op.phase, op.loc.layer)
            tokens = op.operands[2:]
        elif op.definition is Wait:
            reads = tuple(op.attributes["plan.reads"])
            found = Launch(-1, reads, (), "wait", (), op.stream, "wait", op.phase, op.loc.layer)
            tokens = op.operands
        else:
            continue
        found.waits = tuple([position[t] for t in tokens])
        if op.results:
            position[op.result] = len(plan.launches)
        plan.launches.append(found)
    plan.results = [Returned(buffer, argument, way) for buffer, argument, way in about["results"]]
    plan.note_uses()
    return plan


def _buffer(op: Op, number_of: dict[Value, int], numbered: dict[int, Buffer]) -> Buffer:
    fields = op.attributes
    type = fields["type"]
    strides = fields.get("strides") or row_major(type.shape)
    made_by = fields.get("plan.made_by", -1)
    if op.definition is Alloc:
        where = "pinned" if is_pinned(op) else "arena"
        return Buffer(type, strides, where, fields["lifetime"], offset=fields["offset"], op=made_by)
    if op.definition is External:
        own = "constant" if made_by >= 0 else "external"
        argument = -1 if made_by >= 0 else fields["index"]
        name = "" if fields["slot"] == f"{own} {fields['index']}" else fields["slot"]
        return Buffer(type, strides, own, fields["lifetime"], argument=argument, op=made_by, name=name)
    of = number_of[op.operands[0]]
    under = numbered[of]
    base = of if under.base < 0 else under.base
    if op.definition is View:
        found = Buffer(type, strides, under.space, under.lifetime, "view", base, of, fields["offset"], op=made_by)
    else:
        found = Buffer(type, strides, under.space, fields["lifetime"], "donated", base, of, op=made_by)
    return found


def is_pinned(op: Op) -> bool:
    """Whether an arena, or what lies in one, is page-locked host memory."""
    return op.attributes["space"] == space("pinned")


def _taken(op: Op, number_of: dict[Value, int]) -> list[tuple[int, int]]:
    """(new value, old value) of what a launch writes in place."""
    reads, writes, _ = LaunchOp.accesses(op)
    pairs = op.attributes["in_place"]
    out = []
    for w, r in zip(pairs[::2], pairs[1::2], strict=True):
        read = reads[r]
        while read.op is not None and read.op.definition is View:
            read = read.op.operands[0]
        out.append((number_of[writes[w]], number_of[read]))
    return out


def _launch(op: Op, number_of: dict[Value, int]) -> Launch:
    fields = op.attributes
    read, written, _ = LaunchOp.accesses(op)
    reads, writes = [number_of[v] for v in read], [number_of[v] for v in written]
    body, workspace = fields.get("plan.body", -1), -1
    if fields.get("plan.workspace"):
        workspace = writes.pop()
    host_reads, host_writes = fields.get("plan.host_reads", ()), fields.get("plan.host_writes", ())
    places = [p for p in range(len(reads) + len(host_reads) // 2) if p not in host_reads[::2]]
    pairs = fields["in_place"]
    _insert(reads, host_reads[::2], host_reads[1::2])
    _insert(writes, host_writes[::2], host_writes[1::2])
    unwritten = fields.get("plan.unwritten", ())
    skipped = (*host_writes[::2], *unwritten)
    to = [p for p in range(len(written) + len(skipped)) if p not in skipped]
    _insert(writes, unwritten, (-1,) * len(unwritten))
    return Launch(
        fields["ops"][0] if fields["ops"] else -1,
        tuple(reads),
        tuple(writes),
        fields["provider"],
        tuple([(to[w], places[r]) for w, r in zip(pairs[::2], pairs[1::2], strict=True)]),
        fields["stream"],
        fields["plan.what"],
        op.phase,
        op.loc.layer,
        body,
        workspace,
        fields.get("plan.makes", 0),
        takes=fields.get("plan.takes", 0),
    )


def _insert(numbers: list[int], positions: tuple[int, ...], given: tuple[int, ...]) -> None:
    """Puts numbers at the positions that they have in the finished list, from the first to the last."""
    for position, number in zip(positions, given, strict=True):
        if not 0 <= position <= len(numbers):
            raise SavedStepError(f"a launch has an operand at place {position} of {len(numbers)}")
        numbers.insert(position, number)


def _check(plan: Plan) -> None:
    """What the verifier of the dialect cannot see: numbers that must name something."""
    for each in (plan, *plan.bodies):
        count = len(each.buffers)
        there = {n for n, b in enumerate(each.buffers) if b.space != "host" or b.argument >= 0}
        for launch in each.launches:
            for number in (*launch.reads, *launch.writes, launch.workspace):
                if not -1 <= number < count:
                    raise SavedStepError(f"a launch of {launch.name} names buffer {number} of {count}")
            if lost := set(launch.reads) - there - {-1}:
                raise SavedStepError(f"a launch of {launch.name} reads number {min(lost)}, which nothing has written")
            there.update(launch.writes)
            if launch.body >= len(plan.bodies):
                raise SavedStepError(f"a launch runs plan {launch.body} of {len(plan.bodies)}")
        for returned in each.results:
            if not 0 <= returned.buffer < count or returned.way not in WAYS:
                raise SavedStepError(f"a result is buffer {returned.buffer} of {count}, {returned.way}")
        for buffer in each.buffers:
            if buffer.space not in SPACES or buffer.share not in SHARES:
                raise SavedStepError(f"a buffer lies in {buffer.space}, {buffer.share}")


# ---- files -----------------------------------------------------------------------------------------------------------


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes a plan as text."""
    text = print_op(plan_to_module(plan), locations=True)
    Path(path).write_text(f"// wholestep plan {VERSION}, sha256 {digest(text)}\n{text}", encoding="utf-8")


def load(path: str | os.PathLike[str]) -> Plan:
    """A plan that `save` wrote. It is verified as it is read: overlapping buffers, reads of nothing and so on.

    Text without the line that has its checksum, such as mlir-opt prints, is believed as far as it can be verified.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SavedStepError(f"{path} is no text, so it is no plan; plan the step again and save it") from error
    try:
        return module_to_plan(parse(_unchanged(text), context(), str(path)))
    except WholestepError as error:
        raise SavedStepError(
            f"{path} holds no plan that can be run: {error}; plan the step again and save it"
        ) from error


def _unchanged(text: str) -> str:
    """The text of a file, if it is what its first line says."""
    told = FIRST_LINE.match(text)
    if told is None and text.startswith("// wholestep"):
        raise SavedStepError("it was changed or damaged since it was saved (its first line tells no checksum)")
    if told is None:
        return text
    if int(told[1]) != VERSION:
        raise SavedStepError(f"it is version {told[1]} of the format, and this Wholestep reads version {VERSION}")
    if digest(text[told.end() :]) != told[2]:
        raise SavedStepError(
            "it was changed or damaged since it was saved (its first line is the checksum of the rest)"
        )
    return text


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# ---- differences -----------------------------------------------------------------------------------------------------


def describe_changes(old: Plan, new: Plan) -> str:
    """What is different from one plan to the other, in words; empty where nothing is."""
    lines = []
    if old.fingerprint != new.fingerprint:
        lines.append("they are plans of different programs")
    for name, unit in (("arena", " bytes"), ("lower_bound", " bytes"), ("alignment", " bytes"), ("device", "")):
        left, right = getattr(old, name), getattr(new, name)
        if left != right:
            change = f" ({right / left - 1:+.2%})" if unit and left else ""
            lines.append(f"{name.replace('_', ' ')}: {left}{unit} -> {right}{unit}{change}")
    for name in ("order", "placer"):
        if getattr(old, name) != getattr(new, name):
            lines.append(f"{name}: {getattr(old, name)} -> {getattr(new, name)}")
    lines += _launch_changes(old, new)
    if old.fingerprint == new.fingerprint:
        lines += _same_launch_changes(old, new)
        lines += _buffer_changes(old, new) if len(old.buffers) == len(new.buffers) else []
        for name in ("results", "assumed", "program_order_bound", *BESIDE):
            if getattr(old, name) != getattr(new, name):
                lines.append(f"other {name.replace('_', ' ')}")
    for number, (left, right) in enumerate(zip(old.bodies, new.bodies, strict=False)):
        inner = describe_changes(left, right)
        lines += [f"in the plan per micro-batch {number}: {line}" for line in inner.splitlines()]
    return "\n".join(lines)


def _launch_changes(old: Plan, new: Plan) -> list[str]:
    lines = []
    left, right = (Counter(x.name for x in plan.launches) for plan in (old, new))
    for name in sorted(left.keys() | right.keys()):
        if left[name] != right[name]:
            lines.append(f"launches of {name}: {left[name]} -> {right[name]}")
    place = {x.op: p for p, x in enumerate(old.launches) if x.op >= 0}
    moved = [(abs(place[x.op] - p), p, x) for p, x in enumerate(new.launches) if place.get(x.op, p) != p]
    if moved:
        _, p, far = max(moved, key=lambda m: (m[0], -m[1]))
        what = f"{far.name} of {far.layer}" if far.layer else far.name
        lines.append(f"{len(moved)} launches stand elsewhere; {what} moved furthest, from {place[far.op]} to {p}")
    return lines


def _same_launch_changes(old: Plan, new: Plan) -> list[str]:
    """What is different about launches of the same ops."""
    before = {x.op: x for x in old.launches if x.op >= 0}
    pairs = [(before[x.op], x) for x in new.launches if x.op in before]
    lines = []
    for name in ("provider", "stream", "phase", "layer"):
        changed = Counter((getattr(a, name), getattr(b, name)) for a, b in pairs)
        lines += [f"{n} launches: {name} {a} -> {b}" for (a, b), n in sorted(changed.items()) if a != b]
    for name in ("reads", "writes", "in_place", "waits", "body", "workspace", "makes", "takes"):
        if count := sum(getattr(a, name) != getattr(b, name) for a, b in pairs):
            lines.append(f"{count} launches: other {name}")
    return lines


def _buffer_changes(old: Plan, new: Plan) -> list[str]:
    lines = []
    pairs = list(zip(old.buffers, new.buffers, strict=True))
    shares = Counter((a.share, b.share) for a, b in pairs if a.share != b.share)
    for (before, after), count in sorted(shares.items()):
        lines.append(f"{count} buffers: {before} -> {after}")
    moved = [b for a, b in pairs if a.base < 0 and b.base < 0 and a.offset != b.offset]
    if moved:
        lines.append(f"{len(moved)} buffers lie at another offset")
    for name in ("type", "strides", "space", "lifetime", "of", "argument", "op", "name"):
        if count := sum(getattr(a, name) != getattr(b, name) for a, b in pairs):
            lines.append(f"{count} buffers: other {name}")
    return lines
