"""Providers: who is known and who competes, what a region says of itself, and a provider that takes ops for itself."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.dialects.loop.provider import LoopReference, registered
from tests.runtime.runs import data, fresh, sgd
from wholestep.backends import cpp, providers
from wholestep.backends.generated import kernel_of, region_of
from wholestep.backends.kernels import Spec
from wholestep.backends.made_up import neutral_inputs
from wholestep.backends.matrices import one_product
from wholestep.backends.providers import (
    Aten,
    Inductor,
    Launcher,
    Offer,
    Progress,
    Provider,
    Region,
    Triton,
    distinct_bytes,
    known_providers,
    op_by_op,
    providers_for,
    register_provider,
)
from wholestep.dialects.step import StepBuilder
from wholestep.errors import InputError
from wholestep.ir import F32, I64, TensorType, add_function, finish_function, module
from wholestep.ir.core import Op
from wholestep.transforms.loops import lowered

CPU = torch.device("cpu")


def region(types: list[TensorType], build: Any, specs: list[Spec] | None = None, phase: str = "") -> Region:
    function = add_function(module(), "region", types)
    b = StepBuilder(function.regions[0].block)
    b.phase = phase
    made = build(b, *function.regions[0].block.arguments)
    finish_function(function, made if isinstance(made, list) else [made])
    dtype = {F32: torch.float32, I64: torch.int64}
    given = specs or [Spec(t.shape, torch.empty(t.shape).stride(), dtype[t.element]) for t in types]
    return region_of(function, lowered(function), given, CPU)


MATRIX = TensorType((3, 4), F32)


def test_who_competes() -> None:
    assert {"aten", "triton", "cpp", "inductor"} <= set(known_providers())
    on_cpu = [p.name for p in providers_for(CPU, None)]
    assert "aten" in on_cpu and "triton" not in on_cpu and "inductor" not in on_cpu
    on_gpu = [p.name for p in providers_for(torch.device("cuda"), None)]
    assert "triton" in on_gpu and "cpp" not in on_gpu
    assert [p.name for p in providers_for(CPU, ["inductor", "aten", "triton"])] == ["inductor", "aten"]


def test_the_libraries_below_a_provider_compete_with_it() -> None:
    def on_gpu(*names: str) -> list[str]:
        return [p.name for p in providers_for(torch.device("cuda"), names or None)]

    assert on_gpu("aten", "triton") == on_gpu() == ["aten", "cublas", "cudnn", "triton", "wgmma"]
    assert on_gpu("aten") == ["aten"]  # every op through PyTorch
    assert on_gpu("triton", "cudnn", "aten") == ["triton", "wgmma", "cudnn", "aten", "cublas"]
    assert on_gpu("triton", "inductor") == ["triton", "wgmma", "inductor"]


def test_providers_that_have_nothing_for_a_device_are_told() -> None:
    model = fresh(lambda: nn.Linear(4, 3))
    given = model, lambda m, x: m(x).sum(), sgd(model), (data(2, 4),)
    with pytest.warns(UserWarning, match=r"named \(aten, triton\) none has kernels for cpu: .* Try: .*cpp"):
        ws.compile(*given, providers=["aten", "triton"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ws.compile(*given, providers=["aten"])
        ws.compile(*given, providers=["triton"], level=1)


def test_an_unknown_name_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"no provider 'tritn'; known: aten, .*triton"):
        providers_for(CPU, ["aten", "tritn"])
    model = fresh(lambda: nn.Linear(4, 3))
    with pytest.raises(InputError, match="no provider 'tritn'"):
        ws.compile(model, lambda m, x: m(x).sum(), sgd(model), (data(2, 4),), providers=["tritn"])


def test_registering_and_forgetting() -> None:
    with registered(LoopReference):
        assert "loops" in known_providers()
    assert "loops" not in known_providers()
    with pytest.raises(ValueError, match="no name for a provider"):
        register_provider(type("Bad", (LoopReference,), {"name": "two words"}))


def test_keys_are_equal_for_equal_work_alone() -> None:
    def build(b: StepBuilder, x: Any) -> Any:
        return b.exp(b.tanh(x))

    one = region([MATRIX], build)
    assert region([MATRIX], build, phase="backward").key == one.key
    others = [
        region([TensorType((4, 3), F32)], build),
        region([MATRIX], lambda b, x: b.tanh(b.exp(x))),
        region([MATRIX], build, [Spec((3, 4), (1, 3), torch.float32)]),
        region([MATRIX], lambda b, x: [b.exp(b.tanh(x)), b.tanh(x)]),
    ]
    assert len({one.key, *(o.key for o in others)}) == 5


def test_bytes_count_each_element_once() -> None:
    assert distinct_bytes(Spec((3, 4), (0, 1), torch.float32)) == 16
    assert region([MATRIX, MATRIX], lambda b, x, y: b.add(x, y)).bytes == 3 * 48
    given = region([MATRIX, MATRIX], lambda b, x, y: b.add(x, y))
    assert Aten().estimate(given, 1e9) == pytest.approx(144e-9)


def test_a_dimension_that_the_largest_operand_lacks_stays_where_it_is() -> None:
    table, each = TensorType((64, 32), F32), TensorType((2, 1, 1), F32)
    assert region([table, each], lambda b, x, y: b.add(x, y)).results[0].strides == (64 * 32, 32, 1)
    turned = [Spec((64, 32), (1, 64), torch.float32), Spec((2, 1, 1), (1, 1, 1), torch.float32)]
    assert region([table, each], lambda b, x, y: b.add(x, y), turned).results[0].strides == (64 * 32, 1, 64)


def test_inputs_to_try_with_lie_as_said() -> None:
    specs = [Spec((3, 4), (1, 3), torch.float32), Spec((3, 1), (0, 0), torch.int64)]
    given = region(
        [MATRIX, TensorType((3, 1), I64)], lambda b, x, i: b.gather(x, b.broadcast(i, shape=(3, 4)), dim=1), specs
    )
    for positive in (False, True):
        x, index = neutral_inputs(given, positive)
        assert x.stride() == (1, 3) and index.shape == (3, 1) and set(index.flatten().tolist()) <= {0, 1}
        assert not positive or bool((x > 0).all())
        op_by_op(given)(x, index)


@pytest.mark.parametrize(("shape", "rows"), [((7, 5), (7,)), ((2, 5, 3), (2, 3))])
def test_a_loss_is_tried_with_the_logsumexp_of_its_logits(shape: tuple[int, ...], rows: tuple[int, ...]) -> None:
    """ATen's gradient on CPUs makes it anew; kernels that read another one would be called wrong."""
    types = [TensorType(shape, F32), TensorType(rows, I64), TensorType(rows, F32), TensorType(rows, F32)]
    how: dict[str, Any] = dict(reduction="none", ignore_index=-100)
    given = region(types, lambda b, x, t, s, dy: b.cross_entropy_grad(dy, b.mul(x, 2.0), t, s, **how))
    inputs = neutral_inputs(given, False)
    torch.testing.assert_close(inputs[2], (2 * inputs[0]).logsumexp(1))
    expanded = region(types, lambda b, x, t, s, dy: b.sub(b.exp(b.sub(b.mul(x, 2.0), b.unsqueeze(s, 1))), 0.0))
    share = op_by_op(expanded)(*inputs)[0]
    share.scatter_add_(1, inputs[1].unsqueeze(1), torch.full(rows, -1.0).unsqueeze(1))
    torch.testing.assert_close(op_by_op(given)(*inputs)[0], share * inputs[3].unsqueeze(1))


