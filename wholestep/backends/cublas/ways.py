"""The algorithms that cuBLASLt proposes for a product: the first is PyTorch's own choice, which often is not the
fastest of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..kernels import Spec
from ..matrices import Matrices, NotMatrices, matrices_of, multiply
from .library import ALIGNMENT, LIBRARY, Heuristic, Product

if TYPE_CHECKING:
    from ..providers import Region

#: so many algorithms are tried
MOST = 8
#: multiplications below which a product takes no time worth measuring, and per byte below which it waits for memory
LEAST, FEW = 1 << 28, 32
SIXTEEN = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Way:
    """One algorithm for one product."""

    product: Product
    by: Heuristic

    def __call__(self, *tensors: torch.Tensor) -> None:
        if any(t.data_ptr() % ALIGNMENT for t in tensors):  # such as a parameter of the user's that is part of another
            multiply(self.product.known, tensors)
        else:
            self.product.run(self.by, tensors)


def why_not(region: Region) -> str:
    """ "" where the library may run a region, else why not."""
    if LIBRARY.loaded is None:
        return "cuBLASLt is not loaded"
    try:
        known = matrices_of(region)
    except NotMatrices as error:
        return str(error)
    if known.dtype not in SIXTEEN or any(s.dtype is not known.dtype for s in region.operands):
        return "products of 32-bit numbers are left to PyTorch, which knows what precision is wanted"
    if known.z * known.m * known.n * known.k < LEAST:
        return "it is too small to be worth measuring"
    if known.z * known.m * known.n * known.k < FEW * region.bytes:
        return "it waits for memory, whatever the algorithm"
    if not lies_aligned(known):
        return "its rows do not begin at multiples of 16 bytes"
    if known.z > 1 and known.biased:
        return "a batch with a bias"
    return ""


def lies_aligned(known: Matrices) -> bool:
    """Whether every row begins where a whole load can, and every matrix lies along one of its axes."""
    each = ALIGNMENT // known.dtype.itemsize
    for batch, one, other in (known.left, known.right, known.result):
        if 1 not in (one, other) or any(s % each for s in (batch, one, other) if s not in (0, 1)):
            return False
        if 0 in (one, other):
            return False
    return True


def ways(region: Region) -> list[Way]:
    """What the library proposes."""
    product = Product(matrices_of(region), region.device)
    return [Way(product, by) for by in product.algorithms(MOST)]


def scratch_of(way: Way) -> tuple[Spec, ...]:
    return (Spec((way.by.workspace,), (1,), torch.uint8),) if way.by.workspace else ()
