"""Proves a plan: reads find their value, old values are dead where memory is taken, live buffers never overlap.

`verify_plan` runs over flat lists in about the time it takes to read the plan. Three phases, each with its rules:
"tensor" (data dependence alone), "ordered" (issue order, streams, tokens), "placed" (addresses).
"""

from __future__ import annotations

from ...ir.builtin import functions
from ...ir.collector import collector_paused
from ...ir.core import Op
from ...ir.verify import InvalidOp, verify
from .actions import Collective, Copy, Launch
from .base import BEFORE_BACKWARD, GIVEN_BACK, READ_ONLY, can_copy, extent, reaches, space_text, unit_problem
from .buffers import Alloc, External
from .flat import Flat, Version, flatten, plans
from .order import Order, check_tokens
from .overlap import check_overlap
from .tensor_phase import check_tensor_phase
from .writes import SeenWrites, are_apart, overlapping_writes

PHASES = ("tensor", "ordered", "placed")


def verify_plan(module: Op) -> None:
    """Raises a VerifyError for the first plan of a module that breaks a rule of its phase (`move.phase`)."""
    with collector_paused():
        found = plans(module)
        phase = module.attributes.get("move.phase")
        if phase not in PHASES:
            raise InvalidOp(module, f'its attribute "move.phase" is {phase!r}; expected one of {", ".join(PHASES)}')
        if not found:
            raise InvalidOp(module, "it holds no plan: no function has a move op")
        for function in found:
            check_tokens(function)
        verify(module)
        sizes = {f.attributes["sym_name"]: len(f.regions[0].block) for f in functions(module)}
        for function in found:
            flat = flatten(function)
            check_memory(flat)
            check_callees(flat, sizes)
            if phase == "tensor":
                check_tensor_phase(flat)
            else:
                check_order(flat, _units(module), placed=phase == "placed")


def check_order(flat: Flat, units: list[str], placed: bool) -> None:
    """The rules of an ordered plan, and those of a placed one."""
    check_reach(flat, units)
    order = Order(flat, len(units))
    check_in_place(flat)
    for version in flat.versions:
        check_writes(flat, version)
        check_reads(flat, order, version)
        check_taken(flat, order, version)
    check_given_back(flat)
    check_joined(flat, order, units)
    if placed:
        check_placement(flat)
        check_overlap(flat, order)
        return
    for op in flat.storages:
        if op.definition is Alloc and op.attributes["offset"] != -1:
            raise InvalidOp(op, 'it has an offset; a plan with addresses has move.phase = "placed"')


def _units(module: Op) -> list[str]:
    units = module.attributes.get("move.streams")
    if type(units) is not list or not units:
        raise InvalidOp(module, 'it needs "move.streams", the list of units that run its streams, such as ["cuda:0"]')
    for unit in units:
        problem = unit_problem(unit)
        if problem:
            raise InvalidOp(module, problem)
    return units


# ---- memory: what is declared ----


def check_memory(flat: Flat) -> None:
    """Each external names an argument of its own, and lifetimes say what is true."""
    arguments: dict[int, Op] = {}
    for op in flat.storages:
        if op.definition is External:
            other = arguments.setdefault(op.attributes["index"], op)
            if other is not op:
                slots = f"{other.attributes['slot']!r} and {op.attributes['slot']!r}"
                raise InvalidOp(op, f"{slots} are both argument {op.attributes['index']}; one external names it")
    for version in flat.versions:
        _check_lifetime(flat, version)


def _check_lifetime(flat: Flat, version: Version) -> None:
    lifetime, storage = version.op.attributes["lifetime"], flat.storages[version.storage]
    name = flat.name(version.buffer)
    if version.old >= 0:
        kept = storage.attributes["lifetime"]
        if storage.definition is External and lifetime != kept:
            raise InvalidOp(version.op, f"{name} lies in an external that is {kept}, so that is its lifetime")
        if storage.definition is Alloc and lifetime not in Alloc.attribute_fields["lifetime"].choices:
            raise InvalidOp(version.op, f"{name} lies in memory of the plan, which holds no {lifetime}")
    if version.writes and lifetime in READ_ONLY:
        action = version.writes[0][0]
        raise InvalidOp(flat.actions[action], f"{flat.action(action)} writes {name}; a {lifetime} is never written")
    if version.given and version.writes:
        action = version.writes[0][0]
        problem = f"{flat.action(action)} writes {name}, which holds a value; a new value goes to a move.reuse of it"
        raise InvalidOp(flat.actions[action], problem)
    if version.given_back and storage.definition is Alloc and lifetime not in GIVEN_BACK:
        assert flat.result is not None
        raise InvalidOp(flat.result, f"it gives back {name}; what is given back is {' or '.join(GIVEN_BACK)}")
    if lifetime == "workspace":
        users = {action for action, _ in (*version.writes, *version.reads)}
        if len(users) > 1:
            first, second = sorted(users)[:2]
            problem = f"{flat.action(second)} uses {name}, the workspace of {flat.action(first)}"
            raise InvalidOp(flat.actions[second], problem)
    if lifetime == "transient":
        _check_transient(flat, version, name)


