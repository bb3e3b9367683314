"""Fused updates against torch.optim with fused=True, and against the ordinary expansion of the same update."""

from __future__ import annotations

import pytest
import torch

from wholestep.dialects.step import step, tensor_type
from wholestep.errors import VerifyError
from wholestep.ir import F32
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.verify import verify
from wholestep.runtime.executor import Executable
from wholestep.torch_private import FakeTensorMode, schema_of
from wholestep.transforms.expand import expanded

from .harness import StepBuilder, forward

NUMBERS = ("step", "lr", "beta1", "beta2", "eps", "weight_decay", "momentum", "dampening", "fresh")


def tensors(*names, shape=(5, 3), dtype=torch.float32):
    out = {}
    for seed, name in enumerate(names):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        out[name] = (x.abs() if "sq" in name else x).to(dtype)
    return out


def program(name, operands, attributes):
    """A function of one update of optimizers.py."""
    root = module()
    given = [t for t in operands.values() if t is not None]
    function = add_function(root, "main", [tensor_type(t) for t in given])
    block = function.regions[0].block
    rest = iter(block.arguments)
    values = [None if operands.get(f.name) is None else next(rest) for f in step.ops[name].operand_fields]
    op = step.ops[name].build(StepBuilder(block), *values, **attributes)
    finish_function(function, op.results)
    verify(root)
    return function, given


def both_ways(name, operands, **attributes):
    """Results through the ordinary expansion and through the fused op, and the names of the latter's ops."""
    operands = {f.name: operands.get(f.name) for f in step.ops[name].operand_fields}
    function, given = program(name, operands, attributes)
    fused = expanded(function, "cuda")
    names = [op.name for op in fused.regions[0].block]
    numbers = [i for i, (n, t) in enumerate(n for n in operands.items() if n[1] is not None) if n in NUMBERS]
    plain = Executable(function, numbers=numbers)(given)
    return plain, Executable(fused, numbers=numbers)(given), names


def number(value, dtype=torch.float64):
    return torch.tensor(value, dtype=dtype)


