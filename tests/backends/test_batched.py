"""Batched launches: the same numbers as eager PyTorch, in place, in fewer launches; taken apart where nobody runs them.

Triton reads TRITON_INTERPRET when it is imported, so its kernels are run in a child process by `main` below.
"""

from __future__ import annotations

import os

import pytest
import torch

import wholestep as ws
from tests import warm
from wholestep.backends import cpp
from wholestep.backends.batched import ByAddress
from wholestep.backends.providers import Cpp, Region, Triton, forget_provider, register_provider

EXAMPLE = torch.zeros(5, 7)
compiler = pytest.mark.skipif(bool(cpp.missing()), reason="no C++ compiler")


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.GELU(), torch.nn.Linear(33, 40), torch.nn.Linear(40, 3))


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def eager(batches: list[torch.Tensor], clip: float | None) -> tuple[list[float], list[torch.Tensor]]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x in batches:
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, [p.detach() for p in model.parameters()]


def compiled(batches, clip, provider, **options):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = ws.compile(
        model, loss_of, optimizer, (EXAMPLE,), providers=["aten", provider], tune=False, clip_norm=clip, **options
    )
    return [float(step(x)) for x in batches], [p.detach() for p in model.parameters()], step


def launches(step, phase: str) -> list[str]:
    return [x.provider for x in step.plan().launches if x.phase == phase and x.provider not in ("host", "copy")]


def check(provider: str, clip: float | None, steps: int = 3) -> None:
    """Against eager, and against the same step without batches."""
    torch.manual_seed(1)
    batches = [torch.randn(5, 7) for _ in range(steps)]
    losses, weights = eager(batches, clip)
    found, ours, step = compiled(batches, clip, provider)
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours, weights, rtol=1e-4, atol=1e-5)
    single = compiled([], clip, provider, forbid=["fuse batch"])[2]
    assert len(launches(step, "update")) == 1 < len(launches(single, "update")) == 6
    if clip is not None:
        assert len(launches(step, "clip")) == 2 < len(launches(single, "clip"))
    ways = [r.way for r in step.plan().results]
    assert ways == [r.way for r in single.plan().results] and "copy" not in ways
    assert ways.count("in_place") == 18  # parameters and both moments
    assert step.plan().arena <= single.plan().arena * 1.01 + 64 * 12  # scratch memory of norms


@compiler
@pytest.mark.parametrize("clip", [None, 0.1])
def test_as_eager_in_one_launch(clip):
    check("cpp", clip)


@compiler
@pytest.mark.parametrize("why", ["refused", "broken"])
def test_a_batch_that_is_not_run_comes_apart_into_its_regions(why):
    class Single(Cpp):
        name = "single"

        def claims(self, region: Region) -> str:
            return "not today" if region.parts and why == "refused" else super().claims(region)

        def build(self, offers, report=None):
            batches = {o.key for o in offers if o.name.startswith("batch")}
            built = super().build(offers, report)
            return {k: RuntimeError("it broke") if k in batches else v for k, v in built.items()}

    register_provider(Single)
    try:
        torch.manual_seed(1)
        batches = [torch.randn(5, 7) for _ in range(2)]
        _, ours, step = compiled(batches, 0.1, "single")
    finally:
        forget_provider("single")
    torch.testing.assert_close(ours, eager(batches, 0.1)[1], rtol=1e-4, atol=1e-5)
    assert launches(step, "update") == ["single"] * 6


def test_a_table_per_set_of_tensors():
    made: list[int] = []

    def build(candidate: object):
        made.append(len(made))
        number = len(made)
        return lambda *tensors: tensors[0].fill_(number)

    run = ByAddress(build(None), None, build)
    a, b = torch.zeros(3), torch.zeros(3)
    run(a), run(b), run(a), run(b)
    assert made == [0, 1]  # the first was built before
    assert a[0] == 1 and b[0] == 2

    def broken(candidate: object) -> Exception:
        return RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        lost = ByAddress(run, None, broken)
        lost(torch.zeros(2)), lost(torch.ones(2))


def test_triton_in_the_interpreter():
    pytest.importorskip("triton")
    done = warm.run(["-m", "tests.backends.test_batched"], os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def main() -> None:
    class Interpreted(Triton):
        name, devices = "interpreted", ("cpu",)

    register_provider(Interpreted)
    check("interpreted", 0.1, 1)


if __name__ == "__main__":
    main()
