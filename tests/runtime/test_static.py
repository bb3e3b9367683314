"""A step from its plan: it takes no memory of its own, updates tensors where they are, and gives eager's bits."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.runtime.runs import Perceptron, adamw, data, eager_step, fresh, sgd, squares
from wholestep.errors import InputError, MemoryBudgetError
from wholestep.runtime.counters import Counters
from wholestep.runtime.host_numbers import HostCall, HostNumbers
from wholestep.runtime.record import native
from wholestep.runtime.static import StaticStep, check_fits
from wholestep.torch_private import TorchDispatchMode

Optimizer = torch.optim.Optimizer


def images() -> nn.Module:
    """A convolution without a bias: the gradient of one is summed in another order than eager's."""
    head = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*head, nn.Linear(8 * 36, 16), nn.GELU(), nn.Linear(16, 4))


def pictures(seed: int = 0) -> torch.Tensor:
    return data(4, 3, 8, 8, seed=seed)


def static_of(step: ws.TrainStep) -> StaticStep:
    found = step._compiled.static
    assert found is not None
    return found


def start(make: Callable[[], nn.Module], optimizer: Callable[..., Optimizer] = adamw, x: Any = None, **options: Any):
    """A model, its optimizer and its compiled step."""
    model = fresh(make)
    its = optimizer(model)
    return model, its, ws.compile(model, squares, its, (data(6, 4) if x is None else x,), **options)


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Everything that training changes, by name."""
    found = {k: v.detach().clone() for k, v in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}.{key}"] = torch.as_tensor(value).detach().clone()
    return found


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), f"{name} differs by {(value - other[name]).abs().max():.3g}"


# ---- memory ----------------------------------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Notes, operator by operator, the bytes of results in memory of their own, and where its operands lie."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0
        self.places: list[tuple[str, list[int]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = tensors_in((*args, *(kwargs or {}).values()))
        found = func(*args, **(kwargs or {}))
        there = {t.untyped_storage().data_ptr() for t in given}
        for tensor in tensors_in((found,)):
            if tensor.untyped_storage().data_ptr() not in there:
                self.made += tensor.untyped_storage().nbytes()
        self.places.append((str(func), [t.data_ptr() for t in given]))
        return found


def tensors_in(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
    return found


@pytest.mark.parametrize(
    ("make", "x"), [(Perceptron, data(512, 4)), (images, pictures())], ids=["perceptron", "convolution"]
)
def test_only_the_launches_that_say_so_allocate(make, x):
    _, _, step = start(make, x=x)
    step(x)
    static, watch, made = static_of(step), Watch(), Counter[int]()
    launch = before = 0

    def enter(name: str) -> None:
        nonlocal launch, before
        launch, before = int(name.removeprefix("ws:")), watch.made

    def leave() -> None:
        made[launch] += watch.made - before

    static.ranges = (enter, leave)
    with watch:
        step(x)
    static.ranges = None
    launches = step.plan().launches
    took = {position for position, size in made.items() if size}
    assert took == {position for position, each in enumerate(launches) if each.makes}
    assert Counter(launches[p].name for p in took) == Counter(step.report().execution["allocating"])
    assert all(made[p] >= launches[p].makes for p in took)
    assert len(made) > 20 and len(took) < len(made) / 2
    beside = watch.made - sum(made.values())  # the loss that is handed out, the key, the numbers of the host
    assert 0 < beside < 1024 < step.plan().arena


def test_the_reference_executor_does_allocate():
    """The measure above can fail."""
    x = pictures()
    _, _, step = start(images, x=x, level=0)
    step(x)
    watch = Watch()
    with watch:
        step(x)
    assert watch.made > 2 * step.plan().arena


def test_addresses_stay_over_steps():
    model, optimizer, step = start(Perceptron)
    step(data(6, 4))
    static = static_of(step)
    bound, places = static.bound, []
    for seed in range(3):
        with Watch() as watch, torch.no_grad():
            static.bound.run()
        places.append(watch.places)
        step(data(6, 4, seed=seed))
    assert places[0] == places[1] == places[2] and len(places[0]) > 20
    assert static.bound is bound and static.bindings == 1
    ours = {t.data_ptr() for t in bound.memory.arguments if t is not None}
    state = [v for s in optimizer.state.values() for v in s.values() if v.dim()]
    assert {t.data_ptr() for t in (*model.parameters(), *state)} <= ours


def test_results_are_the_users_to_keep():
    def loss(model, x):
        y = model(x)
        return y.pow(2).mean(), y, model.first.weight

    model = fresh(Perceptron)
    step = ws.compile(model, loss, adamw(model), (data(6, 4),))
    first = step(data(6, 4))
    kept = [t.clone() for t in first]
    second = step(data(6, 4, seed=1))
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    first[1].fill_(7.0)  # what the user does with them is no business of the step
    first[2].fill_(7.0)
    assert float(model.first.weight.detach().max()) < 7
    arena = static_of(step).bound.arena
    low, high = arena.data_ptr(), arena.data_ptr() + arena.numel()
    assert not any(low <= t.data_ptr() < high for t in (*first, *second))


# ---- what binds again ------------------------------------------------------------------------------------------------


def reload_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def assign_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    model.load_state_dict({k: v.clone() * 0.5 for k, v in model.state_dict().items()}, assign=True)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    optimizer.state.clear()


def other_memory(model: nn.Module, optimizer: Optimizer) -> None:
    model[4].weight.data = model[4].weight.data.clone() + 0.25


def other_buffer(model: nn.Module, optimizer: Optimizer) -> None:
    model[1].running_mean = model[1].running_mean + 1


def no_state(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state.clear()


def other_state(model: nn.Module, optimizer: Optimizer) -> None:
    held = optimizer.state[model[4].weight]
    held["exp_avg"] = held["exp_avg"] * 2


def in_place(model: nn.Module, optimizer: Optimizer) -> None:
    with torch.no_grad():
        model[4].weight.mul_(0.5)


@pytest.mark.parametrize(
    ("change", "bindings"),
    [
        (reload_optimizer, 1),
        (assign_parameters, 1),
        (other_memory, 1),
        (other_buffer, 1),
        (no_state, 1),
        (other_state, 1),
        (in_place, 0),
    ],
)
def test_a_tensor_that_has_moved_is_bound_again(change, bindings):
    model, optimizer, step = start(images, x=pictures())
    twin = fresh(images)
    other = adamw(twin)
    for _ in range(2):
        for seed in range(2):
            assert float(step(pictures(seed))) == eager_step(lambda m, s=seed: squares(m, pictures(s)), twin, other)
        before = static_of(step), static_of(step).bindings
        change(model, optimizer)
        change(twin, other)
        step(pictures(5))
        eager_step(lambda m: squares(m, pictures(5)), twin, other)
        static = static_of(step)
        assert static.bindings - before[1] == bindings if static is before[0] else static.bindings == 1
    assert_same_bits(state_of(model, optimizer), state_of(twin, other))


def test_a_parameter_that_lies_otherwise_is_planned_again():
    model, optimizer, step = start(images, sgd, x=pictures())
    twin = fresh(images)
    other = sgd(twin)
    step(pictures())
    eager_step(lambda m: squares(m, pictures()), twin, other)
    static = static_of(step)
    before, compilations = static.planned, step.compilations
    for each in (model, twin):
        each[0].weight.data = each[0].weight.data.to(memory_format=torch.channels_last)
    for seed in range(3):
        loss = eager_step(lambda m, s=seed: squares(m, pictures(s)), twin, other)
        assert float(step(pictures(seed))) == pytest.approx(loss, rel=1e-5)
    assert static_of(step) is static and step.compilations == compilations
    assert static.planned is not before and static.bindings == 2
    number = next(i for i, b in enumerate(static.plan.buffers) if b.name == "0.weight")
    assert static.plan.buffers[number].strides == model[0].weight.stride() != before.plan.buffers[number].strides
    for name, value in state_of(model, optimizer).items():
        torch.testing.assert_close(value, state_of(twin, other)[name], rtol=1e-5, atol=1e-6)


class TwoLayers(nn.Module):
    """Two layers of one shape, for weights that share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x)))


