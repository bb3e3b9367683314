"""`through_loss`: cross entropy of a linear layer with many classes, without a pass over its logits.

The gradient of a position's logits is its softmax, times a share of the loss, but for the class that it should have.
Softmax is a number per position times exp(logit - c), whatever c is. So the product that makes logits may write these
exponentials instead, and their sums (`wide_products.py`): what positions are multiplied by is done to rows of the
hidden state and of its gradient, and what belongs to the wished classes, whose exponentials are left out, is added as
rows.

    E = exp(h W' - c) but 0 at the wished class,  s = sum(E),  t = exp(h w - c)     w: the wished class's row of W
    loss = log(s + t) + c - h w,  dh = share / (s + t) E W - share s / (s + t) w,  dW = E' (share / (s + t) h) + rows

Nothing is subtracted that is nearly equal, so nothing is lost where a model is sure of itself. c is not the largest
logit, which nobody knows before the product: it is the largest of the wished class's and those of a sample of classes,
and bf16 has room for what is BEYOND that far above it. Logits further up count as if they were there: the loss of such
a position, which is larger than BEYOND, is too small, and its gradient does not tell these classes apart.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..dialects.step import StepBuilder
from ..dialects.step.contraction import parse_spec
from ..dialects.step.losses import CrossEntropy, expand_coefficients
from ..dialects.step.pointwise import Cast
from ..dialects.step.shape import Pad, Slice, SliceGrad
from ..ir.core import Op, Value
from ..ir.types import BF16, F32, TensorType
from .chunked_loss import LARGE, End, NotPossible, Site, backwards, forwards, in_backward, in_order, other, site_at
from .opportunity import Change, Place, Transformation, register_transformation

#: exponents from c on: what c itself has, and the most; sums of them, and shares of a loss over them, stay in range
LOWEST, HIGHEST = -60.0, 60.0
BEYOND = HIGHEST - LOWEST
#: classes that are looked at for c
SAMPLE = 128
#: numbers of classes below this are told apart in f32, by halves as well
EXACT = 1 << 21
#: further from each other than any two logits
FAR = 1e30


@register_transformation
class ThroughLoss(Transformation):
    """Level 3: a loss, its linear layer and their gradients."""

    name = "through_loss"
    level = 3

    def places(self, function: Op) -> Iterator[Place]:
        for op in function.regions[0].block:
            if op.definition is CrossEntropy and not in_backward(op):
                try:
                    site = site_at(op)
                    yield op, why_not(site) or predicted(site)
                except NotPossible as reason:
                    yield op, str(reason)

    def apply(self, op: Op) -> None:
        site = site_at(op)
        assert op.parent is not None
        made = Exponentials(site)
        for end in site.hidden_grads:
            made.into_hidden(end)
        for end in site.weight_grads:
            made.into_weight(end)
        for old in reversed([o for o in op.parent if o in site.replaced]):
            old.erase()


def why_not(site: Site) -> str:
    """Why the loss at a site needs its logits; empty where it does not."""
    loss, product = site.loss, site.product
    if product.y.type.element is not BF16:
        return f"exponentials have no room in {product.y.type.element}"
    if not LARGE <= classes_of(site) < EXACT:
        return f"{classes_of(site):,} classes: from {LARGE:,} on, and as many as f32 tells apart"
    if loss.label_smoothing:
        return "its target is spread over all classes"
    if product.addend is not None or site.bias_grads:
        return "its linear layer has a bias"
    if weight_of(site)[1] != "first":
        return "the weight of its linear layer does not lie by classes"
    valid = loss.x.type.shape[1]
    if any(not cuts(op, valid) for op in site.path.classes):
        return "classes are moved between the linear layer and its loss"
    for end in (*site.hidden_grads, *site.weight_grads):
        if any(not cuts(op, valid) for op in end.path.classes) or width_of(end) != classes_of(site):
            return "classes are moved between the loss and a gradient of its linear layer"
    if any(parse_spec(e.op.spec)[2][0] != label_of(e) for e in site.weight_grads):
        return "the gradient of its weight does not lie by classes"
    return ""


def cuts(op: Op, valid: int) -> bool:
    """Whether an op casts, or cuts off or fills up classes behind those that there are."""
    if op.definition is Slice:
        return op.start == 0 and op.stride == 1 and op.result.type.shape[-1] >= valid
    if op.definition is SliceGrad:
        return op.start == 0 and op.stride == 1
    if op.definition is Pad:
        return not any(op.low)
    return op.definition is Cast


def classes_of(site: Site) -> int:
    """Classes of the product, those that fill it up among them."""
    return int(site.product.y.type.shape[-1])


def weight_of(site: Site) -> tuple[Value, str]:
    """The weight, and whether classes come first or last."""
    left, right, out = parse_spec(site.product.spec)
    weight, labels = (site.product.lhs, left) if site.hidden is site.product.rhs else (site.product.rhs, right)
    return weight, "first" if labels[0] == out[-1] else "last"


def label_of(end: End) -> str:
    """A gradient's label of classes."""
    left, right, _ = parse_spec(end.op.spec)
    return (left if other(end) is end.op.lhs else right)[-1]


def width_of(end: End) -> int:
    return int(other(end).type.shape[-1])


