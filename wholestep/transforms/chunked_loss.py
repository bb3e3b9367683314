"""`chunk-loss`: cross entropy and its linear layer a few tokens at a time, so that the logits never exist whole.

For each chunk of tokens: its logits, its part of the loss, the gradient of its logits, its rows of the gradient of the
hidden state, and its share of the gradients of weight and bias, which are added up in float32. Nothing is computed
twice. What stood between logits and loss (casts, padding of classes) is done per chunk; what moved tokens (reshapes,
the shift by one) is done to the hidden state instead. Sums over tokens are taken in another order, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ..dialects.step import StepBuilder
from ..dialects.step.contraction import Contract, parse_spec
from ..dialects.step.losses import CrossEntropy, CrossEntropyGrad, expand_coefficients
from ..dialects.step.reductions import Sum
from ..dialects.step.shape import Pad, Reshape, Slice, SliceGrad
from ..dialects.step.support import wide
from ..ir.core import Block, Op, Value
from .opportunity import Change, Opportunity, Place, Transformation, register_transformation, sites
from .recompute import is_late, originals

#: more chunks than this make products too thin
MOST = 64
#: from this many classes on a memory budget thinks of it
LARGE = 1024
#: chunks hold a multiple of this many tokens, where there are enough
TOKENS = 8


class NotPossible(Exception):
    """Why the loss at a site cannot be taken in chunks."""


@dataclass(frozen=True, slots=True)
class Path:
    """The ops between the logits and the loss, or back: those that move tokens, and those that each token has."""

    tokens: tuple[Op, ...] = ()
    classes: tuple[Op, ...] = ()

    def then(self, op: Op) -> Path:
        if moves_tokens(op):
            return Path((*self.tokens, op), self.classes)
        return Path(self.tokens, (*self.classes, op))


@dataclass(slots=True)
class End:
    """Where the gradient of the logits is used up: a product or a sum, and the path to it."""

    op: Op
    path: Path
    operand: Value


@dataclass(slots=True)
class Site:
    """A linear layer with its loss: all that is replaced."""

    loss: Op
    grad: Op
    product: Op
    hidden: Value
    path: Path
    #: products that give the gradient of the hidden state, those that give the weight's, and sums: the bias's
    hidden_grads: list[End] = field(default_factory=list)
    weight_grads: list[End] = field(default_factory=list)
    bias_grads: list[End] = field(default_factory=list)
    #: what is to be known before the loss: operands from backward, and what they are made of
    early: list[Op] = field(default_factory=list)
    #: a copy of the hidden state that backward made for itself -> the hidden state
    same: dict[Value, Value] = field(default_factory=dict)
    replaced: set[Op] = field(default_factory=set)

    @property
    def rows(self) -> int:
        return int(self.loss.x.type.shape[0])

    @property
    def chunk(self) -> int:
        """Tokens in a chunk: its logits are no larger than the gradient of the weight, which is there meanwhile."""
        beside = max((accumulator_bytes(e.op.y) for e in self.weight_grads), default=0) or self.hidden.type.bytes
        count = min(max(2, -(-self.loss.x.type.bytes // max(1, beside))), MOST, self.rows)
        tokens = -(-self.rows // count)
        filled = -(-tokens // TOKENS) * TOKENS
        return filled if filled < self.rows else tokens


@register_transformation
class ChunkLoss(Transformation):
    """Level 3: less memory at the border of forward and backward, for adding up the gradient of the weight."""

    name = "chunk-loss"
    level = 3

    def places(self, function: Op) -> Iterator[Place]:
        for op in function.regions[0].block:
            if op.definition is CrossEntropy and not in_backward(op):
                try:
                    yield op, predicted(site_at(op))
                except NotPossible as reason:
                    yield op, str(reason)

    def apply(self, op: Op) -> None:
        walk_in_chunks(site_at(op))


def large_losses(module: Op) -> list[tuple[Opportunity, int, str]]:
    """Losses over many classes that can be taken in chunks, each with the number of chunks and its linear layer."""
    found, at = [], sites(module)
    for opportunity in ChunkLoss().find(module):
        loss = at[opportunity.site]
        if not opportunity.why_not and loss.x.type.shape[-1] >= LARGE:
            site = site_at(loss)
            found.append((opportunity, -(-site.rows // site.chunk), site.product.loc.layer))
    return found


# ---- what is there ---------------------------------------------------------------------------------------------------


def in_backward(op: Op) -> bool:
    """Whether a loss is a chunk's already."""
    return is_late(op)


