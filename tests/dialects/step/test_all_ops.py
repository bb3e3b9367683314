"""What holds for every op of the dialect: inferred types are true, expansions agree, gradients are autograd's."""

from __future__ import annotations

import pytest
import torch

from wholestep.dialects import context
from wholestep.dialects.step import Roles, StepBuilder, step, tensor_type
from wholestep.ir import TensorType, add_function, finish_function, module, parse, print_module, verify
from wholestep.runtime.executor import Executable
from wholestep.transforms.expand import expand_ops

from .harness import close, flat, gradients, regroup
from .samples import SAMPLES

CASES = [pytest.param(name, *case, id=f"{name}-{i}") for name, cases in SAMPLES.items() for i, case in enumerate(cases)]


def build(name, operands, attributes):
    """A module with a function of one op, and the op."""
    root = module()
    tensors = flat(operands)
    function = add_function(root, "main", [tensor_type(t) for t in tensors])
    block = function.regions[0].block
    op = step.ops[name].build(StepBuilder(block), *regroup(operands, block.arguments), **attributes)
    finish_function(function, op.results)
    return root, function, op


def test_every_op_has_a_sample():
    assert sorted(set(step.ops) - set(SAMPLES)) == ["fused", "micro_batches"]  # they call functions


def test_every_op_is_documented():
    for name, definition in step.ops.items():
        assert (definition.__doc__ or "").strip(), f"step.{name} has no docstring"
        assert definition.__doc__ != definition.__mro__[1].__doc__


@pytest.mark.parametrize(("name", "operands", "attributes"), CASES)
def test_types_expansion_and_text(name, operands, attributes):
    tensors = flat(operands)
    root, function, op = build(name, operands, attributes)
    verify(root)
    computed = Executable(function)(tensors)
    for result, tensor in zip(op.results, computed, strict=True):
        assert tensor_type(tensor) is result.type
    text = print_module(root)
    assert print_module(parse(text, context())) == text
    if op.definition.evaluate is not None and op.definition.expand is not None:
        expand_ops([op])
        verify(root)
        for mine, want in zip(Executable(function)(tensors), computed, strict=True):
            close(mine, want, torch.float64 if mine.dtype is torch.float64 else mine.dtype, "expansion")


def turned(x: torch.Tensor) -> torch.Tensor:
    """x with its first dimension innermost in memory."""
    order = list(range(x.dim()))[::-1]
    return x.permute(order).contiguous().permute(order)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """x with its second dimension innermost in memory, where it has more than two."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if x.dim() > 2 else x


def with_gaps(x: torch.Tensor) -> torch.Tensor:
    """x as every other element of a longer tensor."""
    return torch.stack([x, x.flip(0) if x.dim() else x], -1)[..., 0]


@pytest.mark.parametrize(("name", "operands", "attributes"), CASES)
def test_results_do_not_depend_on_how_operands_lie(name, operands, attributes):
    """Kernels of ours write in any order, and ATen's read what they wrote."""
    tensors = flat(operands)
    _, function, _ = build(name, operands, attributes)
    wanted = [t.clone() for t in Executable(function)(tensors)]
    several = [i for i, t in enumerate(tensors) if t.dim() > 1]
    ways = [[turned(t) for t in tensors], [with_gaps(t) for t in tensors]]
    ways += [[turned(t) if i == n else t for i, t in enumerate(tensors)] for n in several if len(several) > 1]
    for way in ways:
        for mine, want in zip(
            Executable(function)([t.clone() if t.dim() == 0 else t for t in way]), wanted, strict=True
        ):
            close(mine, want, torch.float64 if mine.dtype is torch.float64 else mine.dtype, "otherwise laid out")


@pytest.mark.parametrize(("name", "operands", "attributes"), CASES)
def test_flops_bytes_roles_precision(name, operands, attributes):
    _, _, op = build(name, operands, attributes)
    definition = op.definition
    flops = definition.flops(op)
    assert type(flops) is int and flops >= 0
    read, written = definition.bytes(op)
    assert read >= 0 and written == sum(r.type.bytes for r in op.results)
    assert definition.precision in ("low", "high", "follow")
    roles = definition.roles(op)
    if roles is not None:
        check_roles(roles, op)


