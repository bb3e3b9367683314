"""Failures: a compile that fails changes nothing, and a step that is broken off leaves everything at a step border."""

from __future__ import annotations

import copy
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

import wholestep as ws
from tests.conftest import ROOT
from tests.runtime.runs import Body, adamw, assert_same, data, fresh, sgd, squares
from wholestep.errors import CaptureError, InputError, OptimizerError, WholestepError
from wholestep.runtime.bound import BoundPlan
from wholestep.runtime.calls import Late, Made
from wholestep.runtime.signals import Uninterrupted

X = data(6, 4)


@pytest.fixture(autouse=True)
def ctrl_c_is_heard() -> Iterator[None]:
    """Whoever starts tests in the background of a shell has it ignored, here and in processes that are started here."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """All that a failed compile could have touched."""
    return {
        "parameters": {
            n: (id(p), p.data_ptr(), p.detach().clone(), p.requires_grad) for n, p in model.named_parameters()
        },
        "grads": {n: None if p.grad is None else (id(p.grad), p.grad.clone()) for n, p in model.named_parameters()},
        "buffers": {n: (id(b), b.clone()) for n, b in model.named_buffers()},
        "modes": [m.training for m in model.modules()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._backward_hooks)) for m in model.modules()],
        "log": copy.copy(getattr(model, "log", None)),
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        "state": {id(p): {k: (id(v), copy.deepcopy(v)) for k, v in s.items()} for p, s in optimizer.state.items()},
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()),
        "apply": torch.autograd.Function.apply,
        "grad mode": torch.is_grad_enabled(),
    }


def assert_equal(one, other, path="") -> None:
    assert type(one) is type(other), path
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_equal(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_equal(a, b, f"{path}[{i}]")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
    elif isinstance(one, np.ndarray):
        assert np.array_equal(one, other), path
    else:
        assert one == other, path


def busy(m, x):
    """A forward pass with every side effect there is, before it fails."""
    m.calls.add_(1)
    m.mean = m.mean + x.mean(0)
    m.log.append("forward")
    m.made_here = m.layer(x)
    random.random()
    np.random.rand()
    torch.rand(3)
    m.layer.register_forward_hook(lambda *_: None)
    m.norm.eval()
    h = m.norm(m.layer(x))
    if m.bad and h.sum() > 0:
        return h
    return h.nonzero() if m.dynamic else h


def busy_model(bad: bool, dynamic: bool) -> nn.Module:
    model = Body(
        busy, calls=torch.tensor(0), mean=torch.zeros(4), norm=nn.BatchNorm1d(4), log=[], bad=bad, dynamic=dynamic
    )
    return model


@pytest.mark.parametrize(
    "bad, dynamic, loss_fn, error",
    [
        (True, False, squares, CaptureError),  # while torch.export runs
        (False, True, squares, CaptureError),  # while its graph is read
        (False, False, lambda m, x: m(x), InputError),  # when the loss is looked at
        (False, False, lambda m, x: m(x).detach().mean(), InputError),  # when gradients are taken
    ],
)
@pytest.mark.filterwarnings("ignore:forward keeps tensors")
def test_a_failed_compile_changes_nothing(bad, dynamic, loss_fn, error):
    model = fresh(lambda: busy_model(bad, dynamic))
    optimizer = adamw(model)
    model.layer.weight.grad = torch.ones(4, 4)
    optimizer.step()
    before = everything(model, optimizer)
    with pytest.raises(error):
        ws.compile(model, loss_fn, optimizer, (X,))
    assert_equal(everything(model, optimizer), before)


def test_a_compile_that_works_leaves_no_trace_either():
    model = fresh(lambda: busy_model(False, False))
    optimizer = adamw(model)
    before = everything(model, optimizer)
    with pytest.warns(UserWarning, match="made_here"):
        ws.compile(model, squares, optimizer, (X,))
    assert_equal(everything(model, optimizer), before)


def test_a_failed_compile_when_the_optimizer_is_refused():
    model = fresh(lambda: nn.Linear(4, 4))
    optimizer = torch.optim.LBFGS(model.parameters())
    before = everything(model, optimizer)
    with pytest.raises(OptimizerError, match="LBFGS evaluates the loss several times"):
        ws.compile(model, squares, optimizer, (X,))
    assert_equal(everything(model, optimizer), before)


def test_a_failed_recompile_leaves_the_step_usable():
    model = fresh(lambda: nn.Linear(4, 4))
    step = ws.compile(model, squares, adamw(model), (X,))
    step(X)
    model.requires_grad_(False)
    with pytest.raises(InputError, match="no parameter of the model requires a gradient"):
        step(X)
    model.requires_grad_(True)
    step(X)
    assert step.compilations == 1


# ---- inside a step ---------------------------------------------------------------------------------------------------


def norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3), nn.Dropout(0.5))


def prepared(warm: bool):
    model = fresh(norm_net)
    optimizer = adamw(model)
    step = ws.compile(model, squares, optimizer, (X,))
    if warm:
        step(X)
    return model, optimizer, step


def failing(monkeypatch, index, error):
    """Makes the call that `index` picks from a bound plan fail."""
    run = BoundPlan.run

    def broken(bound):
        at = index(bound)
        working = bound.calls[at]

        def fail(*_, **__):
            raise error("broken off")

        bound.calls[at] = (fail, *working[1:])
        try:
            run(bound)
        finally:
            bound.calls[at] = working

    monkeypatch.setattr(BoundPlan, "run", broken)


def of_phase(phase):
    """The last call of a phase; of the update the first, for it is the last that could still fail."""
    pick = min if phase == "update" else max
    return lambda bound: pick(i for i, (launch, _) in enumerate(bound.sites) if launch.phase == phase)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("phase", ["forward", "backward", "update"])
def test_an_exception_inside_a_step_changes_nothing(phase, error, warm, monkeypatch):
    model, optimizer, step = prepared(warm)
    before = everything(model, optimizer)
    failing(monkeypatch, of_phase(phase), error)
    with pytest.raises(error, match="broken off"):
        step(X)
    assert_equal(everything(model, optimizer), before)
    assert step._own.counter == int(warm)
    monkeypatch.undo()
    other, _, twin = prepared(warm)
    assert float(step(X)) == float(twin(X))  # the same dropout masks: nothing was counted
    assert_same(model, other)


@pytest.mark.parametrize("optimizer", [adamw, sgd, torch.optim.NAdam, torch.optim.Adagrad])
def test_nothing_can_fail_once_the_state_changes(optimizer):
    """After the first write to a parameter or to optimizer state only kernels are left that make no memory, look
    nothing up and were given what they need when the step was bound."""
    model = fresh(norm_net)
    step = ws.compile(model, squares, optimizer(model.parameters() if isinstance(optimizer, type) else model), (X,))
    step(X)
    bound = step._compiled.static.bound
    state = [t for t in (*model.parameters(), *model.buffers()) if t.numel()]
    state += [v for s in step.optimizer.state.values() for v in s.values() if torch.is_tensor(v) and v.dim()]
    spans = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in state]
    positions = [
        p
        for p, launch in enumerate(bound.plan.launches)
        for n in launch.writes
        if n >= 0 and bound.plan.buffers[n].space != "host"
        if any(low <= bound.memory.tensor(n).data_ptr() < high for low, high in spans)
    ]
    assert positions
    for at, (call, _, _) in enumerate(bound.calls):
        if bound.origin[at] >= min(positions):
            inner = call.call if isinstance(call, Late) else call
            assert not isinstance(inner, Made), bound.sites[at]
            assert bound.sites[at][0].phase == "update" or bound.sites[at][0].provider == "copy"


def test_a_failure_after_that_says_what_happened(monkeypatch):
    _, _, step = prepared(True)
    failing(monkeypatch, lambda bound: len(bound.calls) - 1, RuntimeError)
    with pytest.raises(
        WholestepError, match=r"after it had begun to change the model \(.*first\).*broken off\nLoad the"
    ):
        step(X)


def test_ctrl_c_while_the_state_changes_comes_after_the_step(monkeypatch):
    model, optimizer, step = prepared(True)
    other, other_optimizer, twin = prepared(True)
    twin(X)
    run = BoundPlan.run

    def interrupted(bound):
        at = len(bound.calls) - 3
        working = bound.calls[at]

        def call(*args, **kwargs):
            os.kill(os.getpid(), signal.SIGINT)
            working[0](*args, **kwargs)

        bound.calls[at] = (call, *working[1:])
        run(bound)
        bound.calls[at] = working

    monkeypatch.setattr(BoundPlan, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(X)
    monkeypatch.undo()
    assert_same(model, other)
    assert_equal(optimizer.state_dict()["state"], other_optimizer.state_dict()["state"])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert float(step(X)) == float(twin(X))


def test_handlers_of_all_signals_wait():
    seen: list[int] = []

    def handler(number, frame):
        seen.append(number)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with Uninterrupted():
            os.kill(os.getpid(), signal.SIGALRM)
            for _ in range(1000):
                pass
            assert seen == []
        assert seen == [signal.SIGALRM]
        assert signal.getsignal(signal.SIGALRM) is handler
    finally:
        signal.signal(signal.SIGALRM, before)


def test_other_threads_need_no_protection():
    done = []
    thread = threading.Thread(target=lambda: done.append(Uninterrupted().__enter__()))
    thread.start()
    thread.join()
    assert done == [None]


SCRIPT = """
import os, signal, sys, threading, time
import torch
from torch import nn
import wholestep as ws

