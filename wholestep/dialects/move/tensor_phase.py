"""The rules of a plan that has no order yet: data dependence alone says what comes first."""

from __future__ import annotations

from ...ir.core import Op
from ...ir.verify import InvalidOp
from .buffers import External, Reuse
from .flat import Flat
from .writes import overlapping_writes


def check_tensor_phase(flat: Flat) -> None:
    """No order, no sharing of memory, every value written once, and no launch that needs itself."""
    for arena in flat.arenas:
        raise InvalidOp(arena, _early("an arena"))
    for op in flat.sequence:
        _check_free(flat, op)
    for version in flat.versions:
        if version.op.definition is Reuse:
            raise InvalidOp(version.op, _early("a move.reuse"))
        if version.op.attributes.get("offset", -1) != -1:
            raise InvalidOp(version.op, _early("an offset"))
        name = flat.name(version.buffer)
        if version.op.definition is External and version.writes:
            action = version.writes[0][0]
            problem = f"{flat.action(action)} writes {name}; tensors of the user are written once there is an order"
            raise InvalidOp(flat.actions[action], problem)
        clash = overlapping_writes(flat, version) if len(version.writes) > 1 else None
        if clash:
            (first, _), (second, _) = sorted(version.writes[i] for i in clash)
            raise InvalidOp(
                flat.actions[second], f"{name} is written by {flat.action(first)} and {flat.action(second)}"
            )
        if version.reads and not version.given and not version.writes:
            action = version.reads[0][0]
            raise InvalidOp(flat.actions[action], f"{flat.action(action)} reads {name}, which nothing writes")
        if version.given_back and not version.given and not version.writes:
            assert flat.result is not None
            raise InvalidOp(flat.result, f"it gives back {name}, which nothing writes")
    _check_acyclic(flat)


def _early(what: str) -> str:
    return f'{what} has no place in a plan with move.phase = "tensor": it comes with an order'


def _check_free(flat: Flat, op: Op) -> None:
    number = flat.number.get(op)
    if number is None:
        raise InvalidOp(op, _early("a wait"))
    if op.attributes["stream"] or op.attributes.get("in_place"):
        raise InvalidOp(op, _early("in_place" if op.attributes.get("in_place") else "a stream"))
    if op.definition.accesses(op)[2]:  # type: ignore[attr-defined]
        raise InvalidOp(op, _early("a token to wait for"))


def _check_acyclic(flat: Flat) -> None:
    """Takes launches away that need nothing more; whatever is left needs itself."""
    waiting = [0] * len(flat.actions)
    for number, reads in enumerate(flat.reads):
        waiting[number] = sum([len(flat.versions[v].writes) for v in {flat.version[b] for b in reads}])
    missing = [len(version.writes) for version in flat.versions]
    readers = [sorted({action for action, _ in version.reads}) for version in flat.versions]
    ready = [number for number, count in enumerate(waiting) if not count]
    done = 0
    while ready:
        number = ready.pop()
        done += 1
        for buffer in flat.writes[number]:
            version = flat.version[buffer]
            missing[version] -= 1
            if not missing[version]:
                for reader in readers[version]:
                    waiting[reader] -= len(flat.versions[version].writes)
                    if not waiting[reader]:
                        ready.append(reader)
    if done < len(flat.actions):
        stuck = next(number for number, count in enumerate(waiting) if count)
        missed = next(b for b in flat.reads[stuck] if missing[flat.version[b]])
        problem = f"{flat.action(stuck)} reads {flat.name(missed)}, which cannot be made without it: a cycle"
        raise InvalidOp(flat.actions[stuck], problem)
