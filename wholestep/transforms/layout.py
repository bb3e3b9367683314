"""`channels_last`: decides how every image, volume and sequence lies in memory, forward and backward together.

Each value has one of two labels: row by row, or with channels as neighbours. Kernels write as they read, a convolution
that is not given channels-last converts its tensors by itself, and a change of layout between two ops is a copy. What
either costs is measured where a compile has a clock, else modelled (`layout_prices.py`). The cheapest labels are a
minimum cut, which is exact; `step.layout` stands where they change. Libraries convolve sequences with channels as
neighbours only as images of one row, so that is what those become.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from ..dialects.step import StepBuilder
from ..dialects.step.layout import Layout, inverse
from ..dialects.step.reductions import Reduction
from ..dialects.strides import Strides, reshaped, strides_in
from ..ir.builtin import functions
from ..ir.core import Op, Value
from .flow import UNBOUNDED, Network
from .layout_prices import HIGHEST, Costed, Move, Prices, Verdict, case_of, is_whole_copy, timing_now
from .layout_rules import (
    FOLLOW_AS_LOOPS,
    FOLLOW_IMAGES,
    FOLLOW_WIDE,
    Order,
    Preference,
    channels_last,
    conversion,
    differ,
    follows,
    is_convolution,
    is_wide,
    repeats_images,
)
from .opportunity import Change, Place, Transformation, register_transformation

ROWS, LAST = 0, 1
#: nodes of the network: what is cut off from the source lies row by row
SOURCE, SINK = 0, 1
#: ops that, as convolutions, keep the layout of sequences only if these are images of one row
AS_IMAGES = frozenset(f"step.{name}_norm{grad}" for name in ("batch", "group") for grad in ("", "_grad"))
#: ops beside convolutions that libraries have other kernels for where images lie otherwise: their time is asked for
OTHER_KERNELS = AS_IMAGES | FOLLOW_WIDE | FOLLOW_IMAGES | {"step.opaque"}
#: of ops whose times the answer hangs on, the heaviest so large a share is timed at once
AT_ONCE = 0.5
#: the window of a convolution along that row
ROW = {"stride": 1, "padding": 0, "padding_after": 0, "dilation": 1, "output_padding": 0}
#: ops that read any layout and write row by row, beside reductions: padding of sequences only
ROWS_FROM_ANY = frozenset({"step.pad", "step.slice_grad", "step.broadcast", "step.all_finite", "step.cross_entropy"})
#: arguments that the step lays out itself: a batch is copied in, a low-precision copy is written by the update
OWN = ("batch", "copy")


@register_transformation
class ChannelsLast(Transformation):
    """Level 3: one decision for a whole function. Its site is the first convolution, whatever that gets: a recipe holds
    on machines with other times as well."""

    name = "channels_last"
    level = 3
    preference: ClassVar[Preference] = Preference()

    def places(self, function: Op) -> Iterator[Place]:
        ops, known = list(function.regions[0].block), timing_now().verdicts
        convolutions = [op for op in ops if is_convolution(op)]
        if not convolutions:
            return
        if any(op.definition is Layout for op in ops):
            if function.attributes["sym_name"] in known:
                yield convolutions[0], f"done: {known[function.attributes['sym_name']]}"
            return
        decision = self.decision(function)
        known[function.attributes["sym_name"]] = decision.verdict
        yield convolutions[0], decision.change() if decision.verdict.last else decision.why_not()

    def decision(self, function: Op) -> Decision:
        """By the clock, if there is one; by the model where that sees no use for what was asked for by name."""
        timing, module = timing_now(), around(function)
        if timing.clock is None:
            return Decision(module, function, Prices(self.preference), f"modelled bytes: {timing.why_modelled}")
        decision = Decision(module, function, Prices(self.preference, timing), "measured times")
        if timing.insist and not decision.verdict.last:
            by = "modelled bytes: it was asked for, and measured times see no use for it"
            return Decision(module, function, Prices(self.preference), by)
        return decision

    def apply(self, op: Op) -> None:
        self.decision(around(op)).write()


def around(op: Op) -> Op:
    """The op whose region an op stands in."""
    assert op.parent is not None and op.parent.parent is not None and op.parent.parent.parent is not None
    return op.parent.parent.parent


class Decision:
    """The labels of one function. A node is an op or an argument; views are where their memory is from."""

    def __init__(self, module: Op, function: Op, prices: Prices, by: str):
        self.function = function
        self.nodes = 2
        #: nodes whose label is given
        self.pinned: list[tuple[int, int]] = []
        self.node: dict[Value, int] = {}
        #: how a value lies under either label; only values for which that makes a difference are here
        self.orders: dict[Value, tuple[Order, Order]] = {}
        #: who reads a value in the layout of which node
        self.readers: dict[Value, list[tuple[Op, int]]] = {}
        #: values that reach a node by other ways than images do: they are laid out where it gets channels-last
        self.strangers: list[tuple[Op, Value, int]] = []
        self.of_op: dict[Op, int] = {}
        self.costed: list[Costed] = []
        self.own: list[Value] = []
        self.settled: list[tuple[Value, Value]] = []  # new value, the argument it replaces
        self.prices = prices
        sequences = any(is_convolution(op) and not is_wide(op) for op in function.regions[0].block)
        #: what may be a batch of sequences, images or volumes
        self.ranks = (3, 4, 5) if sequences else (4, 5)
        self.walk(module)
        self.side = self.settle()
        self.verdict = self.judged(by)

    # ---- the graph ---------------------------------------------------------------------------------------------------

    def new_node(self) -> int:
        self.nodes += 1
        return self.nodes - 1

    def walk(self, module: Op) -> None:
        block = self.function.regions[0].block
        described = self.function.attributes.get("arg_attrs") or [{}] * len(block.arguments)
        name = self.function.attributes["sym_name"]
        lies = timing_now().lies.get(name, frozenset())
        called = any(op.attributes.get("callee") == name for f in functions(module) for op in f.regions[0].block)
        for number, (argument, words) in enumerate(zip(block.arguments, described, strict=True)):
            own = words.get("step.kind") in OWN and not called
            node, last = self.new_node(), number in lies and not own
            if self.enter(argument, node, None, pin=not own and not last) and own:
                self.own.append(argument)
            if last and argument in self.node:
                self.pinned.append((node, LAST))
        for op in block:
            if op.definition.terminator:
                self.finish(op)
            else:
                self.visit(op)

    def enter(self, value: Value, node: int, orders: tuple[Order, Order] | None, pin: bool = False) -> bool:
        """Notes a value whose layout is decided, if there is anything to decide about it. `pin`: it lies row by row."""
        rank = value.type.rank
        if orders is None:
            if rank not in self.ranks:
                return False
            orders = (tuple(range(rank)), channels_last(rank))
        if len(orders[0]) != rank or not differ(value.type.shape, *orders):
            return False
        self.node[value], self.orders[value] = node, orders
        if pin:
            self.pin(node, value)
        return True

    def pin(self, node: int, value: Value) -> None:
        self.pinned.append((node, LAST if self.rows_label(value) == LAST else ROWS))

    def rows_label(self, value: Value) -> int | None:
        """The label under which a value lies row by row; None where neither is."""
        rows = tuple(range(value.type.rank))
        return self.orders[value].index(rows) if rows in self.orders[value] else None

    def visit(self, op: Op) -> None:
        decided = [v for v in dict.fromkeys(op.operands) if v in self.node]
        name = op.name
        if name in ("step.transpose", "step.slice", "step.detach"):
            self.show(op)
            return
        if name == "step.broadcast" and not repeats_images(op):
            return  # it has no layout of its own: what is read beside it decides
        if name in FOLLOW_AS_LOOPS and decided:  # its classes are numbers per place: they have no say
            self.follow(op, decided[:1], self.orders[decided[0]])
            return
        orders = next((self.orders[v] for v in decided), None)
        follow = orders is not None and follows(op, len(orders[0]))
        if (name in ROWS_FROM_ANY and not follow) or issubclass(op.definition, Reduction) or not op.operands:
            for result in op.results:
                self.enter(result, self.new_node(), None, pin=True)
            return
        if orders is not None and follow and self.fits(op, orders):
            self.follow(op, decided, orders)
            return
        for value in decided:
            label = self.rows_label(value)
            if label is not None and not (name == "step.reshape" and self.stays_a_view(op)):
                self.readers.setdefault(value, []).append((op, (SINK, SOURCE)[label]))
        for result in op.results:
            rank = result.type.rank
            same = next((o for v in decided if len(o := self.orders[v]) and len(o[0]) == rank), None)
            kept = same if same is not None and name != "step.reshape" and tuple(range(rank)) in same else None
            self.enter(result, self.new_node(), kept, pin=True)

    def show(self, op: Op) -> None:
        """A view of all or some of a value's memory."""
        x = op.operands[0]
        if x not in self.node:
            self.enter(op.result, self.new_node(), None, pin=True)
            return
        orders = self.orders[x]
        if op.name == "step.transpose":
            back = inverse(op.order)
            orders = (tuple(back[d] for d in orders[0]), tuple(back[d] for d in orders[1]))
        self.enter(op.result, self.node[x], orders)

    def fits(self, op: Op, orders: tuple[Order, Order]) -> bool:
        """Whether nothing else that the op reads or writes has a say in how its results lie."""
        rank = len(orders[0])
        if op.name in AS_IMAGES:  # beside images they read and write numbers per channel or group
            return True
        for value in op.operands:
            shape = value.type.shape
            if value not in self.node and 1 < len(shape) < rank and differ((1,) * (rank - len(shape)) + shape, *orders):
                return False
        return all(r.type.rank in (0, 1, rank) for r in op.results)

    def follow(self, op: Op, decided: list[Value], orders: tuple[Order, Order]) -> None:
        node = self.of_op[op] = self.new_node()
        standard = (tuple(range(len(orders[0]))), channels_last(len(orders[0])))
        if is_convolution(op):
            orders = standard
        for value in decided:
            if self.orders[value] == orders:
                self.readers.setdefault(value, []).append((op, node))
            else:
                self.strangers.append((op, value, node))
        for result in op.results:
            self.enter(result, node, orders)
        tensors = [*decided, *[r for r in op.results if r in self.node]]
        if is_convolution(op):
            self.costed.append(Costed(op, node, self.prices.preference.share(op), tensors, case_of(op)))
        elif self.prices.clock is not None and op.name in OTHER_KERNELS and orders == standard:
            self.costed.append(Costed(op, node, 0.0, tensors, case_of(op)))

    def stays_a_view(self, op: Op) -> bool:
        """Whether a reshape to what is no image moves no element in either layout."""
        x = op.operands[0]
        shape, new = x.type.shape, op.result.type.shape
        places = [reshaped(shape, strides_in(shape, order), new) for order in self.orders[x]]
        return len(new) not in self.ranks and None not in places

    def finish(self, last: Op) -> None:
        """New state is copied to its place where it lies otherwise; a copy of another type is written there anyway."""
        arguments = self.function.regions[0].block.arguments
        described = self.function.attributes.get("res_attrs") or [{} for _ in last.operands]
        for value, words in zip(last.operands, described, strict=True):
            place = words.get("step.donates", -1)
            if place >= 0 and value in self.node and arguments[place] in self.node and arguments[place] not in self.own:
                self.settled.append((value, arguments[place]))

    def solve(self, way: int = 0) -> list[bool]:
        """Of each node whether it gets channels-last in the cheapest labelling. way: as `Prices.op` takes it."""
        network = Network(self.nodes)
        for node, label in self.pinned:
            network.add(*((SOURCE, node) if label == LAST else (node, SINK)), UNBOUNDED)
        for costed in self.costed:
            rows, last = self.prices.op(costed, way)
            network.add(SOURCE, costed.node, rows)
            network.add(costed.node, SINK, last)
        self.connect(network)
        network.push(SOURCE, SINK)
        return network.after_source(SOURCE)

    def connect(self, network: Network) -> None:
        """Costs where labels differ. All readers of a value in the other layout share one copy."""
        for value, readers in self.readers.items():
            node, (rows, last) = self.node[value], self.orders[value]
            for_last, for_rows = network.node(), network.node()
            network.add(for_last, node, self.prices.copy(value, rows, last))
            network.add(node, for_rows, self.prices.copy(value, last, rows))
            for reader in dict.fromkeys(reader for _, reader in readers):
                network.add(reader, for_last, UNBOUNDED)
                network.add(for_rows, reader, UNBOUNDED)
        for value, argument in self.settled:
            one, other, (rows, last) = self.node[value], self.node[argument], self.orders[value]
            network.add(one, other, self.prices.copy(value, last, rows))
            network.add(other, one, self.prices.copy(value, rows, last))

    def settle(self) -> list[bool]:
        """The cheapest labels, after as much was timed as they hang on.

        The more ops want channels-last, the more get it: where an op gets the same whether all that were not timed want
        it as much or as little as they could, its own time changes nothing. A copy is timed where the answer has one:
        before, it costs what its bytes do, so that no answer without it looks worse than it is.
        """
        if self.prices.clock is None:
            return self.solve()
        while True:
            little, much = self.solve(-1), self.solve(1)
            unclear = [c for c in self.costed if c.case not in self.prices.known and little[c.node] != much[c.node]]
            if unclear:
                self.prices.ask(self.heaviest(unclear), ())
                continue
            side = self.solve()
            moves = [m for _, m in self.copies(side) if m is not None and m not in self.prices.moved]
            if not moves:
                return side
            self.prices.ask((), list(dict.fromkeys(moves)))

    def heaviest(self, ops: Sequence[Costed]) -> list[Costed]:
        """One of each kind of op, for the share of kinds that weighs most."""
        weight: dict[str, tuple[int, int]] = {}  # where the machine's limits are not known, operations count
        for costed in ops:
            so_far, flops = weight.get(costed.case, (0, 0)), costed.op.definition.flops(costed.op)  # type: ignore[attr-defined]
            weight[costed.case] = so_far[0] + self.prices.weight(costed), so_far[1] + flops
        first = {c.case: c for c in reversed(ops)}
        known = max(w for w, _ in weight.values()) < HIGHEST
        ranked = sorted(weight, key=lambda case: weight[case][0 if known else 1], reverse=True)
        return [first[case] for case in ranked[: int(AT_ONCE * len(ranked)) + 1]]

    # ---- the answer --------------------------------------------------------------------------------------------------

    def copies(self, side: Sequence[bool]) -> Iterator[tuple[Value, Move | None]]:
        """Values that labels copy, with the copy where it is nothing else."""

        def is_last(node: int) -> bool:
            return node == SOURCE or (node != SINK and side[node])

        changes = [(v, is_last(self.node[v]), {is_last(r) for _, r in readers}) for v, readers in self.readers.items()]
        changes += [(v, is_last(self.node[v]), {is_last(self.node[a])}) for v, a in self.settled]
        for value, mine, asked in changes:
            for other in asked - {mine}:
                move = Move(value.type, self.orders[value][mine], self.orders[value][other])
                yield value, move if is_whole_copy(value) else None

    def moved(self, side: Sequence[bool]) -> int:
        """Bytes that labels move: copies between layouts, and what convolutions convert by themselves."""
        total = sum(conversion(value) for value, _ in self.copies(side))
        for costed in self.costed:
            total += 0 if side[costed.node] else int(costed.share * sum(2 * v.type.bytes for v in costed.tensors))
        return total

    def seconds(self, side: Sequence[bool]) -> float:
        """What labels take: ops that were timed, what others pay for theirs, and copies."""
        prices, total = self.prices, 0.0
        assert prices.clock is not None
        rate = prices.clock.bandwidth
        for costed in self.costed:
            pair, last = prices.known.get(costed.case), side[costed.node]
            total += pair[last] if pair is not None else prices.op(costed)[last] / rate
        for value, move in self.copies(side):
            timed = None if move is None else prices.moved.get(move)
            total += prices.preference.copy(value) / rate if timed is None else timed
        return total

    def judged(self, by: str) -> Verdict:
        """What was decided, in numbers."""
        name, known = str(self.function.attributes["sym_name"]), self.prices.known
        convolutions = [op for op in self.function.regions[0].block if is_convolution(op)]
        verdict = (name, len(convolutions), sum(self.label(op) == LAST for op in convolutions), by)
        if self.prices.clock is None:
            return Verdict(*verdict)
        timed = {c.case for c in self.costed if known.get(c.case) is not None}
        without = sum(is_convolution(c.op) and c.case in known and known[c.case] is None for c in self.costed)
        clear = sum(c.case not in known for c in self.costed)
        moves = {m for _, m in self.copies(self.side) if m is not None and self.prices.moved.get(m) is not None}
        rows = self.seconds([False] * self.nodes)
        return Verdict(*verdict, len(timed), len(moves), clear, without, self.seconds(self.side), rows)

    def change(self) -> Change:
        """What the decision brings beside all row by row."""
        verdict = self.verdict
        seconds = None if verdict.seconds is None or verdict.rows is None else verdict.seconds - verdict.rows
        return Change(bytes=self.moved(self.side) - self.moved([False] * self.nodes), seconds=seconds)

    def label(self, op: Op) -> int:
        return LAST if op in self.of_op and self.side[self.of_op[op]] else ROWS

    def why_not(self) -> str:
        wanting = [c for c in self.costed if self.prices.op(c)[0] > 0]
        by = "" if self.prices.clock is None else f" ({self.verdict})"
        if not wanting:
            return f"its convolutions run as well row by row{by}"
        what = f"its {len(wanting)} convolutions and gradients"
        return f"the copies between layouts would cost as much as {what} would save{by}"

    def write(self) -> None:
        """Puts `step.layout` where labels change, before the first op that reads a value so."""
        wanted: dict[Op, list[tuple[Value, Order]]] = {}
        own = set(self.own)
        for value, readers in self.readers.items():
            mine = self.side[self.node[value]]
            for op, reader in readers:
                asked = reader == SOURCE or (reader != SINK and self.side[reader])
                if asked != mine or (mine and value in own):
                    wanted.setdefault(op, []).append((value, self.orders[value][asked]))
        for op, value, node in self.strangers:
            if self.side[node]:
                wanted.setdefault(op, []).append((value, channels_last(value.type.rank)))
        made: dict[tuple[Value, Order], Value] = {}
        for op in [op for op in self.function.regions[0].block if op in wanted]:
            new: dict[Value, Value] = {}
            for value, order in wanted[op]:
                if (value, order) not in made:
                    made[value, order] = laid_out(value, order, op)
                new[value] = made[value, order]
            op.set_operands([new.get(v, v) for v in op.operands])
        for op in list(self.function.regions[0].block):
            if (
                self.label(op) == LAST
                and op.operands[0].type.rank == 3
                and (is_convolution(op) or op.name in AS_IMAGES)
            ):
                as_images(op)


