"""Two steps of each network in tiny, every region by its generated Triton kernel, in Triton's interpreter.

Run by `test_interpreted.py` in a process of its own: Triton reads TRITON_INTERPRET when it is imported. Losses and the
first moments of AdamW, which are sums of gradients, are compared with eager PyTorch.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.networks import NAMES, build
from bench.networks.curves import apart, compiled, eager, losses_of
from wholestep import api
from wholestep.backends.providers import Triton, forget_provider, register_provider
from wholestep.transforms import early_norm, through_norm

pytest.importorskip("transformers")

#: relative distance of losses; the interpreter cuts bf16 off instead of rounding it to nearest
LOSSES = {"fp32": 1e-5, "bf16": 1e-2}
#: relative distance of moments from those of fp32, or how many times autocast's own distance they may be away
MOMENTS, TIMES = 1e-3, 3.0
#: share of the largest moment that counts as nothing: some gradients are zero but for rounding
NOTHING = {"fp32": 1e-5, "bf16": 0.02}
#: precisions differ in casts, not in kernels: three networks have all kinds of them
CASES = [(name, "fp32") for name in NAMES] + [(name, "bf16") for name in ("llama", "resnet50")]


class Interpreted(Triton):
    """The Triton provider where there is no GPU."""

    name, devices = "interpreted", ("cpu",)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The provider, and the transformations that are taken by themselves on a GPU."""
    logging.disable(logging.WARNING)
    register_provider(Interpreted)
    monkeypatch.setattr(api, "DEFAULTS", tuple(replace(d, device="") for d in api.DEFAULTS))
    yield
    forget_provider(Interpreted.name)
    logging.disable(logging.NOTSET)


def test_gradients_through_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with large images: backward does not read what a product before a BatchNorm has made, and its statistics are
    known before it is made."""
    monkeypatch.setattr(through_norm, "LEAST", 0)
    monkeypatch.setattr(through_norm, "SMALL", 0)
    monkeypatch.setattr(early_norm, "LEAST", 0)
    recipe = check_two_steps("resnet50", "bf16")
    for name in ("through_norm", "early_norm"):
        assert any(line.startswith(f"{name} ") for line in recipe)


def test_skip_connections_are_one_product() -> None:
    recipe = check_two_steps("wavenet", "bf16", "small")
    assert sum(line.startswith("summed_products ") for line in recipe) == 1
    assert sum(line.startswith("join_zeros ") for line in recipe) == 6  # one for each layer


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_two_steps(name: str, precision: str) -> None:
    check_two_steps(name, precision)


def check_two_steps(name: str, precision: str, size: str = "tiny") -> list[str]:
    """Trains a network, compares, and gives the recipe of the step."""
    network = build(name, size)
    models = [copy.deepcopy(network.model) for _ in range(3)]
    ours = compiled(network, models[0], precision=precision, providers=["aten", Interpreted.name], tune=False)
    theirs = eager(network, models[1], torch.bfloat16 if precision == "bf16" else None)
    exact = eager(network, models[2])
    assert apart(losses_of(network, ours, 2), losses_of(network, theirs, 2)) < LOSSES[precision]

    assert ours.whole is not None and ours.whole.choices is not None
    assert any(launch.provider == Interpreted.name for launch in ours.whole.plan().launches)
    excluded = [timed.why for chosen in ours.whole.choices.known.values() for timed in chosen.excluded]
    assert not excluded, "every kernel that was generated can be built"

    losses_of(network, exact, 2)
    mine, low, wanted = (moments(t.optimizer, m) for t, m in zip((ours, theirs, exact), models, strict=True))
    largest = max(float(m.norm()) for m in wanted.values())
    for parameter, expected in wanted.items():
        found, usual = (float((m[parameter] - expected).norm()) for m in (mine, low))
        allowed = TIMES * usual if precision == "bf16" else MOMENTS * float(expected.norm())
        assert found <= allowed + NOTHING[precision] * largest, parameter
    return ours.whole.recipe


def moments(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, Any]:
    return {name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters() if p in optimizer.state}