def adam_operands(amsgrad=False, dtype=torch.float32, decay=0.1):
    names = ("parameter", "gradient", "exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else []))
    hyper = dict(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=decay)
    operands = tensors(*names, dtype=dtype) | {k: number(v) for k, v in hyper.items()}
    return operands | {"step": number(3.0, torch.float32)}


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam(decoupled, amsgrad, maximize, decay):
    operands = adam_operands(amsgrad, decay=decay)
    plain, fused, names = both_ways("adam", operands, decoupled=decoupled, maximize=maximize)
    name = "step.fused_adamw" if decoupled else "step.fused_adam"
    assert names.count(name) == 1 and not {"step.lerp", "step.addcdiv", "step.sqrt"} & set(names)
    for mine, want in zip(fused, plain, strict=True):
        torch.testing.assert_close(mine, want, rtol=2e-6, atol=1e-7)
    eager = torch_adam(operands, decoupled, amsgrad, maximize)
    for mine, want in zip(fused, eager, strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-6, atol=1e-7)


def torch_adam(operands, decoupled, amsgrad, maximize):
    """The same update by torch.optim with fused=True: parameter, step and states."""
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    parameter = torch.nn.Parameter(operands["parameter"].clone())
    options = {k: float(operands[k]) for k in ("lr", "eps", "weight_decay")}
    betas = (float(operands["beta1"]), float(operands["beta2"]))
    optimizer = kind([parameter], betas=betas, amsgrad=amsgrad, maximize=maximize, fused=True, **options)
    names = ("step", "exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else []))
    optimizer.state[parameter] = {n: operands[n].clone() for n in names}
    parameter.grad = operands["gradient"].clone()
    optimizer.step()
    return [parameter.detach(), *(optimizer.state[parameter][n] for n in names)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adam_in_16_bits(dtype):
    operands = adam_operands(dtype=dtype)
    _, fused, _ = both_ways("adam", operands, decoupled=True)
    for mine, want in zip(fused, torch_adam(operands, True, False, False), strict=True):
        assert torch.equal(mine, want)


@pytest.mark.parametrize("momentum", [None, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dampening", [0.0, 0.3])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_sgd(momentum, nesterov, dampening, decay):
    """Three updates from a fresh buffer, against torch.optim and the ordinary expansion."""
    if nesterov and (momentum is None or dampening):
        with pytest.raises(ValueError, match="Nesterov"):
            torch.optim.SGD([torch.zeros(1)], lr=1.0, momentum=momentum or 0, dampening=dampening, nesterov=True)
        return
    operands = tensors("parameter", "gradient") | {"lr": number(0.1), "weight_decay": number(decay)}
    if momentum is not None:
        operands |= {"momentum_buffer": torch.zeros(5, 3), "momentum": number(momentum)}
        operands |= {"dampening": number(dampening), "fresh": number(1.0)}
    parameter = torch.nn.Parameter(operands["parameter"].clone())
    options = dict(momentum=momentum or 0.0, dampening=dampening if momentum else 0.0, nesterov=nesterov)
    optimizer = torch.optim.SGD([parameter], lr=0.1, weight_decay=decay, fused=True, **options)
    for count in range(3):
        plain, fused, names = both_ways("sgd", operands, nesterov=nesterov)
        assert names.count("step.fused_sgd") == 1 and "step.axpy" not in names
        parameter.grad = operands["gradient"].clone()
        optimizer.step()
        for mine, want in zip(fused, plain, strict=True):
            torch.testing.assert_close(mine, want, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(fused[0], parameter.detach(), rtol=1e-6, atol=1e-6)
        operands["parameter"] = fused[0]
        operands["gradient"] = torch.randn(5, 3, generator=torch.Generator().manual_seed(count + 7))
        if momentum is not None:
            torch.testing.assert_close(fused[1], optimizer.state[parameter]["momentum_buffer"], rtol=1e-6, atol=1e-6)
            operands |= {"momentum_buffer": fused[1], "fresh": number(0.0)}


def test_gradient_of_another_element_type():
    """A bf16 gradient of an f32 parameter is cast first, as in the ordinary expansion."""
    operands = adam_operands()
    operands["gradient"] = operands["gradient"].bfloat16()
    plain, fused, names = both_ways("adam", operands, decoupled=True)
    assert "step.fused_adamw" in names and "step.cast" in names
    for mine, want in zip(fused, plain, strict=True):
        torch.testing.assert_close(mine, want, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("changed", [dict(parameter=torch.float64), dict(exp_avg=torch.bfloat16)])
def test_what_does_not_fit_expands_as_ever(changed):
    operands = adam_operands()
    for name in operands if "parameter" in changed else changed:
        if operands[name].dim():
            operands[name] = operands[name].to(next(iter(changed.values())))
    plain, other, names = both_ways("adam", operands, decoupled=True)
    assert not [n for n in names if "fused" in n]
    for mine, want in zip(other, plain, strict=True):
        assert torch.equal(mine, want)


def numbers_of(name, **hyper):
    """Operands of a fused op itself."""
    fields = [f.name for f in step.ops[name].operand_fields]
    return [hyper.get(f) for f in fields]


@pytest.mark.parametrize("layout", ["transposed", "channels", "states"])
def test_layouts(layout):
    """The kernels want one layout of all tensors; gradients and states that lie otherwise are brought to it."""
    hyper = dict(new_step=torch.tensor(4.0), lr=torch.tensor(0.01), beta1=number(0.9), beta2=number(0.99))
    hyper |= dict(weight_decay=number(0.1), eps=number(1e-8))
    given = tensors("parameter", "gradient", "exp_avg", "exp_avg_sq", shape=(4, 6, 1, 1))
    want = forward("fused_adamw", numbers_of("fused_adamw", **given, **hyper))
    other = dict(given)
    if layout == "transposed":
        other["gradient"] = given["gradient"].transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "channels":
        other["gradient"] = given["gradient"].contiguous(memory_format=torch.channels_last)
        other["parameter"] = given["parameter"].contiguous(memory_format=torch.channels_last)
    else:
        other["exp_avg_sq"] = given["exp_avg_sq"].transpose(0, 1).contiguous().transpose(0, 1)
    for mine, true in zip(forward("fused_adamw", numbers_of("fused_adamw", **other, **hyper)), want, strict=True):
        assert torch.equal(mine, true)


def test_on_fake_cuda_tensors():
    """The call is known without a GPU, and its schema says that the gradient is only read."""
    shape = (4, 6)
    fields = [f for f in step.ops["fused_adamw"].operand_fields if f.name != "max_exp_avg_sq"]
    sizes = [() if f.type.rank == 0 else shape for f in fields]
    elements = [torch.float32 if f.type.rank is None else torch.float64 for f in fields]
    elements = [torch.float32 if f.name in ("lr", "new_step") else e for f, e in zip(fields, elements, strict=True)]
    given = [torch.empty(s, dtype=e) for s, e in zip(sizes, elements, strict=True)]
    block = add_function(module(), "main", [tensor_type(t) for t in given]).regions[0].block
    values = dict(zip((f.name for f in fields), block.arguments, strict=True))
    names = [f.name for f in step.ops["fused_adamw"].operand_fields]
    op = step.ops["fused_adamw"].build(StepBuilder(block), *(values.get(n) for n in names))
    with FakeTensorMode():
        fakes = [0.5 if f.name in op.definition.floats else t for f, t in zip(fields, given, strict=True)]
        fakes = [t if type(t) is float else torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in fakes]
        results = op.definition.evaluate(op)(*fakes)
    assert [tuple(r.shape) for r in results] == [shape] * 3 and {r.device.type for r in results} == {"cuda"}
    for operator in (torch.ops.wholestep.fused_adam_.default, torch.ops.wholestep.fused_sgd_.default):
        written = {a.name for a in schema_of(operator).arguments if a.is_write}
        assert "parameter" in written and "gradient" not in written


def test_the_verifier_refuses_mixed_types():
    hyper = dict(new_step=torch.tensor(4.0), lr=torch.tensor(0.01), beta1=number(0.9), beta2=number(0.99))
    hyper |= dict(weight_decay=number(0.1), eps=number(1e-8))
    given = tensors("parameter", "gradient", "exp_avg", "exp_avg_sq")
    with pytest.raises(VerifyError, match="lr must be f32"):
        forward("fused_adamw", numbers_of("fused_adamw", **given, **(hyper | {"lr": number(0.01)})))
    with pytest.raises(VerifyError, match="one element type"):
        forward("fused_adamw", numbers_of("fused_adamw", **(given | {"gradient": given["gradient"].half()}), **hyper))
    with pytest.raises(VerifyError, match="come together"):
        sgd = dict(parameter=given["parameter"], gradient=given["gradient"], lr=torch.tensor(0.1))
        forward("fused_sgd", numbers_of("fused_sgd", **sgd, weight_decay=number(0.0), momentum=number(0.9)))


def test_declared_numbers_are_operands():
    for name in ("fused_adam", "fused_adamw", "fused_sgd"):
        definition = step.ops[name]
        fields = {f.name for f in definition.operand_fields}
        assert set(definition.floats) | set(definition.device_numbers) <= fields
        numbers = {f.name for f in definition.operand_fields if f.type.rank == 0}
        assert numbers == set(definition.floats) | set(definition.device_numbers)
        assert set(definition.device_numbers.values()) == {F32}
