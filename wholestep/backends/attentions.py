"""Which of PyTorch's kernels runs each attention of a step: the fastest, forward and backward together.

Every kernel that can run a case is compared with the formula, values and gradients, and timed; one that is wrong or
crashes is excluded with its reason. What was measured is kept in the store. A choice other than PyTorch's own becomes
an attribute of the ops before anything is planned, so that forward, backward and the plan agree on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ..dialects.step import StepBuilder, torch_dtype
from ..dialects.step.attention import MATH, Attention, AttentionGrad, kernels_for, row_logsumexp
from ..dialects.step.attention_cuda import CUDNN, CUDNN_REPEATED, EFFICIENT
from ..ir.builtin import functions
from ..ir.core import Block, Op, Value
from ..ir.types import TensorType
from .compare import difference, first_line
from .store import Choice, Store, Timed, fingerprint
from .timing import on_cpu, on_gpu

aten = torch.ops.aten
#: another kernel must take less than this share of the time of PyTorch's own choice, whose results are eager's bits
MARGIN = 0.95

#: kernels that add gradients up in no fixed order: `torch.use_deterministic_algorithms(True)` does without them
UNORDERED = (CUDNN, CUDNN_REPEATED, EFFICIENT)

#: forward(q, k, v, mask) -> out, logsumexp; backward(dout, q, k, v, out, logsumexp, mask) -> dq, dk, dv
Forward = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Backward = Callable[..., tuple[torch.Tensor, ...]]
Way = tuple[Forward, Backward]


@dataclass(frozen=True, slots=True)
class Decision:
    """What runs the attentions of one case, how many there are, and why it was taken."""

    case: str
    kernel: str
    count: int
    why: str
    timed: tuple[Timed, ...] = ()

    def __str__(self) -> str:
        return f"{self.count} x {self.case}: {self.kernel}, {self.why}"


@dataclass(slots=True)
class Case:
    """Attentions that are alike: their ops, forward and backward."""

    text: str
    forward: list[Op] = field(default_factory=list)
    backward: list[Op] = field(default_factory=list)

    @property
    def sample(self) -> Op:
        return (self.forward or self.backward)[0]


@dataclass(slots=True)
class Attentions:
    """Decides about attentions on one device.

    store: None keeps nothing. measure: False takes PyTorch's own choice. lean: the formula, which holds a score for
    every pair of positions, takes no part where anything else can run a case.
    """

    device: torch.device
    store: Store | None = None
    measure: bool = True
    lean: bool = False
    #: the kernels that can run an op, PyTorch's own choice first
    kernels: Callable[[Op, torch.device], list[str]] = kernels_for
    way: Callable[[str, Op], Way] = field(default_factory=lambda: way_by)
    time: Callable[[Callable[[], object], torch.device], float] = field(default_factory=lambda: timed_on)

    def decide(self, module: Op) -> list[Decision]:
        """Chooses for every attention of a module and marks its ops; what was decided, case by case."""
        found = []
        for case in cases(module):
            decision = self.decided(case)
            own = self.kernels(case.sample, self.device)[0]
            for op in (*case.forward, *case.backward):
                op.attributes.pop("kernel", None)
                if decision.kernel != own:
                    op.attributes["kernel"] = decision.kernel
            found.append(decision)
        return found

    def decided(self, case: Case) -> Decision:
        count, names = max(len(case.forward), 1), self.kernels(case.sample, self.device)
        if self.lean:
            names = [name for name in names if name != MATH] or names
        if torch.are_deterministic_algorithms_enabled():
            names = [name for name in names if name not in UNORDERED] or [MATH]
        if len(names) == 1:
            return Decision(case.text, names[0], count, "the only one that can run it here")
        if not self.measure:
            return Decision(case.text, names[0], count, "PyTorch's own choice, not measured (tune=False)")
        orders = [order_of(v) for v in (case.sample.q, case.sample.k, case.sample.v)]
        key = (
            f"attention {case.text}, laid out {orders}, {'' if case.backward else 'forward alone of '}{'+'.join(names)}"
        )
        known = None if self.store is None else self.store.get(key)
        if known is None or known.winner not in (*names, MATH):
            try:
                known = self.measured(case, names, orders)
            except torch.OutOfMemoryError:
                return Decision(case.text, names[0], count, "PyTorch's own choice: too large to compare on this device")
            if self.store is not None:
                self.store.put(key, known)
        return Decision(case.text, known.winner, count, reason(known), tuple(known.candidates))

    def measured(self, case: Case, names: Sequence[str], orders: Sequence[tuple[int, ...]]) -> Choice:
        """Compares and times every kernel. What is wrong with all of them leaves the formula."""
        op, backward = case.sample, bool(case.backward)
        q, k, v, dout, mask = made_up(op, orders, self.device)
        seen = None if mask is None else corner(mask.view(*[1] * (q.dim() - mask.dim()), *mask.shape), op)
        wanted = formula(op, corner(q, op), corner(k, op), corner(v, op), corner(dout, op), seen, backward)
        timed: list[Timed] = []
        for name in names:
            try:
                forward, back = self.way(name, op)

                def both(forward: Forward = forward, back: Backward = back) -> list[torch.Tensor]:
                    out, lse = forward(q, k, v, mask)
                    return [out, lse, *(back(dout, q, k, v, out, lse, mask) if backward else ())]

                with torch.no_grad():
                    why = difference([corner(t, op) for t in both()], wanted, q.element_size() < 4)
                    timed.append(Timed(name, 0.0, why) if why else Timed(name, self.time(both, self.device)))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # one kernel's failure is no reason to stop
                timed.append(Timed(name, 0.0, f"it crashed: {first_line(error)}"))
        right = [t for t in timed if not t.why]
        if not right:
            return Choice(MATH, 0.0, timed)
        best = min(right, key=lambda t: t.seconds * (MARGIN if t.name == names[0] else 1.0))
        return Choice(best.name, best.seconds, timed)


def choose_attentions(
    module: Op, device: torch.device, tune: bool, lean: bool = False, store: Store | None = None
) -> list[Decision]:
    """Decides about the attentions of a module, with the store of this machine where none is given."""
    if not cases(module):
        return []
    tune = tune and (device.type != "cuda" or torch.cuda.is_available())
    if tune and store is None:
        store = Store(fingerprint(device))
    return Attentions(device, store, tune, lean).decide(module)


def report_lines(decisions: Sequence[Decision]) -> list[str]:
    """What a report says of attentions."""
    return ["attention", *(f"  {decision}" for decision in decisions)] if decisions else []


def reason(choice: Choice) -> str:
    """Why a kernel was taken, with what the others took or what is wrong with them."""
    times = {t.name: microseconds(t.seconds) for t in choice.candidates if not t.why}
    excluded = [f"{t.name} is excluded ({t.why})" for t in choice.candidates if t.why]
    if choice.winner not in times:
        return "; ".join(["the formula, for nothing else is right", *excluded])
    others = [f"{name} {text}" for name, text in times.items() if name != choice.winner]
    return "; ".join([f"{times[choice.winner]} forward and backward", *others, *excluded])


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us"


# ---- cases -----------------------------------------------------------------------------------------------------------


def cases(module: Op) -> list[Case]:
    """The attentions of a module, those that are alike together."""
    found: dict[str, Case] = {}
    for function in functions(module):
        for op in function.regions[0].block:
            if op.definition in (Attention, AttentionGrad):
                text = case_text(op)
                case = found.setdefault(text, Case(text))
                (case.forward if op.definition is Attention else case.backward).append(op)
    return list(found.values())


def case_text(op: Op) -> str:
    """What tells cases apart: shapes, element types, the mask and all attributes but the choice itself."""
    q, k, v = (value.type for value in (op.q, op.k, op.v))
    parts = [f"q {sizes(q)} {q.element.text}"]
    if k.shape != q.shape or v.shape != q.shape:
        parts.append(f"k {sizes(k)}, v {sizes(v)}")
    if op.mask is not None:
        parts.append(f"mask {sizes(op.mask.type)} {op.mask.type.element.text}")
    parts += ["causal"] if op.causal else []
    return ", ".join([*parts, f"scale {op.scale:.4g}", "dropout 0"])


def sizes(type: TensorType) -> str:
    return "x".join(map(str, type.shape))


def order_of(value: Value) -> tuple[int, ...]:
    """The dimensions of a value from the slowest to the fastest, as far as the transposes that made it tell."""
    op = value.op
    if op is None or op.name != "step.transpose":
        return tuple(range(value.type.rank))
    places = inverse(op.order)
    return tuple(places[i] for i in order_of(op.operands[0]))


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(order.index(i) for i in range(len(order)))


# ---- running one -----------------------------------------------------------------------------------------------------


def way_by(name: str, op: Op) -> Way:
    """An attention like this one by a named kernel, forward and backward, as the ops themselves run it."""
    types = [v.type for v in (op.q, op.k, op.v)] + ([] if op.mask is None else [op.mask.type])
    block = Block(types)
    q, k, v, *masks = block.arguments
    mask = masks[0] if masks else None
    options = {key: op.attributes[key] for key in ("causal", "scale", "enable_gqa")} | {"kernel": name}
    b = StepBuilder(block)
    out, lse = b.attention(q, k, v, mask, **options)
    dq, _, _ = b.attention_grad(out, q, k, v, out, lse, mask, **options)
    forward, backward = Attention.evaluate(out.op), AttentionGrad.evaluate(dq.op)
    given: Callable[[torch.Tensor | None], list[torch.Tensor]] = lambda m: [] if m is None else [m]  # noqa: E731
    return (
        lambda q, k, v, mask: forward(q, k, v, *given(mask)),
        lambda dout, q, k, v, out, lse, mask: backward(dout, q, k, v, out, lse, *given(mask)),
    )


def timed_on(call: Callable[[], object], device: torch.device) -> float:
    return on_gpu(call, device) if device.type == "cuda" else on_cpu(call)


def made_up(
    op: Op, orders: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Operands q, k, v of an attention, a gradient of its result, and a mask. Every row sees its first key."""
    generator = torch.Generator(device).manual_seed(0)

    def numbers(type: TensorType, order: Sequence[int]) -> torch.Tensor:
        shape = [type.shape[i] for i in order]
        made = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return made.to(torch_dtype(type.element)).permute(inverse(order))

    q, k, v = (numbers(x.type, order) for x, order in zip((op.q, op.k, op.v), orders, strict=True))
    dout = numbers(op.q.type.with_shape((*op.q.type.shape[:-1], op.v.type.shape[-1])), orders[0])
    mask = None
    if op.mask is not None:
        mask = numbers(op.mask.type.with_element(op.q.type.element), range(op.mask.type.rank))
        if op.mask.type.element.kind == "bool":
            mask = mask > -1.0
            mask[..., 0] = True
        mask = mask.to(torch_dtype(op.mask.type.element))
    return q, k, v, dout, mask


