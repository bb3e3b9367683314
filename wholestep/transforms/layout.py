"""`channels_last`: decides how every image, volume and sequence lies in memory, forward and backward together.

Each value has one of two labels: row by row, or with channels as neighbours. Kernels write as they read, a convolution
that is not given channels-last converts its tensors by itself, and a change of layout between two ops is a copy. The
cheapest labels are a minimum cut, which is exact; `step.layout` stands where they change. Libraries convolve sequences
with channels as neighbours only as images of one row, so that is what those become.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..dialects.step import StepBuilder
from ..dialects.step.convolution import ConvolutionLike
from ..dialects.step.layout import Layout, inverse
from ..dialects.step.optimizers import OptimizerUpdate
from ..dialects.step.reductions import Reduction
from ..dialects.strides import Strides, reshaped, same_places, strides_in
from ..ir.builtin import functions
from ..ir.core import Op, Value
from .flow import UNBOUNDED, Network
from .opportunity import Change, Place, Transformation, register_transformation

Order = tuple[int, ...]
ROWS, LAST = 0, 1
#: nodes of the network: what is cut off from the source lies row by row
SOURCE, SINK = 0, 1
#: ops that write as they read, beside pointwise ones and updates; the second no sequences, the third only images, the
#: fourth as loops, which is how GPUs run them
FOLLOW = frozenset({"step.batch_norm", "step.batch_norm_grad", "step.concat"})
FOLLOW_WIDE = frozenset({"step.max_pool", "step.max_pool_grad"})
FOLLOW_IMAGES = frozenset(
    f"step.{name}{grad}" for name in ("avg_pool", "adaptive_avg_pool", "upsample") for grad in ("", "_grad")
)
FOLLOW_AS_LOOPS = frozenset({"step.cross_entropy_grad"})
#: ops that, as convolutions, keep the layout of sequences only if these are images of one row
AS_IMAGES = frozenset({"step.batch_norm", "step.batch_norm_grad"})
#: the window of a convolution along that row
ROW = {"stride": 1, "padding": 0, "padding_after": 0, "dilation": 1, "output_padding": 0}
#: ops that read any layout and write row by row, beside reductions
ROWS_FROM_ANY = frozenset({"step.pad", "step.slice_grad", "step.broadcast", "step.all_finite", "step.cross_entropy"})
#: arguments that the step lays out itself: a batch is copied in, a low-precision copy is written by the update
OWN = ("batch", "copy")


@dataclass(frozen=True, slots=True)
class Preference:
    """What a convolution costs more without channels-last, as a share of copying all its tensors once.

    1 is what a library pays that converts them by itself, as cuDNN does for its tensor-core kernels; our kernels for
    depthwise convolutions take channels-last alone (those of sequences run as well without). `launch` is what one more
    kernel costs beside its bytes, in bytes: by default 1.1 us (a kernel of a CUDA graph) at 4.2 TB/s, as
    machine/h200.json has them.
    """

    convolution: float = 1.0
    depthwise: float = 1.0
    elements: tuple[str, ...] = ("bf16", "f16", "f32")
    launch: int = 4_600_000

    def share(self, op: Op) -> float:
        if op.operands[0].type.element.text not in self.elements:
            return 0.0
        if is_depthwise(op):
            return self.depthwise if is_wide(op) else 0.0
        return self.convolution

    def copy(self, value: Value) -> int:
        """The cost of a copy in another layout; nothing where that copy runs anyway."""
        moved = conversion(value)
        return moved + self.launch if moved else 0


@register_transformation
class ChannelsLast(Transformation):
    """Level 3: one decision for a whole function. Its site is the first convolution that gets channels-last."""

    name = "channels_last"
    level = 3
    preference: ClassVar[Preference] = Preference()

    def places(self, function: Op) -> Iterator[Place]:
        ops = list(function.regions[0].block)
        convolutions = [op for op in ops if is_convolution(op)]
        if not convolutions or any(op.definition is Layout for op in ops):
            return
        decision = Decision(around(function), function, self.preference)
        taken = [op for op in convolutions if decision.label(op) == LAST]
        change = Change(bytes=decision.moved(decision.side) - decision.moved([False] * len(decision.side)))
        yield (taken or convolutions)[0], change if taken else decision.why_not()

    def apply(self, op: Op) -> None:
        function = around(op)
        Decision(around(function), function, self.preference).write()


def around(op: Op) -> Op:
    """The op whose region an op stands in."""
    assert op.parent is not None and op.parent.parent is not None and op.parent.parent.parent is not None
    return op.parent.parent.parent


def channels_last(rank: int) -> Order:
    return (0, *range(2, rank), 1)


def differ(shape: Sequence[int], one: Order, other: Order) -> bool:
    """Whether two orders put elements at different places: one channel, or one pixel, lies the same in both."""
    return 0 not in shape and not same_places(shape, strides_in(shape, one), strides_in(shape, other))


def is_convolution(op: Op) -> bool:
    """A convolution, or a gradient of one."""
    return issubclass(op.definition, ConvolutionLike)


def is_wide(op: Op) -> bool:
    """A convolution of images or volumes, or a gradient of one."""
    return is_convolution(op) and len(op.stride) >= 2


def is_depthwise(op: Op) -> bool:
    shape = op.weight_shape if "weight_shape" in op.attributes else op.w.type.shape
    return op.groups > 1 and shape[1] == 1 and op.groups == shape[0]


def repeats_images(op: Op) -> bool:
    """Whether what a broadcast repeats has both channels and pixels."""
    shape, rank = op.operands[0].type.shape, op.result.type.rank
    rows = tuple(range(rank))
    return rank in (3, 4, 5) and differ((1,) * (rank - len(shape)) + shape, rows, channels_last(rank))


def follows(op: Op, rank: int) -> bool:
    """Whether the op writes in the layout that it reads, where all it reads lie alike."""
    definition, name = op.definition, op.name
    if name == "step.opaque":
        return rank == 4 and str(op.attributes.get("target", "")).startswith("aten.upsample_")
    return (
        getattr(definition, "pointwise", False)
        or issubclass(definition, OptimizerUpdate | ConvolutionLike)
        or name in FOLLOW
        or name in FOLLOW_AS_LOOPS
        or (name in FOLLOW_WIDE and rank >= 4)
        or (name in FOLLOW_IMAGES and rank == 4)
    )


class Decision:
    """The labels of one function. A node is an op or an argument; views are where their memory is from."""

    def __init__(self, module: Op, function: Op, preference: Preference):
        self.function = function
        self.network = Network(2)
        self.node: dict[Value, int] = {}
        #: how a value lies under either label; only values for which that makes a difference are here
        self.orders: dict[Value, tuple[Order, Order]] = {}
        #: who reads a value in the layout of which node
        self.readers: dict[Value, list[tuple[Op, int]]] = {}
        #: values that reach a node by other ways than images do: they are laid out where it gets channels-last
        self.strangers: list[tuple[Op, Value, int]] = []
        self.of_op: dict[Op, int] = {}
        self.penalties: list[tuple[int, float, list[Value]]] = []  # node, share of copies of these if row by row
        self.own: list[Value] = []
        self.settled: list[tuple[Value, Value]] = []  # new value, the argument it replaces
        self.preference = preference
        sequences = any(is_convolution(op) and not is_wide(op) for op in function.regions[0].block)
        #: what may be a batch of sequences, images or volumes
        self.ranks = (3, 4, 5) if sequences else (4, 5)
        self.walk(module)
        self.connect()
        self.network.push(SOURCE, SINK)
        self.side = self.network.after_source(SOURCE)

    # ---- the graph ---------------------------------------------------------------------------------------------------

    def walk(self, module: Op) -> None:
        block = self.function.regions[0].block
        described = self.function.attributes.get("arg_attrs") or [{}] * len(block.arguments)
        name = self.function.attributes["sym_name"]
        called = any(op.attributes.get("callee") == name for f in functions(module) for op in f.regions[0].block)
        for argument, words in zip(block.arguments, described, strict=True):
            own = words.get("step.kind") in OWN and not called
            if self.enter(argument, self.network.node(), None, pin=not own) and own:
                self.own.append(argument)
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
        if self.rows_label(value) == LAST:
            self.network.add(SOURCE, node, UNBOUNDED)
        else:
            self.network.add(node, SINK, UNBOUNDED)

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
        if name in ROWS_FROM_ANY or issubclass(op.definition, Reduction) or not op.operands:
            for result in op.results:
                self.enter(result, self.network.node(), None, pin=True)
            return
        orders = next((self.orders[v] for v in decided), None)
        if decided and orders is not None and follows(op, len(orders[0])) and self.fits(op, orders):
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
            self.enter(result, self.network.node(), kept, pin=True)

    def show(self, op: Op) -> None:
        """A view of all or some of a value's memory."""
        x = op.operands[0]
        if x not in self.node:
            self.enter(op.result, self.network.node(), None, pin=True)
            return
        orders = self.orders[x]
        if op.name == "step.transpose":
            back = inverse(op.order)
            orders = (tuple(back[d] for d in orders[0]), tuple(back[d] for d in orders[1]))
        self.enter(op.result, self.node[x], orders)

    def fits(self, op: Op, orders: tuple[Order, Order]) -> bool:
        """Whether nothing else that the op reads or writes has a say in how its results lie."""
        rank = len(orders[0])
        for value in op.operands:
            shape = value.type.shape
            if value not in self.node and 1 < len(shape) < rank and differ((1,) * (rank - len(shape)) + shape, *orders):
                return False
        return all(r.type.rank in (0, 1, rank) for r in op.results)

    def follow(self, op: Op, decided: list[Value], orders: tuple[Order, Order]) -> None:
        node = self.of_op[op] = self.network.node()
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
        if is_convolution(op):
            tensors, share = [*decided, *[r for r in op.results if r in self.node]], self.preference.share(op)
            self.penalties.append((node, share, tensors))
            copies = sum(2 * v.type.bytes + self.preference.launch for v in tensors)
            self.network.add(SOURCE, node, int(share * copies))

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

    def connect(self) -> None:
        """Costs where labels differ. All readers of a value in the other layout share one copy."""
        network = self.network
        for value, readers in self.readers.items():
            node, cost = self.node[value], self.preference.copy(value)
            for_last, for_rows = network.node(), network.node()
            network.add(for_last, node, cost)
            network.add(node, for_rows, cost)
            for reader in dict.fromkeys(reader for _, reader in readers):
                network.add(reader, for_last, UNBOUNDED)
                network.add(for_rows, reader, UNBOUNDED)
        for value, argument in self.settled:
            for one, other in ((self.node[value], self.node[argument]), (self.node[argument], self.node[value])):
                network.add(one, other, self.preference.copy(value))

    # ---- the answer --------------------------------------------------------------------------------------------------

    def moved(self, side: Sequence[bool]) -> int:
        """Bytes that labels move: copies between layouts, and what convolutions convert by themselves."""

        def is_last(node: int) -> bool:
            return node == SOURCE or (node != SINK and side[node])

        total = 0
        for node, share, tensors in self.penalties:
            total += 0 if is_last(node) else int(share * sum(2 * v.type.bytes for v in tensors))
        for value, readers in self.readers.items():
            other = {is_last(reader) for _, reader in readers} - {is_last(self.node[value])}
            total += conversion(value) * len(other)
        for value, argument in self.settled:
            total += conversion(value) * (is_last(self.node[value]) != is_last(self.node[argument]))
        return total

    def label(self, op: Op) -> int:
        return LAST if op in self.of_op and self.side[self.of_op[op]] else ROWS

    def why_not(self) -> str:
        count = sum(share > 0 for _, share, _ in self.penalties)
        if not count:
            return "its convolutions run as well row by row"
        return f"the copies between layouts would cost as much as its {count} convolutions and gradients would save"

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


def conversion(value: Value) -> int:
    """Bytes that a copy of a value in another layout moves, beyond what is moved anyway."""
    op = value.op
    if op is not None and op.name == "step.cast":
        have, want, users = op.operands[0].type.element, value.type.element, list(value.uses)
        if have.kind == want.kind == "float" and have.bits < want.bits and len(users) == 1:
            # the copy does the cast, which would have run by itself unless its reader does it on the way
            reader_casts = getattr(users[0].definition, "converts", False)
            return op.operands[0].type.bytes + value.type.bytes if reader_casts else 0
    return 2 * value.type.bytes


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
