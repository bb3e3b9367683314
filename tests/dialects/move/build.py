"""Builds plans for the tests: by hand with `PlanBuilder`, or at random and valid by construction with `random_plan`.

The random plan is checked by nothing of the dialect: it keeps its own record of who uses what, and joins all streams
before it takes memory again.
"""

from __future__ import annotations

import random

from wholestep import ir
from wholestep.dialects import move as m
from wholestep.ir import F32, Builder, Location, Op, TensorType, Value

HBM = m.space("hbm", 0)


class PlanBuilder:
    """A module with one plan; every method adds one op."""

    def __init__(self, phase: str = "placed", streams: tuple[str, ...] = ("cuda:0",), size: int = 1 << 20):
        self.module = ir.module()
        self.module.attributes["move.phase"] = phase
        self.module.attributes["move.streams"] = list(streams)
        self.function = ir.add_function(self.module, "plan", [])
        self.b = Builder(self.function.regions[0].block)
        self.phase = phase
        self.arena = m.Arena.build(self.b, space=HBM, size=size).result if phase != "tensor" else None
        self.launches: list[Op] = []
        self.next_index = 0

    def named(self, op: Op, name: str) -> Value:
        op.result.name = name
        return op.result

    def external(self, name: str, lifetime: str = "param", shape=(16,), space=HBM, **more) -> Value:
        self.next_index += 1
        type, index = TensorType(shape, F32), self.next_index - 1
        made = m.External.build(
            self.b, type=type, space=space, lifetime=lifetime, slot=name, index=more.pop("index", index), **more
        )
        return self.named(made, name)

    def alloc(self, name: str, offset: int = -1, lifetime: str = "transient", shape=(16,), space=HBM, **more) -> Value:
        arena = self.arena if self.phase == "placed" else None
        arena = more.pop("arena", arena)
        made = m.Alloc.build(
            self.b, arena, type=TensorType(shape, F32), space=space, lifetime=lifetime, offset=offset, **more
        )
        return self.named(made, name)

    def view(self, name: str, base: Value, shape, offset: int = 0, strides=None) -> Value:
        type = TensorType(shape, F32)
        return self.named(m.View.build(self.b, base, type=type, offset=offset, strides=strides), name)

    def reuse(self, name: str, old: Value, lifetime: str = "param", shape=None, **more) -> Value:
        type = TensorType(shape, F32) if shape is not None else m.type_of(old)
        return self.named(m.Reuse.build(self.b, old, type=type, lifetime=lifetime, **more), name)

    def launch(self, reads=(), writes=(), tokens=(), layer: str = "", stream=0, in_place=(), phase="", **more) -> Value:
        self.b.loc = Location(layer or f"layer.{len(self.launches)}", "model.py", len(self.launches) + 1)
        self.b.phase = phase
        op = m.Launch.build(
            self.b, reads, writes, tokens, provider="aten", stream=stream, in_place=tuple(in_place), **more
        )
        self.b.loc, self.b.phase = ir.UNKNOWN, ""
        self.launches.append(op)
        return op.result

    def copy(self, source: Value, target: Value, tokens=(), stream=0) -> Value:
        self.launches.append(m.Copy.build(self.b, source, target, tokens, stream=stream))
        return self.launches[-1].result

    def wait(self, *tokens: Value, stream: int = 0) -> Op:
        return m.Wait.build(self.b, tokens, stream=stream, result_types=[])

    def finish(self, *results: Value) -> Op:
        """Gives back the results; buffers are moved to the front, so that launches can change places."""
        block = self.function.regions[0].block
        first = next((op for op in block if hasattr(op.definition, "accesses") or op.name == "move.wait"), None)
        behind = False
        for op in list(block):
            behind |= op is first
            if behind and op.name in ("move.alloc", "move.external", "move.view", "move.reuse"):
                block.insert_before(op.detach(), first)
        m.Results.build(self.b, results, result_types=[])
        ir.finish_function(self.function, [])
        return self.module


class RandomPlan(PlanBuilder):
    """A random valid placed plan; records what mutations need to know."""

    def __init__(self, seed: int, launches: int = 30, streams: int = 2, slots: int = 6):
        super().__init__("placed", ("cuda:0",) * streams, size=slots * 128)
        pick = random.Random(seed)
        self.batch = self.external("x", "batch")
        self.constant = self.external("table", "constant")
        live: list[Value] = []  # values that may be read
        params = [self.external(f"w{i}") for i in range(3)]
        writer: dict[Value, Value] = {}  # value -> token
        where: dict[Value, int] = {}  # value -> slot
        free = list(range(slots))
        readers: dict[Value, list[Op]] = {}
        self.cross_reads: list[tuple[Op, Op]] = []  # (wait, launch) where the launch needs the wait
        self.in_place: list[tuple[Op, Value]] = []  # an action and the value that dies in it
        latest: list[Value | None] = [None] * streams
        for number in range(launches):
            stream = pick.randrange(streams)
            candidates = [*live, *params, self.batch, self.constant]
            reads = pick.sample(candidates, min(len(candidates), pick.randint(1, 3)))
            if not free:
                if live and pick.random() < 0.5 and streams == 1:
                    free.append(where[self.retire(live, pick)])
                else:
                    self.join(latest, streams)
                    while live and len(free) < 2:
                        free.append(where[self.retire(live, pick)])
            reads = [r for r in reads if r in live or r not in where]
            tokens = [writer[r] for r in reads if r in writer and writer[r].owner.attributes["stream"] != stream]
            wait = self.wait(*tokens, stream=stream) if tokens else None
            kind = pick.random()
            old = next((r for r in reads if r in params or r in live), None)
            if kind < 0.3 and old is not None:
                if streams > 1:
                    self.join(latest, streams)
                lifetime = "param" if old in params else "transient"
                new = self.reuse(f"{old.name}_{number}", old, lifetime)
                token = self.launch(reads, [new], stream=stream, in_place=(0, reads.index(old)))
                self.in_place.append((self.launches[-1], old))
                if old in params:
                    params[params.index(old)] = new
                else:
                    live[live.index(old)] = new
                    where[new] = where[old]
            else:
                slot = free.pop(pick.randrange(len(free)))
                new = self.alloc(f"v{number}", slot * 128, "transient")
                where[new] = slot
                token = self.launch(reads, [new], stream=stream)
                live.append(new)
            if wait is not None:
                self.cross_reads.append((wait, self.launches[-1]))
            for read in reads:
                readers.setdefault(read, []).append(self.launches[-1])
            writer[new] = token
            latest[stream] = token
        self.writer, self.readers = writer, readers
        # dead values stay unread from here on; one output for the result
        self.join(latest, streams)
        self.out = self.external("loss", "output")
        self.launch(live[-1:], [self.out], stream=0)
        self.finish(self.out)

    def retire(self, live: list[Value], pick: random.Random) -> Value:
        return live.pop(pick.randrange(len(live)))

    def join(self, latest: list[Value | None], streams: int) -> None:
        tokens = [t for t in latest if t is not None]
        for stream in range(streams):
            if tokens:
                self.wait(*tokens, stream=stream)
