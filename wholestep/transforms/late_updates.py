"""Updates that wait for the next forward: one step becomes three programs that share all state.

What the update reads of a step (gradients, the norm of all of them, whether they are finite) is *kept* between steps,
in memory of its own. `first` is a step without its update, `update` that update alone, and `both` the update of the
step before with a step without its own: each weight is updated shortly before forward reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..capture.slots import Slot
from ..errors import InputError
from ..ir.builtin import add_function, finish_function, functions, module
from ..ir.core import Block, Op, Value
from ..ir.passes import run_pipeline
from ..training.build import Program, Result, describe
from .regions import is_view
from .side_updates import ENDING, runs_beside

#: the kind of slots that hold what an update reads of the step before
KEPT = "kept"
#: state that updates change
UPDATED = ("parameter", "optimizer_state", "copy", "ema", "scaler")
#: attribute of a function: arguments that may change though the rest of the step may still fail
AHEAD = "step.ahead"
#: attribute of a function whose updates are to run on a stream of their own, beside forward
BESIDE = "step.beside_forward"
#: bytes of gradients that are updated together, before the first weight of them is read
TOGETHER = 32 << 20


@dataclass(slots=True)
class Late:
    """The three programs of a step whose updates wait."""

    first: Program
    both: Program
    update: Program


def late_updates(program: Program, beside: bool = False) -> Late:
    """The programs of a step whose update waits for the next forward. beside: there it has a stream of its own."""
    if runs_beside(program.function):
        raise InputError(
            "side-updates runs updates beside backward of their own step, and these wait for the next forward; "
            'leave it out, or compile with updates="beside_next_forward"'
        )
    cut = _Cut(program)
    first, both, update = _Writer(program), _Writer(program), _Writer(program)
    for slot in program.slots:  # all of these, in their order, whether somebody reads them or not
        for writer in {"batch": (first, both), "copy": (first, both, update)}.get(slot.kind, ()):
            writer.argument(slot)
    inner = dict[Value, Value]()
    first.run(cut.rest, inner)
    outer = update.kept(cut)
    update.run(cut.late, outer, "update")
    both_outer = both.kept(cut)
    both_inner = both.interleaved(cut, both_outer)
    if beside:
        both.function.attributes[BESIDE] = True
    return Late(
        first.finished(cut.returned(inner, first), cut),
        both.finished([*cut.updates(both_outer, both), *cut.returned(both_inner, both)], cut),
        update.finished(cut.updates(outer, update), cut),
    )


class _Cut:
    """Where a step is cut in two: what its update is made of, and what that reads of the rest."""

    def __init__(self, program: Program):
        self.program = program
        self.block = program.function.regions[0].block
        last = self.block.last
        assert last is not None
        self.slot_of = dict(zip(self.block.arguments, program.slots, strict=True))
        pairs = list(zip(program.results, last.operands, strict=True))
        self.deferred = [(r.slot, v) for r, v in pairs if r.slot is not None and r.slot.kind in UPDATED]
        self.others = [(r, v) for r, v in pairs if r.slot is None or r.slot.kind not in UPDATED]
        for slot, value in self.deferred:
            if value.op is not None and value.op.phase not in ENDING:
                raise InputError(
                    f"{slot.name} is changed in the {value.op.phase} pass, so it cannot wait for the next one; "
                    'compile with updates="in_step"'
                )
        self.from_step = self._from_step()
        self.kept: dict[Value, Slot] = {}
        self._choose([v for _, v in self.deferred])
        self.late = self.slice([v for _, v in self.deferred], self.kept)
        self.rest = self.slice([*(v for _, v in self.others), *self.kept])

    # ---- what is kept ------------------------------------------------------------------------------------------------

    def _from_step(self) -> set[Value]:
        """Values that follow from what the step has computed, and not from state and hyper-parameters alone."""
        found: set[Value] = set()
        for op in self.block:
            if op.operands and (op.phase not in ENDING or any(v in found for v in op.operands)):
                found.update(op.results)
        return found

    def is_kept(self, value: Value) -> bool:
        """Whether the update finds a value in memory instead of computing it: gradients, and numbers made of them all.
        What a batch brings, and buffers that forward changes, are others by then."""
        if value.op is None:
            slot = self.slot_of[value]
            if slot.kind == "random_key":
                raise InputError(
                    "the optimizer's update draws random numbers, which would be those of the next step; compile with "
                    'updates="in_step"'
                )
            return slot.kind in ("batch", "buffer")
        if not value.op.operands:
            return False
        return value.op.phase not in ENDING or (
            value.op.phase == "clip" and not value.type.rank and value in self.from_step
        )

    def _choose(self, wanted: Iterable[Value]) -> None:
        """Decides what is kept: the narrow value where a wide one is only a cast of it, and once what several see."""
        reached: dict[Value, None] = {}
        seen: set[Value] = set()
        stack = list(wanted)
        while stack:
            value = stack.pop()
            if value in seen:
                continue
            seen.add(value)
            if self.is_kept(value):
                reached[value] = None
            elif value.op is not None:
                stack += value.op.operands
        bases: dict[Value, list[Value]] = {}
        for value in reached:
            bases.setdefault(self.behind(value)[-1], []).append(value)
        chosen: dict[Value, None] = {}
        for base, values in bases.items():
            if base.type.bytes <= sum(v.type.bytes for v in values):
                chosen[base] = None
            else:
                chosen.update((min(self.behind(v), key=lambda b: b.type.bytes), None) for v in values)
        order = {v: i for i, v in enumerate([*self.block.arguments, *(r for op in self.block for r in op.results)])}
        for number, value in enumerate(sorted(chosen, key=order.__getitem__)):
            made, where = ("", "") if value.op is None else (value.op.name.removeprefix("step."), value.op.loc.layer)
            name = f"{made or 'value'} {number}" + (f" of {where}" if where else "")
            self.kept[value] = Slot(KEPT, name, (KEPT, number), value.type)

    def behind(self, value: Value) -> list[Value]:
        """A value and what it is a view or a cast of, one after the other."""
        found = [value]
        while (op := found[-1].op) is not None and len(op.operands) == 1 and (is_view(op) or op.name == "step.cast"):
            if op.operands[0].op is None:
                break  # state, which the update changes
            found.append(op.operands[0])
        return found

    # ---- the parts ---------------------------------------------------------------------------------------------------

    def slice(self, values: Iterable[Value], known: Iterable[Value] = ()) -> list[Op]:
        """The ops that values need, in the order of the program; nothing is needed for what is known."""
        there, needed = set(known), set[Op]()
        stack = [v for v in values if v not in there]
        while stack:
            op = stack.pop().op
            if op is not None and op not in needed:
                needed.add(op)
                stack += [v for v in op.operands if v not in there]
        return [op for op in self.block if op in needed]

    def updates(self, mapping: dict[Value, Value], writer: _Writer) -> list[tuple[Result, Value]]:
        """The results of an update."""
        return [(Result("state", slot), writer.value(value, mapping)) for slot, value in self.deferred]

    def returned(self, mapping: dict[Value, Value], writer: _Writer) -> list[tuple[Result, Value]]:
        """The results of a step without its update."""
        kept = [(Result("state", slot), value) for value, slot in self.kept.items()]
        return [(r, writer.value(v, mapping)) for r, v in (*self.others, *kept)]

    def groups(self) -> list[tuple[int, list[Value]]]:
        """New state that is computed together, and the op of the rest before which that is done, by its number."""
        position = {op: i for i, op in enumerate(self.rest)}
        arguments = {slot.source: value for value, slot in self.slot_of.items()}
        owned: dict[str, list[Value]] = {}  # by what they belong to: a parameter, or the loss scale
        first: dict[str, int] = {}
        size: dict[str, int] = {}
        for slot, value in self.deferred:
            owner = "" if slot.kind == "scaler" else slot.source[1]
            used = [position[u] for u in arguments[slot.source].uses if u in position]
            owned.setdefault(owner, []).append(value)
            first[owner] = min([*used, first.get(owner, len(self.rest))])
            size[owner] = max(size.get(owner, 0), slot.type.bytes)
        found: list[tuple[int, list[Value]]] = []
        filled = TOGETHER
        for owner in sorted(owned, key=lambda o: first[o] % len(self.rest)):  # what nobody reads comes first
            if filled + size[owner] > TOGETHER:
                found.append((first[owner] % len(self.rest), []))
                filled = 0
            found[-1][1].extend(owned[owner])
            filled += size[owner]
        return found


class _Writer:
    """Writes one program, of pieces of another."""

    def __init__(self, program: Program):
        self.program, self.root = program, module()
        name = program.function.attributes["sym_name"]
        for function in functions(program.module):
            if function is program.function:
                self.function = add_function(self.root, name, [])
            else:
                self.root.regions[0].block.append(function.clone())
        for key, value in program.function.attributes.items():
            if key not in ("sym_name", "function_type", "arg_attrs", "res_attrs"):
                self.function.attributes[key] = value
        self.block: Block = self.function.regions[0].block
        self.slots: list[Slot] = []
        self.arguments: dict[tuple[object, ...], Value] = {}
        self.slot_of = dict(zip(program.function.regions[0].block.arguments, program.slots, strict=True))

    def argument(self, slot: Slot) -> Value:
        if slot.source not in self.arguments:
            self.arguments[slot.source] = self.block.add_argument(slot.type, slot.name)
            self.slots.append(slot)
        return self.arguments[slot.source]

    def value(self, value: Value, mapping: dict[Value, Value]) -> Value:
        """What a value of the step is here."""
        if value not in mapping and value.op is None:
            mapping[value] = self.argument(self.slot_of[value])
        return mapping[value]

    def kept(self, cut: _Cut) -> dict[Value, Value]:
        """What an update finds instead of computing it."""
        return {value: self.argument(slot) for value, slot in cut.kept.items()}

    def run(self, ops: Iterable[Op], mapping: dict[Value, Value], phase: str = "") -> None:
        """Copies ops; all of one phase, where it is given."""
        for op in ops:
            for operand in op.operands:
                self.value(operand, mapping)
            copy = op.clone(mapping)
            if phase:
                copy.attributes["phase"] = phase
            self.block.append(copy)

    def interleaved(self, cut: _Cut, outer: dict[Value, Value]) -> dict[Value, Value]:
        """The update of the step before, each part of it shortly before its first reader, and a step; gives what the
        values of the step are."""
        inner: dict[Value, Value] = {}
        groups, done = cut.groups(), set[Op]()
        arguments = {slot.source: value for value, slot in self.slot_of.items()}
        for position, op in enumerate(cut.rest):
            while groups and groups[0][0] <= position:
                values = groups.pop(0)[1]
                ops = [o for o in cut.slice(values, cut.kept) if o not in done]
                done.update(ops)
                self.run(ops, outer, "update")
                new = set(values)
                inner.update((arguments[s.source], self.value(v, outer)) for s, v in cut.deferred if v in new)
            self.run([op], inner)
        return inner

    def finished(self, results: Sequence[tuple[Result, Value]], cut: _Cut) -> Program:
        """The program with these results."""
        places = {slot.source: i for i, slot in enumerate(self.slots)}
        for result, _ in results:
            if result.slot is not None and result.slot.source not in places:
                self.argument(result.slot)
                places[result.slot.source] = len(places)
        listed = [r for r, _ in results]
        finish_function(self.function, [v for _, v in results], *describe(self.slots, listed))
        changed = {r.slot.source for r in listed if r.slot is not None}
        if any(slot.kind == KEPT and slot.source in changed for slot in self.slots):  # not the update alone
            deferred = {slot.source for slot, _ in cut.deferred}
            self.function.attributes[AHEAD] = [
                i for i, slot in enumerate(self.slots) if slot.kind == KEPT or slot.source in deferred & changed
            ]
        run_pipeline(self.root, "cse,dce")
        return replace(self.program, module=self.root, function=self.function, slots=self.slots, results=listed)
