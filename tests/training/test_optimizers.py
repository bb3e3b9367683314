"""Every optimizer of torch.optim, through our ops and by itself: parameters, state, keys and errors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import optim

from wholestep.dialects import context
from wholestep.errors import OptimizerError
from wholestep.ir.parser import parse
from wholestep.training.optimizers import FamilyPlan, family_of, plan_optimizer

from .optimizer_harness import (
    CompiledOptimizer,
    assert_same_training,
    clone_optimizer,
    clone_parameters,
    random_gradients,
    random_parameters,
    train_both,
)

SHAPES = [(5, 7), (6,), (), (2, 3, 4)]
MATRICES = [(5, 7), (9, 4), (16, 16)]

CASES = {
    "sgd": (optim.SGD, {"lr": 0.1}),
    "sgd-decay": (optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "sgd-momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "sgd-dampening": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    "sgd-nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 0.01}),
    "sgd-maximize": (optim.SGD, {"lr": 0.1, "momentum": 0.8, "maximize": True}),
    "adam": (optim.Adam, {"lr": 0.01}),
    "adam-decay": (optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4, "betas": (0.8, 0.95)}),
    "adam-amsgrad": (optim.Adam, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "adamw": (optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw-amsgrad": (optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "adamax": (optim.Adamax, {"lr": 0.01}),
    "adamax-decay": (optim.Adamax, {"lr": 0.01, "weight_decay": 0.1, "maximize": True}),
    "nadam": (optim.NAdam, {"lr": 0.01}),
    "nadam-decay": (optim.NAdam, {"lr": 0.01, "weight_decay": 0.1, "maximize": True}),
    "nadam-decoupled": (optim.NAdam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "radam": (optim.RAdam, {"lr": 0.01}),
    "radam-decay": (optim.RAdam, {"lr": 0.01, "weight_decay": 0.1, "maximize": True}),
    "radam-decoupled": (optim.RAdam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "rmsprop": (optim.RMSprop, {"lr": 0.01}),
    "rmsprop-centered": (optim.RMSprop, {"lr": 0.01, "centered": True, "weight_decay": 0.1, "maximize": True}),
    "rmsprop-momentum": (optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "adagrad": (optim.Adagrad, {"lr": 0.1}),
    "adagrad-decay": (
        optim.Adagrad,
        {"lr": 0.1, "weight_decay": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.2, "maximize": True},
    ),
    "adadelta": (optim.Adadelta, {"lr": 0.5}),
    "adadelta-decay": (optim.Adadelta, {"lr": 0.5, "weight_decay": 0.1, "maximize": True}),
    "adafactor": (optim.Adafactor, {"lr": 0.01}),
    "adafactor-decay": (optim.Adafactor, {"lr": 0.1, "weight_decay": 0.1, "eps": (1e-6, 1e-2), "maximize": True}),
    "asgd": (optim.ASGD, {"lr": 0.05}),
    "asgd-averaging": (optim.ASGD, {"lr": 0.05, "t0": 2, "weight_decay": 0.1, "maximize": True}),
    "rprop": (optim.Rprop, {"lr": 0.01}),
    "rprop-bounds": (optim.Rprop, {"lr": 0.01, "etas": (0.4, 1.5), "step_sizes": (0.005, 0.02), "maximize": True}),
}
if hasattr(optim, "Muon"):
    CASES |= {
        "muon": (optim.Muon, {"lr": 0.01}),
        "muon-plain": (optim.Muon, {"lr": 0.01, "nesterov": False, "weight_decay": 0.0, "ns_steps": 2}),
        "muon-adamw": (optim.Muon, {"lr": 0.01, "adjust_lr_fn": "match_rms_adamw", "momentum": 0.8}),
    }


def shapes_of(cls):
    return MATRICES if cls.__name__ == "Muon" else SHAPES


def make(name, **more):
    cls, options = CASES[name]
    return lambda params: cls(params, **{**options, **more})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("name", CASES)
def test_same_as_eager(name, dtype):
    compiled = train_both(make(name), shapes_of(CASES[name][0]), dtype, steps=7)
    assert isinstance(compiled.plan, FamilyPlan)
    assert compiled.compiles == 1


@pytest.mark.parametrize("name", CASES)
def test_resumed_from_eager(name):
    train_both(make(name), shapes_of(CASES[name][0]), steps=3, warm=3)


@pytest.mark.parametrize("name", CASES)
def test_schedules_never_recompile(name):
    """Every hyper-parameter that a schedule may touch changes between steps, to zero and back where it may be zero."""

    def change(i, optimizer):
        for group in optimizer.param_groups:
            group["lr"] *= 0.7
            for key in ("weight_decay", "dampening", "lr_decay", "lambd", "momentum_decay"):
                if key in group and not (key == "dampening" and group["nesterov"]):
                    group[key] = 0.0 if i % 2 else 0.05 * (i + 1)
            for key in ("momentum", "alpha", "rho"):
                if group.get(key):
                    group[key] *= 0.99
            if "betas" in group:
                group["betas"] = (group["betas"][0] * 0.99, group["betas"][1] * 0.999)

    compiled = train_both(make(name), shapes_of(CASES[name][0]), steps=6, before=change)
    assert compiled.compiles == 1


@pytest.mark.parametrize("name", ["adam-decay", "adamw", "sgd-dampening", "rmsprop", "adafactor", "nadam", "asgd"])
def test_low_precision_parameters(name):
    """bf16 parameters round after every call, as eager's kernels do: 0.999 must not become 1."""
    train_both(make(name), SHAPES, torch.bfloat16, steps=5, tolerance=0.02)


