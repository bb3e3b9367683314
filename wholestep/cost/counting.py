"""The ledger of a plan: every operator that its launches run is counted, with the cause of each byte.

The cause is what the tensor is: an argument's by its kind, a new value's by the phases that make and read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..dialects.step.attention import AttentionLike
from ..dialects.step.base import StepOp
from ..dialects.step.control import MicroBatches, root_of
from ..dialects.step.fused import Fused
from ..dialects.step.sources import Random
from ..ir.builtin import functions as functions_of
from ..ir.core import Op
from ..plan.plan import Launch, Plan, aligned
from ..plan.planner import Planned, argument_words
from .accesses import Call, Frame
from .ledger import AFTER, BEFORE, KIND_CAUSES, Buffer, Kernel, Ledger, Move

COPY = "copy into place"
GATHERINGS = {
    "sum": ("sum over micro-batches", "backward"),
    "mean": ("mean over micro-batches", "loss"),
    "concat": ("concat", "loss"),
    "last": ("last of micro-batches", "loss"),
    "carry": ("carry between micro-batches", "loss"),
    "key": ("keys of micro-batches", "forward"),
}


def make_ledger(planned: Planned) -> Ledger:
    """The ledger of a whole step."""
    plan = planned.plan
    writer = Writer(plan.bytes_in("external") + plan.bytes_in("constant"))
    kinds = argument_words(planned.function)[0]
    hints = {
        source_of(plan, r.buffer): KIND_CAUSES[kinds[r.argument]]
        for r in plan.results
        if r.argument >= 0 and kinds[r.argument] in KIND_CAUSES
    }
    roles = roles_of(planned, kinds, hints)
    writer.launches(planned, Frame(planned), roles, writer.buffers_of(plan, kinds, roles))
    return Ledger(writer.kernels, writer.buffers, writer.lasting)


class Writer:
    """Goes through the launches of a step in the plan's order."""

    def __init__(self, lasting: int) -> None:
        self.kernels: list[Kernel] = []
        self.buffers: list[Buffer] = []
        #: bytes that are there for the whole step
        self.lasting = lasting

    def buffers_of(
        self, plan: Plan, kinds: Sequence[str], roles: Sequence[str], given: Mapping[int, int] | None = None
    ) -> list[int]:
        """The ledger's buffer of each buffer of a plan. given: those of arguments that are known already."""
        out: list[int] = []
        for number, buffer in enumerate(plan.buffers):
            if buffer.share == "view":
                out.append(out[buffer.of])
            elif given is not None and number in given:
                out.append(given[number])
            else:
                kind = kinds[number] if number < len(kinds) else "fixed" if buffer.space == "constant" else ""
                self.buffers.append(Buffer(buffer.name, buffer.type.text, buffer.type.bytes, roles[number], kind))
                out.append(len(self.buffers) - 1)
        return out

    def launches(
        self, planned: Planned, frame: Frame, roles: Sequence[str], index: list[int], times: int = 1, outer: int = -1,
        around: int = 0,
    ) -> None:  # fmt: skip
        """The launches of a plan that is run `times` times.

        outer: the launch of the step that runs this plan; around: bytes in use outside of it."""
        plan, ops = planned.plan, list(planned.function.regions[0].block)
        functions = {f.attributes["sym_name"]: f for f in functions_of(root_of(planned.function))}
        live = plan.live_bytes()
        for position, launch in enumerate(plan.launches):
            at, used = position if outer < 0 else outer, around + live[position] + launch.makes
            if launch.body >= 0:
                self.micro_batches(planned, frame, launch, ops[launch.op], roles, index, at, around + live[position])
                continue
            calls = frame.calls(position)
            if not calls:
                continue
            op = ops[launch.op] if launch.op >= 0 else made_by(plan, launch, ops)
            name = COPY if launch.provider == "copy" else launch.name.removeprefix("step.")
            kernel = Kernel(name, launch.phase or "other", op.loc, times)
            kernel.launches, kernel.launch, kernel.live = times * len(calls), at, self.lasting + used
            if launch.op >= 0:
                describe(kernel, op, functions)
            cast = launch.op >= 0 and is_float_cast(op)
            kernel.moves = moves(calls, index, roles, "casts" if cast else "")
            self.add(kernel, [index[n] for n in launch.writes if n >= 0])

    def add(self, kernel: Kernel, makes: Iterable[int]) -> None:
        for buffer in makes:
            if self.buffers[buffer].producer < 0:
                self.buffers[buffer].producer = len(self.kernels)
        self.kernels.append(kernel)

    def micro_batches(
        self, planned: Planned, frame: Frame, launch: Launch, op: Op, roles: Sequence[str], index: list[int], at: int,
        live: int,
    ) -> None:  # fmt: skip
        """The body of `step.micro_batches`, `count` times, and what gathers its results."""
        body, kinds = planned.bodies[launch.body], argument_words(planned.bodies[launch.body].function)[0]
        results = [source_of(body.plan, r.buffer) for r in body.plan.results]
        hints = {r: "gradients" for r, taken in zip(results, op.taken, strict=True) if taken == "sum"}
        for argument, result in enumerate(op.carried):
            if result >= 0:
                hints[results[result]] = KIND_CAUSES.get(kinds[argument], "transients")
        inner_roles = roles_of(body, kinds, hints)
        given = {i: index[n] for i, n in enumerate(launch.reads)}
        inner = self.buffers_of(body.plan, kinds, inner_roles, given)
        workspace = aligned(planned.plan.buffers[launch.workspace].type.bytes, planned.plan.alignment)
        gathered: dict[tuple[str, int], list[Call]] = {}
        for number, (turn, gatherings) in enumerate(frame.turns(launch)):
            if not number:  # all micro-batches move the same bytes
                self.launches(body, turn, inner_roles, inner, op.count, at, live - workspace)
            for gathering in gatherings:
                gathered.setdefault((gathering.what, gathering.result), []).append(gathering.call)
        for (what, result), calls in gathered.items():
            name, phase = GATHERINGS[what]
            made = inner[body.plan.results[result].buffer] if result >= 0 else -1
            maker = self.buffers[made].producer if result >= 0 else -1
            loc = self.kernels[maker].loc if maker >= 0 else op.loc
            kernel = Kernel(name, phase, loc, 1, len(calls), launch=at, live=self.lasting + live)
            out = launch.writes[result] if result >= 0 else -1
            if what in ("sum", "mean"):
                kernel.flops = (op.count - 1) * op.results[result].type.size
            cause = inner_roles[body.plan.results[result].buffer] if what == "carry" else "batch"
            cause = roles[out] if what not in ("carry", "key") else cause
            kernel.moves = moves(calls, index, roles, cause, made)
            self.add(kernel, [index[out]] if out >= 0 else [])


