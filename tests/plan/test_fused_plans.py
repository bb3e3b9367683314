"""Plans with fused kernels: they verify, their bytes add up, and every option of a step goes together with fusion."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.dialects.loop.provider import LoopReference, registered
from tests.runtime.runs import adamw, data, fresh, sgd
from wholestep.backends.kernels import KERNEL, Spec, scratch_places
from wholestep.backends.providers import Launcher, Offer, Region
from wholestep.cost import make_ledger
from wholestep.dialects.move.verify import verify_plan
from wholestep.plan import plan_to_module
from wholestep.plan.plan import Plan
from wholestep.plan.text import describe_changes, load, save


class Scratch(LoopReference):
    """The loop reference that asks for memory beside its tensors, and uses it."""

    name = "scratch"

    def offers(self, region: Region) -> list[Offer]:
        memory = (Spec((100,), (1,), torch.float32), Spec((3, 5), (5, 1), torch.int32))
        return [Offer("float64", f"{self.name} {region.key}", memory, region)]

    def launcher(self, region: Region) -> Launcher:
        inner, count = super().launcher(region), len(region.specs)

        def run(*tensors: torch.Tensor) -> None:
            one, other = tensors[count:]
            assert one.shape == (100,) and other.dtype is torch.int32
            one.fill_(float("nan"))  # whoever else lies there is spoilt
            other.fill_(-1)
            inner(*tensors[:count])
            assert bool(one.isnan().all()) and bool((other == -1).all()), "a result lies in its own scratch memory"

        return run


@pytest.fixture(autouse=True)
def providers() -> Iterator[None]:
    with registered(LoopReference, Scratch):
        yield


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=True, activation="gelu")
    return nn.Sequential(nn.Linear(6, 16), layer, nn.LayerNorm(16), nn.Flatten(), nn.Linear(16 * 4, 3))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32, 3)
    )


NETWORKS = {
    "transformer": (transformer, lambda n: (data(n, 4, 6), torch.arange(n) % 3)),
    "convolutions": (convolutions, lambda n: (data(n, 3, 4, 4), torch.arange(n) % 3)),
}


def compiled(
    name: str, fused: str, rows: int = 6, optimizer: Any = adamw, **options: Any
) -> tuple[nn.Module, ws.TrainStep, Any]:
    make, batch = NETWORKS[name]
    model = fresh(make)
    torch.manual_seed(3)
    more = {"providers": ["aten", fused], "tune": False} if fused else {}
    return (
        model,
        ws.compile(model, nn.functional.cross_entropy, optimizer(model), batch(rows), **more, **options),
        batch,
    )


def losses(step: ws.TrainStep, batch: Any, rows: tuple[int, ...]) -> list[float]:
    return [float(step(*batch(n))) for n in rows]


def kernels_of(plan: Plan, name: str) -> list[int]:
    return [i for i, launch in enumerate(plan.launches) if launch.provider == name]


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("convolutions", {}),
    "clip and average": ("transformer", {"clip_norm": 0.5, "ema": 0.9}),
    "micro-batches": ("transformer", {"accumulate": 2}),
    "all": ("convolutions", {"accumulate": 2, "clip_norm": 0.5, "ema": 0.9, "skip_nonfinite": True}),
    "bf16": ("transformer", {"precision": "bf16"}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_option_goes_with_fusion(case: str) -> None:
    name, options = CASES[case]
    model, step, batch = compiled(name, "loops", optimizer=sgd, **options)
    other, plain, _ = compiled(name, "", optimizer=sgd, **options)
    rtol, atol = (2e-2, 2e-2) if case == "bf16" else (1e-4, 1e-5)
    found, true = losses(step, batch, (6, 6, 6)), losses(plain, batch, (6, 6, 6))
    torch.testing.assert_close(found, true, rtol=rtol, atol=atol)
    for key, tensor in other.state_dict().items():
        torch.testing.assert_close(
            model.state_dict()[key],
            tensor,
            rtol=20 * rtol,
            atol=atol,
            msg=lambda m: f"{key}: {m}",  # noqa: B023
        )
    plan = step.plan()
    verify_plan(plan_to_module(plan))
    assert sum(len(kernels_of(p, "loops")) for p in (plan, *plan.bodies)) > 4
    assert 0 < plan.lower_bound <= plan.arena


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_an_update_is_one_kernel_though_its_decay_may_change(kind: Any) -> None:
    models = [fresh(lambda: nn.Linear(6, 3)) for _ in range(2)]
    optimizers = [kind(m.parameters(), lr=0.05) for m in models]
    x, loss = data(5, 6), nn.functional.mse_loss
    y = torch.zeros(5, 3)
    step = ws.compile(models[0], loss, optimizers[0], (x, y), providers=["aten", "loops"], tune=False)
    update = [k.provider for k in step.plan().launches if k.phase == "update" and k.provider != "host"]
    assert update == ["loops"] * 2  # of two parameters
    for decay in (0.0, 0.5, 0.0):
        for optimizer in optimizers:
            optimizer.param_groups[0]["weight_decay"] = decay
        step(x, y)
        optimizers[1].zero_grad()
        loss(models[1](x), y).backward()
        optimizers[1].step()
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=1e-5, atol=1e-6)


def test_fusion_needs_no_more_memory_and_fewer_launches() -> None:
    for name in NETWORKS:
        fused, plain = compiled(name, "loops")[1].plan(), compiled(name, "")[1].plan()
        assert len(fused.launches) < 0.7 * len(plain.launches)
        assert fused.arena <= 1.15 * plain.arena, name


@pytest.mark.parametrize("provider", ["loops", "scratch"])
def test_bytes_of_a_launch_are_its_tensors_each_once(provider: str) -> None:
    """What the ledger says of a fused launch: operands and results, whatever happens inside."""
    _, step, _ = compiled("transformer", provider)
    planned = step._compiled.static.planned
    plan, ledger = planned.plan, make_ledger(planned)
    by_launch = {k.launch: k for k in ledger.kernels}
    seen = 0
    for number in kernels_of(plan, provider):
        launch, kernel = plan.launches[number], planned.kernels[number]
        assert kernel is not None and [s.kind for s in kernel.steps] == [KERNEL]
        reads = {plan.buffers[r].base if plan.buffers[r].share == "view" else r: r for r in launch.reads}
        arena = [plan.buffers[r] for r in reads.values() if plan.buffers[r].space != "host"]
        writes = [plan.buffers[w] for w in launch.writes if w >= 0]
        inside = sum(kernel.memory[n].bytes for n, _, _ in kernel.scratch)
        found = by_launch[number]
        most = sum(b.type.bytes for b in (*arena, *writes)) + 2 * inside
        least = sum(b.type.bytes for b in writes)
        assert least <= found.bytes <= most + 64 * len(launch.reads), (found.name, found.bytes, most)
        seen += 1
    assert seen > 4
    assert step.plan().arena >= max(b.bytes for b in plan.buffers if b.space == "arena")


def test_scratch_memory_is_planned_and_nobody_elses() -> None:
    _, step, batch = compiled("transformer", "scratch")
    _, plain, _ = compiled("transformer", "")
    torch.testing.assert_close(losses(step, batch, (6, 6)), losses(plain, batch, (6, 6)), rtol=1e-4, atol=1e-5)
    plan = step.plan()
    for number in kernels_of(plan, "scratch"):
        launch = plan.launches[number]
        space = plan.buffers[launch.workspace]
        kernel = step._compiled.static.planned.kernels[number]
        assert launch.workspace >= 0 and space.bytes >= 400 + 60
        assert space.bytes == scratch_places(kernel, [w >= 0 for w in launch.writes], plan.alignment)[1]
        assert (space.first, space.last) == (number, number)
    verify_plan(plan_to_module(plan))


def test_plan_text(tmp_path: Path) -> None:
    plan = compiled("convolutions", "scratch")[1].plan()
    path = tmp_path / "plan.mlir"
    save(plan, path)
    again = load(path)
    assert again == plan
    assert [launch.provider for launch in again.launches].count("scratch") == len(kernels_of(plan, "scratch")) > 0


def test_the_fingerprint_is_of_what_kernels_compute_and_not_of_their_names() -> None:
    def plan(approximate: str, **options: Any) -> tuple[Plan, list[str]]:
        model = fresh(lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(approximate), nn.LayerNorm(8), nn.Linear(8, 3)))
        batch, options = (data(4, 6), torch.arange(4) % 3), {"providers": ["aten", "loops"], "tune": False, **options}
        step = ws.compile(model, nn.functional.cross_entropy, adamw(model), batch, **options)
        return step.plan(), step.recipe

    (exact, recipe), (other, _) = plan("none"), plan("tanh")
    assert exact != other and describe_changes(exact, other) == "they are plans of different programs"
    assert plan("none", recipe=recipe)[0] == exact  # its kernels are numbered otherwise
    micro = [plan(a, accumulate=2)[0] for a in ("none", "tanh", "none")]
    assert micro[0] == micro[2] and "micro-batch 0: they are plans of different" in describe_changes(micro[0], micro[1])


def test_fp16_with_loss_scaling_skips_the_same_steps() -> None:
    rows, settings = (0, 1, 2, 3, 4), {"init_scale": 2.0**14, "growth_interval": 2}
    results = []
    for fused in ("loops", ""):
        model, step, batch = compiled("transformer", fused, optimizer=sgd, precision="fp16", loss_scale=settings)
        before, moved = {k: v.clone() for k, v in model.state_dict().items()}, []
        for number in rows:
            x, y = batch(6)
            step(x * (3e4 if number == 2 else 1.0), y)
            now = model.state_dict()
            moved.append(any(not torch.equal(now[k], before[k]) for k in before))
            before = {k: v.clone() for k, v in now.items()}
        results.append((moved, before))
    assert results[0][0] == results[1][0] == [True, True, False, True, True]
    for key, tensor in results[1][1].items():
        torch.testing.assert_close(results[0][1][key], tensor, rtol=2e-2, atol=2e-2)


def test_a_memory_budget_with_fusion() -> None:
    whole = compiled("transformer", "loops")[1].plan()
    _, step, batch = compiled("transformer", "loops", memory_budget=0.95)
    _, plain, _ = compiled("transformer", "")
    torch.testing.assert_close(losses(step, batch, (6, 6)), losses(plain, batch, (6, 6)), rtol=1e-4, atol=1e-5)
    verify_plan(plan_to_module(step.plan()))
    assert step.plan().arena <= whole.arena


def test_buckets_with_fusion() -> None:
    rows = (6, 5, 8, 6)
    results = []
    for fused in ("loops", ""):
        _, step, batch = compiled("transformer", fused, shapes="bucket", optimizer=sgd)
        results.append(losses(step, batch, rows))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


def test_labels_that_are_no_classes_are_seen() -> None:
    """ATen raises and leaves the state as it was; a kernel cannot raise, so the loss is not a number."""
    model, step, batch = compiled("transformer", "")
    x, y = batch(6)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(IndexError):
        step(x, y + 50)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key]), key
    _, step, _ = compiled("transformer", "loops")
    assert math.isnan(float(step(x, y + 50)))
    _, step, _ = compiled("transformer", "loops")
    y[2] = -100  # the one that is to be ignored
    assert math.isfinite(float(step(x, y)))
