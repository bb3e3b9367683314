"""What happens to buffers: launches, copies, communication, waits, and what is given back at the end.

Each action runs on a stream, reads some buffers and writes others, may wait for tokens, and gives a token of its own.
"""

from __future__ import annotations

from ...ir.core import Op
from ...ir.dialect import Attr, OpDef, Operand, Result
from ...ir.types import TensorType, Type
from .base import TOKEN, AnyBuffer, AnyToken, maker, move, type_of

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
REDUCTIONS = ("none", "sum", "mean", "max", "min")


def _tokens() -> Operand:
    return Operand(AnyToken, "what must have finished before it starts", variadic=True)


def _stream() -> Attr:
    return Attr("int", "number of the stream it runs on", default=0)


def _in_place() -> Attr:
    return Attr("ints", "pairs (write, read): that write lies in the memory of that read", default=())


class Action(OpDef):
    """Base of what runs on a stream and touches buffers. `accesses` says which it reads and which it writes."""

    pure = False

    @staticmethod
    def infer(*operands: Type, **attributes: object) -> Type:
        return TOKEN

    @classmethod
    def accesses(cls, op: Op) -> tuple[tuple, tuple, tuple]:
        """The buffers read, the buffers written and the tokens waited for."""
        raise NotImplementedError

    @staticmethod
    def check(op: Op) -> str | None:
        return stream_problem(op)


def stream_problem(op: Op) -> str | None:
    stream = op.attributes["stream"]
    return f"stream {stream} does not exist" if stream < 0 else None


class _ReadsAndWrites(Action):
    reads = Operand(AnyBuffer, "the buffers it reads", variadic=True)
    writes = Operand(AnyBuffer, "the buffers it writes", variadic=True)
    tokens = _tokens()

    @classmethod
    def accesses(cls, op: Op) -> tuple[tuple, tuple, tuple]:
        reads, writes, _ = op.attributes["operandSegmentSizes"].values
        operands = op.operands
        return operands[:reads], operands[reads : reads + writes], operands[reads + writes :]

    @staticmethod
    def check(op: Op) -> str | None:
        pairs = op.attributes["in_place"]
        if pairs:
            reads, writes, _ = op.attributes["operandSegmentSizes"].values
            if len(pairs) % 2 or any(not 0 <= w < writes for w in pairs[::2]):
                return f"in_place {list(pairs)} is no list of pairs (write, read) for {writes} writes"
            if any(not 0 <= r < reads for r in pairs[1::2]):
                return f"in_place {list(pairs)} names a read out of {reads}"
        return stream_problem(op)


@move.op
class Launch(_ReadsAndWrites):
    """Runs one kernel: some ops of a function of the module, by the code of a provider."""

    callee = Attr("symbol", "the function whose ops it computes", optional=True)
    ops = Attr("ints", "numbers of the ops in the function's block", default=())
    provider = Attr("str", "whose kernel it is")
    stream = _stream()
    in_place = _in_place()
    token = Result(AnyToken)


@move.op
class Copy(Action):
    """Moves a tensor between any two spaces; strided where the buffers are."""

    source = Operand(AnyBuffer, "what it reads")
    target = Operand(AnyBuffer, "what it writes")
    tokens = _tokens()
    stream = _stream()
    token = Result(AnyToken)

    @classmethod
    def accesses(cls, op: Op) -> tuple[tuple, tuple, tuple]:
        return op.operands[:1], op.operands[1:2], op.operands[2:]

    @staticmethod
    def check(op: Op) -> str | None:
        source, target = op.operands[:2]
        if maker(source) is None or maker(target) is None:
            return "its buffers are not made by move ops"
        if type_of(source) is not type_of(target):
            return f"it cannot copy {type_of(source)} to {type_of(target)}"
        return stream_problem(op)


@move.op
class Wait(OpDef):
    """Whatever follows on the stream starts after these tokens."""

    pure = False
    tokens = _tokens()
    stream = _stream()

    @staticmethod
    def check(op: Op) -> str | None:
        return stream_problem(op)


@move.op
class Collective(_ReadsAndWrites):
    """A collective among the devices of a group: one read and one write per tensor."""

    kind = Attr("str", "which", choices=COLLECTIVES)
    reduction = Attr("str", "how values are put together", choices=REDUCTIONS, default="none")
    group = Attr("ints", "the devices that take part")
    stream = _stream()
    in_place = _in_place()
    token = Result(AnyToken)

    @staticmethod
    def check(op: Op) -> str | None:
        reads, writes, _ = Collective.accesses(op)
        if len(reads) != len(writes):
            return f"it reads {len(reads)} buffers and writes {len(writes)}"
        if len(set(op.group)) != len(op.group) or not op.group or min(op.group) < 0:
            return f"its group {list(op.group)} is no list of different devices"
        reduces = op.kind in ("all_reduce", "reduce_scatter")
        if reduces == (op.reduction == "none"):
            return f"{op.kind} {'needs a' if reduces else 'has no'} reduction"
        for read, write in zip(reads, writes, strict=True):
            if maker(read) is None or maker(write) is None:
                return "its buffers are not made by move ops"
            problem = _sizes_problem(op.kind, len(op.group), type_of(read), type_of(write))
            if problem:
                return problem
        return _ReadsAndWrites.check(op)


def _sizes_problem(kind: str, devices: int, read: TensorType, write: TensorType) -> str | None:
    if read.element is not write.element:
        return f"{kind} cannot make {write} out of {read}"
    grows = devices if kind == "all_gather" else 1
    shrinks = devices if kind == "reduce_scatter" else 1
    if read.size * grows != write.size * shrinks or (kind == "all_to_all" and read.size % devices):
        return f"{kind} among {devices} devices cannot make {write} out of {read}"
    return None


class _PointToPoint(Action):
    buffer = Operand(AnyBuffer, "what travels")
    tokens = _tokens()
    peer = Attr("int", "the other device")
    tag = Attr("int", "tells messages between two devices apart", default=0)
    stream = _stream()
    token = Result(AnyToken)

    @staticmethod
    def check(op: Op) -> str | None:
        return f"there is no device {op.peer}" if op.peer < 0 else stream_problem(op)


@move.op
class Send(_PointToPoint):
    """Sends a buffer to another device, which receives it under the same tag."""

    @classmethod
    def accesses(cls, op: Op) -> tuple[tuple, tuple, tuple]:
        return op.operands[:1], (), op.operands[1:]


@move.op
class Recv(_PointToPoint):
    """Receives a buffer from another device, which sends it under the same tag."""

    @classmethod
    def accesses(cls, op: Op) -> tuple[tuple, tuple, tuple]:
        return (), op.operands[:1], op.operands[1:]


@move.op
class Results(OpDef):
    """What the plan gives back, read when every stream is done."""

    name = "result"
    pure = False
    buffers = Operand(AnyBuffer, "the buffers", variadic=True)
