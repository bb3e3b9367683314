"""`grouped_attention`: copies of keys and values, and the sums over their gradients, go; the numbers stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.plan.networks import Case
from tests.runtime.runs import data
from wholestep.dialects.step import attention_cuda
from wholestep.ir.core import Op
from wholestep.ir.passes import run_pipeline
from wholestep.ir.verify import verify
from wholestep.runtime.executor import Executable
from wholestep.transforms.opportunity import apply_key, opportunities, take, transformations

CPU = torch.device("cpu")
HEADS, WIDTH, BATCH, LENGTH = 6, 4, 2, 5


def repeat_kv(x: torch.Tensor, times: int) -> torch.Tensor:
    """[B, heads, L, D] as transformers repeats it."""
    b, heads, length, width = x.shape
    return x[:, :, None].expand(b, heads, times, length, width).reshape(b, heads * times, length, width)


#: ways to make copies of each head of [B, heads, L, D]
WAYS: dict[str, Any] = {
    "transformers": repeat_kv,
    "repeat_interleave": lambda x, n: x.repeat_interleave(n, 1),
    "before heads come first": lambda x, n: x.transpose(1, 2).repeat_interleave(n, 2).transpose(1, 2),
    "expand": lambda x, n: x.expand(-1, n, -1, -1),
    "sdpa": lambda x, n: x,
    "blocks": lambda x, n: x.repeat(1, n, 1, 1),
    "scaled": lambda x, n: repeat_kv(x, n) * torch.arange(1.0, HEADS + 1).view(1, HEADS, 1, 1),
}


class Grouped(nn.Module):
    """Attention with few heads of keys; `v`: how values are repeated, where it is not as keys are."""

    def __init__(self, way: str, own: int, v: str = "", mask: str = "causal", heads: int = HEADS):
        super().__init__()
        self.way, self.v, self.own, self.mask = way, v or way, own, mask
        self.q, self.k = nn.Linear(7, heads * WIDTH), nn.Linear(7, own * WIDTH)
        self.values = nn.Linear(7, own * WIDTH)
        self.bias = nn.Parameter(data(LENGTH, LENGTH, seed=5))
        self.register_buffer("seen", data(BATCH, 1, LENGTH, LENGTH) > -0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for layer in (self.q, self.k, self.values))
        k, v = WAYS[self.way](k, q.shape[1] // self.own), WAYS[self.v](v, q.shape[1] // self.own)
        mask = {"bool": self.seen, "bias": self.bias}.get(self.mask)
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=self.mask == "causal", enable_gqa=self.way == "sdpa"
        )


def case_of(*args: Any, **options: Any) -> Case:
    torch.manual_seed(0)
    target = data(BATCH, HEADS, LENGTH, WIDTH, seed=3)
    return Case((Grouped(*args, **options), lambda y, t: F.mse_loss(y, t), (data(BATCH, LENGTH, 7), target)), "sgd")


def shapes(module: Op) -> list[tuple[int, ...]]:
    """Keys of every attention and of its gradients."""
    return [op.k.type.shape for op in module.walk() if op.name.startswith("step.attention")]


def counts(module: Op) -> list[int]:
    """How many repetitions and sums there are."""
    names = [op.name for op in module.walk()]
    return [names.count("step.broadcast"), names.count("step.sum")]


def run(case: Case) -> list[torch.Tensor]:
    return Executable(case.program.function, "cpu", case.numbers)([x.clone() for x in case.inputs])


def reason(case: Case) -> str:
    (found,) = transformations()["grouped_attention"].find(case.program.module)
    return found.why_not


@pytest.mark.parametrize(
    ("way", "own", "mask"),
    [
        ("transformers", 2, "causal"),
        ("transformers", 1, "bias"),
        ("repeat_interleave", 3, "bool"),
        ("before heads come first", 2, "bias"),
        ("expand", 1, "causal"),
    ],
)
def test_copies_and_sums_over_them_go(way: str, own: int, mask: str) -> None:
    case = case_of(way, own, mask=mask)
    before, repeated = run(case), (BATCH, HEADS, LENGTH, WIDTH)
    many = counts(case.program.module)
    assert set(shapes(case.program.module)) == {repeated}
    assert len(take(case.program.module, ["grouped_attention"], device=CPU)) == 1
    run_pipeline(case.program.module, "cse,dce")
    verify(case.program.module)
    few = (BATCH, own, LENGTH, WIDTH)
    assert shapes(case.program.module) == [few] * (3 if mask == "bias" else 2)
    assert counts(case.program.module) == [n - 2 for n in many]  # of keys and of values
    for mine, want in zip(run(case), before, strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-6)


def test_enable_gqa_is_captured_as_it_is() -> None:
    case = case_of("sdpa", 2)
    assert shapes(case.program.module) == [(BATCH, 2, LENGTH, WIDTH)] * 2
    assert not transformations()["grouped_attention"].find(case.program.module)


def test_what_is_refused_and_why() -> None:
    blocks = "are repeated all heads after one another, not each head beside itself"
    assert reason(case_of("blocks", 2)) == f"its keys {blocks}"
    assert reason(case_of("transformers", 2, v="blocks")) == f"its values {blocks}"
    assert reason(case_of("transformers", 2, v="scaled")) == "its values are not repeated, but its keys are"
    assert not transformations()["grouped_attention"].find(case_of("scaled", 2).program.module)


def test_a_gradient_of_each_copy_that_others_read() -> None:
    case = case_of("transformers", 2)
    module = case.program.module
    (grad,) = [op for op in module.walk() if op.name == "step.attention_grad"]
    (reshape,) = grad.dk.uses
    total = next(op for op in reshape.result.uses if op.name == "step.sum")
    total.attributes["dims"] = (0,)  # a sum over examples instead
    assert reason(case) == "step.sum reads the gradient of each copy of its keys"


def test_a_recipe_does_it_again() -> None:
    case, again = case_of("transformers", 2), case_of("transformers", 2)
    for key in take(case.program.module, ["grouped_attention"], device=CPU):
        apply_key(again.program.module, key)
    assert shapes(again.program.module) == [(BATCH, 2, LENGTH, WIDTH)] * 2
    other = case_of("transformers", 2)
    assert not take(other.program.module, ["grouped_attention"], ["grouped_attention"], CPU)


def test_only_where_a_kernel_reads_few_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU attention in f32 runs by a kernel that needs the copies."""
    monkeypatch.setattr(attention_cuda, "gpu_of", lambda device: ((9, 0), 91900))
    module, gpu = case_of("transformers", 2).program.module, torch.device("cuda")
    assert not take(module, ["grouped_attention"], device=gpu)
    for device, reason in ((gpu, "no kernel of this device reads few heads"), (CPU, "")):
        (found,) = opportunities(module, names=["grouped_attention"], device=device)
        assert found.why_not.startswith(reason) and bool(found.why_not) == bool(reason)
