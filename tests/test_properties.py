"""Properties over random programs and random networks: captured == eager, gradients == autograd, text round trips.

And determinism: the printed program is the same under any hash seed.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st

import wholestep as ws
from tests import warm
from tests.capture.opinfo import differ, import_function, trace
from tests.random_programs import Program, programs
from wholestep.dialects import context
from wholestep.ir import parse, print_op, verify
from wholestep.runtime.executor import Executable
from wholestep.training.autodiff import gradients

torch.set_num_threads(1)
CI = dict(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
SCALE = int(os.environ.get("WHOLESTEP_EXAMPLES", "1"))  # how many times the usual number of examples


def eager(program: Program) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What eager PyTorch gives for a program: its results, the gradients of its leaves."""
    inputs = program.fresh_inputs()
    leaves = inputs[: program.leaves]
    results = program(*inputs)
    if not results[-1].requires_grad:
        return [t.detach() for t in results], [torch.zeros_like(t) for t in leaves]
    found = torch.autograd.grad(results[-1], leaves, allow_unused=True)
    return [t.detach() for t in results], [
        torch.zeros_like(t) if g is None else g for t, g in zip(leaves, found, strict=True)
    ]


@settings(max_examples=60 * SCALE, **CI)
@given(programs())
def test_programs(program):
    note(f"moves: {program.names}")
    try:
        expected, expected_gradients = eager(program)
    except RuntimeError as error:  # autograd refuses what wrote over a value that it still needs
        assume("in-place operation" not in str(error) and "inplace" not in str(error))
        raise
    assume(all(t.isfinite().all() for t in (*expected, *expected_gradients)))
    inputs = program.inputs
    imported = import_function(trace(program, program.fresh_inputs()), inputs)
    found = gradients(imported.b, imported.results[-1], imported.arguments[: program.leaves], imported.vjps)
    imported.finish([*imported.results, *(g for g in found if g is not None)])
    verify(imported.root)
    run = Executable(imported.function)
    results = run([*inputs, *imported.extra()])
    given_gradients = iter(results[len(expected) :])
    tolerance = 1e-4 if program.single else 1e-9
    for i, (got, want) in enumerate(zip(results, expected, strict=False)):
        assert not differ(got, want, tolerance), f"result {i}: {differ(got, want, tolerance)}"
    for i, (value, want) in enumerate(zip(found, expected_gradients, strict=True)):
        got = torch.zeros_like(want) if value is None else next(given_gradients)
        assert not differ(got, want, tolerance), f"gradient {i}: {differ(got, want, tolerance)}"
    check_text(imported.root)


def check_text(root):
    """Printed, parsed and printed again, a program is the same, and still valid."""
    text = print_op(root)
    again = parse(text, context(), verify=True)
    assert print_op(again) == text
    verify(again)


# ---- networks --------------------------------------------------------------------------------------------------------


class Flat(torch.nn.Module):
    def forward(self, x):
        return x.flatten(1)


class Gate(torch.nn.Module):
    """Writes into a part of its input, as gates and masks of real networks do."""

    def forward(self, x):
        y = x.clone()
        y[:, 1:] *= torch.sigmoid(x[:, :1])
        y[:, 0].clamp_(-1, 1)
        return y