def site_at(loss: Op) -> Site:
    """The linear layer and the gradients that belong to a loss; NotPossible with the reason where they do not fit."""
    if loss.x.type.rank != 2:
        raise NotPossible("the classes are not the last dimension of two: reshape the logits to [tokens, classes]")
    if loss.x.type.shape[0] < 2:
        raise NotPossible("there is one token")
    grads = [user for user in loss.logsumexp.uses if user.definition is CrossEntropyGrad]
    if len(grads) != 1 or len(loss.logsumexp.uses) != 1:
        reader = next((u for u in loss.logsumexp.uses if u.definition is not CrossEntropyGrad), None)
        raise NotPossible("it has no gradient of its own" if reader is None else f"{place(reader)} reads it too")
    product, between = loss.x.op, []
    while product is not None and product.definition is not Contract:
        if not is_linear_shape(product):
            raise NotPossible(f"{place(product)} stands between the linear layer and the loss")
        between.append(product)
        product = product.operands[0].op
    if product is None:
        raise NotPossible("no linear layer makes its logits")
    left, right, out = parse_spec(product.spec)
    hidden, mine, weight = (product.rhs, right, left) if out[-1:] in left else (product.lhs, left, right)
    if len(out) < 2 or mine[:-1] != out[:-1] or set(weight) != {mine[-1], out[-1]}:
        raise NotPossible("the product before it is no linear layer")
    if product.addend is not None and product.addend.type.rank != 1:
        raise NotPossible("the linear layer adds more than a bias")
    path = Path()
    for op in reversed(between):
        path = path.then(op)
    site = Site(loss, grads[0], product, hidden, path)
    site.replaced.update((product, loss, site.grad))
    check_readers(product.y, site)
    collect_ends(site.grad.dx, Path(), site)
    if not site.hidden_grads and not site.weight_grads:
        raise NotPossible("no gradient of the linear layer is asked for")
    find_early(site)
    return site


def is_linear_shape(op: Op) -> bool:
    """Whether an op does the same to every token: casts, and shapes that keep tokens apart."""
    if op.name == "step.cast":
        return bool(op.operands[0].type.element.kind == "float" and op.result.type.element.kind == "float")
    if op.definition is Reshape:
        before, after = op.operands[0].type.shape, op.result.type.shape
        return len(before) > 1 and len(after) > 1 and before[-1] == after[-1]
    if op.definition is Pad:
        return op.value == 0 and not any((*op.low[:-1], *op.high[:-1]))
    return op.definition in (Slice, SliceGrad)


def moves_tokens(op: Op) -> bool:
    return op.definition is Reshape or (op.definition in (Slice, SliceGrad) and op.dim != op.operands[0].type.rank - 1)


def check_readers(logits: Value, site: Site) -> None:
    """Refuses where somebody beside the loss reads the logits."""
    for user in logits.uses:
        if user in (site.loss, site.grad):
            continue
        if user.definition.terminator:
            raise NotPossible("the step gives the logits back; return the loss alone")
        if not is_linear_shape(user):
            raise NotPossible(f"{place(user)} reads the logits too")
        site.replaced.add(user)
        check_readers(user.result, site)


