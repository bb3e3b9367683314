"""`bias_apart`: the same numbers as with the bias inside, in the kernel that reads the result."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dialects.step.harness import randn
from wholestep.backends.generated import region_of
from wholestep.backends.kernels import Spec
from wholestep.dialects.step import StepBuilder, tensor_type
from wholestep.dialects.step.fused import Fused
from wholestep.ir import add_function, finish_function, module, verify
from wholestep.ir.core import Op
from wholestep.runtime.executor import Executable
from wholestep.transforms import again
from wholestep.transforms.backward_forms import FORMS
from wholestep.transforms.fuse import fuse
from wholestep.transforms.opportunity import opportunities, take

NAME = "bias_apart f/-/forward/conv#0"


def gated(dtype: torch.dtype, laid: bool = True, **how: Any) -> tuple[Op, Op, list[torch.Tensor]]:
    """A convolution with a bias, half of whose channels are a gate for the others."""
    x, w, bias = (t.to(dtype) for t in (randn(2, 4, 6, 5), randn(8, 4, 3, 3, seed=1), randn(8, seed=2)))
    root = module()
    function = add_function(root, "f", [tensor_type(t) for t in (x, w, bias)])
    block = function.regions[0].block
    b = StepBuilder(block, phase="forward")
    image, kernel = block.arguments[:2]
    if laid:
        image, kernel = (b.layout(v, order=(0, 2, 3, 1)) for v in (image, kernel))
    y = b.conv(image, kernel, block.arguments[2], **how)
    first, second = (b.slice(y, dim=1, start=i, end=i + 4) for i in (0, 4))
    finish_function(function, [b.mul(b.tanh(first), b.sigmoid(second))])
    return root, function, [x, w, bias]


@pytest.mark.parametrize(
    "how",
    [
        dict(stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
        dict(stride=(1, 1), padding=(0, 1), padding_after=(2, 0), dilation=(1, 1)),
    ],
)
def test_the_same_numbers(how: dict[str, Any]) -> None:
    root, function, inputs = gated(torch.float64, **how)
    (wanted,) = Executable(function)(inputs)
    assert take(root, FORMS) == [NAME]
    verify(root)
    (op,) = [op for op in function.regions[0].block if op.name == "step.conv"]
    assert op.bias is None
    torch.testing.assert_close(Executable(function)(inputs)[0], wanted, rtol=1e-12, atol=1e-12)
    assert not [o for o in opportunities(root) if o.transformation == "bias_apart"]


def test_only_where_libraries_add_it_in_a_second_pass() -> None:
    window = dict(stride=(1, 1), padding=(1, 1), dilation=(1, 1))
    root, _, _ = gated(torch.bfloat16, False, **window)
    (found,) = [o for o in opportunities(root) if o.transformation == "bias_apart"]
    assert "not channels-last" in found.why_not and take(root, FORMS) == []
    root, _, _ = gated(torch.bfloat16, **window)
    (found,) = [o for o in opportunities(root) if o.transformation == "bias_apart"]
    assert found.change.bytes == -2 * 2 * 2 * 8 * 6 * 5  # its result is not read and written once more
    assert take(root, FORMS, ["bias_apart *"]) == []


def test_one_kernel_reads_the_result_and_writes_as_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate, its bias and both halves are one kernel, and what it writes is channels-last as well."""
    root, function, _ = gated(torch.bfloat16, stride=(1, 1), padding=(1, 1), dilation=(1, 1))
    assert take(root, FORMS) == [NAME]
    monkeypatch.setattr(again, "LEAST", 1)
    fusion = fuse(function)
    verify(root)
    *_, fused = [op for op in function.regions[0].block if op.definition is Fused]  # (behind those that lay out)
    body = fusion.bodies[fused.callee.name]
    images = [v for v in fused.operands if v.type.rank == 4 and v.type.size > 8]
    assert [v.type.shape for v in images] == [(2, 8, 6, 5)]
    specs = [
        Spec(v.type.shape, (240, 1, 40, 8), torch.bfloat16)
        if v in images
        else Spec(v.type.shape, (1,) * v.type.rank, torch.bfloat16)
        for v in fused.operands
    ]
    region = region_of(body.function, body.kernel, specs, torch.device("cpu"))
    assert [r.strides for r in region.results] == [(120, 1, 20, 4)]
