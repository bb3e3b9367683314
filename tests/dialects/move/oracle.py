"""A second opinion on small plans, by brute force: reachability along tokens and streams, all pairs of memory.

It shares no code with the verifier. It knows plans whose buffers are written whole, once.
"""

from __future__ import annotations

from itertools import combinations

from wholestep.ir import Op, Value


def accesses(op: Op) -> tuple[list[Value], list[Value], list[Value]]:
    operands = list(op.operands)
    if op.name == "move.copy":
        return operands[:1], operands[1:2], operands[2:]
    reads, writes, _ = op.attributes["operandSegmentSizes"].values
    return operands[:reads], operands[reads : reads + writes], operands[reads + writes :]


def reachable(actions: list[Op], block: list[Op]) -> dict[Op, set[Op]]:
    """Per action, all that have finished before it starts."""
    edges: dict[Op, set[Op]] = {}
    waits: dict[int, set[Op]] = {}
    previous: dict[int, Op] = {}
    for op in block:
        if op.name == "move.wait":
            waits.setdefault(op.attributes["stream"], set()).update(v.owner for v in op.operands)
        elif op in actions:
            stream = op.attributes["stream"]
            edges[op] = {v.owner for v in accesses(op)[2]} | waits.get(stream, set())
            if stream in previous:
                edges[op].add(previous[stream])
            previous[stream] = op
    before: dict[Op, set[Op]] = {}
    for op in actions:  # edges lead to earlier ones
        before[op] = set().union(*({e} | before[e] for e in edges[op]))
    return before


def joined(module: Op, block: list[Op], actions: list[Op], before: dict[Op, set[Op]]) -> bool:
    """Whether all that the first stream's unit does is over when that stream is."""
    units = module.attributes["move.streams"]
    seen = {op for op in actions if op.attributes["stream"] == 0}
    seen |= {v.owner for op in block if op.name == "move.wait" and op.attributes["stream"] == 0 for v in op.operands}
    over = seen.union(*[before[op] for op in seen])
    return all(op in over for op in actions if units[op.attributes["stream"]] == units[0])


def valid(module: Op) -> bool:
    """Whether a placed plan is right."""
    (function,) = [f for f in module.regions[0].block if f.attributes["sym_name"] == "plan"]
    block = list(function.regions[0].block)
    actions = [op for op in block if op.name in ("move.launch", "move.copy")]
    before = reachable(actions, block)
    if not joined(module, block, actions, before):
        return False
    given_back = {v for op in block if op.name == "move.result" for v in op.operands}
    values = [op.results[0] for op in block if op.name in ("move.alloc", "move.external", "move.reuse")]

    def storage(value: Value) -> Op:
        while value.owner.name == "move.reuse":
            value = value.owner.operands[0]
        return value.owner

    readers = {v: [op for op in actions if v in accesses(op)[0]] for v in values}
    writers = {v: [op for op in actions if v in accesses(op)[1]] for v in values}
    for value in values:
        maker = value.owner
        there = maker.name == "move.external" and maker.attributes["lifetime"] != "output"
        if len(writers[value]) > (0 if there else 1):
            return False
        if not there and not writers[value] and (readers[value] or value in given_back):
            return False
        if any(w not in before[r] for r in readers[value] for w in writers[value]):
            return False
        if maker.name == "move.reuse" and writers[value]:
            (writer,) = writers[value]
            old = maker.operands[0]
            if old in given_back or any(r is not writer and r not in before[writer] for r in readers[old]):
                return False
            if old.owner.name != "move.external" and any(w not in before[writer] for w in writers[old]):
                return False
            if old.owner.name != "move.external" and not writers[old]:
                return False
    allocs = [op for op in block if op.name == "move.alloc"]
    used: dict[Op, list[Op]] = {a: [] for a in allocs}
    for value in values:
        if storage(value) in used:
            used[storage(value)] += readers[value] + writers[value]
    kept = {storage(v) for v in given_back}
    for one, other in combinations(allocs, 2):
        start = max(one.attributes["offset"], other.attributes["offset"])
        ends = [a.attributes["offset"] + a.attributes["type"].bytes for a in (one, other)]
        if start >= min(ends) or not used[one] or not used[other]:
            continue
        first = one not in kept and all(a in before[b] for a in used[one] for b in used[other])
        second = other not in kept and all(b in before[a] for a in used[one] for b in used[other])
        if not first and not second:
            return False
    return True