def test_parameters_that_share_memory_go_to_the_reference_executor():
    def run(level: int):
        model, optimizer, step = start(TwoLayers, sgd, level=level)
        model.two.weight.data = model.one.weight.data
        losses = [float(step(data(6, 4, seed=s))) for s in range(3)]
        return step, losses, state_of(model, optimizer)

    step, losses, state = run(3)
    found = step.report().execution
    assert found["by"].startswith("the reference executor")
    assert "share memory" in found["why"] and "one.weight" in found["why"] and "two.weight" in found["why"]
    assert found["why"] in str(step.report())
    _, want, want_state = run(0)
    assert losses == want
    assert_same_bits(state, want_state)


def test_parameters_side_by_side_in_one_memory_are_no_reason():
    model, optimizer, step = start(TwoLayers)
    twin = fresh(TwoLayers)
    other = adamw(twin)
    flat = torch.cat([model.one.weight.detach(), model.two.weight.detach()])
    model.one.weight.data, model.two.weight.data = flat[:4], flat[4:]
    for seed in range(3):
        step(data(6, 4, seed=seed))
        eager_step(lambda m, s=seed: squares(m, data(6, 4, seed=s)), twin, other)
    assert step.report().execution["by"] == "from the plan, launch by launch"
    assert_same_bits(state_of(model, optimizer), state_of(twin, other))