def test_groups_with_their_own_settings():
    def build(params):
        return optim.AdamW(
            [
                {"params": params[:2], "lr": 0.1},
                {"params": params[2:3], "weight_decay": 0.0, "betas": (0.5, 0.9)},
                {"params": params[3:], "amsgrad": True, "maximize": True},
            ],
            lr=0.01,
        )

    compiled = train_both(build, SHAPES)
    plan = compiled.plan
    shared = {s.source for s in plan.slots("p0") if s.kind == "hyper"}
    assert shared == {s.source for s in plan.slots("p1") if s.kind == "hyper"}
    assert [s for s in plan.slots("p0") if s.kind == "hyper"] == [s for s in plan.slots("p1") if s.kind == "hyper"]
    assert shared.isdisjoint(s.source for s in plan.slots("p2"))


def test_step_counters_are_per_parameter():
    parameters = random_parameters([(3,), (3,)])
    eager = optim.Adam(list(parameters.values()), lr=0.1)
    parameters["p0"].grad = torch.ones(3, dtype=torch.float64)
    eager.step()  # p1 has no state yet
    ours = clone_parameters(parameters)
    mine = clone_optimizer(eager, parameters, ours)
    compiled = CompiledOptimizer(mine, ours)
    for i in range(3):
        gradients = random_gradients(parameters, i)
        for n, p in parameters.items():
            p.grad = gradients[n].clone()
        eager.step()
        compiled.step(gradients)
        assert_same_training(ours, parameters, mine, eager, 1e-12)
    assert [mine.state[p]["step"].item() for p in ours.values()] == [4.0, 3.0]


@pytest.mark.parametrize("flag", ["foreach", "fused", "capturable"])
def test_flags_of_execution_are_accepted(flag):
    if flag == "capturable":  # eager refuses it on a CPU, the program does not mind
        parameters = random_parameters(SHAPES)
        compiled = CompiledOptimizer(optim.Adam(parameters.values(), capturable=True), parameters)
        compiled.step(random_gradients(parameters, 0))
        return
    for cls in (optim.AdamW, optim.SGD, optim.Adagrad):
        train_both(lambda p, cls=cls: cls(p, lr=0.01, **{flag: True}), SHAPES)


def test_learning_rate_as_a_tensor():
    train_both(lambda p: optim.Adam(p, lr=torch.tensor(0.01, dtype=torch.float64)), SHAPES)
    train_both(lambda p: optim.SGD(p, lr=torch.tensor(0.125)), SHAPES)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["adam", "sgd", "rmsprop", "adagrad", "adamw"])
