"""Low-precision copies of the weights: written by the update, and made again when somebody else writes the weights."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.runtime.runs import Perceptron, adamw, data, fresh, sgd, squares
from wholestep.runtime import own_state


def copies(step: ws.TrainStep) -> dict[str, torch.Tensor]:
    return {source[1]: t for source, t in step._own.tensors.items() if source[0] == "copy"}


def assert_fresh(step: ws.TrainStep) -> None:
    """The copies are the weights in bf16."""
    parameters = dict(step.model.named_parameters())
    found = copies(step)
    assert set(found) >= {"first.weight", "second.weight"}
    for name, tensor in found.items():
        assert torch.equal(tensor, parameters[name].detach().to(torch.bfloat16)), name


def compiled(make_optimizer=adamw):
    model = fresh(Perceptron)
    optimizer = make_optimizer(model)
    return model, optimizer, ws.compile(model, squares, optimizer, (data(6, 4),), precision="bf16")


def test_the_update_writes_the_copies_and_no_step_casts_a_weight():
    _, _, step = compiled()
    places = {}
    for seed in range(3):
        step(data(6, 4, seed=seed))
        assert_fresh(step)
        places = places or {k: t.data_ptr() for k, t in copies(step).items()}
    assert {k: t.data_ptr() for k, t in copies(step).items()} == places
    text = str(step.program())
    assert not [line for line in text.splitlines() if '"step.cast"(%first.weight)' in line]
    assert 'step.kind = "copy"' in text


def test_the_copies_lie_in_one_piece():
    """Asked for one by one they take more: a GPU's allocator hands out up to a megabyte more for each."""
    _, _, step = compiled()
    step(data(6, 4))
    found = list(copies(step).values())
    assert len(found) > 1 and len({t.untyped_storage().data_ptr() for t in found}) == 1
    assert all(t.data_ptr() % 64 == 0 for t in found)
    assert_fresh(step)


def eager_step(model, optimizer):
    optimizer.zero_grad()
    squares(model, data(6, 4, seed=7)).backward()
    optimizer.step()
    optimizer.zero_grad()


def load_weights(model, optimizer):
    model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})


def write_in_place(model, optimizer):
    with torch.no_grad():
        model.first.weight[0, 0] = 3.0


def write_data(model, optimizer):
    for p in model.parameters():
        p.data.mul_(0.5)


def replace_data(model, optimizer):
    model.first.weight.data = torch.ones_like(model.first.weight)


def load_nan(model, optimizer):
    with torch.no_grad():
        model.second.weight.fill_(float("nan"))


@pytest.mark.parametrize(
    "make_optimizer",
    [
        adamw,
        sgd,
        lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=True),
    ],
    ids=["adamw", "sgd", "fused-adamw", "fused-sgd"],
)
@pytest.mark.parametrize("change", [eager_step, load_weights, write_in_place, write_data, replace_data, load_nan])
def test_copies_follow_whoever_writes_the_weights(change, make_optimizer):
    model, optimizer, step = compiled(make_optimizer)
    step(data(6, 4))
    change(model, optimizer)
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        expected = squares(twin, data(6, 4, seed=1))
    loss = step(data(6, 4, seed=1))
    torch.testing.assert_close(loss, expected.detach().float(), rtol=1e-2, atol=1e-4, equal_nan=True)
    if change is not load_nan:
        assert_fresh(step)


def test_a_stale_copy_would_be_seen_in_the_loss(monkeypatch):
    """With everything that notices switched off the test above fails."""
    model, optimizer, step = compiled()
    monkeypatch.setattr(own_state, "mark", lambda parameter: (0, 0))
    monkeypatch.setattr(own_state.OwnState, "notice_changes", lambda self: None)
    step(data(6, 4))
    load_weights(model, optimizer)
    with torch.autocast("cpu", torch.bfloat16):
        expected = squares(model, data(6, 4, seed=1)).detach().float()
    assert not torch.allclose(step(data(6, 4, seed=1)), expected, rtol=1e-2, atol=1e-4)


def test_refresh_after_a_change_that_no_sample_shows():
    model = fresh(lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)))
    step = ws.compile(model, squares, sgd(model, 0.0), (data(6, 64),), precision="bf16")
    step(data(6, 64))
    model[0].weight.data.view(-1)[1] = 50.0  # away from the sampled middle
    step.refresh()
    step(data(6, 64))
    assert float(step._own.tensors["copy", "0.weight"].view(-1)[1]) == 50.0


def test_the_hook_on_the_optimizer_is_ours_alone():
    model, optimizer, step = compiled()
    again = ws.compile(model, squares, optimizer, (data(6, 4),), precision="bf16")  # not refused for our own hook
    again(data(6, 4))
    step(data(6, 4))
    assert_fresh(step)
    del step, again
    eager_step(model, optimizer)  # the steps are gone, the hook does nothing
    assert copy.deepcopy(optimizer).state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def test_the_hook_goes_with_the_step():
    model = fresh(Perceptron)
    optimizer = adamw(model)
    hooks = optimizer._optimizer_step_post_hooks
    for _ in range(3):
        step = ws.compile(model, squares, optimizer, (data(6, 4),), precision="bf16")
        gc.collect()
        assert len(hooks) == 1
    del step
    gc.collect()
    assert not hooks