# ---- numbers of the host ---------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW": adamw,
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True, weight_decay=0.1),
    "RAdam": lambda m: torch.optim.RAdam(m.parameters(), lr=0.01),
    "Adamax": lambda m: torch.optim.Adamax(m.parameters(), lr=0.01),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters(), lr=0.01, t0=3),
    "SGD": sgd,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_counters_that_agree_and_that_do_not(name):
    """One layer starts to learn later; the rate follows a schedule all the time."""
    runs = []
    for compiled in (True, False):
        model = fresh(Perceptron)
        optimizer = OPTIMIZERS[name](model)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
        step = ws.compile(model, squares, optimizer, (data(6, 4),)) if compiled else None
        losses = []
        for number in range(8):
            model.second.requires_grad_(not 2 <= number < 5)
            x = data(6, 4, seed=number)
            losses.append(float(step(x)) if step else eager_step(lambda m, x=x: squares(m, x), model, optimizer))
            schedule.step()
        runs.append((losses, state_of(model, optimizer)))
    assert runs[0][0] == runs[1][0]
    assert_same_bits(runs[0][1], runs[1][1])
    steps = [float(v) for k, v in runs[0][1].items() if k.endswith(".step")]
    assert not steps or sorted(set(steps)) == [5.0, 8.0]


def test_a_frozen_layer_stays_as_it_is():
    model, _, step = start(Perceptron)
    step(data(6, 4))
    model.first.requires_grad_(False)
    kept, moving = model.first.weight.detach().clone(), model.second.weight.detach().clone()
    step(data(6, 4))
    assert torch.equal(model.first.weight, kept) and not torch.equal(model.second.weight, moving)


def test_equal_counters_are_computed_with_once():
    calls: list[float] = []

    def grow(x: float) -> float:
        calls.append(x)
        return x + 1

    numbers = HostNumbers(
        [HostCall(grow, (0,), 2, ("grow",)), HostCall(grow, (1,), 3, ("grow",)), HostCall(grow, (3,), 4, ("grow",))],
        counters=(0, 1),
        needed={2, 3, 4},
    )
    values: list[Any] = [5.0, 5.0, None, None, None]
    assert numbers.compute(values)
    numbers.spread(values)
    assert values == [5.0, 5.0, 6.0, 6.0, 7.0] and calls == [5.0, 6.0]
    values[:2] = [5.0, 9.0]
    assert not numbers.compute(values)
    assert values == [5.0, 9.0, 6.0, 10.0, 11.0] and calls[2:] == [5.0, 9.0, 10.0]


# ---- beside eager, and beside the reference executor -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_eager_and_compiled_steps_mix(name):
    model = fresh(images)
    optimizer = OPTIMIZERS[name](model)
    step = ws.compile(model, squares, optimizer, (pictures(),))
    twin = fresh(images)
    other = OPTIMIZERS[name](twin)
    for number, compiled in enumerate((True, False, False, True, True, False, True)):
        loss = lambda m, n=number: squares(m, pictures(n))  # noqa: E731
        mine = float(step(pictures(number))) if compiled else eager_step(loss, model, optimizer)
        assert mine == eager_step(loss, twin, other)
    assert_same_bits(state_of(model, optimizer), state_of(twin, other))
    assert static_of(step).bindings == 1


