"""What a user asks of fusion: a recipe makes exactly its kernels, force and forbid move the borders, errors say why."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.runtime.loops_provider import loops  # noqa: F401  (a fixture)
from wholestep.errors import InputError

pytestmark = pytest.mark.usefixtures("loops")
X, Y = torch.randn(12, 16, generator=torch.Generator().manual_seed(5)), torch.arange(12) % 3
GELU, NORM = "step/1/forward/gelu#0", "step/2/forward/layer_norm#0"


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 3))


def lively() -> nn.Module:
    """Statistics over the batch, random numbers, a residual, a reshape between ops."""

    class Lively(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.out = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(64, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.relu(self.norm(self.conv(x.view(-1, 1, 4, 4))))
            h = h.flatten(1) + torch.nn.functional.dropout(torch.tanh(h).flatten(1), 0.25)
            return self.out(h)

    return Lively()


def compiled(make=perceptron, **options):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"providers": ["aten", "loops"], "tune": False} | options
    return ws.compile(model, nn.CrossEntropyLoss(), optimizer, (X, Y), **options)


def losses(step, count: int = 3) -> list[float]:
    torch.manual_seed(7)
    return [float(step(X, Y)) for _ in range(count)]


def fused(step) -> list[str]:
    return [line for line in step.recipe if line.startswith("fuse ")]


# ---- a recipe --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "options"), [(perceptron, {}), (lively, {}), (perceptron, {"accumulate": 2})])
def test_a_recipe_replays(make, options):
    step = compiled(make, **options)
    lines = fused(step)
    assert any(" + " in line for line in lines)
    again = compiled(make, recipe=step.recipe, **options)
    assert again.recipe == step.recipe
    assert losses(again) == losses(step)


def test_a_recipe_makes_its_kernels_and_no_others():
    full = compiled()
    assert f"fuse {GELU} + {NORM}" in full.recipe
    other = [line for line in full.recipe if not line.startswith("fuse ")]
    step = compiled(recipe=[*other, f"fuse {GELU}", f"fuse {NORM}"])
    assert fused(step) == [f"fuse {GELU}", f"fuse {NORM}"]
    assert [launch.provider for launch in step.plan().launches].count("loops") == 2
    assert losses(step) == pytest.approx(losses(full), rel=1e-4)
    assert step.why_not(GELU, NORM) == f"{GELU} and {NORM} are not one kernel: the recipe has them apart"


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            [f"fuse {GELU} + step/2/forward/layer_nrm#0"],
            "the step has no op 'step/2/forward/layer_nrm#0'; did you mean",
        ),
        ([f"fuse {GELU} + step/1/backward/gelu_grad#0"], "must run between its ops"),
        ([f"fuse {GELU} + {NORM}", f"fuse {NORM}"], f"{NORM} is in 'fuse {GELU} + {NORM}' already"),
        (["fuse step/0/forward/contract#0"], "a library runs it"),
        (["fuse stop/1/forward/gelu#0"], "fits no fusion"),
    ],
)
def test_a_recipe_that_is_not_possible_says_why(recipe, message):
    with pytest.raises(InputError, match=message.replace("+", r"\+")):
        compiled(recipe=recipe)


def test_a_recipe_needs_somebody_who_runs_it():
    with pytest.raises(InputError, match=r"only ATen may run this step; see providers= and level="):
        compiled(recipe=[f"fuse {GELU}"], providers=["aten"])


def test_a_saved_step_keeps_its_kernels(tmp_path):
    step = compiled()
    part = [line for line in step.recipe if GELU in line or not line.startswith("fuse ")]
    for number, saved in enumerate((step, compiled(recipe=part))):
        saved.save(tmp_path / f"{number}.step")
        torch.manual_seed(0)
        model = perceptron()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loaded = ws.load(tmp_path / f"{number}.step", model, nn.CrossEntropyLoss(), optimizer)
        assert loaded.recipe == saved.recipe
        assert losses(loaded) == losses(saved)
    assert len(fused(loaded)) == 1


# ---- force and forbid ------------------------------------------------------------------------------------------------


def test_forbidden_neighbours_stay_apart():
    step = compiled(forbid=["fuse *layer_norm#0 <- *gelu#0"])
    assert f"fuse {GELU}" in step.recipe and f"fuse {NORM}" in step.recipe
    assert step.why_not(GELU, NORM) == f"{GELU} and {NORM} are not one kernel: it is forbidden"
    assert losses(step) == pytest.approx(losses(compiled()), rel=1e-4)
    with pytest.raises(InputError, match=r"forbid names 'fuse \*softmax\*', which fits no fusion"):
        compiled(forbid=["fuse *softmax*"])


@pytest.mark.parametrize("pattern", ["fuse", "fuse *", "*", "*gelu*"])
def test_a_name_alone_and_a_pattern_of_any_name_forbid_fusion_too(pattern):
    step = compiled(forbid=[pattern])
    assert not any(" + " in line for line in step.recipe if "gelu" in line or pattern != "*gelu*")
    assert step.why_not(GELU, NORM) == f"{GELU} and {NORM} are not one kernel: it is forbidden"
    assert losses(step) == pytest.approx(losses(compiled()), rel=1e-4)
    with pytest.raises(InputError, match=r"forbid names 'fuse \*', but nothing is fused"):
        compiled(forbid=["fuse"], level=1)
    assert compiled(forbid=["*"], level=1).recipe == []


def test_forced_pairs_are_tried_first():
    """Two readers of one product: by itself the first becomes one with what it makes."""

    def make():
        class Two(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(16, 32)

            def forward(self, x):
                h = self.layer(x)
                return torch.tanh(h).sum(1, keepdim=True) * torch.ones(3), torch.exp(h).amax(1)

        return Two()

    def loss(model, x, y):
        a, b = model(x)
        return nn.functional.cross_entropy(a, y) + b.mean()

    def of(**options):
        torch.manual_seed(0)
        model = make()
        options = {"providers": ["aten", "loops"], "tune": False} | options
        return ws.compile(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), (X, Y), **options)

    tanh, exp = "step/-/loss/tanh#0", "step/-/loss/exp#0"
    plain = of()
    assert f"{tanh} and {exp}" in plain.why_not(tanh, exp) and "are one kernel" not in plain.why_not(tanh, exp)
    step = of(force=["fuse */exp#0 <- */tanh#0"])
    assert "are one kernel" in step.why_not(tanh, exp)
    assert losses(step) == pytest.approx(losses(plain), rel=1e-4)


@pytest.mark.parametrize(
    ("force", "message"),
    [
        (["fuse */lerp#0 <- */layer_norm_grad#0"], "is not possible: one is part of backward, the other of update"),
        (["fuse */tanh#0 <- */gelu#0"], "fits no fusion"),
    ],
)
def test_what_cannot_be_forced_says_why(force, message):
    with pytest.raises(InputError, match=message):
        compiled(force=force)


def test_a_recipe_and_forced_pairs_do_not_mix():
    with pytest.raises(InputError, match=r"put the ops of .* into one line of it"):
        compiled(recipe=[f"fuse {GELU}"], force=[f"fuse {NORM} <- {GELU}"])
