"""`through_loss`: a loss of exponentials instead of logits is the same loss, and so are its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.runtime.runs import data, fresh
from wholestep import ir
from wholestep.dialects.step import StepBuilder, tensor_type
from wholestep.errors import InputError
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.core import Op
from wholestep.ir.passes import run_pipeline
from wholestep.runtime.executor import Executable
from wholestep.transforms import pad, through_loss
from wholestep.transforms.opportunity import take, transform

LOW = torch.bfloat16
TOKENS, WIDTH = (3, 8), 16
#: a prime, which `pad` fills up, and one that needs nothing
CLASSES = (173, 176)


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pad, "WORTH", 0)
    monkeypatch.setattr(pad, "PAYS", 0)
    monkeypatch.setattr(through_loss, "LARGE", 2)
    monkeypatch.setattr(through_loss, "SAMPLE", 8)


def head(given: list[torch.Tensor], bias: bool = False, **options: Any) -> tuple[Op, Op]:
    """A linear layer, the loss of its classes, and the gradients of both operands in f32."""
    root = module()
    function = add_function(root, "f", [tensor_type(t) for t in given])
    b = StepBuilder(function.regions[0].block, phase="forward")
    rows, weight, wanted, *weights = function.regions[0].block.arguments
    y = b.contract(rows, weight, b.slice(rows, dim=0, start=0, end=1) if bias else None, spec="abk,nk->abn")
    classes, count = weight.type.shape[0], wanted.type.size
    wide = b.cast(b.reshape(y, shape=(count, classes)), dtype=ir.F32)
    loss, lse = b.cross_entropy(wide, wanted, *weights, **options)
    b.phase = "backward"
    seed = b.full(1.0, loss.type.shape, ir.F32)
    dwide = b.cross_entropy_grad(seed, wide, wanted, lse, *weights, **options)
    dy = b.reshape(b.cast(dwide, dtype=y.type.element), shape=y.type.shape)
    dx, dw = b.contract(dy, weight, spec="abn,nk->abk"), b.contract(dy, rows, spec="abn,abk->nk")
    return root, finish_function(function, [loss, dx, b.cast(dw, dtype=ir.F32)])


def operands(classes: int, scale: float = 1.0) -> list[torch.Tensor]:
    target = torch.randint(0, classes, (24,), generator=torch.Generator().manual_seed(3))
    target[2] = -100
    target[5] = target[6]
    return [(data(*TOKENS, WIDTH) * scale).to(LOW), data(classes, WIDTH, seed=1).to(LOW), target]


def exact(given: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """Loss and gradients in f64, of the same 16-bit numbers."""
    rows, weight, target, *weights = (t.double() if t.is_floating_point() else t for t in given)
    rows, weight = rows.requires_grad_(), weight.requires_grad_()
    logits = (rows @ weight.T).flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, target, *weights, **options)
    return [loss.detach(), *torch.autograd.grad(loss.sum(), (rows, weight))]


def distances(made: list[torch.Tensor], want: list[torch.Tensor]) -> list[float]:
    return [((m.double() - w).norm() / w.norm()).item() for m, w in zip(made, want, strict=True)]


def both(given: list[torch.Tensor], **options: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What a program gives before and after."""
    root, function = head(given, **options)
    before = Executable(function)(given)
    take(root, ["pad"])
    (key,) = transform(root, force=["through_loss *"])
    assert key.startswith("through_loss f/")
    ir.verify(root)
    run_pipeline(root, "cse,dce")
    names = [op.name for op in function.regions[0].block]
    assert not any(n.startswith("step.cross_entropy") for n in names) and names.count("step.embedding_grad") == 1
    return before, Executable(function)(given)


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_and_gradients_are_as_near_to_f64(classes: int, scale: float, reduction: str) -> None:
    given = operands(classes, scale)
    before, after = both(given, reduction=reduction)
    want = exact(given, reduction=reduction)
    for was, now in zip(distances(before, want), distances(after, want), strict=True):
        assert now <= 1.5 * was + 1e-3, (was, now)
    assert distances(after, want)[0] < 3e-3