def test_aten_as_a_launcher_writes_where_it_is_told() -> None:
    given = region([MATRIX], lambda b, x: [b.exp(x), b.sum(x, dims=(1,))])
    (offer,) = Aten().offers(given)
    run = Aten().build([offer])[offer.key]
    assert callable(run)
    x, y, s = data(3, 4), torch.zeros(3, 4), torch.zeros(3)
    run(x, y, s)
    assert torch.equal(y, x.exp())
    torch.testing.assert_close(s, x.sum(1))


def test_inductor_leaves_random_numbers_alone() -> None:
    drawn = region([TensorType((3,), I64)], lambda b, key: b.random(key, distribution="uniform", stream=0, type=MATRIX))
    assert Inductor().claims(drawn)
    assert not Inductor().claims(region([MATRIX], lambda b, x: b.exp(x)))


def test_inductor_compiles_more_regions_than_dynamo_has_room_for_in_one_piece_of_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # (g++ takes seconds for each)
    sizes = range(2, 14)
    offers = [o for n in sizes for o in Inductor().offers(region([TensorType((n, 4), F32)], lambda b, x: b.exp(x)))]
    built = Inductor().build(offers)
    for n, offer in zip(sizes, offers, strict=True):
        run, x, y = built[offer.key], data(n, 4), torch.zeros(n, 4)
        assert callable(run), run
        run(x, y)
        assert torch.equal(y, x.exp())