def collect_ends(value: Value, path: Path, site: Site) -> None:
    """Follows the gradient of the logits to where it is used up."""
    for user in dict.fromkeys(value.uses):
        if user.definition is Contract and user.addend is None and user.lhs is not user.rhs:
            site_end(End(user, path, user.rhs if user.lhs is value else user.lhs), value, site)
        elif user.definition is Sum and tuple(user.dims) == tuple(range(value.type.rank - 1)) and not user.keepdim:
            site.bias_grads.append(End(user, path, value))
        elif not user.definition.terminator and is_linear_shape(user):
            collect_ends(user.result, path.then(user), site)
        else:
            raise NotPossible(f"{place(user)} reads the gradient of the logits")
        site.replaced.add(user)


def site_end(end: End, value: Value, site: Site) -> None:
    """Notes a product that reads the gradient of the logits."""
    left, right, out = parse_spec(end.op.spec)
    mine, other = (left, right) if end.op.lhs is value else (right, left)
    tokens, classes = mine[:-1], mine[-1]
    if out.startswith(tokens) and len(out) == len(tokens) + 1 and classes not in out:
        site.hidden_grads.append(end)
    elif not set(tokens) & set(out) and other[:-1] == tokens and classes in out and len(out) == 2:
        site.weight_grads.append(end)
    else:
        raise NotPossible(f"{place(end.op)} is no gradient of a linear layer")


def find_early(site: Site) -> None:
    """What the walk reads must be there before the loss: finds the ops of backward that make it."""
    block = site.loss.parent
    assert block is not None
    number = {op: n for n, op in enumerate(block)}
    first = originals(block)
    for end in site.weight_grads:
        maker = end.operand.op
        if maker in first and first[maker].results[end.operand.index] is site.hidden:
            site.same[end.operand] = site.hidden
    found: dict[Op, None] = {}

    def need(value: Value) -> None:
        op = value.op
        if op is None or number[op] < number[site.loss] or op in found:
            return
        if op in (site.loss, site.grad) or not op.definition.pure:
            raise NotPossible("the gradient that the loss gets depends on the loss itself")
        for operand in op.operands:
            need(operand)
        found[op] = None

    need(site.grad.dy)
    for end in (*site.hidden_grads, *site.weight_grads):
        need(site.same.get(end.operand, end.operand))
    site.early = sorted(found, key=number.__getitem__)


def place(op: Op) -> str:
    return f"{op.name}{f' in {op.loc.layer}' if op.loc.layer else ''}"


