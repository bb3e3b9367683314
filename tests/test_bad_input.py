"""Bad input: each kind gets a clear error that names the place and the next thing to try, and changes nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholestep as ws
from tests.runtime.runs import Body, Perceptron, data, fresh, sgd, squares
from wholestep.errors import CaptureError, InputError, OptimizerError

X, Y = data(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])


def compiled(model=None, loss_fn=squares, batch=(X,), optimizer=None, **options):
    model = model or fresh(Perceptron)
    return ws.compile(model, loss_fn, optimizer or sgd(model), batch, **options)


def refused(message, error=InputError, **given):
    with pytest.raises(error, match=message):
        compiled(**given)


# ---- what is passed to compile ---------------------------------------------------------------------------------------


def test_batch_on_another_device():
    refused(r"batch\[0\] is on meta but the model is on cpu; move one of them with \.to", batch=(X.to("meta"),))


def test_model_on_two_devices():
    model = fresh(Perceptron)
    model.register_buffer("far", torch.zeros(1, device="meta"))
    refused(r"spread over several devices \(first.weight on cpu, far on meta\)", model=model)


def test_loss_module_on_another_device():
    loss = nn.CrossEntropyLoss(weight=torch.ones(3, device="meta"))
    refused("loss_fn.weight on meta", loss_fn=loss, batch=(X, Y))


def test_model_without_values():
    refused("parameter first.weight is on the meta device and has no values", model=fresh(Perceptron).to("meta"))


def test_lazy_model():
    model = nn.Sequential(nn.LazyLinear(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refused("0.weight has no shape yet .*run the model once", model=model, optimizer=optimizer)


@pytest.mark.parametrize("where", ["batch", "layer"])
def test_mixed_dtypes(where):
    model = fresh(Perceptron)
    if where == "layer":
        model.second.double()
    batch = (X.double(),) if where == "batch" else (X,)
    refused(
        r"runs\.py:\d+ in forward\n.*\n.*different dtypes meet in linear: torch.float(64|32), torch.float(64|32)"
        r"[\s\S]*bring the batch to the model's dtype",
        CaptureError,
        model=model,
        batch=batch,
    )


def test_optimizer_of_another_model():
    refused(
        r"holds 4 of 4 parameters that are not the model's; build the optimizer from model.parameters\(\)",
        optimizer=sgd(fresh(Perceptron)),
    )


def test_optimizer_with_a_parameter_too_many():
    model = fresh(Perceptron)
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(1))], lr=0.1)
    message = "the optimizer holds 1 of 5 parameters that are not the model's.* passed as the nn.Module that it is"
    refused(message, model=model, optimizer=optimizer)


def test_nothing_requires_a_gradient():
    refused("no parameter of the model requires a gradient; unfreeze", model=fresh(Perceptron).requires_grad_(False))


@pytest.mark.parametrize(
    "loss_fn, message",
    [
        (lambda m, x: m(x), r"the loss has shape \[6, 3\]; it must be a single number: take .mean\(\) or .sum\(\)"),
        (lambda m, x: m(x).argmax(), "the loss is tensor<i64>; a loss must be a real floating-point number"),
        (lambda m, x: m(x).sum().to(torch.complex64), r"the loss is tensor<complex<f32>>; a loss must be a real"),
        (lambda m, x: x.sum(), "the loss does not depend on any parameter that the optimizer updates"),
        (lambda m, x: m(x).detach().sum(), r"does not depend on any parameter.*without detach\(\)"),
        (lambda m, x: 3.0, "no loss found in the float that was returned; return a scalar tensor"),
        (lambda m, x: None, "no loss found in the NoneType that was returned"),
        (lambda m, x: {"logits": m(x)}, "no loss found in the dict that was returned"),
        (lambda m, x: {"loss": 3.0}, "the loss is a float, not a tensor"),
        (lambda m, x: (m(x).mean(), object()), r"output\[1\] is a object; only tensors, numbers"),
    ],
)
def test_losses_that_are_none(loss_fn, message):
    refused(message, loss_fn=loss_fn)


def test_loss_connected_only_to_parameters_the_optimizer_leaves_out():
    model = fresh(Perceptron)
    optimizer = torch.optim.SGD(model.second.parameters(), lr=0.1)
    refused("does not depend on any parameter", model=model, optimizer=optimizer, loss_fn=lambda m, x: m.first(x).sum())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_in_parameters_is_reported(value):
    model = fresh(Perceptron)
    with torch.no_grad():
        model.second.weight[1, 2] = value
    refused(r"parameter second.weight holds 1 NaN or infinite values \(of 15\)", model=model)


def test_a_frozen_mask_may_be_infinite_but_not_nan():
    model = fresh(lambda: Body(lambda m, x: m.layer(x) * torch.sigmoid(m.mask)))
    model.mask = nn.Parameter(torch.tensor(float("-inf")), requires_grad=False)
    compiled(model)
    model.mask.fill_(float("nan"))
    refused("parameter mask holds 1 NaN", model=model)


@pytest.mark.parametrize(
    "function, message",
    [
        (lambda m, x: m.layer(x)[x.sum(1) > 0], "aten.index.Tensor"),
        (lambda m, x: torch.masked_select(m.layer(x), x > 0), "aten.masked_select"),
        (lambda m, x: m.layer(x).nonzero().float() * m.layer(x).sum(), "aten.nonzero"),
    ],
)
def test_operators_whose_shape_depends_on_data(function, message):
    refused(
        rf"{message}[\s\S]*shape of its result depends on the data[\s\S]*torch.where[\s\S]*runs\.py:\d+",
        CaptureError,
        model=fresh(lambda: Body(function)),
    )


@pytest.mark.parametrize(
    "draw", [lambda h: torch.multinomial(torch.softmax(h, -1), 1), lambda h: torch.poisson(h.exp())]
)
def test_random_operators_outside_the_dialect(draw):
    model = fresh(lambda: Body(lambda m, x: m.layer(x) * draw(m.layer(x))))
    refused(r"aten\.\w+[\s\S]*random operator is not part of the step dialect; draw with", CaptureError, model=model)


def test_gradient_hooks():
    model = fresh(Perceptron)
    handle = model.first.weight.register_hook(lambda g: g * 2)
    refused("parameter first.weight has gradient hooks, which a compiled step would not call", model=model)
    handle.remove()
    handle = model.first.bias.register_post_accumulate_grad_hook(lambda p: None)
    refused("parameter first.bias has gradient hooks", model=model)
    handle.remove()
    handle = model.second.register_full_backward_hook(lambda *_: None)
    refused("module second has backward hooks", model=model)
    handle.remove()
    compiled(model)


def test_losses_that_do_not_fit_the_batch():
    refused(r"loss_fn takes 4 arguments \(a, b, c, d\) and the batch has 1 parts", loss_fn=lambda a, b, c, d: a)
    refused("loss_fn must be callable or None, not int", loss_fn=3)
    refused(
        r"loss_fn takes \(model, x, y\) but the batch has the keys \['x'\]",
        loss_fn=lambda model, x, y: x,
        batch={"x": X},
    )


def test_a_model_that_returns_no_loss():
    refused(
        "no loss found in the tuple|no loss found", loss_fn=None, model=fresh(lambda: Body(lambda m, x: {"out": x}))
    )


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model": lambda x: x}, "model must be a torch.nn.Module, not function"),
        ({"optimizer": 3}, "optimizer must be a torch.optim.Optimizer, not int"),
        ({"options": {"clip_norm": -1.0}}, "clip_norm must be a positive number, not -1.0"),
        ({"options": {"clip_norm": float("nan")}}, "clip_norm must be a positive number"),
        ({"batch": (X.numpy(),)}, r"batch\[0\] is a ndarray; only tensors"),
        ({"batch": (X.to_sparse(),)}, r"batch\[0\] has the layout torch.sparse_coo; only dense tensors"),
    ],
)
def test_wrong_kinds(change, message):
    model = fresh(Perceptron)
    given = {"model": model, "optimizer": sgd(model), "batch": (X,), "options": {}} | change
    with pytest.raises(InputError, match=message):
        ws.compile(given["model"], squares, given["optimizer"], given["batch"], **given["options"])


def test_optimizers_that_are_no_program():
    model = fresh(Perceptron)
    refused(
        "LBFGS evaluates the loss several times",
        OptimizerError,
        model=model,
        optimizer=torch.optim.LBFGS(model.parameters()),
    )
    refused(
        "SparseAdam wants sparse gradients",
        OptimizerError,
        model=model,
        optimizer=torch.optim.SparseAdam(model.parameters()),
    )


# ---- what is passed to a step ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def step():
    return compiled(loss_fn=F.cross_entropy, batch=(X, Y))


@pytest.mark.parametrize(
    "batch, message",
    [
        (
            (X[:4], Y),
            r"batch\[0\] has shape \[4, 4\] but .* \[6, 4\]: dimension 0 is 4 instead of 6[\s\S]*drop_last=True",
        ),
        ((X, Y[:, None]), r"batch\[1\] has 2 dimensions \[6, 1\] but the step was compiled for 1: \[6\]"),
        ((X.double(), Y), r"batch\[0\] is torch.float64 but .* torch.float32; convert it with .to\(torch.float32\)"),
        ((X, Y.int()), r"batch\[1\] is torch.int32 but the step was compiled for torch.int64"),
        ((X.to("meta"), Y), r"batch\[0\] is on meta but the model is on cpu; move it with .to\(cpu\)"),
        ((X,), r"batch was tuple with \[0, 1\] when compiled and is tuple with \[0\] now"),
        ((X, Y, Y), r"is tuple with \[0, 1, 2\] now"),
        ((X, {"y": Y}), r"batch\[1\] was a tensor when compiled and is dict with \['y'\] now"),
        ((X, None), r"batch\[1\] was a tensor when compiled and is None now"),
        (((X, Y),), r"takes the 2 parts of a batch one by one: call step\(\*batch\)"),
        ((X, Y.numpy()), r"batch\[1\] is a ndarray; only tensors.*torch.as_tensor"),
    ],
)
def test_batches_that_differ(step, batch, message):
    before = [p.detach().clone() for p in step.model.parameters()]
    with pytest.raises(InputError, match=message):
        step(*batch)
    assert all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))


def test_keywords_for_a_positional_step(step):
    with pytest.raises(InputError, match=r"compiled for 2 positional tensors, not keywords \['x'\]"):
        step(x=X)


def test_names_of_rows_are_not_listed_one_by_one():
    batch = {"x": X, "names": [f"row {i}" for i in range(6)]}
    step = compiled(loss_fn=lambda model, batch: squares(model, batch["x"]), batch=batch)
    with pytest.raises(
        InputError, match=r"names\[0\] was 'row 0' .*\(and 3 more\)[\s\S]*leave out what is no tensor"
    ) as said:
        step({"x": X, "names": list("abcdef")})
    assert "names[3]" not in str(said.value)


def test_keyword_batches_that_differ():
    step = compiled(loss_fn=lambda model, x: squares(model, x), batch={"x": X})
    with pytest.raises(InputError, match=r"missing \['x'\], unexpected \['z'\]"):
        step(z=X)
    with pytest.raises(InputError, match=r"compiled for a keyword batch \['x'\]: call step\(\*\*batch\)"):
        step(X)
    with pytest.raises(InputError, match=r"batch.x has shape \[3, 4\]"):
        step(x=X[:3])
