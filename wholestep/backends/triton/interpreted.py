"""What Triton's interpreter (TRITON_INTERPRET=1) lacks: libdevice's functions, in torch, for tests without a GPU.

And what it does in vain: it computes every sum and product of small integers again in 64 bits, to see whether they are
too large, and then asks nobody unless it debugs. That is a third of its time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle, interpreter_builder

if not interpreter_builder.options.debug:
    interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)

FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "rint": torch.round,
    "fast_dividef": torch.div,
    **{
        name: getattr(torch, name)
        for name in ("exp", "exp2", "expm1", "log", "log2", "log1p", "rsqrt", "sin", "cos", "tanh", "erf", "trunc",
                     "atan2", "fmod", "pow")
    },
}  # fmt: skip


class Libdevice:
    """Stands where kernels expect libdevice. Computes in float64 and rounds once."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = FUNCTIONS[name]

        def call(*args: Any) -> Any:
            if len(args) == 2:
                args = tl.broadcast(*args)
            numbers = [torch.from_numpy(a.handle.data.copy()).double() for a in args]
            first = args[0]
            data = function(*numbers).numpy().astype(first.handle.data.dtype)
            return tl.tensor(TensorHandle(data, first.handle.dtype), first.type)

        return call


def counted(*bounds: Any, num_stages: int = 1) -> range:
    """`range` and `tl.range` over numbers of the kernel."""
    return range(*(int(b.handle.data.item()) if isinstance(b, tl.tensor) else b for b in bounds))


STAND_INS = {"libdevice": Libdevice(), "range": counted}
