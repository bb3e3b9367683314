"""`chunk-loss`: the loss and its linear layer in chunks of tokens give what the whole gives, in less memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import wholestep as ws
from wholestep.errors import MemoryBudgetError
from wholestep.ir.core import Op
from wholestep.transforms import pad
from wholestep.transforms.opportunity import Opportunity

CLASSES, WIDTH = 61, 8


class Language(nn.Module):
    """Embedding, one layer, and a linear layer to classes whose weight may be the embedding's."""

    def __init__(self, tied: bool = False, bias: bool = False, classes: int = CLASSES):
        super().__init__()
        self.embed, self.layer = nn.Embedding(classes, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, classes, bias=bias)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.layer(self.embed(tokens))))


def whole(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def summed(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")


def smoothed(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), label_smoothing=0.1, ignore_index=3)


def each(model, x, y):
    losses = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
    return (losses * (y.flatten() > 20)).sum()


def weighted(model, x, y):
    weight = torch.linspace(0.1, 2.0, CLASSES)
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), weight, label_smoothing=0.05)


def next_token(model, x, y):
    """As transformers had it: logits and labels are shifted."""
    return F.cross_entropy(model(x)[:, :-1].reshape(-1, CLASSES).float(), y[:, 1:].reshape(-1))


def padded_labels(model, x, y):
    """As transformers has it: labels alone are shifted, and the last token counts for nothing."""
    logits, shifted = model(x).float(), F.pad(y, (0, 1), value=-100)[..., 1:]
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), shifted.reshape(-1), ignore_index=-100, reduction="mean")


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randint(0, CLASSES, (3, 11)), torch.randint(0, CLASSES, (3, 11))


def compiled(loss_fn, model: nn.Module, given=None, lr: float = 0.5, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return ws.compile(model, loss_fn, optimizer, given or batch(), **options)


def program(step) -> Op:
    return step._compiled.program.module


def largest(root: Op) -> int:
    """Rows of the largest tensor that has a row of classes per token."""
    shapes = [r.type.shape for op in root.walk() for r in op.results if hasattr(r.type, "shape")]
    return max(s[0] if len(s) == 2 else s[0] * s[1] for s in shapes if len(s) > 1 and s[-1] == CLASSES)


@pytest.mark.parametrize("loss_fn", [whole, summed, smoothed, each, weighted, next_token, padded_labels])
@pytest.mark.parametrize(("tied", "bias"), [(False, True), (True, False)], ids=["bias", "tied"])
def test_losses_and_weights_are_eagers(loss_fn, tied, bias):
    torch.manual_seed(1)
    model = Language(tied, bias)
    eager = copy.deepcopy(model)
    lr = 0.02 if loss_fn in (summed, each) else 0.5
    optimizer = torch.optim.SGD(eager.parameters(), lr=lr)
    step = compiled(loss_fn, model, lr=lr, force=["chunk-loss *"])
    assert largest(program(step)) < 33
    for seed in range(4):
        x, y = batch(seed)
        optimizer.zero_grad()
        expected = loss_fn(eager, x, y)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(step(x, y), expected.detach(), rtol=1e-5, atol=1e-6)
    for (name, mine), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_bf16_with_classes_that_are_filled_up(monkeypatch):
    """What `pad` does to the products of the linear layer is done per chunk; gradients are summed in float32."""
    monkeypatch.setattr(pad, "WORTH", 0)
    monkeypatch.setattr(pad, "PAYS", 0)
    losses = {}
    for force in (["pad *"], ["pad *", "chunk-loss *"]):
        torch.manual_seed(1)
        model = Language(tied=True)
        step = compiled(padded_labels, model, precision="bf16", force=force, clip_norm=1.0)
        losses[len(force)] = [float(step(*batch(seed))) for seed in range(5)]
    assert largest(program(step)) < 33
    assert any(op.name == "step.pad" and op.result.type.shape[-1] == 64 for op in program(step).walk())
    torch.testing.assert_close(torch.tensor(losses[2]), torch.tensor(losses[1]), rtol=2e-3, atol=0)
    sums = [op for op in program(step).walk() if op.name == "step.accumulate"]
    assert sums and all(op.total.type.element.text == "f32" for op in sums)


def test_micro_batches():
    torch.manual_seed(1)
    model = Language()
    twin = copy.deepcopy(model)
    given = tuple(t.repeat(2, 1) for t in batch())
    plain, chunked = (
        compiled(whole, m, given, accumulate=2, **kw) for m, kw in ((twin, {}), (model, {"force": ["chunk-loss *"]}))
    )
    for _ in range(3):
        torch.testing.assert_close(chunked(*given), plain(*given), rtol=1e-5, atol=1e-6)


def opportunity(loss_fn, model: nn.Module | None = None) -> Opportunity:
    step = compiled(loss_fn, model or Language(), level=1)
    (found,) = [o for o in step.opportunities() if o.transformation == "chunk-loss"]
    return found


def test_an_opportunity_says_what_it_saves_and_costs():
    found = opportunity(whole)
    assert found.key == "chunk-loss step/-/loss/cross_entropy#0"
    assert found.change.saved == -33 * CLASSES * 4
    weight, more = CLASSES * WIDTH * 4, 4  # chunks of 8 tokens: their logits are as large as the weight's gradient
    assert found.change.bytes == more * (2 * weight + 3 * weight) + 2 * 33 * WIDTH * 4


def with_logits(model, x, y):
    logits = model(x)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten()), logits