torch.set_num_threads(1)
torch.manual_seed(0)
width = 48
model = nn.Sequential(*[m for _ in range(20) for m in (nn.Linear(width, width), nn.Tanh())])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.randn(8, width)
step = ws.compile(model, lambda m, x: m(x).pow(2).mean(), optimizer, (x,), tune=False)
step(x)

def fingerprint():
    counters = {int(s["step"]) for s in optimizer.state.values()}
    return counters, sum(float(p.detach().double().sum()) for p in model.parameters())

# what the parameters are after each number of whole steps, from a twin that is never interrupted
torch.manual_seed(0)
twin = nn.Sequential(*[m for _ in range(20) for m in (nn.Linear(width, width), nn.Tanh())])
twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-3)
twin_step = ws.compile(twin, lambda m, x: m(x).pow(2).mean(), twin_optimizer, (x,), tune=False)
borders = {}

def border(count):
    while len(borders) < count:
        twin_step(x)
        borders[len(borders) + 1] = sum(float(p.detach().double().sum()) for p in twin.parameters())
    return borders[count]

interrupted = 0
for attempt in range(12):
    stop = threading.Event()

    def fire():
        time.sleep(0.002 + 0.0017 * attempt)
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Thread(target=fire)
    try:
        timer.start()
        for _ in range(200000):
            step(x)
    except KeyboardInterrupt:
        interrupted += 1
    timer.join()
    counters, total = fingerprint()
    assert len(counters) == 1, f"half-updated counters: {counters}"
    assert total == border(counters.pop()), "half-updated parameters"
print("interrupted", interrupted)
"""


def test_real_ctrl_c_finds_a_step_border(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "interrupted 12\n"


def test_errors_of_a_step_are_ours_or_torchs(monkeypatch):
    _, _, step = prepared(False)
    failing(
        monkeypatch,
        lambda bound: next(i for i, (launch, _) in enumerate(bound.sites) if launch.layer == "3"),
        ValueError,
    )
    with pytest.raises(WholestepError, match=r"of layer 3 at .*: broken off"):
        step(X)