def predicted(site: Site) -> Change:
    """The logits that are no longer held; and what chunks move more than a whole: the weight, and its sums."""
    count = -(-site.rows // site.chunk)
    late = site.grad.x.op is not None and is_late(site.grad.x.op)
    held = site.product.y.type.bytes if late else site.grad.x.type.bytes
    again = sum(v.type.bytes for v in site.product.operands if v is not site.hidden)
    again += sum(e.operand.type.bytes for e in site.hidden_grads)
    sums = sum(2 * accumulator_bytes(e.op.result) + e.op.result.type.bytes for e in site.weight_grads)
    joined = sum(2 * e.op.result.type.bytes for e in site.hidden_grads)
    adds = sum(e.op.result.type.size for e in site.weight_grads)
    return Change(bytes=(count - 1) * (again + sums) + joined, saved=-held, flops=(count - 1) * adds)


def accumulator_bytes(value: Value) -> int:
    return int(value.type.size * wide(value.type.element).bits // 8)


# ---- what it becomes -------------------------------------------------------------------------------------------------


def walk_in_chunks(site: Site) -> None:
    """Replaces a loss, its linear layer and their gradients by a walk over chunks of tokens, before the loss."""
    loss, block = site.loss, site.loss.parent
    assert block is not None
    for op in site.early:
        block.insert_before(op.detach(), loss)
    walk = Walk(site, block)
    parts = [walk.chunk(start, min(start + site.chunk, site.rows)) for start in range(0, site.rows, site.chunk)]
    walk.finish(parts)
    for op in reversed([op for op in block if op in site.replaced]):
        op.erase()


@dataclass(slots=True)
class Part:
    """What one chunk gives."""

    loss: Value
    hidden: list[Value]
    sums: list[Value]


class Walk:
    """Builds the ops of all chunks."""

    def __init__(self, site: Site, block: Block):
        self.site = site
        loss, grad = site.loss, site.grad
        self.b = b = StepBuilder(block, loss, loss.loc, "backward")
        self.element = wide(loss.x.type.element)
        self.moved: dict[tuple[Value, tuple[object, ...]], Value] = {}
        self.total: Value | None = None
        self.dy = b.cast_to(grad.dy, self.element)
        self.sums: list[Value | None] = [None] * (len(site.weight_grads) + len(site.bias_grads))
        if loss.reduction == "mean":
            mine, _, _ = expand_coefficients(b, loss, None, self.element)
            self.total = b.sum(mine, dims=(0,))
            self.dy = b.div(self.dy, self.total)

    def chunk(self, start: int, end: int) -> Part:
        """One chunk: logits, loss, gradients."""
        site, b, loss = self.site, self.b, self.site.loss
        rows: Callable[[Value], Value] = lambda x: b.slice(x, dim=0, start=start, end=end)  # noqa: E731
        b.loc = site.product.loc
        hidden = rows(self.in_order(site.hidden, forwards(site.path)))
        tokens = parse_spec(site.product.spec)[2][:-1]
        logits = self.contract(site.product, {site.hidden: hidden}, tokens, site.product.addend)
        for op in site.path.classes:
            logits = done_to(b, op, logits)
        logits = b.cast_to(logits, self.element)
        b.loc = loss.loc
        summed = {"ignore_index": loss.ignore_index, "label_smoothing": loss.label_smoothing}
        summed["reduction"] = "none" if loss.reduction == "none" else "sum"
        target, dy = rows(loss.target), rows(self.dy) if loss.reduction == "none" else self.dy
        part, logsumexp = b.cross_entropy(logits, target, loss.weight, **summed)
        if loss.reduction == "none":  # in its place among zeros
            part = b.slice_grad(part, dim=0, start=start, end=end, stride=1, size=site.rows)
        dx = b.cross_entropy_grad(dy, logits, target, logsumexp, loss.weight, **summed)
        dx = b.cast_to(dx, site.grad.dx.type.element)
        b.loc = site.product.loc
        return Part(part, [self.of_hidden(e, dx) for e in site.hidden_grads], self.of_weights(dx, rows))

    def of_hidden(self, end: End, dx: Value) -> Value:
        """A chunk's rows of the gradient of the hidden state."""
        tokens = parse_spec(end.op.spec)[2][:-1]
        return self.contract(end.op, {other(end): self.along(end, dx)}, tokens, None)

    def of_weights(self, dx: Value, rows: Callable[[Value], Value]) -> list[Value]:
        """The gradients of weight and bias so far, this chunk's part among them."""
        site, b = self.site, self.b
        parts = []
        for end in site.weight_grads:
            hidden = rows(self.in_order(site.same.get(end.operand, end.operand), backwards(end.path)))
            left, right, _ = parse_spec(end.op.spec)
            tokens = (right if end.operand is end.op.rhs else left)[:-1]
            new = {other(end): self.along(end, dx), end.operand: hidden}
            parts.append(self.contract(end.op, new, tokens, None))
        parts += [b.sum(self.along(end, dx), dims=(0,)) for end in site.bias_grads]
        for n, part in enumerate(parts):
            before = self.sums[n]
            self.sums[n] = b.cast_to(part, wide(part.type.element)) if before is None else b.accumulate(before, part)
        return [s for s in self.sums if s is not None]

    def along(self, end: End, dx: Value) -> Value:
        """The gradient of a chunk's logits as an end reads it."""
        for op in end.path.classes:
            dx = done_to(self.b, op, dx)
        return dx

    def contract(self, op: Op, new: dict[Value, Value], tokens: str, addend: Value | None) -> Value:
        """A product with operands of a chunk: all labels of tokens become one."""
        left, right, out = (labels.replace(tokens, tokens[0]) for labels in parse_spec(op.spec))
        spec = f"{left},{right}->{out}"
        return self.b.contract(new.get(op.lhs, op.lhs), new.get(op.rhs, op.rhs), addend, spec=spec)

    def in_order(self, x: Value, moves: list[tuple[object, ...]]) -> Value:
        """A hidden state [..., width] as [tokens, width], tokens in the order of the loss."""
        key = (x, tuple(moves))
        if key not in self.moved:
            self.moved[key] = in_order(self.b, x, moves)
        return self.moved[key]

    def finish(self, parts: list[Part]) -> None:
        """Puts the parts together and gives them to whoever read the whole."""
        site, b, loss = self.site, self.b, self.site.loss
        for n, end in enumerate(site.hidden_grads):
            whole = b.concat([p.hidden[n] for p in parts], dim=0)
            end.op.result.replace_by(in_order(b, whole, forwards(end.path)))
        for n, end in enumerate((*site.weight_grads, *site.bias_grads)):
            end.op.result.replace_by(b.cast_to(parts[-1].sums[n], end.op.result.type.element))
        b.loc = loss.loc
        whole = parts[0].loss
        for part in parts[1:]:
            whole = b.accumulate(whole, part.loss)
        if self.total is not None:
            whole = b.div(whole, self.total)
        loss.loss.replace_by(b.cast_to(whole, loss.loss.type.element))


def other(end: End) -> Value:
    """The operand of a product that is the gradient of the logits."""
    return end.op.lhs if end.operand is end.op.rhs else end.op.rhs


def done_to(b: StepBuilder, op: Op, x: Value) -> Value:
    """What an op does to each token, done to the tokens of a chunk."""
    if op.name == "step.cast":
        return b.cast_to(x, op.dtype, op.rounds)
    if op.definition is Pad:
        return b.pad(x, low=(0, op.low[-1]), high=(0, op.high[-1]), value=op.value)
    options = {k: op.attributes[k] for k in ("start", "end", "stride")}
    if op.definition is Slice:
        return b.slice(x, dim=1, **options)
    return b.slice_grad(x, dim=1, size=op.size, **options)


# ---- how tokens move: a reshape of them, a slice of them, or its gradient --------------------------------------------


def forwards(path: Path) -> list[tuple[object, ...]]:
    """What a path does to tokens."""
    found: list[tuple[object, ...]] = []
    for op in path.tokens:
        if op.definition is Reshape:
            found.append(("reshape", op.result.type.shape[:-1]))
        elif op.definition is Slice:
            found.append(("slice", op.dim, op.start, op.end, op.stride))
        else:
            found.append(("slice_grad", op.dim, op.start, op.end, op.stride, op.size))
    return found


def backwards(path: Path) -> list[tuple[object, ...]]:
    """The adjoint of what a path does to tokens."""
    found: list[tuple[object, ...]] = []
    for op in reversed(path.tokens):
        before = op.operands[0].type.shape
        if op.definition is Reshape:
            found.append(("reshape", before[:-1]))
        elif op.definition is SliceGrad:
            found.append(("slice", op.dim, op.start, op.end, op.stride))
        else:
            found.append(("slice_grad", op.dim, op.start, op.end, op.stride, before[op.dim]))
    return found


def in_order(b: StepBuilder, x: Value, moves: list[tuple[object, ...]]) -> Value:
    """Tokens moved by one move after the other."""
    for move in moves:
        x = moved(b, x, move)
    return x


def moved(b: StepBuilder, x: Value, move: tuple[object, ...]) -> Value:
    """Tokens moved: all but the last dimension of x."""
    kind, *how = move
    if kind == "reshape":
        return b.reshape_to(x, (*how[0], x.type.shape[-1]))  # type: ignore[misc]
    dim, start, end, stride, *size = how
    if kind == "slice":
        return b.slice(x, dim=dim, start=start, end=end, stride=stride)
    return b.slice_grad(x, dim=dim, start=start, end=end, stride=stride, size=size[0])