def _check_transient(flat: Flat, version: Version, name: str) -> None:
    made = next((a for a, _ in version.writes if flat.actions[a].phase in BEFORE_BACKWARD), None)
    if made is None:
        return
    for action, _ in version.reads:
        phase = flat.actions[action].phase
        if phase and phase not in BEFORE_BACKWARD:
            problem = f"{flat.action(action)} ({phase}) reads {name}, written by {flat.action(made)}"
            raise InvalidOp(flat.actions[action], f"{problem} ({flat.actions[made].phase}): that is an activation")


def check_callees(flat: Flat, sizes: dict[str, int]) -> None:
    """A launch computes ops that exist."""
    for number, op in enumerate(flat.actions):
        if op.definition is not Launch or "callee" not in op.attributes:
            continue
        name = op.attributes["callee"].name
        if name not in sizes:
            raise InvalidOp(op, f"{flat.action(number)} runs @{name}, which is no function of this module")
        if any(not 0 <= i < sizes[name] for i in op.attributes["ops"]):
            raise InvalidOp(
                op, f"{flat.action(number)} runs ops {list(op.attributes['ops'])} of the {sizes[name]} of @{name}"
            )


# ---- order ----


def check_reach(flat: Flat, units: list[str]) -> None:
    """Streams exist, and what runs on one touches memory its unit reaches."""
    for op in flat.sequence:
        if op.attributes["stream"] >= len(units):
            problem = f"it runs on stream {op.attributes['stream']}; move.streams lists {len(units)}"
            raise InvalidOp(op, problem)
    where = [op.attributes["space"] for op in flat.storages]
    for number, op in enumerate(flat.actions):
        unit = units[op.attributes["stream"]]
        touched = [*flat.reads[number], *flat.writes[number]]
        if op.definition is Copy:
            source, target = (where[flat.storage(b)] for b in touched)
            if not can_copy(unit, source, target):
                from_, to = (f"{flat.name(b)} in {space_text(where[flat.storage(b)])}" for b in touched)
                raise InvalidOp(op, f"{flat.action(number)} runs on {unit}, which cannot copy {from_} to {to}")
            continue
        for buffer in touched:
            place = where[flat.storage(buffer)]
            if not reaches(unit, place):
                problem = f"{flat.action(number)} runs on {unit}, which does not reach {flat.name(buffer)}"
                raise InvalidOp(op, f"{problem} in {space_text(place)}; copy it first")


def check_in_place(flat: Flat) -> None:
    """What an action both reads and writes is declared, and its elements are in the same places."""
    for number, op in enumerate(flat.actions):
        reads, writes = flat.reads[number], flat.writes[number]
        pairs = op.attributes["in_place"] if op.definition in (Launch, Collective) else ()
        declared = set(zip(pairs[::2], pairs[1::2], strict=True))
        for write, read in declared:
            _check_pair(flat, number, writes[write], reads[read])
        at: dict[int, list[int]] = {}
        for i, buffer in enumerate(reads):
            at.setdefault(flat.storage(buffer), []).append(i)
        for j, buffer in enumerate(writes):
            for i in at.get(flat.storage(buffer), ()):
                if (j, i) in declared or are_apart(flat, buffer, reads[i]):
                    continue
                if any(w == j and flat.region(reads[r]) == flat.region(reads[i]) for w, r in declared):
                    continue  # the same elements once more, as in x * x
                problem = f"{flat.action(number)} reads {flat.name(reads[i])} and writes {flat.name(buffer)}"
                raise InvalidOp(op, f"{problem} in the same memory, which its in_place does not say")


def _check_pair(flat: Flat, number: int, write: int, read: int) -> None:
    told = f"{flat.action(number)} says that it writes {flat.name(write)} in place of {flat.name(read)}"
    if flat.versions[flat.version[write]].old != flat.version[read]:
        raise InvalidOp(flat.actions[number], f"{told}, yet it is no move.reuse of it")
    if flat.region(write) != flat.region(read):
        raise InvalidOp(flat.actions[number], f"{told}, yet their elements are not in the same places")


def check_writes(flat: Flat, version: Version) -> None:
    """One value has one writer, or several for disjoint parts."""
    for action, buffer in version.writes:
        if 0 in (flat.strides(buffer) or ()) and flat.type(buffer).size > 1:
            raise InvalidOp(flat.actions[action], f"{flat.action(action)} writes {flat.name(buffer)}, a broadcast")
    if len(version.writes) < 2:
        return
    clash = overlapping_writes(flat, version)
    if clash is None:
        return
    (first, one), (second, other) = sorted(version.writes[i] for i in clash)
    if one == other:
        problem = f"{flat.action(first)} has written {flat.name(one)} before {flat.action(second)} writes it again"
    else:
        problem = (
            f"{flat.action(first)} writes {flat.name(one)} and {flat.action(second)} {flat.name(other)}, which meet"
        )
    raise InvalidOp(flat.actions[second], f"{problem}; a second value in the same memory is a move.reuse")


