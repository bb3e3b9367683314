"""Checkpoints between compiled and eager training, either way: one curve, to the last bit where nothing is random."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholestep as ws
from tests.runtime.runs import adamw, fresh, sgd
from wholestep.cli.tiny_gpt import Shape, TinyGPT
from wholestep.errors import InputError

SHAPE = Shape(layers=2, width=16, heads=2, context=8, batch=3, vocabulary=32)


class Convolutions(nn.Module):
    """A small image classifier with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3, stride=2, bias=False)
        )
        self.norm, self.head = nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.norm(self.body(x))).mean((2, 3)))


class Dropping(nn.Module):
    """Dropout twice."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(4, width), nn.Linear(width, 3), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.second(self.drop(torch.tanh(self.first(x)))))


def gpt() -> nn.Module:
    return TinyGPT(SHAPE)


def tokens(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, SHAPE.vocabulary, (SHAPE.batch, SHAPE.context + 1), generator=draw)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def images(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, 9, 9, generator=draw), torch.randint(0, 5, (4,), generator=draw)


def vectors(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(5, 4, generator=draw), torch.randint(0, 3, (5,), generator=draw)


def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = model(x)
    return F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))


def warm_up(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 / (1 + n))


class Run:
    """A model in training with everything that a checkpoint is made of; compiled or eager."""

    def __init__(self, make: Callable[[], nn.Module], batch: Any, optimizer: Any, compiled: bool, seed: int = 0):
        self.model, self.batch = fresh(make, seed), batch
        self.optimizer = optimizer(self.model)
        self.scheduler = warm_up(self.optimizer)
        self.step = ws.compile(self.model, loss_fn, self.optimizer, batch(0)) if compiled else None

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        for number in range(first, last):
            if self.step is not None:
                losses.append(float(self.step(*self.batch(number))))
            else:
                self.optimizer.zero_grad()
                loss = loss_fn(self.model, *self.batch(number))
                loss.backward()
                self.optimizer.step()
                losses.append(float(loss.detach()))
            if self.scheduler is not None:
                self.scheduler.step()
        return losses

    def save(self) -> io.BytesIO:
        file = io.BytesIO()
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        file.seek(0)
        return file

    def load(self, file: io.BytesIO) -> None:
        found = torch.load(file, weights_only=True)
        self.model.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])
        self.scheduler.load_state_dict(found["scheduler"])


def assert_equal(one: Run, other: Run) -> None:
    """Parameters, buffers and optimizer state, to the last bit."""
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name]), name
    ours, theirs = one.optimizer.state_dict(), other.optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"] and ours["state"].keys() == theirs["state"].keys()
    for number, state in ours["state"].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs["state"][number][key])), (number, key)


# ---- between compiled and eager --------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [adamw, sgd])
@pytest.mark.parametrize(("make", "batch"), [(gpt, tokens), (Convolutions, images)])
@pytest.mark.parametrize("first", ["compiled", "eager"])
def test_a_checkpoint_goes_on_the_other_way_with_the_same_curve(make, batch, optimizer, first):
    whole = Run(make, batch, optimizer, compiled=False)
    curve = whole.train(0, 8)
    start = Run(make, batch, optimizer, compiled=first == "compiled")
    losses = start.train(0, 4)
    rest = Run(make, batch, optimizer, compiled=first == "eager", seed=1)  # other weights, until it is loaded
    rest.load(start.save())
    losses += rest.train(4, 8)
    assert losses == curve
    assert_equal(rest, whole)
    assert curve[-1] != curve[0] and whole.scheduler.get_last_lr() == rest.scheduler.get_last_lr()


def test_batch_norm_counts_and_averages_as_eager_does():
    compiled, eager = (Run(Convolutions, images, sgd, compiled=c) for c in (True, False))
    compiled.train(0, 3), eager.train(0, 3)
    for run in (compiled, eager):
        assert int(run.model.norm.num_batches_tracked) == 3
    assert torch.equal(compiled.model.norm.running_mean, eager.model.norm.running_mean)
    assert torch.equal(compiled.model.norm.running_var, eager.model.norm.running_var)
    assert not torch.equal(compiled.model.norm.running_mean, torch.zeros(4))
    with torch.no_grad():
        ours, theirs = (run.model.eval()(images(9)[0]) for run in (compiled, eager))
    assert torch.equal(ours, theirs)


# ---- resuming a compiled run -----------------------------------------------------------------------------------------


def test_a_resumed_run_with_dropout_is_the_run_that_was_never_interrupted():
    torch.manual_seed(5)
    whole = Run(Dropping, vectors, adamw, compiled=True)
    curve = whole.train(0, 6)
    torch.manual_seed(5)
    start = Run(Dropping, vectors, adamw, compiled=True)
    losses = start.train(0, 3)
    file = io.BytesIO()
    torch.save({"step": start.step.state_dict(), "scheduler": start.scheduler.state_dict()}, file)
    file.seek(0)
    torch.manual_seed(99)  # as in another process: another seed, other weights, no state
    rest = Run(Dropping, vectors, adamw, compiled=True, seed=3)
    found = torch.load(file, weights_only=True)
    rest.step.load_state_dict(found["step"])
    rest.scheduler.load_state_dict(found["scheduler"])
    losses += rest.train(3, 6)
    assert losses == curve
    assert_equal(rest, whole)


def test_dropout_makes_the_test_above_a_test():
    torch.manual_seed(5)
    one = Run(Dropping, vectors, adamw, compiled=True)
    torch.manual_seed(6)
    other = Run(Dropping, vectors, adamw, compiled=True)
    assert one.train(0, 2) != other.train(0, 2)


def test_a_saved_step_and_a_checkpoint_resume_together(tmp_path):
    torch.manual_seed(5)
    whole = Run(Dropping, vectors, sgd, compiled=True)
    curve = whole.train(0, 6)
    torch.manual_seed(5)
    start = Run(Dropping, vectors, sgd, compiled=True)
    losses = start.train(0, 3)
    start.step.save(tmp_path / "dropping.step")
    torch.save({"step": start.step.state_dict(), "scheduler": start.scheduler.state_dict()}, tmp_path / "dropping.pt")
    rest = Run(Dropping, vectors, sgd, compiled=False, seed=3)
    rest.step = ws.load(tmp_path / "dropping.step", rest.model, loss_fn, rest.optimizer)
    found = torch.load(tmp_path / "dropping.pt", weights_only=True)
    rest.step.load_state_dict(found["step"])
    rest.scheduler.load_state_dict(found["scheduler"])
    losses += rest.train(3, 6)
    assert losses == curve
    assert_equal(rest, whole)


# ---- state that changes while a step is in use -----------------------------------------------------------------------


def pair(optimizer: Any = adamw) -> tuple[Run, Run]:
    return Run(gpt, tokens, optimizer, compiled=True), Run(gpt, tokens, optimizer, compiled=False)


@pytest.mark.parametrize("optimizer", [adamw, sgd])
def test_model_and_optimizer_state_loaded_mid_run(optimizer):
    compiled, eager = pair(optimizer)
    assert compiled.train(0, 2) == eager.train(0, 2)
    kept = [copy.deepcopy((r.model.state_dict(), r.optimizer.state_dict())) for r in (compiled, eager)]
    assert compiled.train(2, 4) == eager.train(2, 4)
    for run, (model, state) in zip((compiled, eager), kept, strict=True):
        run.model.load_state_dict(model)
        run.optimizer.load_state_dict(state)
    assert compiled.train(4, 6) == eager.train(4, 6)
    assert_equal(compiled, eager)


def test_a_param_group_added_mid_run_is_trained_from_then_on():
    runs = []
    for compiled in (True, False):
        run = Run(gpt, tokens, lambda m: torch.optim.AdamW(list(m.parameters())[2:], lr=0.01), compiled=compiled)
        run.scheduler = None  # torch's schedulers do not take groups that come later
        losses = run.train(0, 2)
        first = list(run.model.parameters())[:2]
        before = [p.detach().clone() for p in first]
        run.optimizer.add_param_group({"params": first, "lr": 0.02, "weight_decay": 0.0})
        losses += run.train(2, 5)
        assert not any(torch.equal(a, b) for a, b in zip(first, before, strict=True))
        runs.append((run, losses))
    assert runs[0][1] == runs[1][1]
    assert_equal(runs[0][0], runs[1][0])
    assert runs[0][0].step.report().compilations == 2


def test_layers_frozen_and_unfrozen_mid_run_compile_again_and_equal_eager():
    compiled, eager = pair()
    ours, theirs = compiled.train(0, 2), eager.train(0, 2)
    for frozen in (True, False):
        for run in (compiled, eager):
            weights = [p for n, p in run.model.named_parameters() if n.startswith("blocks.0.") or ".0." in n]
            assert weights
            for p in weights:
                p.requires_grad_(not frozen)
        before = copy.deepcopy(compiled.model.state_dict())
        ours += compiled.train(2, 4)
        theirs += eager.train(2, 4)
        same = [torch.equal(before[n], p) for n, p in compiled.model.named_parameters() if not p.requires_grad]
        assert all(same) and bool(same) == frozen
    assert ours == theirs
    assert_equal(compiled, eager)
    assert compiled.step.report().compilations >= 2


def test_one_checkpoint_can_be_loaded_twice():
    run = Run(Dropping, vectors, adamw, compiled=True)
    run.scheduler = None
    run.train(0, 2)
    state = copy.deepcopy(run.step.state_dict())
    curves = []
    for _ in range(2):
        run.step.load_state_dict(state)
        curves.append(run.train(2, 5))
    assert curves[0] == curves[1]


def test_the_loss_scale_of_a_checkpoint_goes_where_there_is_one():
    def compiled(**options: Any) -> Any:
        model = fresh(Dropping)
        return ws.compile(model, F.mse_loss, adamw(model), (torch.ones(2, 4), torch.ones(2, 3)), **options)

    half = compiled(precision="fp16")
    half(torch.ones(2, 4), torch.ones(2, 3))
    state = copy.deepcopy(half.state_dict())
    single = compiled(skip_nonfinite=True)
    single.load_state_dict(state)
    single(torch.ones(2, 4), torch.ones(2, 3))
    assert "scaler" not in single.state_dict() and single.report().loss_scale is None
    half.load_state_dict({**state, "scaler": torch.amp.GradScaler("cpu", enabled=False).state_dict()})
    assert half.state_dict()["scaler"] == state["scaler"]
    for bad in ({**state["scaler"], "scale": float("nan")}, {"scale": 0.0, "_growth_tracker": 0}):
        with pytest.raises(InputError, match="the loss scale of the checkpoint is not one"):
            half.load_state_dict({**state, "scaler": bad})


# ---- a checkpoint that does not fit ----------------------------------------------------------------------------------


def other_width(run: Run) -> dict[str, Any]:
    other = Run(lambda: Dropping(width=9), vectors, adamw, compiled=True)
    other.train(0, 1)
    return other.step.state_dict()


def other_optimizer(run: Run) -> dict[str, Any]:
    """The model fits, the optimizer's groups do not: the model must not be loaded either."""
    state = copy.deepcopy(run.step.state_dict())
    for tensor in state["model"].values():
        tensor.zero_()
    state["optimizer"]["param_groups"][0]["params"].pop()
    return state


def no_number(run: Run) -> dict[str, Any]:
    state = copy.deepcopy(run.step.state_dict())
    for tensor in state["model"].values():
        tensor.zero_()
    state["random"] = {"seed": "x", "counter": 1}
    return state


@pytest.mark.parametrize(
    "make_state",
    [
        other_width,
        other_optimizer,
        no_number,
        lambda run: run.model.state_dict(),
        lambda run: {"model": {}},
        lambda run: 3,
    ],
)
def test_a_checkpoint_of_something_else_is_refused_and_changes_nothing(make_state):
    run = Run(Dropping, vectors, adamw, compiled=True)
    run.train(0, 2)
    twin = Run(Dropping, vectors, adamw, compiled=True)
    twin.train(0, 2)
    with pytest.raises(InputError):
        run.step.load_state_dict(make_state(run))
    assert_equal(run, twin)
    assert run.train(2, 3) == twin.train(2, 3)
