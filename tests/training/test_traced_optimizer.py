"""Third-party optimizers, traced: same numbers as their own step, few traces, clear refusals."""

from __future__ import annotations

import pytest
import torch

from wholestep.errors import OptimizerError
from wholestep.training.optimizers import plan_optimizer
from wholestep.training.traced_optimizer import TracedPlan

from . import third_party as own
from .optimizer_harness import CompiledOptimizer, random_gradients, random_parameters, train_both

SHAPES = [(5, 7), (6,), (), (5, 7)]

CASES = {
    "lion": (own.Lion, {"lr": 0.01}, 1),
    "lion-decay": (own.Lion, {"lr": 0.01, "weight_decay": 0.1}, 1),
    "lamb": (own.Lamb, {"lr": 0.01}, 1),
    "lamb-plain": (own.Lamb, {"lr": 0.01, "weight_decay": 0.0, "debias": False}, 1),
    "adam": (own.PlainAdam, {"lr": 0.01, "weight_decay": 0.1}, 2),  # the warm-up's branch turns once
    "first-gradient": (own.FirstGradient, {"lr": 0.1}, 2),  # the first step is another computation
    "tensor-step": (own.TensorStep, {"lr": 0.01}, 1),
    "subclass-of-adam": (own.MyAdam, {"lr": 0.1}, 1),
}


#: before 2.13 torch traces a first step from no state to another graph, so it has a program of its own
EXTRA = int(torch.__version__ < "2.13")


def make(name):
    cls, options, _ = CASES[name]
    return lambda params: cls(params, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("name", CASES)
def test_same_as_eager(name, dtype):
    compiled = train_both(make(name), SHAPES, dtype, steps=6)
    assert isinstance(compiled.plan, TracedPlan)
    assert CASES[name][2] <= compiled.compiles <= CASES[name][2] + EXTRA


@pytest.mark.parametrize("name", CASES)
def test_resumed_from_eager(name):
    compiled = train_both(make(name), SHAPES, steps=3, warm=4)
    assert compiled.compiles == 1


@pytest.mark.parametrize("name", ["lion", "lamb", "adam"])
def test_low_precision_parameters(name):
    train_both(make(name), SHAPES, torch.bfloat16, steps=4, tolerance=0.03)


def test_schedules_need_no_retrace():
    def change(i, optimizer):
        for group in optimizer.param_groups:
            group["lr"] *= 0.7
            group["weight_decay"] = 0.01 * (i + 1)
            group["betas"] = (0.9 - 0.01 * i, 0.99)

    compiled = train_both(lambda p: own.Lamb(p, lr=0.1), [(3, 4)], before=change)
    assert compiled.compiles <= 1 + EXTRA
    assert EXTRA or compiled.plan.traces == 2  # from no state, and from the state so created


def test_a_branch_that_turns_is_traced_once_more():
    def change(i, optimizer):
        optimizer.param_groups[0]["weight_decay"] = 0.1 if i % 2 else 0.0

    compiled = train_both(lambda p: own.PlainAdam(p, lr=0.1, warmup=0), [(3, 4)], before=change)
    variants = [v for known in compiled.plan._variants.values() for v in known]
    assert len(variants) <= 4
    digests = {v.trace.digest for v in variants}
    assert len(digests) == 2


def test_many_parameters_of_few_shapes_trace_once_per_shape():
    parameters = random_parameters([(4, 4), (4,)] * 30)
    plan = plan_optimizer(own.Lion(parameters.values()), parameters)
    assert plan.traces == 4  # two shapes, each from no state and from the state created


def test_groups_share_traces():
    def build(params):
        return own.Lion([{"params": params[:2], "lr": 0.2}, {"params": params[2:], "weight_decay": 0.3}], lr=0.1)

    compiled = train_both(build, [(4,), (4,), (4,)])
    assert compiled.plan.traces == 2
    assert {s.name for s in compiled.plan.slots("p2")} >= {"p2.exp_avg", "group1.lr", "group1.betas.0"}


def test_learning_rate_as_a_tensor():
    train_both(lambda p: own.Lion(p, lr=torch.tensor(0.125)), [(4, 3)])


def test_numbers_in_state_and_group_advance():
    parameters = random_parameters([(3,)])
    optimizer = own.FirstGradient(parameters.values())
    compiled = CompiledOptimizer(optimizer, parameters)
    for i in range(3):
        compiled.step(random_gradients(parameters, i))
    assert optimizer.param_groups[0]["steps"] == 3 and type(optimizer.param_groups[0]["steps"]) is int
    adam = own.PlainAdam(parameters.values())
    compiled = CompiledOptimizer(adam, parameters)
    compiled.step(random_gradients(parameters, 0))
    assert adam.state[parameters["p0"]]["step"] == 1 and type(adam.state[parameters["p0"]]["step"]) is int


def test_initial_state_from_the_parameter():
    """`slow` starts as a copy of the parameter, `sq` at 0.1: found by running the trace, installed by nobody."""
    parameters = random_parameters([(3, 2)])
    optimizer = own.TensorStep(parameters.values())
    made = plan_optimizer(optimizer, parameters).initialise("p0")
    assert list(made) == ["step", "slow", "sq"] and not optimizer.state
    assert torch.equal(made["slow"], parameters["p0"]) and made["slow"].data_ptr() != parameters["p0"].data_ptr()
    assert torch.equal(made["sq"], torch.full((3, 2), 0.1, dtype=torch.float64))
    assert made["step"].dtype == torch.float32 and made["step"].item() == 0


def test_planning_leaves_the_optimizer_alone():
    parameters = random_parameters(SHAPES)
    before = {n: p.detach().clone() for n, p in parameters.items()}
    optimizer = own.Lamb(parameters.values())
    groups = [dict(g) for g in optimizer.param_groups]
    plan_optimizer(optimizer, parameters)
    assert not optimizer.state and [dict(g) for g in optimizer.param_groups] == groups
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in parameters.items())
    import math

    assert math.sqrt(4.0) == 2.0 and own.sqrt is math.sqrt


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (own.GlobalNorm, ("GlobalNorm", "other parameters", "third_party.py:", "total")),
        (own.Listed, ("Listed", "third_party.py:", "tolist")),
        (own.Foreach, ("Foreach", "third_party.py:", "_foreach_add_")),
        (own.NeedsClosure, ("NeedsClosure", "closure")),
    ],
)
def test_refusals_name_class_and_line(cls, words):
    parameters = random_parameters([(40,), (40,)])
    with pytest.raises(OptimizerError) as error:
        plan_optimizer(cls(parameters.values()), parameters)
    for word in words:
        assert word in str(error.value)


def test_a_branch_that_turns_every_step_is_refused_in_the_end():
    with pytest.raises(OptimizerError, match=r"EveryStepBranch.*third_party.py:\d+"):
        train_both(lambda p: own.EveryStepBranch(p, lr=0.01), [(2,)], steps=25)


def test_numbers_that_leave_python_are_refused():
    import math

    class Escaping(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(p.grad, alpha=-math.hypot(group["lr"], 0.0))

    parameters = random_parameters([(3,)])
    with pytest.raises(OptimizerError, match="not traced"):
        plan_optimizer(Escaping(parameters.values()), parameters)


def test_refuses_nested_state():
    parameters = random_parameters([(3,)])
    optimizer = own.Lion(parameters.values())
    optimizer.state[parameters["p0"]] = {"history": [torch.zeros(3)]}
    with pytest.raises(OptimizerError, match="history"):
        plan_optimizer(optimizer, parameters)