def predicted(site: Site) -> Change:
    """The pass over the logits, and what rows move instead; the partial sums of tiles."""
    logits = site.product.y.type.bytes
    rows = sum((4 if e in site.hidden_grads else 9) * site.hidden.type.bytes for e in ends_of(site))
    return Change(bytes=rows + logits // 32 - 2 * logits)


def ends_of(site: Site) -> list[End]:
    return [*site.hidden_grads, *site.weight_grads]


class Exponentials:
    """Builds the loss and what its gradients are made of."""

    def __init__(self, site: Site):
        self.site = site
        loss, product, block = site.loss, site.product, site.loss.parent
        assert block is not None
        self.b = b = StepBuilder(block, loss, product.loc, loss.phase)
        weight, _ = weight_of(site)
        hidden = in_order(b, site.hidden, forwards(site.path))
        mine, _, self.safe = expand_coefficients(b, loss, None, F32)
        self.rows = b.embedding(weight, self.safe)
        wished = b.sum(b.mul(b.cast(hidden, dtype=F32), b.cast(self.rows, dtype=F32)), dims=(1,))
        low = b.sub(b.maximum(wished, self.sampled(hidden, weight)), LOWEST)
        logits = b.cast(b.contract(hidden, weight, spec="tk,nk->tn"), dtype=F32)
        away, valid = b.unsqueeze(low, 1), loss.x.type.shape[1]
        if valid < classes_of(site):  # nothing is left of what fills a product up
            away = b.maximum(away, self.column_wise((0.5 - valid) * FAR, FAR))
        powers = b.exp(b.minimum(b.sub(logits, away), HIGHEST))
        others = b.ne(self.column_wise(0, 1), b.unsqueeze(b.cast(self.safe, dtype=F32), 1))
        self.powers = b.cast(b.select(others, powers, 0.0), dtype=BF16)
        self.sums = b.sum(b.cast(self.powers, dtype=F32), dims=(1,))
        self.total = b.add(self.sums, b.exp(b.sub(wished, low)))
        b.loc = loss.loc
        each = b.mul(b.sub(b.add(b.log(self.total), low), wished), mine)
        each = b.select(b.eq(mine, 0.0), 0.0, each)
        if loss.reduction != "none":
            each = b.sum(each, dims=(0,))
        if loss.reduction == "mean":
            each = b.div(each, b.sum(mine, dims=(0,)))
        loss.loss.replace_by(b.cast_to(each, loss.loss.type.element))
        self.share()

    def sampled(self, hidden: Value, weight: Value) -> Value:
        """The largest of some logits of each position."""
        b, apart = self.b, self.site.loss.x.type.shape[1] // SAMPLE
        some = b.slice(weight, dim=0, start=0, end=apart * SAMPLE, stride=apart)
        return b.amax(b.cast(b.contract(hidden, some, spec="tk,nk->tn"), dtype=F32), dims=(1,))

    def column_wise(self, start: float, stride: float) -> Value:
        count = classes_of(self.site)
        numbers = self.b.iota(start=start, stride=stride, type=TensorType((count,), F32))
        return self.b.reshape(numbers, shape=(1, count))

    def share(self) -> None:
        """What positions are multiplied by, and the coefficients of wished classes."""
        grad = self.site.grad
        assert grad.parent is not None
        b = StepBuilder(grad.parent, grad, grad.loc, grad.phase)
        mine, share, _ = expand_coefficients(b, grad, grad.dy, F32)
        self.factor = b.unsqueeze(b.div(b.mul(mine, share), self.total), 1)
        self.away = b.neg(b.mul(self.factor, b.unsqueeze(self.sums, 1)))

    def into_hidden(self, end: End) -> None:
        """The gradient of the hidden state."""
        assert end.op.parent is not None
        b = StepBuilder(end.op.parent, end.op, end.op.loc, end.op.phase)
        spec = "tn,nk->tk" if operand_labels(end)[0] == label_of(end) else "tn,kn->tk"
        made = b.mul(b.cast(b.contract(self.powers, end.operand, spec=spec), dtype=F32), self.factor)
        made = b.add(made, b.mul(b.cast(self.rows, dtype=F32), self.away))
        made = b.cast(made, dtype=end.op.result.type.element)
        end.op.result.replace_by(in_order(b, made, forwards(end.path)))

    def into_weight(self, end: End) -> None:
        """The gradient of the weight: a product, and rows of the wished classes."""
        assert end.op.parent is not None
        b = StepBuilder(end.op.parent, end.op, end.op.loc, end.op.phase)
        operand = self.site.same.get(end.operand, end.operand)
        hidden = b.cast(in_order(b, operand, backwards(end.path)), dtype=F32)
        scaled = b.cast(b.mul(hidden, self.factor), dtype=BF16)
        made = b.contract(self.powers, scaled, spec="tn,tk->nk")
        rows = b.cast(b.mul(hidden, self.away), dtype=BF16)
        end.op.result.replace_by(made)
        # added up where the gradient is f32, so that it is not rounded in between
        while len(users := list(made.uses)) == 1 and widens_or_cuts(users[0]):
            made = users[0].result
        after = made.op.next if made.op is not None else None
        assert after is not None
        b = StepBuilder(end.op.parent, after, end.op.loc, end.op.phase)
        table = b.embedding_grad(rows, self.safe, rows=made.type.shape[0])
        whole = b.cast_to(b.add(b.cast_to(made, F32), b.cast(table, dtype=F32)), made.type.element)
        for user in users:
            user.set_operands([whole if v is made else v for v in user.operands])


def widens_or_cuts(op: Op) -> bool:
    """Whether an op leaves out the last rows, or casts to a wider type."""
    if op.definition is Slice:
        return op.dim == 0 and op.start == 0 and op.stride == 1
    return op.definition is Cast and op.dtype is F32


def operand_labels(end: End) -> str:
    left, right, _ = parse_spec(end.op.spec)
    return right if end.operand is end.op.rhs else left