def check_reads(flat: Flat, order: Order, version: Version) -> None:
    """Every read comes after the writes of what it reads."""
    if version.given:
        return
    writes = version.writes
    if not version.reads:
        return
    complete = sum([flat.type(b).bytes for _, b in writes]) == flat.type(version.buffer).bytes
    last = order.last(action for action, _ in writes)
    shown = SeenWrites(flat, version) if writes and (len(writes) > 1 or not complete) else None
    for action, buffer in version.reads:
        seen = None
        if shown is not None and not (complete and buffer == version.buffer):
            seen = shown(buffer)
        needed, covered = (last.values(), complete) if seen is None else (order.last(seen[0]).values(), seen[1])
        late = next((w for w in needed if not order.before(w, action)), None)
        if late is not None:
            raise InvalidOp(flat.actions[action], _not_yet(flat, order, action, buffer, late))
        if not writes or not covered:
            what = "nothing writes" if not needed else "is written only in part"
            raise InvalidOp(flat.actions[action], f"{flat.action(action)} reads {flat.name(buffer)}, which {what}")


def check_given_back(flat: Flat) -> None:
    """What is given back is there, all of it."""
    if flat.result is None:
        return
    number = {value: buffer for buffer, value in enumerate(flat.values)}
    for value in flat.result.operands:
        buffer = number[value]
        version = flat.versions[flat.version[buffer]]
        if version.given or (len(version.writes) == 1 and version.writes[0][1] == version.buffer):
            continue
        seen = SeenWrites(flat, version)(buffer) if version.writes else ([], False)
        if seen is None or not seen[1]:
            what = "is written only in part" if seen is None or seen[0] else "nothing writes"
            raise InvalidOp(flat.result, f"it gives back {flat.name(buffer)}, which {what}")


def _not_yet(flat: Flat, order: Order, reader: int, buffer: int, writer: int) -> str:
    told = f"{flat.action(reader)} reads {flat.name(buffer)}"
    if reader == writer:
        return f"{told}, which it writes itself; in place is a move.reuse of the value it reads"
    if writer > reader:
        return f"{told} before it is written, by {flat.action(writer)}"
    streams = f"on stream {order.stream[reader]}", f"on stream {order.stream[writer]}"
    return f"{told} {streams[0]}, and nothing orders it after {flat.action(writer)} {streams[1]}, which writes it"


def check_taken(flat: Flat, order: Order, version: Version) -> None:
    """Where a value takes the memory of an older one, the older one is written and nobody reads it any more."""
    if version.old < 0 or not version.writes:
        return
    old = flat.versions[version.old]
    name, new = flat.name(old.buffer), flat.name(version.buffer)
    if not old.given and not old.writes:
        raise InvalidOp(version.op, f"{new} takes the memory of {name}, which nothing writes")
    last_reads = order.last(action for action, _ in old.reads)
    last_writes = order.last(action for action, _ in old.writes)
    for writer, _ in version.writes:
        told = f"{flat.action(writer)} writes {new} in the memory of {name}"
        if old.given_back:
            raise InvalidOp(flat.actions[writer], f"{told}, which is given back at the end")
        for verb, last in (("writes", last_writes), ("reads", last_reads)):
            for other in last.values():
                if order.before(other, writer) or (other == writer and verb == "reads"):  # in place: see check_in_place
                    continue
                if other > writer:
                    why = f"which {flat.action(other)} {verb} afterwards"
                else:
                    after = f"{flat.action(other)} on stream {order.stream[other]}"
                    why = f"and nothing orders it after {after}, which {verb} that"
                raise InvalidOp(flat.actions[writer], f"{told}, {why}")


def check_joined(flat: Flat, order: Order, units: list[str]) -> None:
    """What the first stream's unit does on other streams is over when that stream is: the next step starts there."""
    for stream, action in order.last(range(len(flat.actions))).items():
        if units[stream] == units[0] and stream and order.end[stream] < order.place[action]:
            problem = f"{flat.action(action)} runs on stream {stream}, and nothing waits for it before the plan is over"
            raise InvalidOp(flat.actions[action], problem)


# ---- addresses ----


def check_placement(flat: Flat) -> None:
    """Every alloc lies in its arena, aligned."""
    for op in flat.storages:
        if op.definition is not Alloc:
            continue
        arena = op.operands[0].op if op.operands else None
        offset = op.attributes["offset"]
        if arena is None or offset < 0:
            raise InvalidOp(op, "it has no place; in a placed plan every alloc has an arena and an offset")
        end = offset + extent(op.attributes["type"], op.attributes.get("strides"))
        if end > arena.attributes["size"]:
            size = arena.attributes["size"]
            raise InvalidOp(op, f"it covers bytes {offset} to {end} of an arena of {size} bytes")
        alignment = max(arena.attributes["alignment"], op.attributes["type"].element.bytes)
        if offset % alignment:
            raise InvalidOp(op, f"its offset {offset} is not a multiple of {alignment}")