def test_a_decay_of_zero_is_skipped(name, value):
    """An infinite parameter keeps a finite state without weight decay: 0 * inf must not reach the gradient."""
    eager = random_parameters([(4,)])
    with torch.no_grad():
        eager["p0"][1] = value
    build = make(name, weight_decay=0.0)
    ours = clone_parameters(eager)
    first, second = build(list(eager.values())), build(list(ours.values()))
    compiled = CompiledOptimizer(second, ours)
    gradients = random_gradients(eager, 0)
    eager["p0"].grad = gradients["p0"].clone()
    first.step()
    compiled.step(gradients)
    assert torch.allclose(ours["p0"], eager["p0"], equal_nan=True)
    for key, state in first.state[eager["p0"]].items():
        assert torch.allclose(second.state[ours["p0"]][key], state), key


@pytest.mark.parametrize("name", CASES)
def test_initial_state_is_what_torch_creates(name):
    """Keys, dtypes, shapes and layout; from `initialise` alone, which installs nothing."""
    cls, _ = CASES[name]
    shapes = shapes_of(cls)
    parameters = random_parameters(shapes, torch.float32)
    if cls is not optim.Muon:
        parameters["wide"] = torch.nn.Parameter(torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last))
        parameters["turned"] = torch.nn.Parameter(torch.randn(3, 5).t())
    ours, eager = make(name)(list(parameters.values())), make(name)(list(parameters.values()))
    ours.state.clear()
    plan = plan_optimizer(ours, parameters)
    made = {n: plan.initialise(n) for n in parameters}
    assert not ours.state
    for n, p in parameters.items():
        p.grad = torch.zeros_like(p)
        assert plan.initialise(n).keys() == made[n].keys()
    eager.step()
    for n, p in parameters.items():
        state = eager.state.get(p, {})
        assert list(made[n]) == list(state)
        for key, value in state.items():
            mine = made[n][key]
            kind = (mine.dtype, mine.shape, mine.device, mine.requires_grad)
            assert kind == (value.dtype, value.shape, value.device, value.requires_grad), key
            if "_var" not in key:
                assert mine.stride() == value.stride(), key


def test_state_dicts_are_interchangeable():
    parameters = random_parameters(SHAPES)
    compiled = CompiledOptimizer(optim.AdamW(parameters.values(), lr=0.1, amsgrad=True), parameters)
    compiled.step(random_gradients(parameters, 0))
    saved = compiled.optimizer.state_dict()
    eager = clone_parameters(parameters)
    fresh = optim.AdamW(eager.values(), lr=0.5, amsgrad=True)
    fresh.load_state_dict(copy.deepcopy(saved))  # torch would share the tensors
    compiled.optimizer.load_state_dict(saved)
    gradients = random_gradients(parameters, 1)
    for n, p in eager.items():
        p.grad = gradients[n].clone()
    fresh.step()
    compiled.step(gradients)
    assert compiled.compiles == 1
    assert_same_training(parameters, eager, compiled.optimizer, fresh, 1e-12)


def test_structure_changes_with_the_computation_only():
    parameters = random_parameters([(3, 3), (3,)])
    optimizer = optim.SGD([parameters["p0"]], lr=0.1, momentum=0.9)
    plan = plan_optimizer(optimizer, parameters)
    before = plan.structure()
    hash(before)
    optimizer.param_groups[0]["lr"] = 0.3
    assert plan.structure() == before
    optimizer.param_groups[0]["nesterov"] = True
    assert plan.structure() != before
    optimizer.param_groups[0]["nesterov"] = False
    optimizer.param_groups[0]["momentum"] = 0.0
    assert plan.structure() != before
    optimizer.param_groups[0]["momentum"] = 0.5
    assert plan.structure() == before
    optimizer.add_param_group({"params": [parameters["p1"]]})
    assert plan.structure() != before


def test_momentum_switched_on_later():
    def change(i, optimizer):
        optimizer.param_groups[0]["momentum"] = 0.0 if i < 2 else 0.9

    compiled = train_both(lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5), [(4,)], before=change)
    assert compiled.compiles == 3  # with a buffer, without, and with one again