def corner(x: torch.Tensor, op: Op) -> torch.Tensor:
    """The first and the last example and head of [examples, heads, ...], which the formula is computed for.

    Heads of q that share one of k stay together. A mask may have one example or one head for all.
    """
    examples, heads, shared = op.q.type.shape[0], op.q.type.shape[1], op.k.type.shape[1]
    if x.shape[0] == examples > 2:
        x = x[[0, -1]]
    if shared > 2 and x.shape[1] in (heads, shared):
        each = x.shape[1] // shared
        x = torch.cat([x[:, :each], x[:, -each:]], 1)
    return x


def formula(
    op: Op,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    mask: torch.Tensor | None,
    backward: bool,
) -> list[torch.Tensor]:
    """Result, log-sum-exp and gradients by PyTorch's formula and autograd, in float32 at least."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    inputs = [t.detach().to(dtype).requires_grad_(backward) for t in (q, k, v)]
    if mask is not None:
        if mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))
        mask = mask.to(dtype)
    with torch.set_grad_enabled(backward):
        out = aten._scaled_dot_product_attention_math.default(
            *inputs, mask, 0.0, op.causal, scale=op.scale, enable_gqa=op.enable_gqa
        )[0]
    gradients = torch.autograd.grad(out, inputs, dout.to(dtype)) if backward else ()
    with torch.no_grad():
        lse = row_logsumexp(inputs[0], inputs[1], mask, op.causal, op.scale, dtype)
    return [out.detach(), lse, *gradients]