def broken_compiler(function: Any, **options: Any) -> Any:
    """In place of `torch.compile`, which compiles when it is called."""

    def run(*tensors: torch.Tensor) -> None:
        raise RuntimeError("no luck")

    return run


def test_what_inductor_cannot_compile_fails_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", broken_compiler)
    model, batch = fresh(lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))), (data(6, 4), data(6, 3))
    with pytest.warns(UserWarning):
        step = ws.compile(model, nn.MSELoss(), sgd(model), batch, providers=["aten", "inductor"], tune=False)
    assert "inductor" not in {launch.provider for launch in step.plan().launches}
    assert {e.why for e in step.report().kernels.excluded} == {"not built: RuntimeError: no luck"}
    step(*batch)


def test_inductor_is_not_tried_on_numbers_that_would_lead_outside_of_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", broken_compiler)
    for shift, tried in ((0, True), (5, False)):
        given = region(
            [MATRIX, TensorType((3, 4), I64)],
            lambda b, x, i, s=shift: b.gather(x, b.sub(i, s) if s else i, dim=1),
        )
        assert [isinstance(made, Exception) for made in Inductor().build(Inductor().offers(given)).values()] == [tried]


def test_an_undecided_kernel_refuses_to_run() -> None:
    given = region([MATRIX], lambda b, x: b.exp(x))
    kernel = kernel_of(given, None)
    with pytest.raises(RuntimeError, match="no provider was chosen"):
        kernel.steps[0].call(data(3, 4), torch.zeros(3, 4))


class Norms(Provider):
    """A library that has nothing but LayerNorm, forward: it wants every such op alone."""

    name = "norms"
    devices = ("cpu",)
    ran: list[tuple[int, ...]] = []

    def takes(self, op: Op) -> bool:
        return op.name == "step.layer_norm"

    def claims(self, region: Region) -> str:
        return "" if [op.name for op in region.ops] == ["step.layer_norm"] else "it is no LayerNorm"

    def offers(self, region: Region) -> list[Offer]:
        return [Offer("native", f"norms {region.key}", made=region)]

    def build(self, offers: Sequence[Offer], report: Progress | None = None) -> dict[str, Launcher | Exception]:
        return {o.key: self.launcher(o.made) for o in offers}

    def launcher(self, region: Region) -> Launcher:
        (op,) = region.ops

        def run(x: torch.Tensor, *rest: torch.Tensor) -> None:
            *weights, y, mean, rstd = rest
            weight, bias = weights if weights else (None, None)
            made = torch.native_layer_norm(x, x.shape[-op.trailing :], weight, bias, op.eps)
            for out, value in zip((y, mean, rstd), made, strict=True):
                out.copy_(value)
            Norms.ran.append(tuple(x.shape))

        return run


def test_a_provider_of_a_users_takes_ops_for_itself() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))

    def losses(**options: Any) -> tuple[list[float], ws.TrainStep]:
        model = fresh(net)
        batch = (data(6, 4), torch.arange(6) % 3)
        step = ws.compile(model, nn.functional.cross_entropy, sgd(model), batch, **options)
        return [float(step(*batch)) for _ in range(3)], step

    true, _ = losses()
    Norms.ran.clear()
    with registered(Norms, LoopReference):
        found, step = losses(providers=["aten", "norms", "loops"], tune=False)
        report = str(step.report())
    torch.testing.assert_close(found, true, rtol=1e-5, atol=1e-6)
    providers = [launch.provider for launch in step.plan().launches]
    assert providers.count("norms") == 1 and providers.count("loops") > 2
    assert Norms.ran.count((6, 8)) == 3
    assert "norms" in report


