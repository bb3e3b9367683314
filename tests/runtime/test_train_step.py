"""`TrainStep` beside eager PyTorch: the model and the optimizer stay the truth, whatever is mixed with its steps."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholestep as ws
from tests.runtime.runs import Body, Perceptron, adamw, assert_same, data, eager_step, fresh, sgd, squares
from wholestep.errors import InputError

X = data(6, 4)
OPTIMIZERS = [sgd, adamw, lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05)]


def eager(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor = X) -> float:
    return eager_step(lambda m: squares(m, x), model, optimizer)


def norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def assert_same_state(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    ours, theirs = one.state_dict()["state"], other.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    for index, state in ours.items():
        assert state.keys() == theirs[index].keys()
        for key, value in state.items():
            torch.testing.assert_close(value, theirs[index][key], rtol=1e-5, atol=1e-7)


# ---- the user's own tensors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
def test_parameters_buffers_and_state_are_updated_in_place(make_optimizer):
    model = fresh(norm_net)
    optimizer = make_optimizer(model)
    step = ws.compile(model, squares, optimizer, (X,))
    assert not any(optimizer.state.values()) or isinstance(optimizer, torch.optim.Adagrad)
    step(X)
    tensors = {**model.state_dict(keep_vars=True)}
    tensors |= {(id(p), k): v for p, s in optimizer.state.items() for k, v in s.items() if isinstance(v, torch.Tensor)}
    places = {name: (id(t), t.data_ptr()) for name, t in tensors.items()}
    values = {name: t.detach().clone() for name, t in tensors.items()}
    step(X)
    again = {**model.state_dict(keep_vars=True)}
    again |= {(id(p), k): v for p, s in optimizer.state.items() for k, v in s.items() if isinstance(v, torch.Tensor)}
    assert places == {name: (id(t), t.data_ptr()) for name, t in again.items()}
    unchanged = [name for name, t in again.items() if torch.equal(values[name], t)]
    assert all(name == "0.bias" or name[0] == id(model[0].bias) for name in unchanged)  # no gradient before BatchNorm


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
@pytest.mark.parametrize("order", ["ccee", "eecc", "cecece", "ecc"])
def test_compiled_and_eager_steps_mix_in_any_order(make_optimizer, order):
    model, twin = fresh(norm_net), fresh(norm_net)
    optimizer, twin_optimizer = make_optimizer(model), make_optimizer(twin)
    step = None
    for turn, kind in enumerate(order):
        x = data(6, 4, seed=turn)
        if kind == "c":
            step = step or ws.compile(model, squares, optimizer, (x,))
            loss = float(step(x))
        else:
            loss = eager(model, optimizer, x)
        assert loss == pytest.approx(eager(twin, twin_optimizer, x), rel=1e-5)
    assert_same(model, twin)
    assert_same_state(optimizer, twin_optimizer)
    assert step is not None and step.compilations == 1


def test_gradients_are_not_touched():
    model = fresh(Perceptron)
    model.first.weight.grad = kept = torch.full((5, 4), 7.0)
    step = ws.compile(model, squares, sgd(model), (X,))
    step(X)
    assert model.first.weight.grad is kept and torch.equal(kept, torch.full((5, 4), 7.0))
    assert model.second.weight.grad is None


def test_the_loss_and_the_outputs_are_plain_values():
    model = fresh(lambda: Body(lambda m, x: m.layer(x), state=torch.zeros(4)))

    def loss(model, x):
        out = model(x)
        model.state.add_(1)
        return out.pow(2).mean(), model.layer.weight, model.layer.weight[1:], model.state, torch.zeros(2), x, out

    step = ws.compile(model, loss, sgd(model), (X,))
    before, x = model.layer.weight.detach().clone(), X.clone()
    value, weight, rows, state, zeros, given, out = step(x)
    assert not value.requires_grad and value.grad_fn is None
    assert torch.equal(weight, before) and torch.equal(rows, before[1:])  # as the forward pass saw them
    assert torch.equal(state, torch.ones(4))
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), x)}
    for t in (value, weight, rows, state, zeros, given, out):
        assert t.untyped_storage().data_ptr() not in own
    first = float(value)
    zeros.fill_(7)  # a constant of the program must not be reachable from outside
    state.fill_(7)
    again = step(x)
    assert torch.equal(again[4], torch.zeros(2)) and torch.equal(again[3], torch.full((4,), 2.0))
    assert float(value) == first


# ---- between steps ---------------------------------------------------------------------------------------------------


def test_a_scheduler_never_recompiles():
    model, twin = fresh(Perceptron), fresh(Perceptron)
    optimizer, twin_optimizer = adamw(model), adamw(twin)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=8)
    twin_schedule = torch.optim.lr_scheduler.OneCycleLR(twin_optimizer, max_lr=0.05, total_steps=8)
    step = ws.compile(model, squares, optimizer, (X,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where it thinks that the optimizer was not stepped
        for _ in range(5):
            step(X)
            schedule.step()
            eager(twin, twin_optimizer)
            twin_schedule.step()
    assert_same(model, twin)
    assert step.compilations == 1


def test_inference_between_steps():
    model, twin = fresh(norm_net), fresh(norm_net)
    optimizer, twin_optimizer = sgd(model), sgd(twin)
    step = ws.compile(model, squares, optimizer, (X,))
    for _ in range(3):
        step(X)
        eager(twin, twin_optimizer)
        model.eval()
        twin.eval()
        with torch.no_grad():
            torch.testing.assert_close(model(X), twin(X))
        model.train()
        twin.train()
    assert step.compilations == 1
    assert_same(model, twin)


def test_the_model_can_be_copied_and_pickled():
    model = fresh(norm_net)
    step = ws.compile(model, squares, adamw(model), (X,))
    step(X)
    clone, thawed = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    step(X)
    assert_same(clone, thawed)
    assert not torch.equal(clone[0].weight, model[0].weight)
    again = ws.compile(clone, squares, adamw(clone), (X,))
    again(X)
    assert torch.isfinite(clone[0].weight).all()


def test_checkpoints_go_to_a_file_and_on_in_eager():
    model, twin = fresh(norm_net), fresh(norm_net)
    optimizer, twin_optimizer = adamw(model), adamw(twin)
    step = ws.compile(model, squares, optimizer, (X,))
    for _ in range(2):
        step(X)
        eager(twin, twin_optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = fresh(norm_net, seed=1)
    resumed_optimizer = adamw(resumed, lr=0.5)
    resumed.load_state_dict(saved["model"])
    resumed_optimizer.load_state_dict(saved["optimizer"])
    for _ in range(2):
        eager(resumed, resumed_optimizer)
        eager(twin, twin_optimizer)
    assert_same(resumed, twin)
    assert_same_state(resumed_optimizer, twin_optimizer)


def test_a_checkpoint_loaded_into_a_compiled_step():
    model = fresh(lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    step = ws.compile(model, squares, adamw(model), (X,))
    step(X)
    saved = copy.deepcopy(step.state_dict())
    first = [float(step(X)) for _ in range(3)]
    step.load_state_dict(saved)
    assert [float(step(X)) for _ in range(3)] == first  # parameters, moments and dropout masks are those of before
    assert len(set(first)) == 3
    assert step.compilations == 1


# ---- what compiles again ---------------------------------------------------------------------------------------------


def both(make=norm_net, make_optimizer=sgd):
    model, twin = fresh(make), fresh(make)
    optimizer, twin_optimizer = make_optimizer(model), make_optimizer(twin)
    step = ws.compile(model, squares, optimizer, (X,))
    step(X)
    eager(twin, twin_optimizer)
    return model, twin, optimizer, twin_optimizer, step


def follow(model, twin, twin_optimizer, step, compilations):
    for _ in range(2):
        assert float(step(X)) == pytest.approx(eager(twin, twin_optimizer), rel=1e-5)
    assert_same(model, twin)
    assert step.compilations == compilations


def test_freezing_and_unfreezing():
    model, twin, _, twin_optimizer, step = both()
    for flag, count in ((False, 2), (True, 3)):
        model[0].requires_grad_(flag)
        twin[0].requires_grad_(flag)
        follow(model, twin, twin_optimizer, step, count)


def test_changing_modes():
    model, twin, _, twin_optimizer, step = both()
    model[1].eval()
    twin[1].eval()
    follow(model, twin, twin_optimizer, step, 2)


def test_adding_a_group():
    model, twin = fresh(norm_net), fresh(norm_net)
    optimizer, twin_optimizer = (torch.optim.SGD(m[0].parameters(), lr=0.1) for m in (model, twin))
    step = ws.compile(model, squares, optimizer, (X,))
    for _ in range(2):
        step(X)
        eager(twin, twin_optimizer)
    assert_same(model, twin)
    optimizer.add_param_group({"params": [*model[3].parameters()], "lr": 0.01, "weight_decay": 0.1})
    twin_optimizer.add_param_group({"params": [*twin[3].parameters()], "lr": 0.01, "weight_decay": 0.1})
    follow(model, twin, twin_optimizer, step, 2)


def test_a_replaced_layer_is_seen():
    model, twin, optimizer, twin_optimizer, step = both()
    model[3] = nn.Linear(5, 3)
    with pytest.raises(InputError, match="the optimizer holds 2 of 6 parameters that are not the model's"):
        step(X)
    with torch.random.fork_rng(devices=[]):
        twin[3] = copy.deepcopy(model[3])
    for m, o in ((model, optimizer), (twin, twin_optimizer)):
        o.param_groups[0]["params"][-2:] = list(m[3].parameters())
    follow(model, twin, twin_optimizer, step, 2)


def test_another_dtype_is_seen():
    model, _, _, _, step = both()
    model.double()
    with pytest.raises(ws.WholestepError, match="dtypes"):
        step(X)


def test_a_buffer_that_eager_code_replaces_is_the_one_that_counts():
    def count(m, x):
        m.calls = m.calls + 1
        return m.layer(x) * m.calls

    model = fresh(lambda: Body(count, calls=torch.tensor(0.0)))
    optimizer = sgd(model)
    step = ws.compile(model, squares, optimizer, (X,))
    step(X)
    eager(model, optimizer)
    step(X)
    assert float(model.calls) == 3


# ---- where and how it is called --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("where", ["compile", "step"])
def test_under_any_grad_mode(mode, where):
    model, twin = fresh(norm_net), fresh(norm_net)
    optimizer, twin_optimizer = adamw(model), adamw(twin)
    if where == "compile":
        with mode():
            step = ws.compile(model, squares, optimizer, (X,))
        step(X)
    else:
        step = ws.compile(model, squares, optimizer, (X,))
        with mode():
            loss = step(X.clone())
        assert not loss.is_inference()
    eager(model, optimizer)  # state that was made under inference mode could not be updated here
    for _ in range(2):
        eager(twin, twin_optimizer)
    assert_same(model, twin)


def test_under_autocast_is_refused():
    model = fresh(Perceptron)
    step = ws.compile(model, squares, sgd(model), (X,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(InputError, match=r"torch\.autocast is on where the step is called"):
            step(X)
        with pytest.raises(InputError, match=r"torch\.autocast is on where the step is compiled"):
            ws.compile(model, squares, sgd(model), (X,))


def test_two_threads_may_share_a_step():
    model, twin = fresh(norm_net), fresh(norm_net)
    optimizer, twin_optimizer = sgd(model, lr=0.01), sgd(twin, lr=0.01)
    step = ws.compile(model, squares, optimizer, (X,))
    failures: list[BaseException] = []

    def work():
        try:
            for _ in range(10):
                step(X)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(20):
        eager(twin, twin_optimizer)
    assert not failures
    assert_same(model, twin)
    assert len(step.report().step_seconds) == 20


def test_clipping_gives_the_norm():
    model, twin = fresh(Perceptron), fresh(Perceptron)
    step = ws.compile(model, squares, sgd(model), (X,), clip_norm=0.1)
    twin_optimizer = sgd(twin)
    for _ in range(2):
        step(X)
        twin_optimizer.zero_grad()
        squares(twin, X).backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        twin_optimizer.step()
        torch.testing.assert_close(step.last.grad_norm, norm)
    assert_same(model, twin)


def test_dropout_changes_from_step_to_step_and_repeats_with_the_seed():
    def losses():
        torch.manual_seed(3)
        model = fresh(lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
        step = ws.compile(model, squares, sgd(model, lr=1e-12), (X,))
        return [round(float(step(X)), 5) for _ in range(6)]

    first = losses()
    assert len(set(first)) > 3
    assert losses() == first


def test_the_program_and_the_report():
    model = fresh(norm_net)
    step = ws.compile(model, F.mse_loss, adamw(model), (X, data(6, 3)), clip_norm=1.0)
    text = str(step.program())
    for part in (
        "step.contract",
        "step.adam",
        '"forward"',
        '"loss"',
        '"backward"',
        '"clip"',
        '"update"',
        "step.donates",
    ):
        assert part in text, part
    assert repr(step).startswith("<TrainStep of Sequential: ")


def test_the_batch_of_a_compile_is_the_users_to_free():
    model = nn.Linear(4, 3)
    batch = (torch.randn(5, 4), torch.randn(5, 3))
    step = ws.compile(model, lambda m, x, y: F.mse_loss(m(x), y), sgd(model), batch)
    step(*batch)
    memory, shapes = {t.data_ptr() for t in batch}, {t.shape for t in batch}
    tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.layout is torch.strided]
    others = [t for t in tensors if t.shape in shapes and all(t is not own for own in batch)]
    assert not [t for t in others if t.data_ptr() in memory]
    assert [t.shape for t in step.example_batch] == [t.shape for t in batch]