def moves(calls: Iterable[Call], index: Sequence[int], roles: Sequence[str], cause: str, other: int = -1) -> list[Move]:
    """The accesses of calls as moves. cause: of all that is not inside, where it is not what its buffer is;
    other: the ledger's buffer of what has none in the plan."""
    return [
        Move(
            index[a.buffer] if a.buffer >= 0 else other,
            a.written,
            a.bytes,
            "workspace" if a.inside else cause or roles[a.buffer],
            a.inside,
        )
        for call in calls
        for a in call
        if a.bytes
    ]


def describe(kernel: Kernel, op: Op, functions: Mapping[str, Op]) -> None:
    """What the op says of itself: its flops, whether it is a product."""
    if issubclass(op.definition, StepOp):
        kernel.flops = op.definition.flops(op)
    kernel.element = (op.operands or op.results)[0].type.element.text
    product = next(products(op, functions), None)
    if product is not None:
        kernel.matrix, kernel.element = True, product.operands[0].type.element.text


def products(op: Op, functions: Mapping[str, Op]) -> Iterator[Op]:
    """Matrix products, convolutions and attention: the op itself, or those inside of a region."""
    if op.definition is Fused:
        for inner in functions[op.callee.name].regions[0].block:
            yield from products(inner, functions)
    elif issubclass(op.definition, StepOp) and op.definition.precision == "low":
        yield op


# ---- causes ----------------------------------------------------------------------------------------------------------


def host_arguments(function: Op) -> list[int]:
    """Arguments that are numbers of the host, by their kinds: settings, and counters unless a step may be skipped."""
    kinds, arguments = argument_words(function)[0], function.regions[0].block.arguments
    own = ("hyper", "fresh") if "scaler" in kinds else ("hyper", "fresh", "optimizer_state")
    return [i for i, (kind, a) in enumerate(zip(kinds, arguments, strict=True)) if kind in own and not a.type.rank]


def source_of(plan: Plan, number: int) -> int:
    """The buffer whose value a buffer shows."""
    buffer = plan.buffers[number]
    return buffer.of if buffer.share == "view" else number


def made_by(plan: Plan, launch: Launch, ops: Sequence[Op]) -> Op:
    """The op whose result a launch copies to its place."""
    maker = plan.buffers[source_of(plan, launch.reads[0])].op
    return ops[maker] if maker >= 0 else ops[-1]


def is_float_cast(op: Op) -> bool:
    if op.name != "step.cast":
        return False
    have, want = op.operands[0].type.element, op.result.type.element
    return have is not want and have.kind == want.kind == "float"


def roles_of(planned: Planned, kinds: Sequence[str], hints: Mapping[int, str]) -> list[str]:
    """Why the bytes of each buffer of a plan move. hints: of results, by what they replace."""
    plan, ops = planned.plan, list(planned.function.regions[0].block)
    readers: dict[int, set[str]] = {}
    masks: set[int] = set()
    result_of: dict[int, int] = {}
    for launch in plan.launches:
        result_of |= {number: index for index, number in enumerate(launch.writes)}
        for number in launch.reads:
            readers.setdefault(source_of(plan, number), set()).add(launch.phase)
        op = ops[launch.op] if launch.op >= 0 else None
        if op is not None and issubclass(op.definition, AttentionLike) and op.mask is not None:
            masks.add(source_of(plan, launch.reads[op.operands.index(op.mask)]))
    roles: list[str] = []
    for number, buffer in enumerate(plan.buffers):
        maker = ops[buffer.op] if buffer.op >= 0 else None
        if buffer.share == "view":
            roles.append(roles[buffer.of])
        elif buffer.type.element.kind == "bool" or number in masks or (maker and maker.definition is Random):
            roles.append("masks")
        elif number < len(kinds):
            roles.append(KIND_CAUSES.get(kinds[number], "batch"))
        elif buffer.space == "constant" or buffer.lifetime == "workspace":
            roles.append("workspace")
        elif maker is None:  # new state that a launch copies to its place
            roles.append(KIND_CAUSES.get(kinds[plan.owner(number)], "transients"))
        else:
            found = hints.get(number)
            roles.append(found or role_by_phase(maker, result_of.get(number, 0), readers.get(number, set())))
    return roles


def role_by_phase(op: Op, result: int, readers: Iterable[str]) -> str:
    if op.definition is MicroBatches:
        return "gradients" if op.taken[result] == "sum" else "transients"
    if op.phase in BEFORE and any(phase in AFTER for phase in readers):
        return "saved activations"
    if op.phase in ("backward", "clip") and any(phase in ("clip", "update") and phase != op.phase for phase in readers):
        return "gradients"
    return "transients"