def test_ops_round_trip_as_text():
    parameters = random_parameters([(4, 3), (3,)])
    for name in CASES:
        cls, _ = CASES[name]
        chosen = {"p0": parameters["p0"]} if cls.__name__ == "Muon" else parameters
        text = str(CompiledOptimizer(make(name)(chosen.values()), chosen).module)
        assert str(parse(text, context())) == text, name


# ---- refusals --------------------------------------------------------------------------------------------------------


def refused(optimizer, parameters, *words):
    with pytest.raises(OptimizerError) as error:
        plan_optimizer(optimizer, parameters)
    for word in words:
        assert word in str(error.value)


def test_refuses_what_no_program_can_do():
    parameters = random_parameters([(3,)])
    values = list(parameters.values())
    refused(optim.LBFGS(values), parameters, "LBFGS", "closure")
    refused(optim.SparseAdam(values), parameters, "SparseAdam", "torch.optim.Adam")
    refused(optim.Adam(values, differentiable=True), parameters, "differentiable", "group 0")
    refused(torch.nn.Linear(2, 2), parameters, "Linear", "Optimizer")


def test_refuses_complex_parameters_by_name():
    parameters = {"layer.weight": torch.nn.Parameter(torch.randn(3, dtype=torch.complex64))}
    refused(optim.Adam(parameters.values()), parameters, "layer.weight", "complex")


def test_refuses_hooks_by_name():
    parameters = random_parameters([(3,)])
    optimizer = optim.Adam(parameters.values())

    def note_step(optimizer, args, kwargs):
        return None

    handle = optimizer.register_step_pre_hook(note_step)
    refused(optimizer, parameters, "hooks", "note_step")
    handle.remove()
    optimizer.register_step_post_hook(note_step)
    refused(optimizer, parameters, "hooks", "note_step")


def test_refuses_a_patched_step_but_not_a_scheduler():
    parameters = random_parameters([(3,)])
    optimizer = optim.Adam(parameters.values())
    optim.lr_scheduler.StepLR(optimizer, 1)
    assert isinstance(plan_optimizer(optimizer, parameters), FamilyPlan)
    optimizer = optim.Adam(parameters.values())
    optimizer.step = lambda: None
    refused(optimizer, parameters, "replaced")


def test_refuses_state_of_another_model():
    parameters = random_parameters([(3,)])
    optimizer = optim.Adam(parameters.values())
    plan_optimizer(optimizer, parameters)
    state = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(3)}
    optimizer.state[parameters["p0"]] = state
    refused(optimizer, parameters, "exp_avg", "p0", "(4,)")
    del optimizer.state[parameters["p0"]]["exp_avg"]
    refused(optimizer, parameters, "exp_avg", "p0")


def test_parameters_that_are_not_the_optimizers():
    parameters = random_parameters([(3,), (4,)])
    optimizer = optim.Adam([parameters["p0"], torch.nn.Parameter(torch.zeros(2))])
    plan = plan_optimizer(optimizer, parameters)
    assert plan.parameters == ("p0",) and plan.foreign == 1
    with pytest.raises(OptimizerError, match="p1"):
        plan.slots("p1")


def test_subclass_without_its_own_step_is_its_base():
    class Named(optim.AdamW):
        def zero_grad(self, set_to_none=True):
            super().zero_grad(set_to_none)

    compiled = train_both(lambda p: Named(p, lr=0.1), SHAPES)
    assert isinstance(compiled.plan, FamilyPlan)


def test_who_has_called_torch_compile_has_the_same_optimizers() -> None:
    """Its first call wraps parts of all of torch's optimizers, each class anew."""
    torch.compile(lambda x: x, backend="eager")
    weights = [torch.nn.Parameter(torch.zeros(2, 2))]
    for cls in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop):
        assert family_of(cls(weights, lr=0.1)) is not None

    class Own(torch.optim.Adam):
        def _init_group(self, *given: object) -> bool:
            return super()._init_group(*given)

    assert family_of(Own(weights)) is None
