"""The loop dialect: what its ops refuse, what its reference computes, and that stock mlir-opt takes its kernels."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dialects.step.harness import flat, regroup
from tests.dialects.step.samples import SAMPLES
from wholestep.dialects import context, reference
from wholestep.dialects.loop import FUNCTIONS, REDUCTIONS, Apply, Constant, Index, Load, Reduce, Space, Store
from wholestep.dialects.loop.reference import run
from wholestep.dialects.step import StepBuilder, step, tensor_type
from wholestep.errors import VerifyError
from wholestep.ir import (
    BF16,
    BOOL,
    F32,
    F64,
    I64,
    Builder,
    TensorType,
    add_function,
    finish_function,
    module,
    parse,
    print_module,
    structural_hash,
    verify,
)
from wholestep.ir.core import Op
from wholestep.runtime.executor import Executable
from wholestep.transforms.loops import NotLoops, lowered

from .programs import Drawn


def kernel(types: list[TensorType], build: Any) -> Op:
    """A kernel by hand: `build(b, *arguments)` writes it."""
    function = add_function(module(), "k", types)
    block = function.regions[0].block
    build(Builder(block), *block.arguments)
    finish_function(function, [])
    return function


def root_of(function: Op) -> Op:
    return function.parent.parent.parent


VECTOR, MATRIX = TensorType((6,), F64), TensorType((2, 3), F64)


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda b, x, m: Load.build(b, m, [], map=[[1, 0]]), "1 rows for a tensor of rank 2"),
        (lambda b, x, m: Load.build(b, m, [], map=[[1, 0], [1, 0, 0]]), "differ in length"),
        (lambda b, x, m: Load.build(b, x, [], map=[[1, 0]], dynamic=(0,)), "dynamic must name one dimension"),
        (lambda b, x, m: Load.build(b, x, [Index.build(b, dim=0).result], map=[[1, 0]], dynamic=(1,)), "dynamic must"),
        (lambda b, x, m: Store.build(b, Constant.build(b, value=1.0, dtype=F64).result, m, [], map=[]), "0 rows"),
        (lambda b, x, m: Apply.build(b, [Index.build(b, dim=0).result], fn="add", dtype=I64), "add takes 2 numbers"),
        (
            lambda b, x, m: Apply.build(
                b,
                [Constant.build(b, value=v, dtype=t).result for v, t in ((True, BOOL), (1.0, F32), (1.0, BF16))],
                fn="select",
                dtype=F32,
            ),
            "select of f32 and bf16",
        ),
    ],
)
def test_refused(build: Any, why: str) -> None:
    def written(b: Builder, x: Any, m: Any) -> None:
        Space.build(b, sizes=(6,))
        build(b, x, m)

    with pytest.raises(VerifyError, match=why):
        verify(root_of(kernel([VECTOR, MATRIX], written)))


def test_guarded_loads_give_zero_outside() -> None:
    def shifted(b: Builder, x: Any, y: Any) -> None:
        Space.build(b, sizes=(6,))
        Store.build(b, Load.build(b, x, [], map=[[1, -2]], guarded=True).result, y, [], map=[[1, 0]])

    x, y = torch.arange(6.0).double() + 1, torch.full((6,), 9.0).double()
    run(kernel([VECTOR, VECTOR], shifted), [x], [y])
    assert y.tolist() == [0, 0, 1, 2, 3, 4]


def test_an_unguarded_load_must_stay_inside() -> None:
    def shifted(b: Builder, x: Any, y: Any) -> None:
        Space.build(b, sizes=(6,))
        Store.build(b, Load.build(b, x, [], map=[[1, -2]]).result, y, [], map=[[1, 0]])

    with pytest.raises(AssertionError, match="leaves its tensor"):
        run(kernel([VECTOR, VECTOR], shifted), [torch.zeros(6).double()], [torch.zeros(6).double()])


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_reductions_of_the_reference(kind: str) -> None:
    whole = kind in ("or", "and")
    type = TensorType((2, 3, 4), BOOL if whole else F64)
    out = TensorType((3,), type.element)

    def reduced(b: Builder, x: Any, y: Any) -> None:
        Space.build(b, sizes=(2, 3, 4))
        read = Load.build(b, x, [], map=[[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]).result
        made = Reduce.build(b, read, kind=kind, dims=(0, 2), dtype=type.element).result
        Store.build(b, made, y, [], map=[[0, 1, 0, 0]])

    torch.manual_seed(0)
    x = torch.randn(2, 3, 4).double()
    x = x > 1 if whole else x
    y = torch.zeros(3, dtype=x.dtype)
    run(kernel([type, out], reduced), [x], [y])
    rows = x.transpose(0, 1).reshape(3, 8)
    by_name = {"or": rows.any, "and": rows.all, "sum": rows.sum, "max": rows.amax, "min": rows.amin, "prod": rows.prod}
    torch.testing.assert_close(y, by_name[kind](1))


def test_every_function_is_an_op_or_a_rounding_of_one() -> None:
    pointwise = {n for n, d in step.ops.items() if d.pointwise}
    assert set(FUNCTIONS) - pointwise == {"floor_div", "trunc_div", "fmod", "rounded"}


def test_random_numbers_are_those_of_the_step_dialect() -> None:
    for shape in ((5,), (3, 7), (2, 2, 5)):
        function = add_function(module(), "main", [TensorType((3,), I64)])
        b = StepBuilder(function.regions[0].block)
        (key,) = function.regions[0].block.arguments
        type = TensorType(shape, F32)
        drawn = b.random(key, distribution="uniform", stream=5, type=type)
        turned = b.transpose(drawn, order=tuple(reversed(range(len(shape)))))
        finish_function(function, [drawn, turned])
        given = torch.tensor([11, 4, 1])
        found = [torch.zeros(shape).double(), torch.zeros(shape[::-1]).double()]
        run(lowered(function), [given], found)
        for mine, true in zip(found, Executable(function)([given]), strict=True):
            assert torch.equal(mine.float(), true)


def kernels() -> list[Op]:
    """Kernels of every kind: of all samples, and of random programs."""
    found = []
    for name, cases in SAMPLES.items():
        for operands, attributes in cases:
            function = add_function(module(), f"{name}_{len(found)}", [tensor_type(t) for t in flat(operands)])
            block = function.regions[0].block
            op = step.ops[name].build(StepBuilder(block), *regroup(operands, block.arguments), **attributes)
            finish_function(function, op.results)
            found.append(function)
    for seed in range(60):
        function = Drawn(seed).function
        function.attributes["sym_name"] = f"drawn_{seed}"
        found.append(function)
    made = []
    for function in found:
        try:
            made.append(lowered(function))
        except NotLoops:
            continue
    return made


def test_mlir_opt_takes_every_kernel(mlir_opt: str, tmp_path: Path) -> None:
    root = module()
    for made in kernels():
        made.detach()
        root.regions[0].block.append(made)
    verify(root)
    assert len(list(root.regions[0].block)) > 250
    irdl, program = tmp_path / "loop.irdl.mlir", tmp_path / "all.mlir"
    irdl.write_text(reference.pages()["docs/dialects/loop.irdl.mlir"])
    program.write_text(print_module(root))
    command = [mlir_opt, f"--irdl-file={irdl}", "--mlir-print-op-generic", str(program)]
    verdict = subprocess.run(command, capture_output=True, text=True, check=False)
    assert verdict.returncode == 0, verdict.stderr[:2000]
    again = parse(verdict.stdout, context())
    verify(again)
    assert structural_hash(again) == structural_hash(root)
