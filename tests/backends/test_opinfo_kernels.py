"""Kernels traced from torch's own operator samples: the same numbers on poisoned memory, run twice, nothing beside it.

CI takes every ninth operator; `WHOLESTEP_OPINFO=all` takes all.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.capture.opinfo import quick_samples
from wholestep.backends.kernels import COPY, FILL, NEW, OUT, VIEW, Kernel, Operand, Ref, Spec, replaced, trace

CPU = torch.device("cpu")
GUARD = 64  # elements before and after each tensor that nobody may touch
RANDOM = ("rand", "bernoulli", "multinomial", "normal", "dropout", "uniform", "exponential", "cauchy", "geometric")
UNSET = ("empty", "rrelu", "fractional", "resize", "to_sparse", "chalf", "_scaled_mm", "svd_lowrank", "pca_lowrank")
# multi_head drops at random; max_unpool has repeated indices, where any value is right; as_strided counts from the
# start of foreign storage
LEFT_OUT = (*RANDOM, *UNSET, "max_unpool", "as_strided", "multi_head")
OPS = [op for op in op_db if not any(word in op.name for word in LEFT_OUT)]
CHOSEN = OPS if os.environ.get("WHOLESTEP_OPINFO") == "all" else OPS[::9]


def guarded(spec: Spec, poison: float) -> torch.Tensor:
    floats = spec.dtype.is_floating_point or spec.dtype.is_complex
    count = spec.bytes // spec.dtype.itemsize + 2 * GUARD
    return torch.full((count,), poison if floats else 1, dtype=spec.dtype)


def execute(kernel: Kernel, operands: list[torch.Tensor], poison: float) -> list[list[torch.Tensor]]:
    """The results of two runs on the same memory; AssertionError where something beside it was written."""
    tensors = dict(enumerate(operands))
    memory = {n: guarded(s, poison) for n, s in kernel.memory.items()}
    tensors |= {n: memory[n].as_strided(s.shape, s.strides, GUARD) for n, s in kernel.memory.items()}
    calls = []
    for step in kernel.steps:

        def bound(value: Any) -> Any:
            return tensors[value.number] if isinstance(value, Ref) else value

        args, kwargs = replaced(step.args, bound), {k: replaced(v, bound) for k, v in step.kwargs.items()}
        if step.kind == VIEW:
            made = step.call(*args, **kwargs)
            tensors.update(zip(step.makes, made if isinstance(made, list | tuple) else (made,), strict=True))
            continue
        outs = [tensors[n] if n >= 0 else None for n in step.makes]
        calls.append((step, args, kwargs, outs))
    results = []
    for _ in range(2):
        for step, args, kwargs, outs in calls:
            if step.kind in (FILL, COPY):
                step.call(*args)
            elif step.kind == OUT:
                step.call(*args, **kwargs, **dict(zip(step.outs, outs, strict=True)))
            elif step.kind == NEW:
                made = step.call(*args, **kwargs)
                for out, value in zip(outs, made if isinstance(made, list | tuple) else (made,), strict=True):
                    if out is not None and value is not None:
                        assert out.shape == value.shape
                        out.copy_(value)
            else:
                step.call(*args, **kwargs)
        found = zip(kernel.results, kernel.specs, strict=True)
        results.append([memory[n].as_strided(s.shape, s.strides, GUARD).clone() for n, s in found])
    for number, spec in kernel.memory.items():
        fresh = guarded(spec, poison)
        for side in (slice(0, GUARD), slice(-GUARD, None)):
            assert torch.equal(memory[number][side].nan_to_num(7), fresh[side].nan_to_num(7)), "written beside"
    return results


def check(op: Any, sample: Any, backward: bool) -> bool:
    """Compares one sample; False where eager does not run it or it cannot be traced."""
    leaves, structure = tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    operands = [leaves[i].detach() for i in places]
    wanted = [leaves[i].requires_grad for i in places]
    if any(t.layout is not torch.strided for t in operands):
        return False

    def run(*given: torch.Tensor) -> list[torch.Tensor]:
        inner = list(leaves)
        with torch.set_grad_enabled(backward):
            given = tuple(t.detach().requires_grad_(w and backward) for t, w in zip(given, wanted, strict=True))
            for i, tensor in zip(places, given, strict=True):
                inner[i] = tensor
            first, args, kwargs = tree_unflatten(inner, structure)
            outs = [t for t in tree_flatten(op.op(first, *args, **kwargs))[0] if isinstance(t, torch.Tensor)]
            if not backward:
                return outs
            outs = [t for t in outs if t.requires_grad]
            inputs = [t for t in given if t.requires_grad]
            halves = [torch.ones_like(t) * 0.5 for t in outs]
            return [g for g in torch.autograd.grad(outs, inputs, halves, allow_unused=True) if g is not None]

    try:
        with torch.no_grad():
            expected = [t.detach().clone() for t in run(*operands)]
    except Exception:  # a sample that eager itself refuses
        return False
    if not expected:
        return False
    asked = [Operand(Spec(tuple(t.shape), tuple(t.stride()), t.dtype), "cpu") for t in operands]
    specs = [Spec(tuple(t.shape), tuple(t.stride()), t.dtype) for t in expected]
    kernel, why = trace(run, asked, specs, CPU)
    if why or -1 in kernel.results:
        return False
    for poison in (float("nan"), 123.0):
        with torch.no_grad():
            for results in execute(kernel, operands, poison):
                for mine, theirs in zip(results, expected, strict=True):
                    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)
    return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_samples_of_torch(backward: bool) -> None:
    compared = 0
    for op in CHOSEN:
        try:
            with warnings.catch_warnings(), quick_samples():
                warnings.simplefilter("ignore")
                samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=backward))
        except Exception:  # not for this type
            continue
        for sample in samples[:: max(1, len(samples) // 2)][:3]:
            try:
                compared += check(op, sample, backward)
            except AssertionError as error:
                raise AssertionError(f"{op.name} {op.variant_test_name}: {error}") from error
    assert compared > len(CHOSEN) // 2