def squashed(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1).tanh(), y.flatten())


def classes_first(model, x, y):
    return F.cross_entropy(model(x).transpose(1, 2), y)


def squared(model, x, y):
    return whole(model, x, y) ** 2


@pytest.mark.parametrize(
    ("loss_fn", "why"),
    [
        (squashed, "step.tanh stands between the linear layer and the loss"),
        (classes_first, "the classes are not the last dimension"),
        (squared, "the gradient that the loss gets depends on the loss itself"),
        (with_logits, "the step gives the logits back"),
        (lambda m, x, y: whole(m, x, y) + 0.1 * m(x).mean(), "reads the logits too"),
    ],
    ids=["between", "rank", "squared", "output", "mean"],
)
def test_why_not(loss_fn, why):
    assert why in opportunity(loss_fn).why_not


# ---- memory ----------------------------------------------------------------------------------------------------------

MANY = 1500


def large() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randint(0, MANY, (4, 64)), torch.randint(0, MANY, (4, 64))


def test_the_plan_holds_a_chunk_of_logits_at_a_time():
    logits, plans = 4 * 64 * MANY * 4, []
    for options in ({}, {"force": ["chunk-loss *"]}):
        plans.append(compiled(padded_labels, Language(True, classes=MANY), large(), **options).plan())
    assert plans[0].peak > 2 * logits
    assert plans[1].arena < logits / 2


def test_kernels_of_chunks_stay_apart(tmp_path, monkeypatch):
    """Fused too, a chunk's logits are gone before the next chunk's are made."""
    monkeypatch.setenv("WHOLESTEP_CACHE", str(tmp_path))
    model = Language(True, classes=MANY)
    step = compiled(padded_labels, model, large(), providers=["aten", "cpp"], tune=False, force=["chunk-loss *"])
    assert any(launch.provider == "cpp" for launch in step.plan().launches)
    assert step.plan().arena < 4 * 64 * MANY * 4 / 2


def test_a_budget_takes_it_where_running_again_costs_more():
    torch.manual_seed(2)
    model = Language(True, classes=MANY)
    twin = copy.deepcopy(model)
    step = compiled(padded_labels, model, large(), memory_budget=0.5)
    plain = compiled(padded_labels, twin, large())
    found = step.budget
    assert step.recipe == ["chunk-loss step/-/loss/cross_entropy#0"]
    assert step.plan().peak == found.peak_after <= found.budget < found.peak_before == plain.plan().peak
    assert found.chunked[0][0] == "head" and found.chunked_bytes == 4 * 64 * MANY * 4 and found.chunked_seconds > 0
    assert "head and its loss take their tokens in" in str(found)
    for _ in range(2):
        torch.testing.assert_close(step(*large()), plain(*large()), rtol=1e-5, atol=1e-6)
    again = compiled(padded_labels, copy.deepcopy(twin), large(), recipe=step.recipe)
    assert again.plan().peak == found.peak_after
    with pytest.raises(MemoryBudgetError, match="the least found to do"):
        compiled(padded_labels, twin, large(), memory_budget=0.5, forbid=["chunk-loss *"])
