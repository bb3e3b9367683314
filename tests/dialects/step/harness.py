"""Runs single step ops against eager PyTorch: values, gradients, expansions and types.

An operand is a tensor, None (an absent optional one) or a list of tensors (a variadic one).
"""

from __future__ import annotations

import torch

from wholestep.dialects.step import StepBuilder, step, tensor_type
from wholestep.ir import TensorType, Value, add_function, finish_function, module, verify
from wholestep.runtime.executor import Executable
from wholestep.transforms.expand import expand_ops

torch.set_num_threads(1)

TIGHT = {torch.float64: dict(rtol=1e-9, atol=1e-11), torch.float32: dict(rtol=2e-4, atol=2e-5)}


def flat(operands):
    """The tensors among the operands, in order."""
    out = []
    for group in operands:
        out += group if isinstance(group, list) else [] if group is None else [group]
    return out


def regroup(operands, values):
    """`values`, one per tensor of the operands, in the operands' own grouping."""
    rest = iter(values)
    return [
        [next(rest) for _ in group] if isinstance(group, list) else None if group is None else next(rest)
        for group in operands
    ]


def run(tensors, body, expanded=False):
    """Builds a function of the tensors whose results `body(b, *values)` gives, runs it, returns tensors by result.

    With `expanded` every op that has an expansion is replaced by it, again and again.
    """
    root = module()
    function = add_function(root, "main", [tensor_type(t) for t in tensors])
    block = function.regions[0].block
    results = list(body(StepBuilder(block), *block.arguments))
    finish_function(function, [r for r in results if r is not None])
    verify(root)
    types = [r.type for r in results if r is not None]
    while expanded:
        pending = [op for op in block if getattr(op.definition, "expand", None) is not None]
        for op in pending:
            expand_ops([op])
        verify(root)
        expanded = bool(pending)
    before = [t.clone() for t in tensors]
    computed = Executable(function)(tensors)
    for old, new in zip(before, tensors, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True, msg="an operand was changed")
    for type, tensor in zip(types, computed, strict=True):
        assert tensor_type(tensor) is type, f"inferred {type}, computed {tensor_type(tensor)}"
    out = iter(computed)
    return [None if r is None else next(out) for r in results]


def build(b, name, operands, attributes):
    """One op as an Op."""
    return step.ops[name].build(b, *operands, **attributes)


def forward(name, operands, expanded=False, **attributes):
    """All results of one op."""
    tensors = flat(operands)
    return run(tensors, lambda b, *values: build(b, name, regroup(operands, values), attributes).results, expanded)


def gradients(name, operands, cotangents, expanded=False, only=None, **attributes):
    """Gradient per tensor operand by the op's derivative rule, None where it gives none.

    `cotangents` has a tensor or None per result. `only` leaves all but one gradient unused.
    """
    tensors, given = flat(operands), [c for c in cotangents if c is not None]

    def body(b, *values):
        op = build(b, name, regroup(operands, values[: len(tensors)]), attributes)
        rest = iter(values[len(tensors) :])
        incoming = [None if c is None else next(rest) for c in cotangents]
        grads = list(op.definition.derivative(b, op, *incoming))
        assert len(grads) == len(tensors), f"{len(grads)} gradients for {len(tensors)} operands"
        for value, grad in zip(op.operands, grads, strict=True):
            assert grad is None or isinstance(grad, Value)
            assert grad is None or grad.type is value.type, f"gradient {grad.type} of a {value.type}"
        return [g if only is None or i == only else None for i, g in enumerate(grads)]

    return run([*tensors, *given], body, expanded)


def as_tuple(x):
    return tuple(x) if isinstance(x, list | tuple) else (x,)


def close(actual, expected, dtype, what):
    bounds = TIGHT.get(dtype, dict(rtol=4e-2, atol=4e-2))
    torch.testing.assert_close(
        actual, expected, equal_nan=True, **bounds, msg=lambda m: f"{what}: {m}", check_stride=False
    )


def converted(operands, dtype):
    """Operands with every float64 tensor in another float type."""

    def one(t):
        return t.to(dtype) if isinstance(t, torch.Tensor) and t.dtype is torch.float64 else t

    return [[one(t) for t in g] if isinstance(g, list) else one(g) for g in operands]


def check(name, operands, reference, differentiate=True, dtypes=(torch.float64, torch.float32), exact="", **attributes):
    """Compares an op with an eager function of the same operands: values, gradients, and both through the expansion.

    `reference(*operands)` gives the leading results; further results of the op are left unchecked. `exact` demands
    bitwise equality in float32, of "values" or of "all" (gradients too).
    """
    assert exact in ("", "values", "all")
    for dtype in dtypes:
        _check(name, converted(operands, dtype), reference, differentiate, dtype, exact, attributes)


def _check(name, operands, reference, differentiate, dtype, exact, attributes):
    leaves = [t.clone().requires_grad_(t.is_floating_point() and differentiate) for t in flat(operands)]
    expected = as_tuple(reference(*regroup(operands, leaves)))
    computed = forward(name, operands, **attributes)
    for i, (got, want) in enumerate(zip(computed, expected, strict=False)):
        close(got, want.detach(), dtype, f"result {i}")
        if exact and dtype is torch.float32:
            torch.testing.assert_close(
                got, want.detach(), rtol=0, atol=0, equal_nan=True, msg=f"result {i} not bitwise"
            )
    has_expansion = getattr(step.ops[name], "expand", None) is not None
    if has_expansion:
        for i, (got, want) in enumerate(
            zip(forward(name, operands, expanded=True, **attributes), computed, strict=True)
        ):
            close(got, want, dtype, f"result {i} of the expansion")
    if not differentiate:
        return
    torch.manual_seed(7)
    cotangents = [torch.randn_like(y) if y.is_floating_point() and y.requires_grad else None for y in expected]
    pairs = [(y, c) for y, c in zip(expected, cotangents, strict=True) if c is not None]
    wanted = [t for t in leaves if t.requires_grad]
    truth = torch.autograd.grad([y for y, _ in pairs], wanted, [c for _, c in pairs], allow_unused=True)
    by_leaf = iter(truth)
    truth = [next(by_leaf) if t.requires_grad else None for t in leaves]
    cotangents += [None] * (len(computed) - len(cotangents))
    for expanded in (False, True):
        got = gradients(name, operands, cotangents, expanded, **attributes)
        how = " through expansions" if expanded else ""
        for i, (mine, true) in enumerate(zip(got, truth, strict=True)):
            if true is None:
                assert mine is None or leaves[i].requires_grad, f"operand {i} should have no gradient"
                continue
            assert mine is not None, f"operand {i} has no gradient"
            close(mine, true, dtype, f"gradient of operand {i}{how}")
            if exact == "all" and dtype is torch.float32 and not expanded:
                torch.testing.assert_close(mine, true, rtol=0, atol=0, equal_nan=True, msg=f"gradient {i} not bitwise")
    for i, true in enumerate(truth):
        if true is not None and len(wanted) > 1:
            alone = gradients(name, operands, cotangents, only=i, **attributes)[i]
            close(alone, true, dtype, f"gradient of operand {i} alone")


def randn(*shape, seed=0):
    """Reproducible float64 numbers."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1000 * len(shape)))


def randint(high, *shape, seed=0):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def result_types(name, operands, **attributes):
    """The types the op infers for these operands."""
    seen: list[TensorType] = []

    def body(b, *values):
        op = build(b, name, regroup(operands, values), attributes)
        seen.extend(r.type for r in op.results)
        return op.results

    run(flat(operands), body)
    return seen