@pytest.mark.parametrize("classes", CLASSES)
def test_weights_of_classes(classes: int) -> None:
    given = [*operands(classes), data(classes, seed=4).abs()]
    before, after = both(given)
    want = exact(given)
    for was, now in zip(distances(before, want), distances(after, want), strict=True):
        assert now <= 1.5 * was + 1e-3, (was, now)


def test_a_model_that_is_sure_of_itself_loses_nothing() -> None:
    """Gradients are differences of nearly equal numbers then, unless what is wished is left out."""
    rows, weight, target = operands(176)
    target[2] = 3
    weight = torch.nn.functional.normalize(weight.float(), dim=1).to(LOW)
    rows = (weight[target].float() * 30 + 0.3 * rows.flatten(0, 1).float()).to(LOW).reshape(rows.shape)
    given = [rows, weight, target]
    want = exact(given)
    assert want[0] < 1e-2  # nearly all is known
    before, after = both(given)
    for was, now in zip(distances(before, want)[1:], distances(after, want)[1:], strict=True):
        assert now <= 1.5 * was, (was, now)


def test_far_logits_keep_their_distance_and_further_ones_are_finite() -> None:
    given = operands(176)
    rows, weight, target = given
    target[2], free = 0, 100
    target[target == free] = 1
    weight[:, 0], weight[free] = 0, 0
    weight[free, 0] = 1.0
    for far in (100.0, 300.0):
        rows[..., 0] = 0
        rows[1, 2, 0] = far  # one position has one class far above all others
        want = exact(given)
        _, after = both(given)
        if far < through_loss.BEYOND:
            assert max(distances(after, want)) < 1e-2
        else:
            assert all(t.isfinite().all() for t in after) and after[0] < want[0]
            top = after[2][free]  # and it is still the one to be made smaller
            assert top[0] > 0 and top.argmax() == 0


REFUSED = {
    "spread over all classes": ({"label_smoothing": 0.1}, LOW),
    "have no room in f32": ({}, torch.float32),
    "have no room in f16": ({}, torch.float16),
    "adds more than a bias": ({"bias": True}, LOW),
}


@pytest.mark.parametrize("why", REFUSED)
def test_where_it_is_not_possible_it_says_why(why: str) -> None:
    options, dtype = REFUSED[why]
    given = [t.to(dtype) if t.is_floating_point() else t for t in operands(WIDTH if options.get("bias") else 176)]
    if options.get("bias"):
        given[0], given[2] = given[0][:, :1].expand(3, 8, WIDTH).contiguous(), given[2] % WIDTH
    root, _ = head(given, **options)
    (opportunity,) = through_loss.ThroughLoss().find(root)
    assert why in opportunity.why_not
    with pytest.raises(InputError, match=why):
        transform(root, force=["through_loss *"])


class Language(nn.Module):
    """A table that is the head's weight as well, or not."""

    def __init__(self, tied: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(173, WIDTH), nn.Linear(WIDTH, 173, bias=bias)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.table(ids[:, :-1]))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), ids[:, 1:].flatten())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_in_a_whole_step(tied: bool, accumulate: int) -> None:
    ids = torch.randint(0, 173, (4, 9), generator=torch.Generator().manual_seed(0))

    def run(**options: Any) -> tuple[list[str], list[float], dict[str, torch.Tensor]]:
        model = fresh(lambda: Language(tied))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options |= {"precision": "bf16", "accumulate": accumulate}
        step = ws.compile(model, lambda m, ids: m(ids), optimizer, (ids,), **options)
        return step.recipe, [float(step(ids)) for _ in range(6)], dict(model.named_parameters())

    _, losses, parameters = run(forbid=["through_loss"])
    recipe, others, found = run(force=["through_loss *"])
    assert any(key.startswith("through_loss ") for key in recipe)
    assert others == pytest.approx(losses, rel=5e-3)
    for name, wanted in parameters.items():
        torch.testing.assert_close(found[name], wanted, rtol=2e-2, atol=2e-3)


def test_a_bias_needs_the_logits() -> None:
    model = fresh(lambda: Language(bias=True))
    ids = torch.randint(0, 173, (4, 9), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="its linear layer has a bias"):
        ws.compile(model, lambda m, i: m(i), optimizer, (ids,), precision="bf16", force=["through_loss *"])