def test_without_a_compiler_aten_runs_everything_and_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp, "working_compiler", lambda: "none was found")
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="no C\\+\\+ kernels are generated") as told:
        batch = (torch.randn(3, 4), torch.randn(3, 2))
        step = ws.compile(model, nn.MSELoss(), optimizer, batch, providers=["aten", "cpp"])
    assert step.choices is None and {launch.provider for launch in step.plan().launches} <= {"aten", "host", "choose"}
    assert len({str(w.message) for w in told}) == 1


def test_without_triton_one_line_says_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    here, find = type("Here", (Triton,), {"name": "here", "devices": ("cpu",)}), importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "triton" else find(name, *a))
    model = fresh(lambda: nn.Linear(4, 3))
    with registered(here), pytest.warns(UserWarning, match="package triton is not installed.*: ATen runs") as told:
        step = ws.compile(model, lambda m, x: m(x).sum(), sgd(model), (data(2, 4),), providers=["aten", "here"])
    assert step.choices is None and len(told) == 1


MINE = """
from tests.backends.test_providers import Norms
from {package}kernels import kernel

class Mine(Norms):
    name = "mine"
"""


@pytest.mark.parametrize("package", ["", "mine_in_a_package."])
def test_files_that_a_provider_imports_are_part_of_its_version(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its package or from its folder; others are not."""
    names = ["provider", "kernels", "helpers", "stranger"]
    folder = tmp_path / package.rstrip(".")
    folder.mkdir(exist_ok=True)
    texts = [MINE.format(package=package), f"import {package}helpers\ndef kernel(): ...\n", "", ""]
    for name, text in zip(names, texts, strict=True):
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in (package.rstrip(".") or "provider", *(package + n for n in names)):  # (which are imported, then gone)
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    mine = importlib.import_module(f"{package}provider").Mine
    found = [mine().version]
    for name in names:
        with (folder / f"{name}.py").open("a") as file:
            file.write("pass\n")
        found.append(mine().version)
    assert len(set(found)) == 4 and found[-2] == found[-1] != ""


def test_code_that_is_not_python_is_part_of_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "version_of", lambda files: " ".join(file.name for file in files))
    hashed = providers.Cpp().version.split()
    assert {"embedding.h", "embedding.py", "convolution.h"} <= set(hashed)


class Products(Provider):
    """A library that has nothing but matrix products, in two ways, the first of which is wrong."""

    name = "products"
    devices = ("cpu",)
    alone = ("step.contract",)
    ran: list[str] = []

    def at_once(self, region: Region) -> bool:
        return True

    def claims(self, region: Region) -> str:
        return "" if one_product(region) is not None else "it is no product"

    def offers(self, region: Region) -> list[Offer]:
        return [Offer(name, f"products {region.key} {name}", made=(name, region)) for name in ("wrong", "right")]

    def build(self, offers: Sequence[Offer], report: Progress | None = None) -> dict[str, Launcher | Exception]:
        return {o.key: self.launcher(*o.made) for o in offers}

    def launcher(self, name: str, region: Region) -> Launcher:
        multiply = one_product(region)
        assert multiply is not None

        def run(*tensors: torch.Tensor) -> None:
            multiply(*tensors)
            tensors[-1].add_(float(name == "wrong"))
            Products.ran.append(name)

        return run


def test_a_library_of_products_runs_them_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(call: Any, *_: Any) -> float:
        before = len(Products.ran)
        call()
        return 1.0 if len(Products.ran) > before else 2.0

    monkeypatch.setattr("wholestep.backends.choose.on_cpu", seconds)

    def losses(**options: Any) -> tuple[list[float], ws.TrainStep]:
        model = fresh(lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)))
        batch = (data(6, 4), torch.arange(6) % 3)
        step = ws.compile(model, nn.functional.cross_entropy, sgd(model), batch, **options)
        return [float(step(*batch)) for _ in range(3)], step

    true, _ = losses(providers=["aten"])
    with registered(Products):
        found, step = losses(providers=["aten", "products"])
        Products.ran.clear()
        step(data(6, 4), torch.arange(6) % 3)
        report = str(step.report())
    torch.testing.assert_close(found, true, rtol=1e-5, atol=1e-6)
    run = [launch for launch in step.plan().launches if launch.provider == "products"]
    assert [launch.name for launch in run] == ["step.contract"] * 5 and Products.ran == ["right"] * 5
    assert "products" in report and "products:wrong" in report