def laid_out(value: Value, order: Order, reader: Op) -> Value:
    """A value in another order, made right before an op."""
    assert reader.parent is not None
    return StepBuilder(reader.parent, reader, reader.loc, reader.phase).layout(value, order=order)


def as_images(op: Op) -> None:
    """Has an op on sequences work on images of one row. They lie in the same memory."""
    assert op.parent is not None
    b = StepBuilder(op.parent, op, op.loc, op.phase)

    def row(shape: Sequence[int]) -> tuple[int, ...]:
        return (*shape[:2], 1, *shape[2:])

    given = [getattr(op, field.name) for field in op.definition.operand_fields]
    operands = [v if v is None or v.type.rank != 3 else b.reshape(v, shape=row(v.type.shape)) for v in given]
    attributes = {name: op.attributes[name] for name in op.definition.attribute_fields if name in op.attributes}
    for name, along in ROW.items():
        if attributes.get(name):
            attributes[name] = (along, *attributes[name])
    for name in ("input_shape", "weight_shape"):
        if name in attributes:
            attributes[name] = row(attributes[name])
    made = op.definition.build(b, *operands, **attributes)
    for old, new in zip(op.results, made.results, strict=True):
        old.replace_by(b.reshape(new, shape=old.type.shape) if old.type.rank == 3 else new)
    op.erase()


def own_strides(function: Op) -> dict[int, Strides]:
    """How arguments that the step lays out itself had best lie: as the layouts through which alone they are read."""
    block = function.regions[0].block
    described = function.attributes.get("arg_attrs") or [{}] * len(block.arguments)
    found: dict[int, Strides] = {}
    for index, (argument, words) in enumerate(zip(block.arguments, described, strict=True)):
        users = [user for user in argument.uses if not user.definition.terminator]
        if words.get("step.kind") not in OWN or not users or any(user.definition is not Layout for user in users):
            continue
        rows = tuple(range(argument.type.rank))
        orders = [user.order for user in users if user.order != rows]
        if orders:
            found[index] = strides_in(argument.type.shape, orders[0])
    return found