def check_roles(roles: Roles, op) -> None:
    """One label per dimension; a label that may be split has one size everywhere."""
    assert len(roles.operands) == len(op.operands) and len(roles.results) == len(op.results)
    sizes: dict[str, int] = {}
    for spec, value in zip((*roles.operands, *roles.results), (*op.operands, *op.results), strict=True):
        assert isinstance(value.type, TensorType) and len(spec) == value.type.rank, f"{spec!r} for {value.type}"
        for label, size in zip(spec, value.type.shape, strict=True):
            if label == " ":
                assert size == 1
            elif label not in roles.whole:
                assert sizes.setdefault(label, size) == size, f"label {label} has two sizes"


# operands that eager does not differentiate either (attention's mask has a test of its own)
FIXED = {
    "batch_norm": ("running_mean", "running_var"),
    "cross_entropy": ("weight",),
    "nll_loss": ("weight",),
    "attention": ("mask",),
}

DIFFERENTIABLE = [
    case
    for case in CASES
    if step.ops[case.values[0]].derivative is not None and any(t.is_floating_point() for t in flat(case.values[1]))
]


@pytest.mark.parametrize(("name", "operands", "attributes"), DIFFERENTIABLE)
def test_derivative_is_autograd_of_evaluate(name, operands, attributes):
    _, _, op = build(name, operands, attributes)
    fixed = [getattr(op, field) for field in FIXED.get(name, ())]
    leaves = [
        t.clone().requires_grad_(t.is_floating_point() and value not in fixed)
        for t, value in zip(flat(operands), op.operands, strict=True)
    ]
    results = op.definition.evaluate(op)(*leaves)
    results = results if isinstance(results, tuple | list) else [results]
    # further results are statistics kept for backward; their gradients are tested where they have one
    main = results[0]
    if not (main.is_floating_point() and main.requires_grad):
        pytest.skip("no gradient")
    torch.manual_seed(1)
    cotangent = torch.randn_like(main)
    wanted = [t for t in leaves if t.requires_grad]
    truth = iter(torch.autograd.grad(main, wanted, cotangent, allow_unused=True))
    truth = [next(truth) if t.requires_grad else None for t in leaves]
    for expanded in (False, True):
        got = gradients(name, operands, [cotangent] + [None] * (len(op.results) - 1), expanded, **attributes)
        for i, (mine, true) in enumerate(zip(got, truth, strict=True)):
            if true is not None and (mine is not None or bool(true.abs().max() > 0)):
                assert mine is not None, f"operand {i} has no gradient"
                close(mine, true, mine.dtype, f"gradient of operand {i}")


BINARY = [name for name, d in step.ops.items() if d.pointwise and len(d.operand_fields) == 2]


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("shape", [(3,), ()])
def test_a_number_on_either_side(name, side, shape):
    """A 0-d constant reaches ATen as a number; the result must be that of the tensor it stands for."""
    if name.endswith("_grad") and shape:
        pytest.skip("the gradient of an activation takes tensors of one shape")
    integers = name.startswith("bit_")
    x = torch.arange(1, 4) if integers else torch.tensor([0.3, 1.5, 2.0]).double()
    x, number = (x if shape else x[1]), 2 if integers else 1.5
    root = module()
    function = add_function(root, "main", [tensor_type(x)])
    block = function.regions[0].block
    b = StepBuilder(block)
    operands = [block.arguments[0], number] if side else [number, block.arguments[0]]
    result = getattr(b, name)(*operands)
    finish_function(function, [result])
    verify(root)
    (mine,) = Executable(function)([x])
    assert tensor_type(mine) is result.type
    constant = torch.tensor(number, dtype=x.dtype)
    pair = [x, constant] if side else [constant, x]
    torch.testing.assert_close(mine, result.op.definition.evaluate(result.op)(*pair))
