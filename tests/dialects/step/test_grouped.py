"""Grouped products by PyTorch's kernel for all groups: what it leaves as memory was is zero."""

from __future__ import annotations

import pytest
import torch

from wholestep.dialects.step.grouped import by_one_kernel, grouped_product, has_kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ends", [[4, 4, 16], [0, 8, 12], [16, 16, 16], [0, 0, 0]])
@pytest.mark.parametrize("sums", [False, True])
def test_it_is_a_product_of_each_group(sums, ends, dtype):
    torch.manual_seed(0)
    x, y = torch.randn(16, 8, dtype=dtype), torch.randn(*((16, 24) if sums else (3, 8, 24)), dtype=dtype)
    index = torch.tensor(ends, dtype=torch.int32)
    found, wanted = (torch.full((3, 8, 24) if sums else (16, 24), float("nan"), dtype=dtype) for _ in range(2))
    by_one_kernel(found, x, y, index)
    grouped_product(wanted, x, y, index)
    torch.testing.assert_close(found, wanted)


def test_on_a_cpu_each_group_is_a_product():
    assert not has_kernel(torch.ones(16, 8).bfloat16(), torch.ones(3, 8, 24).bfloat16())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu():
    x, y = (torch.randn(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((64, 32), (4, 24, 32)))
    ends = torch.tensor([5, 5, 40, 51], dtype=torch.int32, device="cuda")
    for rhs in (y.transpose(1, 2), torch.randn(64, 24, dtype=torch.bfloat16, device="cuda")):
        assert has_kernel(x, rhs)
        shape = (64, 24) if rhs.dim() == 3 else (4, 32, 24)
        found, wanted = torch.full(shape, float("nan"), dtype=torch.bfloat16, device="cuda"), torch.empty(shape)
        torch.ops.wholestep.grouped_product_(found, x, rhs, ends)
        grouped_product(wanted, x.float().cpu(), rhs.float().cpu(), ends.cpu())
        torch.testing.assert_close(found.float().cpu(), wanted, rtol=2e-2, atol=2e-2)