class WithDropout(nn.Module):
    """Random numbers, statistics, an embedding and a product: a bit of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 16)
        self.norm, self.drop, self.last = nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.table(x).mean(1)))))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": 2},
        {"accumulate": 4, "clip_norm": 0.01},
        {"precision": "bf16", "accumulate": 2},
        {"precision": "fp16"},
        {"clip_value": 0.001, "skip_nonfinite": True},
        {"ema": 0.9, "clip_norm": 0.01},
    ],
    ids=str,
)
def test_a_plan_gives_the_bits_of_the_reference_executor(options):
    runs = []
    for level in (0, 3):
        model = fresh(WithDropout)
        optimizer = adamw(model)
        batches = [torch.randint(0, 11, (8, 3), generator=torch.Generator().manual_seed(s)) for s in range(4)]
        torch.manual_seed(5)
        step = ws.compile(model, squares, optimizer, (batches[0],), level=level, **options)
        losses = [float(step(x)) for x in batches]
        found = state_of(model, optimizer)
        if "ema" in options:
            found |= {f"ema.{k}": v for k, v in step.ema_state_dict().items()}
        runs.append((losses, found))
        assert (step._compiled.static is None) == (level == 0)
    assert runs[0][0] == runs[1][0]
    assert_same_bits(runs[0][1], runs[1][1])


def test_the_report_says_which_executor_runs():
    _, _, planned = start(Perceptron)
    _, _, reference = start(Perceptron, level=0)
    found = planned.report().execution
    assert found["by"] == "from the plan, launch by launch" and found["peak"] == planned.plan().peak
    assert f"{found['launches']} launches" in str(planned.report())
    assert reference.report().execution["by"] == "the reference executor, which allocates as it goes"
    assert "launches" not in reference.report().execution


# ---- what else a user asks -------------------------------------------------------------------------------------------


def test_an_annotated_step_is_a_step():
    model, optimizer, step = start(Perceptron)
    twin, other, plain = start(Perceptron)
    for seed in range(3):
        assert float(step.annotated(data(6, 4, seed=seed))) == float(plain(data(6, 4, seed=seed)))
    assert float(step(data(6, 4))) == float(plain(data(6, 4)))
    assert_same_bits(state_of(model, optimizer), state_of(twin, other))
    with pytest.raises(InputError, match="no plan to annotate"):
        start(Perceptron, level=0)[2].annotated(data(6, 4))


def test_the_latest_loss():
    _, _, step = start(Perceptron)
    assert step.latest_loss() is None
    for seed in range(2):
        loss = step(data(6, 4, seed=seed))
        assert step.latest_loss() == float(loss)


def test_a_plan_that_does_not_fit_is_refused_before_it_runs():
    plan = start(Perceptron)[2].plan()
    check_fits(plan, torch.device("cpu"), total=plan.peak)
    with pytest.raises(MemoryBudgetError) as caught:
        check_fits(plan, torch.device("cpu"), total=plan.peak - 1)
    text = str(caught.value)
    assert f"the step needs {plan.peak / 1e9:.2f} GB and cpu has" in text
    assert "memory_budget=" in text and "accumulate=2" in text and "smaller batch" in text


def test_a_step_that_cannot_fit_changes_nothing(monkeypatch):
    model = fresh(Perceptron)
    optimizer = adamw(model)
    before = state_of(model, optimizer)
    monkeypatch.setattr("os.sysconf", lambda name: 1)
    with pytest.raises(MemoryBudgetError, match="the step needs"):
        ws.compile(model, squares, optimizer, (data(6, 4),))
    assert_same_bits(before, state_of(model, optimizer))


def test_programs_of_one_step_share_their_arena() -> None:
    model = fresh(Perceptron)
    step = ws.compile(model, squares, adamw(model), (data(8, 4),), shapes="bucket")
    twin = fresh(Perceptron)
    single = ws.compile(twin, squares, adamw(twin), (data(8, 4),), shapes="bucket", level=0)
    for rows in (8, 2, 8, 4, 2, 8):
        assert torch.equal(step(data(rows, 4)), single(data(rows, 4)))
    arenas = {c.static.bound.arena.untyped_storage().data_ptr() for c in step._variants.values()}
    assert len(step._variants) == 3 and len(arenas) == 1
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def calls_of_a_warm_step(layers: int) -> int:
    """How many functions a replayed step calls on the host, a graph that does nothing in place of a GPU's."""

    class Replayed:
        def replay(self, alike: bool) -> bool:
            return alike

    x = data(6, 4)
    _, _, step = start(lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)]), x=x)
    for _ in range(2):
        step(x)
    static_of(step).graph = Replayed()  # type: ignore[assignment]
    step(x)
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        step(x)
    finally:
        sys.setprofile(None)
    assert static_of(step).replayed and step.compilations == 1
    return calls


def test_the_host_work_of_a_replayed_step_does_not_grow_with_the_model(monkeypatch):
    if isinstance(why := native(), str):
        pytest.skip(why)
    as_on_a_gpu = lambda *parts: Counters(*parts[:-1], True)  # noqa: E731 - counters side by side in memory
    monkeypatch.setattr("wholestep.runtime.train_step.Counters", as_on_a_gpu)
    few = calls_of_a_warm_step(2)
    assert 0 < few < 400
    assert calls_of_a_warm_step(9) == few
