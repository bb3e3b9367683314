"""The fused bound: the bytes a step must move if everything but its heavy ops were free.

The rule: every contraction, convolution, attention and embedding (forward and backward) runs once, reads each of its
distinct inputs once and writes each output that is used once. The update reads and writes each parameter, each tensor
of optimizer state and each average once, and writes each low-precision copy once. Everything else is free: pointwise
ops, normalisations, reductions, losses, casts, copies, the reading of gradients by the update. An input counts the
bytes it has in memory: a broadcast its own, an embedding the rows that it reads. Ops run per micro-batch count once for
each. A heavy op inside of a fused kernel counts what it would alone, and one that runs a second time to save memory
does not count again. It is the bound of the program that is planned: products that were joined count as the one that
they became, which lowers it, and a loss in chunks reads its weight once per chunk, which raises it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .ledger import Ledger


@dataclass(frozen=True, slots=True)
class Bound:
    """Bytes of the heavy ops and of the update; `total` is what `moved / bound` divides by."""

    heavy: int
    state_read: int
    state_written: int

    @property
    def total(self) -> int:
        return self.heavy + self.state_read + self.state_written

    def ratio(self, moved: int) -> float:
        """moved / bound: 1 is a step that moves nothing it could fuse away."""
        return moved / self.total if self.total else float("nan")


def fused_bound(ledger: Ledger) -> Bound:
    """The bound of the program a ledger was made of."""
    heavy = sum(k.times * k.least for k in ledger.kernels if k.anchor)
    return Bound(heavy, *ledger.state)