class Residual(torch.nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return x + self.body(x)


@st.composite
def networks(draw):
    """A chain of layers on images or sequences, as a module with a scalar loss, and its input's shape."""
    channels, size, batch = draw(st.integers(2, 4)), draw(st.integers(2, 6)), draw(st.integers(2, 3))
    norms = [
        lambda c: torch.nn.BatchNorm2d(c),
        lambda c: torch.nn.GroupNorm(c if draw(st.booleans()) else 1, c),
        lambda c: torch.nn.InstanceNorm2d(c, affine=True, track_running_stats=draw(st.booleans())),
        lambda c: torch.nn.Identity(),
    ]
    activations = [
        torch.nn.ReLU(inplace=draw(st.booleans())), torch.nn.GELU(), torch.nn.SiLU(), torch.nn.Tanh(), torch.nn.ELU(),
        torch.nn.Hardswish(), torch.nn.LeakyReLU(0.1), torch.nn.Softplus(), torch.nn.PReLU(),
    ]  # fmt: skip
    layers, c = [], channels
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["conv", "depthwise", "pointwise", "residual", "gate", "pool", "transposed"]))
        if kind == "conv":
            out = draw(st.integers(2, 4))
            layers.append(torch.nn.Conv2d(c, out, 3, padding=1, stride=1, bias=draw(st.booleans())))
            c = out
        elif kind == "depthwise":
            layers.append(torch.nn.Conv2d(c, c, 3, padding=1, groups=c))
        elif kind == "pointwise":
            layers.append(torch.nn.Conv2d(c, c, 1))
        elif kind == "residual":
            layers.append(
                Residual(torch.nn.Sequential(draw(st.sampled_from(norms))(c), torch.nn.Conv2d(c, c, 3, padding=1)))
            )
        elif kind == "gate":
            layers.append(Gate())
        elif kind == "pool":
            layers.append(
                draw(st.sampled_from([torch.nn.MaxPool2d(2, 1, 1), torch.nn.AvgPool2d(2, 1)])) if size > 2 else Gate()
            )
        else:
            layers.append(torch.nn.ConvTranspose2d(c, c, 3, padding=1))
        layers.append(draw(st.sampled_from(norms))(c))
        layers.append(copy.deepcopy(draw(st.sampled_from(activations))))
    layers += [torch.nn.AdaptiveAvgPool2d(2), Flat(), torch.nn.Linear(4 * c, 5)]
    return torch.nn.Sequential(*layers), (batch, channels, size, size)


def reset(model):
    """Parameters that do not depend on the order in which examples were made."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.4 + 0.1)


@settings(max_examples=15 * SCALE, **CI)
@given(networks(), st.sampled_from(["cross_entropy", "mse", "smooth_l1"]))
def test_networks(network, loss):
    """Two compiled steps of SGD in float64 are two eager ones: parameters and running statistics."""
    model, shape = network
    reset(model)
    model = model.double()
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    if loss == "cross_entropy":
        target, loss_fn = torch.arange(shape[0]) % 5, torch.nn.functional.cross_entropy
    else:
        target = torch.randn(shape[0], 5, dtype=torch.float64, generator=generator)
        loss_fn = torch.nn.functional.mse_loss if loss == "mse" else torch.nn.functional.smooth_l1_loss
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    other = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.5)
    step = ws.compile(model, lambda m, a, b: loss_fn(m(a), b), optimizer, (x, target))
    for _ in range(2):
        got = step(x, target)
        other.zero_grad()
        want = loss_fn(twin(x), target)
        want.backward()
        other.step()
        assert not differ(torch.as_tensor(got).detach(), want.detach(), 1e-9)
    for (name, mine), theirs in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert not differ(mine, theirs, 1e-8), f"{name}: {differ(mine, theirs, 1e-8)}"


# ---- determinism -----------------------------------------------------------------------------------------------------

PRINTER = """
import sys, torch
import wholestep as ws
from wholestep.ir import print_op
from wholestep.plan import plan_to_module
from tests.transforms.test_fuse import fingerprint
from tests.zoo import ZOO
torch.set_num_threads(1)
print(fingerprint())
for name in sys.argv[1:]:
    model, batch = ZOO[name].build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = ws.compile(model, ZOO[name].loss_fn, optimizer, batch, clip_norm=1.0)
    print(print_op(step.program(), locations=True))
    print(plan_to_module(step.plan()))
"""


DETERMINISTIC = ("unet",)


@pytest.mark.slow
def test_same_text_under_any_hash_seed():
    """A process with a hash seed of its own prints the programs, plans and fusions of one that has another."""
    program = ["-c", PRINTER, *DETERMINISTIC]
    environment = os.environ | {"PYTHONHASHSEED": "4242", "OMP_NUM_THREADS": "1"}
    other = subprocess.run([sys.executable, *program], cwd=warm.ROOT, env=environment, capture_output=True, text=True)
    own = warm.run(program, os.environ)
    assert other.returncode == own.returncode == 0, (other.stderr + own.stderr)[-2000:]
    assert len(own.stdout) > 10_000 and "move.launch" in own.stdout
    assert own.stdout == other.stdout
